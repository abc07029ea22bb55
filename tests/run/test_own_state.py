"""A training state of one's own: subclasses of Flax's TrainState, aliased buffers, and what a caller keeps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from helpers.toy import loss_fn, mesh_of, new_params, plan_for, rows

import rampup


class EmaState(train_state.TrainState):
    """A TrainState that keeps a moving average of the parameters, as Flax users write it."""

    ema: Any = None

    def apply_gradients(self, *, grads, **changes):
        """Run the optimizer, then move the average."""
        new = super().apply_gradients(grads=grads, **changes)
        ema = jax.tree.map(lambda e, p: 0.5 * e + 0.5 * p, self.ema, new.params)
        return new.replace(ema=ema)


class BatchStatsState(train_state.TrainState):
    """A TrainState with batch statistics, as in Flax's examples."""

    batch_stats: Any = None


def run(state, step, plan, mesh, steps=3):
    """Return the state after some steps."""
    for batch in rampup.step_batches(rows(), plan, mesh, stop=steps):
        state, _ = step(state, batch)
    return state


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_apply_gradients_of_the_state_is_called(mesh_name):
    """An overridden `apply_gradients` that keeps an average is what updates the state (A5)."""
    mesh = mesh_of(mesh_name)
    plan, tx, params = plan_for(mesh, "0:16"), optax.sgd(0.1), new_params(mesh)
    average = jax.tree.map(jnp.zeros_like, params)
    state = EmaState.create(apply_fn=None, params=params, tx=tx, ema=average)
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    state = run(rampup.prepare_state(state, mesh), step, plan, mesh)
    assert float(jnp.abs(state.ema["in"]).sum()) > 0
    assert int(state.step) == 3


def test_optimizer_of_the_state_that_differs_is_refused():
    """A state that brings another optimizer than the step's is an error, not silently ignored (A5)."""
    mesh = mesh_of("one")
    plan = plan_for(mesh, "0:16")
    state = train_state.TrainState.create(apply_fn=None, params=new_params(mesh), tx=optax.adamw(1.0))
    step = rampup.train_step(loss_fn, optax.adamw(1e-5), plan, mesh)
    with pytest.raises(rampup.RampupError, match="tx"):
        run(rampup.prepare_state(state, mesh), step, plan, mesh, steps=1)


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_batch_stats_reach_the_loss(mesh_name):
    """The field `batch_stats` is carried through the loss like `mutable` (A5)."""
    mesh = mesh_of(mesh_name)
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    state = BatchStatsState.create(apply_fn=None, params=new_params(mesh), tx=tx, batch_stats={"count": jnp.zeros(())})

    def loss(p, b, k, batch_stats):
        return *loss_fn(p, b, k), {"count": batch_stats["count"] + 1}

    step = rampup.train_step(loss, tx, plan, mesh)
    state = run(rampup.prepare_state(state, mesh), step, plan, mesh)
    assert float(state.batch_stats["count"]) >= 3


def test_state_that_is_a_plain_dataclass():
    """A frozen dataclass with `step`, `params` and `opt_state` works without a `replace` method (B5)."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Plain:
        step: Any
        params: Any
        opt_state: Any
        best: Any = None

    mesh = mesh_of("one")
    plan, tx, params = plan_for(mesh, "0:16"), optax.sgd(0.1), new_params(mesh)
    state = Plain(step=0, params=params, opt_state=tx.init(params), best=jnp.float32(7))
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    state = run(rampup.prepare_state(state, mesh), step, plan, mesh)
    assert float(state.best) == 7


@pytest.mark.parametrize("mesh_name", ["one", "data"])
@pytest.mark.parametrize("make", [optax.contrib.prodigy, lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))])
def test_optimizers_whose_state_aliases_the_parameters(mesh_name, make):
    """Optimizers that keep the initial parameters in their state do not donate a buffer twice (B3)."""
    mesh = mesh_of(mesh_name)
    plan, tx = plan_for(mesh, "0:16"), make()
    state = rampup.create_state(new_params(mesh), tx, mesh)
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    assert int(run(state, step, plan, mesh).step) == 3


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_arrays_of_the_caller_survive(mesh_name):
    """The parameters that a state was created from are still there after a step (B3)."""
    mesh = mesh_of(mesh_name)
    plan, tx, params = plan_for(mesh, "0:16"), optax.sgd(0.1), new_params(mesh)
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    run(rampup.create_state(params, tx, mesh), step, plan, mesh)
    assert np.isfinite(np.asarray(params["in"])).all()


def test_state_survives_without_donation():
    """With `donate=False` the state given to a step can be used again (B3)."""
    mesh = mesh_of("one")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    step = rampup.train_step(loss_fn, tx, plan, mesh, donate=False)
    state = rampup.create_state(new_params(mesh), tx, mesh)
    batch = next(iter(rampup.step_batches(rows(), plan, mesh, stop=1)))
    first, _ = step(state, batch)
    second, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_float64_parameters(engine):
    """Both engines and the evaluation run in float64 (B5)."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        mesh = mesh_of("one")
        plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
        step = rampup.train_step(loss_fn, tx, plan, mesh, engine=engine)
        state = rampup.create_state(new_params(mesh, np.float64), step.tx, mesh)
        options = {} if engine == "fused" else {"chunk_size": 1}
        for batch in rampup.step_batches(rows(dtype=np.float64), plan, mesh, stop=2, **options):
            state, metrics = step(state, batch)
        assert metrics["loss"].dtype == jnp.float64
        assert rampup.EvalStep(loss_fn, mesh)(state, batch)[0].dtype == jnp.float64


def test_optimizers_that_want_the_loss():
    """An optimizer with extra arguments gets `value=loss` (B5)."""
    mesh = mesh_of("one")
    plan = plan_for(mesh, "0:16")
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    assert int(run(rampup.create_state(new_params(mesh), tx, mesh), step, plan, mesh).step) == 3


def test_integer_leaves_in_the_parameters():
    """Integer parameters, such as a quantized base model, are left as they are (B5)."""
    mesh = mesh_of("data")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    params = new_params(mesh) | {"base": jnp.arange(4, dtype=jnp.int8)}
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    state = run(rampup.create_state(params, tx, mesh), step, plan, mesh)
    assert state.params["base"].tolist() == [0, 1, 2, 3]


def test_disable_jit_runs_the_step_eagerly():
    """`jax.disable_jit` lets a user step through the loss (B5)."""
    mesh = mesh_of("one")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    state = rampup.create_state(new_params(mesh), tx, mesh)
    with jax.disable_jit():
        assert int(run(state, step, plan, mesh, steps=1).step) == 1


def test_batch_of_another_step_is_refused():
    """A state at step 3 that is given the batch of step 0 again is an error (B5)."""
    mesh = mesh_of("one")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    state = run(rampup.create_state(new_params(mesh), tx, mesh), step, plan, mesh)
    batch = next(iter(rampup.step_batches(rows(), plan, mesh, stop=1)))
    with pytest.raises(rampup.RampupError, match="step 3"):
        step(state, batch)


def test_plan_that_does_not_fit_the_mesh_is_refused():
    """A plan for another number of replicas than the mesh has is an error when the step is made (B5)."""
    with pytest.raises(rampup.RampupError, match="data_parallel_size"):
        rampup.train_step(loss_fn, optax.sgd(0.1), plan_for(mesh_of("one")), mesh_of("data"))
