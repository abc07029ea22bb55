"""Arithmetic and tests of bash."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from rampup.dialects.unknown import ARGUMENT, MARKER, has_unknown

# C's binary operators, from the loosest to the tightest.
_LEVELS = (",", "?", "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %", "**")
_PRECEDENCE = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    ",": lambda _, last: last,
}  # fmt: skip
_UNARY: dict[str, Callable[[int], int]] = {"-": operator.neg, "+": operator.pos, "!": operator.not_, "~": operator.invert}
# A variable with what changes it: `++` or `--` on either side, or an assignment such as `<<=`.
VARIABLE = re.compile(r"(\+\+|--)?\s*([A-Za-z_]\w*)(\[[^\]]*\])?\s*((?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)?")
_TOKEN = re.compile(rf"{MARKER.pattern}|0[xX][0-9a-fA-F]+|\d+|{VARIABLE.pattern}|\*\*|<<|>>|[<>=!]=|&&|\|\||\S")


def compile_expression(text: str, variable: Callable[[re.Match[str], Callable[[], int]], int]) -> Callable[[], int]:
    """Return the function that evaluates an arithmetic expression whose expansions with `$` are done.

    It is made of functions without arguments, so that a side of a condition that is not taken does not happen. `variable` gets
    a match of `VARIABLE` and the value to assign, and returns the value of the expression that it is.

    Raises:
        ValueError, IndexError: not an expression.
    """
    tokens = [*(match[0] for match in _TOKEN.finditer(text)), ""]

    def expect(token: str) -> None:
        if tokens.pop(0) != token:
            raise ValueError(text)

    def expression(level: int) -> Callable[[], int]:
        token = tokens.pop(0)
        left: Callable[[], int]
        if token in _UNARY:
            operand = expression(len(_LEVELS))
            left = partial(lambda sign: int(_UNARY[sign](operand())), token)
        elif token == "(":
            left = expression(0)
            expect(")")
        elif match := VARIABLE.fullmatch(token):
            right = expression(1) if match[4] and match[4].endswith("=") else lambda: 1
            left = partial(variable, match, right)
        else:
            left = partial(to_number, token)
        while (own := _PRECEDENCE.get(tokens[0], -1)) >= level:
            sign = tokens.pop(0)
            right = expression(own + (sign not in ("?", "**")))
            if sign == "?":
                expect(":")
                left = partial(lambda test, first, second: (first if test() else second)(), left, right, expression(own))
            else:
                left = partial(apply_sign, sign, left, right)
        return left

    value = expression(0) if len(tokens) > 1 else int
    expect("")
    return value


def to_number(token: str) -> int:
    """Return a number in bash's notation."""
    if has_unknown(token):
        raise ValueError(token)
    return int(token, 8 if re.fullmatch(r"0\d+", token) else 0)


def apply_sign(sign: str, left: Callable[[], int], right: Callable[[], int]) -> int:
    """Return the value of a binary operator."""
    if sign in ("||", "&&"):
        return int(bool(right())) if bool(left()) == (sign == "&&") else int(sign == "||")
    first, second = left(), right()
    if sign in ("<<", ">>", "**") and not 0 <= second < 64:
        raise ValueError(sign)  # undefined in C, or an error
    result = int(_ARITHMETIC[sign](first, second))
    if abs(result) >= 2**63:
        raise ValueError(sign)
    return result


_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_OPERATORS = {"=", "==", "!=", "=~", "<", ">", *_NUMBER_TESTS}


class Test:
    """A test in brackets: `or` of `and` of tests. None is unknown, for instance whether a file exists."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.unknown: list[str] = []

    def value(self, *, any_of: bool = True) -> bool | None:
        """Return the result of the words up to an end or a `)`."""
        signs = ("||", "-o") if any_of else ("&&", "-a")
        result = self.value(any_of=False) if any_of else self.one()
        while self.words and self.words[0] in signs:
            self.words.pop(0)
            both = (result, self.value(any_of=False) if any_of else self.one())
            result = any_of if any_of in both else None if None in both else not any_of
        return result

    def one(self) -> bool | None:
        """Return the result of the first test of the words."""
        if not self.words:
            return False
        word = text = self.words.pop(0)
        value: bool | None = bool(word)
        if word in _OPERATORS and len(self.words) == 1:  # an empty variable without quotes, which is an error in bash
            self.words.clear()
            return False
        if word == "!" and self.words:
            result = self.one()
            return None if result is None else not result
        if word == "(":
            result = self.value()
            self.words[:1] = []
            return result
        if re.fullmatch(r"-[a-zA-Z]", word) and self.words and self.words[0] not in _OPERATORS:
            text = self.words.pop(0)
            if word not in ("-z", "-n"):
                return None
            text = "" if text[:1] == ARGUMENT else text
            value = bool(text) == (word == "-n")
        elif len(self.words) > 1 and self.words[0] in _OPERATORS:
            sign, other = self.words.pop(0), self.words.pop(0)
            if not (word and other):  # whether the other side is empty
                word = "" if word[:1] == ARGUMENT else word
                other = "" if other[:1] == ARGUMENT else other
            text = word + other
            if sign in _NUMBER_TESTS:
                whole = all(re.fullmatch(r"\s*-?\d+\s*", number) for number in (word, other))
                value = _NUMBER_TESTS[sign](int(word), int(other)) if whole else None
            elif sign == "=~":
                value = None if has_unknown(text) else _search(other, word)
            elif sign in ("<", ">"):
                value = (word < other) == (sign == "<")
            else:
                value = fnmatchcase(word, other) == (sign != "!=")
        elif word[:1] == ARGUMENT:
            return False
        if has_unknown(text):
            self.unknown.append(text)
            return None
        return value


def _search(pattern: str, text: str) -> bool | None:
    """Return whether an extended regular expression matches a part of a text; None if it is not one that Python has too."""
    plain = re.sub(r"\[\[:(digit|alnum|alpha|space):\]\]", lambda match: _CLASSES[match[1]], pattern)
    is_other = "[:" in plain or "\\" in pattern or "(?" in plain
    # What Python might search for long.
    is_slow = re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > _MAX_STARS or len(text) > _MAX_SEARCHED
    if is_other or is_slow:
        return None
    try:
        return re.search(plain, text) is not None
    except re.error:
        return None


_CLASSES = {"digit": "[0-9]", "alnum": "[a-zA-Z0-9]", "alpha": "[a-zA-Z]", "space": r"\s"}
_MAX_STARS = 3
_MAX_SEARCHED = 100
