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
def test_every_program_has_the_same_gradients(quick):
    """Schedules with and without repeats, skipping idle ticks or not, and GPipe have the gradients of the model alone."""
    result = quick("pipeline")
    compared = [row for row in result.rows if row["gradient_error"] is not None]
    assert [row["v"] for row in compared] == [1, 1, 2, 2, 1]
    assert all(row["gradient_error"] < 1e-5 for row in compared)
    assert all(row["step_ms"] > 0 and row["temp_bytes"] > 0 for row in result.rows)
    assert {tuple(row) for row in result.rows} == {pipeline.COLUMNS}


@pytest.mark.bench
def test_loops_and_permutes_match_the_schedules(quick):
    """1F1B is one loop of v*m + p - 1 + v*p - 1 ticks with two permutes, GPipe two loops of m + p - 1 ticks with one."""
    result = quick("pipeline")
    for row in result.rows:
        p, m, v = row["p"], row["m"], row["v"]
        is_gpipe = "gpipe" in row["system"]
        groups = -(-m // p)
        forward_ticks = ((groups - 1) * v + v - 1) * p + (m - 1) % p + p
        assert row["iterations"] == (2 * (m + p - 1) if is_gpipe else forward_ticks + v * p - 1)
        assert row["permutes"] == 2


@pytest.mark.bench
def test_memory_falls_with_smaller_microbatches(quick):
    """Of one batch, smaller microbatches need less memory: at most 2*v*p - 1 of them wait for their backward."""
    result = quick("pipeline")
    of = {row["m"]: row["temp_bytes"] for row in result.rows if row["regret"] is not None and row["v"] == 1}
    assert list(of) == [1, 2, 4, 8, 16]
    assert sorted(of.values(), reverse=True) == list(of.values())


class FakeMaxText:
    """Replaces MaxText: the same arrangement of the layers without a pipeline. It fails with repeats."""

    version = "0"

    def forward(self, stage, *_, num_repeats, **__):
        """Return a function that applies all layers."""
        if num_repeats > 1:
            raise TypeError("no repeats today")
        return lambda layers, x: stage({name: w.reshape(-1, *w.shape[2:]) for name, w in layers.items()}, x)


@pytest.mark.bench
def test_compare_relates_to_the_baseline_and_survives_its_failure():
    """Each program has its ratio to the baseline with the same repeats. What the baseline cannot run becomes a note."""
    notes = []
    rows = compare(QUICK, 2, 4, FakeMaxText(), notes)
    *own, baseline = rows
    assert baseline["system"] == "maxtext 0"
    assert baseline["gradient_error"] < 1e-5
    assert [row["vs_maxtext"] is None for row in rows] == [False, False, True, True, False, True]
    assert own[0]["vs_maxtext"] == pytest.approx(own[0]["step_ms"] / baseline["step_ms"])
    assert notes == ["MaxText's pipeline does not run at p=2, m=4, v=2: TypeError: no repeats today"]


def test_maxtext_has_the_same_gradients():
    """The installed MaxText has the same gradients, with m*v + p - 1 ticks in each direction."""
    pytest.importorskip("maxtext")
    notes = []
    rows = compare(QUICK, 2, 4, MaxTextPipeline.load(), notes)
    assert not notes
    assert [(row["v"], row["iterations"]) for row in rows if row["system"].startswith("maxtext")] == [(1, 10), (2, 18)]
    assert all(row["gradient_error"] < 1e-5 for row in rows)


@pytest.mark.parametrize("number", [1, 3])
def test_pipeline_bench_needs_four_devices(number, monkeypatch):
    """The error has the number of devices and the fix."""
    devices = jax.devices()[:number]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=rf"at least 4 devices .* num_devices={number} \(cpu\).*--fake-devices 8") as caught:
        run(quick=True)
    assert caught.value.nearest == (8,)


def cost_model_check(seconds, default=8):
    """Return a check at p=4 and 16 samples."""
    return CostModelCheck(num_stages=4, samples=16, seconds=seconds, default_overhead=Fraction(default))


def times(h, repeats=(1, 2)):
    """Return the times that the cost model predicts with an overhead."""
    return {
        (m, v): 0.25 * float(predicted_time(m, 16 // m, num_stages=4, num_repeats=v, overhead=Fraction(h)))
        for v in repeats
        for m in (1, 2, 4, 8, 16)
        if m >= 4 or v == 1
    }


def test_regret_measures_a_wrong_overhead():
    """An overhead that is far too large picks too few microbatches, and the regret is the cost of that."""
    seconds = times(0, repeats=(1,))
    found = cost_model_check(seconds, default=1000)
    picked, best = (1, 1), (16, 1)
    assert found.columns(picked)["regret"] == seconds[picked] / seconds[best] == pytest.approx(64 / 19)
    assert [note.split(";")[0].split("picks ")[1] for note in found.notes()] == ["m=16, v=1", "m=1, v=1"]
