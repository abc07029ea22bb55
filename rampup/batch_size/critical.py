"""The critical batch size by branches: which branches, when one is losing, and what their losses mean.

The method is that of Merrill et al. 2025, "Critical Batch Size Revisited" (arXiv 2505.23971). Branches that start at one
checkpoint train on the same samples, each with another batch. The critical batch is the largest whose smoothed loss is not
above that of any smaller batch by more than a tolerance. Here the losses of all branches are measured on the same rows, so that
the noise of the rows cancels in their differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, Self

from rampup.errors import BatchDivisibilityError, ConfigError
from rampup.plan.numbers import exact_fraction, finite_or_none

# Weight of the newest evaluation in the smoothed loss, as in the paper.
SMOOTHING = 0.5
# Evaluations of a branch if its window is long enough, and the fewest.
EVALUATIONS, LEAST_EVALUATIONS = 16, 4
# Optimizer steps of the largest branch if no window is given.
DEFAULT_STEPS = 20
# A branch can be stopped after this fraction of its window, if it then loses by this many tolerances and standard errors.
LEAST_PROGRESS = Fraction(1, 3)
CLEAR_TOLERANCES, CLEAR_ERRORS = 2.0, 3.0
MAX_MULTIPLE, MAX_MULTIPLES = 10**6, 32
# Factors of the run's batch if none are given, as far as they give a legal batch.
DEFAULT_MULTIPLES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWindow:
    """The batches of all branches, and the samples that each of them trains on."""

    multiples: tuple[Fraction, ...]  # factors of the run's batch, ascending
    sizes: tuple[int, ...]  # the global batch size of each branch
    interval: int  # samples between two evaluations, a whole number of optimizer steps of every branch
    num_evaluations: int  # evaluations of a branch; the last one is at the end of the window

    @classmethod
    def of(cls, global_batch_size: int, multiples: Sequence[object], samples: int | None) -> Self:
        """Return the branches of a run whose batch has `global_batch_size` samples.

        Args:
            global_batch_size: samples per optimizer step of the run at the checkpoint.
            multiples: factors of it, as numbers or text.
            samples: samples that every branch trains on at least; it is rounded up to whole intervals. None: `DEFAULT_STEPS`
                optimizer steps of the largest branch.

        Raises:
            RampupError: a multiple is not positive, is given twice or does not give a whole batch, or the window is too short.

        Example:
            >>> window = BranchWindow.of(16, ["1", "2", "4"], 1000)
            >>> window.sizes, window.interval, window.num_evaluations
            ((16, 32, 64), 64, 16)
        """
        factors = sorted(exact_fraction(multiple, what="multiples", key="multiples") for multiple in multiples)
        rule = f"multiples must be 2 to {MAX_MULTIPLES} different numbers, such as 1,2,4,8"
        if not 1 <= len(factors) <= MAX_MULTIPLES or len(set(factors)) < len(factors):
            raise ConfigError(rule, key="multiples")
        if factors[0] <= 0 or factors[-1] > MAX_MULTIPLE:
            wrong = factors[0] if factors[0] <= 0 else factors[-1]
            raise ConfigError(f"multiples: {wrong} must be above 0 and at most {MAX_MULTIPLE:,}", key="multiples", nearest=(1,))
        for factor in factors:
            if (size := factor * global_batch_size).denominator != 1:
                nearest = [Fraction(n, global_batch_size) for n in (math.floor(size), math.ceil(size)) if n]
                raise BatchDivisibilityError(
                    f"multiples: {factor} * the run's batch of {global_batch_size} = {float(size):g} is not a whole batch; "
                    f"nearest: {', '.join(map(str, nearest))}",
                    value=size.numerator,
                    divisor=size.denominator,
                    key="multiples",
                    nearest=[str(number) for number in nearest],
                )
        if len(factors) == 1:
            raise ConfigError(f"{rule}: a single branch has nothing to be compared with", key="multiples")
        sizes = tuple(int(factor * global_batch_size) for factor in factors)
        # After this many samples, every branch has taken a whole number of steps.
        unit = math.lcm(*sizes)
        if samples is None:
            samples = max(DEFAULT_STEPS * sizes[-1], LEAST_EVALUATIONS * unit)
        if samples <= (LEAST_EVALUATIONS - 1) * unit:
            least = LEAST_EVALUATIONS * unit
            raise ConfigError(
                f"a window of {samples:,} samples is too short for batches of {', '.join(map(str, sizes))} samples, which meet "
                f"every {unit:,} samples; at least {LEAST_EVALUATIONS} * {unit:,} = {least:,} samples are needed",
                key="tokens",
                nearest=(least,),
            )
        interval = max(samples // (EVALUATIONS * unit), 1) * unit
        return cls(multiples=tuple(factors), sizes=sizes, interval=interval, num_evaluations=-(-samples // interval))

    @property
    def samples(self) -> int:
        """Samples that every branch trains on."""
        return self.interval * self.num_evaluations


class Evaluation(NamedTuple):
    """The losses of one branch on the rows of one evaluation, which are the same for all branches."""

    losses: tuple[float, ...]  # mean loss of each group of rows
    weights: tuple[float, ...]  # weight (tokens) of each group

    @property
    def mean(self) -> float:
        """The weighted mean loss."""
        return sum(w * x for w, x in zip(self.weights, self.losses, strict=True)) / sum(self.weights)


def smoothed_loss(curve: Sequence[Evaluation]) -> float:
    """Return the exponential moving average of the losses of a branch after its last evaluation.

    Example:
        >>> smoothed_loss([Evaluation((4.0,), (1.0,)), Evaluation((2.0,), (1.0,)), Evaluation((1.0,), (1.0,))])
        2.0
    """
    return sum(share * evaluation.mean for share, evaluation in zip(_shares(len(curve)), curve, strict=True))


def smoothed_difference(curve: Sequence[Evaluation], other: Sequence[Evaluation]) -> tuple[float, float]:
    """Return the smoothed loss of a branch less that of another one at the same tokens, and its standard error.

    The standard error is that of a difference of means over rows that both branches share, from the differences of the groups
    of rows. It does not contain what another seed would change. With one group per evaluation it is 0.

    The other branch has at least as many evaluations.

    Example:
        >>> a = [Evaluation((3.0, 5.0, 4.0), (1.0, 1.0, 1.0))]
        >>> b = [Evaluation((2.0, 4.0, 3.0), (1.0, 1.0, 1.0))]
        >>> smoothed_difference(a, b)  # the groups differ by 2, the differences do not
        (1.0, 0.0)
    """
    total = variance = 0.0
    for share, one, two in zip(_shares(len(curve)), curve, other, strict=False):
        weight, number = sum(one.weights), len(one.losses)
        differences = [x - y for x, y in zip(one.losses, two.losses, strict=True)]
        mean = sum(w * d for w, d in zip(one.weights, differences, strict=True)) / weight
        squares = sum((w * (d - mean)) ** 2 for w, d in zip(one.weights, differences, strict=True))
        total += share * mean
        variance += share**2 * squares / weight**2 * number / max(number - 1, 1)
    return total, math.sqrt(variance)


def is_losing(
    curve: Sequence[Evaluation], smaller: Sequence[Sequence[Evaluation]], num_evaluations: int, tolerance: float
) -> bool:
    """Return whether a branch has clearly lost, so that the rest of its window need not be run.

    It has if its loss is not finite. It also has if, after a third of the window, its loss is above that of a smaller batch by
    more than twice the tolerance and three standard errors, even if the difference keeps closing to the end of the window as
    fast as it has closed in the second half of the evaluations so far. (A difference that closes exponentially closes slower.)

    Args:
        curve: evaluations of the branch so far.
        smaller: evaluations of the branches with smaller batches, complete: `num_evaluations` each.
        tolerance: in the unit of the loss.
    """
    done = len(curve)
    if done and not math.isfinite(curve[-1].mean):
        return True
    if done < 2 or done < LEAST_PROGRESS * num_evaluations or done == num_evaluations:
        return False
    for other in smaller:
        gap, error = smoothed_difference(curve, other)
        before, _ = smoothed_difference(curve[: done // 2], other)
        closing = min((gap - before) / (done - done // 2), 0.0)
        if gap + closing * (num_evaluations - done) - CLEAR_ERRORS * error > CLEAR_TOLERANCES * tolerance:
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """One branch, as in `rampup critical --json`."""

    multiple: Fraction  # its batch by that of the run
    global_batch_size: int  # its batch, in samples
    loss: float | None  # its smoothed loss; None if it is not finite
    standard_error: float | None  # of its difference from the best smaller branch; 0 for the smallest, None if not finite
    stopped: bool  # whether it was stopped early
    difference: float | None  # from the best smaller branch, or None


def find_critical(
    window: BranchWindow, curves: Sequence[Sequence[Evaluation]], tolerance: float
) -> tuple[tuple[BranchResult, ...], int]:
    """Return the result of every branch in the order of their batches, and the number of that with the critical batch.

    That is the largest whose smoothed loss exceeds that of no smaller branch by more than the tolerance. A branch that was
    stopped early is not it.

    Example:
        >>> window = BranchWindow.of(8, (1, 2, 4), 128)
        >>> curves = [[Evaluation((loss,), (1.0,))] * 4 for loss in (2.0, 2.005, 2.2)]
        >>> branches, critical = find_critical(window, curves, 0.01)
        >>> branches[critical].global_batch_size
        16
    """
    results: list[BranchResult] = []
    complete: list[Sequence[Evaluation]] = []
    critical = 0
    for number, curve in enumerate(curves):
        stopped = len(curve) < window.num_evaluations or not math.isfinite(curve[-1].mean)
        gap, error = max((smoothed_difference(curve, other) for other in complete), default=(0.0, 0.0))
        if not stopped:
            critical = number if gap <= tolerance else critical
            complete.append(curve)
        results.append(
            BranchResult(
                multiple=window.multiples[number],
                global_batch_size=window.sizes[number],
                loss=finite_or_none(smoothed_loss(curve)),
                standard_error=finite_or_none(error),
                stopped=stopped,
                difference=finite_or_none(gap) if len(complete) > (not stopped) else None,
            )
        )
    return tuple(results), critical


Bound = Literal["exact", "at_least", "at_most"]


def critical_bound(sizes: Sequence[int], critical: int) -> Bound:
    """Return what the critical batch of branches says: a bound if it is the largest or the smallest that was tried.

    Example:
        >>> [critical_bound((8, 16, 32), size) for size in (8, 16, 32)]
        ['at_most', 'exact', 'at_least']
    """
    return "at_most" if critical == min(sizes) else "at_least" if critical == max(sizes) else "exact"


def _shares(number: int) -> list[float]:
    """Return the weight of each evaluation in the smoothed loss."""
    newest_first = [SMOOTHING * (1 - SMOOTHING) ** age for age in range(number - 1)] + [(1 - SMOOTHING) ** (number - 1)]
    return newest_first[::-1]
