"""Work on devices: train, tune and bench."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

from rich.console import Console

import rampup
from rampup.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    check_output,
    config_options,
    report_error,
    split_cpu,
    use_fake_devices,
)

BENCH_CPU_DEVICES = 8


def train_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup train`."""
    config_options(parser)
    parser.add_argument("--fake-devices", type=int, metavar="N", help="train on N pretended CPU devices")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def train(args: argparse.Namespace, console: Console) -> int:
    """Train, and print what the run did."""
    from rampup.show.progress import TrainProgress
    from rampup.show.tables import print_facts

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    use_fake_devices(args.fake_devices)
    from rampup.lm.train import train as run

    progress = TrainProgress(console, log_period=config.log_period, quiet=args.quiet)
    try:
        summary = run(config, on_event=progress)
    finally:
        progress.close()
    if args.json:
        names = ("steps", "consumed_samples", "first_loss", "final_loss", "num_compilations", "ramp_steps")
        facts = dataclasses.asdict(summary)
        print(json.dumps({name: facts[name] for name in (*names, "tokens_per_second", "checkpoint")}))
    else:
        print_facts(dataclasses.asdict(summary), console)
    return EXIT_INTERRUPTED if summary.interrupted else 0


def tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup tune`."""
    config_options(parser)
    parser.add_argument(
        "--memory-gib", metavar="GIB", help="memory of one device, instead of that of this machine's; required on CPU"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use N of this machine's devices")
    parser.add_argument("--fake-devices", type=int, metavar="N", help="use N pretended CPU devices")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw memory by microbatch size into a .png, .svg or .pdf file")
    parser.add_argument("--memory-options", action="store_true", help="also measure other ways to save memory, and their cost")
    parser.add_argument("--levers", dest="memory_options", action="store_true", help=argparse.SUPPRESS)  # the old name


def tune(args: argparse.Namespace, console: Console) -> int:
    """Print which sizes fit and which are fastest."""
    from rampup.show.tuning import print_tuning

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    if args.output is not None:
        from rampup.show.plots.figure import FORMATS, matplotlib_part

        check_output(args.output, FORMATS)
        matplotlib_part("figure")
    use_fake_devices(args.fake_devices)
    from rampup.tune.search import tune as find_sizes

    progress = Console(stderr=True, highlight=False, markup=False)
    found = find_sizes(
        config,
        memory_gib=args.memory_gib,
        num_devices=args.devices,
        memory_options=args.memory_options,
        report=lambda line: progress.print(line, style="dim"),
    )
    facts = found.to_dict()
    if args.output is not None:
        from rampup.show.plots import draw_memory

        sizes = [(row["microbatch_size"], row["bytes"]) for row in facts["candidates"]]
        draw_memory(sizes, args.output, limit_bytes=facts["usable_bytes"])
    if not args.json:
        print_tuning(facts, console)
    elif found.problem is None:
        print(json.dumps(facts))
    if found.problem is not None:
        report_error(found.problem, args.json, facts)
        return EXIT_REFUSED
    return 0


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rampup bench`."""
    from rampup.bench import BENCHES

    listed = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"what to measure (default all): {listed}")
    parser.add_argument("--fake-devices", type=int, metavar="N", help="measure on N pretended CPU devices")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it runs")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the tables into a .md or .html file")


def bench(args: argparse.Namespace, console: Console) -> int:
    """Measure this machine and print the tables."""
    from rampup.bench import BENCHES
    from rampup.bench import bench as named
    from rampup.bench.output import ENDINGS, print_result, write_results

    check_output(args.output, ENDINGS)
    runs = [named(name) for name in args.names or BENCHES]
    use_fake_devices(args.fake_devices)
    if args.fake_devices is None:
        split_cpu(BENCH_CPU_DEVICES)
    results = []
    for run in runs:
        results.append(run(quick=args.quick))
        if not args.json:
            print_result(results[-1], console)
    if args.output:
        write_results(results, args.output)
    if args.json:
        print(json.dumps({"results": [result.to_dict() for result in results]}))
    return 0
