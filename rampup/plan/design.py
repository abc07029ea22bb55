"""From measurements to a ramp: a model of hours and loss by batch size schedule, and the schedules that are best in it.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rampup.errors import DataError

# Growth of the critical batch with the data if one measurement does not show it (Zhang et al. 2024, arXiv 2410.21676).
ASSUMED_GROWTH = 0.47
# Exponent of the loss over the data, reducible part (Hoffmann et al. 2022, arXiv 2203.15556).
DATA_EXPONENT = 0.28
MAX_KNOTS = 24
# Parts of a schedule in which progress is integrated.
PARTS = 512
# Share of the samples that the frugal ramp may waste, compared with the smallest batch.
FRUGAL_WASTE = 0.05

Schedule = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCurve:
    """The gradient noise scale over the progress of a run, in samples.

    Attributes:
        knots: (progress, noise scale), in order of progress; straight lines between them in logarithms.
        growth: exponent of the power law after the last knot.
    """

    knots: tuple[tuple[float, float], ...]
    growth: float

    @classmethod
    def measured(cls, points: Sequence[tuple[int, int, float]]) -> Self:
        """Return the curve of measurements.

        Args:
            points: (samples consumed, batch of the run there, noise scale in samples), in order of samples.

        Raises:
            DataError: there are none.

        Example:
            >>> curve = NoiseCurve.measured([(100, 10, 40.0), (200, 10, 40.0), (400, 10, 40.0)])
            >>> curve.at(50), curve.growth, round(curve.knots[-1][0])
            (40.0, 0.0, 320)
        """
        if not points:
            raise DataError("there is no measured noise scale or critical batch to design with", key="measured")
        progress, before, placed = 0.0, 0, list[tuple[float, float]]()
        for samples, batch, noise in points:
            progress += (samples - before) / (1 + batch / noise)
            before = samples
            placed.append((max(progress, 1.0), noise))
        knots = tuple(_bins(placed))
        growth = ASSUMED_GROWTH
        if len(knots) > 2:
            # The second half of the knots, which are evenly spaced in the logarithm of progress.
            growth = min(max(_slope([(math.log(x), math.log(n)) for x, n in knots[len(knots) // 2 :]]), 0.0), 1.0)
        return cls(knots=knots, growth=growth)

    def at(self, progress: float) -> float:
        """Return the noise scale."""
        first, last = self.knots[0], self.knots[-1]
        if progress <= first[0]:
            return first[1]
        if progress >= last[0]:
            return last[1] * float((progress / last[0]) ** self.growth)
        place = bisect.bisect_right(self.knots, (progress, math.inf))
        (x0, n0), (x1, n1) = self.knots[place - 1], self.knots[place]
        share = math.log(progress / x0) / math.log(x1 / x0)
        return n0 * float((n1 / n0) ** share)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of an optimizer step by global batch size.

    Attributes:
        measured: (batch, seconds), ascending; straight lines between them.
        start, slope: the line start + slope * batch for other batches, moved to meet the nearest measured one.
    """

    measured: tuple[tuple[int, float], ...]
    start: float
    slope: float

    @classmethod
    def fit(cls, seconds: dict[int, float]) -> Self:
        """Return the times of measured steps.

        Args:
            seconds: seconds of a step by batch. With a single one, time is in proportion to the batch.

        Example:
            >>> times = StepTimes.fit({8: 1.0, 16: 1.5, 32: 2.5})
            >>> times.at(24), times.at(64), times.at(4)
            (2.0, 4.5, 0.75)
        """
        points = tuple(sorted(seconds.items()))
        if not points or points[0][0] < 1 or min(time for _, time in points) <= 0:
            raise DataError("there are no step times to design with; they must be positive", key="measured")
        slope = max(_slope(points), 0.0) if len(points) > 1 else points[0][1] / points[0][0]
        return cls(measured=points, start=max(points[0][1] - slope * points[0][0], 0.0), slope=slope)

    def at(self, batch: int) -> float:
        """Return the seconds of a step."""
        (low, first), (high, last) = self.measured[0], self.measured[-1]
        if batch >= high:
            return last + self.slope * (batch - high)
        if batch <= low:
            # Not below the time in proportion to the batch: a smaller batch is never more efficient.
            return max(first - self.slope * (low - batch), first * batch / low)
        place = bisect.bisect_right(self.measured, (batch, math.inf))
        (b0, t0), (b1, t1) = self.measured[place - 1], self.measured[place]
        return t0 + (t1 - t0) * (batch - b0) / (b1 - b0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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

    def run(self, schedule: Schedule, *, samples: int | None = None, progress: float | None = None) -> Outcome:
        """Return the outcome of a schedule after a number of samples, or at a progress.

        Args:
            schedule: (threshold in samples, global batch size), the first at 0.
            samples: samples of the run.
            progress: progress at which it ends, if `samples` is None.
        """
        done, seconds, steps, reached = 0.0, 0.0, 0.0, 0.0
        for start, end, batch in _phases(schedule, samples):
            # Short parts while little is done, because the noise scale changes on a logarithmic scale.
            while done < end:
                part = min(end - done, max(done / PARTS * 4, (end - start) / PARTS if end < math.inf else batch, 1.0))
                gain = part / (1 + batch / self.noise.at(reached + part / 2 / (1 + batch / self.noise.at(reached))))
                if progress is not None and samples is None and reached + gain >= progress:
                    part *= (progress - reached) / gain
                    gain, end = progress - reached, done
                done, reached = done + part, reached + gain
                steps, seconds = steps + part / batch, seconds + part / batch * self.times.at(batch)
                if end < done:
                    return Outcome(steps=math.ceil(steps), seconds=seconds, samples=math.ceil(done), progress=reached)
        return Outcome(steps=math.ceil(steps), seconds=seconds, samples=round(done), progress=reached)

    def best_schedule(self, sizes: Sequence[int], *, progress: float, sample_cost: float = 0.0) -> Schedule:
        """Return the schedule that reaches a progress in the least time, with batches that do not shrink.

        Args:
            sizes: batches to choose from, ascending.
            progress: where it ends.
            sample_cost: seconds that a consumed sample costs in addition to its time. Large values prefer small batches.

        Example:
            >>> model = DesignModel(noise=NoiseCurve(knots=((1.0, 1.0), (1e4, 1e4)), growth=1.0),
            ...     times=StepTimes.fit({1: 1.0, 1000: 10.0}))
            >>> schedule = model.best_schedule([8, 64, 512], progress=1e4)
            >>> [size for _, size in schedule]
            [8, 64, 512]
        """
        schedule: list[tuple[int, int]] = []
        reached, done, smallest = 0.0, 0.0, 0
        while reached < progress:
            noise = self.noise.at(reached)
            batch = min(
                (size for size in sizes if size >= smallest),
                key=lambda size: (self.times.at(size) / size + sample_cost) * (1 + size / noise),
            )
            if batch != smallest:
                schedule.append((round(done), batch))
                smallest = batch
            part = max(reached / PARTS * 4, progress / PARTS / 64)
            done, reached = done + part * (1 + batch / noise), reached + part
        return tuple(schedule)

    def frugal_schedule(self, sizes: Sequence[int], *, samples: int, waste: float = FRUGAL_WASTE) -> Schedule:
        """Return the fastest schedule of a number of samples whose progress is at least 1 - waste of the smallest batch's.

        It has the least time plus a price on samples, and the price is found by bisection.
        """
        target = self.run(((0, sizes[0]),), samples=samples).progress
        low, high = 0.0, 1e3 * self.times.at(sizes[0])
        found: Schedule = ((0, sizes[0]),)
        for _ in range(30):
            price = math.sqrt(low * high) if low else high / 1e9
            schedule = self.best_schedule(sizes, progress=target, sample_cost=price)
            if self.run(schedule, samples=samples).progress >= (1 - waste) * target:
                found, high = schedule, price
                if not low:
                    break
            else:
                low = price
        return found

    def late_switch(self, sizes: Sequence[int], *, samples: int) -> Schedule:
        """Return the schedule with one switch from the smallest batch that is fastest to the loss of the smallest batch.

        The switch is in the second half of the samples (arXiv 2602.14208).
        """
        target = self.run(((0, sizes[0]),), samples=samples).progress
        choices: list[Schedule] = [
            ((0, sizes[0]), (round(samples * share / 20), size)) for share in range(10, 20) for size in sizes[1:]
        ] or [((0, sizes[0]),)]
        return min(choices, key=lambda schedule: self.run(schedule, progress=target).seconds)


def loss_penalty(progress: float, reference: float, *, slope: float, measured_at: float) -> float:
    """Return the loss at a progress less that at another one, by a power law of the reducible loss.

    Args:
        progress, reference: see `NoiseCurve`.
        slope: decrease of the loss per factor e of samples, measured.
        measured_at: the progress at which it was.

    Example:
        >>> round(loss_penalty(95.0, 100.0, slope=0.2, measured_at=100.0), 4)
        0.0103
    """
    powers = [(x / measured_at) ** -DATA_EXPONENT for x in (progress, reference)]
    return float(slope / DATA_EXPONENT * (powers[0] - powers[1]))


def loss_slope(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the decrease of the loss per factor e of samples in the second half of a run; None with too few steps.

    Args:
        points: (samples consumed, loss).
    """
    last = [(math.log(samples), loss) for samples, loss in points if 2 * samples >= points[-1][0] and math.isfinite(loss)]
    return max(-_slope(last), 0.0) if len(last) >= 8 else None


def format_schedule(schedule: Schedule, *, tokens_per_sample: int = 1) -> str:
    """Return a schedule as the key `batch_size_schedule` takes it.

    Example:
        >>> format_schedule(((0, 8), (1000, 16)), tokens_per_sample=128)
        '0:8 128000:16'
    """
    return " ".join(f"{threshold * tokens_per_sample}:{size}" for threshold, size in schedule)


def _phases(schedule: Schedule, samples: int | None) -> Iterator[tuple[float, float, int]]:
    end: float = math.inf if samples is None else samples
    starts = [(min(float(start), end), batch) for start, batch in schedule]
    for (start, batch), (stop, _) in itertools.pairwise([*starts, (end, 0)]):
        yield start, stop, batch


def _bins(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the geometric means of points in at most `MAX_KNOTS` bins that are evenly spaced in the logarithm of progress."""
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    width = (last - first) / MAX_KNOTS or 1.0
    for _, group in itertools.groupby(points, key=lambda point: min(int((math.log(point[0]) - first) / width), MAX_KNOTS - 1)):
        members = list(group)
        logs = [sum(math.log(member[axis]) for member in members) / len(members) for axis in (0, 1)]
        yield math.exp(logs[0]), math.exp(logs[1])


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line; 0 if there is none."""
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / variance if variance else 0.0
