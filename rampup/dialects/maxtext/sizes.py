"""What MaxText computes from its batch keys, with its own roundings: float products cut to whole numbers.

Exact arithmetic belongs to `rampup.plan`; this file says what MaxText does where that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rampup.plan.ramp import MAX_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """One batch as MaxText sees it, in samples.

    Attributes:
        to_load: rows that the loaders read per optimizer step.
        to_train: rows that the optimizer step is meant to use.
        micro: rows of one forward pass over all devices.
    """

    to_load: int
    to_train: int
    micro: int


def batch_sizes(per_device: Fraction, expansion: Fraction, num_devices: int, accumulation: int) -> BatchSizes:
    """Return the sizes of one batch.

    Args:
        per_device: samples per device and accumulation step; below 1, a whole sample per device is loaded.
        expansion: `expansion_factor_real_data`; it counts above 0.
        num_devices: devices.
        accumulation: `gradient_accumulation_steps`.

    Example:
        >>> batch_sizes(Fraction(1, 2), Fraction(-1), 8, 1)
        BatchSizes(to_load=8, to_train=4, micro=4)

    Source: MaxText `configs/types.py`, calculate_global_batch_sizes.
    """
    factor = float(expansion) if expansion > 0 else 1
    micro_to_load = num_devices * factor if per_device < 1 else int(num_devices * float(per_device) * factor)
    micro = int(num_devices * float(per_device))
    return BatchSizes(to_load=int(micro_to_load * accumulation), to_train=micro * accumulation, micro=micro)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """MaxText's ramp as it steps: without the accumulation factor, each phase counted from zero.

    Attributes:
        start, increment, end: global batch sizes, cut to whole samples.
        samples: `global_rampup_samples`.
        num_increments: changes, from the sizes per device.

    Source: MaxText `utils/rampup_batch.py`.
    """

    start: int
    increment: int
    end: int
    samples: int
    num_increments: int

    @classmethod
    def build(cls, *, start: Fraction, increment: Fraction, end: Fraction, samples: int, num_devices: int) -> Manager:
        """Return the manager of sizes per device that MaxText accepts.

        Example:
            >>> manager = Manager.build(start=Fraction(4), increment=Fraction(2), end=Fraction(12), samples=500, num_devices=4)
            >>> manager.phases()
            [(0, 16, 0), (8, 24, 128), (14, 32, 272), (18, 40, 400), (22, 48, 560)]
        """
        return cls(
            start=int(num_devices * float(start)),
            increment=int(num_devices * float(increment)),
            end=int(num_devices * float(end)),
            samples=samples,
            num_increments=int((float(end) - float(start)) // float(increment)),
        )

    @property
    def grows_twice(self) -> bool:
        """Whether the ramp has a size between its first and its last."""
        return self.start + self.increment < self.end

    @property
    def ends(self) -> bool:
        """Whether the ramp reaches its end in a number of phases that can be listed."""
        if self.start < 1 or self.increment < 1:
            return self.start >= max(self.end, 1)
        return (self.end - self.start) // self.increment < MAX_PHASES

    def phases(self) -> list[tuple[int, int, int]]:
        """Return (first step, global batch size, samples before it) of every phase of a ramp that `ends`."""
        rows, step, consumed = [], 0, 0
        for num_steps, size in self._segments():
            rows.append((step, size, consumed))
            step, consumed = step + num_steps, consumed + num_steps * size
        return [*rows, (step, self.end, consumed)]

    def _segments(self) -> Iterator[tuple[int, int]]:
        share, size = Fraction(self.samples, self.num_increments), self.start
        while size < self.end:
            yield max(math.ceil(share / size), 1), size
            size = min(size + self.increment, self.end)


def config_ramp_end(
    *,
    start: Fraction,
    increment: Fraction,
    end: Fraction,
    samples: int,
    expansion: Fraction,
    num_devices: int,
    accumulation: int,
) -> int:
    """Return `rampup_end_step`, the step at which MaxText's configuration takes the ramp to be over; metrics wait for it.

    Example:
        >>> config_ramp_end(start=Fraction(1), increment=Fraction(1), end=Fraction(4), samples=4096, expansion=Fraction(-1),
        ...     num_devices=8, accumulation=4)
        80

    Source: MaxText `configs/types.py`; it counts loaded rows, with a whole sample per device at least and the accumulation.
    """
    first, step, last = (batch_sizes(size, expansion, num_devices, accumulation).to_load for size in (start, increment, end))
    num_increments = (last - first) // step if step > 0 else 0
    if not 0 < num_increments < MAX_PHASES or first < 1:
        return 0
    return sum(max(math.ceil(Fraction(samples, num_increments) / (first + k * step)), 0) for k in range(num_increments))


def rows_lost_at_ramp_end(*, trained: int, end: int, loaded_per_pull: int) -> int:
    """Return the rows that were read in the ramp and never trained on when it ends.

    Args:
        trained: samples trained on in the ramp.
        end: rows that the loader believes to be in its buffer, the final batch.
        loaded_per_pull: rows that each pull really reads.

    Example:
        >>> rows_lost_at_ramp_end(trained=17, end=4, loaded_per_pull=4)
        3

    Source: MaxText `common/data_loader.py`, RampUpDataLoader: the buffer is dropped with the ramp.
    """
    return -(-trained // end) * loaded_per_pull - trained
