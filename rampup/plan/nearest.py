"""Errors about sizes that a plan refuses: the rule, both numbers and the nearest legal
values.

Nothing here runs for a legal size. Who refuses a size has checked it; these functions
search what it could be instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from rampup.errors import BatchDivisibilityError, RampDefinitionError, RampupError
from rampup.plan.numbers import (
    divisors,
    format_product,
    nearest_in,
    nearest_multiples,
    to_yaml_number,
)

if TYPE_CHECKING:
    from rampup.plan.split import BatchSplitter

# MaxText's keys of a linear ramp: sizes per device, and samples of the whole ramp.
# `ramp_keys`, which reads them, imports this.
START = "per_device_batch_size_start"
INCREMENT = "per_device_batch_size_increment"
END = "per_device_batch_size"
RAMP_SAMPLES = "global_rampup_samples"


# Whether a batch B can be split is decided by division alone. d and G are given, and m
# and b may be; an automatic m counts as the smallest that the pipeline allows. Each
# product in `BatchSplitter.conditions` must divide B, so `unit`, their least common
# multiple, must. A batch of at least `smallest` is enough for G passes. What remains of
# B is for the factors that are free. So the legal sizes are one arithmetic progression,
# and "nearest" are its members next to B, whatever their microbatch.
def nearest_batches(splitter: BatchSplitter, global_batch_size: int) -> tuple[int, ...]:
    """Return the nearest legal global batch sizes below and above."""
    legal = [
        size
        for size in nearest_multiples(global_batch_size, splitter.unit)
        if size >= splitter.smallest
    ]
    return tuple(legal) or (splitter.smallest,)


def batch_error(
    splitter: BatchSplitter,
    global_batch_size: int,
    where: str,
    *,
    key: str | None = None,
) -> BatchDivisibilityError:
    """Return the error about a global batch that a splitter refuses."""
    rules = f"a multiple of {unit_rule(splitter)}"
    if global_batch_size % splitter.unit == 0:
        rules = (
            f"at least {splitter.smallest}, so that accumulation_steps >="
            " gradient_accumulation_steps"
        )
    nearest = nearest_batches(splitter, global_batch_size)
    return BatchDivisibilityError(
        f"global_batch_size={global_batch_size} ({where}) must be {rules}",
        fix=f"nearest: {', '.join(map(str, nearest))}",
        value=global_batch_size,
        divisor=splitter.unit,
        key=key,
        nearest=nearest,
    )


def unit_rule(splitter: BatchSplitter) -> str:
    """Return `splitter.unit` as text: the products of keys that it is the least common
    multiple of.
    """
    conditions = splitter.conditions
    last = math.prod(conditions[-1].values())
    needed = [
        c for c in conditions if c is conditions[-1] or last % math.prod(c.values())
    ]
    return " and of ".join(format_product(factors) for factors in needed)


def size_errors(
    sizes: Mapping[str, Fraction], factor: int, splitter: BatchSplitter
) -> list[RampupError]:
    """Return the errors about sizes per device of one ramp, by key, whose `factor`-fold
    is no whole or legal global batch.
    """
    unit = splitter.unit
    step = Fraction(unit, factor)
    rule = "a whole number of samples"
    if unit > 1:
        rule += f" and a multiple of {unit_rule(splitter)}"
    problems: list[RampupError] = []
    for key, size in sizes.items():
        nearest = _nearest_sizes(sizes, key, step) or nearest_multiples(
            max(size, Fraction(0)), step
        )
        offered = [to_yaml_number(n) for n in nearest]
        if size <= 0:
            problems.append(
                RampDefinitionError(
                    f"{key}={_format(size)} must be greater than 0; nearest:"
                    f" {_format(*nearest)}",
                    key=key,
                    nearest=offered,
                )
            )
        elif size % step:
            factors = (
                "num_devices"
                if key.startswith("eval_")
                else "num_devices * gradient_accumulation_steps"
            )
            samples = f"{_format(size * factor)} samples ({factors} = {factor})"
            problems.append(
                BatchDivisibilityError(
                    f"{key}={_format(size)} gives {samples}, which must be {rule};"
                    f" nearest {key}: {_format(*nearest)}",
                    value=math.floor(size * factor),
                    divisor=unit,
                    key=key,
                    nearest=offered,
                )
            )
    return problems


def growth_error(
    batches: Mapping[str, int], factor: int, splitter: BatchSplitter
) -> RampDefinitionError:
    """Return the error about a linear ramp of legal batches, by key, whose increments
    do not lead from its start to its end.
    """
    sizes = {key: Fraction(batch, factor) for key, batch in batches.items()}
    start = sizes[START]
    increment = sizes[INCREMENT]
    end = sizes[END]
    if end <= start:
        return RampDefinitionError(
            f"{END}={_format(end)} must be greater than {START}={_format(start)}",
            fix="for a decreasing batch size use batch_size_schedule",
            key=END,
            nearest=(to_yaml_number(start + increment),),
        )
    legal = {
        key: _nearest_sizes(sizes, key, Fraction(splitter.unit, factor))
        for key in (INCREMENT, START, END)
    }
    span = (
        f"{END} - {START} = {_format(end)} - {_format(start)} = {_format(end - start)}"
    )
    offered = [
        f"{key} {_format(*legal[key], separator=' or ')}" for key in (END, INCREMENT)
    ]
    problem = RampDefinitionError(
        f"{span} must be a multiple of {INCREMENT}={_format(increment)}",
        fix=f"nearest: {', or '.join(offered)}",
        key=END,
        nearest=[to_yaml_number(n) for n in legal.pop(END)],
    )
    problem.alternatives = {
        key: tuple(map(to_yaml_number, values)) for key, values in legal.items()
    }
    return problem


def _nearest_sizes(
    sizes: Mapping[str, Fraction], key: str, step: Fraction
) -> list[Fraction]:
    """Return the nearest values of a key with which the ramp is legal if the other keys
    stay. Empty if they must change too. Every legal size is a multiple of `step`.
    """
    others = [size for name, size in sizes.items() if name != key]
    if not others or any(size <= 0 or size % step for size in others):
        return []
    value = max(sizes[key], Fraction(0))
    start = sizes[START]
    increment = sizes[INCREMENT]
    end = sizes[END]
    if key == START:
        return [
            n for n in nearest_multiples(value, increment, end % increment) if n < end
        ]
    if key == INCREMENT:
        span = int((end - start) / step)  # no divisors if the ramp does not grow
        return nearest_in(
            value, [step * span / n for n in reversed(divisors(span)) if n <= 10_000]
        )
    return [
        start + n for n in nearest_multiples(max(value - start, Fraction(0)), increment)
    ]


def _format(*values: Fraction, separator: str = ", ") -> str:
    return separator.join(str(to_yaml_number(value)) for value in values)
