"""How values and tables are written for people; with the tables, objects show themselves in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_ROWS = 200
_CELL = "text-align:right;padding:2px 8px"
_TEXT = "text-align:left;padding:2px 8px"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a timeline.

    Attributes:
        start, length: in columns.
        text: what stands in it.
        hint: what is said of it when pointed at.
        style: its colours, as CSS.
    """

    start: int
    length: int
    text: str
    hint: str
    style: str


def shown(value: object) -> str:
    """Write a value for people: whole numbers with commas, others to four digits.

    Example:
        >>> shown(1234567), shown(0.123456), shown(11060.4), shown(True), shown("x")
        ('1,234,567', '0.1235', '11,060', 'True', 'x')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def html_facts(facts: Mapping[str, object]) -> str:
    """Return names and values as an HTML table, one a row.

    Example:
        >>> "1,000" in html_facts({"steps": 1000})
        True
    """
    rows = "".join(
        f'<tr><th style="{_TEXT}">{html.escape(name)}</th>{_cell(value, _TEXT)}</tr>' for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def html_rows(rows: Sequence[Mapping[str, object]], *, caption: str = "") -> str:
    """Return an HTML table with a column for each key of the first row; None is an empty cell.

    Args:
        rows: the rows, all with the same keys; of more than 200, the first and the last 100 are shown.
        caption: a line above the table.

    Example:
        >>> html_rows([{"a": 1, "b": None}]).count("<td")
        2
    """
    if not rows:
        return ""
    hidden = max(len(rows) - MAX_ROWS, 0)
    head = "".join(f'<th style="{_style(rows[0][name])}">{html.escape(name)}</th>' for name in rows[0])
    styles = [_style(value) for value in rows[0].values()]

    def line(row: Mapping[str, object]) -> str:
        return f"<tr>{''.join(map(_cell, row.values(), styles))}</tr>"

    lines = [line(row) for row in rows[: MAX_ROWS // 2 if hidden else None]]
    if hidden:
        lines.append(f'<tr><td colspan="{len(rows[0])}" style="{_TEXT}">{hidden:,} more rows</td></tr>')
        lines += [line(row) for row in rows[-(MAX_ROWS // 2) :]]
    title = f'<caption style="{_TEXT}">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def html_list(lines: Iterable[str]) -> str:
    """Return lines of text as an HTML list; nothing where there are none.

    Example:
        >>> html_list(["a < b"])
        '<ul><li>a &lt; b</li></ul>'
    """
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def html_timeline(rows: Mapping[str, Sequence[Block]], *, num_columns: int, caption: str) -> str:
    """Return a timeline as an HTML table: blocks in order, and nothing between them.

    Example:
        >>> block = Block(start=2, length=3, text="F0", hint="forward", style="color:#000")
        >>> html_timeline({"stage 0": [block]}, num_columns=6, caption="").count("<td")
        3
    """
    lines = []
    for name, blocks in rows.items():
        cells, column = [f'<th style="{_TEXT};white-space:nowrap">{html.escape(name)}</th>'], 0
        for block in blocks:
            cells += [_span(block.start - column), _span(block.length, block)]
            column = block.start + block.length
        lines.append(f"<tr>{''.join(cells)}{_span(num_columns - column)}</tr>")
    title = f'<caption style="{_TEXT}">{html.escape(caption)}</caption>'
    return f'<table style="border-collapse:collapse">{title}{"".join(lines)}</table>'


def _span(columns: int, block: Block | None = None) -> str:
    """Return the cell of a block, or of nothing, over so many columns."""
    if columns == 0:
        return ""
    if block is None:
        return f'<td colspan="{columns}"></td>'
    style = f"text-align:center;padding:2px 3px;border:1px solid #fff;{block.style}"
    return f'<td colspan="{columns}" title="{html.escape(block.hint)}" style="{style}">{html.escape(block.text)}</td>'


def _style(value: object) -> str:
    """Text stands on the left, numbers on the right."""
    return _TEXT if isinstance(value, str) else _CELL


def _cell(value: object, style: str) -> str:
    return f'<td style="{style}">{"" if value is None else html.escape(shown(value))}</td>'
