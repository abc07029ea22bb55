"""Straight lines through measured times, and what they say about a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """y = start + slope * x.

    Attributes:
        start: y at x = 0.
        slope: its rise per x.
    """

    start: float
    slope: float

    def at(self, x: float) -> float:
        """Return y."""
        return self.start + self.slope * x


def fit_line(points: Sequence[Point]) -> Line:
    """Return the line with the least squared errors relative to y; through 0 where all points have the same x.

    Args:
        points: (x, y), at least one, y above 0.

    Example:
        >>> line = fit_line([(1, 3), (2, 5), (4, 9)])
        >>> round(line.start, 6), round(line.slope, 6)
        (1.0, 2.0)
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread == 0:
        return Line(start=0.0, slope=mean_y / mean_x)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    return Line(start=mean_y - slope * mean_x, slope=slope)


def fit_tick_overhead(times: Mapping[int, Sequence[Point]], *, num_repeats: int) -> float | None:
    """Return h, what a pipeline tick costs beside its arithmetic, in samples per replica: `predicted_time`'s overhead.

    A step takes c + t * ticks * (b / v + h) with c for the optimizer. So the slope of each microbatch size's times over its
    ticks is t * (b / v + h), a line over b whose start over its slope is h * v.

    Args:
        times: microbatch size b -> (ticks of a step, seconds), at least two different numbers of ticks each.
        num_repeats: v.

    Returns:
        h, not below 0; None where there are fewer than two sizes, or the times do not grow with ticks and size.

    Example:
        >>> steps = {b: [(ticks, 7 + 0.1 * ticks * (b + 3)) for ticks in (7, 11)] for b in (1, 2, 8)}
        >>> round(fit_tick_overhead(steps, num_repeats=1), 6)
        3.0
    """
    slopes = [(float(b), fit_line(points).slope) for b, points in times.items() if len({ticks for ticks, _ in points}) > 1]
    if len(slopes) < 2 or min(slope for _, slope in slopes) <= 0:
        return None
    line = fit_line(slopes)
    return None if line.slope <= 0 else max(line.start / line.slope / num_repeats, 0.0)
