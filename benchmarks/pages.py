"""A training step on a CPU with huge pages, for which a user can ask, compared with
small pages.

The page size is fixed when a process starts, so each measurement is a process of its
own: this file, with the arguments `measure` and `quick` or `full`, prints one line of
JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from contenders import Problem, main_problem, plan_for, start_rampup, stepper
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    Seconds,
    ignore_row,
    in_turns,
    main,
    run_file,
)

from rampup.data.batches import step_batches
from rampup.engine.mesh import make_mesh
from rampup.plan.ramp import BatchRamp

MICROBATCHES = (1, 8)
STEPS, QUICK_STEPS = 15, 2
# The first argument of a process that `run_file` starts.
CHILD = "measure"
# From version 2.35 on, glibc asks the kernel for huge pages if this is 1.
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Start processes with huge and with small pages in turn."""
    rounds = 2 if quick else ROUNDS
    found: dict[str, list[dict[str, Any]]] = {"small": [], "huge": []}
    measured = Measurements(2 * rounds, on_row)
    for pages in in_turns(list(found), rounds):
        result = run_process(huge=pages == "huge", quick=quick)
        found[pages].append(result)
        measured.add(
            [
                {
                    "pages": pages,
                    **{
                        f"k={k}": f"{seconds * 1e3:.3g} ms"
                        for k, seconds in result["seconds"].items()
                    },
                }
            ]
        )
    return BenchResult(
        name="pages",
        title="a training step on a CPU with huge pages, compared with small pages",
        rows=[row(k, found["huge"], found["small"]) for k in MICROBATCHES],
        notes=[
            str(main_problem(jax.local_devices(backend="cpu")[0], quick=quick)),
            (
                f"One CPU device; medians of {rounds} processes each, in turn, of the"
                f" medians of {QUICK_STEPS if quick else STEPS} steps. faults are the"
                " kernel's page faults in a step."
            ),
            (
                f"Huge pages are {VARIABLE}={TUNABLE}=1 in the environment. If the faults are the same, this machine"
                " does not provide them (the kernel's transparent_hugepage must be"
                " `madvise`)."
            ),
        ],
    )


def row(
    k: int, huge: Sequence[dict[str, Any]], small: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the row of a number of microbatches, from the results of the processes."""
    with_huge, with_small = (
        Seconds(all=tuple(one["seconds"][str(k)] for one in found))
        for found in (huge, small)
    )
    return {
        "microbatches": k,
        "ms": with_huge.median * 1e3,
        "spread": with_huge.spread,
        "small_ms": with_small.median * 1e3,
        "small_spread": with_small.spread,
        "ratio": with_huge.median / with_small.median,
        "faults": statistics.median(one["faults"][str(k)] for one in huge),
        "small_faults": statistics.median(one["faults"][str(k)] for one in small),
    }


def run_process(*, huge: bool, quick: bool) -> dict[str, Any]:
    """Return the result of `measure` in a new process."""
    return run_file(
        __file__,
        [CHILD, "quick" if quick else "full"],
        env={VARIABLE: f"{TUNABLE}={int(huge)}"},
    )


def measure(problem: Problem, steps: int) -> dict[str, Any]:
    """Return the median seconds and page faults of a step, by its number of
    microbatches.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    first, last = (k * problem.rows for k in MICROBATCHES)
    plan = plan_for(
        BatchRamp.piecewise([(0, first), (1, last)]), 2, microbatch_size=problem.rows
    )
    batches = list(step_batches(problem.source(plan.consumed_samples), plan, mesh))
    step = stepper(*start_rampup(problem, plan, mesh))
    seconds, faults = dict[int, float](), dict[int, float]()
    for k, batch in zip(MICROBATCHES, batches, strict=True):
        measured = []
        for _ in range(1 + steps):
            start, faults_before = (
                time.perf_counter(),
                resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
            )
            step(batch)
            measured.append(
                (
                    time.perf_counter() - start,
                    resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before,
                )
            )
        seconds[k], faults[k] = map(statistics.median, zip(*measured[1:], strict=True))
    return {"seconds": seconds, "faults": faults}


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        jax.config.update("jax_platforms", "cpu")
        is_quick = sys.argv[2] == "quick"
        print(
            json.dumps(
                measure(
                    main_problem(jax.devices()[0], quick=is_quick),
                    QUICK_STEPS if is_quick else STEPS,
                )
            )
        )
    else:
        main(pages=run)
