"""`rampup tune`: the largest microbatch that fits in memory, and its speed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console

import rampup
from rampup.cli import common
from rampup.cli.common import Result, arg
from rampup.errors import ConfigError
from rampup.plan.describe import PHASE_TITLES
from rampup.show.console import PLAIN, print_table
from rampup.show.format import format_bytes, format_count, format_value

Facts = Mapping[str, Any]  # of the JSON output
TUNE = {
    **common.CONFIG,
    "--memory-gib": arg(
        "GIB", "memory of one device, instead of this machine's; required on a CPU"
    ),
    "--devices": arg("N", "use N of this machine's devices", type=int),
    **common.FAKE_DEVICES,
    "--topology": arg("NAME", f"compile for {common.SLICES}"),
}


def tune(args: argparse.Namespace) -> Result:
    """Search for the largest size that fits."""
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    if args.topology is not None:
        from rampup.contrib.lab.topology import use_cpu_as_host

        if args.fake_devices is not None:
            raise ConfigError(
                "--topology brings its own devices; leave --fake-devices out",
                key="fake-devices",
            )
        use_cpu_as_host()
    common.use_fake_devices(args.fake_devices)
    from rampup.contrib.lab.search import problem_of, tune

    progress = Console(stderr=True, **PLAIN)
    facts = tune(
        config,
        memory_gib=args.memory_gib,
        num_devices=args.devices,
        topology=args.topology,
        report=lambda line: progress.print(line, style="dim", soft_wrap=True),
    )
    problem = problem_of(facts)
    return Result(
        facts=facts,
        show=lambda console: print_tuning(facts, console),
        exit_code=0 if problem is None else common.EXIT_REFUSED,
        problem=problem,
    )


def print_tuning(found: Facts, console: Console) -> None:
    """Print the sizes that were tried, the largest that fits, and the recommended
    settings with their phases.
    """
    console.print(
        f"{found['num_devices']:,} x {found['device']}, {found['memory_gib']:.4g} GiB"
        f" each, of which {format_bytes(found['usable_bytes'])} are used:"
        f" {found['margin']:.0%} are left free"
    )
    if "topology" in found:
        console.print(
            f"{found['topology']}, {found['compiled_for']}; {found['compiler']}"
        )
    console.print(_largest(found))
    rows = [
        (
            f"{row['microbatch_size']:,}",
            _memory(row),
            "fits" if row["fits"] else "does not fit",
        )
        for row in found["candidates"]
    ]
    print_table(console, ("micro-\nbatch", "memory", ""), rows)
    if found["settings"] is not None:
        _print_settings(found, console)


def _largest(found: Facts) -> str:
    """Return in a sentence which microbatch fits."""
    largest, larger = found["largest_microbatch"], found["next_larger"]
    if largest is None:
        return "no microbatch fits"
    if larger is None:
        return f"the largest microbatch tried, {format_count(largest, 'sample')}, fits"
    return (
        f"the largest microbatch that fits is {format_count(largest, 'sample')};"
        f" {larger:,} does not"
    )


def _print_settings(found: Facts, console: Console) -> None:
    """Print the recommended settings and their phases."""
    words = " ".join(f"{key}={value}" for key, value in found["settings"].items())
    console.print(f"recommended: {words or 'the configuration as it is'}")
    phases = found["phases"]
    columns = ["global_batch_size", "per_device_batch_size", "accumulation_steps"]
    if any(row["num_pipeline_microbatches"] > 1 for row in phases):
        columns.append("num_pipeline_microbatches")
    columns.append("microbatch_size")
    titles = ["phase", *(PHASE_TITLES[name] for name in columns), "memory", "tokens/s"]
    rows = [
        [
            str(number),
            *(format_value(row[name]) for name in columns),
            _memory(row),
            _rate(row),
        ]
        for number, row in enumerate(phases)
    ]
    print_table(console, titles, rows)
    if phases[0]["tokens_per_second"]:
        console.print(
            "tokens/s: timed at the fewest and the most microbatches, else on a line"
        )


def _memory(row: Facts) -> str:
    return "too much" if row["bytes"] is None else format_bytes(row["bytes"])


def _rate(row: Facts) -> str:
    rate = row["tokens_per_second"]
    return "not timed" if rate is None else f"{rate:,.0f}"
