"""Checks of a user's own program: whether its loss is a sum over rows, and whether its
compiled step is right on this machine.
"""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "LossProblem": "rampup.checks.loss",
    "LossReport": "rampup.checks.loss",
    "ParameterCheck": "rampup.checks.step",
    "StepReport": "rampup.checks.step",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
