"""Tests of rampup.contrib.lab.design_model: the model, and its schedules against a
brute-force search on a solvable problem.
"""

import functools
import itertools
import math
import random

import numpy as np
import pytest
from helpers.risk import SPECTRA

from rampup.contrib.lab import design_model
from rampup.contrib.lab.design_model import (
    DesignModel,
    NoiseCurve,
    NoisePoint,
    StepTimes,
    loss_penalty,
    noise_curves,
)
from rampup.plan.ramp import BatchRamp

SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
START = SPECTRA["wide"]
TARGET = 0.004
MAX_STEPS = 60_000


# Twenty throughput curves: a fixed cost per step of 0 to 1,000 samples, and devices
# that saturate.
CURVES = [
    {size: overhead + max(size, full) for size in SIZES}
    for overhead, full in itertools.product(
        (0.0, 4.0, 30.0, 200.0, 1000.0), (1, 32, 128, 400)
    )
]


@functools.cache
def reference():
    """Return the noise scale over the progress of the run with the smallest batch to
    the target, and its samples.
    """
    state, points = START, []
    for step in range(1, MAX_STEPS):
        if step % 16 == 1:
            noise = state.noise_scale
            points.append(
                NoisePoint((step - 1) * SIZES[0] + 1, SIZES[0], noise, noise, noise)
            )
        state = state.step(state.best_rate(SIZES[0]), SIZES[0])
        if state.risk <= TARGET:
            return noise_curves(points)[0], step * SIZES[0]
    raise AssertionError


@functools.cache
def brute_force():
    """Return the steps at each size that every ramp with up to three sizes and two
    switches needs to the exact target.
    """
    levels = np.geomspace(START.risk, TARGET, 14)[1:-1]
    ramps = [((size,), ()) for size in SIZES]
    ramps += [
        (pair, (level,))
        for pair in itertools.combinations(SIZES, 2)
        for level in levels
    ]
    ramps += [
        (triple, pair)
        for triple in itertools.combinations(SIZES, 3)
        for pair in itertools.combinations(levels[::2], 2)
    ]
    sizes = np.array(
        [list(one) + [one[-1]] * (3 - len(one)) for one, _ in ramps], float
    )
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
        m = (
            m * (1 - 2 * eta[:, None] * h + (eta**2 * (1 + 1 / batch))[:, None] * h2)
            + (eta**2 / batch * noise)[:, None] * h
        )
        going = 0.5 * m @ h > TARGET
        alive, m = alive[going], m[going]
    by_size = np.zeros((len(ramps), len(SIZES)))
    for column in range(3):
        np.add.at(
            by_size,
            (np.arange(len(ramps)), np.searchsorted(SIZES, sizes[:, column])),
            counts[:, column],
        )
    return by_size


def exact_time(schedule, times):
    """Return the time to the target risk of a schedule in samples, followed step by
    step.
    """
    ramp, state, total = BatchRamp.piecewise(schedule), START, 0.0
    for step in range(MAX_STEPS):
        size = ramp.global_batch_size_at(step)
        state = state.step(state.best_rate(size), size)
        total += times[size]
        if state.risk <= TARGET:
            return total
    raise AssertionError


@pytest.mark.parametrize("times", CURVES, ids=range(20))
def test_designed_ramp_is_as_fast_as_a_search(times):
    """From the noise scale of one small-batch run, the designed ramp reaches the risk
    within 5% of the best of all ramps.
    """
    noise, samples = reference()
    model = DesignModel(noise=noise, times=StepTimes.fit(times))
    target = model.run(((0, SIZES[0]),), samples=samples).progress
    designed = exact_time(model.best_schedule(SIZES, progress=target), times)
    best = (brute_force() @ np.array([times[size] for size in SIZES])).min()
    assert designed <= 1.05 * best


@pytest.mark.slow
def test_recommended_batches_cost_what_is_printed():
    """Of 100 regressions, at least 90 need between half and twice the predicted share
    of additional samples.
    """
    rng, runs, small = np.random.default_rng(0), 100, 4
    h = 1 / np.arange(1, 33) ** rng.uniform(0.5, 1.2, (runs, 1))
    start, s2 = rng.lognormal(0, 0.7, (runs, 32)), rng.uniform(0.1, 3, runs)

    def noise_scale(m):
        return 1 + ((h * m).sum(1) + s2) * (h**2).sum(1) / (h**3 * m).sum(1)

    def step(m, batch):
        eta = ((h**2 * m).sum(1) / (h**3 * m).sum(1) / (1 + noise_scale(m) / batch))[
            :, None
        ]
        noise = ((h * m).sum(1) + s2)[:, None]
        return (
            m * (1 - 2 * eta * h + eta**2 * (1 + 1 / batch)[:, None] * h**2)
            + eta**2 / batch[:, None] * h * noise
        )

    def samples_to(target, batch):
        """Return the samples after which each regression has its target."""
        m, steps = start, np.zeros(runs)
        while (going := (h * m).sum(1) > target).any():
            steps += going
            m = np.where(going[:, None], step(m, batch), m)
        return steps * batch

    m, noises = start, []
    for number in range(1000):
        noises += [noise_scale(m)] if number % 16 == 0 else []
        m = step(m, np.full(runs, float(small)))
    batches, predicted = [], []
    for each in np.transpose(noises):
        points = [
            NoisePoint(16 * small * n + 1, small, noise, noise, noise)
            for n, noise in enumerate(each.tolist())
        ]
        model = DesignModel(
            noise=noise_curves(points)[0], times=StepTimes.fit({1: 1.0})
        )
        progress = model.run(((0, small),), samples=1000 * small).progress
        overheads = {
            size: model.run(((0, size),), progress=progress).samples / progress - 1
            for size in SIZES
        }
        batches.append(
            max(size for size, overhead in overheads.items() if overhead <= 0.2)
        )
        predicted.append(overheads[batches[-1]])
    target = (h * m).sum(1)
    true = (
        samples_to(target, np.array(batches, float))
        / samples_to(target, np.full(runs, 0.25))
        - 1
    )
    assert (np.abs(np.log2(true / predicted)) <= 1).sum() >= 90


def random_model(rng, sizes, most):
    """Return a model with a noise scale that rises and falls up to a progress of
    `most`, and random step times.
    """
    places = sorted(
        10 ** rng.uniform(0, math.log10(most)) for _ in range(rng.randint(1, 8))
    )
    knots = tuple((place, 10 ** rng.uniform(0, 4)) for place in places)
    seconds = dict(
        zip(
            sizes,
            itertools.accumulate(rng.uniform(0.05, 2.0) for _ in sizes),
            strict=True,
        )
    )
    return DesignModel(
        noise=NoiseCurve(knots=knots, growth=rng.random()), times=StepTimes.fit(seconds)
    )


def optimum(model, sizes, progress):
    """Return the least seconds to a progress of all schedules that do not shrink, by a
    recursion from the end backwards.
    """
    edges = np.concatenate([[0], np.geomspace(progress * 1e-6, progress, 1000)])
    noise = np.array([model.noise.at(place) for place in (edges[1:] + edges[:-1]) / 2])
    times = np.array([model.times.at(size) for size in sizes])
    costs = times * (1 / np.array(sizes) + 1 / noise[:, None]) * np.diff(edges)[:, None]
    rest = np.zeros(len(sizes))
    for cost in costs[::-1]:
        rest = np.minimum.accumulate((cost + rest)[::-1])[::-1]
    return rest[0]


@pytest.mark.parametrize("models", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_best_schedule_is_the_optimum_for_noise_of_every_shape(models):
    """In random models it is within 1% of the recursion, not slower than a constant
    batch, and no batch shrinks.
    """
    rng, sizes = random.Random(0), (8, 16, 64, 512)
    for number in range(models):
        progress = 10 ** rng.uniform(3, 6)
        model = random_model(rng, sizes, progress)
        schedule = model.best_schedule(sizes, progress=progress)
        found = model.run(schedule, progress=progress).seconds
        assert found == pytest.approx(optimum(model, sizes, progress), rel=0.01)
        assert (
            found
            <= model.run(((0, sizes[number % len(sizes)]),), progress=progress).seconds
        )
        for column in zip(*schedule, strict=True):
            assert list(column) == sorted(set(column))


def test_bounds_are_no_points():
    """The curve has the other measurements, held to the bounds, and the interval is
    open where they are.
    """
    open_end = NoisePoint(100, 8, 50.0, 50.0, math.inf)
    points = [
        NoisePoint(1000, 8, 90.0, 80.0, 110.0),
        NoisePoint(2000, 8, 90.0, 80.0, 110.0),
    ]
    noise, low, high = noise_curves([open_end, *points])
    assert [value for _, value in noise.knots] == [90.0, 90.0, 90.0]
    assert (low.at(1.0), high.at(1.0), high.at(1e3)) == (
        50.0,
        math.inf,
        pytest.approx(110.0),
    )
    # At least 5,000 later on, whatever was measured before.
    noise, low, high = noise_curves(
        [*points, NoisePoint(8000, 8, 5000.0, 5000.0, math.inf)]
    )
    assert (noise.at(90.0), noise.knots[-1][1], low.knots[-1][1], high.at(1e9)) == (
        90.0,
        5000.0,
        5000.0,
        math.inf,
    )
    assert noise_curves([open_end])[0].at(1.0) == 50.0
    # A single measurement cannot show its growth with the data, which is then that of
    # the literature.
    single, *_ = noise_curves([NoisePoint(1000, 10, 100.0, 50.0, 200.0)])
    assert single.at(10 * 1000 / 1.1) == pytest.approx(100 * 10**0.47)
    model = DesignModel(
        noise=noise_curves([open_end])[2], times=StepTimes.fit({8: 1.0})
    )
    assert model.run(((0, 8),), samples=800).progress == pytest.approx(800)


def test_growth_has_the_interval_of_its_measurements():
    """Precise measurements give the growth of their law; wide ones leave it open."""
    for width, spread in ((1.001, 1e-3), (3.0, 0.8)):
        law = [(10.0 * 2**n, 8.0, 5.0 * (10.0 * 2**n) ** 0.4) for n in range(10)]
        points = [
            NoisePoint(samples, batch, noise, noise / width, noise * width)
            for samples, batch, noise in law
        ]
        noise, low, high = noise_curves(points)
        assert low.growth <= noise.growth <= high.growth
        assert high.growth - low.growth == pytest.approx(spread, rel=0.6)


def test_progress_follows_its_definition():
    """Progress is the sum of samples over 1 + B/N, followed step by step, whatever the
    schedule.
    """
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
    """Measurements of a run with a growing batch give back the law over progress, also
    beyond the last of them.
    """
    points, progress, batch = [], 0.0, 8
    for step in range(4000):
        batch = 8 if step < 2000 else 32
        samples = points[-1][0] + batch if points else batch
        noise = 5 * max(progress, 1.0) ** 0.4
        progress += batch / (1 + batch / noise)
        points.append(NoisePoint(samples, batch, noise, noise, noise))
    curve, *_ = noise_curves(points)
    assert curve.growth == pytest.approx(0.4, abs=0.01)
    for place in (500.0, 5000.0, 50_000.0, 500_000.0):
        assert curve.at(place) == pytest.approx(5 * place**0.4, rel=0.05)


def test_step_times_interpolate_and_extend():
    """Measured times are kept; beyond them a line, and never below the time in
    proportion to the batch.
    """
    times = StepTimes.fit({8: 2.0, 16: 2.5, 32: 4.0})
    assert [times.at(batch) for batch in (8, 12, 16, 32)] == [2.0, 2.25, 2.5, 4.0]
    assert times.at(64) > times.at(32)
    assert all(
        times.at(n) / n <= times.at(n - 1) / (n - 1) * (1 + 1e-12) for n in range(2, 9)
    )
    assert StepTimes.fit({8: 2.0}).at(80) == pytest.approx(20.0)


def test_loss_penalty_is_the_slope_for_small_differences():
    """Near the measured place, the penalty is slope times the logarithm; later it
    shrinks with the power law.
    """
    assert loss_penalty(99.0, 100.0, slope=0.2, measured_at=100.0) == pytest.approx(
        0.2 * math.log(100 / 99), rel=0.01
    )
    assert loss_penalty(100.0, 100.0, slope=0.2, measured_at=10.0) == 0
    ratio = loss_penalty(990.0, 1000.0, slope=0.2, measured_at=100.0) / loss_penalty(
        99.0, 100.0, slope=0.2, measured_at=100.0
    )
    assert ratio == pytest.approx(10**-0.28, rel=1e-6)
    points = [(n, 5 - 0.3 * math.log(n)) for n in range(1, 100)]
    assert design_model.loss_line(points).slope == pytest.approx(-0.3)
    assert design_model.loss_line(points[:3]) is None


@pytest.mark.parametrize("seed", range(8))
def test_samples_of_a_progress_are_the_integral_over_the_noise_curve(seed):
    """Within 0.1%, also if the curve has short parts at the start and in the middle, or
    an infinite noise scale there.
    """
    rng = np.random.default_rng(seed)
    places = np.sort(
        np.concatenate([10 ** rng.uniform(0, 5, 3), 4e4 + rng.uniform(0, 300, 4)])
    )
    noises = [
        math.inf if rng.random() < 0.2 else 10 ** rng.uniform(1, 4) for _ in places
    ]
    curve = NoiseCurve(
        knots=tuple(zip(places.tolist(), noises, strict=True)), growth=0.5
    )
    model, batch, progress = (
        DesignModel(noise=curve, times=StepTimes.fit({8: 1.0})),
        64,
        1e5,
    )
    # Between two edges, the noise scale is constant, infinite, or a power law.
    edges = sorted({0.0, *(x for x in places if x < progress), progress})
    samples = 0.0
    for start, end in itertools.pairwise(edges):
        x = np.geomspace(max(start, end * 1e-6), end, 5_001)
        middles = np.sqrt(x[1:] * x[:-1])
        samples += max(x[0] - start, 0) + sum(
            np.diff(x) * [1 + batch / curve.at(middle) for middle in middles]
        )
    found = model.run(((0, batch),), progress=progress)
    assert found.samples == pytest.approx(samples, rel=1e-3)
    assert model.run(((0, batch),), samples=found.samples).progress == pytest.approx(
        progress, rel=1e-3
    )


@pytest.mark.parametrize(
    "growth",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in (0.0, 0.3)), 0.47, 0.62],
)
def test_no_ramp_saves_more_than_the_bound(growth):
    """Over machines whose step times are on a line, with finely spaced batches and a
    power law of the noise scale: the bound holds, and the best machine comes near it.
    """
    progress, saved = 1e6, []
    noise = NoiseCurve(
        knots=tuple((x, x**growth) for x in np.geomspace(1, progress, 60).tolist()),
        growth=growth,
    )
    sizes = sorted({round(8 * 2 ** (n / 4)) for n in range(52)})
    for full in (10, 100, 500, 2000):
        times = StepTimes.fit({size: 1 + size / full for size in (8, 4096, 65536)})
        model = DesignModel(noise=noise, times=times)
        constants = [
            model.run(((0, size),), progress=progress).seconds for size in sizes
        ]
        ramp = model.best_schedule(sizes, progress=progress)
        seconds = model.run(ramp, progress=progress).seconds
        saved.append(1 - seconds / min(constants))
    assert max(saved) <= design_model.most_saved(growth) + 1e-3
    assert max(saved) >= 0.7 * design_model.most_saved(growth) - 1e-3


def test_the_loss_line_has_the_error_of_its_scatter():
    """In 85% to 95% of noisy runs, the interval of a mean loss contains the truth,
    near the line and far beyond its end.
    """
    rng, covered = np.random.default_rng(0), []
    samples = [8 * n for n in range(1, 257)]
    for _ in range(300):
        noise = 0.2 * rng.standard_normal(256)
        line = design_model.loss_line(
            [
                (n, 5 - 0.3 * math.log(n) + x)
                for n, x in zip(samples, noise, strict=True)
            ]
        )
        for place, steps in ((1800, 13), (8192, 51)):
            truth = 5 - 0.3 * math.log(place) + 0.2 * rng.standard_normal() / steps**0.5
            found = line.start + line.slope * math.log(place)
            distance = math.log(place / line.pivot)
            covered.append(abs(found - truth) <= line.error(distance, steps))
    assert 0.85 <= np.mean(covered) <= 0.95
