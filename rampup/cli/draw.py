"""`rampup plot` and `rampup report`: a plan or runs as a picture or as one HTML page."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rampup.cli import common
from rampup.cli.common import Result, arg, usage_error
from rampup.config.load import find_config
from rampup.config.notes import plan_notes
from rampup.config.schema import Config, OptimizerKeys
from rampup.errors import ConfigError
from rampup.loop.run_folder import CONFIG_FILE, PREDICTION_FILE, absolute_path, as_path
from rampup.plan.learning_rate import CLOCKS, Clock
from rampup.plan.plan import RampPlan
from rampup.show.report import Report, write_report
from rampup.show.series import RunMetrics

SOURCES = {
    "sources": arg(
        "CONFIG.yml|RUN_DIR",
        "a configuration and key=value settings, or the folder of a run, for `plot` also"
        " of several",
        nargs="+",
    )
}
PLOT = {
    **SOURCES,
    **common.DEVICES,
    "-o --output": arg(
        "FILE",
        "a .png, .svg or .pdf file; by default NAME.png of the run or configuration",
    ),
    "--kind": arg(
        None,
        "batch: batch size and cost of each phase (default for a configuration); rate:"
        " the learning rate on both clocks; timetable: the pipeline of the last phase;"
        " runs: loss, batch and tokens/s of runs (default for runs)",
        choices=("batch", "rate", "timetable", "runs"),
    ),
}
REPORT = {
    **SOURCES,
    **common.DEVICES,
    **common.TOPOLOGY,
    "-o --output": arg(
        "FILE.html",
        "the page to write; by default NAME.html of the run or configuration",
    ),
}


def plot(args: argparse.Namespace) -> Result:
    """Draw a picture into a file."""
    from rampup.show import figures

    inputs = parse_inputs(args.sources)
    output = args.output or f"{inputs.name}.png"
    kind = args.kind or ("runs" if inputs.runs else "batch")
    if kind == "runs":
        figures.draw_runs(inputs.read_runs(), output)
    else:
        if (others := inputs.commands()) is not None:
            return others.plot(args)
        config, plan = inputs.read_plan(args)
        if kind == "rate":
            figures.draw_rate(plan, learning_rates(config, plan), output)
        elif kind == "timetable":
            figures.draw_timetable(plan.timetable(), output)
        else:
            figures.draw_batch(plan, output)
    return Result(
        facts={"kind": kind, "output": output},
        show=lambda console: console.print(f"wrote {output}", soft_wrap=True),
    )


def report(args: argparse.Namespace) -> Result:
    """Write a page."""
    found = gather_report(args)
    output = args.output or f"{found.title}.html"
    size = write_report(found, output)
    facts = {
        "title": found.title,
        "notes": list(found.notes),
        "output": output,
        "bytes": size,
        "prediction": None if found.prediction is None else found.prediction._asdict(),
    }
    sentences = () if found.prediction is None else found.prediction.sentences()
    lines = "\n".join([*sentences, f"wrote {output}"])
    return Result(
        facts=facts, show=lambda console: console.print(lines, soft_wrap=True)
    )


def gather_report(args: argparse.Namespace) -> Report:
    """Return the content of a report of a configuration or of the folder of a run."""
    inputs = parse_inputs(args.sources)
    topology = common.named_topology(args)
    others = inputs.commands()
    if others is not None:
        return others.gather_report(args, inputs)
    run = inputs.read_run()
    config, plan = inputs.read_plan(args)
    rates, prediction = learning_rates(config, plan), None
    if run is not None:
        # What the steps had: a run that was resumed with another length had another
        # schedule before.
        planned = rates[plan.rate.clock]
        had = {
            step: rate
            for step, rate in zip(run.steps, run.learning_rates, strict=True)
            if math.isfinite(rate)
        }
        rates[plan.rate.clock] = lambda step: had.get(step, planned(step))
        if (inputs.runs[0] / PREDICTION_FILE).exists():
            predictions = common.load(common.PREDICTIONS)
            prediction = predictions.compare_prediction(inputs.runs[0], config, run)
    notes = [*plan_notes(config, plan)]
    if topology is not None:
        notes.append(common.describe_topology(topology))
    return Report(
        title=inputs.name,
        plan=plan,
        notes=notes,
        config=config,
        rates=rates,
        run=run,
        prediction=prediction,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CliInputs:
    """The inputs named on a command line."""

    runs: tuple[Path, ...]  # folders of runs
    config: str | None  # a configuration; None if only runs are named
    overrides: tuple[str, ...]  # `key=value` settings of the configuration

    @property
    def name(self) -> str:
        """The name of the configuration or of the run; `runs` if there are several."""
        if self.config is not None:
            return Path(self.config).stem
        return self.runs[0].resolve().name if len(self.runs) == 1 else "runs"

    @property
    def file(self) -> Path:
        """The file with the configuration, of a run the one that it was last started
        with.
        """
        if len(self.runs) > 1:
            raise usage_error(
                f"{len(self.runs)} runs are named; only their metrics can be drawn"
                " together, by `rampup plot RUN_DIR RUN_DIR`"
            )
        return (
            Path(self.config) if self.config is not None else self.runs[0] / CONFIG_FILE
        )

    @property
    def has_config(self) -> bool:
        """Whether there is a configuration: metrics may be without one."""
        return self.config is not None or self.file.is_file()

    def read_plan(self, args: argparse.Namespace) -> tuple[Config, RampPlan]:
        """Return the configuration in `file` and its plan, of a run as it goes on."""
        if not self.has_config:
            raise usage_error(
                f"{self.runs[0]} has no {CONFIG_FILE}, which `rampup train` writes; its"
                f" metrics alone can be drawn: rampup plot {self.runs[0]} -o FILE"
            )
        return common.read_plan(
            args,
            self.config or absolute_path(self.runs[0]),
            self.overrides,
            environ={} if self.runs else os.environ,
        )

    def commands(self) -> Any:
        """Return the module with the commands of `file`; None if it is a base.yml, or a
        run has none.
        """
        return common.commands_of(self.file) if self.has_config else None

    def read_run(self) -> RunMetrics | None:
        """Return the metrics of a run with its configuration; None of a
        configuration.
        """
        return self.read_runs()[0] if self.runs and self.has_config else None

    def read_runs(self) -> tuple[RunMetrics, ...]:
        """Return the metrics of the runs, named after their folders."""
        if not self.runs:
            raise usage_error("only the folder of a run has metrics")
        names = [folder.resolve().name for folder in self.runs]
        if len(set(names)) < len(names):
            names = list(map(str, self.runs))
        return tuple(
            RunMetrics.from_folder(folder, name=name)
            for folder, name in zip(self.runs, names, strict=True)
        )


def parse_inputs(words: Sequence[str]) -> CliInputs:
    """Sort words into folders of runs, or else one configuration and its settings."""
    runs, configs, overrides = list[Path](), list[str](), list[str]()
    for word in words:
        path = as_path(word)
        if path.is_dir():
            runs.append(path)
        elif "=" in word and not path.exists():
            overrides.append(word)
        else:
            find_config(word)  # refuses what is not there
            configs.append(word)
    if len(configs) > 1:
        raise usage_error(f"one configuration at a time: {', '.join(configs[:5])}")
    if configs and runs:
        raise usage_error("name a configuration or folders of runs, not both")
    if not configs and not runs:
        raise usage_error("name a configuration or the folder of a run")
    if runs and overrides:
        key = overrides[0].partition("=")[0]
        raise ConfigError(
            f"{overrides[0]} cannot be applied: the settings of a run folder are fixed",
            key=key,
        )
    return CliInputs(
        runs=tuple(runs),
        config=configs[0] if configs else None,
        overrides=tuple(overrides),
    )


def learning_rates(
    config: OptimizerKeys, plan: RampPlan
) -> dict[Clock, Callable[[int], float]]:
    """Return the configured learning rate with its schedule on each clock, the plan's
    own clock first.
    """
    from rampup.lm.train import learning_rate

    clocks = sorted(CLOCKS, key=lambda clock: clock != plan.rate.clock)
    return {
        clock: learning_rate(
            config, replace(plan, rate=replace(plan.rate, clock=clock))
        ).at
        for clock in clocks
    }
