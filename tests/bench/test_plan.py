"""Tests of rampup.bench.plan."""

import pytest

from rampup.bench.maxtext import ReplayManager
from rampup.bench.plan import CONFIG, FAR_STEP
from rampup.plan.maxtext_manager import RampupBatchManager


@pytest.mark.bench
def test_plan_bench_covers_all_cases(quick):
    """Look-ups, resumes, an update and the two parts of the host's work, each with its baseline."""
    result = quick("plan")
    assert [row["peer"] for row in result.rows] == ["replay, extrapolated"] * 6 + ["update"] + ["the default recipe's step"] * 2
    assert {tuple(row) for row in result.rows} == {result.columns}
    assert all(row["peer_microseconds"] > 0 for row in result.rows)


@pytest.mark.bench
def test_notes_name_what_was_extrapolated(quick):
    """The replayed steps and the factor are in the notes."""
    result = quick("plan")
    assert f"step {FAR_STEP:,} by replaying" in result.notes[0]
    assert "multiplied by 333,333" in result.notes[0]


def test_manager_agrees_with_the_replay():
    """Through the benchmark's ramp, look-up and replay give the same batch at every thousandth step."""
    replay = ReplayManager(CONFIG, 0)
    manager = RampupBatchManager(CONFIG)
    for step in range(30_000):
        if step % 1_000 == 0:
            assert manager.ramp.global_batch_size_at(step) == replay.global_batch_size_current
            assert manager.ramp.samples_before(step) == replay.total_used_samples
        replay.update()
