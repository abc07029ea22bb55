"""Plans, comparisons, token budgets, timetables and configuration keys as text for a terminal; plain if the output is piped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rampup.show.format import describe_split, format_count, format_value

if TYPE_CHECKING:
    from rampup.config.explain import Explanation
    from rampup.config.fix import Fix
    from rampup.plan.budget import TokenBudget
    from rampup.plan.plan import RampPlan
    from rampup.plan.timetable import Operation, Timetable

# Of more phases, only the first and the last are printed.
MAX_PHASES = 20
MAX_CHOICES = 6
MAX_TICKS = 2_000
BAR_WIDTH = 12
MARK = "*"
ELLIPSIS = "..."

# Columns of phase tables: title -> name in `RampPlan.phase_rows`.
_WHEN = {"from\nstep": "start_step", "from\nsample": "start_sample", "steps": "num_steps"}
_BATCH = {"batch": "global_batch_size"}
_SPLIT = {"passes": "accumulation_steps", "pipeline\nmicro": "num_pipeline_microbatches", "micro-\nbatch": "microbatch_size"}
_COMPARED = ("num_devices", "total_steps", "ramp_steps", "ramp_samples", "num_compiled_shapes", "global_batch_to_load")
_KIND_STYLES = {"F": "black on green", "B": "white on blue", "I": "white on blue", "W": "black on cyan"}


def make_table(console: Console, titles: Iterable[str], *, left: int = 0) -> Table:
    """Return an empty table.

    Args:
        console: where it is printed; a terminal gets a line below the titles.
        titles: of the columns.
        left: columns from the first on that are text, aligned left and folded if need be; the others are numbers.
    """
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", overflow="fold", no_wrap=number >= left)
    return table


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Print names and values, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(format_value(value)))
    console.print(table)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print notes, each as a paragraph."""
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def print_plan(plan: RampPlan, console: Console, *, max_phases: int | None = MAX_PHASES) -> None:
    """Print a plan: a summary, its phases, evaluation and notes.

    Args:
        plan: the plan.
        console: where to print.
        max_phases: of more phases, the middle ones are left out and counted; None prints all.
    """
    for sentence in plan.summary:
        console.print(sentence)
    pipeline, scaled = plan.splitter.num_stages > 1, plan.learning_rate_batch_scaling != "none"
    sizes = {"global\nbatch": "global_batch_size", "per\ndevice": "per_device_batch_size"} | _split_columns(pipeline)
    sizes |= {"bubble": "bubble_fraction"} if pipeline else {}
    sizes |= {"rate\nscale": "learning_rate_scale"} if scaled else {}
    layouts: list[tuple[list[Mapping[str, str]], bool]] = [([_WHEN | sizes], True), ([_WHEN | sizes], False)]
    layouts.append(([_WHEN, sizes], False))
    # The first layout that fits; the last one is printed whether it does or not.
    for columns, bars in layouts:
        tables = [_phase_table(plan, chosen, console, max_phases=max_phases, bars=bars) for chosen in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)
    if plan.eval_split:
        split = plan.eval_split
        console.print(f"evaluation: {split.global_batch_size:,} samples per batch = {describe_split(split)}")
    if len(plan.pipeline_candidates) > 1:
        console.print("pipeline microbatches of the last phase, by predicted step time:")
        console.print(_choices_table(plan, console))
    print_notes(plan.advice, console)


def print_comparison(
    plans: Sequence[RampPlan],
    names: Sequence[str],
    changed: Mapping[str, Mapping[str, object]],
    console: Console,
    *,
    max_phases: int | None = MAX_PHASES,
) -> None:
    """Print two plans side by side: the keys that differ, the totals, and the phases.

    Args:
        plans, names: the two plans and their names.
        changed: the keys that differ, each with its value in `a` and in `b`.
        console: where to print.
        max_phases: see `print_plan`.
    """
    console.print(f"a: {names[0]}\nb: {names[1]}\n{MARK} differs\n", highlight=False)
    keys = make_table(console, ["key", "a", "b"], left=1)
    for name, values in changed.items():
        keys.add_row(name, *(Text(_format_setting(values[which])) for which in "ab"))
    console.print(keys if changed else "all keys are the same")
    facts = [{**plan.to_dict(), "consumed_samples": plan.consumed_samples} for plan in plans]
    totals = make_table(console, ["plan", "a", "b", ""], left=1)
    for name in (*_COMPARED, "consumed_samples"):
        pair = [fact[name] for fact in facts]
        totals.add_row(name, *map(_format_setting, pair), MARK if pair[0] != pair[1] else "")
    console.print()
    console.print(totals)
    console.print()
    split = _split_columns(any(plan.splitter.num_stages > 1 for plan in plans))
    when, steps = _WHEN | _BATCH, {title: name for title, name in _WHEN.items() if name != "start_sample"}
    samples = {"from\nsample": "start_sample"} | _BATCH
    for columns in ([when | _BATCH | split], [when, _BATCH | split], [steps | _BATCH, samples, _BATCH | split]):
        tables = [_comparison_table(plans, chosen, console, max_phases=max_phases) for chosen in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)


def print_budget(
    budget: TokenBudget, console: Console, *, configured_steps: int, throughput: Mapping[int, Fraction] | None = None
) -> None:
    """Print what a token budget means: steps of the ramp, steps of its first and last batch kept constant, and time.

    Args:
        budget: the budget.
        console: where to print.
        configured_steps: the steps that the configuration sets.
        throughput: tokens per second by global batch size, if known.
    """
    first, final, by_size = budget.ramp.sizes[0], budget.ramp.sizes[-1], budget.steps_by_size
    beyond = budget.consumed_tokens - budget.tokens
    rows = {
        "budget": f"{budget.tokens:,} tokens = {budget.num_samples:,} samples of {budget.tokens_per_sample:,} tokens",
        "optimizer steps": f"{budget.steps:,}; the last batch goes {beyond:,} tokens beyond the budget",
    }
    if first == final == max(budget.ramp.sizes):
        rows["a ramp"] = "none: the batch is the same throughout"
    else:
        rows[f"at {first:,} throughout"] = _compare_steps(budget.steps_at_first, budget.steps, "the first batch kept constant")
        rows[f"at {final:,} throughout"] = _compare_steps(budget.steps_at_final, budget.steps, "the last batch kept constant")
    if throughput:
        seconds = budget.seconds(throughput)
        hours, rate = float(seconds) / 3600, float(budget.consumed_tokens / seconds)
        days = f" = {hours / 24:,.1f} days" if hours >= 48 else ""
        rows["time"] = f"{hours:,.2f} hours{days} at {format_value(rate)} tokens/s on average"
        unknown = [size for size in by_size if size not in throughput]
        if unknown and len(throughput) > 1:
            rows["not measured"] = (
                f"{len(unknown):,} of {len(by_size):,} batch sizes; each uses the throughput of the nearest one"
            )
    if configured_steps != budget.steps:
        tokens = budget.ramp.samples_before(configured_steps) * budget.tokens_per_sample
        rows["this configuration"] = (
            f"steps={configured_steps:,} consumes {tokens:,} tokens; for the budget set steps={budget.steps}"
        )
    print_facts(rows, console)


def print_timetable(table: Timetable, console: Console) -> None:
    """Print a pipeline timetable: a row per stage, a column per tick, and the totals."""
    if table.num_ticks > MAX_TICKS:
        console.print(f"{table.num_ticks:,} ticks are too many to draw; the most is {MAX_TICKS:,}")
    else:
        _print_ticks(table, console)
    peaks = ", ".join(f"{float(peak):g}" for peak in table.peak_live_microbatches)
    facts = {
        "schedule": table.schedule,
        "makespan": float(table.makespan),
        "bubble": f"{float(table.bubble_fraction):.4f} = {table.bubble_fraction}",
        "live microbatches": f"{peaks}  (maximum of each stage)",
        "sends": f"{', '.join(map(str, table.sends_per_stage))}  (activations and gradients of each stage)",
    }
    print_facts(facts, console)


def print_explanation(explained: Explanation, console: Console) -> None:
    """Print the explanation of a key."""
    from rampup.config.files import yaml_value

    default = yaml_value(explained.default)
    if explained.value_in_file != explained.default:
        default += f"; {explained.file} sets {yaml_value(explained.value_in_file)}"
    maxtext = "has no such key" + (f"; it does {explained.maxtext_default}" if explained.maxtext_default else "")
    if explained.maxtext_name:
        maxtext = f"{explained.maxtext_name}, default {explained.maxtext_default}"
    facts = {
        explained.key: explained.meaning,
        "legal": explained.legal,
        "unit": explained.unit or "none",
        "default": default,
        "MaxText": maxtext,
        "file": f"{explained.file}, section {explained.section}",
    }
    print_facts(facts | {"interacts with": ", ".join(explained.interacts) or "no other key"}, console)


def print_fix(fix: Fix, console: Console) -> None:
    """Print each change of a fix as a comment, then the patch of the file, ready for `patch -p0`."""
    if not fix.changes:
        console.print(f"{fix.file} is legal: nothing to fix")
        return
    for change in fix.changes:
        if change.renamed:
            text = f"{change.renamed} is spelled {change.key}"
        elif change.before is None:
            text = f"set {change.key}={change.after}"
        else:
            text = f"{change.key}: {change.before} -> {change.after}"
        console.print(f"# {text} ({change.where})")
    sys.stdout.write(fix.patch)


def _split_columns(pipeline: bool) -> dict[str, str]:
    return {title: name for title, name in _SPLIT.items() if pipeline or name != "num_pipeline_microbatches"}


def _phase_table(plan: RampPlan, columns: Mapping[str, str], console: Console, *, max_phases: int | None, bars: bool) -> Table:
    table = make_table(console, ["phase", *columns, *([""] if bars else [])])
    if bars:
        table.columns[-1].justify = "left"
    mark, largest, rows = "\u2588" if console.is_terminal else "#", max(plan.ramp.sizes), plan.phase_rows()
    for index in _kept(len(rows), max_phases):
        if index is None:
            table.add_row(ELLIPSIS, *[ELLIPSIS] * len(columns))
            continue
        phase = plan.ramp.phases[index]
        reached = phase.start_step < plan.total_steps
        cells = [_phase_cell(rows[index], name) for name in columns.values()]
        cells += [mark * max(round(BAR_WIDTH * phase.global_batch_size / largest), 1)] if bars else []
        table.add_row(str(index) if reached else f"({index})", *cells, style=None if reached else "dim")
    if (hidden := len(rows) - (max_phases or len(rows))) > 0:
        table.caption, table.caption_justify = f"{format_count(hidden, 'phase')} left out; rampup plan --all shows them", "left"
    return table


def _comparison_table(
    plans: Sequence[RampPlan], columns: Mapping[str, str], console: Console, *, max_phases: int | None
) -> Table:
    titles = [f"{title}\n{which}" if "\n" not in title else f"{title} {which}" for which in "ab" for title in columns]
    table = make_table(console, ["phase", *titles, ""])
    pairs = list(zip_longest(*(plan.phase_rows() for plan in plans)))
    for index in _kept(len(pairs), max_phases):
        if index is None:
            table.add_row(ELLIPSIS, *[ELLIPSIS] * len(titles))
            continue
        pair = pairs[index]
        cells = [_phase_cell(row, name) for row in pair for name in columns.values()]
        table.add_row(str(index), *cells, MARK if pair[0] != pair[1] else "")
    if (hidden := len(pairs) - (max_phases or len(pairs))) > 0:
        table.caption, table.caption_justify = f"{format_count(hidden, 'phase')} left out; rampup plan --all shows them", "left"
    return table


def _kept(number: int, most: int | None) -> list[int | None]:
    """Return the indices of the rows to print, with None in place of the middle ones if there are more than `most`."""
    if most is None or number <= most:
        return list(range(number))
    return [*range(most // 2), None, *range(number - most // 2, number)]


def _phase_cell(row: Mapping[str, object] | None, name: str) -> str:
    if row is None:
        return "-"
    return "rest" if row[name] is None else format_value(row[name])


def _choices_table(plan: RampPlan, console: Console) -> Table:
    choices, used = plan.pipeline_candidates, plan.splits[-1]
    table = make_table(console, ["micro-\nbatches", "micro-\nbatch", "bubble", "predicted\ntime", ""])
    for choice in choices[:MAX_CHOICES]:
        relative = f"{float(choice.predicted_time / choices[0].predicted_time):.2f}"
        sizes = map(format_value, (choice.num_microbatches, choice.microbatch_size))
        table.add_row(
            *sizes, f"{float(choice.bubble):.3f}", relative, "used" * (choice.microbatch_size == used.microbatch_size)
        )
    return table


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def _format_setting(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else format_value(value)


def _compare_steps(constant: int, steps: int, what: str) -> str:
    difference = steps - constant
    compared = "the ramp takes as many"
    if difference:
        word = "fewer" if difference < 0 else "more"
        compared = f"the ramp takes {abs(difference):,} {word} ({abs(difference) / constant:.1%})"
    return f"{format_count(constant, 'step')}, {what}; {compared}"


def operation_label(operation: Operation, num_repeats: int) -> str:
    """Return an operation's label in a picture: kind, microbatch and, with repeats, a letter for the repeat."""
    letter = "abcdefghijklmnopqrstuvwxyz"[operation.repeat % 26] if num_repeats > 1 else ""
    return f"{operation.kind}{operation.microbatch}{letter}"


def _print_ticks(table: Timetable, console: Console) -> None:
    """Print the picture, in blocks that fit the width of the console."""
    rows: list[list[tuple[str, str]]] = []
    for stage in range(table.num_stages):
        cells = [("..", "dim")] * table.num_ticks
        for operation in table.of_stage(stage):
            start, stop = int(operation.start / table.tick), int(operation.end / table.tick)
            style = _KIND_STYLES[operation.kind]
            cells[start:stop] = [(operation_label(operation, table.num_repeats), style)] + [("==", style)] * (stop - start - 1)
        rows.append(cells)
    width = max(len(text) for row in rows for text, _ in row) + 1
    head = len(f"stage {table.num_stages - 1} ")
    per_block = max((console.width - head) // width, 1)
    for start in range(0, table.num_ticks, per_block):
        stop = min(start + per_block, table.num_ticks)
        console.print(Text(" " * head + "".join(f"{tick:<{width}}" for tick in range(start, stop)).rstrip(), style="dim"))
        for stage, row in enumerate(rows):
            line = Text(f"stage {stage} ".rjust(head))
            for text, style in row[start:stop]:
                line.append(text.ljust(width - 1), style=style)
                line.append(" ")
            line.rstrip()
            console.print(line)
        console.print()
    names = "I input gradient, W weight gradient" if table.schedule == "zb-h1" else "B backward"
    letter = ", the letter the repeat" if table.num_repeats > 1 else ""
    console.print(f"F forward, {names}, == continued\nthe number is the microbatch{letter}")
