"""The batch size that follows the measured gradient noise scale: `batch_size_schedule: auto`.

The rules, all of which are known before step 0:

- The sizes are the first batch times powers of two, and the largest batch. Each is checked like a phase of any other ramp.
- The batch never shrinks, and a decision at most doubles it.
- It grows to a size only if the lower end of the noise scale's interval has reached that size, so an estimate that is not
  certain changes nothing.
- After a change, a half-life of samples must pass, so that the estimate has mostly seen the new batch.
- Decisions are made after every `DECISION_PERIOD` steps, from the steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rampup.errors import BatchDivisibilityError, RampDefinitionError
from rampup.plan.ramp import BatchRamp

AutoMode = Literal["advise", "follow"]
MODES: tuple[AutoMode, ...] = ("advise", "follow")
# The value of `batch_size_schedule` that follows the measurement.
AUTO_SCHEDULE = "auto"
DECISION_PERIOD = 10


def auto_sizes(start: int, largest: int) -> tuple[int, ...]:
    """Return the sizes that the batch can have: `start` doubled as long as it fits, and `largest`.

    Raises:
        RampDefinitionError: `largest` is less than `start`.
        BatchDivisibilityError: `largest` is not a multiple of `start`.

    Example:
        >>> auto_sizes(4, 24)
        (4, 8, 16, 24)
    """
    if start < 1 or largest < start:
        raise RampDefinitionError(
            f"batch_size_schedule=auto grows the batch from {start} samples (per_device_batch_size_start) to {largest} "
            "(per_device_batch_size), which must not be less",
            key="per_device_batch_size",
            nearest=(start,),
        )
    if largest % start:
        nearest = (largest - largest % start, largest - largest % start + start)
        raise BatchDivisibilityError(
            f"batch_size_schedule=auto: the largest batch of {largest} samples (per_device_batch_size) must be a multiple of "
            f"the first of {start} (per_device_batch_size_start), so that one program runs all of them; nearest: "
            f"{nearest[0]}, {nearest[1]}",
            value=largest,
            divisor=start,
            key="per_device_batch_size",
        )
    doubled = [start]
    while doubled[-1] * 2 <= largest:
        doubled.append(doubled[-1] * 2)
    return tuple(dict.fromkeys([*doubled, largest]))


@dataclass(slots=True, kw_only=True)
class AutoSchedule:
    """The decisions of a run about its batch. It is the same in all processes, and part of every checkpoint.

    Attributes:
        sizes: the legal sizes, from `auto_sizes`.
        mode: `follow` changes the batch of the run; `advise` only writes what it would do.
        half_life_samples: samples that must pass between two changes.
        rows: start step, start sample and size of every phase so far: those of the run's ramp, or of the advice.

    Example:
        >>> auto = AutoSchedule(sizes=(4, 8, 16), mode="follow", half_life_samples=100, rows=[[0, 0, 4]])
        >>> auto.decide(step=10, sample=40, noise_scale=50.0), auto.decide(step=30, sample=120, noise_scale=50.0)
        (4, 8)
        >>> auto.schedule
        '0:4 120:8'
    """

    sizes: tuple[int, ...]
    mode: AutoMode
    half_life_samples: float
    rows: list[list[int]]

    @property
    def size(self) -> int:
        """The size that is in use, or advised."""
        return self.rows[-1][2]

    @property
    def schedule(self) -> str:
        """The decisions so far as a `batch_size_schedule` in samples."""
        return " ".join(f"{sample}:{size}" for _, sample, size in self.rows)

    @property
    def ramp(self) -> BatchRamp:
        """The decisions so far as a ramp."""
        return BatchRamp.from_rows(self.rows)

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """Continue from the decisions in a checkpoint."""
        self.rows = [[int(value) for value in row] for row in rows]

    def is_due(self, step: int) -> bool:
        """Return whether there is a decision after this many steps."""
        return step > 0 and step % DECISION_PERIOD == 0

    def decide(self, *, step: int, sample: int, noise_scale: float | None) -> int:
        """Decide after a step, and return the size from there on.

        Args:
            step: steps done.
            sample: samples consumed by them, in the run's own ramp.
            noise_scale: lower end of the noise scale's interval in samples; None if it is not known.
        """
        if noise_scale is None or sample - self.rows[-1][1] < self.half_life_samples:
            return self.size
        reached = [size for size in self.sizes if size <= min(noise_scale, 2 * self.size)]
        if reached and reached[-1] > self.size:
            self.rows.append([step, sample, reached[-1]])
        return self.size
