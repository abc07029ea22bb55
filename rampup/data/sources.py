"""Rows by number: from token arrays, from anything that can be indexed, or synthetic.
Batches are elsewhere.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import grain
import jax
import numpy as np

from rampup.data.fields import own_arrays, stack_rows
from rampup.errors import DataError, RampupError, a_type
from rampup.plan.describe import format_count

Rows = Mapping[str, np.ndarray]
# rows of the first step: enough for a random flip of every tenth row to show
_READ_TWICE = 16
# Held while a source is read that several threads may not read: two loaders may have
# the same one.
_ONE_READS = threading.RLock()


class RowSource(Protocol):
    """Random access to rows, many at a time; by one thread at a time, unless an
    attribute `thread_safe` is true.
    """

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, rows: np.ndarray) -> Any:
        """Return a pytree of arrays whose first dimension is the requested rows, in
        that order.
        """

    def describe(self, row: int) -> str:
        """Return where a row comes from, for messages."""


@dataclass(eq=False, repr=False)
class TokenRows:
    """Rows of consecutive tokens from flat arrays, or from
    `rampup.data.files.TokenFile`s.

    Row i of an array contains tokens [i*T, i*T + T]: T inputs, and the T targets that
    are one token later. The last row of an array is padded with zeros; `length` is the
    number of its targets that count. `paths` are the files of the arrays or, for text,
    those that follow each other in the single array, from `starts` on.
    """

    arrays: Sequence[Any]
    paths: Sequence[str]
    _: KW_ONLY
    sequence_length: int
    vocab_size: int
    starts: Sequence[int] = ()
    thread_safe = True

    def __post_init__(self) -> None:
        # The first token of an array is no target, so n tokens are n - 1 targets.
        counts = [
            max(-(-(len(array) - 1) // self.sequence_length), 0)
            for array in self.arrays
        ]
        # The number of the first row of each array, through all of them.
        self._firsts = list(itertools.accumulate(counts, initial=0))

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, rows: np.ndarray) -> Rows:
        """Return {"tokens": (n, T+1), "length": (n,)}."""
        parts = [self._row(row) for row in rows.tolist()]
        sizes = np.fromiter(map(len, parts), np.int32)
        flat = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        # A look-up with a token beyond the vocabulary would return some other row of
        # the embedding, without an error.
        bad = np.flatnonzero((flat >= self.vocab_size) | (flat < 0))
        if len(bad):
            where = self.describe(
                int(rows[np.searchsorted(np.cumsum(sizes), bad[0], side="right")])
            )
            raise DataError(
                f"{where}: token {flat[bad[0]]} must be at least 0 and below"
                f" vocab_size={self.vocab_size}"
            )
        tokens = np.zeros((len(parts), self.sequence_length + 1), np.int32)
        tokens[np.arange(self.sequence_length + 1) < sizes[:, None]] = flat
        return {"tokens": tokens, "length": sizes - 1}

    def _row(self, row: int) -> np.ndarray:
        array, start = self._place(row)
        try:
            return self.arrays[array][start : start + self.sequence_length + 1]
        except DataError as error:
            raise DataError(f"{self.describe(row)}: {error}") from error

    def describe(self, row: int) -> str:
        """Return file and offset."""
        array, start = self._place(row)
        if not self.starts:
            return f"{self.paths[array]} from token {start:,} (row {row:,})"
        file = bisect.bisect_right(self.starts, start) - 1
        return (
            f"{self.paths[file]} from byte {start - self.starts[file]:,} (row {row:,})"
        )

    def _place(self, row: int) -> tuple[int, int]:
        array = bisect.bisect_right(self._firsts, row) - 1
        return array, (row - self._firsts[array]) * self.sequence_length


class ItemRows:
    """Rows from anything with a length that returns a row, a pytree, per index: a list,
    a Grain data source or MapDataset.
    """

    def __init__(self, items: Any) -> None:
        self.items = items
        # Grain reads its own sources and datasets in threads, and asks of what is
        # inside them that it allows this.
        of_grain = (
            isinstance(items, grain.MapDataset)
            or type(items).__module__.partition(".")[0] == "grain"
        )
        self.are_stored = isinstance(items, np.ndarray) or type(items) in (
            list,
            tuple,
            range,
            dict,
        )
        self.thread_safe = bool(
            getattr(items, "thread_safe", of_grain or self.are_stored)
        )

    def __len__(self) -> int:
        return len(self.items)

    def read(self, rows: np.ndarray) -> Any:
        """Return the items, stacked."""
        items = []
        for row in rows.tolist():
            item = self.items[row]
            if item is None:
                raise DataError(
                    f"{self.describe(row)} is None, as `MapDataset.filter` makes of the"
                    " rows that it drops",
                    fix="filter the rows before they are numbered, or train on"
                    " ds.to_iter_dataset() with step.stream",
                )
            # Copied before the next one is read: a source may return the same array
            # again, filled with the next row.
            items.append(item if self.are_stored else own_arrays(item))
        return stack_rows(items, lambda i: self.describe(rows[i]))

    def describe(self, row: int) -> str:
        """Return the row's number."""
        return f"row {row} of {a_type(self.items)} of length {len(self.items):,}"


@dataclass(eq=False)
class SyntheticRows:
    """Synthetic rows: each counts up from a start and by a stride that depend on the
    row's number, which begins at `first`.
    """

    num_rows: int
    _: KW_ONLY
    sequence_length: int
    vocab_size: int
    first: int = 0
    thread_safe = True

    def __len__(self) -> int:
        return self.num_rows

    def read(self, rows: np.ndarray) -> Rows:
        """Return {"tokens": (n, T+1), "length": (n,)}."""
        # The start of a row is spread over the vocabulary by a prime, and strides from
        # 1 to 7 make a rule that can be learned.
        numbers = rows.astype(np.int64)[:, None] + self.first
        tokens = numbers * 7919 % self.vocab_size + (1 + numbers % 7) * np.arange(
            self.sequence_length + 1
        )
        tokens = (tokens % self.vocab_size).astype(np.int32)
        return {
            "tokens": tokens,
            "length": np.full(len(rows), self.sequence_length, np.int32),
        }

    def describe(self, row: int) -> str:
        """Return the row's number."""
        return f"synthetic row {row:,}"


@dataclass(eq=False)
class RowRange:
    """Rows [start, stop) of another source."""

    source: RowSource
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.paths = files_of(self.source)
        self.thread_safe = is_thread_safe(self.source)

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, rows: np.ndarray) -> Any:
        """Return the other source's rows."""
        return self.source.read(rows + self.start)

    def describe(self, row: int) -> str:
        """Return the other source's description."""
        return self.source.describe(row + self.start)


def files_of(source: RowSource) -> tuple[str, ...]:
    """Return the files that a source's rows come from, in order; none if the source has
    no `paths`.
    """
    return tuple(getattr(source, "paths", ()))


def is_thread_safe(source: RowSource) -> bool:
    """Return whether several threads may read a source at the same time: it has to say
    so.
    """
    return bool(getattr(source, "thread_safe", False))


def read_rows(source: RowSource, rows: np.ndarray) -> Any:
    """Return the given rows of a source. A failure is a DataError with the row that
    causes it and where that row comes from.
    """
    many = len(rows) > 1
    place = f"rows {rows.tolist()[:8]}..." if many else source.describe(int(rows[0]))
    alone = contextlib.nullcontext() if is_thread_safe(source) else _ONE_READS
    try:
        with reading(place), alone:
            batch = source.read(rows)
    except DataError as error:
        # One of them is to blame, and has a name.
        for row in rows if many and error.__cause__ else ():
            read_rows(source, row[None])
        raise
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if sizes != {(len(rows),)}:
        raise DataError(
            f"the source was asked for {format_count(len(rows), 'row')}, from"
            f" {source.describe(int(rows[0]))} on, but returned {sizes}"
        )
    return batch


@contextlib.contextmanager
def reading(place: object) -> Iterator[None]:
    """Turn what a source of the user's raises into a DataError with the place, which is
    made a text only then.
    """
    try:
        yield
    except RampupError:
        raise
    except Exception as error:
        raise DataError(
            f"{place} cannot be read:"
            f" {getattr(error, 'strerror', None) or repr(error)[:300]}"
        ) from error


def check_repeatable(source: RowSource, rows: np.ndarray, found: Any) -> None:
    """Refuse a source whose rows differ when they are read once more. `found` is what
    the first reading has returned.
    """
    rows = rows[:_READ_TWICE]
    again = jax.tree.leaves(read_rows(source, rows))
    for (path, first), second in zip(
        jax.tree.leaves_with_path(found), again, strict=True
    ):
        # Fewer rows may have another type, such as that of whole numbers.
        first = np.asarray(first)
        second = np.asarray(second, first.dtype)
        for row, one, other in zip(rows, first, second, strict=False):
            # Not in bytes: wide numbers are padded with what was in memory. A NaN is
            # not equal to itself.
            if not np.all((one == other) | (one != one) & (other != other)):
                raise DataError(
                    f"{source.describe(int(row))} is another one when it is read again,"
                    f" in batch{jax.tree_util.keystr(path)}: no run could be repeated"
                    " or resumed with the same rows",
                    fix="make random numbers from the row's number, such as"
                    " np.random.default_rng((seed, row)), and no state, or train on"
                    " step.stream(...), which promises no rows",
                )


def as_source(source: Any) -> RowSource:
    """Return `source` if it is a RowSource, otherwise one for anything that can be
    indexed by row, or refuse what cannot.
    """
    if hasattr(source, "read") and hasattr(source, "describe"):
        return source
    if isinstance(source, tuple):
        shapes = [getattr(column, "shape", ()) for column in source]
        sizes = {shape[:1] for shape in shapes}
        # Of one length, and longer than the tuple: no rows that somebody trains on.
        if len(shapes) > 1 and len(sizes) == 1 and max(sizes) > (len(shapes),):
            raise DataError(
                f"a tuple of arrays of shape {', '.join(str([*x]) for x in shapes[:4])}"
                " looks like columns, and a source is indexed by row",
                fix="give its rows, list(zip(*columns)); if each array is one row, give"
                " a list of them",
            )
    check_not_batched(
        source, "train with step.stream(dataset.to_iter_dataset(), batched=True)"
    )
    has_names = isinstance(source, Mapping) and 0 not in source
    if (
        has_names
        or not hasattr(source, "__len__")
        or not hasattr(source, "__getitem__")
    ):
        raise DataError(
            f"{a_type(source)} cannot be indexed by row",
            fix="give a list, a Grain data source or a grain.MapDataset (of arrays by"
            " their names: grain.MapDataset.range(num_rows).map(lambda row: {name:"
            " x[row] for name, x in arrays.items()})), or train on rows that come one"
            " after the other with step.stream(source)",
        )
    return ItemRows(source)


def check_not_batched(source: Any, other_way: str) -> None:
    """Refuse a Grain dataset, iterator or loader whose elements are batches, as Grain's
    own transformations say.
    """
    todo = [source]
    while todo:
        node = todo.pop()
        kind = type(node)
        # A class of the user's own may make rows of batches, as flat maps do.
        if (
            kind.__module__.partition(".")[0] != "grain"
            or "flatmap" in kind.__name__.lower()
        ):
            continue
        if "batch" in kind.__name__.lower():
            raise DataError(
                f"the Grain dataset is batched ({kind.__name__.lstrip('_')}): each of"
                " its elements is several rows, but the plan decides how many rows a"
                " step has",
                fix=f"leave out .batch(...), or {other_way}",
            )
        # The names of Grain 0.2. With others, nothing is found and nothing is refused.
        for name in (
            "_parents",
            "_map_parent",
            "_datasets",
            "_data_loader",
            "_operations",
        ):
            found = getattr(node, name, ())
            todo += found if isinstance(found, (list, tuple)) else [found]
