"""Megatron's two ramps: the linear triple and the schedule in steps, exactly and with Megatron's own roundings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from rampup.plan.numbers import MAX_COUNT, SUFFIXES
from rampup.plan.ramp import BatchRamp, check_num_phases

Row = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRamp:
    """`--rampup-batch-size START INCREMENT SAMPLES` up to `--global-batch-size`.

    Attributes:
        start, increment, end: global batch sizes.
        samples: length of the ramp.
        unit: with `--decrease-batch-size-if-needed`, what every batch is rounded down to; otherwise 1.

    Source: megatron-core `num_microbatches_calculator.py`, RampupBatchsizeNumMicroBatchesCalculator.
    """

    start: int
    increment: int
    end: int
    samples: int
    unit: int = 1

    @property
    def num_increments(self) -> int:
        """Changes of size that are asked for."""
        return (self.end - self.start) // self.increment

    def size(self, k: int) -> int:
        """Return the batch after k increments."""
        return (self.start + k * self.increment) // self.unit * self.unit

    def exact(self) -> BatchRamp:
        """Return the ramp without any rounding.

        Example:
            >>> ramp = LinearRamp(start=16, increment=8, end=64, samples=600, unit=12).exact()
            >>> [(phase.start_step, phase.global_batch_size) for phase in ramp.phases]
            [(0, 12), (9, 24), (17, 36), (20, 48), (24, 60)]
        """
        if self.unit == 1:
            return BatchRamp.linear(
                start=self.start, increment=self.increment, end=self.end, samples=self.samples, carry_overshoot=True
            )
        return BatchRamp.piecewise(self.thresholds())

    def thresholds(self) -> list[tuple[int, int]]:
        """Return (samples, batch) at every change, rounded sizes that follow each other with no change left out."""
        count = self.num_increments
        check_num_phases(count + 1)
        pairs = sorted({-(-k * self.samples // count): self.size(k) for k in range(count + 1)}.items())
        changed = [pair for before, pair in itertools.pairwise(pairs) if pair[1] != before[1]]
        return [pairs[0], *changed]

    def as_run(self) -> list[Row]:
        """Return (first step, batch, samples before) as Megatron's floating-point division gives them.

        Example:
            >>> LinearRamp(start=1, increment=4, end=61, samples=22952).as_run()[-1][0]
            2649
        """
        return list(_merged(self._float_rows()))

    def _float_rows(self) -> Iterator[Row]:
        count, step, consumed, k = self.num_increments, 0, 0, 0
        share = self.samples / count

        def stage(samples: int) -> int:
            return count if samples > self.samples else int(samples / share)

        while k < count:
            size = self.size(k)
            number = max(math.ceil((Fraction((k + 1) * self.samples, count) - consumed) / size), 1)
            while number > 1 and stage(consumed + (number - 1) * size) > k:
                number -= 1
            while stage(consumed + number * size) <= k:
                number += 1
            yield step, size, consumed
            step, consumed = step + number, consumed + number * size
            k = stage(consumed)
        yield step, self.size(count), consumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One THRESHOLD:SIZE entry of `--step-batch-size-schedule`.

    Attributes:
        text: as written.
        samples: the threshold, exact, cut to whole samples.
        as_run: the same as Megatron's floating-point product gives it.
        size: global batch size from there on.
    """

    text: str
    samples: int
    as_run: int
    size: int


def parse_entry(text: str, seq_length: int | None) -> Threshold | None:
    """Read one entry as Megatron does; None where it cannot.

    Args:
        text: THRESHOLD:SIZE, with suffixes K, M, B, T.
        seq_length: tokens per sample, if thresholds are tokens.

    Example:
        >>> entry = parse_entry("2.01K:16", None)
        >>> entry.samples, entry.as_run, entry.size
        (2010, 2009, 16)

    Source: Megatron-LM `num_microbatches_calculator.py`, the step schedule: `int(float(digits) * factor)`.
    """
    threshold, colon, size = text.partition(":")
    left, right = _number(threshold), _number(size)
    if not colon or left is None or right is None:
        return None
    per_sample = seq_length or 1
    return Threshold(text=text, samples=left[0] // per_sample, as_run=left[1] // per_sample, size=right[1])


def entries_of(text: str) -> list[str]:
    """Return the entries of a schedule; spaces and commas separate them."""
    return text.replace(",", " ").split()


def _number(text: str) -> tuple[int, int] | None:
    digits, factor = text.strip().upper(), 1
    if digits and digits[-1] in SUFFIXES:
        digits, factor = digits[:-1], SUFFIXES[digits[-1]]
    try:
        exact = Decimal(digits)
    except InvalidOperation:
        return None
    if not exact.is_finite() or abs(exact.adjusted()) > 18 or abs(exact) * factor > MAX_COUNT:
        return None
    return int(exact * factor), int(float(exact) * factor)


def _merged(rows: Iterator[Row]) -> Iterator[Row]:
    before = None
    for row in rows:
        if row[1] != before:
            yield row
        before = row[1]
