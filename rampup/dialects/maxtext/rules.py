"""MaxText's base.yml: its meaning, what surprises, and the rules that MaxText checks or that only its run finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from rampup.dialects import maxtext as keys
from rampup.dialects.maxtext import ACCUMULATION, END, EVAL, EXPANSION, INCREMENT, LAYERS, MICROBATCHES, REPEATS, SAMPLES, START
from rampup.dialects.maxtext.job import MaxTextJob
from rampup.dialects.rules import Dialect, Rule, Side, around, at_least, broken_rules, found_by_run, multiple
from rampup.dialects.verdict import Advice, Term, Words, counted, product
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


def _meanings(job: MaxTextJob) -> Iterator[tuple[str, str]]:
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


def _flow(job: MaxTextJob) -> Iterator[str]:
    sizes = job.sizes
    rows, shards = counted(sizes.to_load, "row"), counted(job.loading_shards, "device")
    yield f"load {rows} of {job['max_target_length']:,} tokens, sharded over {shards}"
    passes = f"each of {job[ACCUMULATION]:,} passes, one after the other" if job[ACCUMULATION] > 1 else "one pass"
    yield f"take {sizes.micro:,} of them in {passes}"
    if job.is_piped and job.microbatches > 0:
        yield (
            f"split a pass into {counted(job.microbatches, 'microbatch')} and send them through {job.stages:,} pipeline stages "
            f"({counted(job.repeats, 'repeat')})"
        )
    replicas = counted(job.axes.data_parallel_size, "replica")
    yield f"sum the gradients of {counted(sizes.to_train, 'sample')} over {replicas}"
    yield "one optimizer step"


def _advice(job: MaxTextJob) -> Iterator[Advice]:
    if job.is_piped:
        yield Advice("more pipeline microbatches, a smaller bubble", BASE_YML,
            job[MICROBATCHES] != AUTO and job.microbatches > job.stages,
            f"{job.microbatches} microbatches for {job.stages} stages; the automatic value is the minimum, with the largest "
            "bubble")  # fmt: skip
    if job["eval_interval"] > 0:
        yield Advice("set eval_steps, so that evaluation does not run out of data", BASE_YML, bool(job["eval_steps"] > 0),
            f"eval_steps={job['eval_steps']}")  # fmt: skip


def _notes(job: MaxTextJob) -> Iterator[str]:
    yield from _size_notes(job)
    yield from _gradient_notes(job)
    if job.manager is not None and job.manager.ends:
        yield from _ramp_notes(job, job.manager.phases())
    yield from _pipeline_notes(job)
    if isinstance(job.planned, RampupError) and not broken_rules(RULES, job):
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
    if job[keys.SHARD_OPTIMIZER] and passes > 1:
        yield (
            f"{keys.SHARD_OPTIMIZER} casts float32 parameters to bfloat16 before the accumulation passes, so the gradients of "
            f"the {passes:,} passes are summed in bfloat16, which keeps 8 bits of each sum; rampup sums in float32"
        )
    if job[keys.TUNIX] and passes > 1:
        yield (
            f"{keys.TUNIX} divides the loss of each of the {passes:,} passes by its own tokens and averages them: a pass with "
            "few tokens counts as much as a full one; otherwise the sum over all passes is divided by all tokens"
        )
    if job[keys.GRAD_DTYPE] != "float32":
        dtype = f"{keys.GRAD_DTYPE}={job[keys.GRAD_DTYPE]}"
        yield f"{dtype}: gradients are rounded to it after the passes are summed, before clipping"


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


FP8 = ("fp8", "nanoo_fp8", "fp8_gpu", "te_fp8_delayedscaling")
VOCAB_TILING, PREFETCH = "num_vocab_tiling", "pipeline_fsdp_ag_per_repeat"
Rules = list[Rule[MaxTextJob]]


def _unit(job: MaxTextJob) -> Fraction:
    """Return the step between sizes per device that divide over the mesh and into microbatches."""
    microbatches = job.microbatches if job.is_piped and job.microbatches > 0 else 1
    return Fraction(math.lcm(max(job.loading_shards, 1), microbatches), job.num_devices)


def _sizes_near(key: str) -> Callable[[MaxTextJob], Iterable[Any]]:
    """Return the candidates of a size per device, which is a fraction."""

    def candidates(job: MaxTextJob) -> Iterable[Any]:
        value, increment = max(Fraction(job[key]), Fraction(0)), abs(Fraction(job[INCREMENT]))
        steps = {_unit(job), Fraction(1, job.num_devices), *([increment] if job.ramps else [])}
        origin = job[START] if job.ramps and key == END else 0
        found = {n for step in steps for n in around(value, step)[:256]} | {*around(value, increment, origin=origin)[:64]}
        return sorted((n for n in found if n > 0), key=lambda n: abs(n - value))

    return candidates


def _increments_near(job: MaxTextJob) -> Iterable[Any]:
    span, value = Fraction(job[END]) - Fraction(job[START]), Fraction(job[INCREMENT])
    return sorted((span / n for n in range(1, 257) if span > 0), key=lambda n: abs(n - value))


CHECKED: Rules = [
    at_least("maxtext.accumulation_positive", (ACCUMULATION,), ACCUMULATION, 1),
    at_least("maxtext.topology_slices", (keys.TOPOLOGY_SLICES,), keys.TOPOLOGY_SLICES, 1,
        when=lambda job: job[keys.TOPOLOGY] is not None and job["num_devices"] is None, note=f" with {keys.TOPOLOGY}"),
    Rule(name="maxtext.ramp_grows", keys=(END, START), when=lambda job: job.ramps, holds=lambda job: job.grows,
        message=lambda job: f"{END}={show(job[END])} must be greater than {START}={show(job[START])}",
        candidates=_sizes_near(END)),
    Rule(name="maxtext.ramp_increment_divides", keys=(INCREMENT, START, END), when=lambda job: job.ramps and job.grows,
        holds=lambda job: job.increment_divides,
        message=lambda job: (
            f"{END} - {START} = {show(job[END])} - {show(job[START])} = {show(job[END] - job[START])} must be a multiple of "
            f"{INCREMENT}={show(job[INCREMENT])}"
            + (
                f" in floating point, where the remainder is {(float(job[END]) - float(job[START])) % float(job[INCREMENT]):g}"
                if (job[END] - job[START]) % job[INCREMENT] == 0
                else ""
            )),
        candidates=_increments_near),
    Rule(name="maxtext.vocab_tiling", keys=(VOCAB_TILING, END, "max_target_length"), when=lambda job: job[END] > 0,
        holds=lambda job: (float(job[END]) * job["max_target_length"]) % job[VOCAB_TILING] == 0,
        message=lambda job: (
            f"{END} * max_target_length = {show(job[END])} * {job['max_target_length']} = "
            f"{show(job[END] * job['max_target_length'])} must be a multiple of {VOCAB_TILING}={job[VOCAB_TILING]}"),
        division=lambda job: (int(job[END] * job["max_target_length"]), job[VOCAB_TILING])),
    Rule(name="maxtext.fp8_accumulation", keys=(ACCUMULATION, "quantization"), when=lambda job: job["quantization"] in FP8,
        holds=lambda job: job[ACCUMULATION] <= 1,
        message=lambda job: f"{ACCUMULATION}={job[ACCUMULATION]} must be 1 with quantization={job['quantization']}"),
]  # fmt: skip


def _prefetch_needs(job: MaxTextJob) -> list[str]:
    needed = {
        f"more than one repeat ({REPEATS} is {job.repeats})": job.repeats > 1,
        f"{keys.STAGE_LAYERS}=1": job[keys.STAGE_LAYERS] == 1,
        f"{keys.DELAY}=false": not job[keys.DELAY],
        "no quantization": not job["quantization"],
        "scan_layers_per_stage=false": not job["scan_layers_per_stage"],
    }
    return [text for text, is_met in needed.items() if not is_met]


def _layers_fit(job: MaxTextJob) -> bool:
    if job.layer_product < 1 or job.layers < 1:
        return False
    return job.layers % job.layer_product == 0 if job[REPEATS] == AUTO else job.layers == job.layer_product


def _layers_message(job: MaxTextJob) -> str:
    given = job[REPEATS] != AUTO
    factors = {
        "num_stages": job.stages,
        **({REPEATS: job[REPEATS]} if given else {}),
        keys.STAGE_LAYERS: job[keys.STAGE_LAYERS],
    }
    return f"{LAYERS}={job.layers:,} must be {product(factors).text}{'' if given else ', or a multiple'}"


_MICROBATCHES: Side[MaxTextJob] = (f"{MICROBATCHES}={{:,}}", lambda job: job.microbatches)


PIPELINE: Rules = [
    Rule(name="maxtext.pipeline_layers", keys=(LAYERS, "base_num_decoder_layers", keys.STAGE_LAYERS, REPEATS),
        when=lambda job: job.is_piped, holds=_layers_fit, message=_layers_message,
        candidates=lambda job: [int(n) for n in around(job.layers, max(job.layer_product, 1)) if n >= 1]),
    Rule(name="maxtext.pipeline_weight_prefetch", keys=(PREFETCH,), when=lambda job: job.is_piped and job[PREFETCH],
        holds=lambda job: not _prefetch_needs(job),
        message=lambda job: f"{PREFETCH}=true needs {' and '.join(_prefetch_needs(job))}",
        candidates=lambda job: (False,)),
    at_least("maxtext.microbatches_positive", (MICROBATCHES,), _MICROBATCHES, 1, when=lambda job: job.is_piped,
        note=", or -1 for automatic"),
    multiple("maxtext.microbatches_multiple_of_stages", (MICROBATCHES,), _MICROBATCHES,
        lambda job: Term(f"the stages, ici_pipeline_parallelism * dcn_pipeline_parallelism = {job.stages}", job.stages),
        when=lambda job: job.is_piped and job.microbatches >= 1),
    multiple("maxtext.batch_multiple_of_microbatches", (END, MICROBATCHES),
        lambda job: Term(f"{product_text(job, END)}, the batch of one forward pass ({job.sizes.micro}),", job.sizes.micro),
        _MICROBATCHES, when=lambda job: job.is_piped and job.microbatches >= 1 and job.sizes.micro > 0,
        candidates=_sizes_near(END)),
    at_least("maxtext.delayed_microbatches", (MICROBATCHES, keys.DELAY), _MICROBATCHES,
        lambda job: Term(f"2 * stages = {job.least_microbatches}", job.least_microbatches),
        when=lambda job: job.is_piped and job[keys.DELAY], note=f" with {keys.DELAY}"),
]  # fmt: skip


def _divides_over_mesh(job: MaxTextJob, key: str) -> bool:
    """Return whether a batch divides over the devices. Below 1 per device a full sample per device is loaded."""
    size = job.global_size(key)
    if key == END:
        return bool(job[END] < 1) or job.sizes.to_train % job.loading_shards == 0
    if job.manager is None or size < 1 or (key == INCREMENT and not job.manager.grows_twice):
        return True
    return size % job.loading_shards == 0


def _over_mesh(name: str, key: str) -> Rule[MaxTextJob]:
    """Return the rule that a batch, or the increment of one, divides over the devices."""
    return Rule(name=f"maxtext.{name}", keys=(key,), holds=lambda job: _divides_over_mesh(job, key),
        message=lambda job: (
            f"{product_text(job, key)} samples must be a multiple of the devices that a batch is sharded over, data * stage * "
            f"fsdp * expert = {job.loading_shards}; MaxText does not check it, and the first such step fails"),
        candidates=_increments_near if key == INCREMENT else _sizes_near(key))  # fmt: skip


def _eval_fits(job: MaxTextJob) -> bool:
    micro = job.eval_sizes.micro
    over_mesh = (job[EVAL] or job[END]) < 1 or micro % job.loading_shards == 0
    return micro >= 1 and over_mesh and (not job.is_piped or micro == job.sizes.micro)


def _eval_message(job: MaxTextJob) -> str:
    key = EVAL if job[EVAL] else END
    rule = f"a multiple of data * stage * fsdp * expert = {job.loading_shards}"
    if job.is_piped:
        rule = f"the training batch of one forward pass, {job.sizes.micro}, for whose shape the pipeline is built"
    return f"{product_text(job, key)} ({job.eval_sizes.micro} rows of evaluation) must be {rule}; MaxText does not check it"


FOUND_BY_RUN = found_by_run(
    [
        # pyconfig accepts any mesh; create_device_mesh asserts that it has as many devices as the run.
        Rule(name="maxtext.mesh", keys=("num_devices",), holds=lambda job: not job.mesh_problem,
            message=lambda job: f"{job.mesh_problem}; MaxText's configuration is accepted, and the run stops at its mesh",
            candidates=lambda job: [int(n) for n in around(job.num_devices) if n >= 1]),
        Rule(name="maxtext.empty_batch", keys=(END,), holds=lambda job: job.sizes.micro >= 1,
            message=lambda job: (
                f"{product_text(job, END)} is truncated to {job.sizes.micro} samples: the step silently trains on nothing"),
            candidates=_sizes_near(END)),
        Rule(name="maxtext.empty_first_batch", keys=(START,), when=lambda job: job.ramps and job.grows,
            holds=lambda job: job.global_size(START) >= 1,
            message=lambda job: (
                f"{product_text(job, START)} is truncated to {job.global_size(START)} samples: the ramp never starts"),
            candidates=_sizes_near(START)),
        Rule(name="maxtext.increment_positive", keys=(INCREMENT,),
            when=lambda job: job.ramps and job.grows and job.increment_divides,
            holds=lambda job: job.global_size(INCREMENT) >= 1,
            message=lambda job: (
                f"{product_text(job, INCREMENT)}, truncated to {job.global_size(INCREMENT)}, must be at least 1: MaxText "
                "divides by zero, hangs, or keeps the first batch indefinitely"),
            candidates=_increments_near),
        _over_mesh("rows_over_mesh", END),
        _over_mesh("first_rows_over_mesh", START),
        _over_mesh("increment_over_mesh", INCREMENT),
        Rule(name="maxtext.ramp_accumulation", keys=(ACCUMULATION, START, INCREMENT),
            when=lambda job: job.manager is not None and job[ACCUMULATION] >= 2,
            holds=lambda job: job.manager is None or job.manager.divides_by(job[ACCUMULATION]),
            message=lambda job: (
                f"MaxText's ramp ignores {ACCUMULATION}={job[ACCUMULATION]}, but splits each batch into that many parts: "
                f"{product_text(job, START)} and {product_text(job, INCREMENT)} must be multiples of it"),
            division=lambda job: (max(job.global_size(START), 1), 1)),
        Rule(name="maxtext.ramp_in_pipeline", keys=(keys.RAMP, "ici_pipeline_parallelism"), when=lambda job: job.is_piped,
            holds=lambda job: job.manager is None,
            message=lambda job: (
                f"the pipeline is built for the final batch of {job.sizes.micro} samples only; the ramp's first one of "
                f"{job.global_size(START)} cannot be given that shape, and the first step fails"),
            candidates=lambda job: (False,)),
        Rule(name="maxtext.eval_batch", keys=(EVAL, "eval_interval"), when=lambda job: job["eval_interval"] > 0,
            holds=_eval_fits, message=_eval_message,
            candidates=lambda job: [0, job[END], *around(job[EVAL] or job[END], _unit(job))]),
        Rule(name="maxtext.no_steps", keys=("steps",), holds=lambda job: job.total_steps >= 1,
            message=lambda job: (
                f"the run has steps={job['steps']} (learning_rate_schedule_steps={job['learning_rate_schedule_steps']})"
            )),
    ]
)  # fmt: skip
RULES = [*CHECKED, *PIPELINE, *FOUND_BY_RUN]
DIALECT = Dialect(
    job=MaxTextJob, rules=RULES, words=Words(_meanings, _flow, _notes, _advice), reader=keys.read_chain, launch=keys.LAUNCH
)
