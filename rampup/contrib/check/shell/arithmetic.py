"""Whole numbers of a script: `$((...))` with the operators that Python shares with C.

What is not one of these is an error, so that its value counts as unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from rampup.contrib.check.shell.grammar import ScriptError

_SIGNS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # C rounds towards zero.
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# A change of a variable, before or behind its name. It is not followed.
CHANGE = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)"
    r"|([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:\+\+|--|(?:<<|>>|[-+*/%&^|])?=(?!=))"
)
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})")
_MAX = 2**63  # of the absolute value; C's numbers start again there


def evaluate(text: str, variable: Callable[[str], str]) -> int:
    """Return the value of an expression whose expansions with `$` are done.

    `variable` returns the text of a variable, which counts as 0 if it is empty.
    """
    if CHANGE.search(text):
        raise ScriptError(text)
    try:
        tree = ast.parse(f"({text.strip() or 0})", mode="eval")
    except (SyntaxError, MemoryError):  # of a text that is nested too deeply
        raise ScriptError(text) from None
    return _value(tree.body, variable)


def _value(node: ast.AST, variable: Callable[[str], str]) -> int:
    """Return the value of a part of an expression."""
    result = _MAX
    match node:
        case ast.Constant(number) if type(number) is int:
            result = number
        case ast.Name(name):
            text = variable(name) or "0"
            if not _NUMBER.fullmatch(text):
                raise ScriptError(text)
            result = int(text)
        case ast.UnaryOp(ast.USub(), inner):
            result = -_value(inner, variable)
        case ast.BinOp(one, sign, other) | ast.Compare(one, [sign], [other]):
            left, right = _value(one, variable), _value(other, variable)
            is_by_zero = isinstance(sign, ast.Div | ast.Mod) and right == 0
            if type(sign) in _SIGNS and not is_by_zero:
                result = int(_SIGNS[type(sign)](left, right))
    if abs(result) >= _MAX:
        raise ScriptError(ast.unparse(node))
    return result
