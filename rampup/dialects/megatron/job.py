"""Megatron's arguments, and what follows from them: replicas, ramp, microbatches, pipeline."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rampup.dialects.megatron.keys import RAMP, SCHEDULE
from rampup.dialects.megatron.ramp import LinearRamp, Threshold, entries_of, parse_entry
from rampup.plan.ramp import MAX_PHASES, BatchRamp

MICRO, GLOBAL, DECREASE = "micro_batch_size", "global_batch_size", "decrease_batch_size_if_needed"
MODEL_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
VIRTUAL, PER_CHUNK, GROUP = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_vp_stage",
)


@dataclass(frozen=True, kw_only=True)
class MegatronFile:
    """Megatron's arguments.

    Attributes:
        values: every argument that matters, with Megatron's defaults.
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def model_parallel(self) -> int:
        """Devices of one replica: tensor * pipeline * context."""
        return math.prod(int(self[axis]) for axis in MODEL_AXES)

    @property
    def world(self) -> int | None:
        """Devices of the job, where the file says."""
        if self["world_size"] is not None:
            return int(self["world_size"])
        for hosts, per_host in (("nnodes", "nproc_per_node"), ("num_nodes", "devices")):
            if self[per_host] is not None and self[per_host] > 0:
                return int((self[hosts] or 1) * self[per_host])
        return None

    @property
    def replicas(self) -> int:
        """Replicas, d; at least 1, also where a rule about the world size is broken."""
        if self["data_parallel_size"] is not None:
            return int(self["data_parallel_size"])
        return max((self.world or 1) // self.model_parallel, 1)

    @property
    def num_devices(self) -> int:
        """Devices that the replicas use."""
        return self.replicas * self.model_parallel

    @property
    def micro(self) -> int:
        """Samples per replica and forward pass; 0 where it is not set."""
        return int(self[MICRO] or 0)

    @property
    def unit(self) -> int:
        """Samples of one forward pass of all replicas; every batch is a multiple."""
        return self.micro * self.replicas

    @property
    def final(self) -> int:
        """The batch after the ramp as it is asked for; unset, one micro batch per replica."""
        return self.unit if self[GLOBAL] is None else int(self[GLOBAL])

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self["pipeline_model_parallel_size"])

    @property
    def chunks(self) -> int:
        """Layer chunks per stage; more than 1 = the interleaved schedule."""
        if self[VIRTUAL] is not None:
            return max(int(self[VIRTUAL]), 1)
        if self[PER_CHUNK] is not None and self["num_layers"] is not None:
            return max(int(self["num_layers"]) // (self.stages * int(self[PER_CHUNK])), 1)
        return 1

    @property
    def group(self) -> int:
        """Microbatches that go through one chunk in a row."""
        return self.stages if self[GROUP] is None else int(self[GROUP])

    @cached_property
    def triple(self) -> tuple[int, ...] | None:
        """The numbers of the linear ramp; None without one, fewer or more than three where it is malformed."""
        if self[RAMP] is None or self[SCHEDULE] is not None:
            return None
        words = re.split(r"[\s,]+", re.sub(r"[\[\]()\"']", " ", self[RAMP]).strip())
        whole = all(re.fullmatch(r"[-+]?[0-9](?:_?[0-9]){0,17}", word) for word in words)
        return tuple(int(word) for word in words) if whole else ()

    @cached_property
    def linear(self) -> LinearRamp | None:
        """The linear ramp, where its numbers make one."""
        if self.triple is None or len(self.triple) != 3:
            return None
        start, increment, samples = self.triple
        if min(start, increment, samples) < 1 or self.final <= start or (self.final - start) % increment:
            return None
        unit = self.unit if self[DECREASE] else 1
        if unit < 1 or start < unit or (self.final - start) // increment >= MAX_PHASES:
            return None
        return LinearRamp(start=start, increment=increment, end=self.final, samples=samples, unit=unit)

    @cached_property
    def entries(self) -> list[Threshold | None]:
        """The entries of the schedule, sorted by threshold as Megatron sorts them; None for one that cannot be read."""
        if self[SCHEDULE] is None:
            return []
        parsed = [parse_entry(text, self["seq_length"]) for text in entries_of(self[SCHEDULE])[:MAX_PHASES]]
        read = sorted((entry for entry in parsed if entry is not None), key=lambda entry: entry.samples)
        return [*read, *(None for entry in parsed if entry is None)]

    @property
    def thresholds(self) -> list[Threshold]:
        """The entries that can be read."""
        return [entry for entry in self.entries if entry is not None]

    @property
    def schedule_good(self) -> bool:
        """Whether the schedule can be followed."""
        pairs = self.thresholds
        rising = all(before.samples < after.samples for before, after in itertools.pairwise(pairs))
        return bool(pairs) and None not in self.entries and pairs[0].samples == 0 and rising and all(p.size > 0 for p in pairs)

    @cached_property
    def ramp(self) -> BatchRamp | None:
        """The batches of the run, exactly; None where there is none to follow."""
        if self[SCHEDULE] is not None:
            pairs = [(entry.samples, entry.size) for entry in self.thresholds]
            return BatchRamp.piecewise(pairs) if self.schedule_good else None
        if self[RAMP] is not None:
            return None if self.linear is None else self.linear.exact()
        size = self.final // self.unit * self.unit if self[DECREASE] and self.unit > 0 else self.final
        return BatchRamp.constant(size) if size >= 1 else None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The different batches of the run, in order; empty where there is no ramp to follow."""
        return () if self.ramp is None else tuple(dict.fromkeys(self.ramp.sizes))

    @property
    def num_microbatches(self) -> list[int] | None:
        """Microbatches of a replica in each phase; None where a batch cannot be cut."""
        if self.ramp is None or not self.cut:
            return None
        return [size // self.unit for size in self.ramp.sizes]

    @property
    def cut(self) -> bool:
        """Whether every batch is a multiple of the unit."""
        return self.unit >= 1 and not any(size % self.unit for size in self.sizes)
