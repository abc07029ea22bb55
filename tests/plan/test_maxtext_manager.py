"""Tests of rampup.plan.maxtext_manager."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError, RampDefinitionError, ResumeMismatchError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan, RampupBatchManager

MAXTEXT = json.loads((Path(__file__).parent.parent / "data" / "ramp_maxtext.json").read_text())


def config(**changes):
    """Return an object with only MaxText's attributes."""
    keys = {
        "per_device_batch_size_start": 4.0,
        "per_device_batch_size_increment": 2.0,
        "per_device_batch_size": 12.0,
        "global_rampup_samples": 500,
        "num_target_devices": 4,
    }
    return SimpleNamespace(**(keys | changes))


@pytest.mark.parametrize("case", [c for c in MAXTEXT if c["carry_overshoot"]["phases"]], ids=lambda c: c["name"])
def test_update_agrees_with_maxtext(case):
    """`update`, called as in MaxText's loop, gives the same phases, attributes and return values."""
    keys = {name: value for name, value in case["config"].items() if name != "gradient_accumulation_steps"}
    manager = RampupBatchManager(SimpleNamespace(num_target_devices=case["num_devices"], **keys), -1)
    phases = case["maxtext_manager"]["phases"]
    steps = min(phases[-1][0] + 2, 3000)
    for step in range(steps):
        start, size, samples = max(phase for phase in phases if phase[0] <= step)
        assert manager.global_batch_size_current == size
        assert manager.total_used_samples == samples + (step - start) * size
        assert manager.num_accum_samples == (step - start) * size
        assert manager.update() == (step + 1 < case["maxtext_manager"]["ramp_steps"])
    assert manager.total_rampup_steps == case["maxtext_manager"]["total_rampup_steps"]
    assert (manager.global_batch_size_start, manager.global_batch_size_end) == (phases[0][1], phases[-1][1])
    assert manager.increment == phases[1][1] - phases[0][1]
    assert manager.global_rampup_samples == keys["global_rampup_samples"]


@given(st.integers(-1, 200), st.booleans(), st.integers(1, 3))
def test_resume_agrees_with_stepping(step_num, carry, factor):
    """A manager created at step N equals one after N updates."""
    keys = config(rampup_carry_overshoot=carry, gradient_accumulation_steps=factor)
    stepped = RampupBatchManager(keys, 0)
    for _ in range(step_num):
        stepped.update()
    resumed = RampupBatchManager(keys, step_num)
    names = ("global_batch_size_current", "total_used_samples", "num_accum_samples", "rampup_active", "step", "phase")
    assert [getattr(resumed, name) for name in names] == [getattr(stepped, name) for name in names]


def test_batches_include_accumulation():
    """With G = 2 every batch is twice as large, as MaxText's loader expects. MaxText's manager ignores G."""
    manager = RampupBatchManager(config(gradient_accumulation_steps=2), 0)
    assert (manager.global_batch_size_start, manager.increment, manager.global_batch_size_end) == (32, 16, 96)


def test_manager_of_other_ramps():
    """A schedule, a constant batch and a plan have the same interface."""
    scheduled = RampupBatchManager(config(batch_size_schedule="0:8 100:16"), 13)
    assert scheduled.global_batch_size_current == 16
    assert scheduled.global_rampup_samples == 104
    with pytest.raises(RampDefinitionError, match="no single increment"):
        _ = scheduled.increment
    constant = RampupBatchManager(config(enable_rampup_batch_size=False), 5)
    assert (constant.update(), constant.increment, constant.total_used_samples) == (False, 0, 288)
    plan = RampPlan(ramp=BatchRamp.constant(8), splitter=BatchSplitter(data_parallel_size=1), num_devices=1, total_steps=9)
    assert RampupBatchManager.from_plan(plan, 3).total_used_samples == 24


def test_missing_attributes_are_named():
    """The error for a config without an attribute names the attribute."""
    keys = config()
    del keys.num_target_devices
    with pytest.raises(ConfigError, match="no attribute num_target_devices"):
        RampupBatchManager(keys, 0)


def test_step_num_below_minus_one():
    """-1 and 0 mean no batch. Smaller numbers are rejected."""
    with pytest.raises(RampDefinitionError, match="step_num=-2"):
        RampupBatchManager(config(), -2)


def test_state_round_trip():
    """A saved state is restored exactly in a new manager of the same ramp."""
    manager = RampupBatchManager(config(), 9)
    state = json.loads(json.dumps(manager.state_dict()))
    other = RampupBatchManager(config(), 0)
    other.load_state_dict(state)
    assert repr(other) == repr(manager)
    assert state["consumed_samples"] == 152


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "x"}, "a different ramp"),
        ({"consumed_samples": 3}, "consumed_samples=3 after step 9"),
        ({"step": None}, None),
    ],
)
def test_load_state_dict_rejects_other_states(change, message):
    """A state of a different ramp, or one that contradicts itself, is rejected."""
    state = RampupBatchManager(config(), 9).state_dict() | change
    if message is None:
        del state["step"]
        message = "lacks step"
    with pytest.raises(ResumeMismatchError, match=message):
        RampupBatchManager(config(), 0).load_state_dict(state)


def test_html():
    """In a notebook, a manager shows its progress."""
    assert "global batch size" in RampupBatchManager(config(), 9)._repr_html_()
