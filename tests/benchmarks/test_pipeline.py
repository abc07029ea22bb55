"""Tests of benchmarks/pipeline.py. The times themselves are not tested."""

from fractions import Fraction

import jax
import pipeline
import pytest
from maxtext_baselines import MaxTextPipeline
from pipeline import QUICK, CostModelCheck, compare, run

from rampup.errors import ConfigError
from rampup.plan.pipeline import predicted_time


@pytest.mark.bench
def test_programs_have_the_gradients_and_the_loops_of_their_schedules(quick):
    """All have the gradients of the model alone; 1F1B is one loop and GPipe two;
    smaller microbatches need less memory.
    """
    rows = quick("pipeline").rows
    compared = [row for row in rows if row["gradient_error"] is not None]
    assert [row["v"] for row in compared] == [1, 1, 2, 2, 1]
    assert all(row["gradient_error"] < 1e-5 for row in compared)
    for row in rows:
        assert tuple(row) == pipeline.COLUMNS
        p, m, v = row["p"], row["m"], row["v"]
        forward_ticks = ((-(-m // p) - 1) * v + v - 1) * p + (m - 1) % p + p
        assert row["iterations"] == (
            2 * (m + p - 1) if "gpipe" in row["system"] else forward_ticks + v * p - 1
        )
        assert row["permutes"] == 2
        assert min(row["step_ms"], row["temp_bytes"]) > 0
    memory = {
        row["m"]: row["temp_bytes"]
        for row in rows
        if row["regret"] is not None and row["v"] == 1
    }
    assert list(memory) == [1, 2, 4, 8, 16]
    assert sorted(memory.values(), reverse=True) == list(memory.values())


def test_maxtext_has_the_same_gradients():
    """The installed MaxText has the same gradients, with m*v + p - 1 ticks in each
    direction.
    """
    pytest.importorskip("maxtext")
    notes = []
    rows = compare(QUICK, 2, 4, MaxTextPipeline.load(), notes)
    assert not notes
    assert [
        (row["v"], row["iterations"])
        for row in rows
        if row["system"].startswith("maxtext")
    ] == [(1, 10), (2, 18)]
    assert all(row["gradient_error"] < 1e-5 for row in rows)


def test_pipeline_bench_needs_four_devices(monkeypatch):
    """The error has the number of devices and the fix."""
    devices = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(
        ConfigError,
        match=r"at least 4 devices .* num_devices=3 \(cpu\).*--fake-devices 8",
    ) as caught:
        run(quick=True)
    assert caught.value.nearest == (8,)


def test_regret_measures_a_wrong_overhead():
    """An overhead that is far too large picks too few microbatches, and the regret is
    the cost of that.
    """
    predicted = {
        m: predicted_time(m, 16 // m, num_stages=4, num_repeats=1, overhead=Fraction(0))
        for m in (1, 2, 4, 8, 16)
    }
    seconds = {(m, 1): 0.25 * float(time) for m, time in predicted.items()}
    found = CostModelCheck(
        num_stages=4, samples=16, seconds=seconds, default_overhead=Fraction(1000)
    )
    picked, best = (1, 1), (16, 1)
    assert (
        found.columns(picked)["regret"]
        == seconds[picked] / seconds[best]
        == pytest.approx(64 / 19)
    )
    assert [note.split(";")[0].split("picks ")[1] for note in found.notes()] == [
        "m=16, v=1",
        "m=1, v=1",
    ]
