"""Megatron's arguments in words: what each means, the step's flow, and what its documentation advises."""

from __future__ import annotations

from rampup.dialects.megatron.job import GLOBAL, MICRO, MODEL_AXES, VIRTUAL, MegatronFile
from rampup.dialects.megatron.keys import RAMP, SCHEDULE
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Advice, Meaning

_HELP = "Megatron-LM, help of its arguments"


def meanings(file: MegatronFile, settings: Settings) -> tuple[Meaning, ...]:
    """Return the table of what the file says and what it means."""
    axes = " * ".join(str(file[axis]) for axis in MODEL_AXES)
    lines = [
        Meaning(says=settings.said(MICRO), means=f"{file.micro:,} samples per replica and forward pass"),
        Meaning(
            says=f"tensor * pipeline * context = {axes}",
            means=f"{file.model_parallel:,} devices per replica, {file.replicas:,} replicas",
        ),
    ]
    if file.ramp is not None:
        final = file.ramp.sizes[-1]
        passes = f", {final // file.unit:,} microbatches per replica" if file.cut else ""
        lines.append(Meaning(says=settings.said(GLOBAL), means=f"{final:,} samples per optimizer step after any ramp{passes}"))
        if key := SCHEDULE if file[SCHEDULE] is not None else RAMP if file[RAMP] is not None else None:
            lines.append(
                Meaning(
                    says=settings.said(key),
                    means=f"{len(file.ramp.phases):,} phases from {file.ramp.sizes[0]:,} to {final:,} samples, over after "
                    f"{file.ramp.ramp_steps:,} steps and {file.ramp.ramp_samples:,} samples",
                )
            )
    if file.chunks > 1:
        lines.append(
            Meaning(
                says=settings.said(VIRTUAL),
                means=f"{file.chunks:,} layer chunks on each of {file.stages:,} stages, {file.group:,} microbatches in a row",
            )
        )
    return tuple(lines)


def flow(file: MegatronFile) -> tuple[str, ...]:
    """Return what one optimizer step after any ramp does, in order."""
    if file.ramp is None or not file.cut:
        return ()
    final = file.ramp.sizes[-1]
    count = final // file.unit
    through = f" through {file.stages:,} pipeline stages" if file.stages > 1 else ""
    return (
        f"each of {file.replicas:,} replicas reads {final // file.replicas:,} of the {final:,} samples",
        f"and runs them as {count:,} microbatches of {file.micro:,}{through}, adding up gradients",
        f"one gradient reduction over {file.replicas:,} replicas",
        "one optimizer step",
    )


def advice(file: MegatronFile) -> tuple[Advice, ...]:
    """Return what Megatron's documentation says, and whether this file follows it."""
    result = []
    if file.triple is not None and len(file.triple) == 3 and file.triple[1] > 0:
        start, increment, _ = file.triple
        result.append(
            Advice(
                rule="the batch grows from start to global batch in steps of the increment",
                source=_HELP,
                holds=(file.final - start) % increment == 0,
                because=f"({file.final:,} - {start:,}) / {increment:,}",
            )
        )
    if file.stages > 1 and file.num_microbatches is not None:
        least = min(file.num_microbatches)
        result.append(
            Advice(
                rule="many more microbatches than pipeline stages keep the bubble small",
                source="Narayanan et al. 2021, section 2.2",
                holds=least >= 4 * file.stages,
                because=f"the smallest phase has {least:,} microbatches for {file.stages:,} stages",
            )
        )
    return tuple(result)
