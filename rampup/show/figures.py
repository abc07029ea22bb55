"""Pictures by matplotlib, imported when one is drawn; pyplot is not touched. `draw_*`
return a figure, and can write a file.
"""

from __future__ import annotations

import importlib
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.describe import summary
from rampup.plan.learning_rate import Clock
from rampup.plan.pipeline import Operation, Timetable
from rampup.plan.plan import RampPlan
from rampup.show.console import operation_label
from rampup.show.format import format_si
from rampup.show.series import RunMetrics, drawn_phases, mean_of_neighbours, rate_points

Phase = Mapping[str, Any]  # of `drawn_phases`
Rates = Mapping[
    Clock, Callable[[int], float]
]  # from a clock to the learning rate of an optimizer step on it

# Dark to light, and dashed: the lines can be told apart in black and white.
LINES = (
    {"color": "#14508c", "linestyle": "-", "marker": "o"},
    {"color": "#c4501b", "linestyle": "--", "marker": "s"},
    {"color": "#2f7f4b", "linestyle": "-.", "marker": "^"},
    {"color": "#7d54b3", "linestyle": ":", "marker": "D"},
    {"color": "#8d6a00", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
    {"color": "#5a5a5a", "linestyle": (0, (1, 1)), "marker": "P"},
)
INK = "#1c2430"
DIM = "#5b6675"
RULE = "#d5dae1"
SHADE = "#e9e9ee"
PAPER = "#ffffff"
BAR = "#a9c4e4"
# Name, face and ink of an operation by its kind.
OPERATIONS = {
    "F": ("forward", "#cfe8cf", "black"),
    "B": ("backward", "#33578f", "white"),
}
WIDTH = 10.0  # of a picture, in inches
TICK_LETTERS = 9
UNIT_LABELS = {"samples": "samples consumed", "steps": "optimizer steps"}
FORMATS = (".png", ".svg", ".pdf")
MAX_BANDS = 40
MAX_WRITTEN = 12
MAX_OPERATIONS = 5_000
MARGIN_INCHES, MIN_TIMETABLE, MAX_TIMETABLE = 1.2, 5.0, 24.0
# times the limit, or the usual: what is higher would make the others too flat to read
FAR_ABOVE = 4
MAX_RUNS = 12


def import_matplotlib(name: str) -> Any:
    """Import a module of matplotlib."""
    try:
        importlib.import_module("matplotlib")
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib: pip install 'rampup[plot]'"
        ) from error


def draw_batch(plan: RampPlan, path: str | Path | None = None) -> Any:
    """Draw the global batch over samples and over steps, and the passes and pipeline
    bubble of every phase.

    The suffix of `path` is the format (.png, .svg, .pdf); None only returns the figure.
    Without matplotlib there is a `MissingDependencyError`, and a `ConfigError` if the
    file cannot be written.
    """
    phases = drawn_phases(plan)
    pipeline = plan.splitter.num_stages > 1
    figure = new_figure(WIDTH, 5.4)
    left, right = figure.subfigures(1, 2, width_ratios=(5, 3))
    over_samples, over_steps = left.subplots(2, 1)
    bars = right.subplots(1 + pipeline, 1, squeeze=False)[:, 0]
    # A title over the whole figure, in as many lines as its width needs.
    lines = textwrap.wrap(summary(plan)[1], int(12.5 * WIDTH))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
    _panel_batch(over_samples, phases, "samples", total=plan.consumed_samples)
    _panel_batch(over_steps, phases, "steps", total=plan.total_steps)
    _panel_bars(bars[0], phases, "accumulation_steps", "{:,}", title="passes per step")
    if pipeline:
        _panel_bars(
            bars[1],
            phases,
            "bubble_fraction",
            "{:.2f}",
            title="pipeline bubble, idle share",
        )
    return save(figure, path)


def draw_rate(plan: RampPlan, rates: Rates, path: str | Path | None = None) -> Any:
    """Draw the learning rate over samples and over steps, with its schedule on each
    clock.

    `rates` gives, for each clock, the learning rate of an optimizer step. For the rest
    see `draw_batch`.
    """
    figure = new_figure(WIDTH, 3.6)
    panels = figure.subplots(1, 2)
    for axes, unit in zip(panels, ("samples", "steps"), strict=True):
        _panel_rate(axes, plan, rates, unit)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return save(figure, path)


def draw_runs(runs: Sequence[RunMetrics], path: str | Path | None = None) -> Any:
    """Draw loss, batch size and tokens per second of up to 12 runs, a line each, over
    the samples that they consumed; of a single run also its other curves.

    For `path` and what is raised see `draw_batch`.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ConfigError(
            f"{len(runs)} runs cannot be told apart; draw 1 to {MAX_RUNS}",
            key="run",
            nearest=(1, MAX_RUNS),
        )
    curves = runs[0].curves if len(runs) == 1 else {}
    heights = (4, 2, 3, *(2 for _ in curves))
    figure = new_figure(WIDTH, 0.8 * sum(heights))
    loss, size, speed, *others = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    _panel_loss(loss, runs)
    _panel_sizes(size, runs)
    _panel_speed(speed, runs)
    for axes, (title, values) in zip(others, curves.items(), strict=True):
        samples = _plot_means(axes, runs[0], values, 0, linewidth=1.3)
        prepare(axes, x=samples, y="", title=title.lower())
    for axes in figure.axes[:-1]:
        axes.set_xlabel("")
    speed.set_xlim(left=0)
    figure.align_ylabels()
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return save(figure, path)


def draw_timetable(
    table: Timetable, path: str | Path | None = None, *, width: float | None = None
) -> Any:
    """Draw a pipeline timetable: a row per stage, a bar per operation; by default as
    wide in inches as its texts need.

    For `path` and what is raised see `draw_batch`. A timetable that is too large to be
    read is refused, too.
    """
    if len(table.operations) > MAX_OPERATIONS:
        raise ConfigError(
            f"{len(table.operations):,} operations are too many to draw; the most is"
            f" {MAX_OPERATIONS:,}",
            key="microbatches",
        )
    span, stages = float(table.makespan), table.num_stages
    if width is None:
        width = min(max(MARGIN_INCHES + 0.28 * span, MIN_TIMETABLE), MAX_TIMETABLE)
    figure = new_figure(width, 1.6 + 0.45 * stages)
    axes = figure.subplots()
    prepare(axes, x="time, in the unit of the costs", y="stage", from_zero=False)
    axes.grid(visible=False)
    axes.set(xlim=(0, span), ylim=(stages - 0.5, -0.5))
    axes.set_yticks(range(stages), [str(stage) for stage in range(stages)])
    for operation in table.operations:
        _draw_operation(axes, operation, table, (width - MARGIN_INCHES) / span)
    # The bars of a kind look alike, so the first of each stands for it.
    first = {
        operation.kind: bar
        for bar, operation in zip(axes.patches, table.operations, strict=True)
    }
    figure.legend(
        list(first.values()),
        [OPERATIONS[kind][0] for kind in first],
        loc="outside lower left",
        ncols=len(first),
        frameon=False,
    )
    repeats = f", v={table.num_repeats}" if table.num_repeats > 1 else ""
    axes.set_title(
        f"{table.schedule}, p={stages}, m={table.num_microbatches}{repeats}:"
        f" {float(table.bubble_fraction):.1%} idle",
        loc="left",
        fontsize=10,
    )
    return save(figure, path)


def _draw_operation(
    axes: Any, operation: Operation, table: Timetable, inches_per_unit: float
) -> None:
    """Draw the bar of an operation, and its microbatch if the bar is wide enough."""
    _, face, ink = OPERATIONS[operation.kind]
    start = float(operation.start)
    length = float(operation.end - operation.start)
    axes.add_patch(
        import_matplotlib("patches").Rectangle(
            (start, operation.stage - 0.45),
            length,
            0.9,
            facecolor=face,
            edgecolor=INK,
            linewidth=0.5,
        )
    )
    text = operation_label(operation, table.num_repeats)[1:]
    if length * inches_per_unit >= 0.075 * len(text):
        axes.text(
            start + length / 2,
            operation.stage,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color=ink,
        )


def svg_text(figure: Any) -> str:
    """Return a figure as the text of an SVG file, the same for the same figure."""
    buffer = io.StringIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": "rampup"}
    with importlib.import_module("matplotlib").rc_context(options):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a width and height in inches."""
    return import_matplotlib("figure").Figure(
        figsize=(width, height), layout="constrained"
    )


def save(figure: Any, path: str | Path | None) -> Any:
    """Return the figure, and write it if there is a path."""
    if path is None:
        return figure
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(
            f"cannot write {path}: it must end in {', '.join(FORMATS)}",
            key="output",
            nearest=FORMATS,
        )
    try:
        # By default a PDF has Type 3 fonts, which publishers refuse, and an SVG has
        # outlines of its letters.
        with importlib.import_module("matplotlib").rc_context(
            {"pdf.fonttype": 42, "svg.fonttype": "none"}
        ):
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}", key="output") from error
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and the dashes of a line by its number."""
    return {name: LINES[number % len(LINES)][name] for name in ("color", "linestyle")}


def prepare(
    axes: Any,
    *,
    x: str,
    y: str,
    title: str = "",
    from_zero: bool = True,
    integers: bool = False,
) -> None:
    """Label the axes, write large numbers as 1.5M, and draw a light grid behind."""
    ticker = import_matplotlib("ticker")
    for axis, label in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_label_text(label, color=INK)
        axis.set_major_formatter(
            ticker.FuncFormatter(lambda value, place: format_si(value))
        )
        axis.set_major_locator(
            ticker.MaxNLocator(
                nbins=6, steps=[1, 2, 5, 10], integer=integers and axis is axes.yaxis
            )
        )
    axes.tick_params(color=DIM, labelcolor=DIM, labelsize=TICK_LETTERS)
    axes.grid(visible=True, axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(DIM)
    if title:
        axes.set_title(title, loc="left", fontsize=10)
    if from_zero:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def _shade(
    axes: Any, edges: Sequence[tuple[float, float]], numbers: Sequence[int]
) -> None:
    """Shade every other phase, and number those that are wide enough. The limits of x
    must be set.
    """
    if not 1 < len(edges) <= MAX_BANDS:
        return
    low, high = axes.get_xlim()
    for place, ((start, end), number) in enumerate(zip(edges, numbers, strict=True)):
        stop = min(end, high)
        if place % 2:
            axes.axvspan(start, stop, color=SHADE, linewidth=0, zorder=0)
        middle = (start + stop) / 2
        wide = (stop - start) / (high - low)
        if wide >= 0.035 and low <= middle <= high:
            axes.annotate(
                str(number),
                (middle, 1),
                ha="center",
                va="top",
                fontsize=8,
                color=DIM,
                xycoords=("data", "axes fraction"),
                xytext=(0, -2),
                textcoords="offset points",
            )


def _panel_batch(axes: Any, phases: Sequence[Phase], unit: str, *, total: int) -> None:
    """Draw the batch as a staircase over samples or steps."""
    one = unit.removesuffix("s")
    sizes = [phase["global_batch_size"] for phase in phases]
    edges = [(phase[f"start_{one}"], phase[f"end_{one}"]) for phase in phases]
    end = edges[-1][1]
    axes.stairs(
        sizes,
        [*(first for first, _ in edges), end],
        baseline=None,
        color=LINES[0]["color"],
        linewidth=2.0,
    )
    more = f"; the run continues to {total:,}" if total > end else ""
    prepare(axes, x=UNIT_LABELS[unit] + more, y="samples per step", integers=True)
    axes.set(xlim=(0, end), ylim=(0, max(sizes) * 1.18))
    _shade(axes, edges, [phase["phase"] for phase in phases])
    if total < end:
        axes.axvline(total, color=INK, linestyle=":", linewidth=1.2)
        axes.annotate(
            "the run ends",
            (total, max(sizes) / 2),
            rotation=90,
            ha="right",
            va="center",
            fontsize=8,
            color=INK,
        )


def _panel_bars(
    axes: Any, phases: Sequence[Phase], name: str, form: str, *, title: str
) -> None:
    """Draw one bar per phase, or a filled staircase if there are many."""
    numbers = [phase["phase"] for phase in phases]
    values = [phase[name] for phase in phases]
    prepare(
        axes,
        x="phase",
        y="",
        title=title,
        integers=all(isinstance(value, int) for value in values),
    )
    if len(phases) > 3 * MAX_WRITTEN:
        axes.stairs(values, [*numbers, numbers[-1] + 1], fill=True, color=BAR)
    else:
        bars = axes.bar(
            numbers, values, width=0.8, color=BAR, edgecolor=INK, linewidth=0.6
        )
        if len(phases) <= MAX_WRITTEN:
            axes.bar_label(
                bars,
                [form.format(value) for value in values],
                padding=2,
                fontsize=8,
                color=INK,
            )
        if len(phases) <= 2 * MAX_WRITTEN:
            axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set_ylim(0, max(values) * 1.15 or 1)


def _panel_rate(axes: Any, plan: RampPlan, rates: Rates, unit: str) -> None:
    """Draw the learning rate over samples or steps, one line per clock of its
    schedule.
    """
    samples = unit == "samples"
    for number, (clock, rate) in enumerate(rates.items()):
        used = clock == plan.rate.clock
        label = f"schedule runs on {clock}" + (" (this plan)" if used else "")
        steps, before, ys = zip(*rate_points(plan, rate), strict=True)
        axes.plot(
            before if samples else steps,
            ys,
            label=label,
            linewidth=2.0 if used else 1.3,
            **line_style(number),
        )
    prepare(axes, x=UNIT_LABELS[unit], y="learning rate")
    end = plan.consumed_samples if samples else plan.total_steps
    axes.set_xlim(0, end)
    starts = [
        phase.start_sample if samples else phase.start_step
        for phase in plan.ramp.phases
    ]
    edges = [
        edge for edge in zip(starts, [*starts[1:], end], strict=True) if edge[0] < end
    ]
    _shade(axes, edges, range(len(edges)))


def _panel_loss(axes: Any, runs: Sequence[RunMetrics]) -> None:
    for number, run in enumerate(runs):
        samples = _plot_means(
            axes, run, run.losses, number, label=run.name, linewidth=1.3
        )
        if run.eval_samples:
            style = LINES[number % len(LINES)] | {
                "linestyle": "",
                "markerfacecolor": PAPER,
            }
            axes.plot(
                run.eval_samples,
                run.eval_losses,
                label=f"{run.name}: evaluation",
                **style,
            )
    prepare(
        axes,
        x=samples,
        y=" or ".join(sorted({run.quantity for run in runs})),
        from_zero=False,
    )


def _panel_sizes(axes: Any, runs: Sequence[RunMetrics]) -> None:
    for number, run in enumerate(runs):
        edges = [run.samples[0] - run.sizes[0], *run.samples]
        axes.stairs(
            run.sizes, edges, baseline=None, linewidth=1.6, **line_style(number)
        )
        if run.noise_scales:
            # Where there is no estimate, the dotted line of the lower end says "at
            # least".
            style = {"color": line_style(number)["color"], "alpha": 0.7}
            name = f"{run.name}: noise scale, 90% interval dotted"
            for values, line, width, label in (
                (run.noise_scales, "--", 1.1, name),
                (run.noise_lows, ":", 0.9, None),
                (run.noise_highs, ":", 0.9, None),
            ):
                xs, ys, _ = mean_of_neighbours(run.samples, values)
                axes.plot(xs, ys, linestyle=line, linewidth=width, label=label, **style)
    prepare(axes, x="samples consumed", y="samples per step", integers=True)
    if any(run.noise_scales for run in runs):
        # It may be far from the batch, whose steps a linear axis would not show.
        axes.autoscale(axis="y")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(axes.xaxis.get_major_formatter())


def _panel_speed(axes: Any, runs: Sequence[RunMetrics]) -> None:
    for number, run in enumerate(runs):
        samples = _plot_means(axes, run, run.tokens_per_second, number, linewidth=1.1)
    prepare(axes, x=samples, y="tokens_per_second")
    # A step that was not waited for, or whose clock stood still, would make the others
    # too flat to read.
    rates = sorted(
        rate for run in runs for rate in run.tokens_per_second if math.isfinite(rate)
    )
    if rates and rates[-1] > (most := FAR_ABOVE * rates[len(rates) * 9 // 10]):
        axes.set_ylim(top=most)
        axes.set_title(
            f"above: up to {format_si(rates[-1])}", loc="right", fontsize=8, color=DIM
        )


def _plot_means(
    axes: Any, run: RunMetrics, values: Sequence[float], number: int, **options: Any
) -> str:
    """Draw what each step of a run has, or the means of neighbours if they are many.
    Return the label of the axis.
    """
    xs, ys, means = mean_of_neighbours(run.samples, values)
    axes.plot(xs, ys, **options, **line_style(number))
    return "samples consumed" + (f" (means of {means:,} steps)" if means > 1 else "")
