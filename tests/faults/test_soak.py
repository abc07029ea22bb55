"""A long run: memory flat, no slowing down, and no files that grow but the metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 2**20


def soak(folder, steps, every):
    """Run it, and return what it measured."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "faults.soak", str(folder), str(steps), str(every)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def check(found, steps, most_growth):
    """Assert that memory, processor time and files do not grow; return the figures."""
    assert found["steps"] == steps
    step, memory, processor, clock = np.array(found["samples"], float).T
    later = step > steps / 4
    growth = np.polyfit(step[later], memory[later], 1)[0] * steps
    per_step = np.diff(processor) / np.diff(step)
    quarter = len(per_step) // 4
    slower = np.median(per_step[-quarter:]) / np.median(per_step[-2 * quarter : -quarter])
    halfway, end = found["files"]
    assert growth < most_growth, f"memory grows by {growth / MIB:.1f} MiB"
    assert slower < 1.25, f"steps become {slower:.2f} times slower"
    assert set(end["metrics"]) == {"metrics.jsonl", "eval.jsonl"}
    assert end["others"] <= halfway["others"]
    assert end["bytes"] <= 1.1 * halfway["bytes"]
    return {
        "steps": steps,
        "MiB at a quarter": round(float(memory[later][0]) / MIB, 1),
        "MiB at the end": round(float(memory[-1]) / MIB, 1),
        "MiB per all steps, fitted": round(float(growth) / MIB, 2),
        "processor time, last quarter over the one before": round(float(slower), 3),
        "files besides metrics": [end["others"], end["bytes"]],
        "seconds": round(clock[-1] - clock[0]),
    }


@pytest.mark.faults
def test_twenty_thousand_steps(tmp_path):
    """Over 20,000 steps, memory grows by less than 8 MiB and steps stay as fast as they were."""
    print(check(soak(tmp_path, 20_000, 250), 20_000, 8 * MIB))
