"""The training state: what a step changes, and how it gets onto a mesh in arrays that a step may donate."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.engine.contract import SummableLoss
from rampup.engine.explicit import on_mesh
from rampup.engine.mesh import BatchAxes, auto_context, is_explicit, shardings_like
from rampup.engine.processes import wait_for_all
from rampup.engine.zero import scattered_shardings
from rampup.errors import ConfigError, RampDefinitionError, a_type
from rampup.plan.plan import RampPlan

# The fields for what a loss function carries from microbatch to microbatch. A state uses one of them; Flax's examples call
# theirs `batch_stats`.
CARRIED_FIELDS = ("mutable", "batch_stats")
MAX_STEPS = 2**31 - 1
# Arrays that the repr of a tree names.
_NAMED = 4
# Optimizers of Optax that need more than the gradient of a step: their functions, what to call them, and the reason.
_SEARCHES = "it evaluates the loss at several points of a step, whose microbatches are not kept"
_UNSUPPORTED = {
    "scale_by_zoom_linesearch.": ("a line search, as in optax.lbfgs", _SEARCHES),
    "scale_by_backtracking_linesearch.": ("optax.scale_by_backtracking_linesearch", _SEARCHES),
    "sam.<locals>.opaque": ("optax.contrib.sam(opaque_mode=True)", f"{_SEARCHES}; leave opaque_mode=True out"),
    "lookahead.": ("optax.lookahead", "it trains pairs of parameters, of which only one has a gradient"),
}


class TrainState(struct.PyTreeNode):
    """The values that training changes. Flax's own `TrainState` works as well, and so does any dataclass with these fields.

    A state with a method `apply_gradients` is updated by it, as in Flax, so a subclass can update fields of its own there, such
    as a moving average; all other fields keep their values. If a state has a field `tx`, it must be the `tx` of the
    `TrainStep`. A field `batch_stats` is carried like `mutable`, and a Flax `DynamicScale` in `dynamic_scale` scales the loss.

    Attributes:
        step: optimizer steps done, int32.
        params: the parameters. Integer arrays among them are not trained.
        opt_state: the optimizer's state.
        mutable: state that the loss function carries from microbatch to microbatch, such as batch statistics, or None.
        frozen: arrays that the loss function reads as its keyword argument `frozen` and that training leaves as they are, such
            as the base model of a LoRA fine-tune, or None. They take no memory for gradients, and a step does not donate them:
            they may be the parameters of another state, as in a GAN.
    """

    step: Any
    params: Any
    opt_state: Any
    mutable: Any = None
    frozen: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        # A dataclass gets a repr of its own otherwise.
        super().__init_subclass__(**{"repr": False} | options)

    def __repr__(self) -> str:
        return describe_fields(self)


def describe_fields(state: Any) -> str:
    """Return the repr of a dataclass of trees, with shapes and counts in place of arrays."""
    fields = (f"{field.name}={describe_tree(getattr(state, field.name))}" for field in dataclasses.fields(state))
    return f"{type(state).__name__}({', '.join(fields)})"


def describe_tree(tree: Any) -> str:
    """Return how many arrays and numbers a tree has, and the shapes of the first arrays; of a number, its value.

    Example:
        >>> describe_tree({"w": np.ones((2, 8), np.float32), "v": np.ones(8, np.float32)}), describe_tree(np.int32(3))
        ('<2 arrays, 24 numbers: v float32[8], w float32[2,8]>', '3')
    """
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        return "None" if tree is None else "<no arrays>"
    if leaves[0][1] is tree:
        is_array = isinstance(tree, (np.ndarray, jax.Array)) and not isinstance(tree, jax.core.Tracer)
        is_there = is_array and not (isinstance(tree, jax.Array) and tree.is_deleted())
        is_number = is_there and jnp.issubdtype(tree.dtype, np.number) and not tree.ndim
        return str(tree) if is_number or isinstance(tree, (int, float, np.generic)) else _describe_array(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves[:_NAMED]]
    named = [f"{name} {_describe_array(leaf)}" for name, (_, leaf) in zip(names, leaves, strict=False)]
    more = [f"{len(leaves) - _NAMED:,} more"] if len(leaves) > _NAMED else []
    total = sum(math.prod(np.shape(leaf)) for _, leaf in leaves)
    return f"<{len(leaves):,} array{'' if len(leaves) == 1 else 's'}, {total:,} numbers: {', '.join(named + more)}>"


def _describe_array(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{','.join(map(str, np.shape(leaf)))}]"


def create_state(
    params: Any,
    tx: optax.GradientTransformation | optax.MultiSteps,
    mesh: Mesh,
    *,
    mutable: Any = None,
    frozen: Any = None,
    shard_optimizer_over_data: bool = False,
    batch_axes: BatchAxes | None = None,
) -> TrainState:
    """Return the training state at step 0, with every leaf placed on the mesh. The caller's arrays are copied.

    Args:
        params: the parameters. Those on the mesh keep their sharding, others are replicated.
        tx: the optimizer; for the engine `multi_steps`, the attribute `tx` of the `TrainStep`. Its state takes the sharding of
            the parameters that it mirrors.
        mesh: the devices.
        mutable, frozen: see `TrainState`.
        shard_optimizer_over_data, batch_axes: see `train_step`.
    """
    check_arguments("create_state(params, tx, mesh)", tx=tx, mesh=mesh)
    for name, tree in {"params": params, "mutable": mutable, "frozen": frozen}.items():
        _check_arrays(name, tree)
    wait_for_all(mesh)
    given = params, mutable, frozen
    params, mutable, frozen = _put(given, shardings_like(given, mesh), may_alias=False)
    with auto_context(mesh):
        if shard_optimizer_over_data:
            # Scattered over the replicas from the start: no device ever has the whole state.
            axes = BatchAxes.of(mesh, batch_axes)
            opt_state = tx.init(jax.device_put(params, scattered_shardings(params, mesh, axes)))
            # New arrays such as counters are on one device. They come onto the mesh before they can be scattered.
            opt_state = _put(opt_state, shardings_like(opt_state, mesh))
            opt_state = _put(opt_state, scattered_shardings(opt_state, mesh, axes))
        else:
            opt_state = tx.init(params)
        state = TrainState(step=jnp.int32(0), params=params, opt_state=opt_state, mutable=mutable, frozen=frozen)
        state = _without_aliases(_put(state, shardings_like(state, mesh)), given)
    return _on_given_mesh(state, mesh)


def prepare_state(
    state: Any, mesh: Mesh, *, shard_optimizer_over_data: bool = False, batch_axes: BatchAxes | None = None
) -> Any:
    """Return a copy of a training state, such as a stock Flax `TrainState`, with all leaves on the mesh and `step` as int32.

    Args:
        state: has `step`, `params` and `opt_state`, as `flax.training.train_state.TrainState` has; see `TrainState`.
        mesh: the devices. Leaves on the mesh keep their sharding, others are replicated.
        shard_optimizer_over_data, batch_axes: see `train_step`. `opt_state` is sharded over the replicas too.
    """
    check_arguments("prepare_state(state, mesh)", mesh=mesh)
    check_state(state)
    _check_arrays("state.params", state.params)
    check_step_number(int(state.step))
    wait_for_all(mesh)
    given = replace_fields(state, step=jnp.asarray(state.step, jnp.int32))
    with auto_context(mesh):
        state = _without_aliases(_put(given, shardings_like(given, mesh), may_alias=False), given)
        if shard_optimizer_over_data:
            scattered = scattered_shardings(state.opt_state, mesh, BatchAxes.of(mesh, batch_axes))
            state = replace_fields(state, opt_state=_put(state.opt_state, scattered))
    return _on_given_mesh(state, mesh)


def replace_fields(state: Any, **changes: Any) -> Any:
    """Return a copy of a state with some fields changed: of a dataclass, a named tuple, or a class with a method `replace`."""
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, **changes)  # type: ignore[type-var]
    return (state.replace if hasattr(state, "replace") else state._replace)(**changes)


def carried(state: Any) -> Any:
    """Return the value that the loss function carries from microbatch to microbatch, or None."""
    name = _carried_field(state)
    return name and getattr(state, name)


def replace_carried(state: Any, value: Any, **changes: Any) -> Any:
    """Return a state with a new value in the field that the loss function carries, if it has one, and with other changes."""
    name = _carried_field(state)
    return replace_fields(state, **changes, **({name: value} if name else {}))


def _carried_field(state: Any) -> str | None:
    """Return the field that the loss function carries, or None."""
    return next((name for name in CARRIED_FIELDS if getattr(state, name, None) is not None), None)


def split_frozen(state: Any) -> tuple[Any, Any]:
    """Return a state without its field `frozen`, and that field, or None."""
    frozen = getattr(state, "frozen", None)
    return (state, None) if frozen is None else (replace_fields(state, frozen=None), frozen)


def join_frozen(state: Any, frozen: Any) -> Any:
    """Undo `split_frozen`."""
    return state if frozen is None else replace_fields(state, frozen=frozen)


def shardings_of(state: Any) -> Any:
    """Return the shardings of a state's leaves. Leaves that are no JAX arrays are refused."""
    for path, leaf in jax.tree.leaves_with_path(state):
        if not hasattr(leaf, "sharding"):
            name = jax.tree_util.keystr(path)
            raise ConfigError(f"state{name} is {a_type(leaf)}; place the state with rampup.prepare_state(state, mesh)")
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def check_state(state: Any) -> None:
    """Refuse something that is not a training state."""
    missing = [name for name in ("step", "params", "opt_state") if not hasattr(state, name)]
    # JAX takes an object of a class that is not registered as a pytree for a leaf.
    if missing or jax.tree_util.all_leaves([state]):
        problem = f"it has no {', '.join(missing)}" if missing else "register it with jax.tree_util.register_dataclass"
        example = "a state is a pytree with `step`, `params` and `opt_state`, such as flax.training.train_state.TrainState"
        raise ConfigError(f"{a_type(state)} cannot be trained: {problem}; {example}")
    if all(getattr(state, name, None) is not None for name in CARRIED_FIELDS):
        problem = f"the state has both {' and '.join(CARRIED_FIELDS)}, but a loss function carries one value"
        raise ConfigError(f"{problem}; put both into one field", key="state")


def check_step_number(steps: int) -> None:
    """Refuse a number of steps that a device cannot count."""
    if steps > MAX_STEPS:
        problem = f"steps={steps:,} does not fit into the int32 step counter of a device"
        raise RampDefinitionError(problem, key="steps", nearest=(MAX_STEPS,))


def check_arguments(call: str, **arguments: Any) -> None:
    """Refuse arguments of the wrong type, such as two in the wrong order."""
    tests: dict[str, Callable[[Any], bool]] = {
        "loss_fn": lambda x: callable(x) or isinstance(x, SummableLoss),
        "tx": lambda x: hasattr(x, "init") and hasattr(x, "update"),
        "plan": lambda x: isinstance(x, RampPlan),
        "mesh": lambda x: isinstance(x, Mesh),
    }
    wrong = {name: type(value).__name__ for name, value in arguments.items() if not tests[name](value)}
    if wrong:
        hint = "; give the optimizer's `tx`, not an nnx.Optimizer" if hasattr(arguments.get("tx"), "opt_state") else ""
        found = ", ".join(f"{name} is a {kind}" for name, kind in wrong.items())
        raise ConfigError(f"{call}: {found}{hint or '; check the order of the arguments'}", key=next(iter(wrong)))
    names = [function.__qualname__ for function in _functions_of(arguments.get("tx"))]
    for start, (optimizer, reason) in _UNSUPPORTED.items():
        if any(name.startswith(start) for name in names):
            raise ConfigError(f"tx is or contains {optimizer}, which a training step cannot run: {reason}", key="tx")


def _check_arrays(name: str, tree: Any) -> None:
    """Refuse a tree that a step cannot train or carry: an NNX module, or leaves that are no arrays of numbers."""
    nnx = sys.modules.get("flax.nnx")  # Whoever has a module has imported it.
    is_module: Callable[[Any], bool] = lambda leaf: nnx is not None and isinstance(leaf, nnx.Module)  # noqa: E731
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_module):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if is_module(leaf):
            problem = f"{place} is an NNX module ({type(leaf).__name__}), whose statistics and random states are no parameters"
            fix = "give it to rampup.split_model(model, loss_fn, tx, mesh), which returns the state and the loss function"
            raise ConfigError(f"{problem}; {fix}", key="params")
        # Random keys and bfloat16 have types that are not NumPy's.
        dtype = getattr(leaf, "dtype", None)
        is_text = isinstance(dtype, np.dtype) and (dtype.kind in "OSUMm" or dtype.names is not None)
        if is_text or (dtype is None and not isinstance(leaf, (bool, int, float, complex))):
            problem = f"{place} is {a_type(leaf)} and not an array of numbers"
            fix = "keep only arrays in it, and the rest in the loss function; an Equinox model is parted by params, static = "
            fix += "eqx.partition(model, eqx.is_inexact_array), and joined in the loss function by eqx.combine(params, static)"
            raise ConfigError(f"{problem}; {fix}", key="params")


def _functions_of(tx: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions that an optimizer is made of. Optax nests them in closures."""
    found, seen = [tx], set[int]()
    while found:
        part = found.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (tuple, list)):
            found += part
        elif isinstance(part, dict):
            found += part.values()
        elif isinstance(part, functools.partial):
            found += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(getattr(part, "__self__", None), optax.MultiSteps):
            found += vars(part.__self__).values()
        elif isinstance(part, FunctionType):
            yield part
            # A cell whose variable has no value yet is equal to an empty one.
            found += [cell.cell_contents for cell in part.__closure__ or () if cell != CellType()]


def _put(tree: Any, shardings: Any, **options: Any) -> Any:
    """Put a tree on devices like `jax.device_put`, which alone refuses random keys on the devices of several processes."""

    def is_key(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))

    # A key travels as its numbers. They have one more dimension, at the end, so its sharding fits them.
    put = jax.device_put(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree), shardings, **options)

    def wrap(leaf: Any, own: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(own)) if is_key(own) else leaf

    return jax.tree.map(wrap, put, tree)


def _on_given_mesh(state: Any, mesh: Mesh) -> Any:
    """Return a state on the mesh that the caller gave, after an optimizer that saw Auto axes."""
    return _put(state, on_mesh(shardings_of(state), mesh)) if is_explicit(mesh) else state


def _without_aliases(state: Any, given: Any) -> Any:
    """Return a state in which every leaf has buffers of its own, as donation requires; leaves that share one are copied.

    A leaf may share its buffers with the caller's arrays `given`, as JAX keeps the shards that are already where they belong,
    or with another leaf, as the state of an optimizer may contain the parameters.
    """

    def buffers(leaf: jax.Array) -> set[int]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards if shard.data.size}

    arrays = [leaf for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array) and leaf.is_fully_addressable]
    used = set[int]().union(*map(buffers, arrays))

    def copy_if_shared(leaf: jax.Array) -> jax.Array:
        # Several processes must decide alike, and none sees the buffers of the others: they always copy.
        if not leaf.is_fully_addressable:
            return jnp.copy(leaf)
        # An empty array has no buffer to compare.
        if not leaf.size or not used.isdisjoint(buffers(leaf)):
            leaf = jax.device_put(jnp.copy(leaf), leaf.sharding)
        used.update(buffers(leaf))
        return leaf

    return jax.tree.map(copy_if_shared, state)
