"""The numbers that follow from a MaxText base.yml, with MaxText's own roundings: float products truncated to whole numbers.

Exact arithmetic belongs to `rampup.plan`; this file computes MaxText's numbers, which sometimes differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from rampup.dialects import maxtext as keys
from rampup.dialects.convert import PretrainingJob
from rampup.dialects.maxtext import ACCUMULATION, DELAY, END, EVAL, EXPANSION, INCREMENT, REPEATS, SAMPLES, STAGE_LAYERS, START
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Run, counted, times
from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO, plain_number, to_yaml_number
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import MAX_PHASES
from rampup.plan.timetable import bubble_fraction


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
        per_device: samples per device and accumulation step; below 1, a full sample per device is loaded.
        expansion: `expansion_factor_real_data`; ignored unless positive.
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
    """MaxText's ramp as it runs: without the accumulation factor, each phase counted from zero.

    Attributes:
        start, increment, end: global batch sizes, truncated to whole samples.
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
        """True if the ramp has a size between its first and its last."""
        return self.start + self.increment < self.end

    @property
    def ends(self) -> bool:
        """True if the ramp reaches its end in a number of phases that can be listed."""
        if self.start < 1 or self.increment < 1:
            return self.start >= max(self.end, 1)
        return (self.end - self.start) // self.increment < MAX_PHASES

    def phases(self) -> list[tuple[int, int, int]]:
        """Return (first step, global batch size, samples before it) of every phase of a ramp that `ends`."""
        rows, step, consumed, size = [], 0, 0, self.start
        share = Fraction(self.samples, self.num_increments)
        while size < self.end:
            rows.append((step, size, consumed))
            num_steps = max(math.ceil(share / size), 1)
            step, consumed = step + num_steps, consumed + num_steps * size
            size = min(size + self.increment, self.end)
        return [*rows, (step, self.end, consumed)]

    def divides_by(self, divisor: int) -> bool:
        """Return whether every batch is a multiple of `divisor`; true for a ramp that never ends."""
        if not self.ends or divisor < 1:
            return True
        sizes = [self.start, self.end, *([self.increment] if self.grows_twice else [])]
        return all(size % divisor == 0 for size in sizes)


class MaxTextJob(PretrainingJob):
    """The numbers of a base.yml.

    Raises:
        ConfigError: the file leaves the number of devices open.
    """

    version = "MaxText of August 2026 (e591f30)"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # MaxText's mesh axes, multiplied into rampup's; -1 if one of a group is -1.
        self.combined_axes = {
            group: {name: self._combine(group, axes) for name, axes in keys.AXIS_GROUPS.items()} for group in ("ici", "dcn")
        }
        self.num_devices = self._count_devices()
        compiled = self["num_slices"] == AUTO and self[keys.TOPOLOGY] is not None
        self.num_slices: int = max(self[keys.TOPOLOGY_SLICES], 1) if compiled else self["num_slices"]
        # An impossible mesh is reported by a rule; one device stands in for it.
        self.axes, self.mesh_problem = MeshAxes(), ""
        try:
            self.axes = MeshAxes.resolve(self.num_devices, num_slices=self.num_slices, **self.combined_axes)
        except RampupError as error:
            self.mesh_problem = str(error)
        # A loaded batch is sharded over the data, stage, fsdp and expert axes.
        self.loading_shards = self.axes.data_parallel_size * self.axes.pipeline * self.axes.expert

        # The pipeline. With one stage every pipeline key is ignored.
        self.stages = self.axes.pipeline
        self.is_piped = self.stages > 1
        self.least_microbatches = self.stages * (2 if self[DELAY] else 1)
        self.microbatches: int = self.least_microbatches if self[keys.MICROBATCHES] == AUTO else self[keys.MICROBATCHES]
        dense = self["first_num_dense_layers"] if self["decoder_block"] == "deepseek" else 0
        self.layers: int = self["base_num_decoder_layers"] - dense if self[keys.LAYERS] == AUTO else self[keys.LAYERS]
        self.repeats: int = self[REPEATS]
        if self.repeats == AUTO:
            self.repeats = self.layers // max(self.stages * self[STAGE_LAYERS], 1)

        # The batch after the ramp, that of evaluation, and the ramp.
        self.sizes = batch_sizes(self[END], self[EXPANSION], self.num_devices, self[ACCUMULATION])
        self.eval_sizes = batch_sizes(self[EVAL] or self[END], self[EXPANSION], self.num_devices, 1)
        self.total_steps: int = self["learning_rate_schedule_steps"] if self["steps"] == AUTO else self["steps"]
        self.ramps: bool = self[keys.RAMP]
        self.grows: bool = self[END] > self[START]
        # MaxText tests the increment in floating point: 1 - 0.1 is not a multiple of 0.1 there.
        increment = float(self[INCREMENT])
        self.increment_divides = increment == 0 or (float(self[END]) - float(self[START])) % increment == 0
        self.manager: Manager | None = None  # none without a ramp, or if MaxText refuses to build it
        if self.ramps and self.grows and self.increment_divides and min(self[START], self[INCREMENT]) > 0:
            self.manager = Manager.build(
                start=self[START], increment=self[INCREMENT], end=self[END], samples=self[SAMPLES], num_devices=self.num_devices
            )

    def _combine(self, group: str, axes: Sequence[str]) -> int:
        sizes = [self[f"{group}_{axis}_parallelism"] for axis in axes]
        return AUTO if AUTO in sizes else math.prod(sizes)

    def _count_devices(self) -> int:
        """Return the given devices, those of the hardware to compile for, or those of a mesh without a free axis."""
        if self["num_devices"] is not None:
            return int(self["num_devices"])
        if self[keys.TOPOLOGY] is not None:
            devices = keys.topology_devices(self[keys.TOPOLOGY])
            if devices is None:
                raise ConfigError(
                    f"{keys.TOPOLOGY}={self[keys.TOPOLOGY]!r:.60} is not known here; add num_devices=N", key="num_devices"
                )
            return devices * int(max(self[keys.TOPOLOGY_SLICES], 1))
        ici, dcn = (self.combined_axes[group].values() for group in ("ici", "dcn"))
        if AUTO in ici or min(ici) < 1:
            raise ConfigError(
                "the file leaves a mesh axis open (-1), so its batches depend on the machine; add num_devices=N, for example "
                "num_devices=8",
                key="num_devices",
            )
        slices = math.prod(size for size in dcn if size != AUTO)
        if self["num_slices"] > 0 and AUTO in dcn:
            slices = self["num_slices"]
        return max(math.prod(ici) * slices, 1)

    def global_size(self, key: str) -> int:
        """Return devices * size per device, truncated to whole samples as MaxText does."""
        return int(self.num_devices * float(self[key]))

    @property
    def layer_product(self) -> int:
        """Layers of one round through the pipeline, or of all repeats if their number is given."""
        return int(self.stages * (1 if self[REPEATS] == AUTO else self[REPEATS]) * self[STAGE_LAYERS])

    @property
    def dropped_per_step(self) -> int:
        """Rows loaded and not trained on, per step after the ramp. Partial loading by few hosts reads each row once."""
        if self[EXPANSION] > 0 and self[END] >= 1:
            return 0
        return max(self.sizes.to_load - self.sizes.to_train, 0)

    @cached_property
    def lost_at_ramp_end(self) -> int:
        """Rows that were read in the ramp and never trained on: the loader's buffer is dropped with the ramp.

        Source: MaxText `common/data_loader.py`, RampUpDataLoader. It believes that a pull fills its buffer with the rows of the
        final batch.
        """
        manager = self.manager
        if manager is None or not manager.ends or manager.end < 1 or self[EXPANSION] > 0:
            return 0
        trained = manager.phases()[-1][2]
        return -(-trained // manager.end) * self.sizes.to_load - trained

    @cached_property
    def config_ramp_end(self) -> int:
        """`rampup_end_step`, the step at which MaxText's configuration expects the ramp to end; metrics wait for it.

        Source: MaxText `configs/types.py`. It counts loaded rows: at least a full sample per device, with accumulation.
        """
        first, step, last = (
            batch_sizes(self[key], self[EXPANSION], self.num_devices, self[ACCUMULATION]).to_load
            for key in (START, INCREMENT, END)
        )
        count = (last - first) // step if step > 0 else 0
        if not 0 < count < MAX_PHASES or first < 1:
            return 0
        share = Fraction(self[SAMPLES], count)
        return sum(max(math.ceil(share / (first + k * step)), 0) for k in range(count))

    @property
    def outcome(self) -> Run:
        """Rows may be dropped in each step, and at the end of the ramp."""
        return "drops" if self.dropped_per_step or self.lost_at_ramp_end else "runs"

    def summary(self) -> str:
        """Return the numbers of an optimizer step in one line."""
        sizes, replicas = self.sizes, self.axes.data_parallel_size
        share = to_yaml_number(Fraction(sizes.micro, replicas))
        shape = times(counted(replicas, "replica"), counted(self[ACCUMULATION], "pass"), share)
        text = f"{counted(sizes.to_train, 'sample')} per optimizer step; {shape}"
        if sizes.to_load != sizes.to_train:
            text += f"; {counted(sizes.to_load, 'row')} loaded"
        if self.manager is not None and self.manager.ends:
            phases = self.manager.phases()
            text += f"; ramp from {phases[0][1]:,} in {counted(len(phases), 'phase')} and {counted(phases[-1][0], 'step')}"
        return text

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        sizes, evaluation = self.sizes, self.eval_sizes
        derived: dict[str, Any] = {
            "num_devices": self.num_devices,
            "global_batch_size_to_load": sizes.to_load,
            "global_batch_size_to_train_on": sizes.to_train,
            "micro_batch_size_to_train_on": sizes.micro,
            "global_batch_size_to_load_eval": evaluation.to_load,
            "global_batch_size_to_eval_on": evaluation.to_train,
            "data_parallel_size": self.axes.data_parallel_size,
            "accumulation_steps": self[ACCUMULATION],
            "num_stages": self.stages,
            "dropped_samples_per_step": self.dropped_per_step,
        }
        if self.is_piped and self.microbatches > 0:
            # Forwarding one tick later is a pipeline with twice the distance between its stages.
            distance = (2 if self[DELAY] else 1) * (self.stages - 1) + 1
            bubble = bubble_fraction(distance, max(self.microbatches, self.stages), max(self.repeats, 1))
            derived |= {
                "num_repeats": self.repeats,
                "num_pipeline_microbatches": self.microbatches,
                "pipeline_microbatch_samples": sizes.micro // self.microbatches,
                "bubble_fraction": float(bubble),
            }
        manager = self.manager
        if manager is None:
            return derived
        derived |= {
            "num_increments": manager.num_increments,
            "samples_per_increment": plain_number(Fraction(manager.samples, manager.num_increments)),
            "rampup_end_step": self.config_ramp_end,
        }
        if manager.ends:
            phases = manager.phases()
            derived |= {
                "manager_phases": [list(phase) for phase in phases],
                "manager_ramp_steps": phases[-1][0],
                "manager_ramp_samples": phases[-1][2],
                "lost_samples_at_ramp_end": self.lost_at_ramp_end,
            }
        return derived

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the phases of the ramp, which count accumulation in every batch."""
        return self.planned.phase_rows() if isinstance(self.planned, RampPlan) and self.ramps else None

    def expressed(self) -> set[str]:
        """Return the keys that rampup's keys express."""
        axes = [name for names in keys.AXIS_GROUPS.values() for name in names]
        return {
            *self.rampup_values(), *(f"{group}_{axis}_parallelism" for group in ("ici", "dcn") for axis in axes),
            "learning_rate_schedule_steps", keys.LAYERS, keys.TOPOLOGY, keys.TOPOLOGY_SLICES,
        }  # fmt: skip

    def reasons(self) -> dict[str, str]:
        """Return the keys that have no effect."""
        unused = [] if self.ramps else sorted(self.settings.given & {START, INCREMENT, SAMPLES})
        return dict.fromkeys(unused, "the ramp is off")

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys."""
        values: dict[str, Any] = {
            "num_devices": self.num_devices,
            "num_slices": self.num_slices,
            **{
                f"{group}_{axis}_parallelism": size for group, axes in self.combined_axes.items() for axis, size in axes.items()
            },
            END: self[END],
            EVAL: self[EVAL],
            ACCUMULATION: self[ACCUMULATION],
            EXPANSION: self[EXPANSION] if self[EXPANSION] > 0 else Fraction(AUTO),
            "rampup_microbatch": "per_phase",
            keys.RAMP: self.ramps,
            "steps": self.total_steps,
            "eval_interval": self["eval_interval"] if self["eval_interval"] > 0 else AUTO,
            "max_target_length": self["max_target_length"],
            "learning_rate_clock": "steps",
        }
        if self[keys.SHARD_OPTIMIZER]:
            values[keys.SHARD_OPTIMIZER] = True
        if self["eval_steps"] > 0:
            values["eval_steps"] = self["eval_steps"]
        if self["steps"] != AUTO and self["learning_rate_schedule_steps"] > 0:
            values["learning_rate_schedule_steps"] = self["learning_rate_schedule_steps"]
        if self.ramps:
            # With no samples requested, every phase of MaxText's ramp lasts one step; so does a ramp of one sample.
            values |= {START: self[START], INCREMENT: self[INCREMENT], SAMPLES: max(self[SAMPLES], 1)}
        if self.is_piped:
            values |= {
                keys.MICROBATCHES: self.microbatches,
                STAGE_LAYERS: self[STAGE_LAYERS],
                REPEATS: self.repeats,
                "base_num_decoder_layers": self.layers,
                DELAY: self[DELAY],
            }
        return values
