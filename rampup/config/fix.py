"""Fix a refused configuration: change each bad value to the nearest legal one, in the
text of the file.

An error names the key to blame and the legal values next to the refused one. One such
value is applied at a time; the configuration is then checked again, because a value that
was hidden behind another problem may be refused too.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.config.files import yaml_value
from rampup.config.key import keys_of_alias
from rampup.config.load import BASE, find_config, load_config, locate_values
from rampup.config.rules import LINEAR
from rampup.config.schema import KEYS, Config
from rampup.config.yaml import Located, parse_mapping, positions, read_text
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampDefinitionError,
    RampupError,
)
from rampup.plan.nearest import END, START
from rampup.plan.numbers import AUTO, exact_fraction, nearest_in, parse_count

MAX_CHANGES = 60
# Two words are spellings of each other if difflib's ratio, from 0 to 1, is at least
# this.
MIN_SIMILARITY = 0.6
# The final batch is kept if another key of the ramp can absorb the change within a
# factor of two.
MAX_ALTERNATIVE_DISTANCE = 0.5
# A size of a schedule moves by at most this share of the larger of the two; further
# away, it is not the ramp that was meant.
MAX_SIZE_CHANGE = 0.25
MAX_SCHEDULES = 4096  # of near sizes that are tried
SCHEDULED_SIZES = re.compile(r"(?<=:)[^\s,]+")
SCHEDULE = "batch_size_schedule"
DEVICES = "num_devices"
PARALLELISM = "_parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed value."""

    key: str  # the key; the right name if the name was misspelled
    # The value as written, before and after. `before` is None if the file did not set
    # the key.
    before: str | None
    after: str
    where: str  # the file and line
    renamed: str | None = None  # the misspelled name, if the name is what changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A legal configuration near a refused one."""

    file: Path
    # Its content, before and after.
    before: str
    text: str
    # The changed values; empty if the configuration was legal.
    changes: tuple[Change, ...] = ()
    problems: tuple[str, ...] = ()  # the messages of the errors

    @property
    def patch(self) -> str:
        """The change of the file as a unified diff; empty if the file does not
        change.
        """
        before, after = (
            text.splitlines(keepends=True) for text in (self.before, self.text)
        )
        lines = difflib.unified_diff(before, after, str(self.file), str(self.file))
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )


def find_fix(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    check: Callable[[Config], object],
) -> Fix:
    """Return a legal configuration near a refused one, for which `check` raises no
    RampupError, or raise what is left.

    Only the file is changed: not its base, and not what is set on the command line or
    by a variable.
    """
    file = find_config(path)
    text = read_text(file)
    parse_mapping(text, str(file))
    start = _Draft(
        file=file, text=text, overrides=tuple(overrides), environ=environ or {}
    )
    found = start.problems(check)
    edits, draft = _find_edits(start, found, check)
    if problems := draft.problems(check):
        raise _nothing_near(problems, draft)
    # A change may have been made for a problem that another change solves too.
    for key in list(edits)[::-1] if len(edits) > 1 else ():
        fewer = {name: value for name, value in edits.items() if name != key}
        without = start.with_edits(fewer)
        if without is not None and not without.problems(check):
            edits, draft = fewer, without
    return Fix(
        file=file,
        before=text,
        text=draft.text,
        changes=tuple(draft.changes.values()),
        problems=tuple(map(str, found)),
    )


def _find_edits(
    start: _Draft, problems: Sequence[RampupError], check: Callable[[Config], object]
) -> tuple[dict[str, str], _Draft]:
    """Return edits by name, each for the first problem that has one, and the draft with
    them; those that are found before none is left, or no way to solve one.
    """
    draft = start
    edits: dict[str, str] = {}
    tried: set[tuple[str, str]] = set()
    while problems and len(tried) < MAX_CHANGES:
        # What was written, with the right names.
        names = {name: key for name, key in edits.items() if name not in KEYS}
        meant = (start.with_edits(names) or start).located()
        ways: list[tuple[tuple[str, str], _Draft]] = []
        for problem in problems:
            for name, value in _suggestions(problem, problems, draft):
                edited = start.with_edits(edits | {name: value})
                if (
                    edited is not None
                    and (name, value) not in tried
                    and (name not in KEYS or _keeps_ramp(meant, edited.located()))
                ):
                    ways.append(((name, value), edited))
            if ways:
                break
        if not ways:
            break
        # The nearest value, unless another one leaves nothing else to change.
        whole = (way for way in ways if not way[1].problems(check))
        edit, draft = next(whole, ways[0])
        edits |= dict([edit])
        tried.add(edit)
        problems = draft.problems(check)
    return edits, draft


def _nothing_near(problems: Sequence[RampupError], draft: _Draft) -> ConfigError:
    """Return the error about the problems that edits have left."""
    changed = " and ".join(
        f"{c.key}={c.after}" for c in draft.changes.values() if c.renamed is None
    )
    with_changes = f" with {changed}" if changed else ""
    sizes = any(
        problem.key == SCHEDULE and isinstance(problem, BatchDivisibilityError)
        for problem in problems
    )
    rule = (
        " that keeps the ramp (it grows where it grew, and a size moves by at most"
        f" {MAX_SIZE_CHANGE:.0%})" * sizes
    )
    more = f", and {len(problems) - 1:,} more" * (len(problems) > 1)
    entry = draft.located().get(problems[0].key or "")
    if entry is not None and entry.line is None:
        more += (
            f"; {problems[0].key} is set outside the file ({entry.path}), where nothing"
            " is changed"
        )
    return ConfigError(
        f"no legal configuration was found near this one{rule}; what is"
        f" left{with_changes}: {problems[0]}{more}",
        key=problems[0].key,
        nearest=problems[0].nearest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A configuration on the way: the file's text, the settings outside it, which stay,
    and the changes so far by edited name.
    """

    file: Path
    text: str
    overrides: tuple[str, ...]
    environ: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)

    def problems(self, check: Callable[[Config], object]) -> tuple[RampupError, ...]:
        """Return the errors of the configuration, none if it is legal."""
        try:
            check(
                load_config(
                    self.file, self.overrides, environ=self.environ, text=self.text
                )
            )
        except RampupError as error:
            return error.problems or (error,)
        return ()

    def located(self) -> dict[str, Located]:
        """Return the value of each key that is set, and where; nothing while the file
        cannot be read.
        """
        try:
            return locate_values(
                self.file, self.overrides, self.environ, KEYS, text=self.text
            )[0]
        except ConfigError:
            return {}

    def is_in_file(self, entry: Located | None) -> bool:
        """Return whether a value is set in the file itself: not in its base, and not
        outside, on the command line or by a variable.
        """
        return entry is not None and entry.path == str(self.file)

    def with_edits(self, edits: Mapping[str, str]) -> _Draft | None:
        """Return the draft after edits, names first: a key with a value as in YAML, or
        an unknown name with the name of a key.

        None if one cannot be made: the value or the name comes from outside the file,
        the text of the value is an alias or has one, or the right name is already
        there.
        """
        draft: _Draft | None = self
        for name in sorted(edits, key=lambda name: name in KEYS):
            draft = draft and draft._with_edit(name, edits[name])
        return draft

    def _with_edit(self, name: str, after: str) -> _Draft | None:
        entry = self.located().get(name)
        if entry is not None and entry.line is None:
            return None
        if name in KEYS and not self.is_in_file(entry):
            newline = "\r\n" if "\r\n" in self.text else "\n"
            gap = "" if self.text.endswith(newline[-1]) else newline
            text = f"{self.text}{gap}{name}: {after}{newline}"
            change = Change(
                key=name, before=None, after=after, where=f"{self.file}, a new line"
            )
            return self._changed(name, change, text)
        is_name = name not in KEYS and name != BASE
        places = positions(self.text)
        if name not in places or (is_name and after in places):
            return None
        place, written = places[name][0 if is_name else 1], after
        line = self.text.count("\n", 0, place.start) + 1
        where = f"{self.file}:{line}"
        change = Change(key=after, before=name, after=after, where=where, renamed=name)
        if not is_name:
            before = self.text[place]
            # A value without text follows the colon directly; a block value includes
            # its line's end.
            gap = "" if before or self.text[place.start - 1].isspace() else " "
            written = f"{gap}{after}" + ("\n" if before.endswith("\n") else "")
            change = Change(key=name, before=before.strip(), after=after, where=where)
        text = self.text[: place.start] + written + self.text[place.stop :]
        return self._changed(name, change, text)

    def _changed(self, name: str, change: Change, text: str) -> _Draft:
        """Return the draft with another text of the file."""
        return replace(self, text=text, changes={**self.changes, name: change})


def _suggestions(
    problem: RampupError, problems: Sequence[RampupError], draft: _Draft
) -> Iterator[tuple[str, str]]:
    """Yield edits that may solve one of a round's problems, nearest first: a key and a
    value, or an unknown name and a key.
    """
    name = problem.key
    if name is None:
        return
    if name == BASE:
        yield from ((BASE, f"{near}.yml") for near in problem.nearest)
        return
    if name not in KEYS:
        aliases, quantity = keys_of_alias(name, KEYS)
        for near in () if quantity else map(str, problem.nearest):
            if near in aliases[:1] or _similarity(name.lower(), near) >= MIN_SIMILARITY:
                yield name, near
        return
    located = draft.located()
    before = _value(located, name)
    if (
        name == SCHEDULE
        and isinstance(problem, BatchDivisibilityError)
        and isinstance(before, str)
    ):
        refused = {
            p.value: p.nearest
            for p in problems
            if p.key == SCHEDULE and isinstance(p, BatchDivisibilityError)
        }
        if (schedule := _with_near_sizes(before, refused)) is not None:
            yield SCHEDULE, yaml_value(schedule)
        return
    # Keys and values, each with a rank: the lowest wins, then the smallest change. 0 =
    # another key, if it was set in the file and a small change suffices (this keeps the
    # final batch of a ramp); 1 = a near value of the
    # key to blame; 2 = automatic; 3 = any other key; 4 = other hardware.
    found: list[tuple[int, str, Any]] = []
    for other, values in problem.alternatives.items():
        own = draft.is_in_file(located.get(other))
        for value in values:
            small = _distance(_value(located, other), value) <= MAX_ALTERNATIVE_DISTANCE
            found.append((0 if own and small else 3, other, value))
    if name == DEVICES and isinstance(problem, BatchDivisibilityError):
        found += [(1, axis, size) for axis, size in _other_axes(problem, located)]
    key = KEYS[name]
    # A value of another type says nothing about what was meant. One that only
    # contradicts other keys may become automatic.
    automatic = key.also if key.allows(before) else ()
    for value in dict.fromkeys([*problem.nearest, *automatic]):
        meant = not key.choices or _similarity(before, value) >= MIN_SIMILARITY
        if (
            (type(value), value) == (type(before), before)
            or not key.allows(value)
            or not meant
        ):
            continue
        if name != DEVICES or AUTO not in (before, value):
            found.append(
                (4 if name == DEVICES else 2 if value in key.also else 1, name, value)
            )
    found.sort(key=lambda edit: (edit[0], _distance(_value(located, edit[1]), edit[2])))
    yield from ((name, yaml_value(value)) for _, name, value in found)


def _other_axes(
    problem: BatchDivisibilityError, located: Mapping[str, Located]
) -> Iterator[tuple[str, int]]:
    """Yield near sizes of the mesh axes in a message about devices that their product
    does not divide.
    """
    for axis in KEYS:
        size = _value(located, axis) if axis.endswith(PARALLELISM) else None
        if axis not in str(problem) or not isinstance(size, int) or size < 2:
            continue
        rest, wrong = divmod(problem.value * size, problem.divisor)
        if problem.divisor % size == 0 and not wrong:
            legal = [n for n in range(1, min(rest, 4 * size) + 1) if rest % n == 0]
            yield from ((axis, other) for other in nearest_in(size, legal))


def _with_near_sizes(
    schedule: str, refused: Mapping[int, Sequence[object]]
) -> str | None:
    """Return a schedule with near sizes for refused ones that grows and falls where it
    did. Of several, it is the one whose sizes share the largest divisor, as a microbatch
    that serves all of them divides it; then the one that moves the least.
    """
    written = SCHEDULED_SIZES.findall(schedule)
    try:
        sizes = [parse_count(text, what="size") for text in written]
    except RampDefinitionError:
        return None
    choices = [[int(str(n)) for n in refused.get(size, (size,))] for size in sizes]
    if math.prod(map(len, choices)) > MAX_SCHEDULES:
        return None

    near: list[tuple[int, float, tuple[int, ...]]] = []
    for chosen in itertools.product(*choices):
        moved = [_distance(a, b) for a, b in zip(sizes, chosen, strict=True)]
        if max(moved) <= MAX_SIZE_CHANGE and _shape(chosen) == _shape(sizes):
            near.append((-math.gcd(*chosen), sum(moved), chosen))
    if not near:
        return None
    new = iter(
        text if size == chosen else str(chosen)
        for text, size, chosen in zip(written, sizes, min(near)[2], strict=True)
    )
    return SCHEDULED_SIZES.sub(lambda _: next(new), schedule)


def _shape(sizes: Sequence[int]) -> list[tuple[bool, bool]]:
    """Return where sizes grow and where they fall."""
    return [(a < b, a > b) for a, b in itertools.pairwise(sizes)]


def _keeps_ramp(before: Mapping[str, Located], after: Mapping[str, Located]) -> bool:
    """Return whether the sizes per device are near those that were written, and still
    grow if they did.
    """

    def sizes(located: Mapping[str, Located]) -> list[Fraction]:
        """Return the legal sizes per device: the first and the last of a linear ramp,
        or that of a constant batch.
        """
        if _value(located, SCHEDULE) is not None:
            return []
        ramp = _value(located, LINEAR) if LINEAR in located else END not in located
        values = [
            _value(located, key) for key in ((START, END) if ramp is True else (END,))
        ]
        return (
            [exact_fraction(value, what="size") for value in values]
            if all(map(KEYS[END].allows, values))
            else []
        )

    old, new = sizes(before), sizes(after)
    if len(old) == 2 and old[0] < old[1] and not (len(new) == 2 and new[0] < new[1]):
        return False
    return (
        len(old) != len(new)
        or max(map(_distance, old, new), default=0.0) <= MAX_ALTERNATIVE_DISTANCE
    )


def _value(located: Mapping[str, Located], key: str) -> Any:
    return located[key].value if key in located else getattr(Config(), key)


def _distance(before: object, after: object) -> float:
    """Return the distance of two values: the relative difference of numbers, 1 - the
    similarity of words.
    """
    try:
        old = exact_fraction(before, what="value")
        new = exact_fraction(after, what="value")
    except RampDefinitionError:
        return 1 - _similarity(before, after)
    return float(abs(old - new) / (max(abs(old), abs(new)) or 1))


def _similarity(before: object, after: object) -> float:
    return difflib.SequenceMatcher(None, str(before), str(after)).ratio()
