"""What is written from the keys and so cannot differ from them: configuration files,
their JSON schemas, explanations.

`python -m rampup.config.files configs` writes configs/base.yml and
configs/rampup.schema.json.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.config.key import FOLDER_NAME, REMOVED, Key, Settings, keys_for_alias
from rampup.config.load import BASE
from rampup.config.schema import KEYS, Config
from rampup.errors import ConfigError

MODELINE = "# yaml-language-server: $schema={}"
LINE_LENGTH = 118
# Keys that `explain` suggests for an unknown one.
MAX_CLOSE = 6
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# A number as text, which YAML 1.2 does not take for one: 1_000, 2K or, of a size, 1/3.
# In Python, `$` alone also matches before a line's end.
_NUMERAL = r"^(?=.*[1-9])[0-9][0-9_]*(\.[0-9_]+)?{end}$(?!\n)"
_ENDS = {"int": "[KMBTkmbt]?", "float": "", "size": "(/[0-9_.]*[1-9][0-9_.]*)?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration file that sets every key, and its JSON schema."""

    name: str  # the file's name, such as base.yml
    schema_name: str  # the name of the file with its JSON schema
    title: str  # the title of that schema
    head: str  # the comment at the top of the file
    settings: type[Settings]  # the class whose attributes are the keys
    overrides: Mapping[str, Any] = field(
        default_factory=dict
    )  # the values that differ from the defaults

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys by name."""
        return self.settings.keys()

    @property
    def defaults(self) -> dict[str, Any]:
        """The value of each key that a file does not set."""
        return self.settings().to_dict()

    @property
    def values(self) -> dict[str, Any]:
        """The value of each key in this file."""
        return self.settings.from_values(self.overrides, {}).to_dict()

    @property
    def text(self) -> str:
        """The content of the file."""
        return yaml_text(
            f"{MODELINE.format(self.schema_name)}\n{self.head}", self.keys, self.values
        )

    @property
    def json_schema(self) -> dict[str, Any]:
        """The JSON schema (draft 2020-12) with which an editor checks and completes
        such files; dotted keys may be nested.

        It accepts legal values as people write them, and refuses other types and
        numbers outside the limits.
        """
        base = {
            "description": (
                "The configuration that provides all values not set here: a file in the"
                " same folder, or one that comes with rampup."
            ),
            "type": ["string", "null"],
            "examples": ["base.yml"],
        }
        properties: dict[str, Any] = {BASE: base}
        types = {
            "bool": "boolean",
            "int": "integer",
            "float": "number",
            "size": "number",
            "text": "string",
            "name": "string",
        }
        defaults = self.defaults
        for name, key in self.keys.items():
            limits = {"minimum": key.minimum, "maximum": key.maximum}
            limits |= {"exclusiveMinimum": key.above, "exclusiveMaximum": key.below}
            shape: dict[str, Any] = {"type": types[key.kind]}
            shape |= {
                limit: value for limit, value in limits.items() if value is not None
            }
            shape |= {
                "text": {"pattern": r"\S"},
                "name": {"pattern": f"^({FOLDER_NAME.pattern})?$(?!\\n)"},
            }.get(key.kind, {})
            if key.choices:
                shape = {
                    "enum": [
                        *key.choices,
                        *([True, False] if "off" in key.choices else []),
                    ]
                }  # YAML's on and off
            shapes = [shape]
            if key.kind in _ENDS:
                shapes.append(
                    {"type": "string", "pattern": _NUMERAL.format(end=_ENDS[key.kind])}
                )
            shapes += [{"const": value} for value in key.also]
            if key.nullable or "none" in key.choices:
                shapes.append({"type": "null"})
            properties[name] = {"description": describe(key), "default": defaults[name]}
            properties[name] |= shape if len(shapes) == 1 else {"anyOf": shapes}
            group, dot, own = name.partition(".")
            if dot:
                nested = properties.setdefault(
                    group,
                    {"type": "object", "properties": {}, "additionalProperties": False},
                )
                nested["properties"][own] = properties[name]
        others = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        return {"$schema": DRAFT, "title": self.title, **others}

    def write(self, folder: str | Path) -> None:
        """Write the file and its schema into a folder."""
        Path(folder, self.name).write_text(self.text, encoding="utf-8")
        schema = json.dumps(self.json_schema, indent=2, ensure_ascii=False)
        Path(folder, self.schema_name).write_text(schema + "\n", encoding="utf-8")


BASE_FILE = ConfigFile(
    name="base.yml",
    schema_name="rampup.schema.json",
    title="A configuration of rampup",
    head="""\
# The configuration of `rampup train`: every key, its documentation and its value.
# Names and meanings are those of MaxText. If its default differs, the comment ends with it.
# Set a key on the command line (steps=100), in the environment (RAMPUP_STEPS=100), or in a file of your own that starts
# with `base_config: base.yml`. Whole numbers may end in K, M, B or T, powers of 1,000: 2K is 2000.
""",
    settings=Config,
)


def run_yaml(config: Settings, **changes: Any) -> str:
    """Return a file that sets every key as a run has it, with `changes` that the run
    has found out, such as `num_devices`.
    """
    return yaml_text(
        "# The configuration that this run was last started with.\n",
        config.keys(),
        config.to_dict() | changes,
    )


def yaml_text(head: str, keys: Mapping[str, Key], values: Mapping[str, Any]) -> str:
    """Return a file that sets every key, each under a comment; dotted keys are
    nested.
    """
    lines, section, group = [head], None, ""
    for name, key in keys.items():
        if key.section != section:
            section = key.section
            lines.append(f"#### {section.upper()} ####")
        parent, _, own = name.rpartition(".")
        lines += [f"{parent}:"] if parent and parent != group else []
        group, indent = parent, "  " if parent else ""
        lines += textwrap.wrap(
            describe(key),
            LINE_LENGTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        lines += [f"{indent}{own}: {yaml_value(values[name])}", ""]
    return "\n".join(lines).rstrip() + "\n"


def describe(key: Key) -> str:
    """Return a key's documentation, with its unit and choices if the documentation
    leaves them out, and MaxText's default.
    """
    remarks = (
        [f"Unit: {key.unit}."]
        if key.unit and key.unit.rstrip("s") not in key.doc.lower()
        else []
    )
    remarks += (
        [f"One of {', '.join(key.choices)}."]
        if any(choice not in key.doc for choice in key.choices)
        else []
    )
    remarks += [f"MaxText: {key.maxtext}."] if key.maxtext else []
    return " ".join([key.doc, *remarks])


def yaml_value(value: Any) -> str:
    """Write a value so that YAML reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Fraction):
        text = str(value)
        plain = (
            text.replace("_", "").replace(".", "").isalnum() and not text[0].isdigit()
        )
        return (
            text
            if plain
            and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off")
            else f'"{text}"'
        )
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return str(value)


def explain(name: str, files: Sequence[ConfigFile] = (BASE_FILE,)) -> dict[str, Any]:
    """Return a key's explanation from the first file that has it, as `rampup explain
    --json` prints it; or name close keys.
    """
    file = next((file for file in files if name in file.keys), None)
    if file is None:
        # Keys that are spelled like the name, or that have a part which is.
        known = list(dict.fromkeys(key for each in files for key in each.keys))
        word = name.lower()
        parts = {part for key in known for part in re.split(r"[_.]", key)}
        alike = difflib.get_close_matches(
            word, {part for part in parts if len(part) > 2}, n=2, cutoff=0.75
        )
        near = [
            key for key in keys_for_alias(word, KEYS) if key in known
        ] + difflib.get_close_matches(word, known, n=3)
        near += [
            key
            for key in known
            if (len(word) > 2 and word in key) or {*re.split(r"[_.]", key)} & {*alike}
        ]
        nearest = list(dict.fromkeys(near))[:MAX_CLOSE]
        hint = (
            f"; close: {', '.join(nearest)}"
            if nearest
            else "; configs/base.yml lists all keys"
        )
        if name in REMOVED:
            nearest, hint = [], f"; {REMOVED[name]}"
        raise ConfigError(
            f"unknown key {name[:100]!r}{hint}", key=name, nearest=nearest
        )
    key, default = file.keys[name], file.defaults[name]
    return {
        "key": name,
        "file": file.name,
        "section": key.section,
        "meaning": key.doc,
        "legal": key.expected,
        "unit": key.unit,
        "default": default,
        "value_in_file": file.values[name],
        "maxtext_name": None if key.own else name,
        "maxtext_default": key.maxtext or (None if key.own else yaml_value(default)),
        # The other keys that the documentation names, and those whose documentation
        # names it.
        "interacts": [
            o
            for o in file.keys
            if o != name and (_names(key, o) or _names(file.keys[o], name))
        ],
    }


def _names(key: Key, name: str) -> bool:
    """Return whether a key's documentation names another key, and not just a word that
    is also a key, such as steps.
    """
    return (
        "_" in name
        and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", key.doc) is not None
    )


if __name__ == "__main__":
    BASE_FILE.write(sys.argv[1])
