"""Tests of rampup.bench.contenders: every contender trains on the same rows and reaches the same losses."""

import jax
import numpy as np
import pytest

from rampup.bench.contenders import (
    AUTO,
    CONTENDERS,
    FIXED,
    JIT,
    MICROBATCHING,
    MULTI_STEPS,
    PER_PHASE,
    QUICK,
    start_run,
    strided,
)
from rampup.bench.ramp import transition_plan
from rampup.run.mesh import make_mesh

STEPS = 4


@pytest.fixture(scope="module")
def runs():
    """Return every contender's losses, compilations and microbatch sizes over three phases."""
    plan, mesh = transition_plan(QUICK, STEPS, STEPS), make_mesh(devices=jax.devices()[:1])
    found = {}
    for name in CONTENDERS:
        started = start_run(name, QUICK, plan, mesh)
        losses = [float(loss) for loss in started.losses]
        found[name] = losses, started.num_compilations(), started.microbatch_sizes, started.late_steps
    return found


def test_losses_are_those_of_the_hand_written_step(runs):
    """Ours in every mode and optax.microbatching have the losses of the plain big batch, on the same rows."""
    for name in (FIXED, PER_PHASE, AUTO, MICROBATCHING):
        np.testing.assert_allclose(runs[name][0], runs[JIT][0], rtol=1e-4)
    assert len(runs[MULTI_STEPS][0]) == 3 * STEPS


def test_compilations(runs):
    """One program serves ours with fixed microbatches, MultiSteps and optax.microbatching; a jit per size has three."""
    counts = {name: run[1] for name, run in runs.items()}
    assert [counts[name] for name in (FIXED, MULTI_STEPS, MICROBATCHING, JIT)] == [1, 1, 1, 3]
    assert 1 <= counts[AUTO] <= 2
    assert 1 <= counts[PER_PHASE] <= 3


def test_cuts(runs):
    """Sizes of microbatches are those of the mode; a step in another size than planned is counted as late."""
    b = QUICK.rows
    assert runs[FIXED][2] == runs[MULTI_STEPS][2] == runs[MICROBATCHING][2] == [b] * 3 * STEPS
    assert runs[JIT][2] == [k * b for k in (1, 2, 3) for _ in range(STEPS)]
    planned = {PER_PHASE: runs[JIT][2], AUTO: [b] * 2 * STEPS + [3 * b] * STEPS}
    for name, sizes in planned.items():
        different = [step for step, (size, wanted) in enumerate(zip(runs[name][2], sizes, strict=True)) if size != wanted]
        assert runs[name][3] == different
    assert runs[FIXED][3] == []


def test_strided_rows_are_microbatches_of_consecutive_rows():
    """Cut as optax.microbatching cuts, the rows give back the microbatches in order, then zeros."""
    rows = np.arange(12).reshape(6, 2) + 1
    found = strided(rows, rows=3, most=4).reshape(4, 3, 2, order="F")
    column = strided({"x": rows[:, 0]}, rows=3, most=4)["x"].reshape((4, 3), order="F")
    assert column.tolist() == [[1, 3, 5], [7, 9, 11], [0, 0, 0], [0, 0, 0]]
    assert found.shape == (4, 3, 2)
