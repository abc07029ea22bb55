"""A rollout in the keys of another system: `check` of the exported file finds the plan's own numbers."""

import collections
import functools
import json
import math
import random

import pytest
import yaml

from rampup import Config
from rampup.cli import main
from rampup.dialects import check_command, check_file
from rampup.dialects.export import EXPORTS, export_rollout
from rampup.errors import ConfigError, RampupError
from rampup.rl.config import RolloutConfig, build_rollout_plan
from rampup.rl.plan import AGGREGATIONS

AXES = [(1, 1, 1)] * 4 + [(2, 1, 1), (4, 2, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]
CHOICES = {"num_generations": [1, 1, 2, 4, 5, 8], "num_iterations": [1, 1, 2, 3], "num_batches": range(1, 10)}
CHOICES |= {"num_epoch": [1, 2], "num_test_batches": [0, 2], "enable_reference_policy": [False, True]}
CHOICES |= {"enable_critic": [True, False, False, False], "pad_microbatches": [True] + [False] * 6}
CHOICES |= {"loss_agg_mode": ["token-mean"] * 9 + ["seq-mean-token-mean", "seq-mean-token-sum"]}


def random_rollout(rng):
    """Return a random legal configuration, its plan and its devices; many are more than one system can run."""
    while True:
        axes, mini = rng.choice(AXES), rng.choice([1, 2, 3, 4, 8, 16, 24, 64])
        devices = rng.choice([1, 2, 3, 4, 8, 16]) * math.prod(axes)
        keys = {name: rng.choice(values) for name, values in CHOICES.items()}
        keys |= dict(zip(("ici_tensor_parallelism", "ici_pipeline_parallelism", "ici_context_parallelism"), axes, strict=True))
        keys |= {"batch_size": mini * rng.choice([1, 1, 2, 3, 4]), "mini_batch_size": mini}
        keys[rng.choice(["microbatch_size", "train_micro_batch_size"])] = rng.choice([-1, 1, 2, 4])
        if rng.random() < 0.15:
            keys |= {"token_budget": 4096, "microbatch_size": -1, "train_micro_batch_size": -1}
        if rng.random() < 0.3:
            keys["rollout_micro_batch_size"] = rng.choice([1, 2, 4, 8])
        if keys["enable_critic"] and rng.random() < 0.5:
            keys["critic_mini_batch_size"] = rng.choice([1, 2, 4])
        try:
            config = RolloutConfig(**keys)
            return config, build_rollout_plan(config, devices), devices
        except RampupError:
            continue


def differences(plan, system, path, exported):
    """Return the shared numbers in which `check` of an exported file and the plan differ."""
    path.write_text(exported.to_yaml(system))
    found = check_file(path, system, [f"{key}={value}" for key, value in exported.facts.items()])
    assert found.ok, found.violations
    wanted = {**plan.to_dict(), "num_chunks": plan.generate_calls, "generation_calls": plan.generate_calls}
    wanted |= {f"critic_{name}": value for name, value in (wanted["critic"] or {}).items()}
    assert {"mini_batches", *(["critic_mini_batches"] if plan.critic else [])} <= found.derived.keys()
    # Those mean something else: for instance, SkyRL pads mini batches, with a token budget too, and a plan pads passes.
    names = found.derived.keys() & wanted.keys() - {"microbatch_samples", "eval_prompts", "padded_samples"}
    return {name: (found.derived[name], wanted[name]) for name in names if found.derived[name] != wanted[name]}


@pytest.mark.parametrize("num_plans", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_plans_make_the_round_trip(tmp_path, num_plans):
    """`check` gives back the plan's numbers; what a system cannot run is refused with a reason."""
    rng, done = random.Random(num_plans), collections.Counter()
    for _ in range(num_plans):
        config, plan, devices = random_rollout(rng)
        for system in EXPORTS:
            try:
                exported = export_rollout(config, plan, devices, system)
            except ConfigError as error:
                assert "cannot run this plan: " in str(error)
                assert error.key
                continue
            done[system] += 1
            assert not differences(plan, system, tmp_path / "exported.yml", exported), (system, config)
    assert all(done[system] > num_plans / 50 for system in EXPORTS), done


def test_exported_keys_of_verl_also_work_as_a_command():
    """Sizes of Megatron need `model_engine=megatron`: a command starts from FSDP's base files (config/ppo_trainer.yaml)."""
    config = RolloutConfig(batch_size=16, mini_batch_size=8, microbatch_size=2, ici_tensor_parallelism=2, enable_critic=True)
    plan = build_rollout_plan(config, 8)
    settings = [f"{key}={value}" for key, value in export_rollout(config, plan, 8, "verl").values.items()]
    found = check_command(["python3", "-m", "verl.trainer.main_ppo", *settings], "verl")
    assert found.ok, found.violations
    assert found.derived["data_parallel_size"] == plan.policy_updates.data_parallel_size == 4


@pytest.mark.parametrize(
    ("keys", "system", "key", "words"),
    [
        ({"enable_critic": True}, "maxtext_rl", "enable_critic", "has no critic; set enable_critic=false"),
        ({"token_budget": 2048, "mini_batch_size": -1}, "maxtext_rl", "token_budget", "set microbatch_size"),
        ({"mini_batch_size": 16}, "maxtext_rl", "mini_batch_size", "updates once per pass over the samples"),
        ({}, "trlx", "rl.num_generations", "one response per prompt; set it to 1"),
        ({"enable_critic": True, "critic_num_iterations": 3}, "skyrl", "critic_num_iterations", "have 3 and 1"),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "skyrl", "rl.loss_agg_mode", "but by token-mean, seq-mean-token-mean"),
        ({}, "ray", "export", "must be one of maxtext_rl, verl, skyrl, trlx"),
    ],
)
def test_what_a_system_cannot_run_is_refused(keys, system, key, words):
    """The error names the key of the rollout and the reason."""
    config = RolloutConfig(**keys)
    with pytest.raises(ConfigError, match=words) as caught:
        export_rollout(config, build_rollout_plan(config, 8), 8, system)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("system", "key", "names"),
    [
        ("maxtext_rl", "rl.loss_agg_mode", ("token-mean", None, "sequence-mean-token-mean")),
        ("verl", "actor_rollout_ref.actor.loss_agg_mode", ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
        ("skyrl", "trainer.algorithm.loss_reduction", ("token_mean", None, "sequence_mean")),
    ],
)
def test_loss_aggregation_has_the_name_of_the_system(system, key, names):
    """How the losses of tokens add up is exported under the system's own key, or refused."""
    for mode, name in zip(AGGREGATIONS, (*names, None), strict=True):
        config = RolloutConfig(loss_agg_mode=mode, mini_batch_size=-1)
        plan = build_rollout_plan(config, 8)
        if name is None:
            with pytest.raises(ConfigError):
                export_rollout(config, plan, 8, system)
        else:
            assert export_rollout(config, plan, 8, system).values[key] == name


@pytest.mark.parametrize(
    ("file", "devices", "system", "key", "value"),
    [("rl", "16", "verl", "data.train_batch_size", 32), ("base", "4", "levanter", "trainer.num_train_steps", Config().steps)],
)
def test_plan_prints_or_writes_the_exported_file(tmp_path, capsys, file, devices, system, key, value):
    """`--export` prints YAML, writes it with `-o`, and is one object with `--json`; other tables are refused beside it."""
    command = ["plan", f"configs/{file}.yml", "--devices", devices, "--export", system]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert functools.reduce(dict.get, key.split("."), yaml.safe_load(printed)) == value
    assert main([*command, "-o", str(tmp_path / "exported.yml")]) == 0
    assert (tmp_path / "exported.yml").read_text() == printed
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["system"], found["values"][key]) == (system, value)
    assert main([*command, "--hyperparameters"]) == 2
    assert main(["plan", f"configs/{file}.yml", "-o", "x.yml"]) == 2
