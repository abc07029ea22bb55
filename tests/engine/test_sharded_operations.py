"""Operations that XLA cannot partition beside a manual axis and two automatic ones, on
data, fsdp and tensor together.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy
from helpers.toy import make_step
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.engine.accumulate import AccumulatedLoss, accumulate
from rampup.engine.mesh import BatchAxes, auto_view, batch_sharding, shardings_like
from rampup.engine.pipeline import PipelinedLoss
from rampup.engine.sums import Recipe

V, E, T, K, R = 32, 16, 4, 3, 8


def embedding(p, b):
    """Look up a table."""
    return jnp.tanh(p["table"][b["id"]])


def labels(p, b):
    """Look up the table, and take the probabilities of labels."""
    return jnp.take_along_axis(
        jax.nn.log_softmax(p["table"][b["id"]] @ p["w"]),
        b["id"][..., None] % E,
        axis=-1,
    )


def scatter(p, b):
    """Change rows of the table, and a part of its columns."""
    return p["table"].at[b["id"].ravel()].add(1.5) * p["table"].at[
        :, b["id"][0] % E
    ].set(2.0)


def ordering(p, b):
    """Sort along a dimension that tensor shards, and one of the table."""
    return (
        jnp.sort(b["x"] @ p["w"], axis=-1) * jnp.arange(E),
        jnp.sort(p["table"], axis=0) * jnp.arange(V)[:, None],
    )


def top_k(p, b):
    """Look up the table at the places of the largest values."""
    values, places = jax.lax.top_k(b["x"] @ p["w"], 2)
    return values[..., None] * jnp.take(p["table"], places, axis=0)


def segment_sum(p, b):
    """Add up rows by their number."""
    return (
        jax.ops.segment_sum((b["x"] @ p["w"]).reshape(-1, E), b["id"].ravel(), V)
        * p["table"]
    )


def slices(p, b):
    """Slice the table where the rows say."""
    one = b["id"][0, 0]
    several = jax.vmap(lambda k: jax.lax.dynamic_slice_in_dim(p["table"], k, 8))(
        b["id"][:, 0] % (V - 8)
    )
    return (
        several,
        p["table"].at[one].add(1.5) * p["table"][:, one % E, None],
        p["table"][b["id"][0, :1]],
        p["w"][one % E],
    )


def experts(p, b):
    """Dispatch each token to the best of four experts by index, with a capacity."""
    x = b["x"].reshape(-1, E)
    chosen = jnp.argmax(x @ p["w"][:, :4], axis=-1)
    place = (
        jnp.cumsum(jax.nn.one_hot(chosen, 4), axis=0)[
            jnp.arange(len(x)), chosen
        ].astype(int)
        - 1
    )
    buffers = jnp.zeros((4, 8, E)).at[chosen, place].add(x, mode="drop")
    return (
        jnp.einsum("xce,xef->xcf", buffers, p["kernel"])
        .at[chosen, place]
        .get(mode="fill", fill_value=0)
    )


def depthwise(p, b):
    """Convolve each channel by itself."""
    kernel, numbers = p["kernel"][:3, :1], ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        b["x"], kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=E
    )


def convolution(p, b):
    """Convolve all channels, in a scan over layers with a branch."""

    def layer(x, kernel):
        y = jax.lax.conv_general_dilated(
            x, kernel[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jax.lax.cond(jnp.sum(y) > 0, jnp.tanh, jnp.sin, y), None

    return jax.lax.scan(layer, b["x"], p["kernel"])[0]


def ragged(p, b):
    """Sort tokens by their expert, for products that `jax.vmap` cannot map."""
    x, chosen = b["x"].reshape(-1, E), b["id"].ravel() % 4
    return jax.lax.ragged_dot(
        x[jnp.argsort(chosen)], p["kernel"], jnp.bincount(chosen, length=4)
    )


def linear(p, b):
    """Solve linear equations, whose operation keeps its functions in a named tuple."""
    return jnp.linalg.solve(p["w"] @ p["w"].T + jnp.eye(E), b["x"].reshape(-1, E).T)


def tensor_kernel(p, b):
    """Multiply in a `jax.shard_map` over tensor, in a loop with a constraint."""
    # Inside of a step, the context has the mesh. The expected sums are those of one
    # device.
    inside = bool(jax.sharding.get_abstract_mesh().shape)
    constraint = NamedSharding(
        toy.mesh_of("data_fsdp_tensor" if inside else "one"), PartitionSpec("fsdp")
    )

    def product(x, w):
        x = jax.lax.with_sharding_constraint(x, constraint)
        return jax.lax.fori_loop(
            0,
            2,
            lambda _, y: jnp.tanh(y + jax.lax.psum(x @ w, "tensor")),
            jnp.zeros((*x.shape[:-1], E)),
        )

    options = {
        "mesh": None if inside else toy.mesh_of("one"),
        "axis_names": {"tensor"},
        "check_vma": False,
    }
    specs = {
        "in_specs": (PartitionSpec(None, None, "tensor"), PartitionSpec("tensor")),
        "out_specs": PartitionSpec(),
    }
    return jax.shard_map(product, **options, **specs)(b["x"], p["w"])


OPERATIONS = [
    linear,
    embedding,
    labels,
    scatter,
    ordering,
    top_k,
    segment_sum,
    slices,
    experts,
    ragged,
]
# What the replicas of data, fsdp and tensor cannot run by themselves.
COMPILED = {tensor_kernel: "shard_map over tensor", ragged: "ragged_dot"}
SPECS = [
    ("tensor", "fsdp"),
    ("fsdp", "tensor"),
    (None, "fsdp"),
    ("tensor", None),
    (("fsdp", "tensor"), None),
]


def loss_of(operations):
    """Return a loss function that adds up the squares of operations, with dropout by
    row.
    """

    def loss_fn(params, batch, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (T, E)))(keys)
        batch = batch | {"x": jnp.where(kept, batch["x"], 0)}
        found = [operation(params, batch) for operation in operations]
        return (
            sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(found)),
            jnp.sum(batch["weight"]),
            {},
        )

    return loss_fn


def problem(mesh, spec, axes=None):
    """Return parameters sharded over two axes, a buffer of rows, and their keys."""
    rng = np.random.default_rng(0)
    shapes = {"table": (V, E), "w": (E, E), "kernel": (4, E, E)}
    params = {
        name: jax.device_put(
            (rng.normal(size=shape) * 0.3).astype(np.float32),
            NamedSharding(
                auto_view(mesh), PartitionSpec(*[None] * (len(shape) - 2), *spec)
            ),
        )
        for name, shape in shapes.items()
    }
    batch = {
        "id": rng.integers(0, V, (K, R, T)).astype(np.int32),
        "x": rng.normal(size=(K, R, T, E)).astype(np.float32),
        "weight": rng.integers(1, 9, (K, R)).astype(np.float32),
    }
    rows = batch_sharding(mesh, leading=1, axes=axes)
    return (
        params,
        jax.device_put(batch, rows),
        jax.device_put(jax.random.split(jax.random.key(5), (K, R)), rows),
    )


def expected_sums(loss_fn, params, batch, keys, replicas):
    """Return loss and gradient of plain `jax.jit` on one device, added up over the rows
    of each microbatch and replica.
    """
    params, batch, keys = jax.device_put((params, batch, keys), jax.devices()[0])
    cut = jax.tree.map(
        lambda x: x.reshape(K * replicas, R // replicas, *x.shape[2:]), (batch, keys)
    )
    run = jax.jit(jax.value_and_grad(lambda *args: loss_fn(*args)[0]))
    parts = [
        run(params, *jax.tree.map(operator.itemgetter(k), cut))
        for k in range(K * replicas)
    ]
    return jax.tree.map(lambda *x: np.sum(np.stack(x), axis=0), *parts)


def assert_close(found, expected):
    """Compare loss and gradients, by the largest number of each array."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


def pairs_on_request():
    """Yield each operation with two ways to shard its parameters, in turn, as slow
    cases, and with the others for the whole campaign.
    """
    for place, operation in enumerate(OPERATIONS):
        for number, spec in enumerate(SPECS):
            is_slow = (number - place) % len(SPECS) in (0, 2)
            yield (toy.slow if is_slow else toy.campaign)([operation], spec)


@pytest.mark.parametrize(
    ("operations", "spec"),
    [
        ([ragged], SPECS[1]),
        ([linear, tensor_kernel], SPECS[1]),
        toy.slow([labels], SPECS[3]),
        toy.slow([tensor_kernel], SPECS[0]),
        *pairs_on_request(),
    ],
)
def test_an_operation_equals_plain_jit(operations, spec):
    """Sums and gradients on data, fsdp and tensor are those of plain `jax.jit` over
    each replica's rows.
    """
    mesh = toy.mesh_of("data_fsdp_tensor")
    params, batch, keys = problem(mesh, spec)
    loss_fn, shardings = loss_of(operations), shardings_like(params, mesh)
    is_compiled = not set(operations).isdisjoint(COMPILED)
    loss = AccumulatedLoss(loss_fn, reduce_once=False if is_compiled else None)
    run = jax.jit(
        lambda *args: accumulate(loss, *args, mesh=mesh, param_shardings=shardings)
    )
    sums = run(params, batch, np.int32(K), keys)
    assert_close(
        (sums.loss, sums.grads),
        expected_sums(loss_fn, params, batch, keys, 1 if is_compiled else 2),
    )
    assert all(
        jax.tree.leaves(
            jax.tree.map(
                lambda g, s: g.sharding.is_equivalent_to(s, g.ndim),
                sums.grads,
                shardings,
            )
        )
    )
    evaluate = jax.jit(
        lambda params, *rows: loss.sums(params, rows, (K, 1), Recipe(), mesh)
    )
    np.testing.assert_allclose(evaluate(params, batch, keys).loss, sums.loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (depthwise, "a conv_general_dilated.* beside data and fsdp and tensor"),
        (convolution, "a conv_general_dilated.* beside data and fsdp and tensor"),
        (tensor_kernel, "a shard_map over tensor.*reduce_once=False"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(operation, words):
    """On data, fsdp and tensor, the error names the operation and a way out."""
    mesh = toy.mesh_of("data_fsdp_tensor")
    args = problem(mesh, SPECS[1])
    run = jax.jit(lambda *args: accumulate(loss_of([operation]), *args, mesh=mesh))
    with pytest.raises(rampup.errors.ConfigError, match=words):
        run(*args[:2], np.int32(K), args[2])


@pytest.mark.parametrize(
    ("name", "reduce_once"),
    [
        ("one", None),
        ("data_tensor", False),
        ("fsdp", None),
        toy.slow("data_fsdp_tensor", False),
    ],
)
def test_a_shard_map_over_fsdp_and_tensor_equals_one_device(name, reduce_once):
    """Where the compiler partitions the loss, also over an axis of one device. Where
    each replica runs by itself, such an axis is manual already, and the error says so.
    """
    mesh = toy.mesh_of(name)
    alone, (params, batch, keys) = toy.mesh_of("one"), problem(mesh, SPECS[1])

    def loss_fn(params, batch, keys, mesh=mesh):
        inner = jax.sharding.get_abstract_mesh()
        specs = {
            "in_specs": (
                PartitionSpec("fsdp", None, "tensor"),
                PartitionSpec("tensor"),
            ),
            "out_specs": PartitionSpec("fsdp"),
        }
        options = {
            "mesh": inner if inner.shape else mesh,
            "axis_names": {"fsdp", "tensor"},
            "check_vma": False,
        }
        x = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "tensor"), **specs, **options
        )(batch["x"], params["w"])
        return jnp.sum(jnp.tanh(x)), jnp.sum(batch["weight"]), {}

    plan = toy.plan_for(
        mesh,
        f"0:{R * K}",
        steps=1,
        microbatch_size=R // mesh.shape["data"] // mesh.shape["fsdp"],
    )
    rows = jax.tree.map(lambda x: np.asarray(x).reshape(R * K, *x.shape[2:]), batch)

    def first_step(**options):
        state = rampup.create_state(params, optax.sgd(1.0), mesh)
        step = make_step(loss_fn, optax.sgd(1.0), plan, mesh, **options)
        return step(state, step.batch(rows))

    if name in ("one", "data_tensor"):
        with pytest.raises(ValueError, match="of one device"):
            first_step(reduce_once=True)
    before = jax.device_get(params)
    state, metrics = first_step(reduce_once=reduce_once)
    loss, grads = expected_sums(
        functools.partial(loss_fn, mesh=alone), before, batch, keys, 1
    )
    weight = np.sum(rows["weight"])
    found = (
        metrics["loss"] * weight,
        jax.tree.map(
            lambda old, new: (old - new) * weight, before, jax.device_get(state.params)
        ),
    )
    assert_close(found, (loss, grads))


def test_a_mesh_with_names_of_its_own_and_two_axes_of_replicas():
    """A loss that carries a mean over all replicas, and sees no axis that is mapped in
    its own constraints.
    """
    mesh = jax.make_mesh((2, 1, 2, 2), ("slice", "copy", "shard", "part"))
    axes = BatchAxes(replica=("slice", "copy"), rows=("slice", "copy", "shard"))
    params, batch, keys = problem(mesh, ("part", "shard"), axes)

    def loss_fn(params, batch, keys, mutable):
        x = jax.lax.with_sharding_constraint(
            embedding(params, batch),
            NamedSharding(auto_view(mesh), PartitionSpec(axes.rows)),
        )
        mean = jax.lax.pmean(jnp.mean(x), axes.replica)
        return (
            jnp.sum(jnp.square(x - mean)),
            batch["weight"].sum(),
            {},
            {"mean": mean, "n": mutable["n"] + 1},
        )

    def plain(params, batch):
        x = embedding(params, batch)
        return jnp.sum(jnp.square(x - jnp.mean(x))), jnp.mean(x)

    start = {"mean": jnp.float32(0), "n": jnp.int32(0)}
    run = jax.jit(
        lambda *args: accumulate(
            AccumulatedLoss(loss_fn, axes, reduce_once=True),
            *args,
            mesh=mesh,
            mutable=start,
        )
    )
    sums = run(params, batch, np.int32(2), keys)
    params, batch = jax.device_get((params, batch))
    parts = [
        jax.value_and_grad(plain, has_aux=True)(
            params, jax.tree.map(operator.itemgetter(k), batch)
        )
        for k in range(2)
    ]
    assert_close(
        (sums.loss, sums.grads),
        jax.tree.map(jnp.add, *[(loss, grads) for (loss, _), grads in parts]),
    )
    np.testing.assert_allclose(sums.mutable["mean"], parts[-1][0][1], rtol=1e-5)
    assert int(sums.mutable["n"]) == 2


def test_gradients_are_reduced_over_the_replicas_once():
    """A step reduces gradients of sharded tables after its loop, with ZeRO-1 and
    measured noise too; its losses are plain.
    """
    mesh, alone, tx = (
        toy.mesh_of("data_fsdp_tensor"),
        toy.mesh_of("one"),
        optax.adam(1e-2),
    )
    params, batch, _ = problem(mesh, ("tensor", "fsdp"))
    host = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), batch)
    rows = [{name: x[n] for name, x in host.items()} for n in range(K * R)] * 8
    losses = []
    cases = [(alone, False, set()), (toy.mesh_of("data"), False, {"all-reduce"})]
    for where, zero, kinds in (
        *cases,
        (mesh, False, {"all-reduce"}),
        (mesh, True, {"reduce-scatter"}),
    ):
        plan = toy.plan_for(
            where,
            "0:8 16:16",
            steps=4,
            microbatch_size=8 // where.shape["data"] // where.shape["fsdp"],
        )
        given = params if where is mesh else jax.device_get(params)
        state = rampup.create_state(given, tx, where, shard_optimizer_over_data=zero)
        options = {"shard_optimizer_over_data": zero, "measure_gradient_noise": zero}
        step = make_step(loss_of([labels]), tx, plan, where, **options)
        found = rampup.contrib.lab.inspect(step, state, next(step.batches(rows)))
        crossing = [c for c in found.collectives if c.axes is None or "data" in c.axes]
        reductions = [
            c
            for c in crossing
            if c.kind in ("all-reduce", "reduce-scatter") and c.num_bytes > 100
        ]
        assert {c.kind for c in reductions} == kinds
        assert not any(c.in_loop for c in reductions)
        losses.append(
            [
                metrics["loss"]
                for metrics in toy.history(step, state, step.batches(rows))[1]
            ]
        )
    np.testing.assert_allclose(losses[1:], losses[:1] * 3, rtol=1e-5)


def whole_lookup(p, b):
    """Look up a table that is whole, as a pipeline asks for."""
    context, table = jax.sharding.get_abstract_mesh(), p["table"]
    if context.shape:
        sizes = tuple(context.shape.values())
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        whole = NamedSharding(
            jax.sharding.Mesh(devices, [*context.shape]), PartitionSpec()
        )
        table = jax.lax.with_sharding_constraint(table, whole)
    return jnp.tanh(table[b["id"]])


def one_hot_labels(p, b):
    """Take the embeddings and the probabilities of labels by products."""
    chosen = jax.nn.one_hot(b["id"], V)
    logits = jax.nn.log_softmax(chosen @ p["table"] @ p["w"])
    return jnp.sum(logits * chosen[..., :E], axis=-1)


def sums_of_pipeline(operations, spec):
    """Return the sums of two stages beside fsdp and tensor, with operations in the last
    part, and those of plain `jax.jit`.
    """
    mesh = rampup.make_mesh(rampup.MeshAxes(fsdp=2, tensor=2, pipeline=2))
    params, batch, keys = problem(mesh, spec)
    loss_fn = loss_of(operations)
    loss = PipelinedLoss(
        first=lambda params, batch, keys: batch["x"],
        stage=lambda layers, x, *others: jax.lax.scan(
            lambda x, w: (x + jnp.tanh(x * w), None), x, layers
        )[0],
        last=lambda params, x, batch, keys: loss_fn(params, batch | {"x": x}, keys),
    )
    layers = np.linspace(0.1, 0.5, 4, dtype=np.float32)
    params["layers"] = jax.device_put(
        layers, NamedSharding(mesh, PartitionSpec("stage"))
    )
    shardings = shardings_like(params, mesh)
    run = jax.jit(
        lambda params, rows, m: loss.sums(
            params, rows, (m, 1), Recipe(), mesh, shardings
        )
    )
    sums = run(params, (batch, keys), np.int32(K))

    def plain(params, batch, keys):
        x = loss.stage(params["layers"], batch["x"])
        return loss.last(
            {name: p for name, p in params.items() if name != "layers"}, x, batch, keys
        )

    expected = expected_sums(plain, params, batch, keys, 1)
    return (sums.loss, sums.grads), expected


@pytest.mark.parametrize(
    ("operations", "spec"),
    [
        ([whole_lookup, one_hot_labels], SPECS[1]),
        ([whole_lookup, one_hot_labels], SPECS[4]),
        *(
            toy.slow([one], spec)
            for one in (whole_lookup, one_hot_labels)
            for spec in SPECS
        ),
    ],
)
def test_an_operation_in_a_pipeline_equals_plain_jit(operations, spec):
    """Where the stage axis is manual beside fsdp and tensor: look-ups in whole tables
    and products, with their gradients.
    """
    assert_close(*sums_of_pipeline(operations, spec))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (embedding, "gather"),
        (labels, "gather"),
        (scatter, "scatter"),
        (ordering, "sort"),
        (top_k, "top_k"),
        (segment_sum, "scatter-add"),
        (experts, "gather|scatter-add"),
        (depthwise, "conv_general_dilated"),
        (convolution, "conv_general_dilated"),
        (tensor_kernel, "shard_map"),
    ],
)
def test_what_a_pipeline_beside_two_axes_cannot_run_is_refused(operation, name):
    """XLA would end the process there, so the error comes before it and says what to
    write instead.
    """
    words = f"the loss has a ({name}).* beside fsdp and tensor"
    with pytest.raises(rampup.errors.ConfigError, match=words):
        sums_of_pipeline([operation], SPECS[1])


def test_a_look_up_in_parts_beside_two_axes_is_told_of_products_alone():
    """The gradient of a look-up in a whole operand is a scatter there, so the error
    does not offer it.
    """
    mesh = jax.make_mesh((2, 2, 2), ("data", "a", "b"))
    axes = BatchAxes(replica=("data",), rows=("data",))
    params, batch, keys = problem(mesh, ("a", "b"), axes)
    loss = AccumulatedLoss(
        loss_of([whole_lookup]), axes, param_shardings=shardings_like(params, mesh)
    )
    run = jax.jit(lambda *args: accumulate(loss, *args, mesh=mesh))
    words = r"beside a and b here; use one of these axes only, or multiply with"
    with pytest.raises(rampup.errors.ConfigError, match=words):
        run(params, batch, np.int32(K), keys)
