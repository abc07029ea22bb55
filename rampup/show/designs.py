"""The result of `rampup design` as text and as a picture. Takes the JSON output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rampup.show.console import make_table, print_notes
from rampup.show.figures import DEFAULT_WIDTH, LINES, _line_style, _new_figure, _prepare, _save
from rampup.show.format import format_si, format_value

MARKERS = "osD^vPX"


def print_design(facts: Mapping[str, Any], console: Console) -> None:
    """Print the candidates with their steps, hours and loss, their schedules, and the assumptions."""
    tokens, growth = format_si(facts["train_tokens"]), facts["noise_growth"]
    console.print(
        f"{tokens} tokens, {facts['train_samples']:,} samples; noise scale from {format_value(facts['noise_scale_start'])} to "
        f"{format_value(facts['noise_scale_end'])} samples ({facts['noise_source']}, growing with the power {growth:.2f})"
    )
    rows = [
        (
            candidate["name"] + (" *" if candidate["name"] == facts["fastest"] else ""),
            f"{candidate['steps']:,}",
            format_value(candidate["hours"]),
            _interval(candidate, "loss_penalty"),
            format_value(candidate["hours_to_same_loss"]),
        )
        for candidate in facts["candidates"]
    ]
    titles = ("schedule", "steps", "hours", "loss penalty", "hours to\nsame loss")
    console.print(make_table(console, titles, rows, left=1))
    console.print("*: the fastest to the loss that the smallest batch has at the end")
    for candidate in facts["candidates"]:
        console.print(f'{candidate["name"]}: batch_size_schedule="{candidate["batch_size_schedule"]}"')
    console.print("This is a model, not a measurement. It assumes:")
    for sentence in facts["assumptions"]:
        console.print(f"- {sentence}")
    print_notes(facts["notes"], console)


def draw_design(facts: Mapping[str, Any], path: str | Path | None = None, *, width: float = DEFAULT_WIDTH) -> Any:
    """Draw the batch of every candidate over the tokens, and its hours by its loss penalty.

    Args:
        facts: the result of `rampup design --json`.
        path, width: see `rampup.show.figures.draw_batch`.

    Raises:
        RampupError: see `draw_batch`.
    """
    figure = _new_figure(width, 4.2)
    over_tokens, by_loss = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, candidate in enumerate(facts["candidates"]):
        style, sizes = _line_style(number), candidate["sizes"]
        style |= {"linewidth": 3.0, "alpha": 0.5} if number >= len(LINES) else {}
        edges = [*candidate["start_tokens"], facts["train_tokens"]]
        over_tokens.step(edges, [*sizes, sizes[-1]], where="post", label=candidate["name"], **style)
        if candidate["loss_penalty"] is not None:
            low, high = (abs(candidate["loss_penalty"] - candidate[f"loss_penalty_{end}"]) for end in ("low", "high"))
            by_loss.errorbar(
                candidate["hours"],
                candidate["loss_penalty"],
                yerr=[[low], [high]],
                fmt=MARKERS[number],
                capsize=3,
                color=style["color"],
            )
    _prepare(over_tokens, x="tokens", y="global batch, samples", from_zero=False)
    over_tokens.set_yscale("log", base=2)
    used = sorted({size for candidate in facts["candidates"] for size in candidate["sizes"]})
    over_tokens.set_yticks(used, [f"{size:,}" for size in used])
    over_tokens.minorticks_off()
    _prepare(by_loss, x="hours", y="expected loss penalty", from_zero=False)
    figure.legend(*over_tokens.get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    return _save(figure, path)


def _interval(candidate: Mapping[str, Any], name: str) -> str:
    """Return a loss with its interval."""
    if candidate[name] is None:
        return "-"
    value, low, high = (f"{candidate[name + end]:.4f}" for end in ("", "_low", "_high"))
    return value if low == value == high else f"{value} ({low} to {high})"
