"""`rampup suggest` and `fix`: sizes to start with, and the nearest legal ones."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path

import rampup
from rampup.cli.common import (
    CONFIG,
    DEVICES,
    Result,
    arg,
    count_devices,
    environment,
    usage_error,
)
from rampup.config.fix import find_fix, write_fix
from rampup.contrib.lab.scaling_laws import suggest_batch
from rampup.contrib.rl import starting_sizes
from rampup.contrib.rl.config import is_rollout_file
from rampup.errors import ConfigError
from rampup.show.console import print_batch_range, print_fix, print_suggestion

SUGGEST = {
    "--params": arg(
        "N",
        "parameters of the model without its embeddings, such as 6B; needed with"
        " --system",
    ),
    "--train-tokens": arg("D", "tokens of a pre-training run, such as 300B"),
    "--tuned": arg(
        "RATE@BATCH",
        "with --train-tokens: a tuned learning rate and its batch in tokens, such as"
        " 3e-4@0.5M",
    ),
    "--system": arg(
        "NAME", "for reinforcement learning: trlx, skyrl, verl or maxtext_rl"
    ),
    "--memory-gib": arg(
        "GIB", "with --system: memory of one device, for the rule of thumb"
    ),
}
FIX = (
    CONFIG
    | DEVICES
    | {"--write": arg(None, "write the file instead of only printing the patch")}
)


def suggest(args: argparse.Namespace) -> Result:
    """Suggest batch sizes for pre-training by scaling laws, or starting sizes for
    reinforcement learning.
    """
    if (args.train_tokens is None) == (args.system is None):
        raise usage_error(
            "give --train-tokens for the batch of a pre-training run, or --system for"
            " the starting sizes of reinforcement learning; not both"
        )
    if args.train_tokens is not None:
        if args.memory_gib is not None:
            raise usage_error("--memory-gib needs --system", key="memory-gib")
        found = suggest_batch(args.train_tokens, args.params, tuned=args.tuned)
        return Result(
            facts=found, show=lambda console: print_batch_range(found, console)
        )
    if args.tuned is not None:
        raise usage_error("--tuned needs --train-tokens", key="tuned")
    if args.params is None:
        raise usage_error("--system needs --params", key="params")
    suggestion = starting_sizes.suggest(
        args.params, system=args.system, memory_gib=args.memory_gib
    )
    return Result(
        facts=suggestion.to_dict(),
        show=lambda console: print_suggestion(suggestion, console),
    )


def fix(args: argparse.Namespace) -> Result:
    """Find the nearest legal configuration, and write it if requested."""
    rollout = False
    with contextlib.suppress(
        ConfigError
    ):  # a file that cannot be read yet, because its base is misspelled, is no rollout's
        rollout = is_rollout_file(args.config)
    if rollout:
        rule = (
            "fix is for a pre-training configuration; `rampup plan` shows what is wrong"
            " with a rollout"
        )
        raise ConfigError(rule, path=args.config)
    found = find_fix(
        args.config,
        args.overrides,
        environ=environment(),
        check=lambda config: rampup.build_plan(config, count_devices(args, config)),
    )
    write = args.write and found.text != found.before
    if write and not Path(args.config).is_file():
        raise ConfigError(
            "this file comes with rampup; copy it, and fix the copy",
            path=str(found.file),
        )
    if write:
        write_fix(found)
        print(f"wrote {found.file}", file=sys.stderr)
    facts = {
        "legal": not found.changes,
        "problems": found.problems,
        "changes": [dataclasses.asdict(change) for change in found.changes],
        "patch": found.patch,
        "written": write,
    }
    return Result(facts=facts, show=lambda console: print_fix(found, console))
