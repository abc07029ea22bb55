"""How a timetable shows itself in a notebook: a row a stage, a colour a kind of operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rampup.show.display import Block, html_timeline

if TYPE_CHECKING:
    from rampup.plan.timetable import Timetable

MAX_SHOWN = 5_000
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_STYLES = {
    "F": "background:#cfe8cf;color:#000",
    "B": "background:#33578f;color:#fff",
    "I": "background:#33578f;color:#fff",
    "W": "background:#a9c4e4;color:#000",
}


def html_timetable(table: Timetable) -> str:
    """Return the timetable as an HTML table whose cells say when pointed at; a line of text where it is too large.

    Example:
        >>> from rampup.plan.timetable import Timetable
        >>> html_timetable(Timetable.build("1f1b", num_stages=2, num_microbatches=3)).count("backward, from")
        6
    """
    facts = f"{table.schedule}: makespan {float(table.makespan):g}, bubble {float(table.bubble_fraction):.1%}"
    if len(table.operations) > MAX_SHOWN:
        return f"<p>{facts}; {len(table.operations):,} operations are too many to show</p>"
    rows = {f"stage {stage}": _blocks(table, stage) for stage in range(table.num_stages)}
    return html_timeline(rows, num_columns=table.num_ticks, caption=facts)


def _blocks(table: Timetable, stage: int) -> list[Block]:
    return [
        Block(
            start=int(operation.start / table.tick),
            length=int((operation.end - operation.start) / table.tick),
            text=operation.label,
            hint=f"{KIND_NAMES[operation.kind]}, from {float(operation.start):g} to {float(operation.end):g}",
            style=_STYLES[operation.kind],
        )
        for operation in table.of_stage(stage)
    ]
