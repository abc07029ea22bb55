"""The learning rate during a ramp: its scale in each phase, and the clock of its
schedule.

Seesaw makes cuts of the learning rate into growth of the batch (Meterez et al. 2025,
arXiv 2510.14717). A cut by a is like a cut by sqrt(a) with a batch a times larger, as
long as the noise of the gradient dominates, and the second takes fewer steps. For SGD,
the batch takes the whole cut (Smith et al. 2017, arXiv 1711.00489). In general, the
rate is `level * growth**exponent`: `level` is the planned rate relative to its peak,
`growth` the batch relative to the planned one. So a batch that is capped or rounded
leaves the rest of the cut to the rate.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from rampup.errors import RampDefinitionError, choice_error
from rampup.plan.numbers import check_whole_or_none
from rampup.plan.ramp import BatchRamp, check_num_phases

BatchScaling = Literal["none", "sqrt", "linear"]
BATCH_SCALING = get_args(BatchScaling)
Clock = Literal["steps", "samples"]
CLOCKS = get_args(Clock)
# Cuts of the rate in one schedule. With a factor near 1 there would be as many as there
# are samples.
MAX_CUTS = 10_000


def learning_rate_scale(
    global_batch_size: int, reference_size: int, scaling: BatchScaling
) -> float:
    """Return the factor on the learning rate: linear for SGD (Goyal et al. 2017), sqrt
    for Adam (Malladi et al. 2022).
    """
    ratio = global_batch_size / reference_size
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


def decay_progress(
    progress: Any,
    *,
    kind: str,
    warmup_fraction: float,
    decay_fraction: float,
    xp: Any = None,
) -> Any:
    """Return the completed part of a schedule's decay: the rate is peak + (final -
    peak) * this. `xp` is numpy or jax.numpy.
    """
    clip, cos = (
        (xp.clip, xp.cos)
        if xp
        else (lambda x, low, high: min(max(x, low), high), math.cos)
    )
    if kind == "constant":
        return 0.0
    decay = max(decay_fraction if kind == "wsd" else 1 - warmup_fraction, 1e-9)
    done = clip((progress - (1 - decay)) / decay, 0.0, 1.0)
    if kind == "cosine":
        done = 0.5 * (1 - cos(math.pi * done))
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSegment:
    """Steps of one phase in which the schedule's progress is linear. With Seesaw, a
    phase has a segment for every cut in it.

    progress(step) = progress + (step - start_step) * progress_per_step, and the rate is
    peak * shape(progress) * scale. After the warm-up, a `level` replaces
    shape(progress). A device gets progress and no samples: their number can overflow
    int32.
    """

    start_step: int  # first optimizer step of the segment
    progress: float  # fraction of the schedule completed before that step; 1 is its end
    progress_per_step: float  # fraction that each step adds
    scale: float  # factor on the learning rate
    global_batch_size: int  # samples per optimizer step
    # The rate after warm-up relative to the peak; None = that of the schedule's shape.
    level: float | None = None

    def progress_at(self, step: int) -> float:
        """Return the fraction of the schedule completed before a step of the segment."""
        return self.progress + (step - self.start_step) * self.progress_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """How the learning rate of a plan follows its steps and its batches.

    Attributes:
        clock: the unit of the schedule's progress. A `Config` has another default,
            `samples`.
        schedule_steps: length of the schedule in optimizer steps. None = those of the
            run.
        batch_scaling: how the rate depends on the batch size, relative to
            `reference_batch_size`.
        reference_batch_size: the batch size for which the hyperparameters were chosen;
            None = that of the last phase.
        seesaw: the transform that made the ramp; None if there is none.

    Example:
        >>> RateRule(batch_scaling="sqrt", reference_batch_size=256).clock
        'steps'
    """

    clock: Clock = "steps"
    schedule_steps: int | None = None
    batch_scaling: BatchScaling = "none"
    reference_batch_size: int | None = None
    seesaw: Seesaw | None = None

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise choice_error("learning_rate_clock", self.clock, CLOCKS)
        if self.batch_scaling not in BATCH_SCALING:
            name = "learning_rate_batch_scaling"
            raise choice_error(name, self.batch_scaling, BATCH_SCALING)
        check_whole_or_none(
            1,
            schedule_steps=self.schedule_steps,
            reference_batch_size=self.reference_batch_size,
        )


def clock_segments(
    ramp: BatchRamp,
    rule: RateRule,
    *,
    schedule_steps: int,
    reference_size: int,
    schedule_samples: int | None = None,
) -> tuple[ClockSegment, ...]:
    """Return the schedule's clock, phase by phase. On that of samples, its length is
    `schedule_samples` or, if None, what the ramp consumes in `schedule_steps`.
    """
    clock, seesaw = rule.clock, rule.seesaw
    total = (
        schedule_steps
        if clock == "steps"
        else schedule_samples or ramp.samples_before(schedule_steps)
    )
    starts = {phase.start_step for phase in ramp.phases}
    if seesaw is not None:
        # A cut takes effect with the first step that starts at or past its sample.
        starts |= {ramp.step_of_sample(cut.sample - 1) + 1 for cut in seesaw.cuts}
    segments = []
    for step in sorted(starts):
        sample = ramp.samples_before(step)
        size = ramp.phase_at(step).global_batch_size
        base = (
            size
            if seesaw is None
            else seesaw.base.phase_of_sample(sample).global_batch_size
        )
        growth = 1.0 if seesaw is None else float((size / base) ** seesaw.exponent)
        scale = learning_rate_scale(base, reference_size, rule.batch_scaling)
        segments.append(
            ClockSegment(
                start_step=step,
                progress=(step if clock == "steps" else sample) / total,
                progress_per_step=(1 if clock == "steps" else size) / total,
                scale=scale * growth,
                global_batch_size=size,
                level=None if seesaw is None else seesaw.level_at(sample),
            )
        )
    return tuple(segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One cut of the planned learning rate."""

    sample: int  # the first step at or past this sample has the new rate
    level: float  # the planned rate from there on, relative to its peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Seesaw:
    """A ramp and a stepwise learning rate in which the batch grows with every cut of
    the rate.

    Cuts out of order and limits that contradict the planned ramp raise a
    RampDefinitionError.

    Attributes:
        base: the planned ramp.
        cuts: the cuts of the planned learning rate, in order.
        ramp: the ramp that results (derived, unless a checkpoint has it).
        max_batch_size: None = no limit. At the limit, a cut lowers the rate alone.
        multiple: batches that grow are rounded down to a multiple of this number of
            samples.
        total_samples: samples of the run. A batch does not grow beyond the samples that
            are left.
        schedule_samples: planned length of the schedule in samples, on which warm-up
            and cuts are placed. None: what `ramp` consumes in the schedule's steps,
            which can exceed the plan by a part of a batch.
        exponent: 1/2 for Adam, 1 for SGD.

    Example:
        >>> cuts = tuple(Cut(sample=4096 * k, level=0.5**k) for k in (1, 2, 3))
        >>> Seesaw(
        ...     base=BatchRamp.constant(8), cuts=cuts, max_batch_size=32
        ... ).ramp.to_rows()
        [[0, 0, 8], [512, 4096, 16], [768, 8192, 32]]
    """

    base: BatchRamp
    cuts: tuple[Cut, ...]
    ramp: BatchRamp = None  # type: ignore[assignment]  # never None after __post_init__
    max_batch_size: int | None = None
    multiple: int = 1
    total_samples: int | None = None
    schedule_samples: int | None = None
    exponent: float = 0.5

    def __post_init__(self) -> None:
        samples = [cut.sample for cut in self.cuts]
        levels = [1.0, *(cut.level for cut in self.cuts)]
        if samples != sorted(set(samples)) or (samples and samples[0] < 1):
            raise RampDefinitionError(
                "the cuts of a schedule must be at increasing samples from 1 on:"
                f" {samples[:10]}"
            )
        if levels != sorted(levels, reverse=True) or levels[-1] < 0:
            raise RampDefinitionError(
                f"the cuts of a schedule must lower the rate: {levels[:10]}"
            )
        largest = max(self.base.sizes)
        limit = math.inf if self.max_batch_size is None else self.max_batch_size
        if limit < largest:
            raise RampDefinitionError(
                f"seesaw_max_batch_size={limit} must be at least the"
                f" largest planned batch, {largest}",
                key="seesaw_max_batch_size",
                nearest=(largest,),
            )
        check_num_phases(len(self.base.phases) + len(self.cuts), key="seesaw_factor")
        if self.ramp is not None:
            return
        # The planned ramp with a larger batch after every cut.
        pairs: list[tuple[int, int]] = []
        for start in sorted(
            {phase.start_sample for phase in self.base.phases}
            | {cut.sample for cut in self.cuts}
        ):
            base = self.base.phase_of_sample(start).global_batch_size
            # A relative error of 1e-9 must not round 2 * 8 down to 15.
            wanted = base / max(self.level_at(start), 1e-18) * (1 + 1e-9)
            size = max(int(min(wanted, limit)) // self.multiple * self.multiple, base)
            # With fewer samples left than this batch, the size stays as before.
            if self.total_samples is not None and size > self.total_samples - start:
                size = min(size, max(base, pairs[-1][1] if pairs else base))
            pairs.append((start, size))
        object.__setattr__(self, "ramp", BatchRamp.piecewise(pairs))

    def level_at(self, sample: int) -> float:
        """Return the planned rate at a sample, relative to its peak."""
        index = bisect.bisect_right(self.cuts, sample, key=lambda cut: cut.sample)
        return self.cuts[index - 1].level if index else 1.0

    def steps_of(self, planned_steps: int) -> int:
        """Return the steps of `ramp` that consume the samples of so many steps of the
        planned ramp.
        """
        return self.ramp.step_of_sample(self.base.samples_before(planned_steps) - 1) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the ramp."""
        cuts = [[cut.sample, cut.level] for cut in self.cuts]
        numbers = {"schedule_samples": self.schedule_samples, "exponent": self.exponent}
        return {"base": self.base.to_rows(), "cuts": cuts, **numbers}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], ramp: BatchRamp) -> Self:
        """Return the transform of a checkpoint, with its ramp."""
        cuts = tuple(
            Cut(sample=int(sample), level=float(level))
            for sample, level in record["cuts"]
        )
        return cls(
            base=BatchRamp.from_rows(record["base"]),
            cuts=cuts,
            ramp=ramp,
            schedule_samples=record.get("schedule_samples"),
            exponent=record["exponent"],
        )


def discretize(
    rate: Callable[[float], float], *, factor: float, total_samples: int
) -> tuple[Cut, ...]:
    """Return the cuts of a rate that never increases: cut k is where it has fallen to
    `factor**-k`, for a factor above 1.
    """
    if not 1 < factor < float("inf"):
        raise RampDefinitionError(
            f"seesaw_factor={factor} must be above 1", key="seesaw_factor", nearest=(2,)
        )
    cuts: list[Cut] = []
    k, end = 1, rate(1.0)
    while (level := float(factor) ** -k) >= end:
        # A rate that is mathematically at the level may be above it in floating point.
        reached = level * (1 + 1e-12)
        before = cuts[-1].sample if cuts else 0
        rest = range(before, total_samples)
        sample = before + bisect.bisect_left(
            rest, -reached, key=lambda sample: -rate(sample / total_samples)
        )
        if sample >= total_samples:
            break
        if cuts and sample == before:
            cuts.pop()
        cuts.append(Cut(sample=sample, level=level))
        if len(cuts) > MAX_CUTS:
            raise RampDefinitionError(
                f"seesaw_factor={factor} gives more than {MAX_CUTS:,} cuts of the"
                " learning rate; use a larger factor",
                key="seesaw_factor",
                nearest=(2,),
            )
        k += 1
    return tuple(cuts)
