"""The operations of a traced function, with those of the functions inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from rampup.engine.mesh import axes_of, axis_names


def operations(value: Any) -> Iterator[Any]:
    """Yield the operations of a jaxpr, or of a parameter of an operation, and those of
    all jaxprs that it contains.
    """
    for jaxpr in jaxprs(value):
        yield from jaxpr.eqns


def jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Yield a jaxpr and all those that it contains."""
    if isinstance(value, tuple):
        for part in value:
            yield from jaxprs(part)
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    if isinstance(jaxpr, Jaxpr):
        yield jaxpr
        for eqn in jaxpr.eqns:
            yield from jaxprs(tuple(eqn.params.values()))


def reads(traced: ClosedJaxpr) -> list[bool]:
    """Return which arguments of a traced function its first result depends on."""
    jaxpr = traced.jaxpr
    return dce_jaxpr(jaxpr, [True, *[False] * (len(jaxpr.outvars) - 1)])[1]


def needing_whole_operands(value: Any) -> Iterator[Any]:
    """Yield the `shard_map`s, gathers and scatters of a loss, and sorts, which have a
    gather in their gradient, but not a gather from an array that was just constrained
    to be whole. With one index, gathers and scatters are slices.
    """
    for jaxpr in jaxprs(value):
        whole = {
            id(eqn.outvars[0])
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "sharding_constraint"
            and not axes_of(eqn.params["sharding"])
        }
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            is_lookup = name.startswith(("gather", "scatter"))
            if is_lookup and eqn.invars[1].aval.ndim < 2:
                continue
            if name == "gather" and id(eqn.invars[0]) in whole:
                continue
            if is_lookup or name in ("shard_map", "sort", "top_k"):
                yield eqn


def axes_of_shard_map(eqn: Any) -> set[str]:
    """Return the axes of a `shard_map`, and those of the collectives in it: newer
    versions of JAX leave out the former where they are manual already.
    """
    found = axes_of_collectives(operations(eqn.params["jaxpr"]))
    for key in ("manual_axes", "newly_manual_axes"):
        found.update(eqn.params.get(key, ()))
    return found


def axes_of_collectives(eqns: Iterable[Any]) -> set[str]:
    """Return the axes of a mesh that operations name."""
    found: set[Any] = set()
    for eqn in eqns:
        for key in ("axes", "axis_name"):
            found.update(axis_names(eqn.params.get(key)))
    # The axes of an array are numbers.
    return {name for name in found if isinstance(name, str)}
