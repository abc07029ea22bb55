"""Strict, size-limited YAML reader that records source lines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rampup.errors import ConfigError

MAX_BYTES = 4_000_000
MAX_VALUES = 200_000
MAX_DEPTH = 50
_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A value and its source."""

    value: Any  # None, bool, int, float, str, list or dict
    path: str  # the file, or the name of another source
    # The line in that file, counted from 1; None in other sources.
    line: int | None = None
    # Of a dict in a file: the line of each of its names.
    lines: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.path if self.line is None else f"{self.path}:{self.line}"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2: 1e-5 is a float, 010 is ten,
    1:30 and dates are text.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as in the base class


# As Python has them: 1_600, and not 1__600 or 1600_, which are text.
_DIGITS = r"[0-9](?:_?[0-9])*"
# The scalars of YAML 1.2: pattern, first characters, and value.
_SCALARS: dict[str, tuple[str, list[str], Callable[[str], Any]]] = {
    "null": (
        r"~|null|Null|NULL|None|none|NONE|",
        ["~", "n", "N", ""],
        lambda text: None,
    ),
    "bool": (
        r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
        list("tTfFyYnNoO"),
        lambda text: text.lower() in ("true", "yes", "on"),
    ),
    "int": (rf"[-+]?{_DIGITS}", list("-+0123456789"), int),
    "float": (
        rf"[-+]?(?:(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?"
        rf"|{_DIGITS}[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|inf)"
        r"|\.(?:nan|NaN|NAN)|nan",
        list("-+.0123456789in"),
        lambda text: float(
            text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")
        ),
    ),
}
for _name, (_pattern, _first, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        _PREFIX + _name, re.compile(rf"(?:{_pattern})\Z"), _first
    )


def parse_mapping(text: str, path: str) -> dict[str, Located]:
    """Read YAML text that is one mapping."""
    return dict(_parse(text, path))


@functools.lru_cache(maxsize=16)
def _parse(text: str, path: str) -> dict[str, Located]:
    # Commands look at the names in a file before they load it; parsing takes most of
    # the time of `rampup plan`.
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            raise ConfigError(
                "the file is empty; it must be a mapping, one `key: value` a line",
                path=path,
            )
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigError(
                f"the file is {kind}; it must be a mapping, one `key: value` a line",
                path=path,
                line=1,
            )
        return dict(_Reader(path).entries(root))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = str(error.problem or error.context)
        hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
        raise ConfigError(
            f"not valid YAML: {problem}{hint}", path=path, line=line
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"not valid YAML: {' '.join(str(error).split())}", path=path
        ) from None
    except RecursionError:
        raise ConfigError(
            "not a configuration: it is nested too deeply", path=path
        ) from None


def positions(text: str) -> dict[str, tuple[slice, slice]]:
    """Return the position in a mapping's text of each key and of its value. Values with
    an alias or a tag are left out.
    """
    parse_mapping(text, "text")
    root = yaml.compose(text, Loader=_Loader)
    assert isinstance(root, yaml.MappingNode)
    return {
        key.value: (
            slice(key.start_mark.index, key.end_mark.index),
            slice(value.start_mark.index, value.end_mark.index),
        )
        for key, value in root.value
        if value.start_mark.index >= key.end_mark.index
        and text[value.start_mark.index : value.start_mark.index + 1] not in ("&", "!")
    }


def parse_scalar(text: str, path: str) -> Any:
    """Return the value that YAML reads from a text, for example from the command
    line.
    """
    tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return _scalar(text, tag, path, line=None)


def read_text(path: str | Path) -> str:
    """Return a text file's content; a ConfigError if it cannot be read, is larger than
    `MAX_BYTES` or is not UTF-8.
    """
    try:
        # `open` of a path in a bucket is that of its file system.
        with open(path, "rb") if isinstance(path, str) else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else str(error)
        )
        raise ConfigError(f"cannot read the file: {reason}", path=str(path)) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"the file is larger than {MAX_BYTES:,} bytes, so it is not a"
            " configuration",
            path=str(path),
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the file is not UTF-8 text (byte {error.start})", path=str(path)
        ) from None


class _Reader:
    """Converts the YAML nodes of one file into values. Limits their number, because
    aliases can repeat values without end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = MAX_VALUES

    def entries(
        self, node: yaml.MappingNode, *, depth: int = 0
    ) -> Iterator[tuple[str, Located]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    "a key must be a plain name", path=self._path, line=line
                )
            name = key_node.value
            if name in seen:
                raise ConfigError(
                    f"{name} is given twice, first in line {seen[name]}",
                    key=name,
                    path=self._path,
                    line=line,
                )
            seen[name] = line
            value = self._value(value_node, depth=depth + 1)
            nested = (
                value_node.value if isinstance(value_node, yaml.MappingNode) else ()
            )
            lines = {inner.value: inner.start_mark.line + 1 for inner, _ in nested}
            yield name, Located(value=value, path=self._path, line=line, lines=lines)

    def _value(self, node: yaml.Node, *, depth: int) -> Any:
        line = node.start_mark.line + 1
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            problem = (
                "nested too deeply"
                if depth > MAX_DEPTH
                else f"too large: more than {MAX_VALUES:,} values"
            )
            raise ConfigError(
                f"not a configuration: it is {problem}", path=self._path, line=line
            )
        legal = (
            ("null", "bool", "int", "float", "str")
            if isinstance(node, yaml.ScalarNode)
            else ("seq", "map")
        )
        if (
            not node.tag.startswith(_PREFIX)
            or node.tag.removeprefix(_PREFIX) not in legal
        ):
            raise ConfigError(
                f"the YAML tag {node.tag!r} is not allowed; write plain values",
                path=self._path,
                line=line,
            )
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node.value, node.tag, self._path, line)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, depth=depth + 1) for item in node.value]
        assert isinstance(node, yaml.MappingNode)
        return {
            name: located.value for name, located in self.entries(node, depth=depth)
        }


def _scalar(text: str, tag: str, path: str, line: int | None) -> Any:
    try:
        return (
            _SCALARS[kind][2](text)
            if (kind := tag.removeprefix(_PREFIX)) in _SCALARS
            else text
        )
    except ValueError:
        raise ConfigError(
            f"{text[:50]!r} is not a usable number", path=path, line=line
        ) from None
