"""Pictures of a plan: its batch over samples and steps, what it costs in each phase, and its learning rate on both clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.plan.learning_rate import Clock
from rampup.plan.plan import RampPlan
from rampup.show.plots.figure import (
    DEFAULT_WIDTH,
    LINES,
    NARROW,
    finish,
    fits,
    headline,
    line_style,
    new_figure,
    prepare,
    shade,
)
from rampup.show.series import Span, phase_spans, rate_points

MAX_WRITTEN = 12
_BARS = {"color": "#a9c4e4", "edgecolor": "black", "linewidth": 0.6}


def draw_batch(plan: RampPlan, path: str | Path | None = None, *, width: float = DEFAULT_WIDTH) -> Any:
    """Draw the global batch over samples and over steps, and beside it passes and pipeline bubble of every phase.

    Args:
        plan: the plan.
        path: a file whose ending gives its format (.png, .svg, .pdf); None only returns the figure.
        width: of the picture, in inches; below 7, everything stands in one column.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    spans, pipeline = phase_spans(plan), plan.splitter.num_stages > 1
    narrow = width < NARROW
    figure = new_figure(width, 9.5 if narrow else 5.4)
    if narrow:
        over_samples, over_steps, *beside = figure.subplots(3 + pipeline, 1)
    else:
        left, right = figure.subfigures(1, 2, width_ratios=(5, 3))
        over_samples, over_steps = left.subplots(2, 1)
        beside = right.subplots(1 + pipeline, 1, squeeze=False)[:, 0]
    _draw_size(over_samples, spans, "samples", total=plan.consumed_samples)
    headline(figure, plan.summary[1])
    _draw_size(over_steps, spans, "steps", total=plan.total_steps)
    _draw_bars(beside[0], spans, [span.accumulation_steps for span in spans], "passes per step", "{:,}")
    if pipeline:
        _draw_bars(beside[1], spans, [span.bubble for span in spans], "pipeline bubble, idle share", "{:.2f}")
    return finish(figure, path)


def draw_rate(
    plan: RampPlan,
    rates: Mapping[Clock, Callable[[int], float]],
    path: str | Path | None = None,
    *,
    width: float = DEFAULT_WIDTH,
) -> Any:
    """Draw the learning rate over samples and over steps, with its schedule on each clock.

    Args:
        plan: the plan.
        rates: from a clock to the learning rate of an optimizer step on it.
        path, width: see `draw_batch`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    points = {clock: rate_points(plan, rate) for clock, rate in rates.items()}
    narrow = width < NARROW
    figure = new_figure(width, 6.4 if narrow else 3.6)
    panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    for axes, unit in zip(panels, ("samples", "steps"), strict=True):
        for number, (clock, line) in enumerate(points.items()):
            xs = [point.sample if unit == "samples" else point.step for point in line]
            mine = clock == plan.learning_rate_clock
            label = f"schedule runs on {clock}" + (" (this plan)" if mine else "")
            style = line_style(number) | {"linewidth": 2.0 if mine else 1.3}
            axes.plot(xs, [point.rate for point in line], label=label, **style)
        prepare(axes, x=f"{unit} consumed" if unit == "samples" else "optimizer steps", y="learning rate")
        axes.set_ylim(top=1.1 * axes.get_ylim()[1])
        end = plan.consumed_samples if unit == "samples" else plan.total_steps
        axes.set_xlim(0, end)
        phases = plan.ramp.phases
        starts = [phase.start_sample if unit == "samples" else phase.start_step for phase in phases]
        edges = list(zip(starts, [*starts[1:], end], strict=True))
        reached = [place for place, start in enumerate(starts) if start < end]
        shade(axes, [edges[place] for place in reached], [phases[place].index for place in reached])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if narrow else 2, frameon=False)
    return finish(figure, path)


def _draw_size(axes: Any, spans: Sequence[Span], unit: str, *, total: int) -> None:
    """Draw the batch as a staircase over samples or steps."""
    samples = unit == "samples"
    edges = [(span.start_sample, span.end_sample) if samples else (span.start_step, span.end_step) for span in spans]
    end = edges[-1][1]
    axes.stairs([span.global_batch_size for span in spans], [start for start, _ in edges] + [end], baseline=None, **_stairs())
    largest = max(span.global_batch_size for span in spans)
    more = f"; the run goes on to {total:,}" if total > end else ""
    prepare(axes, x=("samples consumed" if samples else "optimizer steps") + more, y="samples per step")
    axes.set(xlim=(0, end), ylim=(0, largest * 1.18))
    shade(axes, edges, [span.phase for span in spans])
    if total < end:
        axes.axvline(total, color="black", linestyle=":", linewidth=1.2)
        axes.annotate("the run ends", (total, largest / 2), rotation=90, ha="right", va="center", fontsize=8)


def _draw_bars(axes: Any, spans: Sequence[Span], values: Sequence[float], title: str, form: str) -> None:
    """Draw a bar a phase, or a filled staircase where there are very many."""
    prepare(axes, x="phase", y="", title=title, whole=all(isinstance(value, int) for value in values))
    numbers = [span.phase for span in spans]
    if len(spans) > 3 * MAX_WRITTEN:
        axes.stairs(values, [*numbers, numbers[-1] + 1], fill=True, color=_BARS["color"])
    else:
        axes.bar(numbers, values, width=0.8, **_BARS)
        written = fits(len(spans), MAX_WRITTEN)
        for number, value in zip(numbers, values, strict=True):
            axes.annotate(
                written(form.format(value)), (number, value), xytext=(0, 2), textcoords="offset points",
                ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
        if len(spans) <= 2 * MAX_WRITTEN:
            axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_ylim(0, max(values) * 1.15 or 1)


def _stairs() -> dict[str, Any]:
    return {"color": LINES[0]["color"], "linewidth": 2.0}
