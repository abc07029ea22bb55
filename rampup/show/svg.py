"""Charts and timetables as inline SVG for a page: colours come from the page's style, values from its script."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rampup.plan.timetable import Timetable
from rampup.show.format import KIND_NAMES
from rampup.show.series import short

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 20, 42
MAX_BANDS = 40
# Below this width in picture units a phase's number does not fit.
LEAST_LABELLED = 14
TICK_WIDTH, ROW_HEIGHT = 22, 26
_Place = Callable[[float, float], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        name: what it is called in the legend and in hover values.
        xs, ys: its points; a y that is not a number breaks the line.
        kind: `line` through the points; `steps` that hold each y from its x to the next; `bars`, the same, filled; or `dots`.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    kind: str = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture of lines over one axis.

    Attributes:
        title: what it shows.
        x_label, y_label: the axes, with units.
        series: the lines.
        bands: (start, end, label) of stretches of x that are shaded in turn.
        from_zero: whether y starts at 0.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bands: tuple[tuple[float, float, str], ...] = ()
    from_zero: bool = True

    @property
    def view(self) -> tuple[float, float, float, float]:
        """The smallest and largest x and y that are shown."""
        xs = [x for line in self.series for x in line.xs]
        ys = [y for line in self.series for y in line.ys if math.isfinite(y)] or [0.0, 1.0]
        low, high = (0.0 if self.from_zero else min(ys)), max(ys)
        margin = (high - low) * 0.12 or abs(high) * 0.12 or 1.0
        right = max([*xs, *(end for _, end, _ in self.bands)])
        left = min(xs)
        return left, right if right > left else left + 1, low if self.from_zero else low - margin, high + margin


def chart_figure(chart: Chart) -> str:
    """Return a chart as an HTML figure: title, legend where there are several lines, and the picture."""
    legend = "".join(
        f'<span class="key"><svg class="swatch" viewBox="0 0 28 8" aria-hidden="true">{_swatch(line, number)}</svg>'
        f"{html.escape(line.name)}</span>"
        for number, line in enumerate(chart.series)
    )
    shown = f'<div class="legend">{legend}</div>' if len(chart.series) > 1 else ""
    return f'<figure class="chart"><figcaption>{html.escape(chart.title)}</figcaption>{shown}{_chart_svg(chart)}</figure>'


def timetable_figure(table: Timetable, title: str) -> str:
    """Return a timetable as an HTML figure: a row a stage, a block an operation, each with its times."""
    width = LEFT + TICK_WIDTH * float(table.makespan) + RIGHT
    height = TOP + ROW_HEIGHT * table.num_stages + BOTTOM
    parts = []
    for operation in table.operations:
        x, length = LEFT + TICK_WIDTH * float(operation.start), TICK_WIDTH * float(operation.end - operation.start)
        y = TOP + ROW_HEIGHT * operation.stage
        times = f"from {float(operation.start):g} to {float(operation.end):g}"
        repeat = f", repeat {operation.repeat}" if table.num_repeats > 1 else ""
        hint = f"stage {operation.stage}: {KIND_NAMES[operation.kind]} of microbatch {operation.microbatch}{repeat}, {times}"
        text = operation.label[1:]
        parts.append(
            f'<g class="op op-{operation.kind}" data-tip="{hint}"><rect x="{x:.1f}" y="{y}" width="{length:.1f}" '
            f'height="{ROW_HEIGHT - 3}"/>'
            + (f'<text x="{x + length / 2:.1f}" y="{y + 16}">{text}</text>' if length >= 8 * len(text) else "")
            + "</g>"
        )
    names = [
        f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{TOP + ROW_HEIGHT * stage + 16}">stage {stage}</text>'
        for stage in range(table.num_stages)
    ]
    bottom = TOP + ROW_HEIGHT * table.num_stages
    ticks = [
        f'<text class="tick" text-anchor="middle" x="{LEFT + TICK_WIDTH * tick:.1f}" y="{bottom + 14}">{short(tick)}</text>'
        for tick in nice_ticks(0, float(table.makespan), most=12)
    ]
    label = f'<text class="label" x="{LEFT}" y="{bottom + 34}">time, in the units of the costs</text>'
    kinds = sorted({operation.kind for operation in table.operations}, key="FBIW".index)
    legend = "".join(
        f'<span class="key"><svg class="swatch" viewBox="0 0 28 12" aria-hidden="true">'
        f'<g class="op op-{kind}"><rect width="28" height="12"/></g></svg>{KIND_NAMES[kind]}</span>'
        for kind in kinds
    )
    box = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    picture = (
        f'<svg class="timetable" tabindex="0" role="img" aria-label="{html.escape(title)}; arrow keys go through it" '
        f"{box}>{''.join(parts + names + ticks)}{label}</svg>"
    )
    return (
        f'<figure class="chart wide"><figcaption>{html.escape(title)}</figcaption><div class="legend">{legend}</div>'
        f'<div class="scroll">{picture}</div></figure>'
    )


def nice_ticks(low: float, high: float, *, most: int = 5, whole: bool = False) -> list[float]:
    """Return round numbers from low to high, at most about `most` of them; whole ones where only these mean something.

    Example:
        >>> nice_ticks(0, 29632), nice_ticks(0, 0.0034)
        ([0.0, 10000.0, 20000.0], [0.0, 0.001, 0.002, 0.003])
        >>> nice_ticks(-0.5, 1.5, whole=True)
        [0.0, 1.0]
    """
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _chart_svg(chart: Chart) -> str:
    x0, x1, y0, y1 = chart.view
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - x0) / (x1 - x0) * width, TOP + (y1 - y) / (y1 - y0) * height

    parts = [*_bands(chart, place), *_ticks(chart, place)]
    for number, line in enumerate(chart.series):
        parts.append(_line(line, number, place, end=x1, floor=place(x0, y0)[1]))
    values = {
        "view": [x0, x1, y0, y1],
        "box": [LEFT, TOP, width, height],
        "x": chart.x_label,
        "series": [
            {"name": line.name, "kind": line.kind, "x": list(line.xs), "y": [y if math.isfinite(y) else None for y in line.ys]}
            for line in chart.series
        ],
        "bands": [list(band) for band in chart.bands],
    }
    data = html.escape(json.dumps(values, separators=(",", ":"), allow_nan=False))
    return (
        f'<svg class="plot" tabindex="0" role="img" aria-label="{html.escape(chart.title)}; arrow keys read the values" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" data-chart="{data}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{TOP + height}" hidden=""/></svg>'
    )


def _bands(chart: Chart, place: _Place) -> Iterator[str]:
    if not 1 < len(chart.bands) <= MAX_BANDS:
        return
    for number, (start, end, label) in enumerate(chart.bands):
        left, right = place(start, 0)[0], place(end, 0)[0]
        if number % 2:
            yield (f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>')
        if right - left >= LEAST_LABELLED:
            x = (left + right) / 2
            yield f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{TOP - 6}">{html.escape(label)}</text>'


def _ticks(chart: Chart, place: _Place) -> Iterator[str]:
    x0, x1, y0, y1 = chart.view
    bottom = HEIGHT - BOTTOM
    counts = all(isinstance(y, int) for line in chart.series for y in line.ys)
    for value in nice_ticks(y0, y1, whole=counts):
        y = place(x0, value)[1]
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{short(value)}</text>'
    for value in nice_ticks(x0, x1, whole=True):
        x = place(value, y0)[0]
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 17}">{short(value)}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="label" text-anchor="middle" x="{middle:.0f}" y="{HEIGHT - 7}">{html.escape(chart.x_label)}</text>'
    y = (TOP + bottom) / 2
    yield (
        f'<text class="label" text-anchor="middle" transform="rotate(-90 12 {y:.0f})" x="12" y="{y:.0f}">'
        f"{html.escape(chart.y_label)}</text>"
    )


def _line(line: Series, number: int, place: _Place, *, end: float, floor: float) -> str:
    points = [place(x, y) if math.isfinite(y) else None for x, y in zip(line.xs, line.ys, strict=True)]
    if line.kind == "dots":
        dots = "".join(f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3.5"/>' for point in points if point)
        return f'<g class="dots s{number % 6}">{dots}</g>'
    commands, drawing = [], False
    for point in points:
        if point is None:
            drawing = False
            continue
        x, y = point
        move = f"H{x:.1f}V{y:.1f}" if line.kind != "line" else f"L{x:.1f} {y:.1f}"
        commands.append(move if drawing else f"M{x:.1f} {y:.1f}")
        drawing = True
    if line.kind != "line" and drawing:
        commands.append(f"H{place(end, 0)[0]:.1f}")
    path = "".join(commands)
    area = (
        f'<path class="area s{number % 6}" d="{path}V{floor:.1f}H{points[0][0]:.1f}Z"/>'
        if line.kind == "bars" and points[0]
        else ""
    )
    return f'{area}<path class="line s{number % 6}" d="{path}"/>'


def _swatch(line: Series, number: int) -> str:
    if line.kind == "dots":
        return f'<g class="dots s{number % 6}"><circle cx="14" cy="4" r="3.5"/></g>'
    return f'<path class="line s{number % 6}" d="M0 4H28"/>'
