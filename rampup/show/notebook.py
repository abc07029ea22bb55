"""HTML for notebooks and reports: the one writer of tables, and the HTML form of each
class.

`rampup.__init__` registers the classes of `to_html` with IPython, by name; neither it
nor the classes import this module.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rampup.plan.describe import describe, format_count
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.show.format import format_value

MAX_ROWS = 200

_NUMBER = "text-align:right;padding:2px 8px"
_TEXT = "text-align:left;padding:2px 8px"


def html_table(
    rows: Sequence[Mapping[str, object]],
    *,
    caption: str = "",
    max_rows: int = MAX_ROWS,
    row_classes: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return an HTML table of rows with the same keys. Of more than `max_rows`, the
    middle ones are left out and counted.
    """
    if not rows:
        return ""
    styles = {
        name: _TEXT if isinstance(value, str) else _NUMBER
        for name, value in rows[0].items()
    }
    head = "".join(
        f'<th scope="col" style="{style}">{html.escape(name)}</th>'
        for name, style in styles.items()
    )
    hidden = max(len(rows) - max_rows, 0)
    lines = []
    for number, row in enumerate(rows):
        if hidden and number == max_rows // 2:
            lines.append(
                f'<tr><td colspan="{len(row)}" style="{_TEXT}">'
                f"{format_count(hidden, 'more row')}</td></tr>"
            )
        if hidden and max_rows // 2 <= number < len(rows) - max_rows // 2:
            continue
        cells = "".join(
            _cell(value, style)
            for value, style in zip(row.values(), styles.values(), strict=True)
        )
        lines.append(
            f'<tr class="{row_classes[number]}">{cells}</tr>'
            if number in row_classes
            else f"<tr>{cells}</tr>"
        )
    title = caption and f'<caption style="{_TEXT}">{html.escape(caption)}</caption>'
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def html_list(lines: Iterable[str]) -> str:
    """Return lines of text as an HTML list, or nothing if there are none."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _cell(value: object, style: str) -> str:
    return f'<td style="{style}">{"" if value is None else html.escape(format_value(value))}</td>'


@functools.singledispatch
def to_html(value: object) -> str:
    """Return the HTML form of an object; a `TypeError` if its class has none."""
    raise TypeError(f"{type(value).__name__} has no HTML form")


@to_html.register
def _(ramp: BatchRamp) -> str:
    names = ("start_step", "start_sample", "num_steps", "global_batch_size")
    return html_table(
        [
            {"phase": phase.index, **{name: getattr(phase, name) for name in names}}
            for phase in ramp.phases
        ]
    )


@to_html.register
def _(plan: RampPlan) -> str:
    shown = describe(plan)
    notes = [f"note: {note}" for note in shown.notes]
    table = html_table(shown.table(), caption="; ".join(shown.summary))
    return table + html_list([*shown.remarks, *notes])
