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
    source = "as given" if found["memory_is_named"] else "as reported by the device"
    console.print(
        f"{found['num_devices']:,} x {found['device']}, {found['memory_gib']:.4g} GiB each ({source}), of which "
        f"{format_bytes(found['usable_bytes'])} are used: {found['margin']:.0%} are left free"
    )
    console.print(_describe_largest(found))
    console.print(_candidates_table(found["candidates"], console))
    if found["settings"] is not None:
        _print_settings(found, console)
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
    seconds = found["run_seconds"]
    time = "" if seconds is None else f"; the run's steps take {format_value(seconds)} s"
    console.print(f"recommended: {_format_settings(found['settings'])}{time}")
    console.print(_phases_table(found["phases"], console))
    for other in found["alternatives"]:
        seconds = other["run_seconds"]
        time = "not timed" if seconds is None else f"{format_value(seconds)} s"
        console.print(f"alternative: {_format_settings(other['settings'])}: {time}")
    if found["pipeline_tick_overhead"] is not None:
        console.print(f"measured for the pipeline's cost model: pipeline_tick_overhead={found['pipeline_tick_overhead']:.4g}")


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
