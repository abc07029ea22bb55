"""Tests of benchmarks/ramp_controls.py, the study of a growing batch with controls."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import ramp_controls

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


def test_the_page_has_the_numbers_of_the_results():
    """Every row of the page's table is in the report, and the report has no others."""
    page = (ROOT / "docs/explanation/does_a_ramp_pay.md").read_text()
    rows = ramp_controls.read(ramp_controls.RESULTS)
    assert "\n".join(ramp_controls.constant_table(rows, "wsd")) in page


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
