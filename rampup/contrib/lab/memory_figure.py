"""The memory of a step by the size of its microbatch, as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError
from rampup.plan.numbers import GIB
from rampup.show.figures import (
    BAR,
    FAR_ABOVE,
    INK,
    PAPER,
    check_format,
    import_matplotlib,
    new_figure,
    prepare,
    save,
)

OVER = "#f2c9b4"  # of a bar above the limit


def draw_memory(
    rows: Iterable[tuple[int, int | None]],
    path: str | Path | None = None,
    *,
    limit_bytes: int | None = None,
    width: float = 6,
) -> Any:
    """Draw the memory of a step by the size of its microbatch.

    `rows` are pairs (microbatch size, bytes); None bytes are too many to count and are
    not drawn. `limit_bytes` is the usable memory of a device, drawn as a line; None =
    unknown. Bars above it are hatched, and of those far above it only the smallest size
    is drawn. For the rest see `draw_batch`.
    """
    pairs = sorted((size, number) for size, number in rows if number is not None)
    if limit_bytes is not None:
        pairs = [
            pair
            for pair in pairs
            if pair[1] <= FAR_ABOVE * limit_bytes or pair == pairs[0]
        ]
    if not pairs:
        raise ConfigError(
            "there is no microbatch size to draw the memory of", key="microbatch_size"
        )
    for size, number in pairs:
        if size < 1 or number < 0:
            raise ConfigError(
                f"microbatch_size={size} with {number} bytes cannot be drawn",
                key="microbatch_size",
            )
    figure = new_figure(width, 3.6)
    axes = figure.subplots()
    most = max([number for _, number in pairs] + [limit_bytes or 0])
    unit, name = (GIB, "GiB") if (limit_bytes or most) >= GIB else (2**20, "MiB")
    prepare(axes, x="samples per microbatch", y=f"memory, {name}")
    for place, (_, number) in enumerate(pairs):
        over = limit_bytes is not None and number > limit_bytes
        look = {
            "color": OVER if over else BAR,
            "edgecolor": INK,
            "linewidth": 0.6,
            "hatch": "///" * over,
        }
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.0}
        bar = axes.bar(place, number / unit, width=0.7, **look)
        axes.bar_label(bar, [f"{number / unit:.3g}"], padding=3, fontsize=8, bbox=box)
    axes.set_xticks(range(len(pairs)), [f"{size:,}" for size, _ in pairs])
    axes.set_ylim(0, most / unit * 1.15 if most else 1)
    if limit_bytes is not None:
        axes.axhline(limit_bytes / unit, color=INK, linestyle="--", linewidth=1.2)
        fitting = [size for size, number in pairs if number <= limit_bytes]
        found = (
            f"the largest that fits: {max(fitting):,}"
            if fitting
            else "none of these fits"
        )
        usable = math.floor(100 * limit_bytes / unit) / 100
        axes.set_title(
            f"usable: {usable:g} {name} (dashed)\n{found}", loc="left", fontsize=10
        )
    return save(figure, path)


def check_picture(path: str | Path | None) -> None:
    """Refuse a picture with another suffix, in no folder or without matplotlib, before
    the work.
    """
    if path is None:
        return
    check_format(path)
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(
            f"cannot write {path}: there is no folder {folder}", key="output"
        )
    import_matplotlib("figure")
