"""The learning rate during a ramp: its scale in each phase, and the clock of its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rampup.errors import choice_error
from rampup.plan.ramp import BatchRamp

BatchScaling = Literal["none", "sqrt", "linear"]
BATCH_SCALING: tuple[BatchScaling, ...] = ("none", "sqrt", "linear")
Clock = Literal["steps", "samples"]
CLOCKS: tuple[Clock, ...] = ("steps", "samples")


def learning_rate_scale(global_batch_size: int, final_global_batch_size: int, scaling: BatchScaling) -> float:
    """Return the factor on the learning rate for a batch smaller than the final one.

    Args:
        global_batch_size: samples per optimizer step.
        final_global_batch_size: samples per optimizer step in the last phase, for which the learning rate was chosen.
        scaling: `none`; `linear`, in proportion to the batch (SGD; Goyal et al. 2017, arXiv 1706.02677); or `sqrt`, in
            proportion to its square root (Adam; Malladi et al. 2022, arXiv 2205.10287).

    Example:
        >>> learning_rate_scale(256, 1024, "sqrt")
        0.5
    """
    if scaling not in BATCH_SCALING:
        raise choice_error("learning_rate_batch_scaling", scaling, BATCH_SCALING)
    ratio = global_batch_size / final_global_batch_size
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSegment:
    """The schedule's clock within one phase: progress(step) = progress + (step - start_step) * progress_per_step.

    A sample count can overflow the int32 of a device. These three numbers cannot.
    """

    start_step: int  # first optimizer step of the phase
    progress: float  # fraction of the schedule completed before that step; 1 is its end
    progress_per_step: float  # fraction that each step adds
    scale: float  # factor on the learning rate in this phase


def clock_segments(ramp: BatchRamp, *, clock: Clock, schedule_steps: int, scaling: BatchScaling) -> tuple[ClockSegment, ...]:
    """Return the schedule's clock, phase by phase.

    Args:
        ramp: the ramp.
        clock: `steps` counts optimizer steps. `samples` counts samples, so that warm-up and decay keep their position in the
            data when the batch size changes.
        schedule_steps: length of the schedule in optimizer steps.
        scaling: how the learning rate depends on the batch size.

    Example:
        >>> ramp = BatchRamp.piecewise([(0, 10), (100, 30)])
        >>> [s.progress for s in clock_segments(ramp, clock="samples", schedule_steps=20, scaling="none")]
        [0.0, 0.25]
    """
    if clock not in CLOCKS:
        raise choice_error("learning_rate_clock", clock, CLOCKS)
    total = schedule_steps if clock == "steps" else ramp.samples_before(schedule_steps)
    final = ramp.sizes[-1]
    return tuple(
        ClockSegment(
            start_step=phase.start_step,
            progress=(phase.start_step if clock == "steps" else phase.start_sample) / total,
            progress_per_step=(1 if clock == "steps" else phase.global_batch_size) / total,
            scale=learning_rate_scale(phase.global_batch_size, final, scaling),
        )
        for phase in ramp.phases
    )
