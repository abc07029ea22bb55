"""Reads another system's file as dotted keys: typed, with defaults, and with an error for a key that looks misspelt."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.config.key import Key, Kind
from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_scalar, read_mapping
from rampup.errors import ConfigError, RampupError, raise_together

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*(\.*[A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_MAX_HOPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of another system that its batch arithmetic depends on.

    Attributes:
        key: kind, limits and documentation of its values.
        default: that system's default.
        unit: the unit of a count: prompts, samples, tokens, devices, ...
        scope: the scope of a count: `step`, `replica`, `process`, `job`, ...
    """

    key: Key
    default: Any
    unit: str = ""
    scope: str = ""


def entry(default: Any, doc: str, *, kind: Kind = "int", unit: str = "", scope: str = "", **limits: Any) -> Entry:
    """Return an `Entry`; `limits` are those of `Key`.

    Example:
        >>> entry(1, "passes over a rollout", minimum=1).key.expected
        'a whole number, at least 1'
    """
    nullable = limits.pop("nullable", default is None)
    return Entry(key=Key(kind=kind, doc=doc, section="", nullable=nullable, **limits), default=default, unit=unit, scope=scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a file, by dotted key.

    Attributes:
        values: the value of each known key, or its default.
        given: the known keys that the file or the command line sets.
        where: file and line of each given key.
        others: the names of all other keys in the file.
        notes: remarks of the reader, such as an old name of a key.
    """

    values: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    where: Mapping[str, str] = field(default_factory=dict)
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


def read_leaves(mapping: Mapping[str, Located]) -> dict[str, Located]:
    """Return the leaves of a file by dotted key.

    Raises:
        ConfigError: a key is given twice, once nested and once dotted.
    """
    result: dict[str, Located] = {}
    for top, entry in mapping.items():
        nested = isinstance(entry.value, Mapping) and entry.value
        for name, value in flatten(entry.value, f"{top}.") if nested else ((top, entry.value),):
            if name in result:
                raise ConfigError(f"{name} is given twice", key=name, path=entry.path, line=entry.line)
            result[name] = Located(value=value, path=entry.path, line=entry.line)
    return result


def read_settings(path: str | Path, overrides: Sequence[str], entries: Mapping[str, Entry], *, system: str) -> Settings:
    """Read a file in another system's keys.

    Args:
        path: a YAML file: nested mappings, dotted keys, or both.
        overrides: `key=value` settings of known keys, which win over the file.
        entries: the keys that matter, by dotted name. Other keys are accepted, unless they look like a misspelling of one.
        system: the name of the system, for errors.

    Returns:
        The typed values. `${other.key}` and `${oc.select:other.key,default}` are resolved.

    Raises:
        ConfigError: unreadable, mistyped, misspelt, or without a single key of this system; all problems at once.
    """
    return type_settings(read_leaves(read_mapping(path)), overrides, entries, system=system, path=str(path))


def type_settings(
    located: Mapping[str, Located], overrides: Sequence[str], entries: Mapping[str, Entry], *, system: str, path: str
) -> Settings:
    """Return the typed values of dotted keys, as `read_settings` does; for formats other than plain YAML."""
    recognised = any(name in entries for name in located)
    located = {**located, **_read_overrides(overrides, entries)}
    others = frozenset(located) - frozenset(entries)
    known = {name: entry for name, entry in located.items() if name in entries}
    problems: list[RampupError] = [*_find_misspelt(others, known, entries, located)]
    if not recognised and not problems:
        examples = ", ".join(list(entries)[:3])
        raise ConfigError(f"not a file of {system}: it sets none of its batch keys, such as {examples}", path=path)
    values = {name: entry.default for name, entry in entries.items()}
    for name, entry in known.items():
        try:
            values[name] = entries[name].key.read(name, _resolve_reference(entry.value, name, located, values))
        except ConfigError as error:
            problems.append(ConfigError(str(error), key=name, nearest=error.nearest, path=entry.path, line=entry.line))
    raise_together(problems)
    where = {name: str(entry) for name, entry in known.items()}
    return Settings(values=values, given=frozenset(known), where=where, others=others)


def rename(setting: str, aliases: Mapping[str, str]) -> str:
    """Return a `key=value` setting with the key's canonical name.

    Example:
        >>> rename("num_target_devices=8", {"num_target_devices": "num_devices"})
        'num_devices=8'
    """
    name, equals, text = setting.partition("=")
    return f"{aliases.get(name, name)}{equals}{text}"


def _read_overrides(overrides: Sequence[str], entries: Mapping[str, Entry]) -> dict[str, Located]:
    result = {}
    for setting in overrides:
        name, equals, text = setting.partition("=")
        if not equals or name != name.strip() or name.startswith("-"):
            raise ConfigError(f"{setting!r} is not key=value (no spaces around '=', no dashes)", path=COMMAND_LINE)
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key {name[:100]!r}; the closest is {close[0]}", key=name, nearest=close, path=COMMAND_LINE
            )
        result[name] = Located(value=parse_scalar(text, COMMAND_LINE), path=COMMAND_LINE)
    return result


def _find_misspelt(
    others: frozenset[str], known: Mapping[str, Located], entries: Mapping[str, Entry], located: Mapping[str, Located]
) -> Iterator[ConfigError]:
    """Yield an error for each unknown key that differs from a known, unset one by very little."""
    missing = [name for name in entries if name not in known]
    for name in sorted(others):
        close = difflib.get_close_matches(name, missing, n=1, cutoff=0.93)
        if close and len(close[0]) > 8:
            entry = located[name]
            yield ConfigError(
                f"unknown key {name!r}; did you mean {close[0]}?", key=name, nearest=close, path=entry.path, line=entry.line
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
