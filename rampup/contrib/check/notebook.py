"""The constants of a notebook or a Python program, and what it gives to calls, read from
its syntax. Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# Functions that leave a dictionary among their arguments as it is.
_READERS = (
    *("print", "pprint", "display", "len", "str", "repr", "dict", "list", "sorted"),
    *("isinstance", "dumps"),
)
# Blocks that run once, if at all; those of other statements may be left out.
_ONCE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.With, ast.AsyncWith)


class Constants:
    """What the syntax of a program says.

    Attributes:
        constants: the value of each name, and of each key of a dictionary.
        arguments: of each call, in order: its name, that of the argument or its place,
            and its value. That of `**unknown` is `**`. An attribute that a program
            sets is an argument of the call that made its object, or of "".
    """

    def __init__(self, path: str, devices: int | None) -> None:
        self.path = path
        self.devices = devices  # those of the machine; None if unknown
        self.constants: dict[str, Located] = {}
        self.arguments: list[tuple[str, str, Located]] = []
        self._names: dict[str, Any] = {}
        self._made: dict[str, str] = {}  # the call that made what a name stands for
        self._is_open = False  # whether the statements may be left out

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements in their order."""
        for statement in statements:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self._forget_all(value)
                    self._record_calls(value)
                    self._assign(name, value)
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    self._forget_all(statement)
                    self._record_calls(value)
                    self._set(target, value)
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
        self._forget_all(statement)
        blocks, heads = list[ast.stmt](), list[ast.AST]()
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                blocks.append(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                blocks += child.body
            else:
                heads.append(child)
        for head in heads:
            self._record_calls(head)
            for node in ast.walk(head):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self._set(node, None)
        was_open = self._is_open
        self._is_open = was_open or not isinstance(statement, _ONCE)
        self.run(blocks)
        self._is_open = was_open
        self._forget_all(statement)

    def _assign(self, name: str, value: ast.expr) -> None:
        found, made = self._value(value), self._made.get(_name(value), "")
        if isinstance(value, ast.Call):
            made = self._called(value)
        self._forget(name)
        self._names[name], self._made[name] = found, made
        for key, part in _parts(name, found):
            self.constants[key] = self._at(part, value)

    def _set(self, target: ast.Attribute, value: ast.expr | None) -> None:
        """Record an attribute that is set; to what is open if `value` is None."""
        found = None
        if value is not None and not self._is_open:
            found = self._value(value)
        made = self._made.get(_name(target.value), "")
        place = self._at(_or_mark(found, target), target)
        self.arguments.append((made, target.attr, place))

    def _forget_all(self, code: ast.AST) -> None:
        """Forget what a part of a program assigns, changes, imports or takes as a
        parameter.
        """
        for node in ast.walk(code):
            if isinstance(node, ast.arg):
                self._forget(node.arg)
            elif isinstance(node, ast.alias):
                self._forget(node.asname or node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
                if isinstance(node, ast.Name):
                    self._forget(node.id)
                elif isinstance(node, ast.Subscript):
                    self._forget_dictionary(_root(node))

    def _forget(self, name: str) -> None:
        """Take a name for unknown, with the keys of its dictionary."""
        self._made.pop(name, None)
        for key, _ in _parts(name, self._names.pop(name, None)):
            self.constants.pop(key, None)

    def _forget_dictionary(self, name: str) -> None:
        """Forget a dictionary that may change, under all of its names."""
        changed = set(_dictionaries(self._names.get(name)))
        for other, value in [*self._names.items()]:
            if not changed.isdisjoint(_dictionaries(value)):
                self._forget(other)
        self._forget(name)

    def _at(self, value: Any, node: ast.expr) -> Located:
        return Located(value=value, path=self.path, line=node.lineno)

    def _record_calls(self, code: ast.AST) -> None:
        for call in ast.walk(code):
            if not isinstance(call, ast.Call):
                continue
            name = self._called(call)
            for key, value in _given(call):
                found = self._value(value)
                parts = [(key, found)]
                if key == "**" and isinstance(found, dict):
                    parts = [*found.items()]
                for part, size in parts:
                    if not isinstance(value, ast.Constant):
                        size = _or_mark(size, value)
                    self.arguments.append((name, part, self._at(size, value)))
            self._forget_changed(call)

    def _called(self, call: ast.Call) -> str:
        """Return the name of what is called, or made what `replace` copies."""
        name: str = getattr(call.func, "attr", _name(call.func))
        if name == "replace" and call.args:
            return self._made.get(_name(call.args[0]), "")
        return name

    def _forget_changed(self, call: ast.Call) -> None:
        """Forget the dictionaries that a call may change."""
        name, changed = _name(call.func), list[str]()
        if isinstance(call.func, ast.Attribute):
            name = call.func.attr
            if name not in _READS:
                changed.append(_root(call.func.value))  # such as `owner.update(...)`
        if name not in (*_READS, *_READERS):
            changed += [_name(value) for key, value in _given(call) if key != "**"]
        for owner in changed:
            if isinstance(self._names.get(owner), dict):
                self._forget_dictionary(owner)

    def _dictionary(
        self, pairs: Iterable[tuple[ast.expr | str | None, ast.expr]]
    ) -> dict[Any, Any] | None:
        """Return a dictionary, or None if one of its keys is open."""
        found = dict[Any, Any]()
        for key, part in pairs:
            value = self._value(part)
            if isinstance(key, ast.Constant):
                found[key.value] = value
            elif isinstance(key, str):
                found[key] = value
            elif key is None and isinstance(value, dict):  # that of `**value`
                found |= value
            else:
                return None
        return found

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
                return self._dictionary(zip(keys, parts, strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=given):
                return self._dictionary((part.arg, part.value) for part in given)
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


def _name(node: ast.expr) -> str:
    """Return the name that an expression is, or ""."""
    return node.id if isinstance(node, ast.Name) else ""


def _or_mark(value: Any, node: ast.expr) -> Any:
    """Return a value, or if it is not known, a mark to ask for it."""
    return mark(f"${{{ast.unparse(node)}}}") if value is None else value


def _given(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the arguments of a call by place or name; the rest, `**`, comes first, as
    others count more.
    """
    given = [("**", key.value) for key in call.keywords if key.arg is None]
    given += [(str(place), value) for place, value in enumerate(call.args)]
    return given + [(key.arg, key.value) for key in call.keywords if key.arg]


def _dictionaries(value: Any) -> Iterator[int]:
    """Yield the identity of each dictionary in a value."""
    if isinstance(value, dict):
        yield id(value)
        value = tuple(value.values())
    for part in value if isinstance(value, tuple) else ():
        yield from _dictionaries(part)


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
