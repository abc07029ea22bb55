"""Tests of rampup.batch_size.forgetting against its closed forms."""

import math

import pytest

from rampup.batch_size.design_model import DesignModel, NoiseCurve, StepTimes
from rampup.batch_size.forgetting import ForgettingModel

LENGTH, LAST, SLOPE, MEMORY = 10_000, 1e5, 0.2, 1000.0


def forgetting(*, noise=1e12, power=0.5, times=None):
    """Return a model whose rate was tuned for a batch of 16, and whose loss is nearly straight over the progress."""
    model = DesignModel(noise=NoiseCurve(knots=((LAST, noise),), growth=0.0), times=StepTimes.fit(times or {1: 1.0, 64: 64.0}))
    return ForgettingModel(model=model, batch=16, power=power, memory=MEMORY, slope=SLOPE, length=LENGTH)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_noise_is_forgotten_as_in_the_closed_form(power):
    """After a switch the progress is a sum, and the noise falls by an exponential of it, to that of a constant batch."""
    model = forgetting(power=power)
    gains = [(size / 16) ** (power - 1) for size in (4, 64)]
    constants = [model.follow(((0, size),)) for size in (4, 64)]
    levels = [gain * SLOPE for gain in gains]
    assert [point.progress for point in constants] == pytest.approx([gain * LENGTH for gain in gains])
    assert [point.noise for point in constants] == pytest.approx(levels)
    for switch in (5000, 9000, 9900):
        found, after = model.follow(((0, 4), (switch, 64))), LENGTH - switch
        assert found.progress == pytest.approx(switch * gains[0] + after * gains[1])
        left = math.exp(-after * gains[1] / MEMORY)
        assert found.noise == pytest.approx(levels[1] + (levels[0] - levels[1]) * left)


def test_no_rate_is_above_that_of_a_noiseless_step():
    """A step makes at most the progress of the noise scale, and that of the first model with the tuned batch."""
    model = forgetting(noise=48.0, power=1.0)
    assert model.gain(16, 1.0) == pytest.approx(1 / (1 + 16 / 48))
    assert [size * model.gain(size, 1.0) for size in (16, 32, 64, 512)] == pytest.approx([12, 24, 48, 48])


def test_a_late_switch_wins_where_samples_cost_time():
    """It has the noise of the large batch and nearly the steps of the small one: it is faster than both, and the first model
    has the small batch for the fastest.
    """
    model = forgetting()
    loss = model.loss(model.follow(((0, 4),)))
    late = model.late_switch([4, 16, 64])
    assert late[1][0] >= 0.6 * LENGTH
    seconds = [model.seconds(schedule, loss) for schedule in (late, ((0, 4),), ((0, 16),), ((0, 64),))]
    assert seconds[0] < 0.95 * min(seconds[1:])
    early = ((0, 4), (LENGTH // 5, late[1][1]))
    assert model.loss(model.follow(late)) < min(model.loss(model.follow(other)) for other in (early, ((0, 4),), ((0, 64),)))
    target = model.model.run(((0, 4),), samples=LENGTH).progress
    assert model.model.best_schedule([4, 16, 64], progress=target) == ((0, 4),)
    # If a step takes the same time whatever its batch, the large batch is the fastest in both.
    model = forgetting(times={4: 1.0, 64: 1.0})
    loss = model.loss(model.follow(((0, 4),)))
    assert model.seconds(((0, 64),), loss) < model.seconds(model.late_switch([4, 16, 64]), loss)
