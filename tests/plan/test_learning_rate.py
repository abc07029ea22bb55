"""Tests of rampup.plan.learning_rate."""

import math

import pytest

from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan.learning_rate import (
    Cut,
    RateRule,
    Seesaw,
    clock_segments,
    discretize,
)
from rampup.plan.ramp import BatchRamp

RAMP = BatchRamp.from_schedule("0:8 100:16 250:32")


@pytest.mark.parametrize(
    ("scaling", "exponent"), [("none", 0), ("sqrt", 0.5), ("linear", 1)]
)
@pytest.mark.parametrize("clock", ["steps", "samples"])
def test_clock_progress_is_the_fraction_of_steps_or_samples(clock, scaling, exponent):
    """Progress is completed steps or samples over those of the schedule; the rate is
    relative to the reference batch.
    """
    segments = clock_segments(
        RAMP,
        RateRule(clock=clock, batch_scaling=scaling),
        schedule_steps=40,
        reference_size=32,
    )
    total = 40 if clock == "steps" else RAMP.samples_before(40)
    for step in range(60):
        segment = segments[RAMP.phase_at(step).index]
        done = step if clock == "steps" else RAMP.samples_before(step)
        assert segment.progress + (
            step - segment.start_step
        ) * segment.progress_per_step == pytest.approx(done / total)
        assert segment.scale == (RAMP.global_batch_size_at(step) / 32) ** exponent


def quarter_cosine(t):
    """The decay of the paper: from 1 to 0."""
    return math.cos(math.pi / 2 * t)


def segments_of(seesaw):
    """Return the clock of a Seesaw whose learning rate does not follow the planned
    batch.
    """
    return clock_segments(
        seesaw.ramp,
        RateRule(clock="samples", seesaw=seesaw),
        schedule_steps=100,
        reference_size=1,
    )


@pytest.mark.parametrize(
    ("factor", "saved"),
    [(2, 0.220), (1.5, 0.271), (1.2, 0.317), (1.1, 0.338), (1.005, 1 - 2 / math.pi)],
)
def test_cosine_saves_the_published_steps(factor, saved):
    """A cosine's cuts by a factor save the steps that the paper gives; in the limit 1 -
    2/pi.
    """
    total = 10**9
    cuts = discretize(quarter_cosine, factor=factor, total_samples=total)
    seesaw = Seesaw(base=BatchRamp.constant(1000), cuts=cuts, total_samples=total)
    steps = seesaw.ramp.step_of_sample(total - 1) + 1
    assert 1 - steps / (total / 1000) == pytest.approx(saved, abs=0.002)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("multiple", [1, 8, 24])
def test_rate_over_batch_stays_that_of_the_planned_schedule(exponent, multiple):
    """The ratio rate / batch**exponent equals that of the plan at every step, whatever
    was rounded or capped.
    """
    base = BatchRamp.from_schedule("0:48 1000:96 5000:48")
    cuts = discretize(lambda t: 1 - 0.97 * t, factor=1.3, total_samples=50_000)
    seesaw = Seesaw(
        base=base,
        cuts=cuts,
        max_batch_size=400,
        multiple=multiple,
        total_samples=50_000,
        exponent=exponent,
    )
    assert len(segments_of(seesaw)) > 8
    for segment in segments_of(seesaw):
        size, sample = (
            segment.global_batch_size,
            seesaw.ramp.samples_before(segment.start_step),
        )
        planned = base.phase_of_sample(sample).global_batch_size
        assert segment.level == next(
            (cut.level for cut in reversed(cuts) if cut.sample <= sample), 1
        )
        assert segment.scale / size**exponent == pytest.approx(
            planned**-exponent, rel=1e-12
        )
        assert planned <= size <= 400
        assert size % multiple == 0 or size == planned
        assert size == seesaw.ramp.global_batch_size_at(segment.start_step)
    assert max(seesaw.ramp.sizes) == 400 // multiple * multiple


def test_no_batch_is_larger_than_the_rest_of_the_run():
    """The last batches of a decay to zero stay within the samples that are left."""
    for total in (400, 4000, 40_000):
        cuts = discretize(quarter_cosine, factor=2, total_samples=total)
        ramp = Seesaw(base=BatchRamp.constant(8), cuts=cuts, total_samples=total).ramp
        steps = ramp.step_of_sample(total - 1) + 1
        assert (
            ramp.samples_before(steps) - total
            < ramp.phases[-1].global_batch_size
            <= total / 8
        )
        assert list(ramp.sizes) == sorted(ramp.sizes)


def test_discretize_finds_each_level():
    """Every cut is the first sample at which the decay is at the level, and none is
    missing above the final rate.
    """

    def decay(t):
        return 1 - 0.9 * t

    cuts = discretize(decay, factor=1.5, total_samples=999)
    assert [cut.level for cut in cuts] == pytest.approx([1.5**-k for k in range(1, 6)])
    for cut in cuts:
        assert (
            decay(cut.sample / 999)
            <= cut.level * (1 + 1e-9)
            < decay((cut.sample - 1) / 999)
        )
    # A jump over levels is one cut, of the lowest level it passes.
    assert discretize(
        lambda t: 1.0 if t < 0.5 else 0.25, factor=2, total_samples=100
    ) == (Cut(sample=50, level=0.25),)
    assert discretize(lambda t: 1.0, factor=2, total_samples=100) == ()


def test_bad_clocks_cuts_and_limits_are_refused():
    """Unknown names; cuts out of order, that raise the rate, or a limit below the
    planned batch; too many cuts.
    """
    with pytest.raises(ConfigError, match="must be one of none, sqrt, linear"):
        RateRule(batch_scaling="square")
    with pytest.raises(ConfigError, match="must be one of steps, samples"):
        RateRule(clock="tokens")
    base = BatchRamp.constant(8)
    with pytest.raises(RampDefinitionError, match="increasing samples"):
        Seesaw(base=base, cuts=(Cut(sample=20, level=0.5), Cut(sample=10, level=0.25)))
    with pytest.raises(RampDefinitionError, match="lower the rate"):
        Seesaw(base=base, cuts=(Cut(sample=3, level=1.5),))
    with pytest.raises(
        RampDefinitionError, match="at least the largest planned batch, 8"
    ) as caught:
        Seesaw(base=base, cuts=(), max_batch_size=4)
    assert caught.value.nearest == (8,)
    for factor in (1, 0.5, 0, -2, math.nan, math.inf):
        with pytest.raises(
            RampDefinitionError, match=r"seesaw_factor=.* must be above 1"
        ):
            discretize(quarter_cosine, factor=factor, total_samples=100)
    with pytest.raises(RampDefinitionError, match="larger factor"):
        discretize(lambda t: 1 - t, factor=1.0001, total_samples=10**12)
