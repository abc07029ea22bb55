"""Plans, timetables, configuration keys and tables as text for a terminal; plain if it
is piped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rampup.plan.describe import (
    MAX_PHASES,
    PHASE_TITLES,
    describe_plan,
    phase_table,
    text_table,
)
from rampup.plan.plan import RampPlan
from rampup.show.format import format_value

if TYPE_CHECKING:
    from rampup.config.fix import Fix
    from rampup.plan.pipeline import Operation, Timetable


MAX_TICKS = 2_000
PLAIN: dict[str, Any] = {
    "highlight": False,
    "markup": False,
    "emoji": False,
}  # of a console that prints texts as they are

_HYPERPARAMETERS = {
    "phase": "phase",
    "global_batch_size": PHASE_TITLES["global_batch_size"],
    "learning_rate_scale": PHASE_TITLES["learning_rate_scale"],
    "learning_rate": "learning\nrate",
    "peak_learning_rate": "peak\nrate",
    "adam_b1": "b1",
    "adam_b2": "b2",
    "adam_b2_half_life_tokens": "half life\ntokens",
    "adam_eps": "eps",
    "adam_weight_decay": "weight\ndecay",
}
_KIND_STYLES = {
    "F": "black on green",
    "B": "white on blue",
}


def make_table(
    console: Console,
    titles: Iterable[str],
    rows: Iterable[Iterable[str]] = (),
    *,
    left: int = 0,
) -> Table:
    """Return a table. The first `left` columns are text, aligned left and folded if
    need be, the others numbers.
    """
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
        show_edge=False,
    )
    for number, title in enumerate(titles):
        table.add_column(
            title,
            justify="left" if number < left else "right",
            overflow="fold",
            no_wrap=number >= left,
        )
    for row in rows:
        table.add_row(*row)
    return table


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 0,
) -> None:
    """Print a table; or, where a number or a word of it would be cut, every row as lines
    of its own, headed by its first cell.
    """

    def needed(number: int, column: Sequence[str]) -> int:
        # A column of text is folded between words, one of numbers is not.
        parts = [cell.split() if number < left else cell.split("\n") for cell in column]
        return max((len(part) for cell in parts for part in cell), default=0)

    columns = list(zip(titles, *rows, strict=True))
    width = sum(needed(number, column) + 3 for number, column in enumerate(columns))
    if width <= console.width:
        console.print(make_table(console, titles, rows, left=left))
        return
    names = [title.replace("-\n", "").replace("\n", " ") for title in titles]
    for head, *cells in rows:
        console.print(head, style="bold")
        pairs = zip(names[1:], cells, strict=True)
        print_facts({f"  {name}": cell for name, cell in pairs if cell}, console)


def is_for_a_log() -> bool:
    """Return whether a launcher may have made this process's terminal for a log, as
    `srun --unbuffered` and mpirun do.
    """
    slurm = (
        "SLURM_PROCID" in os.environ and "SLURM_PTY_PORT" not in os.environ
    )  # `srun --pty` is for people
    return slurm or "OMPI_COMM_WORLD_RANK" in os.environ


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Print names and values, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, format_value(value))
    console.print(table)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print notes, each as a paragraph."""
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def print_plan(
    plan: RampPlan,
    console: Console,
    *,
    notes: Sequence[str] | None = None,
    max_phases: int | None = MAX_PHASES,
) -> None:
    """Print a plan as text: see `describe_plan`."""
    text = describe_plan(plan, notes, max_phases=max_phases, width=console.width)
    console.print(text)


def print_hyperparameters(
    plan: RampPlan,
    rows: Sequence[Mapping[str, float]],
    console: Console,
    *,
    max_phases: int | None = MAX_PHASES,
) -> None:
    """Print the hyperparameters of every phase; `rows` has them by key."""
    shown = [
        {"phase": phase, "global_batch_size": size, **row}
        for phase, (size, row) in enumerate(zip(plan.ramp.sizes, rows, strict=True))
    ]
    titles = {
        name: title for name, title in _HYPERPARAMETERS.items() if name in shown[0]
    }
    # The decay rates differ from 1 in few digits.
    cells = [
        [
            f"{row[name]:.6g}"
            if name in ("adam_b1", "adam_b2")
            else format_value(row[name])
            for name in titles
        ]
        for row in shown
    ]
    lines = phase_table([*titles.values()], cells, max_phases, console.width)
    console.print("\n".join(lines))
    console.print(
        "learning rate: of the first step; peak rate: without warm-up and decay; half"
        " life: of b2, in tokens"
    )


def print_timetable(table: Timetable, console: Console) -> None:
    """Print a pipeline timetable: a row per stage, a column per tick, in blocks that
    fit the width, and the totals.
    """
    rows = list[list[tuple[str, str]]]()
    for stage in range(table.num_stages) if table.num_ticks <= MAX_TICKS else ():
        cells = [("..", "dim")] * table.num_ticks
        for operation in table.of_stage(stage):
            start = int(operation.start / table.tick)
            stop = int(operation.end / table.tick)
            style = _KIND_STYLES[operation.kind]
            cells[start:stop] = [
                (operation_label(operation, table.num_repeats), style)
            ] + [("==", style)] * (stop - start - 1)
        rows.append(cells)
    width = max((len(text) for row in rows for text, _ in row), default=0) + 1
    head = len(f"stage {table.num_stages - 1} ")
    per_block = max((console.width - head) // width, 1)
    for start in range(0, table.num_ticks if rows else 0, per_block):
        stop = min(start + per_block, table.num_ticks)
        console.print(
            Text(
                " " * head
                + "".join(f"{tick:<{width}}" for tick in range(start, stop)).rstrip(),
                style="dim",
            )
        )
        for stage, row in enumerate(rows):
            line = Text(f"stage {stage} ".rjust(head))
            for text, style in row[start:stop]:
                line.append(text.ljust(width - 1), style=style).append(" ")
            line.rstrip()
            console.print(line)
        console.print()
    if rows:
        letter = ", the letter the repeat" if table.num_repeats > 1 else ""
        console.print(
            f"F forward, B backward, == continued\nthe number is the microbatch{letter}"
        )
    else:
        console.print(
            f"{table.num_ticks:,} ticks are too many to draw; the most is {MAX_TICKS:,}"
        )
    peaks = ", ".join(f"{float(peak):g}" for peak in table.peak_live_microbatches)
    facts = {
        "schedule": table.schedule,
        "makespan": float(table.makespan),
        "bubble": f"{float(table.bubble_fraction):.4f} = {table.bubble_fraction}",
        "live microbatches": f"{peaks}  (maximum of each stage)",
    }
    print_facts(facts, console)


def print_passes(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print one pass through the pipeline in every phase, as `rampup plan --timetable`
    finds it.
    """
    titles = {**PHASE_TITLES, "makespan": "time of\na pass"}
    names = (
        "phase",
        "start_step",
        "accumulation_steps",
        "num_pipeline_microbatches",
        "makespan",
        "bubble_fraction",
    )
    cells = [[format_value(row[name]) for name in names] for row in rows]
    console.print("\n".join(text_table([titles[name] for name in names], cells)))


def print_explanation(explained: Mapping[str, Any], console: Console) -> None:
    """Print the explanation of a key."""
    from rampup.config.files import yaml_value

    default = yaml_value(explained["default"])
    if explained["value_in_file"] != explained["default"]:
        default += (
            f"; {explained['file']} sets {yaml_value(explained['value_in_file'])}"
        )
    behavior = explained["maxtext_default"]
    maxtext = f"{explained['maxtext_name']}, default {behavior}"
    if explained["maxtext_name"] is None:
        maxtext = "has no such key" + (f"; it does {behavior}" if behavior else "")
    facts = {
        **explained["instead"],
        explained["key"]: explained["meaning"],
        "legal": explained["legal"],
        "unit": explained["unit"],
        "default": default,
        "MaxText": maxtext,
        "file": f"{explained['file']}, section {explained['section']}",
        "interacts with": ", ".join(explained["interacts"]),
    }
    print_facts({name: value for name, value in facts.items() if value}, console)


def print_fix(fix: Fix, console: Console) -> None:
    """Print each change of a fix as a comment, then the patch of the file, ready for
    `patch -p0`.
    """
    if not fix.changes:
        console.print(f"{fix.file} is legal: nothing to fix")
        return
    for change in fix.changes:
        text = f"{change.key}: {change.before} -> {change.after}"
        if change.renamed:
            text = f"{change.renamed} is spelled {change.key}"
        elif change.before is None:
            text = f"set {change.key}={change.after}"
        console.print(f"# {text} ({change.where})")
    sys.stdout.write(fix.patch)


def phase_cell(row: Mapping[str, object] | None, name: str) -> str:
    """Return a size in a row as text. `row` is None for a phase that a plan does not
    have.
    """
    if row is None:
        return "-"
    if row.get(name) is None:
        return "rest" if name == "num_steps" else ""
    return format_value(row[name])


def operation_label(operation: Operation, num_repeats: int) -> str:
    """Return an operation's label in a picture: kind, microbatch and, with repeats, a
    letter for the repeat.
    """
    letter = (
        "abcdefghijklmnopqrstuvwxyz"[operation.repeat % 26] if num_repeats > 1 else ""
    )
    return f"{operation.kind}{operation.microbatch}{letter}"
