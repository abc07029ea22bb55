"""`rampup rows`: the rows that an optimizer step reads."""

from __future__ import annotations

import argparse

from rich.console import Console

import rampup
from rampup.cli.common import Result, add_config_arguments, add_devices_argument, count_devices, environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup rows`."""
    add_config_arguments(parser)
    add_devices_argument(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step, counted from 0")


def run(args: argparse.Namespace, console: Console) -> Result:
    """List the rows of a step."""
    from rampup.lm.train import rows_of_step

    config = rampup.load_config(args.config, args.overrides, environ=environment())
    plan = rampup.build_plan(config, count_devices(args, config))
    rows = rows_of_step(config, plan, args.step)

    def show(console: Console) -> None:
        for row in rows:
            console.print(f"sample {row['sample']:,}: {row['source']}", highlight=False)

    return Result(facts={"step": args.step, "global_batch_size": len(rows), "rows": rows}, show=show)
