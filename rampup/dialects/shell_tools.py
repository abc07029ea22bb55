"""What small programs print or choose that scripts use for their options: `getopts`, `getopt`, `seq`, `cut` and so on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_NUMBERS = 1000
READERS = ("wc", "tr", "xargs", "cut", "awk")  # programs that print what they make of their input


class Option(NamedTuple):
    """An option that `getopts` found."""

    name: str  # its letter; `?` for none or an unknown one, `:` for one without its argument
    argument: str | None
    following: int  # the next argument, counted from 1
    place: int  # of the next letter in it; 0 for a new argument


def next_option(letters: str, arguments: Sequence[str], index: int, place: int) -> Option | None:
    """Return the option with which `getopts LETTERS NAME` continues; None at the end of the options.

    Source: POSIX.1-2024, `getopts`.
    """
    word = arguments[index - 1] if 0 < index <= len(arguments) else ""
    if not place and (not word.startswith("-") or word == "-"):
        return None
    if not place and word == "--":
        return None
    place = max(place, 1)
    letter, rest = word[place], word[place + 1 :]
    following = (index, place + 1) if rest else (index + 1, 0)
    is_silent = letters.startswith(":")
    if letter == ":" or letter not in letters:
        return Option("?", letter if is_silent else None, *following)
    if letters.partition(letter)[2][:1] != ":":
        return Option(letter, None, *following)
    if rest:
        return Option(letter, rest, index + 1, 0)
    if index < len(arguments):
        return Option(letter, arguments[index], index + 2, 0)
    return Option(":" if is_silent else "?", letter if is_silent else None, index + 1, 0)


def split_fields(line: str, separators: str | None, count: int) -> list[str]:
    """Return the fields of a line as `read` splits it, at most `count` if that is positive; `separators` is IFS."""
    is_blank = separators is None or (separators and not separators.strip())
    if separators == "" or count == 1:
        return [line.strip() if is_blank else line]
    if is_blank:
        return line.strip().split(None, count - 1)
    return re.split(f"[{re.escape(separators or '')}]", line, maxsplit=max(count - 1, 0))


def print_output(words: Sequence[str], text: str) -> str | None:
    """Return what a program prints for an input, both known; None if that is not known here."""
    name, *rest = words
    match name, rest:
        case "cat", []:
            return text
        case "echo", _:
            rest = [word for word in rest if word not in ("-n", "-e")]
            return " ".join(rest) + "\n"
        case "printf", [form, *values]:
            return _print_formatted(form, values)
        case "seq", _ if rest and all(re.fullmatch(r"-?\d{1,9}", word) for word in rest) and len(rest) <= 3:
            numbers = list(map(int, rest))
            first = numbers[0] if len(rest) > 1 else 1
            step = numbers[1] if len(rest) == 3 else 1
            found = range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
            return "".join(f"{number}\n" for number in found) if len(found) <= MAX_NUMBERS else None
        case "wc", ["-w"]:
            return f"{len(text.split())}\n"
        case "wc", ["-l"]:
            return f"{text.count(chr(10))}\n"
        case "tr", ["-d", drop] if len(drop) == 1:
            return text.replace(drop, "")
        case "tr", [old, new] if len(old) == 1 or old == "\\n":
            return text.replace(old.replace("\\n", "\n"), new.replace("\\n", "\n")[:1])
        case "xargs", []:
            return " ".join(text.split()) + "\n"
        case (("cut" | "awk"), _):
            return _print_field(_CUT if name == "cut" else _AWK, rest, text)
        case "getopt", _:
            return _print_options(rest)
    return None


def _print_formatted(form: str, values: Sequence[str]) -> str | None:
    kinds = re.findall(r"%(0?\d*[sd])", form)
    if form.count("%") != len(kinds) or len(kinds) != len(values) or "\\" in form.replace("\\n", ""):
        return None
    try:
        filled = [int(value) if kind[-1] == "d" else value for kind, value in zip(kinds, values, strict=True)]
        return str(form.replace("\\n", "\n") % tuple(filled))
    except ValueError:
        return None


_CUT = re.compile(r"-d ?(.) -f ?(\d+)")
_AWK = re.compile(r"(?:-F ?(.) )?\{ ?print (\$[1-9]|\$?NF) ?\}")


def _print_field(pattern: re.Pattern[str], options: Sequence[str], text: str) -> str | None:
    """Return the field that `cut -d, -f2` or `awk -F, '{print $2}'` selects in each line, or their number."""
    found = pattern.fullmatch(" ".join(options))
    if found is None:
        return None
    sign, field = found.groups()
    lines = [line.split(sign) if line else [] for line in text.splitlines()]
    if field == "NF":
        return "".join(f"{len(line)}\n" for line in lines)
    at = -1 if field == "$NF" else int(field.lstrip("$")) - 1
    if sign is None or pattern is _AWK or all(len(line) > 1 for line in lines):  # cut prints a line without the sign
        return "".join(f"{line[at] if -len(line) <= at < len(line) else ''}\n" for line in lines)
    return None


class _Unread(Exception):  # noqa: N818 - an answer, not an error
    """A use of `getopt` that is not known here, or that it refuses."""


def _print_options(words: Sequence[str]) -> str | None:
    """Return the sorted and quoted arguments that the `getopt` of util-linux prints; None for an error."""
    given, rest = dict[str, str](), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, equals, value = rest.pop(0).partition("=")
        if not (word.startswith("--") or equals) and len(word) > 2:
            word, equals, value = word[:2], "=", word[2:]
        option = {"-o": "--options", "-l": "--long", "--longoptions": "--long", "-n": "--name"}.get(word, word)
        if option not in ("--options", "--long", "--name") or not (equals or rest):
            return None
        value = value if equals else rest.pop(0)
        given[option] = f"{given[option]},{value}" if option in given else value
    letters = given.get("--options", "")
    names = [name for name in re.split(r"[,\s]+", given.get("--long", "")) if name]
    if not rest or "::" in f"{letters} {names}" or letters.startswith(("+", "-")):
        return None
    takes = {name.rstrip(":"): name.endswith(":") for name in names}
    try:
        found, operands = _sort_options(rest[1:], letters, takes)
    except _Unread:
        return None
    return f" {' '.join([*found, '--', *map(shlex.quote, operands)])}\n"


def _sort_options(arguments: list[str], letters: str, takes: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the options with their quoted values, and other arguments; `takes` says whether a long option has a value."""
    found, operands = list[str](), list[str]()
    while arguments:
        word = arguments.pop(0)
        if word == "--":
            return found, operands + arguments
        if word.startswith("--"):
            written, equals, value = word[2:].partition("=")
            name, *others = [written] if written in takes else [name for name in takes if name.startswith(written)] or [""]
            if others or name not in takes or (equals and not takes[name]) or (takes[name] and not (equals or arguments)):
                raise _Unread
            found.append(f"--{name}")
            if takes[name]:
                found.append(shlex.quote(value if equals else arguments.pop(0)))
        elif word.startswith("-") and len(word) > 1:
            index, place = 1, 0
            while index == 1 and (option := next_option(f":{letters}", [word, *arguments], index, place)):
                if option.name in ("?", ":"):
                    raise _Unread
                found += [f"-{option.name}", *([] if option.argument is None else [shlex.quote(option.argument)])]
                index, place = option.following, option.place
            del arguments[: index - 2]
        else:
            operands.append(word)
    return found, operands
