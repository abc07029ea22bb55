"""The tables of "Does a ramp pay?" from benchmarks/ramp_controls.jsonl.

    python benchmarks/ramp_controls_report.py          # every table
    python benchmarks/ramp_controls_report.py cosine   # those of one shape

It reads the results with the standard library alone: nothing of rampup takes part.

Losses become hours by one slope: what half of the samples cost the smallest batch, per
factor of e. A constant batch that ends `d` above a ramp needs `exp(d / slope)` times its
samples to end where the ramp ends. The constant batch that then takes the fewest hours,
with its own best rate and b2, is what a ramp has to beat. Intervals are those of Student's t
over the seeds, 90%.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("ramp_controls.jsonl")
SHAPES = ("wsd", "cosine")
SEEDS = (1, 2, 3)
SAMPLES = 8192
# A step of B samples takes 1 + B / machine.
MACHINES = (16, 64, 256)
VARIANTS = {
    "rule": "square-root rule",
    "surge": "peak at the noise scale",
    "none": "left alone",
    "rule, moment divided": "rule, second moment divided",
}
# The different ramps that the pilots led to: the verdict is over all of them.
RAMPS = 5
# The 95% quantile of Student's t by the number of seeds.
STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}


class Study:
    """The runs of one shape of the learning rate, by what they are.

    Attributes:
        constants: held-out losses by batch, b2 and peak rate, then by seed.
        ramps: losses by schedule and variant, then by seed.
        same_rates: losses of the constant batch of as many steps with a ramp's rates,
            by schedule, then by seed.
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
        for row in self.rows:
            if "loss" in row:
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        name, seed, loss = row["name"], row["seed"], row["loss"]
        if "samples" not in row:
            self.steps[row["schedule"]] = row["steps"]
        if " ramp " in name:
            variant = name.split(row["schedule"])[1].rsplit(" ", 1)[0].strip()
            self.ramps.setdefault((row["schedule"], variant), {})[seed] = loss
        elif " with the rates of " in name:
            ramp = name.split(" with the rates of ")[1].rsplit(" ", 1)[0]
            self.same_rates.setdefault(ramp, {})[seed] = loss
            self.same_size[ramp] = int(name.split()[2])
        elif "samples" in row:
            self.short.setdefault(row["samples"], {})[seed] = loss
        else:
            key = (int(name.split()[2]), row.get("b2", 0.99), row["peak"])
            self.constants.setdefault(key, {})[seed] = loss

    def best(
        self, size: int, b2: float = 0.99
    ) -> tuple[float, dict[int, float]] | None:
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
        half = statistics.mean(self.short[SAMPLES // 2][seed] for seed in SEEDS)
        return (half - statistics.mean(best[1].values())) / math.log(2)

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
    ) -> dict[int, float]:
        """Return by seed which share of the hours of the best constant batch a ramp
        saves; `among` chooses the batches by size and b2.
        """
        ramp = self.ramps[schedule, variant]
        time = self.hours(schedule, machine)
        constants = []
        for size, b2 in dict.fromkeys(key[:2] for key in self.constants):
            best = self.best(size, b2)
            if best is None or not among(size, b2):
                continue
            whole = self.hours(f"0:{size}", machine)
            constants.append(
                {
                    seed: whole * math.exp((best[1][seed] - ramp[seed]) / self.slope)
                    for seed in SEEDS
                }
            )
        fastest = min(constants, key=lambda hours: sum(hours.values()))
        return {seed: 1 - time / fastest[seed] for seed in SEEDS}


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 90% interval."""
    found = list(values)
    mean = statistics.mean(found)
    half = STUDENT[len(found)] * statistics.stdev(found) / len(found) ** 0.5
    return mean, mean - half, mean + half


def over_ramps(by_ramp: Sequence[dict[int, float]]) -> list[float]:
    """Return the mean over the ramps, by seed."""
    return [statistics.mean(ramp[seed] for ramp in by_ramp) for seed in SEEDS]


def constant_table(study: Study) -> list[str]:
    """Return a table of the constant batches whose fresh seeds have run."""
    lines = ["| Batch | Steps | b2 | Best rate | Loss |", "|---|---|---|---|---|"]
    keys = sorted({key[:2] for key in study.constants}, key=lambda k: (k[0], -k[1]))
    for size, b2 in keys:
        best = study.best(size, b2)
        if best is None:
            continue
        rate, losses = best
        error = statistics.stdev(losses.values()) / len(losses) ** 0.5
        lines.append(
            f"| {size} | {study.steps[f'0:{size}']:,} | {b2:g} | {rate:.1e} |"
            f" {statistics.mean(losses.values()):.3f} ± {error:.3f} |"
        )
    return lines


def at_equal_steps(study: Study) -> list[str]:
    """Return a table of what ramps end above constant batches of as many steps."""
    lines = [
        "| Rates of the ramp | Above the constant batch at its best rate |"
        " Above the constant batch with the same rates |",
        "|---|---|---|",
    ]
    for variant, words in VARIANTS.items():
        tuned, same = [], []
        for schedule in study.schedules:
            ramp = study.ramps[schedule, variant]
            best = study.best(study.same_size[schedule])
            assert best is not None
            tuned.append({seed: ramp[seed] - best[1][seed] for seed in SEEDS})
            other = study.same_rates[schedule]
            same.append({seed: ramp[seed] - other[seed] for seed in SEEDS})
        cells = [signed(interval(over_ramps(tuned)))]
        # Only the rule has a constant batch with its own rates.
        cells += [signed(interval(over_ramps(same))) if variant == "rule" else ""]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def saved_table(study: Study) -> list[str]:
    """Return a table of the hours that ramps save, by machine."""
    heads = " | ".join(f"1 + B/{machine}" for machine in MACHINES)
    lines = [f"| Rates of the ramp | {heads} |", "|---" * 4 + "|"]
    for variant, words in VARIANTS.items():
        cells = []
        for machine in MACHINES:
            saved = [study.saved(each, variant, machine) for each in study.schedules]
            cells.append(percent(interval(over_ramps(saved))))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def against_table(study: Study) -> list[str]:
    """Return a table of the hours that ramps save with the square-root rule, compared
    with fewer constant batches.
    """
    heads = " | ".join(f"1 + B/{machine}" for machine in MACHINES)
    lines = [f"| Compared with | {heads} |", "|---" * 4 + "|"]
    choices: dict[str, Callable[[int, float], bool]] = {
        "the best batch, b2 of 0.99": lambda size, b2: b2 == 0.99,
        "64, b2 of 0.99": lambda size, b2: (size, b2) == (64, 0.99),
        "64, b2 by the half-life": lambda size, b2: size == 64 and b2 != 0.99,
    }
    for words, among in choices.items():
        cells = []
        for machine in MACHINES:
            saved = [
                study.saved(each, "rule", machine, among) for each in study.schedules
            ]
            cells.append(percent(interval(over_ramps(saved))))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def pilot_table(study: Study) -> list[str]:
    """Return a table of what each pilot predicted, and what the whole runs showed, as
    losses above the smallest batch.
    """
    lines = [
        "| Pilot | Noise scale | Candidate | Predicted | Measured | Inside |",
        "|---|---|---|---|---|---|",
    ]
    first = study.best(study.sizes[0])
    assert first is not None
    base = statistics.mean(first[1].values())
    for row in study.rows:
        for each in row.get("candidates", ()):
            schedule = each["batch_size_schedule"]
            losses = losses_of(study, schedule)
            if schedule == f"0:{study.sizes[0]}" or losses is None:
                continue
            low, high = each["loss_penalty_low"], each["loss_penalty_high"]
            measured = statistics.mean(losses) - base
            pilot = row["name"].removeprefix(f"{study.shape} pilot ")
            inside = "yes" if low <= measured <= high else "no"
            lines.append(
                f"| {pilot.replace(' rate', ',')} | {row['noise_last'][0]:.0f} |"
                f" {schedule} | {each['loss_penalty']:+.2f} ({low:+.2f}, {high:+.2f}) |"
                f" {measured:+.2f} | {inside} |"
            )
    return lines


def losses_of(study: Study, schedule: str) -> list[float] | None:
    """Return the losses of the fresh seeds of a constant batch or a ramp."""
    if " " in schedule:
        found = study.ramps.get((schedule, "rule"), {})
        return list(found.values()) if len(found) == len(SEEDS) else None
    best = study.best(int(schedule.removeprefix("0:")))
    return list(best[1].values()) if best else None


def verdict(study: Study) -> list[str]:
    """Return what the ramps save, by machine; after the last ramp, what the rule of the
    study says of it.
    """
    count, lines = len(study.schedules), []
    for machine in MACHINES:
        saved = [study.saved(each, "rule", machine) for each in study.schedules]
        mean, low, high = interval(over_ramps(saved))
        found = percent((mean, low, high))
        if count == 1:
            says = f"this ramp saves {found}"
        elif count < RAMPS:
            says = f"these ramps save {found}"
        elif mean > 0.02 and low > 0:
            says = f"these ramps pay: {found}"
        else:
            says = f"these ramps do not pay: {found}"
        lines.append(f"- Where a step takes 1 + B/{machine}, {says}.")
    return lines


def signed(found: tuple[float, float, float]) -> str:
    """Return a difference of losses with its interval."""
    mean, low, high = found
    return f"{mean:+.3f} ({low:+.3f}, {high:+.3f})"


def percent(found: tuple[float, float, float]) -> str:
    """Return a share with its interval."""
    mean, low, high = found
    return f"{mean:+.1%} ({low:+.1%}, {high:+.1%})"


def read(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows of a file of results; none if it is not there."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def tables(study: Study) -> dict[str, list[str]]:
    """Return the tables of a shape by their titles; those of ramps if all have run."""
    found = {"Constant batches": constant_table(study)}
    if study.schedules:
        found["Pilots"] = pilot_table(study)
        found["At equal steps"] = at_equal_steps(study)
        found["Hours saved"] = saved_table(study)
        found["Fewer batches"] = against_table(study)
        found["Verdict"] = verdict(study)
    return found


def main() -> None:
    """Print the tables."""
    for shape in sys.argv[1:] or SHAPES:
        study = Study(read(), shape)
        print(f"# {shape}\n")
        if not study.constants:
            print("not run\n")
            continue
        for title, lines in tables(study).items():
            print(f"## {title}\n", *lines, "", sep="\n")
        if study.schedules:
            names = ", ".join(study.schedules)
            print(f"Slope {study.slope:.3f}; ramps: {names}\n")


if __name__ == "__main__":
    main()
