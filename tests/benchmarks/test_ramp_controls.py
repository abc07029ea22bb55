"""Tests of benchmarks/ramp_controls.py, the study of a growing batch with controls."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import ramp_controls
import ramp_controls_report as report

ROOT = Path(__file__).parents[2]


def test_rates_have_a_warm_up_in_steps_and_decay_by_samples():
    """The warm-up takes as many steps for a large batch; a decay ends at its end."""
    small = ramp_controls.rates([8] * 1024, {8: 1.0}, "wsd", 8192)
    large = ramp_controls.rates([64] * 128, {64: 1.0}, "wsd", 8192)
    assert small[:40] == large[:40] == [(n + 1) / 40 for n in range(40)]
    assert small[512] == large[64] == 1.0
    assert math.isclose(small[-1], (8 / 8192) / 0.3)
    cosine = ramp_controls.rates([8] * 1024, {8: 1.0}, "cosine", 8192)
    assert math.isclose(cosine[512], 0.55)


def test_the_page_has_the_tables_of_the_results():
    """Every table that the report prints is on the page as it is."""
    page = (ROOT / "docs/explanation/does_a_ramp_pay.md").read_text()
    for shape in report.SHAPES:
        study = report.Study(report.read(), shape)
        for title, lines in report.tables(study).items():
            assert "\n".join(lines) in page, (shape, title)


def test_the_verdict_waits_for_every_ramp():
    """What one ramp or four save is no verdict; that of five follows the rule."""
    ramps = report.Study(report.read(), "wsd").schedules
    assert len(ramps) == report.RAMPS
    for number in range(1, report.RAMPS + 1):
        study = report.Study(report.read(), "wsd")
        for left_out in ramps[number:]:
            del study.same_rates[left_out]
        said = "\n".join(report.verdict(study))
        assert ("this ramp" in said) == (number == 1)
        assert ("do not pay" in said) == (number == report.RAMPS)


def test_hours_follow_from_losses_by_the_slope():
    """A ramp that ends where a constant batch ends saves what its steps save."""
    rows = [
        {"name": f"wsd constant {size} rate 1 seed{seed}", "schedule": f"0:{size}"}
        | {"seed": seed, "peak": 1.0, "steps": 8192 // size, "loss": 2.0 + extra}
        for size, extra in ((8, 0.0), (64, 1.0))
        for seed in report.SEEDS
    ]
    rows += [
        {"name": f"wsd constant 8 rate 1 samples=4096 seed{seed}", "schedule": "0:8"}
        | {"seed": seed, "samples": 4096, "peak": 1.0, "steps": 512}
        | {"loss": 2.0 + math.log(2)}
        for seed in report.SEEDS
    ]
    ramp = "0:8 4096:64"
    rows += [
        {"name": f"wsd ramp {ramp} rule seed{seed}", "schedule": ramp, "seed": seed}
        | {"peak": 1.0, "steps": 576, "loss": 2.0}
        for seed in report.SEEDS
    ]
    study = report.Study(rows, "wsd")
    assert math.isclose(study.slope, 1.0)
    assert study.hours("0:8", 64) == 1024 * 1.125
    assert study.hours(ramp, 64) == 512 * 1.125 + 64 * 2
    # The batch of 64 would need e times its 256, less than the batch of 8.
    expected = 1 - (512 * 1.125 + 128) / (256 * math.e)
    for saved in study.saved(ramp, "rule", 64).values():
        assert math.isclose(saved, expected)


@pytest.mark.bench
def test_a_toy_study_resumes(tmp_path):
    """Every part runs, and a second call trains nothing."""
    command = [sys.executable, ROOT / "benchmarks/ramp_controls.py", "--quick"]
    command += ["--shapes", "wsd", "--work", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    results = tmp_path / "ramp_controls.jsonl"
    names = [json.loads(line)["name"] for line in results.open()]
    assert len(names) == len(set(names))
    for part in ("wsd constant 16 rate", "wsd constant 8 rate", "wsd pilot seed11"):
        assert any(name.startswith(part) for name in names), part
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.stdout == ""
