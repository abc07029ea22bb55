"""MaxText's reinforcement learning (rl.yml): keys, numbers and rules, also those of
Tunix below it. How devices are divided is not followed.

All sizes, also micro batches, count prompts of the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rampup.config.load import BASE
from rampup.contrib.check.known import load_unread
from rampup.contrib.check.launch import load_entries, load_launch
from rampup.contrib.check.maxtext import BASES, UNREAD, known_keys, old_keys, read_chain
from rampup.contrib.check.rollout import group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.tunix import PromptJob
from rampup.contrib.check.verdict import format_count
from rampup.plan.numbers import AUTO, divisors

BATCH = "batch_size"
GENERATIONS = "rl.num_generations"
ITERATIONS = "rl.num_iterations"
TRAIN = "train_micro_batch_size"
ROLLOUT = "rollout_micro_batch_size"
FSDP = "ici_fsdp_parallelism"

KEYS = load_entries("maxtext_rl")
LAUNCH = load_launch(
    "maxtext_rl",
    bases=BASES,
    parent=BASE,
    unread={
        **{name: row for name, row in UNREAD.items() if name not in KEYS},
        **load_unread("maxtext_rl", "maxtext"),
    },
)


class MaxTextRlJob(PromptJob):
    """The numbers of an rl.yml. Some are computed in MaxText's floating point."""

    system = "maxtext_rl"
    version = "MaxText of August 2026 (e591f30) with its Tunix"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.batch = self.prompts = self[BATCH]
        self.samples_per_prompt: int = self[GENERATIONS]
        # Prompts per backward pass and per generate call.
        train: int = self.batch if self[TRAIN] == AUTO else self[TRAIN]
        self.rollout_micro = train if self[ROLLOUT] == AUTO else self[ROLLOUT]
        self._count_data()
        self.usable = min(train, self.rollout_micro) >= 1
        if self.usable:
            self.count(self.batch, train, self[ITERATIONS])

    def _count_data(self) -> None:
        """Count the prompts of an epoch, the steps of the run, prompts that never fill
        a batch, and those of an evaluation.
        """
        known, fraction = self["num_prompts"], self["train_fraction"]
        self.wanted_prompts = int(self["num_batches"] * self.batch * fraction)
        self.epoch_prompts: int = self.wanted_prompts
        if known is not None:
            self.epoch_prompts = min(self.wanted_prompts, known)
        given = self.epoch_prompts * self["num_epoch"]
        self.training_steps, self.lost_prompts = divmod(given, self.batch)
        # Optimizer steps that the learning-rate schedule is made for.
        scheduled = self["num_batches"] * self[ITERATIONS] * fraction
        self.scheduled_steps = int(scheduled * self["num_epoch"])
        size: int = self["eval_batch_size"]
        size = size if size > 0 else self.batch
        rows = self["num_test_batches"] * size - max(self["test_batch_start_index"], 0)
        self.eval_prompts = max(rows // size, 0) * size  # in full batches

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        return super().derived() | {
            "prompts_used": self.epoch_prompts,
            "dropped_prompts": self.lost_prompts,
            "weight_syncs": self.training_steps,
            "scheduled_optimizer_steps": self.scheduled_steps,
            "eval_prompts": self.eval_prompts,
        }


def _meanings(job: MaxTextRlJob) -> Iterator[tuple[str, str]]:
    yield from job.meanings((BATCH, GENERATIONS, TRAIN, ROLLOUT, ITERATIONS))
    steps = format_count(job.training_steps or 0, "training step")
    yield (
        "num_batches",
        f"{steps} over {format_count(job.epoch_prompts, 'prompt')} an epoch",
    )
    yield (
        "eval_batch_size",
        f"{format_count(job.eval_prompts, 'prompt')} per evaluation",
    )


def _notes(job: MaxTextRlJob) -> Iterator[str]:
    yield from old_keys(job)
    if job["num_prompts"] is None:
        yield (
            f"the data set is assumed to have at least {job.wanted_prompts:,} prompts;"
            " give num_prompts=N if it has fewer"
        )
    elif job.epoch_prompts < job.wanted_prompts:
        yield (
            f"the data set has {job.epoch_prompts:,} prompts, but the keys request"
            f" {job.wanted_prompts:,}"
        )
    steps = job.derived()["total_optimizer_steps"]
    if steps != job.scheduled_steps:
        yield (
            f"the learning-rate schedule is made for {job.scheduled_steps:,} optimizer"
            f" steps, but the run takes {steps:,}: it never reaches its end"
        )
    if job.lost_prompts:
        given = job.epoch_prompts * job["num_epoch"]
        yield (
            f"{job.lost_prompts:,} of {given:,} prompts fill no batch of {job.batch:,}"
            " and are dropped"
        )
    if job[FSDP] == AUTO:
        yield f"{FSDP}=-1: give its size to check whether sequences divide over it"
    else:
        yield from job.sharding_note(job[FSDP])
    yield group_note(job.samples_per_prompt)


def _rules(job: MaxTextRlJob) -> Iterator[Ruling]:
    """Yield what the check of the configuration asks."""
    yield from known_keys(job, BATCH)
    for key, unit in ((TRAIN, "backward pass"), (ROLLOUT, "generate call")):
        if job[key] == AUTO:
            continue
        note = f" (prompts per {unit}; both count prompts)"
        yield job.multiple(f"{key}_divides_batch", [key, BATCH], BATCH, key, note)
        if job[key] < 1:
            yield job.broken(
                f"{key}_positive",
                [key],
                f"{key}={job[key]} (prompts) must be a positive whole number, or -1 for"
                " automatic",
                candidates=(AUTO, *divisors(job.batch)),
            )
    if not job.training_steps:
        given = job.epoch_prompts * job["num_epoch"]
        yield job.broken(
            "dataset_fills_a_batch",
            (BATCH, "num_prompts", "num_batches", "train_fraction"),
            f"{given:,} prompts of all epochs must fill a batch of {BATCH}={job.batch:,}"
            " (prompts); the data set is empty after its last, short batch is dropped",
            division=(given, 1),
        )


DIALECT = Dialect(
    job=MaxTextRlJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
)
