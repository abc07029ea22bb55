"""Pictures with matplotlib, which is imported when one is drawn: pip install 'rampup[plot]'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.timetable import Timetable
from rampup.show.timetables import label

# Light and dark enough to tell apart in black and white, and hatched besides.
LOOKS = {"F": ("#cfe8cf", ""), "B": ("#5b7fb5", ""), "I": ("#5b7fb5", ""), "W": ("#a9c4e4", "///")}
MAX_OPERATIONS = 5_000
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw_timetable(table: Timetable, path: str | Path) -> None:
    """Draw a timetable, one row a stage, into a file whose ending gives its format (.png, .svg, .pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written, or the timetable is too large to be read.
    """
    if len(table.operations) > MAX_OPERATIONS:
        raise ConfigError(
            f"{len(table.operations):,} operations are too many to draw; the most is {MAX_OPERATIONS:,}", key="microbatches"
        )
    pyplot = _pyplot()
    span, stages = float(table.makespan), table.num_stages
    figure, axes = pyplot.subplots(figsize=(min(4 + span * 0.28, 24), 1.6 + 0.45 * stages), layout="constrained")
    for operation in table.operations:
        colour, hatch = LOOKS[operation.kind]
        start, length = float(operation.start), float(operation.end - operation.start)
        axes.barh(operation.stage, length, left=start, height=0.9, color=colour, hatch=hatch, edgecolor="black", linewidth=0.5)
        text = label(operation, table.num_repeats)[1:]
        dark = operation.kind in ("B", "I")
        axes.text(
            start + length / 2, operation.stage, text, ha="center", va="center", fontsize=7, color="white" if dark else "black"
        )
    axes.set(xlim=(0, span), ylim=(stages - 0.5, -0.5), xlabel="time, in the units of the costs", ylabel="stage")
    axes.set_yticks(range(stages))
    kinds = sorted({operation.kind for operation in table.operations}, key="FBIW".index)
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, facecolor=LOOKS[kind][0], hatch=LOOKS[kind][1], edgecolor="black") for kind in kinds
    ]
    axes.legend(
        handles, [NAMES[kind] for kind in kinds], loc="lower left", bbox_to_anchor=(0, 1), ncols=len(kinds), frameon=False
    )
    axes.set_title(
        f"{table.schedule}, p={stages}, m={table.num_microbatches}"
        + (f", v={table.num_repeats}" if table.num_repeats > 1 else "")
        + f": {float(table.bubble_fraction):.1%} idle",
        loc="right",
        fontsize=10,
    )
    _save(figure, path)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError("drawing needs matplotlib: pip install 'rampup[plot]'") from error
    return pyplot


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", key="output") from error
