"""Tests of rampup.batch_size.scaling_laws."""

import pytest

from rampup.batch_size.scaling_laws import suggest_batch
from rampup.errors import RampupError


def test_laws_give_the_values_of_their_formulas():
    """Each law at 100B tokens and 2B parameters, by hand from its formula in tokens; some need no parameters."""
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
    whole, found = suggest_batch("100B", "2B"), suggest_batch("100B")
    sizes = {law["name"]: law["batch_tokens"] for law in whole["laws"]}
    assert sizes == {name: pytest.approx(value, abs=1) for name, value in expected.items()}
    # Without parameters, the laws that need none give the same numbers, and a note names the others.
    left_out = ["DeepSeek LLM", "Kaplan et al."]
    assert found["laws"] == [law for law in whole["laws"] if law["name"] not in left_out]
    assert ", ".join(left_out) in found["notes"][0]


@pytest.mark.parametrize(
    ("tokens", "params", "key"), [*((tokens, "1B", "train-tokens") for tokens in ("0", "x", "-5")), ("1B", "1.5", "params")]
)
def test_bad_numbers_are_refused(tokens, params, key):
    """The error names the option."""
    with pytest.raises(RampupError) as caught:
        suggest_batch(tokens, params)
    assert caught.value.key == key


@pytest.mark.parametrize(("tokens", "params"), [("1", "1"), (10**18, 10**18)])
def test_extreme_runs_give_numbers(tokens, params):
    """The laws extrapolate without failing."""
    assert all(law["batch_tokens"] >= 1 for law in suggest_batch(tokens, params)["laws"])
