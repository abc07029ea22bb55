"""Tests of rampup.contrib.lab.inspect: what it says of steps that are known to be good
or bad.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rampup
from rampup.cli import main
from rampup.errors import ConfigError, DataError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan

P = PartitionSpec
MICROBATCHES, ROWS, WIDTH = 3, 8, 24
PARAMS = {
    "in": jnp.full((WIDTH, 2 * WIDTH), 0.1),
    "out": jnp.full((2 * WIDTH, WIDTH), 0.1),
}
NUM_BYTES = sum(leaf.nbytes for leaf in PARAMS.values())


def loss(params, x):
    """Return the sum of squares of a small network over rows."""
    return jnp.sum((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)


@pytest.fixture(scope="module")
def mesh():
    """Four devices on the data axis."""
    return Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))


def place(mesh, tree, *spec):
    """Return arrays on the mesh, with the first dimensions sharded over the axes in
    `spec`.
    """
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def scan_step(params, batch):
    """A step as GSPMD training loops write it: a scan over microbatches that adds
    gradients up.
    """

    def add(total, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, grads), None

    grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def manual_step(mesh, lost=()):
    """A step that accumulates on each replica and reduces once, except the gradients in
    `lost`.
    """

    def local(params, batch):
        def add(total, x):
            grads = jax.grad(loss)(params, x)
            grads = {
                name: jax.lax.psum(g, "data") if name in lost else g
                for name, g in grads.items()
            }
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        grads = {
            name: g if name in lost else jax.lax.psum(g, "data")
            for name, g in grads.items()
        }
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(None, "data")),
        out_specs=P(),
        check_vma=False,
    )


def batch_of(mesh):
    """Return the microbatches of a step on the mesh."""
    return place(mesh, jnp.ones((MICROBATCHES, ROWS, WIDTH)), None, "data")


def test_inspect_says_that_a_gspmd_scan_reduces_in_every_microbatch(mesh):
    """All gradients are reduced inside the loop, as often as it runs, with their bytes
    and axis.
    """
    found = rampup.contrib.lab.inspect(
        jax.jit(scan_step), place(mesh, PARAMS), batch_of(mesh)
    )
    facts = found.to_dict()
    assert not found.reduces_once
    assert facts["gradient_bytes_in_loops"] == MICROBATCHES * NUM_BYTES
    assert {c.axes for c in found.repeated_reductions} == {("data",)}
    assert (
        "gradients are reduced over data inside of a loop,"
        f" {MICROBATCHES * NUM_BYTES:,} bytes in a run" in found.findings[0]
    )
    assert not any("lost" in finding for finding in found.findings)


def test_inspect_finds_the_reductions_of_a_text_whose_state_is_not_donated(mesh):
    """Without shardings, gradients have the shapes of arguments."""

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    text = (
        jax.jit(step)
        .lower(place(mesh, PARAMS), place(mesh, jnp.ones((ROWS, WIDTH)), "data"))
        .compile()
        .as_text()
    )
    assert (
        f"gradients ({NUM_BYTES:,} bytes in a run) are reduced"
        in rampup.contrib.lab.inspect(text).findings[0]
    )


def test_a_loop_over_layers_reduces_each_layer_once(mesh):
    """A scan over layers reduces one layer of the stacked parameters at a time; inside
    of a scan over microbatches it does so again and again.
    """
    layers = {"w": jnp.full((5, WIDTH, WIDTH), 0.1)}

    def of_rows(params, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (h @ w, None), x, params["w"])[0] ** 2)

    def step(params, x):
        grads = jax.grad(of_rows)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    def accumulating(params, batch):
        return jax.lax.scan(lambda p, x: (step(p, x), None), params, batch)[0]

    rows = place(mesh, jnp.ones((ROWS, WIDTH)), "data")
    found = rampup.contrib.lab.inspect(jax.jit(step), place(mesh, layers), rows)
    assert found.reduces_once
    assert found.to_dict()["gradient_reductions"] in (1, 5)
    found = rampup.contrib.lab.inspect(
        jax.jit(accumulating), place(mesh, layers), batch_of(mesh)
    )
    assert not found.reduces_once


@pytest.mark.parametrize("lost", [(), ("in",), ("out",)])
def test_inspect_tells_gradients_that_are_reduced_once_from_a_lost_tag(mesh, lost):
    """A step that accumulates on each replica has no reduction in the loop; an array
    that has one is named with its shape.
    """
    found = rampup.contrib.lab.inspect(
        jax.jit(manual_step(mesh, lost=lost)), place(mesh, PARAMS), batch_of(mesh)
    )
    assert found.reduces_once == (not lost)
    assert sum(c.num_bytes for c in found.gradient_reductions) == NUM_BYTES
    assert sum(c.num_bytes for c in found.repeated_reductions) == sum(
        PARAMS[name].nbytes for name in lost
    )
    shapes = [f"f32[{','.join(map(str, PARAMS[name].shape))}]" for name in lost]
    said = "reduced over data inside of a loop" if lost else "reduced over data once"
    assert any(
        said in text and all(shape in text for shape in shapes)
        for text in found.findings
    )
    assert any("lost their reduction tag" in x for x in found.findings) == bool(lost)


@pytest.mark.parametrize("lost", [(), ("out",)])
def test_inspect_finds_a_lost_tag_under_explicit_sharding(lost):
    """With explicit sharding a parameter tagged `reduced` is reduced once after the
    loop, one without the tag inside it.
    """
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Explicit,))

    def step(params, batch):
        tagged = {
            k: p if k in lost else jax.sharding.reshard(p, P(reduced={"data"}))
            for k, p in params.items()
        }

        def add(total, x):
            grads = jax.grad(loss)(tagged, x)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = {
            k: jax.sharding.reshard(
                jnp.zeros_like(p), P() if k in lost else P(unreduced={"data"})
            )
            for k, p in params.items()
        }
        grads, _ = jax.lax.scan(add, zeros, batch)
        grads = {
            k: g if k in lost else jax.sharding.reshard(g, P())
            for k, g in grads.items()
        }
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    with jax.set_mesh(mesh):
        try:
            found = rampup.contrib.lab.inspect(
                jax.jit(step), place(mesh, PARAMS), batch_of(mesh)
            )
        except (
            AttributeError,
            TypeError,
            ValueError,
            NotImplementedError,
        ) as error:  # a version without reduced axes
            pytest.skip(f"this JAX cannot trace it: {str(error)[:80]}")
    assert found.reduces_once == (not lost)
    assert any("lost" in text for text in found.findings) == bool(lost)


def test_inspect_says_that_multi_steps_reduces_in_every_microbatch(mesh):
    """Each call of a step with optax.MultiSteps is one microbatch, with the optimizer
    and all gradients.
    """
    tx = optax.MultiSteps(optax.adamw(1e-3), 4)
    state = place(mesh, (PARAMS, tx.init(PARAMS)))

    @partial(jax.jit, donate_argnums=0)
    def step(state, x):
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    x = place(mesh, jnp.ones((ROWS, WIDTH)), "data")
    found = rampup.contrib.lab.inspect(step, state, x)
    assert found.uses_multi_steps
    assert not found.reduces_once
    assert "each call is one microbatch" in found.findings[0]
    assert f"({NUM_BYTES:,} bytes in a run) are reduced" in found.findings[1]
    text = step.lower(state, x).compile().as_text()
    assert rampup.contrib.lab.inspect(text, mesh=(("data", 4),)).uses_multi_steps


def rampup_step(mesh, **options):
    """Return rampup's own step, its state and a batch of three microbatches."""
    ramp, splitter = (
        BatchRamp.from_schedule(f"0:{ROWS} 64:{MICROBATCHES * ROWS}"),
        BatchSplitter(data_parallel_size=4),
    )
    plan = RampPlan(ramp=ramp, splitter=splitter, num_devices=4, total_steps=20)
    tx = optax.adamw(1e-3)
    state = rampup.create_state(PARAMS, tx, mesh, **options)
    step = rampup.train_step(
        lambda p, rows, keys: (loss(p, rows), float(ROWS), {}),
        tx,
        plan,
        mesh,
        **options,
    )
    batch = next(step.batches(np.ones((400, WIDTH), np.float32), 8))
    return step, state, batch


def test_inspect_reads_a_train_step(mesh):
    """The gradients are reduced once whatever the microbatches, and the program says
    its memory.
    """
    found = rampup.contrib.lab.inspect(*rampup_step(mesh))
    assert found.loop_trips == (MICROBATCHES,)
    assert found.reduces_once
    assert found.to_dict()["memory"]["total"] > 0


def test_a_loop_that_runs_once_is_known(mesh):
    """In the first phase a step has one microbatch, and nothing is asked for."""
    step, state, _ = rampup_step(mesh)
    batch = next(step.batches(np.ones((400, WIDTH), np.float32)))
    found = rampup.contrib.lab.inspect(step, state, batch)
    assert found.loop_trips == (1,)
    assert not any("give loop_trips" in text for text in found.findings)


@pytest.mark.parametrize(("loop_trips", "count"), [((3, 5), 15), ((3,), 3), (None, 1)])
def test_inspect_counts_loops_without_trips_once(loop_trips, count, mesh):
    """Of nested loops whose bounds are arguments, those that `loop_trips` leaves out
    count once, and a remark says so.
    """

    def step(w, n, m):
        return jax.lax.fori_loop(
            0,
            n,
            lambda i, w: jax.lax.fori_loop(0, m, lambda j, w: jnp.tanh(w @ w), w),
            w,
        )

    w = place(mesh, jnp.ones((8, 8)), None, "data")
    found = rampup.contrib.lab.inspect(jax.jit(step), w, 3, 5, loop_trips=loop_trips)
    inside = [c for c in found.collectives if len(c.loops) == 2]
    assert inside
    assert {c.count(found.loop_trips) for c in inside} == {count}
    assert any("give loop_trips" in text for text in found.findings) == (
        loop_trips != (3, 5)
    )


def test_inspect_refuses_what_is_no_step(tmp_path, mesh):
    """A clear error for a file that is missing or no program, an object that is no
    step, and senseless trip counts.
    """
    (tmp_path / "a.txt").write_text("module @jit_f {\n}\n")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00\x81")
    text = (
        jax.jit(scan_step)
        .lower(place(mesh, PARAMS), batch_of(mesh))
        .compile()
        .as_text()
    )
    head = text[: text.index("\n", text.index("ENTRY")) + 1]
    for error, message, args, options in (
        (DataError, "no line starts with ENTRY", [tmp_path / "a.txt"], {}),
        (DataError, "cut short", [text[: text.rindex("ROOT")]], {}),
        (DataError, "cut short", [head], {}),
        (DataError, "cut short", [head + "}\n"], {}),
        (DataError, "not compiled yet", [text.replace("is_scheduled=true, ", "")], {}),
        (
            ConfigError,
            "mesh=data=3 has 3 devices, but the program has 4",
            [text],
            {"mesh": (("data", 3),)},
        ),
        (DataError, "not text", [str(tmp_path / "b.txt")], {}),
        (DataError, "no file", ["nowhere.txt"], {}),
        (ConfigError, "is not a step", [3], {}),
        (ConfigError, "at least 1", [lambda x: x, jnp.ones(2)], {"loop_trips": 0}),
        (ConfigError, "takes a state and a batch", [rampup_step(mesh)[0], 1], {}),
    ):
        with pytest.raises(error, match=message):
            rampup.contrib.lab.inspect(*args, **options)


def test_an_inspection_prints_what_the_command_prints(mesh, tmp_path, capsys):
    """`print` gives the findings and the facts, each on a line of its own, and so does
    `rampup inspect`.
    """
    (tmp_path / "a.txt").write_text(
        jax.jit(scan_step)
        .lower(place(mesh, PARAMS), batch_of(mesh))
        .compile()
        .as_text()
    )
    found = rampup.contrib.lab.inspect(tmp_path / "a.txt", mesh=mesh)
    lines = str(found).splitlines()
    assert lines[: len(found.findings)] == [
        f"- {finding}" for finding in found.findings
    ]
    assert "collectives of a run, for each device:" in lines
    assert (
        sum(line.startswith("  all-reduce  over data  4 devices") for line in lines)
        >= 1
    )
    assert max(map(len, lines)) < 400
    assert main(["inspect", str(tmp_path / "a.txt"), "--mesh", "data=4"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert found.memory is None
