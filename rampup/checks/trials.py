"""The trials of `check_loss`: a loss for four rows together, and for each alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.compile import compile_program
from rampup.engine.contract import SummableLoss, call_loss
from rampup.engine.keys import random_key
from rampup.engine.mesh import AXIS_NAMES, auto_view, own_constraints, replicated
from rampup.engine.operations import axes_of_collectives, operations
from rampup.engine.pipeline import LAYERS, PipelinedLoss, without_layers
from rampup.engine.state import check_arrays, check_kept, read_by_loss
from rampup.engine.sums import as_summed, check_trained
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


class TrialSums(NamedTuple):
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


class OneDevice:
    """Runs functions on one device, on which some arrays are: each is compiled once,
    exactly, and with all axes manual, as those of the rows are in a step, so that a
    loss may name them.

    Attributes:
        mesh: of the device, with the axes of the mesh of the arrays.
        operations: those of all functions so far.
    """

    def __init__(
        self,
        arrays: Any,
        *,
        refuses_effects: bool = False,
    ) -> None:
        shardings = [x.sharding for x in arrays if isinstance(x, jax.Array)]
        devices = shardings[0].addressable_devices if shardings else jax.local_devices()
        device = min(devices, key=lambda device: device.id)
        named = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
        names: Any = named[0].axis_names if named else AXIS_NAMES
        shape = (1,) * len(names)
        self.mesh = Mesh(np.full(shape, device, object), names)
        self.operations: list[Any] = []
        self._refuses_effects = refuses_effects
        self._programs: dict[Any, Any] = {}

    def run(self, function: Any, *args: Any, mapped: tuple[str, ...] = ()) -> Any:
        """Return the results of a function in which some axes are mapped."""
        args = jax.device_put(args, replicated(self.mesh))
        if function not in self._programs:
            whole = PartitionSpec()
            mesh = auto_view(self.mesh)
            names = {*mesh.axis_names}
            manual = jax.shard_map(
                own_constraints(mapped)(function),
                mesh=mesh,
                in_specs=whole,
                out_specs=whole,
                axis_names=names - {*mapped},
                check_vma=False,
            )
            with (
                jax.set_mesh(mesh),
                jax.default_matmul_precision("highest"),
                jax.debug_nans(False),
            ):
                traced = jax.jit(manual).trace(*args)
            if self._refuses_effects and traced.jaxpr.effects:
                raise ConfigError("a loss with side effects is not called unasked")
            self.operations += operations(traced.jaxpr)
            # It runs a few times: at level 0, compiling takes two thirds of the time.
            self._programs[function] = compile_program(traced.lower(), level=0)
        return self._programs[function](*args)

    @property
    def coarsest(self) -> float:
        """The epsilon of the coarsest type in which the functions compute."""
        types = {
            getattr(x.aval, "dtype", None) for e in self.operations for x in e.outvars
        }
        return max(
            (float(jnp.finfo(x).eps) for x in types if is_real(x)),
            default=0.0,
        )


class Trials:
    """A loss on one device, evaluated by one program.

    Attributes:
        epsilons: by name, that of the type in which the loss returns it.
        device: where it runs.
    """

    def __init__(
        self,
        loss: Any,
        state: Any,
        rows: Any,
        seed: int,
        *,
        is_quiet: bool = False,
    ) -> None:
        is_state = hasattr(state, "opt_state")
        read = read_by_loss(state) if is_state else (state, None, None)
        arrays = jax.tree.leaves(read)
        for leaf in arrays:
            check_kept("state_or_params", leaf)
        check_arrays("params", read[0])
        check_trained(read[0])
        self._loss_fn = loss_function(loss, "check_loss")
        if getattr(self._loss_fn, "has_streams", False):
            self._loss_fn = functools.partial(self._loss_fn, deterministic=True)
        self.device = OneDevice(arrays, refuses_effects=is_quiet)
        self._arrays = jax.device_put(read, replicated(self.device.mesh))
        self._rows = rows
        keys = jax.random.split(random_key(seed), R * (1 + KEY_SETS))
        self._words = np.asarray(jax.random.key_data(keys))
        self.epsilons: dict[str, float] = {}

    @property
    def draws(self) -> bool:
        """Whether the loss draws random numbers: each trial makes its keys of words."""
        names = {eqn.primitive.name for eqn in self.device.operations}
        return any(name.startswith("random_") for name in names - {"random_wrap"})

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which the loss exchanges numbers."""
        names = axes_of_collectives(self.device.operations)
        return tuple(name for name in self.device.mesh.axis_names if name in names)

    def run(
        self,
        rows: Sequence[int] = ROWS,
        keys: Sequence[int] = ROWS,
        move: int = 0,
    ) -> TrialSums:
        """Return the sums over some rows with some keys, all by number, where the
        parameters are moved in one of several directions, or for 0 are not.
        """
        index = np.array(rows)
        batch = jax.tree.map(
            lambda x: x[index],
            self._rows,
        )
        found = self.device.run(
            self._whole_and_each,
            self._arrays,
            batch,
            self._words[np.array(keys)],
            np.uint32(move),
        )
        return TrialSums(*jax.device_get(found))

    def run_replicas(self) -> dict[str, np.ndarray]:
        """Return the sums over two replicas along the first of `axes`, of half of the
        rows each.
        """
        name = self.axes[0]

        def halves(
            arrays: Any,
            rows: Any,
        ) -> Any:
            two = jax.tree.map(
                lambda x: x.reshape(2, -1, *x.shape[1:]),
                rows,
            )
            own = functools.partial(
                self._sums,
                arrays,
                move=np.uint32(0),
            )
            sums = jax.vmap(own, axis_name=name)(*two)
            return jax.tree.map(
                lambda x: x.sum(0),
                sums,
            )

        rows = self._rows, self._words[:R]
        found = self.device.run(halves, self._arrays, rows, mapped=(name,))
        return dict(jax.device_get(found))

    def _whole_and_each(
        self,
        arrays: Any,
        batch: Any,
        words: Any,
        move: Any,
    ) -> Any:
        def single(row: Any) -> Any:
            try:
                one, word = jax.tree.map(lambda x: x[None], row)
                return self._sums(arrays, one, word, move)
            except Exception as error:
                raise SingleRowError(f"{type(error).__name__}: {error}") from error

        whole = self._sums(arrays, batch, words, move)
        return whole, jax.lax.map(single, (batch, words))

    def _sums(
        self,
        arrays: Any,
        batch: Any,
        words: Any,
        move: Any,
    ) -> dict[str, jax.Array]:
        """Return loss, weight, aux and gradient by name."""
        params, mutable, frozen = arrays
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        function = self._loss_fn
        if frozen is not None:
            function = functools.partial(function, frozen=frozen)

        def loss_of(params: Any) -> Any:
            args = (params, batch, keys) + (() if mutable is None else (mutable,))
            loss, weight, aux, _ = call_loss(
                function, args, self.device.mesh.axis_names
            )
            found = {
                "loss_sum": loss,
                "weight_sum": weight,
                "aux": aux,
            }
            return as_summed(loss), found

        moved = jax.tree.map(
            lambda x: _moved(x, move),
            params,
        )
        gradient, found = jax.grad(loss_of, has_aux=True)(moved)
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


def loss_function(
    loss: Any,
    caller: str,
) -> Callable[..., Any]:
    """Return a loss as a function of (params, batch, keys[, mutable])."""
    if isinstance(loss, PipelinedLoss):

        def run(
            params: Any,
            batch: Any,
            keys: Any,
        ) -> Any:
            shared = without_layers(params)
            x = loss.first(shared, batch, keys)
            x = loss.stage(params[LAYERS], x, batch, keys, jnp.int32(0))
            return loss.last(shared, x, batch, keys)

        return run
    if not isinstance(loss, SummableLoss):
        return loss
    if loss.takes_whole:
        return loss.loss_fn  # type: ignore[attr-defined]
    raise ConfigError(
        f"{caller} calls the loss function with rows of its own choice, but"
        f" {a_type(loss)} sums by itself, or takes shards",
        fix="give the function itself",
        key="loss_fn",
    )


def is_real(dtype: Any) -> bool:
    """Return whether a type has real floating-point numbers."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def norm(x: np.ndarray) -> float:
    """Return the length of a vector."""
    return float(np.linalg.norm(x))


def signs(
    like: jax.Array,
    seed: Any,
) -> jax.Array:
    """Return 1 and -1 in an order that looks random: Knuth's multiplicative hash,
    twice. JAX's own would be a random number that the loss seems to draw.
    """
    x = jax.lax.iota(jnp.uint32, like.size) * jnp.uint32(2654435761) + jnp.uint32(seed)
    x = (x ^ (x >> 15)) * jnp.uint32(2246822519)
    x = x ^ (x >> 13)
    return jnp.where(x % 2 == 1, 1.0, -1.0).reshape(like.shape)


def _moved(
    x: jax.Array,
    move: Any,
) -> jax.Array:
    """Return parameters times 1 +- 2**-8, which rounds otherwise also in bfloat16. Zeros
    become others: where a leaf is zero, a penalty has no gradient, and a zero matrix
    hides what is before it.
    """
    start = jnp.where(jnp.any(x != 0), x, 0.01 * signs(x, 1))
    step = jnp.where(move > 0, 2.0**-8, 0.0)
    return (start * (1 + step * signs(x, move))).astype(x.dtype)


def _compressed(x: Any) -> jax.Array:
    """Return at most `_SUMS` numbers that are as large together as some others."""
    x = as_summed(x).ravel()
    if jnp.iscomplexobj(x):
        x = jnp.concatenate([x.real, x.imag])
    if x.size <= _SUMS:
        return x
    signed = x * signs(x, 0).astype(x.dtype)
    return jnp.pad(signed, (0, -x.size % _SUMS)).reshape(_SUMS, -1).sum(1)
