"""Tests of rampup.contrib.check.maxtext: what a base.yml really does."""

import shutil

import pytest
from helpers.dialect_files import boundary_test, cases, expect, numbers_test, verdict
from helpers.snippets import ROOT

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.contrib.check import check_file
from rampup.errors import ConfigError

SIZE, PASSES, TO_TRAIN = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size_to_train_on",
)


def ramp(start, increment, end, samples=500):
    """Return the keys of a ramp between these sizes per device."""
    sizes = {f"{SIZE}_start": start, f"{SIZE}_increment": increment, SIZE: end}
    return {"enable_rampup_batch_size": True, **sizes, "global_rampup_samples": samples}


RAMP = ramp(4.0, 2.0, 12.0)
PIPELINE = {
    "ici_pipeline_parallelism": 4,
    "base_num_decoder_layers": 16,
    "per_device_batch_size": 4,
}
# With these the mesh does not shard the batch, so that any number of samples can run.
UNSHARDED = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": -1}


def found(config, devices=8):
    """Check a base.yml of these keys."""
    return verdict("maxtext", config, f"num_devices={devices}")


@pytest.mark.parametrize("case", cases("ramp_maxtext"), ids=lambda case: case["name"])
def test_manager_equals_every_reference_case(case):
    """MaxText's own ramp, step by step, also if rampup's plan counts accumulation or
    refuses fractions.
    """
    config, wanted = {**case["config"], **UNSHARDED}, case["maxtext_manager"]
    result = found(config, case["num_devices"])
    assert result.validator == "accepts"
    assert result.derived["manager_phases"] == wanted["phases"]
    assert result.derived["manager_ramp_steps"] == wanted["ramp_steps"]
    whole = all(
        config[f"per_device_batch_size{end}"] * case["num_devices"] % 1 == 0
        for end in ("", "_start", "_increment")
    )
    assert (result.phases is not None) == whole
    if whole and config["gradient_accumulation_steps"] == 1:
        names = ("start_step", "global_batch_size", "start_sample")
        assert [[row[name] for name in names] for row in result.phases] == wanted[
            "phases"
        ]


PIPED, LAYERS, REPEATS = (
    "num_pipeline_microbatches",
    "num_layers_per_pipeline_stage",
    "num_pipeline_repeats",
)
DELAY, EVAL = {"pipeline_delay_activation_forwarding": True}, f"eval_{SIZE}"
BOUNDARIES = [
    ("ramp_grows", ramp(4, 2, 6), ramp(4, 2, 4), "rejects"),
    ("ramp_increment_divides", ramp(4, 4, 12), ramp(4, 3, 12), "rejects"),
    (
        "ramp_increment_divides empty_first_batch",
        RAMP,
        {**ramp(0.1, 0.1, 1, 9), **UNSHARDED},
        "rejects",
    ),
    ("increment_positive", RAMP, ramp(4, 0, 12), "accepts"),
    ("increment_positive", RAMP, ramp(4, -4, 12), "accepts"),
    ("empty_first_batch", RAMP, ramp(0, 2, 12), "accepts"),
    ("empty_batch", {SIZE: 0.125}, {SIZE: 0.0625}, "accepts"),
    ("empty_batch", {SIZE: 0.125}, {SIZE: 0.1, "max_target_length": 1000}, "accepts"),
    ("vocab_tiling empty_batch", {SIZE: 0.125}, {SIZE: 0.1}, "rejects"),
    (
        "rows_over_mesh",
        {SIZE: 1.5, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
        {SIZE: 1.5},
        "accepts",
    ),
    ("first_rows_over_mesh increment_over_mesh", RAMP, ramp(0.5, 0.5, 2, 9), "accepts"),
    ("ramp_accumulation", {**RAMP, PASSES: 4}, {**RAMP, PASSES: 3}, "accepts"),
    ("accumulation_positive", {}, {PASSES: 0}, "rejects"),
    ("vocab_tiling", {"num_vocab_tiling": 8}, {"num_vocab_tiling": 7}, "rejects"),
    (
        "fp8_accumulation",
        {"quantization": "int8", PASSES: 2},
        {"quantization": "fp8", PASSES: 2},
        "rejects",
    ),
    ("mesh", {"ici_tensor_parallelism": 2}, {"ici_tensor_parallelism": 3}, "accepts"),
    (
        "eval_batch",
        {"eval_interval": -1, EVAL: 1.5},
        {"eval_interval": 10, EVAL: 1.5},
        "accepts",
    ),
    ("eval_batch", PIPELINE, {**PIPELINE, "eval_interval": 5, EVAL: 8}, "accepts"),
    (
        "no_steps",
        {"steps": -1, "learning_rate_schedule_steps": 1},
        {"steps": -1},
        "accepts",
    ),
    (
        "microbatches_multiple_of_stages batch_multiple_of_microbatches",
        PIPELINE,
        {**PIPELINE, PIPED: 6},
        "rejects",
    ),
    (
        "batch_multiple_of_microbatches",
        {**PIPELINE, PIPED: 8},
        {**PIPELINE, PIPED: 12},
        "rejects",
    ),
    ("microbatches_positive", {PIPED: 7}, {**PIPELINE, PIPED: 0}, "rejects"),
    ("pipeline_layers", {**PIPELINE, LAYERS: 4}, {**PIPELINE, LAYERS: 3}, "rejects"),
    ("pipeline_layers", {**PIPELINE, REPEATS: 4}, {**PIPELINE, REPEATS: 3}, "rejects"),
    ("ramp_in_pipeline", RAMP, {**PIPELINE, **RAMP}, "accepts"),
]
test_rules_break_just_beyond_their_boundary = boundary_test(
    "maxtext", {"num_devices": 8}, BOUNDARIES, exact=True
)


PIPED8, LOST = {**PIPELINE, PIPED: 8}, "loaded rows are never trained on"
EXPERTS = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 4}
PIPED_NUMBERS = {
    "num_stages": 4,
    "num_repeats": 4,
    "num_pipeline_microbatches": 8,
    "data_parallel_size": 2,
}
GRADIENT = {
    "shard_optimizer_over_data": "the 4 passes are summed in bfloat16",
    "use_tunix_gradient_accumulation": "each accumulation pass by its own tokens",
}
LOADED = ("global_batch_size_to_load", TO_TRAIN, "micro_batch_size_to_train_on")
NUMBERS = [
    # Loaded, trained and per pass: below 1 a full sample per device is loaded, and
    # products are truncated.
    *[
        ({SIZE: size, "expansion_factor_real_data": factor, "num_devices": devices, PASSES: passes},
         dict(zip(LOADED, sizes, strict=True)))
        for size, factor, devices, passes, *sizes in (
            (12, -1, 4, 4, 192, 192, 48), (0.5, -1, 8, 1, 8, 4, 4), (0.1, -1, 8, 1, 8, 0, 0), (1.5, -1, 3, 1, 4, 4, 4),
            (2.7, -1, 8, 2, 42, 42, 21), (2, 0.5, 8, 1, 8, 16, 16), (2, 4, 8, 1, 64, 16, 16),
        )
    ],
    # These change what a batch means, only with accumulation
    # (utils/gradient_accumulation.py).
    *[({PASSES: 4, key: True}, {"note": said}) for key, said in GRADIENT.items()],
    *[({PASSES: 1, key: True}, {"no_note": " passes "}) for key in GRADIENT],
    # With G = 2, MaxText runs 4s, then jumps to 16.
    ({**ramp(1, 1, 2, 64), PASSES: 2, "num_devices": 4},
     {"manager_phases": [[0, 4, 0], [16, 8, 64]], "lost_samples_at_ramp_end": 64, "note": "in step 16 the batch jumps from 4 to 16"}),
    # Below one sample per device, rows loaded beyond the batch are dropped; with one,
    # none are.
    ({"per_device_batch_size": 0.5}, {"run": "drops", "dropped_samples_per_step": 4, "note": "dropped"}),
    ({"per_device_batch_size": 0.125}, {"run": "drops", "dropped_samples_per_step": 7, "note": "dropped"}),
    ({"per_device_batch_size": 1}, {"run": "runs", "dropped_samples_per_step": 0, "no_note": "dropped"}),
    # Sizes 1 x 5, 2 x 3, 3 x 2 on one device: 17 rows trained, 20 loaded; a ramp that
    # fills its buffer loses none.
    ({**ramp(1, 1, 4, 15), "num_devices": 1},
     {"run": "drops", "lost_samples_at_ramp_end": 3, "manager_ramp_samples": 17, "note": f"3 {LOST}"}),
    ({**ramp(1, 1, 4, 36), "num_devices": 1}, {"run": "runs", "lost_samples_at_ramp_end": 0}),
    # The nearest increments divide the growth of the batch.
    (ramp(4, 3, 12), {"message": f"12 - 4 = 8 must be a multiple of {SIZE}_increment=3; nearest {SIZE}_increment: 2, 4"}),
    # Stages, repeats, microbatches and bubble; a note reports uneven microbatches.
    (PIPED8, {**PIPED_NUMBERS, "pipeline_microbatch_samples": 4, "bubble_fraction": 3 / 35}),
    ({**PIPELINE, SIZE: 2, PIPED: 16},
     {"validator": "accepts", "note": "does not divide over data * fsdp = 2"}),
    # fsdp_transpose shards the batch like fsdp, tensor_sequence does not, and experts
    # shard the loaded rows.
    ({f"ici_{axis}_parallelism": 2 for axis in ("fsdp", "fsdp_transpose", "tensor_sequence")}, {"data_parallel_size": 4}),
    ({**EXPERTS, "per_device_batch_size": 1.25}, {"rules": ["rows_over_mesh"]}),
    ({**EXPERTS, "per_device_batch_size": 2}, {"rules": []}),
    # A closed slice on more devices is taken as several slices; what the file says of
    # slices needs no note.
    ({"ici_fsdp_parallelism": 4}, {"run": "runs", "note": "num_devices=8 is taken as 2 slices of 4 devices"}),
    *[({"ici_fsdp_parallelism": 4, key: 2}, {"run": "runs", "no_note": "slices"}) for key in ("num_slices", "dcn_data_parallelism")],
    ({"ici_fsdp_parallelism": 4, "num_slices": 1}, {"run": "fails", "rules": ["mesh"]}),
    ({"ici_fsdp_parallelism": 8}, {"no_note": "slices"}),
]  # fmt: skip
test_numbers_and_notes = numbers_test(
    lambda config: verdict("maxtext", {"num_devices": 8} | config), NUMBERS
)


def test_num_devices_follows_from_a_closed_mesh():
    """Without a free axis the file determines the devices; with one, num_devices must
    be given.
    """
    closed = {
        "ici_fsdp_parallelism": 4,
        "ici_data_parallelism": 2,
        "dcn_data_parallelism": 2,
    }
    assert (
        verdict("maxtext", {"per_device_batch_size": 2, **closed}).derived[
            "global_batch_size_to_train_on"
        ]
        == 32
    )
    assert verdict("maxtext", {**closed}, "num_target_devices=16").ok
    with pytest.raises(ConfigError, match="num_devices=8"):
        verdict("maxtext", {"per_device_batch_size": 2})


def test_upper_file_wins_whatever_the_name_of_a_key(tmp_path):
    """A file takes what it does not set from its base_config. Names of a key mean the
    same in each file; in one they agree.
    """
    base, mine = tmp_path / "base.yml", tmp_path / "mine.yml"
    base.write_text(
        "per_device_batch_size: 3\nnum_target_devices: 8\nbase_config: ''\n"
    )
    mine.write_text("base_config: base.yml\nnum_devices: 16\n")
    assert check_file(mine, "maxtext").derived[TO_TRAIN] == 48
    assert check_file(mine, "maxtext", ["num_target_devices=4"]).derived[TO_TRAIN] == 12
    base.write_text("base_config: mine.yml\n")
    with pytest.raises(ConfigError, match="do they name each other"):
        check_file(mine, "maxtext")
    base.write_text("num_target_devices: 8\nnum_devices: 16\n")
    with pytest.raises(ConfigError, match="num_devices is given twice") as caught:
        check_file(mine, "maxtext")
    assert caught.value.path == str(base)


def test_phases_and_conversion_are_those_of_the_run_that_ignores_accumulation():
    """In MaxText's ramp a batch has no accumulation factor; behind it the batch jumps.
    So it does in the table of phases, and in the run that rampup makes of it.
    """
    verdict = found({**ramp(2, 2, 8, 5000), PASSES: 2, "steps": 10_000}, 16)
    _, second, third, last = verdict.derived["manager_phases"]
    batches = [row["global_batch_size"] for row in verdict.phases]
    assert batches == [32, 64, 96, 256]
    assert [row["start_step"] for row in verdict.phases] == [
        0,
        second[0],
        third[0],
        last[0],
    ]
    assert {row["accumulation_steps"] for row in verdict.phases} == {2}
    plan = build_plan(Config(**verdict.conversion.values))
    assert plan.ramp.sizes == tuple(batches)
    assert not {SIZE, "enable_rampup_batch_size"} & verdict.conversion.left_out.keys()


def test_conversion_keeps_the_key_that_rampup_has():
    """Rampup has one of the keys that change the gradient of several passes."""
    converted = found({PASSES: 4, **dict.fromkeys(GRADIENT, True)}).conversion.values
    assert set(GRADIENT) & set(converted) == {"shard_optimizer_over_data"}


def test_delayed_forwarding_is_asked_about():
    """It is a pipeline with twice the distance between its stages."""
    with pytest.raises(ConfigError, match="doubles the ticks between two stages"):
        found({**PIPED8, **DELAY})


def test_grpo_of_2025_is_asked_about():
    """Its update has `num_generations` samples of each prompt of a device (experimental/
    rl/grpo_trainer.py of MaxText until October 2025), and its file is like a base.yml.
    """
    grpo = {SIZE: 1, "num_generations": 4}
    with pytest.raises(ConfigError, match="num_generations samples of each"):
        found({**grpo, "use_grpo": True})
    assert found({**grpo, "use_grpo": False}).derived[TO_TRAIN] == 8


def test_misspelled_keys_are_named_with_their_line(tmp_path):
    """MaxText refuses them, also beside the right key, in a command and in a file."""
    script, config = tmp_path / "run.sh", tmp_path / "run.yml"
    script.write_text(
        f"#!/bin/bash\npython3 -m maxtext.trainers.pre_train.train base.yml {SIZE}=4"
        " per_device_batchsize=4\n"
    )
    config.write_text(f"{SIZE}: 4\nnum_devices: 8\nper_device_batchsize: 4\n")
    for path, line in ((script, 2), (config, 3)):
        said = f"per_device_batchsize (line {line})"
        expect(
            check_file(path, "maxtext", ["num_devices=8"]),
            rules=["known_keys"],
            validator="rejects",
            message=said,
        )


def test_the_base_file_of_rampup_is_not_that_of_maxtext(tmp_path):
    """Both are `configs/base.yml`, and a command may be within a copy of rampup."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs/base.yml", tmp_path / "configs/base.yml")
    mine = tmp_path / "mine.yml"
    mine.write_text("base_config: base.yml\nsteps: 10\n")
    found = check_file(mine, "maxtext", ["num_devices=8"])
    assert found.derived[TO_TRAIN] == 96
