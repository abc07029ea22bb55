"""Convolutions on every mesh and in every way of running: right, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import make_step
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.engine.evaluation import EvalStep
from rampup.errors import ConfigError

ROWS, C = 16, 8
NUMBERS = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel, **options):
    """Return a convolution of images."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS, **options
    )


# The shape of the kernel, and the operation.
KINDS = {
    "ordinary": ((3, 3, C, C), convolve),
    "grouped": ((3, 3, C // 2, C), lambda x, k: convolve(x, k, feature_group_count=2)),
    "depthwise": ((3, 3, 1, C), lambda x, k: convolve(x, k, feature_group_count=C)),
    "transposed": (
        (3, 3, C, C),
        lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME"),
    ),
    "dilated": ((2, 2, C, C), lambda x, k: convolve(x, k, rhs_dilation=(2, 2))),
}
FORMS = {
    "alone": lambda p, b, y: (y**2).sum(),
    "beside a network": lambda p, b, y: (
        (jnp.tanh(b["x"] @ p["w"]) @ p["v"] + y.reshape(len(y), -1)[:, :8]) ** 2
    ).sum(),
    "before a network": lambda p, b, y: (
        (jnp.tanh(jax.nn.relu(y).mean((1, 2)) @ p["w"]) @ p["v"]) ** 2
    ).sum(),
    "flattened": lambda p, b, y: (
        (jax.nn.relu(y).reshape(len(y), -1)[:, -64:] @ p["f"]) ** 2
    ).sum(),
}


def constrained(b, x, *names):
    """Return an array with a sharding constraint on the mesh of a batch."""
    spec = PartitionSpec(("data", "fsdp"), *names)
    return jax.lax.with_sharding_constraint(x, NamedSharding(b["mesh"], spec))


def called_back(x):
    """Return an array of which a callback sees the sum."""
    jax.debug.callback(lambda total: None, x.sum())
    return x


def beside(p, hidden, y):
    """Return the loss of a network whose output is added to the features."""
    return ((hidden @ p["v"] + y.reshape(len(y), -1)[:, :8]) ** 2).sum()


# Beside a sharding constraint or a callback.
CONSTRAINED = {
    "rows": lambda p, b, y: beside(
        p, jnp.tanh(constrained(b, b["x"], None) @ p["w"]), y
    ),
    "hidden layer": lambda p, b, y: beside(
        p, constrained(b, jnp.tanh(b["x"] @ p["w"]), "tensor"), y
    ),
    "features": lambda p, b, y: (
        constrained(b, y.reshape(len(y), -1), "tensor") ** 2
    ).sum(),
    "callback": lambda p, b, y: beside(p, called_back(jnp.tanh(b["x"] @ p["w"])), y),
}
MESHES = {
    "data_fsdp_tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp_tensor": {"fsdp": 2, "tensor": 2},
    "data_tensor": {"data": 2, "tensor": 2},
    "data_fsdp": {"data": 2, "fsdp": 2},
    "fsdp": {"fsdp": 4},
    "tensor": {"tensor": 4},
    "data": {"data": 4},
}
WAYS = {
    "default": {},
    "compiled": {"reduce_once": False},
    "whole": {"whole_batch": True},
}


def change_of(kind, form, sizes, options, kernel_spec):
    """Return the change of the parameters in a step of two microbatches."""
    shape, operation = KINDS[kind]
    rng = np.random.default_rng(0)
    given = {"w": (8, 8), "v": (8, 8), "f": (64, 8), "k": shape}
    params = {k: (rng.normal(size=s) * 0.3).astype("f") for k, s in given.items()}
    rows = [
        {
            "x": rng.normal(size=8).astype("f"),
            "image": rng.normal(size=(4, 4, C)).astype("f"),
        }
        for _ in range(ROWS)
    ]
    axes = rampup.MeshAxes(**sizes)
    mesh = rampup.make_mesh(axes, jax.devices()[: axes.num_devices])
    specs = {
        "w": PartitionSpec("fsdp", "tensor"),
        "v": PartitionSpec("tensor", "fsdp"),
        "f": PartitionSpec("fsdp", "tensor"),
        "k": kernel_spec,
    }
    d = axes.data * axes.fsdp
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(ROWS),
        splitter=rampup.BatchSplitter(
            data_parallel_size=d, microbatch_size=ROWS // d // 2
        ),
        num_devices=mesh.size,
        total_steps=1,
    )

    def loss_fn(params, batch, keys):
        y = operation(batch["image"], params["k"])
        loss = (FORMS | CONSTRAINED)[form](params, batch | {"mesh": mesh}, y)
        return loss, len(y), {}

    placed = {
        k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()
    }
    step = make_step(loss_fn, optax.sgd(1.0), plan, mesh, **options)
    state = rampup.create_state(placed, step.tx, mesh)
    state, _ = step(state, next(step.batches(rows)))
    return {k: x - np.asarray(state.params[k]) for k, x in params.items()}


def is_refused(kind, mesh, way):
    """Return whether XLA would compute the gradient of the kernel wrongly: beside
    tensor, with groups or beside another axis that it partitions.
    """
    axes = {*MESHES[mesh]} - ({"data"} if way == "default" else set())
    has_groups = kind in ("grouped", "depthwise")
    return "tensor" in axes and (has_groups or len(axes) > 1)


def assert_right(kind, form, mesh, way, kernel_spec):
    """Compare with one device, or see it refused by name."""
    if is_refused(kind, mesh, way):
        with pytest.raises(ConfigError, match=r"conv_general_dilated.*data and fsdp"):
            change_of(kind, form, MESHES[mesh], WAYS[way], kernel_spec)
        return
    expected = change_of(kind, form, {"data": 1}, {}, PartitionSpec())
    found = change_of(kind, form, MESHES[mesh], WAYS[way], kernel_spec)
    for name, x in expected.items():
        np.testing.assert_allclose(
            found[name], x, rtol=1e-4, atol=1e-5 * np.abs(x).max() + 1e-9
        )


@pytest.mark.parametrize(
    ("kind", "form", "mesh", "way", "kernel_spec"),
    [
        ("ordinary", "beside a network", "data_fsdp_tensor", "default", ()),
        ("ordinary", "beside a network", "data_fsdp_tensor", "compiled", ()),
        ("ordinary", "beside a network", "data_tensor", "default", ()),
        (
            "depthwise",
            "flattened",
            "data_tensor",
            "default",
            (None, None, None, "tensor"),
        ),
        ("depthwise", "flattened", "data_fsdp", "default", ()),
        ("grouped", "alone", "fsdp_tensor", "whole", ()),
        ("ordinary", "hidden layer", "data_fsdp_tensor", "compiled", ()),
        ("transposed", "rows", "data_tensor", "default", ()),
        ("dilated", "features", "fsdp_tensor", "default", ()),
        ("grouped", "callback", "data_fsdp_tensor", "compiled", ()),
        ("depthwise", "hidden layer", "data_fsdp_tensor", "default", ()),
        ("grouped", "alone", "data_fsdp", "whole", ()),
    ],
)
def test_a_convolution_is_right_or_refused(kind, form, mesh, way, kernel_spec):
    """The gradients of kernel and network are those of one device, also beside a
    sharding constraint and a callback.
    """
    assert_right(kind, form, mesh, way, PartitionSpec(*kernel_spec))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "form", "mesh", "way"),
    [
        (kind, form, mesh, way)
        for kind in KINDS
        for form in FORMS
        for mesh in MESHES
        for way in WAYS
    ],
)
def test_every_convolution_on_every_mesh(kind, form, mesh, way):
    """The whole table, with a kernel that is whole, and one that is sharded."""
    rows = "fsdp" if kind not in ("grouped", "depthwise") else None
    for spec in (PartitionSpec(), PartitionSpec(None, None, rows, "tensor")):
        assert_right(kind, form, mesh, way, spec)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "form", "mesh", "way"),
    [
        (kind, form, mesh, way)
        for kind in KINDS
        for form in CONSTRAINED
        for mesh in ("data_fsdp_tensor", "fsdp_tensor", "data_tensor")
        for way in WAYS
    ],
)
def test_every_convolution_beside_a_constraint(kind, form, mesh, way):
    """Where a compiler decides about two automatic axes, and where about one."""
    assert_right(kind, form, mesh, way, PartitionSpec())


def evaluated(kind, sizes, kernel_spec):
    """Return the sums of a loss over 10 rows, by 4: two batches, and two rows that are
    left over.
    """
    shape, operation = KINDS[kind]
    rng = np.random.default_rng(0)
    images = rng.normal(size=(10, 4, 4, C)).astype("f")
    axes = rampup.MeshAxes(**sizes)
    mesh = rampup.make_mesh(axes, jax.devices()[: axes.num_devices])
    kernel = jax.device_put(
        (rng.normal(size=shape) * 0.3).astype("f"), NamedSharding(mesh, kernel_spec)
    )

    def loss_fn(params, batch, keys):
        return (jnp.tanh(operation(batch, params)) ** 2).sum(), len(keys), {}

    state = rampup.create_state(kernel, optax.sgd(1.0), mesh)
    step = EvalStep(loss_fn, mesh)
    return np.sum([step(state, batch) for batch in step.batches(images, 4)], axis=0)


@pytest.mark.parametrize(
    ("kind", "mesh", "kernel_spec"),
    [
        ("grouped", "data", ()),
        ("ordinary", "data_fsdp", (None, None, "fsdp", None)),
        ("depthwise", "data_fsdp", (None, None, None, "fsdp")),
    ],
)
def test_the_rows_that_an_evaluation_leaves_over(kind, mesh, kernel_spec):
    """They are on every device, where data and fsdp partition nothing by rows."""
    found = evaluated(kind, MESHES[mesh], PartitionSpec(*kernel_spec))
    expected = evaluated(kind, {"data": 1}, PartitionSpec())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_evaluation_beside_tensor_is_refused():
    """A partitioned kernel is, whatever is computed of it."""
    spec = PartitionSpec(None, None, None, "tensor")
    with pytest.raises(ConfigError, match="XLA partitions wrongly beside tensor"):
        evaluated("depthwise", {"data": 2, "tensor": 2}, spec)
