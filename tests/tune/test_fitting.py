"""Tests of rampup.tune.fitting."""

import pytest

from rampup.plan.pipeline_cost import predicted_time
from rampup.plan.timetable import num_ticks
from rampup.tune.fitting import fit_line, fit_tick_overhead


def test_a_line_is_found():
    """Two points are enough; points at one place give the line through 0."""
    line = fit_line([(2, 10.0), (6, 18.0)])
    assert (line.start, line.slope, line.at(10)) == pytest.approx((6, 2, 26))
    line = fit_line([(4, 2.0), (4, 2.0)])
    assert (line.start, line.slope) == pytest.approx((0, 0.5))


@pytest.mark.parametrize("repeats", [1, 2, 4])
@pytest.mark.parametrize("overhead", [0, 0.25, 3])
def test_the_overhead_is_the_one_of_the_choosers_formula(repeats, overhead):
    """Times made by `predicted_time`, plus a constant for the optimizer, give the overhead back."""
    from fractions import Fraction

    stages, times = 4, {}
    for b in (1, 2, 8):
        times[b] = [
            (
                num_ticks(stages, m, repeats),
                0.5 + 0.01 * float(predicted_time(m, b, num_stages=stages, num_repeats=repeats, overhead=Fraction(overhead))),
            )
            for m in (4, 8, 16)
        ]
    assert fit_tick_overhead(times, num_repeats=repeats) == pytest.approx(overhead, abs=1e-6)


def test_what_cannot_be_fitted_is_not():
    """One size, one number of ticks, and times that fall give nothing; a negative overhead counts as none."""
    assert fit_tick_overhead({1: [(5, 1.0), (9, 2.0)]}, num_repeats=1) is None
    assert fit_tick_overhead({1: [(5, 1.0)], 2: [(5, 2.0)]}, num_repeats=1) is None
    assert fit_tick_overhead({1: [(5, 2.0), (9, 1.0)], 2: [(5, 2.0), (9, 3.0)]}, num_repeats=1) is None
    assert fit_tick_overhead({1: [(5, 2.0), (9, 3.0)], 2: [(5, 2.0), (9, 3.0)]}, num_repeats=1) is None
    assert fit_tick_overhead({2: [(1, 1.0), (2, 2.0)], 4: [(1, 3.0), (2, 6.0)]}, num_repeats=1) == 0
