"""Loops of one's own: other sources of batches, accumulation in a jitted step, frozen
weights, and states that do not fit.
"""

import dataclasses
import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from helpers import toy
from helpers.toy import (
    loss_fn,
    make_step,
    mesh_of,
    new_params,
    plain_loss_fn,
    plan_for,
    rows,
    start,
    train,
)

import rampup
from rampup.data.batches import BatchOptions
from rampup.errors import ConfigError, DataError, RampupError
from rampup.loop.checkpoint import CheckpointOptions, Checkpoints, find_checkpoint


def trained(step, mesh, batches):
    """Return the parameters after some batches, from the beginning."""
    return jax.device_get(
        toy.history(
            step, rampup.create_state(new_params(mesh), step.tx, mesh), batches
        )[0].params
    )


def check_equal(a, b):
    """Check that two trees are equal to rounding."""
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a, b
    )


def refilled(items):
    """Yield the same arrays again and again, filled with the next items."""
    buffer = jax.tree.map(np.array, items[0])
    for item in items:
        jax.tree.map(lambda x, new: np.copyto(x, new), buffer, item)
        yield buffer


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_streams_and_arrays_train_as_random_access_does(mesh_name):
    """A generator, a Grain IterDataset, batches of another size, buffers that are
    filled again, and arrays of a step.
    """
    mesh, data = mesh_of(mesh_name), rows()
    plan = plan_for(mesh, steps=6)
    step = make_step(loss_fn, optax.sgd(0.01), plan, mesh)
    dataset, eights = (
        grain.MapDataset.source(data).to_iter_dataset(),
        [toy.stacked(data[n : n + 8]) for n in range(0, 400, 8)],
    )
    expected = trained(step, mesh, step.batches(data))
    for batches in (
        step.stream(iter(data)),
        step.stream(dataset),
        step.stream(dataset.batch(24), batched=True),
        step.stream(refilled(data)),
        step.stream(refilled(eights), batched=True),
        (
            step.batch(toy.stacked([data[n] for n in plan.rows(number)]), step=number)
            for number in range(6)
        ),
    ):
        check_equal(trained(step, mesh, batches), expected)
    with pytest.raises(DataError, match="step 4 takes arrays of 32 rows"):
        step.batch(toy.stacked(data[:16]), step=4)


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_accumulate_in_a_jitted_step_of_ones_own(mesh_name):
    """`accumulate` without keys and shardings gives the parameters of `train_step`,
    with one compilation.
    """
    mesh = mesh_of(mesh_name)
    plan, tx = plan_for(mesh, steps=6), optax.sgd(0.01)
    state = rampup.prepare_state(toy.flax_state()(new_params(mesh), tx), mesh)

    @jax.jit
    def own_step(state, batch_KR, num_microbatches):
        sums = rampup.accumulate(
            plain_loss_fn, state.params, batch_KR, num_microbatches, mesh=mesh
        )
        return (
            state.apply_gradients(grads=sums.mean_grads(state.params)),
            sums.loss / sums.weight,
        )

    chunk_size = max(plan.max_microbatches.values())
    for batch in rampup.step_batches(
        rows(), plan, mesh, options=BatchOptions(chunk_size=chunk_size)
    ):
        state, _ = own_step(state, batch.chunks[0], batch.num_microbatches)
    assert own_step._cache_size() <= 2
    step = make_step(plain_loss_fn, tx, plan, mesh)
    check_equal(state.params, trained(step, mesh, step.batches(rows())))


def test_step_inside_jit_names_accumulate():
    """A TrainStep in a user's `jax.jit` is refused with the function to use there."""
    step, state = start()
    batch = next(step.batches(rows()))
    with pytest.raises(ConfigError, match=r"rampup\.accumulate"):
        jax.jit(lambda state: step(state, batch))(state)
    with pytest.raises(DataError, match=r"step\.batch\(arrays\)"):
        step(state, {"x": 1})
    with pytest.raises(ConfigError, match="prepare_state"):
        step(state.replace(step=0), batch)


def test_wrong_arguments_are_named():
    """Swapped arguments and an `nnx.Optimizer` are errors in words."""
    mesh, own = (
        mesh_of("one"),
        nnx.Optimizer(
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param
        ),
    )
    for words, *arguments in (
        ("check the order", optax.sgd(0.1), loss_fn),
        ("tx is a.* Optimizer.*tx is an optimizer of Optax", loss_fn, own),
    ):
        with pytest.raises(ConfigError, match=words):
            make_step(*arguments, plan_for(mesh), mesh)


def test_plan_beyond_int32_steps_is_refused():
    """A plan with more steps than a device can count is refused when the step is
    made.
    """
    plan = dataclasses.replace(plan_for(mesh_of("one")), total_steps=2**31)
    with pytest.raises(RampupError, match="int32"):
        make_step(loss_fn, optax.sgd(0.1), plan, mesh_of("one"))


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_dynamic_scale_skips_and_adapts(mesh_name):
    """A Flax DynamicScale scales a float16 loss, skips what overflows, and adapts."""

    def half_loss(params, batch, keys):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        loss, weight, aux = plain_loss_fn(
            half, jax.tree.map(lambda x: x.astype(jnp.float16), batch), keys
        )
        return loss.astype(jnp.float32), weight.astype(jnp.float32), aux

    scaled = toy.flax_state(
        toy.ScaledState,
        dynamic_scale=DynamicScale(scale=jnp.float32(2.0**20), growth_interval=3),
    )
    state, found = toy.history(
        *start(mesh_name, half_loss, optax.sgd(0.01), steps=16, state=scaled)
    )
    assert found[0]["skipped"]
    assert not all(metrics["skipped"] for metrics in found)
    assert float(state.dynamic_scale.scale) < 2.0**20
    assert int(state.step) == 16
    assert np.isfinite(found[-1]["grad_norm"])
    assert np.isfinite(state.params["in"]).all()


class LoRAModel(nnx.Module):
    """Two linear layers with LoRA, and what a model may have beside: statistics,
    dropout, sown values.
    """

    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(8, 64, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.LoRALinear(64, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        """Return as many numbers per row as it has."""
        hidden = nnx.relu(self.norm(self.hidden(x)))
        self.sow(nnx.Intermediate, "features", hidden)
        return self.out(self.dropout(hidden))


@pytest.mark.parametrize(
    ("wrt", "mesh_name"),
    [
        toy.slow(nnx.LoRAParam, "data"),
        (nnx.Param, "one"),
        toy.slow(nnx.LoRAParam, "one"),
        toy.slow(nnx.Param, "data"),
    ],
)
def test_split_model_trains_what_wrt_selects(mesh_name, wrt):
    """Only `wrt` is trained and accumulated; statistics, dropout and sown values
    work.
    """

    def model_loss(model, batch, keys):
        error = (model(batch["x"]) - batch["x"]) ** 2
        return (
            jnp.sum(error),
            error.size,
            {"features": jnp.sum(nnx.pop(model, nnx.Intermediate)["features"][0])},
        )

    mesh = mesh_of(mesh_name)
    plan, tx, model = (
        plan_for(mesh, "0:64 256:128", microbatch_size=8),
        optax.adam(0.05),
        LoRAModel(nnx.Rngs(0)),
    )
    model(jnp.ones((2, 8)))  # leaves a sown value in the model
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    mean = np.array(model.norm.mean[...])
    state, pure = rampup.split_model(model, model_loss, tx, mesh, wrt=wrt)
    step = make_step(pure, tx, plan, mesh)
    batches = list(step.batches(rows()))
    state, found = toy.history(step, state, batches)
    rampup.merge_model(model, state)
    assert found[-1]["loss"] < found[0]["loss"]
    assert step.num_compilations == 1
    assert not np.allclose(np.array(model.norm.mean[...]), mean)
    assert found[-1]["aux"]["features"] > 0
    same = jax.tree.map(
        lambda a, b: np.array_equal(a, b),
        before,
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )
    assert same["hidden"]["kernel"] == (wrt is nnx.LoRAParam)
    assert not same["hidden"]["lora"]["lora_b"]
    assert len(jax.tree.leaves(state.params)) == (4 if wrt is nnx.LoRAParam else 10)
    assert float(rampup.EvalStep(pure, mesh)(state, batches[-1])[1]) > 0
    # The model has arrays of its own, but for what no step can take: the frozen ones.
    jax.tree.map(lambda leaf: leaf.delete(), state.replace(frozen=None))
    assert np.isfinite(np.asarray(model(jnp.ones((2, 8))))).all()


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_field_of_ones_own_is_updated_once_per_step_and_saved(
    skip_nonfinite, tmp_path
):
    """With `multi_steps`, a moving average in `apply_gradients` moves once per
    optimizer step, as with `fused`.
    """

    class State(train_state.TrainState):
        ema: dict = None

        def apply_gradients(self, *, grads, **changes):
            new = super().apply_gradients(grads=grads, **changes)
            return new.replace(
                ema=jax.tree.map(lambda e, p: 0.5 * (e + p), self.ema, new.params)
            )

    ema = jax.tree.map(np.zeros_like, jax.device_get(new_params(mesh_of("one"))))
    data, states = [row | {"weight": np.float32(2)} for row in rows()], []
    for engine in ("fused", "multi_steps"):
        options = {
            "microbatch_size": 4,
            "steps": 4,
            "engine": engine,
            "skip_nonfinite": skip_nonfinite,
        }
        step, fresh = start(
            "one",
            plain_loss_fn,
            optax.sgd(0.01),
            state=toy.flax_state(State, ema=ema),
            **options,
        )
        state, _ = train(step, rampup.prepare_state(fresh, mesh_of("one")), data=data)
        states.append((state.params, state.ema, int(state.step)))
    check_equal(*states)
    assert float(jnp.abs(state.ema["in"]).sum()) > 0
    with Checkpoints(
        tmp_path, CheckpointOptions(async_checkpointing=False)
    ) as checkpoints:
        checkpoints.save(4, state, {})
        restored = checkpoints.restore(find_checkpoint(tmp_path), fresh)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored.tx is fresh.tx


def test_batch_of_another_plan_is_refused():
    """A batch with the layout of the step's plan, but the size that another plan has at
    this step.
    """
    step, state = start(schedule="0:16 48:32", steps=4)
    other, again = (
        start(schedule="0:16 16:32", steps=4)[0],
        start(schedule="0:16 48:32", steps=4)[0],
    )
    first, second = other.batches(rows(), stop=2)
    with pytest.raises(
        DataError, match="of another plan: phase 0, from sample 0, with 16 samples"
    ):
        step(state, first)
    with pytest.raises(
        DataError, match="of another plan: phase 1, from sample 16, with 32 samples"
    ):
        step(state.replace(step=state.step + 1), second)
    # The same plan, made again, is the same.
    state, _ = step(state, next(again.batches(rows())))
    assert int(state.step) == 1


@pytest.mark.parametrize("mesh_name", ["one", "data", "data_tensor", "fsdp"])
@pytest.mark.parametrize(("number", "size"), [(300, 64), (64, 64), (5, 16), (13, 8)])
def test_an_evaluation_counts_every_row_once(mesh_name, number, size):
    """Batches that do not divide the rows evaluate all of them, whatever is left over,
    and no row twice.
    """
    mesh = mesh_of(mesh_name)
    evaluate, state = (
        rampup.EvalStep(plain_loss_fn, mesh),
        start(mesh_name, plain_loss_fn)[1],
    )
    sums = [evaluate(state, batch) for batch in evaluate.batches(rows(number), size)]
    expected = plain_loss_fn(
        new_params(mesh_of("one")), toy.stacked(rows(number)), None
    )
    np.testing.assert_allclose(
        np.sum(jax.device_get(sums), axis=0), jax.device_get(expected[:2]), rtol=1e-5
    )


def test_an_evaluation_of_whole_batches_leaves_one_batch_over():
    """A loss that sees whole batches sees the rows that are left over together; a batch
    that cannot be shared is refused.
    """
    mesh, seen = (
        mesh_of("data"),
        lambda params, batch, keys: (jnp.float32(len(keys)) ** 2, len(keys), {}),
    )
    loss = rampup.AccumulatedLoss(seen, whole_batch=True)
    evaluate, state = rampup.EvalStep(loss, mesh), start("data")[1]
    sums = [evaluate(state, batch) for batch in evaluate.batches(rows(45), 16)]
    assert [(int(loss), int(weight)) for loss, weight in sums] == [
        (256, 16),
        (256, 16),
        (169, 13),
    ]
    with pytest.raises(
        rampup.errors.BatchDivisibilityError,
        match=r"batch_size=12 must be a multiple of data \* fsdp = 8",
    ):
        next(evaluate.batches(rows(45), 12))
