"""`rampup critical`: the critical batch size of a run, by branches from one of its
checkpoints.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console

from rampup.cli.common import FAKE_DEVICES, Result, arg, use_fake_devices
from rampup.errors import ConfigError
from rampup.plan.numbers import exact_fraction, parse_count
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
    "--multiples": arg(
        "K,K,...",
        "factors of the run's batch; by default 1/4,1/2,1,2,4,8, without fractions that"
        " give no legal batch",
    ),
    "--tokens": arg(
        "WINDOW",
        "tokens that each branch trains on; by default so many that the run's loss"
        " curve promises a gain of 0.02, and at least 20 steps of the largest batch",
    ),
    "--tolerance": arg(
        "NATS",
        "loss by which a larger batch may be worse; by default a sixth of what the"
        " window gains: a fifth more tokens",
    ),
    "--work": arg(
        "DIR",
        "folder from which an interrupted measurement resumes, RUN_DIR.critical by"
        " default",
    ),
    **FAKE_DEVICES,
}


def critical(args: argparse.Namespace) -> Result:
    """Train the branches, or what is missing of them."""
    multiples = None
    if args.multiples is not None:
        multiples = [
            exact_fraction(part, what="multiples", key="multiples")
            for part in args.multiples.split(",")
        ]
    tolerance = (
        None
        if args.tolerance is None
        else float(exact_fraction(args.tolerance, what="tolerance", key="tolerance"))
    )
    tokens = (
        None
        if args.tokens is None
        else parse_count(args.tokens, what="tokens", key="tokens")
    )
    if args.step is not None and args.step < 1:
        raise ConfigError(
            f"step={args.step} must be at least 1: there is no checkpoint of step 0",
            key="step",
            nearest=(1,),
        )
    use_fake_devices(args.fake_devices)
    from rampup.contrib.lab.branches import find_critical_batch_size

    progress = Console(stderr=True, **PLAIN)
    found = find_critical_batch_size(
        args.run,
        step=args.step,
        multiples=multiples,
        tokens=tokens,
        tolerance=tolerance,
        work_folder=args.work,
        report=lambda line: progress.print(line, style="dim", soft_wrap=True),
    )
    return Result(
        facts=found.to_dict(),
        show=lambda console: _print_result(found, args.run, console),
    )


def _print_result(found: CriticalBatch, run: str, console: Console) -> None:
    rows, close = [], []
    branches = list(zip(found.branches, found.learning_rates, strict=True))
    for branch, rate in branches:
        # The smallest branch has no difference, and so no error of it.
        measured = (
            branch.loss,
            branch.difference,
            None if branch.difference is None else branch.standard_error,
        )
        cells = [
            "-" if x is None else f"{x:{form}}"
            for x, form in zip(measured, (".4f", "+.4f", ".4f"), strict=True)
        ]
        sizes = (
            f"{branch.multiple}x",
            f"{branch.global_batch_size:,}",
            format_value(rate),
        )
        rows.append(
            (
                *sizes,
                *cells,
                _overhead(branch),
                "stopped early" if branch.stopped else "",
            )
        )
        if None not in measured[1:] and not branch.stopped:
            close += (
                [sizes[1]]
                if abs(branch.difference - found.tolerance) < 2 * branch.standard_error
                else []
            )
    titles = (
        "branch",
        "batch",
        "learning\nrate",
        "smoothed\nloss",
        "worse by",
        "+-",
        "more\ntokens",
        "",
    )
    print_table(console, titles, rows, left=1)
    if found.gain is not None:
        console.print(
            f"{found.tokens:,} tokens lowered the loss of the smallest branch by"
            f" {found.gain:.4f}"
        )
    if not found.decisive:
        why = "which is too little to measure"
        fix = f"a window several times as long, such as --tokens {8 * found.tokens:,}"
        if found.gain is not None and found.deciding_tokens is not None:
            why = (
                f"too little for a tolerance of {found.tolerance:.4g}: a batch that"
                " wastes half of its samples could pass"
            )
            fix = f"--tokens {found.deciding_tokens:,}"
        console.print(
            f"undecided at step {found.step:,}: the window gains {why}; {fix} could"
            " decide"
        )
    else:
        relation = {"exact": "", "at_least": "at least ", "at_most": "at most "}[
            found.bound
        ]
        console.print(
            f"critical batch size at step {found.step:,}:"
            f" {relation}{found.critical_batch_size:,} samples, the largest whose loss"
            f" is within {found.tolerance:.4g} of every smaller one"
        )
        for branch, rate in branches:
            if branch.global_batch_size == found.critical_batch_size:
                tokens = (
                    f"{_overhead(branch)} more tokens than the best smaller batch, "
                    * (branch.token_overhead is not None)
                )
                console.print(
                    f"it needs {tokens}a learning rate of {format_value(rate)} at this"
                    " checkpoint"
                )
        notes = []
        if found.bound == "at_least":
            largest = found.branches[-1].multiple
            notes.append(
                "no larger batch was tried: --multiples"
                f" {largest / 2},{largest},{2 * largest},{4 * largest}"
            )
        if found.bound == "at_most":
            tried = ",".join(
                map(
                    str,
                    (
                        *found.smaller,
                        *(branch.multiple for branch in found.branches[:2]),
                    ),
                )
            )
            reason = (
                "there is none below 1"
                if found.critical_batch_size == 1
                else "half of it is not legal on these devices"
            )
            notes.append(
                "no smaller batch was tried:"
                f" {f'--multiples {tried}' if found.smaller else reason}"
            )
        if found.half_window_size is not None:
            shown = (
                f"the first half of the window shows {found.half_window_size:,}: the"
                " answer depends on the window"
            )
            notes.append(f"{shown}; measure again with --tokens {2 * found.tokens:,}")
        print_notes(notes, console)
        console.print(
            f"to go on with it: rampup train {run} on_plan_change=continue_by_samples"
            " enable_rampup_batch_size=false "
            f'batch_size_schedule="{found.batch_size_schedule}", and a larger steps= if'
            " the run is finished"
        )
    notes = [] if found.disagreement is None else [found.disagreement]
    if found.noise_scale_samples is None:
        notes = [
            "the run measured no gradient noise scale to compare with:"
            " measure_gradient_noise=true"
        ]
    else:
        console.print(
            f"gradient noise scale measured by the run: {found.noise_scale_samples}"
            " samples"
        )
    if close:
        notes.append(
            f"within two standard errors of the tolerance: {', '.join(close)}; a longer"
            " --tokens decides them"
        )
    print_notes(notes, console)
    console.print(f"kept in {found.folder}")


def _overhead(branch: BranchResult) -> str:
    """Return the share of additional tokens of a branch with its interval, as text."""
    if branch.token_overhead is None:
        return "-"
    value, low, high = (
        "no limit" if share is None else f"{share:.0%}"
        for share in branch.token_overhead
    )
    return f"{value} ({low} to {high})"
