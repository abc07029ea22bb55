"""`rampup explain`: a key and its legal values."""

from __future__ import annotations

import argparse

from rampup.cli import common
from rampup.cli.common import Result, arg
from rampup.config import files
from rampup.config.schema import KEYS
from rampup.show.console import print_explanation

EXPLAIN = {"key": arg("KEY", "a key of base.yml or rl.yml, or the word topology")}


def explain(args: argparse.Namespace) -> Result:
    """Explain a key, or list the topologies."""
    if args.key == "topology":
        return common.load(common.TOPOLOGIES).explain(args)
    known = [files.BASE_FILE]
    if args.key not in KEYS:
        known.append(common.load(common.ROLLOUTS).ROLLOUT_FILE)
    explanation = files.explain(args.key, known)
    return Result(
        facts=explanation,
        show=lambda console: print_explanation(explanation, console),
    )
