"""The fields of rows: what a row is, how rows become arrays, and the type of a field.

A tuple, a dict or another pytree is a structure of fields; a Python list is one array,
as JSON and Hugging Face's datasets mean it. Only a whole row that is a list of arrays,
such as `[image, label]`, is a structure. A field has the type of the first batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.engine.batch import lost_in_cast
from rampup.engine.processes import gather_from_all, spans_all
from rampup.engine.sums import differing_leaves
from rampup.errors import DataError, DataWarning, warn
from rampup.plan.numbers import has_numbers

# From the place of a row to its name, for messages.
NameRow = Callable[[int], str]
_PAD = "all rows must have the same fields and shapes: pad or crop them"


def own_arrays(item: Any, *, batched: bool = False) -> Any:
    """Return a row, or a batch of rows, with a copy of each field as one array.

    Args:
        item: a pytree of numbers, arrays, and lists of numbers.
        batched: whether each array has a row per element.

    Raises:
        DataError: a list is not one array, with the field's name.
    """
    is_array = _is_array_in(item)
    fields, structure = jax.tree.flatten(item, is_leaf=is_array)
    if not any(isinstance(field, list) for field in fields):
        return structure.unflatten(map(np.array, fields))

    def array(path: Any, field: Any) -> np.ndarray:
        if not isinstance(field, list):
            return np.array(field)
        where = f"batch{jax.tree_util.keystr(path)}"
        if batched and any(np.ndim(part) for part in field if not _is_plain(part)):
            raise DataError(
                f"{where} is a list of arrays, which may be rows or columns",
                fix="give one array, the rows first",
            )
        try:
            return np.array(field)
        except ValueError:
            raise DataError(
                f"{where} is a list whose parts have different lengths",
                fix="pad or crop them, or make it a tuple if they are fields",
            ) from None

    return jax.tree_util.tree_map_with_path(array, item, is_leaf=is_array)


def num_rows(batch: Any, step: int) -> int:
    """Return how many rows the arrays of a batch have.

    Args:
        batch: a pytree of arrays (rows, ...).
        step: the optimizer step, for messages.

    Raises:
        DataError: there is no such number, or not one for all arrays.
    """
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        known = [f"{size[0]} rows" if size else "no rows" for size in sorted(sizes)]
        raise DataError(
            f"step {step} takes arrays (rows, ...) of as many rows, and was given"
            f" {' and '.join(known) or 'nothing'}"
        )
    return sizes.pop()[0]


def stack_rows(items: Sequence[Any], name: NameRow, *, batched: bool = False) -> Any:
    """Return rows, or batches of rows, as arrays.

    Args:
        items: the rows, or the batches.
        name: called with the place of an item; returns its name for messages.
        batched: whether the items are batches.

    Raises:
        DataError: rows differ, or one has no number in a field of numbers; with the
            row's and the field's name.
    """
    stack = np.concatenate if batched else np.array
    # What differs, or has no numbers, is named below.
    with contextlib.suppress(ValueError):
        # `np.array` stacks small arrays in a third of the time of `np.stack`.
        rows = jax.tree.map(
            lambda *fields: stack(fields), *items, is_leaf=_is_array_in(items[0])
        )
        if all(has_numbers(x.dtype) for x in jax.tree.leaves(rows)):
            return rows
    arrays = []
    for place, item in enumerate(items):
        try:
            arrays.append(own_arrays(item))
        except DataError as error:
            raise DataError(f"{name(place)}: {error}") from None
    _refuse_differing(arrays, name, row_axes=int(batched))
    raise _no_numbers(arrays, name)


class FieldTypes:
    """The type of every field, which is that of the first batch.

    JSON and CSV write 2 for 2.0, so that a batch of whole numbers is one of integers.
    What fits the first batch's type without a loss is cast: numbers of another width,
    whole numbers, and integers in a field of floating-point numbers.

    Example:
        >>> from rampup.engine.mesh import make_mesh
        >>> types, mesh, name = FieldTypes(), make_mesh(), "row {}".format
        >>> types.cast({"x": np.array([0.5, 2.0])}, name, mesh)["x"].dtype
        dtype('float64')
        >>> types.cast({"x": np.array([1, 2])}, name, mesh)["x"].tolist()
        [1.0, 2.0]
    """

    _types: list[np.dtype[Any]] | None = None
    _structure: Any = None

    def cast(self, rows: Any, name: NameRow, mesh: Mesh) -> Any:
        """Return the arrays of a batch in the types of the first one.

        Args:
            rows: a pytree of arrays (rows, ...).
            name: called with the place of a row; returns its name for messages.
            mesh: the devices, whose processes agree on the types.

        Raises:
            DataError: a number does not fit, with the row's and the field's name.
        """
        leaves = jax.tree.leaves_with_path(rows)
        structure = jax.tree.structure(rows)
        if not leaves:
            raise DataError(f"{name(0)} has no fields")
        if self._types is None:
            self._structure = structure
            _warn_of_batches([x.shape[1:] for _, x in leaves])
            self._types = _agreed([np.asarray(x).dtype for _, x in leaves], mesh)
        if structure != self._structure:
            raise DataError(
                f"{name(0)} is {structure}, but the first batch is {self._structure}",
                fix=_PAD,
            )
        found = []
        for (path, x), dtype in zip(leaves, self._types, strict=True):
            if x.dtype != dtype and has_numbers(x.dtype):
                with np.errstate(invalid="ignore", over="ignore"):
                    cast = x.astype(dtype)
                lost = np.flatnonzero(lost_in_cast(x, cast))
                if len(lost):
                    raise DataError(
                        f"{name(int(lost[0]) // x[0].size)}:"
                        f" batch{jax.tree_util.keystr(path)} is {x.flat[lost[0]]}, but"
                        f" the field has {dtype}, as in the first batch",
                        fix="give the field one type in all rows",
                    )
                x = cast
            found.append(x)
        return structure.unflatten(found)


def _agreed(own: list[np.dtype[Any]], mesh: Mesh) -> list[np.dtype[Any]]:
    """Return the types of this process's first rows, or refuse others than those of the
    other processes: all run one program.
    """
    if not spans_all(mesh):
        return own
    types = set(gather_from_all(" ".join(x.name for x in own)))
    if len(types) > 1:
        raise DataError(
            f"the fields of the first batch have types {', but '.join(sorted(types))}"
            " in the processes",
            fix="give each field one type in all rows",
        )
    return own


def _warn_of_batches(shapes: Sequence[tuple[int, ...]]) -> None:
    """Warn if what is taken for a row, here the shapes of its fields, looks like a
    batch: a number per row beside an array per row.
    """
    # No shape proves it: a sequence with a label for each of its elements looks alike.
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or not {1} < {len(shape) for shape in shapes}:
        return
    size = shapes[0][0]
    # Matrices of pairs belong to a sequence.
    if size > 1 and not any(size in shape[1:] for shape in shapes):
        warn(
            f"each row has arrays of shape {', '.join(str([*x]) for x in shapes[:4])}."
            f" If it is a batch of {size} rows, a step takes {size} times as many rows"
            " as the plan says: train with"
            " step.stream(source, batched=True). If it is one row, such as a sequence,"
            " ignore this",
            DataWarning,
        )


def _is_plain(part: Any) -> bool:
    """Return whether a part of a list says that the list is one array."""
    return isinstance(part, (list, bool, int, float, complex, str, bytes, np.generic))


def _is_array_in(item: Any) -> Callable[[Any], bool]:
    """Return a question about the parts of a row or batch: whether one is a list that
    is one array.
    """
    has_fields = isinstance(item, list) and not all(map(_is_plain, item))
    return lambda part: isinstance(part, list) and not (has_fields and part is item)


def _refuse_differing(arrays: Sequence[Any], name: NameRow, *, row_axes: int) -> None:
    """Raise the error about the first row that has other fields or shapes than the
    first one.
    """
    for place, item in enumerate(arrays):
        for leaf, was, now in differing_leaves(
            arrays[0], item, lambda x: np.shape(x)[row_axes:]
        ):
            here, there = (
                "absent" if shape is None else f"of shape {list(shape)}"
                for shape in (now, was)
            )
            raise DataError(
                f"{name(place)}: {leaf or 'the array'} is {here}, but {there} in"
                f" {name(0)}",
                fix=_PAD,
            )
        found, first = map(jax.tree.structure, (item, arrays[0]))
        if found != first:
            raise DataError(
                f"{name(place)} is {found}, but {name(0)} is {first}", fix=_PAD
            )


def _no_numbers(arrays: Sequence[Any], name: NameRow) -> DataError:
    """Return the error about the first row that has no numbers in a field."""
    path, place, x = next(
        (path, place, x)
        for place, item in enumerate(arrays)
        for path, x in jax.tree.leaves_with_path(item)
        if not has_numbers(x.dtype)
    )
    return DataError(
        f"batch{jax.tree_util.keystr(path)} cannot be put on a device: {name(place)}"
        f" has {'a text' if x.dtype.kind == 'U' else x.dtype}",
        fix="give rows that are pytrees, such as dicts, of numbers, and encode texts",
    )
