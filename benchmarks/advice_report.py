"""The tables of "Does a ramp pay?", from the results of
benchmarks/advice.py alone.

Losses are held-out losses after the anneal. The token overhead of a batch is D / D' -
1: its run has D tokens, and a run of the best constant batch has the same loss with D'
tokens. Predictions are compared in the same way. Runs of one seed share initial weights
and the order of the data, so their differences are compared; intervals are 90%
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from advice import Study, best_offset, mean_loss, rows_of, step_time

from rampup.contrib.lab.design_model import (
    DATA_EXPONENTS,
    DesignModel,
    NoisePoint,
    StepTimes,
    loss_penalty,
    noise_curves,
)
from rampup.contrib.lab.scaling_laws import LAWS
from rampup.plan.noise_scale import student

# The source of the noise scale that the constant batches are predicted by.
MAIN = "plain"
SOURCES = {"plain": "Noise scale", "adam": "Noise scale, Adam", "critical": "Critical"}
Interval = tuple[float, float, float]  # the estimate, and the ends of its interval


class Report(NamedTuple):
    """The results of a study, and what follows from them."""

    results: Mapping[str, Any]

    @property
    def study(self) -> Study:
        """The sizes of the study."""
        given = self.results["study"]
        return Study(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in given.items()
            }
        )

    @property
    def runs(self) -> Mapping[str, Any]:
        """The runs by name."""
        return self.results["runs"]

    @property
    def best(self) -> int:
        """The constant batch with the lowest loss."""
        return min(
            self.study.sizes, key=lambda size: mean_loss(self.runs, f"constant {size}")
        )

    def seeds(self, prefix: str) -> list[float]:
        """Return the losses of a schedule's seeds, in order."""
        return [run["loss"] for run in self.runs_of(prefix)]

    def difference(self, prefix: str, other: str) -> Interval:
        """Return the mean difference of the losses of two schedules over the seeds,
        with its interval.
        """
        return interval(
            [a - b for a, b in zip(self.seeds(prefix), self.seeds(other), strict=False)]
        )

    def constant_loss(self, steps: int, seed: int) -> float:
        """Return the loss of a constant batch with so many steps, between those of the
        batches that were run.
        """
        found = {
            math.log(self.study.samples / size): self.seeds(f"constant {size}")[seed]
            for size in self.study.sizes
        }
        return smooth([*found], [*found.values()], math.log(steps))

    def above_constants(self, prefix: str) -> Interval:
        """Return the loss of a schedule less that of a constant batch with as many
        steps, with its interval.
        """
        return interval(
            [
                run["loss"] - self.constant_loss(run["steps"], run["seed"])
                for run in self.runs_of(prefix)
            ]
        )

    def samples_at(self, loss: float) -> float:
        """Return the samples after which the best constant batch has this loss, each
        run with its own anneal.

        The logarithm of the samples is a smooth function of the loss, through the
        lengths that were run.
        """
        best, samples = self.best, self.study.samples
        lengths = {1: mean_loss(self.runs, f"constant {best}")}
        lengths |= {
            share: mean_loss(self.runs, f"length 1/{share} of {best}")
            for share in self.study.shares
        }
        return math.exp(
            smooth(
                [*lengths.values()],
                [math.log(samples / share) for share in lengths],
                loss,
            )
        )

    def overhead(self, prefix: str) -> Interval:
        """Return the measured token overhead of a schedule, with its interval."""
        reference = mean_loss(self.runs, f"constant {self.best}")
        found = [
            self.study.samples / self.samples_at(reference + each) - 1
            for each in self.difference(prefix, f"constant {self.best}")
        ]
        return found[0], found[1], found[2]

    def models(self, source: str) -> list[DesignModel]:
        """Return the models of a source of the noise scale: by its estimate, and by
        both ends of its interval.
        """
        points = [
            NoisePoint(*(math.inf if value is None else value for value in point))
            for point in self.results["designs"][source].get("points", ())
        ]
        times = StepTimes.fit(
            {size: step_time(self.study, size) for size in self.study.sizes}
        )
        return (
            [DesignModel(noise=curve, times=times) for curve in noise_curves(points)]
            if points
            else []
        )

    def predicted_overhead(self, source: str, size: int) -> Interval | None:
        """Return the token overhead of a constant batch that a source predicts,
        compared with the best constant batch.
        """
        if source == "laws":
            found = []
            for law in LAWS:
                if law.overhead is not None:
                    doubling = (
                        law.batch_tokens(
                            self.study.samples * self.study.length,
                            self.results["parameters"],
                        )
                        / law.overhead
                    )
                    ratios = [
                        1 + each * self.study.length / doubling
                        for each in (size, self.best)
                    ]
                    found.append(ratios[0] / ratios[1] - 1)
            return float(np.median(found)), min(found), max(found)
        found = []
        for model in self.models(source):
            reached = model.run(((0, size),), samples=self.study.samples).progress
            found.append(
                self.study.samples
                / model.run(((0, self.best),), progress=reached).samples
                - 1
            )
        return (found[0], min(found), max(found)) if found else None

    def runs_of(self, prefix: str) -> list[Mapping[str, Any]]:
        """Return the runs of a schedule, one for each seed; of a swept one, those with
        the best rate.
        """
        if swept := rows_of(self.runs, prefix):
            return swept[best_offset(self.runs, prefix)]
        return [
            self.runs[name]
            for name in sorted(self.runs)
            if name.rsplit(" seed", 1)[0] == prefix
        ]

    def rate_of(self, size: int, offset: int) -> float:
        """Return a rate of the sweep of a batch."""
        return float(rows_of(self.runs, f"constant {size}")[offset][0]["learning_rate"])

    def rate(self, size: int) -> float:
        """Return the best rate of a constant batch."""
        return self.rate_of(size, best_offset(self.runs, f"constant {size}"))

    def penalty(
        self, source: str, schedule: Sequence[Sequence[int]]
    ) -> Interval | None:
        """Return the loss above that of the pilot's batch that `rampup design` predicts
        for a schedule.
        """
        slope = self.results["designs"][source].get("loss_slope")
        if slope is None:
            return None
        found = []
        for exponent in DATA_EXPONENTS:
            for model in self.models(source):
                own, small = (
                    model.run(each, samples=self.study.samples).progress
                    for each in (tuple(map(tuple, schedule)), ((0, self.study.pilot),))
                )
                at = model.noise.knots[-1][0]
                found.append(
                    loss_penalty(
                        own, small, slope=slope, measured_at=at, exponent=exponent
                    )
                )
        return found[0], min(found), max(found)

    @property
    def slopes(self) -> tuple[float, float]:
        """The fall of the loss per factor e of tokens between half and all of them, and
        as a design has it.
        """
        half = mean_loss(self.runs, f"length 1/2 of {self.best}")
        design = self.results["designs"][MAIN]
        at = (
            self.models(MAIN)[0].noise.knots[-1][0]
            / self.models(MAIN)[0]
            .run(((0, self.best),), samples=self.study.samples)
            .progress
        )
        return (half - mean_loss(self.runs, f"constant {self.best}")) / math.log(
            2
        ), design["loss_slope"] * at ** DATA_EXPONENTS[0]

    def designed(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield the schedules that were designed and run: their name, their source and
        their prediction.
        """
        for source, design in self.results["designs"].items():
            for each in design.get("candidates", ()):
                name = {
                    "early growth, fastest": "fastest",
                    "early growth, frugal": "frugal",
                }.get(each["name"], each["name"])
                yield (
                    (name if name == "seesaw" else f"{name} by {source}"),
                    source,
                    each,
                )


def smooth(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x by the polynomial through the four nearest points, or through fewer
    if there are fewer.
    """
    nearest = sorted(zip(xs, ys, strict=True), key=lambda point: abs(point[0] - x))[:4]
    return float(np.polyval(np.polyfit(*np.array(nearest).T, len(nearest) - 1), x))


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values, one for each seed, and its interval by Student's t."""
    mean = float(np.mean(values))
    if len(values) < 2 or not any(values):
        return mean, mean, mean
    margin = (
        student(len(values) - 1)
        * float(np.std(values, ddof=1))
        / math.sqrt(len(values))
    )
    return mean, mean - margin, mean + margin


def cell(found: Interval | None, form: str = "{:.0%}") -> str:
    """Return an interval as text; without one if its ends are its middle."""
    if found is None:
        return "not known"
    value, low, high = (form.format(each).replace("-0%", "0%") for each in found)
    return value if low == high == value else f"{value} ({low}, {high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "|" + "".join(f" {each} |" if each else " |" for each in line)
        for line in (header, *rows)
    ]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def overhead_table(report: Report) -> str:
    """Return the token overhead of every constant batch, as it came out and, in a table
    of its own, as it was predicted.
    """
    rows, predicted, length = [], [], report.study.length
    for size in report.study.sizes:
        name = f"constant {size}"
        overheads = [
            cell(report.predicted_overhead(source, size))
            for source in (*SOURCES, "laws")
        ]
        predicted.append([f"{size * length:,}", *overheads])
        loss, rate = f"{mean_loss(report.runs, name):.3f}", f"{report.rate(size):.1e}"
        rows.append(
            [
                f"{size * length:,}",
                f"{report.study.samples // size:,}",
                rate,
                loss,
                cell(report.overhead(name)),
            ]
        )
    measured = table(["Tokens", "Steps", "Best rate", "Loss", "Measured cost"], rows)
    return measured + "\n" + table(["Tokens", *SOURCES.values(), "Laws"], predicted)


def rate_table(report: Report) -> str:
    """Return the best rate of every batch beside the square-root rule, and then the
    loss of every rate that was tried.
    """
    rows, tried, best = [], [], {}
    reference = report.rate(report.study.pilot)
    for size in report.study.sizes:
        best[size] = report.rate(size)
        rule = reference * math.sqrt(size / report.study.pilot)
        rows.append(
            [
                f"{size * report.study.length:,}",
                f"{best[size]:.1e}",
                f"{rule:.1e}",
                f"{best[size] / rule:.2f}",
            ]
        )
        for offset, runs in sorted(rows_of(report.runs, f"constant {size}").items()):
            tried.append(
                [
                    rows[-1][0],
                    f"{report.rate_of(size, offset):.1e}",
                    f"{runs[0]['loss']:.3f}",
                ]
            )
    slope = np.polyfit(np.log([*best]), np.log([*best.values()]), 1)[0]
    text = f"The best rate grows with the power {slope:.2f} of the batch."
    losses = table(["Batch, tokens", "Rate", "Held-out loss, seed 0"], tried)
    return f"{table(['Batch, tokens', 'Best rate', 'Square-root rule', 'Ratio'], rows)}\n{text}\n\n{losses}"


def schedule_table(report: Report) -> str:
    """Return the schedules: predicted and measured loss, and the loss of a constant
    batch with as many steps.
    """
    study, small = report.study, f"constant {report.study.pilot}"
    rows: list[list[str]] = []
    compared: list[list[str]] = []

    def add(
        name: str, prefix: str, source: str, schedule: Sequence[Sequence[int]]
    ) -> None:
        runs, tuned = report.runs_of(prefix), f"{prefix} tuned"
        rows.append(
            [
                name.replace("by plain", "by noise scale"),
                " ".join(f"{start}:{size}" for start, size in schedule),
                f"{runs[0]['steps']:,}",
                cell(report.penalty(source, schedule), "{:+.3f}"),
                cell(report.difference(prefix, small), "{:+.3f}"),
            ]
        )
        if not name.startswith("constant"):
            tuned_loss = (
                cell(report.difference(tuned, small), "{:+.3f}")
                if report.runs_of(tuned)
                else ""
            )
            above = cell(report.above_constants(prefix), "{:+.3f}")
            compared.append([rows[-1][0], tuned_loss, above])

    for size in study.sizes:
        if size != study.pilot:
            add(f"constant {size}", f"constant {size}", MAIN, ((0, size),))
    seen = set[str]()
    for name, source, each in report.designed():
        if name not in seen and report.runs_of(f"ramp {name}"):
            seen.add(name)
            add(
                name,
                f"ramp {name}",
                MAIN if name == "seesaw" else source,
                schedule_of(report, each),
            )
    header = [
        "Schedule",
        "Samples: batch",
        "Steps",
        "Predicted",
        "Measured",
    ]
    slopes = [f"{slope:.2f}" for slope in report.slopes]
    text = (
        f"Losses are those above constant {study.pilot},"
        f" {mean_loss(report.runs, small):.4f}. Loss per factor e of tokens: "
    )
    text += f"{slopes[0]} in the last half of the tokens, predicted {slopes[1]}.\n\n"
    both = ["Schedule", "With best rates", "Above the constant batch"]
    return f"{text}{table(header, rows)}\n{table(both, compared)}{auto_rows(report)}"


def schedule_of(report: Report, candidate: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the schedule of a candidate of a design, in samples."""
    starts = [start // report.study.length for start in candidate["start_tokens"]]
    return [*zip(starts, candidate["sizes"], strict=True)]


def auto_rows(report: Report) -> str:
    """Return the runs of `auto`, each with its own batches."""
    rows = [
        [
            f"auto, seed {run['seed']}",
            run["batch_size_schedule"],
            f"{run['steps']:,}",
            (
                f"{run['loss'] - report.seeds(f'constant {report.study.pilot}')[run['seed']]:+.3f}"
            ),
            f"{run['loss'] - report.constant_loss(run['steps'], run['seed']):+.3f}",
        ]
        for run in report.runs_of("ramp auto")
    ]
    header = ["Schedule", "Samples: batch", "Steps", "Measured", "Above constant"]
    return "\n" + table(header, rows) if rows else ""


def wsd_table(report: Report) -> str:
    """Return the losses of schedules under WSD, above that of the pilot's batch under
    WSD.
    """
    names = dict.fromkeys(
        name.rsplit(" seed", 1)[0]
        for name in sorted(report.runs)
        if name.startswith("wsd ")
    )
    # A rate that lost with the first seed has no others.
    won = {
        name.removesuffix(" half rate"): name
        for name in names
        if len(report.runs_of(name)) == report.study.seeds
    }
    small, rows = f"wsd constant {report.study.pilot}", []
    known = {name: schedule_of(report, each) for name, _, each in report.designed()}
    for name, full in won.items():
        short, is_constant = name.removeprefix("wsd "), name.startswith("wsd constant")
        schedule = [(0, int(short.split()[1]))] if is_constant else known[short]
        cosine = report.difference(
            short if is_constant else f"ramp {short}", small.removeprefix("wsd ")
        )
        cells = [
            report.penalty(MAIN, schedule),
            report.difference(full, won[small]),
            cosine,
        ]
        if name != small:
            rows.append(
                [
                    short.replace("by plain", "by noise scale"),
                    *(cell(each, "{:+.3f}") for each in cells),
                ]
            )
    losses = [
        float(np.mean(report.seeds(each)))
        for each in (won[small], small.removeprefix("wsd "))
    ]
    text = (
        f"Above constant {report.study.pilot}: {losses[0]:.3f} under WSD,"
        f" {losses[1]:.3f} under cosine.\n\n"
    )
    return text + table(["Schedule", "Predicted", "WSD", "Cosine"], rows)


def law_table(report: Report) -> str:
    """Return the batch with the lowest loss and its rate, by the laws of `rampup
    suggest` and as they came out.
    """
    tokens, params, rows = (
        report.study.samples * report.study.length,
        report.results["parameters"],
        [],
    )
    for law in LAWS:
        if law.overhead is None:
            rate = (
                f"{law.learning_rate(tokens, params):.1e}" if law.learning_rate else ""
            )
            rows.append([law.name, f"{law.batch_tokens(tokens, params):,.0f}", rate])
    rows.append(
        [
            "measured",
            f"{report.best * report.study.length:,}",
            f"{report.rate(report.best):.1e}",
        ]
    )
    return table(["Law", "Batch with the lowest loss, tokens", "Peak rate"], rows)


def critical_table(report: Report) -> str:
    """Return what the branches of the pilot found."""
    rows = []
    for each in report.results["critical"]:
        if "refused" in each:
            rows.append([str(each["step"]), each["refused"], "", ""])
            continue
        size, length = each["critical_batch_size"], report.study.length
        overheads = ", ".join(
            f"{branch['global_batch_size'] * length:,}:"
            f" {cell(tuple(branch['token_overhead']))}"
            for branch in each["branches"]
            if branch["token_overhead"] and None not in branch["token_overhead"]
        )
        found = (
            "undecided"
            if size is None
            else f"{(each['bound'] or '').replace('_', ' ')} {size * length:,}"
        )
        rows.append([str(each["step"]), found, f"{each['tokens']:,}", overheads])
    return table(
        [
            "Step",
            "Critical batch at +20%, tokens",
            "Window, tokens",
            "Token overhead of the branches",
        ],
        rows,
    )


def print_report(results: Mapping[str, Any]) -> None:
    """Print all tables."""
    report = Report(results)
    text, tokens = results["text"], report.study.samples * report.study.length
    print(
        f"{len(report.runs)} runs of {results['parameters']:,} parameters, {tokens:,}"
        " tokens each unless said"
    )
    print(
        f"text: {text['files']:,} files, {text['train_bytes']:,} bytes to train on,"
        f" {text['held_out_bytes']:,} held out\n"
    )
    for part in (
        overhead_table,
        rate_table,
        law_table,
        critical_table,
        schedule_table,
        wsd_table,
    ):
        print(part(report))
