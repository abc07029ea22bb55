"""Tests of rampup.plan.auto and rampup.plan.ramp_keys."""

import json
import math

import numpy as np
import pytest
from helpers.risk import SPECTRA

from rampup import Config, build_plan
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampDefinitionError,
    RampupError,
)
from rampup.plan.auto import DECISION_PERIOD, AutoSchedule
from rampup.plan.learning_rate import learning_rate_scale
from rampup.plan.noise_scale import NoiseEstimate, default_half_life
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import auto_sizes


def random_config(rng):
    """Return a configuration of `auto` that may or may not be legal, and a number of
    devices.
    """
    fsdp, stages = (int(rng.choice([1, 1, 2])) for _ in range(2))
    start = int(rng.integers(1, 9))
    keys = {
        "batch_size_schedule": "auto",
        "per_device_batch_size_start": start,
        "eval_interval": -1,
    }
    keys["per_device_batch_size"] = start * int(rng.integers(1, 12)) + int(
        rng.random() < 0.1
    )
    keys["gradient_accumulation_steps"] = int(rng.choice([1, 1, 2, 3]))
    keys["microbatch_size"] = int(rng.choice([-1, -1, 1, 2]))
    keys |= {
        "ici_fsdp_parallelism": fsdp,
        "ici_pipeline_parallelism": stages,
        "num_pipeline_repeats": 1,
    }
    return keys, fsdp * stages * int(rng.choice([1, 2, 3]))


def random_noise(rng):
    """Return a lower end of a noise scale: unknown, zero, small or huge."""
    return [
        None,
        0.0,
        float(rng.random() * 100),
        float(10 ** rng.uniform(-3, 9)),
        math.inf,
    ][int(rng.integers(5))]


@pytest.mark.parametrize(
    "number", [400, pytest.param(20_000, marks=pytest.mark.faults)]
)
def test_auto_schedule_never_uses_an_illegal_size(number):
    """Over random configurations and noise: legal sizes only, never smaller, at most
    doubled, and the schedule replays it.
    """
    rng = np.random.default_rng(0)
    legal = 0
    for _ in range(number):
        keys, devices = random_config(rng)
        try:
            plan = build_plan(Config(**keys), devices)
        except RampupError:
            continue
        legal += 1
        half_life = float(10 ** rng.uniform(0, 4))
        auto = AutoSchedule(
            sizes=plan.reserved_sizes,
            half_life_samples=half_life,
            rows=plan.ramp.to_rows(),
        )
        sample, sizes = 0, []
        for step in range(1, 201):
            sizes.append(auto.size)
            sample += auto.size
            if auto.is_due(step):
                before = auto.size
                if rng.random() < 0.1:  # a checkpoint in between changes nothing
                    auto.rows = json.loads(json.dumps(auto.rows))
                noise = random_noise(rng)
                after = auto.decide(step=step, sample=sample, noise_scale=noise)
                assert before <= after <= 2 * before
                assert plan.splitter.allows(after)
                assert after <= plan.reserved_sizes[-1]
                outlook = auto.outlook(
                    step=step,
                    sample=sample,
                    noise=NoiseEstimate(value=None, low=noise, high=None),
                )
                needs = "need a noise" in outlook or "more sample" in outlook
                said = [" -> " in outlook, "the largest batch" in outlook, needs]
                assert said == [
                    after > before,
                    before == after == plan.reserved_sizes[-1],
                    before == after != auto.sizes[-1],
                ]
        replay = BatchRamp.from_schedule(auto.schedule)
        assert [replay.global_batch_size_at(step) for step in range(200)] == sizes
        assert replay.phases[: len(auto.rows)] == auto.ramp.phases
    assert legal > number / 4


def test_auto_schedule_has_hysteresis():
    """It grows only when the lower end is four times the next size and a half-life has
    passed, and never shrinks.
    """
    auto = AutoSchedule(sizes=(8, 16, 32), half_life_samples=100, rows=[[0, 0, 8]])
    assert auto.decide(step=10, sample=80, noise_scale=1e9) == 8
    assert auto.decide(step=20, sample=160, noise_scale=63.9) == 8
    assert auto.decide(step=30, sample=240, noise_scale=64.0) == 16
    assert auto.decide(step=40, sample=339, noise_scale=1e9) == 16
    assert auto.decide(step=50, sample=340, noise_scale=None) == 16
    assert auto.decide(step=50, sample=340, noise_scale=1e9) == 32
    assert auto.decide(step=900, sample=10_000, noise_scale=0.0) == 32
    assert auto.schedule == "0:8 240:16 340:32"
    assert [auto.is_due(step) for step in (0, 1, DECISION_PERIOD)] == [
        False,
        False,
        True,
    ]


def test_auto_schedule_checks_every_size_before_the_run():
    """All sizes share one program, and every one is checked; keys that need all batches
    ahead are refused.
    """
    for largest, error in ((2, RampDefinitionError), (10, BatchDivisibilityError)):
        with pytest.raises(error, match="per_device_batch_size"):
            auto_sizes(4, largest)
    plan = build_plan(Config(batch_size_schedule="auto"), 1)
    assert (plan.ramp.sizes, plan.reserved_sizes) == ((2,), (2, 4, 8))
    assert dict(plan.max_microbatches) == {1: 8}
    pair = {
        "batch_size_schedule": "auto",
        "per_device_batch_size_start": 6,
        "per_device_batch_size": 18,
    }
    with pytest.raises(
        BatchDivisibilityError, match=r"^microbatch_size=4 must divide .*; nearest: 3 "
    ) as caught:
        build_plan(Config(**pair, microbatch_size=4), 1)
    assert (caught.value.key, caught.value.nearest) == ("microbatch_size", (3,))
    assert str(caught.value).count("batch_size_schedule: auto") == 1
    # A pair that is refused is listed once, whatever else is wrong.
    with pytest.raises(RampupError) as caught:
        build_plan(
            Config(
                **pair | {"per_device_batch_size": 20},
                eval_per_device_batch_size=0.3,
                ici_fsdp_parallelism=3,
            ),
            2,
        )
    assert str(caught.value).count("must be a multiple of the first of 12") == 1
    wrong = {
        "measure_gradient_noise": False,
        "rampup_microbatch": "auto",
        "enable_rampup_batch_size": True,
    }
    for budget, own in (
        (
            {},
            {
                "learning_rate_clock": "samples",
                "adam_weight_decay_reference_tokens": 1000,
                "batch_scaling": "timescale",
            },
        ),
        (
            {"train_samples": 1000},
            {"learning_rate_clock": "steps", "learning_rate_schedule_steps": 10},
        ),
    ):
        for name in (wrong | own).keys() - {"batch_scaling"}:
            with pytest.raises(
                ConfigError, match=f"batch_size_schedule=auto needs {name}="
            ):
                Config(batch_size_schedule="auto", **budget, **wrong | own)
    # A rule that one of the sizes breaks, which the run may never reach.
    keys = {
        "batch_size_schedule": "auto",
        "batch_scaling": "sde",
        "adam_b2": 0.5,
        "per_device_batch_size_start": 1,
    }
    with pytest.raises(ConfigError, match="a global batch of 32 samples"):
        build_plan(
            Config(**keys, per_device_batch_size=32, batch_scaling_reference=8), 1
        )


def test_the_plan_says_what_auto_may_do():
    """Text and JSON have the sizes and the bounds of the samples, also after the batch
    has grown; nothing `stays` in vain.
    """
    keys = {
        "batch_size_schedule": "auto",
        "steps": 500,
        "per_device_batch_size_start": 4,
        "per_device_batch_size": 16,
    }
    plan = build_plan(Config(**keys), 4)
    text = str(plan)
    assert (
        "auto: 16, 32 or 64 samples, by the measured noise scale; 500 steps and 8,000"
        " to 32,000 samples" in text
    )
    assert not any(word in text for word in ("stays", "rest", "500 steps, "))
    assert "note: " not in text
    kept = build_plan(Config(**keys, learning_rate_batch_scaling="none"), 4)
    assert "note: learning_rate_batch_scaling=none keeps" in str(kept)
    steps = {"min_steps": 500, "max_steps": 500}
    assert plan.to_dict()["auto"] == {
        "sizes": (16, 32, 64),
        **steps,
        "min_samples": 8_000,
        "max_samples": 32_000,
    }
    grown = build_plan(
        Config(**keys),
        4,
        ramp=BatchRamp.from_schedule("0:16 160:32"),
        reserved_sizes=(16, 32, 64),
    )
    assert grown.auto == {
        "sizes": (32, 64),
        **steps,
        "min_samples": 160 + 490 * 32,
        "max_samples": 160 + 490 * 64,
    }
    assert (
        "auto: 32 or 64 samples, by the measured noise scale; 500 steps and 15,840 to"
        " 31,520 samples" in str(grown)
    )
    advice = AutoSchedule(sizes=(4,), half_life_samples=9, rows=[[0, 0, 4]])
    unknown = NoiseEstimate(value=None, low=None, high=None)
    said = advice.outlook(step=10, sample=40, noise=unknown)
    assert said == "4 samples, the largest batch; the noise scale is not known yet"
    single = build_plan(Config(**keys | {"per_device_batch_size": 4}), 4)
    assert "auto: 16 samples, " in str(single)
    assert "rest" in str(single)
    assert "auto" not in build_plan(Config(), 4).to_dict()


def test_a_budget_bounds_what_auto_may_cost():
    """After random decisions, the run ends with the batch that reaches its budget,
    within the bounds of every plan.
    """
    keys = {
        "batch_size_schedule": "auto",
        "per_device_batch_size_start": 4,
        "per_device_batch_size": 16,
    }
    plan = build_plan(Config(**keys, train_samples=4_001), 4)
    assert plan.auto == {
        "sizes": (16, 32, 64),
        "min_steps": 63,
        "max_steps": 251,
        "min_samples": 4_001,
        "max_samples": 4_064,
    }
    assert "data parallel 4, 4,001 samples\n" in str(plan)
    assert "63 to 251 steps and 4,001 to 4,064 samples" in str(plan)
    assert build_plan(Config(**keys, train_tokens=4_000 * 128 + 1), 4) == plan
    assert default_half_life(plan) == default_half_life(
        plan.grown(BatchRamp.from_schedule("0:16 160:32"))
    )
    assert (plan.total_steps, plan.reference_size) == (251, 64)
    rng = np.random.default_rng(0)
    for _ in range(30):
        auto = AutoSchedule(
            sizes=plan.reserved_sizes,
            half_life_samples=300,
            rows=plan.ramp.to_rows(),
        )
        now, step, bounds = plan, 0, []
        while step < now.total_steps:
            step += 1
            if auto.is_due(step):
                auto.decide(
                    step=step,
                    sample=now.ramp.samples_before(step),
                    noise_scale=random_noise(rng),
                )
                # What has been done stays: the batches, the samples and the rate.
                grown = plan.grown(auto.ramp)
                assert (
                    grown.position(step - 1).segment == now.position(step - 1).segment
                )
                now = grown
                bounds.append(now.auto)
        assert (
            now.consumed_samples - now.position(step - 1).split.global_batch_size
            < 4_001
            <= now.consumed_samples
        )
        for found in bounds:
            assert found["min_steps"] <= step <= found["max_steps"]
            assert found["min_samples"] <= now.consumed_samples <= found["max_samples"]
        for number in range(step):
            segment, sample = now.segment_at(number), now.ramp.samples_before(number)
            progress = (
                segment.progress
                + (number - segment.start_step) * segment.progress_per_step
            )
            assert progress == pytest.approx(sample / 4_001)
            assert segment.scale == math.sqrt(
                now.ramp.global_batch_size_at(number) / 64
            )


def exact_run(start, sizes, rule):
    """Return steps and samples to 1% of the first risk. The rate is the best one for a
    batch of 4, scaled by a rule.
    """
    auto = AutoSchedule(sizes=sizes, half_life_samples=80, rows=[[0, 0, 4]])
    state, step, sample = start, 0, 0
    while state.risk > 0.01 * start.risk:
        if auto.is_due(step):
            auto.decide(step=step, sample=sample, noise_scale=state.noise_scale)
        state = state.step(
            state.best_rate(4) * learning_rate_scale(auto.size, 4, rule), auto.size
        )
        step, sample = step + 1, sample + auto.size
    return step, sample


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_auto_needs_fewer_steps_than_no_ramp_at_a_bounded_cost(spectrum):
    """In exact regressions, `auto` with the rate of SGD takes fewer steps, and at most
    1.3 times the samples, to a risk.
    """
    start = SPECTRA[spectrum]
    steps, samples = exact_run(start, (4,), "none")
    for largest in (16, 64, 512):
        fewer, more = exact_run(start, auto_sizes(4, largest), "linear")
        assert fewer < 0.8 * steps
        assert more <= 1.3 * samples
    if (
        spectrum == "steep"
    ):  # With the rate of the small batch, growing is worse than not growing.
        assert exact_run(start, auto_sizes(4, 64), "none")[0] > steps


def test_the_outlook_says_that_the_limit_is_broken_when_the_noise_falls():
    """Only where the upper end of the interval is below 4 times the batch in use, also
    for the largest batch; an open interval says nothing.
    """
    for sizes in ((8, 16, 32), (8, 16)):
        auto = AutoSchedule(sizes=sizes, half_life_samples=10.0, rows=[[0, 0, 16]])
        for high, is_said in ((63.0, True), (64.0, False), (None, False)):
            value = None if high is None else 50.0
            noise = NoiseEstimate(value=value, low=40.0, high=high)
            said = auto.outlook(step=10, sample=160, noise=noise)
            assert ("The noise scale is too small" in said) == is_said
            assert ("lose at least 20% of their samples" in said) == is_said
