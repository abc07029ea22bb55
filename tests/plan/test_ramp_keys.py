"""Tests of rampup.plan.ramp_keys."""

from types import SimpleNamespace

import pytest
from helpers.dialect_files import cases
from hypothesis import given
from hypothesis import strategies as st

from rampup.config.schema import Config
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError
from rampup.plan import BatchRamp, RampPlan, RampupBatchManager, ramp_keys
from rampup.plan.split import BatchSplitter

MAXTEXT = cases("ramp_maxtext")
LINEAR = {
    "per_device_batch_size_start": 4.0,
    "per_device_batch_size_increment": 2.0,
    "per_device_batch_size": 12.0,
}
LINEAR |= {"global_rampup_samples": 500}


def ramp_from_config(num_devices, *, splitter=None, **keys):
    """Return the ramp of an object with these attributes."""
    config = SimpleNamespace(**({"enable_rampup_batch_size": False} | keys))
    return ramp_keys.ramp_from_config(config, num_devices, splitter=splitter)


@pytest.mark.parametrize("case", MAXTEXT, ids=lambda c: c["name"])
@pytest.mark.parametrize("rule", ["maxtext_manager", "carry_overshoot"])
def test_ramp_from_config_agrees_with_maxtext(case, rule):
    """Both boundary rules give the phases of MaxText's manager and of exact counting;
    accumulation is a factor of all.
    """
    keys = case["config"] | {
        "num_devices": case["num_devices"],
        "rampup_carry_overshoot": rule == "carry_overshoot",
    }
    if case["carry_overshoot"]["phases"] is None:
        with pytest.raises(BatchDivisibilityError, match="whole number of samples"):
            ramp_from_config(**keys)
        return
    G, expected = keys["gradient_accumulation_steps"], case[rule]["phases"]
    assert ramp_from_config(**keys).sizes == tuple(G * size for _, size, _ in expected)
    ramp = ramp_from_config(**keys | {"gradient_accumulation_steps": 1})
    assert [
        [p.start_step, p.global_batch_size, p.start_sample] for p in ramp.phases
    ] == expected


@pytest.mark.parametrize(
    ("change", "error", "key", "nearest"),
    [
        (
            {"per_device_batch_size_start": 0},
            RampDefinitionError,
            "per_device_batch_size_start",
            (2,),
        ),
        (
            {"per_device_batch_size_increment": 0},
            RampDefinitionError,
            "per_device_batch_size_increment",
            (1,),
        ),
        (
            {"per_device_batch_size_increment": 3},
            RampDefinitionError,
            "per_device_batch_size",
            (10, 13),
        ),
        (
            {"per_device_batch_size": 4},
            RampDefinitionError,
            "per_device_batch_size",
            (6,),
        ),
        (
            {"per_device_batch_size": 2},
            RampDefinitionError,
            "per_device_batch_size",
            (6,),
        ),
        (
            {"per_device_batch_size": "x"},
            RampDefinitionError,
            "per_device_batch_size",
            (),
        ),
        (
            {"global_rampup_samples": 0},
            RampDefinitionError,
            "global_rampup_samples",
            (1,),
        ),
        (
            {"global_rampup_samples": 12.5},
            RampDefinitionError,
            "global_rampup_samples",
            (12, 13),
        ),
        (
            {"batch_size_schedule": "0:8"},
            RampDefinitionError,
            "batch_size_schedule",
            (),
        ),
        (
            {"per_device_batch_size_start": 3.7},
            BatchDivisibilityError,
            "per_device_batch_size_start",
            (2, 4),
        ),
        (
            {"per_device_batch_size": 12.1},
            BatchDivisibilityError,
            "per_device_batch_size",
            (12, 14),
        ),
        (
            {"per_device_batch_size_increment": 2.2},
            BatchDivisibilityError,
            "per_device_batch_size_increment",
            (2, 4),
        ),
    ],
)
def test_ramp_from_config_errors_have_legal_values(change, error, key, nearest):
    """Each error names its key, and its nearest values are legal with the other keys
    unchanged.
    """
    splitter, keys = (
        BatchSplitter(data_parallel_size=4),
        LINEAR | {"enable_rampup_batch_size": True} | change,
    )
    with pytest.raises(error) as caught:
        ramp_from_config(4, splitter=splitter, **keys)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)
    for value in nearest:
        ramp_from_config(4, splitter=splitter, **(keys | {key: value}))


def config(**changes):
    """Return an object with only MaxText's attributes."""
    return SimpleNamespace(num_target_devices=4, **LINEAR | changes)


@pytest.mark.parametrize(
    "case",
    [c for c in MAXTEXT if c["carry_overshoot"]["phases"]],
    ids=lambda c: c["name"],
)
def test_update_agrees_with_maxtext(case):
    """`update`, called as in MaxText's loop, gives the same phases, attributes and
    return values.
    """
    keys = {
        name: value
        for name, value in case["config"].items()
        if name != "gradient_accumulation_steps"
    }
    manager = RampupBatchManager(
        SimpleNamespace(num_target_devices=case["num_devices"], **keys), -1
    )
    phases = case["maxtext_manager"]["phases"]
    steps = min(phases[-1][0] + 2, 3000)
    for step in range(steps):
        start, size, samples = max(phase for phase in phases if phase[0] <= step)
        assert manager.global_batch_size_current == size
        assert manager.total_used_samples == samples + (step - start) * size
        assert manager.num_accum_samples == (step - start) * size
        assert manager.update() == (step + 1 < case["maxtext_manager"]["ramp_steps"])
    assert manager.total_rampup_steps == case["maxtext_manager"]["total_rampup_steps"]
    assert (manager.global_batch_size_start, manager.global_batch_size_end) == (
        phases[0][1],
        phases[-1][1],
    )
    assert manager.increment == phases[1][1] - phases[0][1]
    assert manager.global_rampup_samples == keys["global_rampup_samples"]


@pytest.mark.core
@given(st.integers(-1, 200), st.booleans(), st.integers(1, 3))
def test_resume_agrees_with_stepping(step_num, carry, factor):
    """A manager created at step N equals one after N updates."""
    keys = config(rampup_carry_overshoot=carry, gradient_accumulation_steps=factor)
    stepped = RampupBatchManager(keys, 0)
    for _ in range(step_num):
        stepped.update()
    resumed = RampupBatchManager(keys, step_num)
    names = (
        "global_batch_size_current",
        "total_used_samples",
        "num_accum_samples",
        "rampup_active",
        "step",
        "phase",
    )
    assert [getattr(resumed, name) for name in names] == [
        getattr(stepped, name) for name in names
    ]


def test_manager_of_other_ramps():
    """A schedule, a constant batch and a plan have the same interface; a missing
    attribute and a step below -1 are named.
    """
    with pytest.raises(
        ConfigError, match=r"devices; a rampup.Config .*from_plan\(build_plan\(config"
    ):
        RampupBatchManager(Config(per_device_batch_size=4))
    with pytest.raises(ConfigError, match="no attribute num_target_devices"):
        RampupBatchManager(SimpleNamespace(per_device_batch_size=4), 0)
    with pytest.raises(RampDefinitionError, match="step_num=-2"):
        RampupBatchManager(config(), -2)
    with pytest.raises(ConfigError, match="must be one of samples, tokens"):
        RampupBatchManager(
            config(batch_size_schedule="0:8", batch_size_schedule_unit="bytes"), 0
        )
    scheduled = RampupBatchManager(config(batch_size_schedule="0:8 100:16"), 13)
    assert scheduled.global_batch_size_current == 16
    assert scheduled.global_rampup_samples == 104
    with pytest.raises(RampDefinitionError, match="no single increment"):
        _ = scheduled.increment
    constant = RampupBatchManager(config(enable_rampup_batch_size=False), 5)
    assert (constant.update(), constant.increment, constant.total_used_samples) == (
        False,
        0,
        288,
    )
    plan = RampPlan(
        ramp=BatchRamp.constant(8),
        splitter=BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=9,
    )
    assert RampupBatchManager.from_plan(plan, 3).total_used_samples == 24
