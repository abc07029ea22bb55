"""Design a ramp from measured runs: compare constant batches and the fastest ramp by
`rampup.contrib.lab.design_model`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.contrib.lab.design_model import (
    DATA_EXPONENTS,
    PUBLISHED_GROWTH,
    DesignModel,
    LossLine,
    Outcome,
    Schedule,
    StepTimes,
    format_schedule,
    loss_line,
    loss_penalty,
    most_saved,
    noise_curves,
)
from rampup.contrib.lab.measurements import Measurements
from rampup.errors import ConfigError, DataError
from rampup.loop.run_folder import as_path
from rampup.plan.describe import SECONDS_PER_HOUR
from rampup.plan.learning_rate import decay_progress
from rampup.plan.numbers import finite_or_none
from rampup.plan.ramp import BatchRamp

# Candidates go up to this many times the largest batch that was timed, and have at
# least this many optimizer steps.
BEYOND_MEASURED, LEAST_STEPS = 4, 32
# places of a run at which its loss and hours are predicted
COURSE_PARTS = 10
# the loss after some samples is the mean over this share of them, the last
LOSS_SHARE = 0.05
# What an anneal to a rate of 0 takes off the loss at most, as a share of the slope of the
# loss per factor e of the samples. It was chosen on tests/contrib/lab/study.json.
ANNEAL = 0.5
# the noise scale is not taken to grow by more after its last measurement, unless the
# growth is named
MOST_GROWTH = 4.0
RAMP = "fastest ramp"
_ALWAYS = (
    "a sample in a batch B does 1 / (1 + B/N) of the work of one in a tiny batch, N the"
    " noise scale (arXiv 1812.06162)",
    "N depends on the progress of the training only, and every batch has its best"
    " learning rate; the rule printed with a schedule (batch_scaling) comes close to it"
    " only from a rate that was tuned for its reference batch, and while the batch is"
    " below the noise scale",
    "the reducible loss falls with the power 0.28 of the samples (arXiv 2203.15556),"
    " from the loss and the slope that the run measured, at the learning rates of its"
    " second half; the intervals have 0.37 too, the refit of arXiv 2404.10102, the error"
    " of the line through the loss, and what an anneal can take away",
    "what the noise of a step costs is lost for good: the model cannot judge a switch of"
    " the batch before an anneal (arXiv 2601.05034, 2602.14208)",
)


def design_ramp(
    config: Config,
    measured: str | Path | Sequence[str | Path],
    *,
    num_devices: int,
    train_tokens: int | None = None,
    max_batch: int | None = None,
    assume_growth: float | None = None,
) -> dict[str, Any]:
    """Compare constant batches and a ramp for a run by the steps, hours and loss that a
    model predicts from measurements.

    Args:
        config: the configuration of the run to design, on `num_devices` devices.
        measured: folders of measured runs, and files with the output of `rampup tune
            --json`. The first run with a noise scale gives the noise, scaled down to
            its critical batch if that is smaller; step times of all are used.
        num_devices: devices of the run to design.
        train_tokens: tokens of the run to design; None = those of the configuration.
        max_batch: largest global batch in samples; None = four times the largest that
            was timed.
        assume_growth: power of the progress with which the noise scale grows after its
            last measurement, 0 to 1. None = the measured one, at most 0.47, if it makes
            it at most 4 times as large.

    Returns:
        What `rampup design --json` prints, an estimate, of which `assumptions` says
        what it rests on. Each of `candidates` has a `batch_size_schedule` for the
        configuration; `hours_saved` is what the ramp gains against the best constant
        batch, as a share of its hours, and `most_hours_saved` the bound of the model for
        steps that take a + cB.

    Raises:
        ConfigError: no length of the run, nothing to choose from, or measurements of
            other sequence lengths.
        DataError: no noise scale was measured, or too early for a run of this length,
            or not precisely in the second half of the samples.

    Example:
        >>> import rampup
        >>> config = rampup.Config(batch_size_schedule="0:8", train_tokens=10**9)
        >>> design_ramp(config, "runs/nothing", num_devices=1)
        Traceback (most recent call last):
        rampup.errors.ConfigError: runs/nothing has no metrics.jsonl, and is no file ...
    """
    tokens = config.train_tokens if train_tokens is None else train_tokens
    if not tokens:
        raise ConfigError(
            "a design needs the length of the run",
            fix="give train_tokens (--train-tokens), such as 300B",
            key="train-tokens",
        )
    if assume_growth is not None and not 0 <= assume_growth <= 1:
        raise ConfigError(
            f"assume_growth={assume_growth} (--assume-growth) must be between 0 and 1",
            key="assume-growth",
            nearest=(float(assume_growth > 1),),
        )
    paths = [measured] if isinstance(measured, (str, os.PathLike)) else measured
    found = Measurements.read([as_path(path) for path in paths], config)
    found.refuse_vague_end()
    samples = -(-tokens // config.max_target_length)
    sizes = _sizes(config, num_devices, samples, found, max_batch)
    forecast = Forecast.from_measurements(
        found, config, samples, sizes[0], assume_growth
    )
    if assume_growth is None:
        forecast.refuse_extrapolation(found.noise[-1].samples)
    schedules, notes = _schedules(forecast, sizes), list(found.notes)
    if forecast.line is None:
        notes.append(
            "the measured run is too short for the slope of its loss, so no loss and no"
            " loss penalty is predicted"
        )
    candidates = [
        _candidate(config, num_devices, tokens, name, schedule)
        | forecast.of(schedule)
        | {"course": forecast.course(schedule)}
        for name, schedule in schedules.items()
    ]
    hours = {each["name"]: each["hours_to_same_loss"] for each in candidates}
    best = min(hours[name] for name in hours if name != RAMP)
    if RAMP not in hours:
        notes.append("no ramp is faster than the best constant batch")
    noise = forecast.models[0].noise
    return {
        "train_tokens": tokens,
        "train_samples": samples,
        "tokens_per_sample": config.max_target_length,
        "noise_source": found.source,
        **forecast.noise_ends(),
        "noise_scale_last_measured": noise.knots[-1][1],
        "noise_growth": noise.growth,
        "noise_growth_is_capped": noise.is_capped,
        "step_seconds": {
            str(size): found.seconds[size] for size in sorted(found.seconds)
        },
        "loss_slope": None if forecast.line is None else abs(forecast.line.slope),
        "candidates": candidates,
        "fastest": min(hours, key=hours.__getitem__),
        "hours_saved": 1 - hours.get(RAMP, best) / best,
        "most_hours_saved": most_saved(noise.growth),
        "assumptions": _assumptions(found, forecast, sizes),
        "notes": notes,
    }


def _sizes(
    config: Config,
    num_devices: int,
    samples: int,
    measured: Measurements,
    max_batch: int | None,
) -> list[int]:
    """Return the batches to choose from: the plan's first one, and its doublings that
    can be split.
    """
    plan = build_plan(config, num_devices)
    smallest = plan.ramp.sizes[0]
    wanted = max_batch or BEYOND_MEASURED * max(measured.seconds, default=smallest)
    most = min(wanted, max(samples // LEAST_STEPS, smallest))
    powers = range(max(most // smallest, 1).bit_length())
    doublings = (smallest << power for power in powers)
    sizes = [size for size in doublings if size <= most and plan.splitter.allows(size)]
    if len(sizes) >= 2:
        return sizes
    raise ConfigError(
        "there is nothing to choose from: no multiple of the first batch of"
        f" {smallest:,} up to {most:,} is legal",
        fix="raise max_batch (--max-batch), or train_tokens (--train-tokens) if they"
        f" are few for {LEAST_STEPS} steps of a larger batch",
        key="max-batch",
    )


def _schedules(forecast: Forecast, sizes: Sequence[int]) -> dict[str, Schedule]:
    """Return the schedules to compare, by their names: the smallest, the best and the
    largest constant batch, and the fastest ramp, if that is no constant batch.
    """
    model, target = forecast.models[0], forecast.references[0]

    def seconds(size: int) -> float:
        return model.run(((0, size),), progress=target).seconds

    constants = sorted({sizes[0], min(sizes, key=seconds), sizes[-1]})
    found = {f"constant {size:,}": ((0, size),) for size in constants}
    ramp = model.best_schedule(sizes, progress=target)
    return found | ({RAMP: ramp} if len(ramp) > 1 else {})


def _candidate(
    config: Config, num_devices: int, tokens: int, name: str, schedule: Schedule
) -> dict[str, Any]:
    """Return what a run with a schedule is started with, which `rampup plan` allows."""
    in_tokens = config.batch_size_schedule_unit == "tokens"
    text = format_schedule(
        schedule, tokens_per_sample=config.max_target_length if in_tokens else 1
    )
    rule = _rate_rule(config, num_devices)
    settings = _settings(tokens, text, rule)
    build_plan(replace(config, **settings), num_devices)
    return {
        "name": name,
        "batch_size_schedule": text,
        "rate_rule": rule,
        "settings": settings,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted for the schedules of a run, with ranges over the models, whose
    first is the best estimate.
    """

    config: Config
    # by how the noise scale is at its estimate and at both ends of its interval
    models: Sequence[DesignModel]
    # the progress of each model after the samples of the run in the smallest batch
    references: Sequence[float]
    samples: int
    line: LossLine | None  # through the loss of the measured run
    places: Sequence[float]  # the progress of each model at the pivot of that line
    batch: float  # of the measured run there

    @classmethod
    def from_measurements(
        cls,
        measured: Measurements,
        config: Config,
        samples: int,
        smallest: int,
        growth: float | None,
    ) -> Forecast:
        """Return the forecast for a run of so many samples, whose smallest batch is
        given.
        """
        times = StepTimes.fit(dict(measured.seconds))
        models = [
            DesignModel(noise=curve, times=times)
            for curve in noise_curves(measured.noise, growth)
        ]
        start = ((0, smallest),)
        line = loss_line(measured.losses)
        pivot = 0.0 if line is None else line.pivot
        at = [point.samples for point in measured.noise]
        return cls(
            config=config,
            models=models,
            references=[each.run(start, samples=samples).progress for each in models],
            samples=samples,
            line=line,
            places=[
                float(np.interp(pivot, at, [place for place, _ in each.noise.knots]))
                for each in models
            ],
            batch=float(
                np.interp(pivot, at, [point.batch for point in measured.noise])
            ),
        )

    def refuse_extrapolation(self, measured: float) -> None:
        """Refuse a run in which the noise scale grows far beyond what was measured
        after these samples.
        """
        growth = max(model.noise.growth for model in self.models)
        factor = max(
            (end / model.noise.knots[-1][0]) ** model.noise.growth
            for end, model in zip(self.references, self.models, strict=True)
        )
        if factor > MOST_GROWTH:
            raise DataError(
                f"the noise scale was last measured around sample {measured:,.0f}, as"
                f" {self.models[0].noise.knots[-1][1]:,.3g}; growing with a power of up"
                f" to {growth:.2f} of the progress, it would be {factor:,.3g} times as"
                f" large after {self.samples:,} samples, more than {MOST_GROWTH:g}"
                " times: measure in a longer run, or name a growth that you assume with"
                f" assume_growth (--assume-growth): {PUBLISHED_GROWTH} (arXiv"
                " 2410.21676), or 0 for none",
                key="assume-growth",
                nearest=(PUBLISHED_GROWTH, 0),
            )

    def noise_ends(self) -> dict[str, float | None]:
        """Return the noise scale at the start and the end of the run."""
        places = {"noise_scale_start": 1.0, "noise_scale_end": self.references[0]}
        found: dict[str, float | None] = {}
        for key, place in places.items():
            found |= _with_ends(key, [each.noise.at(place) for each in self.models])
        return found

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
        length = self.config.max_target_length
        found = {
            "start_tokens": [start * length for start, _ in schedule],
            "sizes": [size for _, size in schedule],
            "steps": outcomes[0].steps,
            "wasted_samples": 1 - outcomes[0].progress / self.references[0],
            "tokens_to_same_loss": same[0].samples * length,
        }
        for key, values in ranges.items():
            found |= _with_ends(key, values)
        return found

    def course(self, schedule: Schedule) -> list[dict[str, Any]]:
        """Return the predictions after each tenth of the samples."""
        course = []
        for part in range(1, COURSE_PARTS + 1):
            done = -(-self.samples * part // COURSE_PARTS)
            course.append(
                {"tokens": done * self.config.max_target_length}
                | self._loss(schedule, done)
                | _with_ends("hours", self._hours(schedule, [done]))
            )
        return course

    def _loss(self, schedule: Schedule, done: int) -> dict[str, float | None]:
        """Return the mean training loss over the last samples of those that are done.

        It is the loss of the measured run on its line, plus the difference of the
        progress. While the measured run had nearly its peak rate, that of the run
        falls, which takes something off the loss. The interval has, with their squares
        added, the difference by all models, the error of the line with the scatter of
        the mean, and no anneal or twice the expected one.
        """
        middle = round(done * (1 - LOSS_SHARE / 2))
        ends = [each.run(schedule, samples=middle) for each in self.models]
        # Not where the line through the measured loss does not hold.
        if self.line is None or 2 * ends[0].progress < self.places[0]:
            return _with_ends("loss", ())
        penalties = self._penalties(ends, self.places)
        slope = abs(self.line.slope)
        distance = penalties[0] / slope if slope else 0.0
        steps = max(LOSS_SHARE * done / self.batch, 1.0)
        parts = (
            self.line.error(distance, steps),
            ANNEAL / 2 * slope * self._fall(schedule, middle),
        )
        loss = self.line.loss_at_pivot + penalties[0] - parts[1]
        return {
            "loss": loss,
            "loss_low": loss - math.hypot(*parts, penalties[0] - min(penalties)),
            "loss_high": loss + math.hypot(*parts, max(penalties) - penalties[0]),
        }

    def _fall(self, schedule: Schedule, samples: int) -> float:
        """Return the share of its peak by which the learning rate has fallen."""
        config = self.config
        ramp = BatchRamp.from_schedule(format_schedule(schedule))

        def progress(samples: int) -> float:
            if config.learning_rate_clock == "samples":
                return samples / self.samples
            return ramp.step_of_sample(samples) / ramp.step_of_sample(self.samples)

        warmup = config.warmup_steps_fraction
        if config.warmup_steps is not None:
            warmup = progress(ramp.samples_before(config.warmup_steps))
        done = decay_progress(
            progress(samples),
            kind=config.lr_schedule_type,
            warmup_fraction=warmup,
            decay_fraction=config.wsd_decay_steps_fraction,
        )
        return float(done) * (1 - config.learning_rate_final_fraction)

    def _penalties(
        self, ends: Sequence[Outcome], places: Sequence[float]
    ) -> list[float]:
        """Return the loss at the ends less that at other places of the progress, by
        each model and exponent; nothing if no slope of the loss is known.
        """
        if self.line is None:
            return []
        return [
            loss_penalty(
                end.progress,
                place,
                slope=abs(self.line.slope),
                measured_at=measured_at,
                exponent=exponent,
            )
            for exponent in DATA_EXPONENTS
            for end, place, measured_at in zip(ends, places, self.places, strict=True)
        ]

    def _hours(self, schedule: Schedule, samples: Sequence[int]) -> list[float]:
        times = self.models[0].times
        return [
            each.total(schedule, end) / SECONDS_PER_HOUR
            for end in samples
            for each in (times, *times.bounds())
        ]


def _with_ends(key: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return a prediction, the first of the values, and both ends of its interval; an
    end without a limit is None, and all three without a value.
    """
    names = (key, f"{key}_low", f"{key}_high")
    if not values:
        return dict.fromkeys(names)
    ends = finite_or_none(min(values)), finite_or_none(max(values))
    return dict(zip(names, (values[0], *ends), strict=True))


def _settings(tokens: int, schedule: str, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run of these tokens with a `batch_size_schedule` instead of
    the configuration's own ramp.
    """
    return {
        "enable_rampup_batch_size": False,
        "seesaw_factor": None,
        "seesaw_max_batch_size": None,
        "steps": -1,
        "train_tokens": tokens,
        "train_samples": None,
        "learning_rate_schedule_steps": -1,
        "batch_size_schedule": schedule,
        **rule,
    }


def _rate_rule(config: Config, num_devices: int) -> dict[str, Any]:
    """Return the keys that scale the learning rate with the batch: those of the
    configuration, or the optimizer's rule.
    """
    rate = config.batch_rule[0]
    own = config.learning_rate_batch_scaling != "auto" or (
        rate == "none" and config.batch_scaling != "none"
    )
    rule = rate if own else config.batch_scaling
    if rate == "none":
        rule = "linear" if config.opt_type == "sgd" else "sqrt"
    reference = config.batch_scaling_reference
    if reference is None:
        reference = build_plan(config, num_devices).ramp.sizes[-1]
    key = "learning_rate_batch_scaling" if own else "batch_scaling"
    return {key: rule, "batch_scaling_reference": reference}


def _assumptions(
    measured: Measurements, forecast: Forecast, sizes: Sequence[int]
) -> list[str]:
    """Return in sentences what the model assumes."""
    noise, progress = forecast.models[0].noise, forecast.references[0]
    last = noise.knots[-1][0]
    found = list(_ALWAYS)
    if measured.source == "critical":
        found.append(
            "from the critical batch of `rampup critical` and its additional tokens"
            " follows the noise scale, at 100% more tokens"
        )
    else:
        found.append(
            "the measured noise scale is that of plain gradients; with Adam the true"
            " one can be very different: `rampup critical` at a few checkpoints is a"
            " second measurement"
        )
    if progress > last:
        found.append(
            f"N was last measured at a progress of {last:,.0f} samples (those that a"
            " tiny batch needs to get as far), and grows with the power"
            f" {noise.growth:.2f} of it from there to {progress:,.0f}; published powers"
            f" are 0 (arXiv 2505.23971) to {PUBLISHED_GROWTH} (arXiv 2410.21676), to"
            " which a measured one is capped"
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
    return found
