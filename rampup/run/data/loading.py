"""Few processes that read the data of all: for hosts that cannot all reach it, or should not all ask for it.

Shape suffixes: K microbatches of a chunk, R rows of one microbatch over all replicas, f processes that share a reader.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rampup.errors import ConfigError
from rampup.plan.numbers import nearest_multiples
from rampup.run.data.sources import RowSource
from rampup.run.distributed import from_first
from rampup.run.mesh import batch_sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Which processes read: number 0, f, 2f, ... each for itself and the f - 1 after it (MaxText `expansion_factor_real_data`).

    Attributes:
        factor: f; 1 = every process reads for itself.
    """

    factor: int = 1

    def __post_init__(self) -> None:
        count = jax.process_count()
        if self.factor < 1 or count % self.factor:
            nearest = nearest_multiples(count, max(self.factor, 1))
            raise ConfigError(
                f"expansion_factor_real_data={self.factor} must divide the number of processes, {count}; it would fit "
                f"{' or '.join(map(str, nearest))} processes",
                key="expansion_factor_real_data",
                nearest=(-1,),
            )

    @property
    def reads(self) -> bool:
        """Whether this process reads."""
        return jax.process_index() % self.factor == 0

    def rows_to_read(self, mesh: Mesh, num_rows: int) -> np.ndarray:
        """Return the rows of a microbatch that this process reads: those of the first process it reads for, then the next."""
        rows = rows_of_processes(mesh, num_rows)
        first = jax.process_index() // self.factor * self.factor
        return np.concatenate([rows[first + member] for member in range(self.factor)])

    def spread(self, parts: list[jax.Array], mesh: Mesh) -> jax.Array:
        """Return the rows where they belong.

        Args:
            parts: f arrays (K, R, ...); in array g, a reader's rows hold what it has read for the process g after it.
            mesh: the devices.
        """
        return _spreading(mesh, parts[0].shape[1], self.factor)(*parts)


class NoRows:
    """Stands for the rows in a process that does not read them: the same number, all zero."""

    paths: tuple[str, ...] = ()

    def __init__(self, number: int, row: Any) -> None:
        self._number, self._row = number, row

    def __len__(self) -> int:
        return self._number

    def read(self, rows: np.ndarray) -> Any:
        """Return zeros."""
        return jax.tree.map(lambda x: np.zeros((len(rows), *x.shape), x.dtype), self._row)

    def describe(self, row: int) -> str:
        """Say that another process reads it."""
        return f"row {row:,}, read by another process"


def shared_sources(loading: Loading, open_all: Callable[[], tuple[RowSource, ...]]) -> tuple[RowSource, ...]:
    """Open the sources in the processes that read, and stand in for them elsewhere, where no file is opened.

    Args:
        loading: who reads.
        open_all: opens the sources of dictionaries of arrays.
    """
    if loading.factor == 1:
        return open_all()
    opened = open_all() if loading.reads else ()
    told = [
        {"number": len(source), "row": {name: (x.shape[1:], x.dtype.str) for name, x in source.read(np.array([0])).items()}}
        for source in opened
        if len(source)
    ]
    facts = json.loads(from_first("sources", json.dumps(told)))
    if loading.reads:
        return opened
    return tuple(
        NoRows(fact["number"], {name: np.zeros(shape, dtype) for name, (shape, dtype) in fact["row"].items()}) for fact in facts
    )


def rows_of_processes(mesh: Mesh, num_rows: int) -> dict[int, np.ndarray]:
    """Return which rows of a microbatch each process holds, ascending."""
    found: dict[int, set[tuple[int, int]]] = {}
    for device, index in batch_sharding(mesh).devices_indices_map((num_rows,)).items():
        piece = index[0].start or 0, num_rows if index[0].stop is None else index[0].stop
        found.setdefault(device.process_index, set()).add(piece)
    return {
        process: np.concatenate([np.arange(start, stop) for start, stop in sorted(pieces)]) for process, pieces in found.items()
    }


@functools.cache
def _spreading(mesh: Mesh, num_rows: int, factor: int) -> Callable[..., jax.Array]:
    rows = rows_of_processes(mesh, num_rows)
    place = np.zeros(num_rows, np.int32)
    for process, own in rows.items():
        member = process % factor
        place[own] = member * num_rows + rows[process - member]

    def spread(*parts_KR: jax.Array) -> jax.Array:
        return jnp.take(jnp.concatenate(parts_KR, axis=1), place, axis=1)

    return jax.jit(spread, out_shardings=batch_sharding(mesh, leading=1))
