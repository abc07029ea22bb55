"""RampPlan: the ramp, the split of every batch, and everything that follows from them, phase by phase; and a token budget."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from rampup.errors import BatchDivisibilityError, ConfigError, PipelineShapeError, RampDefinitionError, raise_together
from rampup.plan.learning_rate import BatchScaling, Clock, ClockSegment, Seesaw, clock_segments
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO, MAX_COUNT, plain_number
from rampup.plan.pipeline import PipelineCandidate, pass_bubble
from rampup.plan.ramp import AutoMode, BatchRamp, Phase
from rampup.plan.split import BatchSplit, BatchSplitter
from rampup.plan.timetable import Timetable

SECONDS_PER_HOUR = 3600
# How many phases back a run looks for a compiled shape that it can use instead of one that is still compiling.
FALLBACK_PHASES = 8
# `str(plan)` leaves out the middle of longer tables.
MAX_PRINTED_PHASES = 40
# Column titles of the printed table, by the keys of `RampPlan.phase_rows`.
PHASE_TITLES = {
    "start_step": "from step",
    "start_sample": "from sample",
    "num_steps": "steps",
    "global_batch_size": "global batch",
    "per_device_batch_size": "per device",
    "accumulation_steps": "passes",
    "num_pipeline_microbatches": "pipeline microbatches",
    "microbatch_size": "microbatch",
    "bubble_fraction": "bubble",
    "learning_rate_scale": "rate scale",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPosition:
    """The progress of a run after a number of optimizer steps.

    Attributes:
        step: completed optimizer steps, which is also the number of the next step.
        consumed_samples: samples consumed by these steps.
        phase: the phase of the next step.
        split: the split of the next step's batch.
    """

    step: int
    consumed_samples: int
    phase: Phase
    split: BatchSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class RampPlan:
    """Everything about a run's batches that is known before step 0.

    Attributes:
        ramp: maps samples to the global batch size.
        splitter: the rule that splits each batch.
        num_devices: devices of the run.
        total_steps: optimizer steps of the run.
        eval_global_batch_size: samples per evaluation batch. None = no evaluation batch, as if evaluation is off and its
            batch could not be split: an unused key is no error.
        learning_rate_batch_scaling: how the learning rate depends on the batch size, relative to `reference_size`.
        learning_rate_clock: the unit of the learning-rate schedule's progress.
        learning_rate_schedule_steps: length of that schedule in optimizer steps. None = `total_steps`.
        expansion_factor_real_data: MaxText's key. If positive, the batch to load is this multiple of the training batch.
        assumed_tick_overhead: assumed fixed cost of a pipeline tick if the splitter has no measured value, for advice only.
        axes: devices along each mesh axis. By default the splitter's replicas are on the data axis, its stages on the pipeline
            axis, and the tensor axis has the remaining factor of `num_devices`.
        reference_batch_size: the batch size for which the hyperparameters were chosen; None = that of the last phase.
        seesaw: the transform that made the ramp; None if there is none.
        reserved_sizes: global batch sizes that the run may use besides those of the ramp, as with `batch_size_schedule: auto`.
            They are checked and split with the others, and the buffers of rows have room for them.
        auto_schedule: what `batch_size_schedule: auto` does with the reserved sizes; None without it.
        splits: the split of every phase's batch (derived).
        eval_split: the split of the evaluation batch (derived).
        clock: the clock of the learning-rate schedule, phase by phase (derived).
        max_microbatches: for each microbatch size, the maximum number of microbatches in a step, fallbacks included (derived).

    Raises:
        RampupError: If a batch of any phase or of evaluation cannot be split, or the axes contradict the splitter. One error
            has all problems.

    Example:
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.linear(start=16, increment=8, end=48, samples=500),
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
    learning_rate_batch_scaling: BatchScaling = "none"
    learning_rate_clock: Clock = "steps"
    learning_rate_schedule_steps: int | None = None
    expansion_factor_real_data: Fraction = Fraction(-1)
    assumed_tick_overhead: Fraction = Fraction(1)
    axes: MeshAxes = None  # type: ignore[assignment]  # never None after __post_init__
    reference_batch_size: int | None = None
    seesaw: Seesaw | None = None
    reserved_sizes: tuple[int, ...] = ()
    auto_schedule: AutoMode | None = None
    splits: tuple[BatchSplit, ...] = field(init=False, repr=False, compare=False)
    eval_split: BatchSplit | None = field(init=False, repr=False, compare=False)
    clock: tuple[ClockSegment, ...] = field(init=False, repr=False, compare=False)
    max_microbatches: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        eval_size, eval_splitter = self.eval_global_batch_size, self.splitter.for_eval()
        checks = [self.splitter.problem(phase.global_batch_size, str(phase)) for phase in self.ramp.phases]
        auto_key = "batch_size_schedule"
        checks += [self.splitter.problem(size, "batch_size_schedule: auto", key=auto_key) for size in self.reserved_sizes]
        if eval_size is not None:
            checks.append(eval_splitter.problem(eval_size, "evaluation", key="eval_per_device_batch_size"))
        factor, size = self.expansion_factor_real_data, self.ramp.sizes[-1]
        if factor > 0 and (size * factor).denominator > 1:
            key, value, divisor = "expansion_factor_real_data", size * factor.numerator, factor.denominator
            rule = f"global_batch_size * {key} = {size} * {factor} = {float(size * factor):g} must be a whole number of samples"
            problem = f"{rule}; -1 loads the batch itself"
            checks.append(BatchDivisibilityError(problem, value=value, divisor=divisor, key=key, nearest=(-1,)))
        if self.axes is not None:
            pairs = {
                "num_devices": (self.axes.num_devices, self.num_devices),
                "data_parallel_size": (self.axes.data_parallel_size, self.splitter.data_parallel_size),
                "num_stages": (self.axes.pipeline, self.splitter.num_stages),
            }
            wrong = [f"{name}={size}, but the plan has {other}" for name, (size, other) in pairs.items() if size != other]
            checks += [ConfigError(f"the mesh axes have {'; '.join(wrong)}", key="axes")] if wrong else []
        raise_together([problem for problem in checks if problem])
        if self.axes is None:
            replicas, stages = self.splitter.data_parallel_size, self.splitter.num_stages
            rest = max(self.num_devices // (replicas * stages), 1)
            object.__setattr__(self, "axes", MeshAxes(data=replicas, tensor=rest, pipeline=stages))
        splits = self.splitter.split((*self.ramp.sizes, *self.reserved_sizes))
        object.__setattr__(self, "splits", splits[: len(self.ramp.sizes)])
        object.__setattr__(self, "eval_split", None if eval_size is None else eval_splitter.split([eval_size])[0])
        segments = clock_segments(
            self.ramp,
            clock=self.learning_rate_clock,
            schedule_steps=self.schedule_steps,
            scaling=self.learning_rate_batch_scaling,
            reference_size=self.reference_size,
            seesaw=self.seesaw,
        )
        object.__setattr__(self, "clock", segments)
        counts: dict[int, int] = {}
        for split in itertools.chain(splits, *map(self.fallbacks, range(len(self.splits)))):
            counts[split.microbatch_size] = max(counts.get(split.microbatch_size, 0), split.num_microbatches)
        object.__setattr__(self, "max_microbatches", counts)

    def position(self, step: int) -> PlanPosition:
        """Return the progress of the run after `step` optimizer steps. This is a look-up, not a replay."""
        phase, consumed = self.ramp.phase_at(step), self.ramp.samples_before(step)
        return PlanPosition(step=step, consumed_samples=consumed, phase=phase, split=self.splits[phase.index])

    def segment_at(self, step: int) -> ClockSegment:
        """Return the segment of the learning-rate schedule's clock that an optimizer step is in."""
        return self.clock[self.segment_index(step)]

    def segment_index(self, step: int) -> int:
        """Return the index in `clock` of the segment that an optimizer step is in."""
        return bisect.bisect_right(self.clock, step, key=lambda segment: segment.start_step) - 1

    def rows(self, step: int) -> range:
        """Return the numbers of the samples that optimizer step `step` consumes, counted over all epochs."""
        start = self.ramp.samples_before(step)
        return range(start, start + self.ramp.global_batch_size_at(step))

    @property
    def consumed_samples(self) -> int:
        """Samples that the run consumes in total."""
        return self.ramp.samples_before(self.total_steps)

    @property
    def reference_size(self) -> int:
        """The batch size for which the hyperparameters were chosen: by default that of the last phase, before Seesaw."""
        return self.reference_batch_size or (self.seesaw.base if self.seesaw else self.ramp).sizes[-1]

    @property
    def num_compiled_shapes(self) -> int:
        """The number of different microbatch sizes over the ramp. Each is compiled once."""
        return len(self.max_microbatches)

    def fallbacks(self, phase: int) -> tuple[BatchSplit, ...]:
        """Return the splits of a phase's batch into the microbatch sizes of earlier phases, nearest phase first.

        A run uses one of them while the program for the phase's own shape is still compiling.
        """
        before = self.splits[max(phase - FALLBACK_PHASES, 0) : phase]
        sizes = dict.fromkeys(split.microbatch_size for split in reversed(before))
        sizes.pop(self.splits[phase].microbatch_size, None)
        batch = self.ramp.phases[phase].global_batch_size
        return tuple(split for size in sizes if (split := self.splitter.split_with(batch, size)) is not None)

    def with_whole_batches(self) -> RampPlan:
        """Return this plan with every batch as one microbatch, for a loss that has to see all its rows.

        Raises:
            ConfigError: the plan has accumulation steps or pipeline stages.

        Example:
            >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:16 64:32"), splitter=BatchSplitter(data_parallel_size=4),
            ...     num_devices=4, total_steps=8)
            >>> [(s.num_microbatches, s.microbatch_size) for s in plan.with_whole_batches().splits]
            [(1, 4), (1, 8)]
        """
        return replace(self, splitter=replace(self.splitter, whole_batch=True, microbatch_size=AUTO))

    @property
    def global_batch_to_load(self) -> int:
        """Samples per step after the ramp if all hosts loaded (MaxText `global_batch_size_to_load`); see `loading`."""
        size = self.ramp.sizes[-1]
        return int(size * self.expansion_factor_real_data) if self.expansion_factor_real_data > 0 else size

    @property
    def loading(self) -> str | None:
        """In words, which hosts load data by `expansion_factor_real_data`; None if every host loads its own."""
        factor, size = self.expansion_factor_real_data, self.ramp.sizes[-1]
        if factor <= 0:
            return None
        shown = plain_number(factor)
        rows = f"global_batch_to_load = global_batch_size * expansion_factor_real_data = {size:,} * {shown} = "
        rows += f"{self.global_batch_to_load:,} rows per step"
        if factor < 1:
            hosts = plain_number(1 / factor)
            turns = f"MaxText's loaders of {hosts} times as many hosts take turns"
            return f"{rows}: {turns}; rampup trains only with -1 or from 1 on"
        return f"{rows}, if all hosts loaded; 1 of {shown} does, for itself and the others" if factor > 1 else rows

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in optimizer steps."""
        return self.total_steps if self.learning_rate_schedule_steps is None else self.learning_rate_schedule_steps

    @property
    def pipeline_candidates(self) -> tuple[PipelineCandidate, ...]:
        """The legal pipeline splits of the last phase, fastest predicted first. Empty if there is no choice."""
        splitter = self.splitter
        if splitter.tick_overhead is None:
            splitter = replace(splitter, tick_overhead=self.assumed_tick_overhead)
        sizes = self.ramp.sizes[-1:] if splitter.rampup_microbatch == "per_phase" else self.ramp.sizes
        return splitter.candidates(sizes)

    @property
    def summary(self) -> tuple[str, str]:
        """Two lines of text: the run, and its ramp."""
        devices, shapes, sizes = self.num_devices, self.num_compiled_shapes, self.ramp.sizes
        replicas = f"data parallel {self.splitter.data_parallel_size:,}"
        run = f"{devices:,} device{'s' * (devices > 1)}, {replicas}, {self.total_steps:,} steps"
        run += "" if self.auto_schedule == "follow" else f", {self.consumed_samples:,} samples"
        ramp = f"the batch stays at {sizes[-1]:,} samples"
        if self.auto is not None:
            possible = [f"{size:,}" for size in self.auto["sizes"]]
            listed = " or ".join(filter(None, [", ".join(possible[:-1]), possible[-1]]))
            if self.auto_schedule == "follow":
                bounds = f"{self.auto['min_samples']:,} to {self.auto['max_samples']:,} samples"
                ramp = f"auto: {listed} samples, by the measured noise scale; {bounds}"
            else:
                ramp += f"; auto only advises: {listed} samples, by the measured noise scale"
        elif len(sizes) > 1:
            peak = f" (at most {max(sizes):,})" if max(sizes) > max(sizes[0], sizes[-1]) else ""
            last = f"the last from step {self.ramp.ramp_steps:,}, sample {self.ramp.ramp_samples:,}"
            ramp = f"the batch goes from {sizes[0]:,} to {sizes[-1]:,} samples{peak} in {len(sizes)} phases, {last}"
        return run, f"{ramp}; {shapes} compiled shape{'s' * (shapes > 1)}"

    @property
    def auto(self) -> dict[str, Any] | None:
        """What is known of `batch_size_schedule=auto` before the run, as in `rampup plan --json`; None without it.

        `sizes` are the global batch sizes that it may still use, or advise; the run consumes `min_samples` to `max_samples`.
        """
        if self.auto_schedule is None:
            return None
        now, began = self.ramp.sizes[-1], min(self.ramp.ramp_steps, self.total_steps)
        least = most = self.consumed_samples
        sizes = self.reserved_sizes
        if self.auto_schedule == "follow":  # The batch never shrinks.
            sizes = (now, *(size for size in sizes if size > now))
            most = self.ramp.samples_before(began) + (self.total_steps - began) * sizes[-1]
        return {"sizes": sizes, "min_samples": least, "max_samples": most}

    def timetable(self, phase: int = -1) -> Timetable:
        """Return the timetable of one pipeline pass of a phase, by default the last: 1F1B, or interleaved with repeats.

        If the stages do not divide the microbatches, its groups are balanced; those of the program are not (`pass_ticks`).

        Raises:
            PipelineShapeError: If there is no pipeline, or it has too many operations to list.
        """
        stages, repeats = self.splitter.num_stages, self.splitter.num_repeats
        if stages == 1:
            key = "ici_pipeline_parallelism"
            raise PipelineShapeError(f"a plan without pipeline stages has no timetable; set {key} above 1", key=key)
        shape = {"num_stages": stages, "num_microbatches": self.splits[phase].num_pipeline_microbatches, "num_repeats": repeats}
        return Timetable.build("interleaved" if repeats > 1 else "1f1b", **shape)

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences about legal settings that cost time, and about phases that the run does not reach."""
        notes = []
        final, size = self.splits[-1], self.ramp.sizes[-1]
        largest = self.splitter.largest_microbatch(size)
        if self.splitter.rampup_microbatch == "fixed" and largest >= 8 * final.microbatch_size:
            passes = size // (final.data_parallel_size * largest)
            fixed = f"with a fixed microbatch size of {final.microbatch_size}, every step after the ramp runs"
            other = f"rampup_microbatch=auto would run {passes} of {largest} there, at the cost of a second compilation"
            notes.append(f"{fixed} {final.num_microbatches} microbatches; {other}")
        candidates = self.pipeline_candidates
        used = next((candidate for candidate in candidates if candidate.microbatch_size == final.microbatch_size), None)
        if used is not None and candidates[0].predicted_time <= Fraction(19, 20) * used.predicted_time:
            best, gain = candidates[0], float(1 - candidates[0].predicted_time / used.predicted_time)
            faster = f"microbatch_size={best.microbatch_size} is predicted to be {gain:.0%} faster in the last phase"
            cost = f"if a pipeline tick has a fixed cost of {float(self.assumed_tick_overhead):g} samples"
            notes.append(f"{faster}, {cost}; set pipeline_tick_overhead to choose it")
        if self.splitter.whole_batch:
            sizes = {split.microbatch_size for split in self.splits}
            programs = f"{len(sizes)} batch size{'s' * (len(sizes) > 1)} compile as many programs, and the run waits for each"
            memory = f"a replica holds the activations of up to {max(sizes):,} samples, as nothing is accumulated"
            notes.append(f"with whole_batch, {programs}; {memory}")
        unreached = [phase.index for phase in self.ramp.phases if phase.start_step >= self.total_steps]
        if unreached:
            notes.append(f"steps={self.total_steps:,} ends before phase {unreached[0]} and those after it")
        after = self.total_steps - (self.learning_rate_schedule_steps or self.total_steps)
        if after > 0:
            ends = f"the learning rate's schedule ends after {self.learning_rate_schedule_steps:,} steps"
            notes.append(f"{ends}: the other {after:,} have the rate of its end, which is 0 after a whole decay")
        return tuple(notes)

    def _sizes_of(self, split: BatchSplit, gradient_accumulation_steps: int) -> dict[str, int | float]:
        """Return the sizes of one batch by their names in the JSON output."""
        per_device = Fraction(split.global_batch_size, self.num_devices * gradient_accumulation_steps)
        stages, repeats = self.splitter.num_stages, self.splitter.num_repeats
        return {
            "global_batch_size": split.global_batch_size,
            "per_device_batch_size": plain_number(per_device),
            **asdict(split),
            "num_stages": stages,
            "num_repeats": repeats,
            "bubble_fraction": float(pass_bubble(stages, split.num_pipeline_microbatches, repeats)),
        }

    @property
    def scales_learning_rate(self) -> bool:
        """Whether the batch size has an effect on the learning rate."""
        return self.learning_rate_batch_scaling != "none" or self.seesaw is not None

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

    def phase_table(self) -> list[dict[str, int | float | str | None]]:
        """Return one dictionary per phase for printing, with short titles and without columns that have no information."""
        left_out = set() if self.splitter.num_stages > 1 else {"num_pipeline_microbatches", "bubble_fraction"}
        left_out |= set() if self.scales_learning_rate else {"learning_rate_scale"}
        titles = {name: title for name, title in PHASE_TITLES.items() if name not in left_out}
        rows: list[dict[str, int | float | str | None]] = [
            {"phase": phase.index, **{title: row[name] for name, title in titles.items()}}
            for phase, row in zip(self.ramp.phases, self.phase_rows(), strict=True)
        ]
        rows[-1]["steps"] = self.rest
        return rows

    @property
    def rest(self) -> str:
        """The last phase's cell in the column of steps: "auto" if the measured noise scale may end that phase, else "rest"."""
        can_grow = any(size > self.ramp.sizes[-1] for size in self.reserved_sizes)
        return "auto" if self.auto_schedule == "follow" and can_grow else "rest"

    def __str__(self) -> str:
        def text(value: int | float | str | None) -> str:
            return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)

        rows, half = self.phase_table(), MAX_PRINTED_PHASES // 2
        cells = [list(rows[0]), *([*map(text, row.values())] for row in rows)]
        if len(rows) > 2 * half:
            cells[half + 1 : -half] = [["..."] * len(rows[0])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        loading = [] if self.loading is None else [f"loading: {self.loading}"]
        return "\n".join([*self.summary, *table, *loading, *(f"note: {note}" for note in self.advice)])

    def to_dict(self) -> Mapping[str, object]:
        """Return the plan as `rampup plan --json` prints it."""
        increment, candidates = self.ramp.samples_per_increment, self.pipeline_candidates
        return {
            "num_devices": self.num_devices,
            "num_increments": self.ramp.num_increments,
            "samples_per_increment": None if increment is None else plain_number(increment),
            "ramp_steps": self.ramp.ramp_steps,
            "ramp_samples": self.ramp.ramp_samples,
            "total_steps": self.total_steps,
            "num_compiled_shapes": self.num_compiled_shapes,
            "phases": self.phase_rows(),
            "eval": None if self.eval_split is None else self._sizes_of(self.eval_split, 1),
            "global_batch_to_load": self.global_batch_to_load,
            **({} if self.auto is None else {"auto": self.auto}),
            **({"pipeline_choices": [candidate.to_dict() for candidate in candidates]} if candidates else {}),
        }


def token_budget(
    ramp: BatchRamp, *, tokens: int, tokens_per_sample: int, tokens_per_second: Mapping[int, Fraction] | None = None
) -> dict[str, Any]:
    """Return what a number of tokens means for a ramp, as `rampup plan --budget --json` prints it.

    `fewer_steps_than_first` is the number of optimizer steps that the ramp saves compared with its first batch size, and
    `more_steps_than_final` the number of additional steps compared with its last one. A decreasing batch size makes them
    negative.

    Args:
        ramp: maps samples to the global batch size.
        tokens: the budget.
        tokens_per_sample: tokens in one sample.
        tokens_per_second: throughput by global batch size, for the time. A missing size uses the nearest one, by ratio.

    Example:
        >>> ramp, rates = BatchRamp.from_schedule("0:8 80:16"), {8: Fraction(100), 16: Fraction(200)}
        >>> budget = token_budget(ramp, tokens=2400, tokens_per_sample=10, tokens_per_second=rates)
        >>> [budget[name] for name in ("num_samples", "steps", "steps_at_first", "steps_at_final", "tokens_per_second")]
        [240, 20, 30, 15, 150.0]
    """
    for key, value in (("budget", tokens), ("max_target_length", tokens_per_sample)):
        if not 1 <= value <= MAX_COUNT:
            rule = f"{key}={value} must be between 1 and 10**18 tokens"
            raise RampDefinitionError(rule, key=key, nearest=(1 if value < 1 else MAX_COUNT,))
    first, final, samples = ramp.sizes[0], ramp.sizes[-1], -(-tokens // tokens_per_sample)
    steps, at_first, at_final = ramp.step_of_sample(samples - 1) + 1, -(-samples // first), -(-samples // final)
    by_size: dict[int, int] = {}
    for phase in ramp.phases:
        end = steps if phase.num_steps is None else min(phase.start_step + phase.num_steps, steps)
        if end > phase.start_step:
            by_size[phase.global_batch_size] = by_size.get(phase.global_batch_size, 0) + end - phase.start_step
    facts: dict[str, Any] = {
        "tokens": tokens,
        "tokens_per_sample": tokens_per_sample,
        "num_samples": samples,
        "steps": steps,
        "consumed_tokens": ramp.samples_before(steps) * tokens_per_sample,  # with the excess of the last batch
        "first_global_batch_size": first,
        "steps_at_first": at_first,
        "fewer_steps_than_first": at_first - steps,
        "final_global_batch_size": final,
        "steps_at_final": at_final,
        "more_steps_than_final": steps - at_final,
        "steps_by_global_batch_size": {str(size): number for size, number in by_size.items()},
    }
    if tokens_per_second:
        seconds = Fraction(0)
        for size, number in by_size.items():
            nearest = min(tokens_per_second, key=lambda known: Fraction(max(known, size), min(known, size)))
            seconds += Fraction(number * size * tokens_per_sample) / tokens_per_second[nearest]
        facts["hours"] = float(seconds / SECONDS_PER_HOUR)
        facts["tokens_per_second"] = float(facts["consumed_tokens"] / seconds)
    return facts
