"""From measurements to a ramp: candidates, and what the model of `rampup.plan.design` predicts for each."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rampup.config.build import build_plan
from rampup.config.load import load_config
from rampup.config.schema import IDENTITY_KEYS, Config
from rampup.errors import ConfigError, DataError, RampupError
from rampup.plan.budget import SECONDS_PER_HOUR
from rampup.plan.design import (
    FRUGAL_WASTE,
    DesignModel,
    NoiseCurve,
    Schedule,
    StepTimes,
    format_schedule,
    loss_penalty,
    loss_slope,
)
from rampup.plan.noise_scale import measured_noise
from rampup.plan.plan import RampPlan
from rampup.run.run_folder import CONFIG_FILE, CRITICAL_RESULT, CRITICAL_SUFFIX, METRICS_FILE, as_path, read_lines

# Candidates go up to this many times the largest batch that was timed, and have at least this many optimizer steps.
BEYOND_MEASURED, LEAST_STEPS = 4, 32


def design_ramp(
    config: Config,
    measured: str | Path | Sequence[str | Path],
    *,
    num_devices: int,
    train_tokens: int | None = None,
    max_batch: int | None = None,
) -> dict[str, Any]:
    """Compare schedules for a run by the steps, hours and loss that a model predicts from measurements.

    The model is that of `rampup.plan.design`; its answer is an estimate, and `assumptions` says what it rests on.

    Args:
        config: the configuration of the run to design.
        measured: folders of measured runs, and files with the output of `rampup tune --json`. The first run with a noise scale
            or a critical batch gives the noise; step times of all are used.
        num_devices: devices of the run to design.
        train_tokens: tokens of the run to design; None = those of the configuration.
        max_batch: largest global batch in samples; None = four times the largest that was timed.

    Returns:
        What `rampup design --json` prints. Each of `candidates` has a `batch_size_schedule` for the configuration.

    Raises:
        ConfigError: no length of the run, nothing to choose from, or measurements of other sequence lengths.
        DataError: no noise scale and no critical batch was measured.

    Example:
        >>> config = rampup.load_config("configs/base.yml")  # doctest: +SKIP
        >>> found = rampup.design_ramp(config, ["runs/demo"], num_devices=8, train_tokens=10**9)  # doctest: +SKIP
        >>> [(each["name"], each["hours"], each["batch_size_schedule"]) for each in found["candidates"]]  # doctest: +SKIP
    """
    tokens = config.train_tokens if train_tokens is None else train_tokens
    if not tokens:
        raise ConfigError(
            "a design needs the length of the run: give train_tokens (--train-tokens), such as 300B", key="train-tokens"
        )
    paths = [measured] if isinstance(measured, (str, os.PathLike)) else measured
    measurements = Measurements.read([as_path(path) for path in paths], config)
    length = config.max_target_length
    samples = -(-tokens // length)
    plan = build_plan(config, num_devices)
    sizes = _legal_sizes(plan, measurements, samples, max_batch)
    times = StepTimes.fit(dict(measurements.seconds))
    curves = [NoiseCurve.measured(points) for points in (measurements.noise, measurements.low, measurements.high)]
    models = [DesignModel(noise=curve, times=times) for curve in curves]
    model, notes = models[0], list(measurements.notes)
    schedules = _candidates(config, num_devices, tokens, model, sizes, notes)

    slope = loss_slope(measurements.losses)
    if slope is None:
        notes.append("the measured run is too short for the slope of its loss, so no loss penalty is predicted")
    constant = ((0, sizes[0]),)
    references = [each.run(constant, samples=samples).progress for each in models]
    ends = [curve.knots[-1][0] for curve in curves]
    unit = length if config.batch_size_schedule_unit == "tokens" else 1
    candidates = []
    for name, schedule in schedules.items():
        text = format_schedule(schedule, tokens_per_sample=unit)
        build_plan(replace(config, **_schedule_settings(text)), num_devices)  # refuses what `rampup plan` would refuse
        outcome = model.run(schedule, samples=samples)
        # By how the noise scale is at its estimate and at both ends of its interval.
        penalties = [
            loss_penalty(each.run(schedule, samples=samples).progress, reference, slope=slope, measured_at=end)
            for each, reference, end in zip(models, references, ends, strict=True)
            if slope is not None
        ] or [None]
        same = [each.run(schedule, progress=reference) for each, reference in zip(models, references, strict=True)]
        hours = [each.seconds / SECONDS_PER_HOUR for each in same]
        candidates.append(
            {
                "name": name,
                "batch_size_schedule": text,
                "start_tokens": [start * length for start, _ in schedule],
                "sizes": [size for _, size in schedule],
                "steps": outcome.steps,
                "hours": outcome.seconds / SECONDS_PER_HOUR,
                "wasted_samples": 1 - outcome.progress / references[0],
                "loss_penalty": penalties[0],
                "loss_penalty_low": min(penalties),
                "loss_penalty_high": max(penalties),
                "hours_to_same_loss": hours[0],
                "hours_to_same_loss_low": min(hours),
                "hours_to_same_loss_high": max(hours),
                "tokens_to_same_loss": same[0].samples * length,
            }
        )
    return {
        "train_tokens": tokens,
        "train_samples": samples,
        "tokens_per_sample": length,
        "noise_source": measurements.source,
        "noise_scale_start": model.noise.at(1.0),
        "noise_scale_end": model.noise.at(references[0]),
        "noise_growth": model.noise.growth,
        "step_seconds": {str(size): measurements.seconds[size] for size in sorted(measurements.seconds)},
        "loss_slope": slope,
        "candidates": candidates,
        "fastest": min(candidates, key=lambda candidate: candidate["hours_to_same_loss"])["name"],
        "assumptions": _assumptions(measurements, model, references[0], sizes),
        "notes": notes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was measured.

    Attributes:
        seconds: seconds of a step by global batch size.
        source: the kind of measurement that `noise` is: `critical` or `noise_scale`.
        noise: (samples consumed, batch, noise scale), in order; the critical batch stands for the noise scale.
        low, high: the same for the ends of the intervals.
        losses: (samples consumed, loss) of the run whose noise it is.
        notes: remarks.
    """

    seconds: Mapping[int, float]
    source: str
    noise: Sequence[tuple[int, int, float]]
    low: Sequence[tuple[int, int, float]]
    high: Sequence[tuple[int, int, float]]
    losses: Sequence[tuple[int, float]] = ()
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, paths: Sequence[Path], config: Config) -> Measurements:
        """Read runs and results of `rampup tune`.

        Raises:
            RampupError: a path is neither, or something is missing.
        """
        seconds: dict[int, float] = {}
        notes: list[str] = []
        noise: tuple[str, list[tuple[int, int, float, float, float]]] | None = None
        losses: list[tuple[int, float]] = []
        for path in paths:
            if path.is_file():
                seconds |= _tuned_seconds(path)
                continue
            if not (path / METRICS_FILE).is_file():
                raise ConfigError(
                    f"{path} has no {METRICS_FILE}, and is no file with the output of `rampup tune --json`", key="measured"
                )
            seconds = _run_seconds(path, config, notes) | seconds
            lines = list(read_lines(path / METRICS_FILE))
            found = _critical_points(path) or _noise_points(lines)
            if found is not None and noise is None:
                noise = found
                losses = [(line["consumed_samples"], line["loss"]) for line in lines if line.get("loss") is not None]
        if noise is None:
            names = ", ".join(map(str, paths))
            raise DataError(
                f"no noise scale and no critical batch was measured in {names}: train with measure_gradient_noise=true, or run "
                "`rampup critical RUN_DIR` at one or more checkpoints",
                key="measured",
            )
        source, points = noise
        columns = [[(samples, batch, point[place]) for samples, batch, *point in points] for place in range(3)]
        return cls(
            seconds=seconds, source=source, noise=columns[0], low=columns[1], high=columns[2], losses=losses, notes=tuple(notes)
        )


def _tuned_seconds(path: Path) -> dict[int, float]:
    """Return the step times in the output of `rampup tune --json`."""
    try:
        phases = json.loads(path.read_text(encoding="utf-8"))["phases"]
        found = {int(row["global_batch_size"]): float(row["step_seconds"]) for row in phases if row["step_seconds"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the output of `rampup tune --json`: {error!r}", key="measured") from error
    if not found:
        raise ConfigError(f"{path}: tune has timed no phase", key="measured")
    return found


def _run_seconds(folder: Path, config: Config, notes: list[str]) -> dict[int, float]:
    """Return the median step times of a run, and note how its model differs."""
    from rampup.show.series import measured_throughput

    own = load_config(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else config
    if own.max_target_length != config.max_target_length:
        raise ConfigError(
            f"{folder} was measured with max_target_length={own.max_target_length}, but the design has "
            f"{config.max_target_length}: a batch in samples does not mean the same",
            key="max_target_length",
            nearest=(own.max_target_length,),
        )
    different = [name for name in IDENTITY_KEYS if getattr(own, name) != getattr(config, name)]
    if different:
        changes = ", ".join(f"{name}={getattr(own, name)}" for name in different[:6])
        notes.append(f"{folder} was measured with other keys ({changes}); its times and its noise are those of another run")
    return {size: float(size * own.max_target_length / rate) for size, rate in measured_throughput(folder).items()}


def _modified(file: Path) -> float:
    found = file.stat()
    return found.st_mtime if hasattr(found, "st_mtime") else found.mtime  # in a bucket


def _critical_points(folder: Path) -> tuple[str, list[tuple[int, int, float, float, float]]] | None:
    """Return what `rampup critical` has found at the checkpoints of a run; the largest window of each counts."""
    parent, by_step = folder.with_name(f"{folder.resolve().name}{CRITICAL_SUFFIX}"), dict[int, Any]()
    for file in sorted(parent.glob(f"step-*/{CRITICAL_RESULT}"), key=_modified):
        found = json.loads(file.read_text(encoding="utf-8"))
        by_step[found["step"]] = found
    points = []
    for _, found in sorted(by_step.items()):
        size = found["critical_batch_size"]
        sizes = sorted(branch["global_batch_size"] for branch in found["branches"])
        # The critical batch is between the largest that is good enough and the next one that was tried.
        larger = next((other for other in sizes if other > size), 4 * size)
        points.append((found["consumed_samples"], found["global_batch_size"], float(size), float(size), float(larger)))
    return ("critical", points) if points else None


def _noise_points(lines: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int, float, float, float]]] | None:
    """Return the noise scales in the lines of metrics.jsonl. If none has a value, the lower bounds count."""
    estimates = list(measured_noise(lines))
    for name in ("value", "low"):
        points = []
        for line, noise in estimates:
            if (value := getattr(noise, name)) and math.isfinite(value):
                place = line["consumed_samples"], line["global_batch_size"]
                high = 4 * value if noise.high is None else noise.high
                points.append((*place, value, min(noise.low or value, value), max(high, value)))
        if points:
            return "noise_scale", points
    return None


def _legal_sizes(plan: RampPlan, measured: Measurements, samples: int, max_batch: int | None) -> list[int]:
    """Return the batches to choose from: the plan's first one, and its doublings that can be split."""
    smallest = plan.ramp.sizes[0]
    wanted = max_batch or BEYOND_MEASURED * max(measured.seconds, default=smallest)
    most = min(wanted, max(samples // LEAST_STEPS, smallest))
    doublings = (smallest << power for power in range(max(most // smallest, 1).bit_length()))
    sizes = [size for size in doublings if size <= most and plan.splitter.allows(size)]
    if len(sizes) < 2:
        problem = f"there is nothing to choose from: no multiple of the first batch of {smallest:,} up to {most:,} is legal"
        if most < min(wanted, 2 * smallest):
            fix = f"{samples:,} samples are few for {LEAST_STEPS} steps of a larger batch; raise train_tokens (--train-tokens)"
            raise ConfigError(f"{problem}; {fix}", key="train-tokens")
        raise ConfigError(f"{problem}; raise max_batch (--max-batch)", key="max-batch")
    return sizes


def _candidates(
    config: Config, num_devices: int, tokens: int, model: DesignModel, sizes: Sequence[int], notes: list[str]
) -> dict[str, Schedule]:
    """Return the schedules to compare, by their names."""
    samples = -(-tokens // config.max_target_length)
    target = model.run(((0, sizes[0]),), samples=samples).progress
    best = min(sizes, key=lambda size: model.run(((0, size),), progress=target).seconds)
    found: dict[str, Schedule] = {f"constant {size:,}": ((0, size),) for size in sorted({sizes[0], best, sizes[-1]})}
    found["early growth, fastest"] = model.best_schedule(sizes, progress=target)
    found["early growth, frugal"] = model.frugal_schedule(sizes, samples=samples)
    if found["early growth, frugal"] == found["early growth, fastest"]:
        del found["early growth, frugal"]
        notes.append(f"the fastest ramp wastes less than {FRUGAL_WASTE:.0%} of the samples, so there is no more frugal one")
    try:
        settings = _schedule_settings(f"0:{sizes[0]}")
        budget = {"steps": -1, "train_tokens": tokens, "train_samples": None, "learning_rate_schedule_steps": -1}
        seesaw = {"seesaw_factor": 2.0, "seesaw_max_batch_size": sizes[-1], "learning_rate_clock": "samples"}
        planned = build_plan(replace(config, **(settings | budget | seesaw)), num_devices)
        found["seesaw"] = tuple((phase.start_sample, phase.global_batch_size) for phase in planned.ramp.phases)
    except RampupError as error:
        notes.append(f"no Seesaw candidate: {error}")
    found["one late switch"] = model.late_switch(sizes, samples=samples)
    return found


def _schedule_settings(schedule: str) -> dict[str, Any]:
    """Return the settings with which a configuration has a schedule instead of its own ramp."""
    off = {"enable_rampup_batch_size": False, "seesaw_factor": None, "seesaw_max_batch_size": None}
    return off | {"batch_size_schedule": schedule}


def _assumptions(measured: Measurements, model: DesignModel, progress: float, sizes: Sequence[int]) -> list[str]:
    """Return in sentences what the model assumes."""
    last = model.noise.knots[-1][0]
    kind = (
        "the critical batch of `rampup critical` is taken as the noise scale, the batch in which half of a sample is wasted"
        if measured.source == "critical"
        else "the measured noise scale is that of plain gradients; with Adam the true one can be very different: "
        "`rampup critical` at a few checkpoints is a better measurement"
    )
    found = [
        "a sample in a batch B does 1 / (1 + B/N) of the work of one in a tiny batch, N the noise scale (arXiv 1812.06162)",
        kind,
        "N depends on the progress of the training only, and every batch has its best learning rate",
    ]
    if progress > last:
        found.append(
            f"N was measured up to {last:,.0f} samples of progress and grows with the power {model.noise.growth:.2f} of it "
            f"from there to {progress:,.0f}"
        )
    timed = sorted(measured.seconds)
    if len(timed) == 1:
        found.append(f"only a batch of {timed[0]:,} was timed: a step takes time in proportion to its batch")
    elif sizes[-1] > timed[-1] or sizes[0] < timed[0]:
        found.append(f"batches of {timed[0]:,} to {timed[-1]:,} were timed; times of others are on a line through them")
    found += [
        "the reducible loss falls with the power 0.28 of the samples (arXiv 2203.15556), from the slope that the run measured",
        f"frugal: at most {FRUGAL_WASTE:.0%} of the samples are wasted, compared with the smallest batch",
        "Seesaw is judged by its batches alone; it also needs its learning rate (seesaw_factor=2)",
    ]
    return found
