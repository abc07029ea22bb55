"""The architecture, read from the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rampup"
FLOORS = [
    {"errors"},
    {"plan", "packing"},
    {"config"},
    {"run"},
    {"lm", "rl", "tune", "dialects", "show"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
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
    """Errors < plan < config < run, show < recipes < bench < cli; run and show do not know each other."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported(path):
        if name.startswith("rampup."):
            other = name.split(".")[1]
            assert other == own or RANK[other] <= RANK[own], f"{own} imports {name}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in ("plan", "config", "errors.py")], ids=str
)
def test_the_pure_floors_are_pure(path):
    """The plan and the configuration import no jax, no clock and no logging; numpy at most in packing."""
    allowed = {"numpy"} if path.name == "packing.py" else set()
    forbidden = {"jax", "flax", "optax", "grain", "orbax", "numpy", "time", "datetime", "logging", "random"} - allowed
    assert not forbidden & {name.split(".")[0] for name in imported(path)}


def test_import_rampup_does_not_import_jax():
    """`import rampup` is quick, and `rampup.run` is there when asked for."""
    code = "import sys, rampup; assert 'jax' not in sys.modules and 'numpy' not in sys.modules; rampup.run.train_step"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_is_complete_and_sorted():
    """What `__all__` names exists, in order, and every public class says what it is."""
    import rampup

    assert rampup.__all__ == sorted(rampup.__all__)
    assert all(getattr(rampup, name).__doc__ for name in rampup.__all__)
