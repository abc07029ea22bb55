"""Tests of benchmarks/ramp.py and benchmarks/contenders.py: counts and the tables, not
times.
"""

import jax
import numpy as np
import pytest
from contenders import (
    AUTO,
    CONTENDERS,
    FIXED,
    JIT,
    MICROBATCHING,
    MULTI_STEPS,
    PER_PHASE,
    QUICK,
    SMALL,
    start_run,
)
from ramp import (
    CPU_SIZES,
    PHASES,
    QUICK_SIZES,
    Clocked,
    Steps,
    Trip,
    ramp_plan,
    rows,
    transition_plan,
    trip,
)

from rampup.engine.mesh import make_mesh


def test_ramp_plan_has_eight_phases_of_one_shape():
    """The measured ramp goes from one microbatch to eight, one shape, with steps to
    spare in the last phase.
    """
    for problem, sizes in ((QUICK, QUICK_SIZES), (SMALL, CPU_SIZES)):
        plan = ramp_plan(problem, *sizes)
        assert [split.num_microbatches for split in plan.splits] == list(
            range(1, PHASES + 1)
        )
        assert plan.num_compiled_shapes == 1
        assert plan.total_steps - plan.ramp.ramp_steps >= 2


@pytest.mark.bench
@pytest.mark.parametrize(("name", "compilations"), [(FIXED, 1), (JIT, PHASES)])
def test_trip_counts_compilations(name, compilations):
    """Through eight phases rampup compiles once, and a jit per batch size once a
    phase.
    """
    found = trip(
        name,
        QUICK,
        ramp_plan(QUICK, *QUICK_SIZES, replicas=4),
        make_mesh(devices=jax.devices()[:4]),
    )
    assert found.compilations == compilations
    for clock in (found.wall, found.cpu):
        assert 0 < clock.first_seconds <= clock.seconds
        assert clock.row_seconds >= 0
        assert clock.step_seconds > 0
        assert clock.over_own == clock.seconds / (
            clock.first_seconds + clock.step_seconds
        )


def test_rows_start_with_the_ideal():
    """The ideal takes the best time per row and the shortest first compilation of any
    system, in their medians.
    """
    plan = ramp_plan(QUICK, *QUICK_SIZES)
    trips = {}
    for place, name in enumerate((FIXED, JIT, MULTI_STEPS, MICROBATCHING)):
        wall = Clocked(
            seconds=10.0 + place,
            first_seconds=2.0 + place,
            row_seconds=0.01 * (9 - place),
            step_seconds=8.0,
        )
        cpu = Clocked(
            seconds=20.0, first_seconds=5.0, row_seconds=0.5, step_seconds=15.0
        )
        trips[name] = [Trip(wall=wall, cpu=cpu, compilations=1 + place)] * 3
    ideal, *others = rows(trips, plan)
    assert ideal["seconds"] == pytest.approx(2.0 + plan.consumed_samples * 0.06)
    assert (ideal["cpu_s"], ideal["compilations"]) == (
        5 + plan.consumed_samples * 0.5,
        1,
    )
    assert [row["compilations"] for row in others] == [1, 2, 3, 4]
    assert [row["system"] for row in others] == list(trips)
    for row in others:
        assert row["over_ideal"] == pytest.approx(row["seconds"] / ideal["seconds"])
        assert row["over_own"] == pytest.approx(
            row["seconds"] / (row["first_compile_s"] + 8.0)
        )
        assert row["times_ours"] == pytest.approx(row["seconds"] / 10.0)
        assert tuple(row) == tuple(ideal)


PLAN = transition_plan(QUICK, 4, 4)


def steps(seconds, sizes=(2,) * 12, **more):
    """Return a run."""
    return Steps(
        seconds=tuple(seconds), microbatch_sizes=tuple(sizes), compilations=1, **more
    )


def test_slowest_change_sees_stalls_and_not_slower_phases():
    """The first step of a phase or in another size is a change, compared with those of
    its phase and size.
    """
    calm = [99, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert steps(calm).changes(PLAN) == [4, 8]
    assert steps(calm, [2] * 6 + [4] * 6).changes(PLAN) == [4, 6, 8]
    assert steps(calm).slowest_change(PLAN) == 1
    stalled = [*calm[:8], 30, 3, 3, 3]
    assert steps(stalled).slowest_change(PLAN) == 10
    assert steps(stalled).slowest_change(PLAN, later=3) == 1
    late = [*calm[:4], 2, 2, 8, 5, *calm[8:]]
    assert steps(late, [2] * 6 + [4] * 6).slowest_change(PLAN) == pytest.approx(8 / 6.5)


STEPS = 4


@pytest.mark.bench
def test_contenders_have_the_losses_compilations_and_sizes_of_their_policy():
    """On the same rows, each has the losses of the big batch, or the compilations and
    sizes, that its policy implies.
    """
    plan, mesh = (
        transition_plan(QUICK, STEPS, STEPS),
        make_mesh(devices=jax.devices()[:1]),
    )
    runs = {name: start_run(name, QUICK, plan, mesh) for name in CONTENDERS}
    losses = {name: [float(loss) for loss in run.losses] for name, run in runs.items()}
    for name in (FIXED, PER_PHASE, AUTO, MICROBATCHING):
        np.testing.assert_allclose(losses[name], losses[JIT], rtol=1e-4)
    assert len(losses[MULTI_STEPS]) == 3 * STEPS
    counts = {name: run.num_compilations() for name, run in runs.items()}
    assert [counts[name] for name in (FIXED, MULTI_STEPS, MICROBATCHING, JIT)] == [
        1,
        1,
        1,
        3,
    ]
    assert 1 <= counts[AUTO] <= 2
    assert 1 <= counts[PER_PHASE] <= 3
    sizes, b = {name: run.microbatch_sizes for name, run in runs.items()}, QUICK.rows
    assert sizes[FIXED] == sizes[MULTI_STEPS] == sizes[MICROBATCHING] == [b] * 3 * STEPS
    assert sizes[JIT] == [k * b for k in (1, 2, 3) for _ in range(STEPS)]
    planned = {
        FIXED: sizes[FIXED],
        PER_PHASE: sizes[JIT],
        AUTO: [b] * 2 * STEPS + [3 * b] * STEPS,
    }
    for name, wanted in planned.items():
        assert sizes[name] == wanted
