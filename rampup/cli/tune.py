"""`rampup tune`: the largest microbatch that fits in memory, and the fastest settings."""

from __future__ import annotations

import argparse

from rich.console import Console

import rampup
from rampup.cli.common import (
    EXIT_REFUSED,
    Result,
    add_config_arguments,
    add_fake_devices_argument,
    add_topology_argument,
    check_output,
    environment,
    use_fake_devices,
)
from rampup.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup tune`."""
    add_config_arguments(parser)
    parser.add_argument(
        "--memory-gib", metavar="GIB", help="memory of one device, instead of this machine's; required on a CPU"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use N of this machine's devices")
    add_fake_devices_argument(parser)
    add_topology_argument(parser, "compile for")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw memory by microbatch size into a .png, .svg or .pdf file")
    parser.add_argument("--memory-options", action="store_true", help="also measure other ways to save memory, and their cost")
    parser.add_argument("--levers", dest="memory_options", action="store_true", help=argparse.SUPPRESS)  # the old name


def run(args: argparse.Namespace, console: Console) -> Result:
    """Search for the sizes that fit and are fastest."""
    from rampup.show.figures import FORMATS, draw_memory, import_matplotlib
    from rampup.show.tuning import print_tuning

    config = rampup.load_config(args.config, args.overrides, environ=environment())
    check_output(args.output, FORMATS)
    if args.output is not None:
        import_matplotlib("figure")  # it must not turn out to be missing after the work
    if args.topology is not None:
        from rampup.run.compile import use_cpu_as_host

        if args.fake_devices is not None:
            raise ConfigError("--topology has devices of its own; leave --fake-devices out", key="fake-devices")
        use_cpu_as_host()
    use_fake_devices(args.fake_devices)
    from rampup.tune.search import tune

    progress = Console(stderr=True, highlight=False, markup=False)
    found = tune(
        config,
        memory_gib=args.memory_gib,
        num_devices=args.devices,
        topology=args.topology,
        memory_options=args.memory_options,
        report=lambda line: progress.print(line, style="dim", soft_wrap=True),
    )
    facts = found.to_dict()
    if args.output is not None:
        sizes = [(row["microbatch_size"], row["bytes"]) for row in facts["candidates"]]
        draw_memory(sizes, args.output, limit_bytes=facts["usable_bytes"])
    return Result(
        facts=facts,
        show=lambda console: print_tuning(facts, console),
        exit_code=0 if found.problem is None else EXIT_REFUSED,
        problem=found.problem,
    )
