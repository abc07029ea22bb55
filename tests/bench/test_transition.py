"""Tests of rampup.bench.transition: which steps are changes, and what they are compared with."""

import pytest

from rampup.bench.contenders import FIXED, JIT, QUICK
from rampup.bench.ramp import TRANSITION_PHASES, Steps, timed_steps, transition_plan, transition_rows

PLAN = transition_plan(QUICK, 4, 4)


def steps(seconds, sizes=(2,) * 12, **more):
    """Return a run."""
    return Steps(seconds=tuple(seconds), microbatch_sizes=tuple(sizes), compilations=1, **more)


def test_the_plan_has_equal_phases():
    """Three phases of as many steps each, of one, two and three microbatches."""
    assert [phase.start_step for phase in PLAN.ramp.phases] == [0, 4, 8]
    assert PLAN.ramp.sizes == (QUICK.rows, 2 * QUICK.rows, 3 * QUICK.rows)
    assert PLAN.total_steps == 4 * TRANSITION_PHASES


def test_changes_are_phases_and_swaps():
    """The first step of a phase is a change, and so is the first in another size; the first step of the run is none."""
    assert steps([1] * 12).changes(PLAN) == [4, 8]
    assert steps([1] * 12, [2] * 6 + [4] * 6).changes(PLAN) == [4, 6, 8]


def test_a_stall_is_seen_and_a_slower_phase_is_not():
    """A step is compared with those of its phase that were cut alike; a long compilation before the first does not count."""
    calm = [99, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert steps(calm).slowest_change(PLAN) == 1
    stalled = [*calm[:8], 30, 3, 3, 3]
    assert steps(stalled).slowest_change(PLAN) == 10
    assert steps(stalled).slowest_control(PLAN) == 1
    late = [*calm[:4], 2, 2, 8, 5, *calm[8:]]
    assert steps(late, [2] * 6 + [4] * 6).slowest_change(PLAN) == pytest.approx(8 / 6.5)


def test_the_table_compares_medians():
    """Every contender has its median over the runs, its least, and its ratio to ours with fixed microbatches."""
    calm = [9, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    runs = {
        FIXED: [steps(calm)] * 3,
        JIT: [steps([*calm[:8], slow, 3, 3, 3], num_late=4) for slow in (6, 30, 60)],
    }
    ours, peer = transition_rows(runs, PLAN)
    assert (ours["slowest_change"], ours["times_ours"], ours["late_steps"]) == (1, 1, 0)
    assert (peer["slowest_change"], peer["least"], peer["times_ours"], peer["late_steps"]) == (10, 2, 10, 4)
    assert peer["slowest_ms"] == 30_000
    assert tuple(ours) == tuple(peer)


def test_a_contender_is_timed_step_by_step():
    """Every step of the run has its time and its size."""
    found = timed_steps(FIXED, QUICK, PLAN)
    assert len(found.seconds) == len(found.microbatch_sizes) == PLAN.total_steps
    assert found.compilations == 1
    assert all(seconds > 0 for seconds in found.seconds)
