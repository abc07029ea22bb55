"""`rampup train`: trains the language model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

import rampup
from rampup.cli.common import (
    EXIT_INTERRUPTED,
    Result,
    add_config_arguments,
    add_fake_devices_argument,
    environment,
    use_fake_devices,
)
from rampup.config.load import COMMAND_LINE
from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.run.run_folder import CONFIG_FILE
from rampup.show.console import print_facts
from rampup.show.progress import TrainProgress

JSON_KEYS = (
    "steps",
    "consumed_samples",
    "first_loss",
    "final_loss",
    "num_compilations",
    "ramp_steps",
    "tokens_per_second",
    "checkpoint",
    "seconds",
    "first_eval_loss",
    "final_eval_loss",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup train`."""
    add_config_arguments(parser, "CONFIG.yml|RUN_DIR", "a configuration file, or the folder of a run to resume")
    add_fake_devices_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def run(args: argparse.Namespace, console: Console) -> Result:
    """Train, and return the summary of the run."""
    config = _read_config(args)
    use_fake_devices(args.fake_devices)
    from rampup.lm.train import train

    options = "" if args.fake_devices is None else f" --fake-devices {args.fake_devices}"
    progress = TrainProgress(console, log_period=config.log_period, quiet=args.quiet, resume_options=options)
    try:
        summary = train(config, on_event=progress)
    finally:
        progress.close()
    facts = dataclasses.asdict(summary)
    return Result(
        facts={name: facts[name] for name in JSON_KEYS},
        show=lambda console: print_facts({name: fact for name, fact in facts.items() if fact is not None}, console),
        exit_code=EXIT_INTERRUPTED if summary.interrupted else 0,
    )


def _read_config(args: argparse.Namespace) -> Config:
    """Return the configuration: a file with its settings, or that of a run's folder, which the run then resumes in."""
    folder = Path(args.config)
    if not folder.is_dir():
        return rampup.load_config(args.config, args.overrides, environ=environment())
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no {CONFIG_FILE}", path=COMMAND_LINE)
    place = folder if folder.name not in ("", "..") else folder.resolve()
    for setting in args.overrides:
        if (key := setting.partition("=")[0]) in ("run_name", "base_output_directory"):
            raise ConfigError(f"{setting}: the run in {folder} keeps its folder; leave {key} out", key=key)
    config = rampup.load_config(folder / CONFIG_FILE, args.overrides, environ=environment())
    # The folder may have been moved since.
    return dataclasses.replace(config, run_name=place.name, base_output_directory=str(place.parent))
