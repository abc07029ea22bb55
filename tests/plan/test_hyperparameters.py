"""Tests of rampup.plan.hyperparameters."""

import math

import pytest

from rampup.errors import ConfigError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan, RateRule
from rampup.plan.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.plan.learning_rate import Cut, Seesaw

SIZES = (8, 24, 40, 1000, 3)


def plan(ramp=None, **keys):
    """Return a plan of five phases on one device."""
    ramp = ramp or BatchRamp.piecewise(
        [(1000 * k, size) for k, size in enumerate(SIZES)]
    )
    return RampPlan(
        ramp=ramp,
        splitter=BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=1000,
        **keys,
    )


@pytest.mark.parametrize("b", [0.9, 0.95, 0.999, 0.5])
@pytest.mark.parametrize("reference", [None, 1, 128])
def test_half_life_in_tokens_is_constant(b, reference):
    """b**(1/B) is the same in every phase to 1e-12, for b1 and b2, whatever the
    reference batch.
    """
    scaling = AdamScaling(b1="half_life", b2="half_life")
    found = adam_constants(
        plan(rate=RateRule(reference_batch_size=reference)),
        AdamConstants(b1=b, b2=b),
        scaling,
    )
    size = reference or SIZES[-1]
    for constants, batch in zip(found, SIZES, strict=True):
        assert constants.b1 == constants.b2
        assert math.log(constants.b2) / batch == pytest.approx(
            math.log(b) / size, rel=1e-12
        )
        if constants.b2 > 1e-300:
            assert constants.b2 ** (1 / batch) == pytest.approx(
                b ** (1 / size), abs=1e-12
            )


def test_sde_rule():
    """1 - b and the square of the learning rate are in proportion to the batch, and eps
    goes with its square root.
    """
    scaling = AdamScaling(b1="sde", b2="sde", eps="sde")
    base = AdamConstants(b1=0.96, b2=0.98, eps=1e-8)
    found = adam_constants(
        plan(BatchRamp.from_schedule("0:16 100:64 1000:256")), base, scaling
    )
    for constants, ratio in zip(found, (1 / 16, 1 / 4, 1), strict=True):
        assert (constants.b1, constants.b2) == (
            pytest.approx(1 - ratio * 0.04),
            pytest.approx(1 - ratio * 0.02),
        )
        assert constants.eps == pytest.approx(1e-8 / math.sqrt(ratio))


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear"])
def test_timescale_of_the_weight_decay_is_constant(scaling):
    """B / (learning rate * weight decay) is the same in every phase, with any scaling
    of the learning rate and with Seesaw.
    """
    ramp = BatchRamp.from_schedule("0:16 1000:64 4000:48")
    cuts = tuple(
        Cut(sample=sample, level=level)
        for sample, level in ((5000, 0.5), (7000, 0.25), (9000, 0.125))
    )
    seesaw = Seesaw(base=ramp, cuts=cuts, max_batch_size=100, multiple=4)
    for made_by in (None, seesaw):
        rule = RateRule(batch_scaling=scaling, seesaw=made_by)
        made = plan(ramp=made_by.ramp if made_by else ramp, rate=rule)
        found = adam_constants(
            made, AdamConstants(weight_decay=0.1), AdamScaling(weight_decay="timescale")
        )
        assert len(found) == len(made.clock)
        for constants, segment in zip(found, made.clock, strict=True):
            assert segment.global_batch_size / (
                segment.scale * constants.weight_decay
            ) == pytest.approx(48 / 0.1)


def test_floor_and_ceiling():
    """Scaled values stay within their limits; others stay. Ten times the tokens take a
    tenth or a third of the weight decay.
    """
    base = AdamConstants(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3)
    assert set(adam_constants(plan(), base, AdamScaling())) == {base}
    scaling = AdamScaling(weight_decay="timescale", token_ratio=10.0)
    assert scaling.constants(base, ratio=1, rate_scale=1).weight_decay == pytest.approx(
        0.03
    )
    scaling = AdamScaling(weight_decay="power_lines", token_ratio=10.0)
    assert scaling.constants(base, ratio=1, rate_scale=1).weight_decay == pytest.approx(
        0.3 / 2.97, rel=1e-3
    )
    scaling = AdamScaling(b2="half_life", b2_floor=0.95, b2_ceiling=0.9999)
    values = [
        scaling.constants(AdamConstants(b2=0.999), ratio=batch / 32, rate_scale=1).b2
        for batch in (1, 32, 512, 2048)
    ]
    assert values == [0.9999, 0.999, pytest.approx(0.999**16), 0.95]
    assert (
        AdamScaling(b2_floor=0.99)
        .constants(AdamConstants(b2=0.9), ratio=2, rate_scale=1)
        .b2
        == 0.9
    )


@pytest.mark.parametrize(
    ("scaling", "reference", "b2", "text"),
    [
        (
            AdamScaling(b2="sde"),
            3,
            0.95,
            (
                r"1 - 333.333 \* .* = -15.66.*below 0; set adam_b2_floor, or use the"
                r" rule half_life"
            ),
        ),
        (
            AdamScaling(b2="half_life"),
            1000,
            1 - 1e-7,
            "is 1 in float32; set AdamScaling\\(b2_ceiling=",
        ),
    ],
)
def test_values_that_are_no_decay_rates_are_refused(scaling, reference, b2, text):
    """The error has the formula, the phase and the remedy, which works."""
    with pytest.raises(ConfigError, match=text) as caught:
        adam_constants(
            plan(rate=RateRule(reference_batch_size=reference)),
            AdamConstants(b2=b2),
            scaling,
        )
    assert caught.value.key == "batch_scaling"


@pytest.mark.parametrize(
    "wrong", [{"b2": "halflife"}, {"eps": "half_life"}, {"weight_decay": "sde"}]
)
def test_unknown_rules_are_refused(wrong):
    """Each constant has its own rules."""
    with pytest.raises(ConfigError, match=f"AdamScaling.{next(iter(wrong))}="):
        AdamScaling(**wrong)
