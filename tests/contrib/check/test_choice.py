"""Tests of which command of a script is checked, where it ends, and what the script says
of its devices.
"""

import pytest
from helpers.dialect_files import expect

from rampup.contrib.check import check_command, check_file
from rampup.errors import ConfigError

SWIFT = (
    "megatron sft --model m --tensor_model_parallel_size 2 --micro_batch_size 1"
    " --global_batch_size 16"
)
GPT = "pretrain_gpt.py --micro-batch-size 1 --global-batch-size 16 --num-layers 8"
VERL = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=32"
    " actor_rollout_ref.actor.use_dynamic_bsz=True"
    " actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True trainer.n_gpus_per_node=8"
)


def write(tmp_path, text, name="run.sh"):
    """Write a script; return its path."""
    path = tmp_path / name
    path.write_text(text)
    return path


def test_the_rest_of_a_command_that_was_cut_is_not_a_command(tmp_path):
    """A backslash before a blank and a comment ends the line: the comment's words are
    arguments, and the next line is no command of a trainer.
    """
    cut = (
        "python3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=grpo \\\n"
        "  data.train_files=a.parquet \\ # change me\n"
        f"  data.train_batch_size=64 {VERL}\n"
    )
    with pytest.raises(
        ConfigError, match=r"a blank and a comment.*next line is a comm"
    ):
        check_file(write(tmp_path, cut))
    # Without the comment's words the command is complete, and the rest is left out.
    ends = cut.replace(" \\ # change me", "").replace("grpo \\", f"grpo {VERL} \\")
    found = check_file(write(tmp_path, ends), "verl")
    assert found.derived["samples_per_step"] != 64
    # Options that nothing precedes are a command, as always.
    expect(check_command(f"--world-size 8 {GPT[16:]}".split()), num_microbatches=[2])


def test_one_of_several_commands_is_chosen_by_its_line(tmp_path):
    """The note about similar commands says how; a line without a command is refused
    with those that have one.
    """
    path = write(
        tmp_path,
        "".join(
            f"torchrun --nproc_per_node 8 {GPT.replace('16', str(size))}\n"
            for size in (16, 32, 64)
        ),
    )
    expect(check_file(path), global_batch_size=16, note="line=2 chooses another")
    for line, size in ((1, 16), (2, 32), (3, 64)):
        found = check_file(path, None, [f"line={line}"])
        assert found.derived["global_batch_size"] == size
    with pytest.raises(ConfigError, match=r"in line 4.* lines 1, 2, 3"):
        check_file(path, "megatron", ["line=4"])


DEVICES = {
    "NPROC_PER_NODE=4 " + SWIFT: 2,
    "export NPROC_PER_NODE=8\nNNODES=2 " + SWIFT: 8,
    "NPROC_PER_NODE=4 \\\n" + SWIFT: 2,
    f"msrun --worker_num 32 --local_worker_num 8 {GPT}": 32,
    f"msrun --worker_num=4 {GPT}": 4,
    f"deepspeed --num_nodes 1 --num_gpus 8 {GPT}": 8,
}


@pytest.mark.parametrize("text", DEVICES)
def test_devices_that_the_script_says_are_not_asked(tmp_path, text):
    """In the variables before a command, and in the options of its launcher."""
    found = check_file(write(tmp_path, text + "\n"))
    assert found.derived["data_parallel_size"] == DEVICES[text]
    assert ("ms-swift" in " ".join(found.notes)) == ("megatron sft" in text)


def test_what_cannot_be_parsed_is_said_without_a_system(tmp_path):
    """And a program of a known system that its rules do not cover."""
    path = write(tmp_path, f"if true; then\ntorchrun --nproc_per_node 8 {GPT}\n")
    with pytest.raises(ConfigError, match="cannot read the shell script"):
        check_file(path)
    sft = write(tmp_path, "python -m skyrl.train.main_sft strategy=fsdp\n")
    with pytest.raises(ConfigError, match=r"this starts .*main_sft, which the rules"):
        check_file(sft)


FORKS = {
    "megatron": f"torchrun --nproc_per_node 8 megatron_mimo_train.py {GPT[16:]}",
    "maxtext": (
        "python3 MaxText/my_train.py MaxText/configs/base.yml steps=10"
        " per_device_batch_size=1 num_target_devices=8"
    ),
}


@pytest.mark.parametrize("system", FORKS)
def test_a_program_of_a_fork_is_one_question_of_one_round(tmp_path, system):
    """The question comes with all others; its answer is a setting, and a note stays."""
    path = write(tmp_path, f"{FORKS[system]}\n")
    with pytest.raises(ConfigError, match="a program of a fork") as error:
        check_file(path, system)
    answer = error.value.key
    values = {"megatron_version": "legacy", "maxtext_version": "2026-08"}
    found = check_file(path, system, [f"{answer}={values[answer]}"])
    expect(found, ok=True, note="a program of a fork")
    more = {
        "megatron": " --my-parallel-size 2 --llm-tp 4",
        "maxtext": " custom_mesh_and_rule=ep-as-cp n_samples=4",
    }
    path.write_text(f"{FORKS[system]}{more[system]}\n")
    with pytest.raises(ConfigError) as error:
        check_file(path, system)
    assert len(error.value.problems) == 3
