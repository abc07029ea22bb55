"""`rampup critical`: the critical batch size of a run, by branches from one of its
checkpoints.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from rampup.cli.common import FAKE_DEVICES, Result, arg, use_fake_devices
from rampup.plan.numbers import parse_count
from rampup.show.console import PLAIN, print_notes, print_table
from rampup.show.format import format_value

if TYPE_CHECKING:
    from rampup.contrib.lab.branches import CriticalBatch
    from rampup.contrib.lab.critical import BranchResult

CRITICAL = {
    "run": arg(
        "RUN_DIR",
        "the folder of a run; it is only read, also while the run is training",
    ),
    "--step": arg(
        "N", "branch from the checkpoint of step N instead of the newest", type=int
    ),
    "--batches": arg(
        "B,B,...",
        "global batch sizes of the branches; by default 1/4, 1/2, 1, 2, 4 and 8 times"
        " the run's, as far as these are legal",
    ),
    "--tokens": arg(
        "WINDOW",
        "tokens that each branch trains on; by default so many that the run's loss"
        " curve promises a gain of 0.02, and at least 20 steps of the largest batch",
    ),
    **FAKE_DEVICES,
}


def critical(args: argparse.Namespace) -> Result:
    """Train the branches."""
    batches = tokens = None
    if args.batches is not None:
        batches = [
            parse_count(text, what="batches", key="batches")
            for text in args.batches.split(",")
        ]
    if args.tokens is not None:
        tokens = parse_count(args.tokens, what="tokens", key="tokens")
    use_fake_devices(args.fake_devices)
    from rampup.contrib.lab.branches import find_critical_batch_size

    progress = Console(stderr=True, **PLAIN)
    found = find_critical_batch_size(
        args.run,
        step=args.step,
        batches=batches,
        tokens=tokens,
        report=lambda line: progress.print(line, style="dim", soft_wrap=True),
    )
    return Result(
        facts=found.to_dict(),
        show=lambda console: _print_result(found, args.run, console),
    )


def _print_result(found: CriticalBatch, run: str, console: Console) -> None:
    """Print the branches, the critical batch if there is one, and how to go on."""
    branches = list(zip(found.branches, found.learning_rates, strict=True))
    rows = [
        (
            f"{branch.global_batch_size:,}",
            format_value(rate),
            _number(branch.loss, ".4f"),
            _number(branch.difference, "+.4f"),
            # The smallest branch has no difference, and so no error of it.
            "-" if branch.difference is None else _number(branch.standard_error, ".4f"),
            _overhead(branch),
        )
        for branch, rate in branches
    ]
    titles = (
        "batch",
        "learning\nrate",
        "smoothed\nloss",
        "worse by",
        "+-",
        "more\ntokens",
    )
    print_table(console, titles, rows, left=1)
    if found.gain is not None:
        console.print(
            f"{found.tokens:,} tokens lowered the loss of the smallest branch by"
            f" {found.gain:.4f}"
        )
    if found.decisive:
        _print_decision(found, run, console)
    else:
        console.print(
            f"undecided at step {found.step:,}: the window gains too little for a"
            f" tolerance of {found.tolerance:.4g}; a window several times as long, such"
            f" as --tokens {8 * found.tokens:,}, could decide"
        )
    noise = found.noise_scale_samples
    console.print(
        "gradient noise scale measured by the run:"
        f" {'none' if noise is None else f'{noise} samples'}"
    )
    if (implied := found.implied_noise_scale) is not None:
        note = (
            f"from the critical batch follows a noise scale of {implied:,.3g} samples."
            " Either can be wrong: the measured one describes plain SGD, and branches"
            " are short and have no anneal. Whole runs would settle it; until then, the"
            " smaller of the two wastes fewer tokens"
        )
        print_notes([note], console)
    if found.decisive:
        console.print(f"kept in {found.file}")


def _print_decision(found: CriticalBatch, run: str, console: Console) -> None:
    """Print the critical batch, and how to go on with it."""
    assert found.bound is not None
    relation = {"exact": "", "at_least": "at least ", "at_most": "at most "}
    console.print(
        f"critical batch size at step {found.step:,}:"
        f" {relation[found.bound]}{found.critical_batch_size:,} samples, the largest"
        f" whose loss is within {found.tolerance:.4g} of every smaller one"
    )
    other = {"exact": "", "at_least": "larger", "at_most": "smaller"}[found.bound]
    if other:
        print_notes([f"no {other} batch was tried: give {other} --batches"], console)
    console.print(
        f"to go on with it: rampup train {run} on_plan_change=continue_by_samples"
        " enable_rampup_batch_size=false "
        f'batch_size_schedule="{found.batch_size_schedule}", and a larger steps= if'
        " the run is finished"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _overhead(branch: BranchResult) -> str:
    """Return the share of additional tokens of a branch with its interval, as text."""
    if branch.token_overhead is None:
        return "-"
    value, low, high = (
        "no limit" if share is None else f"{share:.0%}"
        for share in branch.token_overhead
    )
    return f"{value} ({low} to {high})"
