"""Batches by step number: element i of the dataset is the batch of optimizer step i.

So prefetching crosses steps, resuming is an index, and the rows of a step do not depend on the number of hosts.
Shape suffixes: n microbatches of this step, K microbatches of a chunk, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rampup.errors import DataError
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit
from rampup.run.data.buffer import BufferLayout, buffer_layout
from rampup.run.data.loading import Loading
from rampup.run.data.sources import RowSource, as_source, read_rows
from rampup.run.mesh import batch_sharding, process_rows

AHEAD_ON_DEVICE = 2


class Batch(NamedTuple):
    """One optimizer step's rows on the devices.

    Attributes:
        position: step, samples before it, phase and split.
        chunks: the filled chunks of the buffer; arrays (K, R, ...), rows cut over the data and fsdp axes.
        layout: the buffer's shape.
    """

    position: PlanPosition
    chunks: tuple[Any, ...]
    layout: BufferLayout

    @property
    def num_microbatches(self) -> int:
        """Microbatches that hold rows."""
        return self.position.split.num_microbatches


class SampleOrder:
    """Which row each sample of the run is, over all epochs.

    Args:
        num_rows: rows of the source.
        seed: shuffles every epoch anew; None keeps the source's order.
        num_epochs: passes over the rows; None = as many as it takes.

    Raises:
        DataError: no rows, or more than can be shuffled.

    Example:
        >>> SampleOrder(4, seed=None).rows(range(2, 7)).tolist()
        [2, 3, 0, 1, 2]
    """

    def __init__(self, num_rows: int, *, seed: int | None, num_epochs: int | None = None) -> None:
        if num_rows < 1:
            raise DataError("the data has no rows")
        if seed is not None and num_rows >= 2**32:
            raise DataError(f"{num_rows:,} rows are more than the 2**32 that can be shuffled; set enable_data_shuffling=false")
        self.num_samples = None if num_epochs is None else num_rows * num_epochs
        self._num_rows = num_rows
        # Beyond its length, a shuffled range goes on with the order of the next epoch.
        self._shuffled = None if seed is None else grain.MapDataset.range(num_rows).shuffle(seed=seed)

    def rows(self, samples: Iterable[int]) -> np.ndarray:
        """Return the row of each sample."""
        if self._shuffled is None:
            return np.fromiter(samples, np.int64) % self._num_rows
        return np.fromiter((self._shuffled[sample] for sample in samples), np.int64)

    def check(self, consumed_samples: int) -> None:
        """Refuse a run that the data cannot feed.

        Raises:
            DataError: with the number of epochs that would be enough.
        """
        if self.num_samples is not None and consumed_samples > self.num_samples:
            epochs = self.num_samples // self._num_rows
            needed = -(-consumed_samples // self._num_rows)
            raise DataError(
                f"the run consumes {consumed_samples:,} samples, but num_epoch={epochs} of {self._num_rows:,} rows are "
                f"{self.num_samples:,}; set num_epoch={needed} or -1, or fewer steps",
                key="num_epoch",
                nearest=(needed, -1),
            )


class StepDataset(grain.MapDataset[Any]):
    """A Grain dataset whose element i is this process's part of the batch of optimizer step i, arrays (n, rows, ...).

    Args:
        source: the rows.
        plan: which samples each step consumes, and how they are cut.
        order: which row each sample is.
        mesh: which rows of a microbatch this process holds.
        loading: which rows it reads, if not just those.
    """

    def __init__(
        self, source: RowSource, plan: RampPlan, order: SampleOrder, mesh: Mesh, loading: Loading | None = None
    ) -> None:
        super().__init__()
        self._source, self._plan, self._order = source, plan, order
        sizes = {split.microbatch_size * split.data_parallel_size for split in plan.splits}
        self._local_rows = {rows: (loading or Loading()).rows_to_read(mesh, rows) for rows in sizes}

    def __len__(self) -> int:
        return self._plan.total_steps

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self.read(self._plan.position(index))

    def read(self, position: PlanPosition) -> Any:
        """Return this process's part of a batch, cut as the position says."""
        local = self._local_rows[position.split.microbatch_size * position.split.data_parallel_size]
        rows = self._order.rows(local_samples(position, local).tolist())
        batch = read_rows(self._source, rows)
        return jax.tree.map(lambda x: x.reshape(position.split.num_microbatches, len(local), *x.shape[1:]), batch)


def local_samples(position: PlanPosition, local_rows: np.ndarray) -> np.ndarray:
    """Return the numbers of the samples that fill the given rows of every microbatch of a step, microbatch by microbatch.

    Microbatch i of a step that starts at sample s holds samples s + i*d*b to s + (i+1)*d*b.
    """
    split = position.split
    starts = position.consumed_samples + split.data_parallel_size * split.microbatch_size * np.arange(split.num_microbatches)
    return (starts[:, None] + local_rows[None, :]).ravel()


def step_batches(
    source: Any,
    plan: RampPlan,
    mesh: Mesh,
    *,
    start: int | PlanPosition = 0,
    stop: int | None = None,
    seed: int | None = None,
    num_epochs: int | None = None,
    num_threads: int = 2,
    read_ahead: int = 4,
    chunk_size: int | None = None,
    split_for: Callable[[PlanPosition], BatchSplit] | None = None,
    loading: Loading | None = None,
    **renamed: Any,
) -> Iterator[Batch]:
    """Yield the batch of every optimizer step, read and put on the devices ahead of use.

    Args:
        source: a RowSource, or anything that can be indexed: a list of rows, a Grain data source or MapDataset.
        plan: the plan.
        mesh: the devices.
        start: the first step, or a position of the plan.
        stop: the step to stop before; None = the plan's end.
        seed: shuffles every epoch anew; None keeps the source's order.
        num_epochs: passes over the source; None = as many as it takes.
        num_threads: threads that read.
        read_ahead: steps read ahead of use.
        chunk_size: microbatches per chunk; None = as few as fit the largest batch into 8 chunks. The engine `multi_steps`
            needs 1.
        split_for: how to split the batch of a position, if not as planned: `TrainStep.split_for`, so that a phase whose
            program is not compiled yet continues with the shape of the phase before.
        loading: which processes read; None = each its own rows.
        renamed: `one_by_one=True` (now `chunk_size=1`) and `choose_split` (now `split_for`), deprecated.

    Raises:
        DataError: the source is too small for the run, or a row cannot be read.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.run.mesh import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=3)
        >>> [np.concatenate(b.chunks)[: b.num_microbatches].ravel().tolist() for b in step_batches(range(6), plan, mesh)]
        [[0, 1], [2, 3], [4, 5, 0, 1]]
    """
    chunk_size, split_for = _renamed_options(chunk_size, split_for, **renamed)
    rows = as_source(source)
    order = SampleOrder(len(rows), seed=seed, num_epochs=num_epochs)
    first = start.step if isinstance(start, PlanPosition) else start
    last = plan.total_steps if stop is None else stop
    order.check(plan.ramp.samples_before(last))
    if first >= last:
        return
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=read_ahead)
    loading = loading or Loading()
    dataset = StepDataset(rows, plan, order, mesh, loading)
    steps = iter(dataset[first:last].to_iter_dataset(options))

    def put(step: int) -> Batch:
        position, batch_nR = plan.position(step), next(steps)
        split = split_for(position) if split_for else position.split
        if split != position.split:
            position = replace(position, split=split)
            batch_nR = dataset.read(position)
        layout = layout_of(plan, split, chunk_size=chunk_size)
        return Batch(position, put_chunks(batch_nR, layout, mesh, loading), layout)

    waiting: deque[Batch] = deque()
    for step in range(first, last):
        try:
            waiting.append(put(step))
        except DataError:
            yield from waiting
            raise
        if len(waiting) > AHEAD_ON_DEVICE:
            yield waiting.popleft()
    yield from waiting


def microbatches(source: Any, plan: RampPlan, mesh: Mesh, *, start: int | PlanPosition = 0, **options: Any) -> Iterator[Any]:
    """Yield microbatch after microbatch, for a training step of your own: one shape for the whole of a `fixed` ramp.

    Use it with `multi_steps`: the optimizer then steps when a global batch is complete.

    Args:
        source: see `step_batches`.
        plan: the plan.
        mesh: the devices; rows are cut over its data and fsdp axes.
        start: the first optimizer step, or a position of the plan.
        options: further arguments of `step_batches`.

    Yields:
        Arrays (R, ...), R = data_parallel_size * microbatch_size rows.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.run.mesh import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=3)
        >>> [batch.tolist() for batch in microbatches(range(8), plan, mesh)]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    for batch in step_batches(source, plan, mesh, start=start, chunk_size=1, **options):
        for chunk in batch.chunks:
            yield jax.tree.map(lambda x: x[0], chunk)


def _renamed_options(
    chunk_size: int | None,
    split_for: Callable[[PlanPosition], BatchSplit] | None,
    *,
    one_by_one: bool = False,
    choose_split: Callable[[PlanPosition], BatchSplit] | None = None,
) -> tuple[int | None, Callable[[PlanPosition], BatchSplit] | None]:
    """Return `chunk_size` and `split_for`, also if they were given under their old names."""
    if one_by_one:
        warnings.warn("one_by_one=True is now chunk_size=1", DeprecationWarning, stacklevel=3)
    if choose_split is not None:
        warnings.warn("choose_split is now split_for", DeprecationWarning, stacklevel=3)
    return 1 if one_by_one else chunk_size, split_for or choose_split


def layout_of(plan: RampPlan, split: BatchSplit, *, chunk_size: int | None = None) -> BufferLayout:
    """Return the buffer's shape for a phase."""
    return buffer_layout(split, plan.max_microbatches[split.microbatch_size], chunk_size=chunk_size)


def put_chunks(batch_nR: Any, layout: BufferLayout, mesh: Mesh, loading: Loading) -> tuple[Any, ...]:
    """Put a step's rows on the devices, as chunks of one shape; the last is filled up with zeros."""
    sharding = batch_sharding(mesh, leading=1)
    num_microbatches, num_rows = jax.tree.leaves(batch_nR)[0].shape[:2]
    parts = tuple(
        jax.tree.map(functools.partial(_chunk, number=number, size=layout.chunk_size), batch_nR)
        for number in range(layout.chunks_for(num_microbatches))
    )
    if num_rows == layout.rows and loading.factor == 1:
        # One call for all arrays: each costs as much as moving a hundred kilobytes.
        return jax.device_put(parts, sharding)

    def put(part: np.ndarray) -> jax.Array:
        if loading.factor == 1:
            return put_rows(part, layout.rows, sharding)
        return loading.spread([put_rows(own, layout.rows, sharding) for own in np.split(part, loading.factor, axis=1)], mesh)

    return jax.tree.map(put, parts)


def _chunk(x: np.ndarray, *, number: int, size: int) -> np.ndarray:
    part = x[number * size : (number + 1) * size]
    return part if len(part) == size else np.concatenate([part, np.zeros((size - len(part), *x.shape[1:]), x.dtype)])


def put_rows(part: np.ndarray, num_rows: int, sharding: NamedSharding) -> jax.Array:
    """Return the global array (K, R, ...) of which this process has the rows `part` (K, local rows, ...)."""
    if part.shape[1] == num_rows:
        return jax.device_put(part, sharding)
    local = process_rows(sharding.mesh, num_rows)

    def rows_of(index: tuple[slice, ...]) -> np.ndarray:
        first = int(np.searchsorted(local, index[1].start or 0))
        count = (num_rows if index[1].stop is None else index[1].stop) - (index[1].start or 0)
        return part[:, first : first + count]

    return jax.make_array_from_callback((part.shape[0], num_rows, *part.shape[2:]), sharding, rows_of)
