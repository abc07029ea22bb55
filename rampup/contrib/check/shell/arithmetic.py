"""Whole numbers of a script: `$((...))`, with the operators that launch scripts use.

What is not one of these is an error, so that its value counts as unknown.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from rampup.contrib.check.shell.grammar import ScriptError
from rampup.contrib.check.shell.values import MARKER

# C's binary operators, from the loosest to the tightest.
_LEVELS = ("?", "||", "&&", "== !=", "< <= > >=", "+ -", "* / %")
_PRECEDENCE = {
    sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()
}
_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: a != 0 and b != 0,
    "||": lambda a, b: a != 0 or b != 0,
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
}
# A variable with what changes it: `++` or `--` on either side, or an assignment.
VARIABLE = re.compile(
    r"(\+\+|--)?\s*([A-Za-z_]\w*)(\[[^\]]*\])?\s*((?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)?"
)
_TOKEN = re.compile(rf"{MARKER.pattern}|\d\w*|{VARIABLE.pattern}|[<>=!]=|&&|\|\||\S")
_MAX = 2**63  # of the absolute value; C's numbers start again there


def evaluate(
    text: str, variable: Callable[[re.Match[str], Callable[[], int]], int]
) -> int:
    """Return the value of an expression whose expansions with `$` are done.

    `variable` gets a match of `VARIABLE` and what reads the value to assign, and
    returns the value of that expression. All sides are evaluated, so that an assignment
    that a condition might skip is an error.
    """
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    if not tokens:
        return 0
    changes = [match for match in map(VARIABLE.fullmatch, tokens) if match]
    if {"?", "&&", "||"} & set(tokens) and any(row[1] or row[4] for row in changes):
        raise ScriptError(text)
    expression = _Expression([*tokens, ""], variable)
    value = expression.read()
    expression.expect("")
    return value


def combine(sign: str, left: int, right: int) -> int:
    """Return the value of a binary operator."""
    if sign not in _BINARY or (sign in "/%" and right == 0):
        raise ScriptError(sign)
    result = int(_BINARY[sign](left, right))
    if abs(result) >= _MAX:
        raise ScriptError(sign)
    return result


def to_number(token: str) -> int:
    """Return a decimal number; octal and hexadecimal ones are not read."""
    if not re.fullmatch(r"-?(0|[1-9]\d{0,17})", token):
        raise ScriptError(token)
    return int(token)


class _Expression:
    """An expression by precedence, from its tokens."""

    def __init__(
        self,
        tokens: list[str],
        variable: Callable[[re.Match[str], Callable[[], int]], int],
    ) -> None:
        self.tokens = tokens
        self.variable = variable

    def expect(self, token: str) -> None:
        """Go on behind a token, which must be the next one."""
        if self.tokens.pop(0) != token:
            raise ScriptError(token)

    def read(self, level: int = 0) -> int:
        """Return the value of what follows, up to an operator of a lower level."""
        left = self.operand()
        while (own := _PRECEDENCE.get(self.tokens[0], -1)) >= level:
            sign = self.tokens.pop(0)
            if sign == "?":
                first = self.read()
                self.expect(":")
                second = self.read(own)
                left = first if left else second
            else:
                left = combine(sign, left, self.read(own + 1))
        return left

    def operand(self) -> int:
        """Return the value of the next number, variable or bracket."""
        token = self.tokens.pop(0)
        if token in _UNARY:
            return int(_UNARY[token](self.operand()))
        if token == "(":
            value = self.read()
            self.expect(")")
            return value
        if match := VARIABLE.fullmatch(token):
            return self.variable(match, self.read)
        return to_number(token)
