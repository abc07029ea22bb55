# ruff: noqa: E501 - scripts and commands are in one line, as people write them
"""Tests of scripts, commands and base files as `rampup check` reads them, for all six systems."""

import json
import re
from pathlib import Path

import pytest
from helpers.dialect_files import expect

from rampup.cli import main
from rampup.dialects import SYSTEMS, check_command, check_file
from rampup.dialects.script import read_commands
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
        "global_batch_size_to_load", 256),
    "maxtext_rl": (
        "python3 -m maxtext.trainers.post_train.rl.train_rl post_train/rl.yml batch_size=$BATCH rl.num_generations=5 num_devices=8",
        "samples_per_step", 320),
    "megatron": (
        "torchrun --nproc_per_node=8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size $BATCH --train-iters 10 --seq-length 8",
        "num_microbatches", [4]),
    "trlx": (
        "accelerate launch --num_processes 4 ppo_sentiments.py '{\"method.num_rollouts\": '$BATCH', \"method.chunk_size\": 16}'",
        "samples_per_step", 256),
}  # fmt: skip


def command_words(system):
    """Return the words of a command with a batch of 64."""
    return read_commands(f"BATCH=64\n{COMMANDS[system][0]}", "x.sh", {}, re.compile("!"))[-1].words


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_asks_for_an_unknown_variable(tmp_path, system):
    """A size from the output of a command is named with the setting to add; both of its forms settle it."""
    command, key, value = COMMANDS[system]
    path = tmp_path / "run.sh"
    path.write_text(f"BATCH=$(cat size)\nHALF=$((BATCH / 2))\n{command}\n")
    if system != "trlx":  # no JSON without the number
        with pytest.raises(ConfigError, match=r"the script does not say what \$BATCH is; add BATCH=\.\.\., or ") as error:
            check_file(path, system)
        assert error.value.problems or error.value.key
    assert check_file(path, system, ["BATCH=64"]).derived[key] == value


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_reads_a_command_after_two_dashes(capsys, system):
    """`rampup check --from SYSTEM -- COMMAND ...` gives the verdict of the command; settings before the dashes win."""
    _, key, value = COMMANDS[system]
    words = command_words(system)
    assert main(["check", "--json", "--from", system, "--", *words]) in (0, 2)
    assert json.loads(capsys.readouterr().out)["derived"][key] == value
    assert check_command(words, system).derived[key] == value
    found = check_command(words)  # its system is found by the program that it starts
    assert (found.system, found.derived[key]) == (system, value)


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
    missing = r"e2e\.sh:\d: this starts or sources a script that is not read: .*examples/run\.sh is neither"
    with pytest.raises(ConfigError, match=missing):
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
    checks = (lambda: check_command(words, "skyrl"), lambda: check_file(path, "skyrl"))
    for check in checks:
        with pytest.raises(ConfigError, match=r"run\.sh is neither beside this script nor in a folder above it"):
            check()
    (tmp_path / "run.sh").write_text(f'BATCH=64\n{child} "$@"\n')
    for check in checks:
        expect(check(), **{key: value, "data_parallel_size": 8, "mini_batch_samples": 40})
    # A launcher of the machine, which starts the program that it is given, need not be there.
    words = ["/opt/launch.sh", *command_words("skyrl"), "trainer.epochs=2"]
    assert check_command(words, "skyrl").derived[key] == value


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
        (f"source models/$1.sh; {COMMANDS['skyrl'][0]}", r"what \$1 is, in models/\$1\.sh"),
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
    others = "source ~/.bashrc\nsource not_there_env.sh\nbash not_there_prepare.sh PLATFORM=gpu\n[ -z $JOB ] && sbatch $0"
    path.write_text(f"{others}\nBATCH=64\n{command}\n")
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    assert sum("what it sets or starts is not read" in note for note in found.notes) == 2 + 1
    (tmp_path / "small.sh").write_text("python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=8\n")
    path.write_text(f"bash small.sh\nBATCH=64\n{command}\nbash small.sh\n")
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    expect(found, note=[f"read from line 3: {command[:50]}", f"similar commands in line 1 of {tmp_path / 'small.sh'}"])


DEVICES = (
    'DEVICE=$(probe)\nif [ "$DEVICE" = npu ]; then A=(trainer.train_batch_size=8); else A=(trainer.train_batch_size=32); fi\n'
    'if [ "$DEVICE" = npu ]; then B=(trainer.logger=x); else B=(trainer.logger=y); fi\n'
    'python -m skyrl.train.entrypoints.main_base trainer.policy_mini_batch_size=8 "${B[@]}" "${A[@]}"\n'
)
TORCHRUN = COMMANDS["megatron"][0].replace("$BATCH", "$b")
CONVERT = "python tools/checkpoint/convert.py --micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 8 --seq-length 4"
DPO, TRAINED_ON = "base_config: post_train/dpo.yml\nsteps: 100\n", "global_batch_size_to_train_on"
OWN_DPO = {"post_train/dpo.yml": "per_device_batch_size: 3\nbase_config: base.yml\n"}
PPO = "python3 -m verl.trainer.main_ppo"
REST = ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "critic.enable=false")
GSM8K = "defaults: [gsm8k_multiturn_grpo, _self_]\ndata: {max_prompt_length: 64}\n"
OWN_GSM8K = {"gsm8k_multiturn_grpo.yaml": "defaults: [ppo_trainer]\ndata: {train_batch_size: 32}\n"}
OTHER = f"{PPO} --config-path=$HERE/config --config-name other {' '.join(REST)}\n"
LARGE = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size 64 "
OPEN, MAXTEXT8, WORLD8 = "--num-layers $LAYERS", "num_devices=8", "world_size=8"
# The system, its file and those beside it, the settings, and what the verdict is, or the error.
FILES = {
    # Options that differ between branches of an unknown condition are not left out.
    "options": ("skyrl", DEVICES, {}, [], r"what \$DEVICE is.*add DEVICE="),
    "options that are decided": ("skyrl", DEVICES, {}, ["DEVICE=gpu"], {"samples_per_step": 160}),
    # Conversion and evaluation are not the run; of several runs the first counts, and a note names the others.
    "conversion before training": (
        "megatron", f"{CONVERT}\nfor b in 64 128; do {TORCHRUN}; done\n{TORCHRUN}\n", {}, [],
        {"num_microbatches": [4], "note": ["line 2", "similar commands in line 3"]},
    ),
    "conversion alone": ("megatron", f"{CONVERT}\n", {}, [], r"starts tools/checkpoint/convert\.py, which the rules of Megatron do not"),
    "no command": ("megatron", "echo hello\n", {}, [], "no command in it is like `torchrun"),
    # A `base_config` beside the file wins over MaxText's own of that name; one that is nowhere is an error, not base.yml.
    "shipped base_config": ("maxtext", DPO, {}, [MAXTEXT8], {TRAINED_ON: 16, "note": "post_train/dpo.yml"}),
    "own base_config": ("maxtext", DPO, OWN_DPO, [MAXTEXT8], {TRAINED_ON: 24}),
    "missing base_config": (
        "maxtext", "base_config: nowhere.yml\nsteps: 100\n", {}, [MAXTEXT8],
        r"nowhere\.yml is neither beside this file nor one that MaxText ships",
    ),
    "given base_config": ("maxtext", "base_config: nowhere.yml\n", {}, [MAXTEXT8, "base_config=base.yml"], {TRAINED_ON: 96}),
    # `--config-name` and `defaults` name a base file: one beside the source wins, veRL's own gives its sizes.
    "shipped defaults": ("verl", GSM8K, {}, REST, {"samples_per_step": 256}),
    "own defaults": ("verl", GSM8K, OWN_GSM8K, REST, {"samples_per_step": 32}),
    "missing --config-name": ("verl", OTHER, {}, [], r"base file other\.yaml is neither beside this file nor one that is known"),
    "own --config-name": ("verl", OTHER, {"config/other.yaml": "data: {train_batch_size: 16}\n"}, [], {"samples_per_step": 16}),
    "shipped --config-name": (
        "verl", f"{PPO} --config-name=ppo_megatron_trainer.yaml {' '.join(REST)} data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", {}, [],
        {"data_parallel_size": 2},
    ),
    # A mandatory key is no misspelling of another; a repeated key that is no size is a note; a mapping is no value.
    "unrelated keys": (
        "verl",
        "actor_rollout_ref: {rollout: {name: vllm}}\ndata.train_batch_size: 64\nhydra: {run: {dir: .}}\ndefaults: [actor, _self_]\n",
        {}, [], {"samples_per_step": 64},
    ),
    "repeated key": (
        "megatron", "M_ARGS:\n  --init: 1\n  --init: 2\n  --micro-batch-size: 2\n  --global-batch-size: 64\n", {}, [WORLD8],
        {"num_microbatches": [4], "note": "init is given twice, again in line 3"},
    ),
    "repeated size": (
        "megatron", "--micro-batch-size: 2\n--micro-batch-size: 4\n", {}, [WORLD8], "micro_batch_size is given twice",
    ),
    "repeated size that is chosen": (
        "megatron", "--micro-batch-size: 2\n--micro-batch-size: 4\n", {}, [WORLD8, "micro_batch_size=2"], {"micro_batch_size": 2},
    ),
    "reference": (
        "megatron", "model: {micro_batch_size: 2}\nref: {micro_batch_size: '${model.micro_batch_size}'}\n", {}, [WORLD8],
        {"micro_batch_size": 2},
    ),
    "further runs": (
        "megatron", "ARGS: {--micro-batch-size: 2}\nARGS_2: {--micro-batch-size: 4}\n", {}, [WORLD8],
        {"micro_batch_size": 2, "note": "ARGS_2"},
    ),
    "mapping": (
        "trlx", "method: {num_rollouts: {strategy: choice, values: [1, 2]}}\ntrain: {batch_size: 4}\n", {}, [],
        r"method\.num_rollouts is a mapping; it must be a whole number",
    ),
    # Layers and the length of a run may be unknown, with a note; not if a ramp or a chunk depends on them. An unknown value of
    # an option is no unknown option.
    "open length": (
        "megatron", f"{LARGE}{OPEN} --train-iters $(($1 / 64)) --save $FOLDER --node-rank $SLURM_PROCID --bf16 $MOE_ARGS\n", {}, [],
        {"num_microbatches": [4], "no_note": ["FOLDER", "SLURM_PROCID"]}
        | {"note": ["train_iters", "does not say what $MOE_ARGS adds",
                    "num_layers=$LAYERS: the script does not say what $LAYERS is; add LAYERS=..., or num_layers=..."]},
    ),
    "open samples of a ramp": (
        "megatron", f"{LARGE}{OPEN} --train-samples $N --rampup-batch-size 16 16 1000\n", {}, [],
        r"train_samples=\$N: the script does not say",
    ),
    "open layers of a chunk": (
        "megatron", f"{LARGE}{OPEN} --num-layers-per-virtual-pipeline-stage 2\n", {}, [], r"num_layers=\$LAYERS: the script does not say",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_check_file_reads_what_a_file_means(tmp_path, name):
    """Which command, which base file and which key count."""
    system, text, others, settings, wanted = FILES[name]
    path = tmp_path / ("run.sh" if text.startswith(("DEVICE", "python", "torchrun", "echo")) else "run.yaml")
    for file, content in {path.name: text, **others}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted) as error:
            check_file(path, system, settings)
        assert error.value.key == {"options": "DEVICE", "missing base_config": "base_config"}.get(name, error.value.key)
    else:
        expect(check_file(path, system, settings), **wanted)
