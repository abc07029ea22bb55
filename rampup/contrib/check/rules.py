"""The rule engine: a system as its numbers, its words and its rules, and the nearest
legal values of broken rules.

The rules of a system are a function that yields what each of them says about a job. A
rule is written with the methods of `Job`: `multiple`, `at_least`, `equal`,
or `broken` for a rule of another kind that a job breaks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partialmethod
from types import MappingProxyType
from typing import Any, TypeAlias

from rampup.config.build import build_plan
from rampup.config.key import keys_of_alias
from rampup.config.schema import KEYS, Config
from rampup.contrib.check.base_files import read_hydra
from rampup.contrib.check.known import Life, load_known_keys, with_lines
from rampup.contrib.check.launch import Launch
from rampup.contrib.check.reading import Source
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Conversion, FoundBy, Run, Term, Violation
from rampup.errors import RampupError
from rampup.plan.numbers import MAX_COUNT, divisors, to_yaml_number
from rampup.plan.plan import RampPlan

MAX_TRIED = 256
_NUM_MULTIPLES = 64
_MAX_RATIO = 16


# A side of a comparison: a key, a constant, or a number with the text that names it.
Side: TypeAlias = str | int | Term


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What a rule of another system says about one job."""

    name: str  # the id of the rule, such as `maxtext.ramp_grows`
    # The keys to change; nearest values are those of the first that has any.
    keys: tuple[str, ...]
    holds: bool
    message: str  # the rule, the arithmetic and the numbers
    found_by: FoundBy = "validator"
    # Values of the first key to try, nearest first, and after them whole numbers; None
    # if no value is to be proposed.
    candidates: Iterable[Any] | None = ()
    # The two numbers that it compares, such as dividend and divisor: whole numbers to
    # try are made from them.
    division: tuple[int, int] | None = None


class Job:
    """The numbers that follow from a file, by that system's own formulas, which a
    subclass computes in `__init__`.
    """

    # whether all counts are positive and every model has a replica; else most numbers
    # are not computed
    usable: bool = True
    system: str = ""  # the system, with which the names of its rules begin
    # the version of the system whose rules the job has, and how to choose another
    version: str = ""
    num_devices: int = 0  # those of the run; 0 if they are not known

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getitem__(self, key: str) -> Any:
        return self.settings.values[key]

    def term(self, side: Side) -> Term:
        """Return a side of a comparison; that of a key is its name and its value."""
        if isinstance(side, str):
            return Term(f"{side}={self[side]:,}", int(self[side]))
        if isinstance(side, int):
            return Term(f"{side:,}", side)
        return side

    def compare(
        self,
        words: str,
        test: Callable[[int, int], bool],
        name: str,
        keys: Sequence[str],
        left: Side,
        right: Side,
        note: str = "",
        **options: Any,
    ) -> Ruling:
        """Return the rule that two sides pass a test; `note` ends the message, and
        `options` are those of `Ruling`.
        """
        one, other = self.term(left), self.term(right)
        return Ruling(
            name=f"{self.system}.{name}",
            keys=tuple(keys),
            holds=test(one.number, other.number),
            message=f"{one.text} {words} {other.text}{note}",
            division=(one.number, other.number),
            **options,
        )

    # A divisor below 1 is another rule's business.
    multiple = partialmethod(
        compare, "must be a multiple of", lambda a, b: b < 1 or a % b == 0
    )
    at_least = partialmethod(compare, "must be at least", operator.ge)
    equal = partialmethod(compare, "must equal", operator.eq)

    def broken(
        self, name: str, keys: Sequence[str], message: str, **options: Any
    ) -> Ruling:
        """Return a rule that the job breaks; `options` are those of `Ruling`."""
        return Ruling(
            name=f"{self.system}.{name}",
            keys=tuple(keys),
            holds=False,
            message=message,
            **options,
        )

    def keys_of(self, system: str, life: Life | None) -> list[str]:
        """Return the keys that the system looks up and that its table has in these
        versions alone, None for no version, with their lines.
        """
        known = load_known_keys(system)
        looked_up = self.settings.looked_up
        return with_lines(
            {name: at for name, at in looked_up.items() if known.life(name) == life}
        )

    def unknown(self, names: Sequence[str], key: str, why: str) -> Iterator[Ruling]:
        """Yield the rule that the system has all keys, of which it lacks some; `key`
        stands for them.
        """
        if names:
            yield self.broken(
                "known_keys",
                [key],
                f"{', '.join(names[:4])} must be {why}",
                candidates=None,
            )

    @property
    def outcome(self) -> Run:
        """What a run of this file does if it breaks no rule."""
        return "runs"

    def summary(self) -> str:
        """Return the numbers of a step in one line."""
        return ""

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report, by the names that all systems share."""
        return {}

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the phases of a ramp as `rampup plan --json` does, or None without a
        ramp.
        """
        return None

    def conversion(self) -> Conversion | None:
        """Return the same run in rampup's keys, or None if rampup's configuration has
        no counterpart.
        """
        return None


def ends_before_ramp(steps: int, phases: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a note on a run that ends before its ramp does; `phases` are the first step
    and the batch of each.
    """
    start, final = phases[-1]
    if 0 < steps <= start:
        last = max(row for row in phases if row[0] < steps)
        yield (
            f"the run ends in step {steps:,}, before the ramp does in step {start:,}:"
            f" its last batch is {last[1]:,} samples, and {final:,} are never reached"
        )


def few_samples_per_pass(
    passes: int, samples: int | Fraction, key: str
) -> Iterator[str]:
    """Yield a note on many passes of one sample; `key` is the size of a pass."""
    size = math.gcd(passes, 8)
    if samples == 1 and passes >= 16 and size > 1:
        yield (
            f"{passes:,} passes of 1 sample: {key}={size} makes {passes // size:,}"
            f" of {size}, if they fit into memory"
        )


class PretrainingJob(Job):
    """The numbers of a file whose run rampup's configuration may express."""

    expressed: Collection[
        str
    ] = ()  # the keys that `rampup_values` expresses, beside those of the same name
    reasons: Mapping[str, str] = MappingProxyType(
        {}
    )  # why keys are left out, if not for want of a counterpart

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys, or raise a RampupError if they cannot
        express it.
        """
        raise NotImplementedError

    @cached_property
    def planned(self) -> RampPlan | RampupError:
        """Rampup's plan of the same run, or why there is none."""
        try:
            return build_plan(Config(**self.rampup_values()))
        except RampupError as error:
            return error

    def conversion(self) -> Conversion:
        """Return the same run in rampup's keys, or why they cannot express it."""
        if isinstance(self.planned, RampupError):
            return Conversion(refusal=str(self.planned))
        values = self.rampup_values()
        left_out = {
            key: why for key, why in self.reasons.items() if key in self.settings.given
        }
        for key in sorted(
            (self.settings.given - {*values, *self.expressed, *left_out})
            | self.settings.others.keys()
        ):
            own = (key,) if key in KEYS else keys_of_alias(key, KEYS)[0]
            left_out[key] = "not converted"
            if own:
                left_out[key] += f"; rampup's key is {own[0]}"
        return Conversion(values=values, left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Everything that a check needs of one system."""

    job: Callable[[Settings], Job]  # from settings to the numbers that follow
    rules: Callable[[Any], Iterator[Ruling]]  # what its rules say about a job
    launch: Launch  # its name, its keys, and how it is started
    notes: Callable[[Any], Iterable[str]]  # of a job: what is legal but surprising
    # Of a job: keys, or other texts, and what they mean, where sizes count prompts.
    meanings: Callable[[Any], Iterable[tuple[str, str]]] = lambda _: ()
    reader: Callable[[Source, Sequence[str], Launch], Settings] = read_hydra
    # For other devices: the setting that is their number; given keys that are counted
    # by device, whose sizes change together; and those that only divide an update.
    devices: str = ""
    by_device: Sequence[str] = ()
    by_pass: Sequence[str] = ()

    def read(self, source: Source, overrides: Sequence[str]) -> Settings:
        """Return the values of a source with `key=value` settings."""
        return self.reader(source, overrides, self.launch)


def found_by_run(rulings: Iterable[Ruling]) -> Iterator[Ruling]:
    """Yield rules that the system's own check does not know: only the run finds
    them.
    """
    return (dataclasses.replace(ruling, found_by="run") for ruling in rulings)


def broken_names(dialect: Dialect, job: Job) -> set[str]:
    """Return the names of the rules that a job breaks."""
    return {ruling.name for ruling in dialect.rules(job) if not ruling.holds}


def find_violations(dialect: Dialect, job: Job) -> tuple[Violation, ...]:
    """Return every rule that a job breaks, each with legal values of its first key that
    has any.

    Legal values are found by trial: a value is offered only if the file with it
    satisfies the rule and breaks no other.
    """
    rulings = [*dialect.rules(job)]
    broken = {ruling.name for ruling in rulings if not ruling.holds}
    divisions = [ruling.division for ruling in rulings if ruling.division]

    def attempts(rule: Ruling) -> Iterator[tuple[str, Iterable[Any]]]:
        yield rule.keys[0], rule.candidates or ()
        for key in rule.keys if rule.candidates is not None else ():
            if dialect.launch.entries[key].kind == "int":
                yield key, _whole_numbers(job[key], divisions)

    def violation(rule: Ruling) -> Violation:
        found = (
            (key, _nearest_values(dialect, job, key, tried, broken - {rule.name}))
            for key, tried in attempts(rule)
        )
        first, nearest = next((row for row in found if row[1]), (rule.keys[0], ()))
        words = {"True": "true", "False": "false", "None": "null"}
        shown = ", ".join(words.get(str(value), str(value)) for value in nearest)
        return Violation(
            rule=rule.name,
            keys=(first, *(key for key in rule.keys if key != first)),
            message=f"{rule.message}; nearest {first}: {shown}"
            if nearest
            else rule.message,
            nearest=nearest,
            found_by=rule.found_by,
        )

    return tuple(violation(ruling) for ruling in rulings if not ruling.holds)


# The derived numbers that say what an optimizer step learns from; all others say how it
# is divided over devices and passes.
UPDATE = (
    "global_batch_size",
    "global_batch_size_to_train_on",
    "samples_per_step",
    "mini_batch_samples",
    "optimizer_steps",
    "total_optimizer_steps",
    "ramp_phases",
    "manager_phases",
)
_MAX_PARTS = 64


def update_of(derived: Mapping[str, Any]) -> dict[str, Any]:
    """Return the derived numbers of the update."""
    return {name: derived[name] for name in UPDATE if name in derived}


def keep_update(dialect: Dialect, before: Job, after: Job) -> dict[str, Any] | None:
    """Return the values with which a run on other devices has the update that it had.

    Sizes that are counted by device are scaled together, and one of the others is
    tried beside them.

    Args:
        dialect: the system of both.
        before: the job on the devices of the file.
        after: the same on other devices.

    Returns:
        The keys to change with their values, none if the update stays; None if there
        are no legal ones.
    """
    wanted = update_of(before.derived())
    ratio = Fraction(before.num_devices, after.num_devices)
    parts = {Fraction(n) for n in range(1, _MAX_PARTS + 1)}
    parts |= {1 / part for part in parts}

    def change(part: Fraction) -> Fraction:
        """Return how much the sizes change that are to change least."""
        factor = ratio / part if dialect.by_device else part
        return max(factor, 1 / factor)

    keys = (*dialect.by_device, *dialect.by_pass)
    given = [key for key in keys if key in after.settings.given and after[key]]
    for part in sorted(parts, key=change):
        changed = after.settings
        try:
            for key in given:
                # What the passes take on, the devices need not have.
                factor = part if key in dialect.by_pass else ratio / part
                size = to_yaml_number(Fraction(after[key] * factor))
                entry = dialect.launch.entries[key]
                changed = changed.with_value(key, entry.convert(key, size))
            job = dialect.job(changed)
            if update_of(job.derived()) == wanted and not broken_names(dialect, job):
                return {k: changed[k] for k in given if changed[k] != after[k]}
        except RampupError:
            continue
    return None


def _nearest_values(
    dialect: Dialect, job: Job, key: str, candidates: Iterable[Any], broken: set[str]
) -> tuple[Any, ...]:
    """Return up to one value of a key below the given one and one above with which no
    rule is broken but those of `broken`.
    """
    before = job[key]
    is_number = isinstance(before, int | Fraction) and not isinstance(before, bool)
    found: dict[bool, Any] = {}  # by whether it is below the given one
    for value in candidates:
        is_below = is_number and value is not None and value < before
        if value == before or is_below in found:
            continue
        try:
            changed = dialect.job(job.settings.with_value(key, value))
            still_broken = broken_names(dialect, changed)
        except RampupError:
            continue
        if still_broken <= broken:
            found[is_below] = value
            if False in found and (True in found or not is_number):
                break
    return tuple(
        to_yaml_number(value) if isinstance(value, Fraction) else value
        for _, value in sorted(found.items(), reverse=True)
    )


_divisors = functools.cache(divisors)


def _whole_numbers(
    value: int | None, divisions: Sequence[tuple[int, int]]
) -> list[int]:
    """Return positive whole numbers that divisibility rules are likely to accept,
    nearest to `value` first: those close to it, powers of 2, the divisors of each
    dividend, and multiples of the divisors. `divisions` are dividend and divisor of the rules.
    """
    near = max(value or 1, 1)
    pairs = [pair for pair in divisions if min(pair) >= 1 and max(pair) <= MAX_COUNT]
    steps = {1, near, *(right for _, right in pairs)}
    found = {2**power for power in range(13)}
    found.update(divisor for left, _ in pairs for divisor in _divisors(left))
    for step in (*steps, math.lcm(*steps)):
        middle = near // step * step
        most = _NUM_MULTIPLES * step
        found.update(range(middle - most, middle + most + 1, step))
    # A value far away is bad advice.
    largest = max(near, *(max(pair) for pair in pairs), 64) * _MAX_RATIO
    return sorted(
        (n for n in found if 1 <= n <= min(largest, MAX_COUNT)),
        key=lambda n: (abs(n - near), n),
    )


def around(value: Fraction | int, step: Fraction | int = 1) -> list[Fraction]:
    """Return multiples of `step` on both sides of `value`, nearest first, up to the
    largest number that a setting can have.
    """
    low, width = int(value // step), Fraction(step)
    multiples = (n * width for n in range(low - MAX_TRIED + 1, low + MAX_TRIED + 1))
    return sorted(
        (n for n in multiples if n <= MAX_COUNT), key=lambda n: abs(n - value)
    )
