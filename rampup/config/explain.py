"""Explanation of one configuration key: its meaning, its legal values, and the keys it interacts with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rampup.config.files import BASE_FILE, ConfigFile, yaml_value
from rampup.config.key import Key
from rampup.config.schema import keys_for_alias
from rampup.errors import ConfigError

MAX_CLOSE = 6
# Numbers of `rampup plan` that follow from the keys: meaning and unit.
DERIVED = {
    "global_batch_to_load": (
        "Rows that the hosts load per step after the ramp: the global batch, times expansion_factor_real_data if that is "
        "positive. MaxText's global_batch_size_to_load.", "samples",
    ),
    "num_increments": ("Changes of the batch in the ramp.", None),
    "samples_per_increment": (
        "Samples requested for each phase of a linear ramp: global_rampup_samples / num_increments.", "samples",
    ),
    "ramp_steps": ("Optimizer steps before the last phase.", "steps"),
    "ramp_samples": ("Samples before the last phase.", "samples"),
    "total_steps": ("Optimizer steps of the run.", "steps"),
    "num_compiled_shapes": ("Microbatch shapes that the run compiles, as rampup_microbatch decides.", None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of one key."""

    key: str  # its name
    file: str  # the configuration file that has it
    section: str  # the heading above it in that file
    meaning: str  # its documentation
    legal: str  # its legal values, in words
    unit: str | None  # the unit of its values, if they have one
    default: Any  # its value if no file sets it
    value_in_file: Any  # its value in the file
    maxtext_name: str | None  # MaxText's name for it; None if MaxText has no such key
    maxtext_default: str | None  # MaxText's default, as written there
    interacts: tuple[str, ...]  # the keys that its documentation names, and those whose documentation names it


def explain(name: str, files: Sequence[ConfigFile] = (BASE_FILE,)) -> Explanation:
    """Return the explanation of a key of the first file that has it.

    Args:
        name: the key.
        files: the configuration files to look it up in.

    Raises:
        ConfigError: no file has such a key; names the closest ones.

    Example:
        >>> explained = explain("global_rampup_samples")
        >>> explained.unit, explained.default, explained.maxtext_default
        ('samples', 1600, '500')
    """
    if name in DERIVED and not any(name in file.keys for file in files):
        return _explain_derived(name, files[0])
    file = next((file for file in files if name in file.keys), None)
    if file is None:
        known = dict.fromkeys(key for each in files for key in each.keys)
        nearest = _close_keys(name.lower(), list(known))
        hint = f"; close: {', '.join(nearest)}" if nearest else "; configs/base.yml lists all keys"
        raise ConfigError(f"unknown key {name[:100]!r}{hint}", key=name, nearest=nearest)
    key, default = file.keys[name], file.defaults[name]
    return Explanation(
        key=name,
        file=file.name,
        section=key.section,
        meaning=key.doc,
        legal=key.expected,
        unit=key.unit,
        default=default,
        value_in_file=file.values[name],
        maxtext_name=None if key.own else name,
        maxtext_default=key.maxtext or (None if key.own else yaml_value(default)),
        interacts=_interacting(name, file.keys),
    )


def _explain_derived(name: str, file: ConfigFile) -> Explanation:
    """Return the explanation of a number that follows from the keys."""
    meaning, unit = DERIVED[name]
    return Explanation(
        key=name,
        file="rampup plan",
        section="what follows",
        meaning=meaning,
        legal="follows from the keys; it cannot be set",
        unit=unit,
        default=None,
        value_in_file=None,
        maxtext_name=None,
        maxtext_default=None,
        interacts=tuple(key for key in file.keys if "_" in key and re.search(rf"\b{re.escape(key)}\b", meaning)),
    )


def _close_keys(name: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that are spelled like a name, or that have a part which is."""
    parts = {part for key in known for part in re.split(r"[_.]", key) if len(part) > 2}
    alike = difflib.get_close_matches(name, parts, n=2, cutoff=0.75)
    close = difflib.get_close_matches(name, known, n=3)
    within = [key for key in known if (len(name) > 2 and name in key) or any(part in re.split(r"[_.]", key) for part in alike)]
    aliases = [key for key in keys_for_alias(name) if key in known]
    return tuple(dict.fromkeys([*aliases, *close, *within]))[:MAX_CLOSE]


def _interacting(name: str, keys: Mapping[str, Key]) -> tuple[str, ...]:
    """Return the other keys that a key's documentation names, and those whose documentation names it."""
    return tuple(other for other in keys if other != name and (_names(keys[name], other) or _names(keys[other], name)))


def _names(key: Key, name: str) -> bool:
    """Return whether a key's documentation names another key, and not just a word that is also a key, such as steps."""
    return "_" in name and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", key.doc) is not None
