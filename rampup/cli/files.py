"""Configuration files: of other systems, to fix, to explain; and starting sizes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console

import rampup
from rampup.cli.options import EXIT_REFUSED, devices_options, num_devices
from rampup.config.load import COMMAND_LINE
from rampup.errors import ConfigError


def check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup check`."""
    parser.add_argument("file", metavar="FILE", help="another system's configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings in its words that win over the file")
    parser.add_argument(
        "--from", dest="system", required=True, metavar="SYSTEM", help="maxtext, maxtext_rl, megatron, skyrl, verl or trlx"
    )
    parser.add_argument("--to", choices=("rampup",), help="also convert what can be expressed")
    parser.add_argument("-o", "--output", metavar="FILE", help="the converted file")


def check(args: argparse.Namespace, console: Console) -> int:
    """Print what another system's file does, and convert it if asked to."""
    from rampup.dialects import check_file, write_conversion

    if (args.to is None) != (args.output is None):
        raise ConfigError("--to and -o FILE belong together", key="to", path=COMMAND_LINE)
    verdict = check_file(args.file, args.system, args.overrides)
    if args.json:
        print(json.dumps(verdict.to_dict()))
    else:
        from rampup.show.verdicts import print_verdict

        print_verdict(verdict, console)
    if verdict.ok and args.output is not None:
        write_conversion(verdict, args.output, source=args.file)
        print(f"wrote {args.output}", file=sys.stderr)
    return 0 if verdict.ok else EXIT_REFUSED


def suggest_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup suggest`."""
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model, such as 6B")
    parser.add_argument("--system", required=True, metavar="NAME", help="trlx, skyrl, verl or maxtext_rl")
    parser.add_argument("--memory-gib", metavar="GIB", help="memory of one device, for the rule of thumb")


def suggest(args: argparse.Namespace, console: Console) -> int:
    """Print starting sizes."""
    from rampup.rl.starting_sizes import suggest as suggested

    suggestion = suggested(args.params, system=args.system, memory_gib=args.memory_gib)
    if args.json:
        print(json.dumps(suggestion.to_dict()))
    else:
        from rampup.show.rollouts import print_suggestion

        print_suggestion(suggestion, console)
    return 0


def fix_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup fix`."""
    devices_options(parser)
    parser.add_argument("--write", action="store_true", help="write the file instead of only printing the patch")


def fix(args: argparse.Namespace, console: Console) -> int:
    """Print the nearest legal configuration as a patch, and write it if asked to."""
    from rampup.config.fix import find_fix, write_fix

    if _is_rollout(args.config):
        raise ConfigError(
            "fix is for a pre-training configuration; `rampup plan` says what is wrong with a rollout", path=args.config
        )
    found = find_fix(
        args.config,
        args.overrides,
        environ=os.environ,
        check=lambda config: rampup.build_plan(config, num_devices(args, config)),
    )
    write = args.write and found.text != found.before
    if write and not Path(args.config).is_file():
        raise ConfigError("this file comes with rampup; copy it, and fix the copy", path=str(found.file))
    if write:
        write_fix(found)
    if args.json:
        changes = [change.to_dict() for change in found.changes]
        print(
            json.dumps(
                {"legal": not changes, "problems": found.problems, "changes": changes, "patch": found.patch, "written": write}
            )
        )
        return 0
    from rampup.show.explanation import print_fix

    print_fix(found, console)
    if write:
        print(f"wrote {found.file}", file=sys.stderr)
    return 0


def _is_rollout(path: str) -> bool:
    """Say whether a file is a rollout's; one that cannot be read yet, because its base is misspelt, is not."""
    from rampup.rl.config import is_rollout_file

    try:
        return is_rollout_file(path)
    except ConfigError:
        return False


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup explain`."""
    parser.add_argument("key", metavar="KEY", help="a key of base.yml or rl.yml")


def explain(args: argparse.Namespace, console: Console) -> int:
    """Print what a key means."""
    from rampup.config.explain import explain as explained
    from rampup.config.files import BASE_FILE
    from rampup.rl.template import ROLLOUT_FILE

    explanation = explained(args.key, (BASE_FILE, ROLLOUT_FILE))
    if args.json:
        print(json.dumps(explanation.to_dict()))
    else:
        from rampup.show.explanation import print_explanation

        print_explanation(explanation, console)
    return 0
