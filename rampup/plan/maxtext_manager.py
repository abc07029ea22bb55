"""RampupBatchManager: a stateful counter over a ramp, with the interface of MaxText's class of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, Self

from rampup.errors import ConfigError, RampDefinitionError, ResumeMismatchError
from rampup.notebook_repr import NotebookRepr
from rampup.plan.per_device import RampKeys, ramp_from_config
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, Phase


class RampupBatchManager(NotebookRepr):
    """Counts optimizer steps and returns the size of the next batch. A drop-in replacement for MaxText's manager.

    It fixes three defects of MaxText's (`utils/rampup_batch.py`): batches include `gradient_accumulation_steps`, batch sizes
    that are not whole numbers are errors, and resuming is a look-up instead of a replay. MaxText labels a checkpoint s after
    s + 1 batches, so a caller that restores label s passes `step_num=s + 1`.

    Args:
        config: any object with MaxText's attributes per_device_batch_size_start, per_device_batch_size_increment,
            per_device_batch_size, global_rampup_samples and num_target_devices. Optional attributes are
            gradient_accumulation_steps, rampup_carry_overshoot, enable_rampup_batch_size, batch_size_schedule,
            batch_size_schedule_unit and max_target_length.
        step_num: batches already consumed. -1 and 0 mean none.

    Attributes:
        ramp: the ramp, for look-ups by step or sample without stepping.
        step: batches consumed so far.

    Raises:
        ConfigError: If an attribute is missing.
        RampDefinitionError: If the attributes do not define a valid ramp.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(per_device_batch_size_start=4.0, per_device_batch_size_increment=2.0,
        ...     per_device_batch_size=12.0, global_rampup_samples=500, num_target_devices=4)
        >>> manager = RampupBatchManager(config, step_num=7)
        >>> manager.global_batch_size_current, manager.update(), manager.global_batch_size_current
        (16, True, 24)
    """

    def __init__(self, config: Any, step_num: int = 0) -> None:
        self.ramp = _ramp_of(config)
        self.step = _check_step(step_num)

    @classmethod
    def from_plan(cls, plan: RampPlan, step_num: int = 0) -> Self:
        """Return a manager of a plan's ramp after `step_num` batches."""
        manager = cls.__new__(cls)
        manager.ramp = plan.ramp
        manager.step = _check_step(step_num)
        return manager

    def update(self) -> bool:
        """Count one batch as consumed, and return whether the ramp is still active."""
        self.step += 1
        return self.rampup_active

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self.ramp.phase_at(self.step)

    @property
    def rampup_active(self) -> bool:
        """Whether the next batch is before the last phase."""
        return self.step < self.ramp.ramp_steps

    @property
    def global_batch_size_current(self) -> int:
        """Samples in the next batch."""
        return self.ramp.global_batch_size_at(self.step)

    @property
    def global_batch_size_start(self) -> int:
        """Samples in the first batch."""
        return self.ramp.sizes[0]

    @property
    def global_batch_size_end(self) -> int:
        """Samples in every batch after the ramp."""
        return self.ramp.sizes[-1]

    @property
    def increment(self) -> int:
        """Growth per phase of a linear ramp in samples. 0 for a constant batch, an error if phases grow unequally."""
        if self.ramp.num_increments == 0:
            return 0
        if self.ramp.samples_per_increment is None:
            raise RampDefinitionError("a batch_size_schedule has no single increment; see ramp.phases")
        return (self.global_batch_size_end - self.global_batch_size_start) // self.ramp.num_increments

    @property
    def num_increments(self) -> int:
        """Number of requested changes of size."""
        return self.ramp.num_increments

    @property
    def samples_per_increment(self) -> Fraction | None:
        """Requested samples per change of a linear ramp, exactly."""
        return self.ramp.samples_per_increment

    @property
    def global_rampup_samples(self) -> Fraction | int:
        """Requested length of a linear ramp in samples. For a schedule, its actual length."""
        each = self.ramp.samples_per_increment
        return self.ramp.ramp_samples if each is None else each * self.ramp.num_increments

    @property
    def total_rampup_steps(self) -> int:
        """Optimizer steps before the last phase."""
        return self.ramp.ramp_steps

    @property
    def total_used_samples(self) -> int:
        """Samples consumed so far."""
        return self.ramp.samples_before(self.step)

    @property
    def num_accum_samples(self) -> int:
        """Samples consumed since the current phase began."""
        return self.total_used_samples - self.phase.start_sample

    def state_dict(self) -> dict[str, int | str]:
        """Return the state for a checkpoint: the step, and the ramp's fingerprint to detect a different ramp."""
        return {"step": self.step, "consumed_samples": self.total_used_samples, "fingerprint": self.ramp.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ResumeMismatchError: If the state is of a different ramp, or its counters contradict each other.
        """
        missing = {"step", "consumed_samples", "fingerprint"} - set(state)
        if missing:
            raise ResumeMismatchError(f"the saved state lacks {', '.join(sorted(missing))}")
        if state["fingerprint"] != self.ramp.fingerprint:
            raise ResumeMismatchError(
                f"the saved state is of a different ramp (fingerprint {state['fingerprint']}, not {self.ramp.fingerprint}); "
                "load it into a manager with the ramp it was saved with"
            )
        step = _check_step(state["step"])
        if self.ramp.samples_before(step) != state["consumed_samples"]:
            raise ResumeMismatchError(
                f"the saved state has consumed_samples={state['consumed_samples']} after step {step}, but the ramp consumes "
                f"{self.ramp.samples_before(step)}"
            )
        self.step = step

    def __repr__(self) -> str:
        return (
            f"RampupBatchManager(step={self.step}, global_batch_size_current={self.global_batch_size_current}, "
            f"total_used_samples={self.total_used_samples}, rampup_active={self.rampup_active})"
        )


_LINEAR = ("per_device_batch_size_start", "per_device_batch_size_increment", "global_rampup_samples")


def _ramp_of(config: Any) -> BatchRamp:
    scheduled = getattr(config, "batch_size_schedule", None) is not None
    linear = getattr(config, "enable_rampup_batch_size", not scheduled)
    required = ("num_target_devices", "per_device_batch_size", *(_LINEAR if linear else ()))
    missing = [name for name in required if not hasattr(config, name)]
    if missing:
        raise ConfigError(f"the config has no attribute {', '.join(missing)}", key=missing[0])
    values = {key.name: getattr(config, key.name) for key in fields(RampKeys) if hasattr(config, key.name)}
    keys = RampKeys(**values | {"enable_rampup_batch_size": linear})
    return ramp_from_config(keys, num_devices=int(config.num_target_devices))


def _check_step(step_num: int) -> int:
    if step_num < -1:
        raise RampDefinitionError(f"step_num={step_num} must be -1 (none), 0 or more", key="step_num", nearest=(-1, 0))
    return max(step_num, 0)
