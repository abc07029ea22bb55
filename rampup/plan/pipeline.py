"""Which layers the pipeline stages hold: layers = stages * repeats * layers per stage."""

from __future__ import annotations

import math

from rampup.errors import PipelineShapeError
from rampup.plan.numbers import divisors, nearest_multiples
from rampup.plan.split import AUTO, product_text


def pipeline_repeats(*, num_layers: int, num_stages: int, num_layers_per_stage: int = 1, num_repeats: int = AUTO) -> int:
    """Return the layer chunks per stage, checked: layers = stages * repeats * layers per stage.

    Args:
        num_layers: decoder layers of the model.
        num_stages: pipeline stages p; with 1 there is nothing to repeat.
        num_layers_per_stage: layers in one chunk.
        num_repeats: chunks per stage v, or -1 for as many as the layers give.

    Raises:
        PipelineShapeError: layers that do not fit, with the nearest numbers that do.

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
            raise PipelineShapeError(
                f"{key}={num_repeats} needs a pipeline, but there is one stage; set it to -1", key=key, nearest=(AUTO, 1)
            )
        return 1
    given = num_repeats != AUTO
    factors = {"num_stages": num_stages, "num_layers_per_pipeline_stage": num_layers_per_stage}
    factors |= {key: num_repeats} if given else {}
    product = math.prod(factors.values())
    if num_layers % product or (given and num_layers != product):
        nearest = [product] if given else nearest_multiples(num_layers, product)
        raise PipelineShapeError(
            f"base_num_decoder_layers={num_layers} must be {'' if given else 'a multiple of '}{product_text(factors)}; "
            f"nearest: {', '.join(map(str, nearest))}",
            key="base_num_decoder_layers",
            nearest=nearest,
        )
    return num_layers // (num_stages * num_layers_per_stage)


def legal_repeats(*, num_layers: int, num_stages: int) -> list[int]:
    """Return every number of repeats that the layers allow.

    Raises:
        PipelineShapeError: the layers do not divide over the stages.

    Example:
        >>> legal_repeats(num_layers=24, num_stages=4)
        [1, 2, 3, 6]
    """
    each = pipeline_repeats(num_layers=num_layers, num_stages=num_stages)
    return divisors(each)


def stage_order(num_layers: int, num_stages: int, num_repeats: int = 1) -> list[int]:
    """Return the layers in the order in which pipeline stages hold them: stage s has the chunks s, s + p, s + 2p, ...

    Raises:
        PipelineShapeError: the layers do not divide into chunks.

    Example:
        >>> stage_order(8, num_stages=2, num_repeats=2)
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    size = num_layers // (num_stages * num_repeats)
    if num_stages > 1:
        pipeline_repeats(
            num_layers=num_layers, num_stages=num_stages, num_layers_per_stage=max(size, 1), num_repeats=num_repeats
        )
    chunks = [r * num_stages + s for s in range(num_stages) for r in range(num_repeats)]
    return [chunk * size + layer for chunk in chunks for layer in range(size)]
