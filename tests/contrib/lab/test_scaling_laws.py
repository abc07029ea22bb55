"""Tests of rampup.contrib.lab.scaling_laws."""

import math

import numpy as np
import pytest

from rampup.contrib.lab.scaling_laws import suggest_batch
from rampup.errors import RampupError


def test_laws_give_the_values_of_their_formulas():
    """Each law at 100B tokens and 1B parameters, by hand from its formula in tokens;
    some need no parameters.
    """
    tokens, params = 1e11, 1e9
    loss = ((6.4e13 / params) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103
    expected = {
        "Power Lines, optimal": 0.0306 * tokens**0.383 * 2048,
        "Step Law": 0.58 * tokens**0.571,
        "DeepSeek LLM": 0.292 * (6 * params * tokens) ** 0.3271,
        "Power Lines, critical": 0.0471 * tokens**0.462 * 2048,
        "Zhang et al.": 22.91 * 100_000**0.47 * 512,
        "Kaplan et al.": 2e8 / loss ** (1 / 0.21),
    }
    whole, found = suggest_batch("100B", "1B"), suggest_batch("100B")
    sizes = {law["name"]: law["batch_tokens"] for law in whole["laws"]}
    assert sizes == {
        name: pytest.approx(value, abs=1) for name, value in expected.items()
    }
    steps = {
        law["name"]: law["steps"] for law in whole["laws"] if law["kind"] == "optimal"
    }
    assert steps == {name: math.ceil(tokens / sizes[name]) for name in steps}
    assert whole["critical_batch_tokens"] == [
        pytest.approx(0.2 * expected["Kaplan et al."], abs=1),
        pytest.approx(expected["Zhang et al."], abs=1),
    ]
    # Without parameters, the laws that need none give the same numbers, and a note
    # names the others.
    left_out = ["DeepSeek LLM", "Kaplan et al."]
    expected_laws = [{**law} for law in whole["laws"] if law["name"] not in left_out]
    assert [{**law} for law in found["laws"]] == [
        {key: value for key, value in law.items() if "learning_rate" not in key}
        for law in expected_laws
    ]
    assert ", ".join(left_out) in found["notes"][0]


def test_critical_laws_agree_on_one_definition():
    """At 20% more tokens, Power Lines and Zhang et al. agree within 17%, where their
    own batches differ by a factor of four.
    """
    for tokens, params, own in (
        ("20B", "1B", 4.5),
        ("300B", "7B", 4.4),
        ("15T", "70B", 4.3),
    ):
        laws = {law["name"]: law for law in suggest_batch(tokens, params)["laws"]}
        lines, zhang = laws["Power Lines, critical"], laws["Zhang et al."]
        assert lines["batch_tokens"] / zhang["batch_tokens"] == pytest.approx(
            own, abs=0.1
        )
        assert lines["batch_tokens_at_overhead"]["20%"] / zhang[
            "batch_tokens_at_overhead"
        ]["20%"] == pytest.approx(1, abs=0.17)
        # Twice the tokens in steps of the batch that doubles them.
        steps, size = (
            lines["steps_at_overhead"]["100%"],
            lines["batch_tokens_at_overhead"]["100%"],
        )
        assert steps == pytest.approx(
            2 * suggest_batch(tokens)["train_tokens"] / size, abs=1
        )


def test_rates_stand_beside_the_batches():
    """Step Law and DeepSeek have a rate, by hand at 3B tokens and 0.1B parameters."""
    found = suggest_batch("3B", "0.1B")
    rates = {
        law["name"]: law["learning_rate"]
        for law in found["laws"]
        if "learning_rate" in law
    }
    assert rates == {
        "Step Law": pytest.approx(2.88e-3, rel=0.01),
        "DeepSeek LLM": pytest.approx(1.63e-3, rel=0.01),
    }
    assert not any("learning_rate" in law for law in suggest_batch("3B")["laws"])


def test_a_law_is_silent_outside_of_the_runs_that_it_was_fitted_to():
    """There it says of what it is outside, and gives no rate."""
    inside = {law["name"]: law for law in suggest_batch("20B", "1B")["laws"]}
    assert inside["Step Law"]["outside"] is None
    assert inside["Step Law"]["learning_rate"] > 0
    # A compute of 1.2e20 is above the 2e19 of DeepSeek's runs.
    assert inside["DeepSeek LLM"]["outside"] == "outside of 1e+17 to 2e+19 FLOPs"
    assert "learning_rate" not in inside["DeepSeek LLM"]
    for tokens, params, outside in (
        ("20B", "8B", "outside of 60M to 1B parameters"),
        ("1000", "100M", "outside of 2B to 100B tokens"),
        ("1000", "10", "outside of 60M to 1B parameters and 2B to 100B tokens"),
    ):
        found = suggest_batch(tokens, params)["laws"]
        (law,) = (law for law in found if law["name"] == "Step Law")
        assert law["outside"] == outside
        assert not any("learning_rate" in law for law in found)


@pytest.mark.parametrize(
    ("tokens", "params"), [("20B", "1B"), ("15T", "8B"), ("300B", None)]
)
def test_the_median_of_the_critical_laws_is_recommended(tokens, params):
    """It is between the ends of the range, and no single old law decides it."""
    found = suggest_batch(tokens, params)
    sizes = [
        law["batch_tokens_at_overhead"]["20%"]
        for law in found["laws"]
        if law["kind"] == "critical"
    ]
    assert found["recommended_batch_tokens"] == round(np.median(sizes))
    assert found["critical_batch_tokens"] == [min(sizes), max(sizes)]


@pytest.mark.parametrize(
    ("tokens", "params", "key"),
    [
        *((tokens, "1B", "train-tokens") for tokens in ("0", "x", "-5")),
        ("1B", "1.5", "params"),
    ],
)
def test_bad_numbers_are_refused(tokens, params, key):
    """The error names the option."""
    with pytest.raises(RampupError) as caught:
        suggest_batch(tokens, params)
    assert caught.value.key == key


@pytest.mark.parametrize(("tokens", "params"), [("1", "1"), (10**18, 10**18)])
def test_extreme_runs_give_numbers(tokens, params):
    """The laws extrapolate without failing."""
    assert all(
        law["batch_tokens"] >= 1 for law in suggest_batch(tokens, params)["laws"]
    )
