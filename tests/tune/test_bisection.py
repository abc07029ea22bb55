"""Tests of rampup.tune.bisection."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.tune.bisection import candidate_sizes, largest_within

ASCENDING = st.lists(st.integers(1, 10**6), unique=True, max_size=60).map(sorted)


@given(ASCENDING, st.lists(st.integers(0, 1000), min_size=60, max_size=60), st.integers(-10, 10**4), st.integers(0, 60))
def test_the_boundary_is_that_of_trying_all(sizes, rises, limit, refused_from):
    """Whatever the costs, as long as they do not fall: the largest size within the limit, and the next one, both tried."""
    costs, total = {}, 0
    for place, (size, rise) in enumerate(zip(sizes, rises, strict=False)):
        total += rise
        costs[size] = total if place < refused_from else math.inf
    found = largest_within(sizes, costs.__getitem__, limit)
    fitting = [size for size in sizes if costs[size] <= limit]
    too_large = [size for size in sizes if costs[size] > limit]
    assert found.largest == (fitting[-1] if fitting else None)
    assert found.next_larger == (too_large[0] if too_large else None)
    assert found.costs == {size: costs[size] for size in found.costs}
    assert {found.largest, found.next_larger} - {None} <= set(found.costs)


@pytest.mark.parametrize("cost", [lambda n: n, lambda n: n**3, lambda n: math.log(n), lambda n: math.inf if n > 77 else 1])
def test_few_trials_are_needed(cost):
    """No more than three times the binary logarithm, and nothing is tried twice."""
    tried = []

    def counted(size):
        tried.append(size)
        return cost(size)

    largest_within(range(1, 4097), counted, cost(77))
    assert len(tried) == len(set(tried)) <= 2 + 3 * 12


def test_candidates_are_legal_sizes_and_powers_of_two():
    """Within the bounds, each once, ascending; nothing where the bounds are empty."""
    assert candidate_sizes([6, 3, 12, 100], least=2, most=12) == (2, 3, 4, 6, 8, 12)
    assert candidate_sizes([1], least=2, most=1) == ()
