"""`rampup rows`: the rows that an optimizer step reads."""

from __future__ import annotations

import argparse

from rich.console import Console

from rampup.cli.common import CONFIG, DEVICES, Result, arg, read_plan

ARGUMENTS = CONFIG | DEVICES | {"--step": arg("N", "the optimizer step, counted from 0", type=int, required=True)}


def run(args: argparse.Namespace, console: Console) -> Result:
    """List the rows of a step."""
    from rampup.lm.train import rows_of_step

    rows = rows_of_step(*read_plan(args, args.config, args.overrides), args.step)

    def show(console: Console) -> None:
        for row in rows:
            console.print(f"sample {row['sample']:,}: {row['source']}", highlight=False)

    return Result(facts={"step": args.step, "global_batch_size": len(rows), "rows": rows}, show=show)
