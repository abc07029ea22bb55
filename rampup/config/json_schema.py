"""configs/rampup.schema.json and rl.schema.json, with which an editor checks and completes a configuration.

`python -m rampup.config.json_schema > configs/rampup.schema.json` writes the one anew, and
`python -m rampup.config.json_schema rl > configs/rl.schema.json` the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rampup.config.key import FOLDER_NAME, Key, Kind
from rampup.config.load import BASE
from rampup.config.schema import KEYS, Config
from rampup.config.template import comment
from rampup.plan.numbers import MAX_COUNT
from rampup.rl.config import ROLLOUT_KEYS, RolloutConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MAX_FLOAT = 1e300
# In Python, `$` alone also matches before a line's end.
_END = r"$(?!\n)"
# YAML 1.2, which editors read, takes 1_000 for text.
_GROUPED = "^(?=(_?[0-9]){{2,{most}}}{end})[1-9][0-9]*(_[0-9]+)+{end}"
_NOT_ZERO = "(?=[^/]*[1-9])"
_DIGITS = "[0-9]{1,18}"
_CONTROL = r"\u0000-\u001f\u007f-\u009f\u2028\u2029"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration.

    It takes every value that the keys take, one by one, and refuses every other; what several keys rule together is left to
    `rampup plan`.

    Example:
        >>> json_schema()["properties"]["log_period"]["anyOf"][0]["minimum"]
        1
    """
    return schema_of(KEYS, Config().to_dict(), title="A configuration of rampup")


def rollout_schema() -> dict[str, Any]:
    """Return the JSON schema of a rollout's configuration.

    Example:
        >>> sorted(rollout_schema()["properties"]["rl"]["properties"])
        ['num_generations', 'num_iterations']
    """
    return schema_of(ROLLOUT_KEYS, RolloutConfig().to_dict(), title="A rollout's configuration of rampup")


def schema_of(keys: Mapping[str, Key], defaults: Mapping[str, Any], *, title: str) -> dict[str, Any]:
    """Return the JSON schema of any keys; dotted ones may also be nested.

    Args:
        keys: the keys.
        defaults: what each of them is where it is not set.
        title: what the schema is of.

    Example:
        >>> schema = schema_of({"a.b": Key(kind="bool", doc="b of a", section="")}, {"a.b": True}, title="An example")
        >>> sorted(schema["properties"]), schema["properties"]["a.b"]["default"]
        (['a', 'a.b', 'base_config'], True)
    """
    base = {
        "description": "A configuration beside this one, or one that comes with rampup, whose values this one starts from.",
        "type": ["string", "null"],
        "examples": ["base.yml"],
    }
    properties: dict[str, Any] = {BASE: base}
    for name, key in keys.items():
        properties[name] = _property(key, defaults[name])
        group, dot, own = name.partition(".")
        if dot:
            nested = properties.setdefault(group, {"type": "object", "properties": {}, "additionalProperties": False})
            nested["properties"][own] = properties[name]
    return {"$schema": DRAFT, "title": title, "type": "object", "properties": properties, "additionalProperties": False}


def _property(key: Key, default: Any) -> dict[str, Any]:
    shapes = [_SHAPES[key.kind](key) if not key.choices else {"enum": list(key.choices)}]
    if key.kind in ("int", "float", "size") and key.below is None:
        # One digit less than the limit has: whatever they are, the number is below it.
        digits = len(str(int(_first(key.maximum, MAX_COUNT)))) - 1
        shapes += [{"type": "string", "pattern": _GROUPED.format(most=digits, end=_END)}] * (digits > 3)
    if key.kind == "size" and key.maximum is None:
        shapes.append({"type": "string", "pattern": _fraction(positive=key.above is not None)})
    shapes += [{"const": value} for value in key.also]
    if key.nullable or "none" in key.choices:
        shapes.append({"type": "null"})
    shape = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    return {"description": comment(key), "default": default, **shape}


def _fraction(*, positive: bool) -> str:
    number = rf"{_DIGITS}(\.[0-9]{{1,17}})?"
    return f"^{_NOT_ZERO if positive else ''}{number}(/{_NOT_ZERO}{_DIGITS})?{_END}"


def _limits(key: Key, bound: float) -> dict[str, Any]:
    lowest = {"exclusiveMinimum": key.above} if key.above is not None else {"minimum": _first(key.minimum, -bound)}
    highest = {"exclusiveMaximum": key.below} if key.below is not None else {"maximum": _first(key.maximum, bound)}
    return lowest | highest


def _first(limit: float | None, otherwise: float) -> float:
    return otherwise if limit is None else limit


_SHAPES: dict[Kind, Callable[[Key], dict[str, Any]]] = {
    "bool": lambda key: {"type": "boolean"},
    "int": lambda key: {"type": "integer", **_limits(key, MAX_COUNT)},
    "float": lambda key: {"type": "number", **_limits(key, MAX_FLOAT)},
    "size": lambda key: {"type": "number", **_limits(key, MAX_COUNT)},
    "text": lambda key: {
        "type": "string",
        "maxLength": 1_000_000,
        "pattern": rf"^[^{_CONTROL}]*[^\s{_CONTROL}][^{_CONTROL}]*{_END}",
    },
    "name": lambda key: {"type": "string", "pattern": f"^({FOLDER_NAME.pattern})?{_END}"},
}


if __name__ == "__main__":
    schema = rollout_schema() if sys.argv[1:] == ["rl"] else json_schema()
    print(json.dumps(schema, indent=2, ensure_ascii=False))
