"""Plans and summaries as tables for a terminal; plain where the output is piped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.show.format import format_value

BAR_WIDTH = 12
MAX_CHOICES = 6


def print_plan(plan: RampPlan, console: Console) -> None:
    """Print a plan: what it amounts to, every phase, evaluation, and what is legal but costs something."""
    for sentence in plan.summary:
        console.print(sentence)
    when, how = _columns(plan)
    for tables in (
        [_phase_table(plan, when | how, console, bars=True)],
        [_phase_table(plan, when | how, console)],
        [_phase_table(plan, when, console), _phase_table(plan, how, console)],
    ):
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)
    if plan.eval_split:
        split = plan.eval_split
        console.print(f"evaluation: {split.global_batch_size:,} samples a batch = {cut(split)}")
    if len(plan.pipeline_candidates) > 1:
        console.print("pipeline microbatches of the last phase, by predicted step time:")
        console.print(_choices_table(plan, console))
    for note in plan.advice:
        console.print(f"note: {note}", style="yellow")


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Print names and values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, format_value(value))
    console.print(table)


def cut(split: BatchSplit) -> str:
    """Return how a batch is cut, in words.

    Example:
        >>> cut(BatchSplit(global_batch_size=48, data_parallel_size=4, accumulation_steps=6, num_pipeline_microbatches=1,
        ...     microbatch_size=2))
        '4 replicas * 6 microbatches * 2 samples'
    """
    counts = {"replica": split.data_parallel_size, "microbatch": split.num_microbatches, "sample": split.microbatch_size}
    return " * ".join(f"{n:,} {name}{'' if n == 1 else 'es' if name.endswith('ch') else 's'}" for name, n in counts.items())


def _columns(plan: RampPlan) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns that say when each phase is, and those that say how its batch is cut: title -> name."""
    pipeline, scaled = plan.splitter.num_stages > 1, plan.learning_rate_batch_scaling != "none"
    when = {"from\nstep": "start_step", "from\nsample": "start_sample", "steps": "num_steps"}
    how = {"global\nbatch": "global_batch_size", "per\ndevice": "per_device_batch_size", "passes": "accumulation_steps"}
    how |= {"pipeline\nmicro": "num_pipeline_microbatches"} if pipeline else {}
    how |= {"micro-\nbatch": "microbatch_size"}
    how |= {"bubble": "bubble_fraction"} if pipeline else {}
    how |= {"rate\nscale": "learning_rate_scale"} if scaled else {}
    return when, how


def _phase_table(plan: RampPlan, columns: Mapping[str, str], console: Console, *, bars: bool = False) -> Table:
    table = _empty_table(console, "phase", *columns)
    if bars:
        table.add_column("", no_wrap=True)
    mark, largest = "\u2588" if console.is_terminal else "#", max(plan.ramp.sizes)
    for phase, row in zip(plan.ramp.phases, plan.phase_rows(), strict=True):
        reached = phase.start_step < plan.total_steps
        cells = [format_value(row[name]) if row[name] is not None else "rest" for name in columns.values()]
        bar = [mark * max(round(BAR_WIDTH * phase.global_batch_size / largest), 1)] if bars else []
        table.add_row(str(phase.index) if reached else f"({phase.index})", *cells, *bar, style=None if reached else "dim")
    return table


def _choices_table(plan: RampPlan, console: Console) -> Table:
    choices, taken = plan.pipeline_candidates, plan.splits[-1]
    table = _empty_table(console, "micro-\nbatches", "micro-\nbatch", "bubble", "predicted\ntime")
    table.add_column("")
    for choice in choices[:MAX_CHOICES]:
        relative = f"{float(choice.predicted_time / choices[0].predicted_time):.2f}"
        cells = (
            format_value(choice.num_microbatches),
            format_value(choice.microbatch_size),
            f"{float(choice.bubble):.3f}",
            relative,
        )
        table.add_row(*cells, "taken" if choice.microbatch_size == taken.microbatch_size else "")
    return table


def _empty_table(console: Console, *titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum
