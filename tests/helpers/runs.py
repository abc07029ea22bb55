"""The folder of a finished run, for comparisons of runs bit for bit."""

import json
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp

from rampup.config.resume import ramp_record
from rampup.loop.events import StepDone

TIMES = {
    "step_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "compile_seconds",
}


def recorded(config, plan, step):
    """Return the record of the ramp in the checkpoint of a step, through JSON."""
    record = ramp_record(config, plan) | {"ramp": plan.ramp.to_rows(), "step": step}
    return json.loads(json.dumps(record))


def metrics_of(folder, name="metrics.jsonl"):
    """Return every line of a file of metrics, without the times."""
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in lines
    ]


def state_of(folder, step):
    """Return every leaf of a checkpoint's state by name."""
    with ocp.PyTreeCheckpointer() as reader:
        stored = folder / "checkpoints" / str(step) / "state"
        # As NumPy arrays, because the devices that saved it may be those of several
        # processes.
        kinds = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
            reader.metadata(stored).item_metadata.tree,
        )
        tree = reader.restore(stored, restore_args=kinds)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def assert_same_run(folder, other, step, files=("metrics.jsonl", "eval.jsonl")):
    """Assert that two runs have the same metrics and state after a step, bit for bit;
    return the names of the state.
    """
    for name in files:
        assert metrics_of(folder, name) == metrics_of(other, name)
    one, two = state_of(folder, step), state_of(other, step)
    assert one.keys() == two.keys()
    for name, leaf in one.items():
        assert leaf.tobytes() == two[name].tobytes(), name
    return one.keys()


def stop_after(step):
    """Return a listener that sends this process SIGTERM when a step's metrics are
    written.
    """

    def on_event(event):
        if isinstance(event, StepDone) and event.step == step:
            signal.raise_signal(signal.SIGTERM)

    return on_event
