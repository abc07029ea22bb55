"""`rampup suggest`: batch sizes to start with, by scaling laws."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rampup.cli.common import Result, arg
from rampup.contrib.lab.scaling_laws import ADVISED, suggest_batch
from rampup.show.console import make_table
from rampup.show.format import format_si

SUGGEST = {
    "--params": arg("N", "parameters of the model without its embeddings, such as 6B"),
    "--train-tokens": arg(
        "D", "tokens of a pre-training run, such as 300B", required=True
    ),
}


def suggest(args: argparse.Namespace) -> Result:
    """Suggest batch sizes for pre-training by scaling laws."""
    found = suggest_batch(args.train_tokens, args.params)
    return Result(facts=found, show=lambda console: print_batch_range(found, console))


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
    console.print(
        f"recommended: {format_si(found['recommended_batch_tokens'])}, the median of {critical} for {ADVISED} more"
        f" tokens; optimal {optimal}"
    )
    for note in found["notes"]:
        console.print(f"- {note}")
