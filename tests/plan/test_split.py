"""Tests of rampup.plan.split."""

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rampup.errors import BatchDivisibilityError, ConfigError, PipelineShapeError, RampupError
from rampup.plan.split import BatchSplit, BatchSplitter


def shapes(splitter, sizes):
    """Return (passes, pipeline microbatches, microbatch size) of every batch."""
    return [(s.accumulation_steps, s.num_pipeline_microbatches, s.microbatch_size) for s in splitter.split(sizes)]


@pytest.mark.parametrize(
    ("keys", "sizes", "expected"),
    [
        # 4 devices on the data axis, 4 -> 12 by 2 per device.
        ({"data_parallel_size": 4}, [16, 24, 32, 40, 48], [(2, 1, 2), (3, 1, 2), (4, 1, 2), (5, 1, 2), (6, 1, 2)]),
        # G is never undone.
        ({"data_parallel_size": 4, "gradient_accumulation_steps": 2}, [16, 32], [(2, 1, 2), (4, 1, 2)]),
        # At least G passes, and no more than the batches need: 3 and 5 passes of 2, not 6 and 10 of 1.
        ({"data_parallel_size": 1, "gradient_accumulation_steps": 2}, [6, 10], [(3, 1, 2), (5, 1, 2)]),
        (
            {"data_parallel_size": 1, "gradient_accumulation_steps": 2, "num_stages": 2, "tick_overhead": Fraction(9)},
            [12, 20],
            [(1, 6, 2), (1, 10, 2)],
        ),
        # BLOOM on 16 devices.
        ({"data_parallel_size": 16}, [192, 208, 2048], [(12, 1, 1), (13, 1, 1), (128, 1, 1)]),
        # b given.
        ({"data_parallel_size": 4, "microbatch_size": 1}, [16, 24], [(4, 1, 1), (6, 1, 1)]),
        # per_phase is MaxText's behaviour.
        ({"data_parallel_size": 4, "rampup_microbatch": "per_phase"}, [16, 24], [(1, 1, 4), (1, 1, 6)]),
        (
            {"data_parallel_size": 2, "gradient_accumulation_steps": 3, "rampup_microbatch": "per_phase"},
            [12, 24],
            [(3, 1, 2), (3, 1, 4)],
        ),
        # auto: fixed while the ramp lasts, the largest after it.
        ({"data_parallel_size": 4, "rampup_microbatch": "auto"}, [16, 24, 48], [(2, 1, 2), (3, 1, 2), (1, 1, 12)]),
        ({"data_parallel_size": 4, "rampup_microbatch": "auto"}, [48], [(1, 1, 12)]),
        ({"data_parallel_size": 1, "rampup_microbatch": "auto", "microbatch_size": 2}, [4, 12], [(2, 1, 2), (1, 1, 12)]),
        # Pipeline, m automatic: one pass, m a multiple of the stages.
        ({"data_parallel_size": 2, "num_stages": 4}, [16, 24, 32], [(1, 8, 1), (1, 12, 1), (1, 16, 1)]),
        ({"data_parallel_size": 1, "num_stages": 2, "gradient_accumulation_steps": 2}, [8, 16], [(1, 4, 2), (1, 8, 2)]),
        # Pipeline, m given: the rest in passes.
        ({"data_parallel_size": 2, "num_stages": 2, "num_pipeline_microbatches": 4}, [16, 24], [(2, 4, 1), (3, 4, 1)]),
        (
            {"data_parallel_size": 1, "num_stages": 2, "num_pipeline_microbatches": 4, "rampup_microbatch": "per_phase"},
            [8, 16],
            [(1, 4, 2), (1, 4, 4)],
        ),
        # Delayed forwarding doubles the least m.
        ({"data_parallel_size": 1, "num_stages": 2, "delay_activation_forwarding": True}, [8], [(1, 4, 2)]),
    ],
)
def test_split_examples(keys, sizes, expected):
    """The split of every phase, case by case."""
    assert shapes(BatchSplitter(**keys), sizes) == expected


splitters = st.fixed_dictionaries(
    {
        "data_parallel_size": st.sampled_from([1, 2, 3, 4, 0]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 3, -1]),
        "num_stages": st.sampled_from([1, 1, 2, 4, 3]),
        "num_repeats": st.sampled_from([1, 1, 2, 0]),
        "num_pipeline_microbatches": st.sampled_from([-1, -1, 0, 1, 4, 8]),
        "rampup_microbatch": st.sampled_from(["fixed", "per_phase", "auto"]),
        "microbatch_size": st.sampled_from([-1, -1, 0, 1, 2, 3]),
    }
)


@given(splitters, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_split_invariants(keys, factors):
    """B = d*a*m*b in every phase, at least G passes of microbatches, and one shape if fixed; or an error with a key."""
    try:
        splitter = BatchSplitter(**keys)
    except RampupError as error:
        assert error.key
        return
    sizes = [splitter.smallest * splitter.unit // math.gcd(splitter.smallest, splitter.unit) * factor for factor in factors]
    splits = splitter.split(sizes)
    d, G = keys["data_parallel_size"], keys["gradient_accumulation_steps"]
    for size, split in zip(sizes, splits, strict=True):
        assert d * split.accumulation_steps * split.num_pipeline_microbatches * split.microbatch_size == size
        assert split.num_microbatches >= G
        if keys["num_stages"] > 1:
            assert split.num_pipeline_microbatches % keys["num_stages"] == 0
    if keys["rampup_microbatch"] == "fixed":
        assert len({split.microbatch_size for split in splits}) == 1
    if keys["rampup_microbatch"] == "auto":
        assert len({split.microbatch_size for split in splits}) <= 2


@given(splitters, st.integers(1, 500))
def test_nearest_sizes_are_legal_and_nearest(keys, size):
    """The sizes in an error are legal, and no legal size is nearer."""
    try:
        splitter = BatchSplitter(**keys)
    except RampupError:
        assume(False)
    if splitter.allows(size):
        assert splitter.problem(size, "here") is None
        return
    nearest = splitter.nearest(size)
    assert all(splitter.allows(other) for other in nearest)
    assert not any(splitter.allows(other) for other in range(size, nearest[-1]))
    below = nearest[0] if nearest[0] < size else 0
    assert not any(splitter.allows(other) for other in range(below + 1, size))
    problem = splitter.problem(size, "here")
    assert isinstance(problem, BatchDivisibilityError)
    assert problem.nearest == nearest
    splitter.split([nearest[0]])


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_legal_microbatches_is_complete(d, G, factors):
    """Exactly the listed microbatch sizes are accepted, and the largest of them is chosen."""
    sizes = [d * G * factor for factor in factors]
    legal = BatchSplitter(data_parallel_size=d, gradient_accumulation_steps=G).legal_microbatches(sizes)
    for size in range(1, max(sizes) + 2):
        splitter = BatchSplitter(data_parallel_size=d, gradient_accumulation_steps=G, microbatch_size=size)
        assert all(map(splitter.allows, sizes)) == (size in legal)
    automatic = BatchSplitter(data_parallel_size=d, gradient_accumulation_steps=G).split(sizes)
    assert {split.microbatch_size for split in automatic} == {legal[-1]}


def test_problem_message_has_rule_numbers_place_and_fix():
    """The message has the documented form; two illegal phases are two problems of one error."""
    problem = BatchSplitter(data_parallel_size=64, microbatch_size=8).problem(1000, "phase 2, from sample 250,000")
    assert str(problem) == (
        "global_batch_size=1000 (phase 2, from sample 250,000) must be a multiple of data_parallel_size * microbatch_size = "
        "64 * 8 = 512; nearest: 512, 1024"
    )
    assert (problem.value, problem.divisor, problem.nearest_below, problem.nearest_above) == (1000, 512, 512, 1024)
    with pytest.raises(BatchDivisibilityError, match="2 problems") as caught:
        BatchSplitter(data_parallel_size=4).split([6, 8, 10])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("keys", "error", "key"),
    [
        ({"data_parallel_size": 0}, ConfigError, "data_parallel_size"),
        ({"gradient_accumulation_steps": 0}, ConfigError, "gradient_accumulation_steps"),
        ({"microbatch_size": 0}, ConfigError, "microbatch_size"),
        ({"rampup_microbatch": "fixd"}, ConfigError, "rampup_microbatch"),
        ({"rampup_microbatch": "per_phase", "microbatch_size": 2}, ConfigError, "microbatch_size"),
        ({"num_pipeline_microbatches": 4}, PipelineShapeError, "num_pipeline_microbatches"),
        ({"num_pipeline_microbatches": 0, "num_stages": 4}, PipelineShapeError, "num_pipeline_microbatches"),
        ({"num_pipeline_microbatches": 6, "num_stages": 4}, PipelineShapeError, "num_pipeline_microbatches"),
        (
            {"num_pipeline_microbatches": 4, "num_stages": 4, "delay_activation_forwarding": True},
            PipelineShapeError,
            "num_pipeline_microbatches",
        ),
    ],
)
def test_splitter_rejects_impossible_rules(keys, error, key):
    """A splitter that could not split any batch is rejected, and the error has the key."""
    with pytest.raises(error) as caught:
        BatchSplitter(**({"data_parallel_size": 1} | keys))
    assert caught.value.key == key


def test_strict_multiple_can_be_disabled():
    """Without MaxText's rule any m is legal. With it, the error for m = 6 and 4 stages has 4 and 8."""
    with pytest.raises(PipelineShapeError, match="nearest: 4, 8") as caught:
        BatchSplitter(data_parallel_size=1, num_stages=4, num_pipeline_microbatches=6)
    assert caught.value.nearest == (4, 8)
    splitter = BatchSplitter(data_parallel_size=1, num_stages=4, num_pipeline_microbatches=6, strict_multiple=False)
    assert shapes(splitter, [12]) == [(1, 6, 2)]


def test_batch_split_checks_its_product():
    """Factors that do not multiply to B are rejected."""
    with pytest.raises(BatchDivisibilityError, match="global_batch_size=10 must be"):
        BatchSplit(
            global_batch_size=10, data_parallel_size=2, accumulation_steps=2, num_pipeline_microbatches=1, microbatch_size=2
        )
