"""The results of a first study of growing batches, in benchmarks/advice.json, and the
numbers of docs/explanation/does_a_ramp_pay.md that follow from them.

    python benchmarks/advice.py    # every table of the page

Its 145 runs cannot be repeated: their text was the installed packages of that day. They
lack controls, which the page names. benchmarks/ramp_controls.py is the study that has
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("advice.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The sizes of the study, in samples unless named otherwise."""

    sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    samples: int = 8192  # of a run
    length: int = 64  # tokens of a sample
    width: int = 96
    layers: int = 3
    pilot: int = 8  # the pilot's batch, whose rate is that of the ramps
    rate: float = 4e-3  # around which the rates of the pilot's batch are swept
    seeds: int = 3
    held_out: int = 2048  # samples of an evaluation
    shares: tuple[int, ...] = (
        2,
        4,
        8,
        16,
    )  # the other runs of the best batch have 1/2, 1/4, ... of the samples
    branchings: tuple[int, ...] = (
        1,
        2,
        4,
    )  # checkpoints of the pilot with branches, in quarters of it
    # a step of B samples takes 1 + B / least_steps units of time on the assumed machine
    least_steps: float = 64.0


def step_time(study: Study, size: int) -> float:
    """Return the time of a step on the assumed machine, which a batch of `least_steps`
    fills half.
    """
    return 1 + size / study.least_steps


def rows_of(runs: Mapping[str, Any], prefix: str) -> dict[int, list[dict[str, Any]]]:
    """Return the runs of a constant batch by the offset of their rate."""
    found: dict[int, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        if name.startswith(f"{prefix} rate"):
            found.setdefault(
                int(name.removeprefix(f"{prefix} rate").split()[0]), []
            ).append(run)
    return found


def best_offset(runs: Mapping[str, Any], prefix: str) -> int:
    """Return the offset of the rate that won with seed 0."""
    firsts = {
        offset: min(run["loss"] for run in each if run["seed"] == 0)
        for offset, each in rows_of(runs, prefix).items()
    }
    return min(firsts, key=firsts.__getitem__)


def mean_loss(runs: Mapping[str, Any], prefix: str) -> float:
    """Return the mean loss over the seeds at the best rate."""
    return float(
        np.mean(
            [run["loss"] for run in rows_of(runs, prefix)[best_offset(runs, prefix)]]
        )
    )


def main() -> None:
    """Print every table of the page."""
    from advice_report import print_report  # which imports this file

    print_report(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
