"""MaxText's pre-training base.yml: what its batches, its ramp and its pipeline really do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.config.build import build_plan
from rampup.config.schema import KEYS, Config
from rampup.dialects.maxtext.explain import advice, flow, meanings
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
from rampup.dialects.maxtext.keys import AXIS_GROUPS, read_maxtext
from rampup.dialects.maxtext.rules import RULES, show
from rampup.dialects.maxtext.sizes import config_ramp_end, rows_lost_at_ramp_end
from rampup.dialects.nearest import find_violations
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Conversion, Run, Verdict
from rampup.errors import RampupError
from rampup.plan.numbers import AUTO, plain_number
from rampup.plan.plan import RampPlan
from rampup.plan.timetable import bubble_fraction

MAX_LISTED_PHASES = 12


def check(path: str | Path, overrides: Sequence[str] = ()) -> Verdict:
    """Return what a base.yml really does.

    Args:
        path: the file.
        overrides: `key=value` settings of known keys; `num_devices=N` says how many devices run it.

    Raises:
        ConfigError: the file cannot be read as MaxText's, or leaves the number of devices open.
    """
    settings = read_maxtext(path, overrides)
    file = MaxTextFile(values=settings.values)
    violations = find_violations(RULES, settings.values, lambda values: MaxTextFile(values=values))
    plan, refusal = _plan(file)
    derived = _derived(file)
    ramp_notes = list(_ramp_notes(file)) if file.manager is not None else []
    notes = [*_size_notes(file), *ramp_notes, *_pipeline_notes(file, settings)]
    if refusal is not None and not violations:
        refused = "; ".join(str(problem) for problem in refusal.problems or (refusal,))
        notes.append(f"rampup itself would refuse this file: {refused}")
    return Verdict(
        system="maxtext",
        violations=violations,
        outcome=_outcome(file),
        notes=tuple(notes),
        derived=derived,
        phases=tuple(plan.phase_rows()) if plan is not None and file.ramps else None,
        meanings=meanings(file, settings),
        flow=flow(file),
        advice=advice(file),
        plan=plan,
        conversion=_conversion(file, settings, refusal),
    )


def _conversion(file: MaxTextFile, settings: Settings, refusal: RampupError | None) -> Conversion:
    if refusal is not None:
        return Conversion(refusal=str(refusal))
    values = _values(file)
    expressed = {
        *values,
        *(f"{group}_{axis}_parallelism" for group in ("ici", "dcn") for axes in AXIS_GROUPS.values() for axis in axes),
    }
    expressed |= {"learning_rate_schedule_steps", "pipeline_parallel_layers"}
    ignored = {START, INCREMENT, SAMPLES} if not file.ramps else set()
    left_out = dict.fromkeys(sorted(settings.given & ignored), "the ramp is off")
    for name in sorted((settings.given - expressed - ignored) | settings.others):
        left_out[name] = "not converted; rampup has a key of this name" if name in KEYS else "no counterpart"
    return Conversion(values=values, left_out=left_out)


def _values(file: MaxTextFile) -> dict[str, Any]:
    expansion = file["expansion_factor_real_data"]
    values: dict[str, Any] = {
        "num_devices": file.num_devices,
        "num_slices": file["num_slices"],
        **{f"{group}_{axis}_parallelism": size for group, axes in file.combined_axes.items() for axis, size in axes.items()},
        END: file[END],
        EVAL: file[EVAL],
        ACCUMULATION: file[ACCUMULATION],
        "expansion_factor_real_data": expansion if expansion > 0 else Fraction(AUTO),
        "rampup_microbatch": "per_phase",
        "enable_rampup_batch_size": file.ramps,
        "steps": file.total_steps,
        "eval_interval": file["eval_interval"] if file["eval_interval"] > 0 else AUTO,
        "max_target_length": file["max_target_length"],
        "learning_rate_clock": "steps",
    }
    if file["eval_steps"] > 0:
        values["eval_steps"] = file["eval_steps"]
    if file["steps"] != AUTO and file["learning_rate_schedule_steps"] > 0:
        values["learning_rate_schedule_steps"] = file["learning_rate_schedule_steps"]
    if file.ramps:
        # Without samples to take, every phase of MaxText's lasts one step; so does a ramp of one sample.
        values |= {START: file[START], INCREMENT: file[INCREMENT], SAMPLES: max(file[SAMPLES], 1)}
    if file.stages > 1:
        values |= {
            MICROBATCHES: file.microbatches,
            "num_layers_per_pipeline_stage": file["num_layers_per_pipeline_stage"],
            "num_pipeline_repeats": file.repeats,
            "base_num_decoder_layers": file.layers,
            "pipeline_delay_activation_forwarding": file["pipeline_delay_activation_forwarding"],
        }
    return values


def _plan(file: MaxTextFile) -> tuple[RampPlan | None, RampupError | None]:
    """Return our plan of the same run, or why there is none."""
    try:
        return build_plan(Config(**_values(file))), None
    except RampupError as error:
        return None, error


def _outcome(file: MaxTextFile) -> Run:
    lost = _lost_at_end(file)
    return "drops" if _dropped_per_step(file) or lost else "runs"


def _dropped_per_step(file: MaxTextFile) -> int:
    """Rows loaded and not trained on, per step after the ramp; partial loading by few hosts reads each row once."""
    expansion = file["expansion_factor_real_data"]
    if expansion > 0 and file[END] >= 1:
        return 0
    return max(file.sizes.to_load - file.sizes.to_train, 0)


def _lost_at_end(file: MaxTextFile) -> int:
    manager = file.manager
    if manager is None or not manager.ends or manager.end < 1 or file["expansion_factor_real_data"] > 0:
        return 0
    *_, (_, _, trained) = manager.phases()
    return rows_lost_at_ramp_end(trained=trained, end=manager.end, loaded_per_pull=file.sizes.to_load)


def _derived(file: MaxTextFile) -> dict[str, Any]:
    sizes, evaluation, stages = file.sizes, file.eval_sizes, file.stages
    derived: dict[str, Any] = {
        "num_devices": file.num_devices,
        "global_batch_size_to_load": sizes.to_load,
        "global_batch_size_to_train_on": sizes.to_train,
        "micro_batch_size_to_train_on": sizes.micro,
        "global_batch_size_to_load_eval": evaluation.to_load,
        "global_batch_size_to_eval_on": evaluation.to_train,
        "data_parallel_size": file.axes.data_parallel_size,
        "accumulation_steps": file[ACCUMULATION],
        "num_stages": stages,
        "dropped_samples_per_step": _dropped_per_step(file),
    }
    if stages > 1 and file.microbatches > 0:
        delay = 2 if file["pipeline_delay_activation_forwarding"] else 1
        repeats = max(file.repeats, 1)
        derived |= {
            "num_repeats": file.repeats,
            "num_pipeline_microbatches": file.microbatches,
            "pipeline_microbatch_samples": sizes.micro // file.microbatches,
            # Forwarding one tick later is a pipeline with twice the distance between its stages.
            "bubble_fraction": float(bubble_fraction(delay * (stages - 1) + 1, max(file.microbatches, stages), repeats)),
        }
    if file.manager is not None:
        derived |= _ramp_derived(file)
    return derived


def _ramp_derived(file: MaxTextFile) -> dict[str, Any]:
    manager = file.manager
    assert manager is not None
    derived: dict[str, Any] = {
        "num_increments": manager.num_increments,
        "samples_per_increment": plain_number(Fraction(manager.samples, manager.num_increments)),
        "rampup_end_step": _config_end(file),
    }
    if manager.ends:
        phases = manager.phases()
        derived |= {
            "manager_phases": [list(phase) for phase in phases],
            "manager_ramp_steps": phases[-1][0],
            "manager_ramp_samples": phases[-1][2],
            "lost_samples_at_ramp_end": _lost_at_end(file),
        }
    return derived


def _config_end(file: MaxTextFile) -> int:
    return config_ramp_end(
        start=file[START],
        increment=file[INCREMENT],
        end=file[END],
        samples=file[SAMPLES],
        expansion=file["expansion_factor_real_data"],
        num_devices=file.num_devices,
        accumulation=file[ACCUMULATION],
    )


def _size_notes(file: MaxTextFile) -> Iterator[str]:
    sizes, dropped = file.sizes, _dropped_per_step(file)
    if dropped and sizes.micro >= 1:
        yield (
            f"{END}={show(file[END])} is below 1: a whole sample per device is loaded, {sizes.to_load:,} rows a step, and "
            f"{sizes.to_train:,} of them are trained on; {dropped:,} are dropped"
        )
    keys = (START, INCREMENT, END) if file.ramps else (END,)
    for key in keys:
        exact, cut = Fraction(file.num_devices) * file[key], file.global_size(key)
        if exact != cut:
            yield (
                f"num_devices * {key} = {file.num_devices} * {show(file[key])} = {show(exact)} is cut to {cut}, in floating "
                "point; rampup calls it an error"
            )
    expansion = file["expansion_factor_real_data"]
    if 0 < expansion < 1:
        yield (
            f"expansion_factor_real_data={show(expansion)}: the loaders of {int(1 / expansion)} times as many hosts take "
            f"turns, and each step gets the {sizes.to_load:,} rows of one of them, where global_batch_size_to_train_on says "
            f"{sizes.to_train:,}"
        )
    elif expansion > 1:
        yield (
            f"expansion_factor_real_data={show(expansion)}: 1 of {show(expansion)} hosts loads, for itself and the others; "
            f"global_batch_size_to_load={sizes.to_load:,} counts what they would load together if all did"
        )


def _ramp_notes(file: MaxTextFile) -> Iterator[str]:
    manager = file.manager
    assert manager is not None
    if not manager.ends:
        return
    phases = manager.phases()
    steps, _, trained = phases[-1]
    if file[ACCUMULATION] > 1:
        yield _accumulation_note(file, phases)
    if manager.samples < 1:
        yield f"{SAMPLES}={manager.samples:,} is below 1: every phase lasts one step"
    elif trained != manager.samples:
        yield (
            f"the ramp takes {trained:,} samples in {steps:,} steps where {SAMPLES} asks for {manager.samples:,} "
            f"({trained / manager.samples - 1:+.1%}): what a phase takes beyond its share is not counted towards the next"
        )
    if lost := _lost_at_end(file):
        yield (
            f"at the ramp's end {lost:,} rows that were loaded are never trained on: the buffer of {file.sizes.to_load:,} rows "
            f"is dropped with the ramp ({trained:,} trained, {trained + lost:,} loaded)"
        )
    yield (
        f"a resume within the ramp loses up to {max(file.sizes.to_load - 1, 0):,} buffered rows, which no checkpoint holds, "
        "and is one batch behind: a checkpoint labelled s holds s + 1 batches and s are replayed"
    )
    if (config_end := _config_end(file)) != steps:
        yield (
            f"the configuration takes the ramp to end at step {config_end:,} (rampup_end_step, from loaded rows: sizes below 1 "
            f"rounded up, accumulation counted), the manager at step {steps:,}; throughput metrics follow the first"
        )
    yield f"each of the {len(phases):,} batch sizes is compiled at its first step; only the final one is lowered at the start"


def _accumulation_note(file: MaxTextFile, phases: Sequence[tuple[int, int, int]]) -> str:
    *ramp, (steps, _, trained) = phases
    shown = ", ".join(f"{size:,}" for _, size, _ in ramp[:MAX_LISTED_PHASES])
    more = ", ..." if len(ramp) > MAX_LISTED_PHASES else ""
    return (
        f"MaxText's ramp ignores {ACCUMULATION}={file[ACCUMULATION]}: in the ramp its batches are {shown}{more} ({trained:,} "
        f"samples in {steps:,} steps), then the batch jumps from {ramp[-1][1]:,} to {file.sizes.to_train:,}; the phases here "
        "count the factor in every batch"
    )


def _pipeline_notes(file: MaxTextFile, settings: Settings) -> Iterator[str]:
    if file.stages == 1:
        ignored = [key for key in (MICROBATCHES, "num_pipeline_repeats", "pipeline_parallel_layers") if file[key] != AUTO]
        if ignored:
            yield f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} ignored: there is one pipeline stage"
        return
    if file.microbatches > 0 and file.sizes.micro % (file.microbatches * file.axes.data_parallel_size):
        yield (
            f"a pipeline microbatch of {file.sizes.micro // file.microbatches} samples does not divide over data * fsdp = "
            f"{file.axes.data_parallel_size}: MaxText does not check it, and devices share or pad samples"
        )
    if settings["model_name"] != "default" and "pipeline_parallel_layers" not in settings.given:
        yield (
            f"model_name={settings['model_name']} brings its own number of layers; {file.layers} from base_num_decoder_layers "
            "was used here, so give base_num_decoder_layers=N if the model has another"
        )
    if file[ACCUMULATION] > 1:
        yield (
            f"each of the {file[ACCUMULATION]} accumulation passes waits for the pipeline to fill; as many microbatches in one "
            "pass would wait once"
        )
