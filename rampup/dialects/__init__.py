"""Configurations of other systems: what a file really does, before it is run.

A system is one file: its keys, its numbers, its words and its rules. A check imports only the requested system.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from rampup.dialects.reading import MIN_MATCHES, Source, read_source
from rampup.dialects.rules import Dialect, doubled_sizes, find_violations
from rampup.dialects.verdict import Meaning, Verdict
from rampup.errors import ConfigError, RampupError

SYSTEMS = ("maxtext", "maxtext_rl", "megatron", "skyrl", "verl", "trlx")  # each is a module


def check_file(path: str | Path, system: str, overrides: Sequence[str] = ()) -> Verdict:
    """Check what a file of another system does, and whether that system's own check and its run accept it.

    Args:
        path: the file: YAML, or a shell script that starts a run. The script is read and never executed.
        system: one of `SYSTEMS`.
        overrides: `key=value` settings in that system's keys, which win over the file; facts that no file states, such as
            `num_processes=8`; and variables that the script does not set.

    Returns:
        The verdict. The rules that the file breaks are in its violations.

    Raises:
        ConfigError: no such system, or a file that cannot be read as one of it; names the system that it looks like.
    """
    return _check_source(path, system, overrides)


def check_command(words: Sequence[str], system: str, overrides: Sequence[str] = ()) -> Verdict:
    """Check what a command does that starts another system.

    Args:
        words: the command, as a program gets it: without quotes.
        system, overrides: as in `check_file`.

    Raises:
        ConfigError: as in `check_file`.

    Example:
        >>> command = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.rollout.n=4"
        >>> check_command(command.split(), "verl").derived["samples_per_step"]
        256
    """
    return _check_source(tuple(words), system, overrides)


def load_dialect(system: str) -> Dialect:
    """Return the dialect of one of `SYSTEMS`; only its modules are imported."""
    dialect: Dialect = importlib.import_module(f"{__name__}.{system}").DIALECT
    return dialect


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
        if not (is_source := target.exists() and target.samefile(source)):
            target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write the file: {reason}", key="output", path=str(path)) from None
    if is_source:
        raise ConfigError("the output file must not be the source file", key="output", path=str(path))


def _check_source(source: Source, system: str, overrides: Sequence[str]) -> Verdict:
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}; choose from {', '.join(SYSTEMS)}", key="from", nearest=SYSTEMS)
    dialect = load_dialect(system)
    try:
        settings = dialect.read(source, overrides)
    except ConfigError as error:
        if error.key != "from":
            raise
        found: dict[str, list[str]] = {}  # the keys that the source sets of each system
        for other in SYSTEMS:
            launch = load_dialect(other).launch
            with contextlib.suppress(ConfigError):
                found[other] = [key for key in read_source(source, (), launch, strict=False).leaves if key in launch.entries]
        name = max(found, key=lambda other: len(found[other]), default=system)
        if name == system or len(found[name]) < MIN_MATCHES:
            raise
        said = f"this looks like a file of {name}, not of {system}: it sets {', '.join(found[name][:3])}; use --from {name}"
        path = None if isinstance(source, tuple) else str(source)
        raise ConfigError(said, key="from", nearest=(name,), path=path) from error

    job = dialect.job(settings)
    violations = find_violations(dialect, job)
    if not job.usable:
        return Verdict(system=system, violations=violations, notes=settings.notes, version=job.version)
    conversion, phases = job.conversion(), job.phases()
    plan = None
    # A run that rampup can express has a plan even if its own system rejects the file.
    if conversion is not None or not violations:
        with contextlib.suppress(RampupError):
            plan = job.plan()
    return Verdict(
        system=system,
        violations=violations,
        outcome=job.outcome,
        notes=(*settings.notes, *dialect.notes(job)),
        version=job.version,
        summary=job.summary(),
        changes=tuple(itertools.starmap(Meaning, doubled_sizes(dialect, job))),
        derived=job.derived(),
        phases=None if phases is None else tuple(phases),
        meanings=tuple(
            Meaning(settings.describe(says) if says in settings.values else says, means)
            for says, means in dialect.meanings(job)
        ),
        plan=plan,
        conversion=conversion,
    )
