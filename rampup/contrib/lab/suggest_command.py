"""`rampup suggest`: batch sizes to start with, by scaling laws or published sizes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rampup.cli.common import Result, arg, usage_error
from rampup.contrib.lab.scaling_laws import ADVISED, suggest_batch
from rampup.contrib.rl import starting_sizes
from rampup.show.console import make_table, phase_cell
from rampup.show.format import format_count, format_si

if TYPE_CHECKING:
    from rampup.contrib.rl.starting_sizes import Suggestion

SUGGEST = {
    "--params": arg(
        "N",
        "parameters of the model without its embeddings, such as 6B; needed with"
        " --system",
    ),
    "--train-tokens": arg("D", "tokens of a pre-training run, such as 300B"),
    "--system": arg(
        "NAME", "for reinforcement learning: trlx, skyrl, verl or maxtext_rl"
    ),
    "--memory-gib": arg(
        "GIB", "with --system: memory of one device, for the rule of thumb"
    ),
}


def suggest(args: argparse.Namespace) -> Result:
    """Suggest batch sizes for pre-training by scaling laws, or starting sizes for
    reinforcement learning.
    """
    if (args.train_tokens is None) == (args.system is None):
        raise usage_error(
            "give --train-tokens for the batch of a pre-training run, or --system for"
            " the starting sizes of reinforcement learning; not both"
        )
    if args.train_tokens is not None:
        if args.memory_gib is not None:
            raise usage_error("--memory-gib needs --system", key="memory-gib")
        found = suggest_batch(args.train_tokens, args.params)
        return Result(
            facts=found, show=lambda console: print_batch_range(found, console)
        )
    if args.params is None:
        raise usage_error("--system needs --params", key="params")
    suggestion = starting_sizes.suggest(
        args.params, system=args.system, memory_gib=args.memory_gib
    )
    return Result(
        facts=suggestion.to_dict(),
        show=lambda console: print_suggestion(suggestion, console),
    )


def print_batch_range(found: Mapping[str, Any], console: Console) -> None:
    """Print the batch that each scaling law gives, with its source, and the ranges."""
    model = "" if found["params"] is None else f", {found['params']:,} parameters"
    console.print(f"{found['train_tokens']:,} tokens{model}: batch size in tokens")
    for kind in ("optimal", "critical"):
        laws = [law for law in found["laws"] if law["kind"] == kind]
        shares = (
            ["batch"]
            if kind == "optimal"
            else [f"+{name}" for name in laws[0]["batch_tokens_at_overhead"]]
        )
        rates = ["rate"] if any("learning_rate" in law for law in laws) else []
        steps = "steps" if kind == "optimal" else f"steps\nat +{ADVISED}"
        table = make_table(console, [kind, *shares, steps, *rates], left=1)
        for law in laws:
            sizes = law.get("batch_tokens_at_overhead", {"": law["batch_tokens"]})
            count = (
                law["steps"] if kind == "optimal" else law["steps_at_overhead"][ADVISED]
            )
            rate = law.get("learning_rate")
            own = ["" if rate is None else f"{rate:.2g}"] if rates else []
            formula = f"{law['name']}: {law['formula']} ({law['source']})"
            if law["outside"] is not None:
                formula += f"; {law['outside']}"
            table.add_row(formula, *map(format_si, sizes.values()), f"{count:,}", *own)
        console.print(table)
    critical, optimal = (
        " to ".join(map(format_si, found[f"{kind}_batch_tokens"]))
        for kind in ("critical", "optimal")
    )
    recommended = format_si(found["recommended_batch_tokens"])
    console.print(
        f"recommended: {recommended}, the median of {critical} for {ADVISED} more"
        f" tokens; optimal {optimal}"
    )
    for note in found["notes"]:
        console.print(f"- {note}")


def print_suggestion(suggestion: Suggestion, console: Console) -> None:
    """Print starting sizes: the published ones and those of the repository, the memory
    behind them, and notes.
    """
    console.print(
        f"{suggestion.params:,} parameters, {suggestion.system}: a starting point"
    )
    if suggestion.published is not None:
        columns = {f"published for {suggestion.published_for}": suggestion.published}
        if suggestion.repository is not None:
            columns["the repository uses"] = suggestion.repository
        rows = [
            (name, *(phase_cell(sizes, name) for sizes in columns.values()))
            for name in suggestion.published
        ]
        console.print(make_table(console, ("key", *columns), rows, left=1))
    if suggestion.memory is not None:
        memory = suggestion.memory
        state = (
            f"{memory['state_gib']:,.1f} GiB, at least"
            f" {format_count(memory['least_devices'], 'device')}"
        )
        free = (
            f"{memory['free_gib_per_device']:,.1f} GiB on each for activations and"
            " generation"
        )
        console.print(
            f"training state: {state} of {memory['device_gib']:,g} GiB, which leaves"
            f" {free}"
        )
    for note in suggestion.notes:
        console.print(f"- {note}")
