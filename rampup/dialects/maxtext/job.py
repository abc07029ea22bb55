"""A MaxText base.yml and what follows from its keys: devices, batches, ramp, pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rampup.dialects.maxtext.keys import AXIS_GROUPS
from rampup.dialects.maxtext.sizes import BatchSizes, Manager, batch_sizes
from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO

START, INCREMENT, END = "per_device_batch_size_start", "per_device_batch_size_increment", "per_device_batch_size"
EVAL, SAMPLES, ACCUMULATION = "eval_per_device_batch_size", "global_rampup_samples", "gradient_accumulation_steps"
MICROBATCHES, REPEATS, LAYERS = "num_pipeline_microbatches", "num_pipeline_repeats", "pipeline_parallel_layers"


@dataclass(frozen=True, kw_only=True)
class MaxTextFile:
    """A base.yml, and what follows from it.

    Attributes:
        values: every key that matters, with MaxText's defaults.
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @cached_property
    def combined_axes(self) -> dict[str, dict[str, int]]:
        """MaxText's mesh axes, multiplied into ours; -1 where one of a group is -1."""
        return {group: {ours: self._combined(group, names) for ours, names in AXIS_GROUPS.items()} for group in ("ici", "dcn")}

    @cached_property
    def num_devices(self) -> int:
        """Devices of the run: as given, or those of a mesh without a free axis."""
        if self["num_devices"] is not None:
            return int(self["num_devices"])
        sizes = self.combined_axes
        if AUTO in sizes["ici"].values() or min(sizes["ici"].values()) < 1:
            raise ConfigError(
                "the file leaves a mesh axis open (-1), so its batches depend on the machine; add num_devices=N, for instance "
                "num_devices=8",
                key="num_devices",
            )
        slices = math.prod(size for size in sizes["dcn"].values() if size != AUTO)
        if self["num_slices"] > 0 and AUTO in sizes["dcn"].values():
            slices = self["num_slices"]
        return max(math.prod(sizes["ici"].values()) * slices, 1)

    @cached_property
    def mesh(self) -> MeshAxes | RampupError:
        """Devices along each of our axes, or why there is no such mesh."""
        sizes = self.combined_axes
        try:
            axes = MeshAxes.resolve(self.num_devices, num_slices=self["num_slices"], **sizes)
        except RampupError as error:
            return error
        return axes

    @property
    def axes(self) -> MeshAxes:
        """The mesh; of one device where the file's is impossible, which a rule reports."""
        return self.mesh if isinstance(self.mesh, MeshAxes) else MeshAxes()

    @property
    def loading_shards(self) -> int:
        """How many ways MaxText cuts a loaded batch: over the data, stage, fsdp and expert axes."""
        axes = self.axes
        return axes.data_parallel_size * axes.pipeline * axes.expert

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 = no pipeline, and then every pipeline key is ignored."""
        return self.axes.pipeline

    @property
    def microbatches(self) -> int:
        """Microbatches of one pipeline pass, with MaxText's automatic value."""
        least = self.stages * (2 if self["pipeline_delay_activation_forwarding"] else 1)
        return least if self[MICROBATCHES] == AUTO else int(self[MICROBATCHES])

    @property
    def layers(self) -> int:
        """Layers in the pipeline."""
        if self[LAYERS] != AUTO:
            return int(self[LAYERS])
        dense = self["first_num_dense_layers"] if self["decoder_block"] == "deepseek" else 0
        return int(self["base_num_decoder_layers"] - dense)

    @property
    def repeats(self) -> int:
        """Layer chunks per stage, with MaxText's automatic value."""
        if self[REPEATS] != AUTO:
            return int(self[REPEATS])
        return self.layers // max(self.stages * int(self["num_layers_per_pipeline_stage"]), 1)

    @cached_property
    def sizes(self) -> BatchSizes:
        """The batch after the ramp."""
        return batch_sizes(self[END], self["expansion_factor_real_data"], self.num_devices, self[ACCUMULATION])

    @cached_property
    def eval_sizes(self) -> BatchSizes:
        """The batch of evaluation."""
        return batch_sizes(self[EVAL] or self[END], self["expansion_factor_real_data"], self.num_devices, 1)

    @property
    def ramps(self) -> bool:
        """Whether the batch grows."""
        return bool(self["enable_rampup_batch_size"])

    @property
    def grows(self) -> bool:
        """Whether the ramp's end is above its start."""
        return bool(self[END] > self[START])

    @property
    def increment_divides(self) -> bool:
        """MaxText's own test, in floating point: 1 - 0.1 is no multiple of 0.1 there."""
        increment = float(self[INCREMENT])
        return increment == 0 or (float(self[END]) - float(self[START])) % increment == 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return int(self["learning_rate_schedule_steps"] if self["steps"] == AUTO else self["steps"])

    @cached_property
    def manager(self) -> Manager | None:
        """MaxText's ramp; None without one, or where MaxText refuses to build it."""
        start, increment, end = self[START], self[INCREMENT], self[END]
        if not self.ramps or not self.grows or not self.increment_divides or min(start, increment) <= 0:
            return None
        return Manager.build(start=start, increment=increment, end=end, samples=self[SAMPLES], num_devices=self.num_devices)

    def global_size(self, key: str) -> int:
        """Return devices * size per device, cut to whole samples as MaxText does."""
        return int(self.num_devices * float(self[key]))

    def ramp_sizes_divide(self, divisor: int) -> bool:
        """Say whether every batch of the ramp is a multiple; true without a ramp that ends."""
        manager = self.manager
        if manager is None or not manager.ends or divisor < 1:
            return True
        return (
            manager.start % divisor == 0
            and (not manager.grows_twice or manager.increment % divisor == 0)
            and manager.end % divisor == 0
        )

    def _combined(self, group: str, names: Iterable[str]) -> int:
        sizes = [self.values[f"{group}_{name}_parallelism"] for name in names]
        return AUTO if AUTO in sizes else math.prod(sizes)
