"""Megatron-LM and NeMo: what their batch arguments, their two ramps and their pipelines really do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.dialects.megatron.conversion import convert
from rampup.dialects.megatron.explain import advice, flow, meanings
from rampup.dialects.megatron.job import DECREASE, GLOBAL, MegatronFile
from rampup.dialects.megatron.keys import RAMP, SCHEDULE, is_nemo, read_megatron
from rampup.dialects.megatron.ramp import entries_of
from rampup.dialects.megatron.rules import ARGUMENTS, INTERLEAVED, LINEAR
from rampup.dialects.megatron.schedule_rules import RULES as SCHEDULED
from rampup.dialects.nearest import find_violations
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.plan.timetable import bubble_fraction

RULES = (*ARGUMENTS, *LINEAR, *SCHEDULED, *INTERLEAVED)


def check(path: str | Path, overrides: Sequence[str] = ()) -> Verdict:
    """Return what a file of Megatron arguments really does.

    Args:
        path: YAML, or a command line in a file; NeMo's YAML too.
        overrides: `key=value` settings of known arguments; `world_size=N` or `data_parallel_size=N` where the file has neither.

    Raises:
        ConfigError: the file cannot be read as Megatron's, or leaves the number of replicas open.
    """
    settings = read_megatron(path, overrides)
    file = MegatronFile(values=settings.values)
    _check_replicas(file, str(path))
    violations = find_violations(RULES, settings.values, lambda values: MegatronFile(values=values))
    rows = phase_rows(file)
    conversion = convert(file, settings)
    plan = None if conversion.refusal else build_plan(Config(**conversion.values))
    ramps = file[RAMP] is not None or file[SCHEDULE] is not None
    return Verdict(
        system="megatron",
        violations=violations,
        notes=tuple(_notes(file, settings)),
        derived=_derived(file),
        phases=tuple(rows) if rows is not None and ramps else None,
        meanings=meanings(file, settings),
        flow=flow(file),
        advice=advice(file),
        plan=plan,
        conversion=conversion,
    )


def phase_rows(file: MegatronFile) -> list[Mapping[str, Any]] | None:
    """Return every phase as `rampup plan --json` does; None where a batch cannot be cut.

    Our own pipeline takes multiples of its stages; Megatron's takes any number of microbatches, so each size is cut by itself.
    """
    if file.ramp is None or not file.cut:
        return None
    by_size: dict[int, Mapping[str, Any]] = {}
    for size in file.sizes:
        plan = RampPlan(
            ramp=BatchRamp.constant(size),
            splitter=_splitter(file, size // file.unit),
            num_devices=file.num_devices,
            total_steps=1,
        )
        by_size[size] = plan.phase_rows()[0]
    return [
        {
            **by_size[phase.global_batch_size],
            "start_step": phase.start_step,
            "start_sample": phase.start_sample,
            "num_steps": phase.num_steps,
        }
        for phase in file.ramp.phases
    ]


def _splitter(file: MegatronFile, microbatches: int) -> BatchSplitter:
    return BatchSplitter(
        data_parallel_size=file.replicas,
        num_stages=file.stages,
        num_repeats=file.chunks if file.stages > 1 else 1,
        num_pipeline_microbatches=microbatches if file.stages > 1 else -1,
        microbatch_size=file.micro,
        strict_multiple=False,
    )


def _check_replicas(file: MegatronFile, path: str) -> None:
    if file.world is None and file["data_parallel_size"] is None:
        raise ConfigError(
            "the number of devices is not in the file; add world_size=N (or data_parallel_size=N)", key="world_size", path=path
        )
    if file["data_parallel_size"] is not None and file.world is not None and file.world != file.num_devices:
        raise ConfigError(
            f"data_parallel_size * tensor * pipeline * context parallel sizes = {file.replicas} * {file.model_parallel} = "
            f"{file.num_devices} is not the world size {file.world}",
            key="data_parallel_size",
            nearest=(file.world // file.model_parallel,),
            path=path,
        )


def _derived(file: MegatronFile) -> dict[str, Any]:
    derived: dict[str, Any] = {
        "num_devices": file.num_devices,
        "data_parallel_size": file.replicas,
        "micro_batch_size": file.micro,
        "num_stages": file.stages,
        "num_repeats": file.chunks,
        "thresholds_samples": None,
        "num_microbatches": file.num_microbatches,
    }
    if file[SCHEDULE] is not None:
        derived["thresholds_samples"] = [[entry.samples, entry.size] for entry in file.thresholds]
    if file.ramp is not None:
        derived |= {
            "global_batch_size": file.ramp.sizes[-1],
            "ramp_phases": [[p.start_step, p.global_batch_size, p.start_sample] for p in file.ramp.phases],
            "num_increments": file.ramp.num_increments,
            "ramp_steps": file.ramp.ramp_steps,
            "ramp_samples": file.ramp.ramp_samples,
        }
    if file.num_microbatches is not None:
        derived["accumulation_steps"] = file.num_microbatches[-1]
        derived["bubble_fraction"] = float(bubble_fraction(file.stages, file.num_microbatches[-1], file.chunks))
    return derived


def _notes(file: MegatronFile, settings: Settings) -> Iterator[str]:
    if file[SCHEDULE] is not None:
        yield from _schedule_notes(file)
    elif file.linear is not None:
        yield from _linear_notes(file)
    elif file[DECREASE] and file.ramp is not None and file.ramp.sizes[-1] != file.final:
        yield f"{DECREASE}: {GLOBAL}={file.final:,} runs as {file.ramp.sizes[-1]:,}, a multiple of {file.unit:,}"
    if file[RAMP] is not None and file[SCHEDULE] is not None:
        yield f"{RAMP} is ignored: versions that know {SCHEDULE} only warn of it"
    if file.chunks > 1 and file.stages == 1:
        yield "there is one pipeline stage: its layer chunks change nothing"
    if is_nemo(settings) and file.ramp is not None and len(file.ramp.phases) > 1:
        yield "NeMo 2 ends the job at every change of the batch, to be started again with the devices for the next"
    if file.num_microbatches is not None and file.stages > 1 and min(file.num_microbatches) < file.stages:
        yield f"with {min(file.num_microbatches)} microbatches the {file.stages} pipeline stages are never all busy; it runs"


def _linear_notes(file: MegatronFile) -> Iterator[str]:
    linear = file.linear
    assert linear is not None
    assert file.ramp is not None
    exact = [(p.start_step, p.global_batch_size, p.start_sample) for p in file.ramp.phases]
    if linear.unit > 1:
        yield f"{DECREASE}: every batch is rounded down to a multiple of {linear.unit:,}: {_listed(file.ramp.sizes)}"
    for ours, theirs in zip(exact, linear.as_run(), strict=False):
        if ours != theirs:
            yield (
                f"exact arithmetic changes to {ours[1]:,} at step {ours[0]:,} (sample {ours[2]:,}); Megatron's floating-point "
                f"division has {theirs[1]:,} from step {theirs[0]:,} (sample {theirs[2]:,}); later phases may differ too"
            )
            break
    skipped = linear.num_increments + 1 - len(exact)
    if skipped and linear.unit == 1:
        yield f"{skipped:,} of the {linear.num_increments + 1:,} sizes are overtaken by one large step and never run"
    yield "at every change Megatron saves a checkpoint; the learning rate follows samples and is not scaled with the batch"


def _schedule_notes(file: MegatronFile) -> Iterator[str]:
    written = entries_of(file[SCHEDULE])
    kept = [entry.text for entry in file.thresholds]
    if None not in file.entries and written != kept:
        yield f"{SCHEDULE} is in the wrong order; Megatron sorts it, as was done here: {_listed(kept)}"
    if file["seq_length"] is None:
        yield "thresholds are taken as samples; from its command line Megatron always takes them as tokens (give seq_length=N)"
    for entry in file.thresholds:
        if entry.samples != entry.as_run:
            yield (
                f"threshold {entry.text.partition(':')[0]} is {entry.samples:,} samples exactly and {entry.as_run:,} in "
                "Megatron's floating-point product"
            )
        size = entry.text.partition(":")[2]
        if "." in size and not size.upper().endswith(("K", "M", "B", "T")):
            yield f"{entry.text}: the size is cut to {entry.size}, silently"
    if file.ramp is not None:
        overtaken = len({entry.size for entry in file.thresholds}) - len(set(file.ramp.sizes))
        if overtaken > 0:
            yield f"{overtaken:,} sizes are overtaken by one large step and never run"
        yield "evaluation uses one micro batch per replica unless eval_global_batch_size is given"


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values[:12])
    return shown + (", ..." if len(values) > 12 else "")
