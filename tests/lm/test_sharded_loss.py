"""Tests of the language model's loss on sharded meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import campaign, make_step, plan_for

from rampup import create_state, make_mesh
from rampup.engine.accumulate import AccumulatedLoss
from rampup.engine.evaluation import EvalStep
from rampup.errors import ConfigError
from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes

SMALL = LanguageModel(
    num_layers=2, width=32, mlp_dim=48, num_heads=4, num_kv_heads=2, vocab_size=64
)
NUM_ROWS = 32


def rows(length=12):
    """Return rows of random tokens, of unequal length."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, length + 1, NUM_ROWS).astype(np.int32)
    return [
        {"tokens": rng.integers(0, 64, length + 1).astype(np.uint8), "length": size}
        for size in sizes
    ]


def run_step(
    model, axes, *, loss=None, devices=None, evaluates=False, tx=None, **options
):
    """Return loss, gradient norm, new parameters and, on request, the evaluation loss
    of one step, by default of SGD.
    """
    mesh = make_mesh(axes, devices)
    model = model.on(mesh)
    sizes = {
        "num_stages": axes.pipeline,
        "microbatch_size": NUM_ROWS // (axes.data * axes.fsdp * 2),
    }
    plan = plan_for(mesh, f"0:{NUM_ROWS}", steps=1, **sizes)
    loss = loss(model, mesh) if loss else model.sharded_loss(mesh)
    step = make_step(loss, tx or optax.sgd(0.5), plan, mesh, **options)
    params = jax.device_put(
        jax.jit(SMALL.init)(jax.random.key(0)), model.shardings(mesh)
    )
    state = create_state(
        params,
        step.tx,
        mesh,
        shard_optimizer_over_data=options.get("shard_optimizer_over_data", False),
    )
    batch = next(iter(step.batches(rows())))
    evaluated = [EvalStep(loss, mesh)(state, batch)] if evaluates else []
    new, metrics = step(state, batch)
    return jax.device_get(
        (metrics["loss"], metrics["grad_norm"], new.params, *evaluated)
    )


@functools.cache
def reference():
    """Return the results of one device, with every feature off."""
    return run_step(SMALL, MeshAxes(), devices=jax.devices()[:1], evaluates=True)


def assert_same(found, expected, tolerance=2e-5):
    """Compare loss, gradients and new parameters."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance / 4
        ),
        found,
        expected,
    )


pytestmark = pytest.mark.slow
ZERO1 = {"shard_optimizer_over_data": True}


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        campaign(MeshAxes(fsdp=8), {}),
        (MeshAxes(data=2, fsdp=2, tensor=2), None),
        campaign(MeshAxes(data=2, fsdp=4), {"num_vocab_tiling": 4}),
        (MeshAxes(data=2, fsdp=2, pipeline=2), {"num_vocab_tiling": 4}),
        (MeshAxes(data=4, tensor=2), {"num_vocab_tiling": 4}),
        (
            MeshAxes(data=2, fsdp=2, tensor=2),
            {"num_vocab_tiling": 4, "remat_policy": "full"},
        ),
    ],
)
def test_sharded_loss_is_that_of_one_device(axes, changes):
    """Whatever gathers the weights, loss, gradients and, without stages, evaluation are
    those of one device, to 2e-5.
    """
    loss, staged = None, axes.pipeline > 1
    if staged or changes is None:

        def loss(model, mesh):
            return model.pipelined(1) if staged else AccumulatedLoss(model.loss)

    found = run_step(
        dataclasses.replace(SMALL, **changes or {}),
        axes,
        loss=loss,
        evaluates=not staged,
    )
    assert_same(found, reference()[: len(found)])


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("reduction_dtype", MeshAxes(data=8), {}),
        ("reduction_dtype", MeshAxes(data=4, tensor=2), {}),
        ("accumulator_dtype", MeshAxes(data=8), ZERO1),
        ("accumulator_dtype", MeshAxes(fsdp=4, data=2), {}),
        ("accumulator_dtype", MeshAxes(data=2, fsdp=2, pipeline=2), ZERO1),
    ],
)
def test_gradients_exchanged_or_accumulated_in_bfloat16_are_close(name, axes, options):
    """Sums in bfloat16 round the gradients, to 1e-2, and not the loss: with ZeRO-1,
    fsdp and a pipeline too.
    """

    def loss(model, mesh):
        loss = (
            AccumulatedLoss(model.loss) if axes.fsdp == 1 else model.sharded_loss(mesh)
        )
        return dataclasses.replace(
            model.pipelined(1) if axes.pipeline > 1 else loss, **{name: jnp.bfloat16}
        )

    found = run_step(SMALL, axes, loss=loss, **options)
    assert found[0] == pytest.approx(reference()[0], rel=1e-6)
    assert found[1] == pytest.approx(reference()[1], rel=1e-2)
    assert found[1] != pytest.approx(reference()[1], rel=1e-6)
    assert_same(found[2], reference()[2], 1e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(found[2])} == {np.dtype("float32")}


def test_sharded_loss_refuses_scattered_gradients():
    """Parts of the optimizer over the replicas need whole parameters; the error names
    the key.
    """
    with pytest.raises(ConfigError, match="whole parameters") as caught:
        run_step(
            SMALL,
            MeshAxes(data=2, fsdp=4),
            tx=optax.adam(0.5),  # SGD has no state, and so no parts
            shard_optimizer_over_data=True,
        )
    assert caught.value.key == "shard_optimizer_over_data"
