"""ZeRO-1: the optimizer's state sharded over the replicas, with one reduction per
step.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import (
    TORI,
    flax_state,
    history,
    loss_fn,
    make_step,
    mesh_of,
    new_params,
    plan_for,
    rows,
    slow,
)
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import rampup
from rampup.engine import zero
from rampup.engine.mesh import BatchAxes
from rampup.engine.offload import bytes_per_device
from rampup.engine.zero import scattered_shardings
from rampup.errors import ConfigError
from rampup.loop.checkpoint import CheckpointOptions, Checkpoints, find_checkpoint

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
}


def begin(
    mesh, *, sharded=True, tx=OPTIMIZERS["adamw"], loss=loss_fn, steps=12, **options
):
    """Return a step, and its state at the beginning."""
    step = make_step(
        loss,
        tx,
        plan_for(mesh, steps=steps),
        mesh,
        shard_optimizer_over_data=sharded,
        **options,
    )
    return step, rampup.create_state(
        new_params(mesh), tx, mesh, shard_optimizer_over_data=sharded
    )


def go_on(step, state, stop=None):
    """Return the losses and norms of the steps from a state on, and the state after
    them.
    """
    state, found = history(step, state, step.batches(rows(), state.step, stop))
    return (
        np.array([[metrics["loss"], metrics["grad_norm"]] for metrics in found]),
        state,
    )


def train(mesh_name, **options):
    """Return the losses, the final state and the step."""
    step, state = begin(mesh_of(mesh_name), **options)
    return *go_on(step, state), step


@functools.cache
def trained(mesh_name, sharded):
    """Return what `train` returns with its defaults, once for all tests that compare
    with it.
    """
    return train(mesh_name, sharded=sharded)


def is_bad_once(p, b, k):
    """Return a loss that is not a number in one step."""
    total, weight, aux = loss_fn(p, b, k)
    return total * jnp.where(jnp.any(b["id"] == 40), np.nan, 1.0), weight, aux


@pytest.mark.parametrize(
    ("mesh_name", "options"),
    [
        ("data", {}),
        ("data_fsdp_tensor", {}),
        ("data", {"loss": is_bad_once, "skip_nonfinite": True}),
        ("data", {"tx": OPTIMIZERS["adafactor"]}),
        *(
            slow("data", {"tx": OPTIMIZERS[name]}, id=name)
            for name in ("sgd", "clipped", "muon")
        ),
        *(slow(name, {}) for name in ("data_tensor", "fsdp")),
    ],
)
def test_losses_and_parameters_equal_those_of_plain_data_parallelism(
    mesh_name, options
):
    """Over a ramp, in one program, with a skipped step, and with optimizers that need
    norms and factors of whole arrays.
    """
    expected, plain, _ = (
        train(mesh_name, sharded=False, **options)
        if options
        else trained(mesh_name, False)
    )
    found, state, step = (
        train(mesh_name, **options) if options else trained(mesh_name, True)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6 if "tx" in options else 1e-6)
    assert np.isnan(found[:, 0]).sum() == ("loss" in options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        state.params,
        plain.params,
    )
    assert step.num_compilations == 1
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim),
            state.params,
            plain.params,
        )
    )


def test_state_of_ones_own_is_prepared_for_it():
    """A Flax `TrainState`, placed by `prepare_state`, has an eighth of the optimizer's
    state on each device, and keeps it.
    """
    expected, _, _ = trained("data", True)
    mesh, tx = mesh_of("data"), OPTIMIZERS["adamw"]
    own = flax_state()(new_params(mesh), tx)
    state = rampup.prepare_state(own, mesh, shard_optimizer_over_data=True)
    step, _ = begin(mesh)
    losses, after = go_on(step, state)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert (type(after), int(after.step), step.num_compilations) == (type(own), 12, 1)
    for each in (state, after, begin(mesh)[1]):
        # The counter is whole.
        assert (
            bytes_per_device(each.opt_state) - 4
            == (bytes_per_device(own.opt_state) - 4) / 8
        )
        assert bytes_per_device(each.params) == bytes_per_device(own.params)
    with pytest.raises(ConfigError, match="prepare_state"):
        step(rampup.prepare_state(own, mesh), next(step.batches(rows())))


@pytest.mark.parametrize("name", [k if k == "ring" else slow(k) for k in TORI])
def test_each_side_of_a_torus_takes_a_reduce_scatter(name, monkeypatch, tmp_path):
    """Losses, parameters and each device's part of the moments are those of one
    reduce-scatter, also after a restart.
    """
    sides = TORI[name]
    expected, one, _ = trained("data", True)
    monkeypatch.setattr(zero, "torus_of", lambda *_: sides)
    found, state, step = train("data", sharded=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

    def check(state):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            state.params,
            one.params,
        )
        for a, b in zip(
            jax.tree.leaves(state.opt_state),
            jax.tree.leaves(one.opt_state),
            strict=True,
        ):
            assert [part.index for part in a.addressable_shards] == [
                part.index for part in b.addressable_shards
            ]
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert bytes_per_device(state.opt_state) == bytes_per_device(one.opt_state)

    check(state)
    inspected = rampup.contrib.lab.inspect(step, state, next(step.batches(rows())))
    scattered = [c for c in inspected.collectives if c.kind == "reduce-scatter"]
    lines = [
        sorted(np.moveaxis(sides, k, 0).reshape(size, -1)[:, 0].tolist())
        for k, size in enumerate(sides.shape)
    ]
    assert [c.group for c in scattered] == [*map(tuple, lines)]
    assert [c.group_size for c in scattered] == [*sides.shape]
    assert not inspected.repeated_reductions
    # In all a device sends as much as in one reduce-scatter, and every side has a row
    # of its own.
    sent = [c.num_bytes * (c.group_size - 1) / c.group_size for c in scattered]
    assert sum(sent) == scattered[0].num_bytes * 7 / 8
    assert (
        sum(
            row["kind"] == "reduce-scatter"
            for row in inspected.to_dict()["collectives"]
        )
        == sides.ndim
    )
    assert (
        f"gradients ({scattered[0].num_bytes:,} bytes) are reduced over data once"
        in inspected.findings[0]
    )
    # A run that was saved with the sides resumes without them.
    _, state, _ = train("data", steps=4)
    with Checkpoints(
        tmp_path, CheckpointOptions(async_checkpointing=False)
    ) as checkpoints:
        checkpoints.save(4, state, {})
        monkeypatch.undo()
        step, state = begin(mesh_of("data"))
        state = checkpoints.restore(find_checkpoint(tmp_path), state)
    check(go_on(step, state)[1])


def count(text, name):
    """Return how often an instruction is in a program."""
    return len(re.findall(rf"= \S+ {name}(-start)?\(", text))


@pytest.mark.parametrize("num_microbatches", [1, slow(2), slow(8), 32])
def test_program_has_one_reduce_scatter_and_one_all_gather(num_microbatches):
    """Gradients are reduced once and parameters gathered once per step, however many
    microbatches it has.
    """
    mesh, tx = mesh_of("data"), OPTIMIZERS["adamw"]
    plan = plan_for(mesh, f"0:{8 * num_microbatches}", microbatch_size=1)
    step = make_step(
        loss_fn, tx, plan, mesh, shard_optimizer_over_data=True, skip_nonfinite=True
    )
    state = begin(mesh)[1]
    text = step.lower(state, rows(1)[0], plan.splits[0]).compile().as_text()
    assert (count(text, "reduce-scatter"), count(text, "all-gather")) == (1, 1)
    assert all(
        "f32[]" in line or "s32[]" in line or "pred[]" in line
        for line in text.splitlines()
        if " all-reduce(" in line
    )


def test_scattered_shardings_prefer_free_dimensions():
    """The first dimension that no axis shards is scattered, then one that both divide;
    otherwise nothing.
    """
    mesh, axes = mesh_of("data_fsdp_tensor"), BatchAxes()
    cases = {
        ((8, 6), (None, "tensor")): ("data", "tensor"),
        ((3, 8), ("fsdp",)): ("fsdp", "data"),
        ((8, 8), ("fsdp", "tensor")): (("data", "fsdp"), "tensor"),
        ((3, 5), ()): (),
        ((), ()): (),
    }
    for (shape, spec), expected in cases.items():
        leaf = jax.ShapeDtypeStruct(
            shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        assert scattered_shardings(leaf, mesh, axes).spec == PartitionSpec(*expected), (
            shape,
            spec,
        )


def test_states_that_do_not_belong_to_the_step_are_refused():
    """Sharded parameters, a state that is sharded otherwise, and `multi_steps`, are
    errors that name the option; the step follows a state made with or without it.
    """
    mesh = mesh_of("data")
    (step, state), (scattering, sharded) = begin(mesh, sharded=False), begin(mesh)
    batch = next(step.batches(rows()))
    other = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))),
        jax.tree.map(np.asarray, state.opt_state[0].mu),
    )
    others = (state.opt_state[0]._replace(mu=other), *state.opt_state[1:])
    with pytest.raises(ConfigError, match="not as shard_optimizer_over_data=True of"):
        step(state.replace(opt_state=others), batch)
    found = [
        run(own, batch)[1]["loss"]
        for run, own in ((step, sharded), (scattering, state))
    ]
    np.testing.assert_allclose(*found, rtol=1e-6)
    over_data = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        for name, x in new_params(mesh).items()
    }
    with pytest.raises(ConfigError, match="shard_optimizer_over_data"):
        step(rampup.create_state(over_data, step.tx, mesh), batch)
    step, _ = begin(mesh, engine="multi_steps")
    options = {"shard_optimizer_over_data": True}
    with pytest.raises(ConfigError, match="multi_steps"):
        step(rampup.create_state(new_params(mesh), step.tx, mesh, **options), batch)


def test_resume_on_fewer_replicas(tmp_path):
    """A run that resumes on 8, 4 and 2 replicas has the losses of the run on eight, and
    each takes its own part (ZeRO-1).
    """
    expected, _, _ = trained("data", True)
    losses = []
    for done, replicas in ((0, 8), (4, 4), (8, 2)):
        step, state = begin(
            rampup.make_mesh(rampup.MeshAxes(data=replicas), jax.devices()[:replicas])
        )
        with Checkpoints(
            tmp_path, CheckpointOptions(async_checkpointing=False)
        ) as checkpoints:
            if done:
                state = checkpoints.restore(find_checkpoint(tmp_path), state)
            found, state = go_on(step, state, done + 4)
            losses += [*found]
            checkpoints.save(done + 4, state, {})
        moment = state.opt_state[0].mu["in"]
        assert (
            moment.sharding.shard_shape(moment.shape)[0] == moment.shape[0] // replicas
        )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


# Chips (x, y, z) of eight devices.
CUBE = [(x, y, z) for z in range(2) for x in range(2) for y in range(2)]
RING = [
    (0, 0, 0),
    (1, 0, 0),
    (2, 0, 0),
    (3, 0, 0),
    (3, 1, 0),
    (2, 1, 0),
    (1, 1, 0),
    (0, 1, 0),
]
LINES = [[(0, k, 0) for k in range(8)], [(x, x, z) for x in range(4) for z in range(2)]]


def test_sides_of_a_torus(monkeypatch):
    """A cube and each of two slices have sides; unequal sides, a line, a part of a
    slice and an axis over slices have none.
    """
    monkeypatch.setattr(zero, "place_of", lambda device: device)

    def sides(chips, names=("data",), **shape):
        devices = np.empty(len(chips), object)
        devices[:] = [
            chip if chip is None or len(chip) == 4 else (0, *chip) for chip in chips
        ]
        shape = shape or {"data": len(chips)}
        mesh = SimpleNamespace(
            axis_names=tuple(shape),
            shape=shape,
            devices=devices.reshape(*shape.values()),
        )
        return zero.torus_of.__wrapped__(mesh, names)

    np.testing.assert_array_equal(sides(CUBE), np.arange(8).reshape(2, 2, 2))
    assert sides(CUBE, data=4, tensor=2) is None
    for chips in (*LINES, [(y, x, z) for x, y, z in RING[:4] * 2], RING, [None] * 8):
        assert sides(chips) is None
    swapped = [
        (1, 0, 3),
        (1, 0, 5),
        (0, 0, 5),
        (0, 0, 3),
        (0, 4, 3),
        (0, 4, 5),
        (1, 4, 5),
        (1, 4, 3),
    ]
    np.testing.assert_array_equal(sides(swapped), [[[3, 2], [0, 1]], [[4, 5], [7, 6]]])
    slices = [
        (number, x, y, 0) for number in range(2) for x in range(3) for y in range(3)
    ]
    np.testing.assert_array_equal(
        sides(slices, ("fsdp",), data=2, fsdp=9), np.arange(9).reshape(3, 3)
    )
    assert sides(slices, ("data", "fsdp"), data=2, fsdp=9) is None
    assert sides(slices, ("fsdp",), data=6, fsdp=3) is None
    # The two slices in different orders would need different groups.
    assert sides([slices[1], slices[0], *slices[2:]], ("fsdp",), data=2, fsdp=9) is None


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", TORI)
def test_gradient_of_a_gather_is_the_own_part_of_the_sum(name, dim, monkeypatch):
    """Each device has its part of the sum over all devices, after one reduce-scatter
    for each side.
    """
    mesh = mesh_of("fsdp")
    monkeypatch.setattr(zero, "torus_of", lambda *_: TORI[name])
    rng, shape, spec = np.random.default_rng(0), [3, 3], [None, None]
    shape[dim], spec[dim] = 16, "fsdp"
    x, factors = (
        rng.normal(size=shape).astype(np.float32),
        rng.normal(size=(8, *shape)).astype(np.float32),
    )

    def gradient(part, factor):
        return jax.grad(
            lambda x: jnp.sum(zero.gather(x, mesh, ("fsdp",), dim) ** 2 * factor[0])
        )(part)

    specs = PartitionSpec(*spec), PartitionSpec("fsdp")
    run = jax.jit(
        jax.shard_map(
            gradient, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )
    )
    np.testing.assert_allclose(
        run(x, factors), 2 * x * factors.sum(0), rtol=1e-4, atol=1e-5
    )
    text = run.lower(x, factors).compile().as_text()
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", text)) == TORI[name].ndim


def test_gather_without_a_torus_is_the_gather_of_jax():
    """On other devices, and for a mesh without devices, the program is that of
    `jax.lax.all_gather`.
    """
    mesh, specs = mesh_of("fsdp"), (PartitionSpec("fsdp"), PartitionSpec())

    def text(function):
        lowered = jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=specs[0],
                out_specs=specs[1],
                check_vma=False,
            )
        )
        return lowered.lower(np.zeros(16, np.float32)).as_text()

    def loss(gather, x):
        return jax.value_and_grad(lambda x: jnp.sum(gather(x) ** 2))(x)[0]

    plain = text(
        functools.partial(loss, lambda x: jax.lax.all_gather(x, ("fsdp",), tiled=True))
    )
    for given in (mesh, AbstractMesh((8,), ("fsdp",)), None):
        assert (
            text(
                functools.partial(
                    loss, lambda x, given=given: zero.gather(x, given, ("fsdp",), 0)
                )
            )
            == plain
        )
