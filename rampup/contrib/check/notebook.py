"""The constants of a notebook or a Python program, and what it gives to calls, read from
its syntax. Nothing is imported or executed.

Statements of the top level and of classes are read, in their order, and of an `if` whose
condition is known the branch that runs. A value is open, and a marker stands for it, if
its name is assigned in another way (by a function, a loop, an open branch, an import) or
two values, if it needs more than arithmetic, or if its dictionary is used in another way
than `name["key"]` and `**name`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.shell.values import has_unknown, mark
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


class Call(NamedTuple):
    """What a program gives to a call.

    Attributes:
        name: the last part of the name of what is called; empty where the program sets
            an attribute.
        arguments: by name or place. That of `**unknown` is `**`.
    """

    name: str
    arguments: Mapping[str, Located]


class Program:
    """What the syntax of a program says."""

    def __init__(self, path: str, devices: int | None) -> None:
        self.path = path
        self.devices = devices  # those of the machine; None if unknown
        self._code: list[ast.AST] = []  # what was read
        self._names: dict[str, Located] = {}
        self._changed: set[str] = set()  # names with two values
        self._shared: set[str] = set()  # names whose dictionaries may change

    def read(self, statements: Sequence[ast.stmt]) -> None:
        """Read statements in their order."""
        for statement in statements:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self._open_names(value)
                    self._bind(name, self._locate(value))
                case ast.ClassDef(body=body):
                    self.read(body)
                case ast.If(test=test, body=body, orelse=other) if isinstance(
                    holds := self._value(test), bool
                ):
                    self.read(body if holds else other)
                case _:
                    self._open_names(statement)

    def constants(self) -> Iterator[tuple[str, Located]]:
        """Yield each name and each key of a dictionary, with its value."""
        for name, place in self._names.items():
            named = [(name, self._known(name))]
            if isinstance(place.value, dict):
                named = [*_keys(place.value, is_open=self._is_open(name))]
            for key, value in named:
                yield key, dataclasses.replace(place, value=value)

    def calls(self) -> Iterator[Call]:
        """Yield what the program gives to each call, the attributes and items that it
        sets, and the dictionaries that it makes in a call or a function.
        """
        makers = ast.Call | ast.FunctionDef | ast.AsyncFunctionDef
        for node in (node for code in self._code for node in ast.walk(code)):
            for part in ast.walk(node) if isinstance(node, makers) else ():
                if isinstance(part, ast.Dict):
                    items = self._items(part).items()
                    yield Call("", {str(name): at for name, at in items})
            match node:
                case ast.Call(func=func):
                    name = getattr(func, "attr", getattr(func, "id", ""))
                    yield Call(name, self._arguments(node))
                case (
                    ast.Attribute(attr=name, ctx=ast.Store())
                    | ast.Subscript(slice=ast.Constant(str(name)), ctx=ast.Store())
                ):
                    yield Call("", {name: self._locate(node)})

    def _open_names(self, code: ast.AST) -> None:
        """Take for open what a part of a program assigns or imports, and the
        dictionaries that it may change.
        """
        self._code.append(code)
        reads = set[ast.AST]()  # of dictionaries; they come before their names
        for node in ast.walk(code):
            match node:
                case (
                    ast.Subscript(value=whole, slice=ast.Constant(), ctx=ast.Load())
                    | ast.keyword(arg=None, value=whole)
                ):
                    reads.add(whole)
                case ast.Name(id=name, ctx=ast.Load()):
                    self._shared |= set() if node in reads else {name}
                case (
                    ast.Name(id=name)
                    | ast.arg(arg=name)
                    | ast.alias(asname=str(name))
                    | ast.alias(name=name)
                    | ast.MatchAs(name=str(name))
                ):
                    self._bind(name, self._locate(node, _open(name)))

    def _bind(self, name: str, place: Located) -> None:
        """Give a name a value; one with two values is open."""
        if self._names.setdefault(name, place).value != place.value:
            self._changed.add(name)
            if isinstance(place.value, dict):  # all of its keys are open
                self._names[name] = place

    def _is_open(self, name: str) -> bool:
        is_dictionary = isinstance(self._names[name].value, dict)
        return name in self._changed or (is_dictionary and name in self._shared)

    def _known(self, name: str) -> Any:
        """Return the value of a name, or a marker."""
        return _open(name) if self._is_open(name) else self._names[name].value

    def _arguments(self, call: ast.Call) -> dict[str, Located]:
        found = {str(n): self._locate(value) for n, value in enumerate(call.args)}
        for keyword in call.keywords:
            place = self._locate(keyword.value)
            if keyword.arg is None and isinstance(place.value, dict):
                for name, value in place.value.items():
                    found[str(name)] = dataclasses.replace(place, value=value)
            else:
                found[keyword.arg or "**"] = place
        return found

    def _items(self, node: ast.Dict) -> dict[Any, Located]:
        """Return the items of a dictionary whose keys are constants."""
        pairs = zip(node.keys, node.values, strict=True)
        return {
            key.value: self._locate(value)
            for key, value in pairs
            if isinstance(key, ast.Constant)
        }

    def _locate(self, node: ast.AST, marker: str = "") -> Located:
        """Return the value of a node, or the marker of one that is open, and its line."""
        value = marker or self._value(node)
        line = getattr(node, "lineno", None)
        return Located(value=value, path=self.path, line=line)

    def _value(self, node: ast.AST) -> Any:
        """Return what an expression is, or a marker of what constants and arithmetic do
        not say.
        """
        see = self._value
        found: Any = None
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._names:
                return self._known(name)
            case ast.Starred(value=whole):
                return see(whole)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = tuple(map(see, parts))
                is_open = any(isinstance(v, str) and has_unknown(v) for v in values)
                found = None if is_open else values
            case ast.Dict(keys=keys):
                items = {name: at.value for name, at in self._items(node).items()}
                found = items if len(items) == len(keys) else None
            case ast.Subscript(value=whole, slice=ast.Constant(value=key)):
                owner = see(whole)
                found = owner.get(key) if isinstance(owner, dict) else None
                # Another name may change a dictionary within one.
                found = None if isinstance(found, dict) else found
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                found = _calculate(op, see(left), see(right))
            case ast.Call(func=ast.Name(id="int"), args=[part]):
                found = int(number) if _is_number(number := see(part)) else None
            case ast.Call(func=ast.Name(id="len"), args=[ast.Call() as call]):
                is_list = getattr(call.func, "attr", "") == "devices"
                found = self.devices if is_list else None
            case ast.Call(func=ast.Attribute(attr="device_count")):
                found = self.devices
        return _open(ast.unparse(node)) if found is None else found


def _open(text: str) -> str:
    """Return the marker of a value that the program leaves open."""
    return mark(f"${{{text}}}")


def _keys(values: Mapping[Any, Any], *, is_open: bool) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a dictionary and of those within it, which are open."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, is_open=True)
        else:
            yield str(key), _open(key) if is_open else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MAX


def _calculate(op: ast.AST, left: Any, right: Any) -> Any:
    """Return the value of an operator of numbers, or whether they are equal; None if it
    is not known.
    """
    if type(op) not in _OPERATORS or not _is_number(left) or not _is_number(right):
        return None
    if right == 0 and isinstance(op, ast.Div | ast.FloorDiv):
        return None
    return _OPERATORS[type(op)](left, right)


def read_program(path: Path, *, devices: int | None = None) -> Program:
    """Return what a notebook or a program says.

    Args:
        path: a `.py` or `.ipynb` file.
        devices: the devices of the machine, for what depends on them.

    Raises:
        ConfigError: the file is no notebook, or a program that is not Python.
    """
    found = Program(str(path), devices)
    text = read_text(path)
    is_notebook = path.suffix == ".ipynb"
    for cell in _cells(text, path) if is_notebook else [text]:
        # Lines of the notebook's own language say nothing about the run.
        plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell)
        try:
            found.read(ast.parse(plain).body)
        except SyntaxError as error:
            if not is_notebook:  # a cell may be of another language
                raise ConfigError(
                    f"this is not Python: {error}", path=str(path)
                ) from None
    return found


def _cells(text: str, path: Path) -> list[str]:
    """Return the code of a notebook's cells."""
    try:
        rows = json.loads(text)["cells"]
        return ["".join(row["source"]) for row in rows if row["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"this is no notebook: {error}", path=str(path)) from None
