"""Megatron's batches: their meaning, what surprises, and the rules of its arguments, of its two ramps and of its pipeline.

The run finds many of them only when the step of a phase comes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from rampup.dialects import megatron as keys
from rampup.dialects.megatron import DECREASE, GLOBAL, GROUP, MICRO, MODEL_AXES, OVERLAP, RAMP, SCHEDULE, STAGES, VIRTUAL
from rampup.dialects.megatron.job import LinearRamp, MegatronJob, Threshold
from rampup.dialects.rules import Dialect, Rule, Side, around, at_least, equal, multiple
from rampup.dialects.verdict import Advice, Term, Words, counted
from rampup.plan.ramp import BatchRamp

MAX_LISTED = 12


def _meanings(job: MegatronJob) -> Iterator[tuple[str, str]]:
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


def _flow(job: MegatronJob) -> Iterator[str]:
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


def _advice(job: MegatronJob) -> Iterator[Advice]:
    if job.stages > 1 and job.num_microbatches is not None:
        least = min(job.num_microbatches)
        yield Advice("many more microbatches than pipeline stages keep the bubble small",
            "Narayanan et al. 2021, section 2.2", least >= 4 * job.stages,
            f"the smallest phase has {counted(least, 'microbatch')} for {job.stages:,} stages")  # fmt: skip


def _notes(job: MegatronJob) -> Iterator[str]:
    if job.has_schedule:
        yield from _schedule_notes(job)
    elif job.linear is not None and job.ramp is not None:
        yield from _linear_notes(job.linear, job.ramp)
    elif job[DECREASE] and job.ramp is not None and job.ramp.sizes[-1] != job.final:
        yield f"{DECREASE}: {GLOBAL}={job.final:,} runs as {job.ramp.sizes[-1]:,}, a multiple of {job.unit:,}"
    yield from _version_notes(job)
    counts = job.layers.layer_counts
    if job.stages > 1 and job.layers.by_deepspeed and job.layers.num_layers is not None:
        slots = job.layers.num_layers + 2 * ("embedding" in (job[keys.PARTITION] or ""))
        uneven = "" if slots % job.stages == 0 else f"; some of the {job.stages:,} stages have one more than others"
        yield f"DeepSpeed balances {slots:,} layers ({job[keys.PARTITION] or 'type:transformer'}) over the stages{uneven}"
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
            f"effect without {SCHEDULE}, and the batch is {job.final:,} from the first step ({keys.VERSION}=head)"
        )
    elif not job.has_linear:
        yield (
            f"{RAMP} has no effect in Megatron-LM since April 2026, which only prints a warning: the batch is {job.final:,} "
            f"from the first step. Give {SCHEDULE} instead, or {keys.VERSION}=legacy for older versions"
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


MANY_SIZES = 2_000
_ROUNDS_TO_0 = f"; {DECREASE} rounds it down to 0 microbatches"
Rules = list[Rule[MegatronJob]]


def _unit(job: MegatronJob) -> Term:
    return Term(f"{MICRO} * data_parallel_size = {job.micro} * {job.replicas} = {job.unit}", job.unit)


_FINAL: Side[MegatronJob] = (f"{GLOBAL}={{:,}}", lambda job: job.final)


ARGUMENTS: Rules = [
    Rule(name="megatron.micro_batch_positive", keys=(MICRO,), holds=lambda job: job.micro >= 1,
        message=lambda job: f"{MICRO} must be set" if job[MICRO] is None else f"{MICRO}={job[MICRO]} must be at least 1"),
    at_least("megatron.global_batch_positive", (GLOBAL,), GLOBAL, 1, when=lambda job: job[GLOBAL] is not None),
    multiple("megatron.world_divisible", ("world_size", *keys.MODEL_AXES),
        lambda job: Term(f"the world size {job.world}", job.world or 0),
        lambda job: Term(
            f"tensor * pipeline * context parallel sizes = {' * '.join(str(job[axis]) for axis in keys.MODEL_AXES)} = "
            f"{job.model_parallel}",
            job.model_parallel),
        when=lambda job: job.world is not None),
    multiple("megatron.batch_divisible", (GLOBAL, MICRO), _FINAL, _unit,
        when=lambda job: not job.has_ramp and not job[DECREASE]),
    at_least("megatron.decreased_to_nothing", (GLOBAL, MICRO), _FINAL, _unit,
        when=lambda job: not job.has_ramp and job[DECREASE] and job.unit >= 1 and job.final >= 1,
        note=_ROUNDS_TO_0),
    multiple("megatron.eval_batch_divisible", (keys.EVAL_GLOBAL, keys.EVAL_MICRO), keys.EVAL_GLOBAL,
        lambda job: Term(
            f"the evaluation's micro batch * data_parallel_size = {job.eval_unit // job.replicas} * {job.replicas} = "
            f"{job.eval_unit}",
            job.eval_unit),
        when=lambda job: job[keys.EVAL_GLOBAL] is not None),
]  # fmt: skip


# The linear ramp: start, increment and samples.


def _is_ordered(job: MegatronJob) -> bool:
    """Return whether start, increment and samples are numbers that the rules about their relation can use."""
    return job.start > 0 and job.increment > 0 and job.ramp_samples >= 0


def _triples(job: MegatronJob) -> Iterator[str]:
    """Yield triples near the given one: start and increment at multiples of the unit, an increment that divides the growth."""
    if job.triple is None or len(job.triple) != 3 or len(job.sizes) > MANY_SIZES:
        return
    start, increment, samples, unit = *job.triple, max(job.unit, 1)
    starts = [int(n) for n in around(start, unit)[:16] if 0 < n < job.final]
    found = [(s, i) for s in starts for n in around(increment, unit)[:64] if (i := int(n)) > 0 and (job.final - s) % i == 0]
    for s, i in sorted(found, key=lambda pair: abs(pair[0] - start) + abs(pair[1] - increment)):
        yield f"{s} {i} {max(samples, 1)}"


def _first_uneven_phase(job: MegatronJob) -> str:
    assert job.ramp is not None
    phase = next(phase for phase in job.ramp.phases if phase.global_batch_size % job.unit)
    return (
        f"the batch of {phase.global_batch_size:,} from step {phase.start_step:,} (sample {phase.start_sample:,}) must be a "
        f"multiple of {_unit(job).text}"
    )


LINEAR: Rules = [
    Rule(name="megatron.ramp_is_a_triple", keys=(RAMP,), when=lambda job: job.triple is not None,
        holds=lambda job: len(job.triple or ()) == 3,
        message=lambda job: f"{RAMP}={job[RAMP]!r:.80} must be three whole numbers: start, increment and samples"),
    Rule(name="megatron.ramp_numbers_positive", keys=(RAMP,), when=lambda job: len(job.triple or ()) == 3, holds=_is_ordered,
        message=lambda job: f"{RAMP}={job[RAMP]}: start and increment must be at least 1, samples at least 0",
        candidates=_triples),
    at_least("megatron.ramp_grows", (GLOBAL, RAMP), _FINAL, ("the ramp's start {:,}", lambda job: job.start),
        when=_is_ordered,
        candidates=lambda job: [int(n) for n in around(job.final, job.increment, origin=job.start) if n >= 1]),
    multiple("megatron.ramp_increment_divides", (GLOBAL, RAMP),
        lambda job: Term(
            f"{GLOBAL} - start = {job.final:,} - {job.start:,} = {job.final - job.start:,}", job.final - job.start),
        ("the ramp's increment {:,}", lambda job: job.increment),
        when=lambda job: _is_ordered(job) and job.final >= job.start),
    Rule(name="megatron.ramp_counts_samples", keys=("train_iters", RAMP), when=lambda job: job.triple is not None,
        holds=lambda job: job["train_iters"] is None,
        message=lambda job: (
            f"a linear ramp needs a run counted in samples; give train_samples instead of train_iters={job['train_iters']:,}"
        )),
    Rule(name="megatron.ramp_divides_by_zero", keys=(RAMP, GLOBAL), when=_is_ordered,
        holds=lambda job: job.final != job.start and job.ramp_samples > 0,
        message=lambda job: (
            f"{RAMP}={job[RAMP]} to {GLOBAL}={job.final:,}: a ramp without increments or samples divides by zero; leave it out"
        ),
        candidates=_triples, found_by="run"),
    at_least("megatron.ramp_decreased_to_nothing", (RAMP, MICRO), ("the ramp's start {:,}", lambda job: job.start), _unit,
        when=lambda job: _is_ordered(job) and job[DECREASE] and job.unit >= 1, note=_ROUNDS_TO_0, candidates=_triples,
        found_by="run"),
    Rule(name="megatron.ramp_phases_divisible", keys=(RAMP, MICRO), when=lambda job: job.linear is not None and job.unit >= 1,
        holds=lambda job: job.splits,
        message=lambda job: f"{_first_uneven_phase(job)}; Megatron checks each batch only when its step comes",
        candidates=_triples, found_by="run"),
]  # fmt: skip


# The schedule in steps: THRESHOLD:SIZE entries.


def _shrinking(job: MegatronJob) -> list[tuple[Threshold, Threshold]]:
    return [(a, b) for a, b in itertools.pairwise(job.thresholds) if b.size < a.size]


def _with_first_threshold_0(job: MegatronJob) -> Iterator[str]:
    if job.thresholds and not job.unreadable:
        first, *rest = job.thresholds
        yield " ".join([f"0:{first.size}", *(entry.text for entry in rest)])


def _with_rounded_sizes(job: MegatronJob) -> Iterator[str]:
    """Yield the schedule with each size rounded to the unit, down and then up."""
    if not job.schedule_valid or job.unit < 1:
        return
    for extra in (0, job.unit - 1):
        sizes = [max((entry.size + extra) // job.unit * job.unit, job.unit) for entry in job.thresholds]
        pairs = zip(job.thresholds, sizes, strict=True)
        yield " ".join(f"{entry.text.partition(':')[0]}:{size}" for entry, size in pairs)


STEPS: Rules = [
    Rule(name="megatron.schedule_excludes_global_batch", keys=(GLOBAL, SCHEDULE), when=lambda job: job.has_schedule,
        holds=lambda job: job[GLOBAL] is None,
        message=lambda job: f"{GLOBAL}={job[GLOBAL]} must not be given with {SCHEDULE}, whose last size it would contradict"),
    Rule(name="megatron.schedule_excludes_decrease", keys=(DECREASE, SCHEDULE), when=lambda job: job.has_schedule,
        holds=lambda job: not job[DECREASE], message=lambda _: f"{DECREASE} must not be given with {SCHEDULE}",
        candidates=lambda _: (False,)),
    Rule(name="megatron.schedule_entries", keys=(SCHEDULE,), when=lambda job: job.has_schedule,
        holds=lambda job: bool(job.thresholds) and not job.unreadable,
        message=lambda job: (
            f"{SCHEDULE}: {', '.join(repr(text[:40]) for text in job.unreadable[:5]) or 'nothing'} is not THRESHOLD:SIZE; "
            "spaces and commas separate entries (1_000 or 1K, not 1,000), suffixes are K, M, B, T")),
    Rule(name="megatron.schedule_starts_at_0", keys=(SCHEDULE,), when=lambda job: bool(job.thresholds),
        holds=lambda job: job.thresholds[0].samples == 0,
        message=lambda job: f"{SCHEDULE}: the first threshold must be 0, it is {job.thresholds[0].samples:,} samples",
        candidates=_with_first_threshold_0),
    Rule(name="megatron.schedule_thresholds_increase", keys=(SCHEDULE,), when=lambda job: not job.unreadable,
        holds=lambda job: not job.not_rising,
        message=lambda job: (
            f"{SCHEDULE}: thresholds must increase, but {job.not_rising[0][0].text} and {job.not_rising[0][1].text} are both "
            f"at {job.not_rising[0][1].samples:,} samples")),
    Rule(name="megatron.schedule_sizes_positive", keys=(SCHEDULE,),
        holds=lambda job: all(entry.size > 0 for entry in job.thresholds),
        message=lambda job: (
            f"{SCHEDULE}: every size must be at least 1, unlike {min(job.thresholds, key=lambda entry: entry.size).text}"
        )),
    Rule(name="megatron.schedule_grows", keys=(SCHEDULE,), when=lambda job: job.schedule_valid,
        holds=lambda job: not _shrinking(job),
        message=lambda job: (
            f"{SCHEDULE}: the batch shrinks from {_shrinking(job)[0][0].size:,} to {_shrinking(job)[0][1].size:,} at "
            f"{_shrinking(job)[0][1].samples:,} samples; the schedule is read, but the trainer stops there"),
        found_by="run"),
    Rule(name="megatron.schedule_phases_divisible", keys=(SCHEDULE, MICRO),
        when=lambda job: job.schedule_valid and job.unit >= 1, holds=lambda job: job.splits,
        message=lambda job: (
            f"{SCHEDULE}: {', '.join(str(size) for size in job.sizes if size % job.unit)} must be multiples of "
            f"{_unit(job).text}; Megatron checks each batch only when its step comes"),
        candidates=_with_rounded_sizes, found_by="run"),
]  # fmt: skip


# The pipeline and its interleaved schedule.


def _divides_layers(job: MegatronJob) -> bool:
    return job.layers.is_even and not _clashing(job)


def _needs_middle(job: MegatronJob) -> bool:
    return _divides_layers(job) and bool(job.layers.ends) and job.layers.middle_stages.number > 0


def _clashing(job: MegatronJob) -> list[str]:
    """Return the given keys of which Megatron takes only one kind."""
    kinds = [
        [key for key in keys.ENDS if job[key] is not None],
        [key for key in keys.EXTRAS if job[key]],
        [keys.LAYOUT] if job[keys.LAYOUT] is not None else [],
    ]
    given = [kind[0] for kind in kinds if kind]
    if job[keys.PER_CHUNK] is not None and job[VIRTUAL] is None and kinds[0] + kinds[2]:
        return [keys.PER_CHUNK, *given]
    return given if len(given) > 1 else []


def _over_chunks(part: str) -> Rule[MegatronJob]:
    """Return the rule that the layers of the first, the last or another stage divide over its chunks."""
    by_size = part not in keys.ENDS  # only an even split may be given as the layers of a chunk

    def chunks(job: MegatronJob) -> Term:
        key = VIRTUAL if job[VIRTUAL] is not None or not by_size else keys.PER_CHUNK
        return Term(f"{key}={job[key]}", max(int(job[key] or 1), 1))

    def share(job: MegatronJob) -> Term:
        number, middle, stages = job.layers.shares[part], job.layers.middle, job.layers.middle_stages
        return Term(f"({middle.text}) / ({stages.text}) = {number} layers" if by_size else f"{part}={number}", number)

    return multiple(
        "megatron.layers_over_chunks" if by_size else f"megatron.{part.removesuffix('_num_layers')}_over_chunks",
        (keys.LAYERS, VIRTUAL, keys.PER_CHUNK) if by_size else (part, VIRTUAL),
        share,
        chunks,
        when=lambda job: (
            _divides_layers(job)
            and part in job.layers.shares
            and (job.layers.middle_stages.number < 1 or job.layers.middle.number % job.layers.middle_stages.number == 0)
        ),
    )


def _letters(job: MegatronJob) -> str:
    return "".join(job.layers.layout or ())


def _failing_phases(job: MegatronJob, fits: Callable[[MegatronJob, int], bool]) -> list[str]:
    """Return the phases whose number of microbatches does not satisfy a condition."""
    if job.ramp is None or job.num_microbatches is None:
        return []
    return [
        f"{number} microbatches from step {phase.start_step:,} (batch {phase.global_batch_size:,} / {job.unit})"
        for phase, number in zip(job.ramp.phases, job.num_microbatches, strict=True)
        if not fits(job, number)
    ]


def _fills_a_group(job: MegatronJob, count: int) -> bool:
    return job.stages <= job.group <= count


def _fills_all_groups(job: MegatronJob, count: int) -> bool:
    return count < job.group or count % job.group == 0 or count % job.group >= job.stages


def _group_division(job: MegatronJob) -> tuple[int, int]:
    return (job.final, max(job.unit, 1) * max(job.group, 1))


PIPELINE: Rules = [
    at_least("megatron.chunks_positive", (VIRTUAL,), VIRTUAL, 1, when=lambda job: job[VIRTUAL] is not None),
    at_least("megatron.chunks_need_stages", (STAGES, VIRTUAL, OVERLAP), STAGES, ("{:,}", lambda job: 2 if job[OVERLAP] else 3),
        when=lambda job: job.chunks > 1,
        note=lambda job: f" for {job.chunks} chunks per stage{'' if job[OVERLAP] else f' without {OVERLAP}'}"),
    Rule(name="megatron.one_kind_of_split", keys=(*keys.ENDS, *keys.EXTRAS, keys.LAYOUT, keys.PER_CHUNK),
        holds=lambda job: not _clashing(job),
        message=lambda job: f"{' and '.join(_clashing(job))} must not be given together: each splits layers over stages"),
    multiple("megatron.layers_over_stages", (keys.LAYERS, STAGES), lambda job: job.layers.middle,
        lambda job: job.layers.middle_stages, when=_divides_layers),
    equal("megatron.ends_hold_all_layers", (keys.LAYERS, *keys.ENDS), lambda job: job.layers.middle, 0,
        when=lambda job: _divides_layers(job) and job.layers.middle_stages.number == 0,
        note=": no stage is left for them"),
    at_least("megatron.ends_leave_layers", (keys.LAYERS, *keys.ENDS), lambda job: job.layers.middle, 1,
        when=lambda job: _needs_middle(job) and job.layers.middle.number == 0,
        note=lambda job: f" for the {job.layers.middle_stages.number} other stages"),
    at_least("megatron.ends_within_layers", (keys.LAYERS, *keys.ENDS), lambda job: job.layers.middle, 0,
        when=lambda job: _needs_middle(job) and job.layers.middle.number != 0,
        note=": Megatron builds stages with a negative number of layers", found_by="run"),
    *[_over_chunks(part) for part in (*keys.ENDS, "the layers of a stage")],
    Rule(name="megatron.layout_is_readable", keys=(keys.LAYOUT,), when=lambda job: job[keys.LAYOUT] is not None,
        holds=lambda job: job.layers.layout is not None,
        message=lambda job: (
            f"{keys.LAYOUT}={job[keys.LAYOUT]!r:.80} must have the letters E, t, m and L for the embedding, decoder, "
            "multi-token prediction and loss, | between stages, and *n for repeats")),
    multiple("megatron.layout_fills_stages", (STAGES, keys.LAYOUT),
        lambda job: Term(f"{keys.LAYOUT} has {len(job.layers.layout or ())} stages, which", len(job.layers.layout or ())),
        STAGES, when=lambda job: job.layers.layout is not None),
    equal("megatron.layout_has_all_layers", (keys.LAYERS, keys.LAYOUT),
        lambda job: Term(f"the {_letters(job).count('t')} layers of {keys.LAYOUT}", _letters(job).count("t")), keys.LAYERS,
        when=lambda job: job.layers.layout is not None and job.layers.num_layers is not None),
    Rule(name="megatron.layout_starts_and_ends", keys=(keys.LAYOUT,), when=lambda job: job.layers.layout is not None,
        holds=lambda job: re.fullmatch("E[tm]*L", _letters(job)) is not None,
        message=lambda job: f"{keys.LAYOUT} must start with its only E, the embedding, and end with its only L, the loss"),
    Rule(name="megatron.group_in_range", keys=(GLOBAL, GROUP, STAGES), when=lambda job: job.interleaved,
        holds=lambda job: not _failing_phases(job, _fills_a_group),
        message=lambda job: (
            f"the interleaved schedule needs {STAGES}={job.stages} <= {GROUP}={job.group} <= microbatches, but "
            f"there are {_failing_phases(job, _fills_a_group)[0]}; nothing checks it before that step"),
        division=_group_division, found_by="run"),
    Rule(name="megatron.whole_groups", keys=(GLOBAL, GROUP, STAGES), when=lambda job: job.interleaved,
        holds=lambda job: not _failing_phases(job, _fills_all_groups),
        message=lambda job: (
            f"{_failing_phases(job, _fills_all_groups)[0]} must fill groups of {GROUP}={job.group}, or leave at least "
            f"{STAGES}={job.stages} for the last; nothing checks it before that step"),
        division=_group_division, found_by="run"),
]  # fmt: skip
RULES = [*ARGUMENTS, *LINEAR, *STEPS, *PIPELINE]
DIALECT = Dialect(
    job=MegatronJob,
    rules=RULES,
    words=Words(_meanings, _flow, _notes, _advice),
    reader=keys.read,
    launch=keys.LAUNCH,
    shared=keys.SHARED,
)
