# ruff: noqa: E501 - scripts and commands are in one line, as people write them
"""Tests of scripts, commands and base files as `rampup check` reads them, for all six systems."""

import json
from pathlib import Path

import pytest

from rampup.cli import main
from rampup.dialects import SYSTEMS, check_command, check_file
from rampup.errors import ConfigError

VERL = (
    "data.train_batch_size=$BATCH actor_rollout_ref.rollout.n=5 +critic.enable=False trainer.nnodes=${NNODES:-1} "
    "++actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / 4)) actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm data.train_files=\"['a', 'b']\""
)
SKYRL = (
    "trainer.train_batch_size=$BATCH trainer.policy_mini_batch_size=$((BATCH/4)) generator.n_samples_per_prompt=5 "
    "trainer.placement.policy_num_gpus_per_node=8 trainer.placement.ref_num_gpus_per_node=8 generator.inference_engine.num_engines=8"
)
# System: the command, with the key of the report and its value if BATCH is 64.
COMMANDS = {
    "verl": (f"python3 -m verl.trainer.main_ppo {VERL}", "samples_per_step", 320),
    "skyrl": (f"uv run --extra vllm -m skyrl.train.entrypoints.main_base {SKYRL}", "samples_per_step", 320),
    "maxtext": (
        "python3 -m MaxText.train src/maxtext/configs/base.yml run_name=x per_device_batch_size=$BATCH num_target_devices=4",
        "global_batch_size_to_load",
        256,
    ),
    "maxtext_rl": (
        "python3 -m maxtext.trainers.post_train.rl.train_rl post_train/rl.yml batch_size=$BATCH rl.num_generations=5 num_devices=8",
        "samples_per_step",
        320,
    ),
    "megatron": (
        "torchrun --nproc_per_node=8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size $BATCH --train-iters 10 --seq-length 8",
        "num_microbatches",
        [4],
    ),
    "trlx": (
        "accelerate launch --num_processes 4 ppo_sentiments.py '{\"method.num_rollouts\": '$BATCH', \"method.chunk_size\": 16}'",
        "samples_per_step",
        256,
    ),
}
FORMS = {
    "plain": '#!/bin/bash\nBATCH=${BATCH_SIZE:-64}\nmkdir out\npython prepare.py --n 3\n%s "$@" 2>&1 | tee log\n',
    "variables": 'BATCH=64\nset -x\nif [ -z "$X" ]; then\n  %s\nfi\n',
    "a function": "run() {\n  local BATCH=$1\n  %s\n}\nrun 64",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_reads_the_script_of_every_system(tmp_path, system, form):
    """The command that starts the system is found among others, and its sizes are read."""
    command, key, value = COMMANDS[system]
    path = tmp_path / "run.sh"
    path.write_text(FORMS[form] % command)
    found = check_file(path, system)
    assert found.derived[key] == value
    assert any("read from line" in note for note in found.notes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_asks_for_an_unknown_variable(tmp_path, system):
    """A size from the output of a command is named with the setting to add; both of its forms settle it."""
    command, key, value = COMMANDS[system]
    path = tmp_path / "run.sh"
    path.write_text(f"BATCH=$(cat size)\nHALF=$((BATCH / 2))\n{command}\n")
    if system == "trlx":  # no JSON without the number
        assert check_file(path, system, ["BATCH=64"]).derived[key] == value
        return
    with pytest.raises(ConfigError, match=r"the script does not say what \$BATCH is; add BATCH=\.\.\., or ") as error:
        check_file(path, system)
    assert error.value.problems or error.value.key
    assert check_file(path, system, ["BATCH=64"]).derived[key] == value


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_reads_a_command_after_two_dashes(capsys, system):
    """`rampup check --from SYSTEM -- COMMAND ...` gives the verdict of the command; settings before the dashes win."""
    command, key, value = COMMANDS[system]
    words = (
        command.replace("$((BATCH / 4))", "16").replace("$((BATCH/4))", "16").replace("'$BATCH'", "64").replace("$BATCH", "64")
    )
    words = words.replace("${NNODES:-1}", "1").replace("'", "").split()
    if system == "trlx":
        words = [*words[:5], '{"method.num_rollouts": 64, "method.chunk_size": 16}']
    assert main(["check", "--json", "--from", system, "--", *words]) in (0, 2)
    assert json.loads(capsys.readouterr().out)["derived"][key] == value
    assert check_command(words, system).derived[key] == value


def test_check_command_runs_a_script_with_arguments(tmp_path):
    """`-- bash FILE ARGUMENTS` gives the script its positional parameters."""
    path = tmp_path / "run.sh"
    path.write_text('B=$1\nif [ "$2" = big ]; then B=$((B * 2)); fi\nBATCH=$B\n' + COMMANDS["skyrl"][0])
    assert check_command(["bash", str(path), "32", "big"], "skyrl").derived["samples_per_step"] == 320
    with pytest.raises(ConfigError, match=r"add B=.* or the script's arguments: .* -- bash FILE ARGUMENTS"):
        check_file(path, "skyrl")


STARTS = (
    'bash examples/run.sh 64 "$@"',
    "source examples/run.sh 64",
    "cd ../.. && . examples/run.sh 64",
    'sbatch -N 2 "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/examples/run.sh" 64',
    "export BATCH=64\nsrun --mpi=pmix bash -x examples/run.sh",
    "if ! BATCH=64 sh ./examples/run.sh; then exit 1; fi",
    'ROOT=${0%/*}/../..\nexec "$ROOT/examples/run.sh" 64',
    "bash -c 'bash examples/run.sh 64'",
    "ray job submit --address=here -- bash examples/run.sh 64",
)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_follows_the_script_that_a_script_starts(tmp_path, system, start):
    """The sizes are those of the script that is started, found from a folder above; one that is not there is refused by name."""
    command, key, value = COMMANDS[system]
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    path, other = tmp_path / "tests" / "gpu" / "e2e.sh", tmp_path / "examples" / "run.sh"
    path.write_text(f"set -e\n{start}\npython summary.py --run_name x\n")
    with pytest.raises(
        ConfigError, match=r"e2e\.sh:\d: this starts or sources a script that is not read: .*examples/run\.sh is neither"
    ):
        check_file(path, system)
    other.write_text(f"BATCH=${{BATCH:-$1}}\n{command}\n")
    found = check_file(path, system)
    assert found.derived[key] == value
    assert any(f"read from line 2 of {other}: " in note for note in found.notes)


def test_keys_for_a_script_are_not_a_launch(tmp_path):
    """Arguments of a script change its sizes, in each of its kinds; a script that is not there is never read as defaults."""
    child, key, value = COMMANDS["skyrl"]
    words = ["bash", str(tmp_path / "run.sh"), "trainer.micro_train_batch_size_per_gpu=2", "trainer.policy_mini_batch_size=8"]
    path = tmp_path / "e2e.sh"
    path.write_text(" ".join(words))
    for check in (lambda: check_command(words, "skyrl"), lambda: check_file(path, "skyrl")):
        with pytest.raises(ConfigError, match=r"run\.sh is neither beside this script nor in a folder above it"):
            check()
    (tmp_path / "run.sh").write_text(f'BATCH=64\n{child} "$@"\n')
    for found in (check_command(words, "skyrl"), check_file(path, "skyrl")):
        assert found.derived[key] == value
        assert found.derived["data_parallel_size"] == 8
        assert found.derived["mini_batch_samples"] == 40
    # A launcher of the machine, which starts the program that it is given, need not be there.
    assert (
        check_command(
            ["/opt/launch.sh", *f"{child} trainer.epochs=2".replace("$BATCH", "64").replace("$((BATCH/4))", "16").split()],
            "skyrl",
        ).derived[key]
        == value
    )


def test_messages_name_the_script_in_which_a_value_stands(tmp_path):
    """An argument stands in the script that gives it, everything else in the one that is started."""
    path, other = tmp_path / "e2e.sh", tmp_path / "run.sh"
    other.write_text('\n\npython -m skyrl.train.entrypoints.main_base trainer.train_batch_size=x "$@"\n')
    path.write_text("\nbash run.sh trainer.policy_mini_batch_size=y\n")
    with pytest.raises(ConfigError) as error:
        check_file(path, "skyrl")
    assert sorted((Path(problem.path).name, problem.line) for problem in error.value.problems) == [("e2e.sh", 2), ("run.sh", 3)]
    other.write_text('torchrun pretrain_gpt.py --micro-batch-size 2 --global-batch-size $((N * 8)) "$@"\n')
    path.write_text("\n\nbash run.sh --train-iters y --tensor-model-parallel-size 1\n")
    with pytest.raises(ConfigError) as error:
        check_file(path, "megatron", ["world_size=8"])
    assert sorted((Path(problem.path).name, problem.line) for problem in error.value.problems) == [("e2e.sh", 3), ("run.sh", 1)]
    # A variable that only the script has which is started is one of its variables.
    path.write_text("bash run.sh --train-iters 3\n")
    assert check_file(path, "megatron", ["world_size=8", "N=4"]).derived["num_microbatches"] == [2]
    assert check_command(["bash", str(path)], "megatron", ["world_size=8", "N=4"]).derived["num_microbatches"] == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bash $0", r"run\.sh:1: .*/run\.sh starts itself"),
        ("source ./run.sh", r"run\.sh starts itself"),
        ("N=${N:-0}; export N=$((N + 1)); bash run.sh", "scripts start each other too often, 20 deep or 200 in all"),
        ('bash run.sh a "$@"; bash run.sh b "$@"', "start each other too often"),
        ("bash $FOLDER/x.sh", r"does not say what \$FOLDER is, in \$FOLDER/x\.sh; add FOLDER="),
        ("bash other.sh", "other.sh: cannot read the shell script: line 1"),
        ("bash <(curl http://x)", r"what <\(curl http://x\) prints is not known"),
        ("bash .", "\\. is neither"),
        ("srun -N 2 --mpi pmix missing.sh trainer.epochs=1", "missing.sh is neither"),
        ("timeout 10m ssh host 'cd x && bash missing.sh trainer.epochs=1'", "missing.sh is neither"),
        (
            "source models/$1.sh; python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=8",
            r"what \$1 is, in models/\$1\.sh",
        ),
    ],
)
def test_check_file_ends_on_scripts_that_cannot_be_followed(tmp_path, text, said):
    """Scripts that start themselves without end, or have no known name, are refused in one sentence."""
    path = tmp_path / "run.sh"
    path.write_text(text)
    (tmp_path / "other.sh").write_text("if true; then (")
    with pytest.raises(ConfigError, match=said):
        check_file(path, "skyrl")


def test_a_script_that_is_not_read_is_a_note_beside_a_launch(tmp_path):
    """Preparation that is not there does not hide the run; of several runs in several scripts the one with most keys counts."""
    command = COMMANDS["skyrl"][0]
    path = tmp_path / "run.sh"
    path.write_text(
        f"source ~/.bashrc\nsource not_there_env.sh\nbash not_there_prepare.sh PLATFORM=gpu\n[ -z $JOB ] && sbatch $0\nBATCH=64\n{command}\n"
    )
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    assert sum("what it sets or starts is not read" in note for note in found.notes) == 2 + 1
    (tmp_path / "small.sh").write_text("python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=8\n")
    path.write_text(f"bash small.sh\nBATCH=64\n{command}\nbash small.sh\n")
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    assert any(
        f"read from line 3: {command[:50]}" in note and f"similar commands in line 1 of {tmp_path / 'small.sh'}" in note
        for note in found.notes
    )


def test_check_file_asks_for_what_decides_the_options(tmp_path):
    """Options that differ between branches of an unknown condition are not left out."""
    path = tmp_path / "run.sh"
    path.write_text(
        'DEVICE=$(probe)\nif [ "$DEVICE" = npu ]; then A=(trainer.train_batch_size=8); else A=(trainer.train_batch_size=32); fi\n'
        'if [ "$DEVICE" = npu ]; then B=(trainer.logger=x); else B=(trainer.logger=y); fi\n'
        'python -m skyrl.train.entrypoints.main_base trainer.policy_mini_batch_size=8 "${B[@]}" "${A[@]}"\n'
    )
    with pytest.raises(ConfigError, match=r"what \$DEVICE is.*add DEVICE=") as error:
        check_file(path, "skyrl")
    assert error.value.key == "DEVICE"
    assert check_file(path, "skyrl", ["DEVICE=gpu"]).derived["samples_per_step"] == 160


def test_check_file_chooses_the_training_command(tmp_path):
    """Conversion and evaluation are not the run; of several runs the first counts, and a note names the others."""
    command = COMMANDS["megatron"][0].replace("$BATCH", "$b")
    path = tmp_path / "run.sh"
    path.write_text(
        "python tools/checkpoint/convert.py --tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 8 --seq-length 4\n"
        f"for b in 64 128; do {command}; done\n{command}\n"
    )
    found = check_file(path, "megatron")
    assert found.derived["num_microbatches"] == [4]
    assert any("line 2" in note and "similar commands in line 3" in note for note in found.notes)
    path.write_text("python tools/checkpoint/convert.py --micro-batch-size 8\n")
    with pytest.raises(ConfigError, match=r"starts tools/checkpoint/convert\.py, which the rules of Megatron do not cover"):
        check_file(path, "megatron")
    path.write_text("echo hello\n")  # such as a file of settings that another script sources
    with pytest.raises(ConfigError, match=r"no command in it is like `torchrun"):
        check_file(path, "megatron")


def test_base_config_is_beside_the_file_or_shipped_or_missing(tmp_path):
    """A `base_config` beside the file wins over MaxText's own of that name; one that is nowhere is an error, not base.yml."""
    path = tmp_path / "mine.yml"
    path.write_text("base_config: post_train/dpo.yml\nsteps: 100\n")
    found = check_file(path, "maxtext", ["num_devices=8"])
    assert found.derived["global_batch_size_to_train_on"] == 16
    assert any("post_train/dpo.yml" in note for note in found.notes)
    (tmp_path / "post_train").mkdir()
    (tmp_path / "post_train" / "dpo.yml").write_text("per_device_batch_size: 3\nbase_config: base.yml\n")
    assert check_file(path, "maxtext", ["num_devices=8"]).derived["global_batch_size_to_train_on"] == 24
    path.write_text("base_config: nowhere.yml\nsteps: 100\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yml is neither beside this file nor one that MaxText ships") as error:
        check_file(path, "maxtext", ["num_devices=8"])
    assert error.value.key == "base_config"
    assert check_file(path, "maxtext", ["num_devices=8", "base_config=base.yml"]).derived["global_batch_size_to_train_on"] == 96


def test_hydra_base_files_are_beside_the_file_or_shipped(tmp_path):
    """`--config-name` and `defaults` name a base file: one beside the source wins, veRL's own gives its sizes."""
    words = ["python3", "-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer.yaml", "data.train_batch_size=64"]
    sizes = [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
    ]
    rest = ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "critic.enable=false"]
    assert check_command([*words, *sizes, *rest], "verl").derived["data_parallel_size"] == 2
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [gsm8k_multiturn_grpo, _self_]\ndata: {max_prompt_length: 64}\n")
    assert check_file(path, "verl", rest).derived["samples_per_step"] == 256
    (tmp_path / "gsm8k_multiturn_grpo.yaml").write_text("defaults: [ppo_trainer]\ndata: {train_batch_size: 32}\n")
    assert check_file(path, "verl", rest).derived["samples_per_step"] == 32
    script = tmp_path / "run.sh"
    script.write_text(f"{' '.join(words[:3])} --config-path=$HERE/config --config-name other {' '.join(rest)}\n")
    with pytest.raises(ConfigError, match=r"base file other\.yaml is neither beside this file nor one that is known"):
        check_file(script, "verl")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "other.yaml").write_text("data: {train_batch_size: 16}\n")
    assert check_file(script, "verl").derived["samples_per_step"] == 16


def test_check_file_is_not_confused_by_names_that_are_alike(tmp_path):
    """A mandatory key is no misspelling of another; a repeated key that is no size is a note; a mapping is no value."""
    path = tmp_path / "a.yaml"
    path.write_text("actor_rollout_ref: {rollout: {name: vllm}}\ndata: {train_batch_size: 64}\n")
    assert check_file(path, "verl").derived["samples_per_step"] == 64
    path.write_text(
        "MODEL_ARGS:\n  --init: 1\n  --init: 2\n  --micro-batch-size: 2\n  --global-batch-size: 64\n  --train-iters: 3\n"
    )
    found = check_file(path, "megatron", ["world_size=8"])
    assert found.derived["num_microbatches"] == [4]
    assert any(
        "MODEL_ARGS.--init is given twice, again in line 3" in note or "init is given twice" in note for note in found.notes
    )
    path.write_text("--micro-batch-size: 2\n--micro-batch-size: 4\n")
    with pytest.raises(ConfigError, match="micro_batch_size is given twice"):
        check_file(path, "megatron", ["world_size=8"])
    assert check_file(path, "megatron", ["world_size=8", "micro_batch_size=2"]).derived["micro_batch_size"] == 2
    path.write_text("model: {micro_batch_size: 2}\nref: {micro_batch_size: '${model.micro_batch_size}'}\n")
    assert check_file(path, "megatron", ["world_size=8"]).derived["micro_batch_size"] == 2
    path.write_text("ARGS: {--micro-batch-size: 2}\nARGS_2: {--micro-batch-size: 4}\n")
    found = check_file(path, "megatron", ["world_size=8"])
    assert found.derived["micro_batch_size"] == 2
    assert any("ARGS_2" in note for note in found.notes)
    path.write_text("method: {num_rollouts: {strategy: choice, values: [1, 2]}}\ntrain: {batch_size: 4}\n")
    with pytest.raises(ConfigError, match=r"method\.num_rollouts is a mapping; it must be a whole number"):
        check_file(path, "trlx")


def test_a_script_may_leave_open_what_no_number_depends_on(tmp_path):
    """Layers and the length of a Megatron run may be unknown, with a note; not if a ramp or a chunk depends on them."""
    path = tmp_path / "run.sh"
    text = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size 64 --num-layers $LAYERS"
    path.write_text(f"{text} --train-iters $(($1 / 64)) --save $FOLDER --node-rank $SLURM_PROCID --bf16 $MOE_ARGS\n")
    found = check_file(path, "megatron")
    assert found.derived["num_microbatches"] == [4]
    notes = "\n".join(found.notes)
    assert "num_layers=$LAYERS: the script does not say what $LAYERS is; add LAYERS=..., or num_layers=..." in notes
    assert "train_iters" in notes
    # An unknown value of an option is no unknown option.
    assert "does not say what $MOE_ARGS adds" in notes
    assert "FOLDER" not in notes
    assert "SLURM_PROCID" not in notes
    path.write_text(f"{text} --train-samples $N --rampup-batch-size 16 16 1000\n")
    with pytest.raises(ConfigError, match=r"train_samples=\$N: the script does not say"):
        check_file(path, "megatron")
    path.write_text(f"{text} --num-layers-per-virtual-pipeline-stage 2\n")
    with pytest.raises(ConfigError, match=r"num_layers=\$LAYERS: the script does not say"):
        check_file(path, "megatron")
