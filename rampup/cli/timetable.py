"""`rampup timetable`: a pipeline schedule, printed and drawn."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result
from rampup.plan.numbers import exact_fraction
from rampup.plan.timetable import Timetable
from rampup.show.console import print_timetable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup timetable`."""
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="microbatches of one pass")
    parser.add_argument("--repeats", type=int, default=1, metavar="V", help="layer chunks per stage (default 1)")
    parser.add_argument(
        "--schedule", metavar="NAME", help="gpipe, 1f1b (default), interleaved (default with repeats), circular or zb-h1"
    )
    parser.add_argument("--forward-cost", default="1", metavar="T", help="of a whole stage (default 1)")
    parser.add_argument("--backward-cost", default="2", metavar="T", help="of a whole stage (default 2)")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw it into a .png, .svg or .pdf file")


def run(args: argparse.Namespace, console: object) -> Result:
    """Build a timetable, and draw it if an output is given."""
    table = Timetable.build(
        args.schedule or ("interleaved" if args.repeats > 1 else "1f1b"),
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_repeats=args.repeats,
        forward_cost=exact_fraction(args.forward_cost, what="forward-cost", key="forward-cost"),
        backward_cost=exact_fraction(args.backward_cost, what="backward-cost", key="backward-cost"),
    )
    if args.output:
        from rampup.show.figures import draw_timetable

        draw_timetable(table, args.output)
    return Result(facts=table.to_dict(), show=lambda console: print_timetable(table, console))
