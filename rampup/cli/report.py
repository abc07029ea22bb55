"""`rampup report`: a plan, a run or a verdict as one HTML page."""

from __future__ import annotations

import argparse
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
from rampup.cli.plot import CliInputs, add_inputs_argument, learning_rates, parse_inputs
from rampup.config.build import with_slices
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError
from rampup.plan.plan import RampPlan
from rampup.plan.topology import Topology
from rampup.rl import config as rl
from rampup.run.run_folder import CONFIG_FILE
from rampup.show.report import Report, key_values, write_report

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
        return _report_on_other_system(inputs, system)
    file = Path(inputs.config) if inputs.config is not None else inputs.runs[0] / CONFIG_FILE
    if file.is_file() and rl.is_rollout_file(file):
        return _report_on_rollout(inputs, file, environ if inputs.config is not None else {}, count_devices)
    config = with_slices(inputs.read_config(environ), topology)
    plan = rampup.build_plan(config, count_devices(config))
    return Report(
        title=Path(inputs.config).stem if inputs.config else inputs.runs[0].resolve().name,
        plan=plan,
        notes=[*plan.advice, *([] if topology is None else [describe_topology(topology)])],
        keys=key_values(config),
        rates=learning_rates(config, plan),
        run=inputs.read_runs()[0] if inputs.runs else None,
        version=rampup.__version__,
    )


def _report_on_rollout(inputs: CliInputs, file: Path, environ: Mapping[str, str], count_devices: CountDevices) -> Report:
    config = rl.load_rollout_config(file, inputs.overrides, environ=environ)
    plan = rl.build_rollout_plan(config, count_devices(config))
    return Report(
        title=inputs.runs[0].resolve().name if inputs.runs else file.stem,
        plan=plan,
        notes=rl.rollout_notes(config, plan),
        keys=key_values(config),
        run=inputs.read_runs()[0] if inputs.runs else None,
        version=rampup.__version__,
    )


def _report_on_other_system(inputs: CliInputs, system: str) -> Report:
    from rampup.dialects import check_file

    if inputs.config is None:
        raise ConfigError("--from needs another system's file, not the folder of a run", key="from", path=COMMAND_LINE)
    verdict = check_file(inputs.config, system, inputs.overrides)
    plan = verdict.plan
    return Report(
        title=Path(inputs.config).name,
        plan=plan,
        notes=plan.advice if isinstance(plan, RampPlan) else (),
        verdict=verdict,
        version=rampup.__version__,
    )
