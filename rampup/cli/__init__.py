"""The command line: dispatches to a command, prints its result, and turns errors into
messages and exit codes.

A command is a function that takes its arguments and returns a `Result`, with a table of
its arguments in capitals: `plan` and `PLAN`. It is in the module of `HOMES`, which
alone is imported. Exit codes: 0 success, 1 failed, 2 refused,
130 interrupted, 141 the output was closed early.
"""

from __future__ import annotations

import argparse
import contextvars
import difflib
import io
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console

import rampup
from rampup.cli import common
from rampup.errors import NonFiniteError, RampupError, StorageError
from rampup.loop.events import ctrl_c_stops

# Each command, with one line of help: those of the core, and what is optional.
COMMANDS = {
    "train": "train the language model",
    "generate": "continue a text with a trained model",
    "plan": "show every phase of a run before it starts",
    "explain": "explain a configuration key and its legal values",
    "plot": "draw a plan, its learning rate or pipeline, or the metrics of runs",
    "report": "write a self-contained HTML report of a plan or a run",
}
OPTIONAL = {
    "suggest": "show batch sizes by scaling laws",
    "design": "design a ramp from the measurements of a run",
    "critical": "find the critical batch size of a run by training branches of it",
    "tune": "find the largest microbatch that fits, and time it",
    "inspect": "show what a compiled program sends, sums, updates and stores",
    "check": "explain and check another system's configuration",
}
ALL = COMMANDS | OPTIONAL
# The module of each command. Those of `contrib` are imported by this table;
# `cli/common.py` names what commands of the core take from there.
HOMES = {
    "train": "rampup.cli.run",
    "generate": "rampup.cli.run",
    "plan": "rampup.cli.plan",
    "explain": "rampup.cli.explain",
    "plot": "rampup.cli.draw",
    "report": "rampup.cli.draw",
    "suggest": "rampup.contrib.lab.suggest_command",
    "design": "rampup.contrib.lab.design_command",
    "critical": "rampup.contrib.lab.critical_command",
    "tune": "rampup.contrib.lab.tune_command",
    "inspect": "rampup.contrib.lab.inspect_command",
    "check": "rampup.contrib.check.command",
}
# Commands that there were, and what is there instead.
GONE = {
    "timetable": "rampup plan CONFIG.yml --timetable",
    "rows": "rampup plan CONFIG.yml --rows STEP",
    "fix": "rampup plan CONFIG.yml --fix",
}
_DEVICES = (
    "`rampup train --fake-devices N` simulates N devices on a CPU, and"
    " `rampup plan --devices N` plans for N"
)
# Options that there were or that another command has, and what is there instead.
GONE_OPTIONS = {
    "devices": _DEVICES,
    "fake-devices": _DEVICES,
    "budget": "set train_tokens instead: the plan has the steps that they take",
    "tokens-per-second": "divide the tokens of a run by it",
    "diff": "print both plans, and compare them with `diff`",
    "width": "an .svg or .pdf can be scaled, and `draw_*` return a figure to resize",
    "from": "`rampup check FILE` has the verdict on another system's file",
    "o": 'design draws no picture; `rampup plot CONFIG.yml batch_size_schedule="SCHEDULE"'
    " -o FILE` draws a candidate, and tune's table has the memory of every size",
    "cost-per-prompt": "docs/guides/reinforcement_learning.md has the formulas",
    "system": "docs/guides/check_other_systems.md has published starting sizes for"
    " reinforcement learning",
    "memory-gib": "`rampup tune` takes the memory of a device",
    "tuned": "multiply the tuned rate by the square root of the ratio of the batches",
    "samples": "`rampup check FILE at_step=N` names where the run stands, in steps",
    "step": "`rampup check FILE at_step=N` names where the run stands, in steps",
    "verbose": "`rampup check` prints all of its notes",
    "multiples": "--batches names the batches of the branches, in samples",
    "tolerance": "the critical batch is the one that needs 20% more tokens",
    "work": "the result of `rampup critical` is in RUN.critical next to the run",
    "memory-options": "set a key that saves memory, such as remat_policy=full, and tune"
    " again",
}


class _Parser(argparse.ArgumentParser):
    """Turns wrong usage into an error like any other."""

    def error(self, message: str) -> NoReturn:
        if option := re.match(
            r"unrecognized arguments: --?([a-z][\w-]*)(?:[ =]([^-\s]\S*))?$", message
        ):
            message += "; " + GONE_OPTIONS.get(
                option[1],
                "a key of the configuration is set without dashes,"
                f" {option[1]}={option[2] or 'VALUE'}",
            )
        raise common.usage_error(f"{message}; see `{self.prog} --help`")


class _Console(Console):
    """Leaves a closed pipe to `main`; rich would exit with 1, the code of a failed
    run.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, with which one of several processes
    ends here if the run failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        common.skip_absent_tpu()
        # The line of the program that called says nothing to who typed a command.
        warnings.formatwarning = lambda text, kind, *_: f"{kind.__name__}: {text}\n"
    as_json = "--json" in (
        arguments[: arguments.index("--")] if "--" in arguments else arguments
    )
    # As standard error: an output that is ASCII must not end a run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        context = contextvars.copy_context()
        context.run(ctrl_c_stops.set, True)
        code = context.run(_dispatch, arguments)
        # a closed pipe must be noticed here, and not when the interpreter exits
        sys.stdout.flush()
        return code
    except RampupError as error:
        _print_error(error, as_json=as_json)
        code = (
            common.EXIT_FAILED
            if isinstance(error, StorageError | NonFiniteError)
            else common.EXIT_REFUSED
        )
    except KeyboardInterrupt:
        code = common.EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = common.EXIT_CLOSED
    except Exception as error:  # noqa: BLE001 - the last resort: the traceback, and the error as JSON
        traceback.print_exc()
        if as_json:
            _print_error(error, as_json=True)
        code = common.EXIT_FAILED
    distributed = sys.modules.get("rampup.loop.distributed")
    if distributed and distributed.has_failed.is_set():
        distributed.leave(code)
    return code


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    parser = _Parser(prog=f"rampup {name}", description=ALL[name], allow_abbrev=False)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, and everything else on standard error",
    )
    for flags, options in getattr(common.load(HOMES[name]), name.upper()).items():
        parser.add_argument(*flags.split(), **options)
    return parser


def _help() -> str:
    """Return what `rampup --help` prints."""
    width = max(map(len, ALL))
    lines = ["usage: rampup COMMAND CONFIG.yml [key=value ...] [options]"]
    for title, group in (("commands", COMMANDS), ("optional", OPTIONAL)):
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {words}" for name, words in group.items()]
    lines += [
        "",
        "rampup COMMAND --help describes a command; rampup --version prints the"
        " version.",
    ]
    return "\n".join(lines)


def _require_command(name: str) -> None:
    """Refuse a command that there is not, with the one that is meant."""
    if name in ALL:
        return
    if name in GONE:
        raise common.usage_error(f"rampup {name} is now `{GONE[name]}`")
    close = difflib.get_close_matches(name, ALL, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(ALL)}"
    raise common.usage_error(f"unknown command {name!r}; {hint}", nearest=tuple(ALL))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"rampup {rampup.__version__}")
        return 0
    name, *rest = arguments
    _require_command(name)
    command: list[str] = []
    if name == "check" and "--" in rest:  # what follows is a command of another system
        rest, command = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    args = make_parser(name).parse_intermixed_args(rest)
    args.command = command
    from rampup.show.console import PLAIN, is_for_a_log

    console = args.console = _Console(
        stderr=args.json,
        soft_wrap=not sys.stdout.isatty(),
        force_terminal=False if is_for_a_log() else None,
        **PLAIN,
    )
    result = getattr(common.load(HOMES[name]), name)(args)
    found = dict[str, Any]()
    if result.problem is not None:
        _print_error(result.problem, as_json=False)
        found = _error_object(result.problem)
    if not args.json:
        result.show(console)
    elif result.facts is not None:
        print(json.dumps({**found, **result.facts}))
    return result.exit_code


def _error_object(error: Exception) -> dict[str, Any]:
    return {
        "error": {
            "type": type(error).__name__,
            "message": str(error),
            "key": getattr(error, "key", None),
            "nearest": list(getattr(error, "nearest", ())),
        }
    }


def _print_error(error: Exception, *, as_json: bool) -> None:
    """Print an error: as JSON on standard output, and one of rampup's own as a message
    on standard error.
    """
    if as_json:
        print(json.dumps(_error_object(error)))
    if isinstance(error, RampupError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
