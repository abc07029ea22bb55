"""The values of a script: texts with parts that only a run could know.

A part that is not known is a marker: its kind, a name, and perhaps the command that
would print it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

# Whether a command succeeds or a condition holds; None if that is not known.
Status: TypeAlias = bool | None
# The variables of a shell: texts, and lists for arrays.
Env: TypeAlias = dict[str, Any]
Words: TypeAlias = Sequence[str]

# The kinds of markers; `script.py` says what they mean.
UNSET = "\ue000"
ARGUMENT = "\ue001"
UNKNOWN = "\ue002"
OPTIONS = "\ue003"
# What is between the name and the command in a marker, and its end.
_WHY, _END = "\ue007", "\ue004"
# added to the characters of a command, so that none means anything to a shell
_HIDDEN = 0xF0000
# Where words are split, and a part in quotes, which makes a word even if it is empty.
BREAK, EMPTY = "\ue005", "\ue006"
RESERVED = re.compile(f"[{UNSET}-{_WHY}\0]")
MARKER = re.compile(
    f"[{UNSET}-{OPTIONS}]([^{_WHY}{_END}]*)(?:{_WHY}([^{_END}]*))?{_END}"
)
_EMPTIES = re.compile(f"[{UNSET}][^{_END}]*{_END}")
_LONGEST = 80


def mark(name: str, kind: str = UNKNOWN, command: str = "") -> str:
    """Return a marker of a kind; `command` would print the value."""
    plain = re.sub(rf"[\s{UNSET}-{_WHY}]+", "_", name[:_LONGEST])
    shown = " ".join(command.split())[:_LONGEST]
    hidden = "".join(chr(ord(letter) % _HIDDEN + _HIDDEN) for letter in shown)
    return f"{kind}{plain}{_WHY}{hidden}{_END}"


def has_unknown(text: str) -> bool:
    """Return whether a part of a text is unknown."""
    return _END in text


def drop_unset(text: str) -> str:
    """Return a text in which variables that nothing sets are empty."""
    return _EMPTIES.sub("", text)


def unknown_names(text: str) -> list[str]:
    """Return the names of the unknown parts of a text, such as `NNODES` or
    `$(nproc)`.
    """
    return list(dict.fromkeys(match[1] for match in MARKER.finditer(text)))


def show_unknown(text: str) -> str:
    """Return a text with `$NAME` for each unknown part."""
    return MARKER.sub(lambda match: _shown(match[1]), text)


def explain_unknown(text: str) -> str:
    """Return why the unknown parts of a text are open, as a sentence without an end."""
    names = " and ".join(map(_shown, unknown_names(text)))
    said = f"the script does not say what {names} is"
    hidden = (match[2] for match in MARKER.finditer(text))
    commands = "; ".join(dict.fromkeys(filter(None, hidden)))
    shown = "".join(chr(ord(letter) % _HIDDEN) for letter in commands)
    if shown:
        return f"{said}: {shown} is not run"
    return said


def first_marker(*texts: str) -> str:
    """Return the marker of the first variable on which one of the texts depends; empty
    if there is none.
    """
    for text in texts:
        for match in MARKER.finditer(text):
            if match[1].isidentifier():
                return match[0]
    return ""


def _shown(name: str) -> str:
    if name.startswith("$"):
        return name
    return f"${name}"
