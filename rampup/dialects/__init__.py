"""Other systems' configurations, each read in its own words: what a file really does, before it is run."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rampup.config.yaml import read_mapping
from rampup.dialects.reading import flatten
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError

# Where each system's `check` and its table of keys are; imported when asked for.
SYSTEMS = ("maxtext", "maxtext_rl", "megatron", "skyrl", "verl", "trlx")
_KEYS = {
    "maxtext": "maxtext.keys",
    "maxtext_rl": "maxtext_rl.job",
    "megatron": "megatron.keys",
    "skyrl": "skyrl.job",
    "verl": "verl.job",
    "trlx": "trlx.job",
}
MIN_MATCHES = 2


def check_file(path: str | Path, system: str, overrides: Sequence[str] = ()) -> Verdict:
    """Say what a file of another system does, and whether that system's own check and its run take it.

    Args:
        path: the file, in that system's format.
        system: one of `SYSTEMS`.
        overrides: `key=value` settings that win over the file, and facts that no file states, such as `num_processes=8`.

    Returns:
        The verdict; what is wrong with the file by that system's rules is in its violations.

    Raises:
        ConfigError: no such system, or a file that cannot be read as one of it; names the system that it looks like.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}; choose from {', '.join(SYSTEMS)}", key="from", nearest=SYSTEMS)
    try:
        verdict = _module(system).check(path, overrides)
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
    assert isinstance(verdict, Verdict)
    return verdict


def write_conversion(verdict: Verdict, path: str | Path, *, source: str | Path) -> None:
    """Write our configuration of the run that a verdict is about.

    Args:
        verdict: of a file that can be used.
        path: the file to write; one that is there is replaced.
        source: the file that the verdict is about, which is never replaced.

    Raises:
        ConfigError: nothing that we can express, or a file that cannot be written.
    """
    text: str = importlib.import_module(f"{__name__}.convert").to_rampup(verdict)
    target = Path(path)
    try:
        if target.exists() and target.samefile(source):
            raise ConfigError("the converted file must be another than the one it comes from", key="output", path=str(path))
        target.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot write the file: {reason}", key="output", path=str(path)) from None


def _looks_like(path: str | Path, system: str) -> tuple[str, list[str]] | None:
    """Return the system most of whose keys a file sets, with those, if it sets none of the asked system's."""
    try:
        names = dict(flatten({name: located.value for name, located in read_mapping(path).items()}))
    except ConfigError:
        return None
    matches = {name: _matches(names, _entries(name)) for name in SYSTEMS}
    if matches[system]:
        return None
    best = max(SYSTEMS, key=lambda name: len(matches[name]))
    return (best, matches[best]) if len(matches[best]) >= MIN_MATCHES else None


def _matches(names: Collection[str], entries: Collection[str]) -> list[str]:
    return [name for name in names if name in entries]


def _entries(system: str) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = importlib.import_module(f"{__name__}.{_KEYS[system]}").ENTRIES
    return entries


def _module(system: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{system}.check")
