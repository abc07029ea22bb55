"""The program for the first minutes on an accelerator, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import accelerator
import pytest

FILE = Path(__file__).parents[2] / "benchmarks/accelerator.py"


@pytest.mark.slow
def test_every_part_runs_and_is_right(tmp_path):
    """All parts end without an error; the step is right, and the resume bit for bit."""
    command = [sys.executable, str(FILE), "--quick", "--out", str(tmp_path)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "accelerator.json").read_text())
    assert list(found) == list(accelerator.PARTS)
    assert all(row["right"] for row in found["check_step"]["rows"])
    assert len(found["check_step"]["rows"]) == 4
    assert found["resume"]["rows"][0]["bit for bit"]
    assert found["resume"]["rows"][0]["executables"] == 1
    text = (tmp_path / "accelerator.md").read_text()
    assert all(f"## {name}" in text for name in accelerator.PARTS)


def test_a_part_that_fails_is_reported(monkeypatch):
    """What it found until then stays in its table."""

    def fails(machine):
        """Measure and fail."""
        yield {"ms": 1.0}
        raise MemoryError("too large")

    monkeypatch.setitem(accelerator.PARTS, "step_time", fails)
    result, _ = accelerator.run_part("step_time", accelerator.Machine(quick=True))
    assert result.notes == ["FAILED: MemoryError: too large"]
    assert "| 1 |" in result.to_markdown()
