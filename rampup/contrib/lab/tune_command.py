"""`rampup tune`: the largest microbatch that fits in memory, and the fastest
settings.
"""

from __future__ import annotations

import argparse
import atexit
import os
import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console

import rampup
from rampup.cli import common
from rampup.cli.common import Result, arg
from rampup.contrib.lab.memory_figure import check_picture, draw_memory
from rampup.errors import ConfigError
from rampup.show.console import PLAIN, TITLES, make_table, print_notes, split_columns
from rampup.show.format import format_bytes, format_value

Facts = Mapping[str, Any]  # of the JSON output
TUNE = {
    **common.CONFIG,
    "--memory-gib": arg(
        "GIB", "memory of one device, instead of this machine's; required on a CPU"
    ),
    "--devices": arg("N", "use N of this machine's devices", type=int),
    **common.FAKE_DEVICES,
    "--topology": arg("NAME", f"compile for {common.SLICES}"),
    "-o --output": arg(
        "FILE", "draw memory by microbatch size into a .png, .svg or .pdf file"
    ),
    "--memory-options": arg(
        None, "also measure other ways to save memory, and their cost"
    ),
}


def tune(args: argparse.Namespace) -> Result:
    """Search for the sizes that fit and are fastest."""
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    check_picture(args.output)
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

    atexit.register(_leave_compiler)
    progress = Console(stderr=True, **PLAIN)
    facts = tune(
        config,
        memory_gib=args.memory_gib,
        num_devices=args.devices,
        topology=args.topology,
        memory_options=args.memory_options,
        report=lambda line: progress.print(line, style="dim", soft_wrap=True),
    )
    problem = problem_of(facts)
    if args.output is not None:
        sizes = [(row["microbatch_size"], row["bytes"]) for row in facts["candidates"]]
        draw_memory(sizes, args.output, limit_bytes=facts["usable_bytes"])
    return Result(
        facts=facts,
        show=lambda console: print_tuning(facts, console),
        exit_code=(
            common.EXIT_INTERRUPTED
            if facts.get("interrupted")
            else 0
            if problem is None
            else common.EXIT_REFUSED
        ),
        problem=problem,
    )


def _leave_compiler() -> None:
    """End the process if Ctrl-C left a compilation behind: nothing can stop it, and the
    interpreter must not end under it.
    """
    from rampup.contrib.lab.topology import COMPILER_THREAD

    if any(thread.name == COMPILER_THREAD for thread in threading.enumerate()):
        os._exit(common.EXIT_INTERRUPTED)


def print_tuning(found: Facts, console: Console) -> None:
    """Print the largest microbatch that fits, the recommended settings with their
    phases, and what else would save memory.
    """
    device = (
        f"{found['num_devices']:,} x {found['device']}, {found['memory_gib']:.4g} GiB"
        " each"
    )
    if is_estimate := "topology" in found:
        console.print(
            f"{found['topology']}, {found['compiled_for']}\n{device}, compiled with"
            f" {found['compiler']}"
        )
    else:
        source = "as given" if found["memory_is_named"] else "as reported by the device"
        used = (
            f"{format_bytes(found['usable_bytes'])} are used: {found['margin']:.0%} are"
            " left free"
        )
        console.print(f"{device} ({source}), of which {used}")
    largest = found["largest_microbatch"]
    if found.get("interrupted"):
        best = (
            "none that fits"
            if largest is None
            else f"the largest that fits is {largest:,} samples"
        )
        text = (
            f"stopped before the end of the search; of the microbatches so far, {best}"
        )
    elif largest is None:
        text = "no microbatch fits"
    elif found["next_larger"] is None:
        text = f"the largest microbatch tried, {largest:,} samples, fits"
    else:
        text = (
            f"the largest microbatch that fits is {largest:,} samples;"
            f" {found['next_larger']:,} does not "
        )
        text += f"({found['next_larger_run']})"
        if (peak := found["measured_peak_bytes"]) is not None:
            text += (
                f"; the devices had {format_bytes(peak)} in use at most while steps ran"
            )
    console.print(text)
    timed = (
        ["step\nat least", "tokens/s\nat most"]
        if is_estimate
        else ["step", "spread", "tokens/s"]
    )
    table = make_table(
        console, ["micro-\nbatch", "micro-\nbatches", "memory", *timed, ""]
    )
    for row in found["candidates"]:
        time = [
            _format(
                "{:,.4g} ms",
                row["roofline_seconds" if is_estimate else "step_seconds"],
                1000,
            )
        ]
        time += [] if is_estimate else [_format("{:.0%}", row["spread"])]
        sizes = (
            format_value(row["microbatch_size"]),
            format_value(row["num_microbatches"]),
        )
        table.add_row(
            *sizes,
            _format_memory(row),
            *time,
            _format_rate(row),
            "fits" if row["fits"] else "does not fit",
        )
    console.print(table)
    if found["settings"] is not None:
        _print_settings(found, console)
    if (
        memory := found.get("memory")
    ) is not None:  # of programs that were compiled for absent slices
        names = [
            name for name in ("arguments", "temporary", "code", "host") if memory[name]
        ]
        parts = ", ".join(f"{name} {format_bytes(memory[name])}" for name in names)
        console.print(
            f"memory of a device: {format_bytes(memory['total'])} of"
            f" {format_bytes(found['hbm_bytes'])} ({parts})"
        )
        console.print(
            f"executables: {found['executables']}, compiled in"
            f" {format_value(found['compile_seconds'])} s"
        )
        console.print(
            "collectives of an optimizer step in the last phase, for each device:"
        )
        table = make_table(
            console,
            ["collective", "axes", "devices", "count", "bytes", "where", "overlapped"],
            left=2,
        )
        for row in found["collectives_per_step"]:
            axes = "unknown" if row["axes"] is None else " ".join(row["axes"]) or "none"
            axes = "between slices" if row["between_slices"] else axes
            where = ("in a loop" if row["in_loop"] else "outside loops") + (
                ", in a branch" if row["in_branch"] else ""
            )
            sizes = (
                format_value(row["group_size"] or "unknown"),
                format_value(row["count"]),
                format_bytes(row["bytes"]),
            )
            table.add_row(
                row["kind"], axes, *sizes, where, "yes" if row["overlapped"] else "no"
            )
        console.print(table)
        kinds = {
            "compute": "computing",
            "memory": "memory",
            "exposed": "collectives that the chip waits for",
        }
        kinds["overlapped"] = "and that overlap"
        parts = ", ".join(
            f"{words} {format_value(found['roofline'][f'{kind}_seconds'])}"
            for kind, words in kinds.items()
        )
        console.print(
            f"roofline estimate of that step: {format_value(found['roofline_seconds'])}"
            f" s ({parts})"
        )
    if levers := found["levers"]:
        console.print(
            "what saves memory, with nothing else changed (~: estimated, the others are"
            " compiled):"
        )
        table = make_table(
            console, ["", "memory", "saves", "step time", "fits"], left=1
        )
        for row in levers:
            about = "" if row["compiled"] else "~"
            sizes = (
                "" if row[name] is None else about + format_bytes(row[name])
                for name in ("bytes", "saved_bytes")
            )
            table.add_row(
                row["name"],
                *sizes,
                _format("x {:.2f}", row["slowdown"]),
                "yes" if row["fits"] else "no",
            )
        console.print(table)
        print_notes(
            (
                f"{option['name']}: {option['remark']}"
                for option in levers
                if option["remark"]
            ),
            console,
        )
    print_notes(found["notes"], console)


def _print_settings(found: Facts, console: Console) -> None:
    """Print the recommended settings, their phases and the alternatives."""

    def words(settings: Facts) -> str:
        return (
            " ".join(f"{key}={value}" for key, value in settings.items())
            or "the configuration as it is"
        )

    best = found["run_seconds"]
    time = "" if best is None else f"; the run's steps take {format_value(best)} s"
    if (estimate := found.get("roofline_run_seconds")) is not None:
        best = estimate
        time = (
            f"; the run's steps take at least {format_value(estimate)} s (roofline"
            " estimate)"
        )
    console.print(
        f"recommended{' so far' * bool(found.get('interrupted'))}:"
        f" {words(found['settings'])}{time}"
    )
    rows = found["phases"]
    columns = ["global_batch_size", "per_device_batch_size"]
    columns += split_columns(any(row["num_pipeline_microbatches"] > 1 for row in rows))
    rate = (
        "tokens/s\nat most"
        if any("roofline_seconds" in row for row in rows)
        else "tokens/s"
    )
    table = make_table(
        console, ["phase", *(TITLES[name] for name in columns), "memory", rate]
    )
    for number, row in enumerate(rows):
        table.add_row(
            str(number),
            *(format_value(row[name]) for name in columns),
            _format_memory(row),
            _format_rate(row),
        )
    console.print(table)
    for other in found["alternatives"]:
        seconds = other.get("run_seconds", other.get("roofline_run_seconds"))
        ratio = f", x {seconds / best:.2f}" if seconds and best else ""
        time = "not timed" if seconds is None else f"{format_value(seconds)} s{ratio}"
        programs = (
            f"; {other['executables']} compiled programs"
            if other["executables"] > 1
            else ""
        )
        console.print(f"alternative: {words(other['settings'])}: {time}{programs}")
    if found["pipeline_tick_overhead"] is not None:
        console.print(
            "measured for the pipeline's cost model:"
            f" pipeline_tick_overhead={found['pipeline_tick_overhead']:.4g}"
        )


def _format(form: str, number: float | None, scale: int = 1) -> str:
    return "" if number is None else form.format(number * scale)


def _format_memory(row: Facts) -> str:
    return "too much" if row["bytes"] is None else format_bytes(row["bytes"])


def _format_rate(row: Facts) -> str:
    rate = row.get("roofline_tokens_per_second") or row["tokens_per_second"]
    return "not timed" if rate is None else f"{rate:,.0f}"
