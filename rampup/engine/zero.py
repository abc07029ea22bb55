"""ZeRO-1: each replica keeps and updates its own part of the optimizer's state.

A step reduce-scatters the gradients once, after the last microbatch; in the way
`compiled`, the compiler does so in each. The compiler runs
the optimizer on the parts, as on any sharded array, so every optimizer stays correct.
Then all-gathers give all replicas the new parameters. The parts of arrays that are not
sharded over other axes travel in one buffer per type, so there is one collective for
it. All others, such as those that are sharded over fsdp, travel one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    STAGE,
    BatchAxes,
    auto_view,
    axes_of,
    axis_names,
    spec_without,
)

# A buffer is made of whole tiles of a TPU's memory. Otherwise the compiler turns an
# all-gather, and on small slices a reduce-scatter, into an all-reduce of all parts,
# which sends up to twice as much.
TILE = (128, 128)


def scattered_shardings(tree: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Return the shardings of a tree's leaves, sharded over the replicas too along a
    dimension that they divide, if any.
    """
    d = axes.num_replicas(mesh)

    def of(leaf: Any) -> NamedSharding:
        sharding: NamedSharding = leaf.sharding
        if d == 1 or is_scattered(sharding, axes):
            return sharding
        entries = [
            _names(entry, mesh)
            for entry in (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
        ]
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


def reduce_gradients(grads: Any, shardings: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Sum this replica's gradients over the replicas, in a function that is manual over
    them; each gets its own part.
    """
    leaves, structure = jax.tree.flatten(grads)
    (whole, alone, buffers), d = (
        _routes(leaves, shardings, mesh, axes),
        axes.num_replicas(mesh),
    )
    for k, total in zip(
        whole, jax.lax.psum([leaves[k] for k in whole], axes.replica), strict=True
    ):
        leaves[k] = total
    for k, dim in alone.items():
        leaves[k] = jax.lax.psum_scatter(
            leaves[k], axes.replica, scatter_dimension=dim, tiled=True
        )

    def split(x: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(
            x.reshape(*x.shape[:dim], d, x.shape[dim] // d, *x.shape[dim + 1 :]), dim, 0
        )

    for members in buffers:
        parts = [split(leaves[k], dim) for k, dim in members.items()]
        sums = jax.lax.psum_scatter(_pack(parts, leading=1), axes.replica)
        for k, x in zip(
            members, _unpack(sums, [part.shape[1:] for part in parts]), strict=True
        ):
            leaves[k] = x
    return jax.tree.unflatten(structure, leaves)


def gather_parameters(params: Any, scattered: Any, mesh: Mesh, axes: BatchAxes) -> Any:
    """Return whole parameters on every replica from the parts that the replicas have by
    `scattered`.
    """
    manual = axes.manual(mesh)
    in_specs = manual_specs(scattered, mesh, manual)
    out_specs = jax.tree.map(
        lambda spec: spec_without(spec, frozenset(axes.replica)), in_specs
    )

    def gather(params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        _, alone, buffers = _routes(leaves, scattered, mesh, axes)
        for k, dim in alone.items():
            leaves[k] = jax.lax.all_gather(
                leaves[k], axes.replica, axis=dim, tiled=True
            )
        for members in buffers:
            parts = [leaves[k] for k in members]
            gathered = jax.lax.all_gather(_pack(parts, leading=0), axes.replica)
            for (k, dim), x in zip(
                members.items(),
                _unpack(gathered, [part.shape for part in parts]),
                strict=True,
            ):
                shape = leaves[k].shape
                leaves[k] = jnp.moveaxis(x, 0, dim).reshape(
                    *shape[:dim], x.shape[0] * shape[dim], *shape[dim + 1 :]
                )
        return jax.tree.unflatten(structure, leaves)

    # check_vma=False: JAX would not infer that a gathered array is the same on all
    # replicas.
    return jax.shard_map(
        gather,
        mesh=auto_view(mesh),
        axis_names=manual,
        in_specs=(in_specs,),
        out_specs=out_specs,
        check_vma=False,
    )(params)


def _routes(
    leaves: Sequence[jax.Array], shardings: Any, mesh: Mesh, axes: BatchAxes
) -> tuple[list[int], dict[int, int], list[dict[int, int]]]:
    """Return which leaves stay whole, travel alone and fill each buffer; of the last
    two, index -> scattered dimension.
    """
    whole = list[int]()
    alone = dict[int, int]()
    by_type = dict[Any, dict[int, int]]()
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    for k, (leaf, sharding) in enumerate(
        zip(leaves, jax.tree.leaves(shardings), strict=True)
    ):
        dims = [
            dim
            for dim, entry in enumerate(sharding.spec)
            if not set(axes.replica).isdisjoint(axis_names(entry))
        ]
        if not dims:
            whole.append(k)
        elif any(
            name not in manual
            for entry in sharding.spec
            for name in _names(entry, mesh)
        ):
            # To flatten it into a buffer, the compiler would gather it over those axes.
            alone[k] = dims[0]
        else:
            by_type.setdefault(leaf.dtype, {})[k] = dims[0]
    return whole, alone, list(by_type.values())


def _pack(arrays: Sequence[jax.Array], *, leading: int) -> jax.Array:
    """Return arrays as one buffer (*leading, N, 128) of whole tiles, flattened except
    for their leading dimensions.
    """
    flat = [x.reshape(*x.shape[:leading], -1) for x in arrays]
    size = sum(x.shape[-1] for x in flat)
    padding = jnp.zeros(
        (*flat[0].shape[:leading], -size % math.prod(TILE)), flat[0].dtype
    )
    return jnp.concatenate([*flat, padding], axis=leading).reshape(
        *padding.shape[:leading], -1, TILE[1]
    )


def _unpack(
    buffer: jax.Array, shapes: Sequence[tuple[int, ...]]
) -> Iterator[jax.Array]:
    """Yield the arrays of these shapes that are in a buffer (*leading, N, 128), each
    with the leading dimensions.
    """
    flat, first = buffer.reshape(*buffer.shape[:-2], -1), 0
    for shape in shapes:
        end = first + math.prod(shape)
        yield jax.lax.slice_in_dim(flat, first, end, axis=flat.ndim - 1).reshape(
            *flat.shape[:-1], *shape
        )
        first = end


def _names(entry: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several devices in one entry of a PartitionSpec."""
    return tuple(name for name in axis_names(entry) if mesh.shape[name] > 1)
