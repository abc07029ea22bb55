"""Batches by step number, so that prefetching crosses steps, resuming is an index, and
the rows do not depend on the hosts.

The plan says which samples a step consumes, `SampleOrder` which row a sample is.
`BatchLoader` reads the rows, makes microbatches of them by a reshape, and puts them on
the devices.

Shape suffixes: n microbatches of a step, C of a chunk, R rows of one microbatch
(data_parallel_size * microbatch_size), S samples of a step that this process reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rampup.data.fields import FieldTypes, num_rows, own_arrays, stack_rows
from rampup.data.sources import (
    RowRange,
    RowSource,
    as_source,
    check_not_batched,
    check_repeatable,
    is_thread_safe,
    read_rows,
    reading,
)
from rampup.engine.arguments import BATCHED_GONE, gone
from rampup.engine.batch import Batch, in_microbatches, put_batch
from rampup.engine.mesh import (
    BatchAxes,
    auto_view,
    batch_sharding,
    check_plan_fits,
    process_rows,
    rows_of_processes,
)
from rampup.engine.processes import first_problem, spans_all
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    DataEndedError,
    DataError,
    DataWarning,
    warn,
)
from rampup.plan.describe import format_count
from rampup.plan.numbers import (
    AUTO,
    check_whole,
    check_whole_or_none,
    nearest_multiples,
)
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.plan.steps import steps_of

AHEAD_ON_DEVICE = 2  # steps whose rows are on the devices before they are used
# Of a step's rows, up to which a thread takes as long to hand them over as it takes to
# read them from memory.
INLINE_BYTES = 2**20
_ROWS_OF_IDENTITY = 8
_END = object()  # of a stream


@dataclass(eq=False, repr=False)
class SampleOrder:
    """Maps the number of a sample, counted over all epochs, to its row. With a seed,
    every epoch has another order.

    With `has_epochs`, the source can be indexed beyond its length, as a Grain
    MapDataset can. With `num_epochs=None`, their number has no limit.
    """

    num_rows: int
    _: KW_ONLY
    seed: int | None
    num_epochs: int | None = None
    has_epochs: bool = False

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError("the data has no rows")
        self._shuffled: Any = None
        if self.seed is None:
            return
        check_whole(0, seed=self.seed)
        if self.num_rows >= 2**32:
            raise DataError(
                f"{self.num_rows:,} rows are more than the 2**32 that can be shuffled",
                fix="set data_shuffle_seed=null (seed=None)",
            )
        # Indexed beyond its length, Grain's shuffled range continues with the next
        # epoch in an order of its own.
        self._shuffled = grain.MapDataset.range(self.num_rows).shuffle(seed=self.seed)

    def rows(self, samples: Iterable[int]) -> np.ndarray:
        """Return the row of each sample."""
        if self._shuffled is None:
            numbers = np.fromiter(samples, np.int64)
            return numbers if self.has_epochs else numbers % self.num_rows
        return np.fromiter((self._shuffled[sample] for sample in samples), np.int64)

    def check(self, consumed_samples: int) -> None:
        """Refuse a run of more samples than the epochs contain, with the number of
        epochs that would be enough.
        """
        epochs = self.num_epochs
        if epochs is not None and consumed_samples > epochs * self.num_rows:
            needed = -(-consumed_samples // self.num_rows)
            raise DataError(
                f"the run consumes {consumed_samples:,} samples, but num_epoch={epochs}"
                f" of {format_count(self.num_rows, 'row')} have"
                f" {epochs * self.num_rows:,}",
                fix=f"set num_epoch={needed} or -1 (num_epochs={needed} or None), or"
                " fewer steps",
                key="num_epoch",
                nearest=(needed, -1),
            )


class StepRows(NamedTuple):
    """The rows of one optimizer step that this process has read, not yet split into
    microbatches.
    """

    position: PlanPosition  # looked up once per step
    numbers: np.ndarray  # of the rows (S,)
    rows: Any  # arrays (S, ...), in the order in which the planned split uses them


@dataclass(frozen=True, slots=True)
class Loading:
    """Which processes read rows: those with the numbers 0, f, 2f, ..., each for itself
    and the f - 1 processes after it. f is `factor`, MaxText's
    `expansion_factor_real_data`.
    """

    factor: int = 1

    def __post_init__(self) -> None:
        count = jax.process_count()
        if count % self.factor:
            raise ConfigError(
                f"expansion_factor_real_data={self.factor} must divide the number of"
                f" processes, {count}",
                fix="it would fit"
                f" {' or '.join(map(str, nearest_multiples(count, self.factor)))}"
                " processes",
                key="expansion_factor_real_data",
                nearest=(-1,),
            )

    @property
    def reads(self) -> bool:
        """Whether this process reads."""
        return jax.process_index() % self.factor == 0

    def rows_to_read(
        self, mesh: Mesh, num_rows: int, axes: BatchAxes | None
    ) -> np.ndarray:
        """Return the rows of a microbatch that this process reads: those of the first
        process it reads for, then the next.
        """
        rows = rows_of_processes(mesh, num_rows, axes)
        first = jax.process_index() // self.factor * self.factor
        return np.concatenate([rows[first + member] for member in range(self.factor)])

    @functools.cache  # noqa: B019 - of few small objects
    def redistribution(
        self, mesh: Mesh, num_rows: int, axes: BatchAxes | None
    ) -> Callable[..., jax.Array]:
        """Return a compiled gather of R rows that moves each from the process that has
        read it to the one that needs it.

        Of its f arguments (C, R, ...), the rows of a reader in number g are what it has
        read for the g-th process after it.
        """
        rows = rows_of_processes(mesh, num_rows, axes)
        # Row r of the result is row source_R[r] of the f parts, concatenated along R:
        # the g-th process after a reader finds its rows in part g, at the places of the
        # reader's own rows.
        source_R = np.zeros(num_rows, np.int32)
        for process, own in rows.items():
            member = process % self.factor
            source_R[own] = member * num_rows + rows[process - member]

        def gather(*parts_CR: jax.Array) -> jax.Array:
            return jnp.take(jnp.concatenate(parts_CR, axis=1), source_R, axis=1)

        return jax.jit(gather, out_shardings=batch_sharding(mesh, leading=1, axes=axes))


@gone(batched=BATCHED_GONE)
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How batches are read and put on the devices.

    Attributes:
        chunk_size: microbatches of a chunk; None: see `rampup.engine.batch.layout_of`.
        batch_axes: the axes of the mesh that the rows are sharded over; None = data and
            fsdp.
        num_threads: threads that read; one if the source is not safe for threads, and
            none if it is in memory and the first step takes at most a megabyte.
        read_ahead: steps whose rows are read ahead of use.

    Example:
        >>> BatchOptions(num_threads=8, read_ahead=16).batch_axes is None
        True
    """

    chunk_size: int | None = None
    batch_axes: BatchAxes | None = None
    num_threads: int = 2
    read_ahead: int = 4

    def __post_init__(self) -> None:
        check_whole_or_none(1, chunk_size=self.chunk_size)
        check_whole(0, num_threads=self.num_threads, read_ahead=self.read_ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoader:
    """Reads the batch of every optimizer step and puts it on the devices ahead of use.

    Attributes:
        source: the rows.
        plan: says which samples a step consumes.
        mesh: the devices.
        order: which row each sample is.
        options: how rows are read and put on the devices.
        loading: which processes read.
        types: the type of every field, shared by loaders of the same rows.

    Example:
        >>> import rampup
        >>> from rampup.data.sources import as_source
        >>> mesh = rampup.make_mesh(devices=jax.devices()[:1])
        >>> plan = rampup.RampPlan(
        ...     ramp=rampup.BatchRamp.constant(2),
        ...     splitter=rampup.BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=3,
        ... )
        >>> order = SampleOrder(6, seed=None)
        >>> loader = BatchLoader(
        ...     source=as_source(range(6)), plan=plan, mesh=mesh, order=order
        ... )
        >>> [batch.chunks[0].ravel().tolist() for batch in loader.batches(1)]
        [[2, 3], [4, 5]]
    """

    source: RowSource
    plan: RampPlan
    mesh: Mesh
    order: SampleOrder
    options: BatchOptions = field(default_factory=BatchOptions)
    loading: Loading = field(default_factory=Loading)
    types: FieldTypes = field(default_factory=FieldTypes)

    def __post_init__(self) -> None:
        check_plan_fits(self.plan, self.mesh, self.options.batch_axes)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield the batches from step `start` up to step `stop`, by default to the end
        of the plan.

        Args:
            start: the first step.
            stop: the step to stop before; None = the end of the plan.

        Raises:
            DataError: the source is too small for the run, or a row cannot be read. All
                batches before it are yielded.
        """
        steps = steps_of(self.plan, start, stop)
        self.order.check(self.plan.ramp.samples_before(steps.stop))
        if not steps:
            return
        largest = max(
            phase.global_batch_size
            for phase in self.plan.ramp.phases
            if phase.start_step < steps.stop
        )
        if largest > len(self.source):
            warn(
                f"a step takes {largest:,} rows, but the source has"
                f" {len(self.source):,}, so that a batch has rows more than once",
                DataWarning,
            )
        read = self._read(steps)
        ready: deque[Batch] = deque()
        for _ in steps:
            try:
                ready.append(self._put(next(read)))
            except DataError:
                # Everything read before the bad row can still be trained on.
                yield from ready
                raise
            # A transfer is not waited for: these batches travel while the step before
            # them runs.
            if len(ready) > AHEAD_ON_DEVICE:
                yield ready.popleft()
        yield from ready

    def read_step(self, step: int) -> StepRows:
        """Return the rows of a step in the order of its planned split.

        Args:
            step: the number of the step.
        """
        position = self.plan.position(step)
        numbers = self.order.rows(self.samples_of(position).ravel().tolist())
        return StepRows(position, numbers, read_rows(self.source, numbers))

    def samples_of(self, position: PlanPosition) -> np.ndarray:
        """Return the samples of a step that this process reads: shape (n, rows of a
        microbatch).

        Args:
            position: of the step.

        Microbatch i of a step that starts at sample s contains samples s + i*R up to,
        not including, s + (i+1)*R.
        """
        # A microbatch takes consecutive samples, over all row shards, so how a batch is
        # split does not change which rows it has.
        split = position.split
        starts = position.consumed_samples + split.num_rows * np.arange(
            split.num_microbatches
        )
        return starts[:, None] + self.loading.rows_to_read(
            self.mesh, split.num_rows, self.options.batch_axes
        )

    def _read(self, steps: range) -> Iterator[StepRows]:
        """Yield the rows of every step: the first read here, the others ahead by Grain's
        threads, which read whole steps, or here too if they are few and in memory.
        `_put` makes microbatches of them.
        """
        first, later = self.read_step(steps[0]), steps[1:]
        check_repeatable(self.source, first.numbers, first.rows)
        yield first
        size = sum(x.nbytes for x in jax.tree.leaves(first.rows))
        if getattr(self.source, "are_stored", False) and size <= INLINE_BYTES:
            yield from map(self.read_step, later)
            return
        if not later:
            return
        # One thread also reads the rows in their order.
        most = self.options.num_threads
        rows = grain.MapDataset.range(later.start, later.stop).map(self.read_step)
        yield from rows.to_iter_dataset(
            grain.ReadOptions(
                num_threads=most if is_thread_safe(self.source) else min(most, 1),
                prefetch_buffer_size=self.options.read_ahead,
            )
        )

    def _put(self, step: StepRows) -> Batch:
        """Split a step's rows into microbatches and put them on the devices."""
        position = step.position
        axes, split = self.options.batch_axes, position.split

        def name_row(place: int) -> str:
            return self.source.describe(int(step.numbers[place]))

        rows = self.types.cast(step.rows, name_row, self.mesh)
        batch_nR = in_microbatches(rows, split.num_microbatches)
        put = functools.partial(
            put_batch,
            position=position,
            plan=self.plan,
            batch_axes=axes,
            chunk_size=self.options.chunk_size,
        )
        f = self.loading.factor
        if f == 1:
            return put(batch_nR, mesh=self.mesh, name_row=name_row)
        # This process has also read for the processes after it: hand their rows on.
        parts = [
            jax.tree.map(lambda x, g=g: np.split(x, f, axis=1)[g], batch_nR)
            for g in range(f)
        ]
        found = [put(part, mesh=auto_view(self.mesh)) for part in parts]
        redistribute = self.loading.redistribution(self.mesh, split.num_rows, axes)
        return found[0]._replace(
            chunks=jax.tree.map(redistribute, *(part.chunks for part in found))
        )


def step_batches(
    source: Any,
    plan: RampPlan,
    mesh: Mesh,
    *,
    start: int = 0,
    stop: int | None = None,
    seed: int | None = None,
    num_epochs: int | None = None,
    options: BatchOptions | None = None,
) -> StepBatches:
    """Return an iterator of the batch of every optimizer step, read and put on the
    devices ahead of use.

    A row is a pytree of numbers, such as a dict; a Python list in it is one array. The
    first batch gives every field its type. Later rows whose numbers fit are cast, and
    others are a DataError.

    Args:
        source: a RowSource, or anything that can be indexed: a list of rows, a Grain
            data source or MapDataset. For rows that come one after the other, see
            `TrainStep.stream`. It is read by one thread at a time, and each row is
            copied before the next is read. A source that several threads may read at
            the same time has an attribute `thread_safe = True`; NumPy arrays, lists,
            and Grain's sources and datasets need none. A row must be the same whenever
            it is read: the first 16 rows are read twice, and refused if they differ.
            Random numbers of a row come from its number.
        plan: says how many rows a step takes, and how they are split.
        mesh: the devices.
        start: the first step.
        stop: the step to stop before; None = the end of the plan.
        seed: shuffles every epoch in a new order; None keeps the source's order. A
            Grain MapDataset then has its own epochs, with a new order and new random
            augmentations in each if it was shuffled and seeded.
        num_epochs: passes over the source; None = unlimited.
        options: how rows are read and put on the devices; see `BatchOptions`.

    Returns:
        An iterator of `Batch`. Its rows are (microbatches, rows of a microbatch, ...).

    Raises:
        DataError: the source is too small for the run, or a row cannot be read, is
            another one when it is read again, or has something else than numbers that
            fit the devices and the types of the first batch.

    Example:
        >>> import rampup
        >>> mesh = rampup.make_mesh(devices=jax.devices()[:1])
        >>> ramp, splitter = (
        ...     rampup.BatchRamp.from_schedule("0:2 4:4"),
        ...     rampup.BatchSplitter(data_parallel_size=1),
        ... )
        >>> plan = rampup.RampPlan(
        ...     ramp=ramp, splitter=splitter, num_devices=1, total_steps=3
        ... )
        >>> [
        ...     np.concatenate(b.chunks)[: b.num_microbatches].ravel().tolist()
        ...     for b in step_batches(range(6), plan, mesh)
        ... ]
        [[0, 1], [2, 3], [4, 5, 0, 1]]
    """
    rows = as_source(source)
    loader = BatchLoader(
        source=rows,
        plan=plan,
        mesh=mesh,
        order=SampleOrder(
            len(rows),
            seed=seed,
            num_epochs=num_epochs,
            has_epochs=isinstance(source, grain.MapDataset),
        ),
        options=options or BatchOptions(),
    )
    return StepBatches(loader.batches(start, stop), rows, seed)


@dataclass(eq=False)
class StepBatches(Iterator[Batch]):
    """The batches of `step_batches`. They know which rows they are of, so that a `Loop`
    notices others at a resume.
    """

    batches: Iterator[Batch]
    source: RowSource
    seed: int | None

    def __next__(self) -> Batch:
        return next(self.batches)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What the rows are, as JSON values: their number, the seed of their order, and
        a digest of some of them.
        """
        number = len(self.source)
        found: dict[str, Any] = {"number": number, "seed": self.seed}
        rows = np.unique(np.linspace(0, number - 1, _ROWS_OF_IDENTITY).astype(np.int64))
        # A row that cannot be read ends the run when its step comes.
        with contextlib.suppress(DataError):
            digest = hashlib.sha256()
            for path, x in jax.tree.leaves_with_path(read_rows(self.source, rows)):
                digest.update(
                    f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode()
                    + np.asarray(x).tobytes()
                )
            found[f"SHA-256 of rows {', '.join(map(str, rows.tolist()))}"] = (
                digest.hexdigest()[:12]
            )
        return found


def eval_batches(
    source: Any,
    batch_size: int,
    mesh: Mesh,
    *,
    batch_axes: BatchAxes | None = None,
    whole_batch: bool = False,
) -> Iterator[Batch]:
    """Yield all rows of a source once, in order; see `EvalStep.batches`."""
    rows, axes = as_source(source), BatchAxes.of(mesh, batch_axes)
    num_shards = axes.num_shards(mesh)
    check_whole(1, batch_size=batch_size)
    if batch_size % num_shards:
        raise BatchDivisibilityError(
            f"batch_size={batch_size} must be a multiple of {' * '.join(axes.rows)} ="
            f" {num_shards}",
            value=batch_size,
            divisor=num_shards,
            key="batch_size",
        )
    if not len(rows):
        raise DataError("the data to evaluate on has no rows")
    full = len(rows) // batch_size * batch_size
    # A loss that sees whole batches sees all that is left over together.
    shared = full if whole_batch else len(rows) // num_shards * num_shards
    # First row, rows of a batch, batches, axes of the rows.
    parts = (
        (0, batch_size, full // batch_size, axes),
        (full, shared - full, 1, axes),
        (shared, len(rows) - shared, 1, BatchAxes(replica=(), rows=())),
    )
    types = FieldTypes()
    for first, size, number, part_axes in parts:
        if not size or not number:
            continue
        yield from BatchLoader(
            source=RowRange(rows, first, len(rows)),
            plan=RampPlan(
                ramp=BatchRamp.constant(size),
                # Rows that every device computes come one by one, as they may be more
                # than its part of a batch.
                splitter=BatchSplitter(
                    data_parallel_size=part_axes.num_shards(mesh),
                    microbatch_size=AUTO if part_axes == axes or whole_batch else 1,
                ),
                num_devices=mesh.size,
                total_steps=number,
            ),
            mesh=mesh,
            order=SampleOrder(size * number, seed=None),
            options=BatchOptions(batch_axes=part_axes),
            types=types,
        ).batches()


def stream_batches(
    source: Iterable[Any],
    plan: RampPlan,
    mesh: Mesh,
    *,
    start: int = 0,
    stop: int | None = None,
    batched: bool = False,
    drop_remainder: bool = False,
    options: BatchOptions | None = None,
) -> Iterator[Batch]:
    """Yield the batch of every optimizer step from rows that come one after the other;
    see `TrainStep.stream`.

    A step takes from the source the rows that it needs and no others, so the state of
    the source, such as that of a Grain iterator, belongs to a checkpoint of the same
    step. The caller restores it. With `batched=True`, the rest of a batch that two
    steps share is kept for the second and lost in a resumption.

    A finite source has fewer steps than an endless one, and the plan says how many: a
    source that ends before the plan is an error, in all processes at the same step. To
    train on rows that are left over, with the mean over them alone, end the ramp with a
    phase of their number: 100 rows in steps of 16 are "0:16 96:4" and 7 steps.

    Args:
        source: rows, or batches of rows (rows, ...), of this process.
        plan: says how many rows a step takes, and how they are split.
        mesh: the devices.
        start: the first step.
        stop: the step to stop before; None = the end of the plan.
        batched: each element of the source is a batch of rows. A `DataWarning` says if
            an element that is taken for a row looks like one.
        drop_remainder: end without an error after the last step for which there are
            rows; the rest of them, less than a step, is left out.
        options: of `BatchOptions` all but the last two.

    Yields:
        The `Batch` of each step: rows (microbatches, rows of a microbatch, ...).

    Raises:
        DataError: the source ends before the plan, its rows differ in structure or
            shape or have numbers that do not fit the types of the first batch, a row
            cannot be read, or it is a batched Grain dataset without `batched=True`.

    Example:
        >>> import rampup
        >>> mesh = rampup.make_mesh(devices=jax.devices()[:1])
        >>> ramp, splitter = (
        ...     rampup.BatchRamp.from_schedule("0:2 4:4"),
        ...     rampup.BatchSplitter(data_parallel_size=1),
        ... )
        >>> plan = rampup.RampPlan(
        ...     ramp=ramp, splitter=splitter, num_devices=1, total_steps=3
        ... )
        >>> [
        ...     b.chunks[0][: b.num_microbatches].ravel().tolist()
        ...     for b in stream_batches(iter(range(8)), plan, mesh)
        ... ]
        [[0, 1], [2, 3], [4, 5, 6, 7]]
        >>> len(list(stream_batches(range(7), plan, mesh, drop_remainder=True)))
        2
    """
    options = options or BatchOptions()
    if isinstance(source, Mapping):
        raise DataError(
            "a stream yields rows, but a dict yields its names",
            fix="give an iterator of rows, or with batched=True of such dicts",
        )
    check_plan_fits(plan, mesh, options.batch_axes)
    if not batched:
        check_not_batched(source, "give batched=True")
    rows = _Stream(iter(source), batched, plan)
    types = FieldTypes()
    is_shared = spans_all(mesh)
    for number in steps_of(plan, start, stop):
        position = plan.position(number)
        split = position.split
        needed = split.num_microbatches * len(
            process_rows(mesh, split.num_rows, options.batch_axes)
        )
        found = problem = None
        try:
            found = types.cast(
                rows.take(needed, number), f"row {{:,}} of step {number:,}".format, mesh
            )
        except DataError as error:
            problem = error
        # No process begins a step for which another one has no rows.
        if is_shared:
            words = f"process {jax.process_index()}: {problem}"
            told = json.dumps([isinstance(problem, DataEndedError), words])
            heard = first_problem(told if problem else "")
            if heard and problem is None:
                has_ended, words = json.loads(heard)
                problem = (DataEndedError if has_ended else DataError)(words)
        if problem is not None:
            if drop_remainder and isinstance(problem, DataEndedError):
                return
            raise problem
        yield put_batch(
            in_microbatches(found, split.num_microbatches),
            position,
            plan,
            mesh,
            batch_axes=options.batch_axes,
            chunk_size=options.chunk_size,
        )


@dataclass
class _Stream:
    """Rows that come one after the other, taken as many at a time as a step needs."""

    rows: Iterator[Any]
    batched: bool
    plan: RampPlan
    pending: list[Any] = field(default_factory=list)  # what is read and not yet taken
    count: int = 0  # rows of it
    taken: int = 0
    step: int = 0

    def __str__(self) -> str:
        """Return the place of the next row."""
        return f"row {self.taken + self.count:,} of the stream, of step {self.step:,},"

    def take(self, needed: int, step: int) -> Any:
        """Return the next rows as arrays (needed, ...).

        Raises:
            DataEndedError: there are fewer.
            DataError: a row cannot be read, or is not like the others.
        """
        self.step = step
        with reading(self):
            while self.count < needed:
                self._read(needed)
        name = f"{'batch' if self.batched else 'row'} {{}} of step {step:,}".format
        ready = stack_rows(self.pending, name, batched=self.batched)
        # What the next step begins with: the rest of a batch that two steps share.
        rest = jax.tree.map(lambda x: x[needed:], ready)
        self.count -= needed
        self.taken += needed
        self.pending = [rest] if self.count else []
        return jax.tree.map(lambda x: x[:needed], ready)

    def _read(self, needed: int) -> None:
        item = next(self.rows, _END)
        if item is _END:
            raise DataEndedError(
                f"step {self.step} needs {format_count(needed, 'row')} in this process,"
                f" but the source ended after {self.count} of them,"
                f" {self.taken + self.count:,} in all; the plan has"
                f" {format_count(self.plan.total_steps, 'step')}",
                fix="give more rows, a plan of fewer steps, or in a loop of your own"
                " drop_remainder=True to end there",
            )
        # Copied: a source may yield the same array again, filled with the next rows.
        rows = own_arrays(item, batched=self.batched)
        self.pending.append(rows)
        self.count += num_rows(rows, self.step) if self.batched else 1


def microbatches(
    source: Any,
    plan: RampPlan,
    mesh: Mesh,
    *,
    start: int = 0,
    stop: int | None = None,
    seed: int | None = None,
    num_epochs: int | None = None,
    options: BatchOptions | None = None,
) -> Iterator[Any]:
    """Yield one microbatch after another, for a training step of your own: one shape
    throughout a `fixed` ramp.

    Use it with `multi_steps`: the optimizer then steps when a global batch is complete.

    Args:
        source: the rows; see `step_batches`.
        plan: says how many microbatches a step has, and of how many rows.
        mesh: the devices.
        start: the first step. With `multi_steps`, steps are
            `opt_state.gradient_step`, and not the `step` of a linen `TrainState`.
        stop: the step to stop before; None = the end of the plan.
        seed: shuffles every epoch in a new order; None keeps the source's order.
        num_epochs: passes over the source; None = unlimited.
        options: how rows are read; its `chunk_size` is not used.

    Yields:
        Arrays (R, ...), R = data_parallel_size * microbatch_size rows, sharded over the
        axes of the rows.

    Raises:
        DataError: see `step_batches`.

    Example:
        >>> import rampup
        >>> mesh = rampup.make_mesh(devices=jax.devices()[:1])
        >>> ramp, splitter = (
        ...     rampup.BatchRamp.from_schedule("0:2 4:4"),
        ...     rampup.BatchSplitter(data_parallel_size=1),
        ... )
        >>> plan = rampup.RampPlan(
        ...     ramp=ramp, splitter=splitter, num_devices=1, total_steps=3
        ... )
        >>> [batch.tolist() for batch in microbatches(range(8), plan, mesh)]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    for batch in step_batches(
        source,
        plan,
        mesh,
        start=start,
        stop=stop,
        seed=seed,
        num_epochs=num_epochs,
        options=replace(options or BatchOptions(), chunk_size=1),
    ):
        for chunk in batch.chunks:
            yield jax.tree.map(lambda x: x[0], chunk)
