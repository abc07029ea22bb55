"""Tests of rampup.engine.nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import toy
from helpers.toy import make_step

import rampup
from rampup import split_model, step_batches


def loss_fn(model, batch, rngs):
    """Squared error, weighted."""
    error = jnp.sum((model(batch["x"]) - batch["x"]) ** 2, axis=-1)
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {}


def test_split_model_equals_a_pure_function():
    """Without statistics and dropout, NNX gives the losses of the same model written as
    a pure function.
    """
    mesh = toy.mesh_of("data")
    plan, tx = toy.plan_for(mesh), optax.sgd(0.01)
    model = nnx.Linear(toy.WIDTH, toy.WIDTH, rngs=nnx.Rngs(0))
    params = {
        "kernel": jnp.array(model.kernel[...]),
        "bias": jnp.array(model.bias[...]),
    }

    def plain(params, batch, rngs):
        return loss_fn(lambda x: x @ params["kernel"] + params["bias"], batch, rngs)

    state, pure = split_model(model, loss_fn, tx, mesh)
    other = rampup.create_state(params, tx, mesh)
    batches = list(step_batches(toy.rows(), plan, mesh))
    _, found = toy.history(make_step(pure, tx, plan, mesh), state, batches)
    _, expected = toy.history(make_step(plain, tx, plan, mesh), other, batches)
    np.testing.assert_allclose(
        [m["loss"] for m in found], [m["loss"] for m in expected], rtol=1e-6
    )
    model(jnp.ones((1, toy.WIDTH)))


def test_split_model_seeds_stacked_layers():
    """Layers that are created with `nnx.vmap` and applied with `nnx.scan` have one
    random stream each, and train.
    """

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return nnx.Sequential(
            nnx.Linear(toy.WIDTH, toy.WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply(x, layer):
        return x + layer(x)

    mesh = toy.mesh_of("one")
    plan, tx = toy.plan_for(mesh, steps=2), optax.sgd(0.01)

    def stacked_loss(layers, batch, rngs):
        return loss_fn(lambda x: apply(x, layers), batch, rngs)

    state, pure = split_model(create(nnx.Rngs(0)), stacked_loss, tx, mesh)
    _, metrics = toy.train(make_step(pure, tx, plan, mesh), state)
    assert np.isfinite(float(metrics["loss"]))


def test_split_model_takes_the_options_of_create_state():
    """The optimizer's state is scattered over the replicas, over axes of the user's
    names; a later state without it is refused.
    """
    mesh = jax.make_mesh(
        (4, 2), ("dp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    options = {
        "batch_axes": rampup.BatchAxes(replica=("dp",), rows=("dp",)),
        "shard_optimizer_over_data": True,
    }
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(16),
        splitter=rampup.BatchSplitter(data_parallel_size=4),
        num_devices=8,
        total_steps=2,
    )
    tx = optax.adam(0.01)
    state, pure = split_model(
        nnx.Linear(toy.WIDTH, toy.WIDTH, rngs=nnx.Rngs(0)), loss_fn, tx, mesh, **options
    )
    (kernel,) = (
        leaf for leaf in jax.tree.leaves(state.opt_state[0].mu) if leaf.ndim == 2
    )
    assert "dp" in str(kernel.sharding.spec)
    step = make_step(pure, tx, plan, mesh, **options)
    assert int(toy.train(step, state)[0].step) == 2
    with pytest.raises(ValueError, match="shardings"):
        toy.train(
            step,
            split_model(
                nnx.Linear(toy.WIDTH, toy.WIDTH, rngs=nnx.Rngs(0)), loss_fn, tx, mesh
            )[0],
        )


def test_split_model_refuses_a_model_with_nothing_to_train():
    """A filter that fits no variable would train nothing."""
    with pytest.raises(rampup.errors.ConfigError, match=r"no variables of wrt=.*LoRA"):
        split_model(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            loss_fn,
            optax.sgd(0.1),
            toy.mesh_of("one"),
            wrt=nnx.LoRAParam,
        )


class Wrapped(nnx.Module):
    """A linear layer under another name."""

    def __init__(self):
        self.layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Wrapped, "model of shape None"),
        (lambda: nnx.Linear(2, 5, rngs=nnx.Rngs(0)), r"model of shape \(5,\)"),
        (
            lambda: nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)),
            "bias.* of shape .* model of shape None",
        ),
    ],
)
def test_merge_model_refuses_another_model(other, words):
    """NNX itself adds variables, and gives those that are there other shapes."""
    state, _ = split_model(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)), loss_fn, optax.sgd(0.1), toy.mesh_of("one")
    )
    model = other()
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(rampup.errors.ConfigError, match=words):
        rampup.merge_model(model, state)
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_merge_model_writes_what_was_frozen():
    """A new model of other weights is that of the state, also where nothing trained."""
    one = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(0))
    other = nnx.LoRALinear(2, 2, lora_rank=1, rngs=nnx.Rngs(1))
    tx, mesh = optax.sgd(0.1), toy.mesh_of("one")
    state, _ = split_model(one, loss_fn, tx, mesh, wrt=nnx.LoRAParam)
    rampup.merge_model(other, state)
    np.testing.assert_array_equal(other(jnp.ones((1, 2))), one(jnp.ones((1, 2))))
    # The frozen arrays are shared and the trained ones copied.
    shared = other.kernel[...].unsafe_buffer_pointer()
    assert shared == state.frozen["kernel"][...].unsafe_buffer_pointer()
    mine = other.lora.lora_a[...].unsafe_buffer_pointer()
    assert mine != state.params["lora"]["lora_a"][...].unsafe_buffer_pointer()
    with pytest.raises(rampup.errors.ConfigError, match="no training state"):
        rampup.merge_model(state, one)


def test_split_model_refuses_a_loss_function_without_keys():
    """At once, and in words."""
    with pytest.raises(
        rampup.errors.ConfigError, match="cannot be called with 3 arguments"
    ):
        split_model(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            lambda model, batch: 0,
            optax.sgd(0.1),
            toy.mesh_of("one"),
        )
