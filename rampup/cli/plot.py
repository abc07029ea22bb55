"""`rampup plot`: a picture of a plan or of runs."""

from __future__ import annotations

import argparse

import rampup
from rampup.cli.common import Result, add_devices_argument, count_devices, environment
from rampup.cli.inputs import add_inputs_argument, learning_rates, parse_inputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup plot`."""
    add_inputs_argument(parser)
    add_devices_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a .png, .svg or .pdf file")
    parser.add_argument(
        "--kind",
        choices=("batch", "rate", "timetable", "runs"),
        help="batch: batch size and cost of each phase (default for a configuration); rate: the learning rate on both clocks; "
        "timetable: the pipeline of the last phase; runs: loss, batch and tokens/s of runs (default for runs)",
    )
    parser.add_argument("--width", type=float, metavar="INCHES", help="of the picture; below 7, its panels are in one column")


def run(args: argparse.Namespace, console: object) -> Result:
    """Draw a picture into a file."""
    from rampup.show import figures

    inputs = parse_inputs(args.sources)
    kind = args.kind or ("runs" if inputs.runs else "batch")
    size = {} if args.width is None else {"width": args.width}
    if kind == "runs":
        figures.draw_runs(inputs.read_runs(), args.output, **size)
    else:
        config = inputs.read_config(environment())
        plan = rampup.build_plan(config, count_devices(args, config))
        if kind == "rate":
            figures.draw_rate(plan, learning_rates(config, plan), args.output, **size)
        elif kind == "timetable":
            figures.draw_timetable(plan.timetable(), args.output, **size)
        else:
            figures.draw_batch(plan, args.output, **size)
    return Result(
        facts={"kind": kind, "output": args.output}, show=lambda console: console.print(f"wrote {args.output}", soft_wrap=True)
    )
