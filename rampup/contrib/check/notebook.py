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
        """Follow the branch that is taken; if that is not known, what both agree on."""
        branches = (statement.body, statement.orelse)
        with contextlib.suppress(_UnknownError):
            self.run(branches[not self._value(statement.test)], local=local)
            return
        found = []
        for branch in branches:
            before = (dict(self._names), dict(self.constants))
            self.run(branch, local=local)
            found.append((self._names, self.constants))
            self._names, self.constants = before
        (names, constants), (others, _) = found
        agreed = {k: v for k, v in names.items() if k in others and others[k] == v}
        gone = (names.keys() | others.keys()) - agreed.keys()
        self._names = agreed
        self.constants = {k: v for k, v in constants.items() if k not in gone}

    def _assign(self, target: ast.expr, value: ast.expr, local: bool) -> None:
        if not isinstance(target, ast.Name | ast.Attribute):
            return
        name = target.id if isinstance(target, ast.Name) else target.attr
        try:
            found = self._value(value)
        except _UnknownError:
            self._names.pop(name, None)
            if not local:
                self.constants.pop(name, None)
            return
        self._names[name] = found
        for key, part in _parts(name, found):
            if not local or key not in self.constants:
                self.constants[key] = self._at(part, value)

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
            # Every other expression is not followed.
            return getattr(self, f"_see_{type(node).__name__.lower()}")(node)
        except _OPEN as error:
            raise _UnknownError from error

    def _see_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _see_name(self, node: ast.Name) -> Any:
        return self._names[node.id]

    def _see_attribute(self, node: ast.Attribute) -> Any:
        return self._names[node.attr]

    def _see_tuple(self, node: ast.Tuple | ast.List) -> Any:
        return tuple(map(self._value, node.elts))

    _see_list = _see_tuple

    def _see_dict(self, node: ast.Dict) -> Any:
        pairs = zip(node.keys, node.values, strict=True)
        return {self._value(key): self._or_none(part) for key, part in pairs if key}

    def _see_unaryop(self, node: ast.UnaryOp) -> Any:
        return self._calculate(node.op, node.operand)

    def _see_binop(self, node: ast.BinOp) -> Any:
        return self._calculate(node.op, node.left, node.right)

    def _see_compare(self, node: ast.Compare) -> Any:
        if len(node.ops) > 1:
            raise _UnknownError
        return self._calculate(node.ops[0], node.left, *node.comparators)

    def _see_ifexp(self, node: ast.IfExp) -> Any:
        return self._value(node.body if self._value(node.test) else node.orelse)

    def _see_subscript(self, node: ast.Subscript) -> Any:
        return self._value(node.value)[self._value(node.slice)]

    def _see_call(self, node: ast.Call) -> Any:
        name = _name(node.func)
        if name in (*_COUNTS, *_LISTS):
            if self.devices is None:
                raise _UnknownError
            return self.devices if name in _COUNTS else (0,) * self.devices
        if name in ("get", "getenv") and len(node.args) == 2:
            return self._value(node.args[1])  # the environment counts as empty
        if not isinstance(node.func, ast.Name):
            raise _UnknownError
        return _FUNCTIONS[name](*map(self._value, node.args))

    def _or_none(self, node: ast.expr) -> Any:
        with contextlib.suppress(_UnknownError):
            return self._value(node)
        return None

    def _calculate(self, op: ast.AST, *parts: ast.expr) -> Any:
        sides = [self._value(part) for part in parts]
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
