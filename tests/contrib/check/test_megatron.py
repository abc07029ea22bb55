"""Tests of rampup.contrib.check.megatron: Megatron's batch arguments."""

import re

import pytest
from helpers.dialect_files import boundary_test, cases, expect, numbers_test, verdict
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rampup.contrib.check import check_command
from rampup.errors import ConfigError, RampupError

RAMP = {
    "rampup_batch_size": [16, 8, 500],
    "global_batch_size": 48,
    "micro_batch_size": 1,
}
STEPS = {"step_batch_size_schedule": "0:8 100:16 250:32", "micro_batch_size": 1}
CONSTANT = {"global_batch_size": 64, "micro_batch_size": 2}
TP, PP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
VP = "virtual_pipeline_model_parallel_size"
INTERLEAVED = {
    "global_batch_size": 32,
    "micro_batch_size": 1,
    PP: 4,
    VP: 2,
    "num_layers": 16,
}
REPLICAS = {"data_parallel_size": 8}


def found(config, replicas=8, *settings, **more):
    """Check arguments as YAML."""
    return verdict(
        "megatron", {**config, **more}, f"data_parallel_size={replicas}", *settings
    )


@pytest.mark.parametrize("case", cases("ramp_megatron"), ids=lambda case: case["name"])
def test_ramps_equal_every_reference_case(case):
    """Phases, microbatches and thresholds of both kinds of ramp, as Megatron's own code
    ran them.
    """
    wanted = {
        "ramp_phases": case["phases"],
        **{name: case[name] for name in ("num_microbatches", "thresholds_samples")},
    }
    result = found(case["config"], case["data_parallel_size"])
    expect(result, validator="accepts", **wanted)
    assert [
        [row["start_step"], row["global_batch_size"], row["start_sample"]]
        for row in result.phases
    ] == case["phases"]


BLOOM = {
    "num_layers": 70,
    PP: 12,
    TP: 4,
    "micro_batch_size": 2,
    "global_batch_size": 2048,
    "train_samples": 220_000_000,
} | {
    "rampup_batch_size": "192 16 9765625",
    "pp_partition_method": "type:transformer|embedding",
    "world_size": 384,
}
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
DEEPSEEK = {
    "num_layers": 61,
    PP: 16,
    FIRST: 3,
    LAST: 2,
    "micro_batch_size": 1,
    "global_batch_size": 15360,
    "world_size": 2048,
}
EMBEDDING, LOSS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
STAGES4 = {"micro_batch_size": 1, "global_batch_size": 32, PP: 4}
WORLD = {**CONSTANT, "global_batch_size": 1024, "world_size": 64}
NOT_CHECKED = "how layers are split is not checked"
HEAD = {"megatron_version": "head", "data_parallel_size": 8}
DECREASED = {
    "rampup_batch_size": "16 8 600",
    "global_batch_size": 64,
    "micro_batch_size": 4,
    "data_parallel_size": 3,
}
AT_272 = {
    "rampup_batch_size": [256, 16, 10**6],
    "global_batch_size": 2048,
    "micro_batch_size": 4,
    "data_parallel_size": 64,
}
GROWING = {**INTERLEAVED, "global_batch_size": 64, "data_parallel_size": 8}
ORDERED = {"ramp_phases": [[0, 8, 0], [13, 16, 104], [23, 32, 264]]}
SCRIPT = """#!/bin/bash
# Usage: this is a comment, with a colon
GPUS_PER_NODE=6
TRAINING_ARGS=(--micro-batch-size 4 --global-batch-size 120
    --rampup-batch-size 24 24 600 --train-samples 10000 --lr 6.0e-5)
MODEL=(--tensor-model-parallel-size 2 --swiglu)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES:-2} pretrain_gpt.py \\
    ${TRAINING_ARGS[@]} ${MODEL[@]}
"""
# One ramp as a script, a command line, YAML with underscores or dashes, and NeMo's
# YAML.
FORMATS = (
    SCRIPT,
    (
        "--micro-batch-size 4 --global-batch-size=120 --rampup-batch-size 24 24 600"
        " --world-size 12 --tensor-model-parallel-size 2 --train-samples 10000"
    ),
    (
        "micro-batch-size: 4\nglobal_batch_size: 120\nrampup-batch-size: 24 24"
        " 600\nworld_size: 12\ntensor_model_parallel_size: 2\ntrain_samples: 10000\n"
    ),
    (
        "MODEL_ARGS:\n  --micro-batch-size: 4\n  --global-batch-size: 120\n "
        " --rampup-batch-size: 24 24 600\n  --train-samples: 10_000\n "
        " --tensor-model-parallel-size: 2\nworld_size: 12\n"
    ),
    (
        "trainer: {num_nodes: 2, devices: 6}\nmodel: {micro_batch_size: 4,"
        " global_batch_size: 120, rampup_batch_size: [24, 24, 600],"
        " tensor_model_parallel_size: 2}\n"
    ),
)
NUMBERS = [
    *((text, {"ok": True, "data_parallel_size": 6, "num_microbatches": [1, 2, 3, 4, 5], "ramp_steps": 14}) for text in FORMATS),
    # Thresholds and sizes are those of Megatron's floating-point products, truncated.
    *((STEPS | REPLICAS | {"step_batch_size_schedule": f"0:8 {entry}"}, {"thresholds_samples": [[0, 8], [threshold, 16]]})
      for entry, threshold in (
          ("2.01K:16", 2009), ("8.2B:16.9", 8_199_999_999), ("117.25B:16", 117_250_000_000))),
    # Entries are sorted, which a note reports; commas separate as spaces do.
    (STEPS | {"step_batch_size_schedule": "250:32 0:8 100:16", **REPLICAS}, ORDERED),
    (STEPS | {"step_batch_size_schedule": "0:8,100:16,250:32", **REPLICAS}, ORDERED),
    # The linear ramp is ignored beside a schedule.
    (STEPS | {"rampup_batch_size": [16, 8, 500], **REPLICAS}, {**ORDERED, "note": "rampup_batch_size is ignored"}),
    # Rounding down changes no multiple of 16 = 2 * 8.
    (CONSTANT | REPLICAS | {"global_batch_size": 64, "decrease_batch_size_if_needed": True}, {"num_microbatches": [4]}),
    # Exact arithmetic decides, and a note says that Megatron's division may not.
    (RAMP | REPLICAS, {"ramp_steps": 21, "note": "floating-point division"}),
    # The second size, 272, stops the run, and the message names its step.
    (AT_272, {"rules": ["ramp_phases_divisible"], "validator": "accepts", "message": "272 from step 35"}),
    # The last batch fits the interleaved pipeline, the second does not: the message
    # names its first step.
    (GROWING | {"rampup_batch_size": [32, 8, 1000]}, {"rules": ["whole_groups"], "message": "5 microbatches from step"}),
    (GROWING | {"rampup_batch_size": [32, 32, 1000]}, {"ok": True}),
    (GROWING | {"rampup_batch_size": [16, 16, 1000]}, {"rules": ["whole_groups"]}),
    # Replicas are the devices over tensor * pipeline * context.
    (WORLD, {"data_parallel_size": 64, "num_microbatches": [8]}),
    (WORLD | {PP: 4, TP: 2}, {"data_parallel_size": 8, "num_microbatches": [64]}),
    (WORLD | {PP: 2, CP: 4, TP: 8}, {"data_parallel_size": 1, "num_microbatches": [512]}),
    (WORLD | {"global_batch_size": 48, TP: 4, "world_size": 6},
     {"rules": ["world_divisible"], "message": "nearest world_size: 4, 8"}),
    # The processes of a launcher stand for the world size: the nearest to 32, not to 1.
    (WORLD | {"world_size": None, "nnodes": 4, "nproc_per_node": 8, TP: 4, PP: 3, "num_layers": 36, "global_batch_size": 48},
     {"rules": ["world_divisible"], "message": "nearest world_size: 36"}),
    # A quoted schedule, a flag before another option, and tokens as thresholds.
    ("--micro-batch-size 1 --step-batch-size-schedule '0:8 8K:16' --bf16 --seq-length 16 --world-size 8",
     {"thresholds_samples": [[0, 8], [500, 16]]}),
    # Megatron-DeepSpeed balances 70 layers over 12 stages, DeepSeek-V3 has shorter
    # ends.
    (BLOOM, {"validator": "accepts", "run": "runs", "ramp_steps": 12_658, "no_note": "April 2026",
             "note": f"pp_partition_method: {NOT_CHECKED}"}),
    (BLOOM | {"pp_partition_method": None}, {"rules": ["layers_over_stages"]}),
    (BLOOM | {"pp_partition_method": None, "deepspeed": True}, {"ok": True}),
    (DEEPSEEK, {"ok": True, "note": [FIRST, NOT_CHECKED]}),
    # Megatron-LM has ignored a linear ramp without a schedule since April 2026
    # (core/num_microbatches_calculator.py).
    (RAMP | REPLICAS, {"note": ["until April 2026", "the batch is 48 from the first step"], "no_note": "wrong order"}),
    (RAMP | HEAD, {"ok": True, "num_microbatches": [6], "note": "has no effect in Megatron-LM since April 2026"}),
    (RAMP | HEAD | {"rampup_batch_size": "1 2 x", "train_iters": 10}, {"ok": True}),
    (CONSTANT | REPLICAS, {"no_note": "April 2026"}),
    (CONSTANT | REPLICAS | {"eval_global_batch_size": 24}, {"ok": True, "note": "is a batch of evaluation"}),
    (STEPS | REPLICAS, {"no_note": "April 2026"}),
]  # fmt: skip
test_numbers_and_notes = numbers_test(
    lambda config: verdict("megatron", config), NUMBERS
)


def test_no_world_size_is_proposed_that_a_file_may_not_have():
    """A replica of 3 * 10**18 devices is out of range."""
    found = verdict("megatron", {"world_size": 1, TP: 10**18, CP: 3})
    nearest = {violation.rule: violation.nearest for violation in found.violations}
    assert nearest["megatron.world_divisible"] == ()


def test_devices_and_conversion_are_refused_with_a_reason():
    """An unknown or contradictory world size; uneven stages, which rampup has not; and
    a ramp that nothing reads.
    """
    with pytest.raises(ConfigError, match="world_size=N"):
        verdict("megatron", CONSTANT)
    with pytest.raises(ConfigError, match="is not the world size 64"):
        verdict("megatron", CONSTANT | {TP: 4}, "world_size=64", "data_parallel_size=8")
    assert (
        verdict("megatron", DEEPSEEK).conversion.refusal
        == "rampup's pipeline has the same number of layers in every stage"
    )
    legacy, head = found(RAMP), verdict("megatron", RAMP | HEAD)
    assert (len(legacy.phases) > 1, head.phases) == (True, None)
    assert "batch_size_schedule" in legacy.conversion.values
    assert "batch_size_schedule" not in head.conversion.values
    assert "rampup_batch_size" in head.conversion.left_out
    constant = CONSTANT | REPLICAS | {"global_batch_size": 65}
    for config, unit in ((DECREASED, 1), (constant, 1), (STEPS | REPLICAS, 8)):
        said = f"rounds batches down to multiples of {unit}"
        with pytest.raises(ConfigError, match=said):
            verdict("megatron", config | {"decrease_batch_size_if_needed": True})


GLOBAL, MICRO, DECREASE = (
    "global_batch_size",
    "micro_batch_size",
    "decrease_batch_size_if_needed",
)
LINEAR, SCHEDULE = "rampup_batch_size", "step_batch_size_schedule"
BOUNDARIES = [
    ("batch_divisible", CONSTANT, {**CONSTANT, GLOBAL: 65}, "rejects"),
    ("batch_divisible", {**CONSTANT, GLOBAL: 16}, {**CONSTANT, GLOBAL: 8}, "rejects"),
    ("global_batch_positive", {**CONSTANT, PP: 8}, {**CONSTANT, GLOBAL: 0}, "rejects"),
    ("micro_batch_positive", CONSTANT, {**CONSTANT, MICRO: 0}, "rejects"),
    ("micro_batch_positive", CONSTANT, {GLOBAL: 64}, "rejects"),
    ("ramp_is_a_triple", RAMP, {**RAMP, LINEAR: [16, 8]}, "rejects"),
    ("ramp_is_a_triple", RAMP, {**RAMP, LINEAR: "16 8 many"}, "rejects"),
    # One word of the command line, which is one string to Megatron.
    ("ramp_is_a_triple", RAMP, {**RAMP, LINEAR: "16,8,1000"}, "rejects"),
    *[("ramp_numbers_positive", RAMP, {**RAMP, LINEAR: numbers}, "rejects")
      for numbers in ([0, 8, 500], [16, 0, 500], [16, 8, -1])],
    ("ramp_divides_by_zero", {**RAMP, LINEAR: [16, 8, 1]}, {**RAMP, LINEAR: [16, 8, 0]}, "accepts"),
    ("ramp_divides_by_zero", RAMP, {**RAMP, LINEAR: [48, 8, 500]}, "accepts"),
    ("ramp_grows", {**RAMP, "max_steps": 100}, {**RAMP, LINEAR: [56, 8, 500]}, "rejects"),
    ("ramp_increment_divides", {**RAMP, LINEAR: [16, 16, 500]}, {**RAMP, LINEAR: [16, 24, 500]}, "rejects"),
    ("ramp_phases_divisible", RAMP, {**RAMP, LINEAR: [20, 4, 500]}, "accepts"),
    ("ramp_phases_divisible", RAMP, {**RAMP, LINEAR: [16, 4, 500]}, "accepts"),
    ("ramp_counts_samples", {**RAMP, "train_samples": 100}, {**RAMP, "train_iters": 100}, "rejects"),
    ("schedule_excludes_global_batch", STEPS, {**STEPS, GLOBAL: 32}, "rejects"),
    ("schedule_starts_at_0", STEPS, {**STEPS, SCHEDULE: "1:8 100:16"}, "rejects"),
    ("schedule_entries", {**STEPS, SCHEDULE: "0:8 1_000:16"}, {**STEPS, SCHEDULE: "0:8 1,000:16"}, "rejects"),
    ("schedule_entries", STEPS, {**STEPS, SCHEDULE: "0:8 1G:16"}, "rejects"),
    ("schedule_thresholds_increase", {**STEPS, SCHEDULE: "0:8 9:16 10:32"}, {**STEPS, SCHEDULE: "0:8 9:16 9:32"}, "rejects"),
    ("schedule_thresholds_increase", STEPS, {**STEPS, SCHEDULE: "0:8 5:16 6:32", "seq_length": 4}, "rejects"),
    ("schedule_sizes_positive", STEPS, {**STEPS, SCHEDULE: "0:8 100:0"}, "rejects"),
    ("schedule_grows", STEPS, {**STEPS, SCHEDULE: "0:16 100:8"}, "accepts"),
    ("schedule_phases_divisible", STEPS, {**STEPS, SCHEDULE: "0:8 100:20"}, "accepts"),
    ("whole_groups", INTERLEAVED, {**INTERLEAVED, GLOBAL: 24}, "accepts"),
    ("whole_groups", INTERLEAVED, {**INTERLEAVED, GLOBAL: 40}, "accepts"),
    ("layers_over_stages", INTERLEAVED, {**INTERLEAVED, "num_layers": 18}, "rejects"),
    ("layers_over_chunks", INTERLEAVED, {**INTERLEAVED, "num_layers": 20}, "rejects"),
    ("chunks_need_stages", {**INTERLEAVED, PP: 2}, {**INTERLEAVED, PP: 1}, "rejects"),
    ("chunks_positive", INTERLEAVED, {**INTERLEAVED, VP: 0}, "rejects"),
    # Only an even split must divide.
    ("layers_over_stages", {**STAGES4, "num_layers": 15, EMBEDDING: True}, {**STAGES4, "num_layers": 15}, "rejects"),
    ("layers_over_stages", {**STAGES4, "num_layers": 14, EMBEDDING: True, LOSS: True, PER_CHUNK: 2},
     {**STAGES4, "num_layers": 14}, "rejects"),
    ("layers_over_stages", {**STAGES4, "num_layers": 9, "hybrid_layer_pattern": "M*M*M*M*M"}, {**STAGES4, "num_layers": 9},
     "rejects"),
]  # fmt: skip
test_rules_break_just_beyond_their_boundary = boundary_test(
    "megatron", REPLICAS, BOUNDARIES, exact=True
)


def test_read_rejects_ambiguous_yaml():
    """Two values of one key are an error unless an override chooses, at any depth."""
    text = "a: {micro_batch_size: 2}\nb: {micro_batch_size: 4}\nglobal_batch_size: 64\n"
    with pytest.raises(ConfigError, match="given twice"):
        verdict("megatron", text, "world_size=8")
    assert verdict("megatron", text, "world_size=8", "micro_batch_size=4").derived[
        "num_microbatches"
    ] == [2]
    deeper = (
        "micro_batch_size: 2\nvalidation: {micro_batch_size: 4}\nglobal_batch_size:"
        " 64\n"
    )
    with pytest.raises(
        ConfigError, match=r"given twice, as 2 and as validation\.micro"
    ):
        verdict("megatron", deeper, "world_size=8")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "micro_batch_size: 1\nglobal_batch_size: 64\nfoo_bar: 3\n",
            "foo_bar (line 3)",
        ),
        (
            "micro-batch-size: 1\nlr-decay-itres: 9\nglobal-batch-size: 64\n",
            "lr_decay_itres (line 2)",
        ),
        (
            "MODEL_ARGS:\n  --micro-batch-size: 1\n  --global-batch-size: 64\n"
            "  --global-batch-sise: 128\n",
            "global_batch_sise (line 1)",
        ),
        (
            "model: {hidden_sise: 8}\nsizes: {micro_batch_size: 1,"
            " global_batch_size: 64}\n",
            "hidden_sise (line 1)",
        ),
    ],
)
def test_keys_of_yaml_that_megatron_does_not_have_are_named(text, name):
    """In every form of YAML, also a misspelled size beside the right one; as a setting
    of the command line each is refused.
    """
    expect(
        verdict("megatron", text, "world_size=8"),
        ok=True,
        num_microbatches=[8],
        note=["stops at options that it does not have, such as", name],
    )
    with pytest.raises(ConfigError, match="unknown key"):
        found(CONSTANT, 8, f"{name.partition(' ')[0]}=3")


def test_pipeline_of_few_microbatches_runs():
    """Megatron runs fewer microbatches than stages: the phases have the bubble, and a
    note reports it.
    """
    result = found(
        RAMP, 8, f"{PP}=4", rampup_batch_size=[24, 24, 500], global_batch_size=72
    )
    expect(result, ok=True, note="never all busy")
    assert [row["num_pipeline_microbatches"] for row in result.phases] == [3, 6, 9]
    assert [row["bubble_fraction"] for row in result.phases] == [3 / 6, 3 / 9, 3 / 12]


@example("--micro-batch-size 'open")
@example("- 1\n- 2\n")
@example("a: !!python/none x\n")
@settings(max_examples=60)
@given(st.text(alphabet="-abcm icro_batch=:'\"$(){}#\n01\\", max_size=80))
def test_read_accepts_or_rejects_any_text(text):
    """Random text, and a file without arguments, gives only a RampupError."""
    with pytest.raises(RampupError):
        verdict("megatron", text)


@pytest.mark.parametrize("entry", ["1__0:64", "1_:64", "1__0.5:64"])
def test_a_number_of_a_schedule_that_megatron_cannot_read_is_refused(entry):
    """In words; single underscores are fine."""
    change = STEPS | {"step_batch_size_schedule": f"0:32 {entry}"} | REPLICAS
    expect(verdict("megatron", change), rules=["schedule_entries"], message=entry)
    change = STEPS | {"step_batch_size_schedule": "0:32 1_000:64"} | REPLICAS
    expect(verdict("megatron", change), thresholds_samples=[[0, 32], [1000, 64]])


def test_chosen_devices_of_hosts_are_asked_about():
    """DeepSpeed's launcher starts on some devices of some hosts."""
    words = "deepspeed --include a:0,1@b:0,1 pretrain_gpt.py --global-batch-size 64"
    words += " --micro-batch-size 2"
    with pytest.raises(ConfigError, match="world_size=N"):
        check_command(words.split(), "megatron")
    found = check_command(words.split(), "megatron", ["world_size=4"])
    expect(found, data_parallel_size=4)


def test_sizes_with_underscores_are_refused_with_the_option_that_is_meant():
    """Megatron's arguments have hyphens; a fork's, a launcher's and ms-swift's may not."""
    start = "torchrun --nproc_per_node 8 pretrain_gpt.py --global-batch-size 64"
    words = f"{start} --micro_batch_size 2 --seq_length=8 --lr 1".split()
    with pytest.raises(ConfigError, match="no option --micro_batch_size") as caught:
        check_command(words, "megatron")
    assert str(caught.value).endswith("no option --seq_length; write --seq-length")
    assert caught.value.key == MICRO
    mended = [word.replace("micro_batch_size", "micro-batch-size") for word in words]
    found = check_command(mended[:-3], "megatron")
    expect(found, ok=True, num_microbatches=[4])
    words[words.index("pretrain_gpt.py")] = "train_own.py"
    with pytest.raises(ConfigError, match="a program of a fork") as caught:
        check_command(words, "megatron")
    assert caught.value.key == "megatron_version"
    found = check_command(words, "megatron", ["megatron_version=legacy"])
    expect(found, ok=True, num_microbatches=[4])


@pytest.mark.parametrize(
    "option",
    ["--nproc_per_node 8", "--nproc-per-node=8", "--world_size 8", "--nnodes 2"],
)
def test_options_of_the_launcher_behind_the_program_are_refused(option):
    """Megatron stops at them: they would not start any process."""
    words = f"pretrain_gpt.py --micro-batch-size 2 --global-batch-size 64 {option}"
    with pytest.raises(ConfigError, match="before the program") as caught:
        check_command(words.split(), "megatron")
    assert caught.value.key == re.sub("[ =].*", "", option)[2:].replace("-", "_")
    found = check_command(
        ["torchrun", *option.split(), *words.split()[:5]], "megatron", ["world_size=8"]
    )
    expect(found, ok=True)


@pytest.mark.parametrize("size", ["64k", "64.0", "1e3", "'64'"])
def test_a_size_that_pythons_int_refuses_is_no_size(size):
    """Megatron reads its arguments with `int`, which takes no suffixes."""
    words = f"torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size {size}"
    with pytest.raises(ConfigError, match="must be a whole number") as caught:
        check_command(words.split(), "megatron")
    assert caught.value.key == "global_batch_size"
    assert "1.6K" not in str(caught.value)
