"""Tests of rampup.plan.balancing."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from rampup.plan.balancing import differencing, largest_first, smallest_maximum


def loads(costs, labels, k):
    """Return what each part costs."""
    sums = [0] * k
    for cost, label in zip(costs, labels, strict=True):
        sums[label] += cost
    return sums


def optimum(costs, k, least=0, most=None):
    """Return the smallest largest cost by trying every partition."""
    allowed = range(least, (len(costs) if most is None else most) + 1)
    partitions = itertools.product(range(k), repeat=len(costs))
    return min(max(loads(costs, p, k)) for p in partitions if all(p.count(part) in allowed for part in range(k)))


def cases(seed, count=60):
    """Yield small inputs: costs in descending order, and parts."""
    rng = random.Random(seed)
    for _ in range(count):
        k = rng.randint(1, 4)
        yield sorted((rng.randint(1, 40) for _ in range(rng.randint(k, 7))), reverse=True), k


@pytest.mark.parametrize("start", [largest_first, differencing])
def test_starts_are_partitions(start):
    """No part stays empty, and equal counts differ by at most one, whatever the number of items."""
    rng = random.Random(0)
    for _ in range(300):
        k = rng.randint(1, 9)
        costs = sorted((rng.randint(1, 1000) for _ in range(rng.randint(k, 60))), reverse=True)
        for equal_count in (False, True):
            counts = Counter(start(costs, k, equal_count=equal_count))
            assert set(counts) == set(range(k))
            assert not equal_count or max(counts.values()) - min(counts.values()) == (len(costs) % k > 0)


def test_largest_first_keeps_grahams_bound():
    """Its largest part costs at most 4/3 - 1/(3k) of the optimum."""
    for costs, k in cases(1):
        reached = max(loads(costs, largest_first(costs, k, equal_count=False), k))
        assert reached <= (Fraction(4, 3) - Fraction(1, 3 * k)) * optimum(costs, k)


@pytest.mark.parametrize(
    ("costs", "k", "equal_count", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, False, [14, 16]),
        ([8, 7, 6, 5, 4], 3, False, [8, 11, 11]),
        ([5, 5, 4, 3, 3], 2, False, [9, 11]),
        ([10, 1, 1, 1, 1, 1], 2, True, [3, 12]),
    ],
)
def test_differencing_gives_the_published_parts(costs, k, equal_count, expected):
    """The examples of the literature and of veRL come out with the sums that their Karmarkar-Karp gives."""
    assert sorted(loads(costs, differencing(costs, k, equal_count=equal_count), k)) == expected


def test_smallest_maximum_is_the_optimum():
    """It agrees with trying every partition, with and without limits on the counts."""
    for costs, k in cases(2):
        n = len(costs)
        for least, most in ((0, None), (1, None), (n // k, -(-n // k))):
            labels = smallest_maximum(costs, k, below=sum(costs) + 1, least=least, most=most)
            assert max(loads(costs, labels, k)) == optimum(costs, k, least, most)
            assert min(labels.count(part) for part in range(k)) >= least


def test_smallest_maximum_below_the_optimum_is_none():
    """A limit at the optimum leaves nothing; one above it leaves the optimum."""
    for costs, k in cases(3, count=20):
        best = optimum(costs, k)
        assert smallest_maximum(costs, k, below=best) is None
        assert max(loads(costs, smallest_maximum(costs, k, below=best + 1), k)) == best


def test_smallest_maximum_stops_at_enough():
    """The first partition that is good enough is taken, though there are better ones."""
    assert smallest_maximum([4, 3, 2, 1], 2, below=11, enough=10) == [0, 0, 0, 0]
