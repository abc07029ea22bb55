"""Tests of rampup.dialects.maxtext_rl: what an rl.yml really does."""

import pytest
import yaml
from helpers.dialect_files import check_nearest, rules, verdict

from rampup.dialects import check_file
from rampup.errors import ConfigError

VALID = {"batch_size": 8, "num_batches": 2, "rl": {"num_generations": 4, "num_iterations": 1}, "ici_fsdp_parallelism": 1}


def found(config=VALID, *settings, **more):
    """Check an rl.yml of these keys."""
    return verdict("maxtext_rl", {**config, **more}, *settings)


@pytest.mark.parametrize(
    ("keys", "broken"),
    [
        ({}, []),
        ({"train_micro_batch_size": 4}, []),
        ({"train_micro_batch_size": 3}, ["train_micro_batch_size_divides_batch"]),
        ({"train_micro_batch_size": 0}, ["train_micro_batch_size_positive"]),
        ({"train_micro_batch_size": -1}, []),
        ({"train_micro_batch_size": -2}, ["train_micro_batch_size_positive"]),
        ({"rollout_micro_batch_size": 8}, []),
        ({"rollout_micro_batch_size": 16}, ["rollout_micro_batch_size_divides_batch"]),
        ({"rollout_micro_batch_size": 0}, ["rollout_micro_batch_size_positive"]),
        ({"batch_size": 0}, ["batch_size_at_least_1"]),
        ({"num_batches": 0}, ["num_batches_at_least_1"]),
        ({"num_epoch": 0}, ["num_epoch_at_least_1"]),
        ({"rl": {"num_generations": 1}}, ["num_generations_at_least_2"]),
        ({"rl": {"num_generations": 2}}, []),
        ({"rl": {"num_iterations": 0}}, ["num_iterations_at_least_1"]),
        ({"train_fraction": 0.0}, ["train_fraction"]),
        ({"train_fraction": 1.0}, []),
        ({"train_fraction": 1.01}, ["train_fraction"]),
        ({"train_fraction": 0.5}, []),
        ({"train_fraction": 0.49}, ["dataset_fills_a_batch"]),
        ({"trainer_devices_fraction": 0.0}, ["trainer_devices_fraction"]),
        ({"sampler_devices_fraction": 1.5}, ["sampler_devices_fraction"]),
        ({"num_trainer_slices": 1}, ["slices"]),
        ({"num_trainer_slices": 1, "num_samplers_slices": 1}, []),
        ({"rollout_tensor_parallelism": -1}, ["rollout_axes"]),
        ({"rollout_tensor_parallelism": -1, "rollout_data_parallelism": 4}, []),
        ({"rollout_tensor_parallelism": 0}, ["rollout_axes"]),
        ({"rollout_tensor_parallelism": 3}, ["rollout_devices"]),
        ({"rollout_tensor_parallelism": 8}, []),
        ({"rollout_tensor_parallelism": 2, "rollout_data_parallelism": 2}, ["rollout_devices"]),
        ({"rollout_tensor_parallelism": 2, "rollout_data_parallelism": 4}, []),
        ({"num_trainer_slices": 1, "num_samplers_slices": 1, "ici_tensor_parallelism": 3}, ["tensor_in_slice"]),
        ({"num_trainer_slices": 1, "num_samplers_slices": 1, "ici_tensor_parallelism": 4}, []),
        ({"trainer_devices_fraction": 0.01}, ["devices_left"]),
        ({"micro_batch_size": 2}, ["older_name"]),
    ],
)
def test_rules_break_just_beyond_their_boundary(keys, broken):
    """A file just beyond each rule breaks it, a file just inside does not, and the nearest values fix it."""
    config = {**VALID, **keys}
    result = found(config, "num_devices=16")
    assert rules(result) == broken
    check_nearest("maxtext_rl", config, ["num_devices=16"], result)


def test_data_set_must_fill_a_batch():
    """One prompt less than a batch is rejected, a full batch is not, and epochs count."""
    assert rules(found(VALID, "num_prompts=7")) == ["dataset_fills_a_batch"]
    assert found(VALID, "num_prompts=7").validator == "rejects"
    assert rules(found(VALID, "num_prompts=8")) == []
    assert found({**VALID, "num_epoch": 2}, "num_prompts=7").derived["weight_syncs"] == 1


def test_note_reports_dropped_prompts():
    """20 prompts are two batches of 8 and 4 dropped prompts; 16 drop none."""
    result = found({**VALID, "num_batches": 5}, "num_prompts=20")
    assert (result.run, result.derived["dropped_prompts"]) == ("drops", 4)
    assert any("4 of 20 prompts fill no batch of 8" in note for note in result.notes)
    assert found({**VALID, "num_batches": 5}, "num_prompts=16").run == "runs"


@pytest.mark.parametrize(("fsdp", "replicates"), [(1, False), (4, False), (8, False), (3, True), (16, True)])
def test_note_reports_silent_replication(fsdp, replicates):
    """2 prompts of 4 samples are 8 sequences: they divide over 8 devices, not over 3 or 16, and nothing fails."""
    result = found(VALID, train_micro_batch_size=2, ici_fsdp_parallelism=fsdp)
    assert result.ok
    assert any(f"do not divide over fsdp={fsdp}" in note for note in result.notes) == replicates


def test_open_fsdp_axis_follows_from_the_devices():
    """Under Pathways two hosts are split, so that 8 of 16 devices train; without num_devices a note requests it."""
    config = {name: value for name, value in VALID.items() if name != "ici_fsdp_parallelism"}
    split = found(config, "num_devices=16", train_micro_batch_size=1)
    assert (split.derived["trainer_devices"], split.derived["sampler_devices"]) == (8, 8)
    assert any("fsdp=8" in note for note in split.notes)
    shared = found(config, "num_devices=16", train_micro_batch_size=1, use_pathways=False)
    assert shared.derived["trainer_devices"] == 16
    assert any("num_devices=N" in note for note in found(config).notes)


def test_read_accepts_nested_and_flat_keys(tmp_path):
    """The sections that MaxText mirrors may be used; a contradiction is an error."""
    nested = {"dataset": {"batch_size": 8, "num_batches": 2}, "rl": VALID["rl"], "ici_fsdp_parallelism": 1}
    assert found(nested).to_dict() == found().to_dict()
    assert found({**nested, "batch_size": 8}).to_dict() == found().to_dict()
    with pytest.raises(ConfigError, match="given twice"):
        found({**nested, "batch_size": 4})
    (tmp_path / "base.yml").write_text(yaml.safe_dump(VALID | {"rl": {}, "num_generations": 4}))
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nrl:\n  num_generations: 2\n")
    assert check_file(tmp_path / "mine.yml", "maxtext_rl").derived["samples_per_step"] == 16
    assert found(VALID, "num_generations=2").derived["samples_per_step"] == 16


def test_meanings_have_prompts_and_samples():
    """Every size is given in prompts and in samples."""
    means = {line.says.partition(" ")[0]: line.means for line in found(VALID, train_micro_batch_size=2).meanings}
    assert means["batch_size"].startswith("8 prompts = 32 samples")
    assert means["train_micro_batch_size"].startswith("2 prompts = 8 samples per backward pass; 4 passes")
    assert means["rollout_micro_batch_size"].startswith("2 prompts = 8 samples per generate call; 4 calls")


def test_agentic_learner_ignores_the_rollout_micro_batch():
    """The agentic learner generates for one prompt at a time, and a note reports it."""
    result = found({**VALID, "rl": {**VALID["rl"], "use_agentic_rollout": True}}, rollout_micro_batch_size=4)
    assert result.derived["generation_calls"] == 8
    assert any("agentic" in note for note in result.notes)


def test_loss_aggregation_is_explained_and_checked():
    """Tunix does not know sequence-mean, which MaxText accepts (tunix/rl/common.py, aggregate_loss)."""
    key = "rl.loss_agg_mode"
    text = " ".join(meaning.means for meaning in verdict("maxtext_rl", {"batch_size": 4, key: "token-mean"}).meanings)
    assert "every token of the batch counts alike" in text
    broken = verdict("maxtext_rl", {"batch_size": 4, key: "sequence-mean"})
    assert (broken.validator, broken.run, rules(broken)) == ("accepts", "fails", ["loss_is_known"])
    assert "token-mean" in broken.violations[0].nearest
    agentic = verdict("maxtext_rl", {"batch_size": 4, key: "sequence-mean", "rl.use_agentic_rollout": True})
    assert agentic.ok
    assert any("does not reach the agentic learner" in note for note in agentic.notes)
