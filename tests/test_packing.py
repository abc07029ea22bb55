"""Tests of rampup.packing."""

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError
from rampup.packing import (
    _arrange,
    _best_fit,
    _largest_first,
    _pack_onto_ladder,
    _tree_of_differences,
    balance,
    imbalance,
    make_ladder,
    pack,
)
from rampup.plan.numbers import MAX_COUNT

WORKLOAD = (24576, 1)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def lognormal(n, seed):
    """Return lengths with a long tail, between 16 and 16,384."""
    return [int(x) for x in np.clip(np.random.default_rng(seed).lognormal(7.3, 0.9, n), 16, 16384)]


def largest(lengths, parts, cost=(1, 0)):
    """Return what the most expensive part costs, in Python integers."""
    return max(sum(cost[0] * lengths[i] + cost[1] * lengths[i] ** 2 for i in part) for part in parts)


def least_largest(lengths, k, equal_count, cost):
    """Return the smallest possible largest cost over all partitions without an empty part."""
    low, high = (len(lengths) // k, -(-len(lengths) // k)) if equal_count else (1, len(lengths))
    best = None
    for labels in itertools.product(range(k), repeat=len(lengths)):
        counts = [labels.count(part) for part in range(k)]
        if min(counts) >= low and max(counts) <= high:
            value = largest(lengths, [[i for i, label in enumerate(labels) if label == part] for part in range(k)], cost)
            best = value if best is None else min(best, value)
    return best


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


def test_balance_is_nearly_optimal_on_tiny_inputs():
    """The optimum of an exhaustive search is reached in nearly all cases, and never missed by more than 5%."""
    missed = 0
    rng = random.Random(0)
    for _ in range(120):
        k = rng.randint(1, 4)
        lengths = [rng.choice([rng.randint(1, 9), rng.randint(1, 50)]) for _ in range(rng.randint(k, 7))]
        cost = rng.choice([(1, 0), (24, 1), (0, 1)])
        for equal_count in (False, True):
            parts = balance(lengths, k, cost, equal_count)
            optimum = least_largest(lengths, k, equal_count, cost)
            missed += largest(lengths, parts, cost) > optimum
            assert largest(lengths, parts, cost) <= 1.05 * optimum, (lengths, k, cost)
    assert missed <= 5


@given(lengths=LENGTHS, data=st.data(), equal_count=st.booleans(), cost=st.sampled_from(["tokens", WORKLOAD, (0, 3)]))
def test_balance_has_every_sequence_once(lengths, data, equal_count, cost):
    """No part is empty, every sequence appears once, equal counts differ by at most one, and a second run gives the same."""
    k = data.draw(st.integers(1, len(lengths)))
    parts = balance(lengths, k, cost, equal_count)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    counts = [len(part) for part in parts]
    assert len(parts) == k
    assert min(counts) >= 1
    assert not equal_count or max(counts) - min(counts) == (len(lengths) % k > 0)
    assert all(list(part) == sorted(part) for part in parts)
    assert balance(lengths, k, cost, equal_count) == parts


@given(lengths=LENGTHS, data=st.data())
def test_balance_stays_within_grahams_bound(lengths, data):
    """No part exceeds the mean by more than (1 - 1/k) of the longest sequence, nor is the largest below what any has."""
    k = data.draw(st.integers(1, len(lengths)))
    reached = largest(lengths, balance(lengths, k))
    assert reached >= max(-(-sum(lengths) // k), max(lengths))
    assert reached <= Fraction(sum(lengths), k) + Fraction(k - 1, k) * max(lengths)


def test_largest_first_makes_legal_parts():
    """No part is empty, and equal counts differ by at most one, for any number of items."""
    rng = random.Random(0)
    for _ in range(300):
        k = rng.randint(1, 9)
        costs = sorted((rng.randint(1, 1000) for _ in range(rng.randint(k, 60))), reverse=True)
        for equal_count in (False, True):
            counts = Counter(_largest_first(costs, k, equal_count))
            assert set(counts) == set(range(k))
            assert not equal_count or max(counts.values()) - min(counts.values()) == (len(costs) % k > 0)


def test_largest_first_stays_within_grahams_bound():
    """Its largest part costs at most 4/3 - 1/(3k) of the optimum."""
    rng = random.Random(1)
    for _ in range(60):
        k = rng.randint(1, 4)
        costs = sorted((rng.randint(1, 40) for _ in range(rng.randint(k, 7))), reverse=True)
        labels = _largest_first(costs, k, False)
        parts = [[i for i, label in enumerate(labels) if label == part] for part in range(k)]
        assert largest(costs, parts) <= (Fraction(4, 3) - Fraction(1, 3 * k)) * least_largest(costs, k, False, (1, 0))


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 100, 333])
def test_tree_of_differences_bounds_the_spread(rows, k):
    """Every part has one item of each row, and parts differ by at most the spread of the widest row."""
    rng = random.Random(rows)
    costs = np.array(sorted((rng.randint(1, 1000) for _ in range(rows * k - 1)), reverse=True))
    labels = _tree_of_differences(costs, k)
    assert all(sorted(row) == list(range(k)) for row in np.append(labels, -1).reshape(rows, k)[:-1])
    padded = np.append(costs, 0).reshape(rows, k)
    loads = [int(costs[labels == part].sum()) for part in range(k)]
    assert max(loads) - min(loads) <= int((padded[:, 0] - padded[:, -1]).max())


@pytest.mark.parametrize(("n", "k"), [(512, 32), (1024, 64), (128, 8)])
def test_balance_with_equal_counts_is_nearly_perfect(n, k):
    """With 16 skewed sequences per part, the most expensive part exceeds the mean by less than 0.01%."""
    for seed in range(3):
        lengths = lognormal(n, seed)
        parts = balance(lengths, k, WORKLOAD, equal_count=True)
        assert {len(part) for part in parts} == {n // k}
        assert imbalance(lengths, parts, WORKLOAD) < 1e-4


@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("cost", ["tokens", WORKLOAD])
@pytest.mark.parametrize("k", [8, 32])
def test_balance_reaches_the_lower_bound_on_large_inputs(k, cost, equal_count):
    """With hundreds of sequences per part, the most expensive part costs exactly the mean, rounded up."""
    lengths = lognormal(10_000, 3)
    coefficients = (1, 0) if cost == "tokens" else cost
    total = sum(coefficients[0] * x + coefficients[1] * x * x for x in lengths)
    assert largest(lengths, balance(lengths, k, cost, equal_count), coefficients) == -(-total // k)


def test_balance_with_equal_counts_if_k_does_not_divide():
    """Counts differ by one if k does not divide the number of sequences."""
    lengths = lognormal(10_007, 1)
    parts = balance(lengths, 32, WORKLOAD, equal_count=True)
    assert Counter(len(part) for part in parts) == {312: 32 - 10_007 % 32, 313: 10_007 % 32}
    assert imbalance(lengths, parts, WORKLOAD) < 1e-9


def test_balance_isolates_one_long_sequence():
    """A sequence that costs more than the mean is alone in its part, or with the fewest and shortest sequences allowed."""
    lengths = [1000] + [1] * 9 + [2] * 10
    assert (0,) in balance(lengths, 4)
    (part,) = (part for part in balance(lengths, 4, equal_count=True) if 0 in part)
    assert sorted(lengths[i] for i in part) == [1, 1, 1, 1, 1000]


@pytest.mark.parametrize("unit", [1, 10**6, 10**13, 10**15])
def test_balance_does_not_overflow(unit):
    """Costs beyond 64 bits are exact: scaled lengths are balanced as well as the lengths themselves."""
    rng = random.Random(1)
    lengths = [unit * rng.randint(1, 1000) for _ in range(9)]
    smallest = least_largest(lengths, 2, True, (0, 1))
    assert largest(lengths, balance(lengths, 2, (0, 1), equal_count=True), (0, 1)) == smallest
    many = [unit * rng.randint(1, 1000) for _ in range(300)]
    parts = balance(many, 4, WORKLOAD)
    assert sorted(itertools.chain(*parts)) == list(range(300))
    assert imbalance(many, parts, WORKLOAD) < 1e-3
    assert {len(part) for part in balance([MAX_COUNT] * 8, 4, WORKLOAD)} == {2}


def test_balance_cost_fractions_are_exact():
    """Coefficients may be fractions, decimals or text; only their ratio matters."""
    lengths = lognormal(200, 0)
    expected = balance(lengths, 7, (2, 1))
    assert balance(lengths, 7, (0.2, 0.1)) == balance(lengths, 7, ("2/3", Fraction(1, 3))) == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, object])
def test_lengths_may_be_arrays(dtype):
    """An integer array and a list of NumPy integers give the same result as a list."""
    lengths = [7, 3, 200, 50, 50, 9]
    array = np.array(lengths, dtype=dtype)
    assert balance(array, 2) == balance(list(array), 2) == balance(lengths, 2)
    assert pack(array, 200, (100, 200)) == pack(lengths, 200, (100, 200))


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
    for call in (lambda: balance(lengths, 1), lambda: pack(lengths, 10, [10]), lambda: imbalance(lengths, [[0]])):
        with pytest.raises(ConfigError, match="lengths") as caught:
            call()
        assert caught.value.key == "lengths"


def test_lengths_error_names_the_index():
    """The error gives the index, the value and the nearest legal one."""
    with pytest.raises(ConfigError, match=r"lengths\[2\]=-4 ") as caught:
        balance([3, 5, -4, 1], 2)
    assert caught.value.nearest == (1,)


@pytest.mark.parametrize(("k", "nearest"), [(0, (1,)), (-3, (1,)), (4, (3,)), (2.0, ()), (True, ()), ("2", ()), (None, ())])
def test_balance_rejects_bad_k(k, nearest):
    """The number of parts must be between 1 and the number of sequences."""
    with pytest.raises(ConfigError, match=r"k=.* between 1 and the number of sequences 3") as caught:
        balance([5, 5, 5], k)
    assert (caught.value.key, caught.value.nearest) == ("k", nearest)


@pytest.mark.parametrize(
    "cost", ["token", (0, 0), (-1, 2), (1, -2), (1,), (1, 2, 3), 5, None, (math.nan, 1), ("x", 1), (True, 1)]
)
def test_balance_rejects_bad_costs(cost):
    """A cost must be 'tokens' or two coefficients, none negative and one positive."""
    with pytest.raises(ValueError, match="cost") as caught:
        balance([5, 5, 5], 2, cost)
    assert caught.value.key == "cost"


@given(
    lengths=LENGTHS,
    slack=st.integers(0, 100),
    rungs=st.integers(1, 5),
    num_replicas=st.integers(1, 5),
    multiple_of=st.integers(1, 5),
)
def test_pack_invariants(lengths, slack, rungs, num_replicas, multiple_of):
    """The budget, one ladder shape per row, equal replicas, the multiple, and empty microbatches only if unavoidable."""
    budget = max(lengths) + slack
    packed = pack(lengths, budget, make_ladder(budget, min(rungs, budget)), num_replicas=num_replicas, multiple_of=multiple_of)
    assert len(packed.replicas) == packed.num_replicas == num_replicas
    assert {len(replica) for replica in packed.replicas} == {packed.num_microbatches}
    assert packed.num_microbatches % multiple_of == 0
    flat = [members for replica in packed.replicas for members in replica]
    assert sorted(itertools.chain(*flat)) == list(range(len(lengths)))
    assert packed.num_empty == max(len(flat) - len(lengths), 0) == flat.count(())
    for number, shape in enumerate(packed.microbatch_shapes):
        loads = [sum(lengths[i] for i in replica[number]) for replica in packed.replicas]
        assert shape == next(rung for rung in packed.ladder if rung >= max(loads))
    assert set(packed.shapes) <= set(packed.ladder)
    assert packed.ladder[-1] == packed.token_budget == budget
    assert packed.num_tokens == sum(lengths)
    assert packed.padded_tokens == num_replicas * sum(packed.microbatch_shapes)
    assert math.isclose(packed.padding_fraction * packed.padded_tokens, packed.padded_tokens - sum(lengths), abs_tol=1e-6)
    assert packed == pack(lengths, budget, packed.ladder, num_replicas=num_replicas, multiple_of=multiple_of)


def test_pack_finds_the_fewest_microbatches_on_tiny_inputs():
    """An exhaustive search finds no smaller number, and on several replicas the number is the next multiple."""
    rng = random.Random(2)
    for _ in range(150):
        budget = rng.randint(6, 20)
        lengths = [rng.randint(1, budget) for _ in range(rng.randint(1, 6))]
        fewest = fewest_microbatches(lengths, budget)
        assert pack(lengths, budget, [budget]).num_microbatches == fewest, (lengths, budget)
        spread = pack(lengths, budget, [budget], num_replicas=2, multiple_of=2)
        assert spread.num_microbatches == -(-fewest // 4) * 2


def test_pack_finds_what_best_fit_misses():
    """Best-fit decreasing needs a fifth microbatch here. Four are enough, without any padding."""
    lengths = [10, 10, 10, 9, 8, 6, 6, 6, 5, 4, 3, 3]
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    assert _best_fit(lengths, order, [20] * 4) is None
    packed = pack(lengths, 20, [20])
    assert (packed.microbatch_shapes, packed.padding_fraction) == ((20, 20, 20, 20), 0)


@pytest.mark.parametrize("seed", range(5))
def test_pack_pads_a_typical_batch_little(seed):
    """With 256 skewed sequences, 16,384 tokens and four shapes, less than 1% of the computed tokens is padding."""
    packed = pack(lognormal(256, seed), 16_384, make_ladder(16_384, 4))
    assert packed.padding_fraction < 0.01
    assert packed.num_microbatches == -(-packed.num_tokens // 16_384)


def test_pack_pads_many_sequences_hardly():
    """Enough short sequences fill the gaps, so padding is below 0.1%."""
    packed = pack(lognormal(5_000, 0), 16_384, make_ladder(16_384, 4))
    assert packed.padding_fraction < 0.001


def test_pack_uses_small_shapes_for_a_required_multiple():
    """If eight microbatches are required, the additional ones have small shapes."""
    packed = pack([10, 10, 10, 2, 2, 2, 2, 2], 10, (2, 5, 10), multiple_of=8)
    assert packed.microbatch_shapes == (10, 10, 10, 2, 2, 2, 2, 2)
    assert packed.padding_fraction == 0


def test_pack_marks_empty_microbatches():
    """With too few sequences, microbatches are empty tuples, and a row without sequences has the smallest shape."""
    packed = pack([7, 3], 8, (2, 4, 8), num_replicas=2, multiple_of=2)
    assert packed.replicas == (((0,), ()), ((1,), ()))
    assert (packed.microbatch_shapes, packed.num_empty) == ((8, 2), 2)
    assert packed.padded_tokens == 20
    assert packed.padding_fraction == 0.5


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
@pytest.mark.parametrize("key", ["token_budget", "num_replicas", "multiple_of"])
def test_pack_rejects_bad_counts(key, value):
    """Budget, replicas and multiple must be whole numbers of at least 1."""
    counts = {"token_budget": 10, "num_replicas": 1, "multiple_of": 1} | {key: value}
    with pytest.raises(ConfigError, match=key) as caught:
        pack([5, 5], ladder=[10], **counts)
    assert caught.value.key == key


def test_pack_limits_empty_microbatches():
    """A billion empty microbatches raise an error instead of exhausting memory."""
    with pytest.raises(ConfigError, match="at most 1,000,000 may be empty"):
        pack([5, 5], 10, [10], num_replicas=10**5, multiple_of=10**4)


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
    assert _arrange([9, 8, 2, 1], [[0, 3], [1, 2]], (5, 10), 3, 1).num_empty == 0


def test_arrange_gives_a_row_its_lowest_shape():
    """Microbatch j has the same shape on all replicas: the lowest for the fullest of them."""
    packed = _arrange([9, 2, 8, 1], [[0], [1], [2], [3]], (5, 10), 2, 2)
    assert packed.replicas == (((0,), (1,)), ((2,), (3,)))
    assert packed.microbatch_shapes == (10, 5)


def test_imbalance_is_exact():
    """The excess over the mean is computed in fractions, so a tiny one is not lost."""
    assert imbalance([2**59 + 1, 2**59], [(0,), (1,)]) == pytest.approx(2.0**-60, rel=1e-12)


def test_packed_microbatches_in_a_notebook():
    """The HTML table has the shape and the sequences of every microbatch."""
    page = _arrange([900, 200], [[0], [1]], (1000,), 1, 2)._repr_html_()
    assert ">1,000</td>" in page
    assert "1 sequence, 900 tokens" in page
