"""The trials of `check_loss`: a loss for four rows together, and for each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.accumulate import AccumulatedLoss, random_key
from rampup.engine.compile import compile_program
from rampup.engine.contract import (
    SummableLoss,
    check_results,
    check_signature,
    explained,
)
from rampup.engine.mesh import AXIS_NAMES, auto_view, own_constraints, replicated
from rampup.engine.pipeline import LAYERS, PipelinedLoss
from rampup.engine.state import carried
from rampup.engine.sums import as_summed, fill, floating
from rampup.engine.whole import operations
from rampup.errors import ConfigError, a_type

# Rows that are evaluated together. Some losses take rows in pairs.
R = 4
ROWS = range(R)
# Sets of R keys besides the first, for a loss that draws: a decision for all rows of a
# microbatch, such as to leave out a layer, falls in one way most of the time.
KEY_SETS = 12
# A large array is compared by so many sums of its numbers with random signs: their norm
# is about that of the array.
_SUMS = 64


class Sums(NamedTuple):
    """What a loss returns by name: loss_sum, weight_sum, entries of aux and gradients,
    each as up to `_SUMS` numbers (whole), and for each row alone (each).
    """

    whole: dict[str, np.ndarray]
    each: dict[str, np.ndarray]

    def gap(self, name: str) -> np.ndarray:
        """Return what does not add up."""
        return self.whole[name] - self.each[name].sum(0)

    def scale(self, name: str) -> float:
        """Return the size of what is added up."""
        return norm(self.whole[name]) + sum(map(norm, self.each[name]))


class SingleRowError(Exception):
    """A loss that takes several rows does not take one."""


class Trials:
    """A loss on one device, evaluated by one program.

    Attributes:
        epsilons: by name, that of the type in which the loss returns it.
        coarsest: that of the coarsest type in which the loss computes.
        draws: whether the loss draws random numbers.
        axes: the axes of the mesh that the loss names.
    """

    def __init__(
        self, loss: Any, state: Any, rows: Any, seed: int, *, is_quiet: bool = False
    ) -> None:
        read: Any = state, None, None
        if hasattr(state, "opt_state"):
            frozen = getattr(state, "frozen", None)
            read = state.params, carried(state), frozen
        arrays = [x for x in jax.tree.leaves(read) if isinstance(x, jax.Array)]
        if any(x.is_deleted() for x in arrays):
            raise ConfigError(
                "the state was given to a training step, which took its memory",
                fix="give the state that the step returned, or make the step with"
                " donate=False",
                key="state",
            )
        self._loss_fn = loss_function(loss, "check_loss")
        if getattr(
            self._loss_fn,
            "has_streams",
            False,
        ):
            self._loss_fn = functools.partial(
                self._loss_fn,
                deterministic=True,
            )
        self._is_quiet = is_quiet
        self._mesh = mesh_of_one(arrays)
        self._arrays, self._rows = self._put(read), rows
        keys = jax.random.split(
            random_key(seed),
            R * (1 + KEY_SETS),
        )
        self._words = np.asarray(jax.random.key_data(keys))
        self._program: Any = None
        self.epsilons: dict[str, float] = {}
        self.draws, self.coarsest = False, 0.0
        self.axes: tuple[str, ...] = ()

    def run(
        self,
        rows: Sequence[int] = ROWS,
        keys: Sequence[int] = ROWS,
        move: int = 0,
    ) -> Sums:
        """Return the sums over some rows with some keys, all by number, where the
        parameters are moved in one of several directions, or for 0 are not.
        """
        index = np.array(rows)
        batch = jax.tree.map(
            lambda x: x[index],
            self._rows,
        )
        words = self._words[np.array(keys)]
        args = (*self._arrays, *self._put((batch, words, np.uint32(move))))
        if self._program is None:
            traced = trace(
                self._whole_and_each,
                self._mesh,
                args,
            )
            self._look_at(traced.jaxpr)
            # It runs a few times: at level 0, compiling takes two thirds of the time.
            self._program = compile_program(traced.lower(), level=0)
        whole, each = jax.device_get(self._program(*args))
        return Sums(whole, each)

    def _look_at(self, jaxpr: Any) -> None:
        """Note what the loss computes, by its operations."""
        if self._is_quiet and jaxpr.effects:
            raise ConfigError("a loss with side effects is not called unasked")
        found = list(operations(jaxpr))
        names = {eqn.primitive.name for eqn in found}
        # Each trial makes its keys of words.
        names.discard("random_wrap")
        self.draws = any(name.startswith("random_") for name in names)
        self.axes = _named_axes(found, self._mesh)
        self.coarsest = coarsest(found)

    def run_replicas(self) -> dict[str, np.ndarray]:
        """Return the sums over two replicas along the first of `axes`, of half of the
        rows each.
        """
        mapped = self.axes[:1]

        def sum_half(
            arrays: Any,
            batch: Any,
            words: Any,
            move: Any,
        ) -> dict[str, jax.Array]:
            return self._sums(arrays, batch, words, move)

        def halves(*args: Any) -> Any:
            arrays, (rows, move) = args[:3], args[3:]
            batch, words = jax.tree.map(
                lambda x: x.reshape(2, -1, *x.shape[1:]),
                rows,
            )
            sums = jax.vmap(
                sum_half,
                in_axes=(None, 0, 0, None),
                axis_name=mapped[0],
            )(arrays, batch, words, move)
            return jax.tree.map(lambda x: x.sum(0), sums)

        rows = self._rows, self._words[:R]
        args = (*self._arrays, *self._put((rows, np.uint32(0))))
        traced = trace(halves, self._mesh, args, mapped)
        program = compile_program(traced.lower(), level=0)
        return dict(jax.device_get(program(*args)))

    def _put(self, tree: Any) -> Any:
        return jax.device_put(
            tree,
            replicated(self._mesh),
        )

    def _whole_and_each(self, *args: Any) -> Any:
        arrays, (batch, words, move) = args[:3], args[3:]

        def single(row: Any) -> Any:
            try:
                one, word = jax.tree.map(lambda x: x[None], row)
                return self._sums(arrays, one, word, move)
            except Exception as error:
                raise SingleRowError(f"{type(error).__name__}: {error}") from error

        whole = self._sums(arrays, batch, words, move)
        return whole, jax.lax.map(single, (batch, words))

    def _sums(
        self, arrays: Any, batch: Any, words: Any, move: Any
    ) -> dict[str, jax.Array]:
        """Return loss, weight, aux and gradient by name."""
        params, mutable, frozen = arrays
        keys = jax.random.wrap_key_data(
            words,
            impl="threefry2x32",
        )
        function = self._loss_fn
        if frozen is not None:
            function = functools.partial(function, frozen=frozen)

        def loss_of(trained: Any) -> Any:
            args = (fill(trained, params), batch, keys)
            args += () if mutable is None else (mutable,)
            check_signature(function, len(args))
            with explained(len(args), self._mesh.axis_names):
                results = function(*args)
            loss, weight, aux, _ = check_results(results, function, args)
            found = {"loss_sum": loss, "weight_sum": weight, "aux": aux}
            return sum(map(as_summed, jax.tree.leaves(loss))), found

        trained = floating(params, params)
        moved = jax.tree.map(
            lambda x: _moved(x, move),
            trained,
        )
        differentiate = jax.value_and_grad(loss_of, has_aux=True)
        (_, found), gradient = differentiate(moved)
        found["gradient"] = gradient
        sums = {}
        for path, leaf in jax.tree.leaves_with_path(found):
            name = path[0].key + jax.tree_util.keystr(path[1:])
            sums[name] = _compressed(leaf)
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.inexact):
                dtype = jnp.float32
            self.epsilons[name] = float(jnp.finfo(dtype).eps)
        return sums


def trace(
    function: Any, mesh: Mesh, args: tuple[Any, ...], mapped: tuple[str, ...] = ()
) -> Any:
    """Trace a function on a mesh of one device, exactly, where all axes but the mapped
    ones are manual, as those of the rows are in a step, so that a loss may name them.
    """
    mesh, whole = auto_view(mesh), PartitionSpec()
    manual = jax.shard_map(
        own_constraints(mapped)(function),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        axis_names={*mesh.axis_names} - {*mapped},
        check_vma=False,
    )
    with (
        jax.set_mesh(mesh),
        jax.default_matmul_precision("highest"),
        jax.debug_nans(False),
    ):
        return jax.jit(manual).trace(*args)


def coarsest(found: list[Any]) -> float:
    """Return the epsilon of the coarsest type in which some operations compute."""
    epsilons = [0.0]
    for eqn in found:
        for variable in eqn.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                epsilons.append(float(jnp.finfo(dtype).eps))
    return max(epsilons)


def norm(x: np.ndarray) -> float:
    """Return the length of a vector."""
    return float(np.linalg.norm(x))


def signs(number: int, seed: Any) -> jax.Array:
    """Return 1 and -1 in an order that looks random: Knuth's multiplicative hash, twice."""
    x = jax.lax.iota(jnp.uint32, number)
    x = x * jnp.uint32(2654435761) + jnp.uint32(seed)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(2246822519)
    x = x ^ (x >> 13)
    return jnp.where(x % 2 == 1, 1.0, -1.0)


def _moved(x: jax.Array, move: Any) -> jax.Array:
    """Return parameters times 1 +- 2**-8, which rounds otherwise also in bfloat16. Zeros
    become others: where a leaf is zero, a penalty has no gradient, and a zero matrix
    hides what is before it.
    """
    others = 0.01 * signs(x.size, 1).reshape(x.shape)
    start = jnp.where(jnp.any(x != 0), x, others)
    pattern = signs(x.size, move).reshape(x.shape)
    step = jnp.where(move > 0, 2.0**-8, 0.0)
    return (start * (1 + step * pattern)).astype(x.dtype)


def _compressed(x: Any) -> jax.Array:
    """Return at most `_SUMS` numbers that are as large together as some others."""
    x = as_summed(x).ravel()
    if jnp.iscomplexobj(x):
        x = jnp.concatenate([x.real, x.imag])
    if x.size <= _SUMS:
        return x
    signed = x * signs(x.size, 0).astype(x.dtype)
    missing = -x.size % _SUMS
    padded = jnp.pad(signed, (0, missing))
    return padded.reshape(_SUMS, -1).sum(1)


def mesh_of_one(arrays: list[jax.Array]) -> Mesh:
    """Return a mesh of one device that has some arrays, with the axes of theirs."""
    names: Any = AXIS_NAMES
    devices = jax.local_devices()
    if arrays:
        devices = [*arrays[0].sharding.addressable_devices]
    for x in arrays:
        if isinstance(x.sharding, NamedSharding):
            names = x.sharding.mesh.axis_names
            break
    device = min(devices, key=lambda device: device.id)
    shape = (1,) * len(names)
    return Mesh(
        np.array(device).reshape(shape),
        names,
    )


def _named_axes(found: list[Any], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh over which some operations exchange numbers."""
    names: set[Any] = set()
    for eqn in found:
        for key in ("axes", "axis_name"):
            value = eqn.params.get(key, ())
            names |= {*value} if isinstance(value, tuple) else {value}
    return tuple(name for name in mesh.axis_names if name in names)


def loss_function(loss: Any, caller: str) -> Callable[..., Any]:
    """Return a loss as a function of (params, batch, keys[, mutable])."""
    if isinstance(loss, PipelinedLoss):

        def run(
            params: Any,
            batch: Any,
            keys: Any,
        ) -> Any:
            shared = {name: value for name, value in params.items() if name != LAYERS}
            x = loss.stage(
                params[LAYERS],
                loss.first(shared, batch, keys),
                batch,
                keys,
                jnp.int32(0),
            )
            return loss.last(shared, x, batch, keys)

        return run
    if isinstance(loss, AccumulatedLoss) and loss.param_shardings is None:
        return loss.loss_fn
    if isinstance(loss, SummableLoss):
        raise ConfigError(
            f"{caller} calls the loss function with rows of its own choice, but"
            f" {a_type(loss)} sums by itself, or takes shards",
            fix="give the function itself",
            key="loss_fn",
        )
    return loss
