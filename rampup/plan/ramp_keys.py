"""The ramp that configuration keys describe, from sizes per device or a schedule, and
MaxText's manager of batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampDefinitionError,
    choice_error,
    combine,
)
from rampup.plan.nearest import (
    END,
    INCREMENT,
    RAMP_SAMPLES,
    START,
    growth_error,
    size_errors,
)
from rampup.plan.numbers import exact_fraction, nearest_multiples, to_yaml_number
from rampup.plan.ramp import BatchRamp, Phase, check_num_phases
from rampup.plan.split import ANY_BATCH, BatchSplitter

if TYPE_CHECKING:
    from rampup.plan.plan import RampPlan

SCHEDULE_UNITS = ("samples", "tokens")

# The value of `batch_size_schedule` that follows the measured gradient noise, see
# `rampup.plan.auto`; unknown to `ramp_from_config`.
AUTO_SCHEDULE = "auto"


def ramp_from_config(
    config: Any,
    num_devices: int,
    *,
    budget: int | Fraction | None = None,
    splitter: BatchSplitter | None = None,
) -> BatchRamp:
    """Return the ramp that a configuration's keys describe.

    Args:
        config: any object with MaxText's attributes `per_device_batch_size` and, unless
            `enable_rampup_batch_size` is False, those of the linear ramp,
            `per_device_batch_size_start`, `per_device_batch_size_increment` and
            `global_rampup_samples`. Optional are `gradient_accumulation_steps`, a
            factor of every batch, `rampup_carry_overshoot` (see `BatchRamp.linear`),
            `batch_size_schedule`, whose sizes include that factor,
            `batch_size_schedule_unit` and, for thresholds in tokens,
            `max_target_length`.
        num_devices: a global batch is devices * size per device *
            gradient_accumulation_steps.
        budget: samples of the whole run, for thresholds that are shares of it.
        splitter: if given, sizes per device must be legal for it; `RampPlan` checks the
            sizes of a schedule.

    Raises:
        ConfigError: Attributes are missing or invalid. One error has all problems of
            the sizes, or of the ramp if the sizes are legal, with the nearest legal
            values.

    Example:
        >>> from types import SimpleNamespace
        >>> keys = SimpleNamespace(
        ...     per_device_batch_size=2,
        ...     per_device_batch_size_start=0.5,
        ...     per_device_batch_size_increment=0.5,
        ...     global_rampup_samples=240,
        ... )
        >>> ramp_from_config(keys, num_devices=8).sizes
        (4, 8, 12, 16)
    """
    schedule = getattr(config, "batch_size_schedule", None)
    linear = getattr(config, "enable_rampup_batch_size", schedule is None)
    if missing := [
        name
        for name in (END, *((START, INCREMENT, RAMP_SAMPLES) if linear else ()))
        if not hasattr(config, name)
    ]:
        raise ConfigError(
            f"the config has no attribute {', '.join(missing)}", key=missing[0]
        )
    if schedule is not None:
        if linear:
            problem = RampDefinitionError(
                "batch_size_schedule and enable_rampup_batch_size: true are two ramps",
                fix="set one of them to null or false",
                key="batch_size_schedule",
            )
            problem.alternatives = {"enable_rampup_batch_size": (False,)}
            raise problem
        unit = getattr(config, "batch_size_schedule_unit", "samples")
        if unit not in SCHEDULE_UNITS:
            raise choice_error("batch_size_schedule_unit", unit, SCHEDULE_UNITS)
        length = (
            getattr(config, "max_target_length", None) if unit == "tokens" else None
        )
        return BatchRamp.from_schedule(schedule, sequence_length=length, budget=budget)
    factor = num_devices * getattr(config, "gradient_accumulation_steps", 1)
    names = (START, INCREMENT, END) if linear else (END,)
    rule = splitter or ANY_BATCH
    sizes = global_batch_sizes(
        {name: getattr(config, name) for name in names}, factor, rule
    )
    if not linear:
        return BatchRamp.constant(sizes[END])
    samples = exact_fraction(
        getattr(config, RAMP_SAMPLES), what=RAMP_SAMPLES, key=RAMP_SAMPLES
    )
    if samples < 1 or samples.denominator != 1:
        raise RampDefinitionError(
            f"{RAMP_SAMPLES}={to_yaml_number(samples)} must be a whole number of at"
            " least 1",
            fix="for no ramp set enable_rampup_batch_size: false",
            key=RAMP_SAMPLES,
            nearest=sorted({max(math.floor(samples), 1), max(math.ceil(samples), 1)}),
        )
    # A whole number of increments leads from the start to the end.
    growth = sizes[END] - sizes[START]
    if growth <= 0 or growth % sizes[INCREMENT]:
        raise growth_error(sizes, factor, rule)
    check_num_phases(growth // sizes[INCREMENT] + 1, key=INCREMENT)
    return BatchRamp.linear(
        start=sizes[START],
        increment=sizes[INCREMENT],
        end=sizes[END],
        samples=int(samples),
        carry_overshoot=getattr(config, "rampup_carry_overshoot", False),
    )


def global_batch_sizes(
    values: Mapping[str, object], factor: int, splitter: BatchSplitter
) -> dict[str, int]:
    """Return the global batch, size * factor, of each size per device of one ramp; a
    splitter must allow all. By key.
    """
    sizes = {key: exact_fraction(x, what=key, key=key) for key, x in values.items()}
    if any(size <= 0 or size * factor % splitter.unit for size in sizes.values()):
        raise combine(size_errors(sizes, factor, splitter))
    return {key: int(size * factor) for key, size in sizes.items()}


def auto_sizes(start: int, largest: int) -> tuple[int, ...]:
    """Return the sizes that the batch can have: `start` doubled as long as it fits, and
    `largest`. 4, 24: 4, 8, 16, 24.
    """
    if start < 1 or largest < start:
        raise RampDefinitionError(
            f"batch_size_schedule=auto grows the batch from {start} ({START}) to"
            f" {largest} ({END}), which must not be less",
            key=END,
            nearest=(start,),
        )
    if largest % start:
        below, above = nearest_multiples(largest, start)
        raise BatchDivisibilityError(
            f"batch_size_schedule=auto: the largest batch, of {largest} ({END}),"
            f" must be a multiple of the first of {start} ({START}), so that one"
            " program runs all of them",
            fix=f"nearest: {below}, {above}",
            value=largest,
            divisor=start,
            key=END,
        )
    doubled = [start << k for k in range((largest // start).bit_length())]
    return tuple(dict.fromkeys([*doubled, largest]))


class RampupBatchManager:
    """Counts optimizer steps and returns the size of the next batch. A drop-in
    replacement for MaxText's manager.

    It fixes three defects of MaxText's (`utils/rampup_batch.py`): batches include
    `gradient_accumulation_steps`, batch sizes that are not whole numbers are errors,
    and resuming is a look-up instead of a replay. MaxText saves a checkpoint after s +
    1 batches under the label s, so a caller that restores label s passes `step_num=s +
    1`.

    Args:
        config: an object as for `ramp_from_config`, with the attribute
            num_target_devices too.
        step_num: batches already consumed. -1 and 0 mean none.

    Attributes:
        ramp: the ramp, for look-ups by step or sample without stepping.
        step: batches consumed so far.
        global_batch_size_start, global_batch_size_end: samples in the first batch, and
            in each after the ramp.
        samples_per_increment: requested samples per change of a linear ramp, exactly.
            None for other ramps.
        global_rampup_samples: samples of a linear ramp as requested, or of a schedule
            as consumed; 0 for a constant batch.
        total_rampup_steps: optimizer steps before the last phase.

    Raises:
        ConfigError: An attribute is missing, or the attributes do not define a valid
            ramp.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(
        ...     per_device_batch_size_start=4.0,
        ...     per_device_batch_size_increment=2.0,
        ...     per_device_batch_size=12.0,
        ...     global_rampup_samples=500,
        ...     num_target_devices=4,
        ... )
        >>> manager = RampupBatchManager(config, step_num=7)
        >>> (
        ...     manager.global_batch_size_current,
        ...     manager.update(),
        ...     manager.global_batch_size_current,
        ... )
        (16, True, 24)
    """

    def __init__(self, config: Any, step_num: int = 0) -> None:
        if not hasattr(config, "num_target_devices"):
            raise ConfigError(
                "the config has no attribute num_target_devices, the number of devices",
                fix="a rampup.Config has a plan:"
                " RampupBatchManager.from_plan(build_plan(config))",
                key="num_target_devices",
            )
        self._begin(ramp_from_config(config, int(config.num_target_devices)), step_num)

    @classmethod
    def from_plan(cls, plan: RampPlan, step_num: int = 0) -> Self:
        """Return a manager of a plan's ramp after `step_num` batches.

        Args:
            plan: the plan of a run.
            step_num: batches already consumed; -1 and 0 mean none.
        """
        manager = cls.__new__(cls)
        manager._begin(plan.ramp, step_num)
        return manager

    def _begin(self, ramp: BatchRamp, step_num: int) -> None:
        if step_num < -1:
            raise RampDefinitionError(
                f"step_num={step_num} must be -1 (none), 0 or more",
                key="step_num",
                nearest=(-1, 0),
            )
        each = ramp.samples_per_increment
        self.ramp = ramp
        self.step = max(step_num, 0)
        self.global_batch_size_start = ramp.sizes[0]
        self.global_batch_size_end = ramp.sizes[-1]
        self.samples_per_increment = each
        self.global_rampup_samples = (
            ramp.ramp_samples if each is None else each * ramp.num_increments
        )
        self.total_rampup_steps = ramp.ramp_steps

    def update(self) -> bool:
        """Count one batch as consumed, and return whether the ramp is still active.

        Returns:
            True while the next batch is before the last phase.
        """
        self.step += 1
        return self.rampup_active

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self.ramp.phase_at(self.step)

    @property
    def rampup_active(self) -> bool:
        """Whether the next batch is before the last phase."""
        return self.step < self.total_rampup_steps

    @property
    def global_batch_size_current(self) -> int:
        """Samples in the next batch."""
        return self.ramp.global_batch_size_at(self.step)

    @property
    def increment(self) -> int:
        """Growth per phase of a linear ramp in samples. 0 for a constant batch, an
        error if phases grow unequally.
        """
        if self.ramp.num_increments == 0:
            return 0
        if self.ramp.samples_per_increment is None:
            raise RampDefinitionError(
                "a batch_size_schedule has no single increment; see ramp.phases"
            )
        return (
            self.global_batch_size_end - self.global_batch_size_start
        ) // self.ramp.num_increments

    @property
    def total_used_samples(self) -> int:
        """Samples consumed so far."""
        return self.ramp.samples_before(self.step)

    @property
    def num_accum_samples(self) -> int:
        """Samples consumed since the current phase began."""
        return self.total_used_samples - self.phase.start_sample

    def __repr__(self) -> str:
        names = (
            "step",
            "global_batch_size_current",
            "total_used_samples",
            "rampup_active",
        )
        return f"RampupBatchManager({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
