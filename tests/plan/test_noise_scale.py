"""Tests of rampup.plan.noise_scale."""

import json
import math

import numpy as np
import pytest

from rampup.errors import ConfigError
from rampup.plan.noise_scale import NoiseScale, measured_noise, noise_trace

# Gaussian linear regression with a known noise scale: loss (x'theta - y)^2 / 2 at a
# fixed distance from the optimum.
H, DELTA, S2 = (
    np.array([1, 0.8, 0.5, 0.3, 0.2, 0.1]),
    np.random.default_rng(5).normal(size=6) * 0.7,
    0.25,
)
SQUARED_NORM = np.sum((H * DELTA) ** 2)
# Sigma = H delta delta' H + (delta' H delta + s2) H.
TRACE = SQUARED_NORM + (DELTA @ (H * DELTA) + S2) * H.sum()


def blocks(rng, weights_TJ):
    """Return the gradient sum of each block (T, J, N) of the regression for the numbers
    of tokens of the blocks.
    """
    number = weights_TJ.sum()
    x = rng.normal(size=(number, len(H))) * np.sqrt(H)
    error = x @ DELTA + math.sqrt(S2) * rng.normal(size=number)
    starts = np.concatenate([[0], np.cumsum(weights_TJ.ravel())[:-1]])
    return np.add.reduceat(x * error[:, None], starts).reshape(*weights_TJ.shape, -1)


def per_step(sums_TJN, weights_TJ):
    """Return W, S and G2 of every step."""
    totals_T = weights_TJ.sum(1).astype(float)
    squares_T = ((sums_TJN**2).sum(2) / weights_TJ).sum(1)
    norms_T = ((sums_TJN.sum(1) / totals_T[:, None]) ** 2).sum(1)
    return totals_T, *noise_trace(squares_T, totals_T, norms_T, weights_TJ.shape[1])


def test_noise_scale_of_linear_regression_in_closed_form():
    """S, G2 and their ratio are within 2% for weights 1 to 8; the estimate that counts
    blocks equally is off by over 30%.
    """
    rng, steps, J = np.random.default_rng(1), 20_000, 8
    weights = rng.choice([1, 8], p=[0.8, 0.2], size=(steps, J))
    sums = blocks(rng, weights)
    totals, trace, squared_norm = per_step(sums, weights)
    noise = NoiseScale(half_life_samples=1e12)
    for w, s, g in zip(totals, trace, squared_norm, strict=True):
        noise.update(samples=J, weight=w, trace=s, squared_norm=g)
    assert noise.trace == pytest.approx(TRACE, rel=0.02)
    assert noise.squared_norm == pytest.approx(SQUARED_NORM, rel=0.02)
    assert noise.tokens.value == pytest.approx(TRACE / SQUARED_NORM, rel=0.02)
    # McCandlish's pair with the mean weight as the small batch and the mean of the
    # block means as the large gradient.
    small, big = weights.mean(), weights.mean() * J
    means = sums / weights[:, :, None]
    norm_small, norm_big = (means**2).sum(2).mean(), (means.mean(1) ** 2).sum(1).mean()
    textbook = ((norm_small - norm_big) / (1 / small - 1 / big)) / (
        (big * norm_big - small * norm_small) / (big - small)
    )
    assert textbook / (TRACE / SQUARED_NORM) > 1.3


@pytest.mark.parametrize(
    ("tokens", "half_life"),
    [((1, 9), 2_500), pytest.param((10, 20), 8_000, marks=pytest.mark.slow)],
)
def test_noise_scale_interval_covers_the_truth(tokens, half_life):
    """The 90% interval has the truth in 87 to 93% of 500 runs, with blocks of few
    tokens and of many.
    """
    rng, runs, steps, J = np.random.default_rng(3), 500, 100, 8
    weights = rng.integers(*tokens, size=(runs * steps, J))
    totals, trace, squared_norm = (
        x.reshape(runs, steps) for x in per_step(blocks(rng, weights), weights)
    )
    truth, covered = TRACE / SQUARED_NORM, 0
    for run in range(runs):
        noise = NoiseScale(half_life_samples=half_life)
        for w, s, g in zip(totals[run], trace[run], squared_norm[run], strict=True):
            noise.update(samples=int(w), weight=w, trace=s, squared_norm=g)
        found = noise.tokens
        covered += found.low <= truth and (found.high is None or truth <= found.high)
    assert 0.87 <= covered / runs <= 0.93


FLAT, SKEWED = np.ones(50), 1 / np.arange(1, 51)


@pytest.mark.parametrize(
    ("spectrum", "schedule"),
    [
        (FLAT, [(2, 60), (16, 30)]),
        pytest.param(FLAT, [(2, 60), (64, 6)], marks=pytest.mark.slow),
        pytest.param(SKEWED, [(2, 60), (16, 30)], marks=pytest.mark.slow),
        (SKEWED, [(2, 60), (8, 30), (32, 10)]),
    ],
    ids=["flat, 8 times", "flat, 32 times", "skewed, 8 times", "skewed, 4 times twice"],
)
def test_noise_scale_interval_covers_the_truth_while_the_batch_grows(
    spectrum, schedule
):
    """The 90% interval has the truth in 87 to 95% of 900 runs of each schedule, and in
    86 to 96% of 300 at each noise scale.
    """
    runs, m, found = 300, 4, []
    for truth in (8, 32, 128):
        rng = np.random.default_rng(0)
        mean = rng.standard_normal(len(spectrum))
        mean *= math.sqrt(spectrum.sum() / truth) / np.linalg.norm(mean)
        noises = [NoiseScale(half_life_samples=1200) for _ in range(runs)]
        for J, steps in schedule:
            # S and the mean gradient of J Gaussian blocks of m samples.
            W, shape = J * m, (steps, runs, len(spectrum))
            gradient = mean + np.sqrt(spectrum / W) * rng.standard_normal(shape)
            trace = 2 * (rng.standard_gamma((J - 1) / 2, shape) @ spectrum) / (J - 1)
            squared_norm = (gradient**2).sum(2) - trace / W
            for s, g in zip(trace.tolist(), squared_norm.tolist(), strict=True):
                for noise, *values in zip(noises, s, g, strict=True):
                    noise.update(
                        samples=W,
                        weight=float(W),
                        trace=values[0],
                        squared_norm=values[1],
                    )
        ends = [
            (noise.in_samples.low, noise.in_samples.high or math.inf)
            for noise in noises
        ]
        found.append(np.mean([low <= truth <= high for low, high in ends]))
    assert 0.86 <= min(found) <= max(found) <= 0.96, found
    assert 0.87 <= np.mean(found) <= 0.95, found


def test_noise_scale_says_at_least_if_the_gradient_cannot_be_told_from_zero():
    """Without a gradient there is no upper end, and the lower end is below the truth of
    a small gradient nine times in ten.
    """
    rng = np.random.default_rng(0)
    below = 0
    for _ in range(200):
        noise = NoiseScale(half_life_samples=1e9)
        for _ in range(50):
            noise.update(
                samples=8,
                weight=8.0,
                trace=10 + rng.normal(),
                squared_norm=0.01 + 0.2 * rng.normal(),
            )
        found = noise.tokens
        below += found.low <= 1000
        assert (found.value is None) == (found.high is None)
        assert found.low >= 0
    assert below >= 180
    assert str(found).startswith("at least")


@pytest.mark.parametrize("size", [1, 10, 50])
def test_noise_scale_counts_a_half_life_in_samples(size):
    """After one half-life a step counts half, however many steps that were; there is no
    interval of few steps.
    """
    noise = NoiseScale(half_life_samples=100)
    noise.update(samples=size, weight=1.0, trace=1.0, squared_norm=1.0)
    assert str(noise.tokens) == "not known yet"
    for _ in range(100 // size):
        noise.update(samples=size, weight=0.0, trace=math.nan, squared_norm=math.nan)
    assert (noise.total, noise.trace, noise.squared_norm) == (
        pytest.approx(0.5, rel=1e-12),
        1.0,
        1.0,
    )
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(ConfigError, match="positive"):
            NoiseScale(half_life_samples=wrong)


def test_noise_scale_leaves_steps_out_that_are_not_finite():
    """Infinite values, NaN and steps without weight change no average."""
    noise = NoiseScale(half_life_samples=1e300)
    for _ in range(10):
        noise.update(samples=4, weight=8.0, trace=3.0, squared_norm=1.0)
    before = noise.state
    for trace, weight in (
        (math.nan, 8.0),
        (math.inf, 8.0),
        (1.0, 0.0),
        (1.0, math.nan),
    ):
        noise.update(samples=4, weight=weight, trace=trace, squared_norm=1.0)
    assert noise.state == before
    assert noise.samples_per_weight == 0.5
    assert noise.in_samples.value == noise.tokens.value / 2 == 1.5
    # Averages that went through JSON are the same bit for bit; those of another version
    # have no interval.
    assert NoiseScale.from_state(
        json.loads(json.dumps(before))
    ) == NoiseScale.from_state(before)
    assert NoiseScale.from_state(
        {"half_life_samples": 77.0, "total": 9.0}
    ) == NoiseScale(half_life_samples=77)


def test_measured_noise_reads_values_and_lower_bounds():
    """Lines without a number do not count; a lower end without a value is a lower
    bound.
    """
    names = [f"noise_scale_samples{end}" for end in ("", "_low", "_high")]
    measured = [
        (5.0, 4.0, 7.0),
        (None, None, None),
        (None, 0.0, None),
        (None, 9.0, None),
    ]
    lines = [
        {"step": step} | dict(zip(names, values, strict=True))
        for step, values in enumerate(measured)
    ]
    found = [
        (line["step"], str(noise))
        for line, noise in measured_noise([*lines, {"step": 4}])
    ]
    assert found == [(0, "5 (4 to 7)"), (3, "at least 9")]
