"""Tests of rampup.contrib.lab.critical: geometry, statistics, and the decision on an
exactly solvable problem.
"""

import functools
import itertools
import math
import random

import numpy as np
import pytest
from helpers.risk import SPECTRA, Regression

from rampup.contrib.lab.critical import (
    BranchWindow,
    Evaluation,
    find_critical,
    judge,
    samples_for_gain,
    smoothed_difference,
)
from rampup.errors import ConfigError

BASE, ETA = 4, 0.02
WINDOW = BranchWindow.of([BASE << n for n in range(6)], 2048)
CHECKPOINTS = (20, 100, 400, 1400, 4000)
TOLERANCES = (0.003, 0.01, 0.03, 0.1)


@functools.cache
def checkpoint(steps):
    """Return the state of one run on the recursion."""
    return SPECTRA["middle"].after(steps, ETA, BASE)


@functools.cache
def branch_risks(steps, size):
    """Return the exact risk of a branch at every evaluation, at the learning rate in
    proportion to its batch.
    """
    state, risks = checkpoint(steps), []
    for _ in range(WINDOW.num_evaluations):
        state = state.after(WINDOW.interval // size, ETA * size / BASE, size)
        risks.append(state.risk)
    return risks


def test_critical_finds_the_batch_of_the_exact_recursion():
    """At 5 checkpoints and 4 tolerances, branches find the largest batch whose exact
    risk is tolerable.
    """
    answers = set()
    for steps, factor in itertools.product(CHECKPOINTS, TOLERANCES):
        tolerance = factor * checkpoint(steps).risk
        # The oracle runs every branch to the end and averages the risks itself.
        smoothed = []
        for size in WINDOW.sizes:
            average, *rest = branch_risks(steps, size)
            for risk in rest:
                average = 0.5 * average + 0.5 * risk
            smoothed.append(average)
        wanted = max(
            i
            for i in range(len(smoothed))
            if all(smoothed[i] <= smoothed[j] + tolerance for j in range(i))
        )
        curves = [
            [Evaluation((risk,), (1.0,)) for risk in branch_risks(steps, size)]
            for size in WINDOW.sizes
        ]
        branches, critical = find_critical(WINDOW, curves, tolerance)
        assert branches[critical].global_batch_size == WINDOW.sizes[wanted]
        answers.add(critical)
    assert len(answers) >= 4


def test_recursion_equals_monte_carlo():
    """The oracle itself: simulated SGD has the risk that the recursion computes."""
    rng = np.random.default_rng(0)
    h, s2, eta, batch, steps, runs = np.array([1.0, 0.3, 0.1]), 0.2, 0.3, 2, 20, 20_000
    theta = np.ones((runs, 3))
    for _ in range(steps):
        x = rng.normal(size=(runs, batch, 3)) * np.sqrt(h)
        error = np.einsum("rbi,ri->rb", x, theta) - rng.normal(
            size=(runs, batch)
        ) * math.sqrt(s2)
        theta -= eta * np.einsum("rb,rbi->ri", error, x) / batch
    risks = 0.5 * theta**2 @ h
    assert abs(
        risks.mean() - Regression(h, np.ones(3), s2).after(steps, eta, batch).risk
    ) < 4 * risks.std() / math.sqrt(runs)


def test_window_is_whole_steps_of_every_branch():
    """Any legal request gives intervals that every branch divides, at least as long as
    requested.
    """
    rng = random.Random(0)
    for _ in range(300):
        base = rng.choice([1, 2, 3, 6, 16, 48])
        multiples = rng.sample([1, 2, 3, 4, 5, 8], rng.randint(2, 4))
        samples = rng.randint(1, 20_000)
        try:
            window = BranchWindow.of([base * m for m in multiples], samples)
        except ConfigError as error:
            unit = math.lcm(*(base * m for m in multiples))
            assert samples <= 3 * unit
            assert error.nearest == (4 * unit,)
            continue
        assert list(window.sizes) == sorted(base * m for m in multiples)
        assert all(window.interval % size == 0 for size in window.sizes)
        assert window.samples >= samples
        assert window.samples - samples < window.interval
        assert 4 <= window.num_evaluations < 33


@pytest.mark.parametrize("batches", [(), (2,), (1, 1), (0, 1), (-2, 1), range(1, 40)])
def test_bad_batches_are_refused(batches):
    """There are at least two different ones, and not too many."""
    with pytest.raises(ConfigError, match="2 to 32 different batches of at least 1"):
        BranchWindow.of(batches, None)


def test_standard_error_is_that_of_paired_differences():
    """Over many draws of rows, the standard error is the spread of the difference,
    whatever the rows have in common.
    """
    rng, differences, errors = np.random.default_rng(1), [], []
    for _ in range(2000):
        curve, other = [], []
        for _ in range(4):
            shared, weights = (
                rng.normal(scale=5, size=16),
                tuple(rng.uniform(1, 3, size=16)),
            )
            curve.append(
                Evaluation(tuple(shared + rng.normal(0.1, 0.3, size=16)), weights)
            )
            other.append(Evaluation(tuple(shared), weights))
        difference, error = smoothed_difference(curve, other)
        differences.append(difference)
        errors.append(error)
    assert abs(np.mean(differences) - 0.1) < 0.01
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(
        np.std(differences), rel=0.07
    )


def test_a_branch_that_is_not_finite_cannot_win():
    """The branches after it are compared with the others only."""
    window = BranchWindow.of((1, 2, 4), 16)
    fine, bad = [Evaluation((1.0,), (1.0,))] * 4, [Evaluation((math.nan,), (1.0,))] * 4
    branches, critical = find_critical(window, [fine, bad, fine], 0.1)
    assert critical == 2
    assert (branches[1].loss, branches[1].standard_error) == (None, None)


def chinchilla(tokens, params=7e9):
    """Return the loss of the fit of Hoffmann et al. 2022 (arXiv 2203.15556), equation
    10.
    """
    return 1.69 + 406.4 / params**0.34 + 410.7 / tokens**0.28


def simulate(consumed, window, wasted, seed=0):
    """Return the curves of branches that waste shares of their samples at 7B
    parameters, and the checkpoint's evaluation.
    """
    rng, rows = (
        np.random.default_rng(seed),
        np.random.default_rng(seed + 1).normal(0, 0.3, (window.num_evaluations, 16)),
    )

    def evaluate(tokens, number):
        losses = chinchilla(tokens) + rows[number - 1] + rng.normal(0, 0.002, 16)
        return Evaluation(tuple(losses), (1.0,) * 16)

    numbers = range(1, window.num_evaluations + 1)
    curves = [
        [evaluate(consumed + window.interval * n * (1 - share), n) for n in numbers]
        for share in wasted
    ]
    return curves, evaluate(consumed, window.num_evaluations)


def test_a_short_window_of_a_long_run_decides_nothing():
    """At 7B and 100B tokens, 20 steps of 32M pass a batch that learns nothing; that is
    said, and a window as long as the loss curve promises decides.
    """
    consumed, wasted = 10**11, (0.0, 0.1, 0.5, 1.0)
    window = BranchWindow.of([4_000_000 * n for n in (1, 2, 4, 8)], 640_000_000)
    curves, checkpoint = simulate(consumed, window, wasted)
    assert find_critical(window, curves, 0.01)[1] == 3
    # Of a share of the gain, the errors say that the window is too short.
    assert not judge(window, curves, checkpoint).decisive

    curve = [(n, chinchilla(n)) for n in np.linspace(1e9, consumed, 1000)]
    promising = samples_for_gain(curve, consumed)
    assert chinchilla(consumed) - chinchilla(consumed + promising) == pytest.approx(
        0.02, rel=0.2
    )
    window = BranchWindow.of(window.sizes, None, promising=promising)
    covered = 0
    for seed in range(20):
        curves, checkpoint = simulate(consumed, window, wasted, seed)
        found = judge(window, curves, checkpoint)
        assert found.decisive
        assert found.critical == 1
        assert found.gain == pytest.approx(
            chinchilla(consumed) - chinchilla(consumed + window.samples), rel=0.15
        )
        assert found.tolerance == pytest.approx(
            found.gain / 6, rel=0.07
        )  # the smoothed losses are half an evaluation behind
        for branch, share in zip(found.branches[1:], wasted[1:], strict=True):
            _, low, high = branch.token_overhead
            truth = share / (1 - share) if share < 1 else math.inf
            covered += (
                (math.inf if low is None else low)
                <= truth
                <= (math.inf if high is None else high)
            )
    assert covered >= 0.85 * 3 * 20


def test_a_window_without_a_gain_decides_nothing():
    """A loss that rose, one that is not finite, and a curve that does not fall give no
    answer and no window.
    """
    window = BranchWindow.of((8, 16), 1600)
    flat = [Evaluation((3.0, 3.1), (1.0, 1.0))] * window.num_evaluations
    for checkpoint in (
        Evaluation((2.9, 3.0), (1.0, 1.0)),
        Evaluation((3.0, 3.1), (1.0, 1.0)),
    ):
        assert not judge(window, [flat, flat], checkpoint).decisive
    broken = [Evaluation((math.nan, 3.0), (1.0, 1.0))] * window.num_evaluations
    assert judge(window, [broken, flat], flat[0]).gain is None
    assert samples_for_gain([(n, 3.0) for n in range(1, 100)], 100) == 0
    assert samples_for_gain([(50, 3.0), (100, 2.0)], 100) == 0
