"""Slow, obvious versions of what the plan computes in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction


def linear_steps(
    start: int, increment: int, end: int, samples: int, *, carry_overshoot: bool
) -> Iterator[int]:
    """Yield the batch of every step of a linear ramp, counting sample by sample as the
    two systems' documentation says.
    """
    each = Fraction(samples, (end - start) // increment)
    size, since_change, consumed = start, 0, 0
    while True:
        yield size
        consumed += size
        since_change += size
        if carry_overshoot:
            reached = min(int(consumed / each), (end - start) // increment)
            size = start + increment * reached
        elif since_change >= each and size < end:
            size, since_change = size + increment, 0


def piecewise_steps(thresholds: list[tuple[int, int]]) -> Iterator[int]:
    """Yield the batch of every step of a schedule: the size of the last threshold at or
    below the samples consumed.
    """
    consumed = 0
    while True:
        size = next(
            size for threshold, size in reversed(thresholds) if threshold <= consumed
        )
        yield size
        consumed += size
