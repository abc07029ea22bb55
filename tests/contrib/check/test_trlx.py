"""Tests of rampup.contrib.check.trlx: its two rules, and what is collected."""

import json

import pytest
from helpers.dialect_files import (
    boundary_test,
    checker,
    expect,
    nested,
    numbers_test,
    verdict,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup.contrib.check import check_command, check_file
from rampup.errors import ConfigError

TRAIN, MICRO, ROUNDS, STEPS = (
    f"train.{name}"
    for name in ("batch_size", "minibatch_size", "epochs", "total_steps")
)
ROLLOUTS, CHUNK, INNER = "method.num_rollouts", "method.chunk_size", "method.ppo_epochs"
BASE = {TRAIN: 32, MICRO: 8, ROLLOUTS: 128, CHUNK: 64, INNER: 4}


trlx = checker("trlx", BASE)
BOUNDARIES = [
    ("micro_divides_batch", {MICRO: 16}, {MICRO: 15}, "rejects"),
    ("micro_divides_batch", {MICRO: 32}, {MICRO: 64}, "rejects"),
]
test_rules_break_just_beyond_their_boundary = boundary_test("trlx", BASE, BOUNDARIES)


@given(
    wanted=st.integers(1, 60),
    chunk=st.integers(1, 20),
    prompts=st.none() | st.integers(1, 30),
    processes=st.integers(1, 3),
)
@settings(max_examples=80)
def test_collection_takes_full_chunks(wanted, chunk, prompts, processes):
    """Full chunks until there are enough; the short chunk that a single process meets
    at the end of the prompts is refused.
    """
    change = {ROLLOUTS: wanted, CHUNK: chunk, "num_processes": processes}
    facts = {} if prompts is None else {"num_prompts": prompts}
    chunks = []
    while sum(chunks) < wanted:
        chunks.append(chunk)
    if processes == 1 and prompts is not None and prompts < sum(chunks):
        with pytest.raises(ConfigError, match="meets a short chunk at their end"):
            trlx(change, facts)
        return
    found = trlx(change, facts)
    assert found.derived["chunks"] == chunks
    assert found.derived["rollouts_per_process"] == sum(chunks)
    batches = [
        list(range(sum(chunks)))[at : at + 32] for at in range(0, sum(chunks), 32)
    ]
    assert found.derived["mini_batches"] == len(batches)
    micro = [len(batches[-1][at : at + 8]) for at in range(0, len(batches[-1]), 8)]
    assert found.derived["last_mini_batch_microbatches"] == micro


NUMBERS = [
    # A micro size multiplies the gradient, and under DeepSpeed the optimizer steps.
    ({}, {"note": "summed over the 4 passes"}),
    ({}, {"note": "under DeepSpeed each pass ends"}),
    ({MICRO: None}, {"no_note": "summed"}),
    (
        {TRAIN: None, MICRO: None, "method.name": "PPOConfig"},
        {"mini_batch_samples": 32, "chunks": [64, 64]},
    ),
]
test_numbers_and_notes = numbers_test(trlx, NUMBERS)


def test_explanation_has_the_numbers_of_the_verdict():
    """Meanings have the verdict's numbers."""
    found = trlx({"num_processes": 2, ROLLOUTS: 100, CHUNK: 40})
    text = " ".join(means for _, means in found.meanings)
    for number in (
        "64 samples per optimizer step",
        "120 samples are collected",
        "3 generate calls",
        "4 mini batches",
    ):
        assert number in text, number


@pytest.mark.parametrize(
    "key",
    [TRAIN, ROLLOUTS, CHUNK, INNER, ROUNDS, STEPS, "num_processes", "num_prompts"],
)
def test_a_count_below_one_is_refused(key):
    """Before anything is computed; a negative micro batch too."""
    with pytest.raises(ConfigError, match=rf"{key}=0 must be .*at least 1"):
        trlx({key: 0})
    with pytest.raises(ConfigError, match=f"{MICRO}=-1 must be .*at least 0"):
        trlx({MICRO: -1})


@pytest.mark.parametrize(
    "sizes", [{ROLLOUTS: 10**9, CHUNK: 1}, {TRAIN: 10**9, MICRO: 1}]
)
def test_more_calls_than_can_be_counted_are_refused(sizes):
    """Each generate call and each pass is counted, up to a million."""
    with pytest.raises(ConfigError, match=r"must be .*at most 1000000"):
        trlx(sizes)


@pytest.mark.parametrize(
    "change",
    [
        {"train.trainer": "NeMoPPOTrainer"},
        *({"method.name": f"{name}Config"} for name in ("RFT", "ILQL", "SFT")),
    ],
)
def test_other_trainers_are_refused(change):
    """NeMo's trainers have sizes of their own, and other methods train on given
    samples, which the rules do not cover.
    """
    with pytest.raises(
        ConfigError, match="the rules of trlX cover PPO with Accelerate"
    ):
        trlx(change)


def test_sizes_that_a_program_may_set_are_named():
    """A command without sizes says that those of its program are not read; with them it
    does not.
    """
    words = ["accelerate", "launch", "--num_processes", "7", "examples/hh/ppo_hh.py"]
    expect(
        check_command(words, "trlx"),
        note=(
            "may set train.batch_size, method.num_rollouts, method.chunk_size itself"
        ),
    )
    sizes = ["train.batch_size=4", "method.num_rollouts=64", "method.chunk_size=16"]
    expect(check_command(words, "trlx", sizes), no_note="may set", ok=True)
    words[-1] = "examples/ilql_sentiments.py"
    with pytest.raises(ConfigError, match=r"starts ilql_sentiments\.py, which the"):
        check_command(words, "trlx")


def test_a_misspelt_setting_is_refused_though_the_file_has_the_right_key():
    """It would be ignored, and the file's value kept."""
    with pytest.raises(ConfigError, match=r"did you mean train\.minibatch_size"):
        verdict("trlx", nested(BASE), "train.minibatchsize=4")


@pytest.mark.parametrize("section", ["trian", "trains"])
def test_a_misspelt_section_is_refused(section):
    """Its sizes would be defaults."""
    with pytest.raises(ConfigError, match=r"did you mean train\.minibatch_size"):
        trlx({MICRO: None, f"{section}.minibatch_size": 4})


def test_an_environment_with_the_name_of_trlx_is_not_its_run(tmp_path):
    """The run of the script is one of ILQL, which the rules do not cover."""
    path = tmp_path / "run.sh"
    path.write_text(
        "conda activate trlx\npip install trlx\n"
        "accelerate launch --num_processes 8 examples/ilql_sentiments.py\n"
    )
    with pytest.raises(ConfigError, match="which the rules of trlX do not cover"):
        check_file(path)
    notebook = tmp_path / "run.ipynb"
    cell = {"cell_type": "code", "source": ["import trlx\n"]}
    notebook.write_text(json.dumps({"cells": [cell]}, indent=1))
    with pytest.raises(ConfigError, match="this is a Python program"):
        check_file(notebook)


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch --num_processes 8 src/open_r1/grpo.py --config demo.yaml",
        "accelerate launch train.py",
    ],
)
def test_a_program_that_names_no_trlx_is_not_taken_for_it(tmp_path, command):
    """Accelerate starts programs of many systems."""
    path = tmp_path / "run.sh"
    path.write_text(command + "\n")
    with pytest.raises(ConfigError):
        check_file(path)


def test_settings_of_trlx_name_it(tmp_path):
    """The program may have any name."""
    path = tmp_path / "run.sh"
    path.write_text("accelerate launch mine.py '{\"train.batch_size\": 16}'\n")
    assert check_file(path, overrides=["num_processes=1"]).system == "trlx"
