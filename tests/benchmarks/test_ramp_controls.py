"""Tests of benchmarks/ramp_controls.py, the study of a growing batch with controls."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ramp_controls
import ramp_controls_report as report
import ramp_controls_results as results

from rampup.contrib.lab.design_model import PUBLISHED_GROWTH, most_saved
from rampup.contrib.lab.measured_design import COURSE_PARTS, LOSS_SHARE

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


def saved_at_most(growth):
    """Return the formula of the page: the largest share of the hours that a ramp saves
    where the noise scale grows with this power.
    """
    return 1 / 2 * (1 - math.sqrt(1 - growth) / (1 - growth / 2))


def test_every_number_of_the_page_is_of_the_results():
    """The page has the tables and the phrases that the report prints, and what follows
    from the formula that it shows. No other number is in it but one that it cites.
    """
    page = (ROOT / "docs/explanation/does_a_ramp_pay.md").read_text()
    rows = results.read()
    studies = {shape: results.Study(rows, shape) for shape in results.SHAPES}
    for shape, study in studies.items():
        for title, lines in report.tables(study).items():
            table = "\n".join(lines)
            assert table in page, (shape, title)
            page = page.replace(table, "")
    for start, end in (("```", "```"), ("](", ")")):  # code, and where links lead
        page = re.sub(re.escape(start) + ".*?" + re.escape(end), "", page, flags=re.S)
    page = " ".join(page.split())
    formula = r"$\frac{1}{2}\left(1 - \frac{\sqrt{1-g}}{1-g/2}\right)$"
    values = [f"{saved_at_most(g):.1%} at $g = {g}$" for g in (0.3, 0.47, 0.8)]
    cited = ["a 1B model", "43% fewer steps"]
    cited += ["[2505.23971", "[2405.14578", "[2602.14208"]
    phrases = list(report.phrases(rows, studies).values())
    for phrase in sorted([*phrases, formula, *values, *cited], key=len, reverse=True):
        assert phrase in page, phrase
        page = page.replace(phrase, "")
    page = page.replace("$(1 + N/B')/(1 + N/B)$", "")
    page = re.sub(r"\b(adam_)?b2\b", "", page)  # a name
    assert re.findall(r"[^.]*\d[^.]*", page) == []


def test_the_bound_of_the_page_is_that_of_rampup_design():
    """The formula is that of `most_saved`, and its growth the one that a design takes."""
    for growth in (0.3, PUBLISHED_GROWTH):
        assert math.isclose(saved_at_most(growth), most_saved(growth))
    assert PUBLISHED_GROWTH == 0.47


def test_predicted_losses_contain_those_of_the_runs():
    """Of the pairs of a run and a place of its prediction, 85% to 95% are in the
    interval of `rampup report`, both at the end of the runs and at all places.
    """
    pairs = [
        place
        for shape in results.SHAPES
        for place in results.places(results.Study(results.read(), shape))
    ]
    ends = [place for place in pairs if place.tenth == results.TENTHS]
    assert len(ends) >= 60
    page = " ".join((ROOT / "docs/explanation/measured_batches.md").read_text().split())
    inside = sum(place.is_inside for place in ends)
    assert f"{inside} of {len(ends)} pairs of a pilot and a run" in page
    for found in (ends, pairs):
        inside = [place.is_inside for place in found]
        assert 0.85 <= sum(inside) / len(inside) <= 0.95
    assert (results.TENTHS, results.LOSS_SHARE) == (COURSE_PARTS, LOSS_SHARE)


def test_a_changed_result_changes_the_phrases():
    """A loss of one ramp is in the phrases of ramps and of hours."""
    rows = results.read()
    changed = [
        row | {"loss": row["loss"] + 0.1} if " ramp " in row["name"] else row
        for row in rows
    ]
    before, after = (
        report.phrases(each, {s: results.Study(each, s) for s in results.SHAPES})
        for each in (rows, changed)
    )
    names = {name for name in before if before[name] != after[name]}
    assert {"above constant batches at their best rates", "hours saved"} <= names
    assert "b2 of 64" not in names


def test_the_verdict_waits_for_every_ramp():
    """What one ramp or four save is no verdict; that of five follows the rule."""
    ramps = results.Study(results.read(), "wsd").schedules
    assert len(ramps) == results.RAMPS
    for number in range(1, results.RAMPS + 1):
        study = results.Study(results.read(), "wsd")
        for left_out in ramps[number:]:
            del study.same_rates[left_out]
        said = "\n".join(report.verdict(study))
        assert ("this ramp" in said) == (number == 1)
        assert ("not shown to pay" in said) == (number == results.RAMPS)


def test_hours_follow_from_losses_by_the_slope():
    """A ramp that ends where a constant batch ends saves what its steps save."""
    rows = [
        {"name": f"wsd constant {size} rate 1 seed{seed}", "schedule": f"0:{size}"}
        | {"seed": seed, "peak": 1.0, "steps": 8192 // size, "loss": 2.0 + extra}
        for size, extra in ((8, 0.0), (64, 1.0))
        for seed in results.SEEDS
    ]
    rows += [
        {"name": f"wsd constant 8 rate 1 samples=4096 seed{seed}", "schedule": "0:8"}
        | {"seed": seed, "samples": 4096, "peak": 1.0, "steps": 512}
        | {"loss": 2.0 + math.log(2)}
        for seed in results.SEEDS
    ]
    ramp = "0:8 4096:64"
    rows += [
        {"name": f"wsd ramp {ramp} rule seed{seed}", "schedule": ramp, "seed": seed}
        | {"peak": 1.0, "steps": 576, "loss": 2.0}
        for seed in results.SEEDS
    ]
    study = results.Study(rows, "wsd")
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
    file = tmp_path / "ramp_controls.jsonl"
    names = [json.loads(line)["name"] for line in file.open()]
    assert len(names) == len(set(names))
    for part in ("wsd constant 16 rate", "wsd constant 8 rate", "wsd pilot seed11"):
        assert any(name.startswith(part) for name in names), part
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.stdout == ""
