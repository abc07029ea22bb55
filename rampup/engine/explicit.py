"""Explicit meshes: arrays live on the mesh that the user gave, a program sees its axes
as automatic, and a loss as it needs.

A loss that says `out_sharding=P("data", ...)` is traced with all axes Explicit, on the
rows of all replicas, and reduced per microbatch, as in `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import BatchAxes, auto_view, is_explicit
from rampup.errors import ConfigError, RampupError


def on_mesh(shardings: Any, mesh: Any) -> Any:
    """Return shardings on another view of their mesh: the same devices and names, other
    types of axes.
    """

    def move(sharding: Any) -> Any:
        is_named = (
            isinstance(sharding, NamedSharding)
            and sharding.mesh.axis_names == mesh.axis_names
        )
        return (
            NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
            if is_named
            else sharding
        )

    return jax.tree.map(move, shardings)


def move(tree: Any, mesh: Mesh) -> Any:
    """Return a tree whose arrays are on another view of their mesh."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, on_mesh(x.sharding, mesh))
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def as_auto(tree: Any) -> Any:
    """Return arrays, or their shapes, as a program with automatic axes takes them:
    those on Explicit axes as shapes.
    """

    def shape_of(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not is_explicit(sharding.mesh):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=on_mesh(sharding, auto_view(sharding.mesh))
        )

    return jax.tree.map(shape_of, tree)


def may_need_explicit(error: Exception, mesh: Mesh) -> bool:
    """Return whether a trace with Auto axes failed because the loss was written for the
    Explicit axes of the mesh.
    """
    is_about_axes = re.search(
        "shard|PartitionSpec|AxisType|mesh", str(error), re.IGNORECASE
    )
    return (
        is_explicit(mesh) and bool(is_about_axes) and not isinstance(error, RampupError)
    )


def neither(auto: Exception, explicit: Exception, mesh: Mesh) -> Exception:
    """Return the error for a loss that runs with neither type of axes, from what JAX
    says of each.
    """
    if isinstance(explicit, RampupError):
        return explicit
    problem = (
        f"the loss function runs neither with Explicit axes ({explicit}) nor with Auto"
        f" axes ({auto})"
    )
    fix = (
        "give the operations that the first names an `out_sharding`, or make the mesh"
        " with Auto axes"
    )
    names = (
        f"{mesh.axis_names}, axis_types=(jax.sharding.AxisType.Auto,) *"
        f" {len(mesh.axis_names)}"
    )
    return ConfigError(
        f"{problem}; {fix}: jax.make_mesh({tuple(mesh.shape.values())}, {names})",
        key="mesh",
    )


def with_either_axes(run: Callable[[bool], Any], mesh: Mesh) -> Any:
    """Return `run(has_explicit)` with False, or with True for a loss that was written
    for the Explicit axes of the mesh.
    """
    try:
        return run(False)
    except Exception as error:
        if not may_need_explicit(error, mesh):
            raise
        first = error
    try:
        return run(True)
    except Exception as error:
        raise neither(first, error, mesh) from error


def call_with_auto_axes(
    run: Callable[..., Any], mesh: Mesh, args: Any, results: Any
) -> Any:
    """Return `run(has_explicit, *args)`, which sees Auto axes, with `results` as
    shardings if the caller has Explicit ones.
    """
    has_types = any(
        is_explicit(jax.typeof(x).sharding.mesh) for x in jax.tree.leaves(args)
    )

    def call(has_explicit: bool) -> Any:
        own = functools.partial(run, has_explicit)
        if not has_types:
            return own(*args)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shardings = jax.tree.map(
                lambda sharding: NamedSharding(mesh.abstract_mesh, sharding.spec),
                results,
            )
            return jax.sharding.auto_axes(
                own, axes=mesh.axis_names, out_sharding=shardings
            )(*args)

    return with_either_axes(call, mesh)


def with_explicit_axes(
    loss: Any, mesh: Mesh, params: Any, carried: Any = None, frozen: Any = None
) -> Any:
    """Return a loss whose function sees all axes as Explicit, and the rows of all
    replicas. The last three are shardings.
    """
    if (
        getattr(loss, "loss_fn", None) is None
        or getattr(loss, "param_shardings", None) is not None
    ):
        rule = (
            "a loss with `out_sharding`, or other uses of Explicit axes, must be a"
            " function of whole parameters"
        )
        raise ConfigError(
            f"{rule}, and not a {type(loss).__name__}; make the mesh with Auto axes",
            key="mesh",
        )
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
