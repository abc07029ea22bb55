"""A model of the hours and the loss of a batch size schedule, and the best schedules under it. It reads no files.

The model is that of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162): a sample in a
batch B does 1 / (1 + B/N) of the work of a sample in a very small batch, where N is the gradient noise scale. *Progress* is the
number of samples that a run with a very small batch would need. N is a function of progress, measured on a run. With t(B)
seconds per step, a unit of progress takes t(B) * (1/B + 1/N) seconds; AdaptDL and Pollux call its inverse goodput (Qiao et al.
2021, arXiv 2008.12260). The batch that minimizes it at every point of the run makes the fastest schedule to any loss.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from rampup.errors import DataError

# The largest published growth of the critical batch with the data (Zhang et al. 2024, arXiv 2410.21676; Power Lines,
# arXiv 2505.13738, has 0.462); Merrill et al. 2025 (arXiv 2505.23971) find that it ends, which is a growth of 0.
PUBLISHED_GROWTH = 0.47
# Exponents of the loss over the data, reducible part: Hoffmann et al. 2022 (arXiv 2203.15556), and the refit of their data by
# Besiroglu et al. 2024 (arXiv 2404.10102).
DATA_EXPONENTS = (0.28, 0.37)
# Parts of a schedule in which progress is integrated.
PARTS = 1024
# Beginnings of a schedule that are followed for each batch.
BEGINNINGS = 30
# Share of the samples that the frugal ramp may waste, compared with the smallest batch.
FRUGAL_WASTE = 0.05

Schedule = tuple[tuple[int, int], ...]
# The seconds and samples of the first part of a schedule, and its batches, each after the samples before it.
Beginning = tuple[float, float, tuple[tuple[float, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCurve:
    """The gradient noise scale over the progress of a run, in samples."""

    # (progress, noise scale) in order of progress; straight lines between them in logarithms. An infinite noise scale has no
    # upper end.
    knots: tuple[tuple[float, float], ...]
    growth: float  # exponent of the power law after the last knot

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

    def knot_after(self, progress: float) -> float:
        """Return the progress of the next knot, or infinity."""
        place = bisect.bisect_right(self.knots, (progress, math.inf))
        return self.knots[place][0] if place < len(self.knots) else math.inf


class NoisePoint(NamedTuple):
    """A measured noise scale with its interval, in samples."""

    samples: float  # that the run had consumed
    batch: float  # of the run there
    noise: float
    low: float  # 0 if there is no such end
    high: float  # infinite if there is no such end

    @property
    def is_bound(self) -> bool:
        """Whether one end of the interval is all that is known: the noise scale is at least `low`, or at most `noise`."""
        return self.low == 0 or (self.high == math.inf and self.noise == self.low)

    def scaled(self, factor: float) -> Self:
        """Return the measurement with its noise scale and both ends times a factor."""
        return self._replace(noise=self.noise * factor, low=self.low * factor, high=self.high * factor)


def noise_curves(points: Sequence[NoisePoint], growth: float | None = None) -> tuple[NoiseCurve, NoiseCurve, NoiseCurve]:
    """Return the noise scale over the progress, and the lower and the upper end of its interval.

    A measurement that is only a bound is no point of the curve. There, the curve has the other measurements, held to the bound;
    it has the bounds themselves if there are no others. At least one measurement is needed, in order of samples.

    The growth after the last one is that of the second half of the measurements, with its interval, at most `PUBLISHED_GROWTH`.
    If there are at most two it is not known: `PUBLISHED_GROWTH`, or the `growth` given, with an interval from 0 on.

    Example:
        >>> found = noise_curves([NoisePoint(100, 8, 90.0, 90.0, math.inf), NoisePoint(400, 8, 200.0, 150.0, 300.0)])
        >>> [[round(noise) for _, noise in curve.knots] for curve in found[:2]], found[2].at(1.0)
        ([[200, 200], [90, 150]], inf)
    """
    exact = [point for point in points if not point.is_bound]
    known = NoiseCurve(knots=tuple((point.samples, point.noise) for point in exact), growth=0.0)
    values = [point.noise for point in points]
    for number, point in enumerate(points):
        if point.is_bound and exact:
            values[number] = (max if point.high == math.inf else min)(point.noise, known.at(point.samples))
    ends = values, [point.low or min(point.noise, 1.0) for point in points], [point.high for point in points]
    knots = []
    for noises in ends:
        progress = 0.0
        before = 0.0
        found = list[tuple[float, float]]()
        for point, noise in zip(points, noises, strict=True):
            progress += (point.samples - before) / (1 + point.batch / noise)
            before = point.samples
            found.append((max(progress, 1.0), noise))
        knots.append(tuple(found))
    assumed = PUBLISHED_GROWTH if growth is None else growth
    growths = [assumed, 0.0, max(assumed, PUBLISHED_GROWTH)]
    if len(exact) > 2 and growth is None:
        # A line through the second half of the measurements, each by its precision. Its slope has an interval of its own.
        rows = []
        placed = [(place, point) for (place, _), point in zip(knots[0], points, strict=True) if not point.is_bound]
        for place, point in placed[len(exact) // 2 :]:
            ratios = (point.noise / point.low, point.high / point.noise, 1.001)
            width = max(math.log(ratio) for ratio in ratios if ratio < math.inf)
            rows.append((math.log(place), math.log(point.noise), width**-2))
        _, slope, squares = weighted_line(rows)
        error = squares**-0.5 if squares else math.inf
        growths = [min(max(each, 0.0), PUBLISHED_GROWTH) for each in (slope, slope - error, slope + error)]
    middle, low, high = (NoiseCurve(knots=each, growth=power) for each, power in zip(knots, growths, strict=True))
    return middle, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of an optimizer step by global batch size."""

    measured: tuple[tuple[int, float], ...]  # (batch, seconds), ascending; straight lines between them
    slope: float  # of a line for other batches, moved to meet the nearest measured one
    others: Literal["line", "least", "most"] = "line"  # times of batches that are not between measured ones, see `bounds`

    @classmethod
    def fit(cls, seconds: dict[int, float]) -> Self:
        """Return the times of measured steps, by their batch. With a single one, time is in proportion to the batch.

        Example:
            >>> times = StepTimes.fit({8: 1.0, 16: 1.5, 32: 2.5})
            >>> times.at(24), times.at(64), times.at(4)
            (2.0, 4.5, 0.75)
        """
        points = tuple(sorted(seconds.items()))
        if not points or points[0][0] < 1 or min(time for _, time in points) <= 0:
            raise DataError("there are no step times to design with; they must be positive", key="measured")
        even = [(batch, time, 1.0) for batch, time in points]
        slope = max(weighted_line(even)[1], 0.0) if len(points) > 1 else points[0][1] / points[0][0]
        return cls(measured=points, slope=slope)

    def bounds(self) -> tuple[Self, Self]:
        """Return the least and the most that batches take that were not timed.

        A larger batch is no faster than a smaller one, and its samples no slower.

        Example:
            >>> least, most = StepTimes.fit({8: 1.0, 16: 1.5}).bounds()
            >>> (least.at(4), most.at(4)), (least.at(32), most.at(32))
            ((0.5, 1.0), (1.5, 3.0))
        """
        return replace(self, others="least"), replace(self, others="most")

    def total(self, schedule: Schedule, samples: float) -> float:
        """Return the seconds of a schedule up to a number of samples."""
        return sum(part / batch * self.at(batch) for batch, part in _parts_of(schedule, samples))

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
            # Not below the time in proportion to the batch: a smaller batch is never more efficient.
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
    """The model: noise scale over progress, and seconds by batch.

    Example:
        >>> model = DesignModel(noise=NoiseCurve(knots=((1.0, 64.0),), growth=0.0), times=StepTimes.fit({8: 1.0, 16: 1.2}))
        >>> outcome = model.run(((0, 64),), samples=6400)
        >>> outcome.steps, round(outcome.progress)  # at a batch of the noise scale, half of every sample is wasted
        (100, 3200)
    """

    noise: NoiseCurve
    times: StepTimes

    def halved(self) -> Self:
        """Return the model with half the noise scale at every progress."""
        knots = tuple((place, noise / 2) for place, noise in self.noise.knots)
        return replace(self, noise=replace(self.noise, knots=knots))

    def run(self, schedule: Schedule, *, samples: int | None = None, progress: float | None = None) -> Outcome:
        """Return the outcome of a schedule after a number of samples, or if that is None at a progress.

        A schedule has pairs of a threshold in samples and a global batch size, the first at 0.
        """
        done, reached = 0.0, 0.0
        total: float = math.inf if samples is None else samples
        starts = [(min(float(start), total), batch) for start, batch in schedule]
        for (start, batch), (end, _) in itertools.pairwise([*starts, (total, 0)]):
            # Short parts while little is done, because the noise scale changes on a logarithmic scale.
            while done < end:
                part = min(end - done, max(done / PARTS * 4, (end - start if end < math.inf else progress or 0.0) / PARTS, 1.0))
                # No part goes beyond a knot of the noise curve, which may be close to the one before it.
                knot = self.noise.knot_after(reached)
                middle = min(reached + part / 2 / (1 + batch / self.noise.at(reached)), (reached + knot) / 2)
                gain = part / (1 + batch / self.noise.at(middle))
                if reached + gain > knot:
                    price = 1 + batch / self.noise.at((reached + knot) / 2)
                    part = min(part, (knot - reached) * price)
                    gain = min(part / price, knot - reached)
                if progress is not None and samples is None and reached + gain >= progress:
                    part *= (progress - reached) / gain
                    gain, end = progress - reached, done
                done, reached = done + part, reached + gain
                if end < done:
                    return self._outcome(schedule, done, reached)
        return self._outcome(schedule, total, reached)

    def _outcome(self, schedule: Schedule, samples: float, progress: float) -> Outcome:
        steps = sum(part / batch for batch, part in _parts_of(schedule, samples))
        seconds = self.times.total(schedule, samples)
        return Outcome(steps=math.ceil(steps), seconds=seconds, samples=math.ceil(samples), progress=progress)

    def best_schedule(self, sizes: Sequence[int], *, progress: float) -> Schedule:
        """Return the schedule of ascending sizes that reaches a progress in the least time, of all that do not shrink.

        Example:
            >>> model = DesignModel(noise=NoiseCurve(knots=((1.0, 1.0), (1e4, 1e4)), growth=1.0),
            ...     times=StepTimes.fit({1: 1.0, 1000: 10.0}))
            >>> schedule = model.best_schedule([8, 64, 512], progress=1e4)
            >>> [size for _, size in schedule]
            [8, 64, 512]
        """
        parts = self._parts(progress, PARTS)
        prices = [(number, size, self.times.at(size) / size) for number, size in enumerate(sizes)][::-1]
        # From the end backwards: the least time of the rest, if the batch may be `sizes[number]` or any larger one.
        rest, choices = [0.0] * len(sizes), list[list[int]]()
        for length, noise in reversed(parts):
            best, after, rest = (math.inf, 0), rest, rest.copy()
            choices.append([0] * len(sizes))
            for number, size, price in prices:
                best = min(best, (length * price * (1 + size / noise) + after[number], number))
                rest[number], choices[-1][number] = best
        switches, done, number = list[tuple[float, int]](), 0.0, 0
        for (length, noise), choice in zip(parts, reversed(choices), strict=True):
            number = choice[number]
            switches.append((done, sizes[number]))
            done += length * (1 + sizes[number] / noise)
        # The constants too: where the optimum is one of them, it is not to lose by the rounding of a threshold.
        found = [_schedule(switches), *(((0, size),) for size in sizes)]
        return min(found, key=lambda schedule: self.run(schedule, progress=progress).seconds)

    def frugal_schedule(self, sizes: Sequence[int], *, samples: int, waste: float = FRUGAL_WASTE) -> Schedule:
        """Return the fastest schedule of a number of samples whose progress is at least 1 - waste of the smallest batch's.

        Of all whose batches do not shrink. For every batch, several beginnings are followed: each is the fastest of those that
        need about as many samples to the end if the batch grows no more.
        """
        least = (1 - waste) * self.run(((0, sizes[0]),), samples=samples).progress
        parts = self._parts(least, PARTS // 4)
        # Samples that each batch needs from here to the end.
        rest = [sum(length * (1 + size / noise) for length, noise in parts) for size in sizes]
        unit = max(samples - rest[0], 1.0) / BEGINNINGS
        # By batch.
        begun: list[list[Beginning]] = [[(0.0, 0.0, ())] for _ in sizes]
        for length, noise in parts:
            before: list[Beginning] = []
            for number, size in enumerate(sizes):
                kept: dict[int, Beginning] = {}
                for each in itertools.chain(begun[number], before):
                    spare = samples - each[1] - rest[number]
                    place = int(spare / unit)
                    if spare >= 0 and (place not in kept or each[0] < kept[place][0]):
                        kept[place] = each
                before = list(kept.values())
                needed = length * (1 + size / noise)
                time = needed * self.times.at(size) / size
                begun[number] = [
                    (seconds + time, done + needed, path if path and path[-1][1] == size else (*path, (done, size)))
                    for seconds, done, path in before
                ]
                rest[number] -= needed
        ends = [
            (seconds + (samples - done) * self.times.at(size) / size, _schedule(path))
            for size, found in zip(sizes, begun, strict=True)
            for seconds, done, path in found
        ]
        by_time = [*(schedule for _, schedule in sorted(ends)), ((0, sizes[0]),)]
        return next(schedule for schedule in by_time if self.run(schedule, samples=samples).progress >= least)

    def _parts(self, progress: float, number: int) -> list[tuple[float, float]]:
        """Return the length and the noise scale of parts of the progress, shorter where little is done and split at knots."""
        edges = {x for x, _ in self.noise.knots if x < progress} | {progress}
        reached = 0.0
        while reached < progress:
            edges.add(reached)
            reached += max(reached / number * 4, progress / number / 64)
        return [(end - start, self.noise.at((start + end) / 2)) for start, end in itertools.pairwise(sorted(edges))]

    def late_switch(self, sizes: Sequence[int], *, samples: int) -> Schedule:
        """Return the schedule with one switch from the smallest batch that is fastest to the loss of the smallest batch.

        The switch is in the second half of the samples (arXiv 2602.14208).
        """
        target = self.run(((0, sizes[0]),), samples=samples).progress
        return min(late_switches(sizes, samples), key=lambda schedule: self.run(schedule, progress=target).seconds)


def late_switches(sizes: Sequence[int], samples: int) -> list[Schedule]:
    """Return the schedules with one switch from the smallest batch, in the second half of the samples."""
    start = (0, sizes[0])
    return [(start, (round(samples * share / 20), size)) for share in range(10, 20) for size in sizes[1:]] or [(start,)]


def _parts_of(schedule: Schedule, samples: float) -> list[tuple[int, float]]:
    """Return the batches of a schedule, each with its samples, up to a number of them."""
    ends = [*(float(start) for start, _ in schedule[1:]), math.inf]
    return [(batch, max(min(end, samples) - start, 0.0)) for (start, batch), end in zip(schedule, ends, strict=True)]


def loss_penalty(
    progress: float, reference: float, *, slope: float, measured_at: float, exponent: float = DATA_EXPONENTS[0]
) -> float:
    """Return the loss at a progress less that at another one, by a power law of the reducible loss.

    `slope` is the decrease of the loss per factor e of samples, measured at the progress `measured_at`.

    Example:
        >>> round(loss_penalty(95.0, 100.0, slope=0.2, measured_at=100.0), 4)
        0.0103
    """
    powers = [(x / measured_at) ** -exponent for x in (progress, reference)]
    return float(slope / exponent * (powers[0] - powers[1]))


def loss_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return start and slope of a line through the loss over the logarithm of the samples consumed, in the second half of a
    run, where the loss does not grow; None if it is short.
    """
    late = [(samples, loss) for samples, loss in points if 2 * samples >= points[-1][0] and math.isfinite(loss)]
    if len(late) < 8:
        return None
    rows = [(math.log(samples), loss, 1.0) for samples, loss in late]
    start, slope, _ = weighted_line(rows)
    return (start, slope) if slope < 0 else (sum(loss for _, loss in late) / len(late), 0.0)


def format_schedule(schedule: Iterable[tuple[int, int]], *, tokens_per_sample: int = 1) -> str:
    """Return a schedule as the key `batch_size_schedule` takes it.

    Example:
        >>> format_schedule(((0, 8), (1000, 16)), tokens_per_sample=128)
        '0:8 128000:16'
    """
    return " ".join(f"{threshold * tokens_per_sample}:{size}" for threshold, size in schedule)


def _schedule(switches: Sequence[tuple[float, int]]) -> Schedule:
    """Return the schedule of batches by the samples before them; of several from one whole sample on, the last."""
    found: dict[int, int] = {}
    for done, size in switches:
        if not found or size != next(reversed(found.values())):
            found[round(done)] = size
    return tuple(found.items())


def weighted_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Return start and slope of the least-squares line, and the inverse of the variance of the slope; it is flat if all x are
    the same.

    The third number of a point is the inverse of the variance of y.
    """
    total = sum(weight for *_, weight in points)
    mean_x, mean_y = (sum(point[axis] * point[2] for point in points) / total for axis in (0, 1))
    if len({x for x, *_ in points}) == 1:  # their mean may differ from them in its last bit
        return mean_y, 0.0, 0.0
    squares = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / squares
    return mean_y - slope * mean_x, slope, squares
