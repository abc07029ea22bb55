"""Tests of rampup.plan.scaling_laws."""

import pytest

from rampup.errors import RampupError
from rampup.plan.scaling_laws import LAWS, suggest_batch


def test_laws_give_the_values_of_their_formulas():
    """Each law at 100B tokens and 2B parameters, computed by hand from its published formula, in tokens."""
    tokens, params = 1e11, 2e9
    loss = ((6.4e13 / params) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103
    expected = {
        "Power Lines, optimal": 0.0306 * tokens**0.383 * 2048,
        "Step Law": 0.58 * tokens**0.571,
        "DeepSeek LLM": 0.292 * (6 * params * tokens) ** 0.3271,
        "nanochat": 524288 * (tokens / 1.321210944e9) ** 0.383,
        "Power Lines, critical": 0.0471 * tokens**0.462 * 2048,
        "Zhang et al.": 22.91 * 100_000**0.47 * 512,
        "Kaplan et al.": 2e8 / loss ** (1 / 0.21),
    }
    found = suggest_batch("100B", "2B")
    assert {law.name: found.batch_tokens(law) for law in LAWS} == {
        name: pytest.approx(value, abs=1) for name, value in expected.items()
    }
    assert all(law.source and law.formula for law in LAWS)
    assert found.range_of("optimal")[0] < found.range_of("critical")[0]


@pytest.mark.parametrize(
    ("tokens", "params", "key"),
    [("0", "1B", "train-tokens"), ("x", "1B", "train-tokens"), ("-5", "1B", "train-tokens"), ("1B", "1.5", "params")],
)
def test_bad_numbers_are_refused(tokens, params, key):
    """The error names the option."""
    with pytest.raises(RampupError) as caught:
        suggest_batch(tokens, params)
    assert caught.value.key == key


@pytest.mark.parametrize(("tokens", "params"), [("1", "1"), (10**18, 10**18)])
def test_extreme_runs_give_numbers(tokens, params):
    """The laws extrapolate without failing."""
    found = suggest_batch(tokens, params)
    assert all(found.batch_tokens(law) >= 1 and found.steps(law) >= 1 for law in LAWS)
