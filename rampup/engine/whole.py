"""Works around XLA: a program evaluated again, with the operands replicated that XLA
partitions wrongly. Whole operands, that is; it has nothing to do with whole batches.

Beside a manual axis and two automatic ones of several devices, XLA aborts the process
at most gathers and scatters: a pipeline and a loss that takes shards must be manual
there. Convolutions it computes wrongly, or aborts at, in any program: grouped ones if
an axis such as tensor is automatic, and others if a second one is. (Seen on JAX 0.7.2
and 0.12, on CPUs.) `Replicas` decides where this is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import auto_view, axes_of, constrain, spec_without

# What these compute has a compiler of its own.
_OPAQUE = ("pallas_call", "custom_partitioning")


def with_whole_operands(run: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return `run` in a form that XLA can partition: its operations one by one, with
    whole operands. Differentiate before: rules of the user's own are left out.
    """

    def rewritten(*args: Any) -> Any:
        shapes = jax.tree.map(lambda x: _shape_of(jax.typeof(x)), args)
        closed, results = jax.make_jaxpr(run, return_shape=True)(*shapes)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), mesh)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    return rewritten


def operations(value: Any) -> Iterator[Any]:
    """Yield the operations of a jaxpr, or of a parameter of an operation, and those of
    all jaxprs that it contains.
    """
    if isinstance(value, tuple):
        for part in value:
            yield from operations(part)
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    if isinstance(jaxpr, Jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn
            yield from operations(tuple(eqn.params.values()))


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], mesh: Mesh
) -> list[Any]:
    """Evaluate a jaxpr, with whole operands in it and in all jaxprs that it
    contains.
    """
    context = jax.sharding.get_abstract_mesh()
    values: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )

    def read(v: Any) -> Any:
        if not isinstance(v, Literal):
            return values[v]
        # JAX's own arrays of NumPy remember which axes were manual.
        is_number = isinstance(v.val, (bool, int, float, complex))
        return v.val if is_number else np.asarray(v.val)

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        # Named scopes, `compute_on` and metadata for XLA belong to the operation. Which
        # axes are manual does not.
        scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes),
            eqn.ctx.manager,
            jax.sharding.use_abstract_mesh(context),
        ):
            outputs = _bind(eqn, inputs, mesh)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _bind(eqn: Any, inputs: list[Any], mesh: Mesh) -> list[Any]:
    """Return the results of one operation."""
    name = eqn.primitive.name
    if name in ("custom_jvp_call", "custom_vjp_call"):
        inner = eqn.params["call_jaxpr"]
        return _evaluate(inner.jaxpr, inner.consts, inputs, mesh)
    if name == "shard_map":
        return _run_manually(eqn.params, inputs, mesh)
    is_constraint = name == "sharding_constraint"
    if is_constraint and not axes_of(eqn.params["sharding"]) <= _automatic_axes():
        return [_constrain_again(inputs[0], mesh, **eqn.params)]
    params = eqn.params
    if name not in _OPAQUE:
        params = {key: _rewrite(value, mesh) for key, value in params.items()}
    bind_params = eqn.primitive.get_bind_params(params)
    # Older versions of JAX return the functions of an operation beside its parameters.
    functions: Any = ()
    if isinstance(bind_params, tuple):
        functions, bind_params = bind_params
    operands = _whole(name, params, inputs, mesh)
    bound = eqn.primitive.bind(*functions, *operands, **bind_params)
    outputs = list(bound) if eqn.primitive.multiple_results else [bound]
    # Their results have the dimensions of the first operand, so what makes that one
    # whole fits them.
    if name.startswith("scatter") or name == "conv_general_dilated":
        return _whole(name, params, [*outputs, *inputs[1:]], mesh)[:1]
    return outputs


def _constrain_again(
    x: Any, mesh: Mesh, *, sharding: Any, unconstrained_dims: Any, **_: Any
) -> Any:
    """Constrain an array along the axes that are automatic here, of those in the
    trace.
    """
    free = dict.fromkeys(unconstrained_dims, PartitionSpec.UNCONSTRAINED)
    entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    spec = PartitionSpec(*(free.get(k, entry) for k, entry in enumerate(entries)))
    kind = sharding.memory_kind
    return constrain(x, NamedSharding(auto_view(mesh), spec, memory_kind=kind))


def _automatic_axes() -> set[str]:
    """Return the axes that are not manual in the function that is traced here."""
    context = jax.sharding.get_abstract_mesh()
    return {str(name) for name in context.axis_names} - set(context.manual_axes)


def _run_manually(params: dict[str, Any], inputs: list[Any], mesh: Mesh) -> list[Any]:
    """Run a `shard_map` manually over all axes: XLA aborts if an automatic axis is
    before a manual one.
    """
    run = functools.partial(_evaluate, params["jaxpr"], (), mesh=mesh)
    automatic = _automatic_axes()
    if not automatic:
        return run(inputs)
    others = frozenset(jax.sharding.get_abstract_mesh().shape) - automatic
    in_specs, out_specs = (
        [spec_without(spec, others) for spec in params[key]]
        for key in ("in_specs", "out_specs")
    )
    options = {"axis_names": automatic, "check_vma": False}
    own = jax.shard_map(
        lambda *args: run(args),
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        **options,
    )
    return list(own(*inputs))


def _whole(
    name: str, params: dict[str, Any], inputs: list[Any], mesh: Mesh
) -> list[Any]:
    """Return the inputs of an operation, with those whole that XLA cannot partition.
    Batch dimensions of a gather or scatter stay as they are.
    """

    def constrained(x: Any, *entries: Any) -> Any:
        return constrain(x, NamedSharding(auto_view(mesh), PartitionSpec(*entries)))

    if name == "conv_general_dilated":
        return [constrained(x) for x in inputs]
    # With a single index, it is a slice, as that of the loops over microbatches and
    # layers.
    is_lookup = name == "gather" or name.startswith("scatter")
    has_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if is_lookup and has_manual and inputs[1].ndim > 1:
        operand = inputs[0]
        entries = [None] * operand.ndim
        for k in params["dimension_numbers"].operand_batching_dims:
            entries[k] = PartitionSpec.UNCONSTRAINED
        return [constrained(operand, *entries), *inputs[1:]]
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
        return jax.make_jaxpr(
            lambda *args: _evaluate(value.jaxpr, value.consts, args, mesh)
        )(*avals)
    if isinstance(value, Jaxpr):
        closed = _rewrite(ClosedJaxpr(value, ()), mesh)
        assert not closed.consts
        return closed.jaxpr
    if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
        return NamedSharding(jax.sharding.get_abstract_mesh(), value.spec)
    return value


def _shape_of(aval: Any) -> Any:
    """Return an abstract array without its sharding, which says which axes were manual
    where it was traced.
    """
    if not hasattr(aval, "weak_type"):
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
