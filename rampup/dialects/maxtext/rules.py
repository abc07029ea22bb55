"""The rules of MaxText's pre-training configuration: those that it checks, and those that its run finds out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from rampup.dialects.maxtext.job import (
    ACCUMULATION,
    END,
    EVAL,
    INCREMENT,
    LAYERS,
    MICROBATCHES,
    REPEATS,
    START,
    MaxTextFile,
)
from rampup.dialects.nearest import Found, Rule, around
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO, to_yaml_number

FP8 = ("fp8", "nanoo_fp8", "fp8_gpu", "te_fp8_delayedscaling")


def _unit(file: MaxTextFile) -> Fraction:
    """The step between sizes per device that every rule on whole batches likes."""
    passes = file.microbatches if file.stages > 1 and file.microbatches > 0 else 1
    return Fraction(math.lcm(max(file.loading_shards, 1), passes), file.num_devices)


def _sizes_near(key: str) -> Callable[[MaxTextFile], Iterable[Any]]:
    def candidates(file: MaxTextFile) -> Iterable[Any]:
        value = max(Fraction(file[key]), Fraction(0))
        steps = {
            _unit(file),
            Fraction(1, file.num_devices),
            *([abs(file[INCREMENT])] if file.ramps and key != INCREMENT else []),
        }
        origin = file[START] if file.ramps and key == END else 0
        found = {n for step in steps for n in around(value, step)[:256]} | set(
            around(value, abs(file[INCREMENT]), origin=origin)[:64]
        )
        return sorted((n for n in found if n > 0), key=lambda n: abs(n - value))

    return candidates


def _increments_near(file: MaxTextFile) -> Iterable[Any]:
    span, value = Fraction(file[END]) - Fraction(file[START]), Fraction(file[INCREMENT])
    parts = [span / n for n in range(1, 257)] if span > 0 else []
    return sorted(parts, key=lambda n: abs(n - value))


def _whole_near(key: str, step: Callable[[MaxTextFile], int] = lambda _: 1) -> Callable[[MaxTextFile], Iterable[Any]]:
    return lambda file: [int(n) for n in around(file[key], max(step(file), 1)) if n >= 1]


def show(value: Any) -> str:
    """Write a size as a person would."""
    return str(to_yaml_number(value)) if isinstance(value, Fraction) else f"{value:,}"


def _piped(file: MaxTextFile) -> bool:
    return file.stages > 1


def _mesh_message(file: MaxTextFile) -> str:
    return str(file.mesh)


def _product(file: MaxTextFile, key: str) -> str:
    return f"num_devices * {key} = {file.num_devices} * {show(file[key])} = {show(file.num_devices * file[key])}"


CHECKED: tuple[Rule[MaxTextFile], ...] = (
    Rule(
        name="maxtext.accumulation_positive",
        keys=(ACCUMULATION,),
        holds=lambda f: f[ACCUMULATION] >= 1,
        message=lambda f: f"{ACCUMULATION}={f[ACCUMULATION]} must be at least 1",
        candidates=lambda _: (1,),
    ),
    Rule(
        name="maxtext.mesh",
        keys=("num_devices",),
        holds=lambda f: isinstance(f.mesh, MeshAxes),
        message=_mesh_message,
        candidates=lambda f: [int(n) for n in around(f.num_devices) if n >= 1],
    ),
    Rule(
        name="maxtext.ramp_grows",
        keys=(END, START),
        holds=lambda f: not f.ramps or f.grows,
        message=lambda f: f"{END}={show(f[END])} must be greater than {START}={show(f[START])}",
        candidates=_sizes_near(END),
    ),
    Rule(
        name="maxtext.ramp_increment_divides",
        keys=(INCREMENT, START, END),
        holds=lambda f: not f.ramps or not f.grows or f.increment_divides,
        message=lambda f: (
            f"{END} - {START} = {show(f[END])} - {show(f[START])} = {show(f[END] - f[START])} must be a multiple of "
            f"{INCREMENT}={show(f[INCREMENT])}"
            + (
                f" in floating point too, where the rest is {(float(f[END]) - float(f[START])) % float(f[INCREMENT]):g}"
                if (f[END] - f[START]) % f[INCREMENT] == 0
                else ""
            )
        ),
        candidates=_increments_near,
    ),
    Rule(
        name="maxtext.vocab_tiling",
        keys=("num_vocab_tiling", END, "max_target_length"),
        holds=lambda f: f[END] <= 0 or (float(f[END]) * f["max_target_length"]) % f["num_vocab_tiling"] == 0,
        message=lambda f: (
            f"{END} * max_target_length = {show(f[END])} * {f['max_target_length']} = {show(f[END] * f['max_target_length'])} "
            f"must be a multiple of num_vocab_tiling={f['num_vocab_tiling']}"
        ),
        candidates=_whole_near("num_vocab_tiling"),
    ),
    Rule(
        name="maxtext.fp8_accumulation",
        keys=(ACCUMULATION, "quantization"),
        holds=lambda f: f["quantization"] not in FP8 or f[ACCUMULATION] <= 1,
        message=lambda f: f"{ACCUMULATION}={f[ACCUMULATION]} must be 1 with quantization={f['quantization']}",
        candidates=lambda _: (1,),
    ),
)  # fmt: skip

PIPELINE: tuple[Rule[MaxTextFile], ...] = (
    Rule(
        name="maxtext.pipeline_layers",
        keys=(LAYERS, "base_num_decoder_layers", "num_layers_per_pipeline_stage", REPEATS),
        holds=lambda f: not _piped(f) or _layers_fit(f),
        message=lambda f: (
            f"{LAYERS}={f.layers:,} must be num_stages * {'' if f[REPEATS] == AUTO else f'{REPEATS} * '}"
            f"num_layers_per_pipeline_stage = {f.stages} * {'' if f[REPEATS] == AUTO else f'{f[REPEATS]} * '}"
            f"{f['num_layers_per_pipeline_stage']} = {_layer_product(f):,}{', or a multiple' if f[REPEATS] == AUTO else ''}"
        ),
        candidates=lambda f: [int(n) for n in around(f.layers, max(_layer_product(f), 1)) if n >= 1],
    ),
    Rule(
        name="maxtext.pipeline_weight_prefetch",
        keys=("pipeline_fsdp_ag_per_repeat",),
        holds=lambda f: not _piped(f) or not f["pipeline_fsdp_ag_per_repeat"] or not _prefetch_problems(f),
        message=lambda f: f"pipeline_fsdp_ag_per_repeat=true needs {' and '.join(_prefetch_problems(f))}",
        candidates=lambda _: (False,),
    ),
    Rule(
        name="maxtext.microbatches_positive",
        keys=(MICROBATCHES,),
        holds=lambda f: not _piped(f) or f.microbatches > 0,
        message=lambda f: f"{MICROBATCHES}={f.microbatches} must be -1 (automatic) or at least 1",
        candidates=_whole_near(MICROBATCHES, lambda f: f.stages),
    ),
    Rule(
        name="maxtext.microbatches_multiple_of_stages",
        keys=(MICROBATCHES,),
        holds=lambda f: not _piped(f) or f.microbatches < 1 or f.microbatches % f.stages == 0,
        message=lambda f: (
            f"{MICROBATCHES}={f.microbatches} must be a multiple of the stages, ici_pipeline_parallelism * "
            f"dcn_pipeline_parallelism = {f.stages}"
        ),
        candidates=_whole_near(MICROBATCHES, lambda f: f.stages),
    ),
    Rule(
        name="maxtext.batch_multiple_of_microbatches",
        keys=(END, MICROBATCHES),
        holds=lambda f: not _piped(f) or f.microbatches < 1 or f.sizes.micro <= 0 or f.sizes.micro % f.microbatches == 0,
        message=lambda f: (
            f"{_product(f, END)}, the batch of one forward pass ({f.sizes.micro}), must be a multiple of "
            f"{MICROBATCHES}={f.microbatches}"
        ),
        candidates=_sizes_near(END),
    ),
    Rule(
        name="maxtext.delayed_microbatches",
        keys=(MICROBATCHES, "pipeline_delay_activation_forwarding"),
        holds=lambda f: (
            not _piped(f) or not f["pipeline_delay_activation_forwarding"] or f.microbatches >= 2 * f.stages
        ),
        message=lambda f: (
            f"{MICROBATCHES}={f.microbatches} must be at least 2 * stages = {2 * f.stages} with "
            "pipeline_delay_activation_forwarding"
        ),
        candidates=_whole_near(MICROBATCHES, lambda f: f.stages),
    ),
)  # fmt: skip


def _layer_product(file: MaxTextFile) -> int:
    repeats = 1 if file[REPEATS] == AUTO else file[REPEATS]
    return int(file.stages * repeats * file["num_layers_per_pipeline_stage"])


def _layers_fit(file: MaxTextFile) -> bool:
    product = _layer_product(file)
    if product < 1 or file.layers < 1:
        return False
    return file.layers % product == 0 if file[REPEATS] == AUTO else file.layers == product


def _prefetch_problems(file: MaxTextFile) -> list[str]:
    wanted = {
        f"more than one repeat ({REPEATS} is {file.repeats})": file.repeats > 1,
        "num_layers_per_pipeline_stage=1": file["num_layers_per_pipeline_stage"] == 1,
        "pipeline_delay_activation_forwarding=false": not file["pipeline_delay_activation_forwarding"],
        "no quantization": not file["quantization"],
        "scan_layers_per_stage=false": not file["scan_layers_per_stage"],
    }
    return [text for text, holds in wanted.items() if not holds]


_RUN: Found = "run"


def _trains_something(file: MaxTextFile) -> bool:
    return file.sizes.micro >= 1


def _starts_with_something(file: MaxTextFile) -> bool:
    return not file.ramps or not file.grows or file.global_size(START) >= 1


def _lies_over_mesh(file: MaxTextFile, key: str) -> bool:
    """A whole sample per device is loaded below 1; otherwise the rows loaded are those trained on."""
    size = file.global_size(key)
    if key == END:
        return bool(file[END] < 1) or file.sizes.to_train % file.loading_shards == 0
    if file.manager is None or size < 1 or (key == INCREMENT and not file.manager.grows_twice):
        return True
    return size % file.loading_shards == 0


def _over_mesh(name: str, key: str) -> Rule[MaxTextFile]:
    """The rule that a batch, or what is added to it, can be laid over the devices."""
    return Rule(
        name=f"maxtext.{name}",
        keys=(key,),
        holds=lambda f: _lies_over_mesh(f, key),
        message=lambda f: (
            f"{_product(f, key)} samples must be a multiple of the devices that a batch is laid over, data * stage * fsdp * "
            f"expert = {f.loading_shards}; MaxText does not check it, and the first such step fails"
        ),
        candidates=_increments_near if key == INCREMENT else _sizes_near(key),
        found_by=_RUN,
    )


def _eval_fits(file: MaxTextFile) -> bool:
    if file["eval_interval"] <= 0:
        return True
    micro = file.eval_sizes.micro
    over_mesh = (file[EVAL] or file[END]) < 1 or micro % file.loading_shards == 0
    return micro >= 1 and over_mesh and (not _piped(file) or micro == file.sizes.micro)


def _eval_message(file: MaxTextFile) -> str:
    key = EVAL if file[EVAL] else END
    rule = f"a multiple of data * stage * fsdp * expert = {file.loading_shards}"
    if _piped(file):
        rule = f"the training batch of one forward pass, {file.sizes.micro}, whose shape the pipeline is built for"
    return f"{_product(file, key)} ({file.eval_sizes.micro} rows of evaluation) must be {rule}; MaxText does not check it"


FOUND_OUT: tuple[Rule[MaxTextFile], ...] = (
    Rule(
        name="maxtext.empty_batch",
        keys=(END,),
        holds=_trains_something,
        message=lambda f: f"{_product(f, END)} is cut to {f.sizes.micro} samples: the step trains on nothing, without an error",
        candidates=_sizes_near(END),
        found_by=_RUN,
    ),
    Rule(
        name="maxtext.empty_first_batch",
        keys=(START,),
        holds=_starts_with_something,
        message=lambda f: f"{_product(f, START)} is cut to {f.global_size(START)} samples: the ramp never starts",
        candidates=_sizes_near(START),
        found_by=_RUN,
    ),
    Rule(
        name="maxtext.increment_positive",
        keys=(INCREMENT,),
        holds=lambda f: not f.ramps or not f.grows or not f.increment_divides or f.global_size(INCREMENT) >= 1,
        message=lambda f: (
            f"{_product(f, INCREMENT)}, cut to {f.global_size(INCREMENT)}, must be at least 1: MaxText divides by zero, "
            "hangs, or keeps the first batch for ever"
        ),
        candidates=_increments_near,
        found_by=_RUN,
    ),
    _over_mesh("rows_over_mesh", END),
    _over_mesh("first_rows_over_mesh", START),
    _over_mesh("increment_over_mesh", INCREMENT),
    Rule(
        name="maxtext.ramp_accumulation",
        keys=(ACCUMULATION, START, INCREMENT),
        holds=lambda f: not f.ramps or f[ACCUMULATION] < 2 or f.ramp_sizes_divide(f[ACCUMULATION]),
        message=lambda f: (
            f"MaxText's ramp ignores {ACCUMULATION}={f[ACCUMULATION]}, but cuts each of its batches into as many parts: "
            f"{_product(f, START)} and {_product(f, INCREMENT)} must be multiples of it"
        ),
        candidates=_whole_near(ACCUMULATION),
        found_by=_RUN,
    ),
    Rule(
        name="maxtext.ramp_in_pipeline",
        keys=("enable_rampup_batch_size", "ici_pipeline_parallelism"),
        holds=lambda f: not _piped(f) or f.manager is None,
        message=lambda f: (
            f"the pipeline is built for the final batch of {f.sizes.micro} samples only; the ramp's first one of "
            f"{f.global_size(START)} cannot be given that shape, and the first step fails"
        ),
        candidates=lambda _: (False,),
        found_by=_RUN,
    ),
    Rule(
        name="maxtext.eval_batch",
        keys=(EVAL, "eval_interval"),
        holds=_eval_fits,
        message=_eval_message,
        candidates=lambda f: [0, f[END], *around(f[EVAL] or f[END], _unit(f))],
        found_by=_RUN,
    ),
    Rule(
        name="maxtext.no_steps",
        keys=("steps",),
        holds=lambda f: f.total_steps >= 1,
        message=lambda f: f"the run has steps={f['steps']} (learning_rate_schedule_steps={f['learning_rate_schedule_steps']})",
        candidates=lambda _: (1,),
        found_by=_RUN,
    ),
)  # fmt: skip
RULES = CHECKED + PIPELINE + FOUND_OUT
