"""The way of running is decided before the loss is traced: once, without another try."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import MESHES, loss_fn, mesh_of, new_params, plan_for, rows, start
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rampup
from rampup.engine.replicas import Replicas
from rampup.errors import ConfigError

EXPLICIT = {
    "explicit data": ((8,), ("data",)),
    "explicit data_fsdp": ((2, 4), ("data", "fsdp")),
    "explicit one": ((1,), ("data",)),
}


def setting(name):
    """Return a mesh, parameters on it and a plan of one phase."""
    if name in MESHES:
        mesh = mesh_of(name)
        return mesh, new_params(mesh), plan_for(mesh, "0:16", microbatch_size=1)
    shape, names = EXPLICIT[name]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(
        shape, names, axis_types=(AxisType.Explicit,) * len(names), devices=devices
    )
    params = jax.device_get(new_params(mesh_of("one")))
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(16),
        splitter=rampup.BatchSplitter(
            data_parallel_size=mesh.size, microbatch_size=16 // mesh.size // 2 or 1
        ),
        num_devices=mesh.size,
        total_steps=12,
    )
    return mesh, params, plan


def first_step(name, loss, **options):
    """Run the first step of a loss with the automatic check, as users do."""
    mesh, params, plan = setting(name)
    step = rampup.train_step(loss, optax.sgd(0.1), plan, mesh, **options)
    state = rampup.create_state(params, step.tx, mesh)
    return step(state, next(step.batches(rows())))


@pytest.mark.parametrize("name", [*MESHES, *EXPLICIT])
@pytest.mark.parametrize("kind", [ValueError, NameError, TypeError])
def test_an_error_of_the_loss_arrives_as_it_is_after_one_call(name, kind):
    """No other way of running is tried, whatever the loss raises and wherever."""
    calls = []

    def loss(params, batch, keys):
        calls.append(1)
        raise kind("the shard_map of my mesh is broken")

    with pytest.raises(kind, match="the shard_map of my mesh is broken") as caught:
        first_step(name, loss)
    assert type(caught.value) is kind
    assert "reduce_once" not in "".join(getattr(caught.value, "__notes__", ()))
    assert len(calls) == 1


@pytest.mark.core
@pytest.mark.parametrize("name", [*MESHES, *EXPLICIT])
def test_a_loss_is_traced_once(name):
    """A loss that is right is traced once for a program."""
    calls = []

    def loss(params, batch, keys):
        calls.append(1)
        return loss_fn(params, batch, keys)

    options = {"reduce_once": True} if name in EXPLICIT else {}
    first_step(name, loss, check_loss=False, **options)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["data", "data_tensor", "data_fsdp_tensor", "fsdp"])
@pytest.mark.parametrize("how", ["broadcast", "reshape"])
def test_a_number_of_rows_in_the_loss_is_an_error(name, how):
    """A loss for 16 rows fails on the rows of a replica, and nothing repairs it."""

    def loss(params, batch, keys):
        errors = jnp.sum((batch["x"] @ params["in"]) ** 2, axis=-1)
        if how == "broadcast":
            errors *= jnp.broadcast_to(jnp.linspace(0, 1, 16), errors.shape)
        else:
            errors = errors.reshape(16, -1)
        return errors.sum(), 16, {}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, TypeError)) as caught:
            first_step(name, loss, check_loss=False)
    assert not isinstance(caught.value, ConfigError)
    assert "reduce_once=False" in "".join(caught.value.__notes__)


def product_over_tensor(mesh=None, names=("tensor",), **options):
    """Return a loss with a `jax.shard_map`, and a sum over its axes."""

    def loss(params, batch, keys):
        given = {} if mesh is None else {"mesh": mesh}

        def scale(x):
            one = 1 + 0 * jnp.sum(x)
            return jax.lax.pmean(one, "data") if "data" in names else one

        y = jax.shard_map(
            lambda w, v, x: jax.lax.psum(jnp.tanh(x @ w) @ v, "tensor") * scale(x),
            in_specs=(
                PartitionSpec(None, "tensor"),
                PartitionSpec("tensor"),
                PartitionSpec(),
            ),
            out_specs=PartitionSpec(),
            axis_names=set(names),
            **given,
            **options,
        )(params["in"], params["out"], batch["x"])
        return jnp.sum(y**2), y.shape[0], {}

    return loss


def gradient_on(name, loss, **options):
    """Return the change of the parameters in one step."""
    mesh, params, plan = setting(name)
    before = jax.device_get(params)
    step = rampup.train_step(loss, optax.sgd(1.0), plan, mesh, **options)
    state = rampup.create_state(params, step.tx, mesh)
    state, _ = step(state, next(step.batches(rows())))
    account = rampup.contrib.lab.inspect(step, state, next(step.batches(rows())))
    after = jax.device_get(state.params)
    return {k: before[k] - after[k] for k in before}, account.reduces_once


def assert_close(found, expected):
    """Compare gradients."""
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_over_tensor_reduces_once(check_vma):
    """On data and tensor, without `mesh=`; with it, the error says to leave it out: our
    own, or the note below that of newer versions of JAX.
    """
    expected, _ = gradient_on("one", product_over_tensor(mesh_of("one")))
    found, reduces_once = gradient_on(
        "data_tensor", product_over_tensor(check_vma=check_vma)
    )
    assert_close(found, expected)
    assert reduces_once
    given = product_over_tensor(mesh_of("data_tensor"), check_vma=check_vma)
    with pytest.raises(ValueError, match=r"leave.* out[\s\S]*reduce_once=False"):
        first_step("data_tensor", given)
    found, reduces_once = gradient_on("data_tensor", given, reduce_once=False)
    assert_close(found, expected)
    assert not reduces_once


@pytest.mark.parametrize(
    ("name", "names"),
    [("data_fsdp_tensor", ("tensor",)), ("data_tensor", ("data", "tensor"))],
)
def test_a_shard_map_that_a_way_cannot_run_is_named(name, names):
    """Beside two axes, or over the replicas, the error gives the operation, its axes
    and `reduce_once=False`, which runs.
    """
    over = " and ".join(names)
    with pytest.raises(ConfigError, match=rf"shard_map over {over}.*reduce_once=False"):
        first_step(name, product_over_tensor(names=names))
    expected, _ = gradient_on("one", product_over_tensor(mesh_of("one")))
    loss = product_over_tensor(mesh_of(name))
    found, _ = gradient_on(name, loss, reduce_once=False)
    assert_close(found, expected)


@pytest.mark.core
def test_an_operation_that_cannot_be_mapped_is_named():
    """Where replicas are mapped, JAX's words and `reduce_once=False` are in the error."""

    def loss(params, batch, keys):
        total, weight, _ = loss_fn(params, batch, keys)
        doubled = jax.pure_callback(
            lambda x: np.float32(2 * x),
            jax.ShapeDtypeStruct((), np.float32),
            jax.lax.stop_gradient(total),
        )
        return total, weight, {"doubled": doubled}

    with pytest.raises(ConfigError, match=r"cannot be mapped.*reduce_once=False"):
        first_step("data_fsdp_tensor", loss, check_loss=False)


def test_reduce_once_is_for_a_function():
    """A loss that takes shards reduces once, so that the option means nothing."""
    mesh, params, plan = setting("fsdp")
    loss = rampup.AccumulatedLoss(
        loss_fn, param_shardings=jax.tree.map(lambda p: p.sharding, params)
    )
    with pytest.raises(ConfigError, match="reduce_once needs a loss function"):
        rampup.train_step(loss, optax.sgd(0.1), plan, mesh, reduce_once=False)


@pytest.mark.parametrize("name", ["explicit data", "explicit data_fsdp"])
def test_evaluation_of_any_number_of_rows_on_an_explicit_mesh(name):
    """Batches and what is left over have the losses of one device."""
    mesh, params, _ = setting(name)
    one = mesh_of("one")

    def plain(params, batch, keys):
        y = jnp.tanh(batch["x"] @ params["in"])
        return jnp.sum(y**2), batch["x"].size, {}

    for number in (3, 16, 29):
        found = []
        for where in (one, mesh):
            state = rampup.create_state(params, optax.sgd(0.1), where)
            evaluate = rampup.EvalStep(plain, where)
            sums = [
                evaluate(state, batch) for batch in evaluate.batches(rows(number), 8)
            ]
            found.append(np.sum(jax.device_get(sums), axis=0))
        np.testing.assert_allclose(*found, rtol=1e-6)


def test_one_replica_has_no_region_without_an_axis_for_it():
    """Manual over no axis means over all, so that every device would run all rows."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    axes = rampup.BatchAxes(replica=(), rows=("fsdp",))
    assert Replicas(mesh=mesh, axes=axes, reduce_once=True).way == "compiled"
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(16),
        splitter=rampup.BatchSplitter(data_parallel_size=4),
        num_devices=4,
        total_steps=1,
    )
    step = rampup.train_step(
        loss_fn, optax.sgd(0.1), plan, mesh, reduce_once=True, check_loss=False
    )
    state = rampup.create_state(setting("one")[1], step.tx, mesh)
    plain = rampup.train_step(loss_fn, optax.sgd(0.1), plan, mesh, check_loss=False)
    flops = [
        each.lower(state, rows()[0], plan.splits[0]).compile().cost_analysis()["flops"]
        for each in (step, plain)
    ]
    assert flops[0] == flops[1]


def test_rows_that_an_evaluation_leaves_over_see_the_axes_of_the_others():
    """With `reduce_once=True` on an Explicit mesh, all of them are Auto."""
    mesh, params, _ = setting("explicit data")
    seen = []

    def loss(params, batch, keys):
        types = jax.typeof(batch["x"]).sharding.mesh.axis_types
        seen.append(AxisType.Explicit in types)
        return loss_fn(params, batch, keys)

    evaluate = rampup.EvalStep(loss, mesh, reduce_once=True)
    state = rampup.create_state(params, optax.sgd(0.1), mesh)
    for batch in evaluate.batches(rows(11), 8):
        evaluate(state, batch)
    assert len(seen) > 1
    assert not any(seen)


def test_explicit_axes_are_those_of_the_mesh():
    """A loss sees Explicit axes and all rows, or with `reduce_once=True` Auto axes and
    one reduction.
    """
    seen = []

    def loss(params, batch, keys):
        seen.append((jax.typeof(batch["x"]).sharding.spec[0], batch["x"].shape[0]))
        return jnp.sum(jnp.tanh(batch["x"] @ params["in"])), len(keys), {}

    first_step("explicit data", loss, check_loss=False)
    first_step("explicit data", loss, check_loss=False, reduce_once=True)
    assert seen == [("data", 8), (None, 1)]


@pytest.mark.slow
def test_names_of_axes_of_one_device():
    """Collectives over axes of one device change nothing, also for one replica with
    `reduce_once=True`, which the error of JAX names.
    """

    def named(*axes):
        def loss(params, batch, keys):
            total, *others = loss_fn(params, batch, keys)
            place = sum(jax.lax.axis_index(name) for name in axes)
            return jax.lax.pmean(total, axes) * (1 + place), *others

        return loss

    for name, axes in (
        ("one", ("data", "fsdp", "tensor", "stage")),
        ("data", ("fsdp", "stage")),
        ("fsdp", ("data", "tensor")),
        ("data_fsdp_tensor", ("stage",)),
    ):
        _, expected = first_step(name, loss_fn, check_loss=False)
        if name in ("one", "fsdp"):
            with pytest.raises(NameError, match="unbound axis name") as caught:
                first_step(name, named(*axes), check_loss=False)
            assert "reduce_once=True" in caught.value.__notes__[0]
        _, found = first_step(name, named(*axes), check_loss=False, reduce_once=True)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)


def test_parameters_of_another_placement_keep_it():
    """A way of running never changes where parameters are."""
    mesh = mesh_of("data_fsdp_tensor")
    step, state = start("data_fsdp_tensor", reduce_once=False)
    state, _ = step(state, next(step.batches(rows())))
    assert state.params["in"].sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec("fsdp", "tensor")), 2
    )
