"""What a benchmark found: rows beside their peers, as a table in text, Markdown or HTML and as JSON."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One benchmark's table.

    Attributes:
        name: as given to `rampup bench`.
        title: what was measured, in a sentence.
        rows: the measurements; every row has the same columns.
        notes: what a reader must know to read them: what was not run, and what limits this machine.
    """

    name: str
    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.rows[0]) if self.rows else ()

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[_cell(row[name]) for name in self.columns] for row in self.rows]

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
        rows = [self.columns, *self.cells]
        body = "".join(
            "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for row, tag in zip(rows, ["th"] + ["td"] * len(self.rows), strict=True)
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<h2>{html.escape(self.name)}: {html.escape(self.title)}</h2><table>{body}</table><ul>{notes}</ul>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
