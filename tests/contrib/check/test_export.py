"""Tests of rampup.contrib.check.export: `check` of an exported rollout finds its numbers,
and systems run a plan's batches.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
import random

import pytest
import yaml
from helpers.oracle import linear_steps

from rampup import Config, build_plan
from rampup.cli import main
from rampup.contrib.check import check_command, check_file
from rampup.contrib.check.export import (
    EXPORTS,
    PLAN_EXPORTS,
    export_plan,
    export_rollout,
)
from rampup.contrib.rl.config import RolloutConfig, build_rollout_plan
from rampup.contrib.rl.plan import AGGREGATIONS
from rampup.errors import ConfigError, RampupError

AXES = [(1, 1, 1)] * 4 + [(2, 1, 1), (4, 2, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]
CHOICES = {
    "num_generations": [1, 1, 2, 4, 5, 8],
    "num_iterations": [1, 1, 2, 3],
    "num_batches": range(1, 10),
}
CHOICES |= {
    "num_epoch": [1, 2],
    "num_test_batches": [0, 2],
    "enable_reference_policy": [False, True],
}
CHOICES |= {
    "enable_critic": [True, False, False, False],
    "pad_microbatches": [True] + [False] * 6,
}
CHOICES |= {
    "loss_agg_mode": ["token-mean"] * 9 + ["seq-mean-token-mean", "seq-mean-token-sum"]
}


def random_rollout(rng):
    """Return a random legal configuration, its plan and its devices; many are more than
    one system can run.
    """
    while True:
        axes, mini = rng.choice(AXES), rng.choice([1, 2, 3, 4, 8, 16, 24, 64])
        devices = rng.choice([1, 2, 3, 4, 8, 16]) * math.prod(axes)
        keys = {name: rng.choice(values) for name, values in CHOICES.items()}
        keys |= dict(
            zip(
                (
                    "ici_tensor_parallelism",
                    "ici_pipeline_parallelism",
                    "ici_context_parallelism",
                ),
                axes,
                strict=True,
            )
        )
        keys |= {
            "batch_size": mini * rng.choice([1, 1, 2, 3, 4]),
            "mini_batch_size": mini,
        }
        keys[rng.choice(["microbatch_size", "train_micro_batch_size"])] = rng.choice(
            [-1, 1, 2, 4]
        )
        if rng.random() < 0.15:
            keys |= {
                "token_budget": 4096,
                "microbatch_size": -1,
                "train_micro_batch_size": -1,
            }
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
    """Return the shared numbers in which `check` of an exported file and the plan
    differ.
    """
    path.write_text(exported.to_yaml(system))
    found = check_file(
        path, system, [f"{key}={value}" for key, value in exported.facts.items()]
    )
    assert found.ok, found.violations
    wanted = {
        **plan.to_dict(),
        "num_chunks": plan.generate_calls,
        "generation_calls": plan.generate_calls,
    }
    wanted |= {
        f"critic_{name}": value for name, value in (wanted["critic"] or {}).items()
    }
    assert {
        "mini_batches",
        *(["critic_mini_batches"] if plan.critic else []),
    } <= found.derived.keys()
    # Those mean something else: for instance, SkyRL pads mini batches, with a token
    # budget too, and a plan pads passes.
    names = found.derived.keys() & wanted.keys() - {
        "microbatch_samples",
        "eval_prompts",
        "padded_samples",
    }
    return {
        name: (found.derived[name], wanted[name])
        for name in names
        if found.derived[name] != wanted[name]
    }


@pytest.mark.parametrize("num_plans", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_plans_make_the_round_trip(tmp_path, num_plans):
    """`check` gives back the plan's numbers; what a system cannot run is refused with a
    reason.
    """
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
            assert not differences(plan, system, tmp_path / "exported.yml", exported), (
                system,
                config,
            )
    assert all(done[system] > num_plans / 50 for system in EXPORTS), done


def test_exported_keys_of_verl_also_work_as_a_command():
    """Sizes of Megatron need `model_engine=megatron`: a command starts from FSDP's base
    files (config/ppo_trainer.yaml).
    """
    config = RolloutConfig(
        batch_size=16,
        mini_batch_size=8,
        microbatch_size=2,
        ici_tensor_parallelism=2,
        enable_critic=True,
    )
    plan = build_rollout_plan(config, 8)
    settings = [
        f"{key}={value}"
        for key, value in export_rollout(config, plan, 8, "verl").values.items()
    ]
    found = check_command(["python3", "-m", "verl.trainer.main_ppo", *settings], "verl")
    assert found.ok, found.violations
    assert (
        found.derived["data_parallel_size"]
        == plan.policy_updates.data_parallel_size
        == 4
    )


@pytest.mark.parametrize(
    ("keys", "system", "key", "words"),
    [
        (
            {"enable_critic": True},
            "maxtext_rl",
            "enable_critic",
            "has no critic; set enable_critic=false",
        ),
        (
            {"token_budget": 2048, "mini_batch_size": -1},
            "maxtext_rl",
            "token_budget",
            "set microbatch_size",
        ),
        (
            {"mini_batch_size": 16},
            "maxtext_rl",
            "mini_batch_size",
            "updates once per pass over the samples",
        ),
        (
            {"enable_critic": True, "critic_num_iterations": 3},
            "skyrl",
            "critic_num_iterations",
            "have 3 and 1",
        ),
        (
            {"loss_agg_mode": "seq-mean-token-sum"},
            "skyrl",
            "rl.loss_agg_mode",
            "but by token-mean, seq-mean-token-mean",
        ),
        ({}, "ray", "export", "must be one of maxtext_rl, verl, skyrl$"),
    ],
)
def test_what_a_system_cannot_run_is_refused(keys, system, key, words):
    """The error names the key of the rollout and the reason."""
    config = RolloutConfig(**keys)
    with pytest.raises(ConfigError, match=words) as caught:
        export_rollout(config, build_rollout_plan(config, 8), 8, system)
    assert caught.value.key == key


LOSSES = {
    "maxtext_rl": (
        "rl.loss_agg_mode",
        ("token-mean", None, "sequence-mean-token-mean", None),
    ),
    "verl": (
        "actor_rollout_ref.actor.loss_agg_mode",
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", None),
    ),
    "skyrl": (
        "trainer.algorithm.loss_reduction",
        ("token_mean", None, "sequence_mean", None),
    ),
}


@pytest.mark.parametrize(
    ("system", "number"), [*itertools.product(LOSSES, range(len(AGGREGATIONS)))]
)
def test_loss_aggregation_has_the_name_of_the_system(system, number):
    """How the losses of tokens add up is exported under the system's own key, or
    refused.
    """
    key, names = LOSSES[system]
    config = RolloutConfig(loss_agg_mode=AGGREGATIONS[number], mini_batch_size=-1)
    with contextlib.nullcontext() if names[number] else pytest.raises(ConfigError):
        assert (
            export_rollout(config, build_rollout_plan(config, 8), 8, system).values[key]
            == names[number]
        )


@pytest.mark.parametrize(
    ("file", "devices", "system", "key", "value"),
    [
        ("rl", "16", "verl", "data.train_batch_size", 32),
        ("base", "4", "maxtext", "steps", Config().steps),
    ],
)
def test_plan_prints_or_writes_the_exported_file(
    tmp_path, capsys, file, devices, system, key, value
):
    """`--export` prints YAML, writes it with `-o`, and is one object with `--json`;
    other tables are refused beside it.
    """
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


def random_plan(rng):
    """Return a random legal configuration and its plan; many are more than one system
    can run.
    """
    while True:
        replicas, tensor, b = (
            rng.choice([1, 2, 3, 4, 8]),
            rng.choice([1, 1, 1, 2]),
            rng.choice([1, 2, 4]),
        )
        unit = replicas * b
        keys = {
            "steps": rng.randint(1, 400),
            "max_target_length": rng.choice([1, 64, 100, 4096]),
            "eval_interval": -1,
        }
        keys |= {
            "ici_tensor_parallelism": tensor,
            "learning_rate_clock": rng.choice(["steps", "samples"]),
        }
        kind = rng.choice(["constant", "linear", "linear", "carried", "factors", "any"])
        if kind in ("linear", "carried"):
            start, growth, n = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 6)
            sizes = {"_start": start, "_increment": growth, "": start + n * growth}
            keys |= {
                f"per_device_batch_size{end}": f"{unit * size}/{replicas * tensor}"
                for end, size in sizes.items()
            }
            keys |= {
                "global_rampup_samples": rng.randint(1, 2000),
                "rampup_carry_overshoot": kind == "carried",
            }
            keys |= {"enable_rampup_batch_size": True}
        elif kind == "constant":
            keys["per_device_batch_size"] = (
                f"{unit * rng.randint(1, 8)}/{replicas * tensor}"
            )
        else:
            sizes, thresholds = [unit * rng.randint(1, 4)], [0]
            for _ in range(rng.randint(1, 5)):
                size = (
                    sizes[-1] * rng.choice([2, 2, 3, 4])
                    if kind == "factors"
                    else unit * rng.randint(1, 30)
                )
                gap = (
                    rng.randint(1, 9) * size
                    if kind == "factors"
                    else rng.randint(1, 900)
                )
                thresholds.append(
                    (thresholds[-1] // size + 1) * size + gap
                    if kind == "factors"
                    else thresholds[-1] + gap
                )
                sizes.append(size)
            keys["batch_size_schedule"] = " ".join(
                f"{t}:{size}" for t, size in zip(thresholds, sizes, strict=True)
            )
        keys |= (
            {"microbatch_size": b}
            if rng.random() < 0.7
            else {"rampup_microbatch": rng.choice(["fixed", "per_phase"])}
        )
        try:
            config = Config(**keys)
            return config, build_plan(config, replicas * tensor)
        except RampupError:
            continue


def megatron_sizes(values, plan):
    """Yield the batches as Megatron does: thresholds of tokens through a float, then
    whole samples, then the samples so far.
    """
    entries = values.get(
        "step_batch_size_schedule", f"0:{values.get('global_batch_size')}"
    ).split()
    pairs = [
        (int(float(t)) // values["seq_length"], int(size))
        for t, size in (entry.split(":") for entry in entries)
    ]
    assert all(
        size % (values["micro_batch_size"] * plan.axes.data_parallel_size) == 0
        for _, size in pairs
    )
    consumed = 0
    while True:
        size = max((t, size) for t, size in pairs if consumed >= t)[1]
        consumed += size
        yield size


def maxtext_sizes(values, plan):
    """Yield the batches as MaxText does: sizes truncated from sizes per device, every
    phase counted from zero.
    """
    sizes = (
        values.get(f"per_device_batch_size{end}", 0)
        for end in ("", "_start", "_increment")
    )
    last, start, growth = (int(plan.num_devices * size) for size in sizes)
    if start == 0:
        return itertools.repeat(last * values["gradient_accumulation_steps"])
    assert values["gradient_accumulation_steps"] == 1
    return linear_steps(
        start, growth, last, values["global_rampup_samples"], carry_overshoot=False
    )


SIZES = {
    "megatron": megatron_sizes,
    "maxtext": maxtext_sizes,
}


@pytest.mark.parametrize(
    ("num_plans", "systems"),
    [
        (60, tuple(PLAN_EXPORTS)),
        pytest.param(1000, tuple(PLAN_EXPORTS), marks=pytest.mark.slow),
        pytest.param(10_000, ("megatron",), marks=pytest.mark.slow),
    ],
)
def test_every_system_runs_the_batches_of_random_plans(num_plans, systems):
    """Step by step, the rule of each system gives the plan's sizes; the others are
    refused with a key and a reason.
    """
    rng, done = random.Random(num_plans), collections.Counter()
    for _ in range(num_plans):
        config, plan = random_plan(rng)
        steps = min(plan.ramp.ramp_steps + 3, 2000)
        expected = [plan.ramp.global_batch_size_at(step) for step in range(steps)]
        for system in systems:
            try:
                exported = export_plan(config, plan, system)
            except ConfigError as error:
                assert "cannot run this plan: " in str(error)
                assert error.key
                continue
            done[system] += 1
            sizes = list(itertools.islice(SIZES[system](exported.values, plan), steps))
            assert sizes == expected, (system, config)
    assert all(done[system] > num_plans / 10 for system in systems), done


def test_notes_say_what_the_system_does_otherwise():
    """The learning rate's clock and its rule, the constants of AdamW, and the rows that
    MaxText drops.
    """
    config = Config(
        batch_size_schedule="0:8 80:16 160:24",
        batch_scaling="half_life",
        learning_rate_batch_scaling="sqrt",
    )
    plan = build_plan(config, 2)
    notes = {
        system: " ".join(export_plan(config, plan, system).notes)
        for system in ("maxtext", "megatron")
    }
    assert "counts steps; that of the plan counts samples" in notes["maxtext"]
    assert "that of the plan counts" not in notes["megatron"]
    assert all(
        "is the same for every batch; that of the plan changes" in note
        for note in notes.values()
    )
    assert "AdamW's constants follow the batch" in notes["megatron"]
    assert "rows at the end of the ramp" in notes["maxtext"]


@pytest.mark.parametrize(
    ("keys", "system", "key", "words"),
    [
        (
            "0:8 80:24 800:64",
            "maxtext",
            "batch_size_schedule",
            "phase 2, from sample 800, grows from 24 to 64",
        ),
        (
            "0:8 80:16 96:24",
            "maxtext",
            "batch_size_schedule",
            "phase 1, from sample 80, has 1 steps",
        ),
        (
            "0:8 80:16 160:8",
            "megatron",
            "batch_size_schedule",
            "phase 2, from sample 160, shrinks from 16 to 8",
        ),
        ("auto", "megatron", "batch_size_schedule", "cannot follow the measured noise"),
        (
            {"rampup_microbatch": "per_phase"},
            "megatron",
            "rampup_microbatch",
            "set rampup_microbatch=fixed",
        ),
        (
            {"per_device_batch_size": "8/3", "ici_tensor_parallelism": 3},
            "maxtext",
            "per_device_batch_size",
            "be a decimal",
        ),
        ({}, "verl", "export", "must be one of maxtext, megatron$"),
    ],
)
def test_a_plan_that_a_system_cannot_run_is_refused(keys, system, key, words):
    """The error names the phase or the key, and the reason."""
    config = Config(
        **({"batch_size_schedule": keys} if isinstance(keys, str) else keys)
    )
    with pytest.raises(ConfigError, match=words) as caught:
        export_plan(
            config, build_plan(config, 2 * config.ici_tensor_parallelism), system
        )
    assert caught.value.key == key
