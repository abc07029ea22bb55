"""ZeRO-1: each replica keeps and updates its own part of the optimizer's state.

A step reduce-scatters the gradients once, after the last microbatch, so that each replica has the sum of its own part. The
compiler runs the optimizer on the parts, as it would on any sharded array, so every optimizer stays correct: norms and factored
moments over whole arrays cost a collective. Then one all-gather gives all replicas the new parameters.

The parts of all arrays that are not sharded over other axes travel in one buffer, so there is one collective and not one per
array. Arrays that fsdp or tensor shard too have a collective of their own, because flattening them would gather them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.run.mesh import STAGE, BatchAxes, auto_view, constrain, spec_without

# A buffer is made of whole tiles of a TPU's memory. Otherwise the compiler turns an all-gather, and on small slices a
# reduce-scatter, into an all-reduce of all parts, which sends up to twice as much.
TILE = (128, 128)


def scattered_shardings(tree: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Return the shardings of a tree's leaves, sharded over the replicas too along a dimension that they divide.

    Leaves without such a dimension keep their sharding. A dimension that no other axis shards is preferred.

    Args:
        tree: arrays on the mesh, or their shapes and shardings.
        mesh: the mesh.
        axes: the batch axes; their `replica` is what the leaves are scattered over.
    """
    d = axes.num_replicas(mesh)

    def of(leaf: Any) -> NamedSharding:
        sharding: NamedSharding = leaf.sharding
        if d == 1 or scattered_dimension(sharding.spec, axes.replica) is not None:
            return sharding
        entries = [_names(entry, mesh) for entry in (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))]
        found = [
            k
            for k, names in enumerate(entries)
            if leaf.shape[k] and leaf.shape[k] % (d * math.prod(mesh.shape[name] for name in names)) == 0 and STAGE not in names
        ]
        if not found:
            return sharding
        best = min(found, key=lambda k: (len(entries[k]), k))
        # The replicas first: inside a function that is manual over them, the other axes shard what each replica has.
        entries[best] = (*axes.replica, *entries[best])
        spec = PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in entries))
        return sharding.update(spec=spec)

    return jax.tree.map(of, tree)


def scattered_dimension(spec: PartitionSpec, replica: tuple[str, ...]) -> int | None:
    """Return the dimension that is sharded over the replicas, or None.

    Example:
        >>> scattered_dimension(PartitionSpec(None, ("data", "fsdp")), ("data",))
        1
    """
    return next(
        (k for k, entry in enumerate(spec) if set(replica) & {*((entry,) if isinstance(entry, str) else entry or ())}), None
    )


def is_scattered(shardings: Any, axes: BatchAxes) -> bool:
    """Return whether any of the shardings names an axis of the replicas."""
    return any(scattered_dimension(sharding.spec, axes.replica) is not None for sharding in jax.tree.leaves(shardings))


def manual_specs(shardings: Any, mesh: Mesh, manual: set[str]) -> Any:
    """Return the part of shardings that a function that is manual over some axes sees, as its `in_specs` or `out_specs`."""
    others = frozenset(str(name) for name in mesh.axis_names if name not in manual)
    return jax.tree.map(lambda sharding: spec_without(sharding.spec, others), shardings)


def reduce_gradients(grads: Any, shardings: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Sum gradients over the replicas, in a function that is manual over them. Each gets what `shardings` says.

    Args:
        grads: this replica's sums.
        shardings: shardings of the result; those that name the replicas' axes make it one part of the array.
        mesh, axes: the mesh and its batch axes.
    """
    leaves, structure = jax.tree.flatten(grads)
    dims = [None] * len(leaves)
    if shardings is not None:
        dims = [scattered_dimension(sharding.spec, axes.replica) for sharding in jax.tree.leaves(shardings)]
    whole = [k for k, dim in enumerate(dims) if dim is None]
    for k, total in zip(whole, jax.lax.psum([leaves[k] for k in whole], axes.replica), strict=True):
        leaves[k] = total
    d = axes.num_replicas(mesh)

    def parts(x: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:dim], d, x.shape[dim] // d, *x.shape[dim + 1 :]), dim, 0)

    def scatter(buffer_dN: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(buffer_dN, axes.replica)

    def alone(x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.psum_scatter(x, axes.replica, scatter_dimension=dim, tiled=True)

    done = _exchange(leaves, dims, shardings, mesh, parts, scatter, alone, leading=1)
    return jax.tree.unflatten(structure, done)


def gather_parameters(params: Any, scattered: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Return parameters as every replica needs them, of which each replica has its own part.

    Args:
        params: the parameters, sharded as `scattered`.
        scattered: from `scattered_shardings`.
        mesh, axes: the mesh and its batch axes.
    """
    manual = axes.manual(mesh)
    in_specs = manual_specs(scattered, mesh, manual)
    out_specs = jax.tree.map(lambda spec: spec_without(spec, frozenset(axes.replica)), in_specs)
    d = axes.num_replicas(mesh)

    def gather(params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        dims = [scattered_dimension(sharding.spec, axes.replica) for sharding in jax.tree.leaves(scattered)]

        def alone(x: jax.Array, dim: int) -> jax.Array:
            return jax.lax.all_gather(x, axes.replica, axis=dim, tiled=True)

        def merge(x: jax.Array, dim: int) -> jax.Array:
            x = jnp.moveaxis(x, 0, dim)
            return x.reshape(*x.shape[:dim], d * x.shape[dim + 1], *x.shape[dim + 2 :])

        def whole(buffer_N: jax.Array) -> jax.Array:
            return jax.lax.all_gather(buffer_N, axes.replica)

        done = _exchange(leaves, dims, scattered, mesh, lambda x, dim: x, whole, alone, leading=0, merge=merge)
        return jax.tree.unflatten(structure, done)

    return jax.shard_map(
        gather, mesh=auto_view(mesh), axis_names=manual, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
    )(params)


def constrain_all(tree: Any, shardings: Any) -> Any:
    """Constrain the shardings of a tree's leaves."""
    return jax.tree.map(constrain, tree, shardings)


def _exchange(
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    shardings: Any,
    mesh: Mesh,
    prepare: Callable[[jax.Array, int], jax.Array],
    together: Callable[[jax.Array], jax.Array],
    alone: Callable[[jax.Array, int], jax.Array],
    *,
    leading: int,
    merge: Callable[[jax.Array, int], jax.Array] | None = None,
) -> list[jax.Array]:
    """Exchange the scattered leaves between the replicas: one buffer per type, and alone what automatic axes shard too.

    Args:
        leaves: the arrays as a replica has them.
        dims: the scattered dimension of each, or None for those that stay as they are.
        shardings: their shardings.
        mesh: the mesh.
        prepare: brings an array into the shape in which it goes into the buffer, after flattening.
        together: exchanges a buffer.
        alone: exchanges an array.
        leading: dimensions of a prepared array that are not flattened.
        merge: makes the result of an array out of its slice of the exchanged buffer, whose first dimension is the replicas.
    """
    done, buffers = list(leaves), dict[Any, list[int]]()
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    for k, (dim, sharding) in enumerate(zip(dims, jax.tree.leaves(shardings), strict=True) if shardings is not None else ()):
        if dim is None:
            continue
        if any(name not in manual for entry in sharding.spec for name in _names(entry, mesh)):
            done[k] = alone(leaves[k], dim)
        else:
            buffers.setdefault(leaves[k].dtype, []).append(k)
    for members in buffers.values():
        ready = [prepare(leaves[k], dims[k]) for k in members]  # type: ignore[arg-type]
        flat = [x.reshape(*x.shape[:leading], -1) for x in ready]
        size = sum(x.shape[-1] for x in flat)
        padding = jnp.zeros((*flat[0].shape[:leading], -size % math.prod(TILE)), flat[0].dtype)
        tiled = jnp.concatenate([*flat, padding], axis=leading).reshape(*flat[0].shape[:leading], -1, TILE[1])
        result = together(tiled)
        result = result.reshape(*result.shape[:-2], -1)
        first = 0
        for k, x in zip(members, ready, strict=True):
            size = math.prod(x.shape[leading:])
            piece = jax.lax.slice_in_dim(result, first, first + size, axis=result.ndim - 1)
            shape = x.shape[leading:]
            done[k] = piece.reshape(shape) if merge is None else merge(piece.reshape(-1, *shape), dims[k])  # type: ignore[arg-type]
            first += size
    return done


def _names(entry: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several devices in one entry of a PartitionSpec."""
    return tuple(name for name in ((entry,) if isinstance(entry, str) else entry or ()) if mesh.shape[name] > 1)
