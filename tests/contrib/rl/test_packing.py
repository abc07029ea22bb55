"""Tests of rampup.contrib.rl.packing."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.contrib.rl.packing import make_ladder, pack
from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def fewest_microbatches(lengths, budget):
    """Return the smallest number of bins of a budget that hold all lengths."""

    def fits(count):
        return any(
            max(np.bincount(bins, lengths)) <= budget
            for bins in itertools.product(range(count), repeat=len(lengths))
        )

    return next(filter(fits, itertools.count(1)))


BAD_LENGTHS = [
    [],
    [0],
    [3, -1],
    [1.0],
    [True],
    [None],
    ["5"],
    [MAX_COUNT + 1],
    "512",
    None,
    {3, 4},
    [[1, 2]],
]


@pytest.mark.parametrize(
    "lengths",
    [*BAD_LENGTHS, np.zeros(3), np.ones((2, 2), int), np.array([2**64 - 1])],
    ids=str,
)
def test_lengths_rejects_bad_values(lengths):
    """Empty, zero, negative, fractional, huge, nested and non-numeric lengths raise an
    error that names them.
    """
    with pytest.raises(ConfigError, match="lengths") as caught:
        pack(lengths, 10, [10])
    assert caught.value.key == "lengths"


@given(
    lengths=LENGTHS,
    slack=st.integers(0, 100),
    rungs=st.integers(1, 5),
    num_replicas=st.integers(1, 5),
)
def test_pack_invariants(lengths, slack, rungs, num_replicas):
    """The budget, one ladder shape per row, equal replicas, and empty microbatches only
    if unavoidable.
    """
    budget = max(lengths) + slack
    packed = pack(
        lengths,
        budget,
        make_ladder(budget, min(rungs, budget)),
        num_replicas=num_replicas,
    )
    assert len(packed.replicas) == num_replicas
    assert {len(replica) for replica in packed.replicas} == {packed.num_microbatches}
    flat = [members for replica in packed.replicas for members in replica]
    assert sorted(itertools.chain(*flat)) == list(range(len(lengths)))
    assert flat.count(()) == max(len(flat) - len(lengths), 0)
    for number, shape in enumerate(packed.microbatch_shapes):
        loads = [
            sum(lengths[i] for i in replica[number]) for replica in packed.replicas
        ]
        assert shape == next(rung for rung in packed.ladder if rung >= max(loads))
    assert set(packed.shapes) <= set(packed.ladder)
    assert packed.ladder[-1] == packed.token_budget == budget
    assert packed.padded_tokens == num_replicas * sum(packed.microbatch_shapes)
    assert math.isclose(
        packed.padding_fraction * packed.padded_tokens,
        packed.padded_tokens - sum(lengths),
        abs_tol=1e-6,
    )
    assert packed == pack(lengths, budget, packed.ladder, num_replicas=num_replicas)


def test_pack_finds_nearly_the_fewest_microbatches():
    """Compared with an exhaustive search, best-fit decreasing keeps Johnson's bound; on
    two replicas, the next multiple.
    """
    rng = random.Random(2)
    for _ in range(150):
        budget = rng.randint(6, 20)
        lengths = [rng.randint(1, budget) for _ in range(rng.randint(1, 6))]
        fewest, found = (
            fewest_microbatches(lengths, budget),
            pack(lengths, budget, [budget]).num_microbatches,
        )
        assert fewest <= found <= (11 * fewest + 6) // 9, (lengths, budget)
        assert pack(lengths, budget, [budget], num_replicas=2).num_microbatches == -(
            -found // 2
        )


@pytest.mark.parametrize("seed", range(5))
def test_pack_pads_a_typical_batch_little(seed):
    """With 256 skewed sequences, 16,384 tokens and four shapes, less than 2% of the
    computed tokens is padding.
    """
    lengths = np.clip(
        np.random.default_rng(seed).lognormal(7.3, 0.9, 256), 16, 16384
    ).astype(int)
    packed = pack(lengths, 16_384, make_ladder(16_384, 4))
    assert packed.padding_fraction < 0.02
    assert packed.num_microbatches == -(-sum(packed.lengths) // 16_384)


@pytest.mark.parametrize(
    ("call", "key", "rule"),
    [
        (lambda: pack([5, 5], 10, []), "ladder", "empty"),
        (
            lambda: pack([5, 5], 10, [5, 9]),
            "ladder",
            "end at token_budget=10, not at 9",
        ),
        (lambda: pack([5, 5], 10, [10, 5]), "ladder", "ascending"),
        (lambda: pack([5, 5], 10, [0, 10]), "ladder", "at least 1 token"),
        (lambda: pack([5, 5], 10, [5.0, 10]), "ladder", r"ladder\[0\]"),
        (lambda: pack([5, 5], 10, 10), "ladder", "sequence"),
        (
            lambda: pack([5, 11, 3, 12], 10, [10]),
            "token_budget",
            r"lengths\[1\]=11 tokens \(and 1 more\) .*token_budget: 12,",
        ),
        (lambda: pack([5, 5], 0, [10]), "token_budget", "between 1 and"),
        (
            lambda: pack([5, 5], 10, [10], num_replicas=1.0),
            "num_replicas",
            "whole number",
        ),
        # A billion empty microbatches would exhaust memory.
        (
            lambda: pack([5, 5], 10, [10], num_replicas=10**9),
            "num_replicas",
            "may be empty",
        ),
        (lambda: make_ladder(8.0, 2), "token_budget", "whole number"),
        (lambda: make_ladder(3, 4), "rungs", "token_budget 3"),
    ],
)
def test_bad_ladders_and_counts_are_refused(call, key, rule):
    """A ladder ascends from a token or more to exactly the budget, with at most as many
    rungs as tokens; counts are whole.
    """
    with pytest.raises(ConfigError, match=rule) as caught:
        call()
    assert caught.value.key == key
    assert key in str(caught.value)


def test_make_ladder_is_even():
    """For every small budget and number of rungs, the shapes ascend to the budget in
    steps that differ by at most one.
    """
    for budget in range(1, 40):
        for rungs in range(1, budget + 1):
            ladder = make_ladder(budget, rungs)
            steps = np.diff([0, *ladder])
            assert (len(ladder), ladder[-1]) == (rungs, budget)
            assert min(steps) >= max(1, max(steps) - 1)
