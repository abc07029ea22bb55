"""`rampup report`: a plan, a run or a verdict as one HTML page."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rampup
from rampup.cli.common import (
    Result,
    add_devices_argument,
    add_topology_argument,
    count_devices,
    describe_topology,
    environment,
    named_topology,
)
from rampup.cli.plot import add_inputs_argument, learning_rates, parse_inputs
from rampup.config.build import with_slices
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError
from rampup.loop.run_folder import CONFIG_FILE
from rampup.plan.plan import RampPlan
from rampup.plan.topology import Topology
from rampup.rl import config as rl
from rampup.show.report import Report, write_report

CountDevices = Callable[[Any], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup report`."""
    add_inputs_argument(parser)
    add_devices_argument(parser)
    add_topology_argument(parser, "plan for")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.html", help="the page to write")
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help="the file is another system's; see `rampup check`")


def run(args: argparse.Namespace, console: object) -> Result:
    """Write the page."""
    report = gather_report(
        args.sources,
        environ=environment(),
        system=args.system,
        count_devices=lambda config: count_devices(args, config),
        topology=named_topology(args),
    )
    size = write_report(report, args.output)
    return Result(
        facts={"title": report.title, "notes": list(report.notes), "output": args.output, "bytes": size},
        show=lambda console: console.print(f"wrote {args.output}", soft_wrap=True),
    )


def gather_report(
    words: Sequence[str],
    *,
    environ: Mapping[str, str],
    count_devices: CountDevices,
    system: str | None = None,
    topology: Topology | None = None,
) -> Report:
    """Return the content of a report.

    Args:
        words: a configuration and `key=value` settings, or the folder of a run.
        environ: environment variables with settings.
        count_devices: from a configuration to the devices to plan for.
        system: the system of the file, one of those that `rampup check` knows; None = rampup.
        topology: the TPU slices that the plan is for, or None.

    Raises:
        RampupError: the input cannot be read or planned.
    """
    inputs = parse_inputs(words)
    if system is not None:
        from rampup.dialects import check_file

        if inputs.config is None:
            raise ConfigError("--from needs another system's file, not the folder of a run", key="from", path=COMMAND_LINE)
        verdict = check_file(inputs.config, system, inputs.overrides)
        notes = verdict.plan.advice if isinstance(verdict.plan, RampPlan) else ()
        return Report(title=Path(inputs.config).name, plan=verdict.plan, notes=notes, verdict=verdict)
    file = Path(inputs.config) if inputs.config is not None else inputs.runs[0] / CONFIG_FILE
    title = file.stem if inputs.config is not None else inputs.runs[0].resolve().name
    if file.is_file() and rl.is_rollout_file(file):
        settings = rl.load_rollout_config(file, inputs.overrides, environ=environ if inputs.config is not None else {})
        rollout = rl.build_rollout_plan(settings, count_devices(settings))
        run = inputs.read_runs()[0] if inputs.runs else None
        return Report(title=title, plan=rollout, notes=rl.rollout_notes(settings, rollout), config=settings, run=run)
    config = with_slices(inputs.read_config(environ), topology)
    plan = rampup.build_plan(config, count_devices(config))
    rates, run = learning_rates(config, plan), inputs.read_runs()[0] if inputs.runs else None
    if run is not None:
        # What the steps had: a run that was resumed with another length had another schedule before.
        clock, planned = plan.learning_rate_clock, rates[plan.learning_rate_clock]
        had = {step: rate for step, rate in zip(run.steps, run.learning_rates, strict=True) if math.isfinite(rate)}
        rates[clock] = lambda step: had[step] if step in had else planned(step)
    notes = [*plan.advice, *([] if topology is None else [describe_topology(topology)])]
    return Report(title=title, plan=plan, notes=notes, config=config, rates=rates, run=run)
