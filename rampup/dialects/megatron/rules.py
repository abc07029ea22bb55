"""The rules of Megatron's batches: those of its arguments and of its calculator's start, and those that a run dies of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rampup.dialects.megatron.job import (
    DECREASE,
    GLOBAL,
    GROUP,
    MICRO,
    PER_CHUNK,
    VIRTUAL,
    MegatronFile,
)
from rampup.dialects.megatron.keys import RAMP, SCHEDULE
from rampup.dialects.nearest import Found, Rule, around

_RUN: Found = "run"
_MANY = 2_000
_UNIT = f"{MICRO} * data_parallel_size"


def _whole_near(key: str, value: Callable[[MegatronFile], int], step: Callable[[MegatronFile], int]) -> Any:
    return lambda f: [int(n) for n in around(value(f), max(step(f), 1)) if n >= 1]


def _unit_text(file: MegatronFile) -> str:
    return f"{_UNIT} = {file.micro} * {file.replicas} = {file.unit}"


def _linear_asked(file: MegatronFile) -> bool:
    return file.triple is not None and len(file.triple) == 3


def _part(file: MegatronFile, index: int) -> int:
    return file.triple[index] if file.triple is not None and len(file.triple) == 3 else 0


def _ordered(file: MegatronFile) -> bool:
    """Whether start, increment and samples are numbers that the rules about their relation can use."""
    return _linear_asked(file) and _part(file, 0) > 0 and _part(file, 1) > 0 and _part(file, 2) >= 0


def _triples(file: MegatronFile) -> Iterator[str]:
    """Triples near the given one: start and increment at multiples of the unit, and the increment a part of the growth."""
    if not _linear_asked(file) or file.triple is None or len(file.sizes) > _MANY:
        return
    start, increment, samples = file.triple
    unit = max(file.unit, 1)
    starts = [int(n) for n in around(start, unit)[:16] if 0 < n < file.final]
    found = [(s, i) for s in starts for n in around(increment, unit)[:64] if (i := int(n)) > 0 and (file.final - s) % i == 0]
    for s, i in sorted(found, key=lambda pair: abs(pair[0] - start) + abs(pair[1] - increment)):
        yield f"{s} {i} {max(samples, 1)}"


def _first_uncut(file: MegatronFile) -> str:
    assert file.ramp is not None
    phase = next(phase for phase in file.ramp.phases if phase.global_batch_size % file.unit)
    return (
        f"the batch of {phase.global_batch_size:,} from step {phase.start_step:,} (sample {phase.start_sample:,}) must be a "
        f"multiple of {_unit_text(file)}"
    )


def _interleaved(file: MegatronFile) -> bool:
    return file.chunks > 1 and file.stages > 1


def _phases_hold(file: MegatronFile, holds: Callable[[int], bool]) -> bool:
    """Say whether the number of microbatches keeps a rule in every phase; true where there is no interleaving or no number."""
    return not _interleaved(file) or not file.cut or all(holds(size // file.unit) for size in file.sizes)


def _first_phase(file: MegatronFile, holds: Callable[[int], bool]) -> str:
    assert file.ramp is not None
    phase = next(phase for phase in file.ramp.phases if not holds(phase.global_batch_size // file.unit))
    number = phase.global_batch_size // file.unit
    return f"{number} microbatches from step {phase.start_step:,} (batch {phase.global_batch_size:,} / {file.unit})"


def _in_group(file: MegatronFile) -> Callable[[int], bool]:
    return lambda m: file.stages <= file.group <= m


def _whole_groups(file: MegatronFile) -> Callable[[int], bool]:
    return lambda m: m < file.group or m % file.group == 0 or m % file.group >= file.stages


def _batch_key_values(file: MegatronFile) -> Iterable[Any]:
    """Values of `global_batch_size` at multiples of all that the pipeline wants."""
    if len(file.sizes) > _MANY:
        return []
    step = max(file.unit, 1) * (file.group if _interleaved(file) and file.group > 0 else 1)
    return [int(n) for size in (file.unit, step) for n in around(file.final, max(size, 1))[:64] if n >= 1]


ARGUMENTS: tuple[Rule[MegatronFile], ...] = (
    Rule(
        name="megatron.micro_batch_positive",
        keys=(MICRO,),
        holds=lambda f: f.micro >= 1,
        message=lambda f: f"{MICRO} must be set" if f[MICRO] is None else f"{MICRO}={f[MICRO]} must be at least 1",
        candidates=lambda _: range(1, 65),
    ),
    Rule(
        name="megatron.global_batch_positive",
        keys=(GLOBAL,),
        holds=lambda f: f[GLOBAL] is None or f[GLOBAL] >= 1,
        message=lambda f: f"{GLOBAL}={f[GLOBAL]} must be at least 1",
        candidates=_batch_key_values,
    ),
    Rule(
        name="megatron.world_divisible",
        keys=("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        holds=lambda f: f.world is None or f.world % f.model_parallel == 0,
        message=lambda f: (
            f"the world size {f.world} must be a multiple of tensor * pipeline * context parallel sizes = "
            f"{f['tensor_model_parallel_size']} * {f.stages} * {f['context_parallel_size']} = {f.model_parallel}"
        ),
        candidates=_whole_near("world_size", lambda f: f.world or 1, lambda f: f.model_parallel),
    ),
    Rule(
        name="megatron.batch_divisible",
        keys=(GLOBAL, MICRO),
        holds=lambda f: (
            f[SCHEDULE] is not None or f[RAMP] is not None or f.unit < 1 or bool(f[DECREASE]) or f.final % f.unit == 0
        ),
        message=lambda f: f"{GLOBAL}={f.final:,} must be a multiple of {_unit_text(f)}",
        candidates=_batch_key_values,
    ),
    Rule(
        name="megatron.decreased_to_nothing",
        keys=(GLOBAL, MICRO),
        holds=lambda f: (
            f[SCHEDULE] is not None or f[RAMP] is not None or not f[DECREASE] or f.unit < 1 or f.final < 1 or f.final >= f.unit
        ),
        message=lambda f: f"{GLOBAL}={f.final:,} is below {_unit_text(f)}, and {DECREASE} rounds it down to 0 microbatches",
        candidates=_batch_key_values,
    ),
    Rule(
        name="megatron.eval_batch_divisible",
        keys=("eval_global_batch_size", "eval_micro_batch_size"),
        holds=lambda f: f["eval_global_batch_size"] is None or f["eval_global_batch_size"] % _eval_unit(f) == 0,
        message=lambda f: (
            f"eval_global_batch_size={f['eval_global_batch_size']:,} must be a multiple of the evaluation's micro batch * "
            f"data_parallel_size = {_eval_unit(f) // f.replicas} * {f.replicas} = {_eval_unit(f)}"
        ),
        candidates=_whole_near("eval_global_batch_size", lambda f: f["eval_global_batch_size"] or 1, lambda f: _eval_unit(f)),
    ),
)


def _eval_unit(file: MegatronFile) -> int:
    return max(int(file["eval_micro_batch_size"] or file.micro or 1), 1) * file.replicas


LINEAR: tuple[Rule[MegatronFile], ...] = (
    Rule(
        name="megatron.ramp_is_a_triple",
        keys=(RAMP,),
        holds=lambda f: f.triple is None or len(f.triple) == 3,
        message=lambda f: f"{RAMP}={f[RAMP]!r:.80} must be three whole numbers: start, increment and samples",
    ),
    Rule(
        name="megatron.ramp_numbers_positive",
        keys=(RAMP,),
        holds=lambda f: not _linear_asked(f) or _ordered(f),
        message=lambda f: f"{RAMP}={f[RAMP]}: start and increment must be at least 1, samples at least 0",
        candidates=_triples,
    ),
    Rule(
        name="megatron.ramp_grows",
        keys=(GLOBAL, RAMP),
        holds=lambda f: not _ordered(f) or f.final >= _part(f, 0),
        message=lambda f: f"{GLOBAL}={f.final:,} must be at least the ramp's start {_part(f, 0):,}",
        candidates=lambda f: [int(n) for n in around(f.final, _part(f, 1), origin=_part(f, 0)) if n >= 1],
    ),
    Rule(
        name="megatron.ramp_increment_divides",
        keys=(GLOBAL, RAMP),
        holds=lambda f: not _ordered(f) or f.final < _part(f, 0) or (f.final - _part(f, 0)) % _part(f, 1) == 0,
        message=lambda f: (
            f"{GLOBAL} - start = {f.final:,} - {_part(f, 0):,} = {f.final - _part(f, 0):,} must be a multiple of the ramp's "
            f"increment {_part(f, 1):,}"
        ),
        candidates=lambda f: [int(n) for n in around(f.final, _part(f, 1), origin=_part(f, 0)) if n >= 1],
    ),
    Rule(
        name="megatron.ramp_counts_samples",
        keys=("train_iters", RAMP),
        holds=lambda f: f.triple is None or f["train_iters"] is None,
        message=lambda f: (
            f"a linear ramp needs a run counted in samples; give train_samples instead of train_iters={f['train_iters']:,}"
        ),
    ),
    Rule(
        name="megatron.ramp_divides_by_zero",
        keys=(RAMP, GLOBAL),
        holds=lambda f: not _ordered(f) or (f.final != _part(f, 0) and _part(f, 2) > 0),
        message=lambda f: (
            f"{RAMP}={f[RAMP]} to {GLOBAL}={f.final:,}: a ramp of no increment or no sample divides by zero; leave it out"
        ),
        candidates=_triples,
        found_by=_RUN,
    ),
    Rule(
        name="megatron.ramp_decreased_to_nothing",
        keys=(RAMP, MICRO),
        holds=lambda f: not _ordered(f) or not f[DECREASE] or f.unit < 1 or _part(f, 0) >= f.unit,
        message=lambda f: (
            f"the ramp's start {_part(f, 0):,} is below {_unit_text(f)}, and {DECREASE} rounds it down to 0 microbatches"
        ),
        candidates=_triples,
        found_by=_RUN,
    ),
    Rule(
        name="megatron.ramp_phases_divisible",
        keys=(RAMP, MICRO),
        holds=lambda f: f.linear is None or f.cut or f.unit < 1,
        message=lambda f: f"{_first_uncut(f)}; Megatron checks each batch only when its step comes",
        candidates=_triples,
        found_by=_RUN,
    ),
)
INTERLEAVED: tuple[Rule[MegatronFile], ...] = (
    Rule(
        name="megatron.chunks_positive",
        keys=(VIRTUAL,),
        holds=lambda f: f[VIRTUAL] is None or f[VIRTUAL] >= 1,
        message=lambda f: f"{VIRTUAL}={f[VIRTUAL]} must be at least 1",
        candidates=lambda _: (1, 2),
    ),
    Rule(
        name="megatron.chunks_need_stages",
        keys=("pipeline_model_parallel_size", VIRTUAL, "overlap_p2p_comm"),
        holds=lambda f: f.chunks <= 1 or f.stages >= (2 if f["overlap_p2p_comm"] else 3),
        message=lambda f: (
            f"{f.chunks} chunks per stage need pipeline_model_parallel_size above {1 if f['overlap_p2p_comm'] else 2}, it is "
            f"{f.stages}{'' if f['overlap_p2p_comm'] else ' (without overlap_p2p_comm)'}"
        ),
        candidates=lambda f: range(f.stages + 1, f.stages + 65),
    ),
    Rule(
        name="megatron.layers_over_stages",
        keys=("num_layers", "pipeline_model_parallel_size"),
        holds=lambda f: f["num_layers"] is None or f["num_layers"] % f.stages == 0,
        message=lambda f: f"num_layers={f['num_layers']} must be a multiple of pipeline_model_parallel_size={f.stages}",
        candidates=_whole_near("num_layers", lambda f: f["num_layers"] or 1, lambda f: f.stages),
    ),
    Rule(
        name="megatron.layers_over_chunks",
        keys=("num_layers", VIRTUAL, PER_CHUNK),
        holds=lambda f: f["num_layers"] is None or f["num_layers"] % f.stages != 0 or _chunk_rest(f) == 0,
        message=lambda f: (
            f"num_layers / pipeline_model_parallel_size = {f['num_layers']} / {f.stages} = {f['num_layers'] // f.stages} must "
            f"be a multiple of {f'{PER_CHUNK}={f[PER_CHUNK]}' if f[VIRTUAL] is None else f'{VIRTUAL}={f[VIRTUAL]}'}"
        ),
        candidates=_whole_near("num_layers", lambda f: f["num_layers"] or 1, lambda f: f.stages * _chunk_divisor(f)),
    ),
    Rule(
        name="megatron.group_in_range",
        keys=(GLOBAL, GROUP, "pipeline_model_parallel_size"),
        holds=lambda f: _phases_hold(f, _in_group(f)),
        message=lambda f: (
            f"the interleaved schedule needs pipeline_model_parallel_size={f.stages} <= {GROUP}={f.group} <= microbatches, but "
            f"there are {_first_phase(f, _in_group(f))}; nothing checks it before that step"
        ),
        candidates=_batch_key_values,
        found_by=_RUN,
    ),
    Rule(
        name="megatron.whole_groups",
        keys=(GLOBAL, GROUP, "pipeline_model_parallel_size"),
        holds=lambda f: _phases_hold(f, _whole_groups(f)),
        message=lambda f: (
            f"{_first_phase(f, _whole_groups(f))} must fill groups of {GROUP}={f.group}, or leave at least "
            f"pipeline_model_parallel_size={f.stages} for the last; nothing checks it before that step"
        ),
        candidates=_batch_key_values,
        found_by=_RUN,
    ),
)


def _chunk_divisor(file: MegatronFile) -> int:
    return max(int(file[PER_CHUNK] or 1) if file[VIRTUAL] is None else int(file[VIRTUAL]), 1)


def _chunk_rest(file: MegatronFile) -> int:
    return int(file["num_layers"]) // file.stages % _chunk_divisor(file)
