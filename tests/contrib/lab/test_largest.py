"""Tests of rampup.contrib.lab.largest: the largest microbatch of a step of one's own."""

import jax
import jax.numpy as jnp
import optax
import pytest

import rampup
from rampup.contrib.lab import largest_microbatch
from rampup.contrib.lab.largest import largest_of
from rampup.errors import ConfigError
from rampup.plan.mesh_axes import MeshAxes

ROW = {"x": jax.ShapeDtypeStruct((64,), jnp.float32)}
WIDTH = 8192


def loss_fn(params, batch, keys):
    """Return a loss whose activations are WIDTH numbers a row."""
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return jnp.sum(hidden**2), hidden.size, {}


def state_on(mesh):
    """Return a training state on a mesh."""
    return rampup.create_state({"w": jnp.ones((64, WIDTH))}, optax.adam(0.01), mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(MeshAxes(data=2), marks=pytest.mark.slow),
        MeshAxes(data=2, fsdp=2),
    ],
)
def test_the_size_fits_and_the_next_one_does_not(axes):
    """By the memory of the compiled step itself, for arrays and for their shapes; twice
    the memory has room for about twice the rows.
    """
    mesh = rampup.make_mesh(axes, devices=jax.devices()[: 2 * axes.fsdp])
    state, tx = state_on(mesh), optax.adam(0.01)
    found = [
        largest_microbatch(loss_fn, tx, state, ROW, mesh, memory_gib=gib)
        for gib in (0.02, 0.04)
    ]
    for each in found:
        fitting = [n for n, x in each.bytes_by_size.items() if x <= each.usable_bytes]
        assert each.microbatch_size == max(fitting)
        assert each.bytes_by_size[each.next_larger] > each.usable_bytes
        assert each.next_larger <= 2 * each.microbatch_size
    assert found[1].microbatch_size >= 2 * found[0].microbatch_size
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    again = largest_microbatch(loss_fn, tx, shapes, ROW, mesh, memory_gib=0.02)
    assert again == found[0]


def test_a_step_that_runs_out_of_memory_does_not_fit():
    """Where steps run to find out, the state is only looked at; an error of the loss is
    raised as it is.
    """
    mesh = rampup.make_mesh(devices=jax.devices()[:1])
    state, tx = state_on(mesh), optax.adam(0.01)

    def grows(params, batch, keys):
        # From five rows on 2**54 bytes: more than an address space has.
        exponent = 10 if len(batch["x"]) <= 4 else 52
        one = params["w"][0, 0]
        many = jax.lax.optimization_barrier(jnp.full(1 << exponent, one))
        return many[0] + jnp.sum(batch["x"]), 1.0, {}

    found = largest_microbatch(grows, tx, state, ROW, mesh, run=True, most=16)
    assert found[:2] == (4, 6)
    assert found.usable_bytes is None
    assert float(state.params["w"].sum()) == 64 * WIDTH

    def fails(params, batch, keys):
        raise ValueError("my own mistake")

    with pytest.raises(ValueError, match="my own mistake"):
        largest_microbatch(fails, tx, state, ROW, mesh, run=True)


def test_a_device_without_memory_of_its_own_asks_for_it():
    """A CPU reports none."""
    mesh = rampup.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match="no memory limit of its own"):
        largest_microbatch(loss_fn, optax.adam(0.01), state_on(mesh), ROW, mesh)


@pytest.mark.parametrize("limit", range(14))
def test_sizes_are_tried_from_below(limit):
    """The answer is that of trying all of them, and no size is tried that is more than
    four places beyond the limit at first.
    """
    sizes, tried = list(range(1, 13)), []

    def fits(size):
        tried.append(size)
        return size <= limit

    fitting = [size for size in sizes if size <= limit]
    largest = max(fitting, default=None)
    larger = min((size for size in sizes if size > limit), default=None)
    assert largest_of(sizes, fits) == (largest, larger)
    assert len(tried) == len(set(tried)) <= 8
    assert tried[0] == 1
    assert all(size <= 2 * max(limit, 1) + 1 for size in tried)
