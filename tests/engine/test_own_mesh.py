"""Meshes of one's own: any axis names, both axis types."""

import contextlib
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import (
    history,
    loss_fn,
    make_step,
    mesh_of,
    plain_loss_fn,
    plan_for,
    rows,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rampup
from rampup.data.batches import BatchOptions

MAXTEXT_AXES = (
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "sequence",
    "tensor",
    "expert",
    "autoregressive",
)
MESHES = {
    "batch_model": (
        (4, 2),
        ("batch", "model"),
        {"replica": ("batch",), "rows": ("batch",)},
    ),
    "data_only": ((8,), ("data",), None),
    "data_fsdp": ((2, 4), ("data", "fsdp"), None),
    "maxtext": ((2, 1, 2, 1, 1, 2, 1, 1), MAXTEXT_AXES, None),
}


def train(mesh, axes, model_axis=None):
    """Return the losses of five steps on a mesh."""
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(8, 16)) * 0.3,
        "out": rng.normal(size=(16, 8)) * 0.3,
    }
    specs = {
        "in": PartitionSpec(None, model_axis),
        "out": PartitionSpec(model_axis, None),
    }
    params = {
        name: jax.device_put(x.astype(np.float32), NamedSharding(mesh, specs[name]))
        for name, x in params.items()
    }
    batch_axes = rampup.BatchAxes.of(mesh, axes and rampup.BatchAxes(**axes))
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.from_schedule("0:16 32:32"),
        splitter=rampup.BatchSplitter(data_parallel_size=batch_axes.num_shards(mesh)),
        num_devices=mesh.size,
        total_steps=5,
    )
    tx = optax.adam(0.01)
    step = make_step(
        loss_fn,
        tx,
        plan,
        mesh,
        reduce_once=True,
        **({} if axes is None else {"batch_axes": batch_axes}),
    )
    _, found = history(step, rampup.create_state(params, tx, mesh))
    assert step.num_compilations == 1
    return [metrics["loss"] for metrics in found]


@functools.cache
def losses_of_one_device():
    """Return the losses that every mesh must have."""
    return train(
        jax.make_mesh(
            (1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
        ),
        None,
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_trains_like_one_device(name, axis_type):
    """Losses on meshes of any axis names and types equal those of one device, also in
    `jax.set_mesh` of the user's mesh.
    """
    shape, names, axes = MESHES[name]
    expected = losses_of_one_device()
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    model_axis = {"batch_model": "model", "maxtext": "tensor"}.get(name)
    with jax.set_mesh(mesh) if name == "data_fsdp" else contextlib.nullcontext():
        np.testing.assert_allclose(train(mesh, axes, model_axis), expected, rtol=1e-6)


def test_gradients_reduced_per_microbatch_are_warned_of_at_the_call():
    """A loss that sees Explicit axes, on several replicas, unless the caller decides."""
    mesh = jax.make_mesh((8, 1), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    make = functools.partial(
        rampup.train_step, plain_loss_fn, optax.sgd(0.1), plan_for(mesh), mesh
    )
    with pytest.warns(RuntimeWarning, match="once per microbatch") as caught:
        make()
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decided in (True, False):
            make(reduce_once=decided)


def explicit_loss_fn(params, batch, keys, *, frozen=None):
    """The loss `plain_loss_fn` of `helpers.toy`, as a model for Explicit axes says
    it.
    """
    x = batch["x"]
    hidden = jnp.tanh(
        jnp.einsum(
            "bi,io->bo", x, params["in"], out_sharding=PartitionSpec("batch", "model")
        )
    )
    y = jnp.einsum(
        "bo,oi->bi", hidden, params["out"], out_sharding=PartitionSpec("batch", None)
    )
    y = y if frozen is None else y + frozen["bias"]
    error = jnp.sum((y - batch["x"]) ** 2, axis=-1)
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {}


@pytest.mark.parametrize("in_context", [True, False])
@pytest.mark.parametrize(
    ("shape", "zero"), [((1, 1), False), ((4, 2), False), ((4, 2), True)]
)
def test_a_model_with_explicit_axes_trains_and_its_results_are_on_the_mesh(
    shape, zero, in_context
):
    """A model with `out_sharding` has the losses of one with Auto axes; metrics, state
    and rows fit the program around it.
    """
    names = "batch", "model"
    mesh = jax.make_mesh(
        shape,
        names,
        axis_types=(AxisType.Explicit,) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )
    axes, tx = rampup.BatchAxes(replica=("batch",), rows=("batch",)), optax.adam(0.01)
    ramp, splitter = (
        rampup.BatchRamp.from_schedule("0:16 32:32"),
        rampup.BatchSplitter(data_parallel_size=shape[0]),
    )
    plan = rampup.RampPlan(
        ramp=ramp, splitter=splitter, num_devices=mesh.size, total_steps=4
    )
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(8, 16)) * 0.3,
        "out": rng.normal(size=(16, 8)) * 0.3,
    }
    specs = {"in": PartitionSpec(None, "model"), "out": PartitionSpec("model", None)}
    params = {
        name: jax.device_put(x.astype(np.float32), NamedSharding(mesh, specs[name]))
        for name, x in params.items()
    }
    options = {"batch_axes": axes, "shard_optimizer_over_data": zero}
    losses = []
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        for own_loss in (plain_loss_fn, explicit_loss_fn):
            state = rampup.create_state(
                params,
                tx,
                mesh,
                frozen={"bias": np.zeros(8)} if own_loss is explicit_loss_fn else None,
                **options,
            )
            once = own_loss is plain_loss_fn
            step = make_step(own_loss, tx, plan, mesh, reduce_once=once, **options)
            state, found = history(step, state)
            losses.append([metrics["loss"] for metrics in found])
            assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
        batch = next(step.batches(rows()))
        before = jax.tree.map(jnp.copy, state.params)
        _, metrics = step(state.replace(step=state.step * 0), batch)
        jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, before, before)
        assert np.isfinite(float(metrics["loss"] / metrics["weight"]))
        chunk = next(
            rampup.microbatches(
                rows(), plan, mesh, options=BatchOptions(batch_axes=axes)
            )
        )
        own = jax.jit(lambda params, batch: explicit_loss_fn(params, batch, None)[0])
        evaluated = rampup.EvalStep(
            rampup.AccumulatedLoss(explicit_loss_fn, axes), mesh
        )(rampup.create_state(before, tx, mesh), batch)
        if in_context:
            np.testing.assert_allclose(own(before, chunk), evaluated[0], rtol=1e-5)
        run = jax.jit(
            lambda *args: rampup.accumulate(
                rampup.AccumulatedLoss(explicit_loss_fn, axes), *args, mesh=mesh
            )
        )
        sums = run(before, batch.chunks[0], np.int32(1))
        assert sums.grads["in"].sharding.mesh == mesh
        np.testing.assert_allclose(sums.loss, evaluated[0], rtol=1e-5)
    assert step.num_compilations == 1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)

    def ambiguous(params, batch, keys):
        params = {
            name: jax.sharding.reshard(p, PartitionSpec(None, "batch"))
            for name, p in params.items()
        }
        return jnp.sum(batch["x"].T @ batch["x"] @ params["in"]), 1.0, {}

    if mesh.size > 1:
        step = make_step(ambiguous, tx, plan, mesh, **options)
        with pytest.raises(Exception, match="Contracting dimensions are sharded"):
            step(rampup.create_state(params, tx, mesh, **options), batch)


@pytest.mark.parametrize(
    ("splitter", "key"),
    [
        ({"data_parallel_size": 4}, "data_parallel_size"),
        ({"data_parallel_size": 8, "num_stages": 2}, "num_stages"),
    ],
)
def test_plan_for_another_mesh_is_refused(splitter, key):
    """A plan for other numbers of replicas or stages is an error of the step and of the
    batches, with the mesh's number.
    """
    mesh = rampup.make_mesh(rampup.MeshAxes(data=8))
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.from_schedule("0:64"),
        splitter=rampup.BatchSplitter(**splitter),
        num_devices=16,
        total_steps=2,
    )
    for use in (
        lambda: make_step(loss_fn, optax.sgd(0.1), plan, mesh),
        lambda: next(rampup.step_batches(rows(), plan, mesh)),
    ):
        with pytest.raises(rampup.errors.ConfigError) as caught:
            use()
        assert (caught.value.key, caught.value.nearest) == (
            key,
            (mesh.shape["data"] if key == "data_parallel_size" else 1,),
        )


def test_pipelined_loss_with_other_repeats_than_the_plan_is_refused():
    """The layer chunks per stage of plan and loss are the same number."""
    mesh = rampup.make_mesh(rampup.MeshAxes(data=4, pipeline=2))
    plan = plan_for(mesh, "0:64", steps=2, num_stages=2)
    loss = rampup.PipelinedLoss(
        first=loss_fn, stage=loss_fn, last=loss_fn, num_repeats=2
    )
    with pytest.raises(rampup.errors.ConfigError, match="num_repeats=2"):
        make_step(loss, optax.sgd(0.1), plan, mesh)


def test_mesh_without_a_batch_axis_is_refused():
    """A mesh none of whose axes takes the rows is an error that names `BatchAxes`."""
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    with pytest.raises(rampup.RampupError, match="BatchAxes"):
        make_step(
            loss_fn,
            optax.sgd(0.1),
            plan_for(jax.make_mesh((8, 1), ("data", "fsdp"))),
            mesh,
        )


@pytest.mark.parametrize(
    "axes", ["batch", rampup.BatchAxes(replica="batch", rows="batch"), ("batch",)]
)
def test_axes_that_are_no_tuples_are_refused(axes):
    """A name or a tuple alone, and names that are not in a tuple, are an error that
    shows `BatchAxes`.
    """
    with pytest.raises(
        rampup.errors.ConfigError, match="must be a BatchAxes of two tuples of the axes"
    ):
        rampup.BatchAxes.of(jax.make_mesh((8,), ("batch",)), axes)


def test_parameters_of_an_equal_mesh_keep_their_sharding():
    """A parameter that is sharded on another mesh is not replicated in silence: its
    axes are axes of this one, or an error.
    """
    ours = rampup.make_mesh(rampup.MeshAxes(data=4, tensor=2))
    for name in ("tensor", "y"):
        other = jax.make_mesh((4, 2), ("data", name), axis_types=(AxisType.Auto,) * 2)
        param = jax.device_put(
            np.zeros((8, 8), np.float32),
            NamedSharding(other, PartitionSpec(None, name)),
        )
        if name == "y":
            with pytest.raises(
                rampup.errors.ConfigError,
                match=r"which the axes .* cannot express; place it on this mesh",
            ):
                rampup.create_state({"w": param}, optax.sgd(0.1), ours)
        else:
            state = rampup.create_state({"w": param}, optax.sgd(0.1), ours)
            assert state.params["w"].sharding.spec == PartitionSpec(None, "tensor")


@pytest.mark.parametrize("make", ["train_step", "EvalStep"])
def test_a_mesh_with_other_axes_is_told_what_to_write(make):
    """The first error has names of the mesh, and where to give them; what it says is
    taken.
    """
    mesh = jax.make_mesh(
        (1,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )
    plan = plan_for(mesh_of("one"))
    build = {
        "train_step": lambda loss: rampup.train_step(loss, optax.sgd(0.1), plan, mesh),
        "EvalStep": lambda loss: rampup.EvalStep(loss, mesh),
    }[make]
    example = "rampup.BatchAxes(replica=('batch',), rows=('batch',))"
    with pytest.raises(rampup.errors.ConfigError, match=re.escape(example)) as caught:
        build(loss_fn)
    assert "rampup.AccumulatedLoss(loss_fn, batch_axes=...)" in str(caught.value)
    axes = rampup.BatchAxes(replica=("batch",), rows=("batch",))
    assert f"rampup.{axes!r}" == example
    build(rampup.AccumulatedLoss(loss_fn, batch_axes=axes))
