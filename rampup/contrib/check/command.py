"""`rampup check`: explains, checks and converts another system's configuration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rampup.cli.common import EXIT_REFUSED, Result, arg, usage_error, write_text
from rampup.contrib.check.verdict import Verdict
from rampup.errors import ConfigError, RampupError
from rampup.plan.describe import MAX_PHASES, PHASE_TITLES, phase_table
from rampup.show.console import phase_cell, print_table
from rampup.show.format import format_count

if TYPE_CHECKING:
    from rampup.contrib.check.reading import Source

CHECK = {
    "file": arg(
        "FILE",
        "another system's configuration or launch script, several of them or a folder,"
        " or `-- COMMAND ...` at the end",
        nargs="?",
    ),
    "overrides": arg(
        "key=value",
        "settings in that system's keys that take precedence over the file, and"
        " variables that a script does not set; line=N chooses one of several commands",
        nargs="*",
    ),
    "--from": arg(
        "SYSTEM",
        "maxtext, maxtext_rl, megatron, skyrl, verl, trlx or tunix; without it, rampup"
        " finds it",
        dest="system",
    ),
    "--against": arg("FILE", "say which sizes of the update differ from that file's"),
    "--env": arg(None, "let scripts see this shell's variables"),
    "--devices": arg(
        "N", "check for N devices, and say which values keep the update", type=int
    ),
    "--all": arg(None, "print all phases of a ramp"),
    "--to": arg(None, "also convert what can be expressed", choices=("rampup",)),
    "-o --output": arg("FILE", "the converted file"),
}
SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".json", ".ipynb")
OUTCOMES = {
    "accepts": "its own check accepts the file",
    "rejects": "its own check rejects the file",
    "runs": "the run uses the sizes below",
    "pads": "the run pads its batches",
    "drops": "the run drops samples",
    "fails": "the run fails",
}
FOUND_BY = {"validator": "found by its own check", "run": "not checked: the run fails"}
PHASE_COLUMNS = {
    name: PHASE_TITLES.get(name, "replicas")
    for name in (
        "start_step",
        "start_sample",
        "num_steps",
        "global_batch_size",
        "data_parallel_size",
        "accumulation_steps",
        "num_pipeline_microbatches",
        "microbatch_size",
    )
}


def check(args: argparse.Namespace) -> Result:
    """Check files or a command, and convert one if an output is given."""
    from rampup.contrib.check import to_rampup

    if (args.to is None) != (args.output is None):
        raise usage_error("--to and -o FILE belong together", key="to")
    sources: list[Source] = []
    settings: list[str] = []
    if args.command:
        sources.append(tuple(args.command))
    for word in (args.file, *args.overrides):
        if word is None:
            continue
        if args.command or ("=" in word and not Path(word).exists()):
            settings.append(word)
        else:
            sources += _files(word)
    if not sources:
        raise usage_error("give a file, or a command after `--`")
    if len(sources) > 1:
        return _check_rows(sources, settings, args)
    verdict = _judge(sources[0], settings, args)
    if args.against is not None:
        return _compare(verdict, _judge(args.against, settings, args))
    if args.output is not None:
        said = f"{args.output} is not written: the file breaks rules; mend them first"
        if verdict.ok:
            text = to_rampup(verdict)
            if Path(args.output).resolve() == Path(args.file or "").resolve():
                raise ConfigError(
                    "the output file must not be the source file",
                    key="output",
                    path=args.output,
                )
            write_text(args.output, text)
            said = f"wrote {args.output}"
        print(said, file=sys.stderr)
    return Result(
        facts=verdict.to_dict(),
        show=lambda console: print_verdict(verdict, console, all_phases=args.all),
        exit_code=0 if verdict.ok else EXIT_REFUSED,
    )


def _judge(
    source: Source, settings: Sequence[str], args: argparse.Namespace
) -> Verdict:
    """Return the verdict on a file or a command."""
    from rampup.contrib.check import check_file

    return check_file(
        source,
        args.system,
        settings,
        environment=dict(os.environ) if args.env else None,
        devices=args.devices,
    )


def _files(word: str) -> list[str]:
    """Return a file, or the files of a folder that may be those of a run."""
    if not Path(word).is_dir():
        return [word]
    return sorted(
        str(file) for file in Path(word).rglob("*") if file.suffix in SUFFIXES
    )


def _check_rows(
    sources: Sequence[Source], settings: Sequence[str], args: argparse.Namespace
) -> Result:
    """Return one row for each file of a system; the others are counted."""
    from rampup.contrib.check import NoSystemError

    rows: list[dict[str, object]] = []
    for source in sources:
        row: dict[str, object] = {"file": source}
        try:
            verdict = _judge(source, settings, args)
        except NoSystemError:
            continue
        except RampupError as error:
            rows.append(
                row | {"error": str(error).removeprefix(f"{source}: "), "ok": False}
            )
            continue
        row |= {"verdict": _said(verdict), "ok": verdict.ok, **verdict.to_dict()}
        rows.append(row | {"summary": verdict.summary})
    others = len(sources) - len(rows)

    def show(console: Console) -> None:
        cells = [
            (
                str(row["file"]),
                str(row.get("system", "")),
                str(row.get("summary", "")),
                str(row.get("verdict", "not checked")),
            )
            for row in rows
        ]
        print_table(console, ("file", "system", "update", "verdict"), cells, left=4)
        for row in rows:
            if "error" in row:
                console.print(f"\n{row['file']}: {row['error']}")
        if others:
            console.print(f"{format_count(others, 'file')} of no system", style="dim")

    return Result(
        facts={"files": rows, "others": others},
        show=show,
        exit_code=0 if all(row["ok"] for row in rows) else EXIT_REFUSED,
    )


def _compare(first: Verdict, second: Verdict) -> Result:
    """Return the derived numbers in which two files differ, those of the update first;
    refuse a file that breaks rules, whose numbers are not those of a run.
    """
    from rampup.contrib.check.rules import UPDATE

    if broken := first.violations + second.violations:
        raise ConfigError(
            f"a file breaks rules: {broken[0].message}",
            fix="mend it before you compare it; `rampup check FILE` has all of them",
            key="against",
        )
    names = [*UPDATE, *(name for name in first.derived if name not in UPDATE)]
    different = {
        name: (first.derived.get(name), second.derived.get(name))
        for name in names
        if first.derived.get(name) != second.derived.get(name)
    }
    update = [name for name in different if name in UPDATE]

    def show(console: Console) -> None:
        for verdict in (first, second):
            console.print(f"{verdict.system}: {verdict.summary}")
        if not update:
            console.print("the update is the same", style="bold green")
        cells = [
            (name, "update" if name in update else "its division", *map(str, values))
            for name, values in different.items()
        ]
        if cells:
            titles = ("what differs", "a size of", "this file", "the other")
            print_table(console, titles, cells, left=2)

    return Result(
        facts={"update": update, "different": different},
        show=show,
        exit_code=EXIT_REFUSED if update else 0,
    )


def _said(verdict: Verdict) -> str:
    """Return what the system's own check and the run do."""
    return f"{OUTCOMES[verdict.validator]}; {OUTCOMES[verdict.run]}"


def print_verdict(
    verdict: Verdict, console: Console, *, all_phases: bool = False
) -> None:
    """Print violations, the meaning of the file and notes, and on request every phase."""
    style = "bold green" if verdict.ok else "bold red"
    console.print(f"{verdict.system}: {_said(verdict)}", style=style)
    if verdict.summary:
        console.print(verdict.summary)
    if verdict.version:
        console.print(f"rules: {verdict.version}", style="dim")
    if verdict.violations:
        console.print(
            f"\n{format_count(len(verdict.violations), 'rule')} broken", style="bold"
        )
    for number, violation in enumerate(verdict.violations, start=1):
        console.print(f"{number}. {violation.message}")
        console.print(
            f"   rule {violation.rule}, {FOUND_BY[violation.found_by]}; keys:"
            f" {', '.join(violation.keys)}",
            style="dim",
        )
    if verdict.meanings:
        console.print()
        print_table(console, ("setting", "meaning"), verdict.meanings, left=2)
    if verdict.phases is not None:
        console.print("\nphases", style="bold")
        rows = [
            [phase_cell(row, name) for name in PHASE_COLUMNS] for row in verdict.phases
        ]
        most = None if all_phases else MAX_PHASES
        titles = [*PHASE_COLUMNS.values()]
        for line in phase_table(titles, rows, most, console.width):
            console.print(line)
    if verdict.notes:
        console.print("\nnotes", style="bold")
    for note in verdict.notes:
        console.print(f"- {note}")
