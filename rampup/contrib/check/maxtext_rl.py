"""MaxText's reinforcement learning (rl.yml): keys, numbers and rules, also those of
Tunix below it.

All sizes, also micro batches, count prompts of the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rampup.contrib.check.known import load_unread
from rampup.contrib.check.maxtext import (
    AXIS_GROUPS,
    BASES,
    UNREAD,
    known_keys,
    old_keys,
    read_chain,
)
from rampup.contrib.check.reading import Launch, Settings, load_entries
from rampup.contrib.check.rollout import group_note
from rampup.contrib.check.rules import Dialect, Rule, at_least, multiple
from rampup.contrib.check.tunix import PromptJob
from rampup.contrib.check.verdict import counted
from rampup.plan.numbers import divisors

BATCH = "batch_size"
GENERATIONS = "rl.num_generations"
ITERATIONS = "rl.num_iterations"
LOSS = "rl.loss_agg_mode"
LOSSES = {
    "token-mean": "every token of the batch counts alike, so long responses weigh more",
    "sequence-mean-token-mean": "every response counts alike, whatever its length",
    "sequence-mean": "not known to Tunix",
}
OLD = "micro_batch_size"
TRAIN, ROLLOUT = (f"{work}_{OLD}" for work in ("train", "rollout"))
ROLLOUT_AXES = tuple(
    f"rollout_{axis}_parallelism" for axis in ("tensor", "data", "expert")
)
SLICES = ("num_trainer_slices", "num_samplers_slices")
FRACTIONS = ("trainer_devices_fraction", "sampler_devices_fraction")
AXES = tuple(
    f"ici_{axis}_parallelism" for axes in AXIS_GROUPS.values() for axis in axes
)
FSDP, TENSOR = "ici_fsdp_parallelism", "ici_tensor_parallelism"
AUTO = -1

KEYS = load_entries("maxtext_rl")
ALIASES = {
    **{
        f"{section}.{name}": name for section in ("dataset", "cluster") for name in KEYS
    },
    **{name.removeprefix("rl."): name for name in KEYS if name.startswith("rl.")},
    "num_target_devices": "num_devices",
    "internal_compile_num_devices": "num_devices",
    "dataset_prompts": "num_prompts",
    "num_epochs": "num_epoch",  # until November 2025
}
LAUNCH = Launch(
    system="MaxText RL",
    program=re.compile(
        r"(?i)\btrain_rl\b|\bgrpo_trainer\b|rl\.num_generations=|maxtext[\w./]*\.rl\.\w+"
    ),
    example="python3 -m maxtext.trainers.post_train.rl.train_rl rl.yml key=value",
    entries=KEYS,
    canonical=lambda name: ALIASES.get(name, name),
    bases=BASES,
    version="August 2026",
    keys="maxtext",
    unread={
        **{name: row for name, row in UNREAD.items() if name not in KEYS},
        **load_unread("maxtext_rl", "maxtext"),
    },
)


class MaxTextRlJob(PromptJob):
    """The numbers of an rl.yml. Some are computed in MaxText's floating point."""

    version = "MaxText of August 2026 (e591f30) with its Tunix"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.batch = self.prompts = self[BATCH]
        self.samples_per_prompt: int = self[GENERATIONS]
        self.iterations: int = self[ITERATIONS]  # optimizer steps per batch
        # Prompts per backward pass and per generate call.
        self.train_micro: int = self.batch if self[TRAIN] == AUTO else self[TRAIN]
        self.rollout_micro = (
            self.train_micro if self[ROLLOUT] == AUTO else self[ROLLOUT]
        )
        if self["rl.use_agentic_rollout"]:
            self.rollout_micro = 1
        self._count_data()
        self._divide_devices()
        checked = (rule for rule in RULES if rule.found_by == "validator")
        self.usable = not any(rule.is_broken(self) for rule in checked)
        if not self.usable:
            return
        self.count(self.batch, self.train_micro, self.iterations)
        # Prompts of an evaluation, in full batches.
        given: int = self["eval_batch_size"]
        size: int = given if given > 0 else self.batch
        rows = self["num_test_batches"] * size - max(self["test_batch_start_index"], 0)
        self.eval_prompts = max(rows // size, 0) * size

    def _count_data(self) -> None:
        """Count the prompts of an epoch, the steps of the run, and prompts that never
        fill a batch.
        """
        known, epochs = self["num_prompts"], self["num_epoch"]
        fraction = self["train_fraction"] if 0 < self["train_fraction"] <= 1 else 0
        self.wanted_prompts = int(self["num_batches"] * self.batch * fraction)
        wanted = self.wanted_prompts
        self.epoch_prompts: int = wanted if known is None else min(wanted, known)
        given = self.epoch_prompts * epochs
        self.full_batches, self.lost_prompts = divmod(given, max(self.batch, 1))
        self.total_steps = self.full_batches * self.iterations
        # Optimizer steps that the learning-rate schedule is made for.
        scheduled = self["num_batches"] * self.iterations * fraction * epochs
        self.scheduled_steps = int(scheduled)

    def _divide_devices(self) -> None:
        """Count the devices that train and that generate; None if the number of devices
        is unknown or the split is invalid.
        """
        self.rollout_axes = [self[axis] for axis in ROLLOUT_AXES]
        are_sizes = all(n == AUTO or n > 0 for n in self.rollout_axes)
        self.axes_valid = are_sizes and self.rollout_axes.count(AUTO) <= 1
        slices = [self[key] for key in SLICES]
        # Training and generation have slices of their own.
        self.multislice = min(slices) > 0
        self.slices_agree = self.multislice or slices == [AUTO, AUTO]
        self.fractions_valid = all(0 < self[key] <= 1 for key in FRACTIONS)
        self.trainer_devices: int | None = None
        self.sampler_devices: int | None = None
        devices = self["num_devices"]
        is_split = self.multislice or (self.slices_agree and self.fractions_valid)
        if devices is not None and is_split:
            shares = [devices, devices]
            if self.multislice:
                shares = [devices * n // sum(slices) for n in slices]
            elif devices // self["chips_per_vm"] >= 2 and self["use_pathways"]:
                # A single slice is divided only between at least two hosts, under
                # Pathways.
                shares = [int(devices * self[key]) for key in FRACTIONS]
            self.trainer_devices, self.sampler_devices = shares
        # Devices along the fsdp axis of training; None if the file and `num_devices`
        # leave it open.
        self.fsdp: int | None = None
        if not self.multislice and self[FSDP] != AUTO:
            self.fsdp = self[FSDP]
        elif self.trainer_devices is not None:
            sizes = (self[axis] for axis in AXES if axis != FSDP)
            others = math.prod(size for size in sizes if size != AUTO)
            if self.multislice:
                others = self[SLICES[0]] * max(self[TENSOR], 1)
            self.fsdp = max(self.trainer_devices // others, 1)

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived = super().derived() | {
            "num_batches": self.full_batches,
            "prompts_used": self.epoch_prompts,
            "dropped_prompts": self.lost_prompts,
            "weight_syncs": self.full_batches,
            "scheduled_optimizer_steps": self.scheduled_steps,
            "total_optimizer_steps": self.total_steps,
            "eval_prompts": self.eval_prompts,
        }
        if self["num_devices"] is not None:
            derived["trainer_devices"] = self.trainer_devices
            derived["sampler_devices"] = self.sampler_devices
        return derived


def _meanings(job: MaxTextRlJob) -> Iterator[tuple[str, str]]:
    yield BATCH, f"{job.prompts_text(job.batch)} per training step and optimizer step"
    responses = counted(job.samples_per_prompt, "sample")
    yield GENERATIONS, f"{responses} (responses) per prompt"
    micro = job.prompts_text(job.train_micro)
    yield TRAIN, f"{micro} per backward pass; {job.passes_text} per optimizer step"
    calls = counted(job.batch // job.rollout_micro, "call")
    micro = job.prompts_text(job.rollout_micro)
    yield ROLLOUT, f"{micro} per generate call; {calls} per step"
    yield LOSS, LOSSES[job[LOSS]]
    updates = counted(job.iterations, "optimizer step")
    yield ITERATIONS, f"{updates} on the samples of one batch"
    steps = counted(job.full_batches, "training step")
    prompts = counted(job.epoch_prompts, "prompt")
    epochs = counted(job["num_epoch"], "epoch")
    data = f"{epochs}, train_fraction {job['train_fraction']:g}"
    yield "num_batches", f"{steps} over {prompts} ({data})"
    yield "eval_batch_size", f"{counted(job.eval_prompts, 'prompt')} per evaluation"
    total = counted(job.total_steps, "optimizer step")
    syncs = counted(job.full_batches, "weight sync")
    yield "", f"{total} and {syncs} in the whole run"


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
    if job.total_steps != job.scheduled_steps:
        yield (
            f"the learning-rate schedule is made for {job.scheduled_steps:,} optimizer"
            f" steps, but the run takes {job.total_steps:,}: it never reaches its end"
        )
    if job.lost_prompts:
        given = job.epoch_prompts * job["num_epoch"]
        yield (
            f"{job.lost_prompts:,} of {given:,} prompts fill no batch of {job.batch:,}"
            " and are dropped"
        )
    if job["rl.use_agentic_rollout"]:
        yield (
            "the agentic learner generates for one prompt at a time, regardless of"
            f" {ROLLOUT}"
        )
        if LOSS in job.settings.given:
            yield f"{LOSS} does not reach the agentic learner, which has its own default"
    if job.fsdp is None:
        yield (
            "ici_fsdp_parallelism=-1: give num_devices=N to check whether"
            f" {job.pass_sequences:,} sequences divide over it"
        )
    else:
        yield from job.sharding_note(job.fsdp)
    yield group_note(job.samples_per_prompt)


def _share(key: str) -> Rule[MaxTextRlJob]:
    return Rule(
        name=f"maxtext_rl.{key}",
        keys=(key,),
        holds=lambda job: 0 < job[key] <= 1,
        message=lambda job: f"{key}={job[key]:g} must be above 0 and at most 1",
        candidates=lambda job: (1.0, 0.5, 0.25) if job[key] > 1 else (0.25, 0.5, 1.0),
    )


def _micro_positive(key: str) -> Rule[MaxTextRlJob]:
    return Rule(
        name=f"maxtext_rl.{key}_positive",
        keys=(key,),
        holds=lambda job: job[key] == AUTO or job[key] > 0,
        message=lambda job: (
            f"{key}={job[key]} (prompts) must be a positive whole number, or -1 for automatic"
        ),
        candidates=lambda job: (AUTO, *divisors(max(job.batch, 1))),
    )


def _generator_rule(job: MaxTextRlJob) -> tuple[bool, str]:
    """Return whether the given axes fit the devices that generate, which they must
    equal unless one axis is free, and so.
    """
    given: dict[str, int] = {
        axis: job[axis] for axis in ROLLOUT_AXES if job[axis] != AUTO
    }
    size = math.prod(given.values())
    devices = job.sampler_devices or 0
    is_free = AUTO in job.rollout_axes
    text = (
        f"{' * '.join(given)} = {' * '.join(map(str, given.values()))} = {size} must"
        f" {'divide' if is_free else 'equal'}"
    )
    return (
        devices % size == 0 if is_free else devices == size,
        f"{text} the {devices} devices that generate",
    )


RULES: list[Rule[MaxTextRlJob]] = [
    known_keys("maxtext_rl", BATCH),
    *[
        at_least(
            f"maxtext_rl.{key.removeprefix('rl.')}_at_least_{least}", (key,), key, least
        )
        for key, least in {
            BATCH: 1,
            "num_batches": 1,
            "num_epoch": 1,
            ITERATIONS: 1,
            GENERATIONS: 2,
        }.items()
    ],
    Rule(
        name="maxtext_rl.older_name",
        keys=(OLD,),
        holds=lambda job: job[OLD] is None,
        candidates=lambda job: [None],
        message=lambda job: (
            f"{OLD}={job[OLD]} is the older name of {TRAIN} and {ROLLOUT}, which MaxText no longer knows"
        ),
    ),
    *map(_share, ("train_fraction", *FRACTIONS)),
    *map(_micro_positive, (TRAIN, ROLLOUT)),
    *[
        multiple(
            f"maxtext_rl.{key}_divides_batch",
            (key, BATCH),
            BATCH,
            key,
            when=lambda job: job.batch >= 1,
            note=f" (prompts per {unit}; both count prompts)",
        )
        for key, unit in ((TRAIN, "backward pass"), (ROLLOUT, "generate call"))
    ],
    Rule(
        name="maxtext_rl.dataset_fills_a_batch",
        keys=(BATCH, "num_prompts", "num_batches", "train_fraction"),
        when=lambda job: (
            min(job.batch, job["num_batches"], job["num_epoch"]) >= 1
            and 0 < job["train_fraction"] <= 1
        ),
        holds=lambda job: job.full_batches >= 1,
        message=lambda job: (
            f"{job.epoch_prompts:,} prompts * num_epoch={job['num_epoch']} must fill a batch of "
            f"{BATCH}={job.batch:,} (prompts); the data set is empty after its last, short batch is dropped"
        ),
        division=lambda job: (job.epoch_prompts * max(job["num_epoch"], 1), 1),
    ),
    Rule(
        name="maxtext_rl.rollout_axes",
        keys=ROLLOUT_AXES,
        holds=lambda job: job.axes_valid,
        message=lambda job: (
            f"{', '.join(f'{axis}={job[axis]}' for axis in ROLLOUT_AXES)}: each must be -1 or above 0, and at most one -1"
        ),
        candidates=lambda job: (1, AUTO),
    ),
    Rule(
        name="maxtext_rl.rollout_devices",
        keys=ROLLOUT_AXES,
        when=lambda job: (
            job.axes_valid and job.sampler_devices is not None and job.fractions_valid
        ),
        holds=lambda job: _generator_rule(job)[0],
        message=lambda job: _generator_rule(job)[1],
        division=lambda job: (job.sampler_devices or 0, 1),
    ),
    Rule(
        name="maxtext_rl.slices",
        keys=SLICES,
        holds=lambda job: job.slices_agree,
        message=lambda job: (
            f"{SLICES[0]}={job[SLICES[0]]} and {SLICES[1]}={job[SLICES[1]]} must both be -1 or both be above 0"
        ),
        candidates=lambda job: (AUTO, 1),
    ),
    multiple(
        "maxtext_rl.tensor_in_slice",
        (TENSOR, SLICES[0]),
        (
            "the {} training devices of a slice",
            lambda job: (job.trainer_devices or 0) // job[SLICES[0]],
        ),
        TENSOR,
        when=lambda job: (
            job["num_devices"] is not None and job.multislice and job[TENSOR] > 1
        ),
    ),
    Rule(
        name="maxtext_rl.loss_is_known",
        keys=(LOSS,),
        when=lambda job: not job["rl.use_agentic_rollout"],
        holds=lambda job: job[LOSS] != "sequence-mean",
        message=lambda job: (
            f"{LOSS}=sequence-mean is accepted by MaxText, but Tunix, which computes the loss, does not know "
            "it and stops at the first step"
        ),
        candidates=lambda job: [name for name in LOSSES if name != "sequence-mean"],
        found_by="run",
    ),
    Rule(
        name="maxtext_rl.devices_left",
        keys=FRACTIONS,
        when=lambda job: job.trainer_devices is not None and job.fractions_valid,
        holds=lambda job: min(job.trainer_devices or 0, job.sampler_devices or 0) >= 1,
        message=lambda job: (
            f"num_devices={job['num_devices']} leave {job.trainer_devices} devices to train and "
            f"{job.sampler_devices} to generate; each needs at least 1"
        ),
        candidates=lambda job: (0.5, 1.0),
        found_by="run",
    ),
]
DIALECT = Dialect(
    job=MaxTextRlJob,
    rules=RULES,
    meanings=_meanings,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
    devices="num_devices",
)
