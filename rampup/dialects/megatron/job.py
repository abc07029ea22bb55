"""The numbers that follow from Megatron's arguments: its two ramps, replicas, microbatches and pipeline.

The ramps are computed exactly and with Megatron's own roundings.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from rampup.dialects import megatron as keys
from rampup.dialects.convert import PretrainingJob
from rampup.dialects.megatron import DECREASE, EVAL_GLOBAL, GLOBAL, GROUP, MICRO, MODEL_AXES, PER_CHUNK, RAMP, SCHEDULE, VIRTUAL
from rampup.dialects.megatron.layers import LayerSplit
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Conversion, counted, times
from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT, SUFFIXES
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import MAX_PHASES, BatchRamp, check_num_phases
from rampup.plan.split import BatchSplitter
from rampup.plan.timetable import bubble_fraction

Row = tuple[int, int, int]
# Megatron's arguments that a conversion expresses.
_EXPRESSED = {
    *(MICRO, GLOBAL, DECREASE, RAMP, SCHEDULE, VIRTUAL, PER_CHUNK, EVAL_GLOBAL, *MODEL_AXES),
    *(keys.LAYERS, keys.VERSION, "seq_length", "train_iters", "max_steps", "train_samples"),
    *("world_size", "data_parallel_size", "nnodes", "nproc_per_node", "num_nodes", "devices"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRamp:
    """`--rampup-batch-size START INCREMENT SAMPLES` up to `--global-batch-size`.

    Attributes:
        start, increment, end: global batch sizes.
        samples: length of the ramp.
        unit: divisor that every batch is rounded down to, with `--decrease-batch-size-if-needed`; otherwise 1.

    Source: megatron-core `num_microbatches_calculator.py`, RampupBatchsizeNumMicroBatchesCalculator.
    """

    start: int
    increment: int
    end: int
    samples: int
    unit: int = 1

    @property
    def num_increments(self) -> int:
        """Requested changes of size."""
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
        """Return (samples, batch) at every change; sizes that rounding makes equal are merged."""
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
        rows = list(self._float_rows())
        return rows[:1] + [row for before, row in itertools.pairwise(rows) if row[1] != before[1]]

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
        samples: the threshold, exact, truncated to whole samples.
        as_run: the same as Megatron's floating-point product gives it.
        size: global batch size from the threshold on.
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
    left, right = _parse_number(threshold), _parse_number(size)
    if not colon or left is None or right is None:
        return None
    per_sample = seq_length or 1
    return Threshold(text=text, samples=left[0] // per_sample, as_run=left[1] // per_sample, size=right[1])


def _parse_number(text: str) -> tuple[int, int] | None:
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


class MegatronJob(PretrainingJob):
    """The numbers of Megatron's arguments.

    Raises:
        ConfigError: the number of devices is unknown or contradictory.
    """

    @property
    def version(self) -> str:  # type: ignore[override]
        """The version of Megatron."""
        if self[keys.VERSION] == "head":
            return "Megatron-LM of August 2026 (d98e8a6); without megatron_version=head, with linear ramps, as until April 2026"
        return "Megatron-LM of August 2026 (d98e8a6), with the linear ramps of those until April 2026"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.model_parallel = math.prod(self[axis] for axis in MODEL_AXES)  # devices of a replica
        self.world = self._world()
        replicas = self["data_parallel_size"]
        # At least one replica, also if a rule about the world size is broken.
        self.replicas: int = max((self.world or 1) // self.model_parallel, 1) if replicas is None else replicas
        self.num_devices = self.replicas * self.model_parallel
        self._check_world()

        self.micro: int = self[MICRO] or 0
        self.unit = self.micro * self.replicas  # samples of one forward pass of all replicas
        self.final: int = self.unit if self[GLOBAL] is None else self[GLOBAL]  # the requested batch after the ramp
        self.eval_unit = max(self[keys.EVAL_MICRO] or self.micro, 1) * self.replicas

        # Layer chunks per stage (more than 1 = the interleaved schedule), and microbatches that pass one chunk in a row.
        self.stages: int = self[keys.STAGES]
        self.layers = LayerSplit(settings=settings, stages=self.stages)
        self.chunks = 1
        if self.layers.layout is not None:
            self.chunks = max(len(self.layers.layout) // self.stages, 1)
        elif self[VIRTUAL] is not None:
            self.chunks = max(self[VIRTUAL], 1)
        elif self[PER_CHUNK] is not None and self.layers.num_layers is not None:
            self.chunks = max((self.layers.num_layers + self.layers.extras) // (self.stages * self[PER_CHUNK]), 1)
        self.group: int = self.stages if self[GROUP] is None else self[GROUP]
        self.interleaved = self.chunks > 1 and self.stages > 1

        # The ramp: a schedule in steps wins over a linear one, which has no effect since April 2026.
        self.has_schedule = self[SCHEDULE] is not None
        self.has_linear = self[RAMP] is not None and not self.has_schedule and self[keys.VERSION] == "legacy"
        self.has_ramp = self.has_schedule or self.has_linear
        self.triple = _parse_triple(self[RAMP]) if self.has_linear else None
        # Start, increment and samples of a linear ramp; 0 without one.
        triple = self.triple or ()
        self.start, self.increment, self.ramp_samples = triple if len(triple) == 3 else (0, 0, 0)
        self.linear = self._linear()
        parsed = [parse_entry(text, self["seq_length"]) for text in self.written_entries[:MAX_PHASES]]
        self.unreadable = [text for text, entry in zip(self.written_entries, parsed, strict=False) if entry is None]
        # Sorted by threshold, as Megatron sorts them.
        self.thresholds = sorted((entry for entry in parsed if entry is not None), key=lambda entry: entry.samples)
        self.schedule_valid = (
            bool(self.thresholds)
            and not self.unreadable
            and self.thresholds[0].samples == 0
            and not self.not_rising
            and all(entry.size > 0 for entry in self.thresholds)
        )
        self.ramp = self._exact_ramp()  # None if there is none to follow
        self.sizes = () if self.ramp is None else tuple(dict.fromkeys(self.ramp.sizes))
        self.splits = self.unit >= 1 and not any(size % self.unit for size in self.sizes)
        self.num_microbatches = [size // self.unit for size in self.ramp.sizes] if self.ramp and self.splits else None

    def _world(self) -> int | None:
        if self["world_size"] is not None:
            return int(self["world_size"])
        for hosts, per_host in (("nnodes", "nproc_per_node"), ("num_nodes", "devices")):
            if self[per_host] is not None and self[per_host] > 0:
                return int((self[hosts] or 1) * self[per_host])
        return None

    def _check_world(self) -> None:
        given = self["data_parallel_size"] is not None
        if self.world is None and not given:
            raise ConfigError(
                "the number of devices is not in the file; add world_size=N (or data_parallel_size=N)", key="world_size"
            )
        if given and self.world is not None and self.world != self.num_devices:
            raise ConfigError(
                f"data_parallel_size * tensor * pipeline * context parallel sizes = {self.replicas} * {self.model_parallel} = "
                f"{self.num_devices} is not the world size {self.world}",
                key="data_parallel_size",
                nearest=(self.world // self.model_parallel,),
            )

    def _linear(self) -> LinearRamp | None:
        """Return the linear ramp if its numbers make one."""
        start, increment, samples = self.start, self.increment, self.ramp_samples
        if min(start, increment, samples) < 1 or self.final <= start or (self.final - start) % increment:
            return None
        unit = self.unit if self[DECREASE] else 1
        if unit < 1 or start < unit or (self.final - start) // increment >= MAX_PHASES:
            return None
        return LinearRamp(start=start, increment=increment, end=self.final, samples=samples, unit=unit)

    def _exact_ramp(self) -> BatchRamp | None:
        if self.has_schedule:
            pairs = [(entry.samples, entry.size) for entry in self.thresholds]
            return BatchRamp.piecewise(pairs) if self.schedule_valid else None
        if self.has_ramp:
            return None if self.linear is None else self.linear.exact()
        size = self.final // self.unit * self.unit if self[DECREASE] and self.unit > 0 else self.final
        return BatchRamp.constant(size) if size >= 1 else None

    @property
    def written_entries(self) -> list[str]:
        """The entries of the schedule as written; spaces and commas separate them."""
        return self[SCHEDULE].replace(",", " ").split() if self.has_schedule else []

    @property
    def not_rising(self) -> list[tuple[Threshold, Threshold]]:
        """Neighbouring thresholds that do not increase."""
        return [(a, b) for a, b in itertools.pairwise(self.thresholds) if b.samples <= a.samples]

    def summary(self) -> str:
        """Return the numbers of an optimizer step in one line."""
        if self.ramp is None or not self.splits:
            return ""
        final = self.ramp.sizes[-1]
        microbatches = counted(final // self.unit, "microbatch")
        shape = times(counted(self.replicas, "replica"), microbatches, self.micro)
        text = f"{counted(final, 'sample')} per optimizer step; {shape}"
        if self.has_ramp:
            text += (
                f"; ramp from {self.ramp.sizes[0]:,} in {counted(len(self.ramp.phases), 'phase')} and "
                f"{counted(self.ramp.ramp_steps, 'step')}"
            )
        return text

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "num_devices": self.num_devices,
            "data_parallel_size": self.replicas,
            "micro_batch_size": self.micro,
            "num_stages": self.stages,
            "num_repeats": self.chunks,
            "thresholds_samples": None,
            "num_microbatches": self.num_microbatches,
        }
        if self.has_schedule:
            derived["thresholds_samples"] = [[entry.samples, entry.size] for entry in self.thresholds]
        if self.ramp is not None:
            derived |= {
                "global_batch_size": self.ramp.sizes[-1],
                "ramp_phases": [[p.start_step, p.global_batch_size, p.start_sample] for p in self.ramp.phases],
                "num_increments": self.ramp.num_increments,
                "ramp_steps": self.ramp.ramp_steps,
                "ramp_samples": self.ramp.ramp_samples,
            }
        if self.num_microbatches is not None:
            derived["accumulation_steps"] = self.num_microbatches[-1]
            derived["bubble_fraction"] = float(bubble_fraction(self.stages, self.num_microbatches[-1], self.chunks))
        return derived

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return every phase as `rampup plan --json` does, or None if a batch cannot be split.

        Rampup's own pipeline takes multiples of its stages; Megatron's takes any number of microbatches, so each size is
        split separately.
        """
        if self.ramp is None or not self.splits or not self.has_ramp:
            return None
        by_size: dict[int, Mapping[str, Any]] = {}
        for size in self.sizes:
            splitter = BatchSplitter(
                data_parallel_size=self.replicas,
                num_stages=self.stages,
                num_repeats=self.chunks if self.stages > 1 else 1,
                num_pipeline_microbatches=size // self.unit if self.stages > 1 else -1,
                microbatch_size=self.micro,
                strict_multiple=False,
            )
            plan = RampPlan(ramp=BatchRamp.constant(size), splitter=splitter, num_devices=self.num_devices, total_steps=1)
            by_size[size] = plan.phase_rows()[0]
        return [
            {
                **by_size[phase.global_batch_size],
                "start_step": phase.start_step,
                "start_sample": phase.start_sample,
                "num_steps": phase.num_steps,
            }
            for phase in self.ramp.phases
        ]

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys."""
        if self.ramp is None or not self.splits:
            raise ConfigError("not every batch of the file can be split")
        counts = sorted({size // self.unit for size in self.sizes})
        uneven = [count for count in counts if count % self.stages]
        if self.stages > 1 and len(counts) > 1 and uneven:
            raise ConfigError(
                "rampup's pipeline takes a growing number of microbatches in multiples of its "
                f"{self.stages} stages, but the file has phases of {uneven[0]}"
            )
        values: dict[str, Any] = {
            "num_devices": self.num_devices,
            "ici_tensor_parallelism": self[keys.TENSOR],
            "ici_context_parallelism": self[keys.CONTEXT],
            "ici_pipeline_parallelism": self.stages,
            "microbatch_size": self.micro,
            "steps": self._total_steps(self.ramp),
            "learning_rate_clock": "samples",
            "eval_interval": -1,
        }
        rounded = self.linear is not None and self.linear.unit > 1
        if self.has_schedule or rounded:
            pairs = [(entry.samples, entry.size) for entry in self.thresholds]
            if self.linear is not None:
                pairs = self.linear.thresholds()
            values["batch_size_schedule"] = " ".join(f"{threshold}:{size}" for threshold, size in pairs)
        else:
            values["per_device_batch_size"] = Fraction(self.ramp.sizes[-1], self.num_devices)
        if self.linear is not None and not rounded:
            values |= {
                "enable_rampup_batch_size": True,
                "per_device_batch_size_start": Fraction(self.linear.start, self.num_devices),
                "per_device_batch_size_increment": Fraction(self.linear.increment, self.num_devices),
                "global_rampup_samples": self.linear.samples,
                "rampup_carry_overshoot": True,
            }
        if self["seq_length"] is not None:
            values["max_target_length"] = self["seq_length"]
        if self[EVAL_GLOBAL] is not None:
            values["eval_per_device_batch_size"] = Fraction(self[EVAL_GLOBAL], self.num_devices)
        if self.stages > 1:
            chunks = self.stages * self.chunks
            layers = chunks if self.layers.num_layers is None else self.layers.num_layers
            values |= {
                "num_pipeline_microbatches": counts[0] if len(counts) == 1 else -1,
                "pipeline_strict_multiple": False,
                "num_pipeline_repeats": self.chunks,
                "base_num_decoder_layers": layers,
                "num_layers_per_pipeline_stage": max(layers // chunks, 1),
            }
        return values

    def expressed(self) -> set[str]:
        """Return the arguments that rampup's keys express."""
        return _EXPRESSED

    def reasons(self) -> dict[str, str]:
        """Return the arguments that have no counterpart or no effect."""
        reasons = {GROUP: "no counterpart: rampup sends all microbatches round together"}
        if not self.has_linear and not self.has_schedule:
            reasons[RAMP] = "ignored by Megatron-LM since April 2026"
        return {key: reason for key, reason in reasons.items() if key in self.settings.given}

    def conversion(self) -> Conversion:
        """Return the same run in rampup's keys, or why they cannot express it."""
        uneven = len(set(self.layers.layer_counts or ())) > 1 or (self.stages > 1 and self.layers.by_deepspeed)
        if uneven and self.plan() is not None:
            return Conversion(refusal="rampup's pipeline has the same number of layers in every stage")
        return super().conversion()

    def _total_steps(self, ramp: BatchRamp) -> int:
        """Return the optimizer steps of the run; if the file does not say, those of the ramp and one more."""
        if self["train_samples"]:
            return max(ramp.step_of_sample(int(self["train_samples"])), 1)
        steps = self["train_iters"] or self["max_steps"] or 0
        return int(steps) if steps > 0 else ramp.ramp_steps + 1


def _parse_triple(text: str) -> tuple[int, ...]:
    """Return the numbers of a linear ramp: fewer or more than three if it is malformed."""
    words = re.split(r"[\s,]+", re.sub(r"[\[\]()\"']", " ", text).strip())
    whole = all(re.fullmatch(r"[-+]?[0-9](?:_?[0-9]){0,17}", word) for word in words)
    return tuple(int(word) for word in words) if whole else ()
