"""What is written from the keys and so cannot differ from them: configuration files and
explanations.

`python -m rampup.config.files configs` writes configs/base.yml.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.config.key import Key, Settings, closest_keys, keys_of_alias, unknown_key
from rampup.config.schema import Config

LINE_LENGTH = 118


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration file that sets every key."""

    name: str  # the file's name, such as base.yml
    head: str  # the comment at the top of the file
    settings: type[Settings]  # the class whose attributes are the keys
    # The values that differ from the defaults.
    overrides: Mapping[str, Any] = field(default_factory=dict)

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
        return yaml_text(self.head, self.keys, self.values)

    def write(self, folder: str | Path) -> None:
        """Write the file into a folder."""
        Path(folder, self.name).write_text(self.text, encoding="utf-8")


BASE_FILE = ConfigFile(
    name="base.yml",
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


def changed_keys(config: Settings, text: str, names: Collection[str]) -> list[str]:
    """Return which of some keys have another value than in a file of `run_yaml`, as
    `key: old -> new`.
    """
    before = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return [
        f"{name}: {before[name]} -> {yaml_value(value)}"
        for name, value in config.to_dict().items()
        if name in names and before.get(name) not in (None, yaml_value(value))
    ]


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
    sentences = [key.doc]
    if key.unit and key.unit.rstrip("s") not in key.doc.lower():
        sentences.append(f"Unit: {key.unit}.")
    if any(choice not in key.doc for choice in key.choices):
        sentences.append(f"One of {', '.join(key.choices)}.")
    if key.maxtext:
        sentences.append(f"MaxText: {key.maxtext}.")
    return " ".join(sentences)


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
    --json` prints it; or refuse an unknown one.

    `instead` says what the first file has instead of a key that only another one has,
    if anything.
    """
    file = next((file for file in files if name in file.keys), None)
    if file is None:
        known = dict.fromkeys(key for each in files for key in each.keys)
        raise unknown_key(name, known)
    key, default = file.keys[name], file.defaults[name]
    instead: dict[str, str] = {}
    if name not in files[0].keys and keys_of_alias(name, files[0].keys)[0]:
        instead[files[0].name] = closest_keys(name, files[0].keys)[1]
    return {
        "instead": instead,
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
