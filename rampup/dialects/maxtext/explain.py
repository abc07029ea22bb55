"""MaxText's base.yml in words: what each size means, how a step runs, what surprises, and what the comments advise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from rampup.dialects.maxtext import (
    ACCUMULATION,
    END,
    EVAL,
    EXPANSION,
    GRAD_DTYPE,
    INCREMENT,
    LAYERS,
    MICROBATCHES,
    REPEATS,
    SAMPLES,
    SHARD_OPTIMIZER,
    START,
    TUNIX,
)
from rampup.dialects.maxtext.job import MaxTextJob
from rampup.dialects.rules import broken_rules
from rampup.dialects.verdict import Advice, Words, counted
from rampup.errors import RampupError
from rampup.plan.numbers import AUTO, to_yaml_number

BASE_YML = "MaxText, comments of base.yml"
MAX_LISTED_PHASES = 12


def show(value: Any) -> str:
    """Return a size as text: a whole number with commas, a fraction as a decimal if it is one."""
    return str(to_yaml_number(value)) if isinstance(value, Fraction) else f"{value:,}"


def product_text(job: MaxTextJob, key: str) -> str:
    """Return the arithmetic from a size per device to a global batch size."""
    return f"num_devices * {key} = {job.num_devices} * {show(job[key])} = {show(job.num_devices * job[key])}"


def meanings(job: MaxTextJob) -> Iterator[tuple[str, str]]:
    """Yield each setting of the file with its meaning."""
    sizes = job.sizes
    yield (
        END,
        f"{counted(sizes.micro, 'sample')} per forward pass over {counted(job.num_devices, 'device')}; "
        f"{sizes.micro * job['max_target_length']:,} tokens",
    )
    passes = counted(job[ACCUMULATION], "pass")
    yield (ACCUMULATION, f"{passes}, so {counted(sizes.to_train, 'sample')} per optimizer step")
    yield (EXPANSION, f"{counted(sizes.to_load, 'row')} to load per step")
    evaluates = job["eval_interval"] > 0
    yield (EVAL, f"{counted(job.eval_sizes.to_train, 'sample')} per evaluation batch" if evaluates else "no evaluation")
    yield ("", f"the batch is sharded over {counted(job.axes.data_parallel_size, 'replica')} (data * fsdp)")
    if job.ramps:
        for key, what in ((START, "in the first phase"), (INCREMENT, "more in each phase")):
            yield (key, f"{counted(job.global_size(key), 'sample')} {what}, without accumulation")
        yield (SAMPLES, "samples requested for the whole ramp, shared equally by its phases")
    if job.is_piped and job.microbatches > 0:
        yield (
            MICROBATCHES,
            f"{counted(job.microbatches, 'microbatch')} of {counted(sizes.micro // job.microbatches, 'sample')} through "
            f"{job.stages:,} stages, {counted(job.repeats, 'repeat')}",
        )


def flow(job: MaxTextJob) -> Iterator[str]:
    """Yield the stages of one optimizer step after the ramp."""
    sizes = job.sizes
    rows, shards = counted(sizes.to_load, "row"), counted(job.loading_shards, "device")
    yield f"load {rows} of {job['max_target_length']:,} tokens, sharded over {shards}"
    yield f"take {sizes.micro:,} of them in each of {counted(job[ACCUMULATION], 'pass')}, one after the other"
    if job.is_piped and job.microbatches > 0:
        yield (
            f"split a pass into {counted(job.microbatches, 'microbatch')} and send them through {job.stages:,} pipeline stages "
            f"({counted(job.repeats, 'repeat')})"
        )
    replicas = counted(job.axes.data_parallel_size, "replica")
    yield f"sum the gradients of {counted(sizes.to_train, 'sample')} over {replicas}"
    yield "one optimizer step"


def advice(job: MaxTextJob) -> Iterator[Advice]:
    """Yield the advice of MaxText's documentation, and whether this file follows it."""
    if job.is_piped:
        yield Advice(
            "more pipeline microbatches, a smaller bubble",
            BASE_YML,
            job[MICROBATCHES] != AUTO and job.microbatches > job.stages,
            f"{job.microbatches} microbatches for {job.stages} stages; the automatic value is the minimum, with the largest "
            "bubble",
        )
    if job["eval_interval"] > 0:
        yield Advice(
            "set eval_steps, so that evaluation does not run out of data",
            BASE_YML,
            bool(job["eval_steps"] > 0),
            f"eval_steps={job['eval_steps']}",
        )


def notes(job: MaxTextJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    yield from _size_notes(job)
    yield from _gradient_notes(job)
    if job.manager is not None and job.manager.ends:
        yield from _ramp_notes(job, job.manager.phases())
    yield from _pipeline_notes(job)
    if isinstance(job.planned, RampupError):
        from rampup.dialects.maxtext.rules import RULES  # which imports this module

        if not broken_rules(RULES, job):
            refusals = "; ".join(str(problem) for problem in job.planned.problems or (job.planned,))
            yield f"rampup itself would refuse this file: {refusals}"


def _size_notes(job: MaxTextJob) -> Iterator[str]:
    sizes, expansion = job.sizes, job[EXPANSION]
    if job.dropped_per_step and sizes.micro >= 1:
        yield (
            f"{END}={show(job[END])} is below 1: a full sample per device is loaded, {sizes.to_load:,} rows per step, and "
            f"{sizes.to_train:,} of them are trained on; {job.dropped_per_step:,} are dropped"
        )
    for key in (START, INCREMENT, END) if job.ramps else (END,):
        exact, truncated = Fraction(job.num_devices) * job[key], job.global_size(key)
        if exact != truncated:
            yield f"{product_text(job, key)} is truncated to {truncated}, in floating point; rampup reports an error"
    if 0 < expansion < 1:
        yield (
            f"{EXPANSION}={show(expansion)}: the loaders of {int(1 / expansion)} times as many hosts take turns, and each step "
            f"gets the {sizes.to_load:,} rows of one of them, while global_batch_size_to_train_on is {sizes.to_train:,}"
        )
    elif expansion > 1:
        yield (
            f"{EXPANSION}={show(expansion)}: 1 of {show(expansion)} hosts loads, for itself and the others; "
            f"global_batch_size_to_load={sizes.to_load:,} counts the rows that they would load together if all did"
        )


def _gradient_notes(job: MaxTextJob) -> Iterator[str]:
    """Yield what changes the gradient that a batch gives."""
    passes = job[ACCUMULATION]
    if job[SHARD_OPTIMIZER] and passes > 1:
        yield (
            f"{SHARD_OPTIMIZER} casts float32 parameters to bfloat16 before the accumulation passes, so the gradients of the "
            f"{passes:,} passes are summed in bfloat16, which keeps 8 bits of each sum; rampup sums in float32"
        )
    if job[TUNIX] and passes > 1:
        yield (
            f"{TUNIX} divides the loss of each of the {passes:,} passes by its own tokens and averages them: a pass with few "
            "tokens counts as much as a full one; otherwise the sum over all passes is divided by all tokens"
        )
    if job[GRAD_DTYPE] != "float32":
        yield f"{GRAD_DTYPE}={job[GRAD_DTYPE]}: gradients are rounded to it after the passes are summed, before clipping"


def _ramp_notes(job: MaxTextJob, phases: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    *ramp, (steps, _, trained) = phases
    samples = job[SAMPLES]
    if job[ACCUMULATION] > 1:
        shown = ", ".join(f"{size:,}" for _, size, _ in ramp[:MAX_LISTED_PHASES])
        shown += ", ..." if len(ramp) > MAX_LISTED_PHASES else ""
        yield (
            f"MaxText's ramp ignores {ACCUMULATION}={job[ACCUMULATION]}: in the ramp its batches are {shown} ({trained:,} "
            f"samples in {steps:,} steps), then the batch jumps from {ramp[-1][1]:,} to {job.sizes.to_train:,}; the phases "
            "here include the factor in every batch"
        )
    if samples < 1:
        yield f"{SAMPLES}={samples:,} is below 1: every phase lasts one step"
    elif trained != samples:
        yield (
            f"the ramp takes {trained:,} samples in {steps:,} steps, but {SAMPLES} requests {samples:,} "
            f"({trained / samples - 1:+.1%}): samples beyond a phase's share do not count towards the next"
        )
    if lost := job.lost_at_ramp_end:
        yield (
            f"at the end of the ramp {lost:,} loaded rows are never trained on: the buffer of {job.sizes.to_load:,} rows "
            f"is dropped with the ramp ({trained:,} trained, {trained + lost:,} loaded)"
        )
    yield (
        f"a resume within the ramp loses up to {max(job.sizes.to_load - 1, 0):,} buffered rows, which no checkpoint contains, "
        "and is one batch behind: a checkpoint labelled s contains s + 1 batches and s are replayed"
    )
    if job.config_ramp_end != steps:
        yield (
            f"the configuration expects the ramp to end at step {job.config_ramp_end:,} (rampup_end_step, from loaded rows: "
            f"sizes below 1 rounded up, accumulation included), the manager at step {steps:,}; throughput metrics use the first"
        )
    yield f"each of the {len(phases):,} batch sizes is compiled at its first step; only the final one is lowered at the start"


def _pipeline_notes(job: MaxTextJob) -> Iterator[str]:
    if not job.is_piped:
        ignored = [key for key in (MICROBATCHES, REPEATS, LAYERS) if job[key] != AUTO]
        if ignored:
            yield f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored: there is one pipeline stage"
        return
    if job.microbatches > 0 and job.sizes.micro % (job.microbatches * job.axes.data_parallel_size):
        yield (
            f"a pipeline microbatch of {job.sizes.micro // job.microbatches} samples does not divide over data * fsdp = "
            f"{job.axes.data_parallel_size}: MaxText does not check it, and devices share or pad samples"
        )
    if job["model_name"] != "default" and LAYERS not in job.settings.given:
        yield (
            f"model_name={job['model_name']} has its own number of layers; {job.layers} from base_num_decoder_layers "
            "was used here, so give base_num_decoder_layers=N if the model has another"
        )
    if job[ACCUMULATION] > 1:
        yield (
            f"each of the {job[ACCUMULATION]} accumulation passes waits for the pipeline to fill; the same microbatches in one "
            "pass would wait once"
        )


WORDS = Words(meanings, flow, notes, advice)
