"""Tests of rampup.contrib.check.tunix and .notebook: what a command line, a YAML file and
the constants of a notebook really do.
"""

import json
import re
import subprocess
import sys

import pytest
from helpers.dialect_files import (
    boundary_test,
    checker,
    expect,
    nested,
    numbers_test,
    verdict,
)
from hypothesis import given
from hypothesis import strategies as st

from rampup.contrib.check import check_command, check_file, find_system
from rampup.contrib.check.notebook import read_program
from rampup.contrib.check.shell.values import has_unknown
from rampup.contrib.check.tunix import (
    ACCUMULATION,
    BATCH,
    GENERATIONS,
    ITERATIONS,
    LOGPS,
    MAX_STEPS,
    MESHES,
    MINI,
    ROLLOUT,
    TRAIN,
)
from rampup.errors import ConfigError, RampupError

MESH, ROLLOUT_MESH = (f"{MESHES[role]}.shape" for role in ("actor", "rollout"))
BASE = {BATCH: 16, MINI: 8, TRAIN: 2, GENERATIONS: 4, MESH: "(2, 2)", "num_devices": 8}
tunix = checker("tunix", BASE)
# The rules of RLTrainingConfig, GRPOConfig and of the learners' `train`.
test_rules_break_just_beyond_their_boundary = boundary_test(
    "tunix",
    BASE,
    [
        ("micro_divides_mini", {TRAIN: 4}, {TRAIN: 3}, "rejects"),
        ("micro_needs_mini", {MINI: 16}, {MINI: None, TRAIN: 16}, "rejects"),
        ("no_accumulation", {}, {ACCUMULATION: 1}, "rejects"),
        ("mini_batch_size_divides_batch", {BATCH: 8}, {BATCH: 12}, "accepts"),
        ("rollout_micro_batch_size_divides_batch", {ROLLOUT: 4}, {ROLLOUT: 3}, "accepts"),
        ("compute_logps_micro_batch_size_divides_batch", {LOGPS: 4}, {LOGPS: 3}, "accepts"),
        ("meshes_fit", {MESH: "(2, 4)"}, {MESH: "(4, 4)"}, "accepts"),
    ],
)  # fmt: skip
ALL_OWN = {"model_config.mesh.shape": "(2, 1)", MESH: None}
NUMBERS = [
    ({}, {"samples_per_step": 64, "mini_batches": 2, "optimizer_steps": 2, "mini_batch_samples": 32, "accumulation_steps": 4,
          "microbatch_samples": [8], "generation_calls": 8, "devices_used": 4, "note": "4 of 8 chips: 4 stay idle"}),
    ({ITERATIONS: 3}, {"optimizer_steps": 6}),
    ({MINI: None, TRAIN: None}, {"optimizer_steps": 1, "accumulation_steps": 1, "microbatch_samples": [64]}),
    # A mesh of null shares the actor's chips; one of its own, or that of model_config,
    # takes further ones (BasePipeline.create_role_to_mesh).
    ({ROLLOUT_MESH: "(1, 4)"}, {"devices_used": 8, "note": "the actor and the rollout have chips of their own"}),
    (ALL_OWN, {"devices_used": 6}),
    ({**ALL_OWN, MESHES["rollout"]: "null", MESHES["reference"]: "null"}, {"devices_used": 2}),
    # Sequences that do not divide are given to every device in whole (rl/utils.py).
    ({TRAIN: 1, MESH: "(8, 1)", GENERATIONS: 2}, {"note": "2 sequences of a pass do not divide over fsdp=8"}),
    ({MESH: None}, {"note": "the chips of the mesh are not known"}),
    ({"num_batches": 10, "train_fraction": 0.9, MAX_STEPS: 12}, {"training_steps": 9, "total_optimizer_steps": 12, "note": "before its 18 steps"}),
    ({"num_batches": 5, MAX_STEPS: 12}, {"total_optimizer_steps": 10, "note": "fewer than"}),
    ({"num_prompts": 40}, {"training_steps": 2}),
    ({}, {"note": "groups of 4 responses that teach nothing, as all are right or all wrong: 65.6%, 24.8%, 12.5% of them"}),
]  # fmt: skip


def _yaml(changes):
    """Check the base file with changes; a mesh of "null" is a null in YAML."""
    flat = {
        key: value for key, value in {**BASE, **changes}.items() if value is not None
    }
    flat = {key: None if value == "null" else value for key, value in flat.items()}
    return checker("tunix", {})(flat) if None not in flat.values() else _check(flat)


def _check(flat):
    import tempfile
    from pathlib import Path

    import yaml

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(nested(flat)))
        return check_file(path, "tunix")


test_numbers_and_notes = numbers_test(_yaml, NUMBERS)


@given(
    mini=st.integers(1, 6),
    micro=st.integers(1, 6),
    updates=st.integers(1, 6),
    responses=st.integers(2, 9),
)
def test_every_sample_of_a_step_is_in_one_pass(mini, micro, updates, responses):
    """Updates, passes and sequences multiply to the samples of a step."""
    sizes = {MINI: mini * micro, TRAIN: micro, BATCH: mini * micro * updates}
    found = tunix(sizes, {GENERATIONS: responses})
    assert found.ok
    product = found.derived["mini_batches"] * found.derived["accumulation_steps"]
    product *= found.derived["microbatch_samples"][0]
    assert product == found.derived["samples_per_step"]


CONSTANTS = """
import jax
NUM_TPUS = len(jax.devices())
if NUM_TPUS == 8:
  COUNTS = (1, 4)
elif NUM_TPUS == 1:
  COUNTS = (1, 1)
else:
  raise ValueError(NUM_TPUS)
MESH = [COUNTS, ("fsdp", "tp")]
NUM_GENERATIONS = 2
NUM_ITERATIONS = 1
TRAIN_MICRO_BATCH_SIZE = 1
NUM_BATCHES = 3738
TRAIN_FRACTION = 0.9
MAX_STEPS = int(NUM_BATCHES * NUM_ITERATIONS * TRAIN_FRACTION)
"""


def test_pasted_constants_of_a_notebook_are_enough(tmp_path):
    """The chips, prompts and sequences of the cell that many people copy."""
    path = tmp_path / "constants.py"
    path.write_text(CONSTANTS)
    found = check_file(path, "tunix", ["num_devices=8"])
    expect(
        found,
        ok=True,
        devices_used=4,
        samples_per_step=2,
        microbatch_samples=[2],
        total_optimizer_steps=3364,
        note=["4 of 8 chips: 4 stay idle", "batches of the data set are not read"],
    )
    expect(check_file(path, "tunix"), ok=True, note="chips of the mesh are not known")


def test_what_a_notebook_gives_to_tunix_counts_more_than_a_constant(tmp_path):
    """Cells in order, magics and other languages left out; found without --from."""
    cells = [
        "%pip install tunix\n!ls\nBATCH_SIZE = 6\nNUM_GENERATIONS = 2",
        "this is no Python",
        "from tunix.rl.grpo.grpo_learner import GRPOConfig\n"
        "config = {'num_generations': 8, 'micro': 3}\n"
        "grpo = GRPOConfig(num_generations=config['num_generations'])\n"
        "mesh = jax.make_mesh(*[(2, 2), ('fsdp', 'tp')])\n"
        "GRADIENT_ACCUMULATION_STEPS = 4\n"
        "train = RLTrainingConfig(mini_batch_size=6, train_micro_batch_size=config['micro'])\n"
        "data = source.batch(BATCH_SIZE)[:7]",
    ]
    path = tmp_path / "grpo.ipynb"
    rows = [{"cell_type": "code", "source": [cell]} for cell in cells]
    rows.append({"cell_type": "markdown", "source": ["NUM_GENERATIONS = 3"]})
    path.write_text(json.dumps({"cells": rows}))
    assert find_system(path) == "tunix"
    expect(
        check_file(path),
        ok=True,
        samples_per_step=48,
        accumulation_steps=2,
        microbatch_samples=[24],
        devices_used=4,
    )


GRPO_CALLS = [
    ("cfg: GRPOConfig = GRPOConfig(num_generations=8)", 8),
    ("cfg = GRPOConfig()\ncfg.num_generations = 8", "${cfg.num_generations}"),
    ("def main():\n  cfg = GRPOConfig()\n  cfg.num_generations = 8", "${cfg.num_generations}"),
    ("cfg = GRPOConfig()\nother = cfg\nother.num_generations = n", "${other.num_generations}"),
    ("cfg = GRPOConfig()\ncfg = replace(cfg, num_generations=8)", 8),
    ("cfg = GRPOConfig()\ncfg.num_generations, n = 8, 2", "${cfg.num_generations}"),
    ("cfg = GRPOConfig()\ncfg.num_generations *= 2", "${cfg.num_generations}"),
    (
        "cfg = GRPOConfig()\nif ask():\n  cfg.num_generations = 8",
        "${cfg.num_generations}",
    ),
    ("all.cfg.num_generations = 8", "${all.cfg.num_generations}"),
    ("cfg = Sampler()\ncfg.num_generations = 8", "${cfg.num_generations}"),
    ("GRPOConfig(num_generations=8)\nGRPOConfig(num_generations=4)", "${num_generations}"),
    ("sizes = Sizes(num_generations=8)", 8),
    ("GRPOConfig(8)", "${GRPOConfig(...)}"),
    ("g = {'num_generations': 8}\nGRPOConfig(**g)", 8),
    ("g = dict(num_generations=8)\nGRPOConfig(**{**g, 'beta': 0})", "${num_generations}"),
    ("g = {'num_generations': 8}\ng.update(more)\nGRPOConfig(**g)", "${GRPOConfig(...)}"),
    ("g = {name: 8}\nGRPOConfig(**g)", "${GRPOConfig(...)}"),
    ("train({'num_generations': 8})", 8),
    ("train(sizes={'grpo': {'num_generations': 8}, name: 4})", 8),
    ("train({'num_generations': ask()})", "${ask()}"),
    ("def sizes():\n  return {'num_generations': 8}", 8),
    ("def sizes():\n  found = {'num_generations': 8}\n  return found", 8),
    ("def sizes(n):\n  return {'num_generations': n}", "${n}"),
    ("def sizes():\n  found = {'num_generations': 8}\n  found['num_generations'] = 4", "${num_generations}"),
    ("async def sizes():\n  return {'grpo': {'num_generations': 8}}", 8),
    ("cfg = {}\ncfg['num_generations'] = 8\ntrain(cfg)", "${cfg['num_generations']}"),
    ("GRPOConfig(**g, num_generations=8, num_iterations=1)", 8),
    ("n = 2\nfor n in [4, 8]:\n  GRPOConfig(num_generations=n)", "${n}"),
    ("n = 2\nc = [GRPOConfig(num_generations=n) for n in [4, 8]]", "${n}"),
    ("n = 2\ndef main(n):\n  GRPOConfig(num_generations=n)", "${n}"),
    ("n = 2\nfrom sizes import n\nGRPOConfig(num_generations=n)", "${n}"),
    ("n = 2\nimport sizes as n\nGRPOConfig(num_generations=n)", "${n}"),
    ("b = {'n': 4}\na = b\na['n'] = 8\nGRPOConfig(num_generations=b['n'])", "${b['n']}"),
    ("b = {'a': {'n': 4}}\na = b['a']\na['n'] = 8\nGRPOConfig(num_generations=b['a']['n'])", "${b['a']['n']}"),
    ("b = {'n': 4}\nchange(b)\nGRPOConfig(num_generations=b['n'])", "${b['n']}"),
    ("b = {'n': 4}\nprint(b)\nGRPOConfig(num_generations=b['n'])", "${b['n']}"),
    ("n = 2\ndef main():\n  GRPOConfig(num_generations=n)\nn = 8\nmain()", "${n}"),
    ("with run(GRPOConfig(num_generations=8)):\n  pass", 8),
    ("for step in train(GRPOConfig(num_generations=8)):\n  pass", 8),
    ("if train(GRPOConfig(num_generations=8)):\n  pass", 8),
    ("while train(GRPOConfig(num_generations=8)):\n  pass", 8),
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), GRPO_CALLS)
def test_a_size_of_a_class_is_followed_or_asked_for(tmp_path, text, size):
    """Wherever it is given; it is never the default if it may be another."""
    path = tmp_path / "run.py"
    constants = CONSTANTS.replace("NUM_GENERATIONS = 2", "").replace(
        "NUM_ITERATIONS = 1", ""
    )
    path.write_text(f"{constants}{text}\n")
    settings = ["num_devices=8", f"{BATCH}=1", f"{ITERATIONS}=1"]
    if isinstance(size, int):
        assert check_file(path, "tunix", settings).derived["samples_per_step"] == size
    else:
        with pytest.raises(ConfigError, match=re.escape(f"{GENERATIONS}={size}")):
            check_file(path, "tunix", settings)


def test_unknown_sizes_of_a_class_are_all_asked_for(tmp_path):
    """A dictionary that is not known may give any of them."""
    path = tmp_path / "run.py"
    path.write_text(f"{CONSTANTS}RLTrainingConfig(mini_batch_size=8, **sizes)\n")
    with pytest.raises(RampupError) as caught:
        check_file(path, "tunix", ["num_devices=8"])
    for key in (TRAIN, ROLLOUT, LOGPS):
        assert f"{key}=${{RLTrainingConfig(...)}}" in str(caught.value)
    assert f"{MINI}=$" not in str(caught.value)


def test_batches_of_another_size_than_the_constant_are_asked_about(tmp_path):
    """The first call of `.batch` is that of the data set to train on."""
    path = tmp_path / "run.py"
    path.write_text(f"{CONSTANTS}BATCH_SIZE = 4\ndata = source.batch(BATCH_SIZE * 2)\n")
    with pytest.raises(ConfigError, match=r"batch_size=\$\{batch_size\}"):
        check_file(path, "tunix", ["num_devices=8"])
    settings = ["num_devices=8", f"{BATCH}=8", f"{MINI}=4"]
    expect(check_file(path, "tunix", settings), ok=True, samples_per_step=16)


@pytest.mark.parametrize("name", ["batch_size", "mini_batch_size"])
def test_a_parameter_is_not_the_constant_of_its_name(tmp_path, name):
    """It is asked for."""
    path = tmp_path / "run.py"
    path.write_text(
        f"{CONSTANTS}{name} = 4\ndef main({name}):\n"
        f"  RLTrainingConfig(mini_batch_size={name})\n"
    )
    with pytest.raises(ConfigError, match=rf"{MINI}=\$\{{{name}\}}"):
        check_file(path, "tunix", ["num_devices=8", f"{BATCH}=4"])


def test_an_argument_that_the_syntax_leaves_open_is_asked_for(tmp_path):
    """It is not taken for the default, nor for a constant of its name."""
    path = tmp_path / "run.py"
    open_size = CONSTANTS + "GRPOConfig(num_generations=args.group)\n"
    path.write_text(open_size)
    with pytest.raises(
        ConfigError, match=r"num_generations=\$\{args\.group\}.*add grpo_"
    ):
        check_file(path, "tunix")
    found = check_file(path, "tunix", [f"{GENERATIONS}=4"])
    expect(found, ok=True, samples_per_step=4)


@pytest.mark.parametrize("key", [BATCH, MINI, TRAIN, ROLLOUT, LOGPS, GENERATIONS])
def test_a_count_below_its_least_is_refused(key):
    """A group has at least two responses, and any other size at least 1."""
    with pytest.raises(ConfigError, match=rf"{key}=0 must be .*at least"):
        tunix({key: 0})


def test_the_agentic_learner_is_refused():
    """Its sizes are its own, which the rules do not cover."""
    with pytest.raises(
        ConfigError, match="training_mode='agentic_grpo' must be one of"
    ):
        tunix({"training_mode": "agentic_grpo"})


DISTILLED = """
from tunix.distillation import distillation_trainer
BATCH_SIZE = 4
NUM_TRAIN_EPOCHS = 1
MESH = [(1, 8), ("fsdp", "tp")]
MAX_STEPS = 200
config = distillation_trainer.TrainingConfig(max_steps=MAX_STEPS)
"""


def test_a_program_without_a_size_of_grpo_is_not_taken_for_it(tmp_path):
    """Fine-tuning and distillation have batches, steps and a mesh as well."""
    path = tmp_path / "distil.py"
    path.write_text(DISTILLED)
    with pytest.raises(ConfigError, match="may not train with GRPO"):
        check_file(path)
    settings = ["grpo_config.num_generations=4"]
    expect(check_file(path, "tunix", settings), ok=True, samples_per_step=16)


PPO = """
model_config: {mesh: {shape: "(2,4)", axis_names: "('fsdp','tp')"}}
batch_size: 8
rl_training_config: {mini_batch_size: 8, max_steps: 100}
ppo_config: {gamma: 1.0, gae_lambda: 0.95}
"""


def test_a_file_of_ppo_is_not_taken_for_one_of_grpo(tmp_path):
    """PPO trains on one response for each prompt; GRPO's default is two."""
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    with pytest.raises(ConfigError, match="may not train with GRPO"):
        check_file(path, "tunix")
    program = tmp_path / "ppo.py"
    program.write_text(
        "from tunix.rl.ppo import ppo_learner\nBATCH_SIZE = 8\n"
        "config = RLTrainingConfig(mini_batch_size=8, train_micro_batch_size=8)\n"
        "learner = ppo_learner.PpoLearner(config, ppo_learner.PpoConfig(beta=0.1))\n"
    )
    with pytest.raises(ConfigError, match="may not train with GRPO"):
        check_file(program, "tunix")
    # Tunix's own base file has the sections of both, and its default is GRPO.
    path.write_text(f"{PPO}grpo_config: {{num_generations: 4}}\n")
    expect(check_file(path, "tunix"), ok=True, samples_per_step=32)


def test_a_misspelt_key_or_section_is_refused(tmp_path):
    """Also a setting beside the right key of the file; a section of the system with a
    key of the same name is none.
    """
    with pytest.raises(ConfigError, match=r"did you mean rl_training_config\.mini_b"):
        verdict("tunix", nested(BASE), "rl_training_config.mini_batchsize=16")
    with pytest.raises(ConfigError, match=r"did you mean rl_training_config\.mini_b"):
        tunix({MINI: None, TRAIN: None, "rl_training_confg.mini_batch_size": 8})
    assert tunix({"training_config.max_steps": 8}).ok


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("SIZE = 2 if COLAB else 64\n", None),
        ("SIZE = 4\nSIZE = ask()\n", None),
        ("SIZE = 4\nif ask():\n  SIZE = 8\n", None),
        ("if 2 + 2 == 4:\n  SIZE = 8 // 2 + 1\nelse:\n  SIZE = 4\n", 5),
        ("SIZE = 4\nif 2 + 2 == 4:\n  SIZE = 8 // 2 + 1\n", None),
        ("if ask():\n  SIZE = 8\nelse:\n  SIZE = 4 * 2\n", None),
        ("K = {'SIZE': 4}\nif ask():\n  K = {'SIZE': 8}\n", None),
        ("K = {'size': 4}\nSIZE = K['size'] * 3\n", 12),
        ("K = {'SIZE': 4}\nK['SIZE'] = 8\n", None),
        ("SIZE = 4\nSIZE *= 2\n", None),
        ("K = {'SIZE': 4}\nK.update(SIZE=8)\n", None),
        ("K = {'a': {'SIZE': 4}}\nK['a'].update({'SIZE': 8})\n", None),
        ("K = {'SIZE': 4}\nn = K.pop('SIZE')\n", None),
        ("K = {'SIZE': 4}\nn = K.get('SIZE')\n", None),
        ("K = {'SIZE': 4}\nn = K['SIZE']\n", 4),
        ("K = {'SIZE': 4}\nK |= more\n", None),
        ("K = {'a': {'SIZE': 4}}\n", None),
        ("SIZE, OTHER = 4, 2\n", None),
        ("K = {'SIZE': 4}\ndel K['SIZE']\n", None),
        ("SIZE = 4\nfrom sizes import SIZE\n", None),
        ("for SIZE in (1, 2):\n  pass\n", None),
        ("try:\n  SIZE = 4\nexcept OSError:\n  SIZE = 2\n", None),
        ("class Config:\n  SIZE: int = 3\n", 3),
        ("SIZE = int(9 / 2)\n", 4),
        ("SIZE = 9 / 0\n", None),
        ("SIZE = 10 ** 10 ** 10\n", None),
        ("SIZE = 'a' * 9\n", None),
        ("def helper():\n  SIZE = 8\n", None),
        ("def helper(SIZE):\n  pass\n", None),
        ("SIZE = __import__('os').system('false')\n", None),
    ],
)
def test_constants_are_followed_and_never_guessed(tmp_path, text, value):
    """Arithmetic, branches, dictionaries; what the syntax leaves open is open."""
    path = tmp_path / "run.py"
    path.write_text(text)
    found = dict(read_program(path).constants())["SIZE"].value
    assert (None if isinstance(found, str) and has_unknown(found) else found) == value


def test_a_program_is_not_executed(tmp_path):
    """A file that would write one does not."""
    path = tmp_path / "run.py"
    touched = tmp_path / "touched"
    path.write_text(f"open({str(touched)!r}, 'w')\n{CONSTANTS}")
    assert check_file(path, "tunix", ["num_devices=8"]).ok
    assert not touched.exists()


def test_a_script_reads_its_base_file_and_the_overriding_one(tmp_path):
    """In this order, and the command above both; one that is not there is a question."""
    (tmp_path / "base.yaml").write_text(
        "batch_size: 16\ngrpo_config: {num_generations: 2}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "batch_size: 8\nrl_training_config: {mini_batch_size: 4}\n"
    )
    script = tmp_path / "run.sh"
    command = "python3 -m tunix.cli.grpo_main base.yaml override_config_file=own.yaml"
    script.write_text(f"{command} grpo_config.num_generations=4\n")
    assert find_system(script) == "tunix"
    expect(check_file(script), ok=True, samples_per_step=32, mini_batches=2)
    # Words with open parts name no file, however long the reason is.
    long = "awk 'BEGIN { printf 0.1 * " + "1 * " * 60 + "$N }'"
    script.write_text(
        f"W=$({long})\n{command} grpo_config.num_generations=4"
        " optimizer_config.warmup_steps=$W x=$W.yaml\n"
    )
    expect(check_file(script), ok=True, samples_per_step=32)
    words = command.replace("own", "other").split()
    with pytest.raises(ConfigError, match=r"=other\.yaml is not here"):
        check_command(words, "tunix")
    with pytest.raises(ConfigError, match="does not say how many prompts"):
        check_command([*words, f"{MINI}=4"], "tunix", ["override_config_file=null"])


def test_devices_of_a_notebook_that_are_no_number_are_refused(tmp_path):
    """In words."""
    path = tmp_path / "run.py"
    path.write_text(CONSTANTS)
    with pytest.raises(RampupError, match=r"num_devices='?x'? must be"):
        check_file(path, "tunix", ["num_devices=x"])


def test_the_command_line_knows_tunix(tmp_path):
    """`--devices` gives the chips, without --from."""
    path = tmp_path / "run.ipynb"
    cell = {"cell_type": "code", "source": CONSTANTS}
    path.write_text(json.dumps({"cells": [cell]}))
    words = [sys.executable, "-m", "rampup", "check", str(path), "--devices", "8"]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "4 of 8 chips" in run.stdout


def test_a_size_outside_of_its_section_is_refused():
    """Tunix has no such setting, so its default would count."""
    sizes = {"mini_batch_size": 4, "train_micro_batch_size": 2}
    with pytest.raises(ConfigError) as caught:
        verdict("tunix", nested(BASE) | sizes)
    for name in sizes:
        assert f"{name} is not of any section" in str(caught.value)
        assert f"give it as rl_training_config.{name}" in str(caught.value)


LAUNCHER = """
pgrep -af "run_trainer_node.py|run_inference_node.py|vllm" || true
PYTHON_BIN=${PYTHON_BIN:-python3}
"$PYTHON_BIN" -m tunix.experimental.distributed.runtime.main --port=1
"""


def test_a_launcher_of_the_distributed_runtime_is_refused_as_one_of_tunix(tmp_path):
    """Not as one of Megatron, whose programs have such names too."""
    path = tmp_path / "launcher.sh"
    path.write_text(LAUNCHER)
    with pytest.raises(
        ConfigError, match=r"starts tunix\S+main, which.* of Tunix do not"
    ):
        check_file(path)


def test_a_note_does_not_ask_for_devices_that_are_given():
    """Without a mesh, its shape is what is missing."""
    sizes = {BATCH: 16, GENERATIONS: 4}
    known = verdict("tunix", nested(sizes), "num_devices=8")
    expect(known, ok=True, note=f"give {MESH}='(1, 4)'", no_note=["num_devices=N"])
    open_note = f"give num_devices=N, or {MESH}='(1, 4)'"
    expect(verdict("tunix", nested(sizes)), note=open_note)
