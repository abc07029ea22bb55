"""The nearest legal configuration: which few values to change in a file that is refused.

Errors name the key to blame and legal values near the refused one. A search tries these, the fewest and smallest changes first,
each on the text of the file itself, until a configuration passes every check.
"""

from __future__ import annotations

import codecs
import difflib
import functools
import heapq
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.config.files import yaml_value
from rampup.config.load import BASE, ENVIRONMENT_PREFIX, find_config, load_config, locate_values
from rampup.config.schema import KEYS, Config
from rampup.config.yaml import Located, parse_mapping, parse_scalar, positions, read_text
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError, RampupError
from rampup.plan.numbers import AUTO, exact_fraction, parse_count

MAX_TRIES = 300
# How alike two words are, from 0 to 1, if one is a slip of the other.
ALIKE = 0.6
SCHEDULE, LINEAR = "batch_size_schedule", "enable_rampup_batch_size"
DEVICES, PARALLELISM = "num_devices", "_parallelism"
_positions = functools.lru_cache(maxsize=8)(positions)
# Further than any change of size: another meaning (-1 = automatic), other hardware.
OTHER_MEANING, OTHER_HARDWARE = 2.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value to change.

    Attributes:
        key: the key; for a misspelt one, its right name.
        before, after: the value as written; None before, where the file does not set the key.
        where: the file and line, the command line, or the environment's variable.
        renamed: the misspelt name, if that is what changes.
    """

    key: str
    before: str | None
    after: str
    where: str
    renamed: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Return the change as `rampup fix --json` prints it."""
        return {name: getattr(self, name) for name in ("key", "before", "after", "where", "renamed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A legal configuration near a refused one.

    Attributes:
        file: the file.
        before, text: its content, and what it should be.
        changes: what differs, in the file or outside; empty where the configuration was legal.
        problems: what was wrong.
    """

    file: Path
    before: str
    text: str
    changes: tuple[Change, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def patch(self) -> str:
        """The change of the file as a unified diff; empty where it stays as it is."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.text))
        lines = difflib.unified_diff(before, after, str(self.file), str(self.file))
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A configuration on the way: the file's text, the settings outside it, and what was changed so far."""

    text: str
    overrides: tuple[str, ...]
    environ: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)
    distance: float = 0.0


def find_fix(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    check: Callable[[Config], object],
) -> Fix:
    """Return the nearest legal configuration: the fewest values changed, and among those the smallest changes.

    Args:
        path, overrides, environ: as for `load_config`. A value that was set outside the file is changed there.
        check: what a configuration has to pass, such as building its plan; raises a RampupError where it does not.

    Raises:
        RampupError: what is left wrong where no legal configuration was found near, or why the file cannot be read.

    Example:
        >>> from rampup.config.build import build_plan
        >>> fix = find_fix("base.yml", ["per_device_batch_size=15"], check=lambda config: build_plan(config, 4))
        >>> [(change.key, change.before, change.after, change.where) for change in fix.changes]
        [('per_device_batch_size', '15', '16', 'command line')]
    """
    file = find_config(path)
    text = read_text(file)
    parse_mapping(text, str(file))
    start = _Draft(text=text, overrides=tuple(overrides), environ=environ or {})
    _, problems = _problems(file, start, check)
    draft = _search(file, start, check)
    changes = tuple(draft.changes.values())
    return Fix(file=file, before=text, text=draft.text, changes=changes, problems=tuple(map(str, problems)))


def write_fix(fix: Fix) -> None:
    """Write the fixed text into the file, whole or not at all; its permissions stay.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = fix.file.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        mark = codecs.BOM_UTF8 if target.read_bytes().startswith(codecs.BOM_UTF8) else b""
        temporary.write_bytes(mark + fix.text.encode())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the file: {error.strerror or error}", path=str(fix.file)) from None


def _search(file: Path, start: _Draft, check: Callable[[Config], object]) -> _Draft:
    count = itertools.count()
    waiting = [(0, 0.0, next(count), start)]
    seen = {_identity(start)}
    furthest: tuple[tuple[bool, int, int], _Draft, Sequence[RampupError]] | None = None
    for _ in range(MAX_TRIES):
        if not waiting:
            break
        *_, draft = heapq.heappop(waiting)
        checked, problems = _problems(file, draft, check)
        if not problems:
            return draft
        # A value that was put right is progress; a change that only moved the problem elsewhere is not.
        rank = (checked, -len(problems), 0 if checked else len(draft.changes))
        if furthest is None or rank > furthest[0]:
            furthest = (rank, draft, problems)
        for changed in _next_drafts(file, draft, problems):
            if (identity := _identity(changed)) not in seen:
                seen.add(identity)
                heapq.heappush(waiting, (len(changed.changes), changed.distance, next(count), changed))
    assert furthest is not None
    raise _nothing_found(*furthest[1:])


def _nothing_found(draft: _Draft, problems: Sequence[RampupError]) -> RampupError:
    done = " and ".join(f"{change.key}={change.after}" for change in draft.changes.values() if change.renamed is None)
    left = problems[0] if len(problems) == 1 else f"{problems[0]}, and {len(problems) - 1:,} more"
    return ConfigError(
        f"no legal configuration was found near this one; what is left{f' with {done}' if done else ''}: {left}",
        key=problems[0].key,
        nearest=problems[0].nearest,
    )


def _identity(draft: _Draft) -> frozenset[tuple[str, str]]:
    return frozenset((change.renamed or change.key, change.after) for change in draft.changes.values())


def _problems(file: Path, draft: _Draft, check: Callable[[Config], object]) -> tuple[bool, tuple[RampupError, ...]]:
    """Return whether the configuration could be read, and what is wrong with it."""
    readable = False
    try:
        config = load_config(file, draft.overrides, environ=draft.environ, text=draft.text)
        readable = True
        check(config)
    except RampupError as error:
        return readable, error.problems or (error,)
    return True, ()


def _next_drafts(file: Path, draft: _Draft, problems: Sequence[RampupError]) -> Iterator[_Draft]:
    """Yield the configurations one change away that may solve a problem."""
    unknown = [problem for problem in problems if problem.key and problem.key not in KEYS]
    if unknown:
        # As long as a name is unknown, values are not looked at.
        yield from _renamed(draft, unknown[0], file)
        return
    try:
        located = locate_values(file, draft.overrides, draft.environ, KEYS, text=draft.text)
    except ConfigError:
        return
    bad = [p for p in problems if p.key in located and not KEYS[p.key].allows(located[p.key].value)]
    for problem in bad[:1] or problems:
        changed = [
            edited
            for key, value, extra in _suggestions(problem, located)
            for edited in _with_value(draft, key, value, file, located.get(key), extra)
        ]
        # What is wrong in itself must change; another value may still suit the other keys better, and is found by their rules.
        yield from sorted(changed, key=lambda edited: edited.distance)[: 1 if bad else None]


def _suggestions(problem: RampupError, located: Mapping[str, Located]) -> Iterator[tuple[str, Any, float]]:
    """Yield keys and values that may solve a problem, and how far they are beside the change of size."""
    name = problem.key
    if name is None:
        return
    before = located[name].value if name in located else getattr(Config(), name)
    if name == SCHEDULE:
        yield from ((name, text, 0.0) for text in _schedules(problem, before))
        # A schedule suffices, and a file that has one often has the linear ramp only from base.yml.
        yield LINEAR, False, 0.0
        return
    if name == DEVICES:
        yield from _axis_sizes(problem, located)
    key = KEYS[name]
    # A value that is none says nothing of what was meant; one that does not suit the other keys may be left to them.
    automatic = key.also if key.allows(before) else ()
    for value in dict.fromkeys([*problem.nearest, *automatic]):
        if (
            (type(value), value) == (type(before), before)
            or not key.allows(value)
            or (name == DEVICES and AUTO in (before, value))
        ):
            continue
        if key.choices and difflib.SequenceMatcher(None, str(before), str(value)).ratio() < ALIKE:
            continue
        yield name, value, OTHER_HARDWARE if name == DEVICES else OTHER_MEANING if value in key.also else 0.0


def _axis_sizes(problem: RampupError, located: Mapping[str, Located]) -> Iterator[tuple[str, Any, float]]:
    """Yield axes of the mesh that divide the devices where their product does not."""
    if not isinstance(problem, BatchDivisibilityError):
        return
    for name in (name for name in KEYS if name.endswith(PARALLELISM) and name in str(problem)):
        size = located[name].value if name in located else AUTO
        if isinstance(size, int) and size > 1 and problem.divisor % size == 0:
            rest, wrong = divmod(problem.value, problem.divisor // size)
            legal = [] if wrong else [n for n in range(1, min(rest, 4 * size) + 1) if rest % n == 0]
            near = [n for n in legal if n < size][-1:] + [n for n in legal if n > size][:1]
            yield from ((name, value, 0.0) for value in near)


def _schedules(problem: RampupError, before: object) -> Iterator[str]:
    """Yield the schedule with each size that cannot be cut replaced by one next to it."""
    if isinstance(problem, BatchDivisibilityError) and isinstance(before, str):
        parts = re.split(r"(?<=:)([^\s,]+)", before)
        for size in map(str, problem.nearest):
            yield "".join(size if _counts(part, problem.value) else part for part in parts)


def _counts(text: str, value: int) -> bool:
    try:
        return parse_count(text, what="size") == value
    except RampDefinitionError:
        return False


def _renamed(draft: _Draft, problem: RampupError, file: Path) -> Iterator[_Draft]:
    """Yield the draft with a misspelt key, or the name of a misspelt base file, put right."""
    assert problem.key is not None
    if problem.key == BASE:
        for name in problem.nearest:
            if edit := _in_file(draft, BASE, f"{name}.yml", file, own=True):
                yield _noted(*edit, edit[1].before, name, 0.0)
        return
    for name in map(str, problem.nearest):
        if difflib.SequenceMatcher(None, problem.key.lower(), name).ratio() < ALIKE:
            continue
        change = Change(key=name, before=problem.key, after=name, where=_place(problem), renamed=problem.key)
        changes = {**draft.changes, problem.key: change}
        overrides = tuple(re.sub(f"^{re.escape(problem.key)}=", f"{name}=", setting) for setting in draft.overrides)
        if overrides != draft.overrides:
            yield replace(draft, overrides=overrides, changes=changes, distance=draft.distance + 1)
            continue
        places = _positions(draft.text)
        if problem.key in places and name not in places:
            text = _replaced(draft.text, places[problem.key][0], name)
            yield replace(draft, text=text, changes=changes, distance=draft.distance + 1)


def _place(problem: RampupError) -> str:
    path, line = getattr(problem, "path", None), getattr(problem, "line", None)
    return f"{path}:{line}" if line is not None else str(path or "file")


def _with_value(draft: _Draft, key: str, value: Any, file: Path, located: Located | None, extra: float) -> Iterator[_Draft]:
    """Yield the draft with another value of a key, wherever the value in force was set."""
    before = getattr(Config(), key) if located is None else located.value
    if located is None or located.line is not None:
        edit = _in_file(draft, key, value, file, own=located is not None and located.path == str(file))
        if edit is not None:
            yield _noted(*edit, before, value, extra)
        return
    after = "null" if value is None else str(value)
    overrides = tuple(f"{key}={after}" if setting.startswith(f"{key}=") else setting for setting in draft.overrides)
    variable = ENVIRONMENT_PREFIX + key.upper()
    environ = {**draft.environ, variable: after} if variable in draft.environ else draft.environ
    change = Change(key=key, before=str(before), after=after, where=located.path)
    yield _noted(replace(draft, overrides=overrides, environ=environ), change, before, value, extra)


def _in_file(draft: _Draft, key: str, value: Any, file: Path, *, own: bool) -> tuple[_Draft, Change] | None:
    """Return the draft with the value's text replaced where the file has the key (`own`), or with a line for it at the end.

    None where the value's text is not to be replaced: an alias of another value, or one that has an alias.
    """
    after = yaml_value(value)
    if not own:
        newline = "\r\n" if "\r\n" in draft.text else "\n"
        start = draft.text if draft.text.endswith("\n") else draft.text + newline
        change = Change(key=key, before=None, after=after, where=f"{file}, a new line")
        return replace(draft, text=f"{start}{key}: {after}{newline}"), change
    places = _positions(draft.text)
    if key not in places:
        return None
    place = places[key][1]
    before = draft.text[place]
    gap = "" if before or draft.text[place.start - 1].isspace() else " "
    end = "\n" if before.endswith("\n") else ""
    line = draft.text.count("\n", 0, place.start) + 1
    change = Change(key=key, before=before.strip(), after=after, where=f"{file}:{line}")
    return replace(draft, text=_replaced(draft.text, place, f"{gap}{after}{end}")), change


def _noted(draft: _Draft, change: Change, before: object, after: object, extra: float) -> _Draft:
    """Return the draft with its change noted; a second change of a key counts from what was there first."""
    first = draft.changes.get(change.key)
    if first is not None and first.renamed is None:
        change = replace(change, before=first.before, where=first.where)
        before = parse_scalar(first.before, "") if first.before is not None else getattr(Config(), change.key, None)
    distance = draft.distance + _distance(before, after) + extra
    return replace(draft, changes={**draft.changes, change.key: change}, distance=distance)


def _distance(before: object, after: object) -> float:
    """Return how far two values are from each other: relative for numbers, 0 to 1 for words."""
    old, new = _number(before), _number(after)
    if old is not None and new is not None:
        return float(abs(old - new) / (max(abs(old), abs(new)) or 1))
    return 1 - difflib.SequenceMatcher(None, str(before), str(after)).ratio()


def _number(value: object) -> Fraction | None:
    try:
        return exact_fraction(value, what="value")
    except RampDefinitionError:
        return None


def _replaced(text: str, place: slice, by: str) -> str:
    return text[: place.start] + by + text[place.stop :]
