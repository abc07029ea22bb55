"""The command of a system in a script or on the command line, and the keys that its words set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_mapping, parse_scalar, read_text
from rampup.dialects.reading import Entry, Reading, read_leaves
from rampup.dialects.script import Command, open_options, read_commands, show_unknown, unknown_names
from rampup.errors import ConfigError

# A file, or the words of a command.
Source = str | Path | tuple[str, ...]
_SETTING = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_YAML_KEY = re.compile(r"^\s*(?:-+)?[A-Za-z_][\w.\-]*\s*:(?:\s|$)", re.MULTILINE)
_COMMAND_WORD = re.compile(r"(?:^|\s)(?:--[A-Za-z]|[A-Za-z_][\w.]*=\S)")
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_SHELLS = ("bash", "sh", "zsh", "sbatch", "source")
_OPTIONS = re.compile(r"(?i)arg|opt|flag|extra|param|config|cmd")
_SHOWN = 60


# The sizes and defaults that each shipped base file sets, by its name.
Bases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a system is started, and the keys and base files that it takes.

    Attributes:
        system: its name in messages.
        program: matches a command that starts it.
        example: such a command, for errors.
        entries: the keys that the rules read.
        canonical: from a key as written to its name in `entries`.
        groups: first parts of its keys that are not in `entries`.
        others: matches its programs that the rules do not cover.
        read: the keys that the words of a command set; None = Hydra's `key=value`.
        bases: the base files that it ships.
        version: the version of `bases`, for notes.
        programs: the base file that a program starts from if its command names none, by a part of the program's name; that
            of all others under the empty name, which needs no note.
    """

    system: str
    program: re.Pattern[str]
    example: str
    entries: Mapping[str, Entry]
    canonical: Callable[[str], str] = str
    groups: Sequence[str] = ()
    others: re.Pattern[str] = re.compile(r"(?!)")
    read: Callable[[Command, str], dict[str, Located]] | None = None
    bases: Bases = field(default_factory=dict)
    version: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)

    def known(self, name: str) -> bool:
        """Return whether a key as written is one that the rules read."""
        return self.canonical(name) in self.entries

    def leaves(self, command: Command, path: str) -> dict[str, Located]:
        """Return the keys that the words of a command set. A value may contain markers of what is unknown."""
        return (self.read or read_words)(command, path)

    def relevant(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the known keys that some words set."""
        leaves = self.leaves(Command(tuple(words), 0), "")
        return {name: located.value for name, located in leaves.items() if self.known(name)}


def read_source(source: Source, overrides: Sequence[str], launch: Launch, *, strict: bool = True) -> Reading:
    """Read a YAML file, a shell script or the words of a command.

    Args:
        source: the file, or the words.
        overrides: `key=value` settings. A name that only the script has is one of its variables, and wins there.
        launch: how the system is started.
        strict: whether a script without such a command is an error, or sets nothing.

    Raises:
        ConfigError: the file cannot be read, or no command in it starts the system.
    """
    if isinstance(source, tuple):
        commands, place = _from_words(source, launch)
        return _choose(commands, overrides, launch, place, strict)
    text = read_text(source)
    if not is_script(source, text):
        repeated: dict[str, int] = {}
        mapping = parse_mapping(text, str(source), repeated=repeated)
        leaves = read_leaves(mapping, repeated)
        return Reading(path=str(source), leaves=leaves, overrides=overrides, repeated=repeated)
    given: dict[str, str] = {}
    rest = []
    for setting in overrides:
        name, equals, value = setting.partition("=")
        if equals and name.isidentifier() and not launch.known(name) and re.search(rf"\b{name}\b", text):
            given[name] = value
        else:
            rest.append(setting)
    return _choose(
        read_commands(text, source, given, launch.program, relevant=launch.relevant), rest, launch, str(source), strict
    )


def is_script(source: str | Path, text: str) -> bool:
    """Return whether a file is a shell script or a command, and not YAML."""
    if text.startswith("#!") or str(source).endswith(_SCRIPTS):
        return True
    if text.lstrip().startswith("{") or _YAML_KEY.search(text):
        return False
    return _COMMAND_WORD.search(text) is not None


def read_words(command: Command, path: str) -> dict[str, Located]:
    """Return what Hydra's words set: `key=value`, `+key=value`, `++key=value` and `~key`."""
    located = {}
    for word in command.words:
        match = _SETTING.fullmatch(word)
        if match is None or (match[3] is None and match[1] != "~"):
            continue
        value = None if match[1] == "~" else match[3].strip()
        if value and value[0] == value[-1] and value[0] in "\"'" and len(value) > 1:
            value = value[1:-1]
        elif value is not None:
            value = parse_scalar(value, path) if not unknown_names(value) else value
        located[match[2]] = Located(value=value, path=path, line=command.line or None)
    return located


def option(command: Command | None, *names: str) -> str | None:
    """Return the value of an option of a command: `--name value` or `--name=value`; None without it.

    Example:
        >>> option(Command(("run", "--config-name=a"), 1), "--config-name", "-cn")
        'a'
    """
    words = () if command is None else command.words
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else following
    return None


def _from_words(words: tuple[str, ...], launch: Launch) -> tuple[list[Command], str]:
    """Return the commands of a command line and their place: itself, its quoted words, or a script with its arguments."""
    program, *rest = (*words, "")
    name = next((word for word in rest if word and not word.startswith("-")), "") if program in _SHELLS else program
    if name.endswith(_SCRIPTS) and Path(name).is_file():
        arguments = words[words.index(name) + 1 :]
        text = read_text(name)
        return read_commands(text, name, {}, launch.program, relevant=launch.relevant, arguments=arguments), name
    commands = [Command(words, 0)]
    for word in words:
        if any(map(str.isspace, word)) and launch.program.search(word):
            inner = read_commands(word, COMMAND_LINE, {}, launch.program, relevant=launch.relevant)
            commands += [Command(command.words, 0) for command in inner]
    return commands, COMMAND_LINE


def _choose(commands: Sequence[Command], overrides: Sequence[str], launch: Launch, path: str, strict: bool) -> Reading:
    """Return what the command sets that starts the system and sets most of its keys; the first of equals."""
    found, other = [], ""
    for command in commands:
        text = " ".join(command.words)
        if match := launch.others.search(text):
            other = other or show_unknown(match[0])
            continue
        leaves = launch.leaves(command, path)
        score = (launch.program.search(text) is not None, sum(map(launch.known, leaves)))
        if any(score):
            found.append((score, command, leaves))
    if not found and not strict:
        return Reading(path=path, leaves={}, overrides=overrides)
    if not found and other:
        raise ConfigError(f"this starts {other}, which the rules of {launch.system} do not cover", path=path)
    if not found:
        raise ConfigError(
            f"this script does not start {launch.system} itself: no command in it is like `{launch.example}`. If another one "
            "starts the run, check that",
            key="from",
            path=path,
        )
    score, command, leaves = max(found, key=lambda row: row[0])
    if name := next((name for word in command.words if (name := open_options(word))), ""):
        raise ConfigError(
            f"the script does not say what ${name} is, and sizes in this command depend on it; add {name}=...",
            key=name,
            path=path,
            line=command.line or None,
        )
    notes = []
    if command.line:
        shown = show_unknown(" ".join(command.words))
        others = sorted({row[1].line for row in found if row[0][0] == score[0] and row[0][1] and row[1].line != command.line})
        also = f"; similar commands in {'lines' if len(others) > 1 else 'line'} {', '.join(map(str, others))}" if others else ""
        notes.append(f"read from line {command.line}: {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}{also}")
    # A word after an option is its value, unless its name is that of options.
    words = zip(command.words[1:], command.words, strict=False)
    unknown = list(dict.fromkeys(
        name for word, before in words
        if (name := _whole_unknown(word)) and (_OPTIONS.search(name) or not before.startswith("-") or "=" in before)
    ))  # fmt: skip
    if unknown:
        notes.append(f"the script does not say what {', '.join(unknown)} adds to the command; it is left out.")
    return Reading(path=path, leaves=leaves, overrides=overrides, command=command, notes=tuple(notes), recognized=score[0])


def _whole_unknown(word: str) -> str:
    names = unknown_names(word)
    shown = show_unknown(word)
    return shown if len(names) == 1 and shown.lstrip("$") == names[0].lstrip("$") else ""
