"""Which keys a system has, and in which of its versions: so that a key that it does not
have is never ignored in silence.

The table of a system is a file beside this one, of lines `section: FIRST-LAST name
name; FIRST-LAST name`. Versions are counted from 1, and `*` stands for all keys further
down.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from rampup.config.yaml import Located
from rampup.errors import ConfigError

Life = tuple[int, int]  # the first and the last version that has a key
_MAX_DEPTH = 3
# Names of forks: of responses of a prompt, and of other sizes.
_RESPONSES = (
    r"(?:n|num|number_of)_(?:samples?|agents?|traj\w*|rollouts?|responses?|generations?|completions?|repeats?|answers?|envs?)"
    r"\w*|\w*(?:rollout|sample|response|generation)s?_n|group_size"
)
_NONE_IF_ONE = re.compile(
    rf"{_RESPONSES}|\w*parallel_size|[tpdcev]{{1,2}}p"
)  # a value of 1 of these changes nothing
MULTIPLIES = re.compile(
    rf"{_RESPONSES}|(?:train|rollout|mini|micro|global|gen|ppo)\w*_batch_size\w*|batch_size"
)


@dataclass(frozen=True)
class KnownKeys:
    """The keys of a system, with their versions."""

    lives: Mapping[str, Life]
    parents: frozenset[str]  # sections, which a setting may replace as a whole

    def life(self, key: str) -> Life | None:
        """Return the versions that have a key, or None if none has it."""
        whole = ".".join(key.split(".")[:_MAX_DEPTH])
        for name in (
            key,
            f"{whole}.*",
            whole,
            *(f"{part}.*" for part in sections_of(key)),
        ):
            if name in self.lives and (
                name.endswith("*") or name == key or key.startswith(f"{name}.")
            ):
                return self.lives[name]
        return (
            (1, max(last for _, last in self.lives.values()))
            if key in self.parents
            else None
        )

    def has(self, key: str, version: int) -> bool:
        """Return whether a version has a key."""
        life = self.life(key)
        return life is not None and life[0] <= version <= life[1]

    def name(self, key: str) -> str:
        """Return the name of a key in the table, where sections further down are
        one.
        """
        parts = key.split(".")
        return key if len(parts) <= _MAX_DEPTH else ".".join([*parts[:_MAX_DEPTH], "*"])

    def in_version(self, version: int) -> frozenset[str]:
        """Return the keys of a version."""
        return frozenset(
            key for key, (first, last) in self.lives.items() if first <= version <= last
        )


def sections_of(key: str) -> Iterator[str]:
    """Return the sections in which a key stands."""
    return (key[:at] for at, letter in enumerate(key) if letter == ".")


@functools.cache
def load_known_keys(system: str) -> KnownKeys:
    """Return the table of a system."""
    lives: dict[str, Life] = {}
    for line in (
        files(__package__)
        .joinpath(f"{system}_keys.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    ):
        section, _, rest = line.partition(": ")
        for group in rest.split("; "):
            life, *names = group.split(" ")
            first, _, last = life.partition("-")
            lives |= {
                name if section == "." else f"{section}.{name}": (int(first), int(last))
                for name in names
            }
    return KnownKeys(
        lives, frozenset(section for key in lives for section in sections_of(key))
    )


def with_lines(keys: Mapping[str, Located]) -> list[str]:
    """Return keys for a message, each with its line if that is known."""
    return [
        f"{name} (line {place.line})" if place.line else name
        for name, place in keys.items()
    ]


def find_open_forks(
    located: Mapping[str, Located],
    known: KnownKeys,
    system: str,
    decides: re.Pattern[str],
    repeats: str = "",
) -> Iterator[ConfigError]:
    """Yield an error for each key that no version has but whose last part `decides` on
    a size: only a fork reads it.

    Null as its value is the answer that it changes no size. `repeats` says what has the
    effect of one that repeats each prompt.
    """
    for name, place in located.items():
        last = name.rpartition(".")[2]
        has_none = place.value is None or (
            place.value == 1
            and place.value is not True
            and _NONE_IF_ONE.fullmatch(last)
        )
        if has_none or not decides.fullmatch(last) or known.life(name) is not None:
            continue
        said = (
            f"unknown, a fork: {name}={place.value} is a key of no version of {system},"
            " and its name is that of a size. Add "
        )
        said += (
            f"{name}=null, and with it the sizes of {system} that have the same effect"
            " (none if it changes no size)"
        )
        if repeats and re.fullmatch(f"{_RESPONSES}|n", last):
            said += f". {repeats}"
        yield ConfigError(said, key=name, path=place.path, line=place.line)
