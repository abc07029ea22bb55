"""Tests of rampup.plan.plan."""

from fractions import Fraction

import pytest

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.errors import BatchDivisibilityError, ConfigError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan

KEYS = {
    "ramp": BatchRamp.linear(start=16, increment=8, end=48, samples=500),
    "splitter": BatchSplitter(data_parallel_size=4),
    "num_devices": 4,
    "total_steps": 100,
    "eval_global_batch_size": 48,
}


def test_to_dict_has_the_documented_format():
    """The example of the documentation, with the names and values of `rampup plan --json`."""
    plan = RampPlan(**KEYS).to_dict()
    assert {name: plan[name] for name in plan if name not in ("phases", "eval")} == {
        "num_devices": 4,
        "num_increments": 4,
        "samples_per_increment": 125,
        "ramp_steps": 22,
        "ramp_samples": 560,
        "total_steps": 100,
        "num_compiled_shapes": 1,
        "global_batch_to_load": 48,
    }
    sizes = {
        "data_parallel_size": 4,
        "num_pipeline_microbatches": 1,
        "microbatch_size": 2,
        "num_stages": 1,
        "num_repeats": 1,
        "bubble_fraction": 0.0,
    }
    steps = [
        (0, 0, 8, 16, 4, 2),
        (8, 128, 6, 24, 6, 3),
        (14, 272, 4, 32, 8, 4),
        (18, 400, 4, 40, 10, 5),
        (22, 560, None, 48, 12, 6),
    ]
    names = ("start_step", "start_sample", "num_steps", "global_batch_size", "per_device_batch_size", "accumulation_steps")
    assert plan["phases"] == [dict(zip(names, row, strict=True)) | sizes | {"learning_rate_scale": 1.0} for row in steps]
    assert plan["eval"] == sizes | {
        "global_batch_size": 48,
        "per_device_batch_size": 12,
        "accumulation_steps": 1,
        "microbatch_size": 12,
    }


def test_position_agrees_with_stepping():
    """The position at step N has the samples of N steps, one by one."""
    plan = RampPlan(**KEYS)
    consumed = 0
    for step in range(40):
        position = plan.position(step)
        assert (position.step, position.consumed_samples) == (step, consumed)
        assert plan.rows(step) == range(consumed, consumed + position.split.global_batch_size)
        assert position.split is plan.splits[position.phase.index]
        consumed += position.split.global_batch_size
    assert plan.consumed_samples == plan.position(100).consumed_samples


def test_plan_checks_every_phase_and_evaluation():
    """An invalid phase in the middle and an invalid evaluation batch are in one error."""
    keys = KEYS | {"ramp": BatchRamp.from_schedule("0:16 100:18 200:32"), "eval_global_batch_size": 6}
    with pytest.raises(BatchDivisibilityError) as caught:
        RampPlan(**keys)
    assert "phase 1, from sample 112" in str(caught.value)
    assert "(evaluation)" in str(caught.value)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(("factor", "expected"), [(-1, 48), (2, 96), (Fraction(1, 2), 24), (1, 48)])
def test_global_batch_to_load(factor, expected):
    """Loading hosts read the final batch times the expansion factor."""
    assert RampPlan(**KEYS, expansion_factor_real_data=Fraction(factor)).global_batch_to_load == expected


def test_num_compiled_shapes():
    """`fixed` compiles one shape, `per_phase` one per phase, and `auto` two."""
    number = {
        mode: RampPlan(**(KEYS | {"splitter": BatchSplitter(data_parallel_size=4, rampup_microbatch=mode)})).num_compiled_shapes
        for mode in ("fixed", "per_phase", "auto")
    }
    assert number == {"fixed": 1, "per_phase": 5, "auto": 2}


def test_advice_about_a_small_microbatch():
    """BLOOM's ramp on 16 devices: 128 passes of one sample per step after the ramp, or one of 128 with `auto`."""
    ramp = BatchRamp.linear(start=192, increment=16, end=2048, samples=9_765_625, carry_overshoot=True)
    plan = RampPlan(ramp=ramp, splitter=BatchSplitter(data_parallel_size=16), num_devices=16, total_steps=10**5)
    (advice,) = plan.advice
    assert "runs 128 microbatches" in advice
    assert "auto would run 1 of 128" in advice
    assert RampPlan(**KEYS).advice == ()


def test_advice_about_phases_that_are_not_reached():
    """Advice names the first phase after the last step."""
    (advice,) = RampPlan(**(KEYS | {"total_steps": 15})).advice
    assert advice == "steps=15 ends before phase 3 and those after it"


def test_phase_rows_have_the_learning_rate_scale():
    """With sqrt scaling, a quarter of the final batch has half of the rate."""
    plan = RampPlan(
        ramp=BatchRamp.from_schedule("0:8 100:32"),
        splitter=BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=10,
        learning_rate_batch_scaling="sqrt",
    )
    assert [row["learning_rate_scale"] for row in plan.phase_rows()] == [0.5, 1.0]


def test_str_is_a_table():
    """`print(plan)` shows the summary, a line per phase and the advice."""
    text = str(RampPlan(**(KEYS | {"total_steps": 15})))
    summary, ramp, head, *rows, note = text.splitlines()
    assert summary.startswith("4 devices, data parallel 4, 15 steps")
    assert ramp.startswith("the batch goes from 16 to 48 samples in 5 phases")
    assert head.split()[:3] == ["phase", "from", "step"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert {len(row) for row in rows} == {len(head)}
    assert note.startswith("note: steps=15 ends before phase 3")


def test_str_leaves_out_the_middle_of_many_phases():
    """A plan of a thousand phases prints the first and the last of them."""
    ramp = BatchRamp.linear(start=4, increment=4, end=4000, samples=10**6)
    plan = RampPlan(ramp=ramp, splitter=BatchSplitter(data_parallel_size=4), num_devices=4, total_steps=10**6)
    lines = str(plan).splitlines()
    assert len(lines) < 50
    assert any(set(line.split()) == {"..."} for line in lines)
    assert lines[-2].split()[0] == "999"


def test_html_has_every_phase():
    """In a notebook, a plan is a table with a row per phase."""
    assert RampPlan(**KEYS)._repr_html_().count("<tr>") == 6


def test_plan_of_ten_thousand_phases():
    """A plan of 10,001 phases on 65,536 devices is looked up at step 10**12."""
    ramp = BatchRamp.linear(start=65536, increment=65536, end=65536 * 10_001, samples=10**12)
    plan = RampPlan(ramp=ramp, splitter=BatchSplitter(data_parallel_size=65536), num_devices=65536, total_steps=10**13)
    assert len(plan.splits) == 10_001
    assert plan.position(10**12).phase.index == 10_000


def test_fallbacks_use_microbatch_sizes_of_earlier_phases():
    """Nearest phase first, if its size divides the batch. The maximum numbers of microbatches include them."""
    plan = RampPlan(
        ramp=BatchRamp.from_schedule("0:4 40:8 80:12 200:24"),
        splitter=BatchSplitter(data_parallel_size=2, rampup_microbatch="per_phase"),
        num_devices=2,
        total_steps=100,
    )
    assert [split.microbatch_size for split in plan.splits] == [2, 4, 6, 12]
    assert [(s.microbatch_size, s.accumulation_steps) for s in plan.fallbacks(3)] == [(6, 2), (4, 3), (2, 6)]
    assert [s.microbatch_size for s in plan.fallbacks(2)] == [2]
    assert plan.fallbacks(0) == ()
    assert plan.max_microbatches == {2: 6, 4: 3, 6: 2, 12: 1}


def test_fallbacks_of_a_fixed_ramp_are_empty():
    """One shape serves all phases."""
    plan = RampPlan(
        ramp=BatchRamp.from_schedule("0:4 40:8"), splitter=BatchSplitter(data_parallel_size=2), num_devices=2, total_steps=9
    )
    assert plan.fallbacks(1) == ()
    assert plan.num_compiled_shapes == 1


def test_axes_default_to_replicas_stages_and_a_remainder():
    """Without axes, replicas are on the data axis, stages on the pipeline axis, and the tensor axis has what remains."""
    splitter = BatchSplitter(data_parallel_size=2, num_stages=2)
    plan = RampPlan(ramp=BatchRamp.constant(8), splitter=splitter, num_devices=12, total_steps=1)
    assert plan.axes == MeshAxes(data=2, pipeline=2, tensor=3)
    assert RampPlan(**KEYS).axes == MeshAxes(data=4)


def test_axes_must_agree_with_the_splitter_and_the_devices():
    """Axes with other sizes than the plan are refused, and the error names every size that differs."""
    axes = MeshAxes(data=2, fsdp=2)
    assert RampPlan(**KEYS, axes=axes).axes is axes
    with pytest.raises(ConfigError, match=r"num_devices=8.* 4; data_parallel_size=8.* 4; num_stages=1") as caught:
        RampPlan(**(KEYS | {"splitter": BatchSplitter(data_parallel_size=4, num_stages=2)}), axes=MeshAxes(data=8))
    assert caught.value.key == "axes"


def test_build_plan_keeps_the_axes_of_the_configuration():
    """The axes of a built plan are those that the parallelism keys describe."""
    config = Config(ici_data_parallelism=2, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
    assert build_plan(config, 8).axes == MeshAxes(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        ("-1", None),
        ("1", "= 8 rows per step"),
        ("2", "8 * 2 = 16 rows per step, if all hosts loaded; 1 of 2 does"),
        ("1/4", "8 * 0.25 = 2 rows per step: MaxText's loaders of 4 times as many hosts take turns"),
    ],
)
def test_plan_says_what_is_loaded(factor, said):
    """The rows of a step for every kind of expansion factor, in the printed plan too."""
    plan = RampPlan(**{**KEYS, "ramp": BatchRamp.constant(8)}, expansion_factor_real_data=Fraction(factor))
    assert (plan.loading is None) == (said is None)
    if said is not None:
        assert said in plan.loading
        assert f"loading: {plan.loading}" in str(plan)
        assert f"* {float(Fraction(factor)):g} = {plan.global_batch_to_load} rows" in plan.loading
