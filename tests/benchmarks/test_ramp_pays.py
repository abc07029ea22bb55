"""Tests of docs/examples/ramp_pays.py, the comparison of batch schedules."""

import json
import math
import sys

import pytest
from helpers.snippets import load_file

import rampup

# On the eight simulated devices of the tests.
SMOKE = ["--samples", "256", "--length", "16", "--small", "16", "--large", "32", "--microbatch", "1"]
SMOKE += ["--seeds", "2", "--width", "16", "--layers", "1"]


script = load_file("docs/examples/ramp_pays.py")


def test_schedules_consume_the_same_samples():
    """Every policy goes from the small to the large batch; Seesaw's thresholds are where the cosine has halved."""
    found = script.schedules(8, 64, 100_000)
    ramps = {name: rampup.BatchRamp.from_schedule(text) for name, text in found.items()}
    assert list(ramps) == ["small", "large", "ramp", "seesaw"]
    assert [ramp.sizes for ramp in ramps.values()] == [(8,), (64,), (8, 16, 32, 64), (8, 16, 32, 64)]
    for power, phase in enumerate(ramps["seesaw"].phases[1:], start=1):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * phase.start_sample / 100_000))
        assert cosine == pytest.approx(2.0**-power, rel=0.01)


@pytest.mark.bench
def test_comparison_runs_and_resumes(tmp_path, monkeypatch, capsys):
    """Two seeds of four schedules train, and a second call prints the same table without training."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["ramp_pays.py", "--output", str(tmp_path), *SMOKE])
    script.main()
    first = capsys.readouterr().out
    table = first[first.index("| Schedule") :].splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["small", "large", "ramp", "seesaw"]
    steps = {line.split("|")[1].strip(): int(line.split("|")[2]) for line in table[2:]}
    assert steps["small"] > steps["seesaw"] >= steps["ramp"] > steps["large"]
    for file in tmp_path.glob("*/result.json"):
        result = json.loads(file.read_text())
        assert 0 < result["final_eval_loss"] < 10
        assert math.isfinite(result["noise_scale_end"])
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/metrics.jsonl")}
    script.main()
    assert capsys.readouterr().out == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/metrics.jsonl")} == before
    assert (tmp_path / "ramp_pays.png").stat().st_size > 1000
