"""Tests of benchmarks/ramp.py: counts and the tables, not times."""

import jax
import pytest
from contenders import FIXED, JIT, MICROBATCHING, MULTI_STEPS, QUICK, SMALL
from ramp import CPU_SIZES, PHASES, QUICK_SIZES, Clocked, Steps, Trip, ramp_plan, rows, transition_plan, transition_rows, trip

from rampup.engine.mesh import make_mesh


def test_ramp_plan_has_eight_phases_of_one_shape():
    """The measured ramp goes from one microbatch to eight, one shape, with steps to spare in the last phase."""
    for problem, sizes in ((QUICK, QUICK_SIZES), (SMALL, CPU_SIZES)):
        plan = ramp_plan(problem, *sizes)
        assert [split.num_microbatches for split in plan.splits] == list(range(1, PHASES + 1))
        assert plan.num_compiled_shapes == 1
        assert plan.total_steps - plan.ramp.ramp_steps >= 2


@pytest.mark.bench
@pytest.mark.parametrize(("name", "compilations"), [(FIXED, 1), (JIT, PHASES)])
def test_trip_counts_compilations(name, compilations):
    """Through eight phases rampup compiles once, and a jit per batch size once a phase."""
    found = trip(name, QUICK, ramp_plan(QUICK, *QUICK_SIZES, replicas=4), make_mesh(devices=jax.devices()[:4]))
    assert found.compilations == compilations
    for clock in (found.wall, found.cpu):
        assert 0 < clock.first_seconds <= clock.seconds
        assert clock.row_seconds >= 0
        assert clock.step_seconds > 0
        assert clock.over_own == clock.seconds / (clock.first_seconds + clock.step_seconds)


def test_rows_start_with_the_ideal():
    """The ideal takes the best time per row and the shortest first compilation of any system, in their medians."""
    plan = ramp_plan(QUICK, *QUICK_SIZES)
    trips = {}
    for place, name in enumerate((FIXED, JIT, MULTI_STEPS, MICROBATCHING)):
        wall = Clocked(seconds=10.0 + place, first_seconds=2.0 + place, row_seconds=0.01 * (9 - place), step_seconds=8.0)
        cpu = Clocked(seconds=20.0, first_seconds=5.0, row_seconds=0.5, step_seconds=15.0)
        trips[name] = [Trip(wall=wall, cpu=cpu, compilations=1 + place)] * 3
    ideal, *others = rows(trips, plan)
    assert ideal["seconds"] == pytest.approx(2.0 + plan.consumed_samples * 0.06)
    assert (ideal["cpu_s"], ideal["compilations"]) == (5 + plan.consumed_samples * 0.5, 1)
    assert [row["compilations"] for row in others] == [1, 2, 3, 4]
    assert [row["system"] for row in others] == list(trips)
    for row in others:
        assert row["over_ideal"] == pytest.approx(row["seconds"] / ideal["seconds"])
        assert row["over_own"] == pytest.approx(row["seconds"] / (row["first_compile_s"] + 8.0))
        assert row["times_ours"] == pytest.approx(row["seconds"] / 10.0)
        assert tuple(row) == tuple(ideal)


PLAN = transition_plan(QUICK, 4, 4)


def steps(seconds, sizes=(2,) * 12, **more):
    """Return a run."""
    return Steps(seconds=tuple(seconds), microbatch_sizes=tuple(sizes), compilations=1, **more)


def test_slowest_change_sees_stalls_and_not_slower_phases():
    """The first step of a phase or in another size is a change, compared with those of its phase and size."""
    calm = [99, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert steps(calm).changes(PLAN) == [4, 8]
    assert steps(calm, [2] * 6 + [4] * 6).changes(PLAN) == [4, 6, 8]
    assert steps(calm).slowest_change(PLAN) == 1
    stalled = [*calm[:8], 30, 3, 3, 3]
    assert steps(stalled).slowest_change(PLAN) == 10
    assert steps(stalled).slowest_change(PLAN, later=3) == 1
    late = [*calm[:4], 2, 2, 8, 5, *calm[8:]]
    assert steps(late, [2] * 6 + [4] * 6).slowest_change(PLAN) == pytest.approx(8 / 6.5)


def test_transition_rows_compare_medians():
    """Every contender has its median over the runs, its least, and its ratio to rampup with fixed microbatches."""
    calm = [9, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    runs = {FIXED: [steps(calm)] * 3, JIT: [steps([*calm[:8], slow, 3, 3, 3], num_late=4) for slow in (6, 30, 60)]}
    rampup, jit = transition_rows(runs, PLAN)
    assert (rampup["slowest_change"], rampup["times_ours"], rampup["late_steps"]) == (1, 1, 0)
    assert (jit["slowest_change"], jit["least"], jit["times_ours"], jit["late_steps"]) == (10, 2, 10, 4)
    assert jit["slowest_ms"] == 30_000
    assert tuple(rampup) == tuple(jit)
