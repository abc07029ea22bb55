"""The batch-size ramp: a table of phases that maps samples consumed, and therefore
steps, to a global batch size.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Self

from rampup.errors import RampDefinitionError, RampupError, raise_together
from rampup.plan.numbers import check_whole, exact_fraction, parse_count

MAX_PHASES = 200_000
# What look-ups bisect.
_START_STEP, _START_SAMPLE = map(operator.attrgetter, ("start_step", "start_sample"))
# Phases that an error message shows of two ramps.
MAX_COMPARED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One interval of constant global batch size.

    Attributes:
        index: counted from 0.
        start_step, start_sample: the first optimizer step, and the samples consumed
            before it.
        num_steps: optimizer steps in the phase. None for the last one, which has no
            end.
        global_batch_size: samples per optimizer step.

    Example:
        >>> str(BatchRamp.from_schedule("0:8 100:16").phases[1])
        'phase 1, from sample 104'
    """

    index: int
    start_step: int
    start_sample: int
    num_steps: int | None
    global_batch_size: int

    def __str__(self) -> str:
        return f"phase {self.index}, from sample {self.start_sample:,}"


# Samples are the primary clock. A threshold is a number of samples after which a size
# begins, counted from the start of a run or, in a linear ramp without
# `carry_overshoot`, of the phase before. A step is never cut: the size begins with the
# first at or past it. So `samples_before` and `step_of_sample` are exact inverses at
# the first sample of every step.
#
# Resuming and `batch_size_schedule: auto` rest on one guarantee: the batches before a
# step depend only on the phases up to it. Phases may be appended, and `spliced_at(step,
# other)` keeps the batches before `step`: equal batches mean equal steps, samples and
# rows of data. The last phase has no end: a run is made longer by the plan's number of
# steps and never by the ramp.
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRamp:
    """An immutable table of phases with closed-form look-ups by step and by sample.

    Attributes:
        phases: the phases in order. The last one never ends.
        sizes: the global batch size of every phase, in samples (derived).
        num_increments: the number of requested changes of size; one large step can skip
            a size. From rows, that of actual ones.
        samples_per_increment: the requested samples per change of a linear ramp,
            exactly. None for other ramps and from rows.
        first_step: the optimizer step that a run starts or goes on with. A phase that
            ends before it is over: look-ups know it, a plan need not split it. Two
            ramps that differ in nothing else are equal.

    Example:
        >>> ramp = BatchRamp.from_schedule("0:8 100:16 250:32")
        >>> (
        ...     ramp.global_batch_size_at(13),
        ...     ramp.samples_before(13),
        ...     ramp.step_of_sample(104),
        ... )
        (16, 104, 13)
    """

    phases: tuple[Phase, ...]
    num_increments: int = 0
    samples_per_increment: Fraction | None = None
    first_step: int = field(default=0, compare=False)
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.phases:
            raise RampDefinitionError("a ramp needs at least one phase")
        check_whole(step=self.first_step)
        if self.first_step < 0:
            raise _negative(self.first_step, "step")
        step = sample = 0
        for index, phase in enumerate(self.phases):
            last = index == len(self.phases) - 1
            if (phase.index, phase.start_step, phase.start_sample) != (
                index,
                step,
                sample,
            ):
                raise RampDefinitionError(
                    f"phase {index} must start at step {step}, sample {sample}; it is"
                    f" {phase}"
                )
            if (
                phase.global_batch_size < 1
                or (phase.num_steps is None) != last
                or phase.num_steps == 0
            ):
                raise RampDefinitionError(
                    f"phase {index} must have a positive batch, and steps unless it is"
                    f" the last: {phase}"
                )
            step += phase.num_steps or 0
            sample += (phase.num_steps or 0) * phase.global_batch_size
        # Once, because looking a size up in a loop over the phases would otherwise take
        # time with their square.
        object.__setattr__(
            self, "sizes", tuple(phase.global_batch_size for phase in self.phases)
        )

    @classmethod
    def constant(cls, global_batch_size: int) -> Self:
        """Return a constant schedule (a single phase).

        Args:
            global_batch_size: samples per optimizer step.
        """
        check_whole(global_batch_size=global_batch_size)
        return cls._from_segments([(None, global_batch_size)])

    @classmethod
    def linear(
        cls,
        *,
        start: int,
        increment: int,
        end: int,
        samples: int,
        carry_overshoot: bool = False,
    ) -> Self:
        """Return a ramp that grows from `start` to `end` by `increment` over `samples`,
        all in samples; phases have equal shares, before rounding to whole steps.

        Without `carry_overshoot`, each phase counts from zero and has at least one step
        (MaxText, `RampupBatchManager.update`). With it, the size changes at the first
        step at or past each multiple of the share, counted over the whole run, so a
        size can be skipped (Megatron-LM, `--rampup-batch-size`). Sizes that do not grow
        to `end` raise a RampDefinitionError.

        Args:
            start: samples per step in the first phase.
            increment: samples per step that each phase adds.
            end: samples per step in the last phase.
            samples: samples of the whole ramp.
            carry_overshoot: count thresholds over the run instead of the phase.

        Raises:
            RampDefinitionError: sizes that do not grow to `end` by whole increments.

        Example:
            >>> [
            ...     p.start_step
            ...     for p in BatchRamp.linear(
            ...         start=16, increment=8, end=48, samples=500
            ...     ).phases
            ... ]
            [0, 8, 14, 18, 22]
        """
        check_whole(start=start, increment=increment, end=end, samples=samples)
        for name, value in (
            ("start", start),
            ("increment", increment),
            ("samples", samples),
        ):
            if value < 1:
                raise RampDefinitionError(
                    f"{name}={value} must be at least 1", key=name, nearest=(1,)
                )
        if end <= start:
            raise RampDefinitionError(
                f"end={end} must be greater than start={start}; for a decreasing batch"
                " size use piecewise",
                key="end",
            )
        num_increments, rest = divmod(end - start, increment)
        if rest:
            nearest = [end - rest] * (num_increments > 0) + [end - rest + increment]
            raise RampDefinitionError(
                f"end - start = {end} - {start} = {end - start} must be a multiple of"
                f" increment={increment}",
                fix=f"nearest end: {', '.join(map(str, nearest))}",
                key="end",
                nearest=nearest,
            )
        check_num_phases(num_increments + 1)
        each = Fraction(samples, num_increments)
        if carry_overshoot:
            pairs = [
                (math.ceil(each * k), start + k * increment)
                for k in range(num_increments + 1)
            ]
            segments = _segments_counted_over_run(pairs)
        else:
            growing = segments_counted_per_phase(
                range(start, end, increment), samples, num_increments
            )
            segments = itertools.chain(growing, [(None, end)])
        return cls._from_segments(
            segments, num_increments=num_increments, samples_per_increment=each
        )

    @classmethod
    def piecewise(cls, thresholds: Iterable[tuple[int, int]]) -> Self:
        """Return a ramp that changes size at the first step at or past each threshold,
        counted over the whole run.

        `thresholds` are pairs (samples consumed, global batch size). Thresholds begin
        with 0 and increase, or raise a RampDefinitionError; sizes may decrease. One is
        skipped if a step passes its threshold and the next.

        Args:
            thresholds: pairs of samples consumed and samples per step.

        Raises:
            RampDefinitionError: thresholds that do not begin with 0 and increase, or a
                size below 1.

        Example:
            >>> [
            ...     (p.start_step, p.global_batch_size)
            ...     for p in BatchRamp.piecewise([(0, 64), (1000, 32)]).phases
            ... ]
            [(0, 64), (16, 32)]
        """
        pairs = list(thresholds)
        if not pairs:
            raise RampDefinitionError(
                "a schedule needs at least one THRESHOLD:SIZE pair"
            )
        check_num_phases(len(pairs))
        for threshold, size in pairs:
            check_whole(threshold=threshold, global_batch_size=size)
        if pairs[0][0] != 0:
            raise RampDefinitionError(
                f"the first threshold must be 0, it is {pairs[0][0]:,}", nearest=(0,)
            )
        problems: list[RampupError] = [
            RampDefinitionError(
                f"thresholds must increase, but sample {after:,} comes after sample"
                f" {before:,}"
            )
            for (before, _), (after, _) in itertools.pairwise(pairs)
            if after <= before
        ]
        problems += [
            RampDefinitionError(
                f"global batch size {size} from sample {threshold:,} must be at"
                " least 1",
                nearest=(1,),
            )
            for threshold, size in pairs
            if size < 1
        ]
        raise_together(problems)
        num_increments = sum(
            before[1] != after[1] for before, after in itertools.pairwise(pairs)
        )
        return cls._from_segments(
            _segments_counted_over_run(pairs), num_increments=num_increments
        )

    @classmethod
    def from_schedule(
        cls,
        text: str,
        *,
        sequence_length: int | None = None,
        budget: int | Fraction | None = None,
        key: str = "batch_size_schedule",
    ) -> Self:
        """Parse a schedule such as `"0:768 250B:1536 500B:3072"` (Megatron-LM's
        `--step-batch-size-schedule`).

        Args:
            text: THRESHOLD:SIZE pairs, separated by spaces or commas, with the suffixes
                K, M, B and T. A threshold such as 2.5% is a share of the budget.
                Thresholds are rounded down to whole samples.
            sequence_length: tokens per sample, if thresholds are tokens.
            budget: samples of the whole run, exactly, for thresholds that are shares of
                it.
            key: the configuration key that errors refer to.

        Returns:
            The ramp, in samples.

        Raises:
            RampDefinitionError: no text, a pair that cannot be parsed, or pairs that
                `piecewise` rejects.

        Example:
            >>> BatchRamp.from_schedule("0:768 250B:1536", sequence_length=4096).phases[
            ...     1
            ... ].start_step
            79473
        """
        if not isinstance(text, str):
            raise RampDefinitionError(
                f'{key}={text!r} must be a text such as "0:768 250B:1536"',
                fix="for one size, use BatchRamp.constant",
                key=key,
            )
        try:
            return cls.piecewise(
                parse_schedule(text, sequence_length=sequence_length, budget=budget)
            )
        except RampDefinitionError as error:
            schedule = f"{key}={text[:200]!r}"
            problems = error.problems or (error,)
            raise_together(
                [
                    RampDefinitionError(f"{schedule}: {p}", key=key, nearest=p.nearest)
                    for p in problems
                ]
            )
            raise

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Self:
        """Return a ramp with the phases that `to_rows` returned as rows: each starts
        where the one before it ends.

        Args:
            rows: start step, start sample and global batch size of every phase.
        """
        table = [*rows]
        changes = sum(
            before[2] != after[2] for before, after in itertools.pairwise(table)
        )
        return cls(phases=_phases(table), num_increments=changes)

    def to_rows(self) -> list[list[int]]:
        """Return start step, start sample and global batch size of every phase: all
        that its batches depend on.
        """
        return [
            [phase.start_step, phase.start_sample, phase.global_batch_size]
            for phase in self.phases
        ]

    def resumed_at(self, step: int) -> BatchRamp:
        """Return this ramp for a run that goes on with `step`: the same batches at the
        same steps, but a plan splits only those of the phases that are still to come.

        So a run whose batch has grown goes on with more devices than its first batches
        could be split for. A run in a loop of its own gives its plan
        `ramp.resumed_at(step)`, where `step` is that of the checkpoint.

        Args:
            step: completed optimizer steps.

        Raises:
            RampDefinitionError: `step` is negative.

        Example:
            >>> ramp = BatchRamp.from_schedule("0:2 18:64").resumed_at(9)
            >>> [
            ...     phase.global_batch_size
            ...     for phase in ramp.phases
            ...     if not ramp.is_over(phase)
            ... ]
            [64]
        """
        return replace(self, first_step=step)

    def is_over(self, phase: Phase) -> bool:
        """Return whether a phase of this ramp ends before `first_step`.

        Args:
            phase: one of `phases`.
        """
        return (
            phase.num_steps is not None
            and phase.start_step + phase.num_steps <= self.first_step
        )

    @property
    def sizes_to_come(self) -> tuple[int, ...]:
        """The global batch sizes of the phases that are not over, in samples."""
        return tuple(
            phase.global_batch_size for phase in self.phases if not self.is_over(phase)
        )

    def spliced_at(self, step: int, other: BatchRamp) -> BatchRamp:
        """Return this ramp before `step`, followed by the sizes that `other` has for
        the same samples consumed; a run goes on with it at `step`.

        Args:
            step: completed optimizer steps.
            other: the ramp to go on with.

        Example:
            >>> BatchRamp.constant(8).spliced_at(
            ...     14, BatchRamp.from_schedule("0:4 100:16 200:32")
            ... ).to_rows()
            [[0, 0, 8], [14, 112, 16], [21, 224, 32]]
        """
        consumed = self.samples_before(step)
        done = [phase for phase in self.phases if phase.start_step < step]
        # Without an end (num_steps is None), `step` is bound enough.
        before = [
            (
                min(phase.num_steps or step, step - phase.start_step),
                phase.global_batch_size,
            )
            for phase in done
        ]
        rest = other.phases[other.phase_of_sample(consumed).index :]
        after = _segments_counted_over_run(
            [(phase.start_sample, phase.global_batch_size) for phase in rest], consumed
        )
        return BatchRamp._from_segments(
            [*before, *after], num_increments=other.num_increments
        ).resumed_at(step)

    @classmethod
    def _from_segments(
        cls,
        segments: Iterable[tuple[int | None, int]],
        *,
        num_increments: int = 0,
        samples_per_increment: Fraction | None = None,
    ) -> Self:
        """Return the ramp of these steps and sizes, with neighbors of one size as one
        phase. The last has no end: None.
        """
        rows, step, sample = [], 0, 0
        for size, parts in itertools.groupby(segments, key=operator.itemgetter(1)):
            rows.append((step, sample, size))
            num_steps = sum(steps or 0 for steps, _ in parts)
            step += num_steps
            sample += num_steps * size
        return cls(
            phases=_phases(rows),
            num_increments=num_increments,
            samples_per_increment=samples_per_increment,
        )

    @property
    def ramp_steps(self) -> int:
        """Optimizer steps before the last phase."""
        return self.phases[-1].start_step

    @property
    def ramp_samples(self) -> int:
        """Samples consumed before the last phase."""
        return self.phases[-1].start_sample

    @property
    def fingerprint(self) -> str:
        """A digest of the rows. Runs with the same digest consume the same samples at
        the same steps.
        """
        return hashlib.sha256(json.dumps(self.to_rows()).encode()).hexdigest()[:16]

    def differences(self, rows: Sequence[Sequence[int]]) -> str:
        """Return the phases of a checkpoint's ramp, its `to_rows`, and of this one side
        by side, for an error message.

        Args:
            rows: start step, start sample and global batch size of every phase.
        """
        before, now = BatchRamp.from_rows(rows).phases, self.phases
        shown = [f"  {'in the checkpoint':<40} here"]
        for pair in itertools.islice(itertools.zip_longest(before, now), MAX_COMPARED):
            left, right = (
                f"from sample {p.start_sample:,}: {p.global_batch_size:,}" if p else "-"
                for p in pair
            )
            shown.append(
                f"  {left:<40} {right}" + ("" if left == right else "  <- differs")
            )
        return "\n".join(
            [*shown, *(["  ..."] if max(len(before), len(now)) > MAX_COMPARED else [])]
        )

    def phase_at(self, step: int) -> Phase:
        """Return the phase of optimizer step `step`, counted from 0.

        Args:
            step: an optimizer step, counted from 0.

        Raises:
            RampDefinitionError: `step` is negative.
        """
        check_whole(step=step)
        if step < 0:
            raise _negative(step, "step")
        return self.phases[bisect.bisect_right(self.phases, step, key=_START_STEP) - 1]

    def global_batch_size_at(self, step: int) -> int:
        """Return the samples that step `step` consumes.

        Args:
            step: an optimizer step, counted from 0.
        """
        return self.phase_at(step).global_batch_size

    def samples_before(self, step: int) -> int:
        """Return the samples consumed by the first `step` steps, which is the first
        sample of step `step`.

        Args:
            step: completed optimizer steps.
        """
        phase = self.phase_at(step)
        return phase.start_sample + (step - phase.start_step) * phase.global_batch_size

    def phase_of_sample(self, sample: int) -> Phase:
        """Return the phase whose steps consume sample number `sample`, counted from
        0.

        Args:
            sample: the number of a sample, counted from 0.

        Raises:
            RampDefinitionError: `sample` is negative.
        """
        if sample < 0:
            raise _negative(sample, "sample")
        return self.phases[
            bisect.bisect_right(self.phases, sample, key=_START_SAMPLE) - 1
        ]

    def step_of_sample(self, sample: int) -> int:
        """Return the step that consumes sample number `sample`, counted from 0.
        `samples_before` gives its first sample.

        Args:
            sample: the number of a sample, counted from 0.
        """
        phase = self.phase_of_sample(sample)
        return (
            phase.start_step + (sample - phase.start_sample) // phase.global_batch_size
        )


def _phases(rows: Sequence[Sequence[int]]) -> tuple[Phase, ...]:
    """Return the phases of rows, as of `BatchRamp.to_rows`: each ends where the next one
    starts, and the last never.
    """
    ends = [*(start for start, _, _ in rows[1:]), None]
    return tuple(
        Phase(
            index=index,
            start_step=step,
            start_sample=sample,
            num_steps=None if end is None else end - step,
            global_batch_size=size,
        )
        for index, ((step, sample, size), end) in enumerate(
            zip(rows, ends, strict=True)
        )
    )


def parse_schedule(
    text: str,
    *,
    sequence_length: int | None = None,
    budget: int | Fraction | None = None,
) -> list[tuple[int, int]]:
    """Return a schedule's pairs (threshold in samples, global batch size), in the same
    order; see `BatchRamp.from_schedule`.
    """
    entries = text.replace(",", " ").split()
    if not entries:
        raise RampDefinitionError(
            'the schedule is empty; write for instance "0:768 250B:1536", or null for'
            " none"
        )
    check_num_phases(len(entries))
    pairs, problems = [], list[RampupError]()
    for entry in entries:
        try:
            pairs.append(_parse_entry(entry, sequence_length, budget))
        except RampDefinitionError as error:
            problems.append(error)
    raise_together(problems)
    return pairs


def _parse_entry(
    entry: str, sequence_length: int | None, budget: int | Fraction | None
) -> tuple[int, int]:
    threshold, colon, size = entry.partition(":")
    if not colon:
        raise RampDefinitionError(
            f"entry {entry!r} is not THRESHOLD:SIZE; commas and spaces separate entries"
            " (write 1_000 or 1K, not 1,000)"
        )
    if threshold.endswith("%"):
        share = exact_fraction(threshold.removesuffix("%"), what="threshold")
        if not 0 <= share <= 100:
            raise RampDefinitionError(
                f"threshold={threshold!r} must be between 0% and 100% of the budget"
            )
        if budget is None:
            raise RampDefinitionError(
                f"threshold={threshold!r} is a share of the budget, but there is none;"
                " set train_tokens or train_samples"
            )
        samples = math.floor(share * budget / 100)
    else:
        samples = parse_count(threshold, what="threshold") // (sequence_length or 1)
    return samples, parse_count(size, what="global batch size")


def check_num_phases(number: int, *, key: str | None = None) -> None:
    """Raise a RampDefinitionError if a ramp has so many phases that it could exhaust
    memory.
    """
    if number > MAX_PHASES:
        raise RampDefinitionError(
            f"{number:,} phases are too many; the maximum is {MAX_PHASES:,}; use a"
            " larger increment",
            key=key,
        )


def segments_counted_per_phase(
    sizes: Iterable[int], samples: int, num_increments: int
) -> Iterator[tuple[int, int]]:
    """Yield (steps, size) with every phase counted from zero: steps = ceil(samples /
    num_increments / size), at least 1.
    """
    for size in sizes:
        yield max(-(-samples // (num_increments * size)), 1), size


def _segments_counted_over_run(
    pairs: Sequence[tuple[int, int]], consumed: int = 0
) -> Iterator[tuple[int | None, int]]:
    """Yield (steps, size): each size until the first step at or past the next
    threshold, unless that is passed already.
    """
    for (_, size), (threshold, _) in itertools.pairwise(pairs):
        num_steps = -(-(threshold - consumed) // size)
        if num_steps > 0:
            consumed += num_steps * size
            yield num_steps, size
    yield None, pairs[-1][1]


def _negative(value: int, what: str) -> RampDefinitionError:
    return RampDefinitionError(
        f"{what}={value} must not be negative; {what}s are counted from 0", nearest=(0,)
    )
