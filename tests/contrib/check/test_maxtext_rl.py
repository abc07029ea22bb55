"""Tests of rampup.contrib.check.maxtext_rl: what an rl.yml really does."""

import pytest
import yaml
from helpers.dialect_files import boundary_test, expect, numbers_test, verdict

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
BOUNDARIES = [
    (f"{TRAIN}_divides_batch", {TRAIN: 4}, {TRAIN: 3}, "rejects"),
    (f"{TRAIN}_positive", {TRAIN: 1}, {TRAIN: 0}, "rejects"),
    (f"{TRAIN}_positive", {TRAIN: -1}, {TRAIN: -2}, "rejects"),
    (f"{ROLLOUT}_divides_batch", {ROLLOUT: 8}, {ROLLOUT: 16}, "rejects"),
    (f"{ROLLOUT}_positive", {ROLLOUT: 1}, {ROLLOUT: 0}, "rejects"),
    (
        "dataset_fills_a_batch",
        {"train_fraction": 0.5},
        {"train_fraction": 0.49},
        "rejects",
    ),
]
test_rules_break_just_beyond_their_boundary = boundary_test(
    "maxtext_rl", VALID, BOUNDARIES, exact=True
)


def test_slices_of_their_own_are_asked_about():
    """The rules divide one slice between training and generation."""
    with pytest.raises(ConfigError, match="slices of their own"):
        found(num_trainer_slices=1, num_samplers_slices=1)
    assert found(num_trainer_slices=-1).ok


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("batch_size", 0, "at least 1"),
        ("num_batches", 0, "at least 1"),
        ("num_epoch", 0, "at least 1"),
        ("rl.num_generations", 1, "at least 2"),
        ("rl.num_iterations", 0, "at least 1"),
        ("train_fraction", 0.0, "above 0"),
        ("train_fraction", 1.01, "at most 1"),
        ("rl.loss_agg_mode", "sequence-mean", "must be one of token-mean"),
        ("micro_batch_size", 2, "the older name of train_micro_batch_size"),
        ("rl.use_agentic_rollout", True, "the agentic learner"),
    ],
)
def test_what_the_rules_do_not_cover_is_refused_or_asked_about(key, value, said):
    """Sizes below their least, a loss that Tunix does not know (tunix/rl/common.py,
    aggregate_loss), older names and other learners.
    """
    with pytest.raises(ConfigError, match=said):
        found(
            {name: old for name, old in VALID.items() if name != "rl"}, **{key: value}
        )


def test_how_devices_are_divided_is_not_followed_and_named():
    """It changes no size of a step; a note says that nothing checks it."""
    expect(
        found(VALID, rollout_tensor_parallelism=4, ici_tensor_parallelism=2),
        ok=True,
        note=["rollout_tensor_parallelism=4 divides devices", "ici_tensor_parallelism"],
    )


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
    ({"batch_size": 8}, {"note": "give its size"}),
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
        says.partition(" ")[0]: text
        for says, text in found(VALID, train_micro_batch_size=2).meanings
    }
    assert means["batch_size"].startswith("8 prompts = 32 samples")
    assert means["train_micro_batch_size"].startswith(
        "2 prompts = 8 samples per backward pass; 4 passes"
    )
    assert means["rollout_micro_batch_size"].startswith(
        "2 prompts = 8 samples per generate call; 4 calls"
    )
