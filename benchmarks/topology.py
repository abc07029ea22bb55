"""The last step of a ramp on an absent TPU slice, compiled: rampup, a jit per batch
size, optax and a scan. With --hours, the hours of whole runs on paper.

    python benchmarks/topology.py --topology v5e:4x4
    python benchmarks/topology.py --hours

Nothing runs: memory, reductions and executables are the compiler's. The first needs the
extra `tpu-compile`.
"""

from __future__ import annotations

import argparse
import math
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

from rampup.contrib.lab.collectives import collective_rows, collectives_of
from rampup.contrib.lab.design_model import (
    PUBLISHED_GROWTH,
    DesignModel,
    NoiseCurve,
    StepTimes,
)
from rampup.contrib.lab.hlo import Program
from rampup.contrib.lab.memory import program_memory
from rampup.contrib.lab.scaling_laws import ADVISED, OVERHEADS, suggest_batch
from rampup.contrib.lab.topology import (
    compile_for,
    compiler_version,
    topology_devices,
    use_cpu_as_host,
)
from rampup.engine.mesh import batch_sharding, make_mesh, replicated
from rampup.engine.multi_steps import multi_steps
from rampup.engine.state import TrainState
from rampup.engine.step import train_step
from rampup.lm.transformer import LanguageModel
from rampup.plan.describe import SECONDS_PER_HOUR
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

# Whole runs on paper: the presets by their parameters, with samples so short that many
# chips can share a small batch.
PRESETS = {"1B": "llama_1b_v5e", "8B": "llama_8b_v5p"}
SHORT, TOKENS_PER_PARAMETER = 1024, 20
COMPILED_FOR, NUM_CHIPS = "v5p:4x4x4", (64, 256, 1024)
CHIP_ROWS = (1, 2, 4, 8, 16, 32)
# Of a step with one sample on each of 64 chips, in seconds, by a roofline estimate of
# its compiled program at published peaks: computing or memory, whichever is longer,
# collectives that the chip waits for, and collectives that overlap.
ONE_SAMPLE = {
    "1B": (0.020857259483189543, 0.009838598636250001, 0.0023819059199999995),
    "8B": (0.11956664947339433, 0.060401574662499985, 0.013503856639999999),
}


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
    collectives = collectives_of(Program(compiled.as_text()), mesh)
    reduced = [
        row
        for row in collective_rows(collectives, trips)
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
    """Compile a system; return the program, calls in a step, iterations of its loops,
    and executables of the ramp.
    """
    mesh, k, d = (
        make_mesh(devices=topology_devices(topology)),
        NUM_PHASES,
        topology.num_devices,
    )
    rows, layers = problem.rows * d, problem.model.num_layers
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

    if name == FIXED:
        step = train_step(problem.model.loss, tx, plan, mesh)
        state = TrainState(
            step=jnp.int32(0), params=params, opt_state=jax.eval_shape(tx.init, params)
        )
        row = {"tokens": np.zeros(problem.tokens + 1, np.int32), "length": np.int32(0)}
        lowered = step.lower(place(state, replicated(mesh)), row, plan.splits[-1])
        return (
            compile_for(lowered),
            1,
            (*plan.loop_trips(plan.splits[-1]), layers),
            plan.num_compiled_shapes,
        )
    calls, executables, more = 1, 1, ()  # type: int, int, tuple[Any, ...]
    trips: tuple[int, ...] = (k, layers)
    made: StepFn
    if name == MULTI_STEPS:
        tx, calls = multi_steps(tx, plan), k
        made, arguments, trips = big_batch(problem, tx), batch(rows), (layers,)
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
        trips = (layers,)
    state = place((params, jax.eval_shape(tx.init, params)), replicated(mesh))
    lowered = jax.jit(made, donate_argnums=0, out_shardings=replicated(mesh)).lower(
        state, arguments, *more
    )
    return compile_for(lowered), calls, trips, executables


def hours() -> BenchResult:
    """Return the hours of constant batches and of the fastest ramp to the loss that a
    very small batch has after 20N tokens.
    """
    rows = [
        hours_row(params, chips, step_seconds(params))
        for params in PRESETS
        for chips in NUM_CHIPS
    ]
    return BenchResult(
        name="hours",
        title=f"whole runs on paper, their steps {NOT_RUN_ON}",
        rows=rows,
        notes=[
            (
                f"libtpu 0.0.50.1; {COMPILED_FOR}; {', '.join(PRESETS.values())}"
                f" with samples of {SHORT:,} tokens."
            ),
            (
                "Steps are roofline estimates at published peaks. Compiled: one sample"
                " for each of 64 chips. More samples multiply the computation but not"
                " the exposed exchange of weights. On more chips, both take as long."
            ),
            (
                "Batches in tokens, and hours. small: a sample for each chip. fastest:"
                f" of all constant batches. large: that of +{ADVISED} tokens in `rampup"
                " suggest`, the geometric mean of its range."
            ),
            (
                f"The noise scale is {1 / OVERHEADS[ADVISED]:g} times the large batch"
                f" at the end, and grows with the power {PUBLISHED_GROWTH} of the"
                " progress. saved: from the hours of the fastest, over the range."
            ),
        ],
    )


def step_seconds(params: str) -> dict[int, float]:
    """Return the estimated seconds of a step by the samples of a chip, from the parts
    of that of one sample.
    """
    busy, exposed, overlapped = ONE_SAMPLE[params]
    return {rows: max(rows * busy, overlapped) + exposed for rows in CHIP_ROWS}


def hours_row(params: str, chips: int, seconds: Mapping[int, float]) -> dict[str, Any]:
    """Return the row of a model on a number of chips, from the seconds of a step by the
    samples of a chip.
    """
    tokens = TOKENS_PER_PARAMETER * int(params.removesuffix("B")) * 10**9
    low, high = suggest_batch(tokens, params)["critical_batch_tokens"]
    times = StepTimes.fit({chips * rows: time for rows, time in seconds.items()})
    sizes, samples = [chips * rows for rows in seconds], tokens / SHORT
    found, saved = dict[str, Any](), list[float]()
    for advised in (
        low / SHORT,
        high / SHORT,
        math.sqrt(low * high) / SHORT,
    ):  # the cells are of the last one
        noise = advised / OVERHEADS[ADVISED]
        first = noise * samples**-PUBLISHED_GROWTH
        model = DesignModel(
            noise=NoiseCurve(
                knots=((1.0, first), (samples, noise)), growth=PUBLISHED_GROWTH
            ),
            times=times,
        )
        ramp = model.best_schedule(sizes, progress=samples)
        spent = {
            size: model.run(((0, size),), progress=samples).seconds / SECONDS_PER_HOUR
            for size in sizes
        }
        fastest, large = (
            min(spent, key=spent.__getitem__),
            min(sizes, key=lambda size: abs(math.log(size / advised))),
        )
        constants = {"small": sizes[0], "large": large, "fastest": fastest}
        found = {
            name: f"{size * SHORT:,}: {spent[size]:.3g}"
            for name, size in constants.items()
        }
        ramp_hours = model.run(ramp, progress=samples).seconds / SECONDS_PER_HOUR
        found["ramp"] = (
            f"{ramp[0][1] * SHORT:,} to {ramp[-1][1] * SHORT:,}: {ramp_hours:.3g}"
        )
        saved.append(1 - ramp_hours / spent[fastest])
    return {
        "model": params,
        "chips": chips,
        **found,
        "saved": f"{min(saved):.1%} to {max(saved):.1%}",
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topology", default="v5e:4x4", help="TPU slices (default v5e:4x4)"
    )
    parser.add_argument(
        "--hours",
        action="store_true",
        help="the hours of whole runs, from steps compiled for " + COMPILED_FOR,
    )
    args = parser.parse_args()
    use_cpu_as_host()
    result = hours() if args.hours else run(Topology.parse(args.topology))
    print_result(result, Console(highlight=False, markup=False))


if __name__ == "__main__":
    main()
