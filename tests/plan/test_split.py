"""Tests of rampup.plan.split."""

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampupError,
)
from rampup.plan.nearest import batch_error, nearest_batches
from rampup.plan.split import BatchSplit, BatchSplitter

D, PASSES, SIZE = "data_parallel_size", "gradient_accumulation_steps", "microbatch_size"
STAGES, PIPED, MODE = "num_stages", "num_pipeline_microbatches", "rampup_microbatch"


def shapes(splitter, sizes):
    """Return (passes, pipeline microbatches, microbatch size) of every batch."""
    return [
        (s.accumulation_steps, s.num_pipeline_microbatches, s.microbatch_size)
        for s in splitter.split(sizes)
    ]


@pytest.mark.core
@pytest.mark.parametrize(
    ("keys", "sizes", "expected"),
    [
        # 4 devices on the data axis, 4 -> 12 by 2 per device.
        (
            {D: 4},
            [16, 24, 32, 40, 48],
            [(2, 1, 2), (3, 1, 2), (4, 1, 2), (5, 1, 2), (6, 1, 2)],
        ),
        # G is never undone.
        ({D: 4, PASSES: 2}, [16, 32], [(2, 1, 2), (4, 1, 2)]),
        # At least G passes, and no more than the batches need: 3 and 5 passes of 2, not
        # 6 and 10 of 1.
        ({D: 1, PASSES: 2}, [6, 10], [(3, 1, 2), (5, 1, 2)]),
        (
            {D: 1, PASSES: 2, STAGES: 2, "tick_overhead": Fraction(9)},
            [12, 20],
            [(1, 6, 2), (1, 10, 2)],
        ),
        # BLOOM on 16 devices.
        ({D: 16}, [192, 208, 2048], [(12, 1, 1), (13, 1, 1), (128, 1, 1)]),
        # b given.
        ({D: 4, SIZE: 1}, [16, 24], [(4, 1, 1), (6, 1, 1)]),
        # per_phase is MaxText's behaviour.
        ({D: 4, MODE: "per_phase"}, [16, 24], [(1, 1, 4), (1, 1, 6)]),
        ({D: 2, PASSES: 3, MODE: "per_phase"}, [12, 24], [(3, 1, 2), (3, 1, 4)]),
        # auto: fixed while the ramp lasts, the largest after it.
        ({D: 4, MODE: "auto"}, [16, 24, 48], [(2, 1, 2), (3, 1, 2), (1, 1, 12)]),
        ({D: 4, MODE: "auto"}, [48], [(1, 1, 12)]),
        ({D: 1, MODE: "auto", SIZE: 2}, [4, 12], [(2, 1, 2), (1, 1, 12)]),
        # Pipeline, m automatic: one pass, m a multiple of the stages.
        ({D: 2, STAGES: 4}, [16, 24, 32], [(1, 8, 1), (1, 12, 1), (1, 16, 1)]),
        ({D: 1, STAGES: 2, PASSES: 2}, [8, 16], [(1, 4, 2), (1, 8, 2)]),
        # Pipeline, m given: the rest in passes.
        ({D: 2, STAGES: 2, PIPED: 4}, [16, 24], [(2, 4, 1), (3, 4, 1)]),
        (
            {D: 1, STAGES: 2, PIPED: 4, MODE: "per_phase"},
            [8, 16],
            [(1, 4, 2), (1, 4, 4)],
        ),
        # Without MaxText's rule any m is legal.
        ({D: 1, STAGES: 4, PIPED: 6, "strict_multiple": False}, [12], [(1, 6, 2)]),
    ],
)
def test_split_examples(keys, sizes, expected):
    """The split of every phase, case by case."""
    assert shapes(BatchSplitter(**keys), sizes) == expected


splitters = st.fixed_dictionaries(
    {
        D: st.sampled_from([1, 2, 3, 4, 0]),
        PASSES: st.sampled_from([1, 2, 3, -1]),
        STAGES: st.sampled_from([1, 1, 2, 4, 3]),
        "num_repeats": st.sampled_from([1, 1, 2, 0]),
        PIPED: st.sampled_from([-1, -1, 0, 1, 4, 8]),
        MODE: st.sampled_from(["fixed", "per_phase", "auto"]),
        SIZE: st.sampled_from([-1, -1, 0, 1, 2, 3]),
    }
)


@pytest.mark.core
@given(splitters, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_split_invariants(keys, factors):
    """B = d*a*m*b in every phase, at least G passes of microbatches, and one shape if
    fixed; or an error with a key.
    """
    try:
        splitter = BatchSplitter(**keys)
    except RampupError as error:
        assert error.key
        return
    sizes = [
        splitter.smallest
        * splitter.unit
        // math.gcd(splitter.smallest, splitter.unit)
        * factor
        for factor in factors
    ]
    splits = splitter.split(sizes)
    for size, split in zip(sizes, splits, strict=True):
        assert (
            keys[D]
            * split.accumulation_steps
            * split.num_pipeline_microbatches
            * split.microbatch_size
            == size
        )
        assert split.num_microbatches >= keys[PASSES]
        assert keys[STAGES] == 1 or split.num_pipeline_microbatches % keys[STAGES] == 0
    assert (
        len({split.microbatch_size for split in splits})
        <= {"fixed": 1, "auto": 2, "per_phase": len(sizes)}[keys[MODE]]
    )


@pytest.mark.core
@given(splitters, st.integers(1, 500))
def test_nearest_sizes_are_legal_and_nearest(keys, size):
    """The sizes in an error are legal, and no legal size is nearer."""
    try:
        splitter = BatchSplitter(**keys)
    except RampupError:
        assume(False)
    if splitter.allows(size):
        return
    nearest = nearest_batches(splitter, size)
    assert all(splitter.allows(other) for other in nearest)
    assert not any(splitter.allows(other) for other in range(size, nearest[-1]))
    below = nearest[0] if nearest[0] < size else 0
    assert not any(splitter.allows(other) for other in range(below + 1, size))
    with pytest.raises(BatchDivisibilityError) as caught:
        splitter.split([size])
    assert caught.value.nearest == nearest
    splitter.split([nearest[0]])


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
)
def test_legal_microbatches_is_complete(d, G, factors):
    """Exactly the listed microbatch sizes are accepted, and the largest of them is
    chosen.
    """
    sizes = [d * G * factor for factor in factors]
    legal = BatchSplitter(
        data_parallel_size=d, gradient_accumulation_steps=G
    ).legal_microbatches(sizes)
    for size in range(1, max(sizes) + 2):
        splitter = BatchSplitter(
            data_parallel_size=d, gradient_accumulation_steps=G, microbatch_size=size
        )
        assert all(map(splitter.allows, sizes)) == (size in legal)
    automatic = BatchSplitter(
        data_parallel_size=d, gradient_accumulation_steps=G
    ).split(sizes)
    assert {split.microbatch_size for split in automatic} == {legal[-1]}


def test_problem_message_has_rule_numbers_place_and_fix():
    """The message has the documented form; two illegal phases are two problems of one
    error.
    """
    problem = batch_error(
        BatchSplitter(data_parallel_size=64, microbatch_size=8),
        1000,
        "phase 2, from sample 250,000",
    )
    assert (
        str(problem)
        == "global_batch_size=1000 (phase 2, from sample 250,000) must be a multiple of"
        " data_parallel_size * microbatch_size = 64 * 8 = 512; nearest: 512, 1024"
    )
    assert (
        problem.value,
        problem.divisor,
        problem.nearest_below,
        problem.nearest_above,
    ) == (1000, 512, 512, 1024)
    with pytest.raises(BatchDivisibilityError, match="2 problems") as caught:
        BatchSplitter(data_parallel_size=4).split([6, 8, 10])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("keys", "error", "key"),
    [
        ({D: 0}, ConfigError, D),
        ({PASSES: 0}, ConfigError, PASSES),
        ({SIZE: 0}, ConfigError, SIZE),
        ({MODE: "fixd"}, ConfigError, MODE),
        ({MODE: "per_phase", SIZE: 2}, ConfigError, SIZE),
        ({PIPED: 4}, PipelineShapeError, PIPED),
        ({PIPED: 0, STAGES: 4}, PipelineShapeError, PIPED),
        ({PIPED: 6, STAGES: 4}, PipelineShapeError, PIPED),
    ],
)
def test_splitter_rejects_impossible_rules(keys, error, key):
    """A splitter that could not split any batch is rejected with the key; instead of m
    = 6, 4 stages can have 4 or 8.
    """
    with pytest.raises(error) as caught:
        BatchSplitter(**({D: 1} | keys))
    assert caught.value.key == key
    assert keys.get(PIPED) != 6 or caught.value.nearest == (4, 8)


def test_batch_split_checks_its_product():
    """Factors that do not multiply to B are rejected."""
    with pytest.raises(BatchDivisibilityError, match="global_batch_size=10 must be"):
        BatchSplit(
            **{
                "global_batch_size": 10,
                D: 2,
                "accumulation_steps": 2,
                PIPED: 1,
                SIZE: 2,
            }
        )
