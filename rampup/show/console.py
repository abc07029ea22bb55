"""Plans, comparisons, budgets, timetables and configuration keys as text for a terminal;
plain if it is piped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rampup.plan.describe import PHASE_TITLES, describe
from rampup.plan.plan import RampPlan
from rampup.show.format import (
    format_count,
    format_value,
)

if TYPE_CHECKING:
    from rampup.config.fix import Fix
    from rampup.plan.pipeline import Operation, Timetable


MAX_PHASES = 20  # of more phases, only the first and the last are printed
MAX_TICKS = 2_000
PLAIN: dict[str, Any] = {
    "highlight": False,
    "markup": False,
    "emoji": False,
}  # of a console that prints texts as they are

# Columns of phase tables: name in `RampPlan.phase_rows` -> title, narrower than in the
# plan: two tables fit in 80 columns.
TITLES = {name: title.replace(" ", "\n") for name, title in PHASE_TITLES.items()}
TITLES |= {
    "num_pipeline_microbatches": "pipeline\nmicro",
    "microbatch_size": "micro-\nbatch",
}
WHEN = {name: TITLES[name] for name in ("start_step", "start_sample", "num_steps")}
BATCH = {"global_batch_size": TITLES["global_batch_size"]}
SPLIT = {
    name: TITLES[name]
    for name in ("accumulation_steps", "num_pipeline_microbatches", "microbatch_size")
}
_HYPERPARAMETERS = {
    "learning_rate_scale": TITLES["learning_rate_scale"],
    "learning_rate": "learning\nrate",
}
_HYPERPARAMETERS |= {
    "peak_learning_rate": "peak\nrate",
    "adam_b1": "b1",
    "adam_b2": "b2",
}
_HYPERPARAMETERS |= {
    "adam_b2_half_life_tokens": "half life\ntokens",
    "adam_eps": "eps",
    "adam_weight_decay": "weight\ndecay",
}
_KIND_STYLES = {
    "F": "black on green",
    "B": "white on blue",
    "I": "white on blue",
    "W": "black on cyan",
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
    plan: RampPlan, console: Console, *, max_phases: int | None = MAX_PHASES
) -> None:
    """Print a plan: a summary, its phases, evaluation and notes. Of more phases than
    `max_phases`, the middle is counted.
    """
    shown = describe(plan)
    for sentence in shown.summary:
        console.print(sentence)
    sizes = {
        name: TITLES[name] for name in shown.titles if name not in ("phase", *WHEN)
    }
    mark = "\u2588" if console.is_terminal else "#"
    largest = max(plan.ramp.sizes)

    def cell(index: int, name: str) -> str:
        if name == "bar":
            return mark * max(round(12 * plan.ramp.sizes[index] / largest), 1)
        return phase_cell(shown.rows[index], name)

    layouts = ([WHEN | sizes | {"bar": ""}], [WHEN | sizes], [WHEN, sizes])
    number = len(shown.rows)
    _print_phases(console, layouts, cell, number, max_phases, dim=shown.unreached)
    for remark in shown.remarks:
        console.print(remark)
    if len(plan.pipeline_candidates) > 1:
        console.print(
            "pipeline microbatches of the last phase, by predicted step time:"
        )
        choices = make_table(
            console,
            ["micro-\nbatches", "micro-\nbatch", "bubble", "predicted\ntime", ""],
        )
        for choice in plan.pipeline_candidates[:6]:
            sizes = (
                f"{choice.num_pipeline_microbatches:,}",
                f"{choice.microbatch_size:,}",
            )
            time = f"{float(choice.predicted_time / plan.pipeline_candidates[0].predicted_time):.2f}"
            used = "used" * (choice.microbatch_size == plan.splits[-1].microbatch_size)
            choices.add_row(*sizes, f"{float(choice.bubble_fraction):.3f}", time, used)
        console.print(choices)
    print_notes(shown.notes, console)


def print_hyperparameters(
    plan: RampPlan,
    rows: Sequence[Mapping[str, float]],
    console: Console,
    *,
    max_phases: int | None = MAX_PHASES,
) -> None:
    """Print the hyperparameters of every phase; `rows` has them by key."""
    titles = {
        name: title for name, title in _HYPERPARAMETERS.items() if name in rows[0]
    }
    rates = {name: title for name, title in titles.items() if "rate" in name}
    others = {name: title for name, title in titles.items() if name not in rates}

    def cell(index: int, name: str) -> str:
        if name == "global_batch_size":
            return f"{plan.ramp.sizes[index]:,}"
        number = rows[index][name]
        digits = 6 if name in ("adam_b1", "adam_b2") else 4
        return f"{number:,.0f}" if number >= 1000 else f"{number:.{digits}g}"

    layouts = ([titles], [part for part in (rates, others) if part])
    _print_phases(
        console,
        [[BATCH | part for part in layout] for layout in layouts],
        cell,
        len(rows),
        max_phases,
    )
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
        names = (
            "I input gradient, W weight gradient"
            if table.schedule == "zb-h1"
            else "B backward"
        )
        letter = ", the letter the repeat" if table.num_repeats > 1 else ""
        console.print(
            f"F forward, {names}, == continued\nthe number is the microbatch{letter}"
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
        "sends": (
            f"{', '.join(map(str, table.sends_per_stage))}  (activations and gradients"
            " of each stage)"
        ),
    }
    print_facts(facts, console)


def print_passes(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Print one pass through the pipeline in every phase, as `rampup plan --timetable`
    finds it.
    """
    titles = {"phase": "phase", **TITLES, "makespan": "time of\na pass"}
    names = ("phase", "start_step", "accumulation_steps", "num_pipeline_microbatches")
    names += ("makespan", "bubble_fraction")
    table = make_table(console, [titles[name] for name in names])
    for row in rows:
        table.add_row(*(phase_cell(row, name) for name in names))
    console.print(table)


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
        explained["key"]: explained["meaning"],
        "legal": explained["legal"],
        "unit": explained["unit"],
    }
    facts |= {
        "default": default,
        "MaxText": maxtext,
        "file": f"{explained['file']}, section {explained['section']}",
    }
    facts["interacts with"] = ", ".join(explained["interacts"])
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


def split_columns(pipeline: bool) -> dict[str, str]:
    """Return the columns of how a batch is split, without that of the pipeline if there
    is none.
    """
    return {
        name: title
        for name, title in SPLIT.items()
        if pipeline or name != "num_pipeline_microbatches"
    }


def _print_phases(
    console: Console,
    layouts: Iterable[Iterable[Mapping[Any, str]]],
    cell: Callable[[int, Any], str],
    number: int,
    most: int | None,
    *,
    dim: Collection[int] = (),
) -> None:
    """Print phases in the tables of the first layout that is narrow enough, or of the
    last; `cell` gives a column's text.
    """
    hidden = (
        range(0)
        if most is None or number <= most
        else range(most // 2, number - most // 2)
    )
    for layout in layouts:
        tables = [
            make_table(console, ["phase", *columns.values()]) for columns in layout
        ]
        for columns, table in zip(layout, tables, strict=True):
            if table.columns[-1].header == "":  # bars or marks
                table.columns[-1].justify = "left"
            for index in range(number):
                if index not in hidden:
                    name, style = (
                        (f"({index})", "dim") if index in dim else (str(index), None)
                    )
                    table.add_row(
                        name, *(cell(index, column) for column in columns), style=style
                    )
                elif index == hidden.start:
                    table.add_row(
                        *["..."] * sum(column.header != "" for column in table.columns)
                    )
            if hidden:
                table.caption = (
                    f"{format_count(len(hidden), 'phase')} left out; rampup plan --all"
                    " shows them"
                )
                table.caption_justify = "left"
        widths = [
            Measurement.get(
                console, console.options.update(max_width=1000), table
            ).maximum
            for table in tables
        ]
        if max(widths) <= console.width:
            break
    console.print(*tables)


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
