"""Which command of a script is checked: the one that starts the system and sets most of
its keys, or the one in the line that the user has chosen.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rampup.config.yaml import Located
from rampup.contrib.check.launch import Launch, Reading, program_of
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import (
    MARKER,
    OPTIONS,
    explain_unknown,
    show_unknown,
    unknown_names,
)
from rampup.errors import ConfigError

_OPTIONS = re.compile(r"(?i)arg|opt|flag|extra|param|config|cmd")

_SHOWN = 60  # letters of a command in a note
LINE = "line"  # the setting that chooses one of several commands


class _Candidate(NamedTuple):
    """A command that starts the system or sets keys of it."""

    starts: bool  # whether it starts the system
    size: int  # how many known keys it sets
    command: Command
    leaves: Mapping[str, Located]


class _Commands:
    """The commands of a source, by what they may be for a system."""

    def __init__(self, commands: Sequence[Command], launch: Launch) -> None:
        self.launch = launch
        self.found: list[_Candidate] = []
        self.unread: list[Command] = []  # scripts that are started and not read
        # A program of the system that the rules do not cover, and its keys, which still
        # tell the system.
        self.other = ""
        self.outside: Mapping[str, Located] = {}
        for command in commands:
            if command.unread:
                self.unread.append(command)
            if command.script:
                continue
            text = " ".join(command.words)
            leaves = launch.read(command)
            # What a program prints is an argument, and the program not the one that
            # runs.
            if match := launch.others.search(MARKER.sub("", text)):
                self.other = self.other or show_unknown(match[0]).strip()
                self.outside = self.outside or leaves
                continue
            starts = launch.program.search(text) is not None
            size = sum(map(launch.known, leaves))
            if starts or size:
                self.found.append(_Candidate(starts, size, command, leaves))
        # What follows a command that was cut short is not a command of a trainer: it
        # begins with a setting or an option.
        self.cut: list[_Candidate] = []
        if any(row.starts and program_of(row.command) for row in self.found):
            rest = re.compile(r"-.*|.*=.*", re.DOTALL)
            self.cut = [
                row for row in self.found if rest.fullmatch(row.command.words[0])
            ]
            self.found = [row for row in self.found if row not in self.cut]

    def in_line(self, line: str, path: str) -> None:
        """Keep the commands that begin in a line, which the user has chosen."""
        kept = [row for row in self.found if str(row.command.line) == line]
        if not kept:
            lines = ", ".join(str(row.command.line) for row in self.found) or "none"
            raise ConfigError(
                f"no command of {self.launch.system} begins in line {line}",
                fix=f"those that do begin in lines {lines}",
                key=LINE,
                path=path,
            )
        self.found = kept

    def unread_run(self) -> Command | None:
        """Return a script that is not read and may be the run, or may set its sizes."""
        is_launched = any(row.starts for row in self.found)
        for command in self.unread:
            sources = command.words[0] in ("source", ".")
            is_open = sources and bool(unknown_names(Path(command.words[1]).name))
            if is_open or (not is_launched and self.launch.relevant(command.words)):
                return command
        if self.unread and not self.found and not self.other:
            return self.unread[0]
        return None


def choose(
    commands: Sequence[Command],
    overrides: Sequence[str],
    launch: Launch,
    path: str,
    strict: bool,
) -> Reading:
    """Return what the command sets that starts the system and sets most of its keys, or
    that begins in the line that the user has chosen.
    """
    rows = _Commands(commands, launch)
    lines = [setting for setting in overrides if setting.startswith(f"{LINE}=")]
    overrides = [setting for setting in overrides if setting not in lines]
    if strict and lines:
        rows.in_line(lines[-1].removeprefix(f"{LINE}="), path)
    if not rows.found and not strict:
        return Reading(
            path=path,
            leaves=rows.outside,
            overrides=overrides,
            recognized=any(map(launch.known, rows.outside)),
        )
    if first := rows.unread_run():
        raise ConfigError(
            f"this starts or sources a script that is not read: {first.unread}",
            key="from",
            path=first.path,
            line=first.line or None,
        )
    if not rows.found:
        raise _starts_nothing(rows.other, launch, path)
    best = max(rows.found, key=lambda row: (row.starts, row.size))
    if strict:
        _refuse_open_words(best, launch)
    return Reading(
        path=best.command.path,
        leaves=best.leaves,
        overrides=overrides,
        command=best.command,
        notes=[*_notes_of(best, rows, path)],
        recognized=best.starts,
    )


def _refuse_open_words(row: _Candidate, launch: Launch) -> None:
    """Refuse a command whose words are not known to be those of the run, or that names a
    key in a way that the system does not read.
    """
    refused = functools.partial(
        ConfigError, path=row.command.path, line=row.command.line or None
    )
    for word in row.command.words:
        # Such as `--key=value` or `key = value` of Hydra, and a key without its dashes.
        match = re.fullmatch(r"-*(\w+[._-][\w.-]*)(?:\s*=.*)?", word, re.DOTALL)
        name = match[1] if match else ""
        if launch.known(name) and {name, launch.canonical(name)}.isdisjoint(row.leaves):
            raise refused(
                f"{word} sets nothing, and {launch.system} may refuse it",
                fix=f"write it as in `{launch.example}`",
                key=name,
            )
        if word[:1] == OPTIONS and MARKER.fullmatch(word):
            [name] = unknown_names(word)
            raise refused(
                f"{explain_unknown(word)}, and sizes in this command depend on it",
                fix=f"add {name}=...",
                key=name,
            )
        if re.fullmatch(r"\s+#.*", word):
            raise refused(
                "a backslash before a blank and a comment does not continue the line:"
                " the comment's words are arguments, and the next line is a command of"
                " its own",
                fix="move the comment",
            )


def _notes_of(best: _Candidate, rows: _Commands, path: str) -> Iterator[str]:
    """Yield which command was read, what it lost, and what beside it was not read."""
    command = best.command
    if command.line:
        shown = show_unknown(" ".join(command.words))[:_SHOWN]
        here = "" if command.path == path else f" of {command.path}"
        yield f"read from line {command.line}{here}: {shown}..."
    others = [
        row.command
        for row in rows.found
        if row.starts == best.starts
        and row.size
        and row.command[1:3] != best.command[1:3]
    ]
    if others:
        lines = [
            f"line {row.line}" + ("" if row.path == path else f" of {row.path}")
            for row in others
        ]
        yield (
            f"similar commands in {', '.join(dict.fromkeys(lines))}:"
            f" {LINE}={others[0].line} chooses another"
        )
    if command.devices:
        yield f"the manifest asks for {command.devices:,} devices."
    for row in rows.cut[:1]:
        first = show_unknown(row.command.words[0])
        yield (
            f"line {row.command.line} begins with {first}, so it is not part of the"
            " command above it: a comment, or a blank behind a backslash, ends that."
        )
    yield from _command_notes(command)
    yield from dict.fromkeys(
        f"{row.unread}; what it sets or starts is not read." for row in rows.unread
    )


def ask_of_forks(reading: Reading, launch: Launch) -> None:
    """Add a question to a reading, or a note if it is answered, where its program is none
    of the system's own.
    """
    command = reading.command
    if command is None or launch.own.fullmatch(program := program_of(command)):
        return
    said = (
        f"this starts {program}, a program of a fork: its rules may differ from those"
        f" of {launch.system}"
    )
    answer = launch.follows.partition("=")[0]
    if answer in reading.answered:
        reading.is_fork = True
        reading.notes.append(f"{said}.")
        return
    reading.questions.append(
        ConfigError(
            f"unknown, a fork: {said}",
            fix=f"if it follows them, add {launch.follows}",
            key=answer,
            path=command.path,
            line=command.line or None,
        )
    )


def _starts_nothing(other: str, launch: Launch, path: str) -> ConfigError:
    """Return why a script without a command of the system is refused; `other` is a
    program that the rules do not cover.
    """
    if other:
        return ConfigError(
            f"this starts {other}, which the rules of {launch.system} do not cover",
            path=path,
        )
    return ConfigError(
        f"this script does not start {launch.system} itself: no command in it is like"
        f" `{launch.example}`. If another one starts the run, check that; if a condition"
        " decides, add VARIABLE=...",
        key="from",
        path=path,
    )


def _command_notes(command: Command) -> Iterator[str]:
    """Yield which words of a command are not known."""
    # A word after an option is its value, unless its name is that of options.
    unknown: dict[str, None] = {}
    for before, word in itertools.pairwise(command.words):
        names, name = unknown_names(word), show_unknown(word)
        is_whole = len(names) == 1 and name.lstrip("$") == names[0].lstrip("$")
        if is_whole and (
            _OPTIONS.search(name) or not before.startswith("-") or "=" in before
        ):
            unknown[name] = None
    if unknown:
        yield (
            f"the script does not say what {', '.join(unknown)} adds to the command; it"
            " is left out."
        )
