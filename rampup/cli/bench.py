"""`rampup bench`: measures this machine."""

from __future__ import annotations

import argparse

from rich.console import Console

from rampup.bench import BENCHES, bench
from rampup.cli.common import Result, add_fake_devices_argument, check_output, split_cpu, use_fake_devices

BENCH_CPU_DEVICES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup bench`."""
    listed = "; ".join(f"{name}: {line}" for name, line in BENCHES.items())
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"benchmarks to run (default all): {listed}")
    add_fake_devices_argument(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, as a smoke test")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the tables into a .md or .html file")


def run(args: argparse.Namespace, console: Console) -> Result:
    """Run benchmarks, and print the table of each one as soon as it is done."""
    from rampup.bench.measure import ENDINGS, RowPrinter, print_result, write_results

    check_output(args.output, ENDINGS)
    benches = {name: bench(name) for name in args.names or BENCHES}
    use_fake_devices(args.fake_devices)
    if args.fake_devices is None:
        split_cpu(BENCH_CPU_DEVICES)
    progress = Console(stderr=True, highlight=False, markup=False)
    results = []
    for name, measure in benches.items():
        results.append(measure(quick=args.quick, on_row=RowPrinter(name, progress)))
        print_result(results[-1], console)
    if args.output:
        write_results(results, args.output)
    return Result(facts={"results": [result.to_dict() for result in results]})
