"""A model of the hours and the loss of a batch size schedule, and the best schedule
under it. It reads no files.

The model is that of McCandlish et al. 2018, "An Empirical Model of Large-Batch
Training" (arXiv 1812.06162): a sample in a batch B does 1 / (1 + B/N) of the work of a
sample in a very small batch, where N is the gradient noise scale. *Progress* is the
number of samples that a run with a very small batch would need. N is a function of
progress, measured on a run. With t(B) seconds per step, a unit of progress takes t(B) *
(1/B + 1/N) seconds; AdaptDL and Pollux call its inverse goodput (Qiao et al. 2021,
arXiv 2008.12260). The batch that minimizes it at every point of the run makes the
fastest schedule to any loss.

The model has no memory: what the noise of a step costs is lost for good. So it cannot
judge a switch of the batch just before an anneal.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np

from rampup.plan.noise_scale import student

# The largest published growth of the critical batch with the data (Zhang et al. 2024,
# arXiv 2410.21676; Power Lines, arXiv 2505.13738, has 0.462); Merrill et al. 2025
# (arXiv 2505.23971) find that it ends, which is a growth of 0.
PUBLISHED_GROWTH = 0.47
# Exponents of the loss over the data, reducible part: Hoffmann et al. 2022 (arXiv
# 2203.15556), and the refit of their data by Besiroglu et al. 2024 (arXiv 2404.10102).
DATA_EXPONENTS = (0.28, 0.37)
PARTS = 1024  # parts of a schedule in which the model is integrated
# thresholds in samples with the batch from there on, the first at 0
Schedule = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCurve:
    """The gradient noise scale over the progress of a run, in samples."""

    # (progress, noise scale) in order, the latter infinite if it has no upper end;
    # straight lines between them in logarithms.
    knots: tuple[tuple[float, float], ...]
    growth: float  # exponent of the power law after the last knot
    is_capped: bool = False  # whether the measured exponent was above that

    def at(self, progress: float) -> float:
        """Return the noise scale."""
        first, last = self.knots[0], self.knots[-1]
        if progress <= first[0]:
            return first[1]
        if progress >= last[0]:
            return last[1] * float((progress / last[0]) ** self.growth)
        place = bisect.bisect_right(self.knots, (progress, math.inf))
        (x0, n0), (x1, n1) = self.knots[place - 1], self.knots[place]
        if math.inf in (n0, n1):
            return math.inf
        share = math.log(progress / x0) / math.log(x1 / x0)
        return n0 * float((n1 / n0) ** share)


class NoisePoint(NamedTuple):
    """A measured noise scale with its interval, in samples."""

    samples: float  # that the run had consumed
    batch: float  # of the run there
    noise: float
    low: float
    high: float  # infinite if there is no such end

    @property
    def is_bound(self) -> bool:
        """Whether one end of the interval is all that is known: the noise scale is at
        least `low`.
        """
        return self.high == math.inf and self.noise == self.low

    def scaled(self, factor: float) -> Self:
        """Return the measurement with its noise scale and both ends times a factor."""
        return self._replace(
            noise=self.noise * factor, low=self.low * factor, high=self.high * factor
        )


def exact_curve(points: Sequence[NoisePoint]) -> NoiseCurve:
    """Return the noise scale over the samples of a run, by the points that are no
    bounds.
    """
    knots = ((point.samples, point.noise) for point in points if not point.is_bound)
    return NoiseCurve(knots=tuple(knots), growth=0.0)


def noise_curves(
    points: Sequence[NoisePoint], growth: float | None = None
) -> tuple[NoiseCurve, NoiseCurve, NoiseCurve]:
    """Return the noise scale over the progress, and the lower and the upper end of its
    interval, from points in order. After the last one it grows with the power `growth`,
    which None takes from the points.
    """
    # Where a measurement is only a bound, the curve has the others, held to it; the
    # bounds themselves if there are no others.
    exact = exact_curve(points)
    values = [
        max(point.noise, exact.at(point.samples))
        if point.is_bound and exact.knots
        else point.noise
        for point in points
    ]
    ends = (
        values,
        [point.low for point in points],
        [point.high for point in points],
    )
    knots = [_knots(points, noises) for noises in ends]
    assumed = PUBLISHED_GROWTH if growth is None else growth
    # After the last of at most two, the growth is not known, and its interval begins at
    # 0.
    growths = [assumed, 0.0, max(assumed, PUBLISHED_GROWTH)]
    if len(exact.knots) > 2 and growth is None:
        growths = _measured_growth(points, knots[0], len(exact.knots) // 2)
    middle, low, high = (
        NoiseCurve(
            knots=each,
            growth=min(max(power, 0.0), PUBLISHED_GROWTH) if growth is None else power,
            is_capped=growth is None and power > PUBLISHED_GROWTH,
        )
        for each, power in zip(knots, growths, strict=True)
    )
    return middle, low, high


def _knots(
    points: Sequence[NoisePoint], noises: Sequence[float]
) -> tuple[tuple[float, float], ...]:
    """Return noise scales at the places of points, over the progress that they give."""
    progress = before = 0.0
    found = list[tuple[float, float]]()
    for point, noise in zip(points, noises, strict=True):
        progress += (point.samples - before) / (1 + point.batch / noise)
        before = point.samples
        found.append((max(progress, 1.0), noise))
    return tuple(found)


def _measured_growth(
    points: Sequence[NoisePoint], knots: Sequence[tuple[float, float]], skipped: int
) -> list[float]:
    """Return the slope of a line through the points after the skipped ones, in
    logarithms and each by its precision, and its slope less and plus its error.
    """
    rows = []
    for (place, _), point in zip(knots, points, strict=True):
        if not point.is_bound:
            ratios = (point.noise / point.low, point.high / point.noise, 1.001)
            width = max(math.log(ratio) for ratio in ratios if ratio < math.inf)
            rows.append((math.log(place), math.log(point.noise), width**-2))
    _, slope, squares = weighted_line(rows[skipped:])
    error = squares**-0.5 if squares else math.inf
    return [slope, slope - error, slope + error]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of an optimizer step by global batch size."""

    # (batch, seconds), ascending; straight lines between them
    measured: tuple[tuple[int, float], ...]
    slope: float  # of a line for other batches, moved to meet the nearest measured one
    # times of batches that are not between measured ones, see `bounds`
    others: Literal["line", "least", "most"] = "line"

    @classmethod
    def fit(cls, seconds: dict[int, float]) -> Self:
        """Return the times of measured steps, by their batch. With a single one, time
        is in proportion to the batch.
        """
        points = tuple(sorted(seconds.items()))
        slope = points[0][1] / points[0][0]
        if len(points) > 1:
            even = [(batch, time, 1.0) for batch, time in points]
            slope = max(weighted_line(even)[1], 0.0)
        return cls(measured=points, slope=slope)

    def bounds(self) -> tuple[Self, Self]:
        """Return the least and the most that untimed batches take: no less than smaller
        ones, and no more per sample.
        """
        return replace(self, others="least"), replace(self, others="most")

    def total(self, schedule: Schedule, samples: float) -> float:
        """Return the seconds of a schedule up to a number of samples."""
        return sum(
            part / batch * self.at(batch)
            for batch, part in _parts_of(schedule, samples)
        )

    def at(self, batch: int) -> float:
        """Return the seconds of a step."""
        (low, first), (high, last) = self.measured[0], self.measured[-1]
        if self.others != "line" and not low <= batch <= high:
            nearest, time = (low, first) if batch < low else (high, last)
            ends = time, time * batch / nearest
            return min(ends) if self.others == "least" else max(ends)
        if batch >= high:
            return last + self.slope * (batch - high)
        if batch <= low:
            # Not below the time in proportion to the batch: a smaller batch is never
            # more efficient.
            return max(first - self.slope * (low - batch), first * batch / low)
        place = bisect.bisect_right(self.measured, (batch, math.inf))
        (b0, t0), (b1, t1) = self.measured[place - 1], self.measured[place]
        return t0 + (t1 - t0) * (batch - b0) / (b1 - b0)


class Outcome(NamedTuple):
    """The model's prediction for one schedule."""

    steps: int  # optimizer steps
    seconds: float  # time of the steps
    samples: int  # samples consumed
    progress: float  # samples that a very small batch would need for the same loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignModel:
    """The model: noise scale over progress, and seconds by batch."""

    noise: NoiseCurve
    times: StepTimes

    def run(
        self,
        schedule: Schedule,
        *,
        samples: int | None = None,
        progress: float | None = None,
    ) -> Outcome:
        """Return the outcome of a schedule after a number of samples, or if that is
        None at a progress.
        """
        done, reached = 0.0, 0.0
        total = math.inf if samples is None else float(samples)
        target = math.inf if progress is None else progress
        starts = [(min(float(start), total), batch) for start, batch in schedule]
        for (start, batch), (end, _) in itertools.pairwise([*starts, (total, 0)]):
            # Short parts while little is done, because the noise scale changes on a
            # logarithmic scale.
            longest = (end - start if end < math.inf else target) / PARTS
            while done < end:
                part = min(end - done, max(done / PARTS * 4, longest, 1.0))
                part, gain = self._advance(batch, reached, part)
                if reached + gain >= target:
                    part, gain = part * ((target - reached) / gain), target - reached
                    return self._outcome(schedule, done + part, reached + gain)
                done, reached = done + part, reached + gain
        return self._outcome(schedule, total, reached)

    def _advance(self, batch: int, reached: float, part: float) -> tuple[float, float]:
        """Return the progress of a part of the samples, from where the run is. A part
        ends at a knot of the noise curve, which may be close to the one before it.
        """
        later = (place for place, _ in self.noise.knots if place > reached)
        knot = next(later, math.inf)
        middle = min(
            reached + part / 2 / (1 + batch / self.noise.at(reached)),
            (reached + knot) / 2,
        )
        gain = part / (1 + batch / self.noise.at(middle))
        if reached + gain > knot:
            price = 1 + batch / self.noise.at((reached + knot) / 2)
            part = min(part, (knot - reached) * price)
            gain = min(part / price, knot - reached)
        return part, gain

    def _outcome(self, schedule: Schedule, samples: float, progress: float) -> Outcome:
        steps = math.ceil(
            sum(part / batch for batch, part in _parts_of(schedule, samples))
        )
        return Outcome(
            steps, self.times.total(schedule, samples), math.ceil(samples), progress
        )

    def best_schedule(self, sizes: Sequence[int], *, progress: float) -> Schedule:
        """Return the schedule of ascending sizes that reaches a progress in the least
        time, of all that do not shrink.
        """
        # The length and the noise scale of parts of the progress, shorter where little
        # is done and split at knots.
        edges = {x for x, _ in self.noise.knots if x < progress} | {progress}
        reached = 0.0
        while reached < progress:
            edges.add(reached)
            reached += max(reached / PARTS * 4, progress / PARTS / 64)
        parts = [
            (end - start, self.noise.at((start + end) / 2))
            for start, end in itertools.pairwise(sorted(edges))
        ]
        batches = np.array(sizes)
        prices = np.array([self.times.at(size) / size for size in sizes])
        # From the end backwards: the least time of the rest, if the batch may be
        # `sizes[number]` or any larger one.
        rest = [np.zeros(len(sizes))]
        for length, noise in reversed(parts):
            total = length * prices * (1 + batches / noise) + rest[-1]
            rest.append(np.minimum.accumulate(total[::-1])[::-1])
        switches, done, number = dict[int, int](), 0.0, 0
        for (length, noise), after in zip(parts, rest[-2::-1], strict=True):
            total = length * prices * (1 + batches / noise) + after
            larger = int(np.argmin(total[number:]))
            if larger or not switches:
                number += larger
                # Of several batches from one whole sample on, the last.
                switches[round(done)] = sizes[number]
            done += length * (1 + sizes[number] / noise)
        # The constants too: where the optimum is one of them, it is not to lose by the
        # rounding of a threshold.
        found = [tuple(switches.items()), *(((0, size),) for size in sizes)]
        return min(
            found, key=lambda schedule: self.run(schedule, progress=progress).seconds
        )


def most_saved(growth: float) -> float:
    """Return the largest share of the hours that a ramp saves against the best constant
    batch, under the model.

    It holds for a step that takes a + c B seconds and a noise scale N in proportion to
    progress^g. The best batch is then sqrt(a N / c) at every point; a unit of progress
    takes c + a/N + 2 sqrt(a c / N) seconds with it, and a constant batch B takes c +
    a/N + a/B + c B/N. Over the run the means of 1/N and of 1/sqrt(N) are 1/(1 - g) and
    1/(1 - g/2) of those at its end, and the saving is largest where a/N is c on
    average: (1 - sqrt(1 - g) / (1 - g/2)) / 2.

    Args:
        growth: g, from 0 to 1.

    Example:
        >>> [round(most_saved(g), 4) for g in (0.0, 0.3, 0.47, 0.8)]
        [0.0, 0.0078, 0.0242, 0.1273]
    """
    return (1 - math.sqrt(1 - growth) / (1 - growth / 2)) / 2


def _parts_of(schedule: Schedule, samples: float) -> list[tuple[int, float]]:
    """Return the batches of a schedule, each with its samples, up to a number of
    them.
    """
    ends = [*(float(start) for start, _ in schedule[1:]), math.inf]
    return [
        (batch, max(min(end, samples) - start, 0.0))
        for (start, batch), end in zip(schedule, ends, strict=True)
    ]


def loss_penalty(
    progress: float,
    reference: float,
    *,
    slope: float,
    measured_at: float,
    exponent: float = DATA_EXPONENTS[0],
) -> float:
    """Return the loss at a progress less that at another one, by a power law of the
    reducible loss.

    `slope` is the decrease of the loss per factor e of samples, measured at the
    progress `measured_at`.
    """
    powers = [(x / measured_at) ** -exponent for x in (progress, reference)]
    return float(slope / exponent * (powers[0] - powers[1]))


class LossLine(NamedTuple):
    """A line through the loss of a run over ln(samples), in its second half."""

    start: float
    slope: float  # not above 0
    residual: float  # standard deviation of the loss of a step around the line
    num_steps: int
    mean: float  # of ln(samples)
    squares: float  # sum of the squares of ln(samples) - mean

    @property
    def pivot(self) -> float:
        """The samples at which the loss of the line is known best."""
        return math.exp(self.mean)

    @property
    def loss_at_pivot(self) -> float:
        """The loss of the line there."""
        return self.start + self.slope * self.mean

    def error(self, distance: float, steps: float) -> float:
        """Return half the width of the 90% interval of a mean loss over so many steps,
        at a distance from the pivot by which the slope is multiplied.
        """
        variance = 1 / self.num_steps + 1 / steps + distance**2 / self.squares
        return student(self.num_steps - 2) * self.residual * math.sqrt(variance)


def loss_line(points: Sequence[tuple[int, float]]) -> LossLine | None:
    """Return the line through (samples consumed, loss) of a run; it is level where the
    loss grows, and None if the run is short.
    """
    late = [
        (math.log(samples), loss)
        for samples, loss in points
        if 2 * samples >= points[-1][0] and math.isfinite(loss)
    ]
    if len(late) < 8:
        return None
    start, slope, squares = weighted_line([(x, loss, 1.0) for x, loss in late])
    mean = sum(x for x, _ in late) / len(late)
    if slope > 0:
        start, slope = start + slope * mean, 0.0
    errors = sum((loss - start - slope * x) ** 2 for x, loss in late)
    residual = math.sqrt(errors / (len(late) - 2))
    return LossLine(start, slope, residual, len(late), mean, squares)


def format_schedule(
    schedule: Iterable[tuple[int, int]], *, tokens_per_sample: int = 1
) -> str:
    """Return a schedule as the key `batch_size_schedule` takes it."""
    return " ".join(
        f"{threshold * tokens_per_sample}:{size}" for threshold, size in schedule
    )


def weighted_line(
    points: Sequence[tuple[float, float, float]],
) -> tuple[float, float, float]:
    """Return start, slope and inverse variance of the slope of a least-squares line
    through (x, y, inverse variance of y).
    """
    total = sum(weight for *_, weight in points)
    mean_x, mean_y = (
        sum(point[axis] * point[2] for point in points) / total for axis in (0, 1)
    )
    if len({x for x, *_ in points}) == 1:
        # Their mean may differ from them in its last bit.
        return mean_y, 0.0, 0.0
    squares = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = (
        sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / squares
    )
    return mean_y - slope * mean_x, slope, squares
