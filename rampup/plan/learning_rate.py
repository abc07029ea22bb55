"""The learning rate during a ramp: its scale in each phase, and the clock of its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rampup.errors import choice_error
from rampup.plan.ramp import BatchRamp
from rampup.plan.seesaw import Seesaw

BatchScaling = Literal["none", "sqrt", "linear"]
BATCH_SCALING: tuple[BatchScaling, ...] = ("none", "sqrt", "linear")
Clock = Literal["steps", "samples"]
CLOCKS: tuple[Clock, ...] = ("steps", "samples")


def learning_rate_scale(global_batch_size: int, reference_size: int, scaling: BatchScaling) -> float:
    """Return the factor on the learning rate for a batch other than the reference batch.

    Args:
        global_batch_size: samples per optimizer step.
        reference_size: samples per optimizer step for which the learning rate was chosen, such as those of the last phase.
        scaling: `none`; `linear`, in proportion to the batch (SGD; Goyal et al. 2017, arXiv 1706.02677); or `sqrt`, in
            proportion to its square root (Adam; Malladi et al. 2022, arXiv 2205.10287).

    Example:
        >>> learning_rate_scale(256, 1024, "sqrt")
        0.5
    """
    if scaling not in BATCH_SCALING:
        raise choice_error("learning_rate_batch_scaling", scaling, BATCH_SCALING)
    ratio = global_batch_size / reference_size
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


def decay_progress(
    progress: Any, *, kind: str, warmup_fraction: float, decay_fraction: float, decay_style: str, xp: Any = None
) -> Any:
    """Return the completed part of a schedule's decay, from 0 to 1: the rate is peak + (final - peak) * this.

    Args:
        progress: fraction of the schedule, from 0 to 1.
        kind: `cosine`, `wsd` or `constant`.
        warmup_fraction: fraction of the warm-up, after which `cosine` decays.
        decay_fraction: fraction at the end in which `wsd` decays.
        decay_style: `linear` or `cosine`, for `wsd`.
        xp: numpy or jax.numpy, for an array of progress.

    Example:
        >>> decay_progress(0.75, kind="wsd", warmup_fraction=0.1, decay_fraction=0.5, decay_style="linear")
        0.5
    """
    clip, cos = (xp.clip, xp.cos) if xp else (lambda x, low, high: min(max(x, low), high), math.cos)
    if kind == "constant":
        return 0.0
    decay = max(decay_fraction if kind == "wsd" else 1 - warmup_fraction, 1e-9)
    done = clip((progress - (1 - decay)) / decay, 0.0, 1.0)
    if kind == "cosine" or decay_style == "cosine":
        done = 0.5 * (1 - cos(math.pi * done))
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSegment:
    """The schedule's clock within one phase: progress(step) = progress + (step - start_step) * progress_per_step.

    A sample count can overflow the int32 of a device. These three numbers cannot. With Seesaw, a phase in which the rate is cut
    has several segments.
    """

    start_step: int  # first optimizer step of the phase
    progress: float  # fraction of the schedule completed before that step; 1 is its end
    progress_per_step: float  # fraction that each step adds
    scale: float  # factor on the learning rate in this phase
    global_batch_size: int  # samples per optimizer step
    level: float | None = None  # the rate after warm-up relative to the peak; None = that of the schedule's shape


def clock_segments(
    ramp: BatchRamp,
    *,
    clock: Clock,
    schedule_steps: int,
    scaling: BatchScaling,
    reference_size: int | None = None,
    seesaw: Seesaw | None = None,
) -> tuple[ClockSegment, ...]:
    """Return the schedule's clock, phase by phase.

    Args:
        ramp: the ramp.
        clock: `steps` counts optimizer steps. `samples` counts samples, so that warm-up and decay keep their position in the
            data when the batch size changes.
        schedule_steps: length of the schedule in optimizer steps.
        scaling: how the learning rate depends on the batch size.
        reference_size: the batch size for which the learning rate was chosen; None = that of the last phase.
        seesaw: the transform that made the ramp, if any.

    Example:
        >>> ramp = BatchRamp.piecewise([(0, 10), (100, 30)])
        >>> [s.progress for s in clock_segments(ramp, clock="samples", schedule_steps=20, scaling="none")]
        [0.0, 0.25]
    """
    if clock not in CLOCKS:
        raise choice_error("learning_rate_clock", clock, CLOCKS)
    total = schedule_steps if clock == "steps" else ramp.samples_before(schedule_steps)
    reference = reference_size or (seesaw.base if seesaw else ramp).sizes[-1]

    def segment(start: Any, size: int, scale: float, level: float | None = None) -> ClockSegment:
        return ClockSegment(
            start_step=start.start_step,
            progress=(start.start_step if clock == "steps" else start.start_sample) / total,
            progress_per_step=(1 if clock == "steps" else size) / total,
            scale=scale,
            global_batch_size=size,
            level=level,
        )

    if seesaw is not None:
        return tuple(
            segment(
                step,
                step.global_batch_size,
                learning_rate_scale(step.base_batch_size, reference, scaling) * step.scale,
                step.level,
            )
            for step in seesaw.steps
        )
    return tuple(
        segment(phase, phase.global_batch_size, learning_rate_scale(phase.global_batch_size, reference, scaling))
        for phase in ramp.phases
    )
