"""A pipeline's timetable as a picture in text: one row a stage, one column a tick, and the accounting under it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from rampup.plan.timetable import Operation, Timetable
from rampup.show.tables import print_facts

STYLES = {"F": "black on green", "B": "white on blue", "I": "white on blue", "W": "black on cyan"}
MAX_TICKS = 2_000
REPEATS = "abcdefghijklmnopqrstuvwxyz"


def print_timetable(table: Timetable, console: Console) -> None:
    """Print the picture, in blocks where it is wider than the console, and what is counted from it."""
    if table.num_ticks > MAX_TICKS:
        console.print(f"{table.num_ticks:,} ticks are too many to draw; the most is {MAX_TICKS:,}")
    else:
        _print_picture(table, console)
    print_facts(
        {
            "schedule": table.schedule,
            "makespan": float(table.makespan),
            "bubble": f"{float(table.bubble_fraction):.4f} = {table.bubble_fraction}",
            "live microbatches": ", ".join(f"{float(peak):g}" for peak in table.peak_live_microbatches) + "  (most, by stage)",
            "sends": ", ".join(map(str, table.sends_per_stage)) + "  (activations and gradients, by stage)",
        },
        console,
    )


def _print_picture(table: Timetable, console: Console) -> None:
    cells = [_cells(table, stage) for stage in range(table.num_stages)]
    width = max(len(text) for row in cells for text, _ in row) + 1
    head = len(f"stage {table.num_stages - 1} ")
    per_block = max((console.width - head) // width, 1)
    for start in range(0, table.num_ticks, per_block):
        stop = min(start + per_block, table.num_ticks)
        console.print(Text(" " * head + "".join(f"{tick:<{width}}" for tick in range(start, stop)).rstrip(), style="dim"))
        for stage, row in enumerate(cells):
            line = Text(f"stage {stage} ".rjust(head))
            for text, style in row[start:stop]:
                line.append(text.ljust(width - 1), style=style)
                line.append(" ")
            line.rstrip()
            console.print(line)
        console.print()
    names = "I input gradient, W weight gradient" if table.schedule == "zb-h1" else "B backward"
    letter = ", the letter the repeat" if table.num_repeats > 1 else ""
    console.print(f"F forward, {names}; == goes on\nthe number is the microbatch{letter}")


def label(operation: Operation, num_repeats: int) -> str:
    """Return what an operation is called in the picture: kind, microbatch and, with repeats, a letter for the repeat."""
    return f"{operation.kind}{operation.microbatch}" + (REPEATS[operation.repeat % 26] if num_repeats > 1 else "")


def _cells(table: Timetable, stage: int) -> list[tuple[str, str]]:
    """Return text and style of every tick of one stage."""
    cells = [("..", "dim")] * table.num_ticks
    for operation in table.of_stage(stage):
        start, stop = int(operation.start / table.tick), int(operation.end / table.tick)
        style = STYLES[operation.kind]
        cells[start:stop] = [(label(operation, table.num_repeats), style)] + [("==", style)] * (stop - start - 1)
    return cells
