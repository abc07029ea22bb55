"""Design a ramp from the files of measured runs: read them, and compare candidates by
`rampup.contrib.lab.design_model`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rampup.config.build import build_plan
from rampup.config.load import load_config
from rampup.config.schema import IDENTITY_KEYS, Config
from rampup.contrib.lab.critical import critical_bound, implied_noise_scale
from rampup.contrib.lab.design_model import (
    DATA_EXPONENTS,
    PUBLISHED_GROWTH,
    DesignModel,
    ForgettingModel,
    NoiseCurve,
    NoisePoint,
    Outcome,
    Schedule,
    StepTimes,
    format_schedule,
    loss_line,
    loss_penalty,
    noise_curves,
)
from rampup.errors import ConfigError, DataError, RampupError
from rampup.loop.run_folder import (
    CONFIG_FILE,
    CRITICAL_RESULT,
    CRITICAL_SUFFIX,
    METRICS_FILE,
    as_path,
    measured_throughput,
    read_lines,
    require_count,
)
from rampup.plan.describe import SECONDS_PER_HOUR
from rampup.plan.noise_scale import NoiseEstimate, NoiseScale, fieller
from rampup.plan.numbers import finite_or_none

# Names in metrics.jsonl: S and G2 of a step; the running noise scale and its interval,
# in samples and in units of weight.
TRACE, SQUARED_NORM = "gradient_noise_trace", "gradient_squared_norm"
SAMPLES, TOKENS = (
    tuple(f"noise_scale_{unit}{end}" for end in ("", "_low", "_high"))
    for unit in ("samples", "tokens")
)
COUNTS = ("consumed_samples", "global_batch_size")
# larger than any number of a step, and small enough that squares of squares are finite
LARGEST = 1e50
LEAST_BIN = 16  # steps that S and G2 are averaged over at least
# S over the standard error of G2, by the lower end of the 90% interval of a G2 that is
# as large as that error.
OPEN_RATIO = 2.64
# the largest ratio of the ends of an interval at which an octave of samples still has
# its own noise scale
PRECISE = 4.0
# The same for the first and the last step, and the shares of a run that their lines go
# through: the first that is precise.
END_PRECISE = 8.0
FIRST_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
LAST_SHARES = (1 / 4, 1 / 2, 1.0)
FOREVER = 1e300  # a half-life with which no step of an average fades
Steps = list[
    tuple[Mapping[str, Any], float]
]  # lines of metrics.jsonl, each with its samples per unit of weight
# Candidates go up to this many times the largest batch that was timed, and have at
# least this many optimizer steps.
BEYOND_MEASURED, LEAST_STEPS = 4, 32
COURSE_PARTS = (
    10  # places of a run at which its loss, hours and noise scale are predicted
)
# the noise scale is not taken to grow by more after its last measurement, unless the
# growth is named
MOST_GROWTH = 4.0


def design_ramp(
    config: Config,
    measured: str | Path | Sequence[str | Path],
    *,
    num_devices: int,
    train_tokens: int | None = None,
    max_batch: int | None = None,
    assume_growth: float | None = None,
) -> dict[str, Any]:
    """Compare schedules for a run by the steps, hours and loss that a model predicts
    from measurements.

    Returns what `rampup design --json` prints, an estimate, of which `assumptions` says
    what it rests on. Each of `candidates` has a `batch_size_schedule` for the
    configuration.

    Args:
        config: the configuration of the run to design, on `num_devices` devices.
        measured: folders of measured runs, and files with the output of `rampup tune
            --json`. The first run with a noise scale or a critical batch gives the
            noise; step times of all are used.
        train_tokens: tokens of the run to design; None = those of the configuration.
        max_batch: largest global batch in samples; None = four times the largest that
            was timed.
        assume_growth: power of the progress with which the noise scale grows after its
            last measurement, 0 to 1. None = the measured one, at most 0.47, if it makes
            it at most 4 times as large.

    Raises:
        ConfigError: no length of the run, nothing to choose from, or measurements of
            other sequence lengths.
        DataError: no noise scale and no critical batch was measured, or too early for a
            run of this length.
    """
    tokens = config.train_tokens if train_tokens is None else train_tokens
    if not tokens:
        fix = "give train_tokens (--train-tokens), such as 300B"
        raise ConfigError(
            f"a design needs the length of the run: {fix}", key="train-tokens"
        )
    if assume_growth is not None and not 0 <= assume_growth <= 1:
        rule = (
            f"assume_growth={assume_growth} (--assume-growth) must be between 0 and 1"
        )
        raise ConfigError(
            rule, key="assume-growth", nearest=(float(assume_growth > 1),)
        )
    paths = [measured] if isinstance(measured, (str, os.PathLike)) else measured
    measurements = Measurements.read([as_path(path) for path in paths], config)
    length = config.max_target_length
    samples = -(-tokens // length)
    # The batches to choose from: the plan's first one, and its doublings that can be
    # split.
    plan = build_plan(config, num_devices)
    smallest = plan.ramp.sizes[0]
    wanted = max_batch or BEYOND_MEASURED * max(measurements.seconds, default=smallest)
    most = min(wanted, max(samples // LEAST_STEPS, smallest))
    doublings = (
        smallest << power for power in range(max(most // smallest, 1).bit_length())
    )
    sizes = [size for size in doublings if size <= most and plan.splitter.allows(size)]
    if len(sizes) < 2:
        problem = (
            "there is nothing to choose from: no multiple of the first batch of"
            f" {smallest:,} up to {most:,} is legal"
        )
        if most < min(wanted, 2 * smallest):
            fix = (
                f"{samples:,} samples are few for {LEAST_STEPS} steps of a larger"
                " batch; raise train_tokens (--train-tokens)"
            )
            raise ConfigError(f"{problem}; {fix}", key="train-tokens")
        raise ConfigError(f"{problem}; raise max_batch (--max-batch)", key="max-batch")
    times = StepTimes.fit(dict(measurements.seconds))
    # By how the noise scale is at its estimate and at both ends of its interval.
    models = [
        DesignModel(noise=curve, times=times)
        for curve in noise_curves(measurements.noise, assume_growth)
    ]
    model, notes = models[0], [*measurements.notes]
    references = [
        each.run(((0, sizes[0]),), samples=samples).progress for each in models
    ]
    if assume_growth is None:
        _refuse_extrapolation(
            models, references, measurements.noise[-1].samples, samples
        )
    line = loss_line(measurements.losses)
    forecast = _Forecast(
        models=models,
        references=references,
        samples=samples,
        tokens_per_sample=length,
        slope=None if line is None else abs(line[1]),
        loss=(
            None
            if line is None
            else line[0] + line[1] * math.log(measurements.noise[-1].samples)
        ),
    )
    schedules = _candidates(config, num_devices, tokens, forecast, sizes, notes)
    if line is None:
        notes.append(
            "the measured run is too short for the slope of its loss, so no loss and no"
            " loss penalty is predicted"
        )
    reference = config.batch_scaling_reference or plan.ramp.sizes[-1]
    forgetting = _forgetting_model(config, forecast, reference)
    if forgetting is not None:
        schedules["one late switch"] = forgetting.late_switch(sizes)
    unit = length if config.batch_size_schedule_unit == "tokens" else 1
    candidates = []
    for name, schedule in schedules.items():
        text = format_schedule(schedule, tokens_per_sample=unit)
        rule = _rate_rule(config, reference)
        if (
            name == "seesaw"
        ):  # which replaces the falls of the rate, and makes the batches itself
            text = f"0:{sizes[0]}"
            rule = _seesaw_keys(sizes)
        settings = _settings(tokens, text, rule)
        # Refuses what `rampup plan` would refuse.
        build_plan(replace(config, **settings), num_devices)
        named = {
            "name": name,
            "batch_size_schedule": text,
            "rate_rule": rule,
            "settings": settings,
        }
        candidates.append(
            named | forecast.of(schedule) | {"course": forecast.course(schedule)}
        )
    fastest = min(candidates, key=lambda candidate: candidate["hours_to_same_loss"])[
        "name"
    ]
    forgets = _fastest_if_forgotten(forgetting, schedules, candidates)
    if forgets is not None and forgets != fastest:
        notes.append(
            f"the models disagree: {fastest!r} is the fastest by the noise scale alone,"
            f" and {forgets!r} if noise is forgotten, as at the constant learning rate"
            f" of lr_schedule_type={config.lr_schedule_type}; a short run of each would"
            " decide"
        )
    return {
        "train_tokens": tokens,
        "train_samples": samples,
        "tokens_per_sample": length,
        "noise_source": measurements.source,
        **_with_ends("noise_scale_start", [each.noise.at(1.0) for each in models]),
        **_with_ends(
            "noise_scale_end", [each.noise.at(references[0]) for each in models]
        ),
        "noise_scale_last_measured": model.noise.knots[-1][1],
        "noise_growth": model.noise.growth,
        "step_seconds": {
            str(size): seconds for size, seconds in sorted(measurements.seconds.items())
        },
        "loss_slope": forecast.slope,
        "candidates": candidates,
        "fastest": fastest,
        "fastest_if_noise_is_forgotten": forgets,
        "assumptions": _assumptions(
            measurements, model, references[0], sizes, forgetting
        ),
        "notes": notes,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """What is predicted for the schedules of a run, with ranges over the models, whose
    first is the best estimate.
    """

    models: Sequence[DesignModel]
    references: Sequence[
        float
    ]  # the progress of each model after the samples of the run in the smallest batch
    samples: int
    tokens_per_sample: int
    slope: (
        float | None
    )  # decrease of the measured loss per factor e of the samples; None if it is not known
    loss: float | None  # of the measured run at its last noise scale

    def of(self, schedule: Schedule) -> dict[str, Any]:
        """Return the predictions for the whole run."""
        outcomes = [each.run(schedule, samples=self.samples) for each in self.models]
        same = [
            each.run(schedule, progress=place)
            for each, place in zip(self.models, self.references, strict=True)
        ]
        ranges = {
            "hours": self._hours(schedule, [self.samples]),
            "hours_to_same_loss": self._hours(schedule, [end.samples for end in same]),
            "loss_penalty": self._penalties(outcomes, self.references),
            # Compared with a very small batch, whose samples are the progress.
            "token_overhead": [end.samples / end.progress - 1 for end in same],
        }
        found: dict[str, Any] = {
            "start_tokens": [start * self.tokens_per_sample for start, _ in schedule],
            "sizes": [size for _, size in schedule],
            "steps": outcomes[0].steps,
            "wasted_samples": 1 - outcomes[0].progress / self.references[0],
            "tokens_to_same_loss": same[0].samples * self.tokens_per_sample,
        }
        for key, values in ranges.items():
            found |= _with_ends(key, values)
        halved = replace(
            self.models[0].noise,
            knots=tuple(
                (place, noise / 2) for place, noise in self.models[0].noise.knots
            ),
        )
        half = replace(self.models[0], noise=halved).run(
            schedule, progress=same[0].progress
        )
        return found | {
            "more_tokens_if_noise_is_half": half.samples / same[0].samples - 1
        }

    def course(self, schedule: Schedule) -> list[dict[str, Any]]:
        """Return the predictions after each tenth of the samples."""
        course = []
        for part in range(1, COURSE_PARTS + 1):
            done = -(-self.samples * part // COURSE_PARTS)
            ends = [each.run(schedule, samples=done) for each in self.models]
            places = [each.noise.knots[-1][0] for each in self.models]
            # Not where the line through the measured loss does not hold.
            penalties = (
                self._penalties(ends, places)
                if 2 * ends[0].progress >= places[0]
                else [None]
            )
            losses = [
                None if self.loss is None or penalty is None else self.loss + penalty
                for penalty in penalties
            ]
            row = {
                "tokens": done * self.tokens_per_sample,
                "steps": ends[0].steps,
                **_with_ends("loss", losses),
            }
            row |= _with_ends("hours", self._hours(schedule, [done]))
            row |= _with_ends(
                "noise_scale",
                [
                    each.noise.at(end.progress)
                    for each, end in zip(self.models, ends, strict=True)
                ],
            )
            course.append(row)
        return course

    def _penalties(
        self, ends: Sequence[Outcome], places: Sequence[float]
    ) -> list[float | None]:
        """Return the loss at the ends less that at other places of the progress, by
        each model and exponent.
        """
        if self.slope is None:
            return [None]
        return [
            loss_penalty(
                end.progress,
                place,
                slope=self.slope,
                measured_at=each.noise.knots[-1][0],
                exponent=exponent,
            )
            for exponent in DATA_EXPONENTS
            for each, end, place in zip(self.models, ends, places, strict=True)
        ]

    def _hours(self, schedule: Schedule, samples: Sequence[int]) -> list[float]:
        times = self.models[0].times
        return [
            each.total(schedule, end) / SECONDS_PER_HOUR
            for end in samples
            for each in (times, *times.bounds())
        ]


def _with_ends(key: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Return a prediction, the first of the values, and both ends of its interval; an
    end without a limit is None.
    """
    known = [value for value in values if value is not None]
    ends = (
        {"low": min(known), "high": max(known)}
        if len(known) == len(values)
        else {"low": None, "high": None}
    )
    finite = {
        f"{key}_{end}": value if value is not None and value < math.inf else None
        for end, value in ends.items()
    }
    return {key: values[0], **finite}


def _forgetting_model(
    config: Config, forecast: _Forecast, reference: int
) -> ForgettingModel | None:
    """Return the second model of a run whose learning rate is constant for most of it;
    None for other runs.
    """
    if not forecast.slope or config.lr_schedule_type == "cosine":
        return None
    return ForgettingModel(
        model=forecast.models[0],
        batch=reference,
        power=1.0 if "linear" in _rate_rule(config, reference).values() else 0.5,
        # The share of a wsd run in which its rate falls stands for the progress in
        # which noise is forgotten.
        memory=max(config.wsd_decay_steps_fraction, 0.01) * forecast.references[0],
        slope=forecast.slope,
        length=forecast.samples,
    )


def _fastest_if_forgotten(
    forgetting: ForgettingModel | None,
    schedules: Mapping[str, Schedule],
    candidates: Sequence[dict[str, Any]],
) -> str | None:
    """Return the fastest candidate of the second model, and add its hours to all;
    Seesaw, which has other rates, has none.
    """
    key = "hours_to_same_loss_if_noise_is_forgotten"
    for candidate in candidates:
        candidate[key] = None
        if forgetting is not None and candidate["name"] != "seesaw":
            loss = forgetting.loss(forgetting.follow(schedules[candidates[0]["name"]]))
            candidate[key] = finite_or_none(
                forgetting.seconds(schedules[candidate["name"]], loss)
                / SECONDS_PER_HOUR
            )
    known = [candidate for candidate in candidates if candidate[key] is not None]
    return min(known, key=lambda candidate: candidate[key])["name"] if known else None


def _settings(tokens: int, schedule: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run of these tokens with a `batch_size_schedule` instead of
    the configuration's own ramp.
    """
    ramp = {
        "enable_rampup_batch_size": False,
        "seesaw_factor": None,
        "seesaw_max_batch_size": None,
    }
    length = {
        "steps": -1,
        "train_tokens": tokens,
        "train_samples": None,
        "learning_rate_schedule_steps": -1,
    }
    return ramp | length | {"batch_size_schedule": schedule} | rule


def _seesaw_keys(sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "seesaw_factor": 2.0,
        "seesaw_max_batch_size": sizes[-1],
        "learning_rate_clock": "samples",
    }


def _rate_rule(config: Config, reference: int) -> dict[str, Any]:
    """Return the keys that scale the learning rate with the batch: those of the
    configuration, or the optimizer's rule.
    """
    rate = config.batch_rule[0]
    own = config.learning_rate_batch_scaling != "auto" or (
        rate == "none" and config.batch_scaling != "none"
    )
    rule: str = rate if own else config.batch_scaling
    if rate == "none":
        rule = "linear" if config.opt_type == "sgd" else "sqrt"
    return {
        "learning_rate_batch_scaling" if own else "batch_scaling": rule,
        "batch_scaling_reference": reference,
    }


def _refuse_extrapolation(
    models: Sequence[DesignModel],
    references: Sequence[float],
    measured: float,
    samples: int,
) -> None:
    """Refuse a run in which the noise scale grows far beyond what was measured, if no
    growth was assumed by name.
    """
    growth = max(model.noise.growth for model in models)
    factor = max(
        (end / model.noise.knots[-1][0]) ** model.noise.growth
        for end, model in zip(references, models, strict=True)
    )
    if factor > MOST_GROWTH:
        raise DataError(
            f"the noise scale was last measured around sample {measured:,.0f}, as"
            f" {models[0].noise.knots[-1][1]:,.3g}; growing with a power of up to"
            f" {growth:.2f} of the progress, it would be {factor:,.3g} times as large"
            f" after {samples:,} samples, more than {MOST_GROWTH:g} times: measure in a"
            " longer run, or name a growth that you assume with assume_growth"
            f" (--assume-growth): {PUBLISHED_GROWTH} (arXiv 2410.21676), or 0 for none",
            key="assume-growth",
            nearest=(PUBLISHED_GROWTH, 0),
        )


class Measurements(NamedTuple):
    """Everything that was measured."""

    seconds: Mapping[int, float]  # seconds of a step by global batch size
    source: str  # the kind of measurement that `noise` is: `critical` or `noise_scale`
    noise: Sequence[
        NoisePoint
    ]  # the noise scale along the run, in order; the critical batch stands for it
    losses: Sequence[
        tuple[int, float]
    ]  # (samples consumed, loss) of the run whose noise it is
    notes: Sequence[str]

    @classmethod
    def read(cls, paths: Sequence[Path], config: Config) -> Measurements:
        """Read runs and results of `rampup tune`."""
        seconds: dict[int, float] = {}
        notes: list[str] = []
        source = ""
        noise = list[NoisePoint]()
        losses = list[tuple[int, float]]()
        for path in paths:
            if path.is_file():
                try:
                    phases = json.loads(path.read_text(encoding="utf-8"))["phases"]
                    timed = {
                        int(row["global_batch_size"]): float(row["step_seconds"])
                        for row in phases
                        if row["step_seconds"]
                    }
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{path} is not the output of `rampup tune --json`: {error!r}",
                        key="measured",
                    ) from error
                if not timed:
                    raise ConfigError(
                        f"{path}: tune has timed no phase", key="measured"
                    )
                seconds |= timed
                continue
            if not (path / METRICS_FILE).is_file():
                problem = (
                    f"{path} has no {METRICS_FILE}, and is no file with the output of"
                    " `rampup tune --json`"
                )
                raise ConfigError(problem, key="measured")
            lines = _checked_lines(path)
            seconds = _run_seconds(path, config, lines, notes) | seconds
            points = _noise_points(lines)
            critical = _critical_points(path)
            if critical:
                # Both measure the same quantity, the critical batch better but only at
                # its checkpoint. So before the first and after the last one, the noise
                # scale counts, times the ratio of the two there unless one is only a
                # bound. The intervals contain both: in
                # docs/explanation/does_a_ramp_pay.md, the smaller one was right.
                first, last = critical[0], critical[-1]
                curve = NoiseCurve(
                    knots=tuple(
                        (each.samples, each.noise)
                        for each in points
                        if not each.is_bound
                    ),
                    growth=0.0,
                )
                ratios = [
                    (
                        1.0
                        if to.is_bound or not curve.knots
                        else to.noise / curve.at(to.samples)
                    )
                    for to in (first, last)
                ]
                before = [
                    each.scaled(ratios[0]).widened(each.low, each.high)
                    for each in points
                    if each.samples < first.samples
                ]
                after = [
                    each.scaled(ratios[1]).widened(each.low, each.high)
                    for each in points
                    if each.samples > last.samples
                ]
                if curve.knots:
                    critical = [
                        each.widened(curve.at(each.samples), curve.at(each.samples))
                        for each in critical
                    ]
                points = [*before, *critical, *after]
                if not before:
                    notes.append(
                        f"nothing was measured before sample {first.samples:,}: the"
                        " critical batch there is taken from the start on; `rampup"
                        " critical RUN_DIR --step STEP` measures at an earlier"
                        " checkpoint"
                    )
            if points and not noise:
                source = "critical" if critical else "noise_scale"
                noise = points
                losses = [
                    (line["consumed_samples"], line["loss"])
                    for line in lines
                    if line.get("loss") is not None
                ]
        if not noise:
            names = ", ".join(map(str, paths))
            fix = (
                "train with measure_gradient_noise=true, or run `rampup critical"
                " RUN_DIR` at one or more checkpoints"
            )
            raise DataError(
                f"no noise scale and no critical batch was measured in {names}: {fix}",
                key="measured",
            )
        what, larger = (
            "noise scale",
            "measure over more samples, or in a larger batch",
        )
        if source == "critical":
            what, larger = ("critical batch", "measure again with larger --multiples")
        lowest = [
            (point.samples, point.low) for point in noise if point.high == math.inf
        ]
        highest = [(point.samples, point.noise) for point in noise if point.low == 0]
        notes += [
            f"at {len(bounds)} of {len(noise)} places the {what} is only known to be"
            f" {relation} a number, {bounds[-1][1]:,.0f} the last time, after"
            f" {bounds[-1][0]:,.0f} samples: the design follows other estimates, held"
            f" to these bounds; {fix}"
            for relation, bounds, fix in (
                ("at least", lowest, larger),
                ("at most", highest, "try smaller --multiples"),
            )
            if bounds
        ]
        return cls(seconds, source, noise, losses, notes)


def _checked_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, or refuse it if a number that a design needs
    is damaged.
    """
    lines, before = list(read_lines(folder / METRICS_FILE)), 0
    for line in lines:
        for key in COUNTS:
            require_count(line, key, str(folder))
        where = f"{folder}, step {line['step']} of its {METRICS_FILE}"
        for key in ("loss", TRACE, SQUARED_NORM, *SAMPLES, *TOKENS):
            value = line.get(key)
            number = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and abs(value) < LARGEST
            )
            if value is not None and not (
                number and (value >= 0 or key in ("loss", TRACE, SQUARED_NORM))
            ):
                rule = (
                    f"{key}={reprlib.repr(value)} is damaged; it must be a number or"
                    " null"
                )
                raise DataError(f"{where}: {rule}", key="measured")
        samples, size = (line[key] for key in COUNTS)
        if size < 1 or samples <= before:
            rule = (
                f"global_batch_size={size} must be at least 1, and"
                f" consumed_samples={samples} more than {before}"
            )
            raise DataError(f"{where}: {rule}, that of the line before", key="measured")
        before = samples
    return lines


def _run_seconds(
    folder: Path, config: Config, lines: Sequence[Mapping[str, Any]], notes: list[str]
) -> dict[int, float]:
    """Return the median step times of a run, and note how its model differs."""
    throughput = measured_throughput(folder, lines)
    length = config.max_target_length
    if (folder / CONFIG_FILE).is_file():
        own = load_config(folder / CONFIG_FILE)
        if own.max_target_length != length:
            rule = (
                f"{folder} was measured with max_target_length={own.max_target_length},"
                f" but the design has {length}"
            )
            nearest = (own.max_target_length,)
            raise ConfigError(
                f"{rule}: a batch in samples does not mean the same",
                key="max_target_length",
                nearest=nearest,
            )
        if different := [
            name
            for name in IDENTITY_KEYS
            if getattr(own, name) != getattr(config, name)
        ]:
            changes = ", ".join(
                f"{name}={getattr(own, name)}" for name in different[:6]
            )
            notes.append(
                f"{folder} was measured with other keys ({changes}); its times and its"
                " noise are those of another run"
            )
    else:
        # A run of another loop, which may count something else than this model's
        # tokens, or samples.
        rows = (
            (
                line["global_batch_size"],
                line.get("tokens_per_second"),
                line.get("step_seconds"),
            )
            for line in lines
        )
        lengths = sorted(
            rate * time / size
            for size, rate, time in rows
            if isinstance(rate, float) and isinstance(time, float)
        )
        length = round(lengths[len(lengths) // 2]) if lengths else length
    return {size: float(size * length / rate) for size, rate in throughput.items()}


def _critical_points(folder: Path) -> list[NoisePoint]:
    """Return the noise scales that `rampup critical` has found at a run's checkpoints;
    the largest window of each counts.
    """
    parent = folder.with_name(f"{folder.resolve().name}{CRITICAL_SUFFIX}")
    by_step = dict[int, tuple[int, NoisePoint]]()
    for file in sorted(parent.glob(f"step-*/{CRITICAL_RESULT}"), key=str):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not found["decisive"]:
                continue
            step, tokens, size = (
                int(found[key]) for key in ("step", "tokens", "critical_batch_size")
            )
            sizes = [int(branch["global_batch_size"]) for branch in found["branches"]]
            share = {key: float(found[key]) for key in ("tolerance", "gain")}
            bound = critical_bound(sizes, size)
            if (
                min(*sizes, found["consumed_samples"], found["global_batch_size"]) < 1
                or share["gain"] <= share["tolerance"]
            ):
                raise ValueError("a size below 1, or a gain below the tolerance")
            # The critical batch is between the largest that is good enough and the next
            # one that was tried.
            high = (
                math.inf
                if bound == "at_least"
                else float(min(other for other in sizes if other > size))
            )
            low = 0.0 if bound == "at_most" else float(size)
            value, low, high = (
                implied_noise_scale(each, **share) for each in (size, low, high)
            )
            point = NoisePoint(
                int(found["consumed_samples"]),
                int(found["global_batch_size"]),
                value,
                low,
                high,
            )
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
            problem = f"{file} is not a result of `rampup critical`: {error!r}"
            raise ConfigError(
                f"{problem}; delete its folder, and measure again", key="measured"
            ) from error
        if step not in by_step or tokens > by_step[step][0]:
            by_step[step] = tokens, point
    return [point for _, (_, point) in sorted(by_step.items())]


def _noise_points(lines: Sequence[Mapping[str, Any]]) -> list[NoisePoint]:
    """Return the noise scale in every octave of a run's samples, and at its first and
    last step by lines through S and G2.

    An octave has the averages over all its steps: those whose running estimate has a
    value have too large a G2.
    """

    def average(steps: Steps) -> NoiseScale:
        noise = NoiseScale(half_life_samples=FOREVER)
        for line, rate in steps:
            size = line["global_batch_size"]
            noise.update(
                samples=size,
                weight=size / rate,
                trace=line[TRACE],
                squared_norm=line[SQUARED_NORM],
            )
        return noise

    def is_precise(steps: Steps) -> bool:
        found = average(steps).tokens
        return (
            found.high is not None
            and bool(found.low)
            and found.high <= PRECISE * found.low
        )

    # The samples of a unit of weight, in which S and G2 are; None if a line has no
    # estimate.
    pairs = [
        [
            (line.get(samples), line.get(tokens))
            for samples, tokens in zip(SAMPLES, TOKENS, strict=True)
        ]
        for line in lines
    ]
    rates = [
        next((samples / tokens for samples, tokens in each if samples and tokens), None)
        for each in pairs
    ]
    rate = next(
        (rate for rate in rates if rate), 0.0
    )  # the first lines have no estimate yet
    octaves: list[Steps] = [[]]
    before = 0
    for line, own in zip(lines, rates, strict=True):
        rate = own or rate
        if (
            None in (line.get(TRACE), line.get(SQUARED_NORM))
            or line.get("skipped", False)
            or not rate
        ):
            continue
        # The last one is the second half of the samples, the one before that half of
        # the rest.
        octave = (
            lines[-1]["consumed_samples"] // line["consumed_samples"]
        ).bit_length()
        if octave != before and len(octaves[-1]) >= LEAST_BIN:
            octaves.append([])
        octaves[-1].append((line, rate))
        before = octave
    if len(octaves) > 1 and len(octaves[-1]) < LEAST_BIN:
        octaves[-2:] = [octaves[-2] + octaves[-1]]
    # Neighbours that are not precise are averaged together.
    bins: list[Steps] = []
    for precise, group in itertools.groupby(octaves, is_precise):
        parts = list(group)
        bins += parts if precise else [list(itertools.chain(*parts))]
    points = []
    for steps in filter(None, bins):
        noise = average(steps)
        samples, batch = (
            sum(line[key] for line, _ in steps) / len(steps) for key in COUNTS
        )
        points.append(
            _point(
                samples,
                batch,
                noise.in_samples,
                noise.trace * noise.samples_per_weight,
                noise.squared_norm,
            )
        )
    steps = list(itertools.chain(*octaves))
    if len(steps) >= LEAST_BIN:
        points = [
            _end_point(steps, FIRST_SHARES),
            *points,
            _end_point(steps[::-1], LAST_SHARES),
        ]
    return [point for point in points if point.low]


def _point(
    samples: float,
    batch: float,
    found: NoiseEstimate,
    trace: float,
    squared_norm: float,
) -> NoisePoint:
    """Return an estimate of the noise scale as a point. Its S is that of a sample."""
    low = found.low or 0.0
    # The interval is open if 0 is in that of G2. The ratio is a number all the same
    # unless G2 is below its standard error.
    value = found.value or low
    if (
        found.value is None
        and squared_norm > 0
        and trace < OPEN_RATIO * low * squared_norm
    ):
        value = trace / squared_norm
    return NoisePoint(
        samples, batch, value, low, math.inf if found.high is None else found.high
    )


def _end_point(steps: Steps, shares: Sequence[float]) -> NoisePoint:
    """Return the noise scale at the first of the steps, by least-squares lines through
    their S and through their G2.

    They go through the first share of the run that gives a precise interval: Fieller's,
    with HC3 variances (MacKinnon and White 1985).
    """
    # Straight over the samples at the start of the run, and over their logarithm at its
    # end, from where the steps go backwards.
    rows = [
        [line[key] for key in (*COUNTS, SQUARED_NORM)] + [line[TRACE] * rate]
        for line, rate in steps
    ]
    samples, sizes, norms, traces = np.array(rows, float).T
    ages, distances = samples / samples[0], abs(samples - samples[0])
    places = ages - 1 if ages[-1] > 1 else np.log(ages)
    for share in shares:
        part = distances <= max(share * samples.max(), distances[LEAST_BIN - 1])
        x, w = places[part], sizes[part]
        total = w.sum()
        apart = x - w @ x / total
        squares = w @ apart**2
        # How far a step moves the line at the first one, and the share of its error
        # that its residual keeps.
        pulls = w / total + w * apart[0] * apart / squares
        kept = 1 - w / total - w * apart**2 / squares
        ends = [float(pulls @ y) for y in (traces[part], norms[part])]
        slopes = [float(w * apart @ y) / squares for y in (traces[part], norms[part])]
        errors = [
            pulls / kept * (y[part] - end - k * x)
            for y, end, k in zip((traces, norms), ends, slopes, strict=True)
        ]
        moments = [
            float(one @ other)
            for one, other in ((errors[0],) * 2, (errors[1],) * 2, errors)
        ]
        found = fieller(*ends, *moments, max(float(total**2 / (w @ w)) - 2, 1.0))
        if (
            found.low
            and found.high is not None
            and found.high <= END_PRECISE * found.low
        ):
            break
    return _point(float(samples[0]), float(w.mean()), found, *ends)


def _candidates(
    config: Config,
    num_devices: int,
    tokens: int,
    forecast: _Forecast,
    sizes: Sequence[int],
    notes: list[str],
) -> dict[str, Schedule]:
    """Return the schedules to compare, by their names."""
    model = forecast.models[0]
    target = forecast.references[0]
    best = min(sizes, key=lambda size: model.run(((0, size),), progress=target).seconds)
    found: dict[str, Schedule] = {
        f"constant {size:,}": ((0, size),)
        for size in sorted({sizes[0], best, sizes[-1]})
    }
    found["early growth, fastest"] = model.best_schedule(sizes, progress=target)
    try:
        planned = build_plan(
            replace(config, **_settings(tokens, f"0:{sizes[0]}", _seesaw_keys(sizes))),
            num_devices,
        )
        found["seesaw"] = tuple(
            (phase.start_sample, phase.global_batch_size)
            for phase in planned.ramp.phases
        )
    except RampupError as error:
        notes.append(f"no Seesaw candidate: {error}")
    found["one late switch"] = model.late_switch(sizes, samples=forecast.samples)
    return found


def _assumptions(
    measured: Measurements,
    model: DesignModel,
    progress: float,
    sizes: Sequence[int],
    forgetting: ForgettingModel | None,
) -> list[str]:
    """Return in sentences what the models assume."""
    last = model.noise.knots[-1][0]
    kind = (
        "from the critical batch of `rampup critical` and its additional tokens follows"
        " the noise scale, at 100% more tokens; before and after its checkpoints, the"
        " measured noise scale in proportion"
        if measured.source == "critical"
        else (
            "the measured noise scale is that of plain gradients; with Adam the true"
            " one can be very different: `rampup critical` at a few checkpoints is a"
            " second measurement"
        )
    )
    found = [
        (
            "a sample in a batch B does 1 / (1 + B/N) of the work of one in a tiny"
            " batch, N the noise scale (arXiv 1812.06162)"
        ),
        kind,
        (
            "N depends on the progress of the training only, and every batch has its"
            " best learning rate; the rule printed with a schedule (batch_scaling)"
            " comes close to it only from a rate that was tuned for its reference batch"
        ),
    ]
    if progress > last:
        found.append(
            f"N was last measured at a progress of {last:,.0f} samples (those that a"
            " tiny batch needs to get as far), and grows with the power"
            f" {model.noise.growth:.2f} of it from there to {progress:,.0f}; published"
            f" powers are 0 (arXiv 2505.23971) to {PUBLISHED_GROWTH} (arXiv 2410.21676)"
        )
    timed = sorted(measured.seconds)
    if len(timed) == 1:
        found.append(
            f"only a batch of {timed[0]:,} was timed: a step takes time in proportion"
            " to its batch, so no larger one is faster; to know better, run into the"
            " next phase, or add --measured tune.json, the output of `rampup tune"
            " --json`"
        )
    elif sizes[-1] > timed[-1] or sizes[0] < timed[0]:
        found.append(
            f"batches of {timed[0]:,} to {timed[-1]:,} were timed; times of others are"
            " on a line through them, and their interval is from the nearest timed"
            " step to a time in proportion to the batch"
        )
    found += [
        (
            "the reducible loss falls with the power 0.28 of the samples (arXiv"
            " 2203.15556), from the loss and the slope that the run measured, at the"
            " learning rates of its second half; the intervals have 0.37 too, the refit"
            " of arXiv 2404.10102"
        ),
        (
            "Seesaw is judged by its batches alone, as if its learning rate were the"
            " best one too"
        ),
    ]
    forgotten = (
        "with the noise that training forgets at a constant learning rate (arXiv"
        " 2601.05034, 2602.14208)"
    )
    if forgetting is None:
        found.append(
            f"no schedule is judged {forgotten}; lr_schedule_type=wsd and constant add"
            " that model"
        )
    else:
        found.append(
            f"the second model judges schedules {forgotten}: the signal follows the"
            " rate times the steps, the noise fades by a factor e in a progress of"
            f" {forgetting.memory:,.0f}, a share wsd_decay_steps_fraction of the run,"
            " and the rate is the best constant one for a batch of"
            f" {forgetting.batch:,}"
        )
    return found
