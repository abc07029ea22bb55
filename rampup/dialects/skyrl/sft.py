"""SkyRL's supervised fine-tuning: a file of its own, whose sizes count samples (train/sft_trainer.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.dialects.nearest import Rule
from rampup.dialects.reading import Entry, Settings, entry, read_settings
from rampup.dialects.rules import counted, divisors, multiples, positive, violations, where_usable
from rampup.dialects.verdict import Meaning, Verdict

BATCH, MICRO = "batch_size", "micro_train_batch_size_per_gpu"
SPLITS = tuple(f"megatron_config.{name}_parallel_size" for name in ("tensor_model", "pipeline_model"))
ENTRIES: dict[str, Entry] = {
    BATCH: entry(4, "samples of an optimizer step", unit="samples", scope="job"),
    MICRO: entry(2, "samples of a pass", unit="samples", scope="replica"),
    "strategy": entry("fsdp", "backend of training", kind="text", choices=("fsdp", "fsdp2", "megatron")),
    "placement.num_nodes": entry(1, "nodes", unit="nodes"),
    "placement.num_gpus_per_node": entry(1, "devices per node", unit="devices"),
    **{key: entry(1, "devices that share a sample") for key in SPLITS},
    "megatron_config.context_parallel_size": entry(1, "devices that share a sequence; its check ignores it"),
    "sequence_parallel_size": entry(1, "devices that share a sequence; its check ignores it"),
    "use_sequence_packing": entry(False, "fill passes by tokens", kind="bool"),
}
COUNTS = (BATCH, MICRO, "placement.num_nodes", "placement.num_gpus_per_node", *SPLITS)


@dataclass(frozen=True, slots=True)
class SftJob:
    """A fine-tuning file's numbers.

    Attributes:
        settings: the file.
        usable: whether the counts are positive and there is a replica (derived).
    """

    settings: Settings
    usable: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        positive_counts = all(self.settings[key] >= 1 for key in COUNTS)
        object.__setattr__(self, "usable", positive_counts and self.replicas >= 1)

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    @property
    def replicas(self) -> int:
        """Data-parallel size as the check has it: neither context nor sequence parallelism counts."""
        devices = self["placement.num_nodes"] * self["placement.num_gpus_per_node"]
        split = self[SPLITS[0]] * self[SPLITS[1]] if self["strategy"] == "megatron" else 1
        return int(devices // max(split, 1))

    @property
    def packed(self) -> bool:
        """Whether passes are filled by tokens."""
        return bool(self["use_sequence_packing"])


_RULES: list[Rule[SftJob]] = [
    Rule(
        name="skyrl.sft_batch_divides_over_replicas",
        keys=(BATCH, "placement.num_gpus_per_node"),
        holds=lambda job: job.packed or job[BATCH] % job.replicas == 0,
        message=lambda job: f"{BATCH}={job[BATCH]:,} must be a multiple of the {job.replicas:,} data-parallel replicas",
        candidates=lambda job: multiples(job[BATCH], job.replicas, job.replicas * job[MICRO]),
    ),
    Rule(
        name="skyrl.sft_micro_divides_share",
        keys=(MICRO, BATCH),
        holds=lambda job: job.packed or job[BATCH] % job.replicas != 0 or job[BATCH] // job.replicas % job[MICRO] == 0,
        message=lambda job: (
            f"{BATCH} / replicas = {job[BATCH]:,} / {job.replicas:,} = {job[BATCH] // job.replicas:,} samples must be a "
            f"multiple of {MICRO}={job[MICRO]:,}"
        ),
        candidates=lambda job: divisors(job[BATCH] // job.replicas, near=job[MICRO]),
    ),
    Rule(
        name="skyrl.sft_packed_batch_reaches_every_replica",
        keys=(BATCH,),
        holds=lambda job: not job.packed or job[BATCH] >= job.replicas,
        message=lambda job: f"{BATCH}={job[BATCH]:,} must be at least the {job.replicas:,} data-parallel replicas",
        candidates=lambda job: [job.replicas],
    ),
]
RULES: list[Rule[SftJob]] = [
    *[positive("skyrl", key, found_by="validator", why="its check compares it with 0 or divides by it") for key in COUNTS],
    Rule(
        name="skyrl.sft_has_a_replica",
        keys=("placement.num_gpus_per_node", *SPLITS),
        holds=lambda job: job.replicas >= 1 or any(job[key] < 1 for key in COUNTS),
        message=lambda job: (
            f"the devices // (tensor * pipeline parallel size) = {job.replicas:,} replicas; at least 1 is needed"
        ),
        candidates=lambda job: multiples(job["placement.num_gpus_per_node"], job[SPLITS[0]] * job[SPLITS[1]]),
    ),
    *where_usable(_RULES),
]


def check(path: str | Path, overrides: Sequence[str]) -> Verdict:
    """Say what a fine-tuning configuration of SkyRL does, as `skyrl.check` does for reinforcement learning."""
    settings = read_settings(path, overrides, ENTRIES, system="SkyRL's supervised fine-tuning")
    job = SftJob(settings)
    found = violations(RULES, settings, SftJob)
    if not job.usable:
        return Verdict(system="skyrl", violations=found)
    share = job[BATCH] // job.replicas
    derived: dict[str, Any] = {"data_parallel_size": job.replicas, "mini_batch_samples": job[BATCH]}
    if not job.packed:
        derived["accumulation_steps"] = share // job[MICRO]
    passes = "as many passes as the tokens need" if job.packed else counted(share // job[MICRO], "pass")
    return Verdict(
        system="skyrl",
        violations=found,
        notes=_notes(job),
        derived=derived,
        meanings=(
            Meaning(says=settings.said(BATCH), means=f"{counted(job[BATCH], 'sample')} per optimizer step, whole job"),
            Meaning(says=settings.said(MICRO), means=f"samples per replica: {passes} per optimizer step"),
        ),
        flow=(
            f"load {counted(job[BATCH], 'sample')}, {share:,} for each of {counted(job.replicas, 'replica')}",
            f"{passes} on every replica, then one optimizer step",
        ),
    )


def _notes(job: SftJob) -> tuple[str, ...]:
    ignored = [
        key
        for key in ("megatron_config.context_parallel_size", "sequence_parallel_size")
        if job[key] is not None and job[key] > 1
    ]
    return tuple(f"its check counts replicas without {key}={job[key]:,}: the run has fewer." for key in ignored)
