"""A training step on a CPU with large memory pages, as our commands ask for, beside one with small pages.

Pages are chosen when a process starts, so that each measurement is one of its own: this file, run as a program, prints a
line of JSON. Its argument is `quick` or `full`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from rampup.bench.contenders import our_state
from rampup.bench.measure import ROUNDS, Seconds
from rampup.bench.problem import Problem, bench_optimizer, main_problem
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.data.batches import step_batches
from rampup.run.mesh import make_mesh
from rampup.run.step import train_step

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MICROBATCHES = (1, 8)
STEPS, QUICK_STEPS = 15, 2
TIMEOUT_SECONDS = 600


def run(*, quick: bool = False) -> BenchResult:
    """Start processes with large and with small pages in turn.

    Args:
        quick: a tiny model, few steps and few rounds.
    """
    rounds = 2 if quick else ROUNDS
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for number in range(rounds):
        for large in (True, False) if number % 2 else (False, True):
            found[large].append(run_process(large=large, quick=quick))
    return BenchResult(
        name="pages",
        title="a training step on a CPU with large memory pages, beside one with small pages",
        rows=[row(k, found[True], found[False]) for k in MICROBATCHES],
        notes=[
            str(main_problem(jax.local_devices(backend="cpu")[0], quick=quick)),
            f"ours, one CPU device; medians of {rounds} processes each, in turn, of which each gives the median of "
            f"{QUICK_STEPS if quick else STEPS} steps; faults are the kernel's page faults in a step",
            f"large pages are {VARIABLE}={TUNABLE}=1, which needs glibc 2.35 and [madvise] in {KERNEL}; here that says: "
            + (KERNEL.read_text().strip() if KERNEL.is_file() else "nothing"),
        ],
    )


def row(k: int, large: Sequence[dict[str, Any]], small: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a number of microbatches.

    Args:
        k: the number.
        large, small: what the processes with large pages printed, and those with small ones.
    """
    ours, theirs = (Seconds(all=tuple(one["seconds"][str(k)] for one in found)) for found in (large, small))
    return {
        "microbatches": k,
        "ms": ours.median * 1e3,
        "spread": ours.spread,
        "small_ms": theirs.median * 1e3,
        "small_spread": theirs.spread,
        "ratio": ours.median / theirs.median,
        "faults": statistics.median(one["faults"][str(k)] for one in large),
        "small_faults": statistics.median(one["faults"][str(k)] for one in small),
    }


def run_process(*, large: bool, quick: bool) -> dict[str, Any]:
    """Return what `measure` finds in a new process.

    Args:
        large: whether it asks for large pages.
        quick: a tiny model and few steps.
    """
    done = subprocess.run(
        [sys.executable, "-m", "rampup.bench.pages", "quick" if quick else "full"],
        env=os.environ | {VARIABLE: f"{TUNABLE}={int(large)}"},
        timeout=TIMEOUT_SECONDS,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(problem: Problem, steps: int) -> dict[str, Any]:
    """Return the median seconds and page faults of a step, by its number of microbatches.

    Args:
        problem: the model.
        steps: how many of each are timed.
    """
    mesh, tx = make_mesh(devices=jax.devices()[:1]), bench_optimizer()
    first, last = (k * problem.rows for k in MICROBATCHES)
    plan = RampPlan(
        ramp=BatchRamp.piecewise([(0, first), (1, last)]),
        splitter=BatchSplitter(data_parallel_size=1, microbatch_size=problem.rows),
        num_devices=1,
        total_steps=2,
    )
    batches = list(step_batches(problem.source(plan.consumed_samples), plan, mesh))
    step, state = train_step(problem.model.loss, tx, plan, mesh), our_state(problem, tx, mesh)
    seconds: dict[int, float] = {}
    faults: dict[int, float] = {}
    for k, batch in zip(MICROBATCHES, batches, strict=True):
        taken = []
        for _ in range(1 + steps):
            before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            taken.append((time.perf_counter() - before[0], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before[1]))
        seconds[k], faults[k] = map(statistics.median, zip(*taken[1:], strict=True))
    return {"seconds": seconds, "faults": faults}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    of = main_problem(jax.devices()[0], quick=sys.argv[1] == "quick")
    print(json.dumps(measure(of, QUICK_STEPS if sys.argv[1] == "quick" else STEPS)))
