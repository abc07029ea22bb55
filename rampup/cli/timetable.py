"""`rampup timetable`: a pipeline schedule, printed and drawn."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result, arg
from rampup.plan.numbers import exact_fraction
from rampup.plan.timetable import Timetable
from rampup.show.console import print_timetable

ARGUMENTS = {
    "--stages": arg("P", "pipeline stages", type=int, required=True),
    "--microbatches": arg("M", "microbatches of one pass", type=int, required=True),
    "--repeats": arg("V", "layer chunks per stage (default 1)", type=int, default=1),
    "--schedule": arg("NAME", "gpipe, 1f1b (default), interleaved (default with repeats), circular or zb-h1"),
    "--forward-cost": arg("T", "of a whole stage (default 1)", default="1"),
    "--backward-cost": arg("T", "of a whole stage (default 2)", default="2"),
    "-o --output": arg("FILE", "draw it into a .png, .svg or .pdf file"),
}


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
