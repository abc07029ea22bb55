"""`rampup train`: trains the language model."""

from __future__ import annotations

import argparse
import dataclasses

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
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup train`."""
    add_config_arguments(parser)
    add_fake_devices_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def run(args: argparse.Namespace, console: Console) -> Result:
    """Train, and return the summary of the run."""
    config = rampup.load_config(args.config, args.overrides, environ=environment())
    use_fake_devices(args.fake_devices)
    from rampup.lm.train import train

    progress = TrainProgress(console, log_period=config.log_period, quiet=args.quiet)
    try:
        summary = train(config, on_event=progress)
    finally:
        progress.close()
    facts = dataclasses.asdict(summary)
    return Result(
        facts={name: facts[name] for name in JSON_KEYS},
        show=lambda console: print_facts(facts, console),
        exit_code=EXIT_INTERRUPTED if summary.interrupted else 0,
    )
