"""Pictures of what was measured: runs on the samples axis, and memory by microbatch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError
from rampup.show.plots.figure import DEFAULT_WIDTH, LINES, NARROW, finish, line_style, new_figure, prepare
from rampup.show.series import RunMetrics, mean_of_neighbours

MIB, GIB = 2**20, 2**30
# Below this share of the highest bar a bar has its number above it.
LEAST_BAR = 0.1
# Times the limit: beside a bar higher than this the others are not to be read.
FAR_ABOVE = 4
# Inches that the title of a picture of memory takes.
ONE_LINE = 5.5
MAX_RUNS = 12


def draw_runs(runs: Sequence[RunMetrics], path: str | Path | None = None, *, width: float = DEFAULT_WIDTH) -> Any:
    """Draw loss, batch size and tokens per second of one or several runs, all over the samples that they consumed.

    Args:
        runs: the runs; a line each.
        path, width: see `draw_batch`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: no run, too many runs, or the file cannot be written.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs cannot be told apart; draw 1 to {MAX_RUNS}", key="run", nearest=(1, MAX_RUNS))
    figure = new_figure(width, 7.5 if width >= NARROW else 8.0)
    loss, size, speed = figure.subplots(3, 1, sharex=True, height_ratios=(4, 2, 3))
    means = 1
    for number, run in enumerate(runs):
        style = line_style(number)
        xs, ys, means = mean_of_neighbours(run.samples, run.losses)
        loss.plot(xs, ys, label=run.name, linewidth=1.3, **style)
        if run.eval_samples:
            marker = {"color": style["color"], "marker": LINES[number % len(LINES)]["marker"], "markerfacecolor": "white"}
            loss.plot(run.eval_samples, run.eval_losses, linestyle="", label=f"{run.name}: evaluation", **marker)
        starts = [0, *run.samples]
        size.stairs(run.sizes, [run.samples[0] - run.sizes[0], *starts[1:]], baseline=None, linewidth=1.6, **style)
        xs, ys, _ = mean_of_neighbours(run.samples, run.tokens_per_second)
        speed.plot(xs, ys, linewidth=1.1, **style)
    prepare(loss, x="", y="loss", from_zero=False)
    prepare(size, x="", y="samples per step")
    prepare(speed, x="samples consumed" + (f" (means of {means:,} steps)" if means > 1 else ""), y="tokens per second")
    speed.set_xlim(left=0)
    figure.align_ylabels()
    columns = 1 if width < NARROW else 3
    figure.legend(*loss.get_legend_handles_labels(), loc="outside upper left", ncols=columns, frameon=False)
    return finish(figure, path)


def draw_memory(
    rows: Iterable[tuple[int, int | None]],
    path: str | Path | None = None,
    *,
    limit_bytes: int | None = None,
    width: float = 6.0,
) -> Any:
    """Draw how much memory a step needs by the size of its microbatch.

    Args:
        rows: pairs (microbatch size, bytes); no bytes, None, where they are too many to tell, which is not drawn.
        path, width: see `draw_batch`.
        limit_bytes: what may be used of a device, drawn as a line; what is above it is hatched, and of what is far above
            it only the smallest size is drawn. None = unknown.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: no rows, a size below 1 or negative bytes, or the file cannot be written.
    """
    pairs = sorted((size, number) for size, number in rows if number is not None)
    if limit_bytes is not None:
        pairs = [pair for pair in pairs if pair[1] <= FAR_ABOVE * limit_bytes or pair == pairs[0]]
    if not pairs:
        raise ConfigError("there is no microbatch size to draw the memory of", key="microbatch_size")
    for size, number in pairs:
        if size < 1 or number < 0:
            raise ConfigError(f"microbatch_size={size} with {number} bytes cannot be drawn", key="microbatch_size")
    figure = new_figure(width, 3.6)
    axes = figure.subplots()
    most = max([number for _, number in pairs] + [limit_bytes or 0])
    unit, name = (GIB, "GiB") if (limit_bytes or most) >= GIB else (MIB, "MiB")
    prepare(axes, x="samples per microbatch", y=f"memory, {name}")
    places = range(len(pairs))
    for place, (_, number) in zip(places, pairs, strict=True):
        over = limit_bytes is not None and number > limit_bytes
        axes.bar(
            place, number / unit, width=0.7, color="#f2c9b4" if over else "#a9c4e4", edgecolor="black", linewidth=0.6,
            hatch="///" if over else "",
        )  # fmt: skip
        inside = number >= LEAST_BAR * most
        axes.annotate(
            f"{number / unit:.3g}", (place, number / unit), xytext=(0, -3 if inside else 3), textcoords="offset points",
            ha="center", va="top" if inside else "bottom",
            fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    axes.set_xticks(places, [f"{size:,}" for size, _ in pairs])
    axes.set_ylim(0, most / unit * 1.15 if most else 1)
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, color="black", linestyle="--", linewidth=1.2)
        fitting = [size for size, number in pairs if number <= limit_bytes]
        found = f"the largest that fits: {max(fitting):,}" if fitting else "none of these fits"
        usable, separator = math.floor(100 * limit_bytes / unit) / 100, "; " if width >= ONE_LINE else "\n"
        axes.set_title(f"usable: {usable:g} {name} (dashed){separator}{found}", loc="left", fontsize=10)
    return finish(figure, path)
