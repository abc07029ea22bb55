"""Tests of scripts, commands and base files as `rampup check` reads them, for all six
systems.
"""

import json
import re
from pathlib import Path

import pytest
from helpers.dialect_files import expect

from rampup.cli import main
from rampup.contrib.check import SYSTEMS, check_command, check_file
from rampup.contrib.check.shell.script import read_commands
from rampup.errors import ConfigError

VERL = (
    "data.train_batch_size=$BATCH actor_rollout_ref.rollout.n=5 +critic.enable=False"
    " trainer.nnodes=${NNODES:-1}"
    " ++actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / 4))"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"
    " actor_rollout_ref.rollout.name=vllm data.train_files=\"['a', 'b']\""
)
SKYRL = (
    "trainer.train_batch_size=$BATCH trainer.policy_mini_batch_size=$((BATCH/4))"
    " generator.n_samples_per_prompt=5 trainer.placement.policy_num_gpus_per_node=8"
    " trainer.placement.ref_num_gpus_per_node=8"
    " generator.inference_engine.num_engines=8"
)
# System: the command, with the key of the report and its value if BATCH is 64.
COMMANDS = {
    "verl": (f"python3 -m verl.trainer.main_ppo {VERL}", "samples_per_step", 320),
    "skyrl": (f"uv run --extra vllm -m skyrl.train.entrypoints.main_base {SKYRL}", "samples_per_step", 320),
    "maxtext": ("python3 -m MaxText.train src/maxtext/configs/base.yml run_name=x per_device_batch_size=$BATCH num_target_devices=4", "global_batch_size_to_load", 256),
    "maxtext_rl": ("python3 -m maxtext.trainers.post_train.rl.train_rl post_train/rl.yml batch_size=$BATCH rl.num_generations=5 num_devices=8", "samples_per_step", 320),
    "megatron": ("torchrun --nproc_per_node=8 pretrain_gpt.py --micro-batch-size 2 --global-batch-size $BATCH --train-iters 10 --seq-length 8", "num_microbatches", [4]),
    "trlx": ("accelerate launch --num_processes 4 ppo_sentiments.py '{\"method.num_rollouts\": '$BATCH', \"method.chunk_size\": 16}'", "samples_per_step", 256),
    "tunix": ("python3 -m tunix.cli.grpo_main base_config.yaml batch_size=$BATCH grpo_config.num_generations=5", "samples_per_step", 320),
}  # fmt: skip


def command_words(system):
    """Return the words of a command with a batch of 64."""
    return read_commands(
        f"BATCH=64\n{COMMANDS[system][0]}", "x.sh", {}, re.compile("!")
    )[-1].words


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_asks_for_an_unknown_variable(tmp_path, system):
    """A size from the output of a command is named with the setting to add; both of its
    forms settle it.
    """
    command, key, value = COMMANDS[system]
    path = tmp_path / "run.sh"
    path.write_text(f"BATCH=$(cat size)\nHALF=$((BATCH / 2))\n{command}\n")
    if system != "trlx":  # no JSON without the number
        with pytest.raises(
            ConfigError,
            match=(
                r"the script does not say what \$BATCH is: \$\(cat size\) is not run;"
                r" add BATCH=\.\.\., or "
            ),
        ) as error:
            check_file(path, system)
        assert error.value.problems or error.value.key
    assert check_file(path, system, ["BATCH=64"]).derived[key] == value


PRINTED = {
    "expr": r"$(expr $(expr 32 / 8) \* 16)",
    "bc": '$(echo "8 * 8" | bc)',
    "awk": "`awk 'BEGIN{print 8*8}'`",
    "python": "$(python3 -c 'print(8 * 8)')",
}


@pytest.mark.parametrize("system", ["megatron", "maxtext", "verl", "skyrl"])
@pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)
def test_a_size_that_a_command_prints_is_asked_for_with_that_command(
    tmp_path, system, printed
):
    """Also where it goes through two variables, and where it stands in the command; the
    answer settles it.
    """
    command, key, value = COMMANDS[system]
    path = tmp_path / "run.sh"
    words = re.escape(f": {printed} is not run; add ")
    for text in (
        f"BATCH={printed}\n{command}",
        f"SIZE={printed}\nBATCH=$SIZE\n{command}",
        command.replace("$BATCH", printed),
    ):
        path.write_text(f"{text}\n")
        with pytest.raises(ConfigError, match=words):
            check_file(path, system)
    path.write_text(f"BATCH={printed}\n{command}\n")
    assert check_file(path, system, ["BATCH=64"]).derived[key] == value


@pytest.mark.parametrize("system", SYSTEMS)
def test_check_reads_a_command_after_two_dashes(capsys, system):
    """`rampup check --from SYSTEM -- COMMAND ...` gives the verdict of the command;
    settings before the dashes win.
    """
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
    path.write_text(
        'B=$1\nif [ "$2" = big ]; then B=$((B * 2)); fi\nBATCH=$B\n'
        + COMMANDS["skyrl"][0]
    )
    assert (
        check_command(["bash", str(path), "32", "big"], "skyrl").derived[
            "samples_per_step"
        ]
        == 320
    )
    with pytest.raises(
        ConfigError,
        match=r"add B=.* or the script's arguments: .* -- bash FILE ARGUMENTS",
    ):
        check_file(path, "skyrl")


STARTS = (
    'bash examples/run.sh 64 "$@"',
    "source examples/run.sh 64",
    "cd ../.. && . examples/run.sh 64",
    (
        'sbatch -N 2 "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." &&'
        ' pwd)/examples/run.sh" 64'
    ),
    "export BATCH=64\nsrun --mpi=pmix bash -x examples/run.sh",
    "if ! BATCH=64 sh ./examples/run.sh; then exit 1; fi",
    'ROOT=$(dirname $0)/../..\nexec "$ROOT/examples/run.sh" 64',
    "bash -c 'bash examples/run.sh 64'",
    "ray job submit --address=here -- bash examples/run.sh 64",
)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_check_file_follows_the_script_that_a_script_starts(tmp_path, system, start):
    """The sizes are those of the script that is started, found from a folder above; one
    that is not there is refused by name.
    """
    command, key, value = COMMANDS[system]
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    path, other = (
        tmp_path / "tests" / "gpu" / "e2e.sh",
        tmp_path / "examples" / "run.sh",
    )
    path.write_text(f"set -e\n{start}\npython summary.py --run_name x\n")
    missing = (
        r"e2e\.sh:\d: this starts or sources a script that is not read:"
        r" .*examples/run\.sh is neither"
    )
    with pytest.raises(ConfigError, match=missing):
        check_file(path, system)
    other.write_text(f"BATCH=${{BATCH:-$1}}\n{command}\n")
    found = check_file(path, system)
    assert found.derived[key] == value
    assert any(f"read from line 2 of {other}: " in note for note in found.notes)


def test_keys_for_a_script_are_not_a_launch(tmp_path):
    """Arguments of a script change its sizes, in each of its kinds; a script that is
    not there is never read as defaults.
    """
    child, key, value = COMMANDS["skyrl"]
    words = [
        "bash",
        str(tmp_path / "run.sh"),
        "trainer.micro_train_batch_size_per_gpu=2",
        "trainer.policy_mini_batch_size=8",
    ]
    path = tmp_path / "e2e.sh"
    path.write_text(" ".join(words))
    checks = (lambda: check_command(words, "skyrl"), lambda: check_file(path, "skyrl"))
    for check in checks:
        with pytest.raises(
            ConfigError,
            match=r"run\.sh is neither beside this script nor in a folder above it",
        ):
            check()
    (tmp_path / "run.sh").write_text(f'BATCH=64\n{child} "$@"\n')
    for check in checks:
        expect(
            check(), **{key: value, "data_parallel_size": 8, "mini_batch_samples": 40}
        )
    # What a launcher of the machine does with the program that it is given is unknown.
    words = ["/opt/launch.sh", *command_words("skyrl"), "trainer.epochs=2"]
    with pytest.raises(ConfigError, match=r"a script that is not read: .*launch\.sh"):
        check_command(words, "skyrl")


def test_messages_name_the_script_in_which_a_value_stands(tmp_path):
    """A value stands in the command that has it, in the script that is started."""
    path, other = tmp_path / "e2e.sh", tmp_path / "run.sh"
    other.write_text(
        "\n\npython -m skyrl.train.entrypoints.main_base trainer.train_batch_size=x"
        ' "$@"\n'
    )
    path.write_text("\nbash run.sh trainer.policy_mini_batch_size=y\n")
    with pytest.raises(ConfigError) as error:
        check_file(path, "skyrl")
    assert sorted(
        (Path(problem.path).name, problem.line) for problem in error.value.problems
    ) == [("run.sh", 3), ("run.sh", 3)]
    other.write_text(
        "torchrun pretrain_gpt.py --micro-batch-size 2 --global-batch-size $((N * 8))"
        ' "$@"\n'
    )
    path.write_text("\n\nbash run.sh --train-iters y --tensor-model-parallel-size 1\n")
    with pytest.raises(ConfigError) as error:
        check_file(path, "megatron", ["world_size=8"])
    assert sorted(
        (Path(problem.path).name, problem.line) for problem in error.value.problems
    ) == [("run.sh", 1), ("run.sh", 1)]
    # A variable that only the script has which is started is one of its variables.
    path.write_text("bash run.sh --train-iters 3\n")
    assert check_file(path, "megatron", ["world_size=8", "N=4"]).derived[
        "num_microbatches"
    ] == [2]
    assert check_command(
        ["bash", str(path)], "megatron", ["world_size=8", "N=4"]
    ).derived["num_microbatches"] == [2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bash $0", "scripts start each other 20 deep"),
        ("source ./run.sh", "scripts start each other 20 deep"),
        (
            "N=${N:-0}; export N=$((N + 1)); bash run.sh",
            "scripts start each other 20 deep",
        ),
        ('bash run.sh a "$@"; bash run.sh b "$@"', "20 deep or 200 in all"),
        (
            "bash $FOLDER/x.sh",
            r"does not say what \$FOLDER is, in \$FOLDER/x\.sh; add FOLDER=",
        ),
        ("bash other.sh", "other.sh: cannot read the shell script: line 1"),
        ("bash <(curl http://x)", r"<\(curl http://x\) is neither"),
        ("bash .", "\\. is neither"),
        ("srun -N 2 --mpi pmix missing.sh trainer.epochs=1", "missing.sh is neither"),
        (
            "timeout 10m ssh host 'cd x && bash missing.sh trainer.epochs=1'",
            "missing.sh is neither",
        ),
        (
            f"source models/$1.sh; {COMMANDS['skyrl'][0]}",
            r"what \$1 is, in models/\$1\.sh",
        ),
    ],
)
def test_check_file_ends_on_scripts_that_cannot_be_followed(tmp_path, text, said):
    """Scripts that start themselves without end, or have no known name, are refused in
    one sentence.
    """
    path = tmp_path / "run.sh"
    path.write_text(text)
    (tmp_path / "other.sh").write_text("if true; then (")
    with pytest.raises(ConfigError, match=said):
        check_file(path, "skyrl")


def test_a_script_that_is_not_read_is_a_note_beside_a_launch(tmp_path):
    """Preparation that is not there does not hide the run; of several runs in several
    scripts the one with most keys counts.
    """
    command = COMMANDS["skyrl"][0]
    path = tmp_path / "run.sh"
    others = (
        "source ~/.bashrc\nsource not_there_env.sh\nbash not_there_prepare.sh"
        " PLATFORM=gpu\n[ -z $JOB ] && sbatch $0"
    )
    path.write_text(f"{others}\nBATCH=64\n{command}\n")
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    assert (
        sum("what it sets or starts is not read" in note for note in found.notes)
        == 2 + 1
    )
    (tmp_path / "small.sh").write_text(
        "python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=8\n"
    )
    path.write_text(f"bash small.sh\nBATCH=64\n{command}\nbash small.sh\n")
    found = check_file(path, "skyrl")
    assert found.derived["samples_per_step"] == 320
    expect(
        found,
        note=[
            f"read from line 3: {command[:50]}",
            f"similar commands in line 1 of {tmp_path / 'small.sh'}",
        ],
    )
