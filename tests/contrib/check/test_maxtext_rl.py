"""Tests of rampup.contrib.check.maxtext_rl: what an rl.yml really does."""

import pytest
import yaml
from helpers.dialect_files import boundary_test, numbers_test, verdict

from rampup.contrib.check import check_file
from rampup.errors import ConfigError

VALID = {
    "batch_size": 8,
    "num_batches": 2,
    "rl": {"num_generations": 4, "num_iterations": 1},
    "ici_fsdp_parallelism": 1,
}


def found(config=VALID, *settings, **more):
    """Check an rl.yml of these keys."""
    return verdict("maxtext_rl", {**config, **more}, *settings)


TRAIN, ROLLOUT = "train_micro_batch_size", "rollout_micro_batch_size"
TENSOR = "rollout_tensor_parallelism"
AXES = {"rollout_data_parallelism": 4}
BOUNDARIES = [
    (f"{TRAIN}_divides_batch", {TRAIN: 4}, {TRAIN: 3}, "rejects"),
    (f"{TRAIN}_positive", {TRAIN: 1}, {TRAIN: 0}, "rejects"),
    (f"{TRAIN}_positive", {TRAIN: -1}, {TRAIN: -2}, "rejects"),
    (f"{ROLLOUT}_divides_batch", {ROLLOUT: 8}, {ROLLOUT: 16}, "rejects"),
    (f"{ROLLOUT}_positive", {ROLLOUT: 1}, {ROLLOUT: 0}, "rejects"),
    ("batch_size_at_least_1", {}, {"batch_size": 0}, "rejects"),
    ("num_batches_at_least_1", {}, {"num_batches": 0}, "rejects"),
    ("num_epoch_at_least_1", {}, {"num_epoch": 0}, "rejects"),
    (
        "num_generations_at_least_2",
        {"rl": {"num_generations": 2}},
        {"rl": {"num_generations": 1}},
        "rejects",
    ),
    ("num_iterations_at_least_1", {}, {"rl": {"num_iterations": 0}}, "rejects"),
    ("train_fraction", {"train_fraction": 0.5}, {"train_fraction": 0.0}, "rejects"),
    ("train_fraction", {"train_fraction": 1.0}, {"train_fraction": 1.01}, "rejects"),
    (
        "dataset_fills_a_batch",
        {"train_fraction": 0.5},
        {"train_fraction": 0.49},
        "rejects",
    ),
    ("trainer_devices_fraction", {}, {"trainer_devices_fraction": 0.0}, "rejects"),
    (
        "sampler_devices_fraction",
        {"sampler_devices_fraction": 1.0},
        {"sampler_devices_fraction": 1.5},
        "rejects",
    ),
    ("rollout_axes", {TENSOR: -1, **AXES}, {TENSOR: -1}, "rejects"),
    ("rollout_axes", {}, {TENSOR: 0}, "rejects"),
    ("rollout_devices", {TENSOR: 8}, {TENSOR: 3}, "rejects"),
    ("rollout_devices", {TENSOR: 2, **AXES}, {TENSOR: 4, **AXES}, "rejects"),
    ("devices_left", {}, {"trainer_devices_fraction": 0.01}, "accepts"),
    ("older_name", {}, {"micro_batch_size": 2}, "rejects"),
]
test_rules_break_just_beyond_their_boundary = boundary_test(
    "maxtext_rl", VALID | {"num_devices": 16}, BOUNDARIES, exact=True
)


def test_slices_of_their_own_are_asked_about():
    """The rules divide one slice between training and generation."""
    with pytest.raises(ConfigError, match="slices of their own"):
        found(num_trainer_slices=1, num_samplers_slices=1)
    assert found(num_trainer_slices=-1).ok


OPEN = {
    name: value for name, value in VALID.items() if name != "ici_fsdp_parallelism"
} | {"train_micro_batch_size": 1}
LOSS, AGENTIC = "rl.loss_agg_mode", {"rl": VALID["rl"] | {"use_agentic_rollout": True}}
NUMBERS = [
    # One prompt less than a batch is rejected, a full batch is not, and epochs count.
    (VALID | {"num_prompts": 7}, {"rules": ["dataset_fills_a_batch"], "validator": "rejects"}),
    (VALID | {"num_prompts": 8}, {"rules": []}),
    (VALID | {"num_prompts": 7, "num_epoch": 2}, {"weight_syncs": 1}),
    # 20 prompts are two batches of 8 and 4 dropped prompts; 16 drop none.
    (VALID | {"num_batches": 5, "num_prompts": 20},
     {"run": "drops", "dropped_prompts": 4, "note": "4 of 20 prompts fill no batch of 8"}),
    (VALID | {"num_batches": 5, "num_prompts": 16}, {"run": "runs"}),
    # 2 prompts of 4 samples are 8 sequences: they divide over 8 devices, not over 3 or
    # 16, and nothing fails.
    *[
        (VALID | {"train_micro_batch_size": 2, "ici_fsdp_parallelism": fsdp},
         {"ok": True, "no_note" if 8 % fsdp == 0 else "note": f"do not divide over fsdp={fsdp}"})
        for fsdp in (1, 3, 4, 8, 16)
    ],
    # Under Pathways two hosts are split, so that 8 of 16 devices train; without
    # num_devices a note requests it.
    (OPEN | {"num_devices": 16}, {"trainer_devices": 8, "sampler_devices": 8, "note": "fsdp=8"}),
    (OPEN | {"num_devices": 16, "use_pathways": False}, {"trainer_devices": 16}),
    (OPEN, {"note": "num_devices=N"}),
    # The agentic learner generates for one prompt at a time.
    (VALID | AGENTIC | {"rollout_micro_batch_size": 4}, {"generation_calls": 8, "note": "agentic"}),
    # Tunix does not know sequence-mean, which MaxText accepts (tunix/rl/common.py,
    # aggregate_loss).
    ({"batch_size": 4, LOSS: "sequence-mean"},
     {"validator": "accepts", "run": "fails", "rules": ["loss_is_known"], "message": "nearest rl.loss_agg_mode: token-mean"}),
    ({"batch_size": 4, LOSS: "sequence-mean", "rl.use_agentic_rollout": True},
     {"ok": True, "note": "does not reach the agentic learner"}),
]  # fmt: skip
test_numbers_and_notes = numbers_test(found, NUMBERS)


def test_read_accepts_nested_and_flat_keys(tmp_path):
    """The sections that MaxText mirrors may be used; a contradiction is an error."""
    nested = {
        "dataset": {"batch_size": 8, "num_batches": 2},
        "rl": VALID["rl"],
        "ici_fsdp_parallelism": 1,
    }
    assert found(nested).to_dict() == found().to_dict()
    assert found({**nested, "batch_size": 8}).to_dict() == found().to_dict()
    with pytest.raises(ConfigError, match="given twice"):
        found({**nested, "batch_size": 4})
    (tmp_path / "base.yml").write_text(
        yaml.safe_dump(VALID | {"rl": {}, "num_generations": 4})
    )
    (tmp_path / "mine.yml").write_text(
        "base_config: base.yml\nrl:\n  num_generations: 2\n"
    )
    assert (
        check_file(tmp_path / "mine.yml", "maxtext_rl").derived["samples_per_step"]
        == 16
    )
    assert found(VALID, "num_generations=2").derived["samples_per_step"] == 16


def test_meanings_have_prompts_and_samples():
    """Every size is given in prompts and in samples."""
    means = {
        line.says.partition(" ")[0]: line.means
        for line in found(VALID, train_micro_batch_size=2).meanings
    }
    assert means["batch_size"].startswith("8 prompts = 32 samples")
    assert means["train_micro_batch_size"].startswith(
        "2 prompts = 8 samples per backward pass; 4 passes"
    )
    assert means["rollout_micro_batch_size"].startswith(
        "2 prompts = 8 samples per generate call; 4 calls"
    )
    text = " ".join(
        line.means for line in found({"batch_size": 4, LOSS: "token-mean"}).meanings
    )
    assert "every token of the batch counts alike" in text
