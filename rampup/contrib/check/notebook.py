"""The constants of a notebook or a Python program, and what it gives to calls, read from
its syntax. Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located, read_text
from rampup.errors import ConfigError

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{call.__name__: call for call in (int, float, bool, str, round, min, max, len)},
    **{call.__name__: call for call in (tuple, list, dict)},
}
# What counts the devices of the machine, or lists them.
_COUNTS = ("device_count", "local_device_count")
_LISTS = ("devices", "local_devices")
_MAX = 10**12
_BLOCKS = (ast.ClassDef, ast.With, ast.For, ast.While, ast.Try)


# What arithmetic on parts that do not fit raises.
_OPEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _UnknownError(Exception):
    """The syntax does not say what an expression is."""


@dataclass
class Constants:
    """What the syntax of a program says.

    Attributes:
        constants: the value of each name, and of each key of a dictionary.
        arguments: of each call, in order: its name, that of the argument or its place,
            and its value.
    """

    path: str
    devices: int | None  # those of the machine; None if unknown
    constants: dict[str, Located] = field(default_factory=dict)
    arguments: list[tuple[str, str, Located]] = field(default_factory=list)
    _names: dict[str, Any] = field(default_factory=dict)

    def run(self, statements: Sequence[ast.stmt], *, local: bool = False) -> None:
        """Follow statements; `local` ones are those of a function, and do not change
        what the program says outside.
        """
        for statement in statements:
            if isinstance(statement, ast.If):
                self._branch(statement, local)
            elif isinstance(statement, ast.FunctionDef):
                outside = dict(self._names)
                self.run(statement.body, local=True)
                self._names = outside
            elif isinstance(statement, _BLOCKS):
                self.run(statement.body, local=local)
            else:
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        self._assign(target, statement.value, local)
                elif isinstance(statement, ast.AnnAssign) and statement.value:
                    self._assign(statement.target, statement.value, local)
                self._record_calls(statement)

    def _branch(self, statement: ast.If, local: bool) -> None:
        """Follow the branch that is taken; if that is not known, both, and forget what
        they assign.
        """
        branches = (statement.body, statement.orelse)
        try:
            self.run(branches[not self._value(statement.test)], local=local)
        except _UnknownError:
            for branch in branches:
                self.run(branch, local=local)
            for node in ast.walk(statement):
                is_set = isinstance(getattr(node, "ctx", None), ast.Store)
                name = getattr(node, "id", getattr(node, "attr", ""))
                if is_set and name in self._names:
                    self._forget(name, local)

    def _assign(self, target: ast.expr, value: ast.expr, local: bool) -> None:
        if not isinstance(target, ast.Name | ast.Attribute):
            return
        name = _name(target)
        try:
            found = self._names[name] = self._value(value)
        except _UnknownError:
            self._forget(name, local)
            return
        for key, part in _parts(name, found):
            if not local or key not in self.constants:
                self.constants[key] = self._at(part, value)

    def _forget(self, name: str, local: bool) -> None:
        """Take a name for unknown, with the keys of its dictionary."""
        for key, _ in _parts(name, self._names.pop(name, None)):
            if not local:
                self.constants.pop(key, None)

    def _at(self, value: Any, node: ast.AST) -> Located:
        line = getattr(node, "lineno", None)
        return Located(value=value, path=self.path, line=line)

    def _record_calls(self, statement: ast.stmt) -> None:
        for call in ast.walk(statement):
            if not isinstance(call, ast.Call):
                continue
            name = _name(call.func)
            if name == "add_argument":
                self._add_option(call)
            given = [(str(place), value) for place, value in enumerate(call.args)]
            given += [(key.arg or "", key.value) for key in call.keywords]
            for key, value in given:
                with contextlib.suppress(_UnknownError):
                    if isinstance(value, ast.Starred):
                        first = self._value(value.value)[0]
                        self.arguments.append((name, key, self._at(first, value)))
                    else:
                        found = self._at(self._value(value), value)
                        self.arguments.append((name, key, found))

    def _add_option(self, call: ast.Call) -> None:
        """Take the default of an option of argparse as a constant of its name."""
        words = [part.value for part in call.args if isinstance(part, ast.Constant)]
        defaults = [key.value for key in call.keywords if key.arg == "default"]
        if words and defaults:
            name = str(words[-1]).lstrip("-").replace("-", "_")
            self._assign(ast.Name(name), defaults[0], local=False)

    def _value(self, node: ast.expr) -> Any:
        """Return what an expression is, if constants and arithmetic say it."""
        try:
            return self._see(node)
        except _OPEN as error:
            raise _UnknownError from error

    def _see(self, node: ast.expr) -> Any:
        see = self._value
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute():
                return self._names[_name(node)]
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(map(see, parts))
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {see(key): self._or_none(part) for key, part in pairs if key}
            case ast.IfExp(test=test, body=body, orelse=other):
                return see(body if see(test) else other)
            case ast.Subscript(value=value, slice=place):
                return see(value)[see(place)]
            case ast.UnaryOp(op=op, operand=part):
                return _calculate(op, see(part))
            case ast.BinOp(op=op, left=left, right=right):
                return _calculate(op, see(left), see(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _calculate(op, see(left), see(right))
            case ast.Call(func=func, args=args):
                return self._see_call(_name(func), isinstance(func, ast.Name), args)
        raise _UnknownError

    def _see_call(self, name: str, is_plain: bool, args: Sequence[ast.expr]) -> Any:
        if name in (*_COUNTS, *_LISTS):
            if self.devices is None:
                raise _UnknownError
            return self.devices if name in _COUNTS else (0,) * self.devices
        if name in ("get", "getenv") and len(args) == 2:
            return self._value(args[1])  # the environment counts as empty
        if not is_plain:
            raise _UnknownError
        return _FUNCTIONS[name](*map(self._value, args))

    def _or_none(self, node: ast.expr) -> Any:
        with contextlib.suppress(_UnknownError):
            return self._value(node)
        return None


def _calculate(op: ast.AST, *sides: Any) -> Any:
    """Return the value of an operator of numbers, or of a comparison."""
    is_test = isinstance(op, ast.Eq | ast.NotEq)
    if not is_test and not all(isinstance(side, int | float) for side in sides):
        raise _UnknownError
    found = _OPERATORS[type(op)](*sides)
    if abs(found) > _MAX:
        raise _UnknownError
    return found


def _name(called: ast.expr) -> str:
    """Return the last part of the name of what is called."""
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a name with its value, or those of a dictionary."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _parts(str(key), part)


def read_constants(path: Path, *, devices: int | None = None) -> Constants:
    """Return what a notebook or a program says, in its order.

    Args:
        path: a `.py` or `.ipynb` file.
        devices: the devices of the machine, for what depends on them.

    Raises:
        ConfigError: the file is no notebook, or a program that is not Python.
    """
    found = Constants(str(path), devices)
    text, cells = read_text(path), list[str]()
    if path.suffix == ".ipynb":
        try:
            rows = json.loads(text)["cells"]
            cells = [
                "".join(row["source"]) for row in rows if row["cell_type"] == "code"
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no notebook: {error}", path=str(path)) from None
    for cell in cells or [text]:
        # Lines of the notebook's own language say nothing about the run.
        own = ("%", "!")
        lines = [
            line[: -len(line.lstrip())] + "pass"
            if line.lstrip().startswith(own)
            else line
            for line in cell.splitlines()
        ]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError as error:
            if cells:
                continue  # a cell of another language
            raise ConfigError(f"this is not Python: {error}", path=str(path)) from None
        found.run(tree.body)
    return found
