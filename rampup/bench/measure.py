"""The harness of the benchmarks: interleaved timing, progress, and the table of a result."""

from __future__ import annotations

import html
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.table import Table

from rampup.errors import ConfigError
from rampup.show.notebook import html_table

ROUNDS = 7
TIMEOUT_SECONDS = 600
ENDINGS = (".md", ".html")
# Called with a measurement, the number of measurements so far, and their total.
OnRow = Callable[[Mapping[str, Any], int, int], None]


def run_module(module: str, *arguments: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Start a module as a program for each list of arguments, all at once, and return the JSON that the first prints last."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *each],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for number, (process, (_, errors)) in enumerate(zip(started, outputs, strict=True)):
        if process.returncode:
            raise RuntimeError(f"process {number} of {len(started)} failed:\n{errors[-2000:]}")
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The times of one candidate."""

    all: tuple[float, ...]  # seconds of every round, in order

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.all)

    @property
    def spread(self) -> float:
        """The interquartile range over the median."""
        if len(self.all) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.all, n=4, method="inclusive")
        return (high - low) / self.median


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield every name once a round, in an order that rotates, so that all meet the same disturbances.

    Example:
        >>> list(in_turns("ab", 2))
        ['a', 'b', 'b', 'a']
    """
    for number in range(rounds):
        yield from (names[(place + number) % len(names)] for place in range(len(names)))


def take_turns(candidates: Mapping[str, Callable[[], Any]], *, rounds: int = ROUNDS, warm_up: int = 1) -> dict[str, Seconds]:
    """Time every candidate, a function that waits for its own results, once a round, after `warm_up` rounds without a clock."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for name in in_turns(list(candidates), warm_up + rounds):
        start = time.perf_counter()
        candidates[name]()
        times[name].append(time.perf_counter() - start)
    return {name: Seconds(all=tuple(seconds[warm_up:])) for name, seconds in times.items()}


def ignore_row(row: Mapping[str, Any], done: int, total: int) -> None:
    """Report nothing."""


class Measurements:
    """The measurements of a benchmark, `total` in the end. Each is passed to `on_row` as soon as it is added."""

    def __init__(self, total: int, on_row: OnRow) -> None:
        self.rows: list[dict[str, Any]] = []
        self._total, self._on_row = total, on_row

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add measurements."""
        for row in rows:
            self.rows.append(row)
            self._on_row(row, len(self.rows), self._total)


class RowPrinter:
    """Prints each measurement of a benchmark, and the estimated time until the last one."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console, self._start = name, console, time.monotonic()

    def __call__(self, row: Mapping[str, Any], done: int, total: int) -> None:
        """Print a measurement."""
        left = (time.monotonic() - self._start) * (total - done) / done
        cells = ", ".join(f"{key}={format_cell(value)}" for key, value in row.items() if value is not None)
        self._console.print(f"{self._name} {done}/{total}, about {left:,.0f} s left: {cells}", style="dim", soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The table of one benchmark."""

    name: str  # the name on the command line
    title: str  # what was measured, in one sentence
    rows: Sequence[Mapping[str, Any]]  # the measurements; every row has the same columns
    notes: Sequence[str] = ()  # how it was measured, what was not run, and the limits of this machine

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.rows[0]) if self.rows else ()

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[format_cell(row[name]) for name in self.columns] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {"name": self.name, "title": self.title, "rows": [dict(row) for row in self.rows], "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """Return the table in Markdown, with its title and notes."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join([f"## {self.name}: {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes), ""])

    def to_html(self) -> str:
        """Return the table in HTML, with its title and notes."""
        table = html_table([dict(zip(self.columns, row, strict=True)) for row in self.cells], max_rows=len(self.rows))
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<h2>{html.escape(self.name)}: {html.escape(self.title)}</h2>{table}<ul>{notes}</ul>"


def format_cell(value: Any) -> str:
    """Return a cell of the table as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Bench(Protocol):
    """The function of a benchmark."""

    def __call__(self, *, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
        """Measure."""


def print_result(result: BenchResult, console: Console) -> None:
    """Print the table and its notes; without a terminal, as Markdown."""
    if not console.is_terminal:
        console.print(result.to_markdown(), markup=False, soft_wrap=True)
        return
    table = Table(title=f"{result.name}: {result.title}", title_justify="left", box=box.SIMPLE_HEAD)
    for place, name in enumerate(result.columns):
        table.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
    for row in result.cells:
        table.add_row(*row)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}")
    console.print()


def write_results(results: Sequence[BenchResult], path: str | Path) -> None:
    """Write the tables of several benchmarks into one Markdown or HTML file, by the file's ending."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(f"{path} must end in .md or .html", key="output", nearest=ENDINGS)
    if ending == ".md":
        text = "\n".join(result.to_markdown() for result in results)
    else:
        style = "<style>body{font-family:sans-serif}table{border-collapse:collapse}</style>"
        body = "".join(result.to_html() for result in results)
        text = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>rampup bench</title>{style}{body}</html>'
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", key="output") from None
