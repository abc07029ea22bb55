"""The command line: finds the command, runs it, and turns what goes wrong into a message and an exit code."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rich.console import Console

import rampup
from rampup.cli import device_commands as train
from rampup.cli import files, pictures
from rampup.cli import plan_commands as plan
from rampup.cli.huge_pages import ask_for_huge_pages
from rampup.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, report_error
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError, NonFiniteError, RampupError, StorageError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it runs, its one line of help and its own options."""

    run: Callable[[argparse.Namespace, Console], int]
    help: str
    options: Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    """Turns wrong usage into an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`", path=COMMAND_LINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: its words; None = those of this process, which a command that works on devices may start anew.

    Example:
        >>> main(["--version"])
        rampup 0.1.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments and arguments[0] in ON_DEVICES:
        ask_for_huge_pages()
    as_json = "--json" in arguments
    try:
        return _dispatch(arguments)
    except RampupError as error:
        report_error(error, as_json)
        return EXIT_FAILED if isinstance(error, StorageError | NonFiniteError) else EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: say it in JSON too, with the traceback
        traceback.print_exc()
        if as_json:
            report_error(error, as_json)
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"rampup {rampup.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command {name!r}; choose from {', '.join(COMMANDS)}", path=COMMAND_LINE, nearest=tuple(COMMANDS)
        )
    args = _parser(name).parse_intermixed_args(rest)
    console = Console(stderr=args.json, highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    return COMMANDS[name].run(args, console)


def _parser(name: str) -> _Parser:
    """Return the parser of a command."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"rampup {name}", description=command.help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and everything else on standard error")
    command.options(parser)
    return parser


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="bash|zsh", help="the shell")


def _completion(args: argparse.Namespace, console: Console) -> int:
    from rampup.cli.completion import completion_script
    from rampup.config.schema import KEYS

    usages = {name: _parser(name).format_usage() for name in COMMANDS}
    options = {name: list(dict.fromkeys(re.findall(r"--[a-z][a-z-]*", usage))) for name, usage in usages.items()}
    configured = [name for name, usage in usages.items() if "key=value" in usage]
    script = completion_script(args.shell, options, KEYS, configured=configured)
    print(json.dumps({"script": script}) if args.json else script, end="\n" if args.json else "")
    return 0


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: rampup COMMAND CONFIG.yml [key=value ...] [options]", "", *lines, "", "rampup COMMAND --help says more."]
    )


COMMANDS = {
    "plan": Command(plan.plan, "show every phase of a run before it starts", plan.plan_options),
    "train": Command(train.train, "train the language model", train.train_options),
    "timetable": Command(
        plan.timetable, "show when each pipeline stage works on what, and what waiting costs", plan.timetable_options
    ),
    "plot": Command(pictures.plot, "draw a plan, its learning rate or pipeline, or runs side by side", pictures.plot_options),
    "report": Command(pictures.report, "write a plan, and a run if there is one, as one page to send", pictures.report_options),
    "bench": Command(train.bench, "measure this machine, beside what people use today", train.bench_options),
    "check": Command(files.check, "say what another system's configuration really does", files.check_options),
    "suggest": Command(
        files.suggest, "show starting sizes for reinforcement learning on a model of a size", files.suggest_options
    ),
    "fix": Command(files.fix, "find the nearest legal configuration, as a patch", files.fix_options),
    "explain": Command(files.explain, "say what a key means and what it may be", files.explain_options),
    "completion": Command(_completion, "print a script that completes rampup in a shell", _completion_options),
    "tune": Command(train.tune, "find the largest microbatch that fits, and the fastest cut of the ramp", train.tune_options),
    "rows": Command(plan.rows, "show exactly which rows an optimizer step reads", plan.rows_options),
}
# The commands that compute.
ON_DEVICES = ("train", "tune", "bench")
