"""Every public name says what it takes, what it returns, what it raises, and how it is
used.
"""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from pathlib import Path

import rampup

# Names that still lack a part, one a line. It only gets shorter.
LACKING = Path(__file__).with_name("undocumented.txt")


def rooms():
    """Yield the modules whose `__all__` is public: the package, its rooms and those of
    `contrib`.
    """
    yield rampup
    for package in (rampup, rampup.contrib):
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            room = importlib.import_module(found.name) if found.ispkg else None
            if hasattr(room, "__all__"):
                yield room


def public_names():
    """Yield every public class, function and method by its name, each once."""
    seen = set()
    for room in rooms():
        for name in room.__all__:
            thing = getattr(room, name)
            is_ours = getattr(thing, "__module__", "").startswith("rampup")
            if not is_ours or id(thing) in seen:
                continue
            seen.add(id(thing))
            home = f"{room.__name__}.{name}"
            yield home, thing
            if inspect.isclass(thing) and not issubclass(thing, BaseException):
                yield from methods(home, thing)


def methods(home, cls):
    """Yield the public methods that a class of rampup defines, `__call__` among
    them.
    """
    for owner in cls.__mro__:
        if not owner.__module__.startswith("rampup"):
            continue
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            is_public = name == "__call__" or not name.startswith("_")
            is_own = getattr(function, "__module__", None) == owner.__module__
            if is_public and is_own and inspect.isfunction(function):
                yield f"{home}.{name}", function


def raises(function):
    """Return whether a function has a `raise` of its own."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(tree))


def missing_parts(name, thing):
    """Yield what the docstring of a public name lacks."""
    words = inspect.getdoc(thing) if "__doc__" in dir(thing) else None
    if not words or words.startswith(f"{getattr(thing, '__name__', '')}("):
        yield "docstring"
        return
    if inspect.isclass(thing):
        if not issubclass(thing, BaseException):
            if ">>>" not in words:
                yield "example"
            if inspect.signature(thing).parameters and not (
                "Attributes:" in words or "Args:" in words or documented_fields(thing)
            ):
                yield "Args"
        return
    signature = inspect.signature(thing)
    if set(signature.parameters) - {"self", "cls"} and "Args:" not in words:
        yield "Args"
    returns = signature.return_annotation not in (None, "None", signature.empty)
    if returns and not (words.startswith(("Return", "Yield")) or "Returns:" in words):
        yield "Returns"
    if raises(thing) and "Raises:" not in words:
        yield "Raises"
    if "." not in thing.__qualname__ and ">>>" not in words:
        yield "example"


def documented_fields(cls):
    """Return whether every field of a dataclass has a comment `#:` beside it, which
    Sphinx shows.
    """
    source = inspect.getsource(cls)
    fields = len(getattr(cls, "__dataclass_fields__", ()))
    return 0 < fields <= source.count("#:")


def test_every_public_name_is_documented():
    """Args, Returns where a summary does not begin with it, Raises, and an example of
    every class and function; of a method all but the example.
    """
    found = {
        f"{name}: {part}"
        for name, thing in public_names()
        for part in missing_parts(name, thing)
    }
    assert sorted(found - set(LACKING.read_text().splitlines())) == []
