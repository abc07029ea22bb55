"""Tests of rampup.contrib.check.export: other systems run the batches of a plan."""

import collections
import itertools
import json
import random

import pytest
import yaml
from helpers.oracle import linear_steps

from rampup import Config, build_plan
from rampup.cli import main
from rampup.contrib.check.export import PLAN_EXPORTS, export_plan
from rampup.errors import ConfigError, RampupError


def test_plan_prints_or_writes_the_exported_file(tmp_path, capsys):
    """`--export` prints YAML, writes it with `-o`, and is one object with `--json`;
    other tables are refused beside it.
    """
    command = ["plan", "configs/base.yml", "--devices", "4", "--export", "maxtext"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["steps"] == Config().steps
    assert main([*command, "-o", str(tmp_path / "exported.yml")]) == 0
    assert (tmp_path / "exported.yml").read_text() == printed
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["system"], found["values"]["steps"]) == ("maxtext", Config().steps)
    assert main([*command, "--hyperparameters"]) == 2
    assert main(["plan", "configs/base.yml", "-o", "x.yml"]) == 2


def test_a_rollout_is_not_exported(capsys):
    """The error says where its sizes are."""
    command = ["plan", "configs/rl.yml", "--devices", "4", "--export", "verl"]
    assert main(command) == 2
    assert "--json has all sizes of a rollout" in capsys.readouterr().err


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
        pytest.param(300, tuple(PLAN_EXPORTS), marks=pytest.mark.slow),
        pytest.param(1000, tuple(PLAN_EXPORTS), marks=pytest.mark.faults),
        pytest.param(10_000, ("megatron",), marks=pytest.mark.faults),
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
            "per_device_batch_size_increment",
            "= 28 must be a multiple of per_device_batch_size_increment=8",
        ),
        (
            "0:8 80:16 96:24",
            "maxtext",
            "batch_size_schedule",
            r"a phase of its own ramp would be .* \[2, 16, 16\] instead of \[10, 16, 80\]",
        ),
        (
            "0:8 80:16 160:8",
            "megatron",
            "step_batch_size_schedule",
            "the batch shrinks from 16 to 8 at 160 samples",
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
