"""The critical batch size by branches: which branches, when one is losing, and what
their losses mean.

The method is that of Merrill et al. 2025, "Critical Batch Size Revisited" (arXiv
2505.23971): branches from one checkpoint train on the same samples, and the critical
batch is the largest whose smoothed loss exceeds that of no smaller one by more than a
tolerance. Here all losses are measured on the same rows, whose noise cancels in the
differences.

A window can only show what it changes. The *gain* is what it lowers the loss of the
smallest branch. A branch that ends worse by a share w of it has wasted about that share
of its samples, so it needs w / (1 - w) more tokens: by default, at most 20%.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, Self

from rampup.contrib.lab.design_model import weighted_line
from rampup.errors import BatchDivisibilityError, ConfigError
from rampup.plan.numbers import exact_fraction, finite_or_none

SMOOTHING = 0.5  # weight of the newest evaluation in the smoothed loss, as in the paper
# Evaluations of a branch if its window is long enough, and the fewest.
EVALUATIONS, LEAST_EVALUATIONS = 16, 4
# A window that is not given has at least so many steps of the largest branch, and the
# loss curve of the run promises this gain in nats from it: a sixth of it is some three
# standard errors of a difference of losses.
DEFAULT_STEPS, DEFAULT_GAIN = 20, 0.02
TOLERANCE_SHARE = (
    1 / 6
)  # the default tolerance as a share w of the gain: w / (1 - w) is 20%
# A measurement decides if its tolerance is at most this share of the gain, so that a
# batch which wastes half of its samples fails, and at least so many standard errors.
DECISIVE_SHARE, DECISIVE_ERRORS = 0.5, 2.0
# A branch can be stopped after this fraction of its window, if it then loses by this
# many tolerances and standard errors.
LEAST_PROGRESS = Fraction(1, 3)
CLEAR_TOLERANCES, CLEAR_ERRORS = 2.0, 3.0
MAX_MULTIPLE, MAX_MULTIPLES = 10**6, 32
# Factors of the run's batch if none are given, as far as they give a legal batch.
DEFAULT_MULTIPLES = (
    Fraction(1, 4),
    Fraction(1, 2),
    Fraction(1),
    Fraction(2),
    Fraction(4),
    Fraction(8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWindow:
    """The batches of all branches, and the samples that each of them trains on."""

    multiples: tuple[Fraction, ...]  # factors of the run's batch, ascending
    sizes: tuple[int, ...]  # the global batch size of each branch
    # samples between two evaluations, a whole number of optimizer steps of every branch
    interval: int
    num_evaluations: (
        int  # evaluations of a branch; the last one is at the end of the window
    )

    @classmethod
    def of(
        cls,
        global_batch_size: int,
        multiples: Sequence[object],
        samples: int | None,
        *,
        promising: int = 0,
    ) -> Self:
        """Return the branches of a run with this batch, of at least `samples`, by
        default `promising` ones, or refuse them.
        """
        factors = sorted(
            exact_fraction(multiple, what="multiples", key="multiples")
            for multiple in multiples
        )
        if wrong := [factor for factor in factors if not 0 < factor <= MAX_MULTIPLE]:
            rule = f"multiples: {wrong[0]} must be above 0 and at most {MAX_MULTIPLE:,}"
            raise ConfigError(rule, key="multiples", nearest=(1,))
        if not 2 <= len(factors) <= MAX_MULTIPLES or len(set(factors)) < len(factors):
            single = (
                ": a single branch has nothing to be compared with"
                if len(factors) == 1
                else ""
            )
            rule = (
                f"multiples must be 2 to {MAX_MULTIPLES} different numbers, such as"
                f" 1,2,4,8{single}"
            )
            raise ConfigError(rule, key="multiples")
        for factor in factors:
            if (size := factor * global_batch_size).denominator != 1:
                nearest = [
                    Fraction(n, global_batch_size)
                    for n in (math.floor(size), math.ceil(size))
                    if n
                ]
                raise BatchDivisibilityError(
                    f"multiples: {factor} * the run's batch of {global_batch_size} ="
                    f" {float(size):g} is not a whole batch; nearest:"
                    f" {', '.join(map(str, nearest))}",
                    value=size.numerator,
                    divisor=size.denominator,
                    key="multiples",
                    nearest=[str(number) for number in nearest],
                )
        sizes = tuple(int(factor * global_batch_size) for factor in factors)
        # After this many samples, every branch has taken a whole number of steps.
        unit = math.lcm(*sizes)
        if samples is None:
            samples = max(
                DEFAULT_STEPS * sizes[-1], LEAST_EVALUATIONS * unit, promising
            )
        if samples <= (LEAST_EVALUATIONS - 1) * unit:
            least = LEAST_EVALUATIONS * unit
            raise ConfigError(
                f"a window of {samples:,} samples is too short for batches of"
                f" {', '.join(map(str, sizes))} samples, which meet every {unit:,}"
                f" samples; at least {LEAST_EVALUATIONS} * {unit:,} = {least:,} samples"
                " are needed",
                key="tokens",
                nearest=(least,),
            )
        interval = max(samples // (EVALUATIONS * unit), 1) * unit
        return cls(
            multiples=tuple(factors),
            sizes=sizes,
            interval=interval,
            num_evaluations=-(-samples // interval),
        )

    @property
    def samples(self) -> int:
        """Samples that every branch trains on."""
        return self.interval * self.num_evaluations


class Evaluation(NamedTuple):
    """The losses of one branch on the rows of one evaluation, which are the same for
    all branches.
    """

    losses: tuple[float, ...]  # mean loss of each group of rows
    weights: tuple[float, ...]  # weight (tokens) of each group

    @property
    def mean(self) -> float:
        """The weighted mean loss."""
        return sum(w * x for w, x in zip(self.weights, self.losses, strict=True)) / sum(
            self.weights
        )


def smoothed_loss(curve: Sequence[Evaluation]) -> float:
    """Return the exponential moving average of the losses of a branch after its last
    evaluation.
    """
    return sum(
        share * evaluation.mean
        for share, evaluation in zip(_shares(len(curve)), curve, strict=True)
    )


def smoothed_difference(
    curve: Sequence[Evaluation], other: Sequence[Evaluation]
) -> tuple[float, float]:
    """Return the smoothed loss of a branch less that of another one at the same tokens,
    and its standard error.

    The error is that of means over rows that both share, without what another seed
    would change; 0 with one group of rows.
    """
    total = variance = 0.0
    for share, one, two in zip(_shares(len(curve)), curve, other, strict=False):
        weight, number = sum(one.weights), len(one.losses)
        differences = [x - y for x, y in zip(one.losses, two.losses, strict=True)]
        mean = (
            sum(w * d for w, d in zip(one.weights, differences, strict=True)) / weight
        )
        squares = sum(
            (w * (d - mean)) ** 2 for w, d in zip(one.weights, differences, strict=True)
        )
        total += share * mean
        variance += share**2 * squares / weight**2 * number / max(number - 1, 1)
    return total, math.sqrt(variance)


def is_losing(
    curve: Sequence[Evaluation],
    smaller: Sequence[Sequence[Evaluation]],
    num_evaluations: int,
    tolerance: float,
) -> bool:
    """Return whether a branch has clearly lost against complete branches of smaller
    batches: its window need not be run on.
    """
    done = len(curve)
    if done and not math.isfinite(curve[-1].mean):
        return True
    if done < 2 or done < LEAST_PROGRESS * num_evaluations or done == num_evaluations:
        return False
    for other in smaller:
        # Even if the difference keeps closing as fast as in the second half so far; one
        # that closes exponentially is slower.
        gap, error = smoothed_difference(curve, other)
        before, _ = smoothed_difference(curve[: done // 2], other)
        closing = min((gap - before) / (done - done // 2), 0.0)
        if (
            gap + closing * (num_evaluations - done) - CLEAR_ERRORS * error
            > CLEAR_TOLERANCES * tolerance
        ):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """One branch, as in `rampup critical --json`."""

    multiple: Fraction  # its batch by that of the run
    global_batch_size: int  # its batch, in samples
    loss: float | None  # its smoothed loss; None if it is not finite
    standard_error: (
        float | None
    )  # of its difference from the best smaller branch; 0 for the smallest, None if not finite
    stopped: bool  # whether it was stopped early
    difference: float | None  # from the best smaller branch, or None
    # The share of additional tokens that its batch needs, compared with the best
    # smaller branch: the estimate, and the ends of its interval of two standard errors.
    # None if it is not known, or without a limit.
    token_overhead: tuple[float | None, float | None, float | None] | None = None


def find_critical(
    window: BranchWindow, curves: Sequence[Sequence[Evaluation]], tolerance: float
) -> tuple[tuple[BranchResult, ...], int]:
    """Return the result of every branch in the order of their batches, and the number
    of that with the critical batch.
    """
    results: list[BranchResult] = []
    complete: list[Sequence[Evaluation]] = []
    critical = 0
    for number, curve in enumerate(curves):
        stopped = len(curve) < window.num_evaluations or not math.isfinite(
            curve[-1].mean
        )
        gap, error = max(
            (smoothed_difference(curve, other) for other in complete),
            default=(0.0, 0.0),
        )
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
                difference=(
                    finite_or_none(gap) if len(complete) > (not stopped) else None
                ),
            )
        )
    return tuple(results), critical


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the branches of a checkpoint show."""

    branches: tuple[BranchResult, ...]  # smallest batch first
    critical: int  # the number of the branch with the critical batch
    tolerance: float  # nats by which a branch may be worse than a smaller one
    gain: (
        float | None
    )  # nats by which the window lowered the loss of the smallest branch; None if it was stopped
    # whether the window could tell a batch that wastes half of its samples from one
    # that wastes none
    decisive: bool
    deciding_samples: int | None = (
        # samples of a window that could, if this one could not; None = nothing says so
        None
    )
    earlier: int | None = (
        # the number of the branch that the first half of the window shows, if it is
        # another one
        None
    )


def judge(
    window: BranchWindow,
    curves: Sequence[Sequence[Evaluation]],
    checkpoint: Evaluation,
    tolerance: float | None,
    consumed_samples: int,
) -> Verdict:
    """Return what the branches from a checkpoint show, and whether they could have
    shown something else.
    """
    gain, gain_error = _gain(curves[0], checkpoint, window.num_evaluations)
    # A gain that is not clear may be as large as its error.
    likely = max(gain or 0.0, gain_error)
    progress = _progress(window.num_evaluations)
    if tolerance is None:
        tolerance = TOLERANCE_SHARE * likely * progress
    results, critical = find_critical(window, curves, tolerance)
    if gain is None or likely == 0:
        return Verdict(
            branches=results,
            critical=critical,
            tolerance=tolerance,
            gain=gain,
            decisive=False,
        )
    errors = [branch.standard_error or 0.0 for branch in results if not branch.stopped]
    # How many times as much the window would have to gain. A longer one gains, and is
    # evaluated on rows, in proportion.
    needed = max(
        tolerance / (DECISIVE_SHARE * likely),
        (DECISIVE_ERRORS * max(errors) / tolerance) ** (2 / 3),
        (CLEAR_ERRORS * gain_error / likely) ** (2 / 3),
    )
    is_clear = gain > CLEAR_ERRORS * gain_error
    is_decisive = is_clear and needed <= 1
    half = [curve[: -(-window.num_evaluations // 2)] for curve in curves]
    earlier = find_critical(
        replace(window, num_evaluations=len(half[0])), half, tolerance
    )[1]
    return Verdict(
        branches=(
            tuple(_with_overhead(branch, gain * progress) for branch in results)
            if is_clear
            else results
        ),
        critical=critical,
        tolerance=tolerance,
        gain=gain,
        decisive=is_decisive,
        deciding_samples=(
            None
            if is_decisive
            else longer_window(window.samples, consumed_samples, max(needed, 1.0))
        ),
        earlier=None if earlier == critical else earlier,
    )


def samples_for_gain(
    curve: Iterable[tuple[int, float]],
    consumed_samples: int,
    gain: float = DEFAULT_GAIN,
) -> int:
    """Return after how many samples the loss of a run is lower by `gain`, by its second
    half; 0 if that does not say it.
    """
    second_half = [
        (n, loss)
        for n, loss in curve
        if consumed_samples / 2 <= n <= consumed_samples and math.isfinite(loss)
    ]
    if len(second_half) < LEAST_EVALUATIONS:
        return 0
    _, slope, _ = weighted_line([(math.log(n), loss, 1.0) for n, loss in second_half])
    # A slope that promises the gain only after a hundred times the samples promises
    # nothing.
    return (
        math.ceil(consumed_samples * math.expm1(gain / -slope))
        if slope < 0 and gain / -slope < math.log(100)
        else 0
    )


def longer_window(samples: int, consumed_samples: int, times: float) -> int:
    """Return the samples of a window that gains `times` as much as one of `samples`:
    losses fall with ln(samples).
    """
    consumed = max(consumed_samples, 1)
    exponent = min(times * math.log1p(samples / consumed), 60.0)
    return max(math.ceil(consumed * math.expm1(exponent)), math.ceil(times * samples))


def _gain(
    smallest: Sequence[Evaluation], checkpoint: Evaluation, num_evaluations: int
) -> tuple[float | None, float]:
    """Return what the window lowered the loss of the smallest branch, and its standard
    error.
    """
    if len(smallest) < num_evaluations or not math.isfinite(smallest[-1].mean):
        return None, 0.0
    return smoothed_difference([checkpoint], [smallest[-1]])


def tolerance_of(
    curves: Sequence[Sequence[Evaluation]],
    checkpoint: Evaluation | None,
    num_evaluations: int,
) -> float:
    """Return the default tolerance as far as it is known: infinite before the smallest
    branch is complete.
    """
    gain = (
        None if checkpoint is None else _gain(curves[0], checkpoint, num_evaluations)[0]
    )
    return (
        TOLERANCE_SHARE * gain * _progress(num_evaluations)
        if gain is not None and gain > 0
        else math.inf
    )


def _progress(num_evaluations: int) -> float:
    """Return the part of the window that has passed in a smoothed loss, whose older
    evaluations are earlier in it.
    """
    return sum(
        share * number / num_evaluations
        for number, share in enumerate(_shares(num_evaluations), start=1)
    )


def _with_overhead(branch: BranchResult, gain: float) -> BranchResult:
    if branch.difference is None or branch.standard_error is None:
        return branch
    wasted = [
        (branch.difference + errors * branch.standard_error) / gain
        for errors in (0, -2, 2)
    ]
    value, low, high = (
        None if share >= 1 else max(share, 0.0) / (1 - max(share, 0.0))
        for share in wasted
    )
    return replace(branch, token_overhead=(value, low, high))


Bound = Literal["exact", "at_least", "at_most"]


def critical_bound(sizes: Sequence[int], critical: int) -> Bound:
    """Return what the critical batch of branches says: a bound if it is the largest or
    the smallest that was tried.
    """
    return (
        "at_most"
        if critical == min(sizes)
        else "at_least"
        if critical == max(sizes)
        else "exact"
    )


def implied_noise_scale(size: float, *, tolerance: float, gain: float) -> float:
    """Return the noise scale that follows from a critical batch: the batch that needs
    100% more tokens.
    """
    return size * (gain - tolerance) / tolerance


def _shares(number: int) -> list[float]:
    """Return the weight of each evaluation in the smoothed loss."""
    newest_first = [SMOOTHING * (1 - SMOOTHING) ** age for age in range(number - 1)] + [
        (1 - SMOOTHING) ** (number - 1)
    ]
    return newest_first[::-1]
