"""The commands that look at configurations: two plans side by side, a token budget, fix and explain."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from rich.console import Console

import rampup
from rampup.errors import ConfigError, RampDefinitionError

PLACE = "command line"
Devices = Callable[[rampup.Config], int]


def plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup plan` that look further than one plan."""
    parser.add_argument("--diff", metavar="OTHER.yml", help="show this plan beside another; key=value is for the first alone")
    parser.add_argument("--budget", metavar="TOKENS", help="say what so many tokens mean, for instance 300B")
    parser.add_argument("--tokens-per-second", metavar="X", help="with --budget: a throughput, for the time")
    parser.add_argument("--measured", metavar="RUN_DIR", help="with --budget: the throughput of a run's metrics.jsonl")


def check_plan_options(args: argparse.Namespace, *, rollout: bool) -> None:
    """Refuse options of `rampup plan` that do not go together.

    Raises:
        ConfigError: names the option.
    """
    asked = [name for name in ("diff", "budget") if getattr(args, name) is not None]
    if len(asked) > 1:
        raise ConfigError("--diff and --budget are two questions; ask one at a time", key="diff", path=PLACE)
    if rollout and asked:
        raise ConfigError(f"--{asked[0]} is for a pre-training plan, not for a rollout", key=asked[0], path=PLACE)
    rates = [name for name in ("tokens_per_second", "measured") if getattr(args, name) is not None]
    if rates and args.budget is None:
        name = rates[0].replace("_", "-")
        raise ConfigError(f"--{name} gives the time of a token budget; add --budget", key=name, path=PLACE)
    if len(rates) > 1:
        raise ConfigError(
            "--tokens-per-second and --measured both give the throughput; leave one out", key=rates[1], path=PLACE
        )


def plan_diff(
    args: argparse.Namespace, console: Console, config: rampup.Config, plan: rampup.RampPlan, devices: Devices
) -> int:
    """Print a plan beside the one of another file."""
    from rampup.config.rollout import is_rollout_file

    if is_rollout_file(args.diff):
        raise ConfigError("--diff is for pre-training plans, not for a rollout", key="diff", path=args.diff)
    other = rampup.load_config(args.diff, environ=os.environ)
    other_plan = rampup.build_plan(other, devices(other))
    changed = config.differences(other)
    if args.json:
        print(json.dumps({"a": plan.to_dict(), "b": other_plan.to_dict(), "changed_keys": changed}))
    else:
        from rampup.show.comparison import print_comparison

        first = " ".join([args.config, *args.overrides])
        print_comparison((plan, other_plan), (first, args.diff), changed, console)
    return 0


def plan_budget(args: argparse.Namespace, console: Console, config: rampup.Config, plan: rampup.RampPlan) -> int:
    """Print what a budget of tokens means for a plan."""
    from rampup.config.measured import measured_throughput
    from rampup.plan.budget import SECONDS_PER_HOUR, TokenBudget
    from rampup.plan.units import parse_count

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
    from rampup.plan.units import SUFFIXES, exact_fraction, parse_count

    name = "tokens-per-second"
    suffixed = text.strip()[-1:].upper() in SUFFIXES
    rate = Fraction(parse_count(text, what=name, key=name)) if suffixed else exact_fraction(text, what=name, key=name)
    if rate <= 0:
        raise RampDefinitionError(f"{name}={text} must be above 0", key=name)
    return rate


def fix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup fix`."""
    parser.add_argument("--write", action="store_true", help="write the file instead of only printing the patch")


def fix(args: argparse.Namespace, console: Console, devices: Devices) -> int:
    """Print the nearest legal configuration as a patch, and write it if asked to."""
    from rampup.config.fix import find_fix, write_fix

    if _is_rollout(args.config):
        raise ConfigError(
            "fix is for a pre-training configuration; `rampup plan` says what is wrong with a rollout", path=args.config
        )
    found = find_fix(
        args.config, args.overrides, environ=os.environ, check=lambda config: rampup.build_plan(config, devices(config))
    )
    write = args.write and found.text != found.before
    if write and not Path(args.config).is_file():
        raise ConfigError("this file comes with rampup; copy it, and fix the copy", path=str(found.file))
    if write:
        write_fix(found)
    if args.json:
        changes = [change.to_dict() for change in found.changes]
        print(
            json.dumps(
                {"legal": not changes, "problems": found.problems, "changes": changes, "patch": found.patch, "written": write}
            )
        )
        return 0
    from rampup.show.explanation import print_fix

    print_fix(found, console)
    if write:
        print(f"wrote {found.file}", file=sys.stderr)
    return 0


def _is_rollout(path: str) -> bool:
    """Say whether a file is a rollout's; one that cannot be read yet, because its base is misspelt, is not."""
    from rampup.config.rollout import is_rollout_file

    try:
        return is_rollout_file(path)
    except ConfigError:
        return False


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup explain`."""
    parser.add_argument("key", metavar="KEY", help="a key of base.yml or rl.yml")


def explain(args: argparse.Namespace, console: Console) -> int:
    """Print what a key means."""
    from rampup.config.explain import explain as explained

    explanation = explained(args.key)
    if args.json:
        print(json.dumps(explanation.to_dict()))
    else:
        from rampup.show.explanation import print_explanation

        print_explanation(explanation, console)
    return 0
