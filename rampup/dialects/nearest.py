"""Rules as data, and the nearest legal values of a broken one, found by trying: what is offered breaks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, Literal, TypeVar

from rampup.dialects.verdict import Violation
from rampup.errors import RampupError
from rampup.plan.numbers import to_yaml_number

T = TypeVar("T")
MAX_TRIED = 512
Found = Literal["validator", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[T]):
    """One rule of another system.

    Attributes:
        name: its id, such as `maxtext.ramp_grows`.
        keys: the keys to change; nearest values are those of the first.
        holds: whether a file keeps it; also true where it does not apply.
        message: the rule, the arithmetic and the numbers of a file that breaks it.
        candidates: values of the first key to try, the nearest first.
        found_by: whether that system's own check finds it, or the run.
    """

    name: str
    keys: tuple[str, ...]
    holds: Callable[[T], bool]
    message: Callable[[T], str]
    candidates: Callable[[T], Iterable[Any]] = lambda _: ()
    found_by: Found = "validator"


def find_violations(
    rules: Sequence[Rule[T]], values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], T]
) -> tuple[Violation, ...]:
    """Return what a file breaks, all of it.

    Args:
        rules: the system's rules.
        values: the file's values by key.
        make: from values to what the rules look at; it may raise a RampupError for values that make no sense.

    Returns:
        The violations, each with up to one legal value below and one above that mend it and break no other rule.

    Example:
        >>> even = Rule(name="even", keys=("n",), holds=lambda file: file["n"] % 2 == 0, message=lambda file: "n must be even",
        ...     candidates=lambda file: around(file["n"]))
        >>> find_violations([even], {"n": 3}, dict)[0].nearest
        (2, 4)
    """
    file = make(values)
    broken = broken_rules(rules, file)
    return tuple(
        Violation(
            rule=rule.name,
            keys=rule.keys,
            message=with_nearest(rule.message(file), rule.keys[0], nearest),
            nearest=nearest,
            found_by=rule.found_by,
        )
        for rule in broken
        for nearest in [nearest_values(rule, rules, broken, values, make)]
    )


def around(value: Fraction | int, step: Fraction | int = 1, *, origin: Fraction | int = 0) -> list[Fraction]:
    """Return multiples of `step` (plus `origin`) on both sides of `value`, the nearest first.

    Example:
        >>> [int(n) for n in around(10, 4)[:4]]
        [8, 12, 4, 16]
    """
    exact, width = Fraction(value) - origin, Fraction(step)
    if width <= 0:
        return []
    low = exact // width
    numbers = [low - k for k in range(MAX_TRIED)] + [low + 1 + k for k in range(MAX_TRIED)]
    return sorted((n * width + origin for n in numbers), key=lambda n: abs(n - Fraction(value)))


def nearest_values(
    rule: Rule[T],
    rules: Sequence[Rule[T]],
    broken: Sequence[Rule[T]],
    values: Mapping[str, Any],
    make: Callable[[Mapping[str, Any]], T],
) -> tuple[Any, ...]:
    """Return up to one legal value of a rule's first key below and one above the given one."""
    key, before = rule.keys[0], values[rule.keys[0]]
    number = isinstance(before, int | Fraction) and not isinstance(before, bool)

    def legal(value: Any, accepted: set[str]) -> bool:
        try:
            file = make({**values, key: value})
            return rule.holds(file) and all(other.name in accepted or other.holds(file) for other in rules)
        except RampupError:
            return False

    others = {other.name for other in broken} - {rule.name}
    # A value that mends the whole file is worth more than one that leaves the other rules broken.
    for accepted in (set(), others) if others else (others,):
        below: list[Any] = []
        above: list[Any] = []
        for value in rule.candidates(make(values)):
            side = below if number and value is not None and value < before else above
            if value != before and not side and legal(value, accepted):
                side.append(value)
            if above and (below or not number):
                break
        if below or above:
            return tuple(to_yaml_number(value) if isinstance(value, Fraction) else value for value in [*below, *above])
    return ()


def broken_rules(rules: Sequence[Rule[T]], file: T) -> list[Rule[T]]:
    """Return the rules that a file breaks, in the order of the table."""
    return [rule for rule in rules if not rule.holds(file)]


def with_nearest(message: str, key: str, nearest: Sequence[Any]) -> str:
    """Return a message with the nearest legal values at its end, if there are any."""
    if not nearest:
        return message
    words = {True: "true", False: "false", None: "null"}
    shown = ", ".join(words[value] if value is None or isinstance(value, bool) else str(value) for value in nearest)
    return f"{message}; nearest {key}: {shown}"
