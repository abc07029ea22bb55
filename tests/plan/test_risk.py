"""Tests of rampup.plan.risk."""

import random

import pytest

from rampup.errors import RampDefinitionError
from rampup.plan.risk import RiskState, sgd_risk

POWER_LAW = tuple(1 / i for i in range(1, 51))


def start(noise=1.0, eigenvalues=POWER_LAW):
    """Return a state with an error of 1 in every direction."""
    return RiskState(eigenvalues=eigenvalues, squared_errors=(1.0,) * len(eigenvalues), noise=noise)


def halved_and_doubled(learning_rate, batch_size, phases=5, samples=4096):
    """Return the risks of halving the rate and of doubling the batch over the same samples, and the steps of each."""
    steps = samples // batch_size
    halved = [(steps, learning_rate / 2**k, batch_size) for k in range(phases)]
    doubled = [(steps >> k, learning_rate, batch_size << k) for k in range(phases)]
    risks = [sgd_risk(start(), plan).risk for plan in (halved, doubled)]
    return *risks, *(sum(steps for steps, _, _ in plan) for plan in (halved, doubled))


@pytest.mark.parametrize(("learning_rate", "batch_size"), [(0.2, 4), (0.2, 8), (0.2, 16), (0.1, 8), (0.05, 16)])
def test_doubling_the_batch_equals_halving_the_rate(learning_rate, batch_size):
    """Within 4% of the risk, in at least 55% fewer steps (Smith et al. 2017; Meterez et al. 2025, theorem 1)."""
    halved, doubled, slow, fast = halved_and_doubled(learning_rate, batch_size)
    assert doubled == pytest.approx(halved, rel=0.04)
    assert fast <= 0.45 * slow
    assert sgd_risk(start(), [(slow, learning_rate, batch_size)]).risk > 3 * doubled or learning_rate < 0.2


def test_equivalence_breaks_for_large_rates():
    """At a rate at which the loss hardly converges, growth of the batch loses: the recursion shows where the rule ends."""
    halved, doubled, *_ = halved_and_doubled(0.8, 32)
    assert doubled > 1.08 * halved


def test_recursion_equals_a_simulation():
    """The expected squared errors are the means over many runs of SGD with Gaussian rows, in every direction."""
    h, noise, eta, batch, steps, runs = (1.0, 0.4), 0.5, 0.3, 2, 6, 20_000
    rng = random.Random(0)
    total = [0.0] * len(h)
    for _ in range(runs):
        error = [1.0] * len(h)
        for _ in range(steps):
            gradient = [0.0] * len(h)
            for _ in range(batch):
                x = [rng.gauss(0, hi**0.5) for hi in h]
                residual = sum(xi * ei for xi, ei in zip(x, error, strict=True)) - rng.gauss(0, noise**0.5)
                gradient = [g + xi * residual / batch for g, xi in zip(gradient, x, strict=True)]
            error = [e - eta * g for e, g in zip(error, gradient, strict=True)]
        total = [t + e * e for t, e in zip(total, error, strict=True)]
    found = sgd_risk(start(noise, h), [(steps, eta, batch)]).squared_errors
    assert found == pytest.approx([t / runs for t in total], rel=0.03)


def test_noise_scale_of_a_state():
    """tr(Sigma)/|G|^2 from Sigma = H d d'H + (d'Hd + s2) H, summed by hand for two directions."""
    state = RiskState(eigenvalues=(2.0, 1.0), squared_errors=(0.25, 1.0), noise=0.5)
    square, loss = 4 * 0.25 + 1 * 1.0, 2 * 0.25 + 1.0
    assert state.noise_scale == pytest.approx((square + (loss + 0.5) * 3) / square)


def test_bad_states_are_refused():
    """Unequal lengths, negative values and no rows are refused."""
    with pytest.raises(RampDefinitionError, match="give as many of both"):
        RiskState(eigenvalues=(1.0,), squared_errors=(1.0, 2.0), noise=0.1)
    with pytest.raises(RampDefinitionError, match="not be negative"):
        RiskState(eigenvalues=(1.0,), squared_errors=(1.0,), noise=-0.1)
    with pytest.raises(RampDefinitionError, match="batch_size=0"):
        start().after(1, learning_rate=0.1, batch_size=0)
