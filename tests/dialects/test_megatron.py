"""Tests of rampup.dialects.megatron: Megatron's batch arguments."""

from fractions import Fraction

import pytest
from helpers.dialect_files import cases, check_nearest, rules, verdict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rampup.dialects.megatron import LinearRamp, parse_entry
from rampup.errors import ConfigError, RampupError

RAMP = {"rampup_batch_size": [16, 8, 500], "global_batch_size": 48, "micro_batch_size": 1}
STEPS = {"step_batch_size_schedule": "0:8 100:16 250:32", "micro_batch_size": 1}
CONSTANT = {"global_batch_size": 64, "micro_batch_size": 2}
ROUNDED = {**RAMP, "decrease_batch_size_if_needed": True}
INTERLEAVED = {
    "global_batch_size": 32,
    "micro_batch_size": 1,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers": 16,
}


def found(config, replicas=8, *settings, **more):
    """Check arguments as YAML."""
    return verdict("megatron", {**config, **more}, f"data_parallel_size={replicas}", *settings)


def table(verdict):
    """Return the phases of a verdict as the reference cases write them."""
    return [[row["start_step"], row["global_batch_size"], row["start_sample"]] for row in verdict.phases]


@pytest.mark.parametrize("case", cases("ramp_megatron"), ids=lambda case: case["name"])
def test_ramps_equal_every_reference_case(case):
    """Phases, microbatches and thresholds of both kinds of ramp, as Megatron's own code ran them."""
    result = found(case["config"], case["data_parallel_size"])
    assert result.validator == "accepts"
    assert table(result) == case["phases"]
    assert result.derived["num_microbatches"] == case["num_microbatches"]
    assert result.derived["thresholds_samples"] == case["thresholds_samples"]


@pytest.mark.parametrize("text", ["250:32 0:8 100:16", "0:8,100:16,250:32"])
def test_schedule_is_sorted_with_a_note(text):
    """Entries are sorted, which a note reports; commas separate as spaces do."""
    result = found(STEPS, step_batch_size_schedule=text)
    assert table(result) == [[0, 8, 0], [13, 16, 104], [23, 32, 264]]
    assert any("wrong order" in note for note in result.notes) == text.startswith("250")


def test_decreased_batches_are_rounded_down():
    """Every size is rounded down to a multiple of 12 = 4 * 3, and equal sizes are one phase."""
    config = {"rampup_batch_size": "16 8 600", "global_batch_size": 64, "micro_batch_size": 4}
    result = found(config, 3, decrease_batch_size_if_needed=True)
    assert table(result) == [[0, 12, 0], [9, 24, 108], [17, 36, 300], [20, 48, 408], [24, 60, 600]]
    assert result.derived["num_microbatches"] == [1, 2, 3, 4, 5]
    assert any("rounded down to a multiple of 12" in note for note in result.notes)


def test_note_reports_floating_point_division():
    """If Megatron's division ends a ramp one step later than exact arithmetic, a note names the step."""
    ramp = LinearRamp(start=1, increment=4, end=61, samples=22952)
    assert (ramp.exact().ramp_steps, ramp.as_run()[-1][0]) == (2648, 2649)
    config = {"rampup_batch_size": [1, 4, 22952], "global_batch_size": 61, "micro_batch_size": 1}
    result = found(config, 1)
    assert result.derived["ramp_steps"] == 2648
    assert any("floating-point division" in note for note in result.notes)
    assert not any("floating-point" in note for note in found(RAMP).notes)


@pytest.mark.parametrize(
    ("entry", "exact", "as_run"),
    [("2.01K:16", 2010, 2009), ("8.2B:16", 8_200_000_000, 8_199_999_999), ("117.25B:16", 117_250_000_000, 117_250_000_000)],
)
def test_thresholds_are_exact_and_truncation_is_noted(entry, exact, as_run):
    """The exact threshold is used, and a note names Megatron's; both truncate a size, with a note."""
    assert (parse_entry(entry, None).samples, parse_entry(entry, None).as_run) == (exact, as_run)
    result = found(STEPS, step_batch_size_schedule=f"0:8 {entry}")
    assert result.derived["thresholds_samples"] == [[0, 8], [exact, 16]]
    assert any(f"{as_run:,} in Megatron" in note for note in result.notes) == (exact != as_run)
    truncated = found(STEPS, step_batch_size_schedule=f"0:8 {entry}.9")
    assert truncated.derived["thresholds_samples"] == result.derived["thresholds_samples"]
    assert any("truncated to 16" in note for note in truncated.notes)


@pytest.mark.parametrize(
    ("config", "validator", "broken"),
    [
        (CONSTANT, "accepts", []),
        ({**CONSTANT, "global_batch_size": 65}, "rejects", ["batch_divisible"]),
        ({**CONSTANT, "global_batch_size": 16}, "accepts", []),
        ({**CONSTANT, "global_batch_size": 8}, "rejects", ["batch_divisible"]),
        ({**CONSTANT, "global_batch_size": 0}, "rejects", ["global_batch_positive"]),
        ({**CONSTANT, "global_batch_size": 65, "decrease_batch_size_if_needed": True}, "accepts", []),
        ({**CONSTANT, "global_batch_size": 15, "decrease_batch_size_if_needed": True}, "rejects", ["decreased_to_nothing"]),
        ({**CONSTANT, "micro_batch_size": 0}, "rejects", ["micro_batch_positive"]),
        ({"global_batch_size": 64}, "rejects", ["micro_batch_positive"]),
        ({**CONSTANT, "eval_global_batch_size": 24}, "rejects", ["eval_batch_divisible"]),
        ({**CONSTANT, "eval_global_batch_size": 24, "eval_micro_batch_size": 3}, "accepts", []),
        (RAMP, "accepts", []),
        ({**RAMP, "rampup_batch_size": [16, 8]}, "rejects", ["ramp_is_a_triple"]),
        ({**RAMP, "rampup_batch_size": "16 8 many"}, "rejects", ["ramp_is_a_triple"]),
        ({**RAMP, "rampup_batch_size": [0, 8, 500]}, "rejects", ["ramp_numbers_positive"]),
        ({**RAMP, "rampup_batch_size": [16, 0, 500]}, "rejects", ["ramp_numbers_positive"]),
        ({**RAMP, "rampup_batch_size": [16, 8, -1]}, "rejects", ["ramp_numbers_positive"]),
        ({**RAMP, "rampup_batch_size": [16, 8, 0]}, "accepts", ["ramp_divides_by_zero"]),
        ({**RAMP, "rampup_batch_size": [16, 8, 1]}, "accepts", []),
        ({**RAMP, "rampup_batch_size": [48, 8, 500]}, "accepts", ["ramp_divides_by_zero"]),
        ({**RAMP, "rampup_batch_size": [56, 8, 500]}, "rejects", ["ramp_grows"]),
        ({**RAMP, "rampup_batch_size": [16, 24, 500]}, "rejects", ["ramp_increment_divides"]),
        ({**RAMP, "rampup_batch_size": [16, 16, 500]}, "accepts", []),
        ({**RAMP, "rampup_batch_size": [20, 4, 500]}, "accepts", ["ramp_phases_divisible"]),
        ({**RAMP, "rampup_batch_size": [16, 4, 500]}, "accepts", ["ramp_phases_divisible"]),
        ({**ROUNDED, "rampup_batch_size": [4, 4, 500]}, "accepts", ["ramp_decreased_to_nothing"]),
        ({**ROUNDED, "rampup_batch_size": [8, 4, 500]}, "accepts", []),
        ({**RAMP, "train_iters": 100}, "rejects", ["ramp_counts_samples"]),
        ({**RAMP, "train_samples": 100}, "accepts", []),
        ({**RAMP, "max_steps": 100}, "accepts", []),
        (STEPS, "accepts", []),
        ({**STEPS, "global_batch_size": 32}, "rejects", ["schedule_excludes_global_batch"]),
        ({**STEPS, "decrease_batch_size_if_needed": True}, "rejects", ["schedule_excludes_decrease"]),
        ({**STEPS, "step_batch_size_schedule": "1:8 100:16"}, "rejects", ["schedule_starts_at_0"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 1,000:16"}, "rejects", ["schedule_entries"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 1_000:16"}, "accepts", []),
        ({**STEPS, "step_batch_size_schedule": "0:8 1G:16"}, "rejects", ["schedule_entries"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 100:16 100:32"}, "rejects", ["schedule_thresholds_increase"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 100:16 101:32"}, "accepts", []),
        ({**STEPS, "step_batch_size_schedule": "0:8 5:16 6:32", "seq_length": 4}, "rejects", ["schedule_thresholds_increase"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 100:0"}, "rejects", ["schedule_sizes_positive"]),
        ({**STEPS, "step_batch_size_schedule": "0:16 100:8"}, "accepts", ["schedule_grows"]),
        ({**STEPS, "step_batch_size_schedule": "0:8 100:20"}, "accepts", ["schedule_phases_divisible"]),
        (INTERLEAVED, "accepts", []),
        ({**INTERLEAVED, "global_batch_size": 24}, "accepts", ["group_in_range"]),
        ({**INTERLEAVED, "global_batch_size": 40}, "accepts", ["whole_groups"]),
        ({**INTERLEAVED, "microbatch_group_size_per_vp_stage": 3}, "accepts", ["group_in_range", "whole_groups"]),
        ({**INTERLEAVED, "global_batch_size": 88, "microbatch_group_size_per_vp_stage": 7}, "accepts", []),
        ({**INTERLEAVED, "global_batch_size": 80, "microbatch_group_size_per_vp_stage": 7}, "accepts", ["whole_groups"]),
        ({**INTERLEAVED, "num_layers": 18}, "rejects", ["layers_over_stages"]),
        ({**INTERLEAVED, "num_layers": 20}, "rejects", ["layers_over_chunks"]),
        ({**INTERLEAVED, "pipeline_model_parallel_size": 1}, "rejects", ["chunks_need_stages"]),
        ({**INTERLEAVED, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": False}, "rejects", ["chunks_need_stages"]),
        ({**INTERLEAVED, "pipeline_model_parallel_size": 2}, "accepts", []),
        ({**INTERLEAVED, "virtual_pipeline_model_parallel_size": 0}, "rejects", ["chunks_positive"]),
        ({**CONSTANT, "pipeline_model_parallel_size": 8}, "accepts", []),
    ],
)
def test_rules_break_just_beyond_their_boundary(config, validator, broken):
    """A file just beyond each rule breaks it, a file just inside does not, and the nearest values fix it."""
    result = found(config)
    assert rules(result) == broken
    assert result.validator == validator
    check_nearest("megatron", config, ["data_parallel_size=8"], result)


def test_ramp_fails_at_the_first_batch_that_does_not_divide():
    """[256, 16, 1M] to 2048 with 4 * 64: the second size, 272, stops the run, and the message names its step."""
    config = {"rampup_batch_size": [256, 16, 1_000_000], "global_batch_size": 2048, "micro_batch_size": 4}
    (violation,) = found(config, 64).violations
    assert "272 from step 35" in violation.message
    assert violation.found_by == "run"
    assert "256 256 1000000" in violation.nearest


def test_interleaving_is_checked_in_every_phase():
    """The last batch fits the interleaved pipeline, the second does not: the message names its first step."""
    ramp = {**INTERLEAVED, "rampup_batch_size": [32, 8, 1000], "global_batch_size": 64}
    (violation,) = found(ramp).violations
    assert violation.rule == "megatron.whole_groups"
    assert "5 microbatches from step" in violation.message
    assert found({**ramp, "rampup_batch_size": [32, 32, 1000]}).ok
    start = found({**ramp, "rampup_batch_size": [16, 16, 1000]})
    assert "group_in_range" in rules(start)


@pytest.mark.parametrize(("stages", "context", "tensor", "replicas"), [(1, 1, 1, 64), (4, 1, 2, 8), (2, 4, 8, 1)])
def test_replicas_follow_from_the_world_size(stages, context, tensor, replicas):
    """Replicas are the devices over tensor * pipeline * context."""
    axes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages, "context_parallel_size": context}
    result = verdict("megatron", {**CONSTANT, "global_batch_size": 1024, **axes, "world_size": 64})
    assert result.derived["data_parallel_size"] == replicas
    assert result.derived["num_microbatches"] == [1024 // (2 * replicas)]


def test_world_size_must_divide():
    """6 devices for replicas of 4 are rejected with the nearest sizes; an unknown world size must be given."""
    config = {**CONSTANT, "global_batch_size": 48, "tensor_model_parallel_size": 4}
    (violation,) = verdict("megatron", config, "world_size=6").violations
    assert (violation.rule, violation.nearest) == ("megatron.world_divisible", (4, 8))
    with pytest.raises(ConfigError, match="world_size=N"):
        verdict("megatron", config)
    with pytest.raises(ConfigError, match="is not the world size 64"):
        verdict("megatron", config, "world_size=64", "data_parallel_size=8")


SCRIPT = """#!/bin/bash
# Usage: this is a comment, with a colon
GPUS_PER_NODE=6
NUM_NODES=2
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 120
    --rampup-batch-size 24 24 600
    --train-samples 10000
    --lr 6.0e-5)
MODEL=(--tensor-model-parallel-size 2 --swiglu)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} pretrain_gpt.py \\
    ${TRAINING_ARGS[@]} ${MODEL[@]}
"""


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT,
        "--micro-batch-size 4 --global-batch-size=120 --rampup-batch-size 24 24 600 --world-size 12 "
        "--tensor-model-parallel-size 2 --train-samples 10000",
        "micro-batch-size: 4\nglobal_batch_size: 120\nrampup-batch-size: 24 24 600\nworld_size: 12\n"
        "tensor_model_parallel_size: 2\ntrain_samples: 10000\n",
        "MODEL_ARGS:\n  --micro-batch-size: 4\n  --global-batch-size: 120\n  --rampup-batch-size: 24 24 600\n"
        "  --train-samples: 10_000\n  --tensor-model-parallel-size: 2\nworld_size: 12\n",
        "trainer: {num_nodes: 2, devices: 6}\nmodel: {micro_batch_size: 4, global_batch_size: 120, rampup_batch_size: "
        "[24, 24, 600], tensor_model_parallel_size: 2}\n",
    ],
    ids=["script", "command line", "yaml", "dashes", "nemo"],
)
def test_read_accepts_all_formats(text):
    """A shell script, a command line, YAML with underscores or dashes, and NeMo's YAML give one ramp."""
    result = verdict("megatron", text)
    assert result.ok
    assert result.derived["data_parallel_size"] == 6
    assert result.derived["num_microbatches"] == [1, 2, 3, 4, 5]
    assert [row["start_step"] for row in result.phases] == [0, 7, 10, 12, 14]


def test_read_accepts_a_schedule_on_a_command_line():
    """A quoted schedule, a flag before another option, and tokens as thresholds."""
    text = "--micro-batch-size 1 --step-batch-size-schedule '0:8 8K:16' --bf16 --seq-length 16 --world-size 8"
    result = verdict("megatron", text)
    assert result.derived["thresholds_samples"] == [[0, 8], [500, 16]]


def test_read_rejects_ambiguous_yaml():
    """Two values at one depth are an error unless an override chooses; the less nested of two depths counts."""
    text = "a: {micro_batch_size: 2}\nb: {micro_batch_size: 4}\nglobal_batch_size: 64\n"
    with pytest.raises(ConfigError, match="given twice"):
        verdict("megatron", text, "world_size=8")
    assert verdict("megatron", text, "world_size=8", "micro_batch_size=4").derived["num_microbatches"] == [2]
    deeper = "micro_batch_size: 2\nvalidation: {micro_batch_size: 4}\nglobal_batch_size: 64\n"
    assert verdict("megatron", deeper, "world_size=8").derived["num_microbatches"] == [4]


def test_pipeline_of_few_microbatches_runs():
    """Megatron runs fewer microbatches than stages: the phases have the bubble, and a note reports it."""
    result = found(
        {"rampup_batch_size": [24, 24, 500], "global_batch_size": 72, "micro_batch_size": 1},
        8,
        "pipeline_model_parallel_size=4",
    )
    assert [row["num_pipeline_microbatches"] for row in result.phases] == [3, 6, 9]
    bubbles = [Fraction(3, 6), Fraction(3, 9), Fraction(3, 12)]
    assert [row["bubble_fraction"] for row in result.phases] == [float(bubble) for bubble in bubbles]
    assert any("never all busy" in note for note in result.notes)


def test_schedule_wins_over_the_linear_ramp():
    """Megatron only prints a warning about the linear ramp, which a note reports."""
    result = found({**STEPS, "rampup_batch_size": [16, 8, 500]})
    assert table(result) == table(found(STEPS))
    assert any("rampup_batch_size is ignored" in note for note in result.notes)


@example("")
@example("--micro-batch-size")
@example("--micro-batch-size 'open")
@example("- 1\n- 2\n")
@example("a: !!python/none x\n")
@settings(max_examples=60)
@given(st.text(alphabet="-abcm icro_batch=:'\"$(){}#\n01\\", max_size=80))
def test_read_accepts_or_rejects_any_text(text):
    """Random text, and a file without arguments, gives only a RampupError."""
    with pytest.raises(RampupError):
        verdict("megatron", text)


BLOOM = {
    "num_layers": 70,
    "pipeline_model_parallel_size": 12,
    "tensor_model_parallel_size": 4,
    "micro_batch_size": 2,
    "global_batch_size": 2048,
    "train_samples": 220_000_000,
    "rampup_batch_size": "192 16 9765625",
    "pp_partition_method": "type:transformer|embedding",
}
DEEPSEEK = {
    "num_layers": 61,
    "pipeline_model_parallel_size": 16,
    "decoder_first_pipeline_num_layers": 3,
    "decoder_last_pipeline_num_layers": 2,
    "micro_batch_size": 1,
    "global_batch_size": 15360,
}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS, LAYOUT = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
STAGES4 = {"micro_batch_size": 1, "global_batch_size": 32, "pipeline_model_parallel_size": 4}


def test_uneven_pipelines_are_accepted():
    """Megatron-DeepSpeed balances 70 layers over 12 stages, DeepSeek-V3 has shorter ends: a note says what is not checked."""
    result = verdict("megatron", BLOOM, "world_size=384")
    assert (result.validator, result.run) == ("accepts", "runs")
    assert result.derived["ramp_steps"] == 12_658
    (broken,) = verdict("megatron", {**BLOOM, "pp_partition_method": None}, "world_size=384").violations
    assert broken.rule == "megatron.layers_over_stages"
    assert verdict("megatron", {**BLOOM, "pp_partition_method": None, "deepspeed": True}, "world_size=384").ok
    ends = verdict("megatron", DEEPSEEK, "world_size=2048")
    assert ends.ok, rules(ends)
    for found_, key in ((result, "pp_partition_method"), (ends, FIRST)):
        assert any(key in note and "how layers are split is not checked" in note for note in found_.notes)
    assert ends.conversion.refusal == "rampup's pipeline has the same number of layers in every stage"


@pytest.mark.parametrize(
    ("config", "broken"),
    [
        ({"num_layers": 15, EMBEDDING: True}, []),
        ({"num_layers": 14, EMBEDDING: True, LOSS: True, "num_layers_per_virtual_pipeline_stage": 2}, []),
        ({"num_layers": 9, LAYOUT: "Ett|(tt|)*2,t*3L"}, []),
        ({"num_layers": 6, LAYOUT: "Ett|tt|ttL"}, ["layout_fills_stages"]),
        ({"num_layers": 8, LAYOUT: "(t|)*100000"}, ["layout_fills_stages"]),
        ({"num_layers": 8, LAYOUT: [["embedding", "decoder"], ["decoder"] * 3, ["decoder"] * 3, ["decoder", "loss"]]}, []),
        ({"num_layers": 9, "hybrid_layer_pattern": "M*M*M*M*M"}, []),
    ],
)
def test_layers_of_an_uneven_pipeline_are_not_divided(config, broken):
    """Only an even split must divide, and a layout must fill the stages."""
    result = found({**STAGES4, **config}, 1)
    assert rules(result) == broken
    check_nearest("megatron", {**STAGES4, **config}, ["data_parallel_size=1"], result)


def test_interleaved_layout_has_its_chunks():
    """Eight stages of a layout on four devices are two chunks each, and group sizes follow from them."""
    result = found({**STAGES4, "num_layers": 8, LAYOUT: "Et|t|t|t|t|t|t|tL"}, 1)
    assert result.ok, rules(result)
    assert result.derived["num_repeats"] == 2
    assert rules(found({**STAGES4, "num_layers": 8, "global_batch_size": 2, LAYOUT: "Et|t|t|t|t|t|t|tL"}, 1)) == [
        "group_in_range"
    ]


def test_linear_ramp_says_which_version_it_speaks_for():
    """Megatron-LM has ignored a linear ramp without a schedule since April 2026 (core/num_microbatches_calculator.py)."""
    legacy = found(RAMP)
    assert len(legacy.phases) > 1
    assert any("until April 2026" in note and "the batch is 48 from the first step" in note for note in legacy.notes)
    head = found(RAMP, 8, "megatron_version=head")
    assert (head.ok, head.phases, head.derived["num_microbatches"]) == (True, None, [6])
    assert any("has no effect in Megatron-LM since April 2026" in note for note in head.notes)
    assert not any("April 2026" in note for note in [*found(CONSTANT).notes, *found(STEPS).notes])
    assert not any("April 2026" in note for note in verdict("megatron", BLOOM, "world_size=384").notes)
    # Nothing of the ignored ramp is checked, and its conversion has a constant batch.
    assert found({**RAMP, "rampup_batch_size": "1 2 x", "train_iters": 10}, 8, "megatron_version=head").ok
    assert "enable_rampup_batch_size" not in head.conversion.values
    assert "rampup_batch_size" in head.conversion.left_out
