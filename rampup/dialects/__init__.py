"""Configurations of other systems: what a file really does, before it is run.

Each system is a folder: its keys in `__init__.py`, its numbers in `job.py`, its rules in `rules.py` and its words in
`explain.py`. (In the smaller ones numbers, rules and words share a file.) A check imports only the requested system.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from rampup.config.yaml import read_mapping
from rampup.dialects.reading import flatten
from rampup.dialects.verdict import Meaning, Verdict
from rampup.errors import ConfigError, RampupError

# The folders of the systems.
SYSTEMS = ("maxtext", "maxtext_rl", "megatron", "skyrl", "verl", "trlx")
MIN_MATCHES = 2


def check_file(path: str | Path, system: str, overrides: Sequence[str] = ()) -> Verdict:
    """Check what a file of another system does, and whether that system's own check and its run accept it.

    Args:
        path: the file, in that system's format.
        system: one of `SYSTEMS`.
        overrides: `key=value` settings that win over the file, and facts that no file states, such as `num_processes=8`.

    Returns:
        The verdict. The rules that the file breaks are in its violations.

    Raises:
        ConfigError: no such system, or a file that cannot be read as one of it; names the system that it looks like.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}; choose from {', '.join(SYSTEMS)}", key="from", nearest=SYSTEMS)
    try:
        return _check(path, system, overrides)
    except ConfigError as error:
        other = _looks_like(path, system)
        if other is None:
            raise
        name, keys = other
        raise ConfigError(
            f"this looks like a file of {name}, not of {system}: it sets {', '.join(keys[:3])}; use --from {name}",
            key="from",
            nearest=(name,),
            path=str(path),
        ) from error


def write_conversion(verdict: Verdict, path: str | Path, *, source: str | Path) -> None:
    """Write rampup's configuration of the run that a verdict is about.

    Args:
        verdict: of a file that breaks no rule.
        path: the file to write; an existing one is replaced.
        source: the file that the verdict is about, which is never replaced.

    Raises:
        ConfigError: rampup's configuration cannot express the run, or the file cannot be written.
    """
    from rampup.dialects.convert import to_rampup

    text = to_rampup(verdict)
    target = Path(path)
    try:
        if target.exists() and target.samefile(source):
            raise ConfigError("the output file must not be the source file", key="output", path=str(path))
        target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot write the file: {reason}", key="output", path=str(path)) from None


def _check(path: str | Path, system: str, overrides: Sequence[str]) -> Verdict:
    """Read the keys, compute the job, apply the rules, and collect numbers and words in a verdict."""
    from rampup.dialects.rules import Dialect, doubled_sizes, find_violations

    dialect: Dialect = importlib.import_module(f"{__name__}.{system}.rules").DIALECT
    dialect = dialect.variant(path) or dialect
    settings = dialect.read(path, overrides)
    job = dialect.job(settings)
    violations = find_violations(dialect.rules, job, dialect.job, dialect.keys)
    if not job.usable:
        return Verdict(system=system, violations=violations, notes=settings.notes, version=job.version)
    conversion, phases, words = job.conversion(), job.phases(), dialect.words
    plan = None
    # A run that rampup can express has a plan even if its own system rejects the file.
    if conversion is not None or not violations:
        with contextlib.suppress(RampupError):
            plan = job.plan()
    return Verdict(
        system=system,
        violations=violations,
        outcome=job.outcome,
        notes=(*settings.notes, *words.notes(job)),
        version=job.version,
        summary=job.summary(),
        changes=tuple(itertools.starmap(Meaning, doubled_sizes(job, dialect.job, dialect.keys, dialect.rules))),
        derived=job.derived(),
        phases=None if phases is None else tuple(phases),
        meanings=tuple(
            Meaning(settings.describe(says) if says in settings.values else says, means) for says, means in words.meanings(job)
        ),
        flow=tuple(words.flow(job)),
        advice=tuple(words.advice(job)),
        plan=plan,
        conversion=conversion,
    )


def _looks_like(path: str | Path, system: str) -> tuple[str, list[str]] | None:
    """Return the system most of whose keys a file sets, with those keys, if it sets none of the requested system's."""
    try:
        names = dict(flatten({name: located.value for name, located in read_mapping(path).items()}))
    except ConfigError:
        return None
    keys = {name: importlib.import_module(f"{__name__}.{name}").KEYS for name in SYSTEMS}
    matches = {name: [key for key in names if key in keys[name]] for name in SYSTEMS}
    if matches[system]:
        return None
    best = max(SYSTEMS, key=lambda name: len(matches[name]))
    return (best, matches[best]) if len(matches[best]) >= MIN_MATCHES else None
