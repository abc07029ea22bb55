"""Finding the largest size that fits, with few trials: each trial is a compilation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Cost = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where sizes stop fitting.

    Attributes:
        largest: the largest size that fits, or None if none does.
        next_larger: the next size, which was tried and does not fit, or None if the largest of all fits.
        costs: what every size that was tried costs.
    """

    largest: int | None
    next_larger: int | None
    costs: Mapping[int, float]


def largest_within(sizes: Sequence[int], cost: Cost, limit: float) -> Boundary:
    """Return the largest size whose cost is within a limit, tried itself, as is the next one.

    Two of three trials are where a straight line through the two nearest costs meets the limit, the third halves what is
    left: a cost that is a constant and a multiple of the size takes about four trials, any other three times the logarithm
    at most.

    Args:
        sizes: the candidates, ascending.
        cost: what a size costs; it must not fall from one candidate to the next, and may be infinite.
        limit: the most it may cost.

    Example:
        >>> found = largest_within(range(1, 1000), lambda size: 100 + 3 * size, 1000)
        >>> found.largest, found.next_larger, len(found.costs)
        (300, 301, 4)
    """
    costs: dict[int, float] = {}

    def fits(place: int) -> bool:
        costs[sizes[place]] = cost(sizes[place])
        return costs[sizes[place]] <= limit

    low, high = -1, len(sizes)
    if sizes and not fits(0):
        high = 0
    elif sizes:
        low = 0
        if len(sizes) > 1:
            low, high = (len(sizes) - 1, high) if fits(len(sizes) - 1) else (0, len(sizes) - 1)
    trial = 0
    while high - low > 1:
        place = (low + high) // 2 if trial % 3 == 2 else _crossing(sizes, costs, low, high, limit)
        low, high = (place, high) if fits(place) else (low, place)
        trial += 1
    return Boundary(
        largest=sizes[low] if low >= 0 else None, next_larger=sizes[high] if high < len(sizes) else None, costs=costs
    )


def candidate_sizes(legal: Iterable[int], *, least: int, most: int) -> tuple[int, ...]:
    """Return the sizes to try from `least` to `most`: the legal ones, and powers of two.

    Example:
        >>> candidate_sizes([1, 3, 6], least=2, most=8)
        (2, 3, 4, 6, 8)
    """
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({size for size in (*legal, *powers) if least <= size <= most}))


def _crossing(sizes: Sequence[int], costs: Mapping[int, float], low: int, high: int, limit: float) -> int:
    """Return the place strictly between two others where a straight line through their costs reaches the limit."""
    start, rise = costs[sizes[low]], costs[sizes[high]] - costs[sizes[low]]
    if not math.isfinite(rise):
        return (low + high) // 2
    size = sizes[low] + (limit - start) * (sizes[high] - sizes[low]) / rise
    within = (place for place in range(high - 1, low, -1) if sizes[place] <= size)
    return next(within, low + 1)
