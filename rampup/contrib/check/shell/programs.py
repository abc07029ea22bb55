"""What tests in brackets say, and what small programs print, where their words say
it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from rampup.contrib.check.shell.values import ARGUMENT, Status, Words, has_unknown

_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_NUMBER = re.compile(r"\s*-?\d+\s*")
_OPERATORS = {"=", "==", "!=", "=~", "<", ">", *_NUMBER_TESTS}


class Test:
    """A test in brackets: `or` of `and` of tests. None is unknown, for instance whether
    a file exists.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.unknown: list[str] = []

    def value(self, *, any_of: bool = True) -> Status:
        """Return the result of the words up to an end or a `)`."""
        signs = ("||", "-o") if any_of else ("&&", "-a")
        result = self.value(any_of=False) if any_of else self.one()
        while self.words and self.words[0] in signs:
            self.words.pop(0)
            other = self.value(any_of=False) if any_of else self.one()
            if any_of in (result, other):
                result = any_of
            elif result is not None:
                result = other
        return result

    def one(self) -> Status:
        """Return the result of the first test of the words."""
        if not self.words:
            return False
        word = self.words.pop(0)
        if word in _OPERATORS and len(self.words) == 1:
            self.words.clear()  # an empty variable without quotes: an error in bash
            return False
        if word == "!" and self.words:
            result = self.one()
            if result is None:
                return None
            return not result
        if word == "(":
            result = self.value()
            self.words[:1] = []
            return result
        if len(self.words) > 1 and self.words[0] in _OPERATORS:
            sign, other = self.words.pop(0), self.words.pop(0)
            return self.compare(word, sign, other)
        if re.fullmatch(r"-[a-zA-Z]", word) and self.words:
            text = self.words.pop(0)
            if word not in ("-z", "-n"):
                return None
            is_full = self.is_full(text)
            if word == "-n" or is_full is None:
                return is_full
            return not is_full
        return self.is_full(word)

    def is_full(self, text: str) -> Status:
        """Return whether a text is not empty; an argument that is not given is."""
        if text[:1] == ARGUMENT or not text:
            return False
        return None if self.is_open(text) else True

    def is_open(self, text: str) -> bool:
        """Return whether a text is unknown, and remember it then."""
        if has_unknown(text):
            self.unknown.append(text)
        return has_unknown(text)

    def compare(self, word: str, sign: str, other: str) -> Status:
        """Return the result of a comparison."""
        if not (word and other):  # whether the other side is empty
            word = "" if word[:1] == ARGUMENT else word
            other = "" if other[:1] == ARGUMENT else other
        if self.is_open(word + other):
            return None
        if sign in ("=", "==", "!="):
            return fnmatchcase(word, other) == (sign != "!=")
        are_numbers = all(_NUMBER.fullmatch(side) for side in (word, other))
        if sign in _NUMBER_TESTS and are_numbers:
            return _NUMBER_TESTS[sign](int(word), int(other))
        return None  # regular expressions and the order of texts are not read


def print_output(words: Words, folder: str) -> str | None:
    """Return what a program prints that is started in a folder; None if that is not
    known here.
    """
    name, *rest = words
    operands = [word for word in rest if not word.startswith("-")]
    path = os.path.normpath(os.path.join(folder, *operands[:1]))
    if has_unknown(path):
        return None
    match name, operands:
        case ("pwd", _) | ("realpath" | "readlink", [_, *_]):
            return path
        case "dirname", [file, *_]:
            return os.path.dirname(file) or "."
        case "basename", [file, *suffix] if not {*rest} - {*operands, "--"}:
            return os.path.basename(file).removesuffix("".join(suffix))
    return None
