"""Another system's pre-training run as rampup's configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction

from rampup.config.files import yaml_value
from rampup.config.schema import KEYS
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError
from rampup.plan.numbers import to_yaml_number

_NAMES = {"maxtext": "MaxText", "megatron": "Megatron"}
_MAX_NAME = 100


def to_rampup(verdict: Verdict) -> str:
    """Return rampup's configuration of the run that a verdict is about.

    Args:
        verdict: of a MaxText or Megatron file.

    Returns:
        YAML text, from which `rampup.load_config` and `build_plan` make the verdict's plan. Keys that it does not set have
        rampup's defaults. A comment names each key of the file that has no counterpart.

    Raises:
        ConfigError: rampup's configuration has no counterpart of the system, or its plan refuses the run.

    Example:
        >>> from rampup.dialects.verdict import Conversion
        >>> conversion = Conversion(values={"steps": 10}, left_out={"a": "no counterpart"})
        >>> print(to_rampup(Verdict(system="maxtext", conversion=conversion)))
        # Converted from a MaxText file: its batches, its ramp and its pipeline.
        <BLANKLINE>
        steps: 10
        <BLANKLINE>
        # Left out:
        # a: no counterpart
        <BLANKLINE>
    """
    conversion = verdict.conversion
    if conversion is None:
        raise ConfigError(
            f"a {verdict.system} file cannot be converted: rampup's configuration is for pre-training; write its sizes in "
            "the keys of configs/rl.yml",
            key="to",
        )
    if conversion.refusal is not None:
        raise ConfigError(f"the file cannot be converted: {conversion.refusal}", key="to")
    name = _NAMES.get(verdict.system, verdict.system)
    lines = [f"# Converted from a {name} file: its batches, its ramp and its pipeline.", ""]
    for key, value in conversion.values.items():
        lines.append(f"{key}: {yaml_value(to_yaml_number(value) if isinstance(value, Fraction) else value)}")
    if conversion.left_out:
        lines += ["", "# Left out:"]
    for key, reason in conversion.left_out.items():
        # A key may contain anything; it must stay within its comment.
        printable = "".join(letter if letter.isprintable() else "?" for letter in key)
        lines.append(f"# {printable[:_MAX_NAME]}: {reason}")
    return "\n".join(lines) + "\n"


def left_out(settings: Settings, expressed: Collection[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a file that a conversion does not express, each with the reason.

    Args:
        settings: the file.
        expressed: the keys that are converted.
        reasons: keys with a reason of their own.
    """
    result = dict(reasons)
    for key in sorted((settings.given - set(expressed) - set(reasons)) | settings.others):
        result[key] = "not converted; rampup has a key of this name" if key in KEYS else "no counterpart"
    return result
