"""Tests of rampup.contrib.check.known: a key that is known is a key that is read, asked
about or named, unless it can change no size.
"""

import re
from importlib.resources import files

import pytest
from helpers.dialect_files import rules, verdict

from rampup.contrib.check import SYSTEMS, check_command, load_dialect
from rampup.contrib.check.known import load_known_keys
from rampup.errors import ConfigError

# A name of one of these may be that of a size, of devices, or of a file of settings.
LOOKS_LIKE_A_SIZE = re.compile(
    r"(?i)parallel|degree|group_size|expert|gpu|node|world|batch|replica|device|accum"
    r"|cfg|config|yaml|override|(?:^|_)(?:[tdpce]p|ranks?)(?:_|$)|mesh|shard|hetero"
    r"|hierarch|num_layers|stage|interleav|layout|rampup|samples|iters|steps|epoch"
    r"|prompts|checkpoint_args"
)
READ_IN_FULL = ("megatron", "maxtext", "maxtext_rl", "skyrl", "verl")
SIZES = {
    "megatron": {"micro_batch_size": 1, "global_batch_size": 64, "world_size": 16},
    "maxtext": {"per_device_batch_size": 1, "num_devices": 16, "steps": 10},
    "maxtext_rl": {"batch_size": 8, "rl.num_generations": 4},
    "skyrl": {"trainer.train_batch_size": 1024, "generator.n_samples_per_prompt": 4},
    "verl": {
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "algorithm.adv_estimator": "grpo",
    },
}
COMMANDS = {
    "megatron": (
        "torchrun --nproc_per_node 16 pretrain_gpt.py --micro-batch-size 1"
        " --global-batch-size 64"
    ),
    "maxtext": (
        "python3 -m maxtext.trainers.pre_train.train base.yml per_device_batch_size=1"
        " num_target_devices=16 steps=10"
    ),
    "maxtext_rl": (
        "python3 -m maxtext.trainers.post_train.rl.train_rl rl.yml batch_size=8"
        " rl.num_generations=4"
    ),
    "skyrl": (
        "python3 -m skyrl.train.entrypoints.main_base trainer.train_batch_size=1024"
    ),
    "verl": "python3 -m verl.trainer.main_ppo data.train_batch_size=64"
    " actor_rollout_ref.actor.ppo_mini_batch_size=16"
    " actor_rollout_ref.actor.use_dynamic_bsz=True algorithm.adv_estimator=grpo",
}
# What answers the question of the version.
STATED = {"verl": ["verl_version=0.9"], "skyrl": ["skyrl_version=legacy"]}
UNREAD = [
    (system, name)
    for system in READ_IN_FULL
    for name in load_dialect(system).launch.unread
]


def as_words(system, name, value):
    """Return the words that set a key on a system's command line."""
    if system != "megatron":
        return [f"{name}={value}"]
    return [f"--{name.replace('_', '-')}", str(value)]


def is_told(check, name):
    """Return whether a check asks about a key or names it in a note."""
    try:
        found = check()
    except ConfigError as error:
        asks = f"unknown: {name}=" in str(error) and f"{name}=null" in str(error)
        return asks or f"{name} must not be set with model_engine" in str(error)
    return any(note.startswith(f"{name}=") for note in found.notes)


@pytest.mark.parametrize(("system", "name"), UNREAD)
def test_a_key_that_no_rule_reads_is_asked_about_or_named(system, name):
    """In YAML, on a command line and as a setting; a value that changes nothing is
    not.
    """
    words, stated = COMMANDS[system].split(), STATED.get(system, [])
    ways = (
        lambda value, *more: verdict(
            system, {**SIZES[system], name: value}, *more, *stated
        ),
        lambda value, *more: check_command(
            [*words, *as_words(system, name, value)], system, [*more, *stated]
        ),
        lambda value, *more: verdict(
            system, SIZES[system], f"{name}={value}", *more, *stated
        ),
    )
    harmless = load_dialect(system).launch.unread[name].harmless[-1]
    for way in ways:
        assert is_told(lambda way=way: way(3), name)
    assert not is_told(lambda: ways[0](harmless), name)
    assert not is_told(lambda: ways[1](3, f"{name}=null"), name)


@pytest.mark.parametrize("system", READ_IN_FULL)
def test_every_name_like_that_of_a_size_is_accounted_for(system):
    """It is read, asked about or named; or it stands among those that were looked up in
    the system's source, and change no size.
    """
    launch = load_dialect(system).launch
    text = files("rampup.contrib.check").joinpath(f"{launch.keys}_keys.txt").read_text()
    looked_up = text.partition("# Names like those of sizes")[2].partition("# All")[0]
    names = set(load_known_keys(launch.keys).lives)
    alike = {name for name in names if LOOKS_LIKE_A_SIZE.search(name)}
    assert len(alike) > 150
    told = {*launch.unread, *looked_up.split(), "num_target_devices"}
    assert not {
        name
        for name in alike
        if launch.canonical(name) not in launch.entries
        and told.isdisjoint({name, name.rpartition(".")[2]})
    }


AXES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
# Keys that were known and not read: two values, and the two answers.
READ = [
    ("megatron", {}, "ds_sequence_parallel_size", (1, 2), (16, 8), "data_parallel_size"),
    ("megatron", AXES, "ds_sequence_parallel_size", (1, 4), (4, 1), "data_parallel_size"),
    ("megatron", {}, "ds_sequence_parallel_size", (2, 3), ([], ["world_divisible", "batch_divisible"]), "rules"),
    ("megatron", {}, "expert_model_parallel_size", (8, 3), ([], ["experts_over_devices"]), "rules"),
    ("megatron", AXES, "expert_model_parallel_size", (4, 8), ([], ["experts_over_devices"]), "rules"),
    ("megatron", AXES | {"expert_model_parallel_size": 8}, "expert_tensor_parallel_size", (1, 2), ([], ["experts_over_devices"]), "rules"),
    ("megatron", {"expert_model_parallel_size": 8}, "num_experts", (64, 60), ([], ["experts_shared"]), "rules"),
    ("megatron", {"expert_model_parallel_size": 8}, "num_moe_experts", (64, 60), ([], ["experts_shared"]), "rules"),
    ("megatron", AXES, "no_pipeline_parallel", (False, True), ([], ["no_pipeline"]), "rules"),
    ("megatron", AXES, "encoder_num_layers", (12, 13), ([], ["layers_over_stages"]), "rules"),
    ("megatron", AXES | {"num_layers": 13}, "standalone_embedding_stage", (False, True), (["layers_over_stages"], []), "rules"),
    ("megatron", AXES | {"num_layers": 13}, "pipeline_model_parallel_split_rank", (None, 1), (["layers_over_stages"], []), "rules"),
    ("megatron", AXES | {"num_layers": 13}, "heterogeneous_layers_config_path", (None, "a.json"), (["layers_over_stages"], []), "rules"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "base", "name", "values", "answers", "what"), READ)
def test_two_values_of_a_key_that_decides_have_two_answers(
    system, base, name, values, answers, what
):
    """The devices of a replica and of the experts, and how layers are split."""
    for value, answer in zip(values, answers, strict=True):
        config = {**SIZES[system], **base, name: value}
        config = {key: value for key, value in config.items() if value is not None}
        found = verdict(system, config)
        assert {**found.derived, "rules": rules(found)}[what] == answer


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_harmless_value_is_one_that_a_user_can_answer(system):
    """Null answers every question, and no key is both read and unread."""
    launch = load_dialect(system).launch
    assert all(None in row.harmless for row in launch.unread.values())
    assert not launch.entries.keys() & launch.unread.keys()
