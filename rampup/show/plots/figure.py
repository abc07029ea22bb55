"""What all pictures share: a figure without pyplot, axes of large numbers, phases shaded, and the file."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError
from rampup.show.series import short

# Dark to light, and dashed besides: each line can be told from the others in black and white.
LINES = (
    {"color": "#14375e", "linestyle": "-", "marker": "o"},
    {"color": "#c4501b", "linestyle": "--", "marker": "s"},
    {"color": "#3f8f5b", "linestyle": "-.", "marker": "^"},
    {"color": "#8d6bb8", "linestyle": ":", "marker": "D"},
    {"color": "#b58900", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#5a5a5a", "linestyle": (0, (1, 1)), "marker": "P"},
)
SHADE = "#e9e9ee"
MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH = 4.0, 10.0, 30.0
NARROW = 7.0
MAX_BANDS = 40
# Below this share of the axes a phase's number does not fit.
LEAST_LABELLED = 0.035
LETTERS_PER_INCH = 12.5
FORMATS = (".png", ".svg", ".pdf")


def matplotlib_part(name: str) -> Any:
    """Import a part of matplotlib.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        importlib.import_module("matplotlib")
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise MissingDependencyError("drawing needs matplotlib: pip install 'rampup[plot]'") from error


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure.

    Args:
        width, height: in inches.

    Raises:
        ConfigError: a width that no picture can have.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ConfigError(
            f"width={width:g} inches must be from {MIN_WIDTH:g} to {MAX_WIDTH:g}",
            key="width",
            nearest=(MIN_WIDTH if width < MIN_WIDTH else MAX_WIDTH,),
        )
    return matplotlib_part("figure").Figure(figsize=(width, height), layout="constrained")


def line_style(number: int) -> dict[str, Any]:
    """Return the look of line `number`, without its marker."""
    style = LINES[number % len(LINES)]
    return {"color": style["color"], "linestyle": style["linestyle"]}


def prepare(axes: Any, *, x: str, y: str, title: str | None = None, from_zero: bool = True, whole: bool = False) -> None:
    """Label the axes, write large numbers as 1.5M, and draw a light grid behind.

    Args:
        axes: the axes.
        x, y: their labels, with units.
        title: a line above.
        from_zero: whether y starts at 0.
        whole: whether values of y are whole numbers.
    """
    ticker = matplotlib_part("ticker")
    for axis, label in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_label_text(label)
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, place: short(value)))
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=whole and axis is axes.yaxis))
    axes.grid(visible=True, axis="y", color="#d0d0d0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    if from_zero:
        axes.set_ylim(bottom=0)


def shade(axes: Any, edges: Sequence[tuple[float, float]], numbers: Sequence[int]) -> None:
    """Shade every other phase, and number those that are wide enough; very many are not shaded.

    Args:
        axes: with its limits of x set.
        edges: where each phase starts and ends.
        numbers: the phases' numbers.
    """
    if not 1 < len(edges) <= MAX_BANDS:
        return
    low, high = axes.get_xlim()
    for place, ((start, end), number) in enumerate(zip(edges, numbers, strict=True)):
        if place % 2:
            axes.axvspan(start, min(end, high), color=SHADE, linewidth=0, zorder=0)
        middle, wide = (start + min(end, high)) / 2, (min(end, high) - start) / (high - low)
        if wide >= LEAST_LABELLED and low <= middle <= high:
            axes.annotate(
                str(number), (middle, 1), xycoords=("data", "axes fraction"), xytext=(0, -2), textcoords="offset points",
                ha="center", va="top", fontsize=8, color="#555555",
            )  # fmt: skip


def headline(figure: Any, text: str) -> None:
    """Write a title over the whole figure, in as many lines as its width needs."""
    lines = textwrap.wrap(text, int(figure.get_figwidth() * LETTERS_PER_INCH))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)


def finish(figure: Any, path: str | Path | None) -> Any:
    """Write the figure into a file if there is one, and return it.

    Raises:
        ConfigError: an ending that is no format, or a file that cannot be written.
    """
    if path is None:
        return figure
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"cannot write {path}: it must end in {', '.join(FORMATS)}", key="output", nearest=FORMATS)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", key="output") from error
    return figure


def fits(pieces: int, most: int) -> Callable[[object], str]:
    """Return how to write values where so many pieces stand side by side: as they are, or not at all."""
    return str if pieces <= most else lambda value: ""
