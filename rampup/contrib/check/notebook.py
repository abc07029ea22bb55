"""The constants of a notebook or a Python program, and what it gives to calls, read from
its syntax. Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.shell.values import mark
from rampup.errors import ConfigError

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
}
_MAX = 10**12
# Methods that leave a dictionary as it is.
_READS = ("get", "items", "keys", "values", "copy")


class Constants:
    """What the syntax of a program says.

    Attributes:
        constants: the value of each name, and of each key of a dictionary.
        arguments: of each call, in order: its name, that of the argument or its place,
            and its value.
    """

    def __init__(self, path: str, devices: int | None) -> None:
        self.path = path
        self.devices = devices  # those of the machine; None if unknown
        self.constants: dict[str, Located] = {}
        self.arguments: list[tuple[str, str, Located]] = []
        self._names: dict[str, Any] = {}

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements in their order."""
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._record_calls(statement)
                    self._assign(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assign(name, value)
                case ast.ClassDef(body=body):
                    self.run(body)
                case ast.If(test=test, body=body, orelse=other) if (
                    holds := self._value(test)
                ) is not None:
                    self.run(body if holds else other)
                case _:
                    self._follow(statement)

    def _follow(self, statement: ast.stmt) -> None:
        """Follow the blocks of a function, a loop or an open branch, and forget what
        they or another statement assign: it may happen once, often, or never.
        """
        children = [*ast.iter_child_nodes(statement)]
        blocks = [child for child in children if isinstance(child, ast.stmt)]
        for child in children:
            if isinstance(child, ast.ExceptHandler):
                blocks += child.body
        self.run(blocks)
        if not blocks:
            self._record_calls(statement)
        for node in ast.walk(statement):
            if isinstance(getattr(node, "ctx", None), ast.Store):
                for part in ast.walk(node):
                    self._forget(getattr(part, "id", ""))

    def _assign(self, name: str, value: ast.expr) -> None:
        self._forget(name)
        self._names[name] = found = self._value(value)
        for key, part in _parts(name, found):
            self.constants[key] = self._at(part, value)

    def _forget(self, name: str) -> None:
        """Take a name for unknown, with the keys of its dictionary."""
        for key, _ in _parts(name, self._names.pop(name, None)):
            self.constants.pop(key, None)

    def _at(self, value: Any, node: ast.expr) -> Located:
        return Located(value=value, path=self.path, line=node.lineno)

    def _record_calls(self, statement: ast.stmt) -> None:
        for call in ast.walk(statement):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if isinstance(call.func, ast.Attribute) and name not in _READS:
                owner = _root(call.func.value)
                if isinstance(self._names.get(owner), dict):
                    self._forget(owner)  # such as `owner.update(...)`
            given = [(str(place), value) for place, value in enumerate(call.args)]
            given += [(key.arg or "", key.value) for key in call.keywords]
            for key, value in given:
                found = self._value(value)
                if found is None and not isinstance(value, ast.Constant):
                    found = mark(f"${{{ast.unparse(value)}}}")  # it is asked for
                self.arguments.append((name, key, self._at(found, value)))

    def _value(self, node: ast.expr) -> Any:
        """Return what an expression is; None if constants and arithmetic do not say
        it.
        """
        see = self._value
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.Starred(value=whole):
                return see(whole)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = tuple(map(see, parts))
                return None if None in values else values
            case ast.Dict(keys=keys, values=parts):
                pairs = zip(keys, parts, strict=True)
                return {
                    key.value: see(part)
                    for key, part in pairs
                    if isinstance(key, ast.Constant)
                }
            case ast.Subscript(value=whole, slice=ast.Constant(value=key)):
                found = see(whole)
                return found.get(key) if isinstance(found, dict) else None
            case ast.BinOp(op=op, left=left, right=right):
                return _calculate(op, see(left), see(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _calculate(op, see(left), see(right))
            case ast.Call(func=ast.Name(id="int"), args=[part]):
                number = see(part)
                return int(number) if _is_number(number) else None
            case ast.Call(func=ast.Name(id="len"), args=[ast.Call() as call]):
                is_list = getattr(call.func, "attr", "") == "devices"
                return self.devices if is_list else None
            case ast.Call(func=ast.Attribute(attr="device_count")):
                return self.devices
        return None


def _root(node: ast.expr) -> str:
    """Return the name that an expression such as `name["key"].part` starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", "")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= _MAX


def _calculate(op: ast.AST, left: Any, right: Any) -> Any:
    """Return the value of an operator of numbers, or whether they are equal."""
    if type(op) not in _OPERATORS or not _is_number(left) or not _is_number(right):
        return None
    if right == 0 and isinstance(op, ast.Div | ast.FloorDiv):
        return None
    return _OPERATORS[type(op)](left, right)


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
    text = read_text(path)
    is_notebook = path.suffix == ".ipynb"
    for cell in _cells(text, path) if is_notebook else [text]:
        # Lines of the notebook's own language say nothing about the run.
        plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell)
        try:
            found.run(ast.parse(plain).body)
        except SyntaxError as error:
            if not is_notebook:  # a cell may be of another language
                said = f"this is not Python: {error}"
                raise ConfigError(said, path=str(path)) from None
    return found


def _cells(text: str, path: Path) -> list[str]:
    """Return the code of a notebook's cells."""
    try:
        rows = json.loads(text)["cells"]
        return ["".join(row["source"]) for row in rows if row["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this is no notebook: {error}", path=str(path)) from None
