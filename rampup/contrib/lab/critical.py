"""The critical batch size by branches: which branches, and what their losses mean.

The method is that of Merrill et al. 2025, "Critical Batch Size Revisited" (arXiv
2505.23971): branches from one checkpoint train on the same samples, and the critical
batch is the largest whose smoothed loss exceeds that of no smaller one by more than a
tolerance. Here all losses are measured on the same rows, whose noise cancels in the
differences.

A window can only show what it changes. The *gain* is what it lowers the loss of the
smallest branch. A branch that ends worse by a share w of it has wasted about that share
of its samples, so it needs w / (1 - w) more tokens. At a constant rate that can be far
too low: a larger batch leaves less noise in the weights, which hides what it loses. The
tolerance is a sixth of the gain: 20% more tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from rampup.contrib.lab.design_model import weighted_line
from rampup.errors import ConfigError
from rampup.plan.numbers import finite_or_none

# A run's results are next to it, in RUN.critical/step-.../result.json.
CRITICAL_SUFFIX, CRITICAL_RESULT = ".critical", "result.json"
SMOOTHING = 0.5  # weight of the newest evaluation in the smoothed loss, as in the paper
# Evaluations of a branch if its window is long enough, and the fewest.
EVALUATIONS, LEAST_EVALUATIONS = 16, 4
# A window that is not given has at least so many steps of the largest branch, and the
# loss curve of the run promises this gain in nats from it: a sixth of it is some three
# standard errors of a difference of losses.
DEFAULT_STEPS, DEFAULT_GAIN = 20, 0.02
TOLERANCE_SHARE = 1 / 6  # as a share w of the gain: w / (1 - w) is 20%
# A measurement decides if its tolerance is at least so many standard errors.
DECISIVE_ERRORS = 2.0
# A branch has clearly lost if it is worse by this many tolerances and standard errors.
CLEAR_TOLERANCES, CLEAR_ERRORS = 2.0, 3.0
MOST_BRANCHES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWindow:
    """The batches of all branches, and the samples that each of them trains on."""

    sizes: tuple[int, ...]  # the global batch size of each branch, ascending
    # samples between two evaluations, a whole number of optimizer steps of every branch
    interval: int
    # evaluations of a branch; the last one is at the end of the window
    num_evaluations: int

    @classmethod
    def of(
        cls, batches: Sequence[int], samples: int | None, *, promising: int = 0
    ) -> Self:
        """Return the branches with these batches, of at least `samples`, by default
        `promising` ones, or refuse them.
        """
        sizes = tuple(sorted(set(batches)))
        if not 2 <= len(sizes) <= MOST_BRANCHES or sizes[0] < 1:
            raise ConfigError(
                f"batches={','.join(map(str, batches))} must be 2 to {MOST_BRANCHES}"
                " different batches of at least 1 sample",
                key="batches",
            )
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
            sizes=sizes, interval=interval, num_evaluations=-(-samples // interval)
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
        mean = Evaluation(tuple(differences), one.weights).mean
        squares = sum(
            (w * (d - mean)) ** 2 for w, d in zip(one.weights, differences, strict=True)
        )
        total += share * mean
        variance += share**2 * squares / weight**2 * number / max(number - 1, 1)
    return total, math.sqrt(variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """One branch, as in `rampup critical --json`."""

    global_batch_size: int  # its batch, in samples
    loss: float | None  # its smoothed loss; None if it is not finite
    # of its difference from the best smaller branch; 0 for the smallest, None if not
    # finite
    standard_error: float | None
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
    smaller: list[Sequence[Evaluation]] = []  # those whose loss is finite
    critical = 0
    for number, curve in enumerate(curves):
        pairs = [smoothed_difference(curve, other) for other in smaller]
        gap, error = max(pairs, default=(0.0, 0.0))
        results.append(
            BranchResult(
                global_batch_size=window.sizes[number],
                loss=finite_or_none(smoothed_loss(curve)),
                standard_error=finite_or_none(error),
                difference=finite_or_none(gap) if smaller else None,
            )
        )
        if math.isfinite(curve[-1].mean):
            critical = number if gap <= tolerance else critical
            smaller.append(curve)
    return tuple(results), critical


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the branches of a checkpoint show."""

    branches: tuple[BranchResult, ...]  # smallest batch first
    critical: int  # the number of the branch with the critical batch
    tolerance: float  # nats by which a branch may be worse than a smaller one
    # nats by which the window lowered the loss of the smallest branch; None if that is
    # not finite
    gain: float | None
    # whether the window could tell a batch that wastes half of its samples from one
    # that wastes none
    decisive: bool


def judge(
    window: BranchWindow, curves: Sequence[Sequence[Evaluation]], checkpoint: Evaluation
) -> Verdict:
    """Return what the branches from a checkpoint show, and whether they could have
    shown something else.
    """
    gain, gain_error = smoothed_difference([checkpoint], [curves[0][-1]])
    is_finite = math.isfinite(gain)
    progress = _progress(window.num_evaluations)
    # A gain that is not clear may be as large as its error.
    largest = max(gain, gain_error) if is_finite else 0.0
    tolerance = TOLERANCE_SHARE * largest * progress
    results, critical = find_critical(window, curves, tolerance)
    # A batch that has clearly lost may be known less precisely.
    errors = [
        branch.standard_error
        for branch in results
        if branch.standard_error is not None and not _has_lost(branch, tolerance)
    ]
    is_clear = is_finite and gain > CLEAR_ERRORS * gain_error
    if is_clear:
        results = tuple(_with_overhead(each, gain * progress) for each in results)
    return Verdict(
        branches=results,
        critical=critical,
        tolerance=tolerance,
        gain=finite_or_none(gain),
        decisive=is_clear and DECISIVE_ERRORS * max(errors) <= tolerance,
    )


def _has_lost(branch: BranchResult, tolerance: float) -> bool:
    if branch.difference is None or branch.standard_error is None:
        return False
    least = branch.difference - CLEAR_ERRORS * branch.standard_error
    return least > CLEAR_TOLERANCES * tolerance


def samples_for_gain(
    curve: Iterable[tuple[int, float]],
    consumed_samples: int,
) -> int:
    """Return after how many samples the loss of a run is lower by `DEFAULT_GAIN`, by
    its second half; 0 if that does not say it.
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
    if slope >= 0 or DEFAULT_GAIN / -slope >= math.log(100):
        return 0
    return math.ceil(consumed_samples * math.expm1(DEFAULT_GAIN / -slope))


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
    found = list[float | None]()
    for errors in (0, -2, 2):
        difference = branch.difference + errors * branch.standard_error
        share = max(difference / gain, 0.0)
        found.append(None if share >= 1 else share / (1 - share))
    value, low, high = found
    return replace(branch, token_overhead=(value, low, high))


Bound = Literal["exact", "at_least", "at_most"]


def critical_bound(sizes: Sequence[int], critical: int) -> Bound:
    """Return what the critical batch of branches says: a bound if it is the largest or
    the smallest that was tried.
    """
    if critical == min(sizes):
        return "at_most"
    return "at_least" if critical == max(sizes) else "exact"


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
