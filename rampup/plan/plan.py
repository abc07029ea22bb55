"""RampPlan: the ramp, the split of every batch, and everything that follows from them,
phase by phase.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampDefinitionError,
    RampupError,
    a_type,
    combine,
)
from rampup.plan.describe import describe_plan
from rampup.plan.learning_rate import ClockSegment, RateRule, Seesaw, clock_segments
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.nearest import batch_error
from rampup.plan.numbers import AUTO, check_whole, nearest_multiples, plain_number
from rampup.plan.pipeline import Timetable, pass_bubble, pass_ticks
from rampup.plan.ramp import BatchRamp, Phase
from rampup.plan.split import BatchSplit, BatchSplitter

# The types of what a plan is made of, and how one is made.
_PARTS: dict[str, tuple[type, str]] = {
    "ramp": (BatchRamp, '.from_schedule("0:8 100:16")'),
    "splitter": (BatchSplitter, "(data_parallel_size=8)"),
    "rate": (RateRule, '(clock="samples")'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPosition:
    """The progress of a run after a number of optimizer steps.

    Attributes:
        step: completed optimizer steps, which is also the number of the next step.
        consumed_samples: samples consumed by these steps.
        phase, split: those of the next step.
        segment: the segment of the learning rate's clock that the next step is in, if
            the plan follows the run, or None.
    """

    step: int
    consumed_samples: int
    phase: Phase
    split: BatchSplit
    segment: ClockSegment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a run decides about its batches while it runs.

    Attributes:
        sizes: the global batch sizes that it may use, ascending. They are checked and
            split with those of the ramp, and the buffers of rows have room for them.
        budget_samples: length of the run in samples: it ends with the first batch that
            reaches them, so `total_steps` is that of the ramp so far (`grown`), and the
            clock of samples ends there too. None = it has `total_steps`.

    Example:
        >>> Growth(sizes=(8, 16, 32), budget_samples=1000).sizes[-1]
        32
    """

    sizes: tuple[int, ...]
    budget_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RampPlan:
    """Everything about a run's batches that is known before step 0, or an error with
    all batches that cannot be split.

    Attributes:
        ramp: maps samples to the global batch size.
        splitter: the rule that splits each batch.
        num_devices, total_steps: devices and optimizer steps of the run.
        eval_global_batch_size: samples per evaluation batch. None = no evaluation
            batch, as if evaluation is off and its batch could not be split: an unused
            key is no error.
        axes: devices along each mesh axis. By default the splitter's row shards are on
            the data axis, its stages on the pipeline axis, and the tensor axis has the
            remaining factor of `num_devices`.
        rate: how the learning rate follows steps and batches.
        growth: what the run decides about its batches while it runs, as with
            `batch_size_schedule: auto`; None = the ramp is all there is.
        splits, eval_split: the split of every phase's batch and of the evaluation batch
            (derived). A phase that is over (`BatchRamp.resumed_at`) needs none: if it
            cannot be split here, as many row shards as divide it stand for it.
        clock: the clock of the learning-rate schedule, phase by phase (derived).
        max_microbatches: for each microbatch size, the most microbatches of a step
            (derived).

    Example:
        >>> ramp = BatchRamp.linear(start=16, increment=8, end=48, samples=500)
        >>> plan = RampPlan(
        ...     ramp=ramp,
        ...     splitter=BatchSplitter(data_parallel_size=4),
        ...     num_devices=4,
        ...     total_steps=100,
        ... )
        >>> [(s.accumulation_steps, s.microbatch_size) for s in plan.splits]
        [(2, 2), (3, 2), (4, 2), (5, 2), (6, 2)]
        >>> plan.position(14).consumed_samples, plan.num_compiled_shapes
        (272, 1)
    """

    ramp: BatchRamp
    splitter: BatchSplitter
    num_devices: int
    total_steps: int
    eval_global_batch_size: int | None = None
    axes: MeshAxes = None  # type: ignore[assignment]  # never None after __post_init__
    rate: RateRule = field(default_factory=RateRule)
    growth: Growth | None = None
    splits: tuple[BatchSplit, ...] = field(init=False, repr=False, compare=False)
    eval_split: BatchSplit | None = field(init=False, repr=False, compare=False)
    clock: tuple[ClockSegment, ...] = field(init=False, repr=False, compare=False)
    max_microbatches: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, (kind, example) in _PARTS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise RampDefinitionError(
                    f"{name} must be a {kind.__name__}, and is {a_type(value)}",
                    fix=f"give {kind.__name__}{example}",
                    key=name,
                )
        check_whole(num_devices=self.num_devices, total_steps=self.total_steps)
        if problems := [*self._problems()]:
            raise combine(problems)
        if self.axes is None:
            shards = self.splitter.data_parallel_size
            stages = self.splitter.num_stages
            rest = self.num_devices // (shards * stages)
            object.__setattr__(
                self, "axes", MeshAxes(data=shards, tensor=rest, pipeline=stages)
            )
        ramp, reserved = self.ramp, self._reserved_to_come
        # On the devices of before, a run that goes on keeps its microbatch, so the
        # phases that are over count where they can be split.
        kept = [
            phase
            for phase in ramp.phases
            if not ramp.is_over(phase) or self.splitter.allows(phase.global_batch_size)
        ]
        sizes = [phase.global_batch_size for phase in kept]
        splits = self.splitter.split((*sizes, *reserved))
        of_phase = dict(zip([phase.index for phase in kept], splits, strict=False))
        object.__setattr__(
            self,
            "splits",
            tuple(
                of_phase.get(phase.index) or self._split_of_the_past(phase)
                for phase in ramp.phases
            ),
        )
        eval_size = self.eval_global_batch_size
        eval_split = (
            None
            if eval_size is None
            else self.splitter.for_eval().split([eval_size])[0]
        )
        object.__setattr__(self, "eval_split", eval_split)
        counts: dict[int, int] = {}
        for split in splits:
            counts[split.microbatch_size] = max(
                counts.get(split.microbatch_size, 0), split.num_microbatches
            )
        object.__setattr__(self, "max_microbatches", counts)
        segments = clock_segments(
            self.ramp,
            self.rate,
            schedule_steps=self.schedule_steps,
            reference_size=self.reference_size,
            # The steps of Seesaw's grown batches may take more samples than are
            # planned; those of `auto` are not known.
            schedule_samples=(
                self.budget_samples
                if self.seesaw is None
                else self.seesaw.schedule_samples
            ),
        )
        object.__setattr__(self, "clock", segments)

    @property
    def follows(self) -> bool:
        """Whether the run decides about its batches while it runs."""
        return self.growth is not None

    @property
    def reserved_sizes(self) -> tuple[int, ...]:
        """The global batch sizes that the run may decide to use."""
        return () if self.growth is None else self.growth.sizes

    @property
    def budget_samples(self) -> int | None:
        """The length in samples of a run that `follows`, if it has one."""
        return None if self.growth is None else self.growth.budget_samples

    @property
    def seesaw(self) -> Seesaw | None:
        """The transform that made the ramp; None if there is none."""
        return self.rate.seesaw

    @property
    def _reserved_to_come(self) -> tuple[int, ...]:
        """The reserved sizes that the run may still use: the batch never shrinks."""
        now = self.ramp.global_batch_size_at(self.ramp.first_step)
        is_resumed = self.ramp.first_step > 0
        return tuple(x for x in self.reserved_sizes if x >= now or not is_resumed)

    def _split_of_the_past(self, phase: Phase) -> BatchSplit:
        """Return what stands for the split of a phase that is over, and that these
        devices cannot split: as many row shards as divide it, in one pass. No step runs
        it.
        """
        size = phase.global_batch_size
        shards = math.gcd(size, self.splitter.data_parallel_size)
        return BatchSplit(
            global_batch_size=size,
            data_parallel_size=shards,
            accumulation_steps=1,
            num_pipeline_microbatches=1,
            microbatch_size=size // shards,
        )

    def _problems(self) -> Iterator[RampupError]:
        for phase in self.ramp.phases:
            if not self.ramp.is_over(phase) and not self.splitter.allows(
                phase.global_batch_size
            ):
                yield batch_error(self.splitter, phase.global_batch_size, str(phase))
        for size in self._reserved_to_come:
            if not self.splitter.allows(size):
                yield batch_error(
                    self.splitter,
                    size,
                    "batch_size_schedule: auto",
                    key="batch_size_schedule",
                )
        eval_size = self.eval_global_batch_size
        eval_splitter = self.splitter.for_eval()
        if eval_size is not None and not eval_splitter.allows(eval_size):
            yield batch_error(
                eval_splitter, eval_size, "evaluation", key="eval_per_device_batch_size"
            )
        if self.total_steps < 1:
            yield ConfigError(
                f"total_steps={self.total_steps} must be at least 1",
                key="steps",
                nearest=(1,),
            )
        needed = self.splitter.data_parallel_size * self.splitter.num_stages
        if self.axes is None and (self.num_devices < 1 or self.num_devices % needed):
            yield BatchDivisibilityError(
                f"num_devices={self.num_devices} must be a multiple of"
                f" data_parallel_size * num_stages = {needed}",
                value=self.num_devices,
                divisor=needed,
                key="num_devices",
                nearest=nearest_multiples(self.num_devices, needed),
            )
        if self.axes is not None:
            pairs = {
                "num_devices": (self.axes.num_devices, self.num_devices),
                "data_parallel_size": (
                    self.axes.data_parallel_size,
                    self.splitter.data_parallel_size,
                ),
                "num_stages": (self.axes.pipeline, self.splitter.num_stages),
            }
            wrong = [
                f"{name}={size}, but the plan has {other}"
                for name, (size, other) in pairs.items()
                if size != other
            ]
            if wrong:
                yield ConfigError(f"the mesh axes have {'; '.join(wrong)}", key="axes")

    def position(self, step: int) -> PlanPosition:
        """Return the progress of the run after `step` optimizer steps. This is a
        look-up, not a replay.

        Args:
            step: completed optimizer steps.
        """
        phase = self.ramp.phase_at(step)
        return PlanPosition(
            step=step,
            consumed_samples=self.ramp.samples_before(step),
            phase=phase,
            split=self.splits[phase.index],
            segment=self.segment_at(step) if self.follows else None,
        )

    def loop_trips(self, split: BatchSplit) -> tuple[int, ...]:
        """Return the iterations of the loops of a step: microbatches, or passes and the
        ticks of a pipeline pass.

        Args:
            split: a split of the plan.
        """
        if self.splitter.num_stages == 1:
            return (split.num_microbatches,)
        ticks = pass_ticks(
            self.splitter.num_stages,
            split.num_pipeline_microbatches,
            self.splitter.num_repeats,
        )
        return split.accumulation_steps, ticks

    def segment_at(self, step: int) -> ClockSegment:
        """Return the segment of the learning-rate schedule's clock that an optimizer
        step is in.

        Args:
            step: an optimizer step, counted from 0.
        """
        return self.clock[self.segment_index(step)]

    def segment_index(self, step: int) -> int:
        """Return the index in `clock` of the segment that an optimizer step is in.

        Args:
            step: an optimizer step, counted from 0.
        """
        return (
            bisect.bisect_right(
                self.clock, step, key=lambda segment: segment.start_step
            )
            - 1
        )

    def rows(self, step: int) -> range:
        """Return the numbers of the samples that optimizer step `step` consumes,
        counted over all epochs.

        Args:
            step: an optimizer step, counted from 0.
        """
        start = self.ramp.samples_before(step)
        return range(start, start + self.ramp.global_batch_size_at(step))

    @property
    def splits_to_come(self) -> tuple[BatchSplit, ...]:
        """The splits of the phases that are not over."""
        pairs = zip(self.ramp.phases, self.splits, strict=True)
        return tuple(split for phase, split in pairs if not self.ramp.is_over(phase))

    @property
    def consumed_samples(self) -> int:
        """Samples that the run consumes in total."""
        return self.ramp.samples_before(self.total_steps)

    @property
    def reference_size(self) -> int:
        """The batch size for which the hyperparameters were chosen: by default the last
        that there may be, before Seesaw.
        """
        sizes = (
            self.reserved_sizes
            if self.follows
            else (self.seesaw.base if self.seesaw else self.ramp).sizes
        )
        return self.rate.reference_batch_size or sizes[-1]

    def grown(self, ramp: BatchRamp) -> RampPlan:
        """Return this plan with a ramp that continues its own, and the steps that its
        budget, if it has one, then takes.

        Args:
            ramp: the ramp so far, with phases appended.
        """
        steps = (
            self.total_steps
            if self.budget_samples is None
            else ramp.step_of_sample(self.budget_samples - 1) + 1
        )
        ramp = ramp.resumed_at(self.ramp.first_step)
        return replace(self, ramp=ramp, total_steps=steps)

    @property
    def of_all_sizes(self) -> RampPlan:
        """This plan, or for a run that follows, one with a step of every size: for what
        depends on the size alone.
        """
        if not self.follows:
            return self
        sizes = sorted({*self.ramp.sizes, *self.reserved_sizes})
        return self.grown(
            BatchRamp.piecewise(
                zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
            )
        )

    @property
    def num_compiled_shapes(self) -> int:
        """The number of different microbatch sizes over the ramp. Each is compiled
        once.
        """
        return len(self.max_microbatches)

    def with_whole_batches(self) -> RampPlan:
        """Return this plan with every batch as one microbatch, for a loss of all rows;
        a ConfigError with passes or stages.
        """
        return replace(
            self,
            splitter=replace(
                self.splitter, rampup_microbatch="whole", microbatch_size=AUTO
            ),
        )

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in optimizer steps."""
        steps = self.rate.schedule_steps
        return self.total_steps if steps is None else steps

    @property
    def auto(self) -> dict[str, Any] | None:
        """What is known of `batch_size_schedule=auto` before the run, as in `rampup
        plan --json`; None without it.

        `sizes` are the global batch sizes that it may still use; the run takes
        `min_steps` to `max_steps` and consumes `min_samples` to `max_samples`: the
        batch stays, or is the largest from the last phase's start on.
        """
        if not self.follows:
            return None
        now = self.ramp.sizes[-1]  # the batch never shrinks
        sizes = (now, *(size for size in self.reserved_sizes if size > now))
        *before, (step, sample, _) = self.ramp.to_rows()
        largest = self.grown(BatchRamp.from_rows([*before, [step, sample, sizes[-1]]]))
        samples = [self.consumed_samples, largest.consumed_samples]
        if self.budget_samples is not None and len(sizes) > 1:
            samples = [self.budget_samples, self.budget_samples + sizes[-1] - 1]
        return {
            "sizes": sizes,
            "min_steps": largest.total_steps,
            "max_steps": self.total_steps,
            "min_samples": min(samples),
            "max_samples": max(samples),
        }

    def timetable(self, phase: int = -1) -> Timetable:
        """Return the timetable of one pipeline pass of a phase: 1F1B, or interleaved
        with repeats; a PipelineShapeError without stages.

        It is that of the schedule as published, and not of the program, which runs all
        stages in lock-step. In 1F1B, stage s of p has the activations of at most p - s
        microbatches in memory; the program has room for the inputs of 2p - 1, from
        which a backward computes the rest again (see `rampup.engine.pipeline`). If the
        stages do not divide the microbatches, the groups of a schedule with repeats are
        balanced, and those of the program are not (`rampup.plan.pipeline.pass_ticks`).

        Args:
            phase: the index of a phase; -1 = the last.

        Raises:
            PipelineShapeError: the plan has no pipeline stages.
        """
        stages = self.splitter.num_stages
        repeats = self.splitter.num_repeats
        if stages == 1:
            key = "ici_pipeline_parallelism"
            raise PipelineShapeError(
                f"a plan without pipeline stages has no timetable; set {key} above 1",
                key=key,
            )
        shape = {
            "num_stages": stages,
            "num_microbatches": self.splits[phase].num_pipeline_microbatches,
            "num_repeats": repeats,
        }
        return Timetable.build("interleaved" if repeats > 1 else "1f1b", **shape)

    def _sizes_of(
        self, split: BatchSplit, gradient_accumulation_steps: int
    ) -> dict[str, int | float]:
        """Return the sizes of one batch by their names in the JSON output."""
        per_device = Fraction(
            split.global_batch_size, self.num_devices * gradient_accumulation_steps
        )
        shape = {
            "num_stages": self.splitter.num_stages,
            "num_repeats": self.splitter.num_repeats,
        }
        return {
            "global_batch_size": split.global_batch_size,
            "per_device_batch_size": plain_number(per_device),
            **asdict(split),
            **shape,
            "bubble_fraction": float(
                pass_bubble(num_microbatches=split.num_pipeline_microbatches, **shape)
            ),
        }

    @property
    def scales_learning_rate(self) -> bool:
        """Whether the batch size has an effect on the learning rate."""
        return self.rate.batch_scaling != "none" or self.seesaw is not None

    def phase_rows(self) -> list[dict[str, int | float | None]]:
        """Return one dictionary per phase, as in `rampup plan --json`."""
        return [
            {
                "start_step": phase.start_step,
                "start_sample": phase.start_sample,
                "num_steps": phase.num_steps,
                **self._sizes_of(split, self.splitter.gradient_accumulation_steps),
                "learning_rate_scale": self.segment_at(phase.start_step).scale,
            }
            for phase, split in zip(self.ramp.phases, self.splits, strict=True)
        ]

    def __str__(self) -> str:
        return describe_plan(self)

    def to_dict(self) -> Mapping[str, object]:
        """Return the plan as `rampup plan --json` prints it."""
        increment = self.ramp.samples_per_increment
        return {
            "num_devices": self.num_devices,
            "num_increments": self.ramp.num_increments,
            "samples_per_increment": (
                None if increment is None else plain_number(increment)
            ),
            "ramp_steps": self.ramp.ramp_steps,
            "ramp_samples": self.ramp.ramp_samples,
            "total_steps": self.total_steps,
            "num_compiled_shapes": self.num_compiled_shapes,
            "phases": self.phase_rows(),
            "eval": (
                None if self.eval_split is None else self._sizes_of(self.eval_split, 1)
            ),
            **({} if self.auto is None else {"auto": self.auto}),
        }
