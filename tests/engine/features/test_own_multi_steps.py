"""`rampup.multi_steps` in a step of one's own: NaN, and the type of its sums."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy

import rampup


def plan_of(microbatches=4, steps=5):
    """Return a plan of steps of some microbatches of two rows, on one device."""
    return rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(2 * microbatches),
        splitter=rampup.BatchSplitter(data_parallel_size=1, microbatch_size=2),
        num_devices=1,
        total_steps=steps,
    )


def parameters_after(tx, plan, gradient, steps=5):
    """Return the parameters after every step, from the gradient of microbatch
    (step, number).
    """
    params = {"w": jnp.float32(1), "v": jnp.ones(3)}
    state, found = tx.init(params), []
    run = jax.jit(tx.update)
    for step in range(steps):
        for number in range(plan.splits[0].num_microbatches):
            grads = jax.tree.map(lambda p: gradient(step, number) + 0 * p, params)  # noqa: B023
            updates, state = run(grads, state, params)
            params = optax.apply_updates(params, updates)
        found.append(jax.device_get(params))
    return found


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize(
    "own",
    [
        optax.chain(optax.zero_nans(), optax.sgd(0.1)),
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.apply_if_finite(optax.sgd(0.1), 1),
    ],
    ids=["zero_nans", "adam", "sgd"],
)
def test_a_microbatch_that_is_not_finite_spoils_its_own_step_alone(own, place, bad):
    """The steps after it change all parameters, as those before it did."""

    def gradient(step, number):
        return bad if (step, number) == (1, place) else 0.5

    if np.isinf(bad):
        own = optax.chain(
            optax.stateless(
                lambda g, _: jax.tree.map(
                    lambda x: jnp.where(jnp.isinf(x), jnp.nan, x), g
                )
            ),
            own,
        )
    plan = plan_of()
    found = parameters_after(rampup.multi_steps(own, plan), plan, gradient)
    for before, after in itertools.pairwise(found[1:]):
        for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            assert np.isfinite(new).all()
            assert (new < old).all()


def test_an_update_that_is_not_finite_and_not_emitted_changes_nothing():
    """An optimizer that divides by the norm of a first microbatch of zeros gives NaN
    there, and a number for the step.
    """

    def normalize(grads, _):
        return jax.tree.map(lambda g: -g / jnp.max(jnp.abs(g)), grads)

    plan = plan_of(2)
    tx = rampup.multi_steps(optax.stateless(normalize), plan)
    found = parameters_after(tx, plan, lambda _, number: float(number), steps=1)
    assert found[0]["w"] == 0


@pytest.mark.skipif(
    "accumulator_dtype" not in inspect.signature(optax.MultiSteps).parameters,
    reason="this Optax sums in the types of the parameters",
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16])
def test_accumulator_dtype_is_that_of_optax(dtype):
    """The sums have the type that `optax.MultiSteps` would give them."""
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    plan = plan_of()
    tx = rampup.multi_steps(optax.sgd(0.1), plan, accumulator_dtype=dtype)
    assert tx.init(params).acc_grads["w"].dtype == dtype
    _, state = tx.update(params, tx.init(params), params)
    assert state.acc_grads["w"].dtype == dtype


@pytest.mark.skipif(
    "accumulator_dtype" not in inspect.signature(optax.MultiSteps).parameters,
    reason="this Optax sums in the types of the parameters",
)
@pytest.mark.parametrize("own", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_accumulator_dtype_reaches_the_sums_of_a_training_step(own, mesh_name):
    """Sums in float32 keep what those in bfloat16 round away."""
    mesh = toy.mesh_of(mesh_name)
    plan = toy.plan_for(mesh, "0:64", steps=1, microbatch_size=64 // mesh.size // 8)

    def loss_fn(params, batch, keys):
        return (params["w"] * batch["x"]).sum(), batch["x"].size, {}

    # Of eight microbatches the first has a gradient of 1, and the others one of 1/512.
    rows = [{"x": np.float32(1 if n < 8 else 1 / 512)} for n in range(64)]
    moments = []
    for dtype in (jnp.float32, jnp.bfloat16):
        tx = rampup.multi_steps(own, plan, accumulator_dtype=dtype)
        step = rampup.train_step(loss_fn, tx, plan, mesh)
        state = rampup.create_state({"w": jnp.float32(1)}, tx, mesh)
        assert state.opt_state.acc_grads["w"].dtype == dtype
        state, _ = step(state, next(step.batches(rows)))
        assert state.opt_state.acc_grads["w"].dtype == dtype
        found = state.opt_state.inner_opt_state
        moments.append(
            abs(
                float(
                    optax.tree.get(found, "mu" if "mu" in str(found) else "trace")["w"]
                )
            )
        )
    assert moments[0] > moments[1]
