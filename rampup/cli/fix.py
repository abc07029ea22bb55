"""`rampup fix`: the nearest legal configuration, as a patch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path

import rampup
from rampup.cli.common import CONFIG, DEVICES, Result, arg, count_devices, environment, is_rollout_file
from rampup.config.fix import find_fix, write_fix
from rampup.errors import ConfigError
from rampup.show.console import print_fix

ARGUMENTS = CONFIG | DEVICES | {"--write": arg(None, "write the file instead of only printing the patch")}


def run(args: argparse.Namespace, console: object) -> Result:
    """Find a fix, and write it if requested."""
    rollout = False
    with contextlib.suppress(ConfigError):  # a file that cannot be read yet, because its base is misspelled, is no rollout's
        rollout = is_rollout_file(args.config)
    if rollout:
        rule = "fix is for a pre-training configuration; `rampup plan` shows what is wrong with a rollout"
        raise ConfigError(rule, path=args.config)
    found = find_fix(
        args.config,
        args.overrides,
        environ=environment(),
        check=lambda config: rampup.build_plan(config, count_devices(args, config)),
    )
    write = args.write and found.text != found.before
    if write and not Path(args.config).is_file():
        raise ConfigError("this file comes with rampup; copy it, and fix the copy", path=str(found.file))
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
