"""Tests of rampup.plan.design: the model, and its schedules against a brute-force search on an exactly solvable problem."""

import functools
import itertools
import math
import random

import numpy as np
import pytest
from helpers.risk import Regression

from rampup.errors import DataError
from rampup.plan.design import DesignModel, NoiseCurve, StepTimes, format_schedule, loss_penalty, loss_slope
from rampup.plan.ramp import BatchRamp

SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
START = Regression(1 / np.arange(1, 33) ** 0.7, np.ones(32), 1.0)
TARGET = 0.004
MAX_STEPS = 60_000


def curves():
    """Return twenty throughput curves: a fixed cost per step of 0 to 1,000 samples, and devices that saturate."""
    found = []
    for overhead, full in itertools.product((0.0, 4.0, 30.0, 200.0, 1000.0), (1, 32, 128, 400)):
        found.append({size: overhead + max(size, full) for size in SIZES})
    return found


@functools.cache
def reference():
    """Return (samples, batch, noise scale) along the run with the smallest batch to the target, and its samples."""
    state, points = START, []
    for step in range(1, MAX_STEPS):
        points.append(((step - 1) * SIZES[0] + 1, SIZES[0], state.noise_scale))
        state = state.step(state.best_rate(SIZES[0]), SIZES[0])
        if state.risk <= TARGET:
            return points, step * SIZES[0]
    raise AssertionError


@functools.cache
def brute_force():
    """Return the steps at each size that every ramp with up to three sizes and two switches needs to the exact target.

    All ramps are followed at once, one row each. Whenever the risk falls below a ramp's threshold, its batch grows.
    """
    levels = np.geomspace(START.risk, TARGET, 14)[1:-1]
    ramps = [((size,), ()) for size in SIZES]
    ramps += [(pair, (level,)) for pair in itertools.combinations(SIZES, 2) for level in levels]
    ramps += [(triple, pair) for triple in itertools.combinations(SIZES, 3) for pair in itertools.combinations(levels[::2], 2)]
    sizes = np.array([list(one) + [one[-1]] * (3 - len(one)) for one, _ in ramps], float)
    thresholds = np.array([list(at) + [-1.0] * (2 - len(at)) for _, at in ramps])
    counts, alive = np.zeros((len(ramps), 3)), np.arange(len(ramps))
    h, m = START.h, np.tile(START.m, (len(ramps), 1))
    h2, h3 = h**2, h**3
    while len(alive):
        risk = 0.5 * m @ h
        place = (risk[:, None] <= thresholds[alive]).sum(axis=1)
        batch = sizes[alive, place]
        noise = m @ h + START.s2
        curvature = m @ h3
        eta = (m @ h2) / (curvature + (curvature + noise * h2.sum()) / batch)
        counts[alive, place] += 1
        m = m * (1 - 2 * eta[:, None] * h + (eta**2 * (1 + 1 / batch))[:, None] * h2) + (eta**2 / batch * noise)[:, None] * h
        going = 0.5 * m @ h > TARGET
        alive, m = alive[going], m[going]
    by_size = np.zeros((len(ramps), len(SIZES)))
    for column in range(3):
        np.add.at(by_size, (np.arange(len(ramps)), np.searchsorted(SIZES, sizes[:, column])), counts[:, column])
    return by_size


def exact_time(schedule, times):
    """Return the time to the target risk of a schedule in samples, followed step by step."""
    ramp, state, total = BatchRamp.piecewise(schedule), START, 0.0
    for step in range(MAX_STEPS):
        size = ramp.global_batch_size_at(step)
        state = state.step(state.best_rate(size), size)
        total += times[size]
        if state.risk <= TARGET:
            return total
    raise AssertionError


@pytest.mark.parametrize("number", range(20))
def test_designed_ramp_is_as_fast_as_a_search(number):
    """From the noise scale of one small-batch run, the designed ramp reaches the risk within 5% of the best of all ramps."""
    times = curves()[number]
    points, samples = reference()
    model = DesignModel(noise=NoiseCurve.measured(points), times=StepTimes.fit(times))
    target = model.run(((0, SIZES[0]),), samples=samples).progress
    designed = exact_time(model.best_schedule(SIZES, progress=target), times)
    best = (brute_force() @ np.array([times[size] for size in SIZES])).min()
    assert designed <= 1.05 * best


def test_progress_follows_its_definition():
    """Progress is the sum of samples over 1 + B/N, followed step by step, whatever the schedule."""
    noise = NoiseCurve(knots=((10.0, 20.0), (300.0, 60.0), (2000.0, 700.0)), growth=0.5)
    times = StepTimes.fit({4: 1.0, 8: 1.5, 64: 9.0})
    model, rng = DesignModel(noise=noise, times=times), random.Random(3)
    for _ in range(20):
        places = sorted(rng.sample(range(64, 8000, 64), 3))
        schedule = tuple(zip((0, *places), rng.sample(SIZES[:5], 4), strict=True))
        progress = seconds = 0.0
        for sample in range(8192):
            batch = next(size for start, size in reversed(schedule) if start <= sample)
            progress += 1 / (1 + batch / noise.at(progress))
            seconds += times.at(batch) / batch
        found = model.run(schedule, samples=8192)
        assert found.progress == pytest.approx(progress, rel=2e-3)
        assert found.seconds == pytest.approx(seconds, rel=1e-6)
        assert found.samples == 8192
        # Until a progress instead of a number of samples: the inverse.
        again = model.run(schedule, progress=found.progress)
        assert again.samples == pytest.approx(8192, rel=5e-3)
        assert again.seconds == pytest.approx(seconds, rel=5e-3)


def test_noise_curve_recovers_a_power_law():
    """Measurements of a run with a growing batch give back the law over progress, also beyond the last of them."""
    points, progress, batch = [], 0.0, 8
    for step in range(4000):
        batch = 8 if step < 2000 else 32
        samples = points[-1][0] + batch if points else batch
        noise = 5 * max(progress, 1.0) ** 0.6
        progress += batch / (1 + batch / noise)
        points.append((samples, batch, noise))
    curve = NoiseCurve.measured(points)
    assert curve.growth == pytest.approx(0.6, abs=0.01)
    for place in (500.0, 5000.0, 50_000.0, 500_000.0):
        assert curve.at(place) == pytest.approx(5 * place**0.6, rel=0.05)


def test_one_measurement_grows_as_published():
    """A single critical batch cannot show its growth with the data."""
    curve = NoiseCurve.measured([(1000, 10, 100.0)])
    assert curve.at(1.0) == pytest.approx(100.0)
    assert curve.at(10 * 1000 / 1.1) == pytest.approx(100 * 10**0.47)
    with pytest.raises(DataError, match="no measured noise scale"):
        NoiseCurve.measured([])


def test_step_times_interpolate_and_extend():
    """Measured times are kept; beyond them a line, and never below the time in proportion to the batch."""
    times = StepTimes.fit({8: 2.0, 16: 2.5, 32: 4.0})
    assert [times.at(batch) for batch in (8, 12, 16, 32)] == [2.0, 2.25, 2.5, 4.0]
    assert times.at(64) > times.at(32)
    assert all(times.at(n) / n <= times.at(n - 1) / (n - 1) * (1 + 1e-12) for n in range(2, 9))
    assert StepTimes.fit({8: 2.0}).at(80) == pytest.approx(20.0)
    for bad in ({}, {0: 1.0}, {8: 0.0}):
        with pytest.raises(DataError):
            StepTimes.fit(bad)


def test_frugal_schedule_keeps_its_promise():
    """It wastes at most the given share of progress, and is faster than the smallest batch."""
    points, samples = reference()
    model = DesignModel(noise=NoiseCurve.measured(points), times=StepTimes.fit(curves()[9]))
    smallest = model.run(((0, SIZES[0]),), samples=samples)
    before = math.inf
    for waste in (0.02, 0.05, 0.2):
        schedule = model.frugal_schedule(SIZES, samples=samples, waste=waste)
        found = model.run(schedule, samples=samples)
        assert found.progress >= (1 - waste) * smallest.progress
        assert found.seconds < min(before, smallest.seconds)
        assert [size for _, size in schedule] == sorted({size for _, size in schedule})
        before = found.seconds


def test_late_switch_is_one_switch_in_the_second_half():
    """And it is the fastest of them to the loss of the smallest batch."""
    points, samples = reference()
    model = DesignModel(noise=NoiseCurve.measured(points), times=StepTimes.fit(curves()[9]))
    (start, small), (switch, large) = model.late_switch(SIZES, samples=samples)
    assert (start, small) == (0, SIZES[0])
    assert samples / 2 <= switch < samples
    target = model.run(((0, small),), samples=samples).progress
    best = model.run(((0, small), (switch, large)), progress=target).seconds
    others = [((0, small), (round(samples * share / 20), size)) for share in (10, 15, 19) for size in SIZES[1:]]
    assert all(best <= model.run(other, progress=target).seconds for other in others)


def test_loss_penalty_is_the_slope_for_small_differences():
    """Near the measured place, the penalty is slope times the logarithm; later it shrinks with the power law."""
    assert loss_penalty(99.0, 100.0, slope=0.2, measured_at=100.0) == pytest.approx(0.2 * math.log(100 / 99), rel=0.01)
    assert loss_penalty(100.0, 100.0, slope=0.2, measured_at=10.0) == 0
    ratio = loss_penalty(990.0, 1000.0, slope=0.2, measured_at=100.0) / loss_penalty(99.0, 100.0, slope=0.2, measured_at=100.0)
    assert ratio == pytest.approx(10**-0.28, rel=1e-6)
    points = [(n, 5 - 0.3 * math.log(n)) for n in range(1, 100)]
    assert loss_slope(points) == pytest.approx(0.3)
    assert loss_slope(points[:3]) is None


def test_schedules_are_legal_text():
    """A schedule parses back into the same ramp, in samples and in tokens."""
    schedule = ((0, 8), (1000, 16), (1500, 32))
    assert BatchRamp.from_schedule(format_schedule(schedule)) == BatchRamp.piecewise(schedule)
    text = format_schedule(schedule, tokens_per_sample=128)
    assert BatchRamp.from_schedule(text, sequence_length=128) == BatchRamp.piecewise(schedule)
