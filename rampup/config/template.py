"""configs/base.yml, written from the schema, so that file and schema cannot differ.

`python -m rampup.config.template > configs/base.yml` writes it anew.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rampup.config.key import Key
from rampup.config.schema import KEYS, Config

MODELINE = "# yaml-language-server: $schema={}"
SCHEMA_FILE = "rampup.schema.json"
_HEAD = f"""\
{MODELINE.format(SCHEMA_FILE)}
# The configuration of `rampup train`: every key, its meaning and its value.
# Names and meanings are MaxText's; where MaxText's own default is another, the comment gives it.
# Set a key on the command line (steps=100), in the environment (RAMPUP_STEPS=100), or in a file of your own that starts
# with `base_config: base.yml`.
"""
# The schema leaves the ramp off, so that a file of a few keys does not get one by surprise; this file turns it on.
_OVERRIDES: dict[str, Any] = {"enable_rampup_batch_size": True}


def base_yaml() -> str:
    """Return the text of configs/base.yml.

    Example:
        >>> "enable_rampup_batch_size: true" in base_yaml()
        True
    """
    return yaml_text(_HEAD, KEYS, base_values())


def base_values() -> dict[str, Any]:
    """Return the keys and values of configs/base.yml."""
    return Config(**_OVERRIDES).to_dict()


def run_yaml(config: Config) -> str:
    """Return a file that sets every key as a run has it: what the run can be planned, drawn and repeated from.

    Example:
        >>> "steps: 7" in run_yaml(Config(steps=7))
        True
    """
    return yaml_text("# The configuration that this run was last started with.\n", KEYS, config.to_dict())


def yaml_text(head: str, keys: Mapping[str, Key], values: Mapping[str, Any]) -> str:
    """Return a file that sets every key, each under its comment; dotted keys are nested.

    Example:
        >>> print(yaml_text("# A file.", {"rl.mu": Key(kind="int", doc="passes", section="Run")}, {"rl.mu": 2}), end="")
        # A file.
        #### RUN ####
        rl:
          # Passes.
          mu: 2
    """
    lines, section, group = [head], None, ""
    for name, key in keys.items():
        if key.section != section:
            section = key.section
            lines.append(f"#### {section.upper()} ####")
        parent, _, own = name.rpartition(".")
        lines += [f"{parent}:"] if parent and parent != group else []
        group, indent = parent, "  " if parent else ""
        lines += textwrap.wrap(comment(key), 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines += [f"{indent}{own}: {yaml_value(values[name])}", ""]
    return "\n".join(lines).rstrip() + "\n"


def comment(key: Key) -> str:
    """Return what a key's comment says: its meaning, its unit and choices where the meaning does not name them, and MaxText's
    default where it is another.
    """
    remarks = [f"in {key.unit}"] if key.unit and key.unit.rstrip("s") not in key.doc else []
    remarks += [" or ".join(key.choices)] if any(choice not in key.doc for choice in key.choices) else []
    remarks += [f"MaxText: {key.maxtext}"] if key.maxtext else []
    return key.doc[0].upper() + key.doc[1:] + (f" ({'; '.join(remarks)})" if remarks else "") + "."


def yaml_value(value: Any) -> str:
    """Write a value as YAML reads it back.

    Example:
        >>> yaml_value(None), yaml_value(True), yaml_value(1e-8), yaml_value("a: b")
        ('null', 'true', '1.0e-08', '"a: b"')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Fraction):
        text = str(value)
        plain = text.replace("_", "").replace(".", "").isalnum() and not text[0].isdigit()
        return text if plain and text.lower() not in ("null", "true", "false", "yes", "no", "on", "off") else f'"{text}"'
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return str(value)


def keys_table() -> str:
    """Return every key as a Markdown table, as it stands in the README."""
    values = base_values()
    rows = ["| key | value in base.yml | meaning |", "|---|---|---|"]
    for name, key in KEYS.items():
        meaning = comment(key).replace("|", "\\|")
        rows.append(f"| `{name}` | `{yaml_value(values[name])}` | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(base_yaml(), end="")
