"""SkyRL's supervised fine-tuning: a kind of file of its own, whose sizes count samples.

Sources: SkyRL `train/config/sft_config.py` (defaults, validate_sft_cfg), `train/sft_trainer.py` (_validate_batch_parallelism).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rampup.dialects.commands import Launch, Source, read_source
from rampup.dialects.reading import Entry, Settings, entry
from rampup.dialects.rules import Dialect, Job, Rule, Side, apply_if, at_least, equal, found_by_run, multiple, positive
from rampup.dialects.verdict import Term, Words, counted, rounded_down, times

BATCH, MICRO, DEVICES = "batch_size", "micro_train_batch_size_per_gpu", "placement.num_gpus_per_node"
SPLITS = tuple(f"megatron_config.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
SEQUENCE, STRATEGY, PACKING, UNPADDED = (
    "sequence_parallel_size", "strategy", "use_sequence_packing", "remove_microbatch_padding"
)  # fmt: skip
LENGTH, BIN, STEPS, EPOCHS = "max_length", "max_tokens_per_microbatch", "num_steps", "num_epochs"
KEYS: dict[str, Entry] = {
    BATCH: entry(4, "samples of an optimizer step", unit="samples"),
    MICRO: entry(2, "samples of a pass", unit="samples"),
    STRATEGY: entry("megatron", "backend of training", kind="text", choices=("fsdp", "fsdp2", "megatron")),
    "placement.num_nodes": entry(1, "nodes", unit="nodes"),
    DEVICES: entry(4, "devices per node", unit="devices"),
    **{key: entry(None, "devices that share a sample; 1, but tensor and pipeline 2 if none is given") for key in SPLITS},
    SEQUENCE: entry(1, "devices that share a sequence with FSDP"),
    PACKING: entry(False, "fill passes by tokens", kind="bool"),
    UNPADDED: entry(True, "sequences of a pass one after the other", kind="bool"),
    LENGTH: entry(None, "longest sequence", unit="tokens"),
    BIN: entry(None, "tokens of a packed pass; null = as max_length", unit="tokens"),
    STEPS: entry(None, "optimizer steps", unit="steps"),
    EPOCHS: entry(1, "times that the data set is read", nullable=True),
}
COUNTS = (BATCH, MICRO, "placement.num_nodes", DEVICES, *SPLITS, STEPS, EPOCHS)


LAUNCH = Launch(
    system="SkyRL",
    program=re.compile(r"\bmain_sft\w*"),
    example="python -m skyrl.train.main_sft key=value",
    entries=KEYS,
    canonical=lambda name: UNPADDED if name == "use_sample_packing" else name,  # the old name
    groups=("placement", "megatron_config", "model", "optimizer_config"),
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
        self.packed: bool = self[PACKING]  # passes are filled by tokens
        self.megatron: bool = self[STRATEGY] == "megatron"
        # Its configuration class has tensor and pipeline size 2; a file that sets any of Megatron's keys replaces it.
        given = any(name.startswith("megatron_config.") for name in settings.given | settings.others)
        defaults = (1, 1, 1) if given else (2, 2, 1)
        self.splits = [n if self[key] is None else self[key] for key, n in zip(SPLITS, defaults, strict=True)]
        self.model_size: int = math.prod(self.splits) if self.megatron else max(self[SEQUENCE], 1)
        self.devices: int = self["placement.num_nodes"] * self[DEVICES]
        self.counts_positive = all(self[key] is None or self[key] >= 1 for key in COUNTS)
        self.replicas = self.devices // max(self.model_size, 1)
        # The check of a batch without packing ignores that devices share a sequence.
        shared = math.prod(self.splits[:2]) if self.megatron else 1
        self.checked_replicas = self.replicas if self.packed else self.devices // max(shared, 1)
        whole = not self.megatron or self.replicas * self.model_size == self.devices
        self.checkable = self.counts_positive and self.checked_replicas >= 1 and whole
        self.usable = self.checkable and self.replicas >= 1
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


_REPLICAS: Side[SftJob] = ("the {:,} data-parallel replicas", lambda job: job.checked_replicas)
_DEVICES: Side[SftJob] = ("the {:,} devices", lambda job: job.devices)


def _share(job: SftJob) -> Term:
    share = job.batch // job.checked_replicas
    return Term(f"{BATCH} / replicas = {job.batch:,} / {job.checked_replicas:,} = {share:,} samples", share)


def _shown(job: SftJob, key: str) -> str:
    return f"{key}={'null' if job[key] is None else job[key]}"


_RULES: list[Rule[SftJob]] = [
    multiple("skyrl.sft_batch_divides_over_replicas", (BATCH, DEVICES), BATCH, _REPLICAS, when=lambda job: not job.packed),
    multiple("skyrl.sft_micro_divides_share", (MICRO, BATCH), _share, MICRO,
        when=lambda job: not job.packed and job.batch % job.checked_replicas == 0),
    at_least("skyrl.sft_packed_batch_reaches_every_replica", (BATCH,), BATCH, _REPLICAS, when=lambda job: job.packed),
]  # fmt: skip
RULES: list[Rule[SftJob]] = [
    *positive("skyrl", COUNTS, "its check compares it with 0 or divides by it"),
    multiple("skyrl.sft_megatron_divides_devices", (DEVICES, *SPLITS), _DEVICES,
        ("tensor * pipeline * context parallel size = {:,}", lambda job: job.model_size),
        when=lambda job: job.counts_positive and job.megatron),
    *found_by_run([at_least("skyrl.sft_has_a_replica", (DEVICES, SEQUENCE), _DEVICES, SEQUENCE,
        when=lambda job: job.counts_positive and not job.megatron)]),
    equal("skyrl.sft_megatron_sequence_parallel", (SEQUENCE,), SEQUENCE, 1, when=lambda job: job.megatron,
        note=f" with {STRATEGY}=megatron"),
    Rule(name="skyrl.sft_context_needs_packing", keys=(UNPADDED, SPLITS[2]),
        when=lambda job: job.megatron and job.splits[2] > 1 and not job.packed, holds=lambda job: job[UNPADDED],
        message=lambda job: f"{SPLITS[2]}={job.splits[2]:,} needs {UNPADDED}=true", candidates=lambda job: [True]),
    Rule(name="skyrl.sft_packing_needs_megatron", keys=(STRATEGY, PACKING), when=lambda job: job.packed,
        holds=lambda job: job.megatron, message=lambda job: f"{PACKING}=true needs {STRATEGY}=megatron",
        candidates=lambda job: ["megatron"]),
    Rule(name="skyrl.sft_packing_needs_length", keys=(LENGTH, BIN), when=lambda job: job.packed,
        holds=lambda job: job[LENGTH] is not None, message=lambda job: f"{PACKING}=true needs {LENGTH}, the tokens of a pass",
        candidates=lambda job: [job[BIN]] if job[BIN] else None),
    at_least("skyrl.sft_bin_holds_a_sequence", (BIN, LENGTH), BIN, LENGTH,
        when=lambda job: job.packed and None not in (job[LENGTH], job[BIN])),
    Rule(name="skyrl.sft_steps_or_epochs", keys=(STEPS, EPOCHS), holds=lambda job: not {STEPS, EPOCHS} <= job.settings.given,
        message=lambda job: f"{_shown(job, STEPS)} and {_shown(job, EPOCHS)} must not both be given, not even as null",
        candidates=lambda job: None),
    Rule(name="skyrl.sft_has_an_end", keys=(EPOCHS, STEPS), holds=lambda job: (job[STEPS], job[EPOCHS]) != (None, None),
        message=lambda job: f"{EPOCHS}=null needs {STEPS}", candidates=lambda job: [1]),
    *apply_if(lambda job: job.checkable, _RULES),
]  # fmt: skip


def _meanings(job: SftJob) -> Iterator[tuple[str, str]]:
    yield BATCH, f"{counted(job.batch, 'sample')} per optimizer step, whole job"
    yield MICRO, f"samples per replica: {job.passes} per optimizer step"


def _flow(job: SftJob) -> Iterator[str]:
    yield f"load {counted(job.batch, 'sample')}, {job.share:,} for each of {counted(job.replicas, 'replica')}"
    yield f"{job.passes} on every replica, then one optimizer step"


def _notes(job: SftJob) -> Iterator[str]:
    if job.devices % job.model_size:
        devices = counted(job.devices, "device")
        yield f"{rounded_down(devices, job.model_size, 'SkyRL', job.replicas)}, without a warning."
    if job.replicas != job.checked_replicas:
        yield (
            f"devices share a sequence, so the run has {counted(job.replicas, 'replica')}; its check counts "
            f"{job.checked_replicas:,}."
        )


DIALECT = Dialect(job=SftJob, rules=RULES, words=Words(_meanings, _flow, _notes), launch=LAUNCH)
