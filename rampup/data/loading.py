"""Lets a subset of the processes load data for the others (MaxText's `expansion_factor_real_data`).

Shape suffixes: K microbatches of a chunk, R rows of one microbatch over all replicas, f processes that share a reader.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rampup.data.sources import RowSource
from rampup.engine.mesh import BatchAxes, batch_sharding, rows_of_processes
from rampup.engine.processes import broadcast_from_process0
from rampup.errors import ConfigError
from rampup.plan.numbers import nearest_multiples


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Which processes read which rows: 0, f, 2f, ..., each for itself and the f - 1 processes after it.

    Attributes:
        factor: f; 1 = every process reads for itself.
        batch_axes: the mesh axes that the rows are sharded over; None = data and fsdp.
    """

    factor: int = 1
    batch_axes: BatchAxes | None = None

    def __post_init__(self) -> None:
        count = jax.process_count()
        if self.factor < 1 or count % self.factor:
            nearest = nearest_multiples(count, max(self.factor, 1))
            problem = f"expansion_factor_real_data={self.factor} must divide the number of processes, {count}"
            fix = f"it would fit {' or '.join(map(str, nearest))} processes"
            raise ConfigError(f"{problem}; {fix}", key="expansion_factor_real_data", nearest=(-1,))

    @property
    def reads(self) -> bool:
        """Whether this process reads."""
        return jax.process_index() % self.factor == 0

    @functools.cache  # noqa: B019 - asking a sharding for its indices takes longer than reading a small batch
    def rows_to_read(self, mesh: Mesh, num_rows: int) -> np.ndarray:
        """Return the rows of a microbatch that this process reads: those of the first process it reads for, then the next."""
        rows = rows_of_processes(mesh, num_rows, self.batch_axes)
        first = jax.process_index() // self.factor * self.factor
        return np.concatenate([rows[first + member] for member in range(self.factor)])

    @functools.cache  # noqa: B019 - of few small objects
    def redistribution(self, mesh: Mesh, num_rows: int) -> Callable[..., jax.Array]:
        """Return a compiled gather of R rows that moves each from the process that has read it to the one that needs it.

        Of its f arguments (K, R, ...), the rows of a reader in number g are what it has read for the g-th process after it.
        """
        rows = rows_of_processes(mesh, num_rows, self.batch_axes)
        # Row r of the result is row source_R[r] of the f parts, concatenated along R: the g-th process after a reader finds
        # its rows in part g, at the places of the reader's own rows.
        source_R = np.zeros(num_rows, np.int32)
        for process, own in rows.items():
            member = process % self.factor
            source_R[own] = member * num_rows + rows[process - member]

        def gather(*parts_KR: jax.Array) -> jax.Array:
            return jnp.take(jnp.concatenate(parts_KR, axis=1), source_R, axis=1)

        return jax.jit(gather, out_shardings=batch_sharding(mesh, leading=1, axes=self.batch_axes))


class PlaceholderRows:
    """A source for a process that does not read: as many rows as the real source, all zero.

    `row` maps the names of a row's arrays to their shape and type.
    """

    thread_safe = True

    def __init__(self, number: int, row: Mapping[str, tuple[Sequence[int], str]]) -> None:
        self._number, self._row = number, row

    def __len__(self) -> int:
        return self._number

    def read(self, rows: np.ndarray) -> Any:
        """Return zeros."""
        return {name: np.zeros((len(rows), *shape), dtype) for name, (shape, dtype) in self._row.items()}

    def describe(self, row: int) -> str:
        """Return the row's number."""
        return f"row {row:,}, read by another process"


def shared_sources(loading: Loading, open_all: Callable[[], tuple[RowSource, ...]]) -> tuple[RowSource, ...]:
    """Open sources of dictionaries of arrays in the processes that read; the others open no file and get placeholders."""
    if loading.factor == 1:
        return open_all()
    opened = open_all() if loading.reads else ()
    own = [
        {"number": len(source), "row": {name: (x.shape[1:], x.dtype.str) for name, x in source.read(np.array([0])).items()}}
        for source in opened
        if len(source)
    ]
    # The others need the number of rows, for the order of samples, and the shapes, for the arrays that they take part in.
    described = json.loads(broadcast_from_process0("sources", json.dumps(own)))
    return opened if loading.reads else tuple(PlaceholderRows(**facts) for facts in described)
