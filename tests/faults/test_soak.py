"""A long run: memory flat, no slowing down, and no files that grow but the metrics."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from faults import victim
from helpers import processes

MIB = 2**20


def files_of(folder):
    """Return the size of each file of metrics, and number and size of all others."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    metrics = {path.name: size for path, size in sizes.items() if path.suffix == ".jsonl"}
    return {"metrics": metrics, "others": len(sizes) - len(metrics), "bytes": sum(sizes.values()) - sum(metrics.values())}


def soak(folder, steps, every, found):
    """Train, and write memory, processor time and time every so many steps, and the files halfway and at the end."""
    victim.use_cpus(1)
    from rampup import Config
    from rampup.lm.train import train
    from rampup.loop.events import Evaluated, RunStopped, StepDone

    samples, files = [], []

    def look(event):
        if isinstance(event, StepDone) and (event.step + 1) % every == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            samples.append([event.step + 1, resident, time.process_time(), time.monotonic()])
        if isinstance(event, RunStopped) or (isinstance(event, Evaluated) and event.step + 1 == steps // 2):
            files.append(files_of(folder / "run"))

    own = {"checkpoint_period": steps // 40, "eval_interval": steps // 20, "eval_steps": 2, "per_device_batch_size": 8}
    where = {"base_output_directory": str(folder), "run_name": "run", "steps": steps, "global_rampup_samples": 2 * steps}
    summary = train(Config(**(victim.SETTINGS | own | where)), look)
    found.write_text(json.dumps({"steps": summary.steps, "samples": samples, "files": files}))


@pytest.mark.faults
def test_long_runs_do_not_grow(tmp_path):
    """Over 20,000 steps, memory grows by less than 8 MiB, steps stay as fast as they were, and only metrics grow."""
    steps = 20_000
    processes.run_all(soak, [(tmp_path, steps, 250, tmp_path / "found")], tmp_path, 3600)
    found = json.loads((tmp_path / "found").read_text())
    assert found["steps"] == steps
    step, memory, processor, clock = np.array(found["samples"], float).T
    later = step > steps / 4
    growth = np.polyfit(step[later], memory[later], 1)[0] * steps
    per_step = np.diff(processor) / np.diff(step)
    quarter = len(per_step) // 4
    slower = np.median(per_step[-quarter:]) / np.median(per_step[-2 * quarter : -quarter])
    halfway, end = found["files"]
    print(
        f"{memory[later][0] / MIB:.1f} to {memory[-1] / MIB:.1f} MiB, {slower:.3f} times slower, {clock[-1] - clock[0]:.0f} s"
    )
    assert growth < 8 * MIB, f"memory grows by {growth / MIB:.1f} MiB"
    assert slower < 1.25, f"steps become {slower:.2f} times slower"
    assert set(end["metrics"]) == {"metrics.jsonl", "eval.jsonl"}
    assert end["others"] <= halfway["others"]
    assert end["bytes"] <= 1.1 * halfway["bytes"]
