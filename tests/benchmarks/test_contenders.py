"""Tests of benchmarks/contenders.py."""

import jax
import numpy as np
import pytest
from contenders import AUTO, CONTENDERS, FIXED, JIT, MICROBATCHING, MULTI_STEPS, PER_PHASE, QUICK, start_run, strided
from ramp import transition_plan

from rampup.engine.mesh import make_mesh

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


@pytest.mark.bench
def test_contenders_have_the_losses_of_the_big_batch(runs):
    """Rampup with every policy and optax.microbatching have the losses of the big batch on the same rows."""
    for name in (FIXED, PER_PHASE, AUTO, MICROBATCHING):
        np.testing.assert_allclose(runs[name][0], runs[JIT][0], rtol=1e-4)
    assert len(runs[MULTI_STEPS][0]) == 3 * STEPS


@pytest.mark.bench
def test_contenders_compile_as_often_as_documented(runs):
    """Rampup with fixed microbatches, MultiSteps and optax.microbatching compile once, a jit per size three times."""
    counts = {name: run[1] for name, run in runs.items()}
    assert [counts[name] for name in (FIXED, MULTI_STEPS, MICROBATCHING, JIT)] == [1, 1, 1, 3]
    assert 1 <= counts[AUTO] <= 2
    assert 1 <= counts[PER_PHASE] <= 3


@pytest.mark.bench
def test_contenders_run_the_sizes_of_their_policy(runs):
    """A step in another size than planned counts as late."""
    b = QUICK.rows
    assert runs[FIXED][2] == runs[MULTI_STEPS][2] == runs[MICROBATCHING][2] == [b] * 3 * STEPS
    assert runs[JIT][2] == [k * b for k in (1, 2, 3) for _ in range(STEPS)]
    planned = {PER_PHASE: runs[JIT][2], AUTO: [b] * 2 * STEPS + [3 * b] * STEPS}
    for name, sizes in planned.items():
        different = [step for step, (size, wanted) in enumerate(zip(runs[name][2], sizes, strict=True)) if size != wanted]
        assert runs[name][3] == different
    assert runs[FIXED][3] == []


def test_strided_gives_microbatches_of_consecutive_rows():
    """Split as optax.microbatching does, the rows are the microbatches in order, then zeros."""
    rows = np.arange(12).reshape(6, 2) + 1
    found = strided(rows, rows=3, most=4).reshape(4, 3, 2, order="F")
    column = strided({"x": rows[:, 0]}, rows=3, most=4)["x"].reshape((4, 3), order="F")
    assert column.tolist() == [[1, 3, 5], [7, 9, 11], [0, 0, 0], [0, 0, 0]]
    assert found.shape == (4, 3, 2)
