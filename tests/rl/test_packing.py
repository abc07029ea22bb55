"""Tests of rampup.rl.packing."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT
from rampup.rl.packing import _arrange, _best_fit, _pack_onto_ladder, make_ladder, pack

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def lognormal(n, seed):
    """Return lengths with a long tail, between 16 and 16,384."""
    return [int(x) for x in np.clip(np.random.default_rng(seed).lognormal(7.3, 0.9, n), 16, 16384)]


def fewest_microbatches(lengths, budget):
    """Return the smallest number of bins of a budget that hold all lengths."""
    for count in range(1, len(lengths) + 1):
        for labels in itertools.product(range(count), repeat=len(lengths)):
            loads = Counter()
            for label, length in zip(labels, lengths, strict=True):
                loads[label] += length
            if max(loads.values()) <= budget:
                return count
    raise AssertionError


BAD_LENGTHS = [
    [],
    [0],
    [3, -1],
    [1.0],
    [2.5],
    [True],
    [None],
    ["5"],
    [MAX_COUNT + 1],
    [10**30],
    "512",
    None,
    5,
    {3, 4},
    [[1, 2]],
]


@pytest.mark.parametrize(
    "lengths", [*BAD_LENGTHS, np.zeros(3), np.ones((2, 2), int), np.array([]), np.array([2**64 - 1])], ids=str
)
def test_lengths_rejects_bad_values(lengths):
    """Empty, zero, negative, fractional, huge, nested and non-numeric lengths raise an error that names them."""
    with pytest.raises(ConfigError, match="lengths") as caught:
        pack(lengths, 10, [10])
    assert caught.value.key == "lengths"


def test_lengths_error_names_the_index():
    """The error gives the index, the value and the nearest legal one."""
    with pytest.raises(ConfigError, match=r"lengths\[2\]=-4 ") as caught:
        pack([3, 5, -4, 1], 10, [10])
    assert caught.value.nearest == (1,)


@given(lengths=LENGTHS, slack=st.integers(0, 100), rungs=st.integers(1, 5), num_replicas=st.integers(1, 5))
def test_pack_invariants(lengths, slack, rungs, num_replicas):
    """The budget, one ladder shape per row, equal replicas, and empty microbatches only if unavoidable."""
    budget = max(lengths) + slack
    packed = pack(lengths, budget, make_ladder(budget, min(rungs, budget)), num_replicas=num_replicas)
    assert len(packed.replicas) == packed.num_replicas == num_replicas
    assert {len(replica) for replica in packed.replicas} == {packed.num_microbatches}
    flat = [members for replica in packed.replicas for members in replica]
    assert sorted(itertools.chain(*flat)) == list(range(len(lengths)))
    assert flat.count(()) == max(len(flat) - len(lengths), 0)
    for number, shape in enumerate(packed.microbatch_shapes):
        loads = [sum(lengths[i] for i in replica[number]) for replica in packed.replicas]
        assert shape == next(rung for rung in packed.ladder if rung >= max(loads))
    assert set(packed.shapes) <= set(packed.ladder)
    assert packed.ladder[-1] == packed.token_budget == budget
    assert packed.num_tokens == sum(lengths)
    assert packed.padded_tokens == num_replicas * sum(packed.microbatch_shapes)
    assert math.isclose(packed.padding_fraction * packed.padded_tokens, packed.padded_tokens - sum(lengths), abs_tol=1e-6)
    assert packed == pack(lengths, budget, packed.ladder, num_replicas=num_replicas)


def test_pack_finds_nearly_the_fewest_microbatches():
    """Compared with an exhaustive search, best-fit decreasing keeps Johnson's bound; on two replicas, the next multiple."""
    rng = random.Random(2)
    for _ in range(150):
        budget = rng.randint(6, 20)
        lengths = [rng.randint(1, budget) for _ in range(rng.randint(1, 6))]
        fewest, found = fewest_microbatches(lengths, budget), pack(lengths, budget, [budget]).num_microbatches
        assert fewest <= found <= (11 * fewest + 6) // 9, (lengths, budget)
        assert pack(lengths, budget, [budget], num_replicas=2).num_microbatches == -(-found // 2)


@pytest.mark.parametrize("seed", range(5))
def test_pack_pads_a_typical_batch_little(seed):
    """With 256 skewed sequences, 16,384 tokens and four shapes, less than 2% of the computed tokens is padding."""
    packed = pack(lognormal(256, seed), 16_384, make_ladder(16_384, 4))
    assert packed.padding_fraction < 0.02
    assert packed.num_microbatches == -(-packed.num_tokens // 16_384)


def test_pack_pads_many_sequences_hardly():
    """Enough short sequences fill the gaps, so padding is below 0.1%."""
    packed = pack(lognormal(5_000, 0), 16_384, make_ladder(16_384, 4))
    assert packed.padding_fraction < 0.001


def test_pack_marks_empty_microbatches():
    """With too few sequences, microbatches are empty tuples."""
    packed = pack([7, 3], 8, (2, 4, 8), num_replicas=3)
    assert packed.replicas == (((0,),), ((1,),), ((),))
    assert packed.microbatch_shapes == (8,)
    assert packed.padded_tokens == 24
    assert packed.padding_fraction == 1 - 10 / 24


def test_pack_names_a_sequence_over_the_budget():
    """A sequence over the budget raises an error with its index, its length and the smallest budget for it."""
    assert pack([5, 10, 3], 10, [10]).num_microbatches == 2
    with pytest.raises(ConfigError, match=r"lengths\[1\]=11 tokens \(and 1 more\) exceeds token_budget=10") as caught:
        pack([5, 11, 3, 12], 10, [10])
    assert (caught.value.key, caught.value.nearest) == ("token_budget", (12,))


@pytest.mark.parametrize(
    ("ladder", "rule"),
    [
        ([], "empty"),
        ([5, 9], "end at token_budget=10, not at 9"),
        ([5, 11], "end at token_budget=10, not at 11"),
        ([10, 5], "ascending"),
        ([5, 5, 10], "ascending"),
        ([0, 10], "at least 1 token"),
        ([-5, 10], "at least 1 token"),
        ([5.0, 10], r"ladder\[0\]"),
        ("10", "sequence"),
        (10, "sequence"),
    ],
)
def test_pack_rejects_bad_ladders(ladder, rule):
    """A ladder must ascend from at least one token to exactly the budget."""
    with pytest.raises(ConfigError, match=rule) as caught:
        pack([5, 5], 10, ladder)
    assert caught.value.key == "ladder"


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None, 10**19])
@pytest.mark.parametrize("key", ["token_budget", "num_replicas"])
def test_pack_rejects_bad_counts(key, value):
    """Budget and replicas must be whole numbers of at least 1."""
    counts = {"token_budget": 10, "num_replicas": 1} | {key: value}
    with pytest.raises(ConfigError, match=key) as caught:
        pack([5, 5], ladder=[10], **counts)
    assert caught.value.key == key


def test_pack_limits_empty_microbatches():
    """A billion empty microbatches raise an error instead of exhausting memory."""
    with pytest.raises(ConfigError, match="at most 1,000,000 may be empty"):
        pack([5, 5], 10, [10], num_replicas=10**9)


def test_make_ladder_is_even():
    """For every small budget and number of rungs, the shapes ascend to the budget in steps that differ by at most one."""
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
def test_make_ladder_rejects_impossible_numbers(budget, rungs, key):
    """Both numbers must be at least 1, with at most as many rungs as tokens."""
    with pytest.raises(ConfigError, match=key) as caught:
        make_ladder(budget, rungs)
    assert caught.value.key == key


def test_best_fit_uses_the_tightest_bin():
    """Each sequence goes into the bin with the least room for it, and None is returned if one fits nowhere."""
    assert _best_fit([5, 5], range(2), [9, 5, 5]) == [[], [0], [1]]
    assert _best_fit([5, 5], range(2), [9, 5]) == [[1], [0]]
    assert _best_fit([5, 5, 5], range(3), [9, 5]) is None


def test_pack_onto_ladder_places_everything():
    """Every sequence is in one bin, and no bin exceeds the largest shape."""
    rng = random.Random(0)
    ladder = (5, 10, 15, 20)
    for _ in range(200):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        bins = _pack_onto_ladder(lengths, order, ladder, len(lengths), 1)
        assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
        shapes = _arrange(lengths, bins, ladder, len(lengths), 1).microbatch_shapes
        assert sum(shapes) >= sum(lengths)
        assert all(sum(lengths[i] for i in members) <= 20 for members in bins)


def test_pack_onto_ladder_without_room():
    """Three sequences above half the budget do not fit into two microbatches."""
    for ladder in ((10,), (5, 10)):
        assert _pack_onto_ladder([6, 6, 6], [0, 1, 2], ladder, 2, 1) is None
        assert _pack_onto_ladder([6, 6, 6], [0, 1, 2], ladder, 3, 1) is not None


def test_arrange_divides_bins_before_it_leaves_one_empty():
    """Additional places get the shortest sequence of the fullest bin, until every bin has one sequence."""
    packed = _arrange([9, 8, 2, 1], [[0, 3], [1, 2]], (5, 10), 4, 1)
    assert packed.replicas == (((0,), (1,), (2,), (3,)),)
    assert packed.microbatch_shapes == (10, 10, 5, 5)
    assert all(_arrange([9, 8, 2, 1], [[0, 3], [1, 2]], (5, 10), 3, 1).replicas[0])


def test_arrange_gives_a_row_its_lowest_shape():
    """Microbatch j has the same shape on all replicas: the lowest for the fullest of them."""
    packed = _arrange([9, 2, 8, 1], [[0], [1], [2], [3]], (5, 10), 2, 2)
    assert packed.replicas == (((0,), (1,)), ((2,), (3,)))
    assert packed.microbatch_shapes == (10, 5)
