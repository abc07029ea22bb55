"""The numbers behind pictures: phases of a plan, its learning rate, and the
metrics of a run.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.errors import DataError
from rampup.loop.run_folder import EVAL_FILE, METRICS_FILE, describe_damage, read_lines
from rampup.plan.noise_scale import NoiseEstimate
from rampup.plan.numbers import finite_or_none
from rampup.plan.plan import RampPlan

MAX_POINTS, RATE_POINTS = 1_200, 400


def drawn_phases(plan: RampPlan) -> list[dict[str, Any]]:
    """Return `RampPlan.phase_rows` with the number of each phase and where it ends in a
    picture; of many phases, some.
    """
    rows = subsample(
        [{"phase": number, **row} for number, row in enumerate(plan.phase_rows())],
        MAX_POINTS,
    )
    # The ramp is drawn up to a third beyond its end, but not beyond a run that reaches
    # its end.
    ramp_steps = plan.ramp.ramp_steps
    last = ramp_steps + -(-ramp_steps // 3) if ramp_steps else plan.total_steps
    if plan.total_steps > ramp_steps:
        last = min(plan.total_steps, last)
    ends = [row["start_step"] for row in rows[1:]] + [last]
    return [
        row | {"end_step": end, "end_sample": plan.ramp.samples_before(end)}
        for row, end in zip(rows, ends, strict=True)
    ]


def rate_points(
    plan: RampPlan, rate: Callable[[int], float]
) -> list[tuple[int, int, float]]:
    """Return step, samples before it and learning rate, at about `RATE_POINTS` even
    steps and on both sides of every known kink.
    """
    last = plan.total_steps - 1
    kinks = {
        segment.start_step + shift
        for segment in subsample(plan.clock, RATE_POINTS // 4)
        for shift in (-1, 0)
    }
    kinks |= {plan.schedule_steps - 1, plan.schedule_steps}
    even = {round(last * part / RATE_POINTS) for part in range(RATE_POINTS + 1)}
    steps = sorted(step for step in kinks | even if 0 <= step <= last)
    return [(step, plan.ramp.samples_before(step), rate(step)) for step in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The metrics of one run, one value per step."""

    name: str  # the name of the run in a picture
    steps: tuple[int, ...]
    samples: tuple[int, ...]  # samples consumed after each step
    losses: tuple[float, ...]  # NaN if the loss was not finite
    tokens_per_second: tuple[float, ...]  # NaN if unknown
    sizes: tuple[int, ...]  # samples of each step
    phases: tuple[int, ...]  # phase of each step
    eval_samples: tuple[int, ...] = ()  # of evaluations
    eval_losses: tuple[float, ...] = ()
    # The noise scale in samples, and the ends of its interval; NaN where it is unknown
    # or has no end. Empty if not measured.
    noise_scales: tuple[float, ...] = ()
    noise_lows: tuple[float, ...] = ()
    noise_highs: tuple[float, ...] = ()
    # what `losses` are; with `reward`, of reinforcement learning, `eval_losses` are
    # accuracies
    quantity: str = "loss"
    learning_rates: tuple[float, ...] = ()  # NaN where unknown
    seconds: tuple[
        float, ...
    ] = ()  # of each step without its compilation; NaN where unknown
    # More curves of a report, by title.
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path, *, name: str) -> RunMetrics:
        """Return the metrics in the folder of a run; a damaged line is refused."""
        for file in (METRICS_FILE, EVAL_FILE):
            if damage := describe_damage(folder / file):
                raise DataError(
                    f"{damage}; resume the run, which removes such lines, or delete"
                    " them",
                    key="run",
                )
        return cls.from_lines(
            name, read_lines(folder / METRICS_FILE), read_lines(folder / EVAL_FILE)
        )

    @classmethod
    def from_lines(
        cls,
        name: str,
        lines: Iterable[Mapping[str, Any]],
        eval_lines: Iterable[Mapping[str, Any]] = (),
    ) -> RunMetrics:
        """Return the metrics in the lines of metrics.jsonl and eval.jsonl; a line
        without the counts is refused.
        """
        rows = list(lines)
        if not rows:
            raise DataError(f"{name} has no steps in its {METRICS_FILE}", key="run")

        def values_of(key: str) -> tuple[float, ...]:
            return tuple(finite_or_nan(row.get(key)) for row in rows)

        keys = ("step", "consumed_samples", "global_batch_size", "phase")
        counts = {
            key: tuple(require_count(row, key, name) for row in rows) for key in keys
        }
        after = dict(zip(counts["step"], counts["consumed_samples"], strict=True))
        quantity, evaluated = (
            ("reward", "accuracy")
            if all("reward" in row for row in rows)
            else ("loss", "eval_loss")
        )
        evals = [
            (after[row["step"]], finite_or_nan(row.get(evaluated)))
            for row in eval_lines
            if row["step"] in after
        ]
        seconds = zip(
            values_of("step_seconds"), values_of("compile_seconds"), strict=True
        )
        noise = (
            (("scale", ""), ("low", "_low"), ("high", "_high"))
            if any("noise_scale_samples" in row for row in rows)
            else ()
        )
        return cls(
            name=name,
            steps=counts["step"],
            samples=counts["consumed_samples"],
            losses=values_of(quantity),
            tokens_per_second=values_of("tokens_per_second"),
            sizes=counts["global_batch_size"],
            learning_rates=values_of("learning_rate"),
            seconds=tuple(
                max(step - compiled, 0.0) if math.isfinite(compiled) else step
                for step, compiled in seconds
            ),
            phases=counts["phase"],
            eval_samples=tuple(sample for sample, _ in evals),
            eval_losses=tuple(loss for _, loss in evals),
            **{
                f"noise_{name}s": values_of(f"noise_scale_samples{end}")
                for name, end in noise
            },
            quantity=quantity,
        )

    def noise_at(self, place: int) -> str:
        """Return the noise scale after a step as text, with its interval."""
        series = (self.noise_scales, self.noise_lows, self.noise_highs)
        value, low, high = (finite_or_none(values[place]) for values in series)
        return str(NoiseEstimate(value=value, low=low, high=high))

    def by_phase(self) -> list[dict[str, int | float | str | None]]:
        """Return the steps, last loss and median tokens per second of each phase."""
        rows = list[dict[str, int | float | str | None]]()
        for phase in sorted(set(self.phases)):
            places = [
                place for place, value in enumerate(self.phases) if value == phase
            ]
            # The median ignores steps that waited for compilation, a checkpoint or an
            # evaluation.
            speeds = sorted(
                value
                for place in places
                if math.isfinite(value := self.tokens_per_second[place])
            )
            last = places[-1]
            row = {
                "phase": phase,
                "global batch size": self.sizes[last],
                "steps done": len(places),
                f"last {self.quantity}": finite_or_none(self.losses[last]),
                "tokens/s (median)": speeds[len(speeds) // 2] if speeds else None,
            }
            if self.noise_scales:
                row["noise scale (samples)"] = self.noise_at(last)
            rows.append(row)
        return rows


def require_count(row: Mapping[str, Any], key: str, name: str) -> int:
    """Return a whole number in a line of metrics.jsonl, or refuse what is not one, or
    too large for any count.
    """
    value = row.get(key)
    if type(value) is int and 0 <= value < 10**18:
        return value
    place = f"{name}, step {row['step']} of its {METRICS_FILE}"
    raise DataError(
        f"{place}: {key}={reprlib.repr(value)} is not a whole number below 1e18",
        key=key,
    )


def mean_of_neighbours(
    xs: Sequence[float], ys: Sequence[float], *, most: int = MAX_POINTS
) -> tuple[list[float], list[float], int]:
    """Return at most `most` points: means of equally many consecutive finite ys, each
    at its last x, and how many.

    >>> mean_of_neighbours([1, 2, 3, 4], [1.0, 3.0, 5.0, float("nan")], most=2)
    ([2, 4], [2.0, 5.0], 2)
    """
    number = max(-(-len(xs) // most), 1)
    groups = [ys[start : start + number] for start in range(0, len(ys), number)]
    finite = [[y for y in group if math.isfinite(y)] for group in groups]
    means = [sum(group) / len(group) if group else math.nan for group in finite]
    return (
        [xs[min(start + number, len(xs)) - 1] for start in range(0, len(xs), number)],
        means,
        number,
    )


def subsample(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [
        items[round((len(items) - 1) * place / (most - 1))] for place in range(most)
    ]


def finite_or_nan(value: Any) -> float:
    """Return a finite number unchanged, and NaN for anything else."""
    known = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
    )
    return float(value) if known else math.nan
