"""ZeRO-1: the optimizer's state sharded over the replicas, with one reduction per
step.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import (
    bytes_per_device,
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
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.engine.mesh import BatchAxes
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
        slow("data", {}),
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
    with pytest.raises(ValueError, match="shardings"):
        step(rampup.prepare_state(own, mesh), next(step.batches(rows())))


def count(text, name):
    """Return how often an instruction is in a program."""
    return len(re.findall(rf"= \S+ {name}(-start)?\(", text))


@pytest.mark.parametrize("num_microbatches", [1, slow(2), slow(8), 32])
def test_program_has_one_reduce_scatter_and_one_all_gather_per_array(num_microbatches):
    """Each gradient is reduced once and each parameter gathered once per step, after
    the loop, however many microbatches it has.
    """
    mesh, tx = mesh_of("data"), OPTIMIZERS["adamw"]
    plan = plan_for(mesh, f"0:{8 * num_microbatches}", microbatch_size=1)
    step = make_step(
        loss_fn, tx, plan, mesh, shard_optimizer_over_data=True, skip_nonfinite=True
    )
    state = begin(mesh)[1]
    text = step.lower(state, rows(1)[0], plan.splits[0]).compile().as_text()
    arrays = len(state.params)
    assert count(text, "reduce-scatter") == count(text, "all-gather") == arrays
    moving = [
        line for line in text.splitlines() if " all-" in line or "scatter(" in line
    ]
    assert not [line for line in moving if "while/body" in line]
    assert all(
        "f32[]" in line or "s32[]" in line or "pred[]" in line
        for line in moving
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
    with pytest.raises(ConfigError, match="not as shard_optimizer_over_data=True does"):
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
