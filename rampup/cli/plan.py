"""`rampup plan`: the phases of a run, compared with another plan, or with a token budget."""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import rampup
from rampup.cli.common import (
    Result,
    add_config_arguments,
    add_devices_argument,
    add_topology_argument,
    count_devices,
    describe_topology,
    environment,
    is_rollout_file,
    named_topology,
)
from rampup.config.build import list_devices, possible_devices, with_slices
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError, RampDefinitionError
from rampup.show.console import MAX_PHASES, print_hyperparameters, print_plan

if TYPE_CHECKING:
    from rampup.dialects.export import Exported


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup plan`."""
    add_config_arguments(parser)
    add_devices_argument(parser)
    add_topology_argument(parser, "plan for")
    parser.add_argument("--all", action="store_true", help=f"print every phase, also if there are more than {MAX_PHASES}")
    parser.add_argument("--hyperparameters", action="store_true", help="show the hyperparameters of every phase")
    parser.add_argument(
        "--other-devices", action="store_true", help="show the numbers of devices on which all batches of this plan run"
    )
    parser.add_argument("--diff", metavar="OTHER.yml", help="compare with another plan; key=value applies to the first only")
    parser.add_argument("--budget", metavar="TOKENS", help="show what a number of tokens means, for example 300B")
    parser.add_argument("--tokens-per-second", metavar="X", help="with --budget: a throughput, for the time")
    parser.add_argument("--measured", metavar="RUN_DIR", help="with --budget: the throughput of a run's metrics.jsonl")
    parser.add_argument(
        "--export",
        metavar="SYSTEM",
        help="the sizes in the keys of another system: maxtext, megatron, levanter or "
        "olmo_core; of a rollout: maxtext_rl, verl, skyrl or trlx",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="with --export: write the file instead of printing it")


def run(args: argparse.Namespace, console: object) -> Result:
    """Plan a configuration."""
    rollout = is_rollout_file(args.config)
    _check_options(args, rollout=rollout)
    if rollout:
        return _plan_rollout(args)
    topology = named_topology(args)
    config = with_slices(rampup.load_config(args.config, args.overrides, environ=environment()), topology)
    plan = rampup.build_plan(config, count_devices(args, config))
    max_phases = None if args.all else MAX_PHASES
    if args.diff is not None:
        return _compare(args, config, plan, max_phases)
    if args.budget is not None:
        return _apply_budget(args, config, plan)
    if args.export is not None:
        from rampup.dialects.export_plan import export_plan

        return _export(export_plan(config, plan, args.export), args)
    rows = devices = None
    facts = plan.to_dict() | ({} if topology is None else {"topology": topology.to_dict()})
    if args.hyperparameters:
        from rampup.lm.train import phase_hyperparameters

        rows = phase_hyperparameters(config, plan)
        facts["phases"] = [{**phase, **row} for phase, row in zip(plan.phase_rows(), rows, strict=True)]

    if args.other_devices:
        devices = facts["possible_devices"] = possible_devices(config, plan)

    def show(console: Console) -> None:
        print_plan(plan, console, max_phases=max_phases)
        if rows is not None:
            print_hyperparameters(plan, rows, console, max_phases=max_phases)
        if topology is not None:
            console.print(describe_topology(topology))
        if devices is not None:
            console.print(f"Numbers of devices that can run these batches: {list_devices(devices)}")

    return Result(facts=facts, show=show)


def _check_options(args: argparse.Namespace, *, rollout: bool) -> None:
    """Refuse options that exclude each other."""
    names = ("diff", "budget", "hyperparameters", "other_devices", *(() if rollout else ("export",)))
    given = [name.replace("_", "-") for name in names if getattr(args, name)]
    if len(given) > 1 and set(given) != {"hyperparameters", "other-devices"}:
        text = " and ".join(f"--{name}" for name in given)
        raise ConfigError(f"{text} exclude each other; leave one out", key=given[0], path=COMMAND_LINE)
    if args.output is not None and args.export is None:
        raise ConfigError("-o is the file of --export; add --export SYSTEM", key="output", path=COMMAND_LINE)
    if rollout and given:
        raise ConfigError(f"--{given[0]} is for a pre-training plan, not for a rollout", key=given[0], path=COMMAND_LINE)
    rates = [name for name in ("tokens_per_second", "measured") if getattr(args, name) is not None]
    if rates and args.budget is None:
        name = rates[0].replace("_", "-")
        raise ConfigError(f"--{name} gives the time of a token budget; add --budget", key=name, path=COMMAND_LINE)
    if len(rates) > 1:
        raise ConfigError(
            "--tokens-per-second and --measured both give the throughput; leave one out", key=rates[1], path=COMMAND_LINE
        )


def _plan_rollout(args: argparse.Namespace) -> Result:
    from rampup.dialects.export import export_rollout
    from rampup.rl.config import build_rollout_schedule, load_rollout_config, rollout_notes
    from rampup.show.console import print_rollout

    config = load_rollout_config(args.config, args.overrides, environ=environment())
    num_devices = count_devices(args, config)
    schedule = build_rollout_schedule(config, num_devices)
    plan = schedule.stages[-1][1]
    if args.export is not None:
        return _export(export_rollout(config, plan, num_devices, args.export), args)
    notes = rollout_notes(config, plan)
    facts = {**plan.to_dict(), "total_optimizer_steps": schedule.optimizer_steps("policy"), "stages": schedule.stage_rows()}
    return Result(facts={**facts, "notes": list(notes)}, show=lambda console: print_rollout(schedule, console, notes=notes))


def _export(exported: Exported, args: argparse.Namespace) -> Result:
    """Print the sizes in another system's keys, or write them into a file."""
    text = exported.to_yaml(args.export)
    if args.output is not None:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the file: {error.strerror}", key="output", path=args.output) from None
    facts = {"system": args.export, "values": exported.values, "facts": exported.facts, "notes": list(exported.notes)}
    shown = text if args.output is None else f"wrote {args.output}\n"
    return Result(facts=facts, show=lambda console: console.print(shown, end="", soft_wrap=True, markup=False, highlight=False))


def _compare(args: argparse.Namespace, config: rampup.Config, plan: rampup.RampPlan, max_phases: int | None) -> Result:
    """Compare a plan with the one of another file."""
    from rampup.show.console import print_comparison

    if is_rollout_file(args.diff):
        raise ConfigError("--diff is for pre-training plans, not for a rollout", key="diff", path=args.diff)
    other = with_slices(rampup.load_config(args.diff, environ=environment()), named_topology(args))
    plans = (plan, rampup.build_plan(other, count_devices(args, other)))
    changed = config.differences(other)
    names = (" ".join([args.config, *args.overrides]), args.diff)
    return Result(
        facts={"a": plans[0].to_dict(), "b": plans[1].to_dict(), "changed_keys": changed},
        show=lambda console: print_comparison(plans, names, changed, console, max_phases=max_phases),
    )


def _apply_budget(args: argparse.Namespace, config: rampup.Config, plan: rampup.RampPlan) -> Result:
    """Show what a budget of tokens means for a plan."""
    from rampup.plan.numbers import parse_count
    from rampup.plan.plan import token_budget
    from rampup.show.console import print_budget

    if plan.auto_schedule == "follow":
        text = "--budget needs batches that are known before the run; batch_size_schedule=auto decides them during it"
        raise ConfigError(text, key="budget", path=COMMAND_LINE)
    tokens = parse_count(args.budget, what="budget", key="budget")
    throughput = None
    if args.measured is not None:
        from rampup.show.series import measured_throughput

        throughput = measured_throughput(args.measured)
    if args.tokens_per_second is not None:
        throughput = dict.fromkeys(plan.ramp.sizes, _parse_rate(args.tokens_per_second))
    length = config.max_target_length
    budget = token_budget(plan.ramp, tokens=tokens, tokens_per_sample=length, tokens_per_second=throughput)
    return Result(
        facts={**plan.to_dict(), "budget": budget},
        show=lambda console: print_budget(budget, plan, console, measured=throughput or {}),
    )


def _parse_rate(text: str) -> Fraction:
    """Return a throughput, with a suffix as for a count or with decimals."""
    from rampup.plan.numbers import SUFFIXES, exact_fraction, parse_count

    name = "tokens-per-second"
    suffixed = text.strip()[-1:].upper() in SUFFIXES
    rate = Fraction(parse_count(text, what=name, key=name)) if suffixed else exact_fraction(text, what=name, key=name)
    if rate <= 0:
        raise RampDefinitionError(f"{name}={text} must be above 0", key=name)
    return rate
