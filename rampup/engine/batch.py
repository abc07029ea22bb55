"""One optimizer step's rows on the devices, in a buffer of the shape that the program
takes.

Shape suffixes: n microbatches of a step, C of a chunk, R rows of one microbatch
(data_parallel_size * microbatch_size).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rampup.engine.mesh import BatchAxes, batch_sharding, process_rows
from rampup.errors import DataError, a_type
from rampup.plan.describe import format_count
from rampup.plan.numbers import has_numbers
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit

MAX_CHUNKS = 8
# A buffer of at most so many numbers is one chunk, and a larger one at most
# `MAX_CHUNKS`: half a megabyte in float32. Every chunk is an array per leaf, and each
# array takes as much of the host's time as copying some hundred kilobytes of padding.
MAX_WHOLE = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """The shape of a compiled step's input: chunks of microbatches, of which a step
    with few microbatches fills the first.
    """

    num_rows: int  # R, of one microbatch (data_parallel_size * microbatch_size)
    chunk_size: int  # C, microbatches of one chunk
    num_chunks: int


def layout_of(
    plan: RampPlan, split: BatchSplit, row_size: int, *, chunk_size: int | None = None
) -> BufferLayout:
    """Return the layout for every step with the microbatch size of `split`, for rows of
    `row_size` numbers; see `MAX_WHOLE`.
    """
    most = plan.max_microbatches[split.microbatch_size]
    if chunk_size is None:
        chunk_size = (
            most
            if most * split.num_rows * row_size <= MAX_WHOLE
            else -(-most // MAX_CHUNKS)
        )
    return BufferLayout(
        num_rows=split.num_rows,
        chunk_size=chunk_size,
        num_chunks=-(-most // chunk_size),
    )


def row_size(row: Any) -> int:
    """Return how many numbers a row has. Not bytes, which differ on the devices."""
    return sum(math.prod(np.shape(x)) for x in jax.tree.leaves(row))


class Batch(NamedTuple):
    """One optimizer step's rows on the devices.

    Attributes:
        position: step, samples before it, phase and split.
        chunks: the filled chunks of the buffer: arrays (C, R, ...), rows sharded over
            the data and fsdp axes.
        layout: the buffer's shape.

    Example:
        >>> from rampup import BatchRamp, BatchSplitter, make_mesh, step_batches
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.constant(4),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=1,
        ... )
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> batch = next(step_batches(np.zeros((4, 3)), plan, mesh))
        >>> batch.num_microbatches, batch.row.shape
        (1, (3,))
    """

    position: PlanPosition
    chunks: tuple[Any, ...]
    layout: BufferLayout

    def __repr__(self) -> str:
        # With the shape of a row, so that one sees batches that were given as rows.
        return (
            f"Batch(step={self.position.step},"
            f" {format_count(self.position.split.global_batch_size, 'sample')} in"
            f" microbatches of {self.layout.num_rows:,}, a row is {self.row})"
        )

    @property
    def row(self) -> Any:
        """The shapes and types of a row."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), self.chunks[0]
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches that contain rows."""
        return self.position.split.num_microbatches


def check_batch(batch: Any) -> None:
    """Refuse what is no batch of a step."""
    if not isinstance(batch, Batch):
        raise DataError(
            f"a step takes a Batch and not {a_type(batch)}",
            fix="get batches from step.batches(source), or make one of arrays with"
            " step.batch(arrays) of a training step",
        )


def put_batch(
    batch_nR: Any,
    position: PlanPosition,
    plan: RampPlan,
    mesh: Mesh,
    *,
    batch_axes: BatchAxes | None = None,
    chunk_size: int | None = None,
    name_row: Callable[[int], str] | None = None,
) -> Batch:
    """Put the microbatches of this process, which must not change afterwards, on the
    devices as chunks, padded with zeros.
    """
    name_row = name_row or f"row {{:,}} of step {position.step:,}".format
    arrays = []
    leaves, structure = jax.tree.flatten_with_path(batch_nR)
    for path, leaf in leaves:
        try:
            arrays.append(_for_devices(np.asarray(leaf), name_row))
        except DataError as error:
            raise DataError(
                f"batch{jax.tree_util.keystr(path)} cannot be put on a device: {error}"
            ) from None
    size = sum(math.prod(x.shape[2:]) for x in arrays)
    layout = layout_of(plan, position.split, size, chunk_size=chunk_size)
    sharding = batch_sharding(mesh, leading=1, axes=batch_axes)
    local = process_rows(mesh, layout.num_rows, batch_axes)
    C = layout.chunk_size
    firsts = range(0, len(arrays[0]), C)
    chunks = [
        [_global_array(x[first : first + C], layout, sharding, local) for x in arrays]
        for first in firsts
    ]
    return Batch(position, tuple(map(structure.unflatten, chunks)), layout)


def in_microbatches(rows: Any, number: int) -> Any:
    """Return arrays of rows as microbatches (number, rows of a microbatch, ...)."""
    # Not -1, which NumPy cannot replace if an array is empty.
    return jax.tree.map(
        lambda x: x.reshape(number, len(x) // number, *x.shape[1:]), rows
    )


def lost_in_cast(x: np.ndarray, cast: np.ndarray) -> Any:
    """Return which numbers another type has changed by more than rounding."""
    if cast.dtype.kind in "biu" or (x.dtype.kind == "c" and cast.dtype.kind != "c"):
        return cast != x
    return np.isfinite(x) & ~np.isfinite(cast)


def _for_devices(x_nR: np.ndarray, name_row: Callable[[int], str]) -> np.ndarray:
    """Return an array in the type that it has on the devices, or refuse one that would
    not arrive as it is.
    """
    shape, dtype = x_nR.shape[2:], x_nR.dtype
    if not has_numbers(dtype):
        raise DataError(
            f"{name_row(0)} has {dtype}; give rows that are pytrees, such as dicts, of"
            " numbers, and encode texts"
        )
    if dtype.itemsize > {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize):
        raise DataError(
            f"{name_row(0)} has {dtype}, which no device has", fix="cast it to float64"
        )
    if 0 in shape:
        raise DataError(
            f"{name_row(0)} has the shape {list(shape)}, and so no numbers; leave it"
            " out of the rows"
        )
    # Only a type of 64 bits can have another one there.
    target = dtype if dtype.itemsize < 8 else jax.dtypes.canonicalize_dtype(dtype)
    if target == dtype:
        return x_nR
    # Without x64, JAX would take the lower half of an integer of 64 bits, and infinity
    # for a large number.
    with np.errstate(over="ignore"):
        narrow = x_nR.astype(target)
    lost = lost_in_cast(x_nR, narrow)
    if lost.any():
        place = np.unravel_index(np.argmax(lost), lost.shape)
        row = name_row(int(place[0] * x_nR.shape[1] + place[1]))
        fix = "split" if dtype.kind in "iu" else "scale"
        raise DataError(
            f"{row} has {x_nR[place]}, which does not fit {target}; {fix} the number,"
            " or set jax_enable_x64"
        )
    return narrow


def _global_array(
    part_CR: np.ndarray,
    layout: BufferLayout,
    sharding: NamedSharding,
    local: np.ndarray,
) -> jax.Array:
    """Return the global array (C, R, ...). This process has the rows `local` of each
    microbatch, `part_CR` (at most C, local rows, ...).
    """
    missing, num_rows = layout.chunk_size - len(part_CR), layout.num_rows
    if missing:
        # Only the last chunk can be short, and the step's loop ends before the zeros.
        part_CR = np.concatenate(
            [part_CR, np.zeros((missing, *part_CR.shape[1:]), part_CR.dtype)]
        )

    # Rows of other processes are missing here; a device of this process asks for a
    # range of its own ones.
    def shard(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[1].indices(num_rows)
        first = int(np.searchsorted(local, start))
        return part_CR[:, first : first + stop - start]

    # Not by `jax.device_put`, which takes two to three times as long for a small array.
    # With all rows here, an index is that of the array itself.
    return jax.make_array_from_callback(
        (part_CR.shape[0], num_rows, *part_CR.shape[2:]),
        sharding,
        part_CR.__getitem__ if len(local) == num_rows else shard,
    )
