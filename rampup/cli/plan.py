"""`rampup plan`: the phases of a run, its pipeline's timetable, the rows of a step, or
the nearest legal configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

from rich.console import Console

import rampup
from rampup.cli import common
from rampup.cli.common import Result, arg, usage_error
from rampup.config.devices import list_devices
from rampup.config.draft import global_batch_to_load
from rampup.config.fix import find_fix
from rampup.config.notes import hyperparameter_notes, plan_notes
from rampup.config.resume import possible_devices
from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.plan.describe import MAX_PHASES
from rampup.plan.pipeline import SCHEDULES, Timetable
from rampup.plan.plan import RampPlan
from rampup.show import console as tables

PLAN = {
    **common.CONFIG,
    **common.DEVICES,
    **common.TOPOLOGY,
    "--all": arg(None, f"print every phase, also if there are more than {MAX_PHASES}"),
    "--hyperparameters": arg(None, "show the hyperparameters of every phase"),
    "--other-devices": arg(
        None, "show the numbers of devices on which all batches of this plan run"
    ),
    "--timetable": arg(
        "SCHEDULE",
        "show the pipeline of the last phase, and its bubble in every phase; with"
        f" another schedule than the plan's: {', '.join(SCHEDULES)}",
        nargs="?",
        const="",
    ),
    "--rows": arg("STEP", "show the rows that an optimizer step reads", type=int),
    "--fix": arg(
        None, "show the nearest legal configuration, as a patch for `patch -p0`"
    ),
    "--export": arg(
        "SYSTEM",
        "the sizes in the keys of another system: maxtext or megatron",
    ),
    "-o --output": arg("FILE", "with --export: write the file instead of printing it"),
}


def plan(args: argparse.Namespace) -> Result:
    """Show a plan, or what an option asks of it."""
    _check_options(args)
    if args.fix:
        return _fix(args)
    if (others := common.commands_of(args.config)) is not None:
        return others.plan(args)
    view = given_options(args, tuple(VIEWS))
    return VIEWS[view[0]](args) if view else _phases(args)


def _phases(args: argparse.Namespace) -> Result:
    """Show every phase, and on request its hyperparameters and other devices."""
    topology = common.named_topology(args)
    config, plan = common.read_plan(args, args.config, args.overrides)
    notes = plan_notes(config, plan)
    if args.hyperparameters:
        notes += hyperparameter_notes(config, plan)
    facts = {
        **plan.to_dict(),
        "global_batch_to_load": global_batch_to_load(config, plan),
        "notes": list(notes),
    }
    if topology is not None:
        facts["topology"] = topology.to_dict()
    rows: list[dict[str, float]] = []
    if args.hyperparameters:
        from rampup.lm.train import phase_hyperparameters

        rows = phase_hyperparameters(config, plan)
        pairs = zip(plan.phase_rows(), rows, strict=True)
        facts["phases"] = [{**phase, **row} for phase, row in pairs]
    devices = ""
    if args.other_devices:
        possible = facts["possible_devices"] = possible_devices(config, plan)
        devices = list_devices(possible)
    max_phases = None if args.all else MAX_PHASES

    def show(console: Console) -> None:
        tables.print_plan(plan, console, notes=notes, max_phases=max_phases)
        if rows:
            tables.print_hyperparameters(plan, rows, console, max_phases=max_phases)
        if topology is not None:
            console.print(common.describe_topology(topology))
        if devices:
            console.print(f"Numbers of devices that can run these batches: {devices}")

    return Result(facts=facts, show=show)


def _timetable(args: argparse.Namespace) -> Result:
    """Show the pipeline of the last phase, and its bubble in every phase."""
    _, plan = common.read_plan(args, args.config, args.overrides)
    found: dict[int, Timetable] = {}  # by pipeline microbatches
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        number = split.num_pipeline_microbatches
        if phase.start_step < plan.total_steps and number not in found:
            found[number] = _scheduled(plan.timetable(phase.index), args.timetable)
    rows = [
        {
            "phase": phase.index,
            "start_step": phase.start_step,
            "accumulation_steps": split.accumulation_steps,
            "num_pipeline_microbatches": split.num_pipeline_microbatches,
            "makespan": float(table.makespan),
            "bubble_fraction": float(table.bubble_fraction),
        }
        for phase, split in zip(plan.ramp.phases, plan.splits, strict=True)
        if (table := found.get(split.num_pipeline_microbatches)) is not None
        and phase.start_step < plan.total_steps
    ]
    last = found[rows[-1]["num_pipeline_microbatches"]]

    def show(console: Console) -> None:
        tables.print_timetable(last, console)
        console.print("one pass of every phase:")
        tables.print_passes(rows, console)

    return Result(facts={**last.to_dict(), "phases": rows}, show=show)


def _scheduled(table: Timetable, schedule: str) -> Timetable:
    """Return the timetable of a pass with another schedule, if one is named."""
    if not schedule:
        return table
    return Timetable.build(
        schedule,  # type: ignore[arg-type]  # it checks the name
        num_stages=table.num_stages,
        num_microbatches=table.num_microbatches,
        num_repeats=table.num_repeats,
    )


def _rows(args: argparse.Namespace) -> Result:
    """List the rows that an optimizer step reads."""
    from rampup.lm.train import rows_of_step

    config, plan = common.read_plan(args, args.config, args.overrides)
    found = rows_of_step(config, plan, args.rows)
    lines = "\n".join(f"sample {row['sample']:,}: {row['source']}" for row in found)
    facts = {"step": args.rows, "global_batch_size": len(found), "rows": found}
    return Result(facts=facts, show=lambda console: console.print(lines))


def _fix(args: argparse.Namespace) -> Result:
    """Find the nearest legal configuration."""
    if _is_rollout(args.config):
        raise ConfigError(
            "--fix is for a pre-training configuration; `rampup plan` shows what is"
            " wrong with a rollout",
            path=args.config,
        )

    def check(config: Config) -> RampPlan:
        return rampup.build_plan(config, common.count_devices(args, config))

    found = find_fix(args.config, args.overrides, environ=os.environ, check=check)
    facts = {
        "legal": not found.changes,
        "problems": found.problems,
        "changes": [dataclasses.asdict(change) for change in found.changes],
        "patch": found.patch,
    }
    return Result(facts=facts, show=lambda console: tables.print_fix(found, console))


def _is_rollout(path: str) -> bool:
    """Return whether a file is a rollout's. One that cannot be read yet, because its
    base is misspelled, is none.
    """
    try:
        return common.commands_of(path) is not None
    except ConfigError:
        return False


def _exported(args: argparse.Namespace) -> Result:
    """Print the sizes in another system's keys, or write them into a file."""
    config, plan = common.read_plan(args, args.config, args.overrides)
    exported = common.load(common.EXPORTS).export_plan(config, plan, args.export)
    shown = text = exported.to_yaml(args.export)
    if args.output is not None:
        common.write_text(args.output, text)
        shown = f"wrote {args.output}\n"
    facts = {
        "system": args.export,
        "values": exported.values,
        "facts": exported.facts,
        "notes": list(exported.notes),
    }
    return Result(
        facts=facts,
        show=lambda console: console.print(
            shown, end="", soft_wrap=True, markup=False, highlight=False
        ),
    )


# What an option asks of a plan. They exclude each other.
VIEWS = {
    "timetable": _timetable,
    "rows": _rows,
    "export": _exported,
}
# Those of a pre-training plan only.
NOT_FOR_ROLLOUTS = (
    "export",
    "timetable",
    "rows",
    "hyperparameters",
    "other_devices",
)


def given_options(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Return which of these options are given, as one writes them."""
    values = {name.replace("_", "-"): getattr(args, name) for name in names}
    return [
        name
        for name, value in values.items()
        if value is not None and value is not False  # step 0 is given, too
    ]


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other."""
    given = given_options(args, (*VIEWS, "fix", "hyperparameters", "other_devices"))
    if len(given) > 1 and set(given) != {"hyperparameters", "other-devices"}:
        listed = " and ".join(f"--{name}" for name in given)
        raise usage_error(f"{listed} exclude each other; leave one out", key=given[0])
    if "=" in (args.timetable or ""):
        raise usage_error(
            f"--timetable {args.timetable}: that is a setting and no schedule; give"
            " settings before --timetable",
            key="timetable",
        )
    if args.output is not None and args.export is None:
        raise usage_error(
            "-o is the file of --export; add --export SYSTEM", key="output"
        )
