"""The results of the study behind "Does a ramp pay?", and what follows from them.

It reads benchmarks/ramp_controls.jsonl with the standard library alone: nothing of rampup
takes part. `ramp_controls_report.py` prints it.

Losses become hours by one slope: what half of the samples cost the smallest batch, per
factor of e. A constant batch that ends `d` above a ramp needs `exp(d / slope)` times its
samples to end where the ramp ends. The constant batch that then takes the fewest hours,
with its own best rate and b2, is what a ramp has to beat. Intervals are those of Student's t
over the seeds, 90%.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("ramp_controls.jsonl")
SHAPES = ("wsd", "cosine")
SEEDS = (1, 2, 3)
SMALLEST = 8  # batch
SAMPLES = 8192
LENGTH = 64  # bytes of a sample
WARMUP_STEPS = 40
WSD_DECAY = 0.3
# A step of B samples takes 1 + B / machine.
MACHINES = (16, 64, 256)
B2 = 0.99  # of the smallest batch, and of all batches unless it follows the half-life
CONFIDENCE = 0.9
DESIGNED_FOR = 64
# A ramp pays if it saves more than this share of the hours, and surely some of them.
LEAST_SAVED = 0.02
VARIANTS = {
    "rule": "square-root rule",
    "surge": "peak at the noise scale",
    "none": "left alone",
    "rule, moment divided": "rule, second moment divided",
}
TENTHS = 10  # places of a run at which a design predicts the loss
LOSS_SHARE = 0.05  # of the samples up to there, over which that loss is a mean
# The different ramps that the pilots led to: the verdict is over all of them.
RAMPS = 5
# The 95% quantile of Student's t by the number of seeds.
STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}
# The mean training loss in parts of a run, each with the samples at its end.
Curve = list[list[float]]


class Study:
    """The runs of one shape of the learning rate, by what they are.

    Attributes:
        constants: held-out losses by batch, b2 and peak rate, then by seed.
        ramps: losses by schedule and variant, then by seed.
        short: losses of the smallest batch with fewer samples, by their number, then by
            seed.
        same_rates: losses of the constant batch of as many steps with a ramp's rates,
            by schedule, then by seed.
        same_size: the size of that batch, by schedule.
        curves: training losses of `constants` and `ramps`, by their keys and seed.
        steps: optimizer steps by schedule.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], shape: str) -> None:
        self.shape = shape
        self.rows = [row for row in rows if row["name"].startswith(f"{shape} ")]
        self.constants: dict[tuple[int, float, float], dict[int, float]] = {}
        self.short: dict[int, dict[int, float]] = {}
        self.ramps: dict[tuple[str, str], dict[int, float]] = {}
        self.same_rates: dict[str, dict[int, float]] = {}
        self.same_size: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.curves: dict[Any, dict[int, Curve]] = {}
        for row in self.rows:
            if "loss" in row:
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        name, seed, loss = row["name"], row["seed"], row["loss"]
        if "samples" not in row:
            self.steps[row["schedule"]] = row["steps"]
        if " ramp " in name:
            variant = name.split(row["schedule"])[1].rsplit(" ", 1)[0].strip()
            ramp = (row["schedule"], variant)
            self.ramps.setdefault(ramp, {})[seed] = loss
            self.curves.setdefault(ramp, {})[seed] = row.get("curve", [])
        elif " with the rates of " in name:
            schedule = name.split(" with the rates of ")[1].rsplit(" ", 1)[0]
            self.same_rates.setdefault(schedule, {})[seed] = loss
            self.same_size[schedule] = int(name.split()[2])
        elif "samples" in row:
            self.short.setdefault(row["samples"], {})[seed] = loss
        else:
            key = (int(name.split()[2]), row.get("b2", B2), row["peak"])
            self.constants.setdefault(key, {})[seed] = loss
            self.curves.setdefault(key, {})[seed] = row.get("curve", [])

    def best(self, size: int, b2: float = B2) -> tuple[float, dict[int, float]] | None:
        """Return the rate of a batch whose fresh seeds have run, and their losses."""
        for (known, known_b2, rate), losses in self.constants.items():
            fresh = {seed: losses[seed] for seed in SEEDS if seed in losses}
            if (known, known_b2) == (size, b2) and len(fresh) == len(SEEDS):
                return rate, fresh
        return None

    @property
    def sizes(self) -> list[int]:
        """The constant batches with fresh seeds."""
        return sorted({key[0] for key in self.constants if self.best(key[0])})

    @property
    def schedules(self) -> list[str]:
        """The ramps whose variants and controls have all run."""
        return [
            schedule
            for schedule in dict.fromkeys(each for each, _ in self.ramps)
            if all(
                set(self.ramps.get((schedule, variant), {})) >= set(SEEDS)
                for variant in VARIANTS
            )
            and set(self.same_rates.get(schedule, {})) >= set(SEEDS)
            and self.best(self.same_size[schedule])
        ]

    @property
    def slope(self) -> float:
        """The loss per factor of e in samples, at the end of the smallest batch."""
        best = self.best(self.sizes[0])
        assert best is not None
        return (mean(self.short[SAMPLES // 2]) - mean(best[1])) / math.log(2)

    @property
    def earlier_slope(self) -> float:
        """The same between a quarter and half of the samples, where it is steeper."""
        quarter, half = (mean(self.short[SAMPLES // part]) for part in (4, 2))
        return (quarter - half) / math.log(2)

    def hours(self, schedule: str, machine: int) -> float:
        """Return the time of a run, in the time of a step without samples."""
        phases = [
            tuple(map(int, phase.split(":"))) for phase in schedule.split(" ") if phase
        ]
        seconds, samples = 0.0, 0
        while samples < SAMPLES:
            size = [batch for start, batch in phases if start <= samples][-1]
            seconds += 1 + size / machine
            samples += size
        return seconds

    def saved(
        self,
        schedule: str,
        variant: str,
        machine: int,
        among: Callable[[int, float], bool] = lambda size, b2: True,
        slope: float | None = None,
    ) -> dict[int, float]:
        """Return by seed which share of the hours of the best constant batch a ramp
        saves; `among` chooses the batches by size and b2.
        """
        ramp = self.ramps[schedule, variant]
        time = self.hours(schedule, machine)
        constants = self.hours_of_constants(machine, ramp, slope or self.slope)
        fastest = min(
            (hours for key, hours in constants.items() if among(*key)), key=mean
        )
        return {seed: 1 - time / fastest[seed] for seed in SEEDS}

    def hours_of_constants(
        self, machine: int, losses: Mapping[int, float], slope: float
    ) -> dict[tuple[int, float], dict[int, float]]:
        """Return the time of each constant batch to the losses, by size and b2, then by
        seed.
        """
        found = {}
        for size, b2 in dict.fromkeys(key[:2] for key in self.constants):
            best = self.best(size, b2)
            if best is not None:
                whole = self.hours(f"0:{size}", machine)
                found[size, b2] = {
                    seed: whole * math.exp((best[1][seed] - losses[seed]) / slope)
                    for seed in SEEDS
                }
        return found

    def curves_of(self, schedule: str) -> list[Curve]:
        """Return the training losses of the fresh seeds of a ramp by the square-root
        rule, or of a constant batch with b2 of 0.99 at its best rate.
        """
        if " " in schedule:
            return list(self.curves[schedule, "rule"].values())
        size = int(schedule.removeprefix("0:"))
        best = self.best(size)
        assert best is not None
        return [self.curves[size, B2, best[0]][seed] for seed in SEEDS]


def mean(losses: Mapping[int, float]) -> float:
    """Return the mean over seeds."""
    return statistics.mean(losses.values())


def half_life_b2(size: int) -> float:
    """Return the b2 that forgets as many samples as B2 does at the smallest batch."""
    return float(round(B2 ** (size / SMALLEST), 4))


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 90% interval."""
    found = list(values)
    middle = statistics.mean(found)
    half = STUDENT[len(found)] * statistics.stdev(found) / len(found) ** 0.5
    return middle, middle - half, middle + half


def over_ramps(by_ramp: Sequence[dict[int, float]]) -> list[float]:
    """Return the mean over the ramps, by seed."""
    return [statistics.mean(ramp[seed] for ramp in by_ramp) for seed in SEEDS]


def above_tuned(study: Study, schedule: str, variant: str) -> dict[int, float]:
    """Return by seed what a ramp ends above the constant batch of about as many steps
    at its best rate.
    """
    best = study.best(study.same_size[schedule])
    assert best is not None
    ramp = study.ramps[schedule, variant]
    return {seed: ramp[seed] - best[1][seed] for seed in SEEDS}


def above_same_rates(study: Study, schedule: str) -> dict[int, float]:
    """Return by seed what a ramp by the rule ends above the constant batch of about as
    many steps with the same rates.
    """
    ramp, other = study.ramps[schedule, "rule"], study.same_rates[schedule]
    return {seed: ramp[seed] - other[seed] for seed in SEEDS}


class Penalty(NamedTuple):
    """What a pilot predicted of a schedule: its loss above the smallest batch."""

    pilot: str
    noise: float
    schedule: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains what was measured."""
        return self.low <= self.measured <= self.high


def penalties(study: Study) -> list[Penalty]:
    """Return what each pilot predicted, and what the whole runs showed."""
    base, found = statistics.mean(losses_of(study, f"0:{study.sizes[0]}")), []
    for row in study.rows:
        for each in row.get("candidates", ()):
            schedule = each["batch_size_schedule"]
            losses = losses_of(study, schedule)
            if schedule != f"0:{study.sizes[0]}" and losses:
                penalty = Penalty(
                    pilot=row["name"].removeprefix(f"{study.shape} pilot "),
                    noise=row["noise_last"][0],
                    schedule=schedule,
                    predicted=each["loss_penalty"],
                    low=each["loss_penalty_low"],
                    high=each["loss_penalty_high"],
                    measured=statistics.mean(losses) - base,
                )
                found.append(penalty)
    return found


def losses_of(study: Study, schedule: str) -> list[float]:
    """Return the losses of the fresh seeds of a constant batch or a ramp, if all have
    run.
    """
    if " " in schedule:
        found = study.ramps.get((schedule, "rule"), {})
        return list(found.values()) if len(found) == len(SEEDS) else []
    best = study.best(int(schedule.removeprefix("0:")))
    return list(best[1].values()) if best else []


class Place(NamedTuple):
    """The training loss of one run at one place of a pilot's prediction."""

    shape: str
    pilot: str
    tenth: int  # of the run
    is_inside: bool


def places(study: Study) -> list[Place]:
    """Return whether the intervals that `rampup report` would show contain the training
    losses of the whole runs, at every tenth for which a pilot predicted one.
    """
    found = []
    for row in study.rows:
        for each in row.get("candidates", ()):
            schedule = each["batch_size_schedule"]
            if not losses_of(study, schedule):
                continue
            for tenth, point in enumerate(each["course"], 1):
                if point["loss"] is None:
                    continue
                # The middle of the samples over which the predicted loss is a mean.
                at = SAMPLES * tenth / TENTHS * (1 - LOSS_SHARE / 2)
                for curve in study.curves_of(schedule):
                    inside = point["loss_low"] <= read_off(curve, at)
                    inside &= read_off(curve, at) <= point["loss_high"]
                    found.append(Place(study.shape, row["name"], tenth, inside))
    return found


def read_off(curve: Curve, samples: float) -> float:
    """Return the loss of a curve after so many samples, on straight lines between the
    middles of its parts.
    """
    ends = [0.0, *(end for end, _ in curve)]
    middles = [(start + end) / 2 for start, end in itertools.pairwise(ends)]
    return on_lines(middles, [loss for _, loss in curve], samples)


def on_lines(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x, on straight lines between points and level outside of them."""
    place = bisect.bisect(xs, x)
    if place in (0, len(xs)):
        return ys[min(place, len(xs) - 1)]
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])


def excludes_zero(found: tuple[float, float, float]) -> bool:
    """Return whether an interval shows a difference."""
    return not found[1] <= 0 <= found[2]


def pays(saved: tuple[float, float, float]) -> bool:
    """Return what the rule of the study says, from the share of the hours saved."""
    middle, low, _ = saved
    return middle > LEAST_SAVED and low > 0


def read(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none if it is not there."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def moved_by_steps(studies: Mapping[str, Study]) -> float:
    """Return a bound, in thousandths, of how far the means above constant batches at
    their best rates move if those are interpolated to the steps of the ramps.
    """
    moved = 0.0
    for study in studies.values():
        means = {
            study.steps[f"0:{size}"]: statistics.mean(losses_of(study, f"0:{size}"))
            for size in reversed(study.sizes)
        }
        shifts = [
            means[study.steps[f"0:{study.same_size[schedule]}"]]
            - on_lines(list(means), list(means.values()), study.steps[schedule])
            for schedule in study.schedules
        ]
        moved = max(moved, abs(statistics.mean(shifts)))
    return math.ceil(moved * 1000) / 1000


def hours_to_the_smallest(study: Study, machine: int) -> dict[tuple[int, float], float]:
    """Return the mean time of each constant batch to the loss of the smallest one."""
    goal = statistics.mean(losses_of(study, f"0:{study.sizes[0]}"))
    losses = dict.fromkeys(SEEDS, goal)
    times = study.hours_of_constants(machine, losses, study.slope)
    return {key: mean(hours) for key, hours in times.items()}


def fastest(study: Study, machine: int) -> tuple[int, float]:
    """Return the constant batch that takes the fewest hours to a loss, and its b2."""
    times = hours_to_the_smallest(study, machine)
    return min(times, key=lambda key: times[key])


def lost_by(study: Study, machine: int, sizes: Iterable[int]) -> list[float]:
    """Return which share more hours constant batches take than the best one, all with
    the same b2.
    """
    times = hours_to_the_smallest(study, machine)
    best = min(time for (_, b2), time in times.items() if b2 == B2)
    return [times[size, B2] / best - 1 for size in sizes]


def hours_saved(study: Study, machine: int, **how: Any) -> tuple[float, float, float]:
    """Return the share of the hours that ramps save by the square-root rule, as the mean
    over them with its interval; `how` is what `Study.saved` takes.
    """
    saved = [study.saved(each, "rule", machine, **how) for each in study.schedules]
    return interval(over_ramps(saved))


def control_sizes(study: Study) -> list[int]:
    """Return the constant batches that have about as many steps as the ramps."""
    return [study.same_size[schedule] for schedule in study.schedules]


def expected(study: Study) -> list[float]:
    """Return the share of the hours that each design expected its ramp to save."""
    shares = []
    for row in study.rows:
        if "candidates" in row:
            hours = {
                each["name"]: each["hours_to_same_loss"] for each in row["candidates"]
            }
            ramp = hours.pop("fastest ramp")
            shares.append(1 - ramp / min(hours.values()))
    return shares


def rates_grow_to(study: Study) -> int:
    """Return the batch up to which no best rate, as it is printed, is lower than that of
    a smaller batch, with both rules for b2.
    """
    reached = list(study.sizes)
    for rule in (lambda size: B2, half_life_b2):
        rates = {
            size: float(f"{best[0]:.1e}")
            for size in study.sizes
            if (best := study.best(size, rule(size)))
        }
        lower = [
            size
            for before, size in itertools.pairwise(rates)
            if rates[size] < rates[before]
        ]
        reached = [size for size in reached if not lower or size < lower[0]]
    return max(reached)
