"""ZeRO-1: each replica keeps and updates its own part of the optimizer's state.

A step reduce-scatters each gradient once, after the last microbatch; in the way
`compiled`, the compiler does so in each. The compiler runs the optimizer on the parts,
as on any sharded array, so every optimizer stays correct, and gathers the new
parameters. It combines collectives where that pays.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import STAGE, BatchAxes, axes_of, axis_names, spec_without


def scattered_shardings(tree: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Return the shardings of a tree's leaves, sharded over the replicas too along a
    dimension that they divide, if any.
    """
    d = axes.num_replicas(mesh)

    def of(leaf: Any) -> NamedSharding:
        sharding: NamedSharding = leaf.sharding
        if d == 1 or is_scattered(sharding, axes):
            return sharding
        dims = itertools.zip_longest(leaf.shape, sharding.spec)
        entries = [_names(entry, mesh) for _, entry in dims]
        # Not the dimension of the stages: a stage takes whole layers, and an optimizer
        # may treat each layer by itself.
        found = [
            k
            for k, names in enumerate(entries)
            if leaf.shape[k]
            and leaf.shape[k] % (d * math.prod(mesh.shape[name] for name in names)) == 0
            and STAGE not in names
        ]
        if not found:
            return sharding
        best = min(found, key=lambda k: (len(entries[k]), k))
        # The replicas first: inside a function that is manual over them, the other axes
        # shard what each replica has.
        entries[best] = (*axes.replica, *entries[best])
        spec = PartitionSpec(
            *(names[0] if len(names) == 1 else names or None for names in entries)
        )
        return sharding.update(spec=spec)

    return jax.tree.map(of, tree)


def is_scattered(shardings: Any, axes: BatchAxes) -> bool:
    """Return whether any of the shardings names an axis of the replicas."""
    return not axes_of(shardings).isdisjoint(axes.replica)


def manual_specs(shardings: Any, mesh: Mesh, manual: set[str]) -> Any:
    """Return the part of shardings that a function that is manual over some axes sees,
    as its `in_specs` or `out_specs`.
    """
    others = frozenset(str(name) for name in mesh.axis_names if name not in manual)
    return jax.tree.map(lambda sharding: spec_without(sharding.spec, others), shardings)


def reduce_gradients(grads: Any, shardings: Any, axes: BatchAxes) -> Any:
    """Sum this replica's gradients over the replicas, in a function that is manual over
    them; each gets its own part of those that are scattered.
    """

    def reduce(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        for dim, entry in enumerate(sharding.spec):
            if not set(axes.replica).isdisjoint(axis_names(entry)):
                return jax.lax.psum_scatter(
                    x, axes.replica, scatter_dimension=dim, tiled=True
                )
        return jax.lax.psum(x, axes.replica)

    return jax.tree.map(reduce, grads, shardings)


def _names(entry: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several devices in one entry of a PartitionSpec."""
    return tuple(name for name in axis_names(entry) if mesh.shape[name] > 1)
