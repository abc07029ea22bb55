"""The architecture, read from the imports."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rampup

PACKAGE = Path(__file__).parent.parent / "rampup"
FLOORS = [
    {"errors", "moved", "notebook_repr"},
    {"plan", "packing"},
    {"config"},
    {"run"},
    {"lm", "rl", "tune", "dialects", "show"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
PURE = ("errors.py", "packing.py", "plan", "config")
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem != "__init__")


def imported(path):
    """Yield every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    """Errors < plan, packing < config < run < lm, rl, tune, dialects, show < bench < cli; never up."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "notebook_repr":  # the documented exception: it imports `show` when a notebook asks for the HTML
        assert set(imported(path)) == {"rampup.show.notebook"}
        return
    for name in imported(path):
        if name.startswith("rampup."):
            other = name.split(".")[1]
            assert RANK[other] <= RANK[own], f"{own} imports {name}"


def test_imports_have_no_cycle():
    """No module imports, at its top level, a module that imports it."""
    names = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text())
        targets = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rampup"):
                targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        graph[name] = (targets & set(names)) - {name}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def module_name(path):
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in ("plan", "config", "errors.py", "packing.py")],
    ids=str,
)
def test_the_pure_floors_are_pure(path):
    """The plan and the configuration import no jax, no clock and no logging; numpy at most in packing."""
    allowed = {"numpy"} if path.name == "packing.py" else set()
    forbidden = {"jax", "flax", "optax", "grain", "orbax", "numpy", "time", "datetime", "logging", "random"} - allowed
    assert not forbidden & {name.split(".")[0] for name in imported(path)}


def test_import_rampup_imports_no_jax():
    """`import rampup`, a plan and a check of a file import no jax; `rampup.train_step` does."""
    code = """
import sys, rampup
rampup.build_plan(rampup.Config(), 1), rampup.check_file, rampup.RolloutPlan, rampup.Timetable
assert "jax" not in sys.modules and "numpy" not in sys.modules
rampup.train_step
assert "jax" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_listed_alike():
    """The table of public names, the imports that editors see and `dir(rampup)` agree, and each name is documented."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    listed = {alias.name: node.module for node in block.body for alias in node.names}
    assert listed == rampup._HOME
    assert set(rampup.__all__) <= set(dir(rampup))
    assert all(getattr(rampup, name).__doc__ for name in rampup.__all__)


def test_moved_modules_import_with_a_warning():
    """Every old module name gives the module of today, and the warning names it."""
    for old, new in rampup.moved.MOVED_MODULES.items():
        sys.modules.pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"{re.escape(old)} is now {re.escape(new)}"):
            assert importlib.import_module(old) is importlib.import_module(new)
