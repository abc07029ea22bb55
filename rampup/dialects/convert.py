"""From a verdict to our own YAML: ramps, accumulation and pipelines, with a comment for every key that has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rampup.config.files import yaml_value
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError
from rampup.plan.numbers import to_yaml_number

_NAMES = {"maxtext": "MaxText", "megatron": "Megatron"}
_MAX_SHOWN = 100


def to_rampup(verdict: Verdict) -> str:
    """Return our configuration of the run that a verdict is about.

    Args:
        verdict: of a MaxText or Megatron file.

    Returns:
        YAML text. `rampup.load_config` and `build_plan` make the verdict's plan of it; keys that are not in it have our
        defaults.

    Raises:
        ConfigError: a system that our configuration has no counterpart of, or a run that our plan refuses.

    Example:
        >>> from rampup.dialects.verdict import Conversion
        >>> conversion = Conversion(values={"steps": 10}, left_out={"a": "no counterpart"})
        >>> print(to_rampup(Verdict(system="maxtext", conversion=conversion)))
        # Converted from a file of MaxText: its batches, its ramp and its pipeline.
        <BLANKLINE>
        steps: 10
        <BLANKLINE>
        # Left out:
        # a: no counterpart
        <BLANKLINE>
    """
    if verdict.conversion is None:
        raise ConfigError(
            f"a file of {verdict.system} cannot be converted: rampup's configuration is for pre-training; write its sizes in "
            "the keys of configs/rl.yml",
            key="to",
        )
    if verdict.conversion.refusal is not None:
        raise ConfigError(f"it cannot be converted: {verdict.conversion.refusal}", key="to")
    name = _NAMES.get(verdict.system, verdict.system)
    lines = [f"# Converted from a file of {name}: its batches, its ramp and its pipeline.", ""]
    lines += [f"{key}: {_text(value)}" for key, value in verdict.conversion.values.items()]
    lines += _left_out(verdict.conversion.left_out)
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    return yaml_value(to_yaml_number(value) if isinstance(value, Fraction) else value)


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    if not reasons:
        return []
    return ["", "# Left out:", *(f"# {_printable(name)}: {reason}" for name, reason in reasons.items())]


def _printable(name: str) -> str:
    """A key's name as one line of a comment, whatever a stranger wrote into it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:_MAX_SHOWN]
