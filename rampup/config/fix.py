"""Fix a refused configuration: change each bad value to the nearest legal one, in the text of the file.

An error names the key to blame and the legal values next to the refused one. Each round applies one such value per error; the
configuration is then checked again, because a value that was hidden behind another problem may be refused too.
"""

from __future__ import annotations

import codecs
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rampup.config.files import yaml_value
from rampup.config.load import BASE, ENVIRONMENT_PREFIX, find_config, load_config, locate_values
from rampup.config.schema import KEYS, Config, keys_for_alias
from rampup.config.yaml import Located, parse_mapping, positions, read_text
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError, RampupError
from rampup.plan.numbers import AUTO, exact_fraction, nearest_in, parse_count

MAX_ROUNDS = 20
# Two words are spellings of each other if difflib's ratio, from 0 to 1, is at least this.
MIN_SIMILARITY = 0.6
# The final batch is kept if another key of the ramp can absorb the change within a factor of two.
MAX_ALTERNATIVE_DISTANCE = 0.5
SCHEDULE, DEVICES, PARALLELISM = "batch_size_schedule", "num_devices", "_parallelism"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One changed value."""

    key: str  # the key; the right name if the name was misspelled
    # The value as written, before and after. `before` is None if the file did not set the key.
    before: str | None
    after: str
    where: str  # the file and line, the command line, or the environment variable
    renamed: str | None = None  # the misspelled name, if the name is what changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A legal configuration near a refused one."""

    file: Path
    # Its content, before and after.
    before: str
    text: str
    changes: tuple[Change, ...] = ()  # the changed values, in the file or outside; empty if the configuration was legal
    problems: tuple[str, ...] = ()  # the messages of the errors

    @property
    def patch(self) -> str:
        """The change of the file as a unified diff; empty if the file does not change."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.text))
        lines = difflib.unified_diff(before, after, str(self.file), str(self.file))
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def find_fix(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    check: Callable[[Config], object],
) -> Fix:
    """Return a legal configuration near a refused one.

    Args:
        path, overrides, environ: as for `load_config`. A value that was set outside the file is changed there.
        check: the check that a configuration must pass, such as building its plan. Raises a RampupError if it does not.

    Raises:
        RampupError: the file cannot be read, or no value that the errors offer leads to a legal configuration. The message
            then names the problem that is left.

    Example:
        >>> from rampup.config.build import build_plan
        >>> fix = find_fix("base.yml", ["per_device_batch_size=15"], check=lambda config: build_plan(config, 4))
        >>> [(change.key, change.before, change.after, change.where) for change in fix.changes]
        [('per_device_batch_size', '15', '16', 'command line')]
    """
    file = find_config(path)
    text = read_text(file)
    parse_mapping(text, str(file))
    draft = start = _Draft(file=file, text=text, overrides=tuple(overrides), environ=environ or {})
    problems = found = start.problems(check)
    edits: dict[str, str] = {}
    tried: set[tuple[str, str]] = set()
    for _ in range(MAX_ROUNDS):
        before = draft
        # A key changes at most once a round, except that several sizes of a schedule may be refused.
        done: set[str | None] = set()
        for problem in problems:
            for key, value in _suggestions(problem, draft) if problem.key not in done else ():
                edited = draft.with_edit(key, value) if key not in done and (key, value) not in tried else None
                if edited is not None:
                    draft = edited
                    edits[key] = value
                    tried.add((key, value))
                    done |= {key, problem.key} - {SCHEDULE}
                    break
        if draft is before:
            break
        problems = draft.problems(check)
    if problems:
        raise _nothing_found(draft, problems)
    # A change may have been made for a problem that another change solves too.
    for key in list(edits)[::-1] if len(edits) > 1 else ():
        fewer = {name: value for name, value in edits.items() if name != key}
        without = start.with_edits(fewer)
        if without is not None and not without.problems(check):
            edits, draft = fewer, without
    changes = tuple(draft.changes.values())
    return Fix(file=file, before=text, text=draft.text, changes=changes, problems=tuple(map(str, found)))


def write_fix(fix: Fix) -> None:
    """Write the fixed text to the file, atomically and with the file's permissions.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A configuration on the way: the file's text, the settings outside it, and the changes so far by edited name."""

    file: Path
    text: str
    overrides: tuple[str, ...]
    environ: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)

    def problems(self, check: Callable[[Config], object]) -> tuple[RampupError, ...]:
        """Return the errors of the configuration, none if it is legal."""
        try:
            check(load_config(self.file, self.overrides, environ=self.environ, text=self.text))
        except RampupError as error:
            return error.problems or (error,)
        return ()

    def located(self) -> dict[str, Located]:
        """Return the value of each key that is set, and where; nothing while a name is unknown."""
        try:
            return locate_values(self.file, self.overrides, self.environ, KEYS, text=self.text)
        except ConfigError:
            return {}

    def source_rank(self, entry: Located | None) -> int:
        """Return how close to the user a value was set: 0 = a setting or variable, 1 = the file, 2 = its base or a default."""
        if entry is None or entry.line is not None:
            return 1 if entry is not None and entry.path == str(self.file) else 2
        return 0

    def with_edits(self, edits: Mapping[str, str]) -> _Draft | None:
        """Return the draft after several edits, names first; None if one of them cannot be made."""
        draft: _Draft | None = self
        for name in sorted(edits, key=lambda name: name in KEYS):
            draft = draft and draft.with_edit(name, edits[name])
        return draft

    def with_edit(self, name: str, after: str) -> _Draft | None:
        """Return the draft after one edit: a key gets a value as written in YAML, an unknown name the name of a key.

        None if the edit cannot be made: the text of the value is an alias or has one, or the right name is already there.
        """
        if name == BASE:
            return self._with_value_in_file(BASE, after)
        if name not in KEYS:
            return self._with_name(name, after)
        entry = self.located().get(name)
        source = self.source_rank(entry)
        if source == 1:
            return self._with_value_in_file(name, after)
        if entry is None or source == 2:
            return self._with_line(name, after)
        value = after.strip('"')
        overrides = tuple(f"{name}={value}" if setting.startswith(f"{name}=") else setting for setting in self.overrides)
        variable = ENVIRONMENT_PREFIX + name.upper()
        environ = {**self.environ, variable: value} if variable in self.environ else self.environ
        change = Change(key=name, before=str(entry.value), after=value, where=entry.path)
        return replace(self, overrides=overrides, environ=environ)._with_change(name, change)

    def _with_name(self, name: str, key: str) -> _Draft | None:
        overrides = tuple(re.sub(f"^{re.escape(name)}=", f"{key}=", setting) for setting in self.overrides)
        if overrides != self.overrides:
            change = Change(key=key, before=name, after=key, where="command line", renamed=name)
            return replace(self, overrides=overrides)._with_change(name, change)
        places = positions(self.text)
        if name not in places or key in places:
            return None
        place = places[name][0]
        change = Change(key=key, before=name, after=key, where=self._line_of(place), renamed=name)
        return replace(self, text=_splice(self.text, place, key))._with_change(name, change)

    def _with_value_in_file(self, key: str, after: str) -> _Draft | None:
        places = positions(self.text)
        if key not in places:
            return None
        place = places[key][1]
        before = self.text[place]
        # A value without text follows the colon directly; a block value includes its line's end.
        gap = "" if before or self.text[place.start - 1].isspace() else " "
        end = "\n" if before.endswith("\n") else ""
        change = Change(key=key, before=before.strip(), after=after, where=self._line_of(place))
        return replace(self, text=_splice(self.text, place, f"{gap}{after}{end}"))._with_change(key, change)

    def _with_line(self, key: str, after: str) -> _Draft:
        newline = "\r\n" if "\r\n" in self.text else "\n"
        text = self.text if self.text.endswith("\n") else self.text + newline
        change = Change(key=key, before=None, after=after, where=f"{self.file}, a new line")
        return replace(self, text=f"{text}{key}: {after}{newline}")._with_change(key, change)

    def _with_change(self, name: str, change: Change) -> _Draft:
        """Return the draft with a change noted. A second change of a key keeps what was there first."""
        first = self.changes.get(name)
        if first is not None:
            change = replace(change, before=first.before, where=first.where)
        return replace(self, changes={**self.changes, name: change})

    def _line_of(self, place: slice) -> str:
        line = self.text.count("\n", 0, place.start) + 1
        return f"{self.file}:{line}"


def _suggestions(problem: RampupError, draft: _Draft) -> Iterator[tuple[str, str]]:
    """Yield edits that may solve a problem, the nearest first: a key with a value, or an unknown name with a key."""
    name = problem.key
    if name is None:
        return
    if name == BASE:
        yield from ((BASE, f"{near}.yml") for near in problem.nearest)
        return
    if name not in KEYS:
        aliases = keys_for_alias(name)
        for near in map(str, problem.nearest):
            if near in aliases[:1] or _similarity(name.lower(), near) >= MIN_SIMILARITY:
                yield name, near
        return
    located = draft.located()
    before = _value(located, name)
    if name == SCHEDULE and isinstance(problem, BatchDivisibilityError) and isinstance(before, str):
        sizes = sorted(problem.nearest, key=lambda size: _distance(problem.value, size))
        yield from ((SCHEDULE, yaml_value(_with_size(before, problem.value, size))) for size in sizes)
        return
    ranked = [
        (rank, _distance(_value(located, key), value), key, value)
        for rank, key, value in _values(problem, name, before, draft, located)
    ]
    yield from ((key, yaml_value(value)) for _, _, key, value in sorted(ranked, key=lambda candidate: candidate[:2]))


def _values(
    problem: RampupError, name: str, before: Any, draft: _Draft, located: Mapping[str, Located]
) -> Iterator[tuple[int, str, Any]]:
    """Yield keys and values that may solve a problem, each with a rank. The lowest rank wins, then the smallest change.

    0 = another key, if it was set as close to the user as the key to blame and a small change suffices (this keeps the final
    batch of a ramp); 1 = a near value of the key to blame; 2 = automatic; 3 = any other key; 4 = other hardware.
    """
    for other, values in problem.alternatives.items():
        own = draft.source_rank(located.get(other)) <= min(draft.source_rank(located.get(name)), 1)
        for value in values:
            near = _distance(_value(located, other), value) <= MAX_ALTERNATIVE_DISTANCE
            yield (0 if own and near else 3), other, value
    if name == DEVICES:
        yield from ((1, axis, size) for axis, size in _axis_sizes(problem, located))
    key = KEYS[name]
    # A value of another type says nothing about what was meant. One that only contradicts other keys may become automatic.
    automatic = key.also if key.allows(before) else ()
    for value in dict.fromkeys([*problem.nearest, *automatic]):
        if (type(value), value) == (type(before), before) or not key.allows(value):
            continue
        if key.choices and _similarity(before, value) < MIN_SIMILARITY:
            continue
        if name != DEVICES:
            yield (2 if value in key.also else 1), name, value
        elif AUTO not in (before, value):
            yield 4, name, value


def _axis_sizes(problem: RampupError, located: Mapping[str, Located]) -> Iterator[tuple[str, int]]:
    """Yield sizes of the mesh axes that divide the devices, if the product of the axes does not."""
    if not isinstance(problem, BatchDivisibilityError):
        return
    for name in (name for name in KEYS if name.endswith(PARALLELISM) and name in str(problem)):
        size = _value(located, name)
        if isinstance(size, int) and size > 1 and problem.divisor % size == 0:
            rest, wrong = divmod(problem.value, problem.divisor // size)
            legal = [] if wrong else [n for n in range(1, min(rest, 4 * size) + 1) if rest % n == 0]
            yield from ((name, near) for near in nearest_in(size, legal))


def _with_size(schedule: str, refused: int, size: object) -> str:
    """Return a schedule with another size in place of a refused one, wherever it occurs."""

    def is_refused(text: str) -> bool:
        try:
            return parse_count(text, what="size") == refused
        except RampDefinitionError:
            return False

    parts = re.split(r"(?<=:)([^\s,]+)", schedule)
    return "".join(str(size) if is_refused(part) else part for part in parts)


def _value(located: Mapping[str, Located], key: str) -> Any:
    return located[key].value if key in located else getattr(Config(), key)


def _distance(before: object, after: object) -> float:
    """Return the distance of two values: the relative difference of numbers, 1 - the similarity of words."""
    try:
        old, new = exact_fraction(before, what="value"), exact_fraction(after, what="value")
    except RampDefinitionError:
        return 1 - _similarity(before, after)
    return float(abs(old - new) / (max(abs(old), abs(new)) or 1))


def _similarity(before: object, after: object) -> float:
    return difflib.SequenceMatcher(None, str(before), str(after)).ratio()


def _splice(text: str, place: slice, replacement: str) -> str:
    return text[: place.start] + replacement + text[place.stop :]


def _nothing_found(draft: _Draft, problems: Sequence[RampupError]) -> RampupError:
    done = " and ".join(f"{change.key}={change.after}" for change in draft.changes.values() if change.renamed is None)
    left = problems[0] if len(problems) == 1 else f"{problems[0]}, and {len(problems) - 1:,} more"
    return ConfigError(
        f"no legal configuration was found near this one; what is left{f' with {done}' if done else ''}: {left}",
        key=problems[0].key,
        nearest=problems[0].nearest,
    )
