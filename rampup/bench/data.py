"""Rows per second of our loader beside Grain's own fixed batches, from the same source with the same threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np

from rampup.bench.measure import ROUNDS, Seconds, take_turns
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.data.batches import SampleOrder, StepDataset
from rampup.run.data.sources import RowSource, TokenRows, as_source
from rampup.run.mesh import make_mesh

TOKENS, VOCAB_SIZE, SEED = 128, 256, 3
BATCH = 64
NUM_ROWS, STEPS, THREADS = 100_000, 300, (1, 2, 4, 8, 16)
QUICK_NUM_ROWS, QUICK_STEPS, QUICK_THREADS = 1_000, 6, (1, 2)
# Batches read ahead, at least one for every thread.
READ_AHEAD = 16


class RowItems:
    """The rows of a token array one by one, as Grain reads them.

    Args:
        tokens: the array that `TokenRows` cuts too.
        length: tokens per row.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        start = row * self._length
        return {"tokens": self._tokens[start : start + self._length + 1], "length": np.asarray(self._length, np.int32)}


def run(*, quick: bool = False) -> BenchResult:
    """Read the same number of rows through both, with several numbers of threads.

    Args:
        quick: few rows and few rounds.
    """
    num_rows, steps, rounds = (QUICK_NUM_ROWS, QUICK_STEPS, 3) if quick else (NUM_ROWS, STEPS, ROUNDS)
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=num_rows * TOKENS + 1).astype(np.uint8)
    items = RowItems(tokens, TOKENS)
    stored = [items[row] for row in range(len(items))]
    sources = {
        "rows in memory": (as_source(stored), stored),
        "tokens cut into rows": (TokenRows([tokens], ["random"], sequence_length=TOKENS, vocab_size=VOCAB_SIZE), items),
    }
    rows = []
    for name, (ours, theirs) in sources.items():
        for seed in (None, SEED):
            for threads in QUICK_THREADS if quick else THREADS:
                rows += compare(name, ours, theirs, seed=seed, threads=threads, steps=steps, rounds=rounds)
    return BenchResult(
        name="data",
        title="rows per second of our loader, beside Grain's own .batch() on the same source",
        rows=rows,
        notes=[
            f"{num_rows:,} rows of {TOKENS} tokens; {steps} steps of {BATCH} rows, read to the end and thrown away; the ramp "
            f"has as many rows in batches of {BATCH // 4}, {BATCH // 2} and {BATCH}. Medians of {rounds} rounds in turn",
            "ours reads the rows of a step at once, in the order of the plan; Grain's batch is fixed, and reads row by row",
            f"both read {READ_AHEAD} batches ahead; nothing is put on a device. Threads share the cores and Python's lock",
        ],
    )


def compare(
    name: str, ours: RowSource, theirs: Any, *, seed: int | None, threads: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for our fixed batch and one for our ramp, each beside Grain's fixed batch.

    Args:
        name: of the source.
        ours, theirs: the same rows, for either.
        seed: shuffles; None keeps the order.
        threads: that read.
        steps: of the fixed batch.
        rounds: that each is timed.
    """
    counted: dict[str, int] = {}
    readers: dict[str, Callable[[], int]] = {
        f"fixed batch of {BATCH}": lambda: read_ours(ours, fixed_plan(steps), seed, threads),
        "ramp": lambda: read_ours(ours, ramp_plan(steps), seed, threads),
        "Grain": lambda: read_grain(theirs, steps, seed, threads),
    }
    times = take_turns({what: _counting(what, read, counted) for what, read in readers.items()}, rounds=rounds)
    assert len(set(counted.values())) == 1, counted
    peer = counted["Grain"] / times["Grain"].median
    return [
        _row(name, what, seed, threads, counted[what], times[what]) | {"grain_rows_per_s": peer, "ratio": ours_rate / peer}
        for what in times
        if what != "Grain" and (ours_rate := counted[what] / times[what].median)
    ]


def _row(name: str, what: str, seed: int | None, threads: int, num_rows: int, seconds: Seconds) -> dict[str, Any]:
    return {
        "source": name,
        "ours": what,
        "shuffled": seed is not None,
        "threads": threads,
        "rows": num_rows,
        "rows_per_s": num_rows / seconds.median,
        "grain_rows_per_s": 0.0,
        "ratio": 0.0,
        "spread": seconds.spread,
    }


def _counting(what: str, read: Callable[[], int], counted: dict[str, int]) -> Callable[[], None]:
    return lambda: counted.update({what: read()})


def fixed_plan(steps: int) -> RampPlan:
    """Return the plan of a constant batch."""
    return _plan(BatchRamp.constant(BATCH), steps)


def ramp_plan(steps: int) -> RampPlan:
    """Return a plan of three batch sizes that consumes as many rows as `steps` of the largest, a third in each phase."""
    third = steps * BATCH // 3
    assert third % BATCH == 0
    ramp = BatchRamp.piecewise([(0, BATCH // 4), (third, BATCH // 2), (2 * third, BATCH)])
    return _plan(ramp, ramp.ramp_steps + third // BATCH)


def _plan(ramp: BatchRamp, steps: int) -> RampPlan:
    return RampPlan(ramp=ramp, splitter=BatchSplitter(data_parallel_size=1), num_devices=1, total_steps=steps)


def read_ours(source: RowSource, plan: RampPlan, seed: int | None, threads: int) -> int:
    """Read all batches of a plan through our dataset and return how many rows they had."""
    mesh = make_mesh(devices=jax.devices()[:1])
    dataset = StepDataset(source, plan, SampleOrder(len(source), seed=seed), mesh)
    return sum(_num_rows(step.rows) for step in dataset[:].to_iter_dataset(_options(threads)))


def read_grain(items: Any, steps: int, seed: int | None, threads: int) -> int:
    """Read as many fixed batches through Grain alone and return how many rows they had."""
    dataset = grain.MapDataset.source(items)
    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    batches = dataset.repeat().batch(BATCH)[:steps].to_iter_dataset(_options(threads))
    return sum(map(_num_rows, batches))


def _options(threads: int) -> grain.ReadOptions:
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=READ_AHEAD)


def _num_rows(batch: Mapping[str, np.ndarray]) -> int:
    return len(batch["tokens"])
