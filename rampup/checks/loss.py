"""Whether a loss is a sum over rows: `check_loss` compares the loss of some rows with
the sum over each of them alone.

By the definition: loss, weight, aux and gradient of a sum over rows add up, whichever
rows are together, in any order, and whatever keys they draw with. So every trial
evaluates four rows together and each alone, and its *gap* is the difference.

A gap may be rounding. A loss that adds up in exact numbers has another gap wherever the
parameters are moved a little, as it rounds otherwise there; a loss that does not add up
keeps its gap. So the first trials move the parameters, and what is beyond their spread
is no rounding. The report says how large a gap would have been seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rampup.checks.trials import (
    KEY_SETS,
    ROWS,
    R,
    SingleRowError,
    Trials,
    TrialSums,
    norm,
)
from rampup.data.sources import as_source
from rampup.engine.arguments import check_arguments
from rampup.engine.batch import Batch
from rampup.engine.contract import LossFn, SummableLoss
from rampup.engine.state import read_by_loss
from rampup.errors import DataError, LossWarning, warn

# Trials with moved parameters. The first has them as they are.
MOVES = 6
LOSS, GRADIENT = "loss_sum", "gradient"
# The same rows in another order.
OTHER_ORDER = (2, 0, 3, 1)
# Numbers in a state of which a training step checks the loss by itself.
MAX_NUMBERS = 20_000_000
HINTS = {
    "mean": (
        "return sums over the rows, such as losses.sum(), also in aux, and as"
        " weight_sum what the loss is to be divided by"
    ),
    "penalty": (
        "multiply by weight_sum what does not depend on the rows: losses.sum() +"
        " penalty * weight"
    ),
    "random key": (
        "draw the numbers of a row with its own key, such as by jax.vmap over rows and"
        " keys, or accept that they depend on how the batch is split"
    ),
    "interacting rows": (
        "if rows have to interact, as in batch normalization or a contrastive loss, let"
        " the loss see whole batches, train_step(..., plan.with_whole_batches(), mesh):"
        ' docs/guides/contract.md, "Losses in which rows interact"; an NNX model that is'
        " evaluated needs model.eval() before split_model; if rows need not interact,"
        " return sums over rows that are treated alike, also in aux"
    ),
    "not finite": (
        "try rows and parameters of which it is finite: nothing else can be compared."
        " If it is finite with all rows, rows of weight 0 may be alone: guard what is"
        " divided by their weight, or, for statistics of masked rows, let the loss see"
        " whole batches, train_step(..., plan.with_whole_batches(), mesh)"
    ),
}


@dataclass(frozen=True, slots=True)
class LossProblem:
    """What does not add up over the rows, and why, as far as a few trials can tell.

    Attributes:
        kind: a hint, one of `mean`, `penalty`, `random key`, `interacting rows` and
            `not finite`.
        found: what was evaluated.

    Example:
        >>> LossProblem("penalty", "loss_sum is 5 for 4 rows").fix.partition(":")[0]
        'multiply by weight_sum what does not depend on the rows'
    """

    kind: str
    found: str

    @property
    def fix(self) -> str:
        """The way out."""
        return HINTS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind}: {self.found}. Way out: {self.fix}"


@dataclass(frozen=True, slots=True)
class LossReport:
    """What `check_loss` found. True if that is nothing.

    Attributes:
        problems: what did not add up, at most one for each hint.
        tolerance: the part of a sum that would not have been seen, as it is rounding.

    Example:
        >>> bool(LossReport((), 1e-5))
        True
    """

    problems: tuple[LossProblem, ...]
    tolerance: float

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self:
            return (
                "the loss is a sum over the rows that were tried; a difference below"
                f" {self.tolerance:.1g} of a sum is taken for rounding"
            )
        lines = "\n".join(f"- {problem}" for problem in self.problems)
        return f"the loss has problems:\n{lines}"


def check_loss(
    loss_fn: LossFn | SummableLoss,
    state_or_params: Any,
    rows: Any,
    *,
    seed: int = 0,
) -> LossReport:
    """Report whether a loss is a sum over rows, as a training step and `accumulate`
    take it, by calls on one device.

    Nothing found is no proof: other rows may interact, and a rare decision for a whole
    microbatch may not have been drawn. Parameters are moved by less than a percent,
    those that are all zeros a little more, as many wrong losses are right there.

    Args:
        loss_fn: see `train_step`. The dropout of an NNX model is left out.
        state_or_params: the training state, with `mutable` and `frozen` if it has them,
            or the parameters. They stay as and where they are.
        rows: at least two rows that differ, of which four are read, two of them
            neighbours: a pytree of arrays (rows, ...), a `Batch`, or a list or another
            source of single rows.
        seed: of the random keys.

    Returns:
        A `LossReport`, true if nothing was found.

    Raises:
        ConfigError: the loss function breaks its contract in a way that every call
            shows, or sums by itself, or the state was given to a step that took its
            memory.
        DataError: fewer than two rows.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss_fn(params, batch, keys):
        ...     return jnp.mean((params["w"] - batch["x"]) ** 2), len(keys), {}
        >>> rows = {"x": jnp.arange(8.0)}
        >>> report = check_loss(loss_fn, {"w": jnp.float32(0)}, rows)
        >>> bool(report), [problem.kind for problem in report.problems]
        (False, ['mean'])
    """
    check_arguments("check_loss(loss_fn, state_or_params, rows)", loss_fn=loss_fn)
    return _report(Trials(loss_fn, state_or_params, _pick(rows), seed))


def warn_of_loss(
    loss: SummableLoss,
    state: Any,
    batch: Batch,
) -> None:
    """Check the loss of a step on rows of its first batch, if the state is small, and
    warn of what is wrong. One microbatch on one device is checked too: the same run may
    go on, or be evaluated, with other ones.
    """
    size = sum(map(np.size, jax.tree.leaves(read_by_loss(state))))
    if jax.process_count() > 1 or size > MAX_NUMBERS:
        return
    try:
        trials = Trials(
            loss,
            state,
            _pick(batch),
            seed=0,
            is_quiet=True,
        )
        report = _report(trials)
    except Exception:  # noqa: BLE001 - what only the mesh of the step can run is not checked, and the step raises the rest
        return
    if not report:
        more = (
            "rampup.check_loss(loss_fn, state, rows) repeats this check;"
            " check_loss=False leaves it out"
        )
        warn(f"{report}\n{more}", LossWarning)


def _pick(rows: Any) -> Any:
    """Return up to R rows, the first two neighbours, as arrays (rows, ...) on the
    host. No others are read.
    """
    if isinstance(rows, Batch):
        filled = min(rows.num_microbatches, rows.layout.chunk_size)
        rows = jax.tree.map(
            lambda x: np.asarray(x)[:filled].reshape(-1, *x.shape[2:]), rows.chunks[0]
        )
    leaves = jax.tree.leaves(rows)
    # A tuple of numbers or of dictionaries of them is rows, and one of arrays a batch.
    is_source = isinstance(rows, list) or not any(getattr(x, "ndim", 0) for x in leaves)
    arrays = [as_source(rows)] if is_source else leaves
    lengths = {len(x) if is_source or np.ndim(x) else 0 for x in arrays}
    size = lengths.pop()
    if lengths or size < 2:
        raise DataError(
            "check_loss needs at least two rows, the same number in all arrays, and"
            " they should differ: one row cannot show whether rows interact"
        )
    places = np.array([0, 1, size // 2, size - 1]) % size
    if is_source:  # as a step reads it
        return arrays[0].read(places)
    return jax.tree.map(lambda x: np.stack([np.asarray(x[n]) for n in places]), rows)


class _Rounding:
    """How large a gap may be, by trials with moved parameters."""

    def __init__(
        self,
        moved: list[TrialSums],
        trials: Trials,
    ) -> None:
        self._epsilons = trials.epsilons
        # Sums in a narrow type may be cut off, which is the same wherever they are.
        self._cut = 2 * trials.device.coarsest
        first = moved[0]
        gradients = [name for name in self._epsilons if _kind(name) == GRADIENT]
        self._largest = max(first.scale(name) for name in gradients)
        # The spread of a few numbers may be small by chance, that of all gradients not.
        self._spreads: dict[str, float] = {}
        for name in self._epsilons:
            # What is not finite is told of by itself.
            gaps = np.nan_to_num([sums.gap(name) for sums in moved])
            spread = norm(gaps.std(0, ddof=1)) / self._scale(name, first)
            kind = _kind(name)
            self._spreads[kind] = max(spread, self._spreads.get(kind, 0.0))

    def _scale(
        self,
        name: str,
        sums: TrialSums,
    ) -> float:
        """Return what a gap is compared with. A gradient that is zero but for rounding
        is small beside the others.
        """
        least = 0.1 * self._largest if _kind(name) == GRADIENT else 0.0
        return np.nan_to_num(max(sums.scale(name), least)) or 1.0

    def relative(
        self,
        name: str,
        number: int = 1,
    ) -> float:
        """Return the part of a sum that may be rounding, in the mean of a number of
        trials.
        """
        least = max(self._epsilons[name] ** 0.75, self._cut)
        return least + 8 * self._spreads[_kind(name)] / number**0.5

    def wrong(
        self,
        sums: TrialSums,
        number: int = 1,
    ) -> list[str]:
        """Return the names of what does not add up."""
        found = []
        for name in self._epsilons:
            size = norm(sums.gap(name))
            allowed = self.relative(name, number) * self._scale(name, sums)
            if size > allowed or np.isnan(size):
                found.append(name)
        return found


@np.errstate(over="ignore", invalid="ignore")  # a loss may be no finite number
def _report(trials: Trials) -> LossReport:
    """Return what does not add up in some trials, with hints."""
    try:
        moved = [trials.run(move=move) for move in range(MOVES)]
    except SingleRowError as error:
        found = f"the loss can be called with {R} rows, but not with one: {error}"
        return LossReport((LossProblem("interacting rows", found),), 0.0)
    rounding = _Rounding(moved, trials)
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *moved)
    wrong = dict.fromkeys(rounding.wrong(mean, MOVES), moved[0])
    further = [trials.run(OTHER_ORDER, OTHER_ORDER)]
    orders = moved[0], *further
    if trials.draws:
        starts = range(R, R * (1 + KEY_SETS), R)
        further += [trials.run(keys=range(start, start + R)) for start in starts]
    if trials.axes:
        further.append(TrialSums(trials.run_replicas(), moved[0].each))
    for sums in further:
        wrong = dict.fromkeys(rounding.wrong(sums), sums) | wrong
    unseen = [rounding.relative(n, MOVES) for n in trials.epsilons if n not in wrong]
    problems = _problems(wrong, _Hints(trials, rounding, orders)) if wrong else ()
    return LossReport(problems, max(unseen, default=0.0))


class _Hints:
    """Why something does not add up, by trials of the same rows and of the same keys;
    `orders` are those of the rows in their order and in another one.
    """

    def __init__(
        self,
        trials: Trials,
        rounding: _Rounding,
        orders: tuple[TrialSums, ...],
    ) -> None:
        self._trials, (self._first, self._ordered) = trials, orders
        self._equal = [trials.run((n,) * R, (0,) * R) for n in ROWS]
        self._wrong_alike = rounding.wrong(trials.run(keys=(0,) * R))
        # Other keys for all rows but the first, and but the last.
        keys = (0, R, R + 1, R + 2), (R, R + 1, R + 2, R - 1)
        self._others = [trials.run(keys=each) for each in keys]

    def of(
        self,
        name: str,
        sums: TrialSums,
    ) -> str:
        """Return the hint for a name that does not add up in `sums`."""
        whole, gap = self._first.whole[name], sums.gap(name)
        sides = sums.whole[name], sums.each[name]
        # Only together: a mean times a weight of 0, for instance.
        if not all(np.isfinite(x).all() for x in sides):
            return "not finite"
        if self._is_mean(name):
            return "mean"
        # A gap is a difference of sums, and has their rounding.
        rounded = 4 * R * self._trials.epsilons[name] * self._first.scale(name)
        if all(_are_close(gap, equal.gap(name), rounded) for equal in self._equal):
            return "penalty"
        # A loss that ignores all keys draws nothing that matters here.
        ignores = {_are_close(whole, other.whole[name]) for other in self._others}
        is_drawn = len(ignores) == 2 or name not in self._wrong_alike
        return "random key" if self._trials.draws and is_drawn else "interacting rows"

    def _is_mean(self, name: str) -> bool:
        """Return whether the sum of R equal rows is less than R times that of one, as
        many times for all rows, and in any order of them.
        """
        factors = [factor for x in self._equal if (factor := _factor(x, name)) >= 0]
        if not factors or not all(0 < x < 0.99 * R for x in factors):
            return False
        is_symmetric = _are_close(self._first.whole[name], self._ordered.whole[name])
        return is_symmetric and max(factors) - min(factors) < 0.01


def _problems(
    wrong: dict[str, TrialSums],
    hints: _Hints,
) -> tuple[LossProblem, ...]:
    """Return what is wrong, by the hint that fits."""
    # The loss says more than its gradients; and where one key is for all rows, what is
    # counted of them says nothing.
    is_drawn = LOSS in wrong and hints.of(LOSS, wrong[LOSS]) == "random key"
    found: dict[str, list[str]] = {}
    for name in sorted(wrong, key=lambda name: name != LOSS):
        is_gradient = LOSS in wrong and _kind(name) == GRADIENT
        said = LOSS if is_drawn or is_gradient else name
        found.setdefault(hints.of(said, wrong[said]), []).append(name)
    return tuple(
        LossProblem(kind, _numbers(names, wrong[names[0]]))
        for kind, names in found.items()
    )


def _factor(
    sums: TrialSums,
    name: str,
) -> float:
    """Return how many times as large the sum of R equal rows is as that of one, 0 if it
    is no number of times, and -1 if both are 0.
    """
    whole, one = sums.whole[name], sums.each[name][0]
    if not whole.any() and not one.any():
        return -1.0
    factor = float(whole @ one) / (float(one @ one) or 1.0)
    return max(factor, 0.0) if _are_close(whole, factor * one) else 0.0


def _are_close(
    left: np.ndarray,
    right: np.ndarray,
    rounded: float = 0.0,
) -> bool:
    allowed = 1e-3 * (norm(left) + norm(right)) + rounded
    return norm(left - right) <= allowed


def _kind(name: str) -> str:
    return name.partition("[")[0]


def _numbers(
    names: list[str],
    sums: TrialSums,
) -> str:
    """Return what was evaluated of the first of some names, and the others."""
    name, *others = names
    whole, each = sums.whole[name], sums.each[name].sum(0)
    more = f"; also {', '.join(others[:5])}" if others else ""
    if whole.size > 1:
        return (
            f"{name} of {R} rows has the norm {norm(whole):.5g}, and its difference to"
            f" the sum over each row alone has {norm(whole - each):.3g}{more}"
        )
    return (
        f"{name} is {whole[0]:.6g} for {R} rows, and {each[0]:.6g} as the sum over"
        f" each row alone{more}"
    )
