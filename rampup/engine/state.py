"""The training state: what a step changes, how it gets onto a mesh in arrays that may
be donated, and on what no step runs.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.engine.arguments import check_arguments
from rampup.engine.explicit import as_auto
from rampup.engine.mesh import BatchAxes, auto_context, is_explicit, shardings_like
from rampup.engine.processes import wait_for_all
from rampup.engine.sums import check_trained, differing_leaves
from rampup.engine.zero import is_scattered, scattered_shardings
from rampup.errors import ConfigError, RampDefinitionError, a_type
from rampup.plan.describe import format_count
from rampup.plan.numbers import has_numbers

# The fields for what a loss function carries from microbatch to microbatch; a state
# uses one. Flax's examples have the second.
CARRIED_FIELDS = ("mutable", "batch_stats")
MAX_STEPS = 2**31 - 1


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
        params, opt_state: the parameters, real or complex, and the optimizer's state.
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
    """Return the value of a number, the shape of another array, and how many arrays and
    numbers any other tree has.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return "None" if tree is None else "<no arrays>"
    if leaves[0] is tree:
        is_shape = isinstance(tree, (jax.core.Tracer, jax.ShapeDtypeStruct)) or (
            isinstance(tree, jax.Array) and tree.is_deleted()
        )
        if not is_shape and not np.shape(tree):
            return str(tree)
        return f"{tree.dtype}{list(tree.shape)}"
    total = sum(math.prod(np.shape(leaf)) for leaf in leaves)
    return f"<{format_count(len(leaves), 'array')}, {format_count(total, 'number')}>"


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
        ConfigError: leaves that are no arrays, parameters that are integers,
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
        check_arrays(name, tree)
    check_trained(params)
    wait_for_all(mesh)
    given = params, mutable, frozen
    params, mutable, frozen = _put(given, shardings_like(given, mesh))
    axes = BatchAxes.of(mesh, batch_axes) if shard_optimizer_over_data else None
    with auto_context(mesh):
        parts = params
        if axes is not None:
            parts = jax.device_put(params, scattered_shardings(params, mesh, axes))
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=tx.init(parts),
            mutable=mutable,
            frozen=frozen,
        )
        # New arrays such as counters are on one device, and come onto the mesh.
        return _finished(_put(state, shardings_like(state, mesh)), given, mesh, axes)


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
    check_arrays("state.params", state.params)
    check_step_number(int(state.step))
    wait_for_all(mesh)
    given = replace_fields(state, step=jnp.asarray(state.step, jnp.int32))
    axes = BatchAxes.of(mesh, batch_axes) if shard_optimizer_over_data else None
    with auto_context(mesh):
        state = _put(given, shardings_like(given, mesh))
        return _finished(state, given, mesh, axes)


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


def read_by_loss(state: Any) -> tuple[Any, Any, Any]:
    """Return what a loss reads of a state: parameters, what it carries, and frozen
    arrays.
    """
    return state.params, carried(state), getattr(state, "frozen", None)


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
    if frozen is None:
        return state, None
    return replace_fields(state, frozen=None), frozen


def join_frozen(state: Any, frozen: Any) -> Any:
    """Undo `split_frozen`."""
    return state if frozen is None else replace_fields(state, frozen=frozen)


def shardings_of(state: Any) -> Any:
    """Return the shardings of a state's leaves, JAX arrays or their shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def check_state(state: Any) -> None:
    """Refuse something that is not a training state."""
    # JAX takes an object of a class that is not registered as a pytree for a leaf.
    if jax.tree_util.all_leaves([state]) or not all(
        hasattr(state, name) for name in ("step", "params", "opt_state")
    ):
        raise ConfigError(
            f"{a_type(state)} is no training state",
            fix="rampup.create_state(params, tx, mesh) makes one of parameters; one of"
            " your own is a registered pytree with `step`, `params` and `opt_state`,"
            " such as flax.training.train_state.TrainState",
            key="state",
        )
    if all(getattr(state, name, None) is not None for name in CARRIED_FIELDS):
        raise ConfigError(
            f"the state has both {' and '.join(CARRIED_FIELDS)}, but a loss function"
            " carries one value",
            fix="put both into one field",
            key="state",
        )


def check_placed(state: Any) -> None:
    """Refuse a state that a program cannot read: one that was donated, or with leaves
    that are not on devices.
    """
    check_state(state)
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f"state{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.core.Tracer):
            raise ConfigError(
                f"{name} is traced, but a step is compiled already",
                fix="in a jitted function of your own, use rampup.accumulate",
                key="state",
            )
        if not isinstance(leaf, jax.Array):
            raise ConfigError(
                f"{name} is {a_type(leaf)}, and not an array on the mesh",
                fix="place the state with rampup.prepare_state(state, mesh)",
                key="state",
            )
        check_kept(name, leaf)


def check_kept(name: str, leaf: Any) -> None:
    """Refuse an array whose memory a step took."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigError(
            f"{name}: the state was donated to an earlier step",
            fix="use the one that it returned, or train_step(..., donate=False)",
            key="state",
        )


def check_step_number(steps: int) -> None:
    """Refuse a number of steps that a device cannot count."""
    if steps > MAX_STEPS:
        raise RampDefinitionError(
            f"steps={steps:,} does not fit into the int32 step counter of a device",
            key="steps",
            nearest=(MAX_STEPS,),
        )


def check_arrays(name: str, tree: Any) -> None:
    """Refuse a tree that a step cannot train or carry: an NNX module, or leaves that
    are no arrays of numbers.
    """
    nnx = sys.modules.get("flax.nnx")  # Whoever has a module has imported it.

    def is_module(leaf: Any) -> bool:
        return nnx is not None and isinstance(leaf, nnx.Module)

    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_module):
        # Random keys and bfloat16 have types that are not NumPy's.
        dtype = getattr(leaf, "dtype", None)
        is_number = isinstance(leaf, (bool, int, float, complex))
        is_array = isinstance(leaf, jax.Array) or (
            isinstance(dtype, np.dtype) and has_numbers(dtype)
        )
        if is_module(leaf) or not (is_number or is_array):
            raise ConfigError(
                f"{name}{jax.tree_util.keystr(path)} is {a_type(leaf)} and not an array"
                " of numbers",
                fix="keep only arrays in it: an NNX module is split by"
                " rampup.split_model(model, loss_fn, tx, mesh), and an Equinox model by"
                " eqx.partition(model, eqx.is_inexact_array)",
                key="params",
            )


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and bool(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def _put(tree: Any, shardings: Any) -> Any:
    """Put a tree on devices like `jax.device_put`, which alone refuses random keys on
    the devices of several processes.
    """
    # A key travels as its numbers, whose further dimension is the last, so its sharding
    # fits them.
    put = jax.device_put(
        jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree),
        shardings,
    )

    def wrap(leaf: Any, own: Any) -> Any:
        if not is_key(own):
            return leaf
        return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(own))

    return jax.tree.map(wrap, put, tree)


def _finished(state: Any, given: Any, mesh: Mesh, axes: BatchAxes | None) -> Any:
    """Return a state that is placed, in buffers of its own and on the mesh that the
    caller gave; with `axes`, each replica has its part of the optimizer's state.
    """
    if axes is not None:
        parts = scattered_shardings(state.opt_state, mesh, axes)
        state = replace_fields(state, opt_state=_put(state.opt_state, parts))
    state = _without_aliases(state, given)
    if not is_explicit(mesh):
        return state
    # The optimizer saw Auto axes.
    return _put(state, jax.tree.map(lambda x: x.sharding.update(mesh=mesh), state))


def _without_aliases(state: Any, given: Any) -> Any:
    """Return a state in which every leaf has buffers of its own, as donation requires:
    none of `given`, or of another leaf.
    """

    def buffers(leaf: jax.Array) -> set[int]:
        if is_key(leaf):
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


def check_new_state(
    state: Any, tx: Any, mesh: Mesh, axes: BatchAxes, *, donate: bool
) -> None:
    """Refuse a state that a step did not return and cannot run on."""
    check_placed(state)
    # An axis of one device shards nothing, even if a sharding names it.
    replica = tuple(name for name in axes.replica if mesh.shape[name] > 1)
    axes = dataclasses.replace(axes, replica=replica)

    def refuse(problem: str, fix: str, key: str = "state") -> NoReturn:
        raise ConfigError(problem, fix=fix, key=key)

    if getattr(state, "tx", tx) != tx:
        refuse(
            "the state has another tx than the step",
            "give the same optimizer to both, such as the `tx` of the step",
            "tx",
        )
    _check_optimizer(state, tx, mesh)
    if isinstance(tx, optax.MultiSteps):
        _check_multi_steps(state)
    else:
        refuse_multi_steps(state.opt_state)
    names: dict[int, str] = {}
    devices = {*mesh.devices.flat}
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f"state{jax.tree_util.keystr(path)}"
        if leaf.sharding.device_set != devices:
            refuse(
                f"{name} is on other devices than the mesh",
                "place the state with rampup.prepare_state(state, mesh)",
            )
        if donate and (other := names.setdefault(id(leaf), name)) != name:
            refuse(
                f"{other} and {name} are one array, and a step donates each to what it"
                " becomes",
                "copy one with jax.tree.map(jnp.copy, ...)",
            )
    over = " and ".join(axes.replica)
    if is_scattered(shardings_of(state.params), axes):
        refuse(
            f"the parameters are sharded over {over}, but every replica needs them"
            " whole",
            "shard them over another axis such as fsdp, or only the optimizer's state,"
            " with shard_optimizer_over_data=True; or give the loss as"
            " AccumulatedLoss(loss_fn, batch_axes=BatchAxes(replica=(),"
            f" rows={axes.rows})): the compiler gathers them where it must",
            "shard_optimizer_over_data",
        )
    found = shardings_of(state.opt_state)
    wanted = scattered_shardings(state.opt_state, mesh, axes)
    is_zero = not isinstance(tx, optax.MultiSteps) and (
        jax.tree.leaves(found) == jax.tree.leaves(wanted)
    )
    if is_scattered(found, axes) and not is_zero:
        refuse(
            f"the optimizer's state is sharded over {over}, but not as"
            " shard_optimizer_over_data=True does, or the step is one of multi_steps",
            "place it with create_state, prepare_state or split_model",
            "shard_optimizer_over_data",
        )


def _check_optimizer(state: Any, tx: Any, mesh: Mesh) -> None:
    """Refuse a state of another optimizer, which might run on it without an error."""
    with auto_context(mesh):
        expected = jax.eval_shape(tx.init, as_auto(state.params))
    for name, wanted, found in differing_leaves(expected, state.opt_state, np.shape):
        raise ConfigError(
            f"`opt_state` is not that of the step's optimizer: opt_state{name} has the"
            f" shape {found} in the state and {wanted} in the optimizer, where None is"
            " absent",
            fix="make it with the `tx` of the step:"
            " create_state(params, step.tx, mesh)",
            key="tx",
        )


def refuse_multi_steps(opt_state: Any) -> None:
    """Refuse the state of an optimizer that has an `optax.MultiSteps` in it."""

    def accumulates(part: Any) -> bool:
        return isinstance(part, optax.MultiStepsState)

    if any(map(accumulates, jax.tree.leaves(opt_state, is_leaf=accumulates))):
        raise ConfigError(
            "the optimizer has an optax.MultiSteps in it, which would average the"
            " gradients of several steps",
            fix="give the optimizer inside it: a training step, and rampup.multi_steps,"
            " accumulate by themselves",
            key="tx",
        )


def _check_multi_steps(state: Any) -> None:
    """Refuse what `multi_steps` cannot go on with."""
    if getattr(state, "dynamic_scale", None) is not None:
        raise ConfigError(
            "multi_steps runs one program per microbatch, but dynamic_scale adapts once"
            " per step",
            fix="use gradient_accumulation=fused",
            key="gradient_accumulation",
            nearest=("fused",),
        )
    counts = state.opt_state
    done, microbatch = int(counts.gradient_step), int(counts.mini_step)
    if microbatch or done != int(state.step):
        raise ConfigError(
            f"the state is at step {state.step}, but its optimizer at microbatch"
            f" {microbatch} of step {done}",
            fix="go on with the state of a whole step: the steps must be equal",
            key="state",
        )
