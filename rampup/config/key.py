"""Configuration keys: type, limits and documentation of one key, its names elsewhere,
and the base class of a configuration.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from importlib.resources import files
from typing import Any, ClassVar, Literal, Self

import yaml

from rampup.errors import (
    ConfigError,
    RampDefinitionError,
    RampupError,
    a_type,
    raise_together,
)
from rampup.plan.numbers import MAX_COUNT, exact_fraction, parse_count, to_yaml_number

Kind = Literal["bool", "int", "float", "size", "text", "name"]
EXPECTED: dict[Kind, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "size": "a number or a fraction such as 1/3",
    "text": "text that is not empty",
    "name": "a folder name of letters, digits, '.', '_' and '-'",
}
# With up to three decimals and a suffix, a number is whole; with six digits, at most
# 10**18. `parse_count` takes 1.2000K too.
SUFFIXED_COUNT = re.compile(r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3})?[KMBTkmbt]")
FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_BOOL_WORDS = {
    "1": True,
    "0": False,
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
}

# A name whose likeness to a key, from 0 to 1 as of difflib, is lower is no misspelling:
# tokenizer_path is not token_dtype.
MIN_LIKENESS = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a configuration."""

    kind: Kind  # the type of its values
    doc: str  # its documentation, one or more sentences
    section: str  # the heading above it in the configuration file
    # The mapping that contains it in the file: `rl` makes the key `rl.num_generations`.
    # None = top level.
    group: str | None = None
    unit: str | None = None  # the unit of its values, if they have one
    choices: tuple[str, ...] = ()  # the only legal values, if there are few
    minimum: float | None = None  # limits, inclusive
    maximum: float | None = None
    above: float | None = None  # limits, exclusive
    below: float | None = None
    # Legal values outside the limits, such as -1 for automatic.
    also: tuple[int, ...] = ()
    # Whether a whole number may be written with a suffix, such as 1.6K.
    suffixes: bool = True
    nullable: bool = False  # whether null is legal
    # Keys that set the same fact: the one that is set nearer to the command line counts.
    instead_of: tuple[str, ...] = ()
    # MaxText's default, as written there, if it differs from the default here.
    maxtext: str | None = None
    # Whether MaxText has no such key; `maxtext` then gives MaxText's behavior.
    own: bool = False
    # Whether a checkpoint belongs to a run only if both have the same value.
    identity: bool = False
    # Whether a changed value may change the ramp of a resumed run; `resume.ramp_keys`
    # says in which cases.
    ramp: bool = False
    # Whether the value may differ between the processes of one run.
    per_process: bool = False

    @property
    def expected(self) -> str:
        """The legal values, in words."""
        if self.choices:
            words = [f"one of {', '.join(self.choices)}"]
        else:
            limits = {
                "at least": self.minimum,
                "at most": self.maximum,
                "above": self.above,
                "below": self.below,
            }
            known = {name: limit for name, limit in limits.items() if limit is not None}
            shown = (
                f"{name} {limit:g}" if isinstance(limit, float) else f"{name} {limit}"
                for name, limit in known.items()
            )
            words = [
                EXPECTED[self.kind],
                *shown,
                *(f"or {value}" for value in self.also),
            ]
        return ", ".join([*words, *(["or null"] if self.nullable else [])])

    def convert(self, name: str, value: object) -> Any:
        """Convert a value from YAML or Python to this key's type and check its limits;
        an error calls it `name`.
        """
        if value is None and "none" in self.choices:
            return "none"
        if isinstance(value, bool) and "off" in self.choices:
            return "on" if value else "off"  # as YAML reads these words without quotes
        if value is None:
            if self.nullable:
                return None
            raise self._error(name, "null")
        # The only texts that are whole numbers have a suffix.
        is_text = self.kind == "int" and isinstance(value, str)
        converted = _as_kind(self.kind, value)
        if is_text and not self.suffixes:
            converted = None
        if converted is None:
            hint = (
                ", such as 1600 or 1.6K"
                if is_text and self.suffixes and str(value)[:1].isdigit()
                else ""
            )
            if self.kind in ("text", "name") and isinstance(value, bool | int | float):
                hint = f"; in YAML put it in quotes: {name}: {str(value)[:80]!r}"
            if name == "batch_size_schedule" and isinstance(value, list | Mapping):
                hint = ', such as "0:768 250B:1536 500B:3072"'
            if (
                self.kind in ("int", "size")
                and isinstance(value, int | float)
                and abs(value) > MAX_COUNT
            ):
                hint = ", at most 10**18"
            raise self._error(
                name, repr(value)[:100], hint, nearest=self._guesses(value)
            )
        if self.choices and converted not in self.choices:
            raise self._error(name, repr(converted), nearest=self.choices)
        if converted not in self.also:
            self._check_limits(name, converted)
        return converted

    def allows(self, value: object) -> bool:
        """Return whether `convert` accepts a value."""
        try:
            self.convert("", value)
        except ConfigError:
            return False
        return True

    def _check_limits(self, name: str, value: Any) -> None:
        low = (self.minimum is not None and value < self.minimum) or (
            self.above is not None and value <= self.above
        )
        high = (self.maximum is not None and value > self.maximum) or (
            self.below is not None and value >= self.below
        )
        if low or high:
            limit = self.minimum if low else self.maximum
            if limit is None and low and self.above is not None and self.kind == "size":
                limit = self.above + 1
            nearest = [
                *self.also,
                *(
                    []
                    if limit is None
                    else [int(limit) if limit == int(limit) else limit]
                ),
            ]
            raise self._error(
                name,
                f"{float(value):g}" if isinstance(value, Fraction) else str(value),
                nearest=nearest,
            )

    def _guesses(self, value: object) -> list[Any]:
        """Return the legal values that a value of another type may stand for: 5 for
        "5", 1 and 2 for 1.5, "5" for 5.
        """
        candidates: list[Any] = []
        if self.kind in ("text", "name"):
            candidates = [str(value)] if isinstance(value, bool | int | float) else []
        elif self.kind == "bool":
            candidates = (
                [_BOOL_WORDS[word]]
                if (word := str(value).lower()) in _BOOL_WORDS
                else []
            )
        elif (
            isinstance(value, str | float)
            and (number := _as_kind("size", value)) is not None
        ):
            candidates = (
                [float(number)]
                if self.kind == "float"
                else sorted({math.floor(number), math.ceil(number)})
            )
        return [candidate for candidate in candidates if self.allows(candidate)]

    def _error(
        self, name: str, shown: str, hint: str = "", nearest: Any = ()
    ) -> ConfigError:
        return ConfigError(
            f"{name}={shown} must be {self.expected}{hint}", key=name, nearest=nearest
        )


def read_keys(package: str) -> dict[str, Key]:
    """Return the keys that the file `keys.yml` of a package describes, by attribute."""
    text = files(package).joinpath("keys.yml").read_text(encoding="utf-8")
    # The parser in C, where PyYAML has it, is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sections: dict[str, dict[str, Any]] = yaml.load(text, Loader=loader)
    keys = {}
    for section, entries in sections.items():
        for name, entry in entries.items():
            facts: dict[str, Any] = {
                fact: tuple(value) if isinstance(value, list) else value
                for fact, value in entry.items()
            }
            keys[name] = Key(section=section, **facts)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A checked configuration: one attribute per key, each value read once, when the
    object is made.

    `sources` says where each value that was set comes from, by key. All bad values are
    one ConfigError; if there are none, so is all that `_contradictions` finds.
    """

    # What is known of each key, by attribute.
    table: ClassVar[Mapping[str, Key]] = read_keys(__package__)

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    # The attributes that any source set, also to their default. base.yml sets every key,
    # so on top of it all are given.
    _given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, *given: Any, **values: Any) -> Self:
        """Remember which attributes are set, and refuse an unknown name."""
        if given:
            raise TypeError(
                f"{cls.__name__}() takes keys by name, and not {a_type(given[0])}:"
                f" write {cls.__name__}(**keys)"
            )
        if unknown := [
            name for name in values if name not in {f.name for f in fields(cls)}
        ]:
            known = [*map(attribute_of, cls.keys())]
            hints = [f"{name!r}; {closest_keys(name, known)[1]}" for name in unknown]
            raise TypeError(
                f"{cls.__name__}() got an unexpected keyword argument"
                f" {', and '.join(hints)}"
            )
        self = super(Settings, cls).__new__(cls)
        object.__setattr__(self, "_given", frozenset(values))
        return self

    def __post_init__(self) -> None:
        problems: list[RampupError] = []
        for name, spec in self.keys().items():
            attribute = attribute_of(name)
            try:
                object.__setattr__(
                    self, attribute, spec.convert(name, getattr(self, attribute))
                )
            except ConfigError as error:
                problems.append(error)
        raise_together(problems)
        for attribute, default in self._dependent_defaults().items():
            object.__setattr__(self, attribute, default)
        raise_together(self._contradictions())

    @classmethod
    @functools.cache
    def keys(cls) -> dict[str, Key]:
        """Return the keys by their names in a file, in the order of the class."""
        names = [f.name for f in fields(cls) if f.init and f.name != "sources"]
        specs = {name: cls.table[name] for name in names}
        return {
            f"{spec.group}.{name}" if spec.group else name: spec
            for name, spec in specs.items()
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], sources: Mapping[str, str]) -> Self:
        """Return the configuration with these values by key, and defaults for the
        others.

        Args:
            values: the values that are set, by key.
            sources: where each of them comes from, by key.
        """
        return cls(
            **{attribute_of(name): value for name, value in values.items()},
            sources=sources,
        )

    def where(self, name: str) -> str:
        """Return where the value of a key comes from: a file and line, the command
        line, a variable, or `default`.

        Args:
            name: a key.
        """
        return self.sources.get(name, "default")

    def to_dict(self) -> dict[str, Any]:
        """Return the values by key, in the order of the keys, as plain numbers and
        text.
        """
        values = {name: getattr(self, attribute_of(name)) for name in self.keys()}
        return {
            name: to_yaml_number(value) if isinstance(value, Fraction) else value
            for name, value in values.items()
        }

    def identity(self) -> dict[str, Any]:
        """Return the values that a checkpoint and the run that resumes it must share,
        by key.
        """
        return {
            name: getattr(self, attribute_of(name))
            for name, spec in self.keys().items()
            if spec.identity
        }

    def _dependent_defaults(self) -> dict[str, Any]:
        """Return the defaults that depend on other attributes, which are read already,
        and on which ones are set.
        """
        return {}

    def _contradictions(self) -> list[RampupError]:
        """Return an error for each rule between keys that the values break."""
        return []


@functools.cache
def other_names() -> Mapping[str, Any]:
    """Return the names that are no keys, in `names.yml`: `aliases`, those of other
    systems by key, `other_quantities`, which of them have other units, and `removed`,
    what replaces a former key.
    """
    text = files(__package__).joinpath("names.yml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.safe_load(text)
    return tables


def attribute_of(name: str) -> str:
    """Return the attribute that a key of the file becomes: that of `rl.num_generations`
    is `num_generations`.
    """
    return name.rpartition(".")[2]


def _as_kind(kind: Kind, value: object) -> Any:
    """Return a value as the type of a kind; None if it has another type."""
    if kind == "bool":
        return value if isinstance(value, bool) else None
    if kind == "text":
        return (
            value
            if isinstance(value, str)
            and value.strip()
            and value.isprintable()
            and len(value) <= 1_000_000
            else None
        )
    if kind == "name":
        return (
            value
            if isinstance(value, str) and (value == "" or FOLDER_NAME.fullmatch(value))
            else None
        )
    if kind == "size":
        try:
            return exact_fraction(value, what="size")
        except RampDefinitionError:
            return None
    # Such as 300B.
    if kind == "int" and isinstance(value, str) and SUFFIXED_COUNT.fullmatch(value):
        value = parse_count(value, what="count")
    largest = MAX_COUNT if kind == "int" else 1e300
    # NaN is not at most the largest either.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= largest
    ):
        return None
    if kind == "float":
        return float(value)
    return int(value) if value == int(value) else None


def closest_keys(name: str, keys: Collection[str]) -> tuple[tuple[str, ...], str]:
    """Return the keys that an unknown name may stand for, with a hint for its error:
    what replaces a former key, those of other systems, or a spelling.
    """
    if removed := other_names()["removed"].get(name):
        return (), removed
    nearest, quantity = keys_of_alias(name, keys)
    if nearest:
        return nearest, quantity or f"its name here is {' or '.join(nearest)}"
    word = name.lower()
    if close := difflib.get_close_matches(
        word, [*keys, "base_config"], n=1, cutoff=MIN_LIKENESS
    ):
        return tuple(close), f"the closest is {close[0]}"
    return (
        (),
        (
            "no key is like it; if it is a key of MaxText that rampup does not have,"
            " delete it (`rampup check FILE --from maxtext num_devices=8` reads such a"
            " file)"
        ),
    )


def unknown_key(
    name: str, keys: Collection[str], path: str | None = None, line: int | None = None
) -> ConfigError:
    """Return the error about a name that is no key, and where it is set."""
    nearest, hint = closest_keys(name, keys)
    return ConfigError(
        f"unknown key {name[:100]!r}; {hint}",
        key=name,
        nearest=nearest,
        path=path,
        line=line,
    )


def keys_of_alias(
    name: str, keys: Collection[str]
) -> tuple[tuple[str, ...], str | None]:
    """Return the keys that other systems call by a name, such as `learning_rate` for
    `lr`; and what an error says if the name has other units than they, such as `min_lr`
    and `learning_rate_final_fraction`, else None.
    """
    word = name.lower().replace("-", "_")
    tables = other_names()
    found = tuple(
        key
        for key, aliases in tables["aliases"].items()
        if key in keys and word in aliases.split()
    )
    hints = (
        hint
        for names, hint in tables["other_quantities"].items()
        if word in names.split()
    )
    return found, next(hints, None)
