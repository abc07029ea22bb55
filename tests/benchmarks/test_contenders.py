"""Tests of benchmarks/contenders.py."""

import jax
import numpy as np
import pytest
from contenders import AUTO, CONTENDERS, FIXED, JIT, MICROBATCHING, MULTI_STEPS, PER_PHASE, QUICK, start_run
from ramp import transition_plan

from rampup.engine.mesh import make_mesh

STEPS = 4


@pytest.mark.bench
def test_contenders_have_the_losses_compilations_and_sizes_of_their_policy():
    """On the same rows, each has the losses of the big batch, or the compilations and late steps, that its policy implies."""
    plan, mesh = transition_plan(QUICK, STEPS, STEPS), make_mesh(devices=jax.devices()[:1])
    runs = {name: start_run(name, QUICK, plan, mesh) for name in CONTENDERS}
    losses = {name: [float(loss) for loss in run.losses] for name, run in runs.items()}
    for name in (FIXED, PER_PHASE, AUTO, MICROBATCHING):
        np.testing.assert_allclose(losses[name], losses[JIT], rtol=1e-4)
    assert len(losses[MULTI_STEPS]) == 3 * STEPS
    counts = {name: run.num_compilations() for name, run in runs.items()}
    assert [counts[name] for name in (FIXED, MULTI_STEPS, MICROBATCHING, JIT)] == [1, 1, 1, 3]
    assert 1 <= counts[AUTO] <= 2
    assert 1 <= counts[PER_PHASE] <= 3
    sizes, b = {name: run.microbatch_sizes for name, run in runs.items()}, QUICK.rows
    assert sizes[FIXED] == sizes[MULTI_STEPS] == sizes[MICROBATCHING] == [b] * 3 * STEPS
    assert sizes[JIT] == [k * b for k in (1, 2, 3) for _ in range(STEPS)]
    planned = {FIXED: sizes[FIXED], PER_PHASE: sizes[JIT], AUTO: [b] * 2 * STEPS + [3 * b] * STEPS}
    for name, wanted in planned.items():
        assert runs[name].late_steps == [step for step in range(3 * STEPS) if sizes[name][step] != wanted[step]]
