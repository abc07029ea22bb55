"""The exceptions that rampup raises.

A message states the rule, both numbers with their names, the place and the nearest fix.
Each class also derives from the built-in exception that a caller would expect, so
`except ValueError` works.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from typing import Any

MAX_LISTED = 20


class RampupError(Exception):
    """Base class of all errors that rampup raises.

    Args:
        problem: the rule, both numbers with their names, and the place.
        fix: what the caller can do about it; the message is "problem; fix".

    Attributes:
        key: the configuration key to change, or None.
        nearest: legal values near the rejected one, smallest first.
        alternatives: legal values of other keys; each alone would also solve the
            problem.
        problems: the individual errors, if `raise_together` combined several or closed
            the message. Otherwise empty.
    """

    def __init__(
        self,
        problem: str,
        *,
        fix: str = "",
        key: str | None = None,
        nearest: Sequence[object] = (),
    ) -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.key = key
        self.nearest = tuple(nearest)
        self.alternatives: dict[str, tuple[object, ...]] = {}
        self.problems: tuple[RampupError, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self),), {"args": self.args, **self.__dict__}


class ConfigError(RampupError, ValueError):
    """An invalid configuration: an unknown key, a bad value, or a file that cannot be
    read. Its subclasses say what is invalid.

    Attributes:
        path: the file that the value came from, or another source such as the command
            line.
        line: the line in that file, counted from 1.
    """

    def __init__(
        self,
        problem: str,
        *,
        fix: str = "",
        key: str | None = None,
        nearest: Sequence[object] = (),
        path: str | None = None,
        line: int | None = None,
    ) -> None:
        if path is not None:
            place = path if line is None else f"{path}:{line}"
            problem = f"{place}: {problem}"
        super().__init__(problem, fix=fix, key=key, nearest=nearest)
        self.path = path
        self.line = line


class RampDefinitionError(ConfigError):
    """An invalid ramp definition (thresholds, increments, or their order)."""


class BatchDivisibilityError(ConfigError):
    """A batch size that cannot be split as configured.

    Attributes:
        value: the number that is not a multiple of `divisor`.
        divisor: the number that `value` must be a multiple of.
        nearest_below: the largest positive multiple below `value`, or None.
        nearest_above: the smallest positive multiple that is not below `value`.
    """

    def __init__(
        self,
        problem: str,
        *,
        value: int,
        divisor: int,
        fix: str = "",
        key: str | None = None,
        nearest: Sequence[object] | None = None,
    ) -> None:
        below = max((value - 1) // divisor * divisor, 0)
        self.value = value
        self.divisor = divisor
        self.nearest_below = below or None
        self.nearest_above = below + divisor
        if nearest is None:
            nearest = [n for n in (below, self.nearest_above) if n]
        super().__init__(problem, fix=fix, key=key, nearest=nearest)


class PipelineShapeError(ConfigError):
    """An inconsistent combination of pipeline stages, repeats, layers and
    microbatches.
    """


class ResumeMismatchError(RampupError, ValueError):
    """A checkpoint that does not match the plan, the data or the devices."""


class DataError(RampupError, ValueError):
    """Training data that cannot be read or has too few rows."""


class DataEndedError(DataError):
    """A source of rows that ended before the plan."""


class DataWarning(UserWarning):
    """Training data that look wrong, but may be right."""


class ResumeWarning(UserWarning):
    """A resumed run that computes something else than before."""


class LossWarning(UserWarning):
    """A loss that is not a sum over rows, so that it depends on how a batch is split,
    see `rampup.check_loss`; or one that is not finite, or has the weight 0.
    """


class StorageError(RampupError, OSError):
    """A checkpoint or a metrics file that cannot be written, for example because the
    disk is full.
    """


class NonFiniteError(RampupError, ArithmeticError):
    """Too many consecutive optimizer steps, numbered `steps`, with a loss or gradient
    that is not finite.
    """

    def __init__(
        self,
        problem: str,
        *,
        steps: Sequence[int],
        fix: str = "",
        key: str | None = None,
    ) -> None:
        super().__init__(problem, fix=fix, key=key)
        self.steps = tuple(steps)


class MissingDependencyError(RampupError, ImportError):
    """An optional dependency that is not installed."""


def choice_error(name: str, value: object, choices: Sequence[str]) -> ConfigError:
    """Return the error about an illegal value."""
    return ConfigError(
        f"{name}={repr(value)[:60]} must be one of {', '.join(choices)}",
        key=name,
        nearest=tuple(choices),
    )


def raise_together(problems: Sequence[RampupError], closing: str = "") -> None:
    """Raise all problems, if any, as one error of the first one's type. `closing` ends
    its message: what is not checked yet.
    """
    if problems:
        raise combine(problems, closing)


def combine(problems: Sequence[RampupError], closing: str = "") -> RampupError:
    """Return the error that `raise_together` raises about one or more problems."""
    flat = [part for problem in problems for part in problem.problems or (problem,)]
    if len(flat) == 1 and not closing:
        return flat[0]
    text = f"{flat[0]}; {closing}"
    if len(flat) > 1:
        lines = [f"{len(flat)} problems:"]
        for number, problem in enumerate(flat[:MAX_LISTED], start=1):
            lines.append(f"  {number}. {problem}")
        if len(flat) > MAX_LISTED:
            lines.append(f"  and {len(flat) - MAX_LISTED:,} more")
        if closing:
            lines.append(closing)
        text = "\n".join(lines)
    combined = copy.copy(flat[0])
    combined.args = (text,)
    combined.problems = tuple(flat)
    return combined


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of rampup whose call led here."""
    # In Python 3.12 this is `skip_file_prefixes` of `warnings.warn`.
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("rampup."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def a_type(value: object) -> str:
    """Return the name of a value's type with its article, such as "an Optimizer"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"
