"""The training state: what a step changes, how it gets onto a mesh in arrays that may
be donated, and on what no step runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, SingleDeviceSharding

from rampup.engine.contract import SummableLoss
from rampup.engine.explicit import as_auto, on_mesh
from rampup.engine.mesh import BatchAxes, auto_context, is_explicit, shardings_like
from rampup.engine.processes import wait_for_all
from rampup.engine.sums import differing_leaves
from rampup.engine.zero import is_scattered, scattered_shardings
from rampup.errors import ConfigError, RampDefinitionError, a_type
from rampup.plan.plan import RampPlan

# The fields for what a loss function carries from microbatch to microbatch; a state
# uses one. Flax's examples have the second.
CARRIED_FIELDS = ("mutable", "batch_stats")
MAX_STEPS = 2**31 - 1
_NAMED = 4
F = TypeVar("F", bound=Callable[..., Any])
# Optimizers of Optax that need more than the gradient of a step: their functions, what
# to call them, and the reason.
_SEARCHES = (
    "it evaluates the loss at several points of a step, whose microbatches are not kept"
)
_UNSUPPORTED = {
    "scale_by_zoom_linesearch.": ("a line search, as in optax.lbfgs", _SEARCHES),
    "scale_by_backtracking_linesearch.": (
        "optax.scale_by_backtracking_linesearch",
        _SEARCHES,
    ),
    "sam.<locals>.opaque": (
        "optax.contrib.sam(opaque_mode=True)",
        f"{_SEARCHES}; leave opaque_mode=True out",
    ),
    "lookahead.": (
        "optax.lookahead",
        "it trains pairs of parameters, of which only one has a gradient",
    ),
}


class TrainState(struct.PyTreeNode):
    """The values that training changes. Flax's own `TrainState` works as well, and so
    does any dataclass with these fields.

    A state with a method `apply_gradients` is updated by it, as in Flax, so a subclass
    can update fields of its own there, such as a moving average. A field `tx` must be
    the `tx` of the `TrainStep`. A field `batch_stats` is carried like `mutable`, and a
    Flax `DynamicScale` in `dynamic_scale` scales the mean loss of a microbatch, as in a
    step by hand. All other fields keep their values.

    Attributes:
        step: optimizer steps done, int32.
        params, opt_state: the parameters, of which integer arrays are not trained, and
            the optimizer's state.
        mutable: what the loss function carries from microbatch to microbatch, such as
            batch statistics, or None.
        frozen: arrays that the loss function reads as its keyword argument `frozen`,
            such as the base model of a LoRA fine-tune, or None. They have no gradients
            and are not donated: they may be the parameters of another state.

    Example:
        >>> tx, params = optax.sgd(0.1), {"w": jnp.zeros(3)}
        >>> TrainState(
        ...     step=jnp.int32(0), params=params, opt_state=tx.init(params)
        ... ).mutable
    """

    step: Any
    params: Any
    opt_state: Any
    mutable: Any = None
    frozen: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**{"repr": False} | options)

    def __repr__(self) -> str:
        return describe_fields(self)


def describe_fields(state: Any) -> str:
    """Return the repr of a dataclass of trees, with shapes and counts in place of
    arrays.
    """
    fields = (
        f"{field.name}={describe_tree(getattr(state, field.name))}"
        for field in dataclasses.fields(state)
    )
    return f"{type(state).__name__}({', '.join(fields)})"


def describe_tree(tree: Any) -> str:
    """Return how many arrays and numbers a tree has, and the shapes of the first
    arrays; of a number, its value.
    """
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        return "None" if tree is None else "<no arrays>"
    if leaves[0][1] is tree:
        is_array = isinstance(tree, (np.ndarray, jax.Array)) and not isinstance(
            tree, jax.core.Tracer
        )
        is_there = is_array and not (isinstance(tree, jax.Array) and tree.is_deleted())
        is_number = is_there and jnp.issubdtype(tree.dtype, np.number) and not tree.ndim
        return (
            str(tree)
            if is_number or isinstance(tree, (int, float, np.generic))
            else _describe_array(tree)
        )
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in leaves[:_NAMED]
    ]
    named = [
        f"{name} {_describe_array(leaf)}"
        for name, (_, leaf) in zip(names, leaves, strict=False)
    ]
    more = [f"{len(leaves) - _NAMED:,} more"] if len(leaves) > _NAMED else []
    total = sum(math.prod(np.shape(leaf)) for _, leaf in leaves)
    return (
        f"<{len(leaves):,} array{'' if len(leaves) == 1 else 's'}, {total:,} numbers:"
        f" {', '.join(named + more)}>"
    )


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
    """Return the training state at step 0, with every leaf placed on the mesh. The
    caller's arrays are copied.

    Args:
        params: the parameters. Those on the mesh keep their sharding, others are
            replicated.
        tx: the optimizer, such as the attribute `tx` of the `TrainStep`.
        mesh: the devices.
        mutable, frozen: see `TrainState`.
        shard_optimizer_over_data: each replica keeps and updates its own part of the
            optimizer's state (ZeRO-1). The step follows the state.
        batch_axes: the axes of the mesh that take the rows; None = data and fsdp.

    Returns:
        The state, whose `step` is 0.

    Raises:
        ConfigError: leaves that are no arrays, parameters that are all integers,
            arguments of the wrong type, or an optimizer that a step cannot run.

    Example:
        >>> from rampup import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> state = create_state({"w": np.zeros(3)}, optax.adam(1e-3), mesh)
        >>> int(state.step), state.params["w"].shape
        (0, (3,))
    """
    check_arguments("create_state(params, tx, mesh)", tx=tx, mesh=mesh)
    for name, tree in {"params": params, "mutable": mutable, "frozen": frozen}.items():
        _check_arrays(name, tree)
    types = {jnp.result_type(leaf) for leaf in jax.tree.leaves(params)}
    if types and not any(jnp.issubdtype(each, jnp.inexact) for each in types):
        raise ConfigError(
            f"no leaf of params is trained: all are {' or '.join(map(str, types))}",
            fix="make those that the optimizer shall change floating-point arrays",
            key="params",
        )
    wait_for_all(mesh)
    given = params, mutable, frozen
    params, mutable, frozen = _put(given, shardings_like(given, mesh), may_alias=False)
    with auto_context(mesh):
        if shard_optimizer_over_data:
            axes = BatchAxes.of(mesh, batch_axes)
            opt_state = tx.init(
                jax.device_put(params, scattered_shardings(params, mesh, axes))
            )
            # New arrays such as counters are on one device. They come onto the mesh
            # before they can be scattered.
            opt_state = _put(opt_state, shardings_like(opt_state, mesh))
            opt_state = _put(opt_state, scattered_shardings(opt_state, mesh, axes))
        else:
            opt_state = tx.init(params)
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=opt_state,
            mutable=mutable,
            frozen=frozen,
        )
        state = _without_aliases(_put(state, shardings_like(state, mesh)), given)
    return _on_given_mesh(state, mesh)


def prepare_state(
    state: Any,
    mesh: Mesh,
    *,
    shard_optimizer_over_data: bool = False,
    batch_axes: BatchAxes | None = None,
) -> Any:
    """Return a copy of a training state, such as a stock Flax `TrainState`, with all
    leaves on the mesh and `step` as int32.

    Args:
        state: the state; see `TrainState`. Leaves on the mesh keep their sharding,
            others are replicated.
        mesh: the devices.
        shard_optimizer_over_data, batch_axes: see `create_state`.

    Returns:
        The copy, whose leaves may be donated.

    Raises:
        ConfigError: this is no training state, or has leaves that are no arrays.

    Example:
        >>> from rampup import make_mesh
        >>> tx, params = optax.sgd(0.1), {"w": np.zeros(3)}
        >>> state = TrainState(step=0, params=params, opt_state=tx.init(params))
        >>> prepare_state(state, make_mesh(devices=jax.devices()[:1])).step.dtype.name
        'int32'
    """
    check_arguments("prepare_state(state, mesh)", mesh=mesh)
    check_state(state)
    _check_arrays("state.params", state.params)
    check_step_number(int(state.step))
    wait_for_all(mesh)
    given = replace_fields(state, step=jnp.asarray(state.step, jnp.int32))
    with auto_context(mesh):
        state = _without_aliases(
            _put(given, shardings_like(given, mesh), may_alias=False), given
        )
        if shard_optimizer_over_data:
            scattered = scattered_shardings(
                state.opt_state, mesh, BatchAxes.of(mesh, batch_axes)
            )
            state = replace_fields(state, opt_state=_put(state.opt_state, scattered))
    return _on_given_mesh(state, mesh)


def replace_fields(state: Any, **changes: Any) -> Any:
    """Return a copy with some fields changed of a dataclass, a named tuple, or a class
    with a method `replace`.
    """
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, **changes)  # type: ignore[type-var]
    return (state.replace if hasattr(state, "replace") else state._replace)(**changes)


def carried(state: Any) -> Any:
    """Return the value that the loss function carries from microbatch to microbatch, or
    None.
    """
    return next(
        (
            value
            for name in CARRIED_FIELDS
            if (value := getattr(state, name, None)) is not None
        ),
        None,
    )


def replace_carried(state: Any, value: Any, **changes: Any) -> Any:
    """Return a state with a new value in the field that the loss function carries, if
    it has one, and with other changes.
    """
    own = {
        name: value for name in CARRIED_FIELDS if getattr(state, name, None) is not None
    }
    return replace_fields(state, **changes, **own)


def split_frozen(state: Any) -> tuple[Any, Any]:
    """Return a state without its field `frozen`, and that field, or None."""
    frozen = getattr(state, "frozen", None)
    return (
        (state, None)
        if frozen is None
        else (replace_fields(state, frozen=None), frozen)
    )


def join_frozen(state: Any, frozen: Any) -> Any:
    """Undo `split_frozen`."""
    return state if frozen is None else replace_fields(state, frozen=frozen)


def shardings_of(state: Any) -> Any:
    """Return the shardings of a state's leaves, or refuse leaves that are no JAX
    arrays.
    """
    for path, leaf in jax.tree.leaves_with_path(state):
        if not hasattr(leaf, "sharding"):
            name = jax.tree_util.keystr(path)
            raise ConfigError(
                f"state{name} is {a_type(leaf)}; place the state with"
                " rampup.prepare_state(state, mesh)"
            )
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def check_state(state: Any) -> None:
    """Refuse something that is not a training state."""
    missing = [
        name for name in ("step", "params", "opt_state") if not hasattr(state, name)
    ]
    # JAX takes an object of a class that is not registered as a pytree for a leaf.
    if missing or jax.tree_util.all_leaves([state]):
        problem = (
            f"it has no {', '.join(missing)}"
            if missing
            else "register it with jax.tree_util.register_dataclass"
        )
        example = (
            "a state is a pytree with `step`, `params` and `opt_state`, such as"
            " flax.training.train_state.TrainState"
        )
        raise ConfigError(f"{a_type(state)} cannot be trained: {problem}; {example}")
    if all(getattr(state, name, None) is not None for name in CARRIED_FIELDS):
        problem = (
            f"the state has both {' and '.join(CARRIED_FIELDS)}, but a loss function"
            " carries one value"
        )
        raise ConfigError(f"{problem}; put both into one field", key="state")


def check_placed(state: Any) -> None:
    """Refuse a state that a program cannot read: one that was donated, or with leaves
    that are not on devices.
    """
    check_state(state)
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f"state{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            raise ConfigError(
                f"{name} is {a_type(leaf)}, and not an array on the mesh",
                fix="place the state with rampup.prepare_state(state, mesh)",
                key="state",
            )
        if not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise ConfigError(f"{name}: {_DONATED[0]}", fix=_DONATED[1], key="state")


def check_step_number(steps: int) -> None:
    """Refuse a number of steps that a device cannot count."""
    if steps > MAX_STEPS:
        problem = (
            f"steps={steps:,} does not fit into the int32 step counter of a device"
        )
        raise RampDefinitionError(problem, key="steps", nearest=(MAX_STEPS,))


def gone(**replacements: str) -> Callable[[F], F]:
    """Decorate a function that had these keyword arguments: whoever gives one is told
    what replaces it.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name in replacements.keys() & options.keys():
                problem = f"{function.__name__} has no argument {name!r}"
                raise TypeError(f"{problem}; {replacements[name]}")
            return function(*args, **options)

        return cast(F, checked)

    return decorate


def check_arguments(call: str, **arguments: Any) -> None:
    """Refuse arguments of the wrong type, such as two in the wrong order."""
    tests: dict[str, Callable[[Any], bool]] = {
        "loss_fn": lambda x: callable(x) or isinstance(x, SummableLoss),
        "tx": lambda x: hasattr(x, "init") and hasattr(x, "update"),
        "plan": lambda x: isinstance(x, RampPlan),
        "mesh": lambda x: isinstance(x, Mesh),
    }
    wrong = {
        name: type(value).__name__
        for name, value in arguments.items()
        if not tests[name](value)
    }
    if wrong:
        hint = (
            "; give the optimizer's `tx`, not an nnx.Optimizer"
            if hasattr(arguments.get("tx"), "opt_state")
            else ""
        )
        found = ", ".join(f"{name} is a {kind}" for name, kind in wrong.items())
        raise ConfigError(
            f"{call}: {found}{hint or '; check the order of the arguments'}",
            key=next(iter(wrong)),
        )
    names = [function.__qualname__ for function in _functions_of(arguments.get("tx"))]
    for start, (optimizer, reason) in _UNSUPPORTED.items():
        if any(name.startswith(start) for name in names):
            raise ConfigError(
                f"tx is or contains {optimizer}, which a training step cannot run:"
                f" {reason}",
                key="tx",
            )


def _check_arrays(name: str, tree: Any) -> None:
    """Refuse a tree that a step cannot train or carry: an NNX module, or leaves that
    are no arrays of numbers.
    """
    nnx = sys.modules.get("flax.nnx")  # Whoever has a module has imported it.

    def is_module(leaf: Any) -> bool:
        return nnx is not None and isinstance(leaf, nnx.Module)

    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_module):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if is_module(leaf):
            problem = (
                f"{place} is an NNX module ({type(leaf).__name__}), whose statistics"
                " and random states are no parameters"
            )
            fix = (
                "give it to rampup.split_model(model, loss_fn, tx, mesh), which returns"
                " the state and the loss function"
            )
            raise ConfigError(f"{problem}; {fix}", key="params")
        # Random keys and bfloat16 have types that are not NumPy's.
        dtype = getattr(leaf, "dtype", None)
        is_text = isinstance(dtype, np.dtype) and (
            dtype.kind in "OSUMm" or dtype.names is not None
        )
        if is_text or (
            dtype is None and not isinstance(leaf, (bool, int, float, complex))
        ):
            problem = f"{place} is {a_type(leaf)} and not an array of numbers"
            fix = (
                "keep only arrays in it, and the rest in the loss function; an Equinox"
                " model is parted by params, static = "
            )
            fix += (
                "eqx.partition(model, eqx.is_inexact_array), and joined in the loss"
                " function by eqx.combine(params, static)"
            )
            raise ConfigError(f"{problem}; {fix}", key="params")


def _functions_of(tx: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions that an optimizer is made of. Optax nests them in
    closures.
    """
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
            found += [
                cell.cell_contents
                for cell in part.__closure__ or ()
                if cell != CellType()
            ]


def _put(tree: Any, shardings: Any, **options: Any) -> Any:
    """Put a tree on devices like `jax.device_put`, which alone refuses random keys on
    the devices of several processes.
    """

    def is_key(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and bool(
            jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        )

    # A key travels as its numbers, whose further dimension is the last, so its sharding
    # fits them.
    put = jax.device_put(
        jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree),
        shardings,
        **options,
    )

    def wrap(leaf: Any, own: Any) -> Any:
        return (
            jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(own))
            if is_key(own)
            else leaf
        )

    return jax.tree.map(wrap, put, tree)


def _on_given_mesh(state: Any, mesh: Mesh) -> Any:
    """Return a state on the mesh that the caller gave, after an optimizer that saw Auto
    axes.
    """
    return (
        _put(state, on_mesh(shardings_of(state), mesh)) if is_explicit(mesh) else state
    )


def _without_aliases(state: Any, given: Any) -> Any:
    """Return a state in which every leaf has buffers of its own, as donation requires:
    none of `given`, or of another leaf.
    """

    def buffers(leaf: jax.Array) -> set[int]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return {
            shard.data.unsafe_buffer_pointer()
            for shard in leaf.addressable_shards
            if shard.data.size
        }

    arrays = [
        leaf
        for leaf in jax.tree.leaves(given)
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    ]
    used = set[int]().union(*map(buffers, arrays))

    def copy_if_shared(leaf: jax.Array) -> jax.Array:
        # Several processes must decide alike, and none sees the buffers of the others:
        # they always copy.
        if not leaf.is_fully_addressable:
            return jnp.copy(leaf)
        if not leaf.size or not used.isdisjoint(buffers(leaf)):
            leaf = jax.device_put(jnp.copy(leaf), leaf.sharding)
        used.update(buffers(leaf))
        return leaf

    return jax.tree.map(copy_if_shared, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """A state that a training step did not return, and what decides whether the step
    can run on it.
    """

    state: Any
    tx: Any
    mesh: Mesh
    axes: BatchAxes  # those of the rows; `replica` are those of several devices
    # the step has no programs yet; later states must have the types and shapes that it
    # compiled for
    is_first: bool
    donate: bool

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer runs once per step."""
        return not isinstance(self.tx, optax.MultiSteps)

    def check(self) -> int:
        """Refuse a state that the step cannot run on, or return its step number. That
        waits for the devices, once.
        """
        check_state(self.state)
        for problem, key, message in _STATE_PROBLEMS:
            if found := problem(self):
                nearest = ("fused",) if key == "gradient_accumulation" else ()
                raise ConfigError(
                    message.format(found, new=self, state=self.state),
                    key=key,
                    nearest=nearest,
                )
        return int(self.state.step)

    def other_optimizer(self) -> str | None:
        """Return how `opt_state` differs from that of the step's optimizer, which may
        run on it without an error, or None.
        """
        if not self.is_first:
            return None
        try:
            with auto_context(self.mesh):
                expected = jax.eval_shape(self.tx.init, as_auto(self.state.params))
        except Exception:  # noqa: BLE001 - an `init` that looks at values cannot tell the shapes
            return None
        found = self.state.opt_state
        for name, want, have in differing_leaves(expected, found, np.shape):
            wanted, got = (
                "is absent" if shape is None else f"has the shape {list(shape)}"
                for shape in (want, have)
            )
            return f"opt_state{name} {got} in the state, and {wanted} in the optimizer"
        parts = [
            jax.tree.structure(tree, is_leaf=lambda x: not isinstance(x, tuple))
            for tree in (expected, found)
        ]
        same = parts[0] == parts[1]
        return (
            None
            if same
            else (
                "its parts are others, such as those of a chain with more or fewer"
                " transformations"
            )
        )

    def on_one_device(self) -> str | None:
        """Return the name of an array that is not on the mesh."""
        shardings = (
            jax.tree.leaves_with_path(shardings_of(self.state))
            if self.mesh.size > 1
            else ()
        )
        outside = (
            path
            for path, sharding in shardings
            if isinstance(sharding, SingleDeviceSharding)
        )
        return next(map(jax.tree_util.keystr, outside), None)

    def same_arrays(self) -> str | None:
        """Return the names of two leaves that are one array, which a step cannot donate
        to what each becomes.
        """
        names: dict[int, str] = {}
        for path, leaf in jax.tree.leaves_with_path(self.state) if self.donate else ():
            name = f"state{jax.tree_util.keystr(path)}"
            if (other := names.setdefault(id(leaf), name)) is not name:
                return f"{other} and {name}"
        return None

    def scattered_parameters(self) -> str | None:
        """Return the replicas over which parameters are sharded."""
        return (
            " and ".join(self.axes.replica)
            if is_scattered(shardings_of(self.state.params), self.axes)
            else None
        )

    def scattered_otherwise(self) -> str | None:
        """Return the replicas over which the optimizer's state is sharded otherwise
        than by ZeRO-1, or for `multi_steps` at all.
        """
        found = shardings_of(self.state.opt_state)
        if not is_scattered(found, self.axes):
            return None
        wanted = scattered_shardings(self.state.opt_state, self.mesh, self.axes)
        is_zero = jax.tree.leaves(found) == jax.tree.leaves(wanted)
        over = " and ".join(self.axes.replica)
        return None if is_zero and self.is_fused else over


_DONATED = (
    "the state was donated to an earlier step",
    "use the one that it returned, or train_step(..., donate=False)",
)
_OWN_TX = "make it with the `tx` of the step: create_state(params, step.tx, mesh)"
_AT = (
    "the state is at step {state.step}, but its optimizer at microbatch"
    " {state.opt_state.mini_step} of step "
)
_AT += "{state.opt_state.gradient_step}"
# What a step cannot run on, in an order in which each may rely on those before it: the problem, which is what was found or
# false; the key; and the message, with {} for what was found.
# fmt: off
_STATE_PROBLEMS: tuple[tuple[Callable[[NewState], Any], str | None, str], ...] = (
    (lambda new: isinstance(new.state.step, jax.core.Tracer), None,
     "a TrainStep is compiled already; in a jitted function of your own, use rampup.accumulate"),
    (lambda new: isinstance(new.state.step, jax.Array) and new.state.step.is_deleted(), "state",
     "; ".join(_DONATED)),
    (lambda new: getattr(new.state, "tx", new.tx) != new.tx, "tx",
     "the state has another tx than the step; give the same optimizer to both, such as the `tx` of the step"),
    (lambda new: isinstance(new.state.opt_state, optax.MultiStepsState) is new.is_fused and a_type(new.state.opt_state), "tx",
     f"`opt_state` is {{}}, which is not what the engine of the step needs; {_OWN_TX}"),
    (NewState.other_optimizer, "tx", f"`opt_state` is not that of the step's optimizer: {{}}; {_OWN_TX}"),
    (NewState.on_one_device, "state",
     "state{} is on one device, and not on the mesh; place the state with rampup.prepare_state(state, mesh)"),
    (NewState.same_arrays, "state",
     "{} are one array, and a step donates each to what it becomes; copy one with jax.tree.map(jnp.copy, ...)"),
    (NewState.scattered_parameters, "shard_optimizer_over_data",
     "the parameters are sharded over {}, but every replica needs them whole; shard them over another axis such as fsdp, or "
     "only the optimizer's state, with shard_optimizer_over_data=True; or give the loss as AccumulatedLoss(loss_fn, "
     "batch_axes=BatchAxes(replica=(), rows={new.axes.rows})): the compiler gathers them where it must"),
    (NewState.scattered_otherwise, "shard_optimizer_over_data",
     "the optimizer's state is sharded over {}, but not as shard_optimizer_over_data=True of create_state, prepare_state and "
     "split_model does, or the step is one of multi_steps; place it with one of them"),
    (lambda new: not new.is_fused and getattr(new.state, "dynamic_scale", None) is not None, "gradient_accumulation",
     "multi_steps runs one program per microbatch, but dynamic_scale adapts once per step; use the engine fused"),
    (lambda new: not new.is_fused and int(new.state.opt_state.mini_step) != 0, "state",
     f"{_AT}; go on with the state of a whole step"),
    (lambda new: not new.is_fused and int(new.state.opt_state.gradient_step) != int(new.state.step), "state",
     f"{_AT}; `step` and `opt_state.gradient_step` must be equal"),
)
# fmt: on
