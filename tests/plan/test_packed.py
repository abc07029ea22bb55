"""Tests of rampup.plan.packed."""

import itertools
import random

import pytest

from rampup.errors import ConfigError
from rampup.plan.packed import arrange, best_fit, fitting_first, imbalance, make_ladder


def test_ladders_are_even_and_end_at_the_budget():
    """For every small budget and number of rungs the shapes ascend, end at the budget, and lie at most one token off even."""
    for budget, rungs in itertools.product(range(1, 40), range(1, 40)):
        if rungs <= budget:
            ladder = make_ladder(budget, rungs)
            steps = [high - low for low, high in itertools.pairwise((0, *ladder))]
            assert len(ladder) == rungs
            assert ladder[-1] == budget
            assert min(steps) >= 1
            assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize(
    ("budget", "rungs", "key"), [(0, 1, "token_budget"), (8, 0, "rungs"), (3, 4, "rungs"), (8.0, 2, "token_budget")]
)
def test_impossible_ladders_are_refused(budget, rungs, key):
    """Neither number may be below 1, and there are at most as many rungs as tokens."""
    with pytest.raises(ConfigError, match=key) as caught:
        make_ladder(budget, rungs)
    assert caught.value.key == key


def test_best_fit_takes_the_tightest_bin():
    """Each sequence goes where it leaves least room, the first of equal bins; None once one fits nowhere."""
    assert best_fit([5, 5], range(2), [9, 5, 5]) == [[], [0], [1]]
    assert best_fit([5, 5], range(2), [9, 5]) == [[1], [0]]
    assert best_fit([5, 5, 5], range(3), [9, 5]) is None


def test_fitting_first_needs_little():
    """It finds the cheapest of its plans: one that the next cheaper shapes could not hold."""
    rng = random.Random(0)
    ladder = (5, 10, 15, 20)
    for _ in range(200):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        bins = fitting_first(lengths, order, ladder, len(lengths), 1)
        assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
        shapes = arrange(lengths, bins, ladder, len(lengths), 1).microbatch_shapes
        assert sum(shapes) >= sum(lengths)
        assert all(sum(lengths[i] for i in members) <= 20 for members in bins)


def test_fitting_first_without_room_is_none():
    """Three sequences over half the budget do not fit into two microbatches, on any ladder."""
    for ladder in ((10,), (5, 10)):
        assert fitting_first([6, 6, 6], [0, 1, 2], ladder, 2, 1) is None
        assert fitting_first([6, 6, 6], [0, 1, 2], ladder, 3, 1) is not None


def test_arrange_splits_before_it_leaves_a_microbatch_empty():
    """Surplus places take the shortest sequence of the fullest bin, until every bin holds one."""
    packed = arrange([9, 8, 2, 1], [[0, 3], [1, 2]], (5, 10), 4, 1)
    assert packed.replicas == (((0,), (1,), (2,), (3,)),)
    assert packed.microbatch_shapes == (10, 10, 5, 5)
    assert arrange([9, 8, 2, 1], [[0, 3], [1, 2]], (5, 10), 3, 1).num_empty == 0


def test_neighbours_in_size_share_a_shape():
    """Microbatch j has one shape on all replicas, the lowest that holds the fullest of them."""
    packed = arrange([9, 2, 8, 1], [[0], [1], [2], [3]], (5, 10), 2, 2)
    assert packed.replicas == (((0,), (1,)), ((2,), (3,)))
    assert packed.microbatch_shapes == (10, 5)


def test_imbalance_is_exact():
    """The excess over the mean is computed in fractions, also where a float would lose it."""
    assert imbalance([2**59 + 1, 2**59], [(0,), (1,)]) == pytest.approx(2.0**-60, rel=1e-12)


def test_a_packing_shows_itself():
    """The notebook's table names every microbatch, its shape and what it holds."""
    page = arrange([900, 200], [[0], [1]], (1000,), 1, 2)._repr_html_()
    assert ">1,000</td>" in page
    assert "1 sequence, 900 tokens" in page
