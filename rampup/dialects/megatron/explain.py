"""Megatron's arguments in words: what each means, how a step runs, what surprises, and what the documentation advises."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rampup.dialects.megatron import DECREASE, GLOBAL, MICRO, MODEL_AXES, PARTITION, RAMP, SCHEDULE, VERSION, VIRTUAL
from rampup.dialects.megatron.job import LinearRamp, MegatronJob
from rampup.dialects.verdict import Advice, Words, counted
from rampup.plan.ramp import BatchRamp

MAX_LISTED = 12


def meanings(job: MegatronJob) -> Iterator[tuple[str, str]]:
    """Yield each argument with its meaning."""
    if job.micro:
        yield (MICRO, f"{counted(job.micro, 'sample')} per replica and forward pass")
    yield (
        f"tensor * pipeline * context = {' * '.join(str(job[axis]) for axis in MODEL_AXES)}",
        f"{counted(job.model_parallel, 'device')} per replica, {counted(job.replicas, 'replica')}",
    )
    if job.ramp is not None:
        final = job.ramp.sizes[-1]
        passes = f", {counted(final // job.unit, 'microbatch')} per replica" if job.splits else ""
        yield (GLOBAL, f"{counted(final, 'sample')} per optimizer step after any ramp{passes}")
        if job.has_ramp:
            yield (
                SCHEDULE if job.has_schedule else RAMP,
                f"{counted(len(job.ramp.phases), 'phase')} from {job.ramp.sizes[0]:,} to {final:,} samples, complete after "
                f"{counted(job.ramp.ramp_steps, 'step')} and {job.ramp.ramp_samples:,} samples",
            )
    if job.chunks > 1:
        yield (VIRTUAL, f"{job.chunks:,} layer chunks on each of {job.stages:,} stages, {job.group:,} microbatches in a row")


def flow(job: MegatronJob) -> Iterator[str]:
    """Yield the stages of one optimizer step after any ramp."""
    if job.ramp is None or not job.splits:
        return
    final = job.ramp.sizes[-1]
    through = f" through {job.stages:,} pipeline stages" if job.stages > 1 else ""
    count = counted(final // job.unit, "microbatch")
    if job.replicas > 1:
        yield f"each of {job.replicas:,} replicas reads {final // job.replicas:,} of the {counted(final, 'sample')}"
        yield f"and runs them as {count} of {job.micro:,}{through}, accumulating gradients"
        yield f"one gradient reduction over {job.replicas:,} replicas"
    else:
        yield f"the only replica reads the {counted(final, 'sample')} and runs them as {count} of {job.micro:,}{through}"
    yield "one optimizer step"


def advice(job: MegatronJob) -> Iterator[Advice]:
    """Yield the advice of Megatron's documentation, and whether this file follows it."""
    if job.stages > 1 and job.num_microbatches is not None:
        least = min(job.num_microbatches)
        yield Advice(
            "many more microbatches than pipeline stages keep the bubble small",
            "Narayanan et al. 2021, section 2.2",
            least >= 4 * job.stages,
            f"the smallest phase has {counted(least, 'microbatch')} for {job.stages:,} stages",
        )


def notes(job: MegatronJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    if job.has_schedule:
        yield from _schedule_notes(job)
    elif job.linear is not None and job.ramp is not None:
        yield from _linear_notes(job.linear, job.ramp)
    elif job[DECREASE] and job.ramp is not None and job.ramp.sizes[-1] != job.final:
        yield f"{DECREASE}: {GLOBAL}={job.final:,} runs as {job.ramp.sizes[-1]:,}, a multiple of {job.unit:,}"
    yield from _version_notes(job)
    counts = job.layers.layer_counts
    if job.stages > 1 and job.layers.by_deepspeed and job.layers.num_layers is not None:
        slots = job.layers.num_layers + 2 * ("embedding" in (job[PARTITION] or ""))
        uneven = "" if slots % job.stages == 0 else f"; some of the {job.stages:,} stages have one more than others"
        yield f"DeepSpeed balances {slots:,} layers ({job[PARTITION] or 'type:transformer'}) over the stages{uneven}"
    elif counts is not None and len(set(counts)) > 1:
        shown = ", ".join(f"{len(list(same)):,} x {count:,}" for count, same in itertools.groupby(counts))
        yield f"stages have different numbers of layers, in their order: {shown}; the bubble is computed for equal ones"
    if job.chunks > 1 and job.stages == 1:
        yield "there is one pipeline stage: its layer chunks change nothing"
    is_nemo = bool(job.settings.given & {"num_nodes", "devices"})
    if is_nemo and job.ramp is not None and len(job.ramp.phases) > 1:
        yield "NeMo 2 ends the job at every change of the batch, to be restarted with the devices for the next"
    if job.num_microbatches is not None and job.stages > 1 and min(job.num_microbatches) < job.stages:
        count = counted(min(job.num_microbatches), "microbatch")
        yield f"with {count} the {job.stages} pipeline stages are never all busy; it runs"


def _version_notes(job: MegatronJob) -> Iterator[str]:
    """Yield which version the report speaks for, if a linear ramp depends on it, and what the other one does."""
    if job[RAMP] is None:
        return
    if job.has_schedule:
        yield f"{RAMP} is ignored: versions that know {SCHEDULE} only print a warning"
    elif job.has_linear and not job.layers.by_deepspeed and not job.settings.given & {"num_nodes", "devices"}:
        yield (
            f"this is what {RAMP} does in Megatron-LM until April 2026 and megatron-core up to 0.16; since then it has no "
            f"effect without {SCHEDULE}, and the batch is {job.final:,} from the first step ({VERSION}=head)"
        )
    elif not job.has_linear:
        yield (
            f"{RAMP} has no effect in Megatron-LM since April 2026, which only prints a warning: the batch is {job.final:,} "
            f"from the first step. Give {SCHEDULE} instead, or {VERSION}=legacy for older versions"
        )


def _linear_notes(linear: LinearRamp, ramp: BatchRamp) -> Iterator[str]:
    if linear.unit > 1:
        yield f"{DECREASE}: every batch is rounded down to a multiple of {linear.unit:,}: {_listed(ramp.sizes)}"
    for phase, row in zip(ramp.phases, linear.as_run(), strict=False):
        if (phase.start_step, phase.global_batch_size, phase.start_sample) != row:
            yield (
                f"exact arithmetic changes to {phase.global_batch_size:,} at step {phase.start_step:,} (sample "
                f"{phase.start_sample:,}); Megatron's floating-point division has {row[1]:,} from step {row[0]:,} (sample "
                f"{row[2]:,}); later phases may differ too"
            )
            break
    skipped = linear.num_increments + 1 - len(ramp.phases)
    if skipped and linear.unit == 1:
        yield f"{skipped:,} of the {linear.num_increments + 1:,} sizes are skipped by one large step and never run"
    yield "at every change Megatron saves a checkpoint; the learning rate follows samples and is not scaled with the batch"


def _schedule_notes(job: MegatronJob) -> Iterator[str]:
    kept = [entry.text for entry in job.thresholds]
    if not job.unreadable and job.written_entries != kept:
        yield f"{SCHEDULE} is in the wrong order; Megatron sorts it, as was done here: {_listed(kept)}"
    if job["seq_length"] is None:
        yield "thresholds are taken as samples; from its command line Megatron always takes them as tokens (give seq_length=N)"
    for entry in job.thresholds:
        threshold, _, size = entry.text.partition(":")
        if entry.samples != entry.as_run:
            yield (
                f"threshold {threshold} is {entry.samples:,} samples exactly and {entry.as_run:,} in Megatron's floating-point "
                "product"
            )
        if "." in size and not size.upper().endswith(("K", "M", "B", "T")):
            yield f"{entry.text}: the size is silently truncated to {entry.size}"
    if job.ramp is not None:
        skipped = len({entry.size for entry in job.thresholds}) - len(set(job.ramp.sizes))
        if skipped > 0:
            yield f"{skipped:,} sizes are skipped by one large step and never run"
        yield "evaluation uses one micro batch per replica unless eval_global_batch_size is given"


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values[:MAX_LISTED])
    return shown + (", ..." if len(values) > MAX_LISTED else "")


WORDS = Words(meanings, flow, notes, advice)
