"""A loss of one's own inside the manual region of a training step: callbacks, kernels
and sharding constraints.
"""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy import loss_fn, mesh_of, start, train
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.engine.mesh import auto_view, own_constraints, without_manual_axes


def one_step(loss, mesh_name="data", **options):
    """Return the metrics of one step with a loss function."""
    return train(*start(mesh_name, loss, **options), steps=1)[1]


def test_debug_print_and_callbacks_in_the_loss(capfd):
    """`jax.debug.print` and callbacks run inside the loss on a mesh with several
    replicas.
    """
    seen = []

    def loss(p, b, k):
        total, weight, aux = loss_fn(p, b, k)
        jax.debug.print("loss {x}", x=total)
        jax.debug.callback(lambda x: seen.append(float(x)), total)
        doubled = jax.pure_callback(
            lambda x: np.float32(2 * x),
            jax.ShapeDtypeStruct((), np.float32),
            jax.lax.stop_gradient(total),
        )
        return total, weight, aux | {"doubled": doubled}

    metrics = one_step(loss)
    jax.effects_barrier()
    assert len(seen) >= 8
    assert "loss " in capfd.readouterr().out
    np.testing.assert_allclose(
        metrics["aux"]["doubled"], 2 * metrics["loss"] * metrics["weight"], rtol=1e-6
    )


def constrained_by_name(mesh, x):
    """Constrain with a NamedSharding."""
    return jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
    )


def constrained_by_spec(mesh, x):
    """Constrain with a PartitionSpec, in the context of the mesh."""
    with mesh:
        return jax.lax.with_sharding_constraint(
            {"x": x}, PartitionSpec(("data", "fsdp"), "tensor")
        )["x"]


def constrained_by_flax(mesh, x):
    """Constrain with Flax's logical axes, as MaxText does."""
    with nn.logical_axis_rules([("batch", ("data", "fsdp")), ("width", "tensor")]):
        return nn.with_logical_constraint(x, ("batch", "width"), mesh=mesh)


@pytest.mark.parametrize(
    "constrain", [constrained_by_name, constrained_by_spec, constrained_by_flax]
)
@pytest.mark.parametrize("mesh_name", ["data", "data_fsdp_tensor", "fsdp"])
def test_sharding_constraint_over_the_data_axis_in_the_loss(mesh_name, constrain):
    """A loss that constrains its activations over the data axis, as MaxText's models
    do, runs and agrees.
    """
    mesh = mesh_of(mesh_name)
    original = jax.lax.with_sharding_constraint

    def loss(p, b, k):
        return loss_fn(p, b | {"x": constrain(mesh, b["x"])}, k)

    expected = one_step(loss_fn, mesh_name)
    np.testing.assert_allclose(
        one_step(loss, mesh_name)["loss"], expected["loss"], rtol=1e-6
    )
    assert jax.lax.with_sharding_constraint is original


def test_constraints_of_other_threads_are_untouched():
    """While one thread traces a loss, another one's constraints reach JAX as they
    are.
    """
    mesh, done = mesh_of("data"), []

    def other():
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        done.append(
            jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
                jnp.zeros(8)
            ).sharding
        )

    with own_constraints():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert done[0].spec == PartitionSpec("data")


def test_constraint_keeps_the_automatic_axes():
    """Only the manual axes leave a constraint; if no other axis has several devices,
    nothing is constrained.
    """
    found = []

    def body(x):
        found.append(
            without_manual_axes(
                NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
            )
        )
        return x

    for mesh in (mesh_of("data_fsdp_tensor"), mesh_of("data")):
        options = {
            "in_specs": PartitionSpec("data"),
            "out_specs": PartitionSpec("data"),
            "check_vma": False,
        }
        jax.eval_shape(
            jax.shard_map(body, mesh=mesh, axis_names={"data"}, **options),
            jnp.zeros((8, 8)),
        )
    assert found[0].spec == PartitionSpec("fsdp", "tensor")
    assert found[0].mesh == auto_view(mesh_of("data_fsdp_tensor"))
    assert found[1] is None


def test_splash_attention_in_the_loss_lowers_for_tpu():
    """A Pallas TPU kernel in the loss lowers for a mesh with four replicas."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    H, T, D = 2, 256, 128
    mesh = rampup.make_mesh(rampup.MeshAxes(data=4), jax.devices()[:4])

    def loss(params, batch, rngs):
        mask = splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.CausalMask((T, T))] * H
        )
        kernel = splash_attention_kernel.make_splash_mha(
            mask, head_shards=1, q_seq_shards=1
        )
        qkv = jnp.einsum("bte,ehd->bhtd", batch["x"], params["qkv"])
        out = jax.vmap(kernel)(*qkv.reshape(-1, 3, H, T, D).swapaxes(0, 1))
        return jnp.sum(out**2), out.size, {}

    params = jax.device_put(
        {"qkv": np.zeros((8, 3 * H, D), np.float32)},
        rampup.engine.mesh.replicated(mesh),
    )
    batch = jax.ShapeDtypeStruct(
        (2, 4, T, 8),
        np.float32,
        sharding=rampup.engine.mesh.batch_sharding(mesh, leading=1),
    )
    program = jax.jit(
        lambda params, x, number: rampup.accumulate(
            loss, params, {"x": x}, number, mesh=mesh
        )
    )
    lowered = program.trace(params, batch, jnp.int32(2)).lower(
        lowering_platforms=("tpu",)
    )
    assert "tpu_custom_call" in lowered.as_text()
