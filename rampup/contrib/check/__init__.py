"""Configurations of other systems: what a file really does, before it is run.

A system is one file: its keys, its numbers, its words and its rules. A check imports
only the requested system.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from rampup.config.yaml import read_text
from rampup.contrib.check.known import load_table
from rampup.contrib.check.reading import MIN_MATCHES, Source, read_source
from rampup.contrib.check.rules import (
    Dialect,
    broken_names,
    find_violations,
    keep_update,
)
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Conversion, Verdict
from rampup.errors import ConfigError
from rampup.plan.numbers import to_yaml_number

SYSTEMS = (
    "maxtext",
    "maxtext_rl",
    "megatron",
    "skyrl",
    "verl",
    "trlx",
    "tunix",
)  # each is a module
READABLE = (
    "files and launch scripts of MaxText, MaxText RL, Megatron-LM (and NeMo), SkyRL,"
    " veRL, trlX and Tunix"
)
_COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")
_MAX_NAME = 100
# Systems whose files are known and not checked.
_FOREIGN = load_table("foreign", "systems")
_DEVICES = ("devices", "nodes", "processes")  # units of keys that count devices


class NoSystemError(ConfigError):
    """A file of no system that rampup can read, as far as it can see."""


def check_file(
    path: Source,
    system: str | None = None,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    devices: int | None = None,
) -> Verdict:
    """Check what a file of another system does, and whether that system's own check and
    its run accept it.

    Args:
        path: YAML, or a shell script that starts a run. The script is read and never
            executed. A tuple is a command, as of `check_command`.
        system: one of `SYSTEMS`; None finds it.
        overrides: `key=value` settings in that system's keys, which win over the file;
            facts that no file states, such as `num_processes=8`; and variables that the
            script does not set.
        environment: variables that a script sees where it does not set them; None is an
            empty environment. A note names those that it uses.
        devices: check for this number of devices instead of that of the file. A note
            says which values keep the update.

    Raises:
        ConfigError: no such system, or a file that cannot be read as one of it; names
            the system that it looks like.
    """
    if system is None:
        system = find_system(path, overrides)
    if system not in SYSTEMS:
        raise ConfigError(
            f"unknown system {system!r}; choose from {', '.join(SYSTEMS)}",
            key="from",
            nearest=SYSTEMS,
        )
    _refuse_foreign(path)
    dialect = load_dialect(system)
    launch = dataclasses.replace(dialect.launch, environment=environment or {})
    dialect = dataclasses.replace(dialect, launch=launch)
    notes: tuple[str, ...] = ()
    if devices is not None:
        if not dialect.devices:
            keys = [
                name for name, row in launch.entries.items() if row.unit in _DEVICES
            ]
            raise ConfigError(
                f"--devices is not for {system}",
                fix="set its own keys of devices as key=value, such as"
                f" {', '.join(keys[:2])}",
                key="devices",
            )
        moved = [*overrides, f"{dialect.devices}={devices}"]
        notes = (_keep(dialect, path, overrides, moved, devices),)
        overrides = moved
    verdict = _judge(dialect, system, dialect.read(path, overrides))
    return dataclasses.replace(verdict, notes=(*notes, *verdict.notes))


def check_command(
    words: Sequence[str],
    system: str | None = None,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    devices: int | None = None,
) -> Verdict:
    """Check what a command does that starts another system; `words` are without quotes,
    as a program gets them.

    The other arguments and the errors are those of `check_file`.

    Example:
        >>> command = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.rollout.n=4"
        >>> check_command(command.split(), "verl").derived["samples_per_step"]
        256
    """
    return check_file(
        tuple(words), system, overrides, environment=environment, devices=devices
    )


def find_system(source: Source, overrides: Sequence[str] = ()) -> str:
    """Return the system that a file or a command is made for, or refuse one of no
    system here.
    """
    _refuse_foreign(source)
    if found := _recognize(source, overrides):
        return found
    # What one of them says of it is a better reason; Megatron's programs have common
    # names.
    for system in sorted(SYSTEMS, key="megatron".__eq__):
        launch = load_dialect(system).launch
        if launch.program.search(_text(source)):
            read_source(source, overrides, launch)
    raise NoSystemError(
        f"this looks like a file of no system that rampup can read ({READABLE})",
        fix="if it is one, say which with --from",
        key="from",
        nearest=SYSTEMS,
        path=_path(source),
    )


def _refuse_foreign(source: Source) -> None:
    """Refuse a file or a command of a system that the rules do not cover, by its name,
    with what its update is.
    """
    text = _COMMENT.sub("", _text(source))
    if re.search(_FOREIGN["covered"], text):
        return
    for row in _FOREIGN["systems"]:
        if all(re.search(mark, text, re.MULTILINE) for mark in row["marks"]):
            raise ConfigError(
                f"this is a file of {row['name']}, which rampup cannot check; it reads"
                f" {READABLE}",
                fix=f"its update is {row['update']}: plan that with `rampup plan`",
                key="from",
                path=_path(source),
            )


def _text(source: Source) -> str:
    return " ".join(source) if isinstance(source, tuple) else read_text(source)


def _path(source: Source) -> str | None:
    """Return the file of a source, for errors; None for a command."""
    return None if isinstance(source, tuple) else str(source)


def _recognize(source: Source, overrides: Sequence[str]) -> str:
    """Return the system that a source starts, or of which it sets most keys; empty if
    there is none.
    """
    found: list[tuple[bool, int, str]] = []
    for system in SYSTEMS:
        launch = load_dialect(system).launch
        try:
            reading = read_source(source, overrides, launch, strict=False)
        except ConfigError as error:
            if error.key is not None:  # one that the file gives twice
                raise
            continue
        keys = [
            key
            for key in reading.leaves
            if launch.known(key) and key not in _FOREIGN["shared"]
        ]
        if reading.recognized or len(keys) >= MIN_MATCHES:
            found.append((reading.recognized, len(keys), system))
    return max(found, key=lambda row: row[:2], default=(False, 0, ""))[2]


def load_dialect(system: str) -> Dialect:
    """Return the dialect of one of `SYSTEMS`; only its modules are imported."""
    dialect: Dialect = importlib.import_module(f"{__name__}.{system}").DIALECT
    return dialect


def to_rampup(verdict: Verdict) -> str:
    """Return rampup's configuration of a verdict's run, as YAML with a comment on each
    key that it does not express.
    """
    from rampup.config.files import yaml_value

    conversion = verdict.conversion or Conversion(
        refusal="rampup's configuration is for pre-training; write its sizes in the"
        " keys of configs/rl.yml"
    )
    if conversion.refusal is not None:
        raise ConfigError(
            f"the file cannot be converted: {conversion.refusal}", key="to"
        )
    name = load_dialect(verdict.system).launch.system
    lines = [
        f"# Converted from a {name} file: its batches, its ramp and its pipeline.",
        "",
    ]
    for key, value in conversion.values.items():
        plain = to_yaml_number(value) if isinstance(value, Fraction) else value
        lines.append(f"{key}: {yaml_value(plain)}")
    if conversion.left_out:
        lines += ["", "# Left out:"]
    for key, reason in conversion.left_out.items():
        # A key may contain anything; it must stay within its comment.
        printable = "".join(letter if letter.isprintable() else "?" for letter in key)
        lines.append(f"# {printable[:_MAX_NAME]}: {reason}")
    return "\n".join(lines) + "\n"


def _keep(
    dialect: Dialect,
    source: Source,
    overrides: Sequence[str],
    moved: Sequence[str],
    devices: int,
) -> str:
    """Return the note on what keeps the update of a file on other devices."""
    try:
        before = dialect.job(dialect.read(source, overrides))
    except ConfigError:
        return (
            "the file leaves the number of devices open: there is no other update to"
            f" keep on {devices:,}"
        )
    if broken_names(dialect, before):
        return "the file breaks a rule also without --devices: mend that first"
    after = dialect.job(dialect.read(source, moved))
    kept = keep_update(dialect, before, after)
    if kept == {}:
        return f"on {devices:,} devices the update stays the same"
    keys = "no legal sizes keep"
    if kept:
        shown = (
            f"{key}={to_yaml_number(value) if isinstance(value, Fraction) else value}"
            for key, value in kept.items()
        )
        keys = f"{' '.join(shown)} keeps"
    of_file = f" of {before.num_devices:,}" if before.num_devices else ""
    return f"on {devices:,} devices {keys} the update{of_file}: {before.summary()}"


def _judge(dialect: Dialect, system: str, settings: Settings) -> Verdict:
    """Return the verdict on the values of a source."""
    job = dialect.job(settings)
    verdict = Verdict(
        system=system,
        violations=find_violations(dialect, job),
        notes=settings.notes,
        version=job.version,
    )
    if not job.usable:
        return verdict
    phases = job.phases()
    notes = (*settings.notes, *dialect.notes(job))
    return dataclasses.replace(
        verdict,
        run=job.outcome,
        notes=notes,
        summary=job.summary(),
        derived=job.derived(),
        phases=None if phases is None else tuple(phases),
        meanings=tuple(
            (settings.describe(says) if says in settings.values else says, means)
            for says, means in dialect.meanings(job)
        ),
        conversion=job.conversion(),
    )
