"""The commands of a rollout's file or run: `rampup train`, `generate`, `plan`, `plot`
and `report`, which find this module by its name.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rampup.cli import common
from rampup.cli.common import Result, usage_error
from rampup.cli.draw import CliInputs
from rampup.cli.plan import NOT_FOR_ROLLOUTS, given_options
from rampup.cli.run import read_run_config, run_to_end, show_text
from rampup.contrib.rl.config import (
    ROLLOUT_FILE as ROLLOUT_FILE,  # which `rampup explain` reads
)
from rampup.contrib.rl.config import (
    build_rollout_plan,
    build_rollout_schedule,
    load_rollout_config,
    rollout_notes,
)
from rampup.contrib.rl.config import is_rollout_file as is_rollout_file
from rampup.contrib.rl.progress import RolloutProgress
from rampup.contrib.rl.tables import print_rollout, rollout_html
from rampup.errors import ConfigError
from rampup.loop.run_folder import METRICS_FILE, read_lines
from rampup.show.format import format_count
from rampup.show.notebook import html_table
from rampup.show.report import MAX_ROWS, Report
from rampup.show.series import finite_or_nan

JSON_KEYS = (
    "steps",
    "samples",
    "accuracy_before",
    "accuracy_after",
    "reward_first",
    "reward_last",
    "num_compilations",
    "seconds",
    "checkpoint",
)
# Titles of the curves of a report, and the keys of metrics.jsonl.
CURVES = {
    "Spread of rewards": "reward_spread",
    "Share of prompts without spread": "zero_spread_share",
    "KL divergence": "kl",
    "Clip fraction": "clip_fraction",
    "Tokens of a response": "response_length",
    "Prompts of an update": "num_prompts",
    "Samples of an update": "num_samples",
}


def train(args: argparse.Namespace) -> Result:
    """Train by reinforcement learning, and return the summary of the run."""
    config = read_run_config(args, load_rollout_config)
    common.use_fake_devices(args.fake_devices)
    # With JAX, which a configuration that is refused need not load.
    from rampup.contrib.rl.train import train as train_policy

    return run_to_end(args, config, train_policy, JSON_KEYS, progress=RolloutProgress)


def generate(args: argparse.Namespace) -> Result:
    """Load a checkpoint of a policy and sample from it."""
    from rampup.contrib.rl.train import load

    return show_text(load(args.run), args)


def plan(args: argparse.Namespace) -> Result:
    """Show the sizes of a step."""
    if given := given_options(args, NOT_FOR_ROLLOUTS):
        raise usage_error(
            f"--{given[0]} is for a pre-training plan, not for a rollout; --json has"
            " all sizes of a rollout",
            key=given[0],
        )
    config = load_rollout_config(args.config, args.overrides, environ=os.environ)
    num_devices = common.count_devices(args, config)
    schedule = build_rollout_schedule(config, num_devices)
    step = schedule.stages[-1][1]
    notes = rollout_notes(config, step)
    facts = {
        **step.to_dict(),
        "total_optimizer_steps": schedule.total_steps,
        "stages": schedule.stage_rows(),
        "notes": list(notes),
    }
    return Result(
        facts=facts,
        show=lambda console: print_rollout(schedule, console, notes=notes),
    )


def plot(args: argparse.Namespace) -> Result:
    """Refuse: there is no ramp."""
    raise ConfigError(
        "a step of reinforcement learning has no ramp to draw; `rampup plan` and"
        " `rampup report` show it",
        path=args.sources[0],
    )


def gather_report(args: argparse.Namespace, inputs: CliInputs) -> Report:
    """Return the content of a report of a rollout's configuration or run."""
    environ = {} if inputs.runs else os.environ
    config = load_rollout_config(inputs.file, inputs.overrides, environ=environ)
    step = build_rollout_plan(config, common.count_devices(args, config))
    run = inputs.read_run()
    if run is not None:
        lines = list(read_lines(Path(inputs.runs[0]) / METRICS_FILE))
        run = replace(run, curves=curves(lines))
    prompts = format_count(step.prompts_per_step, "prompt")
    size = f"{prompts} * {format_count(step.samples_per_prompt, 'response')}"
    steps = format_count(step.num_steps, "step")
    total = format_count(step.total_optimizer_steps, "optimizer step")
    timetable = html_table(step.timetable(), max_rows=MAX_ROWS)
    return Report(
        title=inputs.name,
        sentences=(f"{steps} of {size}, {total}",),
        notes=rollout_notes(config, step),
        config=config,
        run=run,
        others={"Step": {"timetable": timetable, "sizes": rollout_html(step)}},
    )


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return what lines of metrics.jsonl have besides loss and reward, by title; NaN
    where a line lacks it.
    """
    found = {
        title: tuple(finite_or_nan(line.get(key)) for line in lines)
        for title, key in CURVES.items()
    }
    return {
        title: values
        for title, values in found.items()
        if not all(map(math.isnan, values))
    }
