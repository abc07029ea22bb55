"""`rampup report`: a plan, a run or a verdict as one HTML page."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import rampup
from rampup.cli import common
from rampup.cli.common import Result, arg
from rampup.cli.plot import SOURCES, learning_rates, parse_inputs
from rampup.config.build import with_slices
from rampup.plan.describe import advice
from rampup.plan.plan import RampPlan
from rampup.rl import config as rl
from rampup.show.prediction import compare_prediction
from rampup.show.report import Report, write_report

ARGUMENTS = {
    **SOURCES,
    **common.DEVICES,
    **common.TOPOLOGY,
    "-o --output": arg("FILE.html", "the page to write", required=True),
    "--from": arg("SYSTEM", "the file is another system's; see `rampup check`", dest="system"),
}


def run(args: argparse.Namespace, console: object) -> Result:
    """Write the page."""
    report = gather_report(args)
    size = write_report(report, args.output)
    facts = {"title": report.title, "notes": list(report.notes), "output": args.output, "bytes": size}
    facts["prediction"] = None if report.prediction is None else report.prediction._asdict()
    sentences = () if report.prediction is None else report.prediction.sentences()
    lines = "\n".join([*sentences, f"wrote {args.output}"])
    return Result(facts=facts, show=lambda console: console.print(lines, soft_wrap=True))


def gather_report(args: argparse.Namespace) -> Report:
    """Return the content of a report of a configuration, of the folder of a run, or of another system's file."""
    inputs = parse_inputs(args.sources)
    topology = common.named_topology(args)
    if args.system is not None:
        from rampup.dialects import check_file

        if inputs.config is None:
            raise common.usage_error("--from needs another system's file, not the folder of a run", key="from")
        verdict = check_file(inputs.config, args.system, inputs.overrides)
        notes = advice(verdict.plan) if isinstance(verdict.plan, RampPlan) else ()
        return Report(title=Path(inputs.config).name, plan=verdict.plan, notes=notes, verdict=verdict)
    run, file = None, inputs.file
    if file.is_file() and rl.is_rollout_file(file):
        settings = rl.load_rollout_config(file, inputs.overrides, environ={} if inputs.runs else common.environment())
        rollout = rl.build_rollout_plan(settings, common.count_devices(args, settings))
        run = inputs.read_runs()[0] if inputs.runs else None
        return Report(title=inputs.name, plan=rollout, notes=rl.rollout_notes(settings, rollout), config=settings, run=run)
    config = with_slices(inputs.read_config(), topology)
    plan = rampup.build_plan(config, common.count_devices(args, config))
    rates, prediction = learning_rates(config, plan), None
    if inputs.runs:
        run = inputs.read_runs()[0]
        # What the steps had: a run that was resumed with another length had another schedule before.
        clock = plan.learning_rate_clock
        planned = rates[plan.learning_rate_clock]
        had = {step: rate for step, rate in zip(run.steps, run.learning_rates, strict=True) if math.isfinite(rate)}
        rates[clock] = lambda step: had[step] if step in had else planned(step)
        prediction = compare_prediction(inputs.runs[0], config, run)
    notes = [*advice(plan), *([] if topology is None else [common.describe_topology(topology)])]
    return Report(title=inputs.name, plan=plan, notes=notes, config=config, rates=rates, run=run, prediction=prediction)
