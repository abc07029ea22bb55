"""Rollout plans and starting sizes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rampup.rl.plan import RolloutPlan
from rampup.rl.starting_sizes import Suggestion
from rampup.rl.updates import Updates

GIB = 2**30


def print_rollout(plan: RolloutPlan, console: Console, *, notes: Iterable[str] = ()) -> None:
    """Print a step of reinforcement learning in its order: generate, train, sync, evaluate, and what is stored."""
    console.print(
        f"{plan.num_steps:,} steps of {plan.prompts_per_step:,} prompts * {plan.samples_per_prompt:,} responses = "
        f"{plan.samples_per_step:,} samples; {plan.total_optimizer_steps:,} optimizer steps of the policy"
    )
    calls = f"{plan.generate_calls:,} call{'s' * (plan.generate_calls > 1)}"
    console.print(f"a step generates in {calls} of {plan.sequences_per_call:,} sequences, trains, then syncs weights:")
    console.print(_training_table(plan.order, console))
    if plan.eval_prompts:
        console.print(f"evaluation: {plan.eval_prompts:,} prompts, {plan.eval_samples:,} samples")
    for remark in _remarks(plan):
        console.print(remark)
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def print_suggestion(suggestion: Suggestion, console: Console) -> None:
    """Print starting sizes: what is published beside what the repository uses, the memory behind them, and what to know."""
    console.print(f"{suggestion.params:,} parameters, {suggestion.system}: a starting point")
    if suggestion.row is not None and suggestion.used is not None:
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
        for title in ("key", f"published for {suggestion.row.label}", "the repository uses"):
            table.add_column(title, justify="left" if title == "key" else "right")
        used = suggestion.used.to_dict()
        for name, size in suggestion.row.published.to_dict().items():
            table.add_row(name, _cell(size), _cell(used[name]))
        console.print(table)
    if suggestion.memory is not None:
        memory = suggestion.memory
        console.print(
            f"training state: {memory.state_bytes / GIB:,.1f} GiB, at least {memory.least_devices:,} "
            f"device{'s' * (memory.least_devices > 1)} of {memory.device_bytes / GIB:,g} GiB, which leaves "
            f"{memory.free_bytes / GIB:,.1f} GiB on each for activations and generation"
        )
    for note in suggestion.notes:
        console.print(f"- {note}")


def _training_table(order: Iterable[Updates], console: Console) -> Table:
    titles = ("model", "replicas", "epochs", "mini\nbatches", "optimizer\nsteps", "samples\neach", "passes\neach")
    shown = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(box=shown, pad_edge=False, show_edge=False, collapse_padding=shown is not None)
    for title in (*titles, "per replica\nand pass"):
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    for updates in order:
        passes, per_pass = _cell(updates.accumulation_steps), f"{_cell(updates.microbatch_size)} samples"
        if updates.token_budget is not None:
            passes = f"<= {passes}" if passes else "?"
            per_pass = f"{updates.token_budget:,} tokens"
        counts = (updates.data_parallel_size, updates.num_epochs, updates.num_mini_batches, updates.optimizer_steps)
        table.add_row(updates.model, *map(_cell, counts), _cell(updates.mini_batch_samples), passes, per_pass)
    return table


def _remarks(plan: RolloutPlan) -> list[str]:
    lag = plan.policy_updates.optimizer_steps - 1
    remarks = [
        "on-policy: the weights that generate a sample are those that train on it"
        if lag == 0
        else f"policy lag: the last optimizer step trains on samples of weights {lag:,} update{'s' * (lag > 1)} older"
    ]
    first = plan.order[0]
    if plan.overlapping_microbatches and first.microbatches_per_epoch:
        remarks.append(
            f"overlap: {plan.overlapping_microbatches:,} of {first.microbatches_per_epoch:,} microbatches of the first epoch "
            f"can train ({first.model}) while later calls generate, if samples keep the order of generation"
        )
    padded = {updates.model: updates.padded_samples for updates in plan.order if updates.padded_samples}
    remarks += [f"padding: {rows:,} rows of weight 0 per epoch ({model})" for model, rows in padded.items()]
    stored = plan.to_dict()["experience"]
    if stored is not None:
        remarks.append(_stored_text(stored))
    return remarks


def _stored_text(stored: Mapping[str, Any]) -> str:
    return (
        f"stored experience: {stored['bytes_per_sample']:,} bytes a sample at full length, "
        f"{_bytes(stored['bytes_per_step'])} a step, {_bytes(stored['bytes_per_replica'])} a replica"
    )


def _bytes(number: int) -> str:
    """Write a number of bytes for people.

    Example:
        >>> _bytes(6_422_528), _bytes(900)
        ('6.1 MiB', '900 bytes')
    """
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} bytes"


def _cell(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
