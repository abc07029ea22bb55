"""The last step of a ramp on an absent TPU slice, compiled: rampup, a jit per batch
size, optax and a scan.

    python benchmarks/topology.py --topology v5e:4x4

Nothing runs: memory, reductions and executables are the compiler's. It needs the extra
`tpu-compile`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import (
    FIXED,
    JIT,
    MICROBATCHING,
    MULTI_STEPS,
    Problem,
    StepFn,
    bench_optimizer,
    big_batch,
    microbatched,
    scanned,
)
from measure import BenchResult, Measurements, OnRow, ignore_row, print_result
from rich.console import Console

from rampup.contrib.lab.account import account_of
from rampup.contrib.lab.hlo import Program
from rampup.contrib.lab.topology import (
    compile_for,
    compiler_version,
    topology_devices,
    use_cpu_as_host,
)
from rampup.engine.accumulate import multi_steps
from rampup.engine.mesh import batch_sharding, make_mesh, replicated
from rampup.engine.offload import program_memory
from rampup.engine.state import TrainState
from rampup.engine.step import train_step
from rampup.lm.transformer import LanguageModel
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.plan.topology import NOT_RUN_ON, Topology

SCAN = "scan over microbatches"
SYSTEMS = (FIXED, JIT, MULTI_STEPS, MICROBATCHING, SCAN)
# A ramp of 4, 8, 12 and 16 rows of a device, in microbatches of 4.
MICROBATCH, NUM_PHASES = 4, 4
# Its model, with matrix products in bfloat16.
MODEL = LanguageModel(
    num_layers=4,
    width=128,
    mlp_dim=512,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=256,
    dtype="bfloat16",
)
TOKENS = 128


def run(
    topology: Topology, *, problem: Problem | None = None, on_row: OnRow = ignore_row
) -> BenchResult:
    """Compile the last phase of a ramp with every system, all devices on the data
    axis.
    """
    problem = problem or Problem(name="1M", model=MODEL, tokens=TOKENS, rows=MICROBATCH)
    found = Measurements(len(SYSTEMS), on_row)
    for name in SYSTEMS:
        found.add([measure(name, problem, topology)])
    return BenchResult(
        name="topology",
        title=(
            f"one optimizer step of {NUM_PHASES} microbatches on {topology.name},"
            f" {NOT_RUN_ON}"
        ),
        rows=found.rows,
        notes=[
            str(problem),
            (
                f"{compiler_version()}; AdamW after clipping; all numbers are of one"
                " device and one optimizer step."
            ),
            (
                f"executables: of a ramp of {NUM_PHASES} batch sizes. hbm_mib: of the"
                " largest of them."
            ),
            (
                f"{SCAN}: gradient accumulation as GSPMD training loops such as"
                " MaxText's have it."
            ),
        ],
    )


def measure(name: str, problem: Problem, topology: Topology) -> dict[str, Any]:
    """Return the row of one system."""
    compiled, calls, trips, executables = compile_system(name, problem, topology)
    mesh = (("data", topology.num_devices),)
    account = account_of(Program(compiled.as_text()), mesh)
    reduced = [
        row
        for row in account.collective_rows(trips)
        if row["kind"] in ("all-reduce", "reduce-scatter")
    ]
    return {
        "system": name,
        "executables": executables,
        "hbm_mib": program_memory(compiled).total / 2**20,
        "reductions": calls * sum(row["count"] for row in reduced),
        "reduced_mib": calls * sum(row["bytes"] for row in reduced) / 2**20,
        "in_loops": calls * sum(row["count"] for row in reduced if row["in_loop"]),
    }


def compile_system(
    name: str, problem: Problem, topology: Topology
) -> tuple[Any, int, tuple[int, ...], int]:
    """Compile a system; return the program, calls in a step, iterations of its open
    loops, and executables of the ramp.
    """
    mesh, k, d = (
        make_mesh(devices=topology_devices(topology)),
        NUM_PHASES,
        topology.num_devices,
    )
    rows = problem.rows * d
    plan = RampPlan(
        ramp=BatchRamp.from_schedule(
            " ".join(f"{4 * n * rows}:{(n + 1) * rows}" for n in range(k))
        ),
        splitter=BatchSplitter(data_parallel_size=d, microbatch_size=problem.rows),
        num_devices=d,
        total_steps=100,
    )
    tx: Any = bench_optimizer()
    params = jax.eval_shape(problem.model.init, jax.random.key(0))

    def place(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def batch(*leading: int, within: int = 0) -> Mapping[str, Any]:
        shapes = {
            "tokens": ((*leading, problem.tokens + 1), np.int32),
            "length": (leading, np.int32),
        }
        sharding = batch_sharding(mesh, leading=within)
        return {
            key: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for key, (shape, dtype) in shapes.items()
        }

    chip = topology.chip.name
    if name == FIXED:
        step = train_step(problem.model.loss, tx, plan, mesh)
        state = TrainState(
            step=jnp.int32(0), params=params, opt_state=jax.eval_shape(tx.init, params)
        )
        row = {"tokens": np.zeros(problem.tokens + 1, np.int32), "length": np.int32(0)}
        lowered = step.lower(place(state, replicated(mesh)), row, plan.splits[-1])
        return (
            compile_for(lowered, kind=chip),
            1,
            step.loop_trips(plan.splits[-1]),
            plan.num_compiled_shapes,
        )
    calls, executables, more = 1, 1, ()  # type: int, int, tuple[Any, ...]
    made: StepFn
    if name == MULTI_STEPS:
        tx, calls = multi_steps(tx, plan), k
        made, arguments = big_batch(problem, tx), batch(rows)
    elif name == MICROBATCHING:
        made, arguments, more = (
            microbatched(problem, tx, rows),
            batch(k * rows),
            (np.int32(k),),
        )
    elif name == SCAN:
        made, arguments, executables = scanned(problem, tx), batch(k, rows, within=1), k
    else:
        made, arguments, executables = big_batch(problem, tx), batch(k * rows), k
    state = place((params, jax.eval_shape(tx.init, params)), replicated(mesh))
    lowered = jax.jit(made, donate_argnums=0, out_shardings=replicated(mesh)).lower(
        state, arguments, *more
    )
    return compile_for(lowered, kind=chip), calls, (k,), executables


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topology", default="v5e:4x4", help="TPU slices (default v5e:4x4)"
    )
    args = parser.parse_args()
    use_cpu_as_host()
    result = run(Topology.parse(args.topology))
    print_result(result, Console(highlight=False, markup=False))


if __name__ == "__main__":
    main()
