"""The path of the data: rows per second of the loader, and bytes moved to the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np
from contenders import (
    POLICIES,
    Problem,
    main_problem,
    plan_for,
    start_rampup,
    with_policy,
)
from jax.sharding import Mesh
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    ignore_row,
    main,
    take_turns,
)
from ramp import ramp_plan, sizes

from rampup.contrib.lab.memory import program_memory
from rampup.data.batches import BatchLoader, SampleOrder
from rampup.data.sources import RowSource, TokenRows, as_source
from rampup.engine.batch import MAX_CHUNKS, MAX_WHOLE, in_microbatches, put_batch
from rampup.engine.compile import compile_program
from rampup.engine.mesh import batch_sharding, make_mesh
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp

TOKENS, VOCAB_SIZE, SEED = 128, 256, 3
BATCH = 64
NUM_ROWS, STEPS, THREADS = 100_000, 300, (1, 2, 4, 8, 16)
QUICK_NUM_ROWS, QUICK_STEPS, QUICK_THREADS = 1_000, 6, (1, 2)
# Batches read ahead, at least one for every thread.
READ_AHEAD = 16


class RowItems:
    """The rows of a token array one by one, as Grain reads them."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        start = row * self._length
        return {
            "tokens": self._tokens[start : start + self._length + 1],
            "length": np.asarray(self._length, np.int32),
        }


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Read the same number of rows through rampup and Grain, with several numbers of
    threads.
    """
    num_rows, steps, rounds = (
        (QUICK_NUM_ROWS, QUICK_STEPS, 3) if quick else (NUM_ROWS, STEPS, ROUNDS)
    )
    threads = QUICK_THREADS if quick else THREADS
    tokens = (
        np.random.default_rng(0)
        .integers(VOCAB_SIZE, size=num_rows * TOKENS + 1)
        .astype(np.uint8)
    )
    items = RowItems(tokens, TOKENS)
    stored = [items[row] for row in range(len(items))]
    sources = {
        "rows in memory": (as_source(stored), stored),
        "tokens cut into rows": (
            TokenRows(
                [tokens], ["random"], sequence_length=TOKENS, vocab_size=VOCAB_SIZE
            ),
            items,
        ),
    }
    found = Measurements(len(sources) * 2 * len(threads) * 2, on_row)
    for name, (source, grain_items) in sources.items():
        for seed in (None, SEED):
            for number in threads:
                rows = compare(
                    source,
                    grain_items,
                    seed=seed,
                    threads=number,
                    steps=steps,
                    rounds=rounds,
                )
                found.add({"source": name, **row} for row in rows)
    return BenchResult(
        name="data",
        title=(
            "rows per second of the loader, compared with Grain's own .batch() on the"
            " same source"
        ),
        rows=found.rows,
        notes=[
            (
                f"{num_rows:,} rows of {TOKENS} tokens; {steps} steps of {BATCH} rows."
                f" The ramp has as many rows in batches of {BATCH // 4}, {BATCH // 2}"
                f" and {BATCH}. Medians of {rounds} rounds in turn."
            ),
            (
                "rampup reads all rows of a step at once; Grain's batch is fixed and"
                f" reads row by row. Both read {READ_AHEAD} batches ahead. Nothing is"
                " put on a device. Threads share the cores and Python's lock."
            ),
        ],
    )


def compare(
    source: RowSource,
    items: Any,
    *,
    seed: int | None,
    threads: int,
    steps: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Return a row for rampup's fixed batch and one for its ramp, each compared with
    Grain's fixed batch.
    """
    readers: dict[str, Callable[[], int]] = {
        f"fixed batch of {BATCH}": lambda: read_rampup(
            source, fixed_plan(steps), seed, threads
        ),
        "ramp": lambda: read_rampup(source, three_phase_plan(steps), seed, threads),
        "Grain": lambda: read_grain(items, steps, seed, threads),
    }
    assert {read() for read in readers.values()} == {steps * BATCH}  # also the warm-up
    times = take_turns(readers, rounds=rounds, warm_up=0)
    rates = {name: steps * BATCH / seconds.median for name, seconds in times.items()}
    return [
        {
            "ours": name,
            "shuffled": seed is not None,
            "threads": threads,
            "rows": steps * BATCH,
            "rows_per_s": rates[name],
            "grain_rows_per_s": rates["Grain"],
            "ratio": rates[name] / rates["Grain"],
            "spread": times[name].spread,
        }
        for name in readers
        if name != "Grain"
    ]


def fixed_plan(steps: int) -> RampPlan:
    """Return the plan of a constant batch."""
    return plan_for(BatchRamp.constant(BATCH), steps)


def three_phase_plan(steps: int) -> RampPlan:
    """Return a plan of three batch sizes with as many rows as `steps` of the largest, a
    third in each phase.
    """
    third = steps * BATCH // 3
    assert third % BATCH == 0
    ramp = BatchRamp.piecewise(
        [(0, BATCH // 4), (third, BATCH // 2), (2 * third, BATCH)]
    )
    return plan_for(ramp, ramp.ramp_steps + third // BATCH)


def read_rampup(
    source: RowSource, plan: RampPlan, seed: int | None, threads: int
) -> int:
    """Read all batches of a plan and return their number of rows."""
    mesh = make_mesh(devices=jax.devices()[:1])
    loader = BatchLoader(
        source=source, plan=plan, mesh=mesh, order=SampleOrder(len(source), seed=seed)
    )
    steps = grain.MapDataset.range(plan.total_steps).map(loader.read_step)
    return sum(
        _num_rows(step.rows) for step in steps.to_iter_dataset(_options(threads))
    )


def read_grain(items: Any, steps: int, seed: int | None, threads: int) -> int:
    """Read as many fixed batches through Grain alone and return their number of
    rows.
    """
    dataset = grain.MapDataset.source(items)
    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    batches = dataset.repeat().batch(BATCH)[:steps].to_iter_dataset(_options(threads))
    return sum(map(_num_rows, batches))


def _options(threads: int) -> grain.ReadOptions:
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=READ_AHEAD)


def _num_rows(batch: Mapping[str, np.ndarray]) -> int:
    return len(batch["tokens"])


def run_buffer(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Put a batch of every phase on the device in several ways, and compile the
    programs that take them.
    """
    device = jax.devices()[0]
    problem, mesh = (
        main_problem(device, quick=quick),
        make_mesh(devices=jax.devices()[:1]),
    )
    plan = ramp_plan(problem, *sizes(device, quick=quick))
    policies = list(POLICIES.values())[: 1 if quick else None]
    found = Measurements(len(policies) * len(plan.ramp.phases), on_row)
    for policy in policies:
        buffer_rows(
            problem,
            with_policy(plan, policy),
            mesh,
            found,
            rounds=3 if quick else ROUNDS,
        )
    return BenchResult(
        name="buffer",
        title=(
            "bytes moved to the device by a step of each phase, and the memory of its"
            " program"
        ),
        rows=found.rows,
        notes=[
            str(problem),
            (
                f"One {device.device_kind or device.platform} device; medians of"
                f" {ROUNDS} transfers, in turn, each waited for."
            ),
            (
                "chunks: those with the step's rows. padded: a buffer for the largest"
                f" batch. ours: padded if that has at most {MAX_WHOLE:,} numbers, else"
                " chunks. rows: the rows alone, for a step compiled for each size."
            ),
            (
                "program_bytes is the memory of the phase's program on the device:"
                " state, buffer and all temporary values."
            ),
        ],
    )


def buffer_rows(
    problem: Problem, plan: RampPlan, mesh: Mesh, found: Measurements, *, rounds: int
) -> None:
    """Add a row for each phase of a plan."""
    source = problem.source(4 * plan.ramp.sizes[-1])
    loader = BatchLoader(
        source=source, plan=plan, mesh=mesh, order=SampleOrder(len(source), seed=None)
    )
    (step, state), row = (
        start_rampup(problem, plan, mesh),
        jax.tree.map(lambda x: x[0], source.arrays),
    )
    programs: dict[int, int] = {}
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        if split.microbatch_size not in programs:
            programs[split.microbatch_size] = program_memory(
                compile_program(step.lower(state, row, split))
            ).total
        moves = transfers(
            in_microbatches(
                loader.read_step(phase.start_step).rows, split.num_microbatches
            ),
            plan.position(phase.start_step),
            plan,
            mesh,
        )
        times = take_turns(moves, rounds=rounds)
        found.add(
            [
                {
                    "rampup_microbatch": plan.splitter.rampup_microbatch,
                    "phase": phase.index,
                    "batch": split.global_batch_size,
                    **{
                        f"{name}_bytes": _bytes_per_device(move())
                        for name, move in moves.items()
                    },
                    **{f"{name}_ms": times[name].median * 1e3 for name in moves},
                    "spread": times["ours"].spread,
                    "program_bytes": programs[split.microbatch_size],
                }
            ]
        )


def _bytes_per_device(tree: Any) -> int:
    """Return the bytes per device of sharded arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def transfers(
    batch_nR: Any, position: PlanPosition, plan: RampPlan, mesh: Mesh
) -> dict[str, Callable[[], Any]]:
    """Return ways to put a step's rows on the devices: ours, which is one of the next
    two, and the rows alone.
    """
    most, sharding = (
        plan.max_microbatches[position.split.microbatch_size],
        batch_sharding(mesh, leading=1),
    )

    def put(chunk_size: int | None) -> Any:
        return jax.block_until_ready(
            put_batch(batch_nR, position, plan, mesh, chunk_size=chunk_size).chunks
        )

    return {
        "ours": lambda: put(None),
        "chunks": lambda: put(-(-most // MAX_CHUNKS)),
        "padded": lambda: put(most),
        "rows": lambda: jax.block_until_ready(jax.device_put(batch_nR, sharding)),
    }


if __name__ == "__main__":
    main(data=run, buffer=run_buffer)
