"""Tests of rampup.plan.timetable."""

from fractions import Fraction

import pytest

from rampup.plan.timetable import bubble_fraction, num_ticks


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "ticks", "bubble"),
    [
        (1, 1, 1, 1, 0),
        (2, 2, 1, 3, Fraction(1, 3)),
        (4, 8, 1, 11, Fraction(3, 11)),
        (4, 3, 1, 6, Fraction(1, 2)),
        (4, 8, 2, 19, Fraction(3, 19)),
        (8, 16, 4, 71, Fraction(7, 71)),
        (4, 6, 2, 15, Fraction(1, 5)),
        (4, 3, 2, 10, Fraction(2, 5)),
        (4, 2, 2, 9, Fraction(5, 9)),
    ],
)
def test_closed_forms(stages, microbatches, repeats, ticks, bubble):
    """Ticks and bubble agree with the published tables, also with fewer microbatches than stages."""
    assert num_ticks(stages, microbatches, repeats) == ticks
    assert bubble_fraction(stages, microbatches, repeats) == bubble
