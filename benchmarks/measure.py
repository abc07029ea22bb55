"""The harness of the benchmarks: interleaved timing, progress, and the table of a
result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import jax
from rich import box
from rich.console import Console
from rich.table import Table

ROUNDS = 7
TIMEOUT_SECONDS = 600
# Called with a measurement, the number of measurements so far, and their total.
OnRow = Callable[[Mapping[str, Any], int, int], None]


def run_file(
    path: str, *arguments: Sequence[str], env: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Start a file as a program for each list of arguments, all at once, and return the
    JSON that the first prints last.
    """
    started = [
        subprocess.Popen(
            [sys.executable, path, *each],
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
            raise RuntimeError(
                f"process {number} of {len(started)} failed:\n{errors[-2000:]}"
            )
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
    """Yield every name once a round, in an order that rotates, so that all meet the
    same disturbances.

    Example:
        >>> list(in_turns("ab", 2))
        ['a', 'b', 'b', 'a']
    """
    for number in range(rounds):
        yield from (names[(place + number) % len(names)] for place in range(len(names)))


def take_turns(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = ROUNDS,
    warm_up: int = 1,
) -> dict[str, Seconds]:
    """Time every candidate, a function that waits for its own results, once a round,
    after `warm_up` rounds without a clock.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for name in in_turns(list(candidates), warm_up + rounds):
        start = time.perf_counter()
        candidates[name]()
        times[name].append(time.perf_counter() - start)
    return {
        name: Seconds(all=tuple(seconds[warm_up:])) for name, seconds in times.items()
    }


def ignore_row(row: Mapping[str, Any], done: int, total: int) -> None:
    """Report nothing."""


class Measurements:
    """The measurements of a benchmark, `total` in the end. Each is passed to `on_row`
    as soon as it is added.
    """

    def __init__(self, total: int, on_row: OnRow) -> None:
        self.rows: list[dict[str, Any]] = []
        self._total, self._on_row = total, on_row

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add measurements."""
        for row in rows:
            self.rows.append(row)
            self._on_row(row, len(self.rows), self._total)


class RowPrinter:
    """Prints each measurement of a benchmark, and the estimated time until the last
    one.
    """

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console, self._start = name, console, time.monotonic()

    def __call__(self, row: Mapping[str, Any], done: int, total: int) -> None:
        """Print a measurement."""
        left = (time.monotonic() - self._start) * (total - done) / done
        cells = ", ".join(
            f"{key}={format_cell(value)}"
            for key, value in row.items()
            if value is not None
        )
        self._console.print(
            f"{self._name} {done}/{total}, about {left:,.0f} s left: {cells}",
            style="dim",
            soft_wrap=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The table of one benchmark."""

    name: str  # the name on the command line
    title: str  # what was measured, in one sentence
    rows: Sequence[
        Mapping[str, Any]
    ]  # the measurements; every row has the same columns
    notes: Sequence[
        str
    ] = ()  # how it was measured, what was not run, and the limits of this machine

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
        return {
            "name": self.name,
            "title": self.title,
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """Return the table in Markdown, with its title and notes."""
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|" + " --- |" * len(self.columns),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.cells]
        return "\n".join(
            [
                f"## {self.name}: {self.title}",
                "",
                *lines,
                "",
                *(f"- {note}" for note in self.notes),
                "",
            ]
        )


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

    def __call__(
        self, *, quick: bool = False, on_row: OnRow = ignore_row
    ) -> BenchResult:
        """Measure."""


def print_result(result: BenchResult, console: Console) -> None:
    """Print the table and its notes; without a terminal, as Markdown."""
    if not console.is_terminal:
        console.print(result.to_markdown(), markup=False, soft_wrap=True)
        return
    table = Table(
        title=f"{result.name}: {result.title}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for place, name in enumerate(result.columns):
        table.add_column(
            name, justify="left" if place == 0 else "right", overflow="fold"
        )
    for row in result.cells:
        table.add_row(*row)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}")
    console.print()


def main(**subjects: Bench) -> None:
    """Run the benchmarks of a file: those named on the command line, or all."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help=f"what to measure (default all): {', '.join(subjects)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and few rounds, as a smoke test",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        metavar="N",
        help="simulate N CPU devices (default 8)",
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - subjects.keys()):
        parser.error(
            f"unknown benchmark {unknown[0]!r}; choose from {', '.join(subjects)}"
        )
    jax.config.update(
        "jax_num_cpu_devices", args.devices
    )  # other backends are not affected
    progress = Console(stderr=True, highlight=False, markup=False)
    for name in args.names or subjects:
        print_result(
            subjects[name](quick=args.quick, on_row=RowPrinter(name, progress)),
            Console(highlight=False, markup=False),
        )
