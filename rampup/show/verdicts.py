"""A verdict on another system's file as text: complete at any width, and plain if the output is piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rampup.dialects.verdict import Verdict
from rampup.show.console import BATCH, SPLIT, WHEN, make_table, phase_cell
from rampup.show.format import format_count

CHECKS = {"accepts": "its own check accepts the file", "rejects": "its own check rejects the file"}
RUNS = {
    "runs": "the run uses the sizes as written",
    "pads": "the run pads its batches",
    "drops": "the run drops samples",
    "fails": "the run fails",
}
FOUND_BY = {"validator": "found by its own check", "run": "not checked: the run fails"}
PHASE_COLUMNS = WHEN | BATCH | {"data_parallel_size": "replicas"} | SPLIT
# Rows of a table of phases before and after those that are folded.
FIRST_PHASES, LAST_PHASES = 8, 3


def print_verdict(verdict: Verdict, console: Console, *, verbose: bool = False, all_phases: bool = False) -> None:
    """Print a verdict: violations, the meaning of the file and notes.

    Args:
        verdict: the verdict.
        console: where it is printed.
        verbose: also print what each size changes.
        all_phases: print all phases of a ramp; otherwise those in the middle are folded.
    """
    style = "bold green" if verdict.ok else "bold red"
    _print_line(console, f"{verdict.system}: {CHECKS[verdict.validator]}; {RUNS[verdict.run]}", style=style)
    if verdict.summary:
        _print_line(console, verdict.summary)
    if verdict.version:
        _print_line(console, f"rules: {verdict.version}", style="dim")
    if verdict.violations:
        _print_title(console, f"{format_count(len(verdict.violations), 'rule')} broken")
    for number, violation in enumerate(verdict.violations, start=1):
        _print_hanging(console, f"{number}. ", violation.message)
        keys = ", ".join(violation.keys)
        _print_hanging(console, "   ", f"rule {violation.rule}, {FOUND_BY[violation.found_by]}; keys: {keys}", "dim")
    if verdict.meanings:
        console.print()
        _print_table(console, ("setting", "meaning"), [(meaning.says, meaning.means) for meaning in verdict.meanings])
    if verdict.phases is not None:
        _print_title(console, "phases")
        columns = {name: title for name, title in PHASE_COLUMNS.items() if any(name in row for row in verdict.phases)}
        cells = [[phase_cell(row, name) for name in columns] for row in verdict.phases]
        folded = 0 if all_phases else len(cells) - FIRST_PHASES - LAST_PHASES
        if folded > 1:
            cells[FIRST_PHASES:-LAST_PHASES] = [["..."] * len(columns)]
        _print_table(console, list(columns.values()), cells, numbers=True)
        if folded > 1:
            _print_line(console, f"{folded:,} phases are folded; --all shows them", style="dim")
    if verdict.changes and verbose:
        _print_title(console, "what each size changes")
        _print_table(console, ("doubled", "what follows"), [(change.says, change.means) for change in verdict.changes])
    if verdict.notes:
        _print_title(console, "notes")
        for note in verdict.notes:
            _print_hanging(console, "- ", note)
    if not verbose and verdict.changes:
        console.print()
        _print_line(console, "--verbose adds what each size changes", style="dim")


def _print_table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print a table that folds in a terminal; piped, each row is one line of any length."""
    if console.is_terminal:
        table = make_table(console, titles, (map(Text, row) for row in rows), left=0 if numbers else len(titles))
        for column in table.columns:
            column.no_wrap = False
        console.print(table)
        return
    lines = [[title.replace("-\n", "").replace("\n", " ") for title in titles], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        _print_line(console, "  ".join(map(str.rjust if numbers else str.ljust, line, widths)).rstrip())


def _print_hanging(console: Console, head: str, text: str, style: str = "") -> None:
    """Print a head and a text whose further lines are aligned with its first."""
    if console.is_terminal:
        grid = Table.grid(padding=0)
        grid.add_column(width=len(head), no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(head, style=style), Text(text, style="dim" if style == "dim" else ""))
        console.print(grid)
    else:
        _print_line(console, f"{head}{text}")


def _print_title(console: Console, text: str) -> None:
    console.print()
    _print_line(console, text, style="bold")


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
