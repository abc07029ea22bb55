"""MaxText's rl.yml in words: what each size means, how a training step runs, and what the documentation says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rampup.dialects.maxtext_rl import BATCH, GENERATIONS, ITERATIONS, ROLLOUT, TRAIN
from rampup.dialects.rules import counted
from rampup.dialects.verdict import Advice, Meaning

if TYPE_CHECKING:
    from rampup.dialects.maxtext_rl.rules import MaxTextRlJob

GUIDE = "MaxText, docs/reference/core_concepts/batch_size.md"


def meanings(job: MaxTextRlJob) -> Iterator[Meaning]:
    """Yield each setting of the file with its meaning, every size in prompts or samples."""
    describe, generations = job.settings.describe, job.generations

    def prompts(number: int) -> str:
        return f"{counted(number, 'prompt')} = {counted(number * generations, 'sample')}"

    yield Meaning(describe(BATCH), f"{prompts(job.batch)} per training step and optimizer step")
    yield Meaning(describe(GENERATIONS), f"{counted(generations, 'sample')} (responses) per prompt")
    yield Meaning(
        describe(TRAIN),
        f"{prompts(job.train_micro)} per backward pass; {counted(job.batch // job.train_micro, 'pass')} per optimizer step",
    )
    yield Meaning(
        describe(ROLLOUT),
        f"{prompts(job.rollout_micro)} per generate call; {counted(job.batch // job.rollout_micro, 'call')} per step",
    )
    yield Meaning(describe(ITERATIONS), f"{counted(job.updates, 'optimizer step')} on the samples of one batch")
    yield Meaning(
        describe("num_batches"),
        f"{counted(job.full_batches, 'training step')} over {counted(job.prompts, 'prompt')} "
        f"({counted(job['num_epoch'], 'epoch')}, train_fraction {job['train_fraction']:g})",
    )
    yield Meaning(describe("eval_batch_size"), f"{counted(job.eval_prompts, 'prompt')} per evaluation")
    yield Meaning(
        "", f"{counted(job.total_steps, 'optimizer step')} and {counted(job.full_batches, 'weight sync')} in the whole run"
    )


def flow(job: MaxTextRlJob) -> Iterator[str]:
    """Yield the stages of a training step."""
    yield f"load {counted(job.batch, 'prompt')}"
    yield (
        f"generate in {counted(job.batch // job.rollout_micro, 'call')} of {counted(job.rollout_micro, 'prompt')}: "
        f"{counted(job.batch * job.generations, 'sample')} in total"
    )
    yield (
        "score and compute log-probabilities as soon as "
        f"{counted(math.lcm(job.rollout_micro, job.train_micro), 'prompt')} are generated, {job.train_micro:,} at a time"
    )
    yield f"advantages within each prompt's {counted(job.generations, 'sample')}"
    yield (
        f"{counted(job.updates, 'time')}: {counted(job.batch // job.train_micro, 'backward pass')} of "
        f"{counted(job.train_micro * job.generations, 'sample')}, then one optimizer step"
    )
    yield "send the weights to the generator"


def advice(job: MaxTextRlJob) -> Iterator[Advice]:
    """Yield what the documentation says of the sizes, and whether it is true."""
    yield Advice(
        "micro batch sizes count pairs of a prompt and a response",
        GUIDE,
        None,
        f"they count prompts: {TRAIN} = {counted(job.train_micro, 'prompt')} are "
        f"{counted(job.train_micro * job.generations, 'sequence')} in a backward pass",
    )


def notes(job: MaxTextRlJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    if job["num_prompts"] is None:
        yield f"the data set is assumed to have at least {job.wanted_prompts:,} prompts; give num_prompts=N if it has fewer"
    elif job.prompts < job.wanted_prompts:
        yield f"the data set has {job.prompts:,} prompts, but the keys request {job.wanted_prompts:,}"
    if job.total_steps != job.scheduled_steps:
        yield (
            f"the learning-rate schedule is made for {job.scheduled_steps:,} optimizer steps, but the run takes "
            f"{job.total_steps:,}: it never reaches its end"
        )
    if job.dropped_prompts:
        yield (
            f"{job.dropped_prompts:,} of {job.prompts * job['num_epoch']:,} prompts fill no batch of {job.batch:,} "
            "and are dropped"
        )
    if job["rl.use_agentic_rollout"]:
        yield f"the agentic learner generates for one prompt at a time, regardless of {ROLLOUT}"
    sequences, fsdp = job.train_micro * job.generations, job.fsdp
    if fsdp is None:
        yield f"ici_fsdp_parallelism=-1: give num_devices=N to check whether {sequences:,} sequences divide over it"
    elif sequences % fsdp:
        yield (
            f"train micro batch * num_generations = {job.train_micro:,} * {job.generations:,} = {sequences:,} sequences do not "
            f"divide over fsdp={fsdp:,}: every device silently gets all of them, and {fsdp:,} times the work is done"
        )
