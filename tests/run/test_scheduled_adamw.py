"""AdamW whose constants follow the batch, in the training step, compared with `optax.adamw` per phase."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy

from rampup.plan import BatchRamp, BatchSplitter, RampPlan
from rampup.plan.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.plan.seesaw import Seesaw, discretize
from rampup.run.data.batches import step_batches
from rampup.run.optimizer import AdamSchedule, LearningRate, make_optimizer, scheduled_adamw
from rampup.run.state import create_state
from rampup.run.step import train_step

BASE = AdamConstants(b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.2)
SCALING = AdamScaling(b1="half_life", b2="half_life", eps="sde", weight_decay="timescale")


def constants_of(plan, scaling=SCALING):
    """Return the constants of every phase."""
    return adam_constants(plan, BASE, scaling)


def train(plan, mesh, tx_at, **options):
    """Train the toy with the optimizer that `tx_at` gives for each step, and return parameters, state and steps."""
    steps, state = {}, None
    engine = options.get("engine", "fused")
    chunk_size = 1 if engine == "multi_steps" else None
    for batch in step_batches(toy.rows(), plan, mesh, seed=5, chunk_size=chunk_size):
        tx = tx_at(batch.position)
        step = steps.setdefault(id(tx), train_step(toy.loss_fn, tx, plan, mesh, seed=3, **options))
        if state is None:
            shard = options.get("shard_optimizer_over_data", False)
            state = create_state(toy.new_params(mesh), step.tx, mesh, shard_optimizer_over_data=shard)
        state, _ = step(state, batch)
    return jax.device_get(state.params), state, list(steps.values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("data", {"shard_optimizer_over_data": True}),
        pytest.param("one", {"skip_nonfinite": True}, marks=pytest.mark.slow),
        pytest.param("data", {"engine": "multi_steps"}, marks=pytest.mark.slow),
        pytest.param("data_fsdp_tensor", {}, marks=pytest.mark.slow),
    ],
)
def test_one_program_equals_adamw_with_the_constants_of_each_phase(name, options):
    """A fresh `optax.adamw` at each boundary, with the state carried over, gives the same parameters to 1e-6."""
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh)
    rate = LearningRate(plan=plan, peak=0.02, warmup_fraction=0.2)
    found = constants_of(plan)
    assert len({constants.b2 for constants in found}) == 3
    per_phase = [make_optimizer(rate, **{n: getattr(c, n) for n in ("b1", "b2", "eps", "weight_decay")}) for c in found]
    expected, expected_state, _ = train(plan, mesh, lambda position: per_phase[position.phase.index], **options)
    tx = make_optimizer(rate, adam=AdamSchedule(plan=plan, constants=found))
    params, state, (step,) = train(plan, mesh, lambda position: tx, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, expected)
    assert step.num_compilations == 1
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected_state.opt_state)


@pytest.mark.parametrize(
    ("b2", "dtype"), [(0.95, jnp.bfloat16), (0.95, jnp.complex64), (0.999, jnp.float32), (0.99999, jnp.float32)]
)
def test_update_is_that_of_adamw(b2, dtype):
    """The same update, moments and types as `optax.adamw`, also for decay rates near 1, where float32 loses digits of 1 - b."""
    plan = toy.plan_for(toy.mesh_of("one"))
    base = AdamConstants(b2=b2)
    tx = scheduled_adamw(
        lambda count: 0.1 * count, AdamSchedule(plan=plan, constants=adam_constants(plan, base, AdamScaling()))
    )
    expected = optax.adamw(lambda count: 0.1 * count, b2=b2, weight_decay=0.1)
    params = {"w": jnp.linspace(-1, 1, 7).astype(dtype), "none": None}
    states = [each.init(params) for each in (tx, expected)]
    for k in range(5):
        grads = {"w": (jnp.linspace(-1, 2, 7) * 10.0**-k).astype(dtype), "none": None}
        results = [jax.jit(each.update)(grads, state, params) for each, state in zip((tx, expected), states, strict=True)]
        states = [state for _, state in results]
        for a, b in zip(*map(jax.tree.leaves, results), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(
                a.astype(np.complex64), b.astype(np.complex64), rtol=1e-6 if dtype != jnp.bfloat16 else 0.01
            )


def test_constants_are_those_of_the_plan_at_every_step():
    """The traced constants equal those on the host at every step."""
    plan = toy.plan_for(toy.mesh_of("one"))
    schedule = AdamSchedule(plan=plan, constants=constants_of(plan))
    traced = jax.jit(jax.vmap(schedule))(jnp.arange(plan.total_steps))
    for step in range(plan.total_steps):
        constants = schedule.at(step)
        assert constants == schedule.constants[plan.ramp.phase_at(step).index]
        for name in ("b1", "b2", "eps", "weight_decay"):
            assert float(traced[name][step]) == np.float32(getattr(constants, name))
        assert float(traced["c2"][step]) == np.float32(1 - constants.b2)


def test_learning_rate_with_seesaw_is_the_same_on_host_and_device():
    """Warm-up, then a staircase: host and device agree at every step, and each step is level * scale of the peak."""
    cuts = discretize(lambda t: 1 - 0.9 * max(t - 0.1, 0), factor=1.5, total_samples=2000)
    seesaw = Seesaw(base=BatchRamp.constant(16), cuts=cuts, max_batch_size=40, multiple=8, total_samples=2000)
    splitter = BatchSplitter(data_parallel_size=1)
    options = {"learning_rate_clock": "samples", "total_steps": seesaw.ramp.step_of_sample(1999) + 1, "num_devices": 1}
    plan = RampPlan(ramp=seesaw.ramp, splitter=splitter, seesaw=seesaw, **options)
    rate = LearningRate(plan=plan, peak=0.3, warmup_fraction=0.1)
    on_device = jax.jit(jax.vmap(rate))(jnp.arange(plan.total_steps))
    np.testing.assert_allclose(on_device, [rate.at(step) for step in range(plan.total_steps)], rtol=1e-5)
    for step in (step for step in seesaw.steps[1:] if step.start_step < plan.total_steps):
        assert rate.at(step.start_step) == pytest.approx(0.3 * step.level * (step.global_batch_size / 16) ** 0.5)
    assert len(plan.clock) > len(plan.ramp.phases) == 4
