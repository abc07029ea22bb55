"""What pictures are made of: the phases of a plan, its learning rate and a run's metrics, as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rampup.errors import DataError
from rampup.plan.plan import RampPlan
from rampup.plan.timetable import bubble_fraction

MAX_POINTS = 1_200


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase as it is drawn; the last one, which has no end, as far as the picture goes.

    Attributes:
        phase: its number.
        start_step, end_step, start_sample, end_sample: where it is drawn.
        global_batch_size: samples per optimizer step.
        num_microbatches: passes times pipeline microbatches of one replica and optimizer step.
        accumulation_steps: passes.
        bubble: idle share of the pipeline.
    """

    phase: int
    start_step: int
    end_step: int
    start_sample: int
    end_sample: int
    global_batch_size: int
    num_microbatches: int
    accumulation_steps: int
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """The learning rate of one optimizer step.

    Attributes:
        step: the step.
        sample: samples consumed before it.
        rate: its learning rate.
    """

    step: int
    sample: int
    rate: float


def last_drawn_step(plan: RampPlan) -> int:
    """Return the step up to which the ramp is drawn: a third beyond its end, and no further than the run if it gets so far.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> keys = {"splitter": BatchSplitter(data_parallel_size=1), "num_devices": 1, "total_steps": 1000}
        >>> last_drawn_step(RampPlan(ramp=BatchRamp.from_schedule("0:8 240:16"), **keys))
        40
        >>> last_drawn_step(RampPlan(ramp=BatchRamp.constant(8), **keys))
        1000
    """
    ramp_steps = plan.ramp.ramp_steps
    if ramp_steps == 0:
        return plan.total_steps
    beyond = ramp_steps + -(-ramp_steps // 3)
    return min(plan.total_steps, beyond) if plan.total_steps > ramp_steps else beyond


def phase_spans(plan: RampPlan, *, most: int = MAX_POINTS) -> tuple[Span, ...]:
    """Return the phases as they are drawn; of very many, evenly chosen ones, the first and the last among them.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> ramp, splitter = BatchRamp.from_schedule("0:8 240:16"), BatchSplitter(data_parallel_size=1)
        >>> plan = RampPlan(ramp=ramp, splitter=splitter, num_devices=1, total_steps=99)
        >>> [(span.start_sample, span.end_sample) for span in phase_spans(plan)]
        [(0, 240), (240, 400)]
    """
    end = last_drawn_step(plan)
    phases = some(plan.ramp.phases, most)
    stops = [phase.start_step for phase in phases[1:]] + [end]
    spans = []
    for phase, stop in zip(phases, stops, strict=True):
        split = plan.splits[phase.index]
        bubble = bubble_fraction(plan.splitter.num_stages, split.num_pipeline_microbatches, plan.splitter.num_repeats)
        spans.append(
            Span(
                phase=phase.index,
                start_step=phase.start_step,
                end_step=stop,
                start_sample=phase.start_sample,
                end_sample=plan.ramp.samples_before(stop),
                global_batch_size=phase.global_batch_size,
                num_microbatches=split.num_microbatches,
                accumulation_steps=split.accumulation_steps,
                bubble=float(bubble),
            )
        )
    return tuple(spans)


def rate_points(plan: RampPlan, rate: Callable[[int], float], *, most: int = 400) -> tuple[RatePoint, ...]:
    """Return the learning rate over the whole run, at evenly spaced steps and on both sides of every kink that is known.

    Args:
        plan: the plan.
        rate: from an optimizer step to its learning rate.
        most: about how many points.
    """
    last = plan.total_steps - 1
    kinks = {phase.start_step + shift for phase in some(plan.ramp.phases, most // 4) for shift in (-1, 0)}
    kinks |= {plan.schedule_steps - 1, plan.schedule_steps}
    even = {round(last * part / most) for part in range(most + 1)}
    steps = sorted(step for step in kinks | even if 0 <= step <= last)
    return tuple(RatePoint(step=step, sample=plan.ramp.samples_before(step), rate=rate(step)) for step in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The metrics of one run, a value a step.

    Attributes:
        name: what the run is called in a picture.
        steps: numbers of the steps.
        samples: samples consumed after each.
        losses: not a number where the loss was not finite.
        tokens_per_second: not a number where it is not known.
        sizes: samples of each step.
        phases: phase of each step.
        eval_samples, eval_losses: evaluations.
    """

    name: str
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    losses: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    sizes: tuple[int, ...]
    phases: tuple[int, ...]
    eval_samples: tuple[int, ...] = ()
    eval_losses: tuple[float, ...] = ()

    @classmethod
    def from_lines(
        cls, name: str, lines: Iterable[Mapping[str, Any]], eval_lines: Iterable[Mapping[str, Any]] = ()
    ) -> RunMetrics:
        """Return the metrics of the lines of metrics.jsonl and eval.jsonl.

        Raises:
            DataError: no lines, or a line without a number that pictures need.

        Example:
            >>> line = {"step": 0, "consumed_samples": 8, "loss": None, "global_batch_size": 8, "phase": 0}
            >>> run = RunMetrics.from_lines("a", [line])
            >>> run.samples, run.losses
            ((8,), (nan,))
        """
        rows = list(lines)
        if not rows:
            raise DataError(f"{name} has no steps in its metrics.jsonl", key="run")
        whole = {key: tuple(_whole(row, key, name) for row in rows) for key in ("step", "consumed_samples")}
        counts = {key: tuple(_whole(row, key, name) for row in rows) for key in ("global_batch_size", "phase")}
        after = dict(zip(whole["step"], whole["consumed_samples"], strict=True))
        evals = [(after[row["step"]], _number(row.get("eval_loss"))) for row in eval_lines if row["step"] in after]
        return cls(
            name=name,
            steps=whole["step"],
            samples=whole["consumed_samples"],
            losses=tuple(_number(row.get("loss")) for row in rows),
            tokens_per_second=tuple(_number(row.get("tokens_per_second")) for row in rows),
            sizes=counts["global_batch_size"],
            phases=counts["phase"],
            eval_samples=tuple(sample for sample, _ in evals),
            eval_losses=tuple(loss for _, loss in evals),
        )

    def by_phase(self) -> list[dict[str, int | float | None]]:
        """Return, phase by phase, how many steps the run did, its last loss and its median tokens per second.

        The median leaves out what a step waited for: compilation, checkpoints, evaluation.
        """
        rows: list[dict[str, int | float | None]] = []
        for phase in sorted(set(self.phases)):
            places = [place for place, value in enumerate(self.phases) if value == phase]
            speeds = sorted(value for place in places if math.isfinite(value := self.tokens_per_second[place]))
            loss = self.losses[places[-1]]
            rows.append(
                {
                    "phase": phase,
                    "global batch size": self.sizes[places[-1]],
                    "steps done": len(places),
                    "last loss": loss if math.isfinite(loss) else None,
                    "tokens/s (median)": speeds[len(speeds) // 2] if speeds else None,
                }
            )
        return rows


def mean_of_neighbours(
    xs: Sequence[float], ys: Sequence[float], *, most: int = MAX_POINTS
) -> tuple[list[float], list[float], int]:
    """Return at most `most` points: means of equally many consecutive finite ys, each at its last x, and how many.

    Example:
        >>> mean_of_neighbours([1, 2, 3, 4], [1.0, 3.0, 5.0, float("nan")], most=2)
        ([2, 4], [2.0, 5.0], 2)
    """
    number = max(-(-len(xs) // most), 1)
    groups = [ys[start : start + number] for start in range(0, len(ys), number)]
    finite = [[y for y in group if math.isfinite(y)] for group in groups]
    means = [sum(group) / len(group) if group else math.nan for group in finite]
    return [xs[min(start + number, len(xs)) - 1] for start in range(0, len(xs), number)], means, number


def short(value: float) -> str:
    """Write a number in few letters, with K, M, B and T for powers of 1,000.

    Example:
        >>> short(1500), short(2e12), short(0.003), short(0), short(-2.5e7)
        ('1.5K', '2T', '0.003', '0', '-25M')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def some(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return at most `most` items, evenly chosen, the first and the last among them.

    Example:
        >>> some(range(11), 3)
        [0, 5, 10]
    """
    if len(items) <= most:
        return items
    return [items[round((len(items) - 1) * place / (most - 1))] for place in range(most)]


def _whole(row: Mapping[str, Any], key: str, name: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"{name}, step {row['step']} of its metrics.jsonl: {key}={value!r} is not a whole number", key=key)
    return value


def _number(value: object) -> float:
    """Return a finite number as it is, and anything else as not a number."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known else math.nan
