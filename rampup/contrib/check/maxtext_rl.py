"""MaxText's reinforcement learning (rl.yml): keys, numbers and rules, also those of
Tunix below it.

All sizes, also micro batches, count prompts of the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rampup.contrib.check.maxtext import (
    AXIS_GROUPS,
    BASES,
    known_keys,
    old_keys,
    read_chain,
)
from rampup.contrib.check.reading import Launch, Settings, entry
from rampup.contrib.check.rollout import RolloutJob
from rampup.contrib.check.rules import Dialect, Rule, at_least, multiple
from rampup.contrib.check.verdict import counted, product, times
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

KEYS = {
    BATCH: entry(1, "prompts per training step and optimizer step", unit="prompts"),
    TRAIN: entry(AUTO, "prompts per backward pass; -1 = batch_size", unit="prompts"),
    ROLLOUT: entry(AUTO, "prompts per generate call; -1 = the train micro batch", unit="prompts"),
    OLD: entry(None, "older name of both, until they were split", unit="prompts"),
    GENERATIONS: entry(2, "responses per prompt", unit="samples"),
    ITERATIONS: entry(1, "optimizer steps per batch"),
    LOSS: entry("sequence-mean-token-mean", "how the loss of a batch is averaged", kind="text", choices=tuple(LOSSES)),
    "rl.use_agentic_rollout": entry(False, "the agentic learner", kind="bool"),
    "num_batches": entry(4, "batches of an epoch"),
    "num_epoch": entry(1, "passes over the prompts"),
    "train_fraction": entry(1.0, "share of the batches that is used", kind="float"),
    "num_test_batches": entry(5, "evaluation batches"),
    "eval_batch_size": entry(AUTO, "prompts per evaluation batch; -1 = batch_size", unit="prompts"),
    "test_batch_start_index": entry(0, "first evaluation prompt", unit="prompts"),
    FRACTIONS[0]: entry(0.5, "share of the devices that train", kind="float"),
    FRACTIONS[1]: entry(0.5, "share of the devices that generate", kind="float"),
    "chips_per_vm": entry(4, "devices of a host", minimum=1, unit="devices"),
    "use_pathways": entry(True, "whether one controller sees all hosts", kind="bool"),
    **{key: entry(AUTO, f"slices that {do}", unit="slices") for key, do in zip(SLICES, ("train", "generate"), strict=True)},
    "rollout_data_parallelism": entry(AUTO, "replicas of the generator; -1 = the rest"),
    "rollout_tensor_parallelism": entry(1, "devices that share the generator's matrices; -1 = the rest"),
    "rollout_expert_parallelism": entry(1, "devices that share its experts; -1 = the rest"),
    **{axis: entry(AUTO if axis == FSDP else 1, "devices along this axis", minimum=1, also=(AUTO,)) for axis in AXES},
    "num_devices": entry(None, "devices of the run; given as num_devices=N", minimum=1, unit="devices"),
    "num_prompts": entry(None, "prompts of the data set after its filter; given as num_prompts=N", minimum=0, unit="prompts"),
}  # fmt: skip
ALIASES = {
    **{
        f"{section}.{name}": name for section in ("dataset", "cluster") for name in KEYS
    },
    **{name.removeprefix("rl."): name for name in KEYS if name.startswith("rl.")},
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
)


class MaxTextRlJob(RolloutJob):
    """The numbers of an rl.yml. Some are computed in MaxText's floating point."""

    version = "MaxText of August 2026 (e591f30) with its Tunix"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.batch = self.prompts = self[
            BATCH
        ]  # prompts per training step and optimizer step
        self.samples_per_prompt: int = self[GENERATIONS]
        self.iterations: int = self[ITERATIONS]  # optimizer steps per batch
        # Prompts per backward pass and per generate call.
        self.train_micro: int = self.batch if self[TRAIN] == AUTO else self[TRAIN]
        self.rollout_micro: int = (
            self.train_micro if self[ROLLOUT] == AUTO else self[ROLLOUT]
        )
        if self["rl.use_agentic_rollout"]:
            self.rollout_micro = 1
        # Prompts of one epoch, training steps of the run, and prompts that never fill a
        # batch.
        known = self["num_prompts"]
        fraction = self["train_fraction"] if 0 < self["train_fraction"] <= 1 else 0
        self.wanted_prompts = int(self["num_batches"] * self.batch * fraction)
        self.epoch_prompts: int = (
            self.wanted_prompts if known is None else min(self.wanted_prompts, known)
        )
        self.full_batches, self.lost_prompts = divmod(
            self.epoch_prompts * self["num_epoch"], max(self.batch, 1)
        )
        self.total_steps = self.full_batches * self.iterations
        # Optimizer steps that the learning-rate schedule is made for.
        self.scheduled_steps = int(
            self["num_batches"] * self.iterations * fraction * self["num_epoch"]
        )
        self.rollout_axes = [self[axis] for axis in ROLLOUT_AXES]
        self.axes_valid = (
            all(n == AUTO or n > 0 for n in self.rollout_axes)
            and self.rollout_axes.count(AUTO) <= 1
        )
        slices = [self[key] for key in SLICES]
        self.multislice = (
            min(slices) > 0
        )  # training and generation have slices of their own
        self.slices_agree = self.multislice or slices == [AUTO, AUTO]
        self.fractions_valid = all(0 < self[key] <= 1 for key in FRACTIONS)
        # Devices that train and that generate; None if the number of devices is unknown
        # or the split is invalid.
        self.trainer_devices: int | None = None
        self.sampler_devices: int | None = None
        if (devices := self["num_devices"]) is not None and (
            self.multislice or (self.slices_agree and self.fractions_valid)
        ):
            self.trainer_devices = self.sampler_devices = devices
            if self.multislice:
                self.trainer_devices, self.sampler_devices = (
                    devices * n // sum(slices) for n in slices
                )
            elif devices // self["chips_per_vm"] >= 2 and self["use_pathways"]:
                # A single slice is divided only between at least two hosts, under
                # Pathways.
                self.trainer_devices, self.sampler_devices = (
                    int(devices * self[key]) for key in FRACTIONS
                )
        self.usable = not any(
            rule.is_broken(self) for rule in RULES if rule.found_by == "validator"
        )
        if not self.usable:
            return
        self.train("policy", self.batch, 1, micro=None, epochs=self.iterations)
        self.passes = self.batch // self.train_micro
        # Prompts of an evaluation, in full batches.
        size: int = (
            self.batch if self["eval_batch_size"] <= 0 else self["eval_batch_size"]
        )
        rows = self["num_test_batches"] * size - max(self["test_batch_start_index"], 0)
        self.eval_prompts = max(rows // size, 0) * size
        # Devices along the fsdp axis of training; None if the file and `num_devices`
        # leave it open.
        self.fsdp: int | None = None
        if not self.multislice and self[FSDP] != AUTO:
            self.fsdp = self[FSDP]
        elif self.trainer_devices is not None:
            others = math.prod(
                self[axis] for axis in AXES if axis != FSDP and self[axis] != AUTO
            )
            if self.multislice:
                others = self[SLICES[0]] * max(self[TENSOR], 1)
            self.fsdp = max(self.trainer_devices // others, 1)

    def summary(self) -> str:
        """Return the numbers of a step in one line."""
        samples = (
            f"{times(counted(self.batch, 'prompt'), self.samples_per_prompt)} ="
            f" {counted(self.samples, 'sample')}"
        )
        steps = f"{counted(self.iterations, 'optimizer step')} of {self.samples:,}"
        return (
            f"{samples}; {steps};"
            f" {times(self.passes_text, self.train_micro * self.samples_per_prompt)}"
        )

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "samples_per_step": self.samples,
            "mini_batches": 1,
            "mini_batch_samples": self.samples,
            "optimizer_steps": self.iterations,
            "accumulation_steps": self.passes,
            "microbatch_samples": [self.train_micro * self.samples_per_prompt],
            "generation_calls": self.batch // self.rollout_micro,
            "samples_per_generation_call": self.rollout_micro * self.samples_per_prompt,
            "num_batches": self.full_batches,
            "prompts_used": self.epoch_prompts,
            "dropped_prompts": self.lost_prompts,
            "weight_syncs": self.full_batches,
            "scheduled_optimizer_steps": self.scheduled_steps,
            "total_optimizer_steps": self.total_steps,
            "eval_prompts": self.eval_prompts,
        }
        if self["num_devices"] is not None:
            derived |= {
                "trainer_devices": self.trainer_devices,
                "sampler_devices": self.sampler_devices,
            }
        return derived


def _meanings(job: MaxTextRlJob) -> Iterator[tuple[str, str]]:
    generations = job.samples_per_prompt

    def prompts(number: int) -> str:
        return (
            f"{counted(number, 'prompt')} = {counted(number * generations, 'sample')}"
        )

    calls = counted(job.batch // job.rollout_micro, "call")
    data = (
        f"{counted(job['num_epoch'], 'epoch')}, train_fraction"
        f" {job['train_fraction']:g}"
    )
    yield BATCH, f"{prompts(job.batch)} per training step and optimizer step"
    yield GENERATIONS, f"{counted(generations, 'sample')} (responses) per prompt"
    yield (
        TRAIN,
        (
            f"{prompts(job.train_micro)} per backward pass; {job.passes_text} per"
            " optimizer step"
        ),
    )
    yield ROLLOUT, f"{prompts(job.rollout_micro)} per generate call; {calls} per step"
    yield LOSS, LOSSES[job[LOSS]]
    yield (
        ITERATIONS,
        f"{counted(job.iterations, 'optimizer step')} on the samples of one batch",
    )
    steps = counted(job.full_batches, "training step")
    yield "num_batches", f"{steps} over {counted(job.epoch_prompts, 'prompt')} ({data})"
    yield "eval_batch_size", f"{counted(job.eval_prompts, 'prompt')} per evaluation"
    syncs = counted(job.full_batches, "weight sync")
    yield (
        "",
        f"{counted(job.total_steps, 'optimizer step')} and {syncs} in the whole run",
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
    if job.total_steps != job.scheduled_steps:
        scheduled = (
            f"the learning-rate schedule is made for {job.scheduled_steps:,} optimizer"
            " steps"
        )
        yield (
            f"{scheduled}, but the run takes {job.total_steps:,}: it never reaches"
            " its end"
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
            yield (
                f"{LOSS} does not reach the agentic learner, which has its own default"
            )
    micro = product(
        {
            "train micro batch": job.train_micro,
            "num_generations": job.samples_per_prompt,
        },
        "sequences",
    )
    if (fsdp := job.fsdp) is None:
        yield (
            "ici_fsdp_parallelism=-1: give num_devices=N to check whether"
            f" {micro.number:,} sequences divide over it"
        )
    elif micro.number % fsdp:
        done = (
            f"every device silently gets all of them, and {fsdp:,} times the work is"
            " done"
        )
        yield f"{micro.text} do not divide over fsdp={fsdp:,}: {done}"


def _share(key: str) -> Rule[MaxTextRlJob]:
    return Rule(name=f"maxtext_rl.{key}", keys=(key,), holds=lambda job: 0 < job[key] <= 1,
        message=lambda job: f"{key}={job[key]:g} must be above 0 and at most 1",
        candidates=lambda job: (1.0, 0.5, 0.25) if job[key] > 1 else (0.25, 0.5, 1.0))  # fmt: skip


def _micro_positive(key: str) -> Rule[MaxTextRlJob]:
    return Rule(name=f"maxtext_rl.{key}_positive", keys=(key,), holds=lambda job: job[key] == AUTO or job[key] > 0,
        message=lambda job: f"{key}={job[key]} (prompts) must be a positive whole number, or -1 for automatic",
        candidates=lambda job: (AUTO, *divisors(max(job.batch, 1))))  # fmt: skip


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
    *[at_least(f"maxtext_rl.{key.removeprefix('rl.')}_at_least_{least}", (key,), key, least)
      for key, least in {BATCH: 1, "num_batches": 1, "num_epoch": 1, ITERATIONS: 1, GENERATIONS: 2}.items()],
    Rule(name="maxtext_rl.older_name", keys=(OLD,), holds=lambda job: job[OLD] is None, candidates=lambda job: [None],
        message=lambda job: f"{OLD}={job[OLD]} is the older name of {TRAIN} and {ROLLOUT}, which MaxText no longer knows"),
    *map(_share, ("train_fraction", *FRACTIONS)),
    *map(_micro_positive, (TRAIN, ROLLOUT)),
    *[multiple(f"maxtext_rl.{key}_divides_batch", (key, BATCH), BATCH, key, when=lambda job: job.batch >= 1,
        note=f" (prompts per {unit}; both count prompts)")
      for key, unit in ((TRAIN, "backward pass"), (ROLLOUT, "generate call"))],
    Rule(name="maxtext_rl.dataset_fills_a_batch", keys=(BATCH, "num_prompts", "num_batches", "train_fraction"),
        when=lambda job: min(job.batch, job["num_batches"], job["num_epoch"]) >= 1 and 0 < job["train_fraction"] <= 1,
        holds=lambda job: job.full_batches >= 1,
        message=lambda job: f"{job.epoch_prompts:,} prompts * num_epoch={job['num_epoch']} must fill a batch of "
            f"{BATCH}={job.batch:,} (prompts); the data set is empty after its last, short batch is dropped",
        division=lambda job: (job.epoch_prompts * max(job["num_epoch"], 1), 1)),
    Rule(name="maxtext_rl.rollout_axes", keys=ROLLOUT_AXES, holds=lambda job: job.axes_valid, message=lambda job: (
            f"{', '.join(f'{axis}={job[axis]}' for axis in ROLLOUT_AXES)}: each must be -1 or above 0, and at most one -1"),
        candidates=lambda job: (1, AUTO)),
    Rule(name="maxtext_rl.rollout_devices", keys=ROLLOUT_AXES,
        when=lambda job: job.axes_valid and job.sampler_devices is not None and job.fractions_valid,
        holds=lambda job: _generator_rule(job)[0], message=lambda job: _generator_rule(job)[1],
        division=lambda job: (job.sampler_devices or 0, 1)),
    Rule(name="maxtext_rl.slices", keys=SLICES, holds=lambda job: job.slices_agree,
        message=lambda job: f"{SLICES[0]}={job[SLICES[0]]} and {SLICES[1]}={job[SLICES[1]]} must both be -1 or both be above 0",
        candidates=lambda job: (AUTO, 1)),
    multiple("maxtext_rl.tensor_in_slice", (TENSOR, SLICES[0]),
        ("the {} training devices of a slice", lambda job: (job.trainer_devices or 0) // job[SLICES[0]]), TENSOR,
        when=lambda job: job["num_devices"] is not None and job.multislice and job[TENSOR] > 1),
    Rule(name="maxtext_rl.loss_is_known", keys=(LOSS,), when=lambda job: not job["rl.use_agentic_rollout"],
        holds=lambda job: job[LOSS] != "sequence-mean",
        message=lambda job: f"{LOSS}=sequence-mean is accepted by MaxText, but Tunix, which computes the loss, does not know "
            "it and stops at the first step",
        candidates=lambda job: [name for name in LOSSES if name != "sequence-mean"], found_by="run"),
    Rule(name="maxtext_rl.devices_left", keys=FRACTIONS,
        when=lambda job: job.trainer_devices is not None and job.fractions_valid,
        holds=lambda job: min(job.trainer_devices or 0, job.sampler_devices or 0) >= 1,
        message=lambda job: f"num_devices={job['num_devices']} leave {job.trainer_devices} devices to train and "
            f"{job.sampler_devices} to generate; each needs at least 1", candidates=lambda job: (0.5, 1.0), found_by="run"),
]  # fmt: skip
DIALECT = Dialect(
    job=MaxTextRlJob,
    rules=RULES,
    meanings=_meanings,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
    devices="num_devices",
)
