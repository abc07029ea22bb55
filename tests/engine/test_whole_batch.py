"""Losses in which rows interact, with `whole_batch`: every step of a ramp is that of
the big batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import toy
from helpers.toy import make_step
from jax.sharding import PartitionSpec as P

import rampup
from rampup.data.batches import BatchOptions
from rampup.engine.accumulate import AccumulatedLoss
from rampup.plan import BatchRamp, BatchSplitter, RampPlan

SCHEDULE, SIZES = "0:16 32:32 96:64", (16, 16, 32, 32, 64, 64)
MESHES = [
    "data_fsdp_tensor",
    *(toy.slow(name) for name in ("one", "data", "data_tensor", "fsdp", "four")),
]
rng = np.random.default_rng(0)
MIX = rng.normal(size=(8, 8)).astype(np.float32)
LENGTHS = rng.integers(1, 8, 256)
ROWS = [
    {"x": x, "y": x @ MIX, "n": np.int32(n)}
    for x, n in zip(rng.normal(size=(256, 8)).astype(np.float32), LENGTHS, strict=True)
]
START = {
    "in": (rng.normal(size=(8, 16)) * 0.3).astype(np.float32),
    "out": (rng.normal(size=(16, 8)) * 0.3).astype(np.float32),
}


def contrastive(params, batch):
    """Return the loss of pairs, each against all other rows of the batch."""
    both = jnp.tanh(batch["x"] @ params["in"]) @ params["out"], batch["y"]
    a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in both)
    logits = 7.0 * a @ b.T
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.arange(len(a))
    ).mean()


def two_means(params, batch):
    """Return a mean over tokens plus a mean over rows."""
    y = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    counts = jnp.arange(8) < batch["n"][:, None]
    return jnp.sum(counts * (y - batch["x"]) ** 2) / jnp.sum(counts) + jnp.mean(
        jnp.sum(y, axis=-1) ** 2
    )


class Normalized(nnx.Module):
    """A network with normalization over the batch."""

    def __init__(self, axis_name=None):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, rngs=rngs)
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        """Return a row for each row."""
        return self.b(nnx.relu(self.norm(self.a(x))))


def normalized(model, batch):
    """Return the mean error of a network."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def as_loss_fn(mean):
    """Return a loss function of `train_step` for a mean over the batch."""
    return lambda params, batch, keys: (mean(params, batch) * len(keys), len(keys), {})


def mesh_of(name):
    """Return a mesh; `four` has four devices on its data axis."""
    return (
        rampup.make_mesh(devices=jax.devices()[:4])
        if name == "four"
        else toy.mesh_of(name)
    )


def plan_of(mesh, **splitter):
    """Return a plan whose own batches are many microbatches."""
    d = mesh.shape["data"] * mesh.shape["fsdp"]
    rule = BatchSplitter(data_parallel_size=d, **splitter)
    return RampPlan(
        ramp=BatchRamp.from_schedule(SCHEDULE),
        splitter=rule,
        num_devices=mesh.size,
        total_steps=len(SIZES),
    )


def big_batches(mean, tx):
    """Return the losses and the last parameters of a plain loop over whole batches, on
    one device.
    """
    is_model = mean is normalized
    model = Normalized() if is_model else START
    graph, params, rest = (
        nnx.split(model, nnx.Param, ...) if is_model else (None, model, None)
    )

    @jax.jit
    def step(params, rest, opt_state, batch):
        def loss(params):
            if not is_model:
                return mean(params, batch), rest
            merged = nnx.merge(graph, params, jax.tree.map(lambda x: x, rest))
            return mean(merged, batch), nnx.split(merged, nnx.Param, ...)[-1]

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new, opt_state, value

    opt_state, used, losses = tx.init(params), 0, []
    for size in SIZES:
        params, rest, opt_state, loss = step(
            params, rest, opt_state, toy.stacked(ROWS[used : used + size])
        )
        used += size
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize("mean", [contrastive, two_means, normalized])
@pytest.mark.parametrize("name", MESHES)
def test_every_step_of_a_ramp_is_that_of_the_big_batch(name, mean):
    """A plan of any microbatches, a state made without options, and `step.batches`:
    losses and parameters within 2e-5.
    """
    # Not Adam: the bias before a normalization has no gradient but rounding, which Adam
    # would make as large as any other.
    mesh, tx = mesh_of(name), optax.sgd(0.1, momentum=0.9)
    if mean is normalized:
        # Without collectives: the statistics are over all rows already.
        state, loss_fn = rampup.split_model(Normalized(), as_loss_fn(mean), tx, mesh)
    else:
        state, loss_fn = rampup.create_state(START, tx, mesh), as_loss_fn(mean)
    plan = plan_of(mesh, microbatch_size=1)
    step = make_step(loss_fn, tx, plan, mesh, whole_batch=True)
    state, metrics = toy.history(step, state, step.batches(ROWS))
    losses, params = big_batches(mean, tx)
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, atol=2e-5)
    for found, expected in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert step.num_compilations == 3


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit():
    """A new step that goes on with the state after three steps, ZeRO-1 included, ends
    in the same bits.
    """
    mesh, tx = toy.mesh_of("data"), optax.adam(1e-2)
    options = {"shard_optimizer_over_data": True}
    ends = []
    for stops in ((6,), (3, 6)):
        state = rampup.create_state(START, tx, mesh, **options)
        for stop in stops:
            step = make_step(
                as_loss_fn(contrastive),
                tx,
                plan_of(mesh),
                mesh,
                whole_batch=True,
                **options,
            )
            state, metrics = toy.history(
                step, state, step.batches(ROWS, state.step, stop)
            )
        ends.append((jax.device_get(state.params), metrics[-1]["loss"]))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    np.testing.assert_allclose(
        ends[0][1], big_batches(contrastive, tx)[0][-1], atol=2e-5
    )


def test_accumulate_and_evaluation_see_the_whole_batch():
    """In a jitted step of one's own, and in an `EvalStep`: a batch of one microbatch,
    on all devices; others are refused.
    """
    mesh = toy.mesh_of("data_fsdp_tensor")
    state, loss_fn = (
        rampup.create_state(START, optax.sgd(0.1), mesh),
        as_loss_fn(two_means),
    )
    plan = plan_of(mesh, microbatch_size=2)
    batch = next(rampup.step_batches(ROWS, plan.with_whole_batches(), mesh))
    many = next(
        rampup.step_batches(ROWS, plan, mesh, options=BatchOptions(chunk_size=4))
    )
    value, grads = jax.jit(jax.value_and_grad(two_means))(START, toy.stacked(ROWS[:16]))

    @jax.jit
    def run(params, buffer, number):
        keys = jnp.zeros(buffer["n"].shape)
        sums = rampup.accumulate(
            AccumulatedLoss(loss_fn, whole_batch=True),
            params,
            buffer,
            number,
            keys,
            mesh=mesh,
        )
        return sums.loss / sums.weight, sums.mean_grads()

    found = run(state.params, batch.chunks[0], batch.num_microbatches)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, (value, grads)
    )
    with pytest.raises(TypeError, match=r"'whole_batch'; give rampup.AccumulatedLoss"):
        rampup.EvalStep(loss_fn, mesh, whole_batch=True)
    evaluate = rampup.EvalStep(AccumulatedLoss(loss_fn, whole_batch=True), mesh)
    loss, weight = evaluate(state, batch)
    np.testing.assert_allclose(loss / weight, value, atol=2e-5)
    for take in (
        lambda: run(state.params, many.chunks[0], many.num_microbatches),
        lambda: evaluate(state, many),
    ):
        with pytest.raises(
            rampup.errors.ConfigError, match="has room for 4; make its batches"
        ):
            take()


def test_what_cannot_see_a_whole_batch_is_refused():
    """Accumulation, shapes of an earlier phase, replicas by name, measured noise,
    losses that split rows, and other batches.
    """
    mesh, tx, loss_fn = toy.mesh_of("data"), optax.sgd(0.1), as_loss_fn(contrastive)
    replicas = rampup.BatchAxes(replica=("data",), rows=("data", "fsdp"))
    cases = {
        "needs gradient_accumulation_steps=1, not 2": {
            "plan": plan_of(mesh, gradient_accumulation_steps=2)
        },
        "tx=multi_steps and whole batches": {"engine": "multi_steps"},
        "whole batches and measure_gradient_noise": {"measure_gradient_noise": True},
        r"give BatchAxes\(replica=\(\), rows=": {"batch_axes": replicas},
        "sees the rows of one device": {
            "loss_fn": AccumulatedLoss(loss_fn, param_shardings={})
        },
        "PipelinedLoss runs microbatches by itself": {
            "loss_fn": rampup.PipelinedLoss(first=loss_fn, stage=loss_fn, last=loss_fn)
        },
    }
    for words, changes in cases.items():
        args = {
            "loss_fn": loss_fn,
            "tx": tx,
            "plan": plan_of(mesh),
            "mesh": mesh,
            "whole_batch": True,
        } | changes
        with pytest.raises(rampup.errors.ConfigError, match=words):
            make_step(**args)
    plan = plan_of(mesh, microbatch_size=1)
    step = make_step(loss_fn, tx, plan, mesh, whole_batch=True)
    with pytest.raises(rampup.errors.DataError, match="take its own batches"):
        step(
            rampup.create_state(START, tx, mesh),
            next(rampup.step_batches(ROWS, plan, mesh)),
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", ["data_fsdp_tensor", "data", "data_fsdp"])
def test_a_loss_that_spreads_rows_over_the_replicas_itself_is_compiled(mesh_name):
    """A `jax.shard_map` over the axes of the replicas is refused, by rampup or by JAX
    with a note, with the option with which it trains as on one device, and reduces per
    microbatch.
    """
    mesh = (
        rampup.make_mesh(rampup.MeshAxes(data=4, fsdp=2))
        if mesh_name == "data_fsdp"
        else toy.mesh_of(mesh_name)
    )
    # A replica has two rows of a microbatch of one. On fewer rows than devices, the
    # error is JAX's own.
    size = 2 if mesh_name == "data_fsdp_tensor" else 1
    plan, tx = plan_of(mesh, microbatch_size=size), optax.sgd(0.1)

    def loss_fn(params, batch, keys):
        def kernel(params, x):
            error = jnp.tanh(x @ params["in"]) @ params["out"] - x
            return jax.lax.psum(jnp.sum(error**2), ("data", "fsdp"))

        spread = jax.shard_map(
            kernel,
            mesh=mesh,
            in_specs=(P(), P(("data", "fsdp"))),
            out_specs=P(),
            check_vma=False,
        )
        return spread(params, batch["x"]), batch["x"].size, {}

    step = make_step(loss_fn, tx, plan, mesh)
    state = rampup.create_state(START, tx, mesh)
    with pytest.raises(ValueError, match="reduce_once=False"):
        toy.history(step, state, step.batches(ROWS))
    step = make_step(loss_fn, tx, plan, mesh, reduce_once=False)
    state, metrics = toy.history(step, state, step.batches(ROWS))
    losses, params = big_batches(
        lambda p, b: jnp.mean((jnp.tanh(b["x"] @ p["in"]) @ p["out"] - b["x"]) ** 2), tx
    )
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, atol=2e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), state.params, params
    )
    assert not rampup.contrib.lab.inspect(
        step, state, next(step.batches(ROWS))
    ).reduces_once


def test_an_error_of_the_loss_itself_is_raised_as_it_is():
    """What cannot be traced by the compiler's way either is not the fault of the
    replicas.
    """
    step, state = toy.start("data", lambda params, batch, keys: batch["x"] @ batch["x"])
    with pytest.raises(Exception, match="dot_general requires contracting dimensions"):
        toy.history(step, state)


def test_a_shard_map_beside_collectives_over_the_rows_is_refused():
    """Both would name the same axis, and the gradient of the kernel would lack the
    other devices' part; alone, each runs.
    """
    mesh = toy.mesh_of("data")

    def kernel(params, x):
        specs = {
            "in_specs": (P(), P("data")),
            "out_specs": P("data"),
            "check_vma": False,
        }
        inner = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            lambda w, x: jnp.tanh(x @ w), mesh=inner if inner.shape else mesh, **specs
        )(params["w"], x)

    def both(params, batch, keys):
        return jax.lax.pmean(jnp.sum(kernel(params, batch["x"])), "data"), len(keys), {}

    def alone(params, batch, keys):
        return jnp.sum(kernel(params, batch["x"])), len(keys), {}

    rows, params = toy.stacked(ROWS[:16]), {"w": START["in"][:, :4]}
    plan, tx = plan_of(mesh, microbatch_size=1), optax.sgd(1.0)
    step = make_step(alone, tx, plan, mesh, whole_batch=True)
    state, _ = step(rampup.create_state(params, tx, mesh), step.batch(rows))
    expected = jax.grad(lambda w: jnp.mean(jnp.sum(jnp.tanh(rows["x"] @ w), axis=1)))(
        params["w"]
    )
    np.testing.assert_allclose(
        params["w"] - np.asarray(state.params["w"]), expected, rtol=1e-5, atol=1e-6
    )
    step = make_step(both, tx, plan, mesh, whole_batch=True)
    with pytest.raises(NameError, match="data"):
        step(rampup.create_state(params, tx, mesh), step.batch(rows))
