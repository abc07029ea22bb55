"""SkyRL's supervised fine-tuning: a kind of file of its own, whose sizes count samples (train/sft_trainer.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from rampup.dialects.commands import Launch, Source, read_source
from rampup.dialects.hydra import read_hydra
from rampup.dialects.reading import Entry, Settings, entry
from rampup.dialects.rules import Dialect, Job, Rule, Side, at_least, if_usable, multiple, positive
from rampup.dialects.verdict import Term, Words, counted, times

BATCH, MICRO = "batch_size", "micro_train_batch_size_per_gpu"
DEVICES = "placement.num_gpus_per_node"
SPLITS = tuple(f"megatron_config.{name}_parallel_size" for name in ("tensor_model", "pipeline_model"))
# The check of this trainer ignores these.
IGNORED = ("megatron_config.context_parallel_size", "sequence_parallel_size")
KEYS: dict[str, Entry] = {
    BATCH: entry(4, "samples of an optimizer step", unit="samples"),
    MICRO: entry(2, "samples of a pass", unit="samples"),
    "strategy": entry("fsdp", "backend of training", kind="text", choices=("fsdp", "fsdp2", "megatron")),
    "placement.num_nodes": entry(1, "nodes", unit="nodes"),
    DEVICES: entry(1, "devices per node", unit="devices"),
    **{key: entry(1, "devices that share a sample") for key in SPLITS},
    **{key: entry(1, "devices that share a sequence") for key in IGNORED},
    "use_sequence_packing": entry(False, "fill passes by tokens", kind="bool"),
}
COUNTS = (BATCH, MICRO, "placement.num_nodes", DEVICES, *SPLITS)


LAUNCH = Launch(
    system="SkyRL",
    program=re.compile(r"\bmain_sft\w*"),
    example="python -m skyrl.train.main_sft key=value",
    known=KEYS.__contains__,
)


def is_fine_tuning(source: Source) -> bool:
    """Return whether a source is for the fine-tuning trainer, whose sizes are at the top level."""
    reading = read_source(source, (), LAUNCH, strict=False)
    names = reading.leaves
    return (reading.recognized or MICRO in names) and not any(
        name.partition(".")[0] in ("trainer", "generator") for name in names
    )


class SftJob(Job):
    """A fine-tuning file's numbers."""

    version = "SkyRL of August 2026 (a956457)"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.batch: int = self[BATCH]
        self.packed: bool = self["use_sequence_packing"]  # passes are filled by tokens
        self.model_size: int = self[SPLITS[0]] * self[SPLITS[1]] if self["strategy"] == "megatron" else 1
        self.devices: int = self["placement.num_nodes"] * self[DEVICES]
        self.replicas = self.devices // max(self.model_size, 1)
        self.counts_positive = all(self[key] >= 1 for key in COUNTS)
        self.usable = self.counts_positive and self.replicas >= 1
        if self.usable:
            self.share = self.batch // self.replicas
            self.passes = "as many passes as the tokens need" if self.packed else counted(self.share // self[MICRO], "pass")

    def summary(self) -> str:
        """Return the numbers of a step in one line."""
        passes = self.passes if self.packed else times(self.passes, min(self[MICRO], self.share))
        return f"{counted(self.batch, 'sample')} per optimizer step; {times(counted(self.replicas, 'replica'), passes)}"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {"data_parallel_size": self.replicas, "mini_batch_samples": self.batch}
        if not self.packed:
            derived["accumulation_steps"] = self.share // self[MICRO]
        return derived


_REPLICAS: Side[SftJob] = ("the {:,} data-parallel replicas", lambda job: job.replicas)


def _share(job: SftJob) -> Term:
    return Term(f"{BATCH} / replicas = {job.batch:,} / {job.replicas:,} = {job.share:,} samples", job.share)


_RULES: list[Rule[SftJob]] = [
    multiple("skyrl.sft_batch_divides_over_replicas", (BATCH, DEVICES), BATCH, _REPLICAS, when=lambda job: not job.packed),
    multiple("skyrl.sft_micro_divides_share", (MICRO, BATCH), _share, MICRO,
        when=lambda job: not job.packed and job.batch % job.replicas == 0),
    at_least("skyrl.sft_packed_batch_reaches_every_replica", (BATCH,), BATCH, _REPLICAS, when=lambda job: job.packed),
]  # fmt: skip
RULES: list[Rule[SftJob]] = [
    *positive("skyrl", COUNTS, "its check compares it with 0 or divides by it"),
    at_least("skyrl.sft_has_a_replica", (DEVICES, *SPLITS), ("the {:,} devices", lambda job: job.devices),
        ("tensor * pipeline parallel size = {:,}", lambda job: job.model_size),
        when=lambda job: job.counts_positive),
    *if_usable(_RULES),
]  # fmt: skip


def meanings(job: SftJob) -> Iterator[tuple[str, str]]:
    """Yield each setting of the file with its meaning."""
    yield BATCH, f"{counted(job.batch, 'sample')} per optimizer step, whole job"
    yield MICRO, f"samples per replica: {job.passes} per optimizer step"


def flow(job: SftJob) -> Iterator[str]:
    """Yield the stages of an optimizer step."""
    yield f"load {counted(job.batch, 'sample')}, {job.share:,} for each of {counted(job.replicas, 'replica')}"
    yield f"{job.passes} on every replica, then one optimizer step"


def notes(job: SftJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    for key in IGNORED:
        if job[key] > 1:
            yield f"its check counts replicas without {key}={job[key]:,}: the run has fewer."


DIALECT = Dialect(
    system="SkyRL's supervised fine-tuning",
    keys=KEYS,
    job=SftJob,
    rules=RULES,
    words=Words(meanings, flow, notes),
    reader=partial(
        read_hydra, launch=LAUNCH, entries=KEYS, groups=("placement", "megatron_config", "model", "optimizer_config")
    ),
    launch=LAUNCH,
)
