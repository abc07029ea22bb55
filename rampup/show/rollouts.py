"""Rollout plans and starting sizes as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from rampup.rl.plan import RolloutPlan
from rampup.rl.starting_sizes import Suggestion
from rampup.rl.updates import Updates
from rampup.show.console import make_table, print_notes
from rampup.show.format import format_bytes, format_count, format_value

GIB = 2**30


def print_rollout(plan: RolloutPlan, console: Console, *, notes: Iterable[str] = ()) -> None:
    """Print one step of reinforcement learning in its order: generate, train, sync, evaluate and store."""
    console.print(
        f"{format_count(plan.num_steps, 'step')} of {plan.prompts_per_step:,} prompts * {plan.samples_per_prompt:,} responses "
        f"= {plan.samples_per_step:,} samples; {format_count(plan.total_optimizer_steps, 'optimizer step')} of the policy"
    )
    calls = format_count(plan.generate_calls, "call")
    console.print(f"a step generates in {calls} of {plan.sequences_per_call:,} sequences, trains, then syncs weights:")
    console.print(_training_table(plan.order, console))
    if plan.eval_prompts:
        console.print(f"evaluation: {plan.eval_prompts:,} prompts, {plan.eval_samples:,} samples")
    for remark in _remarks(plan):
        console.print(remark)
    print_notes(notes, console)


def print_suggestion(suggestion: Suggestion, console: Console) -> None:
    """Print starting sizes: the published ones and those of the repository, the memory behind them, and notes."""
    console.print(f"{suggestion.params:,} parameters, {suggestion.system}: a starting point")
    if suggestion.row is not None:
        columns = {f"published for {suggestion.row.label}": suggestion.row.published.to_dict()}
        if suggestion.used is not None:
            columns["the repository uses"] = suggestion.used.to_dict()
        rows = [(name, *(_cell(sizes[name]) for sizes in columns.values())) for name in suggestion.row.published.to_dict()]
        console.print(make_table(console, ("key", *columns), rows, left=1))
    if suggestion.memory is not None:
        memory = suggestion.memory
        console.print(
            f"training state: {memory.state_bytes / GIB:,.1f} GiB, at least {format_count(memory.least_devices, 'device')} of "
            f"{memory.device_bytes / GIB:,g} GiB, which leaves {memory.free_bytes / GIB:,.1f} GiB on each for activations and "
            "generation"
        )
    for note in suggestion.notes:
        console.print(f"- {note}")


def _training_table(order: Iterable[Updates], console: Console) -> Table:
    titles = ("model", "replicas", "epochs", "mini\nbatches", "optimizer\nsteps", "samples\neach", "passes\neach")
    table = make_table(console, (*titles, "per replica\nand pass"), left=1)
    table.collapse_padding = console.is_terminal
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
        "on-policy: each sample is trained on by the weights that generated it"
        if lag == 0
        else f"policy lag: the last optimizer step trains on samples of weights {format_count(lag, 'update')} older"
    ]
    first = plan.order[0]
    if plan.overlapping_microbatches and first.microbatches_per_epoch:
        remarks.append(
            f"overlap: {plan.overlapping_microbatches:,} of {first.microbatches_per_epoch:,} microbatches of the first epoch "
            f"can train ({first.model}) while later calls generate, if samples keep the order of generation"
        )
    padded = {updates.model: updates.padded_samples for updates in plan.order if updates.padded_samples}
    remarks += [f"padding: {format_count(rows, 'row')} of weight 0 per epoch ({model})" for model, rows in padded.items()]
    stored: Mapping[str, Any] | None = plan.to_dict()["experience"]
    if stored is not None:
        remarks.append(
            f"stored experience: {stored['bytes_per_sample']:,} bytes per sample at full length, "
            f"{format_bytes(stored['bytes_per_step'])} per step, {format_bytes(stored['bytes_per_replica'])} per replica"
        )
    return remarks


def _cell(value: int | None) -> str:
    return "" if value is None else format_value(value)
