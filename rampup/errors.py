"""Every error that rampup raises on purpose.

A message states the rule, both numbers with their names, where it happened and the nearest fix. Each class also derives from
the built-in exception that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

MAX_LISTED = 20


class RampupError(Exception):
    """Base of all errors that rampup raises on purpose.

    Attributes:
        key: the configuration key to change, if one is to blame.
        nearest: legal values near the refused one, smallest first.
        problems: every problem found, where there was more than one; otherwise empty.
    """

    def __init__(self, message: str, *, key: str | None = None, nearest: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.nearest = tuple(nearest)
        self.problems: tuple[RampupError, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigError(RampupError, ValueError):
    """A configuration that cannot be read: an unknown key, a bad value, a broken file.

    Attributes:
        path: the file, or the name of another place that the value came from.
        line: the line in that file, counted from 1.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        nearest: Sequence[object] = (),
        path: str | None = None,
        line: int | None = None,
    ) -> None:
        where = "" if path is None else f"{path}:{line}: " if line is not None else f"{path}: "
        super().__init__(where + message, key=key, nearest=nearest)
        self.path = path
        self.line = line


class RampDefinitionError(RampupError, ValueError):
    """A ramp that is no ramp: thresholds, increments or their order are wrong."""


class BatchDivisibilityError(RampupError, ValueError):
    """A batch that cannot be cut as asked.

    Attributes:
        value: the number that does not divide.
        divisor: what it must be a multiple of.
        nearest_below: the largest legal value below, or None.
        nearest_above: the smallest legal value above, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        value: int,
        divisor: int,
        key: str | None = None,
        nearest: Sequence[object] | None = None,
    ) -> None:
        below, above = nearest_multiples(value, divisor)
        if nearest is None:
            nearest = [n for n in (below, above) if n is not None]
        super().__init__(message, key=key, nearest=nearest)
        self.value = value
        self.divisor = divisor
        self.nearest_below = below
        self.nearest_above = above


class PipelineShapeError(RampupError, ValueError):
    """Pipeline stages, repeats, layers and microbatches that do not fit together."""


class ResumeMismatchError(RampupError, ValueError):
    """A checkpoint that does not belong to this plan, this data or these devices."""


class DataError(RampupError, ValueError):
    """Training data that cannot be read, or too little of it."""


class StorageError(RampupError, OSError):
    """The disk refuses what a run must write: a checkpoint or its metrics."""


class NonFiniteError(RampupError, ArithmeticError):
    """Too many optimizer steps in a row whose loss or gradient is not finite.

    Attributes:
        steps: the steps, in order.
    """

    def __init__(self, message: str, *, steps: Sequence[int], key: str | None = None) -> None:
        super().__init__(message, key=key)
        self.steps = tuple(steps)


class MissingDependencyError(RampupError, ImportError):
    """An optional package that this feature needs is not installed."""


def nearest_multiples(value: int, divisor: int) -> tuple[int | None, int]:
    """Return the positive multiples of `divisor` next to `value`, below and above.

    Example:
        >>> nearest_multiples(1000, 512)
        (512, 1024)
        >>> nearest_multiples(3, 8)
        (None, 8)
    """
    below = (value - 1) // divisor * divisor
    return (below if below > 0 else None), max(below + divisor, divisor)


def raise_together(problems: Sequence[RampupError]) -> None:
    """Raise all problems as one error of the first one's type; do nothing when there are none.

    Example:
        >>> raise_together([])
        >>> raise_together([RampDefinitionError("no increment", key="a"), ConfigError("no steps", key="b")])
        Traceback (most recent call last):
        rampup.errors.RampDefinitionError: 2 problems:
          1. no increment
          2. no steps
    """
    flat = [part for problem in problems for part in problem.problems or (problem,)]
    if not flat:
        return
    if len(flat) == 1:
        raise flat[0]
    combined = copy.copy(flat[0])
    lines = [f"  {number}. {problem}" for number, problem in enumerate(flat[:MAX_LISTED], start=1)]
    if len(flat) > MAX_LISTED:
        lines.append(f"  and {len(flat) - MAX_LISTED:,} more")
    combined.args = ("\n".join([f"{len(flat)} problems:", *lines]),)
    combined.problems = tuple(flat)
    raise combined


def _rebuild(cls: type[RampupError], args: tuple[Any, ...], state: dict[str, Any]) -> RampupError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
