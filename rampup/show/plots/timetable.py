"""A pipeline's timetable as a picture: a row a stage, a bar an operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rampup.errors import ConfigError
from rampup.plan.timetable import Timetable
from rampup.show.format import KIND_NAMES
from rampup.show.plots.figure import MIN_WIDTH, finish, matplotlib_part, new_figure
from rampup.show.timetables import label

# Light and dark enough to tell apart in black and white, and hatched besides.
LOOKS = {"F": ("#cfe8cf", ""), "B": ("#5b7fb5", ""), "I": ("#5b7fb5", ""), "W": ("#a9c4e4", "///")}
MAX_OPERATIONS = 5_000
# Inches that a unit of time and its text want.
UNIT_INCHES, MARGIN_INCHES, MOST_INCHES = 0.28, 1.2, 24.0
LETTER_INCHES = 0.075


def draw_timetable(table: Timetable, path: str | Path | None = None, *, width: float | None = None) -> Any:
    """Draw a timetable.

    Args:
        table: the timetable.
        path: a file whose ending gives its format (.png, .svg, .pdf); None only returns the figure.
        width: of the picture, in inches; None = what its texts need.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written, or the timetable is too large to be read.
    """
    if len(table.operations) > MAX_OPERATIONS:
        raise ConfigError(
            f"{len(table.operations):,} operations are too many to draw; the most is {MAX_OPERATIONS:,}", key="microbatches"
        )
    span, stages = float(table.makespan), table.num_stages
    if width is None:
        width = max(min(MARGIN_INCHES + UNIT_INCHES * span, MOST_INCHES), MIN_WIDTH + 2)
    figure = new_figure(width, 1.6 + 0.45 * stages)
    axes = figure.subplots()
    per_unit = (width - MARGIN_INCHES) / span
    for operation in table.operations:
        colour, hatch = LOOKS[operation.kind]
        start, length = float(operation.start), float(operation.end - operation.start)
        axes.barh(operation.stage, length, left=start, height=0.9, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5)
        text = label(operation, table.num_repeats)[1:]
        if length * per_unit >= LETTER_INCHES * len(text):
            ink = "white" if operation.kind in ("B", "I") else "black"
            behind = {"facecolor": colour, "edgecolor": "none", "pad": 0.8} if hatch else None
            axes.text(start + length / 2, operation.stage, text, ha="center", va="center", fontsize=7, color=ink, bbox=behind)
    axes.set(xlim=(0, span), ylim=(stages - 0.5, -0.5), xlabel="time, in the units of the costs", ylabel="stage")
    axes.set_yticks(range(stages))
    kinds = sorted({operation.kind for operation in table.operations}, key="FBIW".index)
    rectangle = matplotlib_part("patches").Rectangle
    handles = [rectangle((0, 0), 1, 1, facecolor=LOOKS[kind][0], hatch=LOOKS[kind][1], edgecolor="black") for kind in kinds]
    figure.legend(handles, [KIND_NAMES[kind] for kind in kinds], loc="outside lower left", ncols=len(kinds), frameon=False)
    axes.set_title(
        f"{table.schedule}, p={stages}, m={table.num_microbatches}"
        + (f", v={table.num_repeats}" if table.num_repeats > 1 else "")
        + f": {float(table.bubble_fraction):.1%} idle",
        loc="left",
        fontsize=10,
    )
    return finish(figure, path)
