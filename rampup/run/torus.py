"""Reduce-scatters over a TPU slice: one for each side of the torus where the compiler would run one as an all-reduce.

The first exchanges whole arrays and the next ones only the part that is left, so the bytes are those of one reduce-scatter and
about half of those of an all-reduce.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh


@functools.cache
def torus_of(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray | None:
    """Return the devices along some axes by their place in a TPU torus if each side takes a reduce-scatter, else None.

    The compiler (libtpu 0.0.50) runs one over all of them as an all-reduce if they are all chips of a slice in three
    dimensions, or of a square larger than 2x2. Along the other axes there may be more slices.
    """
    first = [[str(name) for name in mesh.axis_names].index(name) for name in names]
    size = math.prod(mesh.shape[name] for name in names)
    groups = np.moveaxis(mesh.devices, first, range(len(first))).reshape(size, -1).T
    places = [[place_of(device) for device in group] for group in groups]
    slices = [{place and place[0] for place in group} for group in places]
    if any(len(found) > 1 or None in found for found in slices) or len(set.union(*slices)) < len(slices):
        return None
    tori = [_torus(np.array(group)[:, 1:]) for group in places]
    return tori[0] if all(np.array_equal(torus, tori[0]) for torus in tori) else None


def place_of(device: Any) -> tuple[int, ...] | None:
    """Return the number of a TPU's slice and the coordinates of its chip; None for other devices."""
    return (getattr(device, "slice_index", 0), *device.coords) if device.platform == "tpu" else None


def _torus(coordinates: np.ndarray) -> np.ndarray | None:
    """Return the places in a torus of the devices with these coordinates, shape (devices, dimensions), or None."""
    sides = [np.unique(x, return_inverse=True)[1] for x in coordinates.T if len({*x}) > 1]
    # The side that changes least from one device to the next comes first: the parts are mostly in order then.
    sides.sort(key=lambda side: -np.argmax(side != side[0]))
    sizes = [int(side.max()) + 1 for side in sides]
    is_whole = len(np.unique(coordinates, axis=0)) == math.prod(sizes) == len(coordinates)
    if not is_whole or len(sizes) < 2 or (len(sizes) == 2 and (sizes[0] != sizes[1] or sizes[0] == 2)):
        return None
    torus = np.empty(sizes, int)
    torus[tuple(sides)] = np.arange(len(coordinates))
    return torus


def scatter_sum(x: jax.Array, mesh: Mesh, names: tuple[str, ...], dim: int) -> jax.Array:
    """Return this device's part of the sum over the devices along some axes, in a function that is manual over them.

    Args:
        x: this device's summand.
        mesh: the mesh.
        names: the axes.
        dim: the dimension that is divided among the devices.
    """
    torus = torus_of(mesh, names)
    if torus is None:
        return jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    order = torus.reshape(-1).tolist()
    if order != sorted(order):
        parts = jnp.split(x, len(order), axis=dim)
        x = jnp.concatenate([parts[k] for k in order], axis=dim)
    for k, size in enumerate(torus.shape):
        groups = np.moveaxis(torus, k, -1).reshape(-1, size).tolist()
        x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, axis_index_groups=groups, tiled=True)
    return x


def gather(x: jax.Array, mesh: Any, names: tuple[str, ...], dim: int) -> jax.Array:
    """Return an array of which each device along some axes has a part. The gradient of the part is a `scatter_sum`.

    Args:
        x: this device's part.
        mesh: the mesh; without devices there is one reduce-scatter.
        names: the axes.
        dim: the dimension that is divided among the devices.
    """
    if not isinstance(mesh, Mesh) or torus_of(mesh, names) is None:
        return jax.lax.all_gather(x, names, axis=dim, tiled=True)

    @jax.custom_vjp
    def whole(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, names, axis=dim, tiled=True)

    whole.defvjp(lambda x: (whole(x), None), lambda _, gradient: (scatter_sum(gradient, mesh, names, dim),))
    return whole(x)
