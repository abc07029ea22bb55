"""Plans: shown, beside another, with a token budget; a step's rows; a pipeline's timetable."""

from __future__ import annotations

import argparse
import json
import os
from fractions import Fraction

from rich.console import Console

import rampup
from rampup.cli.options import devices_options, num_devices
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan.numbers import exact_fraction


def plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup plan`."""
    devices_options(parser)
    parser.add_argument("--diff", metavar="OTHER.yml", help="show this plan beside another; key=value is for the first alone")
    parser.add_argument("--budget", metavar="TOKENS", help="say what so many tokens mean, for instance 300B")
    parser.add_argument("--tokens-per-second", metavar="X", help="with --budget: a throughput, for the time")
    parser.add_argument("--measured", metavar="RUN_DIR", help="with --budget: the throughput of a run's metrics.jsonl")


def plan(args: argparse.Namespace, console: Console) -> int:
    """Print every phase of a plan, or what else was asked of it."""
    from rampup.rl.config import is_rollout_file
    from rampup.show.tables import print_plan

    rollout = is_rollout_file(args.config)
    _check_plan_options(args, rollout=rollout)
    if rollout:
        return _plan_rollout(args, console)
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, num_devices(args, config))
    if args.diff is not None:
        return _plan_diff(args, console, config, plan)
    if args.budget is not None:
        return _plan_budget(args, console, config, plan)
    if args.json:
        print(json.dumps(plan.to_dict()))
    else:
        print_plan(plan, console)
    return 0


def _check_plan_options(args: argparse.Namespace, *, rollout: bool) -> None:
    """Refuse options of `rampup plan` that do not go together.

    Raises:
        ConfigError: names the option.
    """
    asked = [name for name in ("diff", "budget") if getattr(args, name) is not None]
    if len(asked) > 1:
        raise ConfigError("--diff and --budget are two questions; ask one at a time", key="diff", path=COMMAND_LINE)
    if rollout and asked:
        raise ConfigError(f"--{asked[0]} is for a pre-training plan, not for a rollout", key=asked[0], path=COMMAND_LINE)
    rates = [name for name in ("tokens_per_second", "measured") if getattr(args, name) is not None]
    if rates and args.budget is None:
        name = rates[0].replace("_", "-")
        raise ConfigError(f"--{name} gives the time of a token budget; add --budget", key=name, path=COMMAND_LINE)
    if len(rates) > 1:
        raise ConfigError(
            "--tokens-per-second and --measured both give the throughput; leave one out", key=rates[1], path=COMMAND_LINE
        )


def _plan_rollout(args: argparse.Namespace, console: Console) -> int:
    from rampup.rl.config import build_rollout_plan, load_rollout_config, rollout_notes

    config = load_rollout_config(args.config, args.overrides, environ=os.environ)
    plan = build_rollout_plan(config, num_devices(args, config))
    notes = rollout_notes(config, plan)
    if args.json:
        print(json.dumps({**plan.to_dict(), "notes": notes}))
    else:
        from rampup.show.rollouts import print_rollout

        print_rollout(plan, console, notes=notes)
    return 0


def _plan_diff(args: argparse.Namespace, console: Console, config: rampup.Config, plan: rampup.RampPlan) -> int:
    """Print a plan beside the one of another file."""
    from rampup.rl.config import is_rollout_file

    if is_rollout_file(args.diff):
        raise ConfigError("--diff is for pre-training plans, not for a rollout", key="diff", path=args.diff)
    other = rampup.load_config(args.diff, environ=os.environ)
    other_plan = rampup.build_plan(other, num_devices(args, other))
    changed = config.differences(other)
    if args.json:
        print(json.dumps({"a": plan.to_dict(), "b": other_plan.to_dict(), "changed_keys": changed}))
    else:
        from rampup.show.comparison import print_comparison

        first = " ".join([args.config, *args.overrides])
        print_comparison((plan, other_plan), (first, args.diff), changed, console)
    return 0


def _plan_budget(args: argparse.Namespace, console: Console, config: rampup.Config, plan: rampup.RampPlan) -> int:
    """Print what a budget of tokens means for a plan."""
    from rampup.plan.budget import SECONDS_PER_HOUR, TokenBudget
    from rampup.plan.numbers import parse_count
    from rampup.show.measured import measured_throughput

    tokens = parse_count(args.budget, what="budget", key="budget")
    budget = TokenBudget(ramp=plan.ramp, tokens=tokens, tokens_per_sample=config.max_target_length)
    throughput = None
    if args.measured is not None:
        throughput = measured_throughput(args.measured)
    if args.tokens_per_second is not None:
        throughput = dict.fromkeys(plan.ramp.sizes, _rate(args.tokens_per_second))
    if not args.json:
        from rampup.show.comparison import print_budget

        print_budget(budget, console, configured_steps=plan.total_steps, throughput=throughput)
        return 0
    facts = budget.to_dict()
    if throughput is not None:
        seconds = budget.seconds(throughput)
        facts["hours"] = float(seconds / SECONDS_PER_HOUR)
        facts["tokens_per_second"] = float(budget.consumed_tokens / seconds)
    print(json.dumps({**plan.to_dict(), "budget": facts}))
    return 0


def _rate(text: str) -> Fraction:
    """Return a throughput, with a suffix as for a count or with decimals."""
    from rampup.plan.numbers import SUFFIXES, exact_fraction, parse_count

    name = "tokens-per-second"
    suffixed = text.strip()[-1:].upper() in SUFFIXES
    rate = Fraction(parse_count(text, what=name, key=name)) if suffixed else exact_fraction(text, what=name, key=name)
    if rate <= 0:
        raise RampDefinitionError(f"{name}={text} must be above 0", key=name)
    return rate


def rows_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup rows`."""
    devices_options(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step, counted from 0")


def rows(args: argparse.Namespace, console: Console) -> int:
    """Print which rows a step reads."""
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, num_devices(args, config))
    from rampup.lm.data import rows_of_step

    rows = rows_of_step(config, plan, args.step)
    if args.json:
        print(json.dumps({"step": args.step, "global_batch_size": len(rows), "rows": rows}))
    else:
        for row in rows:
            console.print(f"sample {row['sample']:,}: {row['source']}", highlight=False)
    return 0


def timetable_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup timetable`."""
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="microbatches of one pass")
    parser.add_argument("--repeats", type=int, default=1, metavar="V", help="layer chunks per stage (default 1)")
    parser.add_argument(
        "--schedule", metavar="NAME", help="gpipe, 1f1b (default), interleaved (default with repeats), circular or zb-h1"
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="interleaved in contiguous groups of N, as Megatron-LM does"
    )
    parser.add_argument("--forward-cost", default="1", metavar="T", help="of a whole stage (default 1)")
    parser.add_argument("--backward-cost", default="2", metavar="T", help="of a whole stage (default 2)")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw it into a .png, .svg or .pdf file")


def timetable(args: argparse.Namespace, console: Console) -> int:
    """Print, and draw if asked to, when each pipeline stage works on what."""
    from rampup.plan.timetable import Timetable

    table = Timetable.build(
        args.schedule or ("interleaved" if args.repeats > 1 else "1f1b"),
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_repeats=args.repeats,
        group_size=args.group_size,
        forward_cost=exact_fraction(args.forward_cost, what="forward-cost", key="forward-cost"),
        backward_cost=exact_fraction(args.backward_cost, what="backward-cost", key="backward-cost"),
    )
    if args.output:
        from rampup.show.plots import draw_timetable

        draw_timetable(table, args.output)
    if args.json:
        print(json.dumps(table.to_dict()))
    else:
        from rampup.show.timetables import print_timetable

        print_timetable(table, console)
    return 0
