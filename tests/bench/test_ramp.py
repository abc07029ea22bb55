"""Tests of rampup.bench.ramp: counts and the table, not times."""

import jax
import pytest

from rampup.bench.contenders import CONTENDERS, FIXED, JIT, MICROBATCHING, MULTI_STEPS, QUICK, SMALL
from rampup.bench.ramp import CPU_SIZES, PHASES, QUICK_SIZES, Clocked, Trip, ramp_plan, rows, trip
from rampup.run.mesh import make_mesh


def test_the_ramp_has_eight_phases_of_one_shape():
    """The measured ramp goes from one microbatch to eight, one shape, with steps to spare in the last phase."""
    for problem, sizes in ((QUICK, QUICK_SIZES), (SMALL, CPU_SIZES)):
        plan = ramp_plan(problem, *sizes)
        assert [split.num_microbatches for split in plan.splits] == list(range(1, PHASES + 1))
        assert plan.num_compiled_shapes == 1
        assert plan.total_steps - plan.ramp.ramp_steps >= 2


@pytest.mark.parametrize(("name", "compilations"), [(FIXED, 1), (JIT, PHASES)])
def test_compilations_of_a_whole_ramp(name, compilations):
    """Through eight phases ours compiles once, and a jit per batch size once a phase."""
    found = trip(name, QUICK, ramp_plan(QUICK, *QUICK_SIZES, replicas=4), make_mesh(devices=jax.devices()[:4]))
    assert found.compilations == compilations
    for clock in (found.wall, found.cpu):
        assert 0 < clock.first_seconds <= clock.seconds
        assert clock.row_seconds >= 0
        assert clock.step_seconds > 0
        assert clock.over_own == clock.seconds / (clock.first_seconds + clock.step_seconds)


def test_the_ideal_is_the_best_of_all():
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


def test_contenders_are_ours_and_three_peers():
    """Ours runs in three modes beside three other ways to grow a batch."""
    assert len(CONTENDERS) == 6
    assert sum(name.startswith("rampup") for name in CONTENDERS) == 3
