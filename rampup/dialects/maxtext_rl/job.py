"""The keys of MaxText's rl.yml, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rampup.dialects.maxtext.keys import AXIS_GROUPS
from rampup.dialects.reading import Entry, entry

TRAIN, ROLLOUT, OLD = "train_micro_batch_size", "rollout_micro_batch_size", "micro_batch_size"
ROLLOUT_AXES = ("rollout_tensor_parallelism", "rollout_data_parallelism", "rollout_expert_parallelism")
SLICES = ("num_trainer_slices", "num_samplers_slices")
_AXES = tuple(f"ici_{axis}_parallelism" for axes in AXIS_GROUPS.values() for axis in axes)
FSDP, TENSOR = "ici_fsdp_parallelism", "ici_tensor_parallelism"
AUTO = -1

ENTRIES: dict[str, Entry] = {
    "batch_size": entry(1, "prompts per training step and optimizer step", unit="prompts", scope="job"),
    TRAIN: entry(AUTO, "prompts per backward pass; -1 = batch_size", unit="prompts", scope="job"),
    ROLLOUT: entry(AUTO, "prompts per generate call; -1 = the train micro batch", unit="prompts", scope="job"),
    OLD: entry(None, "older name of both", unit="prompts", scope="job"),
    "rl.num_generations": entry(2, "responses per prompt", unit="samples"),
    "rl.num_iterations": entry(1, "optimizer steps per batch"),
    "rl.use_agentic_rollout": entry(False, "the agentic learner", kind="bool"),
    "num_batches": entry(4, "batches of an epoch"),
    "num_epoch": entry(1, "passes over the prompts"),
    "train_fraction": entry(1.0, "share of the batches that is used", kind="float"),
    "num_test_batches": entry(5, "evaluation batches"),
    "eval_batch_size": entry(AUTO, "prompts per evaluation batch; -1 = batch_size", unit="prompts"),
    "test_batch_start_index": entry(0, "first evaluation prompt", unit="prompts"),
    "eval_interval": entry(10, "optimizer steps between evaluations", unit="steps"),
    "trainer_devices_fraction": entry(0.5, "share of the devices that train", kind="float"),
    "sampler_devices_fraction": entry(0.5, "share of the devices that generate", kind="float"),
    "chips_per_vm": entry(4, "devices of a host", minimum=1, unit="devices"),
    "use_pathways": entry(True, "whether one controller sees all hosts", kind="bool"),
    SLICES[0]: entry(AUTO, "slices that train", unit="slices"),
    SLICES[1]: entry(AUTO, "slices that generate", unit="slices"),
    "rollout_data_parallelism": entry(AUTO, "replicas of the generator; -1 = the rest"),
    "rollout_tensor_parallelism": entry(1, "devices that share the generator's matrices; -1 = the rest"),
    "rollout_expert_parallelism": entry(1, "devices that share its experts; -1 = the rest"),
    "max_prefill_predict_length": entry(256, "longest prompt", minimum=1, unit="tokens"),
    "max_target_length": entry(1024, "longest prompt and response", minimum=1, unit="tokens"),
    **{axis: entry(AUTO if axis == FSDP else 1, "devices along this axis", minimum=1, also=(AUTO,)) for axis in _AXES},
    "num_devices": entry(None, "devices of the run; given as num_devices=N", minimum=1, unit="devices"),
    "num_prompts": entry(None, "prompts of the data set after its filter; given as num_prompts=N", minimum=0, unit="prompts"),
}  # fmt: skip
_DATASET = (
    *("batch_size", "num_batches", "num_test_batches", "eval_batch_size", "test_batch_start_index", "train_fraction"),
    *(TRAIN, ROLLOUT, OLD),
)
_CLUSTER = (*ROLLOUT_AXES, *SLICES, "trainer_devices_fraction", "sampler_devices_fraction", "chips_per_vm", "use_pathways")
ALIASES = {
    **{f"dataset.{name}": name for name in _DATASET},
    **{f"cluster.{name}": name for name in _CLUSTER},
    **{name.removeprefix("rl."): name for name in ENTRIES if name.startswith("rl.")},
    "dataset_prompts": "num_prompts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RlFile:
    """An rl.yml, and what follows from it.

    Attributes:
        values: every key that matters, with MaxText's defaults.
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def batch(self) -> int:
        """Prompts per training step, and per optimizer step."""
        return int(self["batch_size"])

    @property
    def generations(self) -> int:
        """Responses per prompt."""
        return int(self["rl.num_generations"])

    @property
    def train_micro(self) -> int:
        """Prompts per backward pass."""
        return self.batch if self[TRAIN] == AUTO else int(self[TRAIN])

    @property
    def rollout_micro(self) -> int:
        """Prompts per generate call."""
        if self["rl.use_agentic_rollout"]:
            return 1
        return self.train_micro if self[ROLLOUT] == AUTO else int(self[ROLLOUT])

    @property
    def asked_prompts(self) -> int:
        """Prompts that the keys ask for, in MaxText's floating point."""
        return int(self["num_batches"] * self["batch_size"] * self["train_fraction"])

    @property
    def prompts(self) -> int:
        """Prompts of one epoch, as far as the data set has them."""
        known = self["num_prompts"]
        return self.asked_prompts if known is None else min(self.asked_prompts, int(known))

    @property
    def full_batches(self) -> int:
        """Training steps of the run: the last, short batch is dropped."""
        return self.prompts * int(self["num_epoch"]) // max(self.batch, 1)

    @property
    def dropped_prompts(self) -> int:
        """Prompts that never fill a batch."""
        return self.prompts * int(self["num_epoch"]) - self.full_batches * self.batch

    @property
    def scheduled_steps(self) -> int:
        """Optimizer steps that the learning-rate schedule is told of, in MaxText's floating point."""
        return int(self["num_batches"] * self["rl.num_iterations"] * self["train_fraction"] * self["num_epoch"])

    @property
    def eval_prompts(self) -> int:
        """Prompts of an evaluation, in whole batches."""
        size = self.batch if self["eval_batch_size"] <= 0 else int(self["eval_batch_size"])
        rows = self["num_test_batches"] * size - max(self["test_batch_start_index"], 0)
        return max(int(rows) // size, 0) * size

    @property
    def split(self) -> bool:
        """Whether a single slice is divided between training and generation."""
        hosts = (self["num_devices"] or 0) // int(self["chips_per_vm"])
        return hosts >= 2 and bool(self["use_pathways"]) and not self.multislice

    @property
    def multislice(self) -> bool:
        """Whether training and generation have slices of their own."""
        return bool(min(self[key] for key in SLICES) > 0)

    @property
    def trainer_devices(self) -> int:
        """Devices that train, where `num_devices` is given."""
        return self._share("trainer_devices_fraction", SLICES[0])

    @property
    def sampler_devices(self) -> int:
        """Devices that generate, where `num_devices` is given."""
        return self._share("sampler_devices_fraction", SLICES[1])

    @property
    def fsdp(self) -> int | None:
        """Devices along the fsdp axis of training; None where the file and `num_devices` leave it open."""
        if not self.multislice and self[FSDP] != AUTO:
            return int(self[FSDP])
        if self["num_devices"] is None:
            return None
        if self.multislice:
            return max(self.trainer_devices // int(self[SLICES[0]] * max(self[TENSOR], 1)), 1)
        others = math.prod(int(self[axis]) for axis in _AXES if axis != FSDP and self[axis] != AUTO)
        return max(self.trainer_devices // others, 1)

    def _share(self, fraction: str, slices: str) -> int:
        devices = int(self["num_devices"])
        if self.multislice:
            return devices * int(self[slices]) // sum(int(self[key]) for key in SLICES)
        return int(devices * self[fraction]) if self.split else devices
