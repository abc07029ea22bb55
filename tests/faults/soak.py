"""A long run of a tiny model in a process of its own; prints what it measured about itself as JSON."""

import json
import os
import sys
import time
from pathlib import Path


def resident_bytes():
    """Return the memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files_of(folder):
    """Return the size of each file of metrics, and number and size of all others."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    metrics = {path.name: size for path, size in sizes.items() if path.suffix == ".jsonl"}
    return {"metrics": metrics, "others": len(sizes) - len(metrics), "bytes": sum(sizes.values()) - sum(metrics.values())}


def main(folder, steps, every):
    """Train, and look at memory, processor time and files every so many steps."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    from faults.victim import SETTINGS

    from rampup import Config
    from rampup.lm.train import train
    from rampup.loop.events import Evaluated, RunStopped, StepDone

    samples, files = [], []

    def look(event):
        if isinstance(event, StepDone) and (event.step + 1) % every == 0:
            samples.append([event.step + 1, resident_bytes(), time.process_time(), time.monotonic()])
        if isinstance(event, RunStopped) or (isinstance(event, Evaluated) and event.step + 1 == steps // 2):
            files.append(files_of(Path(folder) / "run"))

    own = {"checkpoint_period": steps // 40, "eval_interval": steps // 20, "eval_steps": 2, "per_device_batch_size": 8}
    where = {"base_output_directory": folder, "run_name": "run", "steps": steps, "global_rampup_samples": 2 * steps}
    summary = train(Config(**(SETTINGS | own | where)), look)
    print(json.dumps({"steps": summary.steps, "samples": samples, "files": files}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
