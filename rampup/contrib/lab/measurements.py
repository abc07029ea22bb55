"""Read what measured runs say about a design: step times, the noise scale along the
run with its intervals, critical batches, and the loss.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rampup.config.load import load_config
from rampup.config.schema import IDENTITY_KEYS, Config
from rampup.contrib.lab.critical import (
    CRITICAL_RESULT,
    CRITICAL_SUFFIX,
    implied_noise_scale,
)
from rampup.contrib.lab.design_model import NoisePoint, exact_curve
from rampup.errors import ConfigError, DataError
from rampup.loop.run_folder import CONFIG_FILE, METRICS_FILE, read_lines
from rampup.plan.noise_scale import NoiseEstimate, NoiseScale, fieller
from rampup.show.series import require_count

# Names in metrics.jsonl: S and G2 of a step; the running noise scale and its interval,
# in samples and in units of weight.
TRACE, SQUARED_NORM = "gradient_noise_trace", "gradient_squared_norm"
SAMPLES, TOKENS = (
    tuple(f"noise_scale_{unit}{end}" for end in ("", "_low", "_high"))
    for unit in ("samples", "tokens")
)
COUNTS = ("consumed_samples", "global_batch_size")
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
# lines of metrics.jsonl, each with its samples per unit of weight
Steps = list[tuple[Mapping[str, Any], float]]


class Measurements(NamedTuple):
    """Everything that was measured."""

    seconds: Mapping[int, float]  # seconds of a step by global batch size
    # `noise_scale`, or `critical` if that of `rampup critical` is the smaller one
    source: str
    # the noise scale along the run, in order
    noise: Sequence[NoisePoint]
    last_octave: NoiseEstimate | None  # that of the second half of the samples
    # (samples consumed, loss) of the run whose noise it is
    losses: Sequence[tuple[int, float]]
    notes: Sequence[str]

    @classmethod
    def read(cls, paths: Sequence[Path], config: Config) -> Measurements:
        """Read runs and results of `rampup tune`."""
        seconds: dict[int, float] = {}
        notes: list[str] = []
        found = cls(seconds, "", (), None, (), notes)
        for path in paths:
            if path.is_file():
                seconds |= _tuned_seconds(path)
                continue
            if not (path / METRICS_FILE).is_file():
                raise ConfigError(
                    f"{path} has no {METRICS_FILE}, and is no file with the output of"
                    " `rampup tune --json`",
                    key="measured",
                )
            lines = _checked_lines(path)
            # What was measured first counts.
            seconds |= _run_seconds(path, config, lines, notes) | seconds
            if not found.noise:
                found = found._replace(**_noise_of(path, lines, notes))
        if not found.noise:
            names = ", ".join(map(str, paths)) or "any run"
            raise DataError(
                f"no noise scale was measured in {names}",
                fix="give --measured RUN_DIR of a run with measure_gradient_noise=true",
                key="measured",
            )
        return found

    def refuse_vague_end(self) -> None:
        """Refuse a design if the noise scale of the second half of the samples, from
        which it goes on, is not known to a factor of 4.
        """
        found = self.last_octave
        if found is not None and not _is_precise(found):
            raise DataError(
                "the noise scale of the second half of the measured samples is"
                f" {found} tokens, which is not precise enough to design from: the ends of"
                f" its interval must be within a factor of {PRECISE:g}; measure in a"
                " longer run, or in one with a larger batch",
                key="measured",
            )


def _tuned_seconds(path: Path) -> dict[int, float]:
    """Return the step times in a file with the output of `rampup tune --json`."""
    try:
        phases = json.loads(path.read_text(errors="replace"))["phases"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not the output of `rampup tune --json`: {error!r}",
            key="measured",
        ) from error
    timed = {
        row["global_batch_size"]: row["step_seconds"]
        for row in phases
        if row["step_seconds"]
    }
    if not timed:
        raise ConfigError(f"{path}: tune has timed no phase", key="measured")
    return timed


def _checked_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, which all have a batch and more samples than
    the line before.
    """
    lines, before = list(read_lines(folder / METRICS_FILE)), 0
    for line in lines:
        samples, size = (require_count(line, key, str(folder)) for key in COUNTS)
        if size < 1 or samples <= before:
            raise DataError(
                f"{folder}, step {line['step']} of its {METRICS_FILE}:"
                f" global_batch_size={size} must be at least 1, and"
                f" consumed_samples={samples} more than {before}, that of the line"
                " before",
                key="measured",
            )
        before = samples
    return lines


def _noise_of(
    folder: Path, lines: Sequence[Mapping[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """Return the noise of a run and its losses, as fields of `Measurements`.

    A run may have two sources of it, its noise scale at all places and the critical
    batch at a few. Nobody knows which is right for a large model, so the smaller one
    counts, which wastes fewer tokens: the measured noise scale, times the smallest ratio
    of a critical batch to it where that is below 1.
    """
    octaves = _octaves(lines)
    points, source = _noise_points(octaves), "noise_scale"
    if bounds := [point for point in points if point.is_bound]:
        notes.append(
            f"at {len(bounds)} of {len(points)} places the noise scale is only known to"
            f" be at least a number, {bounds[-1].noise:,.0f} the last time, after"
            f" {bounds[-1].samples:,.0f} samples: the design follows other estimates,"
            " held to these bounds; measure over more samples, or other batches"
        )
    ratio = min(_critical_ratios(folder, points), default=1.0)
    if ratio < 1:
        source, points = "critical", [point.scaled(ratio) for point in points]
        notes.append(
            "the critical batches of `rampup critical` are as low as"
            f" {ratio:.2g} of the measured noise scale: the smaller one counts, all"
            " along the run"
        )
    return {
        "source": source,
        "noise": points,
        "last_octave": _average(octaves[-1]).tokens if points else None,
        "losses": losses_of(lines),
    }


def losses_of(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the samples consumed after each step of a run, with its loss, where that
    is finite.
    """
    return [
        (line["consumed_samples"], line["loss"])
        for line in lines
        if line.get("loss") is not None
    ]


def _critical_ratios(folder: Path, points: Sequence[NoisePoint]) -> list[float]:
    """Return the noise scales that follow from what `rampup critical` has decided at a
    run's checkpoints, over the measured ones there.
    """
    measured, ratios = exact_curve(points), list[float]()
    if not measured.knots:
        return []
    parent = folder.with_name(f"{folder.resolve().name}{CRITICAL_SUFFIX}")
    for file in sorted(parent.glob(f"step-*/{CRITICAL_RESULT}"), key=str):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            # A lower bound does not say that the critical batch is the smaller one.
            if found["bound"] in ("exact", "at_most"):
                noise = implied_noise_scale(
                    found["critical_batch_size"],
                    tolerance=found["tolerance"],
                    gain=found["gain"],
                )
                ratios.append(noise / measured.at(found["consumed_samples"]))
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise DataError(
                f"{file} is damaged, no result of `rampup critical`: {error!r}",
                fix="delete its folder, and measure again",
                key="measured",
            ) from error
    return ratios


def _run_seconds(
    folder: Path, config: Config, lines: Sequence[Mapping[str, Any]], notes: list[str]
) -> dict[int, float]:
    """Return the median step times of a run, and note how its model differs."""
    length = config.max_target_length
    if (folder / CONFIG_FILE).is_file():
        own = load_config(folder / CONFIG_FILE)
        if own.max_target_length != length:
            raise ConfigError(
                f"{folder} was measured with max_target_length={own.max_target_length},"
                f" but the design has {length}: a batch in samples does not mean the"
                " same",
                key="max_target_length",
                nearest=(own.max_target_length,),
            )
        if different := [
            name
            for name in IDENTITY_KEYS
            if getattr(own, name) != getattr(config, name)
        ]:
            notes.append(
                f"{folder} was measured with other keys ({', '.join(different)}); its"
                " times and its noise are those of another run"
            )
    else:
        # A run of another loop, which may count something else than this model's
        # tokens, or samples.
        lengths = [
            line["tokens_per_second"] * line["step_seconds"] / line["global_batch_size"]
            for line in lines
            if line.get("tokens_per_second") and line.get("step_seconds")
        ]
        length = round(statistics.median_high(lengths or [length]))
    return {size: size * length / rate for size, rate in _throughput(folder, lines)}


def _throughput(
    folder: Path, lines: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float]]:
    """Return each batch size in a run's lines with its median tokens per second, or
    refuse a run without any.

    Steps that compiled count only if there are no others of their size.
    """
    rates: defaultdict[tuple[int, bool], list[float]] = defaultdict(list)
    for line in lines:
        rate: Any = line.get("tokens_per_second")
        if type(rate) in (int, float) and 0 < rate < 1e18:
            # The first step compiles too, even if it took its program from the cache.
            compiled = line["step"] == 0 or "compile_seconds" in line
            rates[line["global_batch_size"], compiled].append(float(rate))
    if not rates:
        raise ConfigError(
            "no line has a global_batch_size and its tokens_per_second",
            key="measured",
            path=str(folder / METRICS_FILE),
        )
    return [
        (size, statistics.median_low(rates.get((size, False)) or rates[size, True]))
        for size in sorted({size for size, _ in rates})
    ]


def _average(steps: Steps) -> NoiseScale:
    """Return the averages over steps, none of which fades.

    Steps whose running estimate has a value would have too large a G2.
    """
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


def _is_precise(found: NoiseEstimate, ratio: float = PRECISE) -> bool:
    low, high = found.low or 0.0, found.high
    return low > 0 and high is not None and high <= ratio * low


def _octaves(lines: Sequence[Mapping[str, Any]]) -> list[Steps]:
    """Return the steps with S and G2 in octaves of the samples: the last one is the
    second half of the samples, the one before that half of the rest.
    """
    # The samples of a unit of weight, in which S and G2 are; None if a line has no
    # estimate. The first lines have none yet.
    rates = []
    for line in lines:
        pairs = (
            (line.get(a), line.get(b)) for a, b in zip(SAMPLES, TOKENS, strict=True)
        )
        rates.append(next((a / b for a, b in pairs if a and b), None))
    rate = next((rate for rate in rates if rate), 0.0)
    octaves: list[Steps] = [[]]
    before = 0
    for line, own in zip(lines, rates, strict=True):
        rate = own or rate
        is_measured = None not in (line.get(TRACE), line.get(SQUARED_NORM))
        if not is_measured or line.get("skipped", False) or not rate:
            continue
        octave = lines[-1]["consumed_samples"] // line["consumed_samples"]
        if octave.bit_length() != before and len(octaves[-1]) >= LEAST_BIN:
            octaves.append([])
        octaves[-1].append((line, rate))
        before = octave.bit_length()
    if len(octaves) > 1 and len(octaves[-1]) < LEAST_BIN:
        octaves[-2:] = [octaves[-2] + octaves[-1]]
    return octaves


def _noise_points(octaves: Sequence[Steps]) -> list[NoisePoint]:
    """Return the noise scale in every octave of a run's samples, and at its first and
    last step by lines through S and G2.
    """
    # Neighbours that are not precise are averaged together.
    groups: list[Steps] = []
    for precise, group in itertools.groupby(
        octaves, lambda steps: _is_precise(_average(steps).tokens)
    ):
        parts = list(group)
        groups += parts if precise else [list(itertools.chain(*parts))]
    points = []
    for steps in filter(None, groups):
        noise = _average(steps)
        samples, batch = (
            sum(line[key] for line, _ in steps) / len(steps) for key in COUNTS
        )
        trace = noise.trace * noise.samples_per_weight
        points.append(
            _point(samples, batch, noise.in_samples, trace, noise.squared_norm)
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


class _EndLine:
    """A weighted least-squares line through values of steps, at the first step."""

    def __init__(self, places: np.ndarray, weights: np.ndarray) -> None:
        self.places, total = places, weights.sum()
        apart = places - weights @ places / total
        squares = weights @ apart**2
        self._slopes = weights * apart / squares
        # How far a step's value moves the line at the first step, where the place is 0.
        self._pulls = weights / total + apart[0] * self._slopes
        # The share of a step's error that its residual keeps.
        self._kept = 1 - weights / total - apart * self._slopes

    def at_first(self, values: np.ndarray) -> float:
        """Return the line there."""
        return float(self._pulls @ values)

    def errors(self, values: np.ndarray) -> np.ndarray:
        """Return what each step's error adds to the line there. The sum of the squares
        is the HC3 variance (MacKinnon and White 1985).
        """
        line = self.at_first(values) + float(self._slopes @ values) * self.places
        return self._pulls / self._kept * (values - line)


def _end_point(steps: Steps, shares: Sequence[float]) -> NoisePoint:
    """Return the noise scale at the first of the steps, by least-squares lines through
    their S and through their G2.

    They go through the first share of the run that gives a precise interval, which is
    Fieller's. They are straight over the samples at the start of the run, and over
    their logarithm at its end, from where the steps go backwards.
    """
    rows = [
        [line[key] for key in (*COUNTS, SQUARED_NORM)] + [line[TRACE] * rate]
        for line, rate in steps
    ]
    samples, sizes, norms, traces = np.array(rows, float).T
    distances = abs(samples - samples[0])
    is_start = samples[-1] > samples[0]
    places = samples / samples[0] - 1 if is_start else np.log(samples / samples[0])
    for share in shares:
        part = distances <= max(share * samples.max(), distances[LEAST_BIN - 1])
        weights = sizes[part]
        line = _EndLine(places[part], weights)
        trace, norm = line.at_first(traces[part]), line.at_first(norms[part])
        trace_errors, norm_errors = line.errors(traces[part]), line.errors(norms[part])
        found = fieller(
            trace,
            norm,
            float(trace_errors @ trace_errors),
            float(norm_errors @ norm_errors),
            float(trace_errors @ norm_errors),
            max(float(weights.sum() ** 2 / (weights @ weights)) - 2, 1.0),
        )
        if _is_precise(found, END_PRECISE):
            break
    return _point(float(samples[0]), float(weights.mean()), found, trace, norm)
