"""Tests of rampup.contrib.check.reading: files are read safely, typed, and with suspicion;
what a system does not have is not ignored.
"""

import re

import pytest
from helpers.dialect_files import expect, rules

from rampup.config.yaml import read_text
from rampup.contrib.check import SYSTEMS, check_command, check_file, load_dialect
from rampup.contrib.check.known import load_known_keys
from rampup.contrib.check.launch import Entry, Launch, Reading
from rampup.contrib.check.reading import read_leaves
from rampup.contrib.check.settings import FACTS, type_settings
from rampup.errors import ConfigError, RampupError

ENTRIES = {
    "trainer.train_batch_size": Entry(default=1024, doc="prompts", unit="prompts"),
    "trainer.model.path": Entry(default=None, doc="a path", kind="text", nullable=True),
    "trainer.micro_batch_size": Entry(default=None, doc="samples", nullable=True),
    "trainer.flag": Entry(default=False, doc="a switch", kind="bool"),
}
LAUNCH = Launch(
    system="Some System", program=re.compile("!"), example="!", entries=ENTRIES
)


def read(tmp_path, text, *overrides):
    """Read text as a file of a made-up system."""
    file = tmp_path / "file.yml"
    file.write_text(text)
    leaves = read_leaves(read_text(file), str(file))
    reading = Reading(path=str(file), leaves=leaves, overrides=overrides)
    return type_settings(reading, LAUNCH)


def test_type_settings_treats_nested_and_dotted_keys_alike(tmp_path):
    """Nested mappings, dotted keys and overrides give one table, with the given keys;
    an override wins over the file.
    """
    found = read(
        tmp_path,
        "trainer:\n  train_batch_size: 8\n  model: {path: m}\nother: {}\n",
        "trainer.flag=true",
    )
    dotted = "trainer.train_batch_size: 9\ntrainer.model.path: m\n"
    assert (
        found.values
        == read(
            tmp_path, dotted, "trainer.flag=true", "trainer.train_batch_size=8"
        ).values
    )
    assert found.given == {
        "trainer.train_batch_size",
        "trainer.model.path",
        "trainer.flag",
    }
    assert found.others.keys() == {"other"}
    assert found["trainer.micro_batch_size"] is None
    assert (
        read(tmp_path, "trainer.micro_batch_size: 8", "trainer.micro_batch_size=null")[
            "trainer.micro_batch_size"
        ]
        is None
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${trainer.train_batch_size}", 8),
        ("${.train_batch_size}", 8),
        ("${oc.select:trainer.train_batch_size,3}", 8),
        ("${oc.select:nothing.here,3}", 3),
        ("${oc.select:nothing.here,null}", None),
    ],
)
def test_type_settings_resolves_references(tmp_path, value, expected):
    """A reference stands for the value of another key, or for its own default."""
    found = read(
        tmp_path, f"trainer:\n  train_batch_size: 8\n  micro_batch_size: {value}\n"
    )
    assert found["trainer.micro_batch_size"] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer.train_batch_size: many", "must be a whole number"),
        ("trainer.train_batch_size: [1]", "must be a whole number"),
        ("trainer.train_batch_size: null", "must be a whole number"),
        ("trainer.train_batch_size: 1e400", "must be a whole number"),
        ("trainer.flag: 1\ntrainer.train_batch_size: 1", "true or false"),
        ("trainer.train_batchsize: 8", "did you mean trainer.train_batch_size"),
        ("trainer:\n  train_batch_size: 1\ntrainer.train_batch_size: 2", "given twice"),
        ("trainer.micro_batch_size: ${trainer.micro_batch_size}", "circular"),
        ("trainer.micro_batch_size: ${no.such.key}\ntrainer.flag: true", "no.such.key"),
        ("unrelated: 1", "not a file of Some System"),
        ("", "empty"),
        ("- 1", "a list"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "not a file of Some System"),
        ("trainer.train_batch_size: !!python/object/apply:os.getcwd []", "not allowed"),
        ("{" * 2000, "nested too deeply"),
        ("trainer: {", "not valid YAML"),
        ("trainer:\n  train_batch_size: x\n  flag: 7\n", "2 problems"),
        (
            "a0: &a0 [x, x]\n"
            + "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 20)),
            "too large",
        ),
        pytest.param(
            "trainer.train_batch_size: 8\n#" + "x" * 4_000_000, "larger than", id="huge"
        ),
    ],
)
def test_type_settings_rejects_invalid_files(tmp_path, text, said):
    """Mistyped, misspelt, foreign, empty, huge or malicious files give an error with
    the reason, and all problems at once.
    """
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.flag", "is not key=value"),
        ("--trainer.flag=true", "is not key=value"),
        ("trainer.flag =true", "is not key=value"),
        ("no_such_key=1", "unknown key 'no_such_key'"),
        ("trainer.train_batchsize=8", "did you mean trainer.train_batch_size"),
    ],
)
def test_type_settings_rejects_invalid_overrides(tmp_path, setting, said):
    """An override must be key=value, and set a key of the system, which the file need
    not set.
    """
    found = read(
        tmp_path, "unrelated: 1", "trainer.train_batch_size=8", "trainer.logger=console"
    )
    assert found["trainer.train_batch_size"] == 8
    assert found.others.keys() == {"unrelated", "trainer.logger"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, "trainer.flag: true", setting)


SKYRL = (
    "python -m skyrl.train.entrypoints.main_base trainer.train_batch_size=32"
    " trainer.policy_mini_batch_size=32 generator.n_samples_per_prompt=4"
    " generator.inference_engine.num_engines=1"
)
OWN_KEYS = f"{SKYRL} trainer.no_such_thing=1 terminal_bench_config.x=2"
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1"
    " --global-batch-size 64 --num-layers 30"
)
STAGES = f"{MEGATRON} --pipeline-model-parallel-size 8"
PADDED, OTHER_PROGRAM = (
    f"{STAGES} --allow-padding-num-layers",
    MEGATRON.replace("pretrain_gpt", "mg_test"),
)
VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size=512"
MAXTEXT = "python3 -m MaxText.train MaxText/configs/base.yml num_target_devices=8"
MAXTEXT_RL = (
    "python3 -m maxtext.trainers.post_train.rl.train_rl rl.yml batch_size=4"
    " num_target_devices=4"
)
REFUSED = {"rules": ["known_keys"], "validator": "rejects"}
# The system, its command, the settings, and what the verdict is, or the question.
COMMANDS = [
    # Invalid fields are rejected, a key that looks like a size is a question, and older
    # keys are named.
    ("skyrl", SKYRL, [], {"ok": True}),
    ("skyrl", f"{SKYRL} trainer.no_such_thing=1", [], REFUSED),
    ("skyrl", f"{SKYRL} trainer.policy.optimizer_config.lrr=1", [], REFUSED),
    ("skyrl", f"{SKYRL} generator.sampling_params.max_generate_lenght=1", [], REFUSED),
    ("skyrl", f"{SKYRL} trainer.policy.fsdp_config.context_parallel_size=2", [], r"unknown, a fork: trainer\.policy\.fsdp_config\.context_parallel_size=2"),
    ("skyrl", f"{SKYRL} trainer.strategy=deepspeed", [], {"rules": ["strategy"], "samples_per_step": 128, "message": "only SkyRL before January 2026 has it"}),
    ("skyrl", OWN_KEYS, ["trainer.no_such_thing=1"], {"ok": True}),
    ("skyrl", OWN_KEYS.replace("skyrl.train.entrypoints.main_base", "examples.dapo.main_dapo"), [], {"ok": True, "note": "trainer.no_such_thing"}),
    ("skyrl", f"{SKYRL} trainer.n_samples_per_prompt=8", [], r"unknown, a fork: trainer\.n_samples_per_prompt=8 is a key of no version of SkyRL"),
    ("skyrl", f"{SKYRL} generator.async_engine=true", [], r"SkyRL 0\.3 .*refuses keys of older ones: generator\.async_engine"),
    ("skyrl", f"{SKYRL} generator.async_engine=true", ["skyrl_version=legacy"], {"ok": True}),
    # Unknown options that may be sizes and unknown programs are questions; others are
    # named, but not those of the launcher.
    ("megatron", STAGES, [], {"rules": ["layers_over_stages"]}),
    ("megatron", PADDED, [], r"unknown, a fork: allow_padding_num_layers=True.*add allow_padding_num_layers=null"),
    ("megatron", PADDED, ["allow_padding_num_layers=null", "num_layers=32"], {"ok": True}),
    ("megatron", f"{MEGATRON} -pp 8", [], "unknown, a fork: pp=8"),
    ("megatron", OTHER_PROGRAM, [], r"this starts mg_test, a program of a fork: .*add megatron_version=legacy"),
    ("megatron", OTHER_PROGRAM, ["megatron_version=legacy"], {"ok": True}),
    ("megatron", f"{MEGATRON.replace('8 ', '8 --rdzv_backend c10d ', 1)} --no-such-thing 2 --swiglu", [], {"ok": True, "note": "does not have, such as no_such_thing:"}),
    ("megatron", f"{MEGATRON} --swiglu", [], {"no_note": "does not have"}),
    # A key of a fork that repeats each prompt says what has the same effect.
    ("verl", f"{VERL} actor_rollout_ref.rollout.n_agent=5", [], r"n_agent=5 .* counts the rows: give data\.train_batch_size as many times as large"),
    ("verl", f"{VERL} actor_rollout_ref.rollout.n_agent=1", ["verl_version=0.2"], {"ok": False}),
    ("verl", f"{VERL.replace('3 -m verl.trainer.main_ppo', ' -u train.py')} actor_rollout_ref.rollout.n=2", [], r"this starts train, a program of a fork"),
    # A key of older versions is noted, one like a size asked for.
    ("maxtext", f"{MAXTEXT} enable_profiler=true", [], {"ok": True, "note": "only MaxText before August 2026"}),
    ("maxtext", f"{MAXTEXT} n_samples=4", [], r"unknown, a fork: n_samples=4 is a key of no version of MaxText"),
    ("maxtext_rl", MAXTEXT_RL, [], {"ok": True}),
    ("maxtext_rl", f"{MAXTEXT_RL} no_such_thing=1", [], {"rules": ["known_keys"]}),
]  # fmt: skip


@pytest.mark.parametrize(("system", "command", "given", "wanted"), COMMANDS)
def test_what_a_system_does_not_have_is_never_ignored(system, command, given, wanted):
    """Keys, options and programs of no version are refused as the system does, asked
    for if they may be sizes, or named.
    """
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            check_command(command.split(), system, given)
    else:
        expect(check_command(command.split(), system, given), **wanted)


def test_tables_say_which_versions_have_a_key():
    """A key, a section that is replaced as a whole, a key further down, and one that
    none has.
    """
    verl = load_known_keys("verl")
    assert verl.life("actor_rollout_ref.rollout.n") == (2, 9)
    assert verl.life("trainer.use_v1") == (9, 9)
    assert verl.life("actor_rollout_ref.actor") == (1, 9)
    assert (
        verl.life("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params")
        is not None
    )
    assert verl.life("data.n_samples") is None
    assert load_known_keys("skyrl").life("trainer.n_samples_per_prompt") is None


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_key_that_the_rules_read_is_one_of_the_system(system):
    """Except for facts that users state. The defaults are of the key's own kind."""
    launch = load_dialect(system).launch
    for name, found in launch.entries.items():
        assert found.convert(name, found.default) == found.default
        assert (
            not launch.keys
            or load_known_keys(launch.keys).life(name)
            or name in {*FACTS, f"{system}_version"}
        ), name


def test_files_of_forks_are_questions_or_have_notes(tmp_path):
    """Meshes of several kinds of devices are a question, answered by a setting; a YAML
    of another trainer names its keys.
    """
    path = tmp_path / "train.yaml"
    path.write_text(
        "micro_batch_size: 1\nglobal_batch_size: 8\nworld_size: 8\nenable_hetero:"
        " true\n"
    )
    with pytest.raises(ConfigError, match="enable_hetero=True"):
        check_file(path, "megatron")
    assert check_file(path, "megatron", ["enable_hetero=null"]).ok
    path.write_text(
        "defaults: [ppo_trainer]\nactor_rollout_ref: {actor: {own: {gamma: 1}}}\n"
    )
    expect(
        check_file(path, "verl"),
        note="no version of veRL has actor_rollout_ref.actor.own.gamma (line 2)",
    )


def test_keys_that_maxtext_does_not_have_are_refused_as_maxtext_does(tmp_path):
    """A key of no version is rejected with its line, unless it is given as a setting
    too, or the base file of a fork has it.
    """
    path = tmp_path / "scripts" / "run.sh"
    path.parent.mkdir()
    path.write_text(f"true\n{MAXTEXT} no_such_thing=1")
    found = check_file(path, "maxtext")
    assert (rules(found), found.validator) == (["known_keys"], "rejects")
    assert "no_such_thing (line 2) must be left out" in found.violations[0].message
    assert check_file(path, "maxtext", ["no_such_thing=1"]).ok
    base = tmp_path / "MaxText" / "configs" / "base.yml"
    base.parent.mkdir(parents=True)
    base.write_text("per_device_batch_size: 3\nno_such_thing: 0\n")
    found = check_file(path, "maxtext")
    expect(
        found,
        ok=True,
        global_batch_size_to_train_on=24,
        note="MaxText/configs/base.yml: its base file",
    )


def test_models_of_maxtext_forks_are_named(tmp_path):
    """The file of a model is not read, and is named."""
    command = "python3 -m MaxText.train configs/base.yml num_target_devices=8"
    path = tmp_path / "run.sh"
    path.write_text(f"{command} model_name=omni")
    expect(
        check_file(path, "maxtext"),
        global_batch_size_to_train_on=96,
        note="model_name=omni: the file of the model is not read",
    )
    path.write_text(command)
    expect(check_file(path, "maxtext"), no_note="the file of the model")
    models = tmp_path / "configs" / "models"
    models.mkdir(parents=True)
    (models / "llama3.1-8b.yml").write_text("per_device_batch_size: 2\n")
    path.write_text(f"{command} model_name=llama3.1-8b")
    expect(check_file(path, "maxtext"), note="llama3.1-8b: the file of the model is")


def test_questions_come_in_the_order_of_the_table(tmp_path):
    """Not in that of a set, which differs from run to run."""
    path = tmp_path / "run.sh"
    names = [
        name for name in load_dialect("skyrl").launch.entries if "batch_size" in name
    ]
    sizes = " ".join(f"{name}=${{SIZE_{place}}}" for place, name in enumerate(names))
    path.write_text(f"python -m skyrl.train.entrypoints.main_base {sizes}\n")
    with pytest.raises(RampupError) as caught:
        check_file(path, "skyrl")
    asked = re.findall(r"what \$SIZE_(\d+) is", str(caught.value))
    assert len(asked) > 4
    assert asked == [str(place) for place in range(len(asked))]


SCRIPT = """#!/bin/bash
# train_batch_size is for 8 nodes
NODES=${NODES:-1}
N=5
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_batch_size=$((NODES * 128)) trainer.nnodes=$NODES \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=$N \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8
"""


@pytest.mark.parametrize(
    "setting",
    ["train_batch_size=64", "ppo_mini_batch_size=64", "n_gpus_per_node=4", "n=8"],
)
def test_the_end_of_a_key_is_no_variable_of_a_script(tmp_path, setting):
    """A shortened key would set nothing; a variable that the script uses sets it."""
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    with pytest.raises(ConfigError, match=f"unknown key '{setting.partition('=')[0]}'"):
        check_file(file, overrides=[setting])
    found = check_file(file, overrides=["NODES=2", "N=4"])
    expect(found, samples_per_step=1024)


@pytest.mark.parametrize(
    ("system", "text", "key"),
    [
        (
            "tunix",
            "batch_size: 8\nrl_training_config: {mini_batch_size: 4,"
            " train_micro_batch_size: 2, minibatch_size: 4}\n"
            "grpo_config: {num_generations: 4}\n",
            "rl_training_config.minibatch_size",
        ),
        (
            "tunix",
            "batch_size: 8\nrl_training_config: {mini_batch_size: 4, n_samples: 2}\n"
            "grpo_config: {num_generations: 4}\n",
            "rl_training_config.n_samples",
        ),
        ("trlx", "train: {batch_size: 8, batchsize: 9}\n", "train.batchsize"),
        (
            "trlx",
            "train: {batch_size: 8, global_batch_size: 9}\n",
            "train.global_batch",
        ),
    ],
)
def test_a_name_like_that_of_a_size_is_asked_about(tmp_path, system, text, key):
    """Also beside the right key, and of systems without a list of all keys."""
    file = tmp_path / "file.yml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"unknown, a fork: {key}"):
        check_file(file, system=system)


@pytest.mark.parametrize(
    "command",
    [
        f"{VERL} actor_rollout_ref.rollout.n = 16",
        f"{VERL} --trainer.nnodes=2",
        f"{VERL} --trainer.nnodes 2",
        f"{SKYRL} --generator.inference_engine.tensor_parallel_size=2",
        f"{MAXTEXT} --per_device_batch_size=2",
        f"{MAXTEXT} per_device_batch_size 2",
        MEGATRON.replace("--global", "-global"),
        MEGATRON.replace("--global", "global"),
    ],
)
def test_a_key_that_the_system_does_not_read_as_it_is_written_is_refused(command):
    """It would set nothing here, and the system refuses the word or sets another key."""
    with pytest.raises(ConfigError, match=r"sets nothing, and .* may refuse it"):
        check_command(command.split())
