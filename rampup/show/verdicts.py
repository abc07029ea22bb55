"""A verdict on another system's file, for people: plain where the output is piped, complete at any width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rampup.dialects.verdict import Advice, Verdict, Violation

CHECKS = {"accepts": "its own check accepts the file", "rejects": "its own check rejects the file"}
RUNS = {
    "runs": "the run goes as written",
    "pads": "the run pads its batches",
    "drops": "the run drops samples",
    "fails": "the run fails",
}
PHASE_COLUMNS = {
    "start_step": "from\nstep",
    "start_sample": "from\nsample",
    "num_steps": "steps",
    "global_batch_size": "global\nbatch",
    "data_parallel_size": "replicas",
    "accumulation_steps": "passes",
    "num_pipeline_microbatches": "pipeline\nmicro",
    "microbatch_size": "micro-\nbatch",
}


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print a verdict: what is wrong, what the file means, how a step flows, which advice is true."""
    style = "bold green" if verdict.ok else "bold red"
    _line(console, f"{verdict.system}: {CHECKS[verdict.validator]}; {RUNS[verdict.run]}", style=style)
    _violations(verdict.violations, console)
    if verdict.meanings:
        console.print()
        rows = [(meaning.says, meaning.means) for meaning in verdict.meanings]
        _table(console, ("what the file says", "what it means"), rows)
    if verdict.phases is not None:
        _title(console, "phases")
        _phases(verdict.phases, console)
    if verdict.flow:
        _title(console, "a step")
        _numbered(verdict.flow, console)
    if verdict.advice:
        _title(console, "advice of the guides")
        for advice in verdict.advice:
            _advice(advice, console)
    if verdict.notes:
        _title(console, "notes")
        for note in verdict.notes:
            _hanging(console, "- ", note)


def _violations(violations: Sequence[Violation], console: Console) -> None:
    if not violations:
        return
    _title(console, f"{len(violations)} rule{'s' * (len(violations) > 1)} broken")
    found = {"validator": "found by its own check", "run": "not checked: the run fails"}
    for number, violation in enumerate(violations, start=1):
        _hanging(console, f"{number}. ", violation.message)
        _hanging(
            console, "   ", f"rule {violation.rule}, {found[violation.found_by]}; keys: {', '.join(violation.keys)}", "dim"
        )


def _phases(phases: Iterable[Mapping[str, Any]], console: Console) -> None:
    rows = list(phases)
    names = [name for name in PHASE_COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(row.get(name), rest="rest" if name == "num_steps" else "") for name in names] for row in rows]
    _table(console, [PHASE_COLUMNS[name] for name in names], cells, numbers=True)


def _advice(advice: Advice, console: Console) -> None:
    mark, style = {True: ("true    ", "green"), False: ("not here", "yellow"), None: ("wrong   ", "red")}[advice.holds]
    _hanging(console, f"{mark} ", f"{advice.rule} ({advice.source}): {advice.because}", style)


def _table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print a table: folded to a terminal's width; one line a row, as long as it is, where the output is piped."""
    if not console.is_terminal:
        lines = [[title.replace("-\n", "").replace("\n", " ") for title in titles], *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        for line in lines:
            cells = [cell.rjust(width) if numbers else cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            _line(console, "  ".join(cells).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _numbered(lines: Iterable[str], console: Console) -> None:
    for number, line in enumerate(lines, start=1):
        _hanging(console, f"{number:>2}. ", line)


def _hanging(console: Console, head: str, text: str, style: str = "") -> None:
    """Print text that continues under itself and not under its head."""
    if console.is_terminal:
        grid = Table.grid(padding=0)
        grid.add_column(width=len(head), no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(head, style=style), Text(text, style="dim" if style == "dim" else ""))
        console.print(grid)
    else:
        _line(console, f"{head}{text}")


def _title(console: Console, text: str) -> None:
    console.print()
    _line(console, text, style="bold")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _cell(value: Any, *, rest: str = "") -> str:
    if value is None:
        return rest
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
