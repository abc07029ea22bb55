"""The result of `rampup tune` as text for a terminal. Takes the JSON output, because `show` must not import `tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rampup.show.console import make_table, print_notes
from rampup.show.format import format_bytes, format_value

Facts = Mapping[str, Any]


def print_tuning(found: Facts, console: Console) -> None:
    """Print the largest microbatch that fits, the recommended settings with their phases, and what else would save memory."""
    if "topology" in found:
        console.print(
            f"{found['topology']}, {found['compiled_for']}\n{found['num_devices']:,} x {found['device']}, "
            f"{found['memory_gib']:.4g} GiB each, compiled with {found['compiler']}"
        )
    else:
        source = "as given" if found["memory_is_named"] else "as reported by the device"
        console.print(
            f"{found['num_devices']:,} x {found['device']}, {found['memory_gib']:.4g} GiB each ({source}), of which "
            f"{format_bytes(found['usable_bytes'])} are used: {found['margin']:.0%} are left free"
        )
    console.print(_describe_largest(found))
    console.print(_candidates_table(found["candidates"], console))
    if found["settings"] is not None:
        _print_settings(found, console)
    if found.get("memory") is not None:
        _print_slices(found, console)
    if found["levers"]:
        console.print("what saves memory, with nothing else changed (~: estimated, the others are compiled):")
        console.print(_options_table(found["levers"], console))
        print_notes((f"{option['name']}: {option['remark']}" for option in found["levers"] if option["remark"]), console)
    print_notes(found["notes"], console)


def _describe_largest(found: Facts) -> str:
    largest, following = found["largest_microbatch"], found["next_larger"]
    if largest is None:
        return "no microbatch fits"
    if following is None:
        return f"the largest microbatch tried, {largest:,} samples, fits"
    peak = found["measured_peak_bytes"]
    measured = f"; the devices had {format_bytes(peak)} in use at most while steps ran" if peak is not None else ""
    run = found["next_larger_run"]
    return f"the largest microbatch that fits is {largest:,} samples; {following:,} does not ({run}){measured}"


def _print_settings(found: Facts, console: Console) -> None:
    seconds, estimate = found["run_seconds"], found.get("roofline_run_seconds")
    time = "" if seconds is None else f"; the run's steps take {format_value(seconds)} s"
    time = time if estimate is None else f"; the run's steps take at least {format_value(estimate)} s (roofline estimate)"
    console.print(f"recommended: {_format_settings(found['settings'])}{time}")
    console.print(_phases_table(found["phases"], console))
    for other in found["alternatives"]:
        seconds = other.get("run_seconds", other.get("roofline_run_seconds"))
        time = "not timed" if seconds is None else f"{format_value(seconds)} s"
        console.print(f"alternative: {_format_settings(other['settings'])}: {time}")
    if found["pipeline_tick_overhead"] is not None:
        console.print(f"measured for the pipeline's cost model: pipeline_tick_overhead={found['pipeline_tick_overhead']:.4g}")


def _print_slices(found: Facts, console: Console) -> None:
    """Print what was compiled for slices that are not here."""
    memory, roofline = found["memory"], found["roofline"]
    kinds = ", ".join(
        f"{name} {format_bytes(memory[name])}" for name in ("arguments", "temporary", "code", "host") if memory[name]
    )
    console.print(f"memory of a device: {format_bytes(memory['total'])} of {format_bytes(found['hbm_bytes'])} ({kinds})")
    number = found["executables"]
    console.print(f"executables: {number}, compiled in {format_value(found['compile_seconds'])} s")
    console.print("collectives of an optimizer step in the last phase, for each device:")
    console.print(collectives_table(found["collectives_per_step"], console))
    names = {"compute": "computing", "memory": "memory", "exposed": "collectives that wait", "overlapped": "and that overlap"}
    parts = ", ".join(f"{words} {format_value(roofline[f'{name}_seconds'])}" for name, words in names.items())
    console.print(f"roofline estimate of that step: {format_value(found['roofline_seconds'])} s ({parts})")


def collectives_table(rows: Sequence[Facts], console: Console) -> Table:
    """Return a table of collectives: `Account.collective_rows`."""
    table = make_table(console, ["collective", "axes", "devices", "count", "bytes", "where", "overlapped"], left=2)
    for row in rows:
        axes = "unknown" if row["axes"] is None else " ".join(row["axes"]) or "none"
        axes = "between slices" if row["between_slices"] else axes
        where = ("in a loop" if row["in_loop"] else "outside loops") + (", in a branch" if row["in_branch"] else "")
        count, total = format_value(row["count"]), format_bytes(row["bytes"])
        overlapped = "yes" if row["overlapped"] else "no"
        table.add_row(row["kind"], axes, format_value(row["group_size"] or "unknown"), count, total, where, overlapped)
    return table


def _format_settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the configuration as it is"


def _candidates_table(rows: Sequence[Facts], console: Console) -> Table:
    cells = [
        (
            format_value(row["microbatch_size"]),
            format_value(row["num_microbatches"]),
            _format_memory(row["bytes"]),
            "" if row["step_seconds"] is None else f"{row['step_seconds'] * 1000:,.4g} ms",
            "" if row["spread"] is None else f"{row['spread']:.0%}",
            _format_rate(row["tokens_per_second"]),
            "fits" if row["fits"] else "does not fit",
        )
        for row in rows
    ]
    return make_table(console, ["micro-\nbatch", "micro-\nbatches", "memory", "step", "spread", "tokens/s", ""], cells)


def _phases_table(rows: Sequence[Facts], console: Console) -> Table:
    pipeline = any(row["num_pipeline_microbatches"] > 1 for row in rows)
    columns = {"global\nbatch": "global_batch_size", "per\ndevice": "per_device_batch_size", "passes": "accumulation_steps"}
    columns |= {"pipeline\nmicro": "num_pipeline_microbatches"} if pipeline else {}
    columns |= {"micro-\nbatch": "microbatch_size"}
    table = make_table(console, ["phase", *columns, "memory", "tokens/s"])
    for number, row in enumerate(rows):
        cells = (format_value(row[name]) for name in columns.values())
        table.add_row(str(number), *cells, _format_memory(row["bytes"]), _format_rate(row["tokens_per_second"]))
    return table


def _options_table(rows: Sequence[Facts], console: Console) -> Table:
    table = make_table(console, ["", "memory", "saves", "step time", "fits"], left=1)
    for row in rows:
        saved, slowdown, about = row["saved_bytes"], row["slowdown"], "" if row["compiled"] else "~"
        table.add_row(
            row["name"],
            about + _format_memory(row["bytes"]) if row["bytes"] is not None else "",
            about + format_bytes(saved) if saved is not None else "",
            "" if slowdown is None else f"x {slowdown:.2f}",
            "yes" if row["fits"] else "no",
        )
    return table


def _format_memory(number: float | None) -> str:
    return "too much" if number is None else format_bytes(number)


def _format_rate(tokens_per_second: float | None) -> str:
    return "not timed" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def print_topologies(rows: Sequence[Facts], console: Console) -> None:
    """Print the TPU slices that can be planned and compiled for, with the figures of a device and their sources."""
    titles = ["topology", "product", "devices", "HBM", "bfloat16\nTFLOP/s", "HBM\nGB/s", "links\nGB/s"]
    table = make_table(console, titles, left=2)
    for row in rows:
        table.add_row(
            row["name"],
            row["product_name"],
            format_value(row["num_devices"]),
            format_bytes(row["hbm_bytes"]),
            f"{row['peak_flops'] / 1e12:,.4g}",
            f"{row['hbm_bandwidth'] / 1e9:,.4g}",
            f"{row['ici_bandwidth'] / 1e9:,.4g}",
        )
    console.print(table)
    console.print(
        "HBM is what the compiler (libtpu 0.0.50) lets a program use; the other figures are published, for one device:"
    )
    for source in dict.fromkeys(row["source"] for row in rows):
        console.print(f"  {source}")
    console.print("several slices: 2*v5e:4x4; larger v4, v5p and tpu7x slices have sides that are multiples of 4")
