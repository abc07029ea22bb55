"""The command line: a function per command, no logic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rich.console import Console

import rampup
from rampup.errors import ConfigError, RampupError

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it runs, its one line of help and its own options."""

    run: Callable[[argparse.Namespace, Console], int]
    help: str
    options: Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    """Turns wrong usage into an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`", path="command line")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Example:
        >>> main(["--version"])
        rampup 0.1.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        return _dispatch(arguments)
    except RampupError as error:
        _report(error, as_json)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: say it in JSON too, with the traceback
        traceback.print_exc()
        if as_json:
            _report(error, as_json)
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
            f"unknown command {name!r}; choose from {', '.join(COMMANDS)}", path="command line", nearest=tuple(COMMANDS)
        )
    command = COMMANDS[name]
    parser = _Parser(prog=f"rampup {name}", description=command.help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and everything else on standard error")
    command.options(parser)
    args = parser.parse_intermixed_args(rest)
    return command.run(args, Console(stderr=args.json, highlight=False, soft_wrap=not sys.stdout.isatty()))


def _plan(args: argparse.Namespace, console: Console) -> int:
    from rampup.show.tables import print_plan

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, _num_devices(args, config))
    if args.json:
        print(json.dumps(plan.to_dict()))
    else:
        print_plan(plan, console)
    return 0


def _train(args: argparse.Namespace, console: Console) -> int:
    from rampup.show.progress import TrainProgress
    from rampup.show.tables import print_facts

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    _use_fake_devices(args.fake_devices)
    from rampup.recipes.lm import train

    progress = TrainProgress(console, log_period=config.log_period, quiet=args.quiet)
    try:
        summary = train(config, progress)
    finally:
        progress.close()
    if args.json:
        names = ("steps", "consumed_samples", "first_loss", "final_loss", "num_compilations", "ramp_steps")
        facts = dataclasses.asdict(summary)
        print(json.dumps({name: facts[name] for name in (*names, "tokens_per_second", "checkpoint")}))
    else:
        print_facts(dataclasses.asdict(summary), console)
    return EXIT_INTERRUPTED if summary.interrupted else 0


def _rows(args: argparse.Namespace, console: Console) -> int:
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, _num_devices(args, config))
    from rampup.recipes.lm import rows_of_step

    rows = rows_of_step(config, plan, args.step)
    if args.json:
        print(json.dumps({"step": args.step, "global_batch_size": len(rows), "rows": rows}))
    else:
        for row in rows:
            console.print(f"sample {row['sample']:,}: {row['source']}", highlight=False)
    return 0


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yml", help="a configuration file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win over the file")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")


def _train_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--fake-devices", type=int, metavar="N", help="train on N pretended CPU devices")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def _rows_options(parser: argparse.ArgumentParser) -> None:
    _plan_options(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step, counted from 0")


def _num_devices(args: argparse.Namespace, config: rampup.Config) -> int:
    """The devices asked for, or those of the configuration, or those of this machine, for which JAX is needed."""
    if args.devices is not None:
        if args.devices < 1:
            raise ConfigError(f"--devices={args.devices} must be at least 1", key="num_devices", nearest=(1,))
        return int(args.devices)
    if config.num_devices != -1:
        return config.num_devices
    import jax

    return jax.device_count()


def _use_fake_devices(number: int | None) -> None:
    if number is None:
        return
    if not 1 <= number <= 1024:
        raise ConfigError(f"--fake-devices={number} must be between 1 and 1024", key="fake-devices", nearest=(1, 1024))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)


def _report(error: Exception, as_json: bool) -> None:
    if as_json:
        details: dict[str, Any] = {
            "type": type(error).__name__,
            "message": str(error),
            "key": getattr(error, "key", None),
            "nearest": list(getattr(error, "nearest", ())),
        }
        print(json.dumps({"error": details}))
    if isinstance(error, RampupError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: rampup COMMAND CONFIG.yml [key=value ...] [options]", "", *lines, "", "rampup COMMAND --help says more."]
    )


COMMANDS = {
    "plan": Command(_plan, "show every phase of a run before it starts", _plan_options),
    "train": Command(_train, "train the language model", _train_options),
    "rows": Command(_rows, "show exactly which rows an optimizer step reads", _rows_options),
}
