"""Whole operands: a program evaluated again, with what XLA cannot partition beside a
manual axis replicated before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import auto_view, axes_of, constrain, spec_without
from rampup.errors import RampupError

# What these compute has a compiler of its own.
_OPAQUE = ("pallas_call", "custom_partitioning")
# What JAX runs only where all axes are manual, or beside at most one that is not.
_CALLBACKS = ("debug_callback", "debug_print", "pure_callback")


def with_whole_operands(
    run: Callable[..., Any], mesh: Mesh, manual: set[str]
) -> Callable[..., Any]:
    """Return `run`, to be called in a `shard_map` that is manual over `manual`, in a
    form that XLA can partition.

    With two or more automatic axes of several devices, XLA aborts the process at most
    gathers and scatters, and computes some grouped convolutions wrongly. So `run` is
    traced, backward pass included, and their operands are replicated over those axes.
    With fewer, that is done only for a `shard_map` or a sum over axes of one device:
    traced as automatic, they are left out.
    """
    num_automatic = sum(
        size > 1 and name not in manual for name, size in mesh.shape.items()
    )

    def is_refused(eqn: Any) -> bool:
        # Older versions of JAX find out when they lower it.
        is_nested = eqn.primitive.name == "shard_map" and not manual.isdisjoint(
            eqn.params.get("manual_axes", ())
        )
        return is_nested or (num_automatic > 0 and _is_over_single(eqn, mesh))

    def rewritten(*args: Any) -> Any:
        single = {name: AxisType.Auto for name, size in mesh.shape.items() if size == 1}
        shapes = jax.tree.map(lambda x: _shape_of(jax.typeof(x)), args)
        with jax.sharding.use_abstract_mesh(
            jax.sharding.get_abstract_mesh().update_axis_types(single)
        ):
            closed, results = jax.make_jaxpr(run, return_shape=True)(*shapes)
        outputs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), mesh)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    return rewritten if num_automatic > 1 else traceable(run, rewritten, is_refused)


def traceable(
    run: Callable[..., Any], otherwise: Callable[..., Any], is_refused: Any = None
) -> Callable[..., Any]:
    """Return a function that is `run`, or `otherwise` where JAX cannot trace `run`
    because of its axes: unbound, or manual.
    """

    # One function: whoever debugs a loss function sees each frame between.
    def either(*args: Any) -> Any:
        try:
            if is_refused is None:
                return run(*args)
            closed, results = jax.make_jaxpr(run, return_shape=True)(*args)
            if refused := next(filter(is_refused, operations(closed)), None):
                raise ValueError(
                    f"a {refused.primitive.name} over axes of one device within a"
                    " shard_map"
                )
            return replay(closed, results, args)
        except RampupError:
            raise
        except (NameError, ValueError) as first:
            try:
                return otherwise(*args)
            except Exception:  # noqa: BLE001 - it is not because of the axes
                raise first from None

    return either


def replay(closed: ClosedJaxpr, results: Any, args: Any) -> Any:
    """Run a jaxpr as the function that it was traced from: on a tree of arguments, for
    results of this structure.
    """
    return jax.tree.unflatten(
        jax.tree.structure(results), jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    )


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


def floating_types(jaxpr: ClosedJaxpr) -> list[Any]:
    """Return the `finfo` of each floating-point type that a jaxpr computes."""
    types = {
        v.aval.dtype
        for eqn in operations(jaxpr)
        for v in eqn.outvars
        if hasattr(v.aval, "dtype")
    }
    return [jnp.finfo(t) for t in types if jnp.issubdtype(t, jnp.floating)]


def contains(jaxpr: ClosedJaxpr, names: frozenset[str]) -> bool:
    """Return whether a jaxpr contains one of these operations."""
    return any(eqn.primitive.name in names for eqn in operations(jaxpr))


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
        return (
            v.val
            if isinstance(v.val, (bool, int, float, complex))
            else np.asarray(v.val)
        )

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inputs = [read(v) for v in eqn.invars]
        # Named scopes, `compute_on` and metadata for XLA belong to the operation. Which
        # axes are manual does not.
        scopes = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=scopes),
            eqn.ctx.manager,
            jax.sharding.use_abstract_mesh(context),
        ):
            if name in ("custom_jvp_call", "custom_vjp_call"):
                inner = eqn.params["call_jaxpr"]
                outputs = _evaluate(inner.jaxpr, inner.consts, inputs, mesh)
            elif _is_over_single(eqn, mesh):
                outputs = inputs
            elif (
                name == "sharding_constraint"
                and not axes_of(eqn.params["sharding"]) <= _automatic_axes()
            ):
                outputs = [_constrain_again(inputs[0], mesh, **eqn.params)]
            elif name == "shard_map":
                run = functools.partial(_evaluate, eqn.params["jaxpr"], (), mesh=mesh)
                outputs = _run_manually(
                    run, eqn.params["in_specs"], eqn.params["out_specs"], inputs
                )
            elif name in _CALLBACKS and _automatic_axes():
                whole = PartitionSpec()
                run = functools.partial(_call_back, eqn, _automatic_axes())
                outputs = _run_manually(
                    run, [whole] * len(inputs), [whole] * len(eqn.outvars), inputs
                )
            else:
                params = (
                    eqn.params
                    if name in _OPAQUE
                    else {
                        key: _rewrite(value, mesh) for key, value in eqn.params.items()
                    }
                )
                bind_params = eqn.primitive.get_bind_params(params)
                # Older versions of JAX return the functions of an operation beside its
                # parameters.
                functions, bind_params = (
                    bind_params if isinstance(bind_params, tuple) else ((), bind_params)
                )
                bound = eqn.primitive.bind(
                    *functions, *_whole(name, params, inputs, mesh), **bind_params
                )
                outputs = list(bound) if eqn.primitive.multiple_results else [bound]
                # Their results have the dimensions of the first operand, so what makes
                # that one whole fits them.
                if name.startswith("scatter") or name == "conv_general_dilated":
                    outputs = _whole(name, params, [*outputs, *inputs[1:]], mesh)[:1]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_over_single(eqn: Any, mesh: Mesh) -> bool:
    """Return whether an operation reduces over axes of one device alone, which changes
    nothing.
    """
    is_reduction = eqn.primitive.name in ("psum", "psum_invariant", "pmax", "pmin")
    return is_reduction and all(
        mesh.shape.get(name) == 1 for name in eqn.params["axes"]
    )


def _constrain_again(
    x: Any, mesh: Mesh, *, sharding: Any, unconstrained_dims: Any, **_: Any
) -> Any:
    """Constrain an array along the axes that are automatic here, of those in the
    trace.
    """
    free = dict.fromkeys(unconstrained_dims, PartitionSpec.UNCONSTRAINED)
    entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    spec = PartitionSpec(*(free.get(k, entry) for k, entry in enumerate(entries)))
    return constrain(
        x, NamedSharding(auto_view(mesh), spec, memory_kind=sharding.memory_kind)
    )


def _automatic_axes() -> set[str]:
    """Return the axes that are not manual in the function that is traced here."""
    context = jax.sharding.get_abstract_mesh()
    return {str(name) for name in context.axis_names} - set(context.manual_axes)


def _run_manually(
    run: Callable[[Sequence[Any]], list[Any]],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    inputs: list[Any],
) -> list[Any]:
    """Run a function of a list manually over all axes: XLA aborts if an automatic axis
    is before a manual one.
    """
    automatic = _automatic_axes()
    if not automatic:
        return run(inputs)
    others = frozenset(jax.sharding.get_abstract_mesh().shape) - automatic
    own_specs = [
        [spec_without(spec, others) for spec in specs]
        for specs in (in_specs, out_specs)
    ]
    options = {
        "in_specs": tuple(own_specs[0]),
        "out_specs": own_specs[1],
        "axis_names": automatic,
        "check_vma": False,
    }
    return list(jax.shard_map(lambda *args: run(args), **options)(*inputs))


def _call_back(eqn: Any, automatic: set[str], inputs: Sequence[Any]) -> list[Any]:
    """Run a callback where all axes are manual: one without results on a single device
    along those that were automatic.
    """
    if eqn.outvars:
        return list(eqn.primitive.bind(*inputs, **eqn.params))

    def call() -> None:
        eqn.primitive.bind(*inputs, **eqn.params)

    is_first = sum(jax.lax.axis_index(name) for name in automatic) == 0
    jax.lax.cond(is_first, call, lambda: None)
    return []


def _whole(
    name: str, params: dict[str, Any], inputs: list[Any], mesh: Mesh
) -> list[Any]:
    """Return the inputs of an operation, with those whole that XLA cannot partition.
    Batch dimensions stay as they are.
    """
    if (
        name == "conv_general_dilated"
        and max(params["feature_group_count"], params["batch_group_count"]) > 1
    ):
        return [
            constrain(x, NamedSharding(auto_view(mesh), PartitionSpec()))
            for x in inputs
        ]
    # With a single index, it is a slice, as that of the loops over microbatches and
    # layers.
    if (name == "gather" or name.startswith("scatter")) and inputs[1].ndim > 1:
        operand = inputs[0]
        batching = params["dimension_numbers"].operand_batching_dims
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(
            *(free if k in batching else None for k in range(operand.ndim))
        )
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
    is_array = hasattr(aval, "weak_type")
    return (
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        if is_array
        else aval
    )
