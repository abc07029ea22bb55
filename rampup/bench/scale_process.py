"""One process of a run over several, for `rampup bench scale`: started as a program, its result a line of JSON.

Arguments: how many devices in all, processes, this one's number, the coordinator's address, rounds, and `quick` or `full`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rampup.bench.contenders import big_batch, jitted, new_state, our_state
from rampup.bench.measure import take_turns
from rampup.bench.problem import QUICK, SMALL, Problem, bench_optimizer
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.data.batches import step_batches
from rampup.run.distributed import join
from rampup.run.mesh import batch_sharding, make_mesh, process_rows
from rampup.run.step import train_step

MICROBATCHES = 4


def main(arguments: list[str]) -> None:
    """Join the others, time the step, and print what was found if this is the first process."""
    num_devices, num_processes, number, rounds = (int(arguments[n]) for n in (0, 1, 2, 4))
    if num_devices % num_processes:
        raise SystemExit(f"{num_devices} devices cannot be shared by {num_processes} processes")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices // num_processes)
    if num_processes > 1:
        join(coordinator_address=arguments[3], num_processes=num_processes, process_id=number)
    problem = QUICK if arguments[5] == "quick" else replace(SMALL, rows=1)
    found = measure(problem, rounds)
    if number == 0:
        print(json.dumps(found), flush=True)


def measure(problem: Problem, rounds: int) -> dict[str, Any]:
    """Time one optimizer step of ours and of a hand-written big batch on all devices of all processes, in turn.

    Args:
        problem: the model, and the rows of a microbatch on one device.
        rounds: steps that each is timed for.

    Returns:
        The seconds of each, the losses of the steps of ours, how many programs were compiled for them, and how many rows of a
        step this process reads.
    """
    mesh, tx = make_mesh(), bench_optimizer()
    rows = mesh.size * problem.rows
    plan = RampPlan(
        ramp=BatchRamp.constant(MICROBATCHES * rows),
        splitter=BatchSplitter(data_parallel_size=mesh.size, microbatch_size=problem.rows),
        num_devices=mesh.size,
        total_steps=1,
    )
    source = problem.source(plan.consumed_samples)
    (batch,) = step_batches(source, plan, mesh)
    step, state = train_step(problem.model.loss, tx, plan, mesh), our_state(problem, tx, mesh)
    losses: list[float] = []

    def ours() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))

    plain, plain_state = jitted(big_batch(problem, tx), mesh), new_state(problem, tx, mesh)
    whole = {name: _global(x, mesh) for name, x in source.arrays.items()}

    def theirs() -> None:
        nonlocal plain_state
        plain_state, loss = plain(plain_state, whole)
        loss.block_until_ready()

    times = take_turns({"ours": ours, "theirs": theirs}, rounds=rounds)
    return {
        "seconds": times["ours"].all,
        "peer_seconds": times["theirs"].all,
        "losses": losses,
        "compilations": step.num_compilations,
        "rows": MICROBATCHES * len(process_rows(mesh, rows)),
    }


def _global(x: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.make_array_from_callback(x.shape, batch_sharding(mesh), lambda index: x[index])


if __name__ == "__main__":
    main(sys.argv[1:])
