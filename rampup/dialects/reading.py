"""Reads another system's file as dotted keys: typed, with defaults, and with an error for a key that looks misspelt."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rampup.config.key import Key, Kind
from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_scalar
from rampup.dialects.script import Command, needs_arguments, show_unknown, unknown_names
from rampup.errors import ConfigError, RampupError, raise_together

_REFERENCE = re.compile(r"\$\{(?:oc\.select:|oc\.env:)?\s*(\.*[A-Za-z_][\w.]*)\s*(?:[,:]\s*([^{}]*))?\}")
_MAX_HOPS = 20
# Keys that tell whose file it is, or a part of whose.
MIN_MATCHES = 2
# What users state of a run beside its file; it does not tell whose file it is.
FACTS = frozenset({"num_prompts", "num_processes", "num_devices", "world_size", "data_parallel_size"})
# A name at least this similar to a longer one is a misspelling of it.
_SIMILAR, _MIN_LENGTH = 0.93, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of another system that its batch arithmetic depends on.

    Attributes:
        key: kind, limits and documentation of its values.
        default: that system's default.
        unit: the unit of a count: prompts, samples, tokens, devices, ...
        optional: True if the numbers of a step are known without it, so that a script may leave it open.
    """

    key: Key
    default: Any
    unit: str = ""
    optional: bool = False


def entry(default: Any, doc: str, *, kind: Kind = "int", unit: str = "", optional: bool = False, **limits: Any) -> Entry:
    """Return an `Entry`; `limits` are those of `Key`.

    Example:
        >>> entry(1, "passes over a rollout", minimum=1).key.expected
        'a whole number, at least 1'
    """
    nullable = limits.pop("nullable", default is None)
    key = Key(kind=kind, doc=doc, section="", nullable=nullable, **limits)
    return Entry(key=key, default=default, unit=unit, optional=optional)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a source sets.

    Attributes:
        path: the name of the source, for errors.
        leaves: the value of each dotted key. A text may contain markers of what a script does not say.
        overrides: the `key=value` settings that are no variables of the script; they win over `leaves`.
        command: the command that was read, in a script or on the command line.
        repeated: keys that the file sets twice, with the line of the second; the second counts.
        notes: which command was read.
        recognized: whether it is known to be of the system: its command starts it, or it names one of its base files.
    """

    path: str
    leaves: Mapping[str, Located]
    overrides: Sequence[str] = ()
    command: Command | None = None
    repeated: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recognized: bool = False

    def rename(self, canonical: Callable[[str], str]) -> Reading:
        """Return the same with the canonical names of keys.

        Raises:
            ConfigError: two names of a key have different values.
        """
        leaves: dict[str, Located] = {}
        for name, value in self.leaves.items():
            known = canonical(name)
            before = leaves.get(known, value).value
            if before != value.value:
                raise ConfigError(
                    f"{known} is given twice, as {before!r} and as {value.value!r} ({name}); leave one out",
                    key=known,
                    path=value.path,
                    line=value.line,
                )
            leaves[known] = value
        settings = [setting.partition("=") for setting in self.overrides]
        overrides = [f"{canonical(name)}{equals}{text}" for name, equals, text in settings]
        return dataclasses.replace(self, leaves=leaves, overrides=overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a file, by dotted key.

    Attributes:
        values: the value of each known key, or its default.
        given: the known keys that the file or the command line sets.
        others: the names of all other keys in the file.
        notes: remarks of the reader, such as an old name of a key.
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_value(self, name: str, value: Any) -> Settings:
        """Return the settings with one more key given."""
        return dataclasses.replace(self, values={**self.values, name: value}, given=self.given | {name})

    def describe(self, name: str) -> str:
        """Return `key = value` for the table of meanings; a default is marked."""
        value = self.values[name]
        shown = (
            f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "null" if value is None else str(value)
        )
        return f"{name} = {shown}" + ("" if name in self.given else " (default)")


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `dotted.key, value` for every leaf of nested mappings.

    Example:
        >>> dict(flatten({"trainer": {"epochs": 1, "placement": {"nodes": 2}}}))
        {'trainer.epochs': 1, 'trainer.placement.nodes': 2}
    """
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_leaves(mapping: Mapping[str, Located], repeated: dict[str, int]) -> dict[str, Located]:
    """Return the leaves of a file by dotted key; one that is given twice, nested and dotted, is added to `repeated`."""
    result: dict[str, Located] = {}
    for top, entry in mapping.items():
        nested = isinstance(entry.value, Mapping) and entry.value
        for name, value in flatten(entry.value, f"{top}.") if nested else ((top, entry.value),):
            if name in result:
                repeated[name] = entry.line or 0
            result[name] = Located(value=value, path=entry.path, line=entry.line)
    return result


def type_settings(
    reading: Reading,
    entries: Mapping[str, Entry],
    *,
    system: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    groups: Iterable[str] = (),
) -> Settings:
    """Return the typed values of dotted keys. `${other.key}` and `${oc.select:other.key,default}` are resolved.

    Args:
        reading: a file or a command.
        entries: the keys that matter, by dotted name. Others are accepted, unless they look like a misspelling of one. One
            that the file repeats is an error.
        system: the name of the system, for errors.
        defaults: values of a base file, which replace the system's defaults.
        groups: first parts of the system's keys that are not in `entries`.

    Raises:
        ConfigError: mistyped, misspelt, without a single key of this system, or a key whose value depends on a variable that
            the script does not set; all problems at once.
    """
    located, path = reading.leaves, reading.path
    chosen = _read_overrides(reading.overrides, entries, groups)
    known_names = entries.keys() & {*located, *(chosen.keys() - FACTS)}
    if not (reading.recognized or known_names or _find_mappings(located, entries)):
        misspelt = list(_find_misspelt(located, entries))
        raise_together(misspelt)
        if part := find_part(located, entries):
            raise ConfigError(
                f"this is a part of a file of {system}, its group {part[0]}: it sets {', '.join(part[1][:3])}; check the "
                "file or the command that includes it",
                key="from",
                path=path,
            )
        examples = ", ".join(list(entries)[:3])
        raise ConfigError(f"not a file of {system}: it sets none of its batch keys, such as {examples}", key="from", path=path)
    twice = {name: line for name, line in reading.repeated.items() if name in entries and name not in chosen}
    problems: list[RampupError] = [
        ConfigError(f"{name} is given twice; choose one with {name}=...", key=name, path=path, line=line)
        for name, line in twice.items()
    ]
    problems += _find_mappings({name: entry for name, entry in located.items() if name not in chosen}, entries)
    located = {**located, **chosen}
    problems += _find_misspelt(located, entries)
    known = {name: entry for name, entry in located.items() if name in entries}
    values = {name: entry.default for name, entry in entries.items()}
    base = {name: Located(value=value, path=f"a base file of {system}") for name, value in defaults.items()}
    located = base | located
    notes = [*reading.notes]
    for name, entry in [*base.items(), *known.items()]:
        if name not in entries:
            continue
        try:
            value = _resolve_reference(entry.value, name, located, values)
            if isinstance(value, str) and (unknown := unknown_names(value)):
                error = _unknown_error(name, value, unknown)
                if not entries[name].optional:
                    raise error
                notes.append(f"{error}. The numbers of a step are the same without it.")
                del known[name]
                continue
            values[name] = entries[name].key.read(name, value)
        except ConfigError as error:
            problems.append(ConfigError(str(error), key=name, nearest=error.nearest, path=entry.path, line=entry.line))
    raise_together(problems)
    notes += [
        f"{name} is given twice, again in line {line}; the last one counts."
        for name, line in reading.repeated.items()
        if name not in entries
    ]
    return Settings(values=values, given=frozenset(known), others=frozenset(located) - frozenset(entries), notes=tuple(notes))


def _unknown_error(name: str, value: str, unknown: Sequence[str]) -> ConfigError:
    """Return the error about a value that a script leaves open, with the `key=value` that would settle it."""
    variables = [word for word in unknown if word.isidentifier()]
    settle = f"{variables[0]}=..., or {name}=..." if variables else f"{name}=..."
    settle += ", or the script's arguments: `rampup check ... -- bash FILE ARGUMENTS`" if needs_arguments(value) else ""
    shown = " and ".join(word if word.startswith("$") else f"${word}" for word in unknown)
    return ConfigError(f"{name}={show_unknown(value)[:100]}: the script does not say what {shown} is; add {settle}", key=name)


def _read_overrides(overrides: Sequence[str], entries: Mapping[str, Entry], groups: Iterable[str]) -> dict[str, Located]:
    """Return `key=value` settings of any key of the system: of `entries`, or with the same first part as one of them."""
    groups = {*groups, *(name.partition(".")[0] for name in entries if "." in name)}
    is_flat = 2 * sum("." in name for name in entries) < len(entries)
    result = {}
    for setting in overrides:
        name, equals, text = setting.partition("=")
        if not equals or name != name.strip() or name.startswith("-"):
            raise ConfigError(f"{setting!r} is not key=value (no spaces around '=', no dashes)", path=COMMAND_LINE)
        name = name.lstrip("+")
        result[name] = Located(value=parse_scalar(text, COMMAND_LINE), path=COMMAND_LINE)
        if name in entries:
            continue
        close = difflib.get_close_matches(name, entries, n=1, cutoff=0.8 if is_flat else 0.0)
        first, dot, _ = name.partition(".")
        if (
            (is_flat and close)
            or not (is_flat or (dot and first in groups))
            or any(True for _ in _find_misspelt({name: result[name]}, entries))
        ):
            close = close or difflib.get_close_matches(name, entries, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key {name[:100]!r}; the closest is {close[0]}", key=name, nearest=close, path=COMMAND_LINE
            )
    return result


def _find_mappings(located: Mapping[str, Located], entries: Mapping[str, Entry]) -> list[ConfigError]:
    """Return an error for each key that holds a mapping instead of a value."""
    found: dict[str, Located] = {}
    for name, entry in located.items():
        parents = [name[:at] for at in range(len(name)) if name[at] == "."]
        found |= {parent: entry for parent in parents if parent in entries and parent not in located}
    return [
        ConfigError(f"{name} is a mapping; it must be {entries[name].key.expected}", key=name, path=entry.path, line=entry.line)
        for name, entry in found.items()
    ]


def find_part(located: Iterable[str], entries: Mapping[str, Entry]) -> tuple[str, list[str]] | None:
    """Return the group of keys of which a file is a part, as in Hydra's folders, with its keys; None if it is none.

    Example:
        >>> find_part(["n", "name", "seed"], {"rollout.n": entry(1, "responses"), "rollout.name": entry("", "engine")})
        ('rollout', ['n', 'name'])
    """
    names = list(located)
    groups = dict.fromkeys(key.rpartition(".")[0] for key in entries if "." in key)
    found = [(group, [name for name in names if f"{group}.{name}" in entries]) for group in groups]
    best = max(found, key=lambda row: len(row[1]), default=("", []))
    return best if len(best[1]) >= MIN_MATCHES else None


def _find_misspelt(located: Mapping[str, Located], entries: Mapping[str, Entry]) -> Iterator[ConfigError]:
    """Yield an error for each unknown key that differs from a known, unset one by very little.

    Its last part is compared with those beside it; the parts before the last, if no known key has them, with those of keys of
    the same name.
    """
    missing = [name for name in entries if name not in located]
    parents = {name.rpartition(".")[0] for name in entries}
    for name in sorted(frozenset(located) - frozenset(entries)):
        parent, _, last = name.rpartition(".")
        if parent in parents:
            beside = {
                key.rpartition(".")[2]: key for key in missing if key.rpartition(".")[0] == parent and len(key) > _MIN_LENGTH
            }
            close = [beside[found] for found in difflib.get_close_matches(last, beside, n=1, cutoff=_SIMILAR)]
        else:
            alike = {key.rpartition(".")[0]: key for key in missing if key.rpartition(".")[2] == last}
            close = [alike[found] for found in difflib.get_close_matches(parent, alike, n=1, cutoff=_SIMILAR)]
        if close:
            place = located[name]
            yield ConfigError(
                f"unknown key {name!r}; did you mean {close[0]}?", key=name, nearest=close, path=place.path, line=place.line
            )


def _resolve_reference(
    value: Any, name: str, located: Mapping[str, Located], defaults: Mapping[str, Any], hops: int = 0
) -> Any:
    """Return the value that an OmegaConf reference stands for; any other value as it is."""
    match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    target, default = match.groups()
    dots = len(target) - len(target.lstrip("."))
    if dots:
        parents = name.split(".")[:-dots]
        target = ".".join([*parents, target.lstrip(".")])
    if hops == _MAX_HOPS:
        raise ConfigError(f"{name}={value} is a circular reference", key=name)
    if target in located:
        return _resolve_reference(located[target].value, target, located, defaults, hops + 1)
    if target in defaults:
        return defaults[target]
    if default is not None:
        return parse_scalar(default.strip(), name)
    raise ConfigError(f"{name}={value} refers to {target}, which the file does not set", key=name)
