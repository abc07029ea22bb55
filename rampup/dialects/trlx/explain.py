"""A trlX file in words: what its sizes mean, how a round of collecting and training runs, and which advice is true of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rampup.dialects.rules import counted
from rampup.dialects.trlx import CHUNK, INNER, MICRO, ROLLOUTS, TRAIN
from rampup.dialects.verdict import Advice, Meaning

if TYPE_CHECKING:
    from rampup.dialects.trlx.rules import TrlxJob

GUIDE = "a community guide to trlX"


def meanings(job: TrlxJob) -> Iterator[Meaning]:
    """Yield each setting of the file with its meaning."""
    describe = job.settings.describe
    yield Meaning(
        f"{counted(job.replicas, 'data-parallel replica')} (NeMo)" if job.nemo else counted(job.replicas, "process"),
        "each collects samples of its own and trains on them; gradients are averaged over them",
    )
    yield Meaning(
        describe(TRAIN) if TRAIN in job.settings.given else f"{TRAIN} = {job.batch:,} (default)",
        f"samples per process: {counted(job.batch * job.replicas, 'sample')} per optimizer step",
    )
    yield Meaning(
        describe(MICRO), f"{counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} per process and optimizer step"
    )
    if not job.ppo:
        return
    over = job.collected - job[ROLLOUTS]
    yield Meaning(
        describe(ROLLOUTS),
        f"at least this many per process: {counted(job.collected, 'sample')} are collected"
        + (f", {over:,} more than requested" if over else "")
        + f", {job.collected * job.replicas:,} in total",
    )
    yield Meaning(
        describe(CHUNK),
        f"{counted(job.num_chunks, 'generate call')} of {counted(job.chunk, 'prompt')} per process"
        + (", rounded up to full batches" if job.chunk != job[CHUNK] else ""),
    )
    yield Meaning(
        describe(INNER),
        f"{counted(job.mini_batches, 'mini batch')} per pass over the samples, "
        f"{counted(job.mini_batches * job[INNER], 'optimizer step')} per round",
    )
    limit = "train.total_steps" if job.planned_steps == job["train.total_steps"] else "train.epochs"
    yield Meaning(
        f"{describe('train.epochs')}, {describe('train.total_steps')}",
        f"{counted(job.planned_steps, 'optimizer step')}: {limit} ends the run",
    )
    yield Meaning(
        "", f"an evaluation uses {counted(job.batch * job.replicas, 'prompt')}, unless there are fewer or separate ones"
    )


def flow(job: TrlxJob) -> Iterator[str]:
    """Yield the stages of a round of collecting and training."""
    step = (
        f"each optimizer step: {counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} on every process, gradients "
        f"summed, then one step over {counted(job.batch * job.replicas, 'sample')}"
    )
    if not job.ppo:
        yield "load the given samples, distributed over the processes"
        yield step
        return
    yield (
        f"each process generates {counted(job.num_chunks, 'chunk')} of {counted(job.chunk, 'prompt')}: "
        f"{counted(job.collected, 'sample')}"
    )
    yield "log-probabilities, values and rewards, chunk by chunk, while collecting"
    yield (
        f"train on the process's own samples, reshuffled for each pass: {counted(job.mini_batches, 'mini batch')}"
        + (f", the last of {counted(job.last_batch, 'sample')}" if job.last_batch < job.batch else "")
    )
    yield step
    yield (
        f"{counted(job[INNER], 'pass')} over the samples = {counted(job.mini_batches * job[INNER], 'optimizer step')}; the "
        "learning rate advances with each"
    )
    yield "the trained model generates the next round: there are no weights to send"


def advice(job: TrlxJob) -> Iterator[Advice]:
    """Yield the rules of the guides, each with what is true of this file."""
    yield Advice(
        "minibatch_size saves memory and does not change training",
        GUIDE,
        None,
        "the number of samples is the same, but gradients of the passes are summed, not averaged: they are "
        f"{job.passes:,} times as large here",
    )
    if not job.ppo:
        return
    yield Advice(
        "chunk_size divides num_rollouts",
        GUIDE,
        job[ROLLOUTS] % job[CHUNK] == 0,
        f"{job[ROLLOUTS]:,} requested, {job.collected:,} collected",
    )
    yield Advice(
        "batch_size divides num_rollouts",
        GUIDE,
        job.collected % job.batch == 0,
        f"the last of {counted(job.mini_batches, 'mini batch')} has {counted(job.last_batch, 'sample')}",
    )


def notes(job: TrlxJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    yield f"{TRAIN}, {MICRO}, {ROLLOUTS} and {CHUNK} are per process; this run has {counted(job.replicas, 'process')}."
    if job.passes > 1 and not job.nemo:
        yield (
            f"gradients are summed over the {job.passes:,} passes, not averaged: {job.passes:,} times those of one pass. "
            "Adam hides it; gradient clipping, epsilon and plain SGD do not."
        )
        ends = "each pass ends" if job["deepspeed"] else "(deepspeed=true) each pass would end"
        yield (
            f"under DeepSpeed {ends} in an optimizer step: {job.passes:,} optimizer steps of "
            f"{counted(job.micro * job.replicas, 'sample')} instead of one."
        )
    if job.nemo:
        yield from _nemo_notes(job)
    elif job.ppo:
        yield from _collection_notes(job)
    if job[MICRO] == 0:
        yield f"{MICRO}=0 is the same as null."
    if not job.ppo:
        yield f"{job.method.upper()} trains on given samples: num_rollouts, chunk_size and ppo_epochs have no effect."


def _collection_notes(job: TrlxJob) -> Iterator[str]:
    if job.collected != job[ROLLOUTS]:
        more = job.collected - job[ROLLOUTS]
        yield f"{more:,} more samples are collected than requested: full chunks, until there are enough."
    if job.last_batch < job.batch:
        yield (
            f"the last mini batch of each pass has {job.last_batch:,} of {job.batch:,} samples and the same weight as others."
        )
    num_prompts = job["num_prompts"]
    if num_prompts is None:
        yield "the size of the prompt set is unknown (give num_prompts=N): every chunk is assumed to be full."
    elif job.replicas == 1 and num_prompts % job[CHUNK]:
        yield (
            f"every pass over the {num_prompts:,} prompts ends with a chunk of {num_prompts % job[CHUNK]:,}, so later rounds "
            "may collect a different number of samples than the first, from which trlX computes the planned steps."
        )


def _nemo_notes(job: TrlxJob) -> Iterator[str]:
    devices = job.nodes * job.devices_per_node
    if devices % job.model_size:
        yield (f"{devices:,} devices do not divide by {job.model_size:,}: trlX counts {job.replicas:,} replicas, rounded down.")
    if not job.ppo:
        return
    if job.chunk != job[CHUNK]:
        yield f"{CHUNK}={job[CHUNK]:,} is rounded up to {job.chunk:,}, a multiple of {TRAIN}={job.batch:,}."
    trained = job.mini_batches * job[INNER]
    if trained * job.batch * job.replicas != job.train_samples:
        yield (
            f"the length of the run is planned with {job.train_samples:,} samples a round, but {trained:,} optimizer steps of "
            f"{job.batch * job.replicas:,} are made."
        )
    if job["num_prompts"] is not None:
        lost = job["num_prompts"] % job.replicas + job["num_prompts"] // job.replicas % job.chunk * job.replicas
        if lost:
            yield f"{counted(lost, 'prompt')} of {job['num_prompts']:,} fill no chunk and are dropped in each pass over them."
