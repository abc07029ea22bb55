"""A training step in several processes, and plans for many devices and phases.

A process of the training step is this file, run as a program, which prints one line of
JSON. Its arguments: `measure`, the number of all devices, the number of processes, its
own number, the coordinator's address, rounds, and `quick` or `full`.
"""

from __future__ import annotations

import json
import socket
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
from contenders import (
    FIXED,
    PER_PHASE,
    POLICIES,
    QUICK,
    SMALL,
    Problem,
    baseline,
    plan_for,
    start_rampup,
    stepper,
)
from maxtext_baselines import MakeManager, manager_ramp, maxtext_manager
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    Seconds,
    ignore_row,
    main,
    run_file,
    take_turns,
)

from rampup.data.batches import step_batches
from rampup.engine.mesh import batch_sharding, make_mesh, process_rows
from rampup.loop.distributed import join
from rampup.plan.plan import RampPlan
from rampup.plan.split import RampupMicrobatch

# The first argument of a process that `run_file` starts.
CHILD = "measure"
FAKE_DEVICES, PROCESSES, QUICK_PROCESSES = 8, (1, 2, 4), (1, 2)
PLANNED_DEVICES, PHASES = (4_096, 65_536), 10_000
QUICK_PLANNED_DEVICES, QUICK_PHASES = (4_096,), 100
# Steps of the first phase of a planned ramp; the last phases have one for every
# `PHASES` of them.
FIRST_STEPS = 1_000_000
REPLAYED = 300_000
MICROBATCHES = 4
COLUMNS = (
    "case",
    "devices",
    "processes",
    "phases",
    "ms",
    "spread",
    "peer_ms",
    "ratio",
    "peak_bytes",
    "compilations",
)
COLUMNS += ("rows_here", "loss_difference")


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Start runs of one, two and four processes, and plan for thousands of devices."""
    manager, origin = maxtext_manager()
    rounds, processes = 3 if quick else ROUNDS, QUICK_PROCESSES if quick else PROCESSES
    devices, phases = (
        (QUICK_PLANNED_DEVICES, QUICK_PHASES) if quick else (PLANNED_DEVICES, PHASES)
    )
    found = Measurements(len(processes) + 2 * len(devices), on_row)
    found.add(process_table(processes, rounds, quick=quick))
    for num_devices in devices:
        found.add(planning_rows(num_devices, phases, manager, rounds))
    return BenchResult(
        name="scale",
        title=(
            "one training step in several processes, and plans for many devices and"
            " phases"
        ),
        rows=[{name: row.get(name) for name in COLUMNS} for row in found.rows],
        notes=[
            (
                f"A step: {FAKE_DEVICES} simulated CPU devices in real processes joined"
                " by jax.distributed, on the cores of this machine. The baseline is a"
                " hand-written jitted step on the full batch; ratio is rampup /"
                " baseline."
            ),
            (
                "loss_difference: the largest relative difference from one process."
                " rows_here: the rows a process reads in a step."
            ),
            (
                "A plan: built, checked, split, and its last step looked up. The"
                f" baseline is the replay of the ramp by {origin}, extrapolated from"
                f" {REPLAYED:,} steps; it checks and splits nothing."
            ),
            (
                f"Medians of {rounds} rounds in turn. peak_bytes is the peak of"
                " Python's allocations for a plan."
            ),
            "Not run: several machines, accelerators, and more than 4 processes.",
        ],
    )


def process_table(
    numbers: tuple[int, ...], rounds: int, *, quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for every number of processes."""
    losses: list[float] = []
    for number in numbers:
        found = run_processes(number, rounds, quick=quick)
        losses = losses or found["losses"]
        seconds, baseline_seconds = (
            Seconds(all=tuple(found["seconds"])),
            Seconds(all=tuple(found["peer_seconds"])),
        )
        yield {
            "case": "training step",
            "devices": FAKE_DEVICES,
            "processes": number,
            "ms": seconds.median * 1e3,
            "spread": seconds.spread,
            "peer_ms": baseline_seconds.median * 1e3,
            "ratio": seconds.median / baseline_seconds.median,
            "compilations": found["compilations"],
            "rows_here": found["rows"],
            "loss_difference": max(
                abs(a - b) / abs(b)
                for a, b in zip(found["losses"], losses, strict=True)
            ),
        }


def run_processes(number: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Start this many processes, a divisor of the devices, and return the result of the
    first; see `measure`.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    sizes, last = (
        (str(FAKE_DEVICES), str(number)),
        (address, str(rounds), "quick" if quick else "full"),
    )
    return run_file(
        __file__, *([CHILD, *sizes, str(place), *last] for place in range(number))
    )


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Time one optimizer step of rampup and of a hand-written big batch on all devices
    of all processes, in turn.
    """
    mesh = make_mesh()
    plan = problem.plan(MICROBATCHES, mesh)
    source = problem.source(plan.consumed_samples)
    (batch,) = step_batches(source, plan, mesh)
    step, state = start_rampup(problem, plan, mesh)
    take_step, losses = stepper(step, state), list[float]()
    plain, plain_state = baseline("plain", problem, plan, mesh)
    batch_B = jax.tree.map(
        lambda x: jax.make_array_from_callback(
            x.shape, batch_sharding(mesh), lambda index: x[index]
        ),
        source.arrays,
    )

    def baseline_step() -> None:
        nonlocal plain_state
        plain_state, loss = plain(plain_state, batch_B)
        loss.block_until_ready()

    def rampup_step():
        return losses.append(float(take_step(batch)[1]["loss"]))

    times = take_turns(
        {"rampup": rampup_step, "baseline": baseline_step}, rounds=rounds
    )
    return {
        "seconds": times["rampup"].all,
        "peer_seconds": times["baseline"].all,
        "losses": losses,
        "compilations": step.num_compilations,
        "rows": MICROBATCHES * len(process_rows(mesh, mesh.size * problem.rows)),
    }


def measure_in_process(arguments: list[str]) -> None:
    """Join the other processes, time the step, and print the result if this is the
    first process.
    """
    num_devices, num_processes, number, rounds = (
        int(arguments[n]) for n in (0, 1, 2, 4)
    )
    if num_devices % num_processes:
        raise SystemExit(
            f"{num_devices} devices cannot be shared by {num_processes} processes"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices // num_processes)
    if num_processes > 1:
        join(
            coordinator_address=arguments[3],
            num_processes=num_processes,
            process_id=number,
        )
    found = measure(
        QUICK if arguments[5] == "quick" else replace(SMALL, rows=1), rounds
    )
    if number == 0:
        print(json.dumps(found), flush=True)


def planning_rows(
    num_devices: int, phases: int, manager: MakeManager, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for a plan of one shape and for one of a shape per phase."""
    config = SimpleNamespace(
        per_device_batch_size_start=1,
        per_device_batch_size_increment=1,
        per_device_batch_size=phases,
        global_rampup_samples=FIRST_STEPS * num_devices * (phases - 1),
        num_target_devices=num_devices,
    )
    for policy in (POLICIES[FIXED], POLICIES[PER_PHASE]):
        make = partial(_make_plan, config, policy)
        tracemalloc.start()
        try:
            plan = make()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        times = take_turns(
            {"rampup": make, "replay": lambda: manager(config, REPLAYED)}, rounds=rounds
        )
        replay = times["replay"].median * plan.ramp.ramp_steps / REPLAYED
        yield {
            "case": f"plan, {policy}",
            "devices": num_devices,
            "phases": len(plan.ramp.phases),
            "ms": times["rampup"].median * 1e3,
            "spread": times["rampup"].spread,
            "peer_ms": replay * 1e3,
            "ratio": times["rampup"].median / replay,
            "peak_bytes": peak,
            "compilations": plan.num_compiled_shapes,
        }


def _make_plan(config: Any, policy: RampupMicrobatch) -> RampPlan:
    ramp = manager_ramp(config)
    plan = plan_for(
        ramp, 2 * ramp.ramp_steps, replicas=config.num_target_devices, policy=policy
    )
    plan.position(plan.total_steps - 1)
    return plan


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        measure_in_process(sys.argv[2:])
    else:
        main(scale=run)
