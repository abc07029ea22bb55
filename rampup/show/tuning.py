"""What `rampup tune` found, for a terminal.

It is given what the command prints as JSON: the recipes are a floor above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rampup.show.format import format_value

Facts = Mapping[str, Any]


def print_tuning(found: Facts, console: Console) -> None:
    """Print where microbatches stop fitting, the settings recommended, every phase with them, and what else would help.

    Args:
        found: what was found, by its JSON names.
        console: where to.
    """
    whose = "as named" if found["memory_is_named"] else "its own"
    console.print(
        f"{found['num_devices']:,} x {found['device']}, {found['memory_gib']:.4g} GiB each ({whose}), of which "
        f"{bytes_text(found['usable_bytes'])} are used: {found['margin']:.0%} are left free"
    )
    console.print(_boundary(found))
    console.print(_candidates(found["candidates"], console))
    if found["settings"] is not None:
        _print_settings(found, console)
    if found["levers"]:
        console.print("what saves memory, with nothing else changed (~: arithmetic, the others are compiled):")
        console.print(_levers(found["levers"], console))
        for lever in found["levers"]:
            if lever["remark"]:
                console.print(f"note: {lever['name']}: {lever['remark']}", style="yellow")
    for note in found["notes"]:
        console.print(f"note: {note}", style="yellow")


def bytes_text(number: float | None) -> str:
    """Write a number of bytes for people.

    Example:
        >>> bytes_text(1536), bytes_text(17_179_869_184), bytes_text(None)
        ('1.5 KiB', '16 GiB', 'too much')
    """
    if number is None:
        return "too much"
    for unit in ("bytes", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} GiB"


def _boundary(found: Facts) -> str:
    largest, following = found["largest_microbatch"], found["next_larger"]
    if largest is None:
        return "no microbatch fits"
    if following is None:
        return f"the largest microbatch tried, {largest:,} samples, fits"
    peak = found["measured_peak_bytes"]
    seen = f"; the devices had {bytes_text(peak)} in use at most while steps ran" if peak is not None else ""
    return f"the largest microbatch that fits is {largest:,} samples; {following:,} does not ({found['next_larger_run']}){seen}"


def _print_settings(found: Facts, console: Console) -> None:
    settings = " ".join(f"{key}={value}" for key, value in found["settings"].items()) or "what the configuration has"
    took = found["run_seconds"]
    console.print(f"recommended: {settings}" + ("" if took is None else f"; the run's steps take {format_value(took)} s"))
    console.print(_phases(found["phases"], console))
    for other in found["alternatives"]:
        keys = " ".join(f"{key}={value}" for key, value in other["settings"].items()) or "what the configuration has"
        seconds = other["run_seconds"]
        console.print(f"instead: {keys}: {'not timed' if seconds is None else f'{format_value(seconds)} s'}")
    if found["pipeline_tick_overhead"] is not None:
        console.print(f"measured for the pipeline's chooser: pipeline_tick_overhead={found['pipeline_tick_overhead']:.4g}")


def _candidates(rows: Sequence[Facts], console: Console) -> Table:
    table = _empty(console, "micro-\nbatch", "micro-\nbatches", "memory", "step", "spread", "tokens/s", "")
    for row in rows:
        table.add_row(
            format_value(row["microbatch_size"]),
            format_value(row["num_microbatches"]),
            bytes_text(row["bytes"]),
            _time(row["step_seconds"]),
            "" if row["spread"] is None else f"{row['spread']:.0%}",
            _rate(row["tokens_per_second"]),
            "fits" if row["fits"] else "does not fit",
        )
    return table


def _phases(rows: Sequence[Facts], console: Console) -> Table:
    pipeline = any(row["num_pipeline_microbatches"] > 1 for row in rows)
    columns = {"global\nbatch": "global_batch_size", "per\ndevice": "per_device_batch_size", "passes": "accumulation_steps"}
    columns |= {"pipeline\nmicro": "num_pipeline_microbatches"} if pipeline else {}
    columns |= {"micro-\nbatch": "microbatch_size"}
    table = _empty(console, "phase", *columns, "memory", "tokens/s")
    for number, row in enumerate(rows):
        cells = (format_value(row[name]) for name in columns.values())
        table.add_row(str(number), *cells, bytes_text(row["bytes"]), _rate(row["tokens_per_second"]))
    return table


def _levers(rows: Sequence[Facts], console: Console) -> Table:
    table = _empty(console, "", "memory", "saves", "step time", "fits")
    for row in rows:
        saved, slowdown, about = row["saved_bytes"], row["slowdown"], "" if row["compiled"] else "~"
        known = row["bytes"] is not None
        table.add_row(
            row["name"],
            about + bytes_text(row["bytes"]) if known else "",
            about + bytes_text(saved) if saved is not None else "",
            "" if slowdown is None else f"x {slowdown:.2f}",
            "yes" if row["fits"] else "no",
        )
    table.columns[0].justify = "left"
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    return table


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.4g} ms"


def _rate(tokens_per_second: float | None) -> str:
    return "not timed" if tokens_per_second is None else f"{tokens_per_second:,.0f}"


def _empty(console: Console, *titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table
