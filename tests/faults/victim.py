"""A training run in a process of its own, made to be killed: slowed down, and writing
down which rows it used.
"""

import hashlib
import json
import time

from helpers.tiny import TINY_MODEL

SETTINGS = TINY_MODEL | {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 1,
    "per_device_batch_size_increment": 1,
    "per_device_batch_size": 8,
    "dropout_rate": 0.1,
    "dataset_type": "synthetic",
    "checkpoint_period": 4,
    "max_num_checkpoints_to_keep": 2,
    "jax_cache_dir": None,
}
ROWS_FILE, LOG_FILE = "rows.jsonl", "log.txt"


def use_cpus(devices):
    """Give this process as many simulated devices, and every compiled program to the
    next one.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def run(settings, folder, pause, devices):
    """Train; return 0 when finished, 130 when stopped by a signal, 2 when refused."""
    import jax

    use_cpus(devices)
    from rampup import Config
    from rampup.errors import RampupError
    from rampup.lm import train as lm
    from rampup.loop.events import (
        CheckpointDamaged,
        RunStarted,
        StepSkipped,
        StorageFailed,
        ctrl_c_stops,
    )

    ctrl_c_stops.set(True)
    inner = lm.BatchLoader.batches

    def watched(*arguments):
        with open(folder / ROWS_FILE, "a", buffering=1) as file:
            for batch in inner(*arguments):
                held = jax.device_get(batch.chunks)
                content = hashlib.sha256(
                    b"".join(leaf.tobytes() for leaf in jax.tree.leaves(held))
                ).hexdigest()
                file.write(
                    json.dumps({"step": batch.position.step, "rows": content}) + "\n"
                )
                time.sleep(pause)
                yield batch

    lm.BatchLoader.batches = watched
    events = []
    try:
        summary = lm.train(Config(**(SETTINGS | settings)), events.append)
    except RampupError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2
    finally:
        kinds = (RunStarted, CheckpointDamaged, StorageFailed, StepSkipped)
        print(
            *(str(event)[:500] for event in events if isinstance(event, kinds)),
            sep="\n",
            flush=True,
        )
    return 130 if summary.interrupted else 0
