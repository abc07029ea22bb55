"""The result of checking another system's file: the verdict, and everything that
explains it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rampup.plan.describe import format_count as format_count

Validator = Literal["accepts", "rejects"]
Run = Literal["runs", "pads", "drops", "fails"]
FoundBy = Literal["validator", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that the file breaks."""

    rule: str  # its id, such as `skyrl.policy_mini_divides_train`
    keys: tuple[str, ...]  # the keys to change, in that system's words
    message: str  # the rule, the arithmetic with its names, and the fix
    nearest: tuple[
        Any, ...
    ] = ()  # legal values of the first key near the given one, smallest first
    # that system's own check, before the run; or only the run, which fails
    found_by: FoundBy = "validator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The part of a file that rampup's configuration can express."""

    values: Mapping[str, Any] = field(default_factory=dict)  # by rampup's keys
    left_out: Mapping[str, str] = field(
        default_factory=dict
    )  # the file's keys without a counterpart, and the reasons
    refusal: str | None = None  # why the file cannot be converted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a file really does, in one vocabulary."""

    system: str
    violations: tuple[Violation, ...] = ()
    run: Run = "runs"  # what the run does: with violations it fails
    notes: tuple[str, ...] = ()  # settings that are legal but surprising
    version: str = ""  # the version of the system whose rules these are
    summary: str = ""  # the numbers of a step in one line
    derived: Mapping[str, Any] = field(
        default_factory=dict
    )  # such as `samples_per_step` and `optimizer_steps`
    phases: tuple[Mapping[str, Any], ...] | None = (
        None  # of a ramp, as in `rampup plan --json`
    )
    # The explanation for people: a setting, such as
    # `trainer.policy_mini_batch_size = 256`, and what it means, such as `1,280 samples
    # per optimizer step`.
    meanings: tuple[tuple[str, str], ...] = ()
    conversion: Conversion | None = (
        None  # the same run in rampup's keys; None for systems that have no counterpart
    )

    def __post_init__(self) -> None:
        # A run that the validator would stop counts as failed.
        if self.violations:
            object.__setattr__(self, "run", "fails")

    @property
    def validator(self) -> Validator:
        """The result of that system's own check."""
        return (
            "rejects"
            if any(violation.found_by == "validator" for violation in self.violations)
            else "accepts"
        )

    @property
    def ok(self) -> bool:
        """True if the file breaks no rule."""
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as `rampup check --json` prints it."""
        result: dict[str, Any] = {
            "system": self.system,
            "validator": self.validator,
            "run": self.run,
            "violations": [
                {
                    "rule": v.rule,
                    "keys": list(v.keys),
                    "message": v.message,
                    "nearest": list(v.nearest),
                }
                for v in self.violations
            ],
            "notes": list(self.notes),
            "derived": dict(self.derived),
        }
        if self.phases is not None:
            result["phases"] = [dict(phase) for phase in self.phases]
        return result


class Term(NamedTuple):
    """One side of a comparison: a number, and the text that names it in a message."""

    text: str
    number: int


def product(factors: Mapping[str, int], noun: str = "") -> Term:
    """Return a product with its arithmetic: `prompts * responses = 4 * 8 = 32
    samples`.
    """
    number = math.prod(factors.values())
    values = " * ".join(f"{factor:,}" for factor in factors.values())
    return Term(
        f"{' * '.join(factors)} = {values} = {number:,}{noun and ' '}{noun}", number
    )


def times(*factors: object) -> str:
    """Return factors with signs of multiplication between them."""
    return " \u00d7 ".join(
        f"{factor:,}" if isinstance(factor, int) else str(factor) for factor in factors
    )
