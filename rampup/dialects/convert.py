"""Another system's pre-training run as rampup's configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rampup.config.build import build_plan
from rampup.config.files import yaml_value
from rampup.config.schema import KEYS, Config
from rampup.dialects import load_dialect
from rampup.dialects.rules import Job
from rampup.dialects.verdict import Conversion, Verdict
from rampup.errors import ConfigError, RampupError
from rampup.plan.numbers import to_yaml_number
from rampup.plan.plan import RampPlan

_MAX_NAME = 100


def to_rampup(verdict: Verdict) -> str:
    """Return rampup's configuration of the run that a verdict is about.

    Returns:
        YAML text, from which `rampup.load_config` and `build_plan` make the verdict's plan. Keys that it does not set have
        rampup's defaults. A comment names each key of the file that has no counterpart.

    Raises:
        ConfigError: rampup's configuration has no counterpart of the system, or its plan refuses the run.
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
    name = load_dialect(verdict.system).launch.system
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


class PretrainingJob(Job):
    """The numbers of a file whose run rampup's configuration may express."""

    expressed: Collection[str] = ()  # the keys that `rampup_values` expresses, beside those of the same name
    reasons: Mapping[str, str] = MappingProxyType({})  # why keys are left out, if not for want of a counterpart

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys.

        Raises:
            RampupError: they cannot express it.
        """
        raise NotImplementedError

    @cached_property
    def planned(self) -> RampPlan | RampupError:
        """Rampup's plan of the same run, or why there is none."""
        try:
            return build_plan(Config(**self.rampup_values()))
        except RampupError as error:
            return error

    def plan(self) -> RampPlan | None:
        """Return rampup's plan of the same run, or None if it cannot express it."""
        return self.planned if isinstance(self.planned, RampPlan) else None

    def conversion(self) -> Conversion:
        """Return the same run in rampup's keys, or why they cannot express it."""
        if isinstance(self.planned, RampupError):
            return Conversion(refusal=str(self.planned))
        values = self.rampup_values()
        left_out = {key: why for key, why in self.reasons.items() if key in self.settings.given}
        for key in sorted((self.settings.given - {*values, *self.expressed, *left_out}) | self.settings.others.keys()):
            left_out[key] = "not converted; rampup has a key of this name" if key in KEYS else "no counterpart"
        return Conversion(values=values, left_out=left_out)
