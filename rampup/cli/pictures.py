"""Pictures and the page to send."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from rich.console import Console

import rampup
from rampup.cli.options import num_devices


def _picture_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", metavar="CONFIG.yml|RUN_DIR", nargs="+", help="a configuration and key=value settings, or folders of runs"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")


def plot_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup plot`."""
    _picture_options(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a .png, .svg or .pdf file")
    parser.add_argument(
        "--kind",
        choices=("batch", "rate", "timetable", "runs"),
        help="the batch and what each phase costs (default for a configuration); the learning rate on both clocks; the last "
        "phase's pipeline; loss, batch and tokens/s of runs (default for runs)",
    )
    parser.add_argument("--width", type=float, metavar="INCHES", help="of the picture; below 7, its parts stand in one column")


def plot(args: argparse.Namespace, console: Console) -> int:
    """Draw a plan or runs into a file."""
    from rampup.cli.inputs import config_of, rates_of, runs_of, sort_names
    from rampup.show import plots

    named = sort_names(args.sources)
    kind = args.kind or ("runs" if named.runs else "batch")
    size = {} if args.width is None else {"width": args.width}
    if kind == "runs":
        plots.draw_runs(runs_of(named), args.output, **size)
    else:
        config = config_of(named, os.environ)
        plan = rampup.build_plan(config, num_devices(args, config))
        if kind == "rate":
            plots.draw_rate(plan, rates_of(config, plan), args.output, **size)
        elif kind == "timetable":
            plots.draw_timetable(plan.timetable(), args.output, **size)
        else:
            plots.draw_batch(plan, args.output, **size)
    return _wrote({"kind": kind, "output": args.output}, args, console)


def report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup report`."""
    _picture_options(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.html", help="the page to write")
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help="the file is another system's; see `rampup check`")


def report(args: argparse.Namespace, console: Console) -> int:
    """Write the page."""
    from rampup.cli.report_inputs import gather_report
    from rampup.show.report import write_report

    report = gather_report(
        args.sources, environ=os.environ, system=args.system, count_devices=lambda config: num_devices(args, config)
    )
    size = write_report(report, args.output)
    return _wrote({"title": report.title, "notes": list(report.notes), "output": args.output, "bytes": size}, args, console)


def _wrote(facts: dict[str, Any], args: argparse.Namespace, console: Console) -> int:
    if args.json:
        print(json.dumps(facts))
    else:
        console.print(f"wrote {facts['output']}", soft_wrap=True)
    return 0
