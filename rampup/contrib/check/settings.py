"""From what a source sets to typed values of a system's keys, above its defaults, with an
error or a question for each key that is mistyped, misspelt, open or unknown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_scalar
from rampup.contrib.check.known import (
    MULTIPLIES,
    NONE_IF_ONE,
    RESPONSES,
    find_unread,
    sections_of,
)
from rampup.contrib.check.launch import Entry, Launch, Reading
from rampup.contrib.check.shell.values import (
    ARGUMENT,
    explain_unknown,
    show_unknown,
    unknown_names,
)
from rampup.errors import ConfigError, raise_together

_REFERENCE = re.compile(
    r"\$\{(?:oc\.select:|oc\.env:)?\s*(\.*[A-Za-z_][\w.]*)\s*(?:[,:]\s*([^{}]*))?\}"
)

_MAX_HOPS = 20

# What users state of a run beside its file; it does not tell whose file it is.
FACTS = frozenset({
    "num_prompts", "num_processes", "num_devices", "world_size", "data_parallel_size", "at_step",
})  # fmt: skip

# A name at least this similar to a longer one is a misspelling of it.
_SIMILAR = 0.93

_MIN_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a file, by dotted key."""

    values: Mapping[str, Any]  # the value of each known key, or its default
    given: frozenset[str] = (
        frozenset()
    )  # the known keys that the file or the command line sets
    others: Mapping[str, Located] = field(
        default_factory=dict
    )  # all other keys of the file
    # The keys that the system looks up in its base file, and refuses if they are not
    # there. Not those of `key=value` settings.
    looked_up: Mapping[str, Located] = field(default_factory=dict)
    other_versions: tuple[
        str, ...
    ] = ()  # versions of the system that are possible beside the one of the rules
    notes: tuple[str, ...] = ()  # remarks of the reader

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_value(self, name: str, value: Any) -> Settings:
        """Return the settings with one more key given."""
        return dataclasses.replace(
            self, values={**self.values, name: value}, given=self.given | {name}
        )

    def describe(self, name: str) -> str:
        """Return `key = value` for the table of meanings; a default is marked."""
        value = self.values[name]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        shown = f"{value:,}" if is_number else "null" if value is None else value
        return f"{name} = {shown}" + ("" if name in self.given else " (default)")


def type_settings(
    reading: Reading, launch: Launch, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Settings:
    """Return the typed values of a reading's keys, above those of a base file in
    `defaults`; references are resolved.

    Refused, all at once, are keys that are mistyped, misspelt, given twice, open, or
    unknown sizes; and a reading that sets no key of the system.
    """
    entries = launch.entries
    chosen = _read_overrides(reading, launch)
    _refuse_other_systems(reading, launch, chosen)
    given = {**reading.leaves, **chosen}
    base = f"a base file of {launch.system}"
    located = {name: Located(value=at, path=base) for name, at in defaults.items()}
    located |= given
    values, mistyped, unknown = _type_values(launch, located)
    written = {key: at for key, at in reading.leaves.items() if key not in chosen}
    others = {name: at for name, at in given.items() if name not in entries}
    raise_together(
        [
            *reading.questions,
            *_find_mappings(written, entries),
            *_find_misspelt(given, launch),
            *_find_questions(others, launch),
            *mistyped,
        ]
    )
    notes = (
        *reading.notes,
        *(
            f"{said}: the rules do not follow it."
            for _, said in find_unread(given, launch.unread, asks=False)
        ),
        *unknown.values(),
    )
    return Settings(
        values=values,
        given=frozenset(entries.keys() & given) - unknown.keys(),
        others={name: at for name, at in located.items() if name not in entries},
        notes=notes,
    )


def _refuse_other_systems(
    reading: Reading, launch: Launch, chosen: Mapping[str, Located]
) -> None:
    """Refuse a reading that sets no key of the system."""
    entries = launch.entries
    of_system = entries.keys() & (reading.leaves.keys() | (chosen.keys() - FACTS))
    if reading.recognized or of_system or _find_mappings(reading.leaves, entries):
        return
    raise_together(list(_find_misspelt(reading.leaves, launch)))
    raise ConfigError(
        f"not a file of {launch.system}: it sets none of its batch keys, such as"
        f" {', '.join(list(entries)[:3])}",
        fix="leave out --from, and rampup finds the system",
        key="from",
        path=reading.path,
    )


def _find_questions(
    located: Mapping[str, Located], launch: Launch
) -> Iterator[ConfigError]:
    """Yield a question for each key that may change a size and that no rule reads: one
    that the system has, or one that no version has but whose last part decides on a
    size, so that only a fork reads it.

    Null as its value is the answer that it changes no size.
    """
    asked = [
        (name, f": {said}, and the rules do not follow it", "")
        for name, said in find_unread(located, launch.unread, asks=True)
    ]
    sizes = [
        re.escape(name.rpartition(".")[2])
        for name, entry in launch.entries.items()
        if entry.unit in ("prompts", "samples", "devices", "nodes")
    ]
    decides = launch.decides or re.compile("|".join([*sizes, MULTIPLIES.pattern]))
    for name, place in located.items():
        last = name.rpartition(".")[2]
        is_one = place.value == 1 and place.value is not True
        if (
            name in launch.unread
            or place.value is None
            or (is_one and NONE_IF_ONE.fullmatch(last))
            or not decides.fullmatch(last)
            or launch.known_keys.life(name) is not None
        ):
            continue
        said = (
            f", a fork: {name}={place.value} is a key of no version of"
            f" {launch.system}, and its name is that of a size"
        )
        is_group = launch.repeats and re.fullmatch(f"{RESPONSES}|n", last)
        asked.append((name, said, f". {launch.repeats}" if is_group else ""))
    for name, said, more in asked:
        yield ConfigError(
            f"unknown{said}",
            fix=f"add {name}=null, and with it the sizes of {launch.system} that have"
            f" the same effect (none if it changes no size){more}",
            key=name,
            path=located[name].path,
            line=located[name].line,
        )


def _type_values(
    launch: Launch, located: Mapping[str, Located]
) -> tuple[dict[str, Any], list[ConfigError], dict[str, str]]:
    """Return the values of keys as the types of their entries, above the defaults; what
    is wrong with them; and a note on each that is not known, and may be.
    """
    values = {name: entry.default for name, entry in launch.entries.items()}
    problems = list[ConfigError]()
    notes = dict[str, str]()
    for name in [name for name in launch.entries if name in located]:
        place, entry = located[name], launch.entries[name]
        try:
            value = resolve_reference(place.value, name, located, values)
            if not (isinstance(value, str) and unknown_names(value)):
                values[name] = entry.convert(name, value)
                continue
            question = _ask_for(name, value)
            if not entry.optional:
                raise question
            notes[name] = f"{question}. The numbers of a step are the same without it."
        except ConfigError as error:
            problems.append(
                ConfigError(
                    str(error),
                    key=name,
                    nearest=error.nearest,
                    path=place.path,
                    line=place.line,
                )
            )
    return values, problems, notes


def _ask_for(name: str, value: str) -> ConfigError:
    """Return the question for a value with unknown parts, with the `key=value` that
    would settle it.
    """
    variables = [word for word in unknown_names(value) if word.isidentifier()]
    settle = f"{name}=..."
    if variables:
        settle = f"{variables[0]}=..., or {settle}"
    why = explain_unknown(value)
    if ARGUMENT in value or re.search(r"\$\{?\d", why):
        settle += (
            ", or the script's arguments: `rampup check ... -- bash FILE ARGUMENTS`"
        )
    return ConfigError(
        f"{name}={show_unknown(value)[:100]}: {why}", fix=f"add {settle}", key=name
    )


def _read_overrides(reading: Reading, launch: Launch) -> dict[str, Located]:
    """Return `key=value` settings of any key of the source or the system, or of one of
    its sections.
    """
    entries = launch.entries
    sections = {name.partition(".")[0] for name in entries if "." in name}
    settable = {*entries, *reading.leaves, *launch.unread}
    result = {}
    for setting in reading.overrides:
        written, equals, text = setting.partition("=")
        if not equals or written != written.strip() or written.startswith("-"):
            raise ConfigError(
                f"{setting!r} is not key=value (no spaces around '=', no dashes)",
                path=COMMAND_LINE,
            )
        name = written.lstrip("+")
        result[name] = Located(
            value=parse_scalar(text, COMMAND_LINE), path=COMMAND_LINE
        )
        section, dot, _ = name.partition(".")
        if name in settable or launch.known_keys.life(name):
            continue
        if dot and section in {*sections, *launch.groups}:
            # Also if the source sets the right key: the setting would do nothing.
            raise_together(list(_find_misspelt({name: result[name]}, launch)))
            continue
        close = difflib.get_close_matches(name, entries, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown key {name[:100]!r}; the closest is {close[0]}",
            key=name,
            nearest=close,
            path=COMMAND_LINE,
        )
    return result


def _find_mappings(
    located: Mapping[str, Located], entries: Mapping[str, Entry]
) -> list[ConfigError]:
    """Return an error for each key that holds a mapping instead of a value."""
    within = {
        section: place
        for name, place in located.items()
        for section in sections_of(name)
    }
    return [
        ConfigError(
            f"{name} is a mapping; it must be {entries[name].expected}",
            key=name,
            path=within[name].path,
            line=within[name].line,
        )
        for name in entries
        if name in within and name not in located
    ]


def _find_misspelt(
    located: Mapping[str, Located], launch: Launch
) -> Iterator[ConfigError]:
    """Yield an error for each unknown key that differs very little from a known, unset
    one: in its last part, or in its section if the system has no such section.
    """
    sections = {name.rpartition(".")[0] for name in launch.entries}
    unset = launch.entries.keys() - located.keys()
    for name in sorted(located.keys() - launch.entries.keys()):
        section, _, last = name.rpartition(".")
        if section in sections:
            written = last
            alike = {
                part: key
                for key in unset
                if len(part := key.rpartition(".")[2]) > _MIN_LENGTH
                and key.rpartition(".")[0] == section
            }
        elif section.partition(".")[0] in launch.groups or launch.known_keys.life(name):
            continue
        else:
            written = name
            alike = {key: key for key in unset if key.endswith(f".{last}")}
        for part in difflib.get_close_matches(written, alike, n=1, cutoff=_SIMILAR):
            yield ConfigError(
                f"unknown key {name!r}; did you mean {alike[part]}?",
                key=name,
                nearest=[alike[part]],
                path=located[name].path,
                line=located[name].line,
            )


def rename(reading: Reading, launch: Launch) -> Reading:
    """Give the keys of a reading the system's own names, and return it. Two names of a
    key that the rules read must not have different values, unless a setting chooses.
    """
    if launch.canonical is str:  # no key has another name
        return reading
    overrides = list[str]()
    for setting in reading.overrides:
        name, equals, text = setting.partition("=")
        if launch.known(name) and not name.startswith("-"):
            name = launch.canonical(name)
        overrides.append(f"{name}{equals}{text}")
    reading.overrides = overrides
    leaves = dict[str, Located]()
    for written, place in reading.leaves.items():
        name = launch.canonical(written)
        with contextlib.suppress(ConfigError):  # another key of that name
            value = resolve_reference(place.value, written, reading.leaves, {})
            place = dataclasses.replace(place, value=value)
        first = leaves.setdefault(name, place).value
        is_key = name in launch.entries and name not in reading.answered
        if is_key and first != place.value:
            raise ConfigError(
                f"{name} is given twice, as {first!r} and as {written}={place.value!r}",
                fix=f"choose one with {name}=...",
                key=name,
                path=place.path,
                line=place.line,
            )
    reading.leaves = leaves
    return reading


def resolve_reference(
    value: Any, name: str, located: Mapping[str, Located], defaults: Mapping[str, Any]
) -> Any:
    """Return the value that an OmegaConf reference stands for, or another value as it
    is; `name` is its key.
    """
    for _ in range(_MAX_HOPS + 1):
        match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        target, default = match.groups()
        if dots := len(target) - len(target.lstrip(".")):
            target = ".".join([*name.split(".")[:-dots], target.lstrip(".")])
        if target not in located:
            if target in defaults:
                return defaults[target]
            if default is not None:
                return parse_scalar(default.strip(), name)
            raise ConfigError(
                f"{name}={value} refers to {target}, which the file does not set",
                key=name,
            )
        name, value = target, located[target].value
    raise ConfigError(f"{name}={value} is a circular reference", key=name)
