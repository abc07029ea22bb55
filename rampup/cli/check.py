"""`rampup check`: explains and checks another system's configuration, and converts it."""

from __future__ import annotations

import argparse
import sys

from rampup.cli.common import EXIT_REFUSED, Result, arg, usage_error

# System -> the setting that is the number of devices of its run.
DEVICES = {"maxtext": "num_devices", "maxtext_rl": "num_devices", "megatron": "world_size"}


ARGUMENTS = {
    "file": arg("FILE", "another system's configuration or launch script, or `-- COMMAND ...` at the end", nargs="?"),
    "overrides": arg(
        "key=value",
        "settings in that system's keys that take precedence over the file, and variables that a script does not set",
        nargs="*",
    ),
    "--from": arg("SYSTEM", "maxtext, maxtext_rl, megatron, skyrl, verl or trlx; without it, rampup finds it", dest="system"),
    "--devices": arg("N", "check for N devices (maxtext, maxtext_rl and megatron)", type=int),
    "--verbose": arg(None, "also print what each size changes"),
    "--all": arg(None, "print all phases of a ramp"),
    "--to": arg(None, "also convert what can be expressed", choices=("rampup",)),
    "-o --output": arg("FILE", "the converted file"),
}


def run(args: argparse.Namespace, console: object) -> Result:
    """Check a file, and convert it if an output is given."""
    from rampup.dialects import check_command, check_file, find_system, write_conversion
    from rampup.show.verdicts import print_verdict

    if (args.to is None) != (args.output is None):
        raise usage_error("--to and -o FILE belong together", key="to")
    settings = list(args.overrides)
    if args.command:
        settings = [setting for setting in (args.file, *settings) if setting is not None]
    elif args.file is None:
        raise usage_error("give a file, or a command after `--`")
    system = args.system or find_system(tuple(args.command) or args.file, settings)
    if args.devices is not None:
        if system not in DEVICES:
            rule = f"--devices is for {', '.join(DEVICES)}; for {system}, set its own keys of devices as key=value"
            raise usage_error(rule, key="devices")
        settings.append(f"{DEVICES[system]}={args.devices}")
    verdict = check_command(args.command, system, settings) if args.command else check_file(args.file, system, settings)
    if verdict.ok and args.output is not None:
        write_conversion(verdict, args.output, source=args.file or "")
        print(f"wrote {args.output}", file=sys.stderr)
    return Result(
        facts=verdict.to_dict(),
        show=lambda console: print_verdict(verdict, console, verbose=args.verbose, all_phases=args.all),
        exit_code=0 if verdict.ok else EXIT_REFUSED,
    )
