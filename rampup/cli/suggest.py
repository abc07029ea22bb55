"""`rampup suggest`: starting sizes for reinforcement learning."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result
from rampup.rl.starting_sizes import suggest
from rampup.show.rollouts import print_suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup suggest`."""
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model, such as 6B")
    parser.add_argument("--system", required=True, metavar="NAME", help="trlx, skyrl, verl or maxtext_rl")
    parser.add_argument("--memory-gib", metavar="GIB", help="memory of one device, for the rule of thumb")


def run(args: argparse.Namespace, console: object) -> Result:
    """Suggest starting sizes."""
    suggestion = suggest(args.params, system=args.system, memory_gib=args.memory_gib)
    return Result(facts=suggestion.to_dict(), show=lambda console: print_suggestion(suggestion, console))
