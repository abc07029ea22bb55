"""Explicit meshes: arrays live on the mesh that the user gave, a program sees its axes
as automatic, and a loss as the mesh has them.

A loss of whole parameters is traced with all axes Explicit, on the rows of all
replicas, and reduced per microbatch, as in `jax.jit`. With `reduce_once=True` it sees
Auto axes and the rows of one replica, as do a pipeline and a loss that takes shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.contract import SummableLoss
from rampup.engine.mesh import BatchAxes, auto_view, is_explicit


def as_auto(tree: Any) -> Any:
    """Return arrays, or their shapes, as a program with automatic axes takes them:
    those on Explicit axes as shapes.
    """

    def shape_of(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not is_explicit(sharding.mesh):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=sharding.update(mesh=auto_view(sharding.mesh)),
        )

    return jax.tree.map(shape_of, tree)


def sees_explicit(loss: SummableLoss, mesh: Any) -> bool:
    """Return whether a loss sees Explicit axes, those of this mesh."""
    return is_explicit(mesh) and loss.takes_whole and not loss.reduce_once


def call_with_auto_axes(
    run: Callable[..., Any], mesh: Mesh, args: Any, results: Any
) -> Any:
    """Return `run(*args)`, which sees Auto axes, with `results` as shardings if the
    caller has Explicit ones.
    """
    # Such arrays say in their types how they are sharded.
    if not any(is_explicit(jax.typeof(x).sharding.mesh) for x in jax.tree.leaves(args)):
        return run(*args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        shardings = jax.tree.map(
            lambda sharding: NamedSharding(mesh.abstract_mesh, sharding.spec), results
        )
        return jax.sharding.auto_axes(
            run, axes=mesh.axis_names, out_sharding=shardings
        )(*args)


def with_explicit_axes(
    loss: Any, mesh: Mesh, params: Any, carried: Any, frozen: Any = None
) -> Any:
    """Return a loss whose function sees all axes as Explicit, and the rows of all
    replicas. The last three are shardings.
    """
    axes = BatchAxes(replica=(), rows=BatchAxes.of(mesh, loss.batch_axes).rows)
    rows, function = PartitionSpec(axes.rows), loss.loss_fn

    def specs_of(shardings: Any) -> Any:
        return jax.tree.map(
            lambda sharding: getattr(sharding, "spec", PartitionSpec()), shardings
        )

    def loss_fn(*args: Any, **options: Any) -> Any:
        specs = (
            specs_of(params),
            *jax.tree.map(lambda _: rows, args[1:3]),
            *[specs_of(carried)] * (len(args) - 3),
        )
        run = jax.sharding.explicit_axes(
            lambda args, options: function(*args, **options),
            axes=mesh.axis_names,
            in_sharding=(specs, {"frozen": specs_of(frozen)} if options else {}),
        )
        return run(args, options)

    return dataclasses.replace(loss, loss_fn=loss_fn, batch_axes=axes)
