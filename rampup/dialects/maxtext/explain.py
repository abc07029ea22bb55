"""MaxText's base.yml in words: what each size means, the step's flow, and what its documentation advises."""

from __future__ import annotations

from fractions import Fraction

from rampup.dialects.maxtext.job import (
    ACCUMULATION,
    END,
    EVAL,
    INCREMENT,
    MICROBATCHES,
    SAMPLES,
    START,
    MaxTextFile,
)
from rampup.dialects.reading import Settings
from rampup.dialects.rules import counted
from rampup.dialects.verdict import Advice, Meaning
from rampup.plan.numbers import AUTO, to_yaml_number

_BASE_YML = "MaxText, comments of base.yml"


def meanings(file: MaxTextFile, settings: Settings) -> tuple[Meaning, ...]:
    """Return the table of what the file says and what it means."""
    sizes, n = file.sizes, file.num_devices
    lines = [
        Meaning(
            says=settings.said(END),
            means=f"{sizes.micro:,} samples per forward pass over {n:,} devices; {_tokens(file, sizes.micro)} tokens",
        ),
        Meaning(
            says=settings.said(ACCUMULATION),
            means=f"{counted(file[ACCUMULATION], 'pass')}, so {sizes.to_train:,} samples per optimizer step",
        ),
        Meaning(says=settings.said("expansion_factor_real_data"), means=f"{sizes.to_load:,} rows to load per step"),
        Meaning(
            says=settings.said(EVAL),
            means=f"{file.eval_sizes.to_train:,} samples per evaluation batch"
            if file["eval_interval"] > 0
            else "no evaluation",
        ),
        Meaning(says="", means=f"the batch is cut {file.axes.data_parallel_size:,} ways (data * fsdp)"),
    ]
    if file.ramps:
        lines += [
            Meaning(says=settings.said(key), means=f"{file.global_size(key):,} samples {what}, accumulation not counted")
            for key, what in ((START, "in the first phase"), (INCREMENT, "more in each phase"))
        ]
        lines.append(
            Meaning(says=settings.said(SAMPLES), means="samples asked for the whole ramp, shared equally by its phases")
        )
    if file.stages > 1 and file.microbatches > 0:
        lines.append(
            Meaning(
                says=settings.said(MICROBATCHES),
                means=f"{file.microbatches:,} microbatches of {sizes.micro // file.microbatches:,} samples through "
                f"{file.stages:,} stages, {file.repeats:,} times round",
            )
        )
    return tuple(lines)


def flow(file: MaxTextFile) -> tuple[str, ...]:
    """Return what one optimizer step after the ramp does, in order."""
    sizes, axes = file.sizes, file.axes
    steps = [
        f"load {sizes.to_load:,} rows of {file['max_target_length']:,} tokens, laid over {file.loading_shards:,} devices",
        f"take {sizes.micro:,} of them in each of {counted(file[ACCUMULATION], 'pass')}, one after the other",
    ]
    if file.stages > 1 and file.microbatches > 0:
        steps.append(
            f"cut a pass into {file.microbatches:,} microbatches and send them through {file.stages:,} pipeline stages "
            f"({file.repeats:,} times)"
        )
    steps.append(f"sum the gradients of {sizes.to_train:,} samples over {axes.data_parallel_size:,} replicas")
    steps.append("one optimizer step")
    return tuple(steps)


def advice(file: MaxTextFile) -> tuple[Advice, ...]:
    """Return what MaxText's documentation advises, and whether this file follows it."""
    result = []
    if file.ramps:
        increment = file[INCREMENT]
        whole = increment > 0 and (file[END] - file[START]) % increment == 0
        result.append(
            Advice(
                rule="the growth of the batch should be a multiple of its increment",
                source=_BASE_YML,
                holds=bool(whole),
                because=f"{_text(file[END])} - {_text(file[START])} in steps of {_text(increment)}",
            )
        )
    if file.stages > 1:
        result.append(
            Advice(
                rule="more pipeline microbatches, a smaller bubble",
                source=_BASE_YML,
                holds=file[MICROBATCHES] != AUTO and file.microbatches > file.stages,
                because=f"{file.microbatches} microbatches for {file.stages} stages; the automatic value is the least, "
                "with the largest bubble",
            )
        )
    if file["eval_interval"] > 0:
        result.append(
            Advice(
                rule="set eval_steps, so that evaluation does not run out of data",
                source=_BASE_YML,
                holds=bool(file["eval_steps"] > 0),
                because=f"eval_steps={file['eval_steps']}",
            )
        )
    return tuple(result)


def _tokens(file: MaxTextFile, samples: int) -> str:
    return f"{samples * file['max_target_length']:,}"


def _text(value: Fraction) -> str:

    return str(to_yaml_number(Fraction(value)))
