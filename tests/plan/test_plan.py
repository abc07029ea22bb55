"""Tests of rampup.plan.plan."""

import collections
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup import Config, build_plan
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan, describe
from rampup.plan.describe import token_budget

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
    head |= {"total_steps": 100, "num_compiled_shapes": 1, "global_batch_to_load": 48}
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
    assert lines[-2].split()[0] == "999"


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


def test_fallbacks_use_microbatch_sizes_of_earlier_phases():
    """Nearest phase first, if its size divides the batch. The maximum numbers of
    microbatches include them.
    """
    splitter = BatchSplitter(data_parallel_size=2, rampup_microbatch="per_phase")
    plan = RampPlan(
        ramp=BatchRamp.from_schedule("0:4 40:8 80:12 200:24"),
        splitter=splitter,
        num_devices=2,
        total_steps=100,
    )
    assert [split.microbatch_size for split in plan.splits] == [2, 4, 6, 12]
    assert [(s.microbatch_size, s.accumulation_steps) for s in plan.fallbacks(3)] == [
        (6, 2),
        (4, 3),
        (2, 6),
    ]
    assert [s.microbatch_size for s in plan.fallbacks(2)] == [2]
    assert plan.fallbacks(0) == ()
    assert plan.max_microbatches == {2: 6, 4: 3, 6: 2, 12: 1}


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
    with pytest.raises(ConfigError, match="total_steps=-3 must be at least 0"):
        RampPlan(**(KEYS | {"total_steps": -3}))


LOADED = {
    "-1": None,
    "1": "= 8 rows per step",
    "2": "8 * 2 = 16 rows per step, if all hosts loaded; 1 of 2 does",
}
LOADED |= {
    "1/4": (
        "8 * 0.25 = 2 rows per step: MaxText's loaders of 4 times as many hosts take"
        " turns"
    )
}


@pytest.mark.parametrize(("factor", "said"), LOADED.items())
def test_plan_says_what_is_loaded(factor, said):
    """The rows of a step for every kind of expansion factor, in the printed plan
    too.
    """
    plan = RampPlan(
        **{**KEYS, "ramp": BatchRamp.constant(8)},
        expansion_factor_real_data=Fraction(factor),
    )
    loading = describe.loading(plan)
    assert (loading is None) == (said is None)
    if said is not None:
        assert said in loading
        assert f"loading: {loading}" in str(plan)
        assert (
            f"* {float(Fraction(factor)):g} = {plan.global_batch_to_load} rows"
            in loading
        )


def budget(schedule="0:8 80:16", tokens=2400, tokens_per_sample=10, **options):
    """Return what a small budget means."""
    return token_budget(
        BatchRamp.from_schedule(schedule),
        tokens=tokens,
        tokens_per_sample=tokens_per_sample,
        **options,
    )


def counted(ramp, samples):
    """Return steps and samples of a ramp, stepped through until a number of samples is
    consumed.
    """
    steps = consumed = 0
    while consumed < samples:
        consumed += ramp.global_batch_size_at(steps)
        steps += 1
    return steps, consumed


@pytest.mark.core
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=4),
    st.integers(1, 40),
    st.integers(1, 4000),
    st.integers(1, 9),
)
def test_steps_agree_with_a_step_by_step_loop(gaps, first, tokens, length):
    """Steps, consumed tokens and steps by size agree with a loop that counts, and so do
    the steps at a constant batch size.
    """
    thresholds, pairs = 0, [(0, first)]
    for gap, size in gaps:
        thresholds += gap
        pairs.append((thresholds, size))
    ramp = BatchRamp.piecewise(pairs)
    spent = token_budget(ramp, tokens=tokens, tokens_per_sample=length)
    samples = -(-tokens // length)
    steps, consumed = counted(ramp, samples)
    assert (spent["steps"], spent["consumed_tokens"]) == (steps, consumed * length)
    at_first, at_final = (
        counted(BatchRamp.constant(ramp.sizes[index]), samples)[0] for index in (0, -1)
    )
    assert (spent["steps_at_first"], spent["steps_at_final"]) == (at_first, at_final)
    assert (spent["fewer_steps_than_first"], spent["more_steps_than_final"]) == (
        at_first - steps,
        steps - at_final,
    )
    by_size = {
        int(size): number
        for size, number in spent["steps_by_global_batch_size"].items()
    }
    assert sum(by_size.values()) == steps
    assert sum(size * number for size, number in by_size.items()) == consumed


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 0}, {"tokens": -5}, {"tokens": 10**18 + 1}, {"tokens_per_sample": 0}],
)
def test_budget_rejects_bad_numbers(changed):
    """Zero, negative and too large numbers are rejected."""
    with pytest.raises(RampDefinitionError, match="must be between 1 and") as caught:
        budget(**changed)
    assert caught.value.key == (
        "budget" if "tokens" in changed else "max_target_length"
    )


def test_budget_time_uses_the_throughput_of_each_size():
    """A size without a measurement uses the nearest one, and the throughput is that of
    the whole.
    """
    spent, seconds = (
        budget(
            "0:8 80:16 200:64", tokens_per_second={8: Fraction(1), 50: Fraction(10)}
        ),
        800 + 1280 + 64,
    )
    assert spent["hours"] * 3600 == pytest.approx(seconds)
    assert spent["tokens_per_second"] == pytest.approx(
        spent["consumed_tokens"] / seconds
    )


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
