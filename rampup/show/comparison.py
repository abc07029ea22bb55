"""Two plans side by side, and what a budget of tokens means, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rampup.plan.budget import SECONDS_PER_HOUR, TokenBudget
from rampup.plan.plan import RampPlan
from rampup.show.format import format_value

FACTS = ("num_devices", "total_steps", "ramp_steps", "ramp_samples", "num_compiled_shapes", "global_batch_to_load")
WHEN = {"from\nstep": "start_step", "from\nsample": "start_sample", "steps": "num_steps", "batch": "global_batch_size"}
STEPS = {title: name for title, name in WHEN.items() if name != "start_sample"}
SAMPLES = {title: name for title, name in WHEN.items() if name in ("start_sample", "global_batch_size")}
HOW = {
    "batch": "global_batch_size",
    "passes": "accumulation_steps",
    "pipeline\nmicro": "num_pipeline_microbatches",
    "micro-\nbatch": "microbatch_size",
}
MARK = "*"


def print_comparison(
    plans: Sequence[RampPlan], names: Sequence[str], changed: Mapping[str, Mapping[str, object]], console: Console
) -> None:
    """Print two plans side by side: the keys that differ, what the plans amount to, and every phase.

    Args:
        plans, names: the two plans, and what they are called.
        changed: the keys that differ, each with its value in `a` and in `b`.
        console: where to print.
    """
    console.print(f"a: {names[0]}\nb: {names[1]}\n{MARK} differs\n", highlight=False)
    keys = _table(console, ["key", "a", "b"], left=1)
    for name, values in changed.items():
        keys.add_row(name, _cell(values["a"]), _cell(values["b"]))
    console.print(keys if changed else "all keys are the same")
    facts = [plan.to_dict() for plan in plans]
    table = _table(console, ["plan", "a", "b", ""], left=1)
    for name in (*FACTS, "consumed_samples"):
        pair = [fact.get(name, plan.consumed_samples) for plan, fact in zip(plans, facts, strict=True)]
        table.add_row(name, *map(_cell, pair), MARK if pair[0] != pair[1] else "")
    console.print()
    console.print(table)
    console.print()
    pipelined = any(plan.splitter.num_stages > 1 for plan in plans)
    how = {title: name for title, name in HOW.items() if pipelined or name != "num_pipeline_microbatches"}
    for columns in ([WHEN | how], [WHEN, how], [STEPS, SAMPLES, how]):
        tables = [_phases(plans, chosen, console) for chosen in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)


def print_budget(
    budget: TokenBudget, console: Console, *, configured_steps: int, throughput: Mapping[int, Fraction] | None = None
) -> None:
    """Print what a budget means: steps of the ramp, beside the first and the last batch kept constant, and time.

    Args:
        budget: the budget.
        console: where to print.
        configured_steps: the steps that the configuration asks for.
        throughput: tokens per second by global batch size, if known.
    """
    beyond = budget.consumed_tokens - budget.tokens
    first, final = budget.ramp.sizes[0], budget.ramp.sizes[-1]
    rows = {
        "budget": f"{budget.tokens:,} tokens = {budget.num_samples:,} samples of {budget.tokens_per_sample:,} tokens",
        "optimizer steps": f"{budget.steps:,}; the last batch goes {beyond:,} tokens beyond the budget",
    }
    if first == final == max(budget.ramp.sizes):
        rows["a ramp"] = "none: the batch is the same throughout"
    else:
        rows[f"at {first:,} throughout"] = _against(budget.steps_at_first, budget.steps, "the first batch kept constant")
        rows[f"at {final:,} throughout"] = _against(budget.steps_at_final, budget.steps, "the last batch kept constant")
    by_size = budget.steps_by_size
    if throughput:
        seconds = budget.seconds(throughput)
        rate = Fraction(budget.consumed_tokens) / seconds
        rows["time"] = f"{_hours(seconds)} at {format_value(float(rate))} tokens/s on average"
        unknown = [size for size in by_size if size not in throughput]
        if unknown and len(throughput) > 1:
            rows["not measured"] = f"{len(unknown):,} of {len(by_size):,} batch sizes, which take the nearest one's throughput"
    if configured_steps != budget.steps:
        tokens = budget.ramp.samples_before(configured_steps) * budget.tokens_per_sample
        rows["this configuration"] = (
            f"steps={configured_steps:,} consumes {tokens:,} tokens; for the budget set steps={budget.steps}"
        )
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _against(constant: int, steps: int, what: str) -> str:
    difference = steps - constant
    share = f" ({abs(difference) / constant:.1%})" if difference else ""
    word = "fewer" if difference < 0 else "more"
    compared = f"the ramp takes {abs(difference):,} {word}{share}" if difference else "the ramp takes as many"
    return f"{constant:,} steps, {what}; {compared}"


def _hours(seconds: Fraction) -> str:
    hours = float(seconds / SECONDS_PER_HOUR)
    return f"{hours:,.2f} hours" + (f" = {hours / 24:,.1f} days" if hours >= 48 else "")


def _phases(plans: Sequence[RampPlan], columns: Mapping[str, str], console: Console) -> Table:
    titles = [f"{title}\n{which}" if "\n" not in title else f"{title} {which}" for which in "ab" for title in columns]
    table = _table(console, ["phase", *titles, ""])
    for index, pair in enumerate(zip_longest(*(plan.phase_rows() for plan in plans))):
        cells = [_phase_cell(row, name) for row in pair for name in columns.values()]
        table.add_row(str(index), *cells, MARK if pair[0] != pair[1] else "")
    return table


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def _phase_cell(row: Mapping[str, object] | None, name: str) -> str:
    if row is None:
        return "-"
    return "rest" if row[name] is None else format_value(row[name])


def _cell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else format_value(value)


def _table(console: Console, titles: Sequence[str], *, left: int = 0) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", overflow="fold", no_wrap=not left)
    return table
