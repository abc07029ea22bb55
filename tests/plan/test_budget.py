"""Tests of rampup.plan.budget."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import RampDefinitionError
from rampup.plan.budget import TokenBudget
from rampup.plan.ramp import BatchRamp


def budget(schedule="0:8 80:16", tokens=2400, tokens_per_sample=10):
    """Return a small budget."""
    return TokenBudget(ramp=BatchRamp.from_schedule(schedule), tokens=tokens, tokens_per_sample=tokens_per_sample)


def counted(ramp, samples):
    """Return steps and samples of a ramp, stepped through until a number of samples is consumed."""
    steps = consumed = 0
    while consumed < samples:
        consumed += ramp.global_batch_size_at(steps)
        steps += 1
    return steps, consumed


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=4),
    st.integers(1, 40),
    st.integers(1, 4000),
    st.integers(1, 9),
)
def test_steps_agree_with_a_step_by_step_loop(gaps, first, tokens, length):
    """Steps, consumed tokens and steps by size agree with a loop that counts, and so do the steps at a constant batch size."""
    thresholds, pairs = 0, [(0, first)]
    for gap, size in gaps:
        thresholds += gap
        pairs.append((thresholds, size))
    ramp = BatchRamp.piecewise(pairs)
    spent = TokenBudget(ramp=ramp, tokens=tokens, tokens_per_sample=length)
    samples = -(-tokens // length)
    steps, consumed = counted(ramp, samples)
    assert (spent.steps, spent.consumed_tokens) == (steps, consumed * length)
    assert spent.steps_at_first == counted(BatchRamp.constant(ramp.sizes[0]), samples)[0]
    assert spent.steps_at_final == counted(BatchRamp.constant(ramp.sizes[-1]), samples)[0]
    assert sum(spent.steps_by_size.values()) == steps
    assert sum(size * number for size, number in spent.steps_by_size.items()) == consumed


def test_steps_are_between_those_of_first_and_last_batch():
    """A growing ramp needs fewer steps than its first batch size and more than its last."""
    facts = budget().to_dict()
    assert (facts["steps"], facts["steps_at_first"], facts["steps_at_final"]) == (20, 30, 15)
    assert (facts["fewer_steps_than_first"], facts["more_steps_than_final"]) == (10, 5)


def test_differences_are_negative_for_a_decreasing_batch():
    """With a decreasing batch size, the first size needs fewer steps and the last one more."""
    facts = budget("0:16 80:8").to_dict()
    assert (facts["fewer_steps_than_first"], facts["more_steps_than_final"]) == (-10, -5)


def test_budget_of_gpt3():
    """300 billion tokens with the ramp of GPT-3, 16 to 1,536 over 12 billion tokens of sequences of 2,048, counted by hand."""
    ramp = BatchRamp.linear(start=16, increment=16, end=1536, samples=5_859_375, carry_overshoot=True)
    spent = TokenBudget(ramp=ramp, tokens=300 * 10**9, tokens_per_sample=2048)
    assert spent.num_samples == 146_484_375
    assert spent.steps == 19_802 + -(-(146_484_375 - 5_859_424) // 1536)
    assert (spent.steps_at_first, spent.steps_at_final) == (9_155_274, 95_368)


@pytest.mark.parametrize("tokens", [1, 10, 11, 79, 80, 81, 10**18])
def test_budget_limits(tokens):
    """One token needs one step, and the largest budget is counted exactly."""
    spent = budget(tokens=tokens, tokens_per_sample=1)
    before = spent.ramp.samples_before(spent.steps - 1)
    assert before < tokens <= spent.consumed_tokens


@pytest.mark.parametrize("changed", [{"tokens": 0}, {"tokens": -5}, {"tokens": 10**18 + 1}, {"tokens_per_sample": 0}])
def test_budget_rejects_bad_numbers(changed):
    """Zero, negative and too large numbers are rejected."""
    with pytest.raises(RampDefinitionError, match="must be between 1 and") as caught:
        budget(**changed)
    assert caught.value.key == ("budget" if "tokens" in changed else "max_target_length")


def test_seconds_use_the_throughput_of_each_size():
    """Ten steps of 80 tokens at 100 per second and ten of 160 at 200. A size without a measurement uses the nearest one."""
    assert budget().seconds({8: Fraction(100), 16: Fraction(200)}) == 8 + 8
    assert budget().seconds({16: Fraction(200)}) == 4 + 8
    assert budget("0:8 80:16 200:64").seconds({8: Fraction(1), 50: Fraction(10)}) == 800 + 1280 + 64
