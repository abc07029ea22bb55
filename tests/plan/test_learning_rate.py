"""Tests of rampup.plan.learning_rate."""

import math

import pytest

from rampup.errors import ConfigError
from rampup.plan.learning_rate import clock_segments, learning_rate_scale
from rampup.plan.ramp import BatchRamp

RAMP = BatchRamp.from_schedule("0:8 100:16 250:32")


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("sqrt", math.sqrt(0.25)), ("linear", 0.25)])
def test_scale_is_relative_to_the_final_batch(scaling, expected):
    """At a quarter of the final batch size each rule gives its fraction of the learning rate, at the final size all of it."""
    assert learning_rate_scale(8, 32, scaling) == expected
    assert learning_rate_scale(32, 32, scaling) == 1.0


@pytest.mark.parametrize("clock", ["steps", "samples"])
def test_clock_progress_is_the_fraction_of_steps_or_samples(clock):
    """Within each phase, progress is exactly the completed steps or samples divided by those of the schedule."""
    schedule_steps = 40
    segments = clock_segments(RAMP, clock=clock, schedule_steps=schedule_steps, scaling="sqrt")
    total = schedule_steps if clock == "steps" else RAMP.samples_before(schedule_steps)
    for step in range(60):
        segment = segments[RAMP.phase_at(step).index]
        done = step if clock == "steps" else RAMP.samples_before(step)
        assert segment.progress + (step - segment.start_step) * segment.progress_per_step == pytest.approx(done / total)
        assert segment.scale == math.sqrt(RAMP.global_batch_size_at(step) / 32)


def test_unknown_clock_or_scaling():
    """The error for a misspelled clock or scaling has the choices."""
    with pytest.raises(ConfigError, match="must be one of none, sqrt, linear"):
        learning_rate_scale(8, 32, "square")
    with pytest.raises(ConfigError, match="must be one of steps, samples"):
        clock_segments(RAMP, clock="tokens", schedule_steps=10, scaling="none")
