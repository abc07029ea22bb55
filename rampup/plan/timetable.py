"""When each pipeline stage works on which microbatch, and what the waiting costs."""

from __future__ import annotations

from fractions import Fraction


def bubble_fraction(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Fraction:
    """Return idle time over total time of one pipeline pass (GPipe, 1F1B; circular and interleaved with repeats).

    Args:
        num_stages: pipeline stages p.
        num_microbatches: microbatches m of the pass; below p, repeats stall.
        num_repeats: layer chunks v per stage.

    Returns:
        (p - 1) / (v*m + p - 1) for m >= p or v = 1, exactly.

    Example:
        >>> bubble_fraction(4, 8), bubble_fraction(4, 8, 2)
        (Fraction(3, 11), Fraction(3, 19))

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; for m < p the ticks of the circular pipeline.
    """
    ticks = num_ticks(num_stages, num_microbatches, num_repeats)
    return Fraction(ticks - num_repeats * num_microbatches, ticks)


def num_ticks(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> int:
    """Return the forward ticks of one pass: max(m, p) (v - 1) + m + p - 1.

    Example:
        >>> num_ticks(4, 8, 2)
        19
    """
    return max(num_microbatches, num_stages) * (num_repeats - 1) + num_microbatches + num_stages - 1
