"""Whether a loss is a sum over rows: `check_loss` evaluates it on some rows together
and on each of them alone.

A sum over rows, each with its own random key, has the same loss, weight, aux and
gradient in both ways. If one of them differs, further evaluations find out why:

- the rows in another order, or with some of them exchanged: f(x) + f(y) = f(x with a
  row of y) + f(y with that row of x);
- a row repeated: the mean of equal rows is that of one, a sum is several times as
  large, and a penalty is added once;
- k copies of one row beside R - k of another: a quotient of two sums is a rational
  function of k;
- other keys for all rows but the first, and a row whose integers or masks are those of
  padding.

Most evaluations use keys with which every row draws the same numbers (`_generator`), as
random ones would hide all of this.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.accumulate import AccumulatedLoss, random_key
from rampup.engine.batch import Batch
from rampup.engine.compile import compile_program
from rampup.engine.contract import (
    LossFn,
    SummableLoss,
    check_results,
    check_signature,
    explained,
)
from rampup.engine.mesh import AXIS_NAMES, auto_view, own_constraints, replicated
from rampup.engine.pipeline import LAYERS, PipelinedLoss
from rampup.engine.state import carried
from rampup.engine.sums import as_summed, fill, floating
from rampup.engine.whole import floating_types
from rampup.errors import ConfigError, DataError, LossWarning, a_type

# Rows that are evaluated together. The fit of a quotient needs four, and some losses
# take rows in pairs.
R = 4
MAX_PARAMETERS = 20_000_000  # of a model whose loss a training step checks by itself
_WHOLE_BATCH = "let the loss see whole batches: train_step(..., whole_batch=True)"
WAYS_OUT = {
    "mean": (
        "return the sum over the rows, such as losses.sum(), and as weight_sum what it"
        " is to be divided by"
    ),
    "aux": (
        "a step adds aux up over its microbatches: return sums, and divide them by a"
        " sum after the step"
    ),
    "penalty": (
        "multiply by weight_sum what does not depend on the rows: losses.sum() +"
        " penalty * weight"
    ),
    "interacting rows": (
        "for a contrastive loss, a loss of pairs or normalization over the batch,"
        f" {_WHOLE_BATCH}"
    ),
    "denominators": (
        "return a tuple of sums and one of what each is divided by, such as"
        f" (token_sum, row_sum), (num_tokens, num_rows), aux; or {_WHOLE_BATCH}"
    ),
    "random key": (
        "draw the numbers of a row with its own key, such as jax.vmap over rows and"
        f" `keys`, accept that they depend on how the batch is split, or {_WHOLE_BATCH}"
    ),
    "weight": (
        "return as weight_sum a sum over the rows, such as their number or that of"
        " their tokens"
    ),
    "nan": (
        "return a sum, not a mean times its weight, or divide by jnp.maximum(weight,"
        " 1): no other rows may be with it"
    ),
    "order": (
        "treat all rows alike, as which of them are in a microbatch depends on how the"
        f" batch is split, or {_WHOLE_BATCH}"
    ),
}
# What is right if the loss sees all rows of a step.
OF_PARTS = ("interacting rows", "denominators", "random key", "order")


@dataclass(frozen=True, slots=True)
class LossProblem:
    """Something that makes a loss depend on how a batch is split: a key of `WAYS_OUT`,
    and what was evaluated.
    """

    kind: str
    found: str

    @property
    def fix(self) -> str:
        """The way out."""
        return WAYS_OUT[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}: {self.found}. Way out: {self.fix}"


@dataclass(frozen=True, slots=True)
class LossReport:
    """What `check_loss` found. True if that is nothing."""

    problems: tuple[LossProblem, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self:
            return "the loss is a sum over rows"
        return "\n".join(
            (
                "the loss depends on how a batch is split:",
                *(f"- {problem}" for problem in self.problems),
            )
        )


def check_loss(
    loss_fn: LossFn | SummableLoss, state_or_params: Any, rows: Any, *, seed: int = 0
) -> LossReport:
    """Report whether a loss is a sum over rows, as a training step and `accumulate`
    take it, by calls on one device.

    A leaf of parameters that is all zeros is moved a little, as many wrong losses are
    right there.

    Args:
        loss_fn: see `train_step`. Random streams of an NNX model, which are for a
            microbatch, are not reported.
        state_or_params: the training state, with `mutable` and `frozen` if it has them,
            or the parameters.
        rows: at least two rows that differ, of which four are used: a pytree of arrays
            (rows, ...), a `Batch`, or a list or another source of single rows.

    Raises:
        ConfigError: the loss function breaks its contract in a way that every call
            shows, or sums by itself.
        DataError: fewer than two rows.

    Example:
        >>> report = check_loss(lambda params, batch, keys: (jnp.mean((params["w"] - batch["x"]) ** 2), len(keys), {}),
        ...     {"w": jnp.float32(0)}, {"x": jnp.arange(8.0)})
        >>> bool(report), [problem.kind for problem in report.problems]
        (False, ['mean'])
    """
    picked = _pick(rows)
    if len(jax.tree.leaves(picked)[0]) < 2:
        raise DataError(
            "check_loss needs at least two rows, and they should differ: one row cannot"
            " show whether rows interact"
        )
    return LossReport(
        tuple(_problems(_Evaluations(loss_fn, state_or_params, picked, seed)))
    )


def warn_of_loss(
    loss: SummableLoss, state: Any, batch: Batch, *, sees_whole: bool
) -> None:
    """Check the loss of a training step on rows of its first batch, if the model is
    small, and warn of what is wrong.
    """
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(state.params)]
    if (
        jax.process_count() > 1
        or jax.config.jax_disable_jit
        or sum(sizes) > MAX_PARAMETERS
    ):
        return
    try:
        found = _problems(
            _Evaluations(loss, state, _pick(batch), seed=0, is_quiet=True)
        )
        report = LossReport(
            tuple(
                problem
                for problem in found
                if not (sees_whole and problem.kind in OF_PARTS)
            )
        )
    except Exception:  # noqa: BLE001 - what only the mesh of the step can run is not checked, and the step raises the rest
        return
    if not report:
        more = (
            "rampup.check_loss(loss_fn, state, rows) repeats this check;"
            " train_step(..., check_loss=False) leaves it out"
        )
        warnings.warn(f"{report}\n{more}", LossWarning, stacklevel=3)


def _pick(rows: Any) -> Any:
    """Return up to R rows, evenly spaced, as arrays (rows, ...) on the host."""
    if isinstance(rows, Batch):
        number = min(rows.num_microbatches, rows.layout.chunk_size)
        rows = jax.tree.map(
            lambda x: np.asarray(x)[:number].reshape(-1, *x.shape[2:]), rows.chunks[0]
        )
    is_source = isinstance(rows, list) or (
        hasattr(rows, "__getitem__")
        and jax.tree_util.all_leaves([rows])
        and not np.ndim(rows)
    )
    lengths = (
        {len(rows)}
        if is_source
        else {len(leaf) if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(rows)}
    )
    if len(lengths) != 1 or 0 in lengths:
        problem = (
            "rows are arrays with the rows as their first axis, or a source of single"
            f" rows, and not {a_type(rows)}"
        )
        raise DataError(f"{problem} with the lengths {sorted(lengths)}")
    index = np.unique(np.linspace(0, lengths.pop() - 1, R).astype(int))
    if is_source:
        return jax.tree.map(
            lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]),
            *(rows[int(n)] for n in index),
        )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], rows)


# What a loss returns for some rows by name: loss_sum, weight_sum, entries of aux and,
# for each gradient, up to `_SUMS` sums.
Sums = dict[str, np.ndarray]
_KINDS = ("loss_sum", "weight_sum", "aux", "gradient")
Term = tuple[float, Sums]  # of a sum of evaluations that is to be zero
# Sums of the numbers of a gradient, each with a random sign: their norm is about that
# of the gradient.
_SUMS = 64


class _Evaluations:
    """A loss on one device. Rows and keys are numbers: from R on, rows are padding;
    with key 0, all draw the same numbers.
    """

    def __init__(
        self,
        loss: Any,
        state_or_params: Any,
        rows: Any,
        seed: int,
        *,
        is_quiet: bool = False,
    ) -> None:
        state = state_or_params if hasattr(state_or_params, "opt_state") else None
        params = state_or_params if state is None else state.params
        mutable = None if state is None else carried(state)
        self._loss_fn = _function(loss)
        self._is_quiet = is_quiet
        self.has_streams = getattr(self._loss_fn, "has_streams", False)
        # A mesh of one device, with the axes of the parameters' mesh.
        shardings = [
            leaf.sharding
            for leaf in jax.tree.leaves(params)
            if isinstance(leaf, jax.Array)
        ]
        devices = shardings[0].addressable_devices if shardings else jax.local_devices()
        names = next(
            (s.mesh.axis_names for s in shardings if isinstance(s, NamedSharding)),
            AXIS_NAMES,
        )
        one = np.array(min(devices, key=lambda device: device.id)).reshape(
            (1,) * len(names)
        )
        self._on_device = replicated(Mesh(one, names))
        self._arrays = jax.device_put(
            (params, mutable, getattr(state, "frozen", None)), self._on_device
        )
        self._rows, self.padding = _with_padding(rows)
        keys = jax.random.split(random_key(seed), 2 * R + 1)
        # The third word is that of `_generator`.
        self._words = np.column_stack(
            [jax.random.key_data(keys), np.arange(len(keys)) == 0]
        ).astype(np.uint32)
        self._programs: dict[int, Any] = {}
        self._draws_alike, self._epsilon = True, 0.0
        self.sums = functools.cache(self._sums)

    def _sums(self, rows: tuple[int, ...], keys: tuple[int, ...]) -> Sums:
        batch = jax.tree.map(lambda leaf: leaf[np.array(rows)], self._rows)
        args = (
            *self._arrays,
            *jax.device_put((batch, self._words[np.array(keys)]), self._on_device),
        )
        if len(keys) not in self._programs:
            self._programs[len(keys)] = self._compile(args)
        return _named(jax.device_get(self._programs[len(keys)](*args)))

    def _compile(self, args: tuple[Any, ...]) -> Any:
        mesh = auto_view(self._on_device.mesh)
        whole = PartitionSpec()

        def traced() -> Any:
            evaluate = own_constraints()(
                functools.partial(_evaluate, self._loss_fn, self._draws_alike)
            )
            # All axes are manual, as those of the rows are in a step, so that a loss
            # may name them.
            manual = jax.shard_map(
                evaluate, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
            )
            return jax.jit(manual).trace(*args)

        with (
            jax.set_mesh(mesh),
            jax.default_matmul_precision("highest"),
            jax.debug_nans(False),
        ):
            try:
                program = traced()
            except Exception:
                if not self._draws_alike or self._programs:
                    raise
                # such as for a model that takes the data of a key for that of another
                # generator
                self._draws_alike = False
                program = traced()
            if self._is_quiet and program.jaxpr.effects:
                raise ConfigError(
                    "a loss with side effects is not called without being asked"
                )
            self._epsilon = max(
                [
                    self._epsilon,
                    *(float(info.eps) for info in floating_types(program.jaxpr)),
                ]
            )
            # It runs a few times: at level 0, compiling takes two thirds of the time.
            return compile_program(program.lower(), level=0)

    @property
    def tolerance(self) -> float:
        """How much of a sum may be rounding: the square root of the epsilon of the
        coarsest type.
        """
        return self._epsilon**0.5

    def single(self, row: int, key: int = 0) -> Sums:
        """Return the sums over one row. A row without weight that is not finite counts
        as nothing.
        """
        sums = self.sums((row,), (key,))
        if any(sums[name].any() for name in sums if name.startswith("weight_sum")):
            return sums
        return {
            name: np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
            for name, x in sums.items()
        }

    def differing(self, *terms: Term, kinds: tuple[str, ...] = _KINDS) -> list[str]:
        """Return the names of what is not zero in a sum of evaluations with factors,
        but for rounding.
        """
        scales = {
            name: sum(abs(c) * _norm(sums[name]) for c, sums in terms)
            for name in terms[0][1]
        }
        largest = {
            kind: max(
                [s for name, s in scales.items() if name.startswith(kind)], default=0.0
            )
            for kind in _KINDS
        }
        # What is zero but for rounding is small beside the other gradients, or per unit
        # of the weight.
        floors = {"gradient": 0.1 * largest["gradient"], "weight_sum": 0.0}
        names = []
        for name, scale in scales.items():
            kind = next(kind for kind in _KINDS if name.startswith(kind))
            allowed = self.tolerance * (
                scale + floors.get(kind, 0.01 * largest["weight_sum"])
            )
            parts = [c * sums[name] for c, sums in terms]
            is_finite = [bool(np.isfinite(part).all()) for part in parts]
            if all(is_finite) and _norm(np.sum(parts, axis=0)) <= allowed:
                continue
            # What is not finite on both sides shows nothing.
            if all(is_finite) or is_finite[0] != all(is_finite[1:]):
                names.append(name)
        return [name for name in names if name.startswith(kinds)]


def _evaluate(
    loss_fn: Any,
    draws_alike: bool,
    params: Any,
    mutable: Any,
    frozen: Any,
    batch: Any,
    words: Any,
) -> Any:
    """Return loss, weight, aux and the gradient of a loss function."""
    if draws_alike:
        keys = jax.random.wrap_key_data(words, impl=_generator())
    else:
        keys = jax.random.wrap_key_data(words[:, :2], impl="threefry2x32")
    if frozen is not None:
        loss_fn = functools.partial(loss_fn, frozen=frozen)

    def loss_of(trained: Any) -> Any:
        args = (fill(trained, params), batch, keys) + (
            () if mutable is None else (mutable,)
        )
        check_signature(loss_fn, len(args))
        with explained(len(args), jax.sharding.get_abstract_mesh().axis_names):
            results = loss_fn(*args)
        loss, weight, aux, _ = check_results(results, loss_fn, args)
        return sum(map(as_summed, jax.tree.leaves(loss))), (loss, weight, aux)

    def moved(x: Any) -> Any:
        # Where a leaf is zero, a penalty has no gradient, and a zero matrix hides what
        # is before it.
        return jnp.where(
            jnp.any(x != 0),
            x,
            jnp.linspace(0.01, 0.02, x.size, dtype=x.dtype).reshape(x.shape),
        )

    (_, sums), grads = jax.value_and_grad(loss_of, has_aux=True)(
        jax.tree.map(moved, floating(params, params))
    )
    return (*sums, grads)


@functools.cache
def _generator() -> Any:
    """Return a generator of random numbers whose keys have a third word: 1 if all
    numbers drawn with a key are equal.
    """

    def threefry(key: Any) -> Any:
        return jax.random.wrap_key_data(key[:2], impl="threefry2x32")

    def with_flag(words: Any, key: Any) -> Any:
        return jnp.concatenate(
            [words, jnp.broadcast_to(key[2:], (*words.shape[:-1], 1))], axis=-1
        )

    def split(key: Any, shape: tuple[int, ...]) -> Any:
        words, alike = (
            jax.random.key_data(jax.random.split(threefry(key), n)) for n in (shape, 1)
        )
        return with_flag(jnp.where(key[2] == 1, alike[0], words), key)

    def random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
        dtype = jnp.dtype(f"uint{bit_width}")
        bits, one = (
            jax.random.bits(threefry(key), size, dtype) for size in (shape, ())
        )
        # At most 0.4, so that dropout keeps, and another number for every key, so that
        # loops that reject numbers end.
        low, span = (dtype.type(part * 2**bit_width) for part in (0.1, 0.3))
        return jnp.where(key[2] == 1, low + one % span, bits)

    return jax.extend.random.define_prng_impl(
        key_shape=(3,),
        seed=lambda seed: jnp.stack(
            [jnp.uint32(0), seed.astype(jnp.uint32), jnp.uint32(0)]
        ),
        split=split,
        random_bits=random_bits,
        fold_in=lambda key, data: with_flag(
            jax.random.key_data(jax.random.fold_in(threefry(key), data)), key
        ),
        name="rampup_check_loss",
        tag="check",
    )


def _function(loss: Any) -> Callable[..., Any]:
    """Return a loss as a function of (params, batch, keys[, mutable])."""
    if isinstance(loss, PipelinedLoss):

        def run(params: Any, batch: Any, keys: Any) -> Any:
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
        problem = (
            "check_loss calls the loss function with rows of its own choice, but"
            f" {a_type(loss)} sums by itself"
        )
        raise ConfigError(
            f"{problem}, or takes shards; give the function itself", key="loss_fn"
        )
    return loss


def _with_padding(rows: Any) -> tuple[Any, list[str]]:
    """Return R rows, repeated if there are fewer, with rows after them that have values
    of padding, and what these are.
    """
    rows = jax.tree.map(lambda leaf: leaf[np.arange(R) % len(leaf)], rows)
    leaves, structure = jax.tree.flatten(rows)
    padded, names = [leaves], []
    for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(rows)):
        values = {0}
        if np.issubdtype(leaf.dtype, np.integer):
            values |= (
                {int(min(leaf.min(), 0)), int(leaf[0].flat[-1])}
                if leaf[0].size > 1
                else {int(min(leaf.min(), 0))}
            )
        for value in sorted(values)[:3] if leaf.dtype.kind in "biuf" else ():
            padded.append(
                [
                    np.full_like(x[:1], value) if n == index else x[:1]
                    for n, x in enumerate(leaves)
                ]
            )
            names.append(f"batch{jax.tree_util.keystr(path)} = {value}")
    return (
        structure.unflatten(
            [np.concatenate(parts) for parts in zip(*padded, strict=True)]
        ),
        names,
    )


def _named(results: Any) -> Sums:
    """Return the results of an evaluation by name."""
    sums = {}
    for path, leaf in jax.tree.leaves_with_path(
        dict(zip(_KINDS, results, strict=True))
    ):
        x = np.ravel(leaf)
        x = np.concatenate([x.real, x.imag]) if np.iscomplexobj(x) else x
        name = path[0].key + jax.tree_util.keystr(path[1:])
        if path[0].key == "gradient" and x.size > _SUMS:
            starts = np.linspace(0, x.size, _SUMS, endpoint=False).astype(int)
            x = np.add.reduceat(x * _signs(x.size), starts, dtype=np.float64)
        sums[name] = x.astype(np.float64)
    return sums


@functools.lru_cache(maxsize=256)
def _signs(number: int) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([-1, 1], np.int8), number)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(x))


def _problems(loss: _Evaluations) -> Iterator[LossProblem]:
    """Yield what makes a loss depend on how a batch is split."""
    rows = tuple(range(R))
    alike = (0,) * R
    own = tuple(range(1, R + 1))
    whole = loss.sums(rows, alike)
    try:
        singles = [loss.sums((row,), (0,)) for row in rows]
    except Exception as error:  # noqa: BLE001 - whatever it is, it did not happen with several rows
        found = (
            f"the loss can be called with {R} rows, but not with one:"
            f" {type(error).__name__}: {str(error).splitlines()[0]}"
        )
        yield LossProblem("interacting rows", found)
        return
    yield from _without_weight(loss, singles)

    def together_minus_each(keys: tuple[int, ...]) -> list[Term]:
        return [
            (1.0, loss.sums(rows, keys)),
            *((-1.0, loss.single(*pair)) for pair in zip(rows, keys, strict=True)),
        ]

    def numbers(name: str, keys: tuple[int, ...] = alike) -> str:
        (_, sums), *each = together_minus_each(keys)
        together = sums[name]
        total = np.sum([sums[name] for _, sums in each], axis=0)
        if name.startswith("gradient"):
            sizes = (
                f"{_norm(together):.3g} for {R} rows, and {_norm(total):.3g} for the"
                " sum over each row alone"
            )
            return (
                f"the norm of {name} is {sizes}; that of their difference is"
                f" {_norm(together - total):.3g}"
            )
        place = int(np.argmax(np.abs(together - total)))
        return (
            f"{name} is {together[place]:.5g} for {R} rows, and {total[place]:.5g} as"
            " the sum over each row alone"
        )

    wrong = loss.differing(*together_minus_each(alike))
    uses_keys = bool(loss.differing((1, whole), (-1, loss.sums(rows, own))))
    wrong_own = loss.differing(*together_minus_each(own)) if uses_keys else []
    if not wrong and not wrong_own:
        return
    ignores_keys = uses_keys and not loss.differing(
        (1, loss.sums(rows, own)), (-1, loss.sums(rows, (1, *range(R + 1, 2 * R))))
    )
    equal_rows = [loss.sums((row,) * R, alike) for row in rows]
    factor = _factor(loss, equal_rows, singles, _main(whole))
    interacts = any(
        _main(loss.differing(*_exchange(loss, place, own))) for place in range(R - 1)
    )
    kinds: list[str] = []
    if interacts:
        is_mean = factor is not None and 0 < factor < 0.99 * R
        is_quotient = _is_quotient(loss, alike)
        # A mean over tokens is a quotient too.
        kinds = (
            ["mean"] * is_mean
            + ["denominators"] * (is_quotient and not is_mean)
            + ["interacting rows"] * (not is_quotient)
        )
    elif _main(wrong):
        excess = [
            ((1.0, equal), (-R, single))
            for equal, single in zip(equal_rows, singles, strict=True)
        ]
        minus_first = [(-c, sums) for c, sums in excess[0]]
        if loss.differing((1, whole), (-1, loss.sums(rows[1:] + rows[:1], alike))):
            # Numbers that were drawn for all rows with one key may differ from place to
            # place.
            kinds = [] if ignores_keys else ["order"]
        elif factor is not None:
            kinds = ["mean"]
        elif not any(
            _main(loss.differing(*terms, *minus_first)) for terms in excess[1:]
        ):
            kinds = ["penalty"]
        else:
            kinds = ["interacting rows"]
    has_one_key = ignores_keys or (
        _main(wrong_own) and not interacts and not _main(wrong)
    )
    for kind in kinds:
        name = next(iter(_main(wrong) or _main(wrong_own)))
        found = numbers(name, alike if name in wrong else own)
        if kind == "mean" and factor is not None:
            found += f"; for {R} equal rows it is {factor:.3g} times that of one"
        yield LossProblem(kind, found)
    if has_one_key and not loss.has_streams:
        others = "other keys for all rows but the first change nothing"
        yield LossProblem(
            "random key",
            others if ignores_keys else "a row alone draws other numbers with its key",
        )
    for name in dict.fromkeys([*wrong, *wrong_own]):
        if name.startswith("weight_sum"):
            yield LossProblem("weight", numbers(name, alike if name in wrong else own))
    for name in wrong:
        own_factor = _factor(loss, equal_rows, singles, [name])
        if name.startswith("aux") and (
            not kinds or (own_factor is not None and abs(own_factor - R) > 0.01 * R)
        ):
            yield LossProblem(
                "aux",
                (
                    f"{numbers(name)}: a mean, a maximum or a constant?"
                    if own_factor
                    else numbers(name)
                ),
            )


def _exchange(loss: _Evaluations, place: int, keys: tuple[int, ...]) -> list[Term]:
    """Return terms that cancel if the last row and that in a place contribute the same
    there, whatever the other rows are.
    """
    x = np.arange(R)
    y = np.roll(x, place + 1)  # with the last row in that place
    is_exchanged = x == place
    mixed = np.where(is_exchanged, y, x), np.where(is_exchanged, x, y)
    return [
        (c, loss.sums(tuple(map(int, index)), keys))
        for c, index in zip((1, 1, -1, -1), (x, y, *mixed), strict=True)
    ]


def _main(names: Any) -> list[str]:
    """Return those of some names that belong to the loss or its gradient, the loss
    first.
    """
    return sorted(
        (name for name in names if name.startswith(("loss_sum", "gradient"))),
        reverse=True,
    )


def _without_weight(loss: _Evaluations, singles: list[Sums]) -> Iterator[LossProblem]:
    """Yield that a row of weight 0 is not finite, also one with the values of
    padding.
    """
    names = [
        *(f"row {n}" for n in range(R)),
        *(f"a row with {setting}" for setting in loss.padding),
    ]
    padded = [loss.sums((R + n,), (0,)) for n in range(len(loss.padding))]
    for name, sums in zip(names, singles + padded, strict=True):
        has_weight = any(
            x.any() for key, x in sums.items() if key.startswith("weight_sum")
        )
        infinite = [key for key in _main(sums) if not np.isfinite(sums[key]).all()]
        if infinite and not has_weight:
            yield LossProblem(
                "nan", f"{infinite[0]} is not finite for {name}, whose weight is 0"
            )
            return


def _factor(
    loss: _Evaluations, equal_rows: list[Sums], singles: list[Sums], names: list[str]
) -> float | None:
    """Return how many times as large some sums of R equal rows are as those of one, or
    None if that is no one number.
    """
    flat = [
        np.concatenate([sums[name] for sums in group for name in names])
        for group in (equal_rows, singles)
    ]
    size = float(flat[1] @ flat[1])
    if not size or not np.isfinite(flat).all():
        return None
    factor = float(flat[0] @ flat[1]) / size
    pairs = zip(equal_rows, singles, strict=True)
    differing = [
        set(loss.differing((1, equal), (-factor, single))) for equal, single in pairs
    ]
    return None if set(names) & set().union(*differing) else factor


def _is_quotient(loss: _Evaluations, keys: tuple[int, ...]) -> bool:
    """Return whether rows interact as in a quotient of two sums, times the weight, plus
    further sums.

    For k copies of a row beside R - k of another one, it is (c0 + c1 k + c2 k^2) / (n0
    + n1 k), with one denominator for loss and gradients: with phi the values at all k
    and P the projection that leaves no quadratic, n0 P phi + n1 P (k phi) = 0.
    """
    k = np.arange(R + 1.0)[:, None]
    orthonormal = np.linalg.qr(k ** np.arange(3.0))[0]
    fits = []
    for other in range(1, R):
        mixtures = [
            loss.sums((0,) * (R - n) + (other,) * n, keys) for n in range(R + 1)
        ]
        phi = np.array(
            [np.concatenate([sums[name] for name in _main(sums)]) for sums in mixtures]
        )
        if not np.isfinite(phi).all():
            return False
        bent = _norm(phi - orthonormal[:, :2] @ (orthonormal[:, :2].T @ phi))
        if bent <= loss.tolerance * _norm(phi):
            continue
        columns = np.stack(
            [(x - orthonormal @ (orthonormal.T @ x)).ravel() for x in (phi, k * phi)],
            axis=1,
        )
        # A quadratic: a mean over rows, times a weight that is not the same for all.
        # Otherwise it is a loss of pairs.
        has_equal_weights = not loss.differing(
            (1, loss.single(0)), (-1, loss.single(other)), kinds=("weight_sum",)
        )
        if has_equal_weights and _norm(columns[:, 0]) <= 0.01 * bent:
            return False
        _, values, (_, (n0, n1)) = np.linalg.svd(columns, full_matrices=False)
        fits.append(
            values[1] <= max(0.003, loss.tolerance / 2) * values[0]
            and bool((np.sign(n0 + n1 * k) == np.sign(n0)).all())
        )
    return bool(fits) and all(fits)
