"""Whole operands: a program evaluated again, with what XLA cannot partition beside a manual axis replicated before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import auto_view, constrain

# What these compute has a compiler of its own.
_OPAQUE = ("pallas_call", "custom_partitioning")


def with_whole_operands(run: Callable[..., Any], mesh: Mesh, manual: set[str]) -> Callable[..., Any]:
    """Return `run`, to be called in a `shard_map` that is manual over `manual`, in a form that XLA can partition.

    With two or more automatic axes of several devices, XLA aborts the process at most gathers and scatters, and computes some
    grouped convolutions wrongly. So `run` is traced, and the operands of these operations are made whole: replicated over those
    axes. The trace must have the backward pass already, because the gradient of a sort, for one, is a gather too.
    """
    if sum(size > 1 and name not in manual for name, size in mesh.shape.items()) < 2:
        return run

    def rewritten(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), mesh)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return rewritten


def contains(value: Any, names: frozenset[str]) -> bool:
    """Return whether a jaxpr, or a parameter of an operation, contains one of these operations."""
    if isinstance(value, tuple):
        return any(contains(part, names) for part in value)
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    return isinstance(jaxpr, Jaxpr) and any(
        eqn.primitive.name in names or any(contains(part, names) for part in eqn.params.values()) for eqn in jaxpr.eqns
    )


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Evaluate a jaxpr, with whole operands in it and in all jaxprs that it contains."""
    context = jax.sharding.get_abstract_mesh()
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        if not isinstance(v, Literal):
            return values[v]
        # JAX's own arrays of NumPy remember which axes were manual.
        return v.val if isinstance(v.val, (bool, int, float, complex)) else np.asarray(v.val)

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [read(v) for v in eqn.invars]
        # Named scopes, `compute_on` and metadata for XLA belong to the operation. Which axes are manual does not.
        scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes),
            eqn.ctx.manager,
            jax.sharding.use_abstract_mesh(context),
        ):
            if name in ("custom_jvp_call", "custom_vjp_call"):
                # Its rule is not needed any more.
                inner = eqn.params["call_jaxpr"]
                outputs = _evaluate(inner.jaxpr, inner.consts, inputs, mesh)
            elif name == "sharding_constraint" and not _automatic_axes():
                outputs = inputs
            elif name == "shard_map":
                outputs = _run_manually(eqn.params, inputs, mesh)
            else:
                params = eqn.params if name in _OPAQUE else {key: _rewrite(value, mesh) for key, value in eqn.params.items()}
                bind_params = eqn.primitive.get_bind_params(params)
                # Older versions of JAX return the functions of an operation beside its parameters.
                functions, bind_params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
                bound = eqn.primitive.bind(*functions, *_whole(name, params, inputs, mesh), **bind_params)
                outputs = list(bound) if eqn.primitive.multiple_results else [bound]
                # Their results have the dimensions of the first operand, so what makes that one whole fits them.
                if name.startswith("scatter") or name == "conv_general_dilated":
                    outputs = _whole(name, params, [*outputs, *inputs[1:]], mesh)[:1]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _automatic_axes() -> set[str]:
    """Return the axes that are not manual in the function that is traced here."""
    context = jax.sharding.get_abstract_mesh()
    return {str(name) for name in context.axis_names} - set(context.manual_axes)


def _run_manually(params: dict[str, Any], inputs: list[Any], mesh: Mesh) -> list[Any]:
    """Return the results of a `jax.shard_map` that is within another one: manual over all axes.

    XLA aborts the process if an axis stays automatic and is before a manual one. Along an axis that was automatic, the devices
    repeat the computation: on whole operands, as the specs do not name it.
    """
    run = functools.partial(_evaluate, params["jaxpr"], (), mesh=mesh)
    specs = {"in_specs": params["in_specs"], "out_specs": list(params["out_specs"])}
    outputs = jax.shard_map(lambda *args: run(args), **specs, axis_names=_automatic_axes(), check_vma=False)(*inputs)
    return list(outputs)


def _whole(name: str, params: dict[str, Any], inputs: list[Any], mesh: Mesh) -> list[Any]:
    """Return the inputs of an operation, with those whole that XLA cannot partition. Batch dimensions stay as they are."""
    if name == "conv_general_dilated" and max(params["feature_group_count"], params["batch_group_count"]) > 1:
        return [constrain(x, NamedSharding(auto_view(mesh), PartitionSpec())) for x in inputs]
    # With a single index, it is a slice, as that of the loops over microbatches and layers.
    if (name == "gather" or name.startswith("scatter")) and inputs[1].ndim > 1:
        operand, batching = inputs[0], params["dimension_numbers"].operand_batching_dims
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(free if k in batching else None for k in range(operand.ndim)))
        return [constrain(operand, NamedSharding(auto_view(mesh), spec)), *inputs[1:]]
    return inputs


def _rewrite(value: Any, mesh: Mesh) -> Any:
    """Return a parameter of an operation, with whole operands in its jaxprs."""
    if isinstance(value, tuple):
        is_jaxprs = any(isinstance(x, (ClosedJaxpr, Jaxpr)) for x in value)
        if not is_jaxprs:
            return value
        parts = [_rewrite(x, mesh) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, ClosedJaxpr):
        avals = [_shape_of(v.aval) for v in value.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args, mesh))(*avals)
    if isinstance(value, Jaxpr):
        closed = _rewrite(ClosedJaxpr(value, ()), mesh)
        assert not closed.consts
        return closed.jaxpr
    if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
        return NamedSharding(jax.sharding.get_abstract_mesh(), value.spec)
    return value


def _shape_of(aval: Any) -> Any:
    """Return an abstract array without its sharding, which says which axes were manual where it was traced."""
    is_array = hasattr(aval, "weak_type")
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) if is_array else aval
