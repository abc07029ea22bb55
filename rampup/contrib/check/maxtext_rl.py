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
from rampup.contrib.check.launch import Launch, load_entries
from rampup.contrib.check.maxtext import (
    AXIS_GROUPS,
    BASES,
    UNREAD,
    known_keys,
    old_keys,
    read_chain,
)
from rampup.contrib.check.rollout import group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.tunix import PromptJob
from rampup.contrib.check.verdict import counted, product
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
FRACTIONS = ("trainer_devices_fraction", "sampler_devices_fraction")
AXES = tuple(
    f"ici_{axis}_parallelism" for axes in AXIS_GROUPS.values() for axis in axes
)
FSDP = "ici_fsdp_parallelism"
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

    system = "maxtext_rl"
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
        rulings = (*_checked(self), *_device_rules(self))
        self.usable = all(rule.holds or rule.found_by == "run" for rule in rulings)
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
        self.fractions_valid = all(0 < self[key] <= 1 for key in FRACTIONS)
        self.trainer_devices: int | None = None
        self.sampler_devices: int | None = None
        devices = self["num_devices"]
        if devices is not None and self.fractions_valid:
            shares = [devices, devices]
            if devices // self["chips_per_vm"] >= 2 and self["use_pathways"]:
                # A single slice is divided only between at least two hosts, under
                # Pathways.
                shares = [int(devices * self[key]) for key in FRACTIONS]
            self.trainer_devices, self.sampler_devices = shares
        # Devices along the fsdp axis of training; None if the file and `num_devices`
        # leave it open.
        self.fsdp: int | None = None
        if self[FSDP] != AUTO:
            self.fsdp = self[FSDP]
        elif self.trainer_devices is not None:
            sizes = (self[axis] for axis in AXES if axis != FSDP)
            others = math.prod(size for size in sizes if size != AUTO)
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
    yield from job.micro_meanings(TRAIN, ROLLOUT)
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


def _rules(job: MaxTextRlJob) -> Iterator[Ruling]:
    """Yield what the check of the configuration and the run ask."""
    yield from known_keys(job, BATCH)
    yield from _checked(job)
    yield from _device_rules(job)


def _checked(job: MaxTextRlJob) -> Iterator[Ruling]:
    """Yield what the check of the configuration asks."""
    for key in (BATCH, "num_batches", "num_epoch", ITERATIONS, GENERATIONS):
        least = 2 if key == GENERATIONS else 1
        name = f"{key.removeprefix('rl.')}_at_least_{least}"
        yield job.at_least(name, [key], key, least)
    if job[OLD] is not None:
        yield job.broken(
            "older_name",
            [OLD],
            f"{OLD}={job[OLD]} is the older name of {TRAIN} and {ROLLOUT}, which MaxText"
            " no longer knows",
            candidates=[None],
        )
    for key in ("train_fraction", *FRACTIONS):
        if not 0 < job[key] <= 1:
            said = f"{key}={job[key]:g} must be above 0 and at most 1"
            near = sorted((0.25, 0.5, 1.0), reverse=job[key] > 1)
            yield job.broken(key, [key], said, candidates=near)
    for key, unit in ((TRAIN, "backward pass"), (ROLLOUT, "generate call")):
        if job[key] != AUTO and job[key] <= 0:
            yield job.broken(
                f"{key}_positive",
                [key],
                f"{key}={job[key]} (prompts) must be a positive whole number, or -1 for"
                " automatic",
                candidates=(AUTO, *divisors(max(job.batch, 1))),
            )
        if job.batch >= 1:
            note = f" (prompts per {unit}; both count prompts)"
            yield job.multiple(f"{key}_divides_batch", [key, BATCH], BATCH, key, note)
    epochs = job["num_epoch"]
    is_counted = min(job.batch, job["num_batches"], epochs) >= 1
    if is_counted and 0 < job["train_fraction"] <= 1 and job.full_batches < 1:
        yield job.broken(
            "dataset_fills_a_batch",
            (BATCH, "num_prompts", "num_batches", "train_fraction"),
            f"{job.epoch_prompts:,} prompts * num_epoch={epochs} must fill a batch of"
            f" {BATCH}={job.batch:,} (prompts); the data set is empty after its last,"
            " short batch is dropped",
            division=(job.epoch_prompts * epochs, 1),
        )
    if job["rl.use_agentic_rollout"] or job[LOSS] != "sequence-mean":
        return
    yield job.broken(
        "loss_is_known",
        [LOSS],
        f"{LOSS}=sequence-mean is accepted by MaxText, but Tunix, which computes the"
        " loss, does not know it and stops at the first step",
        candidates=[name for name in LOSSES if name != "sequence-mean"],
        found_by="run",
    )


def _device_rules(job: MaxTextRlJob) -> Iterator[Ruling]:
    """Yield the rules of the devices that train and that generate."""
    given = {axis: job[axis] for axis in ROLLOUT_AXES}
    devices = job.sampler_devices or 0
    if not job.axes_valid:
        shown = ", ".join(f"{axis}={size}" for axis, size in given.items())
        yield job.broken(
            "rollout_axes",
            ROLLOUT_AXES,
            f"{shown}: each must be -1 or above 0, and at most one -1",
            candidates=(1, AUTO),
        )
    elif job.sampler_devices is not None and job.fractions_valid:
        # The axes fill the devices, unless one of them is free.
        fixed = {axis: size for axis, size in given.items() if size != AUTO}
        size = math.prod(fixed.values())
        is_free = len(fixed) < len(given)
        if devices % size or not (is_free or devices == size):
            yield job.broken(
                "rollout_devices",
                ROLLOUT_AXES,
                f"{product(fixed).text} must {'divide' if is_free else 'equal'} the"
                f" {devices} devices that generate",
                division=(devices, 1),
            )
    trains = job.trainer_devices
    if trains is not None and job.fractions_valid and min(trains, devices) < 1:
        yield job.broken(
            "devices_left",
            FRACTIONS,
            f"num_devices={job['num_devices']} leave {trains} devices to train and"
            f" {devices} to generate; each needs at least 1",
            candidates=(0.5, 1.0),
            found_by="run",
        )


DIALECT = Dialect(
    job=MaxTextRlJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
    devices="num_devices",
)
