"""A training state of one's own: subclasses of Flax's TrainState, aliased buffers, and what a caller keeps."""

import dataclasses
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from helpers.toy import loss_fn, mesh_of, new_params, plan_for, rows

import rampup
from rampup.lm.transformer import LanguageModel
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan
from rampup.run.mesh import make_mesh


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


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_a_maximum_that_starts_at_infinity_skips_no_step(engine):
    """With `skip_nonfinite`, what was infinite before a step is no reason to skip it; what becomes so is (B5)."""
    mesh, tx = mesh_of("one"), optax.sgd(0.01)
    plan = plan_for(mesh, "0:16", steps=3)

    def loss(params, batch, keys, mutable):
        bad = jnp.where(jnp.any(batch["id"] == 20), jnp.inf, 0.0)
        return *loss_fn(params, batch, keys), {"maximum": mutable["maximum"], "sum": mutable["sum"] + bad}

    step = rampup.train_step(loss, tx, plan, mesh, engine=engine, skip_nonfinite=True)
    carried = {"maximum": jnp.float32(-jnp.inf), "sum": jnp.float32(0)}
    state, skipped = rampup.create_state(new_params(mesh), step.tx, mesh, mutable=carried), []
    for batch in step.batches(rows()):
        state, metrics = step(state, batch)
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [False, True, False]
    assert float(state.mutable["sum"]) == 0


MODEL = LanguageModel(num_layers=2, width=16, mlp_dim=16, num_heads=2, num_kv_heads=1, vocab_size=32)
init = jax.jit(MODEL.init)


def run_pipeline(num_stages, **fields):
    """Return losses and parameters of some steps with a state that has further fields, on two replicas with stages."""
    axes = MeshAxes(data=2, pipeline=num_stages)
    mesh = make_mesh(axes, jax.devices()[: 2 * num_stages])
    splitter = BatchSplitter(data_parallel_size=2, num_stages=num_stages, microbatch_size=2)
    plan = RampPlan(ramp=BatchRamp.from_schedule("0:8 16:16"), splitter=splitter, num_devices=mesh.size, total_steps=5)
    model, tx = MODEL.on(mesh), optax.sgd(0.3)
    params = jax.device_put(init(jax.random.key(0)), model.shardings(mesh))
    state = ScaledState(step=0, params=params, opt_state=tx.init(params), **fields)
    step = rampup.train_step(model.pipelined(1) if num_stages > 1 else model.loss, tx, plan, mesh)
    rng, losses = np.random.default_rng(0), []
    data = [{"tokens": rng.integers(0, 32, 9).astype(np.uint8), "length": np.int32(n % 8 + 1)} for n in range(64)]
    state = rampup.prepare_state(state, mesh)
    for batch in step.batches(data):
        state, metrics = step(state, batch)
        losses.append([float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics.get("skipped", 0))])
    return losses, jax.device_get((state.params, state.dynamic_scale))


@flax.struct.dataclass
class ScaledState:
    """A state with a loss scale and frozen arrays."""

    step: Any
    params: Any
    opt_state: Any
    dynamic_scale: Any = None
    frozen: Any = None


@pytest.mark.slow
def test_dynamic_scale_works_with_pipeline_stages():
    """Losses, skipped steps, the scale and the parameters are those without a pipeline, to 1e-6 (A5)."""
    scale = DynamicScale(scale=jnp.float32(2.0**122), growth_interval=2, backoff_factor=2**-8)  # The first steps overflow.
    expected, found = run_pipeline(1, dynamic_scale=scale), run_pipeline(2, dynamic_scale=scale)
    assert [row[2] for row in found[0]] == [row[2] for row in expected[0]]
    assert 0 < sum(row[2] for row in found[0]) < 5
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[1], expected[1])


def test_frozen_integer_and_carried_values_with_pipeline_stages_are_refused():
    """The error comes before anything is computed, and names the field, the loss and what to do (A5)."""
    with pytest.raises(rampup.ConfigError, match=r"`frozen`, which a PipelinedLoss .* optax\.transforms\.freeze"):
        run_pipeline(2, frozen={"base": jnp.zeros(2)})
    mesh = make_mesh(MeshAxes(pipeline=2), jax.devices()[:2])
    splitter = BatchSplitter(data_parallel_size=1, num_stages=2)
    plan = RampPlan(ramp=BatchRamp.constant(8), splitter=splitter, num_devices=2, total_steps=5)
    params = init(jax.random.key(0)) | {"count": jnp.zeros(2, jnp.int32)}
    step = rampup.train_step(MODEL.on(mesh).pipelined(1), optax.sgd(0.1), plan, mesh)
    data = [{"tokens": np.zeros(9, np.uint8), "length": np.int32(8)}] * 8
    with pytest.raises(rampup.ConfigError, match="integer parameters, which a PipelinedLoss"):
        step(rampup.create_state(params, step.tx, mesh), next(step.batches(data)))
    carried = rampup.create_state(init(jax.random.key(0)), step.tx, mesh, mutable={"count": jnp.zeros(())})
    with pytest.raises(rampup.ConfigError, match="`mutable`, which a PipelinedLoss cannot"):
        step(carried, next(step.batches(data)))


def test_parameters_whose_gradients_are_new_values_are_refused():
    """The scales of Flax's float8 layers cannot be summed over microbatches, so they would be wrong without an error."""
    mesh = mesh_of("one")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    params = {"params": new_params(mesh), "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    state = rampup.create_state(params, tx, mesh)
    step = rampup.train_step(lambda p, *args: loss_fn(p["params"], *args), tx, plan, mesh)
    with pytest.raises(rampup.ConfigError, match=r"takes its gradients as new values.*rampup\.multi_steps"):
        run(state, step, plan, mesh)


def test_empty_arrays_of_the_caller_survive():
    """Arrays without elements are copied too, so that a step does not donate the caller's."""
    mesh = mesh_of("data")
    plan, tx = plan_for(mesh, "0:16"), optax.sgd(0.1)
    params = new_params(mesh) | {"empty": jnp.zeros((0, 3))}
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    run(rampup.create_state(params, tx, mesh), step, plan, mesh)
    assert not params["empty"].is_deleted()
