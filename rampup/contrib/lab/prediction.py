"""What a design has predicted for a run, kept in the run's folder, beside what the run
measured.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rampup.config.schema import IDENTITY_KEYS, KEYS, Config
from rampup.contrib.lab.measured_design import LOSS_SHARE
from rampup.errors import DataError
from rampup.loop.run_folder import PREDICTION_FILE, write_whole
from rampup.plan.describe import SECONDS_PER_HOUR
from rampup.plan.numbers import finite_or_none
from rampup.show.format import format_value
from rampup.show.series import RunMetrics

# What a prediction is for besides the keys of its schedule. Seeds are left out: it is
# for all of them.
_SECTIONS = ("Learning rate", "Optimizer", "Model")
_OTHERS = ("num_devices", "batch_size_schedule_unit", "grain_train_files")
COMPARED = tuple(
    name
    for name, key in KEYS.items()
    if (
        key.section in _SECTIONS
        or name in (*IDENTITY_KEYS, *_OTHERS)
        or name.endswith("_parallelism")
    )
    and not name.endswith("_seed")
)
QUANTITIES = ("loss", "hours")


class Comparison(NamedTuple):
    """A prediction beside its run."""

    # the name of the design's schedule that the run has; the closest one, if it has
    # none
    schedule: str
    # what the run has and what was predicted for, if that differs; then there are no
    # rows
    other_settings: tuple[str, ...]
    # One for each quantity and token count that the run has passed; `low` and `high`
    # are the ends of the predicted interval, `off` is measured less predicted, and
    # `inside` whether it is in the interval. None if not known
    rows: tuple[dict[str, Any], ...]

    def sentences(self) -> tuple[str, ...]:
        """Return how far off the prediction is so far, or why nothing is compared."""
        if self.other_settings:
            return (
                "the prediction is for other settings:"
                f" {'; '.join(self.other_settings)}",
            )
        if not self.rows:
            return ("the run has not reached the first token count of its prediction",)
        last = {row["quantity"]: row for row in self.rows}
        return tuple(
            f"{row['quantity']} after {row['tokens']:,} tokens: predicted"
            f" {row['predicted']}, measured {row['measured']}"
            + (f", off by {row['off by']}" if row["off by"] else "")
            for row in map(_as_text, last.values())
        )

    def table(self) -> list[dict[str, Any]]:
        """Return the rows as text, by quantity."""
        return [
            _as_text(row)
            for quantity in QUANTITIES
            for row in self.rows
            if row["quantity"] == quantity
        ]


def _as_text(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for people: a loss is off by nats, hours by a share of the
    prediction.
    """
    off, predicted = row["off"], row["predicted"]
    if off is None:
        text = ""
    elif row["quantity"] == "loss":
        text = f"{off:+.3f}"
    else:
        text = f"{off / predicted:+.0%}"
    if row["inside"] is False:
        text += ", outside of the interval"
    return {
        "quantity": row["quantity"],
        "tokens": row["tokens"],
        "predicted": with_ends(predicted, row["low"], row["high"]),
        "measured": with_ends(row["measured"]),
        "off by": text,
    }


def with_ends(
    value: float | None,
    low: float | None = None,
    high: float | None = None,
    text: Callable[[float], str] = format_value,
) -> str:
    """Return a number as text, with its interval if that is known and shows."""
    if value is None:
        return "not known"
    shown = text(value)
    if low is None:
        return shown
    if high is None:
        return f"{shown} (at least {text(low)})"
    ends = f"{text(low)} to {text(high)}"
    return shown if ends == f"{shown} to {shown}" else f"{shown} ({ends})"


def write_prediction(folder: Path, config: Config, design: Mapping[str, Any]) -> None:
    """Keep what `rampup.contrib.lab.design_ramp` has returned for a configuration in the folder of
    a run.
    """
    values = config.to_dict()
    text = json.dumps({"config": {name: values[name] for name in COMPARED}, **design})
    write_whole(folder / PREDICTION_FILE, text.encode())


def compare_prediction(
    folder: Path, config: Config, run: RunMetrics
) -> Comparison | None:
    """Return the prediction in the folder of a run beside its metrics, or None;
    `config` is what it was last started with.
    """
    file = folder / PREDICTION_FILE
    if not file.exists():
        return None
    try:
        return _compare(json.loads(file.read_text(encoding="utf-8")), config, run)
    except (json.JSONDecodeError, KeyError) as error:
        raise DataError(
            f"{file} is damaged: it is not what `rampup design --write` writes"
            f" ({error!r})",
            fix="delete it, and the report is without a prediction",
            key="prediction",
        ) from error


def _compare(design: Mapping[str, Any], config: Config, run: RunMetrics) -> Comparison:
    own, length = config.to_dict(), int(design["tokens_per_sample"])

    def changes_from(candidate: Mapping[str, Any]) -> list[str]:
        expected = {**design["config"], **candidate["settings"]}
        return [
            f"{key}={own.get(key)}, predicted for {value}"
            for key, value in expected.items()
            if own.get(key) != value
        ]

    candidate = min(design["candidates"], key=lambda each: len(changes_from(each)))
    changes = changes_from(candidate)
    # A run that was resumed may have had other batches before.
    starts = [tokens // length for tokens in candidate["start_tokens"]]
    for step, end, size in zip(run.steps, run.samples, run.sizes, strict=True):
        predicted = candidate["sizes"][bisect.bisect_right(starts, end - size) - 1]
        if size != predicted and not changes:
            changes = [f"step {step} had a batch of {size:,}, predicted {predicted:,}"]
    rows = [] if changes else _rows(candidate["course"], run, length)
    return Comparison(str(candidate["name"]), tuple(changes), tuple(rows))


def _rows(
    course: Sequence[Mapping[str, Any]], run: RunMetrics, length: int
) -> list[dict[str, Any]]:
    """Return a row for each quantity at each place of the course that a run has
    passed.
    """
    hours = [
        seconds / SECONDS_PER_HOUR for seconds in itertools.accumulate(run.seconds)
    ]
    rows = []
    for point in course:
        samples = point["tokens"] // length
        # The last step with samples up to here. A run ends with the last whole step of
        # its tokens.
        place = bisect.bisect_left(run.samples, samples)
        if place == len(run.samples) and samples - run.samples[-1] < run.sizes[-1]:
            place -= 1
        if place == len(run.samples):
            break
        measured = {
            "loss": _mean_loss(run, place),
            "hours": finite_or_none(hours[place]),
        }
        rows += [
            _row(quantity, point, value)
            for quantity, value in measured.items()
            if point[quantity] is not None
        ]
    return rows


def _mean_loss(run: RunMetrics, place: int) -> float | None:
    """Return the mean over the last share of the samples up to a step."""
    first = bisect.bisect_right(run.samples, (1 - LOSS_SHARE) * run.samples[place])
    losses = [loss for loss in run.losses[first : place + 1] if math.isfinite(loss)]
    return sum(losses) / len(losses) if losses else None


def _row(
    quantity: str, point: Mapping[str, Any], value: float | None
) -> dict[str, Any]:
    """Return a prediction beside what was measured."""
    least, most = point[f"{quantity}_low"], point[f"{quantity}_high"]
    return {
        "quantity": quantity,
        "tokens": point["tokens"],
        "predicted": point[quantity],
        "low": least,
        "high": most,
        "measured": value,
        "off": None if value is None else value - point[quantity],
        "inside": None if value is None else least <= value <= most,
    }
