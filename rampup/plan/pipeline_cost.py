"""How many pipeline microbatches: a smaller bubble against smaller, less efficient microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from rampup.plan.numbers import divisors
from rampup.plan.timetable import bubble_fraction, num_ticks

# What a tick costs beside its arithmetic, where nobody has measured it: moving weights and gradients is worth some hundred
# tokens of arithmetic on accelerators with about 200 floating-point operations per byte of memory traffic.
DEFAULT_OVERHEAD_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """One way to cut a batch for the pipeline, and what it is predicted to cost.

    Attributes:
        num_microbatches: m.
        num_repeats: v.
        microbatch_size: b, samples per replica.
        predicted_time: of one pass, in samples' worth of one stage's arithmetic.
        bubble: the idle share of it.
    """

    num_microbatches: int
    num_repeats: int
    microbatch_size: int
    predicted_time: Fraction
    bubble: Fraction

    def to_dict(self) -> dict[str, int | float]:
        """Return the choice by its names, for JSON."""
        return {
            "num_pipeline_microbatches": self.num_microbatches,
            "num_repeats": self.num_repeats,
            "microbatch_size": self.microbatch_size,
            "bubble_fraction": float(self.bubble),
            "predicted_time": float(self.predicted_time),
        }


def predicted_time(
    num_microbatches: int, microbatch_size: int, *, num_stages: int, num_repeats: int, overhead: Fraction
) -> Fraction:
    """Return T = ticks * (b / v + h), in samples' worth of a whole stage's arithmetic.

    Args:
        num_microbatches: m; a pass has m*v + p - 1 ticks for m >= p.
        microbatch_size: b, samples per replica.
        num_stages: p.
        num_repeats: v; a tick is one chunk, 1/v of a stage.
        overhead: h, what a tick costs beside its arithmetic, in samples; `rampup tune` measures it.

    Example:
        >>> predicted_time(8, 2, num_stages=4, num_repeats=1, overhead=Fraction(1))
        Fraction(33, 1)
    """
    return num_ticks(num_stages, num_microbatches, num_repeats) * (Fraction(microbatch_size, num_repeats) + overhead)


def pipeline_choices(
    samples: int,
    *,
    num_stages: int,
    overhead: Fraction,
    repeats: Iterable[int] = (1,),
    multiple: int = 1,
    least: int = 1,
) -> tuple[PipelineChoice, ...]:
    """Return every legal way to cut one replica's samples of a pass, the fastest first; on a tie the fewest microbatches.

    Args:
        samples: samples per replica and pass, m * b.
        num_stages: p.
        overhead: h, see `predicted_time`.
        repeats: the values of v to consider.
        multiple: m must be a multiple of this.
        least: the smallest m.

    Example:
        >>> best, *_ = pipeline_choices(16, num_stages=4, overhead=Fraction(1), multiple=4)
        >>> best.num_microbatches, best.microbatch_size, best.predicted_time
        (8, 2, Fraction(33, 1))
    """
    legal = [m for m in divisors(samples) if m % multiple == 0 and m >= least]
    choices = [
        PipelineChoice(
            num_microbatches=m,
            num_repeats=v,
            microbatch_size=samples // m,
            predicted_time=predicted_time(m, samples // m, num_stages=num_stages, num_repeats=v, overhead=overhead),
            bubble=bubble_fraction(num_stages, m, v),
        )
        for v in repeats
        for m in legal
    ]
    return tuple(sorted(choices, key=lambda choice: (choice.predicted_time, choice.num_microbatches, choice.num_repeats)))
