"""Pipeline stages: the layers of each stage, and a cost model that chooses the number of microbatches.

layers = stages * repeats * layers per chunk (MaxText: num_layers_per_pipeline_stage). A tick is the time of one chunk of one
microbatch. More microbatches make the bubble smaller, but each one is smaller, and every tick has a fixed cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from rampup.errors import PipelineShapeError
from rampup.plan.numbers import AUTO, divisors, format_product, nearest_multiples

# The assumed fixed cost of a tick, if it has not been measured. Moving weights and gradients takes as long as the arithmetic of
# several hundred tokens on accelerators with about 200 floating-point operations per byte of memory traffic.
DEFAULT_OVERHEAD_TOKENS = 512


def pipeline_repeats(*, num_layers: int, num_stages: int, num_layers_per_stage: int = 1, num_repeats: int = AUTO) -> int:
    """Return the number of layer chunks per stage, after checking that layers = stages * repeats * layers per chunk.

    Args:
        num_layers: decoder layers of the model.
        num_stages: pipeline stages p. With one stage there are no repeats.
        num_layers_per_stage: layers in one chunk.
        num_repeats: chunks per stage v, or -1 to derive it from the layers.

    Raises:
        PipelineShapeError: If num_layers is not the product. The error has the nearest numbers of layers that are.

    Example:
        >>> pipeline_repeats(num_layers=16, num_stages=4, num_layers_per_stage=2)
        2

    Source: MaxText `configs/types.py`, the checks on num_pipeline_repeats.
    """
    for key, size in (("base_num_decoder_layers", num_layers), ("num_layers_per_pipeline_stage", num_layers_per_stage)):
        if size < 1:
            raise PipelineShapeError(f"{key}={size} must be at least 1", key=key, nearest=(1,))
    key = "num_pipeline_repeats"
    if num_repeats < 1 and num_repeats != AUTO:
        raise PipelineShapeError(f"{key}={num_repeats} must be -1 (automatic) or at least 1", key=key, nearest=(AUTO, 1))
    if num_stages == 1:
        if num_repeats not in (AUTO, 1):
            problem = f"{key}={num_repeats} needs a pipeline, but there is one stage; set it to -1"
            raise PipelineShapeError(problem, key=key, nearest=(AUTO, 1))
        return 1
    given = num_repeats != AUTO
    factors = {"num_stages": num_stages, "num_layers_per_pipeline_stage": num_layers_per_stage}
    factors |= {key: num_repeats} if given else {}
    product = math.prod(factors.values())
    if num_layers % product or (given and num_layers != product):
        nearest = [product] if given else nearest_multiples(num_layers, product)
        rule = f"base_num_decoder_layers={num_layers} must be {'' if given else 'a multiple of '}{format_product(factors)}"
        problem = f"{rule}; nearest: {', '.join(map(str, nearest))}"
        raise PipelineShapeError(problem, key="base_num_decoder_layers", nearest=nearest)
    return num_layers // (num_stages * num_layers_per_stage)


def stage_layer_order(num_layers: int, num_stages: int, num_repeats: int = 1) -> list[int]:
    """Return the layers in stage order: first those of stage 0, whose chunks are 0, p, 2p, ..., then those of stage 1, ...

    Raises:
        PipelineShapeError: If the layers cannot be divided into chunks.

    Example:
        >>> stage_layer_order(8, num_stages=2, num_repeats=2)
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    size = num_layers // (num_stages * num_repeats)
    if num_stages > 1:
        shape = {"num_stages": num_stages, "num_layers_per_stage": max(size, 1), "num_repeats": num_repeats}
        pipeline_repeats(num_layers=num_layers, **shape)
    chunks = [r * num_stages + s for s in range(num_stages) for r in range(num_repeats)]
    return [chunk * size + layer for chunk in chunks for layer in range(size)]


def pass_ticks(num_stages: int, num_microbatches: Any, num_repeats: int = 1) -> Any:
    """Return the ticks of one pass of the program in which a stage has a forward; as many have a backward.

    Microbatches go through all repeats in groups of p, and the last group may have fewer: see `rampup.engine.pipeline`, which
    gives an array for the number of microbatches. If p divides m, these are v * m + p - 1 ticks.

    Example:
        >>> pass_ticks(4, 8, 2), pass_ticks(4, 5, 3)
        (19, 24)
    """
    p, m = num_stages, num_microbatches
    groups = (m + p - 1) // p
    # The last microbatch in its last turn, on stage 0. The last stage runs it p - 1 ticks later.
    last_unit = (groups * num_repeats - 1) * p + (m - 1) % p
    return last_unit + p


def pass_bubble(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Fraction:
    """Return the idle time of one pass of the program as a fraction of its time.

    Example:
        >>> pass_bubble(4, 8, 2), pass_bubble(4, 5, 3)
        (Fraction(3, 19), Fraction(3, 8))
    """
    ticks = pass_ticks(num_stages, num_microbatches, num_repeats)
    return Fraction(ticks - num_repeats * num_microbatches, ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCandidate:
    """One way to split a batch for the pipeline, with its predicted cost."""

    num_pipeline_microbatches: int  # m
    num_repeats: int  # v
    microbatch_size: int  # b, samples per replica
    bubble_fraction: Fraction  # the idle fraction of the predicted time
    predicted_time: Fraction  # time of one pass, in samples' worth of one stage's arithmetic

    def to_dict(self) -> dict[str, int | float]:
        """Return the candidate as `rampup plan --json` prints it."""
        return {name: float(value) if isinstance(value, Fraction) else value for name, value in asdict(self).items()}


def predicted_time(
    num_microbatches: int, microbatch_size: int, *, num_stages: int, num_repeats: int, overhead: Fraction
) -> Fraction:
    """Return T = ticks * (b / v + h), in samples' worth of a whole stage's arithmetic.

    Args:
        num_microbatches: m. A pass has `pass_ticks`, which are m*v + p - 1 if p divides m.
        microbatch_size: b, samples per replica.
        num_stages: p.
        num_repeats: v. A tick computes one chunk, 1/v of a stage.
        overhead: h, the fixed cost of a tick in samples. `rampup tune` measures it.

    Example:
        >>> predicted_time(8, 2, num_stages=4, num_repeats=1, overhead=Fraction(1))
        Fraction(33, 1)
    """
    ticks: int = pass_ticks(num_stages, num_microbatches, num_repeats)
    return ticks * (Fraction(microbatch_size, num_repeats) + overhead)


def pipeline_candidates(
    samples: int, *, num_stages: int, overhead: Fraction, repeats: Iterable[int] = (1,), multiple: int = 1, minimum: int = 1
) -> tuple[PipelineCandidate, ...]:
    """Return every legal split of one replica's samples, fastest first. Ties are sorted by the number of microbatches.

    Args:
        samples: samples per replica and pass, m * b.
        num_stages: p.
        overhead: h, see `predicted_time`.
        repeats: the values of v to consider.
        multiple: m must be a multiple of this number.
        minimum: the smallest m.

    Example:
        >>> best, *_ = pipeline_candidates(16, num_stages=4, overhead=Fraction(1), multiple=4)
        >>> best.num_pipeline_microbatches, best.microbatch_size, best.predicted_time
        (8, 2, Fraction(33, 1))
    """
    candidates = [
        PipelineCandidate(
            num_pipeline_microbatches=m,
            num_repeats=v,
            microbatch_size=samples // m,
            predicted_time=predicted_time(m, samples // m, num_stages=num_stages, num_repeats=v, overhead=overhead),
            bubble_fraction=pass_bubble(num_stages, m, v),
        )
        for v in repeats
        for m in divisors(samples)
        if m % multiple == 0 and m >= minimum
    ]
    return tuple(sorted(candidates, key=lambda c: (c.predicted_time, c.num_pipeline_microbatches, c.num_repeats)))
