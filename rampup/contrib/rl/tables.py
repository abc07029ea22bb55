"""A rollout as text for a terminal, and as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from rampup.show.console import make_table, phase_cell, print_notes
from rampup.show.format import format_bytes, format_count
from rampup.show.notebook import html_table

if TYPE_CHECKING:
    from rampup.contrib.rl.plan import RolloutPlan
    from rampup.contrib.rl.schedule import RolloutSchedule


def print_rollout(
    schedule: RolloutSchedule, console: Console, *, notes: Iterable[str] = ()
) -> None:
    """Print the sizes of every stage of a batch that grows, and a step of reinforcement
    learning of the last one.
    """
    plan, stages = schedule.stages[-1][1], schedule.stage_rows()
    sizes = (
        f"{format_count(plan.prompts_per_step, 'prompt')} *"
        f" {format_count(plan.samples_per_prompt, 'response')} ="
        f" {format_count(plan.samples_per_step, 'sample')}"
    )
    steps = format_count(plan.num_steps, "step")
    total = format_count(schedule.total_steps, "optimizer step")
    if len(stages) > 1:
        columns = {
            "from\nstep": "start_step",
            "steps": "num_steps",
            "prompts": "prompts_per_step",
            "responses\neach": "samples_per_prompt",
            "samples": "samples_per_step",
            "samples per\nmini batch": "mini_batch_samples",
            "optimizer\nsteps": "optimizer_steps",
        }
        console.print(f"{steps} of a batch that grows; {total} of the policy")
        console.print(
            make_table(
                console,
                columns,
                [
                    [phase_cell(row, name) for name in columns.values()]
                    for row in stages
                ],
            )
        )
        console.print(f"in the last stage, a step of {sizes}:")
    else:
        console.print(f"{steps} of {sizes}; {total} of the policy")
    console.print(
        "a step, from top to bottom; each line is done as often within the one"
        " above it:"
    )
    table = make_table(
        console,
        ["one step", "number", "prompts\neach", "samples\neach", "tokens\neach", "how"],
        left=1,
    )
    depths = {
        "prompts": 0,
        "responses": 1,
        "mini batches": 1,
        "microbatches": 2,
        "optimizer step": 2,
    }
    table.collapse_padding = console.is_terminal
    for row in plan.timetable():
        what = row["what"]
        name = "  " * (depth := depths[what]) + "-> " * (depth > 0) + what
        table.add_row(
            name,
            *(
                phase_cell(row, key)
                for key in ("number", "prompts", "samples", "tokens")
            ),
            row["how"],
        )
    table.add_row("-> weights to the generator", *[""] * 5)
    console.print(table)
    if plan.eval_prompts:
        console.print(
            f"evaluation: {format_count(plan.eval_prompts, 'prompt')},"
            f" {format_count(plan.eval_samples, 'sample')}"
        )
    if lag := plan.policy_updates.optimizer_steps - 1:
        console.print(
            "policy lag: the last optimizer step trains on samples of weights"
            f" {format_count(lag, 'update')} older"
        )
    else:
        console.print(
            "on-policy: each sample is trained on by the weights that generated it"
        )
    if rows := plan.policy_updates.padded_samples:
        console.print(f"padding: {format_count(rows, 'row')} of weight 0 per epoch")
    if stored := plan.to_dict()["experience"]:
        step, replica = (
            format_bytes(stored[f"bytes_per_{what}"]) for what in ("step", "replica")
        )
        per_sample = f"{stored['bytes_per_sample']:,} bytes per sample at full length"
        console.print(
            f"stored experience: {per_sample}, {step} per step, {replica} per replica"
        )
    print_notes(notes, console)


def rollout_html(plan: RolloutPlan) -> str:
    """Return the sizes of a step of a rollout as an HTML table."""
    return html_table(
        [
            {"size": name, "value": value}
            for name, value in plan.to_dict().items()
            if isinstance(value, int)
        ]
    )
