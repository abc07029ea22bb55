"""`rampup check`: explains, checks and converts another system's configuration. Piped,
a row is a line of any length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from rampup.cli.common import EXIT_REFUSED, Result, arg, usage_error
from rampup.cli.draw import CliInputs
from rampup.plan.describe import advice
from rampup.plan.plan import RampPlan
from rampup.show.console import BATCH, SPLIT, WHEN, make_table, phase_cell
from rampup.show.format import format_count
from rampup.show.report import Report

if TYPE_CHECKING:
    from rampup.contrib.check.verdict import Verdict

# System -> the setting that is the number of devices of its run.
DEVICES = {
    "maxtext": "num_devices",
    "maxtext_rl": "num_devices",
    "megatron": "world_size",
    "tunix": "num_devices",
}
CHECK = {
    "file": arg(
        "FILE",
        "another system's configuration or launch script, or `-- COMMAND ...` at"
        " the end",
        nargs="?",
    ),
    "overrides": arg(
        "key=value",
        "settings in that system's keys that take precedence over the file, and"
        " variables that a script does not set",
        nargs="*",
    ),
    "--from": arg(
        "SYSTEM",
        "maxtext, maxtext_rl, megatron, skyrl, verl, trlx or tunix; without it, rampup"
        " finds it",
        dest="system",
    ),
    "--devices": arg(
        "N", "check for N devices (maxtext, maxtext_rl, megatron and tunix)", type=int
    ),
    "--verbose": arg(None, "also print what each size changes"),
    "--all": arg(None, "print all phases of a ramp"),
    "--to": arg(None, "also convert what can be expressed", choices=("rampup",)),
    "-o --output": arg("FILE", "the converted file"),
}
OUTCOMES = {
    "accepts": "its own check accepts the file",
    "rejects": "its own check rejects the file",
}
OUTCOMES |= {
    "runs": "the run uses the sizes as written",
    "pads": "the run pads its batches",
}
OUTCOMES |= {"drops": "the run drops samples", "fails": "the run fails"}
FOUND_BY = {"validator": "found by its own check", "run": "not checked: the run fails"}
PHASE_COLUMNS = WHEN | BATCH | {"data_parallel_size": "replicas"} | SPLIT
FIRST_PHASES, LAST_PHASES = (
    8,
    3,
)  # rows of a table of phases before and after those that are folded


def check(args: argparse.Namespace) -> Result:
    """Check a file, and convert it if an output is given."""
    from rampup.contrib.check import (
        check_command,
        check_file,
        find_system,
        write_conversion,
    )

    if (args.to is None) != (args.output is None):
        raise usage_error("--to and -o FILE belong together", key="to")
    settings = list(args.overrides)
    if args.command:
        settings = [
            setting for setting in (args.file, *settings) if setting is not None
        ]
    elif args.file is None:
        raise usage_error("give a file, or a command after `--`")
    system = args.system or find_system(tuple(args.command) or args.file, settings)
    if args.devices is not None:
        if system not in DEVICES:
            rule = (
                f"--devices is for {', '.join(DEVICES)}; for {system}, set its own keys"
                " of devices as key=value"
            )
            raise usage_error(rule, key="devices")
        settings.append(f"{DEVICES[system]}={args.devices}")
    verdict = (
        check_command(args.command, system, settings)
        if args.command
        else check_file(args.file, system, settings)
    )
    if verdict.ok and args.output is not None:
        write_conversion(verdict, args.output, source=args.file or "")
        print(f"wrote {args.output}", file=sys.stderr)
    return Result(
        facts=verdict.to_dict(),
        show=lambda console: print_verdict(
            verdict, console, verbose=args.verbose, all_phases=args.all
        ),
        exit_code=0 if verdict.ok else EXIT_REFUSED,
    )


def gather_report(args: argparse.Namespace, inputs: CliInputs) -> Report:
    """Return the content of a report of another system's file."""
    from rampup.contrib.check import check_file
    from rampup.contrib.check.page import verdict_html
    from rampup.contrib.rl.commands import sentence_of, step_tables
    from rampup.contrib.rl.plan import RolloutPlan

    assert inputs.config is not None
    verdict = check_file(inputs.config, args.system, inputs.overrides)
    plan = verdict.plan
    ramp = plan if isinstance(plan, RampPlan) else None
    sentences: tuple[str, ...] = ()
    others = {"Verdict": {"verdict": verdict_html(verdict)}}
    if isinstance(plan, RolloutPlan):
        sentences = (sentence_of(plan),)
        others["Step"] = step_tables(plan)
    return Report(
        title=Path(inputs.config).name,
        sentences=sentences,
        plan=ramp,
        notes=() if ramp is None else advice(ramp),
        others=others,
    )


def print_verdict(
    verdict: Verdict,
    console: Console,
    *,
    verbose: bool = False,
    all_phases: bool = False,
) -> None:
    """Print violations, the meaning of the file and notes, and on request what each
    size changes and every phase.
    """
    style = "bold green" if verdict.ok else "bold red"
    console.print(
        f"{verdict.system}: {OUTCOMES[verdict.validator]}; {OUTCOMES[verdict.run]}",
        style=style,
    )
    if verdict.summary:
        console.print(verdict.summary)
    if verdict.version:
        console.print(f"rules: {verdict.version}", style="dim")
    if verdict.violations:
        console.print(
            f"\n{format_count(len(verdict.violations), 'rule')} broken", style="bold"
        )
    for number, violation in enumerate(verdict.violations, start=1):
        _print_hanging(console, f"{number}. ", violation.message)
        keys = ", ".join(violation.keys)
        _print_hanging(
            console,
            "   ",
            f"rule {violation.rule}, {FOUND_BY[violation.found_by]}; keys: {keys}",
            style="dim",
        )
    if verdict.meanings:
        console.print()
        _print_table(
            console,
            ("setting", "meaning"),
            [(meaning.says, meaning.means) for meaning in verdict.meanings],
        )
    if verdict.phases is not None:
        console.print("\nphases", style="bold")
        columns = {
            name: title
            for name, title in PHASE_COLUMNS.items()
            if any(name in row for row in verdict.phases)
        }
        cells = [[phase_cell(row, name) for name in columns] for row in verdict.phases]
        folded = 0 if all_phases else len(cells) - FIRST_PHASES - LAST_PHASES
        if folded > 1:
            cells[FIRST_PHASES:-LAST_PHASES] = [["..."] * len(columns)]
        _print_table(console, list(columns.values()), cells, numbers=True)
        if folded > 1:
            console.print(
                f"{folded:,} phases are folded; --all shows them", style="dim"
            )
    if verdict.changes and verbose:
        console.print("\nwhat each size changes", style="bold")
        _print_table(
            console,
            ("doubled", "what follows"),
            [(change.says, change.means) for change in verdict.changes],
        )
    if verdict.notes:
        console.print("\nnotes", style="bold")
        for note in verdict.notes:
            _print_hanging(console, "- ", note)
    if verdict.changes and not verbose:
        console.print("\n--verbose adds what each size changes", style="dim")


def _print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: bool = False,
) -> None:
    if console.is_terminal:
        table = make_table(console, titles, rows, left=0 if numbers else len(titles))
        for column in table.columns:
            column.no_wrap = False
        console.print(table)
        return
    lines = [[title.replace("-\n", "").replace("\n", " ") for title in titles], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        console.print(
            "  ".join(map(str.rjust if numbers else str.ljust, line, widths)).rstrip()
        )


def _print_hanging(console: Console, head: str, text: str, style: str = "") -> None:
    """Print a head and a text whose further lines are aligned with its first."""
    if not console.is_terminal:
        console.print(head + text)
        return
    grid = Table.grid(padding=0)
    grid.add_column(width=len(head), no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, text, style=style)
    console.print(grid)
