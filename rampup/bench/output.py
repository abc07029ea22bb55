"""What a benchmark found, for a terminal and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rampup.bench.result import BenchResult
from rampup.errors import ConfigError

ENDINGS = (".md", ".html")


def print_result(result: BenchResult, console: Console) -> None:
    """Print the table and its notes; as Markdown, at its own width, where there is no terminal."""
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
    """Write the tables of several benchmarks into one Markdown or HTML file, by the file's ending.

    Raises:
        ConfigError: another ending, or the file cannot be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(f"{path} must end in .md or .html", key="output", nearest=ENDINGS)
    if ending == ".md":
        text = "\n".join(result.to_markdown() for result in results)
    else:
        body = "".join(result.to_html() for result in results)
        style = "body{font-family:sans-serif}td,th{padding:2px 8px;text-align:right}table{border-collapse:collapse}"
        head = f'<meta charset="utf-8"><title>rampup bench</title><style>{style}</style>'
        text = f'<!doctype html><html lang="en">{head}{body}</html>'
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", key="output") from None
