"""`rampup plan`: the phases of a run, compared with another plan, or with a token
budget.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rampup.cli import common
from rampup.cli.common import Result, arg, usage_error
from rampup.config.resume import list_devices, possible_devices
from rampup.contrib.lab.scaling_laws import batch_notes
from rampup.engine.compile import topology_facts
from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan.describe import token_budget
from rampup.plan.numbers import SUFFIXES, exact_fraction, parse_count
from rampup.show import console as tables

if TYPE_CHECKING:
    from rampup.contrib.check.export import Exported


PLAN = {
    **common.CONFIG,
    **common.DEVICES,
    **common.TOPOLOGY,
    "--all": arg(
        None, f"print every phase, also if there are more than {tables.MAX_PHASES}"
    ),
    "--hyperparameters": arg(None, "show the hyperparameters of every phase"),
    "--other-devices": arg(
        None, "show the numbers of devices on which all batches of this plan run"
    ),
    "--diff": arg(
        "OTHER.yml", "compare with another plan; key=value applies to the first only"
    ),
    "--budget": arg("TOKENS", "show what a number of tokens means, for example 300B"),
    "--tokens-per-second": arg("X", "with --budget: a throughput, for the time"),
    "--measured": arg(
        "RUN_DIR", "with --budget: the throughput of a run's metrics.jsonl"
    ),
    "--export": arg(
        "SYSTEM",
        "the sizes in the keys of another system: maxtext, megatron, levanter or"
        " olmo_core; of a rollout: maxtext_rl, verl, skyrl or trlx",
    ),
    "-o --output": arg("FILE", "with --export: write the file instead of printing it"),
}


def plan(args: argparse.Namespace) -> Result:
    """Plan a configuration."""
    rollout = common.is_rollout_file(args.config)
    _check_options(args, rollout=rollout)
    if rollout:
        from rampup.contrib.rl import config as rl

        config = rl.load_rollout_config(
            args.config, args.overrides, environ=common.environment()
        )
        num_devices = common.count_devices(args, config)
        schedule = rl.build_rollout_schedule(config, num_devices)
        plan = schedule.stages[-1][1]
        if args.export is not None:
            from rampup.contrib.check.export import export_rollout

            return _export(export_rollout(config, plan, num_devices, args.export), args)
        notes = rl.rollout_notes(config, plan)
        facts = {
            **plan.to_dict(),
            "total_optimizer_steps": schedule.optimizer_steps("policy"),
            "stages": schedule.stage_rows(),
        }
        return Result(
            facts={**facts, "notes": list(notes)},
            show=lambda console: tables.print_rollout(schedule, console, notes=notes),
        )
    topology = common.named_topology(args)
    config, plan = common.read_plan(args, args.config, args.overrides)
    max_phases = None if args.all else tables.MAX_PHASES
    if args.diff is not None:
        if common.is_rollout_file(args.diff):
            raise ConfigError(
                "--diff is for pre-training plans, not for a rollout",
                key="diff",
                path=args.diff,
            )
        other, other_plan = common.read_plan(args, args.diff, ())
        changed = config.differences(other)
        names = (" ".join([args.config, *args.overrides]), args.diff)
        return Result(
            facts={
                "a": plan.to_dict(),
                "b": other_plan.to_dict(),
                "changed_keys": changed,
            },
            show=lambda console: tables.print_comparison(
                (plan, other_plan), names, changed, console, max_phases=max_phases
            ),
        )
    length = config.max_target_length
    if args.budget is not None:
        if plan.auto_schedule == "follow":
            text = (
                "--budget needs batches that are known before the run;"
                " batch_size_schedule=auto decides them during it"
            )
            raise usage_error(text, key="budget")
        tokens = parse_count(args.budget, what="budget", key="budget")
        throughput = None
        if args.measured is not None:
            from rampup.loop.run_folder import measured_throughput

            throughput = measured_throughput(args.measured)
        elif (
            text := args.tokens_per_second
        ) is not None:  # with a suffix as for a count, or with decimals
            name = "tokens-per-second"
            parse = (
                parse_count if text.strip()[-1:].upper() in SUFFIXES else exact_fraction
            )
            rate = Fraction(parse(text, what=name, key=name))
            if rate <= 0:
                raise RampDefinitionError(f"{name}={text} must be above 0", key=name)
            throughput = dict.fromkeys(plan.ramp.sizes, rate)
        budget = token_budget(
            plan.ramp,
            tokens=tokens,
            tokens_per_sample=length,
            tokens_per_second=throughput,
        )
        return Result(
            facts={**plan.to_dict(), "budget": budget},
            show=lambda console: tables.print_budget(
                budget, plan, console, measured=throughput or {}
            ),
        )
    if args.export is not None:
        from rampup.contrib.check.export import export_plan

        return _export(export_plan(config, plan, args.export), args)
    rows = devices = None
    notes = batch_notes(
        plan.consumed_samples * length, max(plan.of_all_sizes.ramp.sizes) * length
    )
    facts = plan.to_dict() | ({"notes": list(notes)} if notes else {})
    if topology is not None:
        facts["topology"] = topology_facts(topology)
    if args.hyperparameters:
        from rampup.lm.train import phase_hyperparameters

        rows = phase_hyperparameters(config, plan)
        facts["phases"] = [
            {**phase, **row} for phase, row in zip(plan.phase_rows(), rows, strict=True)
        ]
    if args.other_devices:
        devices = facts["possible_devices"] = possible_devices(config, plan)

    def show(console: Console) -> None:
        tables.print_plan(plan, console, max_phases=max_phases)
        tables.print_notes(notes, console)
        if rows is not None:
            tables.print_hyperparameters(plan, rows, console, max_phases=max_phases)
        if topology is not None:
            console.print(common.describe_topology(topology))
        if devices is not None:
            console.print(
                "Numbers of devices that can run these batches:"
                f" {list_devices(devices)}"
            )

    return Result(facts=facts, show=show)


def _check_options(args: argparse.Namespace, *, rollout: bool) -> None:
    """Refuse options that exclude each other."""
    names = (
        "diff",
        "budget",
        "hyperparameters",
        "other_devices",
        *(() if rollout else ("export",)),
    )
    given = [name.replace("_", "-") for name in names if getattr(args, name)]
    rates = [
        name.replace("_", "-")
        for name in ("tokens_per_second", "measured")
        if getattr(args, name) is not None
    ]
    if len(given) > 1 and set(given) != {"hyperparameters", "other-devices"}:
        raise usage_error(
            f"{' and '.join(f'--{name}' for name in given)} exclude each other; leave"
            " one out",
            key=given[0],
        )
    if args.output is not None and args.export is None:
        raise usage_error(
            "-o is the file of --export; add --export SYSTEM", key="output"
        )
    if rollout and given:
        raise usage_error(
            f"--{given[0]} is for a pre-training plan, not for a rollout", key=given[0]
        )
    if rates and args.budget is None:
        raise usage_error(
            f"--{rates[0]} gives the time of a token budget; add --budget", key=rates[0]
        )
    if len(rates) > 1:
        raise usage_error(
            "--tokens-per-second and --measured both give the throughput; leave"
            " one out",
            key=rates[1],
        )


def _export(exported: Exported, args: argparse.Namespace) -> Result:
    """Print the sizes in another system's keys, or write them into a file."""
    shown = text = exported.to_yaml(args.export)
    if args.output is not None:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the file: {error.strerror}",
                key="output",
                path=args.output,
            ) from None
        shown = f"wrote {args.output}\n"
    facts = {
        "system": args.export,
        "values": exported.values,
        "facts": exported.facts,
        "notes": list(exported.notes),
    }
    return Result(
        facts=facts,
        show=lambda console: console.print(
            shown, end="", soft_wrap=True, markup=False, highlight=False
        ),
    )
