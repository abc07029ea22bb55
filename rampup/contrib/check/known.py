"""Which keys a system has, in which of its versions, and which of them a check reads: so
that no key that can change a size is ignored in silence.

A key of a source is one of four kinds:

1. The rules read it: it is one of the `entries` of the system's `Launch`.
2. It can change a size or the devices, and no rule reads it: the `unread` of the
   `Launch` say what it changes. It is asked about, or named in a note.
3. No version has it, and its name is that of a size: it is asked about.
4. All others change no size, and are ignored. The file beside this module lists them,
   in lines `section: FIRST-LAST name name; FIRST-LAST name`. Versions are counted from
   1, `*` stands for all keys further down, and a line that starts with `#` is a
   comment. The file may list names of the first two kinds too, for their versions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from rampup.config.yaml import Located
from rampup.contrib.check.shell.values import show_unknown

Life = tuple[int, int]  # the first and the last version that has a key
# Names of forks: of responses of a prompt, and of other sizes.
RESPONSES = (
    r"(?:n|num|number_of)_(?:samples?|agents?|traj\w*|rollouts?|responses?|generations?|completions?|repeats?|answers?|envs?)"
    r"\w*|\w*(?:rollout|sample|response|generation)s?_n|group_size"
)
NONE_IF_ONE = re.compile(
    rf"{RESPONSES}|\w*parallel_size|[tpdcev]{{1,2}}p"
)  # a value of 1 of these changes nothing
MULTIPLIES = re.compile(
    rf"{RESPONSES}|(?:train|rollout|mini|micro|global|gen|ppo)\w*batch_?size\w*|batch_?size"
)


@dataclass(frozen=True)
class KnownKeys:
    """The keys of a system, with their versions."""

    lives: Mapping[str, Life]
    parents: frozenset[str]  # sections, which a setting may replace as a whole

    def life(self, key: str) -> Life | None:
        """Return the versions that have a key, or None if none has it."""
        if (name := self.name(key)) in self.lives:
            return self.lives[name]
        if key in self.parents:
            return 1, max(last for _, last in self.lives.values())
        return None

    def has(self, key: str, version: int) -> bool:
        """Return whether a version has a key."""
        life = self.life(key)
        return life is not None and life[0] <= version <= life[1]

    def name(self, key: str) -> str:
        """Return the name of a key in the table: its own, or that of a section whose
        keys are not listed.
        """
        if key in self.lives:
            return key
        sections = [f"{section}.*" for section in sections_of(key)]
        return next((name for name in reversed(sections) if name in self.lives), key)

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
    file = files(__package__).joinpath(f"{system}_keys.txt")
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
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


@dataclass(frozen=True, slots=True)
class Unread:
    """A key that a system has, that can change sizes or devices, and that no rule
    reads.
    """

    # What it can change, as the end of a sentence: `divides the devices of a replica`
    changes: str
    # The values with which it changes nothing.
    harmless: Sequence[Any] = (None, False, "")
    # Whether its effect is so likely that there is no verdict without an answer;
    # otherwise a note names it.
    asks: bool = True


def load_table(system: str, name: str) -> dict[str, Any]:
    """Return the table `SYSTEM_NAME.yml` beside this module."""
    file = files(__package__).joinpath(f"{system}_{name}.yml")
    table: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return table


def load_unread(system: str, keys: str = "") -> dict[str, Unread]:
    """Return the keys that match the patterns of a system's table `unread`; `keys` is
    the system whose keys they are, if it is another.
    """
    rows = load_table(system, "unread")
    return {
        name: Unread(**row)
        for name in load_known_keys(keys or system).lives
        for pattern, row in rows.items()
        if re.fullmatch(pattern, name)
    }


def find_unread(
    located: Mapping[str, Located], unread: Mapping[str, Unread], *, asks: bool
) -> Iterator[tuple[str, str]]:
    """Yield the name, and a sentence without an end, of each key that no rule reads and
    whose value can change a size.

    Only those that are to be asked about are yielded, or only the others.
    """
    for name, place in located.items():
        row = unread.get(name)
        if str(place.value).startswith("${"):  # it follows another key
            continue
        if row is not None and row.asks is asks and place.value not in row.harmless:
            yield name, f"{name}={show_unknown(str(place.value))} {row.changes}"
