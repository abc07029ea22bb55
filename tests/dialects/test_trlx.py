"""Tests of rampup.dialects.trlx: its two rules, what is collected, and NeMo."""

import pytest
from helpers.dialect_files import agrees, case_settings, cases, check_nearest, nested, rules, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

TRAIN, MICRO, ROUNDS, STEPS = (f"train.{name}" for name in ("batch_size", "minibatch_size", "epochs", "total_steps"))
ROLLOUTS, CHUNK, INNER = "method.num_rollouts", "method.chunk_size", "method.ppo_epochs"
NODES, DEVICES, TP, PP = (
    "trainer.num_nodes",
    "trainer.devices",
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
)
BASE = {TRAIN: 32, MICRO: 8, ROLLOUTS: 128, CHUNK: 64, INNER: 4}
NEMO = {"train.trainer": "NeMoPPOTrainer", DEVICES: 8}


def trlx(*changes):
    """Check the base file with changes."""
    config = dict(BASE)
    for change in changes:
        config |= change
    return verdict("trlx", nested(config))


@pytest.mark.parametrize("case", cases("trlx"), ids=lambda case: case["name"])
def test_verdict_equals_every_reference_case(case):
    """The verdict and every number are those of trlX's own code."""
    found = verdict("trlx", case["config"], *case_settings(case))
    assert not agrees(found, case["expect"])
    check_nearest("trlx", case["config"], case_settings(case), found)


BOUNDARIES = [
    # rule, changes that just hold, changes that just break it, validator's verdict on the latter
    ("micro_divides_batch", {MICRO: 16}, {MICRO: 15}, "rejects"),
    ("micro_divides_batch", {MICRO: 32}, {MICRO: 64}, "rejects"),
    ("nemo_micro_divides_batch", {**NEMO, MICRO: 16}, {**NEMO, MICRO: 15}, "accepts"),
    ("total_steps_reached", {STEPS: 1}, {STEPS: 0}, "accepts"),
    ("total_steps_reached", {STEPS: 0, ROLLOUTS: 16, CHUNK: 16}, {STEPS: -1, ROLLOUTS: 16, CHUNK: 16}, "accepts"),
    ("epochs_train", {ROUNDS: 1}, {ROUNDS: 0}, "accepts"),
    ("micro_not_negative", {MICRO: 0}, {MICRO: -1}, "accepts"),
    ("positive.train.minibatch_size", {**NEMO, MICRO: None}, {**NEMO, MICRO: 0}, "accepts"),
    ("nemo_has_a_replica", {**NEMO, TP: 8}, {**NEMO, TP: 8, PP: 2}, "rejects"),
    ("nemo_prompts_fill_a_chunk", {**NEMO, "num_prompts": 512}, {**NEMO, "num_prompts": 511}, "accepts"),
]


@pytest.mark.parametrize(
    ("rule", "holds", "breaks", "validator"), BOUNDARIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_rules_break_just_beyond_their_boundary(rule, holds, breaks, validator):
    """One step to either side of each rule."""
    valid, invalid = trlx(holds), trlx(breaks)
    assert valid.ok, rules(valid)
    assert rule in rules(invalid)
    assert (invalid.validator, invalid.run) == (validator, "fails")
    check_nearest("trlx", nested(BASE | breaks), [], invalid)


@pytest.mark.parametrize("key", [TRAIN, ROLLOUTS, CHUNK, INNER, "num_processes", "num_prompts", DEVICES])
def test_counts_must_be_positive(key):
    """Zero breaks one rule and causes no division by zero."""
    assert f"positive.{key}" in rules(trlx({key: 0}))
    assert f"positive.{key}" not in rules(trlx({key: 1}))


@given(wanted=st.integers(1, 60), chunk=st.integers(1, 20), prompts=st.none() | st.integers(1, 30), processes=st.integers(1, 3))
@settings(max_examples=80)
def test_collection_takes_full_chunks(wanted, chunk, prompts, processes):
    """Full chunks until there are enough; a single process meets a short chunk at the end of each pass."""
    change = {ROLLOUTS: wanted, CHUNK: chunk, "num_processes": processes}
    found = trlx(change, {} if prompts is None else {"num_prompts": prompts})
    chunks, left = [], prompts
    while sum(chunks) < wanted:
        size = chunk if prompts is None or processes > 1 else min(chunk, left)
        chunks.append(size)
        if left is not None:
            left = left - size or prompts
    assert found.derived["chunks"] == chunks
    assert found.derived["num_chunks"] == len(chunks)
    assert found.derived["rollouts_per_process"] == sum(chunks)
    batches = [list(range(sum(chunks)))[at : at + 32] for at in range(0, sum(chunks), 32)]
    assert found.derived["mini_batches"] == len(batches)
    micro = [len(batches[-1][at : at + 8]) for at in range(0, len(batches[-1]), 8)]
    assert found.derived["last_mini_batch_microbatches"] == micro


NEMO_RUNS = [
    # batch, micro, rollouts, chunk, inner, rounds, total steps, nodes, devices, tensor, pipeline;
    # replicas, global batch, micro, rounded chunk, planned samples, planned steps
    ((16, 2, 128, 16, 4, 100, 10_000, 1, 8, 1, 1), (8, 128, 2, 16, 4096, 3200)),
    ((2, None, 16, 5, 4, 100, 1000, 4, 8, 4, 1), (8, 16, 2, 6, 512, 1000)),
]


@pytest.mark.parametrize(("asked", "expected"), NEMO_RUNS, ids=str)
def test_nemo_sizes_equal_those_of_trlx(asked, expected):
    """NeMo's replicas, chunk and length, as trlX computes them."""
    names = (TRAIN, MICRO, ROLLOUTS, CHUNK, INNER, ROUNDS, STEPS, NODES, DEVICES, TP, PP)
    found = trlx({"train.trainer": "NeMoPPOTrainer"}, dict(zip(names, asked, strict=True)))
    names = ("data_parallel_size", "mini_batch_samples", "micro_batch_samples_per_process")
    assert tuple(found.derived[name] for name in (*names, "chunk_size", "train_samples", "max_steps")) == expected
    assert found.ok


def test_nemo_sizes_may_be_nested():
    """NeMo's own mapping may be in the file, in its usual place."""
    inside = "train.trainer_kwargs.megatron_cfg."
    found = trlx({"train.trainer": "NeMoPPOTrainer", f"{inside}trainer.devices": 8, f"{inside}{TP}": 3})
    assert found.derived["data_parallel_size"] == 2
    assert any("8 devices do not divide by 3" in note for note in found.notes)


def test_nemo_rounds_chunks_and_drops_prompts():
    """A chunk becomes full batches, and prompts that fill no chunk are dropped."""
    found = trlx(NEMO, {CHUNK: 33, "num_prompts": 1000})
    assert found.derived["chunk_size"] == 64
    assert any("rounded up to 64" in note for note in found.notes)
    assert found.run == "drops"
    assert any("488 prompts of 1,000" in note for note in found.notes)
    assert trlx(NEMO, {"num_prompts": 1024}).run == "runs"


def test_notes_report_summed_gradients():
    """A micro size multiplies the gradient, and under DeepSpeed the optimizer steps; without one there is no note."""
    found = trlx()
    assert any("summed over the 4 passes" in note for note in found.notes)
    assert any(advice.holds is None and "4 times" in advice.because for advice in found.advice)
    assert any("under DeepSpeed each pass ends" in note for note in trlx({"deepspeed": True}).notes)
    assert not any("summed" in note for note in trlx({MICRO: None}).notes)


@pytest.mark.parametrize(("method", "batch"), [("ILQLConfig", 128), ("SFTConfig", 8), ("PPOConfig", 32)])
def test_methods_have_their_own_default_batch(method, batch):
    """Each method has its own default batch; only PPO collects samples."""
    found = verdict("trlx", nested({"method.name": method, ROUNDS: 3}))
    assert found.derived["mini_batch_samples"] == batch
    assert ("chunks" in found.derived) == (method == "PPOConfig")


def test_huge_counts_are_not_listed():
    """A billion calls are counted, not listed."""
    found = trlx({ROLLOUTS: 10**9, CHUNK: 1, "num_prompts": 7})
    assert found.derived["num_chunks"] == 10**9
    assert "chunks" not in found.derived


def test_explanation_and_plan_have_the_numbers_of_the_verdict():
    """Meanings, flow and plan have the verdict's numbers."""
    found = trlx({"num_processes": 2, ROLLOUTS: 100, CHUNK: 40})
    text = " ".join([meaning.means for meaning in found.meanings] + list(found.flow))
    for number in ("64 samples per optimizer step", "120 samples are collected, 20 more", "3 generate calls", "4 mini batches"):
        assert number in text, number
    updates = found.plan.policy_updates
    assert (updates.num_mini_batches, updates.optimizer_steps) == (4, found.derived["optimizer_steps"])
    assert trlx().plan.policy_updates.accumulation_steps == 4


RFT = {"train.trainer": "AccelerateRFTTrainer", "method.name": "RFTConfig", "train.batch_size": 8, "train.minibatch_size": 2}


def test_rft_is_not_read_as_ppo():
    """RFT selects from n_generations_per_prompt responses and has no rollout size (trainer/accelerate_rft_trainer.py)."""
    found = verdict("trlx", nested(RFT), "num_prompts=100", "num_processes=2")
    assert found.ok, rules(found)
    assert (found.derived["mini_batch_samples"], found.derived["accumulation_steps"]) == (16, 4)
    assert not {"rollouts_per_process", "optimizer_steps", "num_chunks"} & set(found.derived)
    assert any("3,200 samples in all" in meaning.means for meaning in found.meanings)
    assert any("are not known before the run" in note for note in found.notes)
    assert not any("32 rollouts" in line for line in found.flow)
    assert "rft_batch_given" in rules(verdict("trlx", nested({**RFT, "train.batch_size": None})))
    assert rules(verdict("trlx", nested({**RFT, "train.minibatch_size": 3}))) == ["micro_divides_batch"]
    assert rules(verdict("trlx", nested({**RFT, "method.n_generations_per_prompt": 0}))) == [
        "positive.method.n_generations_per_prompt"
    ]
