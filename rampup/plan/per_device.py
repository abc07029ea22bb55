"""MaxText's ramp keys, which are sizes per device, as a `BatchRamp`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from rampup.errors import BatchDivisibilityError, RampDefinitionError, RampupError, choice_error, raise_together
from rampup.moved import moved_names
from rampup.plan.numbers import divisors, exact_fraction, nearest_in, nearest_multiples, to_yaml_number
from rampup.plan.ramp import BatchRamp, check_num_phases
from rampup.plan.split import BatchSplitter

START, INCREMENT, END = "per_device_batch_size_start", "per_device_batch_size_increment", "per_device_batch_size"
SCHEDULE_UNITS = ("samples", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RampKeys:
    """The configuration's keys that describe its ramp.

    Attributes:
        per_device_batch_size: samples per device and accumulation step after the ramp. May be fractional.
        gradient_accumulation_steps: G, a factor of every batch.
        enable_rampup_batch_size: whether the batch grows linearly. Without it and without a schedule, B is constant.
        per_device_batch_size_start: size per device in the first phase.
        per_device_batch_size_increment: growth per phase.
        global_rampup_samples: requested length of the ramp, in samples.
        rampup_carry_overshoot: see `BatchRamp.linear`.
        batch_size_schedule: see `BatchRamp.from_schedule`. Its sizes are B itself, so they include G.
        batch_size_schedule_unit: the unit of its thresholds, `samples` or `tokens`.
        max_target_length: tokens per sample, for thresholds in tokens.
    """

    per_device_batch_size: object
    gradient_accumulation_steps: int = 1
    enable_rampup_batch_size: bool = False
    per_device_batch_size_start: object = None
    per_device_batch_size_increment: object = None
    global_rampup_samples: object = None
    rampup_carry_overshoot: bool = False
    batch_size_schedule: str | None = None
    batch_size_schedule_unit: str = "samples"
    max_target_length: int | None = None


def ramp_from_config(
    keys: RampKeys | None = None,
    *,
    num_devices: int,
    budget: int | Fraction | None = None,
    splitter: BatchSplitter | None = None,
    **values: Any,
) -> BatchRamp:
    """Return the ramp that the configuration's keys describe.

    Args:
        keys: the keys.
        num_devices: devices of the run. A global batch is devices * size per device * gradient_accumulation_steps.
        budget: samples of the whole run, for thresholds that are shares of it.
        splitter: if given, sizes must be legal for it, and so are the nearest sizes in errors.
        values: attributes of `RampKeys`, instead of `keys` or in place of some of them.

    Raises:
        RampDefinitionError, BatchDivisibilityError: If the keys are invalid. One error has all problems and the nearest legal
            values.

    Example:
        >>> ramp = ramp_from_config(num_devices=8, per_device_batch_size=2, enable_rampup_batch_size=True,
        ...     per_device_batch_size_start=0.5, per_device_batch_size_increment=0.5, global_rampup_samples=240)
        >>> ramp.sizes
        (4, 8, 12, 16)
    """
    if unknown := values.keys() - {key.name for key in fields(RampKeys)}:
        raise TypeError(f"ramp_from_config() got unexpected keys: {', '.join(sorted(unknown))}")
    keys = RampKeys(**values) if keys is None else replace(keys, **values)
    if keys.batch_size_schedule is not None:
        if keys.enable_rampup_batch_size:
            problem = RampDefinitionError(
                "batch_size_schedule and enable_rampup_batch_size: true are two ramps; set one of them to null or false",
                key="batch_size_schedule",
            )
            problem.alternatives = {"enable_rampup_batch_size": (False,)}
            raise problem
        if keys.batch_size_schedule_unit not in SCHEDULE_UNITS:
            raise choice_error("batch_size_schedule_unit", keys.batch_size_schedule_unit, SCHEDULE_UNITS)
        length = keys.max_target_length if keys.batch_size_schedule_unit == "tokens" else None
        return BatchRamp.from_schedule(keys.batch_size_schedule, sequence_length=length, budget=budget)
    names = (START, INCREMENT, END) if keys.enable_rampup_batch_size else (END,)
    sizes = _Sizes({name: getattr(keys, name) for name in names}, num_devices * keys.gradient_accumulation_steps, splitter)
    if not keys.enable_rampup_batch_size:
        return BatchRamp.constant(sizes.samples(END))
    samples = _parse_rampup_samples(keys.global_rampup_samples)
    sizes.check_growth()
    return BatchRamp.linear(
        start=sizes.samples(START),
        increment=sizes.samples(INCREMENT),
        end=sizes.samples(END),
        samples=samples,
        carry_overshoot=keys.rampup_carry_overshoot,
    )


def global_batch_size(
    per_device: object, *, num_devices: int, gradient_accumulation_steps: int, key: str, splitter: BatchSplitter | None = None
) -> int:
    """Return devices * size per device * G, which must be a whole number and, with a splitter, a legal size for it.

    Example:
        >>> global_batch_size(0.5, num_devices=8, gradient_accumulation_steps=1, key="per_device_batch_size")
        4
    """
    return _Sizes({key: per_device}, num_devices * gradient_accumulation_steps, splitter).samples(key)


def _parse_rampup_samples(value: object) -> int:
    key = "global_rampup_samples"
    samples = exact_fraction("null" if value is None else value, what=key, key=key)
    if samples < 1 or samples.denominator != 1:
        raise RampDefinitionError(
            f"{key}={_format(samples)} must be a whole number of at least 1; for no ramp set enable_rampup_batch_size: false",
            key=key,
            nearest=sorted({max(math.floor(samples), 1), max(math.ceil(samples), 1)}),
        )
    return int(samples)


class _Sizes:
    """The per-device sizes by key as exact fractions, checked. A size times `factor`, num_devices * G, is a global batch."""

    def __init__(self, values: dict[str, object], factor: int, splitter: BatchSplitter | None) -> None:
        self.factor = factor
        # Every size must be a multiple of `step`, so that its global batch is a multiple of the splitter's unit.
        unit = 1 if splitter is None else splitter.unit
        self.step = Fraction(unit, factor)
        self.rule = "a whole number of samples"
        if splitter is not None and unit > 1:
            self.rule += f" and a multiple of {splitter.unit_rule}"
        given = {key: "null" if value is None else value for key, value in values.items()}
        self.values = {key: exact_fraction(value, what=key, key=key) for key, value in given.items()}
        raise_together([problem for key in self.values if (problem := self._problem(key))])

    def samples(self, key: str) -> int:
        """Return the global batch size of a key."""
        return int(self.values[key] * self.factor)

    def check_growth(self) -> None:
        """Check that a whole number of increments leads from the start to the end."""
        start, increment, end = (self.values[key] for key in (START, INCREMENT, END))
        if end <= start:
            raise RampDefinitionError(
                f"{END}={_format(end)} must be greater than {START}={_format(start)}; for a decreasing batch size use "
                "batch_size_schedule",
                key=END,
                nearest=(to_yaml_number(start + increment),),
            )
        if (end - start) % increment:
            increments = self._increments(increment)
            ends = [start + n for n in nearest_multiples(end - start, increment)]
            problem = RampDefinitionError(
                f"{END} - {START} = {_format(end)} - {_format(start)} = {_format(end - start)} must be a multiple of "
                f"{INCREMENT}={_format(increment)}; nearest: {END} {_format(ends, ' or ')}, or {INCREMENT} "
                f"{_format(increments, ' or ')}",
                key=END,
                nearest=[to_yaml_number(n) for n in ends],
            )
            others = {INCREMENT: increments, START: self._legal(START)}
            problem.alternatives = {key: tuple(map(to_yaml_number, values)) for key, values in others.items()}
            raise problem
        check_num_phases(int((end - start) / increment) + 1, key=INCREMENT)

    def _problem(self, key: str) -> RampupError | None:
        value = self.values[key]
        nearest = self._legal(key) or nearest_multiples(max(value, Fraction(0)), self.step)
        offered = [to_yaml_number(n) for n in nearest]
        if value <= 0:
            return RampDefinitionError(
                f"{key}={_format(value)} must be greater than 0; nearest: {_format(nearest)}", key=key, nearest=offered
            )
        if value % self.step == 0:
            return None
        return BatchDivisibilityError(
            f"{key}={_format(value)} gives {_format(value * self.factor)} samples (num_devices * gradient_accumulation_steps = "
            f"{self.factor}), which must be {self.rule}; nearest {key}: {_format(nearest)}",
            value=math.floor(value * self.factor),
            divisor=int(self.step * self.factor),
            key=key,
            nearest=offered,
        )

    def _legal(self, key: str) -> list[Fraction]:
        """Return the nearest values of a key that are legal with the other keys as given. Empty if another key is invalid."""
        others = [value for name, value in self.values.items() if name != key]
        if not others or any(value <= 0 or value % self.step for value in others):
            return []
        value = max(self.values[key], Fraction(0))
        start, increment, end = (self.values[name] for name in (START, INCREMENT, END))
        if key == START:
            return [n for n in nearest_multiples(value, increment, end % increment) if n < end]
        if key == INCREMENT:
            return self._increments(value) if end > start else []
        return [start + n for n in nearest_multiples(max(value - start, Fraction(0)), increment)]

    def _increments(self, value: Fraction) -> list[Fraction]:
        span = int((self.values[END] - self.values[START]) / self.step)
        return nearest_in(value, [self.step * span / n for n in reversed(divisors(span)) if n <= 10_000])


def _format(values: Fraction | list[Fraction], separator: str = ", ") -> str:
    return separator.join(str(to_yaml_number(value)) for value in ([values] if isinstance(values, Fraction) else values))


__getattr__ = moved_names(__name__, {"define_ramp": "rampup.plan.per_device.ramp_from_config"})
