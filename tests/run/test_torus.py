"""Reduce-scatters over the sides of a TPU torus, on simulated devices."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy import TORI, mesh_of
from jax.sharding import AbstractMesh, PartitionSpec

from rampup.run import torus

# Chips (x, y, z) of eight devices.
CUBE = [(x, y, z) for z in range(2) for x in range(2) for y in range(2)]
RING = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0), (2, 1, 0), (1, 1, 0), (0, 1, 0)]


@pytest.fixture
def on_torus(monkeypatch):
    """Return a function that places the simulated devices on a torus of TPU chips."""

    def place(chips, slices=(0,) * 8):
        places = [chip and (number, *chip) for number, chip in zip(slices, chips, strict=True)]
        monkeypatch.setattr(torus, "place_of", dict(zip(jax.devices(), places, strict=True)).get)
        torus.torus_of.cache_clear()

    yield place
    torus.torus_of.cache_clear()


def test_sides_of_a_torus(on_torus):
    """A cube has three sides. One reduce-scatter is kept over two unequal sides, a line, and a part of a slice."""
    sides = lambda name="data": torus.torus_of(mesh_of(name), ("data",))  # noqa: E731
    on_torus(CUBE)
    np.testing.assert_array_equal(sides(), np.arange(8).reshape(2, 2, 2))
    assert sides("data_tensor") is None
    on_torus([(y, x, z) for x, y, z in RING[:4] + RING[:4]])
    assert sides() is None
    for chips in (RING, [(0, k, 0) for k in range(8)], [(x, x, z) for x in range(4) for z in range(2)], [None] * 8):
        on_torus(chips)
        assert sides() is None
    on_torus([(1, 0, 3), (1, 0, 5), (0, 0, 5), (0, 0, 3), (0, 4, 3), (0, 4, 5), (1, 4, 5), (1, 4, 3)])
    np.testing.assert_array_equal(sides(), [[[3, 2], [0, 1]], [[4, 5], [7, 6]]])


def test_each_slice_is_a_torus(monkeypatch):
    """An axis over all chips of each of two slices has sides. One over both slices or over a part of one has none."""
    monkeypatch.setattr(torus, "place_of", lambda device: device)
    chips = np.empty(18, object)
    chips[:] = [(number, x, y, 0) for number in range(2) for x in range(3) for y in range(3)]

    def sides(names, **shape):
        mesh = SimpleNamespace(axis_names=tuple(shape), shape=shape, devices=chips.reshape(*shape.values()))
        return torus.torus_of.__wrapped__(mesh, names)

    np.testing.assert_array_equal(sides(("fsdp",), data=2, fsdp=9), np.arange(9).reshape(3, 3))
    assert sides(("data", "fsdp"), data=2, fsdp=9) is None
    assert sides(("fsdp",), data=6, fsdp=3) is None
    # The two slices in different orders would need different groups.
    chips[:2] = chips[1], chips[0]
    assert sides(("fsdp",), data=2, fsdp=9) is None


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", TORI)
def test_gradient_of_a_gather_is_the_own_part_of_the_sum(name, dim, monkeypatch):
    """Each device has its part of the sum over all devices, after one reduce-scatter for each side."""
    mesh = mesh_of("fsdp")
    monkeypatch.setattr(torus, "torus_of", lambda *_: TORI[name])
    rng, shape, spec = np.random.default_rng(0), [3, 3], [None, None]
    shape[dim], spec[dim] = 16, "fsdp"
    x, factors = rng.normal(size=shape).astype(np.float32), rng.normal(size=(8, *shape)).astype(np.float32)

    def gradient(part, factor):
        return jax.grad(lambda x: jnp.sum(torus.gather(x, mesh, ("fsdp",), dim) ** 2 * factor[0]))(part)

    specs = PartitionSpec(*spec), PartitionSpec("fsdp")
    run = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False))
    np.testing.assert_allclose(run(x, factors), 2 * x * factors.sum(0), rtol=1e-4, atol=1e-5)
    text = run.lower(x, factors).compile().as_text()
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", text)) == TORI[name].ndim


def test_gather_without_a_torus_is_the_gather_of_jax():
    """On other devices, and for a mesh without devices, the program is that of `jax.lax.all_gather`."""
    mesh, specs = mesh_of("fsdp"), (PartitionSpec("fsdp"), PartitionSpec())

    def text(function):
        lowered = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))
        return lowered.lower(np.zeros(16, np.float32)).as_text()

    def loss(gather, x):
        return jax.value_and_grad(lambda x: jnp.sum(gather(x) ** 2))(x)[0]

    plain = text(functools.partial(loss, lambda x: jax.lax.all_gather(x, ("fsdp",), tiled=True)))
    for given in (mesh, AbstractMesh((8,), ("fsdp",)), None):
        assert text(functools.partial(loss, lambda x, given=given: torus.gather(x, given, ("fsdp",), 0))) == plain
