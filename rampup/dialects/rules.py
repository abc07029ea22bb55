"""What the tables of rules of the reinforcement-learning systems share: counts, candidates, words."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rampup.dialects.nearest import Found, Rule, broken_rules, nearest_values, with_nearest
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Violation
from rampup.errors import ConfigError
from rampup.plan import numbers
from rampup.plan.numbers import MAX_COUNT

MAX_FACTOR = 1_000


class Job(Protocol):
    """What rules look at: a file's settings, and whether its counts are all positive, without which nothing follows."""

    @property
    def settings(self) -> Settings:
        """The file."""

    @property
    def usable(self) -> bool:
        """Whether the other numbers can be computed."""


J = TypeVar("J", bound=Job)


def violations(rules: Sequence[Rule[J]], settings: Settings, build: Callable[[Settings], J]) -> tuple[Violation, ...]:
    """Return every rule that a file breaks, with legal values of its first key that has any.

    Args:
        rules: the system's table.
        settings: the file.
        build: makes of settings what the rules look at; called again for every value that is tried.
    """
    original = settings.values

    def make(values: Mapping[str, Any]) -> J:
        new = {name: value for name, value in values.items() if value is not original[name]}
        if any(isinstance(value, int) and value > MAX_COUNT for value in new.values()):
            raise ConfigError(f"no file can say a number above {MAX_COUNT:,}")
        given = settings.given | new.keys()
        return build(dataclasses.replace(settings, values=values, given=given))

    job = make(original)
    broken = broken_rules(rules, job)

    def violation(rule: Rule[J]) -> Violation:
        nearest = nearest_values(rule, rules, broken, original, make)
        for key in rule.keys if not nearest else ():
            keys = (key, *(other for other in rule.keys if other != key))
            sizes_near = plausible(original[key])
            other = dataclasses.replace(rule, keys=keys, candidates=functools.partial(_always, sizes_near))
            nearest = nearest_values(other, rules, broken, original, make)
            if nearest:
                rule = other
                break
        message = with_nearest(rule.message(job), rule.keys[0], nearest)
        return Violation(rule=rule.name, keys=rule.keys, message=message, nearest=nearest, found_by=rule.found_by)

    return tuple(map(violation, broken))


def _always(candidates: Sequence[Any], job: Job) -> Sequence[Any]:
    return candidates


def plausible(value: Any) -> list[int]:
    """Return sizes that are often legal, nearest to a size first; nothing for what is no size.

    Example:
        >>> plausible(100)[:6], plausible("fsdp")
        ([100, 99, 101, 98, 102, 97], [])
    """
    if isinstance(value, bool) or not isinstance(value, int | None):
        return []
    size = max(value or 1, 1)
    found = {*range(max(size - 16, 1), size + 17), *(size * n for n in range(2, 9)), *(size // n for n in range(2, 17))}
    found |= {2**power for power in range(13)}
    return sorted(found - {0}, key=lambda n: (abs(n - size), n))


def where_usable(rules: Iterable[Rule[J]]) -> list[Rule[J]]:
    """Return rules that keep quiet about a job whose counts are not even positive."""

    def guarded(rule: Rule[J]) -> Rule[J]:
        return dataclasses.replace(rule, holds=lambda job: not job.usable or rule.holds(job))

    return [guarded(rule) for rule in rules]


def positive(
    system: str, key: str, *, found_by: Found, why: str, applies: Callable[[Any], bool] = lambda job: True
) -> Rule[Any]:
    """Return the rule that a count, where it applies, is at least 1 or unset; `why` says what happens otherwise."""
    return Rule(
        name=f"{system}.positive.{key}",
        keys=(key,),
        holds=lambda job: not applies(job) or job.settings[key] is None or job.settings[key] >= 1,
        message=lambda job: f"{key}={job.settings[key]:,} must be at least 1: {why}",
        candidates=lambda job: [*range(1, 65), *(2**power for power in range(7, 13))],
        found_by=found_by,
    )


def multiples(value: int, *steps: int, number: int = 40) -> list[int]:
    """Return positive multiples of each step around `value`, nearest first; steps below 1 give none.

    Example:
        >>> multiples(1000, 512, number=1)
        [1024, 512]
        >>> multiples(10, 4, 6, number=1)
        [8, 12, 6]
    """
    found: set[int] = set()
    for step in steps:
        if step >= 1:
            below = value // step
            found.update(n * step for n in range(max(below - number + 1, 1), below + number + 1))
    return sorted(found, key=lambda n: (abs(n - value), n))


def divisors(number: int, near: int | None = None) -> list[int]:
    """Return the divisors of a positive number, nearest to `near` first; of a huge one, those that are found soon.

    Example:
        >>> divisors(12), divisors(12, near=5), divisors(0)
        ([1, 2, 3, 4, 6, 12], [4, 6, 3, 2, 1, 12], [])
    """
    if number < 1:
        return []
    if number <= numbers.MAX_SAMPLES:
        found = numbers.divisors(number)
    else:
        small = [factor for factor in range(1, MAX_FACTOR + 1) if number % factor == 0]
        found = sorted({*small, *(number // factor for factor in small)})
    return found if near is None else sorted(found, key=lambda n: (abs(n - near), n))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "prompt"), counted(1024, "mini batch"), counted(0, "pass")
        ('1 prompt', '1,024 mini batches', '0 passes')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}" + ("es" if noun.endswith(("ch", "s")) else "s")
