"""How a system is started, the keys that its rules read, and what a source of it sets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rampup.config.key import Key, Kind
from rampup.config.yaml import Located, parse_scalar
from rampup.contrib.check.known import KnownKeys, Unread, load_known_keys, load_table
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import show_unknown, unknown_names
from rampup.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Key):
    """A key of another system that its batch arithmetic depends on."""

    kind: Kind = "int"
    section: str = ""
    suffixes: bool = False
    default: Any  # that system's default
    # True if the numbers of a step are known without it, so that a script may leave it
    # open
    optional: bool = False


def load_entries(system: str) -> dict[str, Entry]:
    """Return the keys that the rules of a system read: the table `SYSTEM_sizes.yml`
    beside this module. One whose default is null may be null.
    """
    return {
        name: Entry(**{"nullable": row["default"] is None, **row})
        for name, row in load_table(system, "sizes").items()
    }


@dataclass(kw_only=True)
class Reading:
    """What a source sets. Its readers change it, one after the other."""

    path: str  # the name of the source, for errors
    leaves: Mapping[
        str, Located
    ]  # the value of each dotted key; a text may contain markers of what a script does not say
    overrides: Sequence[
        str
    ] = ()  # `key=value` settings that are no variables of the script; they win over `leaves`
    command: Command | None = (
        None  # the command that was read, in a script or on the command line
    )
    notes: list[str] = field(default_factory=list)  # which command was read
    # whether its command starts the system, or it names one of its base files
    recognized: bool = False
    # what must be answered before the numbers are known; raised with all other problems
    questions: list[ConfigError] = field(default_factory=list)
    # whether its program is none of the system's own, and the user has said that it
    # follows the rules
    is_fork: bool = False

    @property
    def answered(self) -> set[str]:
        """The names of the user's settings."""
        return {setting.partition("=")[0].lstrip("+") for setting in self.overrides}

    def written(self, *signs: str) -> set[str]:
        """Return the keys that the command writes with one of Hydra's signs."""
        words = () if self.command is None else self.command.words
        return {
            match[2]
            for word in words
            if (match := _SETTING.fullmatch(word)) and match[1] in signs
        }


_SETTING = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)

_LAUNCHERS = (
    "torch.distributed",
    "deepspeed.",
    "accelerate.",
)  # modules that start a program

# The key of a file that names those from which it starts.
PARENT = "defaults"


def parse_known(text: str, path: str) -> Any:
    """Return the value of a text in YAML; as it is, one with a part that the script
    does not say.
    """
    return text if unknown_names(text) else parse_scalar(text, path)


def read_words(command: Command) -> dict[str, Located]:
    """Return what Hydra's words set: `key=value`, `+key=value`, `++key=value` and
    `~key`.
    """
    located = {}
    for word in command.words:
        match = _SETTING.fullmatch(word)
        if match is None or (match[3] is None and match[1] != "~"):
            continue
        value = None
        if match[1] != "~":
            value = match[3].strip()
            if re.fullmatch(r"'.*'|\".*\"", value, re.DOTALL):
                value = value[1:-1]
            else:
                value = parse_known(value, command.path)
        located[match[2]] = command.locate(value)
    return located


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a system is started, and the keys and base files that it takes."""

    system: str  # its name in messages
    program: re.Pattern[str]  # matches a command that starts it
    example: str  # such a command, for errors
    entries: Mapping[str, Entry]  # the keys that the rules read
    canonical: Callable[[str], str] = (
        str  # from a key as written to its name in `entries`
    )
    groups: Sequence[str] = ()  # first parts of its keys that are not in `entries`
    others: re.Pattern[str] = re.compile(
        r"(?!)"
    )  # matches its programs that the rules do not cover
    read: Callable[[Command], dict[str, Located]] = (
        read_words  # the keys that a command sets; values may contain markers
    )
    # The sizes and defaults that each base file sets that it ships, by its name.
    bases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parent: str = PARENT  # the key of a file that names those from which it starts
    version: str = ""  # that of `bases`, for notes
    # The base file that a program starts from if its command names none, by a part of
    # its name; that of all others by "".
    programs: Mapping[str, str] = field(default_factory=dict)
    keys: str = ""  # the name of the table of all its keys
    # Reads the keys that a Python program or a notebook sets, if the system has them.
    python: Callable[[str, Sequence[str]], dict[str, Located]] | None = None
    # The keys that can change sizes or devices and that no rule reads.
    unread: Mapping[str, Unread] = field(default_factory=dict)
    # Matches the last part of a key that no version has, but that may be a size.
    decides: re.Pattern[str] | None = None
    # Matches the system's own programs, as `program_of` gives them. Another one is a
    # fork's, which is asked about; `follows` is the setting that says that the rules
    # are true of it.
    own: re.Pattern[str] = re.compile(r"[\s\S]*")
    follows: str = ""
    # The variables that a script sees where it does not set them.
    environment: Mapping[str, str] = field(default_factory=dict)
    repeats: str = (
        ""  # what has the same effect as a fork's key that repeats each prompt
    )

    @property
    def known_keys(self) -> KnownKeys:
        """All keys of the system; none if there is no table of them."""
        if self.keys:
            return load_known_keys(self.keys)
        return KnownKeys({}, frozenset())

    def known(self, name: str) -> bool:
        """Return whether a key as written is one that the rules read."""
        return self.canonical(name) in self.entries

    def relevant(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the known keys that some words set."""
        return {
            name: value.value
            for name, value in self.read(Command(tuple(words), 0)).items()
            if self.known(name)
        }


def known_end(path: str) -> str:
    """Return the part of a path that is known: behind the last folder that is not, such
    as one of the environment.
    """
    if unknown_names(path):
        return show_unknown(path).rpartition("$")[2].partition("/")[2]
    return path


def program_of(command: Command) -> str:
    """Return the path of the Python program that a command starts, without its suffix:
    `verl/trainer/main_ppo`.
    """
    for word, following in itertools.pairwise(command.words):
        if word == "-m" and not following.startswith(_LAUNCHERS):
            return following.replace(".", "/")
    file = next((word for word in command.words if word.endswith(".py")), "")
    return known_end(file).removesuffix(".py")


def load_launch(system: str, **parts: Any) -> Launch:
    """Return how a system is started: the table `SYSTEM_launch.yml` beside this module,
    which lists the alternatives of each pattern and other names of keys, and `parts`
    that are no text.
    """
    row = load_table(system, "launch")
    if aliases := row.pop("aliases", {}):
        parts["canonical"] = lambda name: aliases.get(name, name)
    for name in {"program", "others", "own"} & row.keys():
        row[name] = re.compile("|".join(row[name]))
    return Launch(**row, entries=load_entries(system), **parts)
