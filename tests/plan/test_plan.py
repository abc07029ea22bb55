"""Tests of rampup.plan.plan."""

import collections
import sys

import pytest

from rampup import Config, build_plan
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan, describe

KEYS = {
    "num_devices": 4,
    "total_steps": 100,
    "eval_global_batch_size": 48,
    "splitter": BatchSplitter(data_parallel_size=4),
}
KEYS |= {"ramp": BatchRamp.linear(start=16, increment=8, end=48, samples=500)}


def test_to_dict_has_the_documented_format():
    """The example of the documentation, with the names and values of `rampup plan
    --json`.
    """
    plan = RampPlan(**KEYS).to_dict()
    head = {
        "num_devices": 4,
        "num_increments": 4,
        "samples_per_increment": 125,
        "ramp_steps": 22,
        "ramp_samples": 560,
    }
    head |= {"total_steps": 100, "num_compiled_shapes": 1}
    assert {name: plan[name] for name in plan if name not in ("phases", "eval")} == head
    sizes = {
        "data_parallel_size": 4,
        "num_pipeline_microbatches": 1,
        "num_stages": 1,
        "num_repeats": 1,
        "bubble_fraction": 0.0,
    }
    split = (
        "global_batch_size",
        "per_device_batch_size",
        "accumulation_steps",
        "microbatch_size",
    )
    names = ("start_step", "start_sample", "num_steps", *split)
    steps = [
        (0, 0, 8, 16, 4, 2, 2),
        (8, 128, 6, 24, 6, 3, 2),
        (14, 272, 4, 32, 8, 4, 2),
        (18, 400, 4, 40, 10, 5, 2),
        (22, 560, None, 48, 12, 6, 2),
    ]
    assert plan["phases"] == [
        dict(zip(names, row, strict=True)) | sizes | {"learning_rate_scale": 1.0}
        for row in steps
    ]
    assert plan["eval"] == dict(zip(split, (48, 12, 1, 12), strict=True)) | sizes


@pytest.mark.core
def test_plan_checks_every_phase_and_evaluation():
    """An invalid phase in the middle and an invalid evaluation batch are in one
    error.
    """
    keys = KEYS | {
        "ramp": BatchRamp.from_schedule("0:16 100:18 200:32"),
        "eval_global_batch_size": 6,
    }
    with pytest.raises(BatchDivisibilityError) as caught:
        RampPlan(**keys)
    assert "phase 1, from sample 112" in str(caught.value)
    assert "(evaluation)" in str(caught.value)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("start", [0, 40])
def test_phases_that_a_longer_run_has_reached_are_not_unreached(start):
    """A run of 40 steps is shown with steps=12, which end before its last phase."""
    ramp = BatchRamp.from_schedule("0:8 80:16 240:32").resumed_at(start)
    plan = RampPlan(
        ramp=ramp,
        splitter=BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=12,
    )
    said = "\n".join(describe.advice(plan))
    assert ("batches of 16 samples, and 32 are never reached" in said) == (start == 0)


@pytest.mark.parametrize(
    ("name", "value"), [("ramp", "0:16"), ("splitter", 8), ("rate", "samples")]
)
def test_a_plan_refuses_parts_of_another_type_in_words(name, value):
    """The error says what to give."""
    parts = {
        "ramp": BatchRamp.constant(8),
        "splitter": BatchSplitter(data_parallel_size=1),
        "num_devices": 1,
        "total_steps": 1,
    }
    with pytest.raises(
        RampDefinitionError, match=f"{name} must be a .* give "
    ) as found:
        RampPlan(**parts | {name: value})
    assert found.value.key == name


@pytest.mark.core
def test_phases_that_are_over_need_no_split():
    """A ramp that goes on at a step is split from there on: 8 replicas take the batches
    of 64, not the 2 samples of a phase that is over. One that has steps left is refused.
    """
    keys = {"num_devices": 8, "total_steps": 14}
    keys |= {"splitter": BatchSplitter(data_parallel_size=8)}
    ramp = BatchRamp.from_schedule("0:2 18:64")
    for step in (0, 8):
        with pytest.raises(BatchDivisibilityError, match="phase 0, from sample 0"):
            RampPlan(ramp=ramp.resumed_at(step), **keys)
    plan = RampPlan(ramp=ramp.resumed_at(9), **keys)
    whole = RampPlan(**keys | {"ramp": BatchRamp.constant(64)})
    assert plan.position(9).split == plan.position(13).split == whole.splits[0]
    assert plan.max_microbatches == whole.max_microbatches
    assert plan.consumed_samples == 18 + 5 * 64
    assert plan.ramp == ramp
    assert plan.ramp.fingerprint == ramp.fingerprint
    assert len(plan.phase_rows()) == 2
    assert "is over" in str(plan)


def test_a_resumed_ramp_keeps_its_shapes_where_all_phases_can_be_split():
    """On the devices of before, a run that goes on has the microbatch of before, bit for
    bit, although the phases to come would allow a larger one.
    """
    plan = RampPlan(**KEYS)
    again = RampPlan(**KEYS | {"ramp": KEYS["ramp"].resumed_at(50)})
    assert again.splits == plan.splits
    assert again.max_microbatches == plan.max_microbatches


def test_advice_about_a_small_microbatch():
    """BLOOM's ramp on 16 devices: 128 passes of one sample per step after the ramp, or
    one of 128 with `auto`.
    """
    ramp = BatchRamp.linear(
        start=192, increment=16, end=2048, samples=9_765_625, carry_overshoot=True
    )
    plan = RampPlan(
        ramp=ramp,
        splitter=BatchSplitter(data_parallel_size=16),
        num_devices=16,
        total_steps=10**5,
    )
    (advice,) = describe.advice(plan)
    assert "runs 128 microbatches" in advice
    assert "auto would run 1 of 128" in advice
    assert describe.advice(RampPlan(**KEYS)) == ()


def test_str_leaves_out_the_middle_of_many_phases():
    """A plan of a thousand phases prints the first and the last of them."""
    ramp = BatchRamp.linear(start=4, increment=4, end=4000, samples=10**6)
    plan = RampPlan(
        ramp=ramp,
        splitter=BatchSplitter(data_parallel_size=4),
        num_devices=4,
        total_steps=10**6,
    )
    lines = str(plan).splitlines()
    assert len(lines) < 50
    assert any(set(line.split()) == {"..."} for line in lines)
    assert lines[-3].split()[0] == "999"
    assert lines[-2].startswith("980 phases left out")


def calls_to_plan(number, mode):
    """Return the Python calls that it takes to build, look up and show a plan of so
    many phases.
    """
    counted = collections.Counter()
    keys = {
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": 1,
        "per_device_batch_size_increment": 1,
    }
    config = Config(
        **keys,
        per_device_batch_size=number,
        global_rampup_samples=10**12,
        steps=10**12,
        rampup_microbatch=mode,
    )
    sys.setprofile(lambda frame, event, argument: counted.update([event]))
    try:
        plan = build_plan(config, 65_536)
        facts = str(plan), plan.to_dict(), plan.position(10**12)
    finally:
        sys.setprofile(None)
    assert len(facts[1]["phases"]) == number == facts[2].phase.index + 1
    return counted["call"]


@pytest.mark.parametrize("mode", ["fixed", "per_phase", "auto"])
def test_work_grows_with_the_phases_and_not_with_their_square(mode):
    """Twice as many phases, on 65,536 devices and with steps to 10**12, take twice as
    many calls.
    """
    assert calls_to_plan(1000, mode) < 2.1 * calls_to_plan(500, mode)


def test_axes_agree_with_the_splitter_and_the_devices():
    """The data axis has the replicas, the pipeline axis the stages, the tensor axis the
    rest; other sizes are all named.
    """
    splitter = BatchSplitter(data_parallel_size=2, num_stages=2)
    plan = RampPlan(
        ramp=BatchRamp.constant(8), splitter=splitter, num_devices=12, total_steps=1
    )
    assert plan.axes == MeshAxes(data=2, pipeline=2, tensor=3)
    assert RampPlan(**KEYS).axes == MeshAxes(data=4)
    axes = MeshAxes(data=2, fsdp=2)
    assert RampPlan(**KEYS, axes=axes).axes is axes
    with pytest.raises(
        ConfigError, match=r"num_devices=8.* 4; data_parallel_size=8.* 4; num_stages=1"
    ) as caught:
        RampPlan(
            **(KEYS | {"splitter": BatchSplitter(data_parallel_size=4, num_stages=2)}),
            axes=MeshAxes(data=8),
        )
    assert caught.value.key == "axes"
    with pytest.raises(
        BatchDivisibilityError, match=r"num_devices=6 must be a multiple of .* = 4"
    ) as caught:
        RampPlan(**(KEYS | {"num_devices": 6}))
    assert caught.value.nearest == (4, 8)
    for steps in (-3, 0):
        with pytest.raises(
            ConfigError, match=f"total_steps={steps} must be at least 1"
        ):
            RampPlan(**(KEYS | {"total_steps": steps}))


def test_the_plan_warns_of_choices_that_cost_loss():
    """A rate above twice the tuned one, and accumulation on a single replica; neither
    below the limit or with two replicas.
    """

    def notes(devices, **keys):
        schedule = {
            "batch_size_schedule": "0:8 80:64",
            "batch_scaling": "sqrt",
            "microbatch_size": 4,
            "steps": 90,
        }
        return " ".join(describe.advice(build_plan(Config(**schedule | keys), devices)))

    assert "a batch of 64 has 2.83 times the learning rate that was tuned" in notes(
        1, batch_scaling_reference=8
    )
    assert "times the learning rate" not in notes(1, batch_scaling_reference=16)
    assert "one replica accumulates 16 microbatches" in notes(1)
    assert "one replica" not in notes(2) + notes(
        1, batch_size_schedule="0:4", per_device_batch_size=4
    )
