"""`rampup explain`: a key of the configuration, or the TPU slices that `--topology` takes."""

from __future__ import annotations

import argparse
import dataclasses

from rampup.cli.common import Result
from rampup.config.files import BASE_FILE, explain
from rampup.rl.config import ROLLOUT_FILE
from rampup.show.console import print_explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup explain`."""
    parser.add_argument("key", metavar="KEY", help="a key of base.yml or rl.yml, or the word topology")


def run(args: argparse.Namespace, console: object) -> Result:
    """Explain a key, or list the topologies."""
    if args.key == "topology":
        from rampup.plan.topology import known_topologies
        from rampup.show.tuning import print_topologies

        rows = [topology.to_dict() for topology in known_topologies()]
        return Result(facts={"topologies": rows}, show=lambda console: print_topologies(rows, console))
    explanation = explain(args.key, (BASE_FILE, ROLLOUT_FILE))
    return Result(facts=dataclasses.asdict(explanation), show=lambda console: print_explanation(explanation, console))
