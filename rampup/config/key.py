"""What a configuration key is: its kind, its limits, its one line of documentation, and how a value is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan.numbers import MAX_COUNT, exact_fraction

Kind = Literal["bool", "int", "float", "size", "text", "name"]
EXPECTED: dict[Kind, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "size": "a number or a fraction such as 1/3",
    "text": "text that is not empty",
    "name": "a folder name of letters, digits, '.', '_' and '-'",
}
_TRUTH = {"1": True, "0": False, "true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}
FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration.

    Attributes:
        kind: what values it takes.
        doc: one line of documentation.
        section: the banner it stands under in base.yml.
        unit: the unit of its values, if they have one.
        choices: the only values allowed, if there are few.
        minimum, maximum: limits, inclusive.
        above, below: limits, exclusive.
        also: values allowed outside the limits, such as -1 for automatic.
        nullable: whether null is a value.
        maxtext: MaxText's default where ours differs, as written there.
        own: whether MaxText has no such key; `maxtext` then says what it does.
    """

    kind: Kind
    doc: str
    section: str
    unit: str | None = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[int, ...] = ()
    nullable: bool = False
    maxtext: str | None = None
    own: bool = False

    @property
    def expected(self) -> str:
        """What to write, in words.

        Example:
            >>> Key(kind="int", doc="", section="", minimum=1, also=(-1,)).expected
            'a whole number, at least 1, or -1'
        """
        if self.choices:
            words = f"one of {', '.join(self.choices)}"
        else:
            limits = {"at least": self.minimum, "at most": self.maximum, "above": self.above, "below": self.below}
            parts = [EXPECTED[self.kind], *(f"{name} {_plain(limit)}" for name, limit in limits.items() if limit is not None)]
            words = ", ".join(parts) + "".join(f", or {value}" for value in self.also)
        return words + (", or null" if self.nullable else "")

    def read(self, name: str, value: object) -> Any:
        """Return the value in this key's own type.

        Args:
            name: the key's name, for the error.
            value: what YAML or Python gave.

        Raises:
            ConfigError: another type, or outside the limits; says what to write instead.
        """
        if value is None and "none" in self.choices:
            return "none"
        if value is None:
            if self.nullable:
                return None
            raise self._error(name, "null")
        converted = _READERS[self.kind](value)
        if converted is None:
            shown = repr(value)[:100]
            quoting = f"; in YAML put it in quotes: {name}: {str(value)[:80]!r}" if self._is_text and _is_scalar(value) else ""
            raise self._error(name, shown, quoting, nearest=self._meant(value))
        if self.choices and converted not in self.choices:
            raise self._error(name, repr(converted), nearest=self.choices)
        if isinstance(converted, int | float | Fraction) and not isinstance(converted, bool):
            self._check_limits(name, converted)
        return converted

    @property
    def _is_text(self) -> bool:
        return self.kind in ("text", "name")

    def _check_limits(self, name: str, value: float | Fraction) -> None:
        if value in self.also:
            return
        low = (self.minimum is not None and value < self.minimum) or (self.above is not None and value <= self.above)
        high = (self.maximum is not None and value > self.maximum) or (self.below is not None and value >= self.below)
        if low or high:
            limit = self.minimum if low else self.maximum
            if limit is None and low and self.above is not None and self.kind == "size":
                limit = self.above + 1
            nearest = [*self.also, *([] if limit is None else [int(limit) if limit == int(limit) else limit])]
            raise self._error(name, f"{float(value):g}" if isinstance(value, Fraction) else str(value), nearest=nearest)

    def allows(self, value: object) -> bool:
        """Say whether a value is one that `read` takes."""
        try:
            self.read("", value)
        except ConfigError:
            return False
        return True

    def _meant(self, value: object) -> list[Any]:
        """Return what a value of another type may stand for: 5 for "5", 1 and 2 for 1.5, "5" for 5 where text is wanted."""
        candidates: list[Any] = []
        if self._is_text:
            candidates = [str(value)] if _is_scalar(value) else []
        elif self.kind == "bool":
            candidates = [_TRUTH[text]] if (text := str(value).lower()) in _TRUTH else []
        elif isinstance(value, str | float) and (number := _read_size(value)) is not None:
            candidates = [float(number)] if self.kind == "float" else sorted({math.floor(number), math.ceil(number)})
        return [candidate for candidate in candidates if self.allows(candidate)]

    def _error(self, name: str, shown: str, hint: str = "", nearest: Any = ()) -> ConfigError:
        return ConfigError(f"{name}={shown} must be {self.expected}{hint}", key=name, nearest=nearest)


def key(default: Any, doc: str, *, section: str, kind: Kind | None = None, **limits: Any) -> Any:
    """Return a dataclass field with its default and its `Key`; the kind follows from the default unless given."""
    kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "text", Fraction: "size"}
    chosen = kind or kinds[type(default)]
    return field(default=default, metadata={"key": Key(kind=chosen, doc=doc, section=section, **limits)})


def _plain(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _read_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _read_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not (math.isfinite(value) and value == int(value)):
        return None
    return int(value) if abs(value) <= MAX_COUNT else None


def _read_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def _read_size(value: object) -> Fraction | None:
    try:
        return exact_fraction(value, what="size")
    except RampDefinitionError:
        return None


def _read_text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= 1_000_000 else None


def _read_name(value: object) -> str | None:
    return value if isinstance(value, str) and (value == "" or FOLDER_NAME.fullmatch(value)) else None


_READERS: dict[Kind, Callable[[object], Any]] = {
    "bool": _read_bool,
    "int": _read_int,
    "float": _read_float,
    "size": _read_size,
    "text": _read_text,
    "name": _read_name,
}
