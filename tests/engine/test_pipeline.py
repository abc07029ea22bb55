"""Tests of rampup.engine.pipeline, in float64 against the model without a pipeline; one
executable serves many cases.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from helpers.toy import slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rampup import PipelinedLoss, make_mesh
from rampup.engine.pipeline import permute_layers
from rampup.engine.sums import Recipe
from rampup.errors import ConfigError, PipelineShapeError
from rampup.plan import MeshAxes
from rampup.plan.pipeline import pass_ticks, stage_layer_order

pytestmark = pytest.mark.usefixtures("float64")

LAYERS, WIDTH, ROWS, MOST, WORDS = 48, 8, 4, 16, 11


@functools.cache
def problem():
    """Return parameters with a tied embedding, sixteen microbatches, their keys, and a
    function for the loss in parts.
    """
    rng = np.random.default_rng(0)
    layers = {
        "kernel": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "bias": np.zeros((LAYERS, WIDTH)),
    }
    params = jax.tree.map(
        jnp.asarray, {"layers": layers, "embedding": rng.normal(size=(WORDS, WIDTH))}
    )
    batch = {
        "token": jnp.asarray(rng.integers(0, WORDS, size=(MOST, ROWS))),
        "target": jnp.asarray(rng.integers(0, WORDS, size=(MOST, ROWS))),
        "weight": jnp.asarray(rng.integers(0, 5, size=(MOST, ROWS)).astype(np.float64)),
        "bias": jnp.asarray(rng.normal(size=(MOST, ROWS, WIDTH)) * 0.1),
    }
    keys = jax.vmap(jax.vmap(jax.random.key))(
        jnp.arange(MOST * ROWS).reshape(MOST, ROWS)
    )

    def first(params, batch, rngs):
        x = (batch["token"][:, None] == jnp.arange(WORDS)) @ params["embedding"]
        return {"x": x, "sum": x[:, :1]}

    def stage(layers, state, batch, rngs, first_layer):
        def one(state, numbered):
            layer, number = numbered
            x = state["x"] + batch["bias"] * jnp.cos(number)
            # Divided by its norm, without an epsilon.
            y = (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ layer[
                "kernel"
            ] + layer["bias"]
            x += 0.3 * jnp.tanh(y)
            return {"x": x, "sum": state["sum"] + x[:, :1]}, None

        numbers = first_layer + jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        return jax.lax.scan(one, state, (layers, numbers))[0]

    def last(params, state, batch, rngs):
        logits = (state["x"] * state["sum"]) @ params["embedding"].T
        chosen = jnp.sum(
            jnp.where(batch["target"][:, None] == jnp.arange(WORDS), logits, 0), -1
        )
        loss = jnp.sum((jax.nn.logsumexp(logits, -1) - chosen) * batch["weight"])
        return loss, jnp.sum(batch["weight"]), {"rows": batch["weight"].size}

    def parts(**options):
        return PipelinedLoss(first=first, stage=stage, last=last, **options)

    return params, batch, keys, parts


@functools.cache
def reference():
    """Return loss, weight and gradients of the first m microbatches for every m, from
    the model without a pipeline.
    """
    params, batch, keys, parts = problem()
    loss = parts()

    def of_one(params, batch, keys):
        shared = {"embedding": params["embedding"]}
        x = loss.stage(
            params["layers"], loss.first(shared, batch, keys), batch, keys, 0
        )
        total, weight, _ = loss.last(shared, x, batch, keys)
        return total, weight

    grad = jax.vmap(jax.value_and_grad(of_one, has_aux=True), (None, 0, 0))
    return jax.tree.map(
        lambda x: np.cumsum(np.asarray(x), axis=0), jax.jit(grad)(params, batch, keys)
    )


def on_mesh(params, axes, repeats=1):
    """Return a mesh and the parameters on it, layers in the order in which the stages
    hold them.
    """
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    tensor = "tensor" if axes.tensor > 1 else None
    specs = {
        "layers": jax.tree.map(
            lambda x: PartitionSpec("stage", *(None,) * (x.ndim - 2), tensor),
            params["layers"],
        ),
        "embedding": PartitionSpec(None, tensor),
    }
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    order = stage_layer_order(LAYERS, axes.pipeline, repeats)
    return (
        mesh,
        shardings,
        jax.device_put(permute_layers(params, order), shardings),
        np.argsort(order),
    )


def largest_error(found, wanted):
    """Return the largest difference, relative to the largest value of each array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b)) for a, b in pairs)


GRID = [(p, v, {}) for p in (1, 2, 4, 8) for v in (1, 2, 3)]
BESIDE = [(2, v, {"data": 2, "tensor": 2}) for v in (1, 2, 3)]
DEFAULT = [BESIDE[1]]  # with repeats and other axes
OPTIONS = {
    "skipping": {},
    "computing": {"skip_idle": False},
}


@pytest.mark.parametrize(
    ("p", "v", "beside"),
    [case if case in DEFAULT else slow(*case) for case in GRID + BESIDE],
)
def test_pipeline_sums_equal_the_model(p, v, beside):
    """One trace serves 1 to 16 microbatches, and loss, weight and gradients equal those
    of the model to 1e-9 for each.
    """
    check_all(
        MeshAxes(pipeline=p, **beside), problem()[3](num_repeats=v), range(1, MOST + 1)
    )


@pytest.mark.parametrize(
    ("v", "name"),
    [
        (1, "computing"),
        slow(2, "computing"),
    ],
)
def test_pipeline_sums_with_other_options_equal_the_model(name, v):
    """To compute idle ticks instead of skipping them changes no result."""
    check_all(
        MeshAxes(pipeline=4),
        problem()[3](num_repeats=v, **OPTIONS[name]),
        (1, 3, 4, 7, 16),
    )


def check_all(axes, loss, numbers):
    """Compare the pipeline with the model for several numbers of microbatches, counting
    traces.
    """
    params, batch, keys, _ = problem()
    mesh, shardings, placed, natural = on_mesh(params, axes, loss.num_repeats)
    (losses, weights), grads = reference()
    traces = []

    @jax.jit
    def run(params, m):
        traces.append(m)
        return loss.sums(params, (batch, keys), (m, 1), Recipe(), mesh, shardings)

    for m in numbers:
        sums = run(placed, m)
        assert abs(sums.loss - losses[m - 1]) <= 1e-9 * abs(losses[m - 1])
        assert sums.weight == weights[m - 1]
        assert sums.aux["rows"] == m * ROWS
        assert (
            largest_error(
                permute_layers(sums.grads, natural),
                jax.tree.map(lambda g: g[m - 1], grads),  # noqa: B023
            )
            < 1e-9
        )
    assert len(traces) == 1


def test_pipeline_sums_run_several_passes():
    """Three passes of four microbatches have the mean gradient of twelve, and the
    forward alone gives the same loss.
    """
    params, batch, keys, parts = problem()
    mesh, shardings, placed, natural = on_mesh(params, MeshAxes(pipeline=4))
    (losses, weights), grads = reference()
    rows = batch, keys
    run = jax.jit(
        lambda params: parts().sums(params, rows, (4, 3), Recipe(), mesh, shardings)
    )
    sums = run(placed)
    assert (
        largest_error(
            permute_layers(sums.mean_grads(), natural),
            jax.tree.map(lambda g: g[11] / weights[11], grads),
        )
        < 1e-9
    )
    alone = jax.jit(lambda params: parts().sums(params, rows, (12, 1), Recipe(), mesh))(
        placed
    )
    assert alone.grads is None
    np.testing.assert_allclose(alone.loss, losses[11], rtol=1e-12)
    recipe = Recipe(mutable={"n": jnp.zeros(())})
    with pytest.raises(ConfigError, match="supports neither `mutable`"):
        parts().sums(placed, rows, (2, 1), recipe, mesh)


def test_the_program_runs_the_ticks_that_the_plan_counts():
    """Also if the stages do not divide the microbatches: counted in every stage, by one
    program for all numbers.
    """
    params, batch, keys, parts = problem()
    mesh, _, placed, _ = on_mesh(params, MeshAxes(pipeline=4), repeats=3)
    loss, chunks = parts(num_repeats=3, skip_idle=False), []

    def stage(layers, x, batch, keys, first_layer):
        jax.debug.callback(chunks.append, first_layer)
        return loss.stage(layers, x, batch, keys, first_layer)

    counted = dataclasses.replace(loss, stage=stage)
    run = jax.jit(
        lambda params, m: counted.sums(params, (batch, keys), (m, 1), Recipe(), mesh)
    )
    for m in (2, 5, 8):
        chunks.clear()
        run(placed, m)
        jax.effects_barrier()
        assert len(chunks) == 4 * pass_ticks(4, m, 3)


def compiled(loss, number, axes):
    """Return the executable for at most `number` microbatches, and the bytes of its
    rows.
    """
    params, batch, keys, _ = problem()
    mesh, shardings, placed, _ = on_mesh(params, axes, loss.num_repeats)
    batch, keys = jax.tree.map(
        lambda x: jnp.concatenate([x[:4]] * (number // 4)), (batch, keys)
    )

    def run(params, batch, keys):
        return loss.sums(params, (batch, keys), (number, 1), Recipe(), mesh, shardings)

    return (
        jax.jit(run).lower(placed, batch, keys).compile(),
        sum(x.nbytes for x in jax.tree.leaves(batch)) + 8 * keys.size,
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_the_microbatches():
    """From 4 to 64 microbatches, temporary memory grows by no more than the inputs."""
    (few, inputs), (many, more) = (
        compiled(problem()[3](), number, MeshAxes(pipeline=4)) for number in (4, 64)
    )
    grown = (
        many.memory_analysis().temp_size_in_bytes
        - few.memory_analysis().temp_size_in_bytes
    )
    assert grown <= more - inputs


@pytest.mark.parametrize(("p", "v", "m"), [slow(4, 1, 16), (4, 2, 16), slow(2, 3, 12)])
def test_a_tick_has_two_permutes_and_a_step_one_reduction(p, v, m):
    """The loop runs the documented ticks, with a permute of activations and one of
    gradients (per leaf), and no all-reduce.
    """
    executable, _ = compiled(
        problem()[3](num_repeats=v), m, MeshAxes(pipeline=p, data=2)
    )
    text = executable.as_text()
    assert v * m + p - 1 + v * p - 1 in map(
        int, re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
    )
    leaves = 2
    assert len(re.findall(r"= .*? collective-permute(?:-start)?\(", text)) == 2 * leaves
    reductions = re.findall(r"^.*? all-reduce(?:-start)?\(.*$", text, re.MULTILINE)
    assert len(reductions) <= 3
    assert not [line for line in reductions if "while/body" in line]
    for name in ("forward_tick", "backward_tick", "reduce"):
        assert f"/{name}/" in text


@pytest.mark.parametrize(
    ("spoil", "key", "words"),
    [
        ("repeats", "base_num_decoder_layers", "at least 1 each"),
        (
            "repeats of 5",
            "base_num_decoder_layers",
            r"48 must be a multiple of .* 4 \* 5 = 20; nearest: 40, 60",
        ),
        ("axis", None, "no axis 'stage'"),
        ("shape", None, "must keep the shape and type"),
        ("dtype", None, "must keep the shape and type"),
        (
            "integer",
            None,
            "must be floating-point, .*int32.*; put other values into the batch",
        ),
        (
            "frozen",
            None,
            "a dict with arrays under .layers. .* here is a FrozenDict with ",
        ),
        (
            "ordered",
            None,
            "a dict with arrays under .layers. .* here is an OrderedDict with ",
        ),
        ("list", None, "a dict with arrays under .layers. .* here is a list"),
        ("missing", None, r"here is a dict with layers of the sizes \[\]"),
        ("scalar", None, r"with layers of the sizes \[\(\), \(48,\)\]"),
    ],
)
def test_pipeline_sums_refuse_wrong_shapes_before_compiling(spoil, key, words):
    """Sizes that do not divide, parameters without stacked layers, and stages that do
    not pass on what they get, in words.
    """
    params, batch, keys, parts = problem()
    mesh, shardings, placed, _ = on_mesh(params, MeshAxes(pipeline=4))
    loss = parts(num_repeats={"repeats": 0, "repeats of 5": 5}.get(spoil, 1))
    if spoil == "axis":
        mesh = jax.make_mesh(
            (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
        )
    changes = {"shape": lambda x: x[:, :4], "dtype": lambda x: x.astype(jnp.float32)}
    if spoil in changes:
        loss = dataclasses.replace(
            loss, stage=lambda layers, x, *_: {**x, "x": changes[spoil](x["x"])}
        )
    if spoil == "integer":

        def first(*args):
            return {
                **parts().first(*args),
                "n": jnp.zeros((ROWS,), jnp.int32),
            }

        loss = dataclasses.replace(loss, first=first, stage=lambda layers, x, *_: x)
    if spoil == "scalar":
        placed["layers"]["scale"] = jnp.ones(())
    if spoil == "missing":
        del placed["layers"]
    kinds = {
        "frozen": FrozenDict,
        "ordered": collections.OrderedDict,
        "list": lambda params: [*params.values()],
    }
    placed = kinds.get(spoil, dict)(placed)
    with pytest.raises(PipelineShapeError, match=words) as caught:
        loss.sums(placed, (batch, keys), (4, 1), Recipe(), mesh, shardings)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("part", "spoiled", "words"),
    [
        (
            "first",
            lambda params, batch: params,
            "takes 2 positional arguments",
        ),
        (
            "stage",
            lambda layers, x, batch, keys: x,
            "takes 4 positional arguments",
        ),
        (
            "last",
            lambda params, x: (0.0, 1.0, {}),
            "takes 2 positional arguments",
        ),
        (
            "last",
            lambda params, x, batch, keys: (0.0, 1.0, keys),
            r"aux of the loss function has values for single rows",
        ),
    ],
)
def test_parts_that_break_their_contract_are_refused(part, spoiled, words):
    """A part that does not take its arguments, and `aux` with a value per row, are
    errors before anything is compiled.
    """
    params, batch, keys, parts = problem()
    mesh, shardings, placed, _ = on_mesh(params, MeshAxes(pipeline=4))
    loss = dataclasses.replace(parts(), **{part: spoiled})
    # What Python or a loss raises itself arrives as it is.
    with pytest.raises((TypeError, ConfigError), match=words):
        loss.sums(placed, (batch, keys), (4, 1), Recipe(), mesh, shardings)
