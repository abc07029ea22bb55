"""Tests of rampup.plan.per_device."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError, RampupError
from rampup.plan.per_device import RampKeys, global_batch_size, ramp_from_config
from rampup.plan.split import BatchSplitter

MAXTEXT = json.loads((Path(__file__).parent.parent / "data" / "ramp_maxtext.json").read_text())
LINEAR = {
    "num_devices": 4,
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 4.0,
    "per_device_batch_size_increment": 2.0,
    "per_device_batch_size": 12.0,
    "global_rampup_samples": 500,
}


@pytest.mark.parametrize("case", MAXTEXT, ids=lambda c: c["name"])
def test_ramp_from_config_agrees_with_maxtext(case):
    """The same keys give the phases of MaxText. With accumulation, every batch and sample count includes it."""
    keys = case["config"]
    factor = keys["gradient_accumulation_steps"]
    if case["carry_overshoot"]["phases"] is None:
        with pytest.raises(BatchDivisibilityError, match="whole number of samples"):
            ramp_from_config(num_devices=case["num_devices"], **keys)
        return
    ramp = ramp_from_config(num_devices=case["num_devices"], **keys)
    assert [size // factor for size in ramp.sizes] == [size for _, size, _ in case["maxtext_manager"]["phases"]]
    if factor == 1:
        assert [[p.start_step, p.global_batch_size, p.start_sample] for p in ramp.phases] == case["maxtext_manager"]["phases"]


def test_accumulation_counts_samples():
    """With G = 4, each phase has the steps of a four times larger batch. MaxText's manager ignores G."""
    ramp = ramp_from_config(
        num_devices=8,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=1,
        per_device_batch_size_increment=1,
        per_device_batch_size=4,
        global_rampup_samples=4096,
        gradient_accumulation_steps=4,
    )
    assert ramp.sizes == (32, 64, 96, 128)
    assert ramp.ramp_steps == 80


def test_floats_are_exact_decimals():
    """0.1 -> 1 by 0.1 on 10 devices is legal, although 0.1 is not a binary fraction. MaxText rejects it."""
    ramp = ramp_from_config(
        num_devices=10,
        enable_rampup_batch_size=True,
        per_device_batch_size_start=0.1,
        per_device_batch_size_increment=0.1,
        per_device_batch_size=1.0,
        global_rampup_samples=50,
    )
    assert ramp.sizes == tuple(range(1, 11))


@pytest.mark.parametrize(
    ("change", "error", "key", "nearest"),
    [
        ({"per_device_batch_size_start": 0}, RampDefinitionError, "per_device_batch_size_start", (2,)),
        ({"per_device_batch_size_start": -4}, RampDefinitionError, "per_device_batch_size_start", (2,)),
        ({"per_device_batch_size_increment": 0}, RampDefinitionError, "per_device_batch_size_increment", (1,)),
        ({"per_device_batch_size_increment": -2}, RampDefinitionError, "per_device_batch_size_increment", (1,)),
        ({"per_device_batch_size_increment": 3}, RampDefinitionError, "per_device_batch_size", (10, 13)),
        ({"per_device_batch_size": 4}, RampDefinitionError, "per_device_batch_size", (6,)),
        ({"per_device_batch_size": 2}, RampDefinitionError, "per_device_batch_size", (6,)),
        ({"per_device_batch_size": "x"}, RampDefinitionError, "per_device_batch_size", ()),
        ({"per_device_batch_size": None}, RampDefinitionError, "per_device_batch_size", ()),
        ({"global_rampup_samples": 0}, RampDefinitionError, "global_rampup_samples", (1,)),
        ({"global_rampup_samples": -100}, RampDefinitionError, "global_rampup_samples", (1,)),
        ({"global_rampup_samples": 12.5}, RampDefinitionError, "global_rampup_samples", (12, 13)),
        ({"batch_size_schedule": "0:8"}, RampDefinitionError, "batch_size_schedule", ()),
        ({"per_device_batch_size_start": 3.7}, BatchDivisibilityError, "per_device_batch_size_start", (2, 4)),
        ({"per_device_batch_size": 12.1}, BatchDivisibilityError, "per_device_batch_size", (12, 14)),
        ({"per_device_batch_size_increment": 2.2}, BatchDivisibilityError, "per_device_batch_size_increment", (2, 4)),
    ],
)
def test_ramp_from_config_errors_have_legal_values(change, error, key, nearest):
    """Each error names its key, and its nearest values are legal with the other keys unchanged."""
    keys = LINEAR | {"splitter": BatchSplitter(data_parallel_size=4)} | change
    with pytest.raises(error) as caught:
        ramp_from_config(**keys)
    assert caught.value.key == key
    assert caught.value.nearest == nearest
    for value in nearest:
        ramp_from_config(**(keys | {key: value}))


sizes = st.fractions(min_value=Fraction(1, 8), max_value=12, max_denominator=8)


@given(st.integers(1, 8), st.integers(1, 3), sizes, sizes, sizes, st.integers(1, 1000))
def test_ramp_from_config_always_returns_a_ramp_or_a_named_error(devices, G, start, increment, end, samples):
    """Every combination of keys gives a ramp of the requested sizes, or an error with a key."""
    try:
        ramp = ramp_from_config(
            num_devices=devices,
            gradient_accumulation_steps=G,
            enable_rampup_batch_size=True,
            per_device_batch_size_start=start,
            per_device_batch_size_increment=increment,
            per_device_batch_size=end,
            global_rampup_samples=samples,
        )
    except RampupError as error:
        assert error.key
    else:
        assert ramp.sizes == tuple(int(devices * G * (start + increment * n)) for n in range(len(ramp.sizes)))
        assert ramp.sizes[-1] == devices * G * end


def test_batch_size_schedule_sets_the_global_batch():
    """A schedule may count in tokens, and needs no per-device sizes."""
    ramp = ramp_from_config(
        num_devices=4,
        per_device_batch_size=1,
        gradient_accumulation_steps=2,
        batch_size_schedule="0:8 1K:16",
        batch_size_schedule_unit="tokens",
        max_target_length=10,
    )
    assert [(p.start_sample, p.global_batch_size) for p in ramp.phases] == [(0, 8), (104, 16)]
    with pytest.raises(ConfigError, match="must be one of samples, tokens"):
        ramp_from_config(num_devices=4, per_device_batch_size=1, batch_size_schedule="0:8", batch_size_schedule_unit="bytes")


def test_global_batch_size_is_exact():
    """Fractions of a sample per device must give a whole global batch."""
    assert global_batch_size("1/3", num_devices=3, gradient_accumulation_steps=2, key="k") == 2
    with pytest.raises(BatchDivisibilityError, match="nearest k: 1/3, 2/3"):
        global_batch_size(0.5, num_devices=3, gradient_accumulation_steps=1, key="k")


def test_keys_are_one_object_or_arguments():
    """`RampKeys`, the same keys as arguments, and arguments in the place of some keys agree."""
    keys = RampKeys(**{key: value for key, value in LINEAR.items() if key != "num_devices"})
    assert ramp_from_config(keys, num_devices=4) == ramp_from_config(**LINEAR)
    assert ramp_from_config(keys, num_devices=4, per_device_batch_size=16).sizes[-1] == 64
    with pytest.raises(TypeError, match="per_device_batch_sise"):
        ramp_from_config(num_devices=4, per_device_batch_sise=2)
