"""A trlX file in words: what its sizes mean, how a round flows, what each size costs, and which advice is true of it."""

from __future__ import annotations

from rampup.dialects.rules import counted
from rampup.dialects.trlx.job import CHUNK, INNER, MICRO, ROLLOUTS, TRAIN, TrlxJob
from rampup.dialects.verdict import Advice, Meaning

GUIDE, DOCUMENTATION = "trlX's guide to batch sizes", "trlX's documentation"


def meanings(job: TrlxJob) -> tuple[Meaning, ...]:
    """Return what the file says and what it means."""
    said = job.settings.said
    batch = said(TRAIN) if TRAIN in job.settings.given else f"{TRAIN} = {job.batch:,} (default)"
    lines = [
        Meaning(
            says=f"{counted(job.replicas, 'data-parallel replica')} (NeMo)" if job.nemo else counted(job.replicas, "process"),
            means="each collects samples of its own and trains on them; gradients are averaged over them",
        ),
        Meaning(
            says=batch,
            means=f"samples per process: {counted(job.batch * job.replicas, 'sample')} per optimizer step",
        ),
        Meaning(
            says=said(MICRO),
            means=f"{counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} per process and optimizer step",
        ),
    ]
    if not job.ppo:
        return tuple(lines)
    over = job.collected - job[ROLLOUTS]
    lines += [
        Meaning(
            says=said(ROLLOUTS),
            means=f"at least this many per process: {counted(job.collected, 'sample')} are collected"
            + (f", {over:,} more than asked" if over else "")
            + f", {job.collected * job.replicas:,} in all",
        ),
        Meaning(
            says=said(CHUNK),
            means=f"{counted(job.num_chunks, 'generate call')} of {counted(job.chunk, 'prompt')} per process"
            + (", rounded up to whole batches" if job.chunk != job[CHUNK] else ""),
        ),
        Meaning(
            says=said(INNER),
            means=f"{counted(job.mini_batches, 'mini batch')} per pass over the samples, "
            f"{counted(job.mini_batches * job[INNER], 'optimizer step')} per round",
        ),
        Meaning(
            says=f"{said('train.epochs')}, {said('train.total_steps')}",
            means=f"{counted(job.planned_steps, 'optimizer step')}: {_limit(job)}",
        ),
        Meaning(says="", means=f"{counted(job.batch * job.replicas, 'prompt')} are evaluated unless there are fewer or others"),
    ]
    return tuple(lines)


def _limit(job: TrlxJob) -> str:
    return "train.total_steps ends the run" if job.planned_steps == job["train.total_steps"] else "train.epochs ends the run"


def flow(job: TrlxJob) -> tuple[str, ...]:
    """Return a round of collecting and training, stage by stage."""
    step = (
        f"each optimizer step: {counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} on every process, gradients "
        f"added up, then one step over {counted(job.batch * job.replicas, 'sample')}"
    )
    if not job.ppo:
        return ("load the given samples, shared out over the processes", step)
    return (
        f"each process generates {counted(job.num_chunks, 'chunk')} of {counted(job.chunk, 'prompt')}: "
        f"{counted(job.collected, 'sample')}",
        "log-probabilities, values and rewards, chunk by chunk, while collecting",
        f"train on the process's own samples, reshuffled for each pass: {counted(job.mini_batches, 'mini batch')}"
        + (f", the last of {counted(job.last_batch, 'sample')}" if job.last_batch < job.batch else ""),
        step,
        f"{counted(job[INNER], 'pass')} over the samples = {counted(job.mini_batches * job[INNER], 'optimizer step')}, and the "
        "learning rate advances with each",
        "the model that was trained generates the next round: there are no weights to send",
    )


def advice(job: TrlxJob) -> tuple[Advice, ...]:
    """Return the guides' rules, each with what is true of this file."""
    rules = [
        Advice(
            rule="minibatch_size divides batch_size",
            source=DOCUMENTATION,
            holds=job.batch % job.micro == 0,
            because=f"{job.batch:,} % {job.micro:,} = {job.batch % job.micro:,}",
        ),
        Advice(
            rule="minibatch_size saves memory and leaves training the same",
            source=GUIDE,
            holds=None,
            because="the number of samples is the same, but gradients of the passes are added up and not averaged: they are "
            f"{job.passes:,} times as large here",
        ),
    ]
    if not job.ppo:
        return tuple(rules)
    return (
        *rules,
        Advice(
            rule="chunk_size divides num_rollouts",
            source=GUIDE,
            holds=job[ROLLOUTS] % job[CHUNK] == 0,
            because=f"{job[ROLLOUTS]:,} asked for, {job.collected:,} collected",
        ),
        Advice(
            rule="batch_size divides num_rollouts",
            source=GUIDE,
            holds=job.collected % job.batch == 0,
            because=f"the last of {counted(job.mini_batches, 'mini batch')} has {counted(job.last_batch, 'sample')}",
        ),
    )


def notes(job: TrlxJob) -> tuple[str, ...]:
    """Return what is legal but surprising."""
    found = [f"{TRAIN}, {MICRO}, {ROLLOUTS} and {CHUNK} count for each process; {counted(job.replicas, 'process')} here."]
    if job.passes > 1 and not job.nemo:
        found.append(
            f"gradients are added up over the {job.passes:,} passes, not averaged: {job.passes:,} times those of one pass. "
            "Adam hides it; gradient clipping, epsilon and plain SGD do not."
        )
        found.append(_deepspeed(job))
    if job.nemo:
        found += _nemo_notes(job)
    elif job.ppo:
        found += _collecting(job)
    if job[MICRO] == 0:
        found.append(f"{MICRO}=0 is the same as null.")
    if not job.ppo:
        found.append(f"{job.method.upper()} trains on given samples: num_rollouts, chunk_size and ppo_epochs play no part.")
    return tuple(found)


def _deepspeed(job: TrlxJob) -> str:
    steps = f"{job.passes:,} optimizer steps of {counted(job.micro * job.replicas, 'sample')} instead of one"
    if job["deepspeed"]:
        return f"under DeepSpeed each pass ends in an optimizer step: {steps}."
    return f"under DeepSpeed (deepspeed=true) each pass would end in an optimizer step: {steps}."


def _collecting(job: TrlxJob) -> list[str]:
    found = []
    if job.collected != job[ROLLOUTS]:
        found.append(
            f"{job.collected - job[ROLLOUTS]:,} more samples are collected than asked for: whole chunks, until there are "
            "enough."
        )
    if job.last_batch < job.batch:
        found.append(
            f"the last mini batch of each pass has {job.last_batch:,} of {job.batch:,} samples and counts as much as the "
            "others."
        )
    num_prompts = job["num_prompts"]
    if num_prompts is None:
        found.append("the size of the prompt set is not given (num_prompts=N): every chunk is taken to be full.")
    elif job.replicas == 1 and num_prompts % job[CHUNK]:
        found.append(
            f"every reading of the {num_prompts:,} prompts ends in a chunk of {num_prompts % job[CHUNK]:,}, so later rounds "
            "may collect another number of samples than the first, which the planned steps are computed from."
        )
    return found


def _nemo_notes(job: TrlxJob) -> list[str]:
    found = []
    devices = job.nemo_size("num_nodes") * job.nemo_size("devices")
    split = job.nemo_size("tensor") * job.nemo_size("pipeline")
    if devices % split:
        found.append(f"{devices:,} devices are no multiple of {split:,}: trlX counts {job.replicas:,} replicas, rounded down.")
    if job.ppo and job.chunk != job[CHUNK]:
        found.append(f"{CHUNK}={job[CHUNK]:,} is rounded up to {job.chunk:,}, a multiple of {TRAIN}={job.batch:,}.")
    trained = job.mini_batches * job[INNER] if job.ppo else 0
    if job.ppo and trained * job.batch * job.replicas != job.train_samples:
        found.append(
            f"the length of the run is planned with {job.train_samples:,} samples a round, but {trained:,} optimizer steps of "
            f"{job.batch * job.replicas:,} are made."
        )
    if job.ppo and job["num_prompts"] is not None:
        lost = job["num_prompts"] % job.replicas + job["num_prompts"] // job.replicas % job.chunk * job.replicas
        if lost:
            found.append(f"{counted(lost, 'prompt')} of {job['num_prompts']:,} fill no chunk and are dropped at each reading.")
    return found
