"""Tests of rampup.bench.plan: what is compared, and that the answers agree."""

import pytest

from rampup.bench.maxtext import ReplayManager
from rampup.bench.plan import CONFIG, FAR_STEP, run
from rampup.plan.maxtext_manager import RampupBatchManager


@pytest.fixture(scope="module")
def result():
    """Return the quick benchmark."""
    return run(quick=True)


def test_rows_are_complete(result):
    """Look-ups, resumes, an update and the host's two parts stand there, each beside its peer."""
    assert [row["peer"] for row in result.rows] == ["replay, extrapolated"] * 6 + ["update"] + ["the default recipe's step"] * 2
    assert {tuple(row) for row in result.rows} == {result.columns}
    assert all(row["peer_microseconds"] > 0 for row in result.rows)


def test_a_look_up_is_not_a_replay(result):
    """At a step this far, every look-up and every resume is more than a thousand times as fast as the replay."""
    assert all(row["times_faster"] > 1e3 for row in result.rows[:6])


def test_the_notes_say_what_was_extrapolated(result):
    """The replayed steps, the factor and where the peer is from are in the notes."""
    assert f"step {FAR_STEP:,} by replaying" in result.notes[0]
    assert "multiplied by 333,333" in result.notes[0]


def test_the_peer_answers_the_same():
    """On the way through the benchmark's ramp, look-up and replay give the same batch at every thousandth step."""
    theirs = ReplayManager(CONFIG, 0)
    ours = RampupBatchManager(CONFIG)
    for step in range(30_000):
        if step % 1_000 == 0:
            assert ours.ramp.global_batch_size_at(step) == theirs.global_batch_size_current
            assert ours.ramp.samples_before(step) == theirs.total_used_samples
        theirs.update()
