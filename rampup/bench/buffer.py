"""What a step of each phase moves to the devices, and what its program needs there: ours beside a padded buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.bench.contenders import our_state, with_policy
from rampup.bench.measure import ROUNDS, take_turns
from rampup.bench.problem import Problem, bench_optimizer, main_problem
from rampup.bench.ramp import ramp_plan, sizes
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.split import RampupMicrobatch
from rampup.run.compile import compile_program
from rampup.run.data.batches import BufferLayout, SampleOrder, StepDataset, layout_of, put_chunks
from rampup.run.mesh import batch_sharding, make_mesh
from rampup.run.offload import bytes_per_device, program_memory
from rampup.run.step import train_step

POLICIES: tuple[RampupMicrobatch, ...] = ("fixed", "per_phase", "auto")


def run(*, quick: bool = False) -> BenchResult:
    """Put a batch of every phase on the device in three ways, and compile the programs that take them.

    Args:
        quick: a tiny model and few rounds.
    """
    device = jax.devices()[0]
    problem, mesh = main_problem(device, quick=quick), make_mesh(devices=jax.devices()[:1])
    plan = ramp_plan(problem, *sizes(device, quick=quick))
    rows = [
        row
        for policy in POLICIES[: 1 if quick else None]
        for row in phase_rows(problem, with_policy(plan, policy), mesh, rounds=3 if quick else ROUNDS)
    ]
    return BenchResult(
        name="buffer",
        title="bytes moved to the device by a step of each phase, and the memory of its program",
        rows=rows,
        notes=[
            str(problem),
            f"one {device.device_kind or device.platform} device, medians of {ROUNDS} transfers, in turn, each waited for",
            "ours are the chunks that hold the rows of the step; padded is a buffer for the largest batch, which a step of one "
            "compiled shape would otherwise move in every phase; rows is the rows alone, as a step compiled for each size does",
            "program_bytes is what the program of the phase takes of the device: state, buffer and everything in between",
        ],
    )


def phase_rows(problem: Problem, plan: RampPlan, mesh: Mesh, *, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each phase of a plan.

    Args:
        problem: the model, and what a row is.
        plan: the ramp.
        mesh: one device.
        rounds: times that each transfer is timed.
    """
    source = problem.source(4 * plan.ramp.sizes[-1])
    dataset = StepDataset(source, plan, SampleOrder(len(source), seed=None), mesh)
    step = train_step(problem.model.loss, bench_optimizer(), plan, mesh)
    state, one = our_state(problem, step.tx, mesh), jax.tree.map(lambda x: x[0], source.read(np.arange(1)))
    programs: dict[BufferLayout, int] = {}
    found = []
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        layout = layout_of(plan, split)
        if layout not in programs:
            programs[layout] = program_memory(compile_program(step.lower(state, one, split))).total
        moved = transfers(dataset.split_rows(dataset[phase.start_step], split), layout, mesh)
        times = take_turns({name: functools.partial(_finish, move) for name, move in moved.items()}, rounds=rounds)
        found.append(
            {
                "rampup_microbatch": plan.splitter.rampup_microbatch,
                "phase": phase.index,
                "batch": split.global_batch_size,
                **{f"{name}_bytes": bytes_per_device(move()) for name, move in moved.items()},
                **{f"{name}_ms": times[name].median * 1e3 for name in moved},
                "spread": times["ours"].spread,
                "program_bytes": programs[layout],
            }
        )
    return found


def transfers(batch_nR: Any, layout: BufferLayout, mesh: Mesh) -> dict[str, Callable[[], Any]]:
    """Return three ways to put a step's rows on the devices: ours, padded to the whole buffer, and the rows alone.

    Args:
        batch_nR: the rows, arrays (n, R, ...).
        layout: the buffer.
        mesh: the devices.
    """
    whole = layout.num_chunks * layout.chunk_size
    padded = jax.tree.map(lambda x: np.zeros((whole, *x.shape[1:]), x.dtype), batch_nR)
    sharding = batch_sharding(mesh, leading=1)
    return {
        "ours": lambda: put_chunks(batch_nR, layout, mesh),
        "padded": lambda: jax.device_put(padded, sharding),
        "rows": lambda: jax.device_put(batch_nR, sharding),
    }


def _finish(move: Callable[[], Any]) -> None:
    jax.block_until_ready(move())
