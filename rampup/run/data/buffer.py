"""The buffer that carries one step's rows to the devices: a fixed number of chunks of microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from rampup.plan.split import BatchSplit

MAX_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """The shape of a compiled step's input, the same in every phase with the same microbatch.

    A step of few microbatches fills only its first chunks; the others are one chunk of zeros that lies on the devices
    already, so that an early phase moves its own rows and not the largest batch.

    Attributes:
        rows: rows of one microbatch over all replicas, d * b.
        chunk_size: microbatches in one chunk.
        num_chunks: chunks in the buffer.
    """

    rows: int
    chunk_size: int
    num_chunks: int

    def chunks_for(self, num_microbatches: int) -> int:
        """Return how many chunks a step of this many microbatches fills."""
        return -(-num_microbatches // self.chunk_size)


def buffer_layout(split: BatchSplit, most: int, *, chunk_size: int | None = None, max_chunks: int = MAX_CHUNKS) -> BufferLayout:
    """Return the layout that serves every step of up to `most` microbatches like those of `split`.

    Args:
        split: a split with the wanted microbatch.
        most: the largest number of microbatches of a step.
        chunk_size: microbatches per chunk; None = the smallest with which `max_chunks` chunks are enough.
        max_chunks: the most chunks, if `chunk_size` is None.

    Example:
        >>> split = BatchSplit(global_batch_size=8, data_parallel_size=2, accumulation_steps=2,
        ...     num_pipeline_microbatches=1, microbatch_size=2)
        >>> buffer_layout(split, 20)
        BufferLayout(rows=4, chunk_size=3, num_chunks=7)
    """
    chunk_size = chunk_size or -(-most // max_chunks)
    return BufferLayout(
        rows=split.data_parallel_size * split.microbatch_size, chunk_size=chunk_size, num_chunks=-(-most // chunk_size)
    )
