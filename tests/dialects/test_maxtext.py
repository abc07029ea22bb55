"""Tests of rampup.dialects.maxtext: what a base.yml really does."""

import pytest
from helpers.dialect_files import cases, check_nearest, expect, rules, verdict

from rampup.dialects import check_file
from rampup.dialects.maxtext import KEYS, MaxTextJob
from rampup.dialects.reading import Settings
from rampup.errors import ConfigError

RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 4.0,
    "per_device_batch_size_increment": 2.0,
    "per_device_batch_size": 12.0,
    "global_rampup_samples": 500,
}
TENTHS = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 0.1,
    "per_device_batch_size_increment": 0.1,
    "per_device_batch_size": 1,
}
HALVES = {
    **RAMP,
    "per_device_batch_size_start": 0.5,
    "per_device_batch_size_increment": 0.5,
    "per_device_batch_size": 2,
    "global_rampup_samples": 240,
}
PIPELINE = {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 16, "per_device_batch_size": 4}
# With these the mesh does not shard the batch, so that any number of samples can run.
UNSHARDED = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": -1}


FOUND_BY_RUN = {"mesh", "empty_batch", "empty_first_batch", "increment_positive", "rows_over_mesh", "first_rows_over_mesh"}
FOUND_BY_RUN |= {"increment_over_mesh", "ramp_accumulation", "ramp_in_pipeline", "eval_batch", "no_steps"}


def found(config, devices=8, **more):
    """Check a base.yml of these keys."""
    return verdict("maxtext", {**config, **more}, f"num_devices={devices}")


def table(verdict):
    """Return the phases of a verdict as the reference cases write them."""
    return [[row["start_step"], row["global_batch_size"], row["start_sample"]] for row in verdict.phases]


@pytest.mark.parametrize("case", cases("ramp_maxtext"), ids=lambda case: case["name"])
def test_manager_equals_every_reference_case(case):
    """MaxText's own ramp, step by step, also if rampup's plan counts accumulation or refuses fractions."""
    config, wanted = {**case["config"], **UNSHARDED}, case["maxtext_manager"]
    result = found(config, case["num_devices"])
    assert result.validator == "accepts"
    assert result.derived["manager_phases"] == wanted["phases"]
    assert result.derived["manager_ramp_steps"] == wanted["ramp_steps"]
    whole = all(config[f"per_device_batch_size{end}"] * case["num_devices"] % 1 == 0 for end in ("", "_start", "_increment"))
    assert (result.phases is not None) == whole
    if whole and config["gradient_accumulation_steps"] == 1:
        assert table(result) == wanted["phases"]


@pytest.mark.parametrize(
    ("per_device", "expansion", "devices", "accumulation", "sizes"),
    [
        (12, -1, 4, 4, (192, 192, 48)),
        (0.5, -1, 8, 1, (8, 4, 4)),
        (0.1, -1, 8, 1, (8, 0, 0)),
        (1.5, -1, 3, 1, (4, 4, 4)),
        (2.7, -1, 8, 2, (42, 42, 21)),
        (2, 0.5, 8, 1, (8, 16, 16)),
        (2, 4, 8, 1, (64, 16, 16)),
    ],
)
def test_batch_sizes_are_rounded_as_in_maxtext(per_device, expansion, devices, accumulation, sizes):
    """Loaded, trained and per pass: below 1 a full sample per device is loaded, and products are truncated."""
    config = {
        "per_device_batch_size": per_device,
        "expansion_factor_real_data": expansion,
        "gradient_accumulation_steps": accumulation,
    }
    derived = found(config, devices).derived
    names = ("global_batch_size_to_load", "global_batch_size_to_train_on", "micro_batch_size_to_train_on")
    assert tuple(derived[name] for name in names) == sizes


def test_ramp_ignores_accumulation():
    """With G = 2, MaxText runs 4s, then jumps to 16; the phases include G, and the note has both numbers."""
    keys = {"per_device_batch_size_start": 1, "per_device_batch_size_increment": 1, "per_device_batch_size": 2}
    result = found({**RAMP, **keys, "global_rampup_samples": 64, "gradient_accumulation_steps": 2}, 4)
    assert result.derived["manager_phases"] == [[0, 4, 0], [16, 8, 64]]
    assert [row["global_batch_size"] for row in result.phases] == [8, 16]
    assert result.derived["lost_samples_at_ramp_end"] == 64
    assert any("its batches are 4 " in note and "from 4 to 16" in note for note in result.notes)


@pytest.mark.parametrize(
    ("config", "broken"),
    [
        ({**RAMP, "per_device_batch_size": 4}, ["ramp_grows"]),
        ({**RAMP, "per_device_batch_size": 6}, []),
        ({**RAMP, "per_device_batch_size_increment": 3}, ["ramp_increment_divides"]),
        ({**RAMP, "per_device_batch_size_increment": 4}, []),
        ({**TENTHS, **UNSHARDED, "global_rampup_samples": 9}, ["ramp_increment_divides", "empty_first_batch"]),
        ({**RAMP, "per_device_batch_size_increment": 0}, ["increment_positive"]),
        ({**RAMP, "per_device_batch_size_increment": -4}, ["increment_positive"]),
        ({**RAMP, "per_device_batch_size_start": 0}, ["empty_first_batch"]),
        ({"per_device_batch_size": 0.0625}, ["empty_batch"]),
        ({"per_device_batch_size": 0.1, "max_target_length": 1000}, ["empty_batch"]),
        ({"per_device_batch_size": 0.1}, ["vocab_tiling", "empty_batch"]),
        ({"per_device_batch_size": 0.125}, []),
        ({"per_device_batch_size": 1.5}, ["rows_over_mesh"]),
        ({"per_device_batch_size": 1.5, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, []),
        ({**HALVES, "global_rampup_samples": 9}, ["first_rows_over_mesh", "increment_over_mesh"]),
        ({**RAMP, "gradient_accumulation_steps": 3}, ["ramp_accumulation"]),
        ({**RAMP, "gradient_accumulation_steps": 4}, []),
        ({"gradient_accumulation_steps": 0}, ["accumulation_positive"]),
        ({"num_vocab_tiling": 7}, ["vocab_tiling"]),
        ({"num_vocab_tiling": 8}, []),
        ({"quantization": "fp8", "gradient_accumulation_steps": 2}, ["fp8_accumulation"]),
        ({"quantization": "int8", "gradient_accumulation_steps": 2}, []),
        ({"ici_tensor_parallelism": 3}, ["mesh"]),
        ({"eval_interval": 10, "eval_per_device_batch_size": 1.5}, ["eval_batch"]),
        ({"eval_interval": -1, "eval_per_device_batch_size": 1.5}, []),
        ({"steps": -1}, ["no_steps"]),
        ({"steps": -1, "learning_rate_schedule_steps": 1}, []),
        (PIPELINE, []),
        ({**PIPELINE, "num_pipeline_microbatches": 6}, ["microbatches_multiple_of_stages", "batch_multiple_of_microbatches"]),
        ({**PIPELINE, "num_pipeline_microbatches": 8}, []),
        ({**PIPELINE, "num_pipeline_microbatches": 12}, ["batch_multiple_of_microbatches"]),
        ({**PIPELINE, "num_pipeline_microbatches": 0}, ["microbatches_positive"]),
        ({**PIPELINE, "num_pipeline_microbatches": 4, "pipeline_delay_activation_forwarding": True}, ["delayed_microbatches"]),
        ({**PIPELINE, "num_pipeline_microbatches": 8, "pipeline_delay_activation_forwarding": True}, []),
        ({**PIPELINE, "num_layers_per_pipeline_stage": 3}, ["pipeline_layers"]),
        ({**PIPELINE, "num_layers_per_pipeline_stage": 4}, []),
        ({**PIPELINE, "num_pipeline_repeats": 3}, ["pipeline_layers"]),
        ({**PIPELINE, "num_pipeline_repeats": 4}, []),
        ({**PIPELINE, **RAMP}, ["ramp_in_pipeline"]),
        ({**PIPELINE, "eval_interval": 5, "eval_per_device_batch_size": 8}, ["eval_batch"]),
        ({"num_pipeline_microbatches": 7}, []),
    ],
)
def test_rules_break_just_beyond_their_boundary(config, broken):
    """A file just beyond each rule breaks it, a file just inside does not, and the nearest values fix it."""
    result = found(config)
    assert rules(result) == broken
    assert result.validator == ("rejects" if set(broken) - FOUND_BY_RUN else "accepts")
    check_nearest("maxtext", config, ["num_devices=8"], result)


PIPED8, LOST = {**PIPELINE, "num_pipeline_microbatches": 8}, "loaded rows are never trained on"
ONES = {**RAMP, "per_device_batch_size_start": 1, "per_device_batch_size_increment": 1, "num_devices": 1}
EXPERTS = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 4}
PIPED_NUMBERS = {"num_stages": 4, "num_repeats": 4, "num_pipeline_microbatches": 8, "data_parallel_size": 2}
NUMBERS = [
    # Below one sample per device, rows loaded beyond the batch are dropped; with one, none are.
    ({"per_device_batch_size": 0.5}, {"run": "drops", "dropped_samples_per_step": 4, "note": "dropped"}),
    ({"per_device_batch_size": 0.125}, {"run": "drops", "dropped_samples_per_step": 7, "note": "dropped"}),
    ({"per_device_batch_size": 1}, {"run": "runs", "dropped_samples_per_step": 0, "no_note": "dropped"}),
    # Sizes 1 x 5, 2 x 3, 3 x 2 on one device: 17 rows trained, 20 loaded; a ramp that fills its buffer loses none.
    (
        {**ONES, "per_device_batch_size": 4, "global_rampup_samples": 15},
        {"run": "drops", "lost_samples_at_ramp_end": 3, "manager_ramp_samples": 17, "note": f"3 {LOST}"},
    ),
    ({**ONES, "per_device_batch_size": 4, "global_rampup_samples": 36}, {"run": "runs", "lost_samples_at_ramp_end": 0}),
    # The nearest increments divide the growth of the batch.
    (
        {**RAMP, "per_device_batch_size_increment": 3},
        {
            "message": "12 - 4 = 8 must be a multiple of per_device_batch_size_increment=3; nearest per_device_batch_size_"
            "increment: 2, 4"
        },
    ),
    # Stages, repeats, microbatches and bubble, which delayed forwarding doubles; a note reports uneven microbatches.
    (PIPED8, {**PIPED_NUMBERS, "pipeline_microbatch_samples": 4, "bubble_fraction": 3 / 35}),
    ({**PIPED8, "pipeline_delay_activation_forwarding": True}, {"bubble_fraction": 6 / 38}),
    (
        {**PIPELINE, "per_device_batch_size": 2, "num_pipeline_microbatches": 16},
        {"validator": "accepts", "note": "does not divide over data * fsdp = 2"},
    ),
    # fsdp_transpose shards the batch like fsdp, tensor_sequence does not, and experts shard the loaded rows.
    ({f"ici_{axis}_parallelism": 2 for axis in ("fsdp", "fsdp_transpose", "tensor_sequence")}, {"data_parallel_size": 4}),
    ({**EXPERTS, "per_device_batch_size": 1.25}, {"rules": ["rows_over_mesh"]}),
    ({**EXPERTS, "per_device_batch_size": 2}, {"rules": []}),
]


@pytest.mark.parametrize(("config", "wanted"), NUMBERS)
def test_numbers_and_notes(config, wanted):
    """What MaxText makes of a file, with a note on what is legal but surprising."""
    expect(verdict("maxtext", {"num_devices": 8} | config), **wanted)


def test_num_devices_follows_from_a_closed_mesh():
    """Without a free axis the file determines the devices; with one, num_devices must be given."""
    closed = {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2, "dcn_data_parallelism": 2}
    assert verdict("maxtext", {"per_device_batch_size": 2, **closed}).derived["global_batch_size_to_train_on"] == 32
    assert verdict("maxtext", {**closed}, "num_target_devices=16").ok
    with pytest.raises(ConfigError, match="num_devices=8"):
        verdict("maxtext", {"per_device_batch_size": 2})


def test_read_follows_base_config(tmp_path):
    """A file takes the keys that it does not set from its base_config; a circular reference is an error."""
    (tmp_path / "base.yml").write_text("per_device_batch_size: 3\nsteps: 7\nbase_config: ''\n")
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nsteps: 9\n")
    result = check_file(tmp_path / "mine.yml", "maxtext", ["num_devices=2"])
    assert result.derived["global_batch_size_to_train_on"] == 6
    (tmp_path / "base.yml").write_text("base_config: mine.yml\n")
    with pytest.raises(ConfigError, match="circular"):
        check_file(tmp_path / "mine.yml", "maxtext", ["num_devices=2"])


def test_upper_file_wins_whatever_the_name_of_a_key(tmp_path):
    """Names of a key mean the same in each file of a chain; two of them in one file must agree."""
    (tmp_path / "base.yml").write_text("per_device_batch_size: 3\nnum_target_devices: 8\n")
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nnum_devices: 16\n")
    assert check_file(tmp_path / "mine.yml", "maxtext").derived["global_batch_size_to_train_on"] == 48
    assert check_file(tmp_path / "mine.yml", "maxtext", ["num_target_devices=4"]).derived["global_batch_size_to_train_on"] == 12
    (tmp_path / "base.yml").write_text("num_target_devices: 8\nnum_devices: 16\n")
    with pytest.raises(ConfigError, match="num_devices is given twice") as caught:
        check_file(tmp_path / "mine.yml", "maxtext")
    assert caught.value.path == str(tmp_path / "base.yml")


def test_read_names_misspelt_and_mistyped_keys():
    """The error names the key that was meant, or the key with the wrong type."""
    with pytest.raises(ConfigError, match="did you mean per_device_batch_size_start"):
        found({"per_device_batch_size_strat": 1, "steps": 1})
    with pytest.raises(ConfigError, match="enable_rampup_batch_size"):
        found({"enable_rampup_batch_size": "sometimes"})


def test_defaults_are_of_their_kind():
    """The defaults pass their own kind, so that an empty file is MaxText's base.yml."""
    values = {name: entry.key.read(name, entry.default) for name, entry in KEYS.items()}
    assert MaxTextJob(Settings(values={**values, "num_devices": 2})).sizes.to_train == 24


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("shard_optimizer_over_data", "the 4 passes are summed in bfloat16"),
        ("use_tunix_gradient_accumulation", "each of the 4 passes by its own tokens"),
    ],
)
def test_keys_that_change_the_gradient_of_several_passes_have_a_note(key, said):
    """Each changes what a batch means, only with accumulation (utils/gradient_accumulation.py)."""
    for passes in (4, 1):
        result = found({"per_device_batch_size": 2, "gradient_accumulation_steps": passes, key: True})
        assert any(said in note for note in result.notes) == (passes == 4)
        # Rampup has one of them, and sums in float32.
        assert (result.conversion.values.get(key) is True) == (key == "shard_optimizer_over_data")
