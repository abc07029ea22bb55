"""What a check of another system's file found out: the verdict, and everything that explains it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from rampup.notebook_repr import NotebookRepr

Validator = Literal["accepts", "rejects"]
Run = Literal["runs", "pads", "drops", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that the file breaks.

    Attributes:
        rule: its id, such as `skyrl.mini_divides_train`.
        keys: the keys to change, in that system's words.
        message: the rule, the arithmetic with its names, and the fix.
        nearest: legal values of the first key near the one given, smallest first.
        found_by: `validator`: that system's own check says so before the run; `run`: nothing does, and the run fails.
    """

    rule: str
    keys: tuple[str, ...]
    message: str
    nearest: tuple[Any, ...] = ()
    found_by: Literal["validator", "run"] = "validator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """One line of the table "what the file says / what it means".

    Attributes:
        says: what the file says, such as `trainer.policy_mini_batch_size = 256`; empty for what only follows.
        means: what it means, such as `1,280 samples per optimizer step`.
    """

    says: str
    means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A rule that the system's guide gives, and whether it is true of this file.

    Attributes:
        rule: the advice, in our words.
        source: which guide gives it.
        holds: whether this file follows it; None where the guide's rule is itself wrong.
        because: the arithmetic of this file, or why the rule is wrong.
    """

    rule: str
    source: str
    holds: bool | None
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What of a file our own configuration can say.

    Attributes:
        values: our keys and their values; empty where there is a `refusal`.
        left_out: the file's keys that have no counterpart, each with the reason.
        refusal: why the file cannot be converted; None where it can.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(NotebookRepr):
    """What a file really does, in one vocabulary.

    Attributes:
        system: whose file it is.
        violations: what is wrong, all of it.
        outcome: what a run without violations does: it `runs`, `pads` its batches or `drops` samples.
        notes: what is legal but surprising.
        derived: the numbers that follow, by the names of design: `samples_per_step`, `optimizer_steps`, ...
        phases: for a ramp, every phase as `rampup plan --json` gives it; None without one.
        meanings, flow, advice: the explanation for people.
        plan: our `RampPlan` or `RolloutPlan` of the same run, where one can be built.
        conversion: the same run in our keys; None for systems that our configuration has no counterpart of.
    """

    system: str
    violations: tuple[Violation, ...] = ()
    outcome: Run = "runs"
    notes: tuple[str, ...] = ()
    derived: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] | None = None
    meanings: tuple[Meaning, ...] = ()
    flow: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    plan: Any = None
    conversion: Conversion | None = None

    @property
    def validator(self) -> Validator:
        """What that system's own check says."""
        return "rejects" if any(violation.found_by == "validator" for violation in self.violations) else "accepts"

    @property
    def run(self) -> Run:
        """What a run then does; one that the validator would stop counts as failed."""
        return "fails" if self.violations else self.outcome

    @property
    def ok(self) -> bool:
        """True if the file breaks no rule."""
        return not self.violations

    @property
    def good(self) -> bool:
        """Deprecated name of `ok`."""
        warnings.warn("Verdict.good is now Verdict.ok", DeprecationWarning, stacklevel=2)
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as `rampup check --json` prints it."""
        result: dict[str, Any] = {
            "system": self.system,
            "validator": self.validator,
            "run": self.run,
            "violations": [
                {"rule": v.rule, "keys": list(v.keys), "message": v.message, "nearest": list(v.nearest)}
                for v in self.violations
            ],
            "notes": list(self.notes),
            "derived": dict(self.derived),
        }
        if self.phases is not None:
            result["phases"] = [dict(phase) for phase in self.phases]
        return result


def in_words(job: Any, words: ModuleType) -> dict[str, Any]:
    """Return the parts of a verdict that are sentences, by their names, from the functions of a system's module of words.

    Args:
        job: what a file makes the system do.
        words: has `meanings`, `flow`, `advice` and `notes`, each a function of the job.
    """
    return {name: getattr(words, name)(job) for name in ("meanings", "flow", "advice", "notes")}
