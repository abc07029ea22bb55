"""The versions of veRL: which of them a source is for, and how their defaults differ.

veRL's own version file is no exact statement: until 0.5 its `.dev` came after a release, since 0.6 before one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.dialects.known import load_known_keys
from rampup.dialects.reading import Reading, Version, find_in_repository, looked_up, repository_folders
from rampup.errors import ConfigError

WORD = "verl_version"
VERSIONS = tuple(f"0.{number}" for number in range(1, 10))
NEWEST = len(VERSIONS)  # 0.9, of August 2026
_NUMBER = re.compile(r"v?(\d+)\.(\d+)([\w.]*)")
_PIN = re.compile(r"(?m)^[^#\n]*\bverl(?:\[[\w,\- ]*\])?(?:\s*==\s*|(?:\.git)?@)v?(\d+\.\d+[\w.]*)")
_PINNED = ("requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg", "environment*.y*ml", "Dockerfile*")
# A file with so many keys is a base file of its version.
_MANY = 50
_LAST_OF_OLD_WORKERS = 7
# Key: its value until a version, that of 0.9 since then.
_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
_UNTIL: Mapping[str, tuple[int, Any]] = {
    f"{_ACTOR}.ppo_micro_batch_size": (1, 64),
    f"{_ROLLOUT}.log_prob_micro_batch_size": (1, 128),
    f"{_REF}.log_prob_micro_batch_size": (1, 128),
    "critic.ppo_micro_batch_size": (1, 64),
    "actor_rollout_ref.model.use_remove_padding": (6, False),
    "critic.model.use_remove_padding": (6, False),
    f"{_ROLLOUT}.mode": (6, "sync"),
    "trainer.use_v1": (8, False),
}
# The deprecated sizes of the whole job, which only the workers until 0.7 read, and their successors.
_SUCCESSORS = {key: f"{key}_per_gpu" for key in _UNTIL if key.endswith("micro_batch_size")}


class _Evidence(NamedTuple):
    """What is known of the version: those that are possible, the likeliest first, and why."""

    versions: Sequence[int]
    why: str = ""


def old_defaults(version: int) -> dict[str, Any]:
    """Return the sizes that a version has by default, where they differ from those of 0.9."""
    return {key: value for key, (last, value) in _UNTIL.items() if version <= last}


def read_version(text: str) -> str:
    """Return one of `VERSIONS` for what a user states, such as `0.4.1` or `head`.

    Raises:
        ConfigError: it is none.
    """
    if text == "head":
        return VERSIONS[-1]
    match = _NUMBER.fullmatch(text)
    if match is None or match[1] != "0" or f"0.{match[2]}" not in VERSIONS:
        said = f"{WORD}={text} must be one of {', '.join(VERSIONS)}; {VERSIONS[-1]} or head is that of August 2026"
        raise ConfigError(said, key=WORD, nearest=VERSIONS)
    return f"0.{match[2]}"


def choose_version(reading: Reading, beside: Mapping[str, Located], stated: str | None = None) -> Version:
    """Return the version of a source: what the user states, its version file, a pin, its base file, or what its keys fit."""
    if stated is None and WORD in reading.leaves:
        stated = read_version(str(reading.leaves[WORD].value))
    misfits = _misfits(reading, beside)
    if stated:
        found = _Evidence([VERSIONS.index(stated) + 1], f"{WORD} says so")
    elif file := next(_statements(reading.path), None):
        possible, why = file
        found = _Evidence(sorted(possible, key=lambda version: (len(misfits[version]), -version)), why)
    elif base := _by_base_file(beside or (reading.leaves if reading.command is None else {})):
        found = base
    else:
        found = _by_keys(reading, misfits)
    version, *others = found.versions
    if version == NEWEST and not found.why:
        notes = []
    else:
        name = f"veRL {VERSIONS[version - 1]}"
        notes = [f"the rules are those of {name}: {found.why}. {WORD}=... chooses another."]
    defaults = {WORD: VERSIONS[version - 1], **old_defaults(version)}
    return Version(defaults=defaults, notes=notes, others=tuple(VERSIONS[other - 1] for other in others))


def _statements(path: str) -> Iterator[tuple[Collection[int], str]]:
    """Yield the versions that files say, from the source upwards."""
    for file in find_in_repository(path, "verl/version/version"):
        if file.is_file() and (match := _NUMBER.match(text := read_text(file).strip())):
            yield _of_version_file(int(match[1]), int(match[2]), match[3]), f"{_short(file)} says {text}"
    for folder in repository_folders(path):
        for pattern in _PINNED:
            for file in sorted(folder.glob(pattern)):
                if file.is_file() and (match := _PIN.search(read_text(file))):
                    number = _NUMBER.match(match[1])
                    assert number is not None
                    yield [min(max(int(number[2]), 1), NEWEST)], f"{_short(file)} pins {match[1]}"


def _of_version_file(major: int, minor: int, rest: str) -> Collection[int]:
    if major > 0 or minor > NEWEST:
        return [NEWEST]
    if minor <= 1:  # unchanged until February 2025, when most of 0.2 was there
        return [1, 2]
    if "dev" not in rest:
        return [minor]
    return {2: [2, 3, 4], 3: [3, 4], 4: [4, 5], 5: [5, 6]}.get(minor, [minor - 1, minor])


def _misfits(reading: Reading, beside: Mapping[str, Located]) -> dict[int, list[str]]:
    """Return, for each version, the keys of a command that it has not, and those that `+` adds although it has them."""
    known = load_known_keys("verl")
    required = [key for key in looked_up(reading, beside) if known.life(key)]
    added = sorted(reading.written("+"))
    return {
        version: [key for key in required if not known.has(key, version)]
        + [f"+{key}" for key in added if known.has(key, version)]
        for version in range(1, NEWEST + 1)
    }


def _by_keys(reading: Reading, misfits: Mapping[int, Collection[str]]) -> _Evidence:
    """Return the versions that the keys of a command fit best, the newest first."""
    possible, why = [*misfits], ""
    leaves = reading.leaves
    old = [name for name, new in _SUCCESSORS.items() if name in leaves and leaves[name].value is not None and new not in leaves]
    if old and reading.command is not None:
        possible, why = possible[:_LAST_OF_OLD_WORKERS], f"later versions do not read {old[0]}"
    least = min(len(misfits[version]) for version in possible)
    fitting = [version for version in possible if len(misfits[version]) == least][::-1]
    if len(misfits[NEWEST]) > least:
        unfit = next(name for name in misfits[NEWEST] if name not in misfits[fitting[0]])
        why = f"{unfit} does not fit later versions"
    return _Evidence(fitting, why)


def _by_base_file(leaves: Mapping[str, Located]) -> _Evidence | None:
    """Return the versions by their likeness to a base file, if there is one."""
    known = load_known_keys("verl")
    own = {known.name(key) for key in leaves}
    if len(own) < _MANY:
        return None

    def likeness(version: int) -> float:
        other = known.in_version(version)
        return len(own & other) / len(own | other)

    best = max(range(1, NEWEST + 1), key=likeness)
    file = next(iter(leaves.values())).path or ""
    return _Evidence([best], f"{_short(Path(file))} has the keys of that version")


def _short(file: Path) -> str:
    return "/".join(file.parts[-3:])
