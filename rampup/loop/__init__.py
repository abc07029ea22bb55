"""A run in its folder: the loop over steps, checkpoints, metrics and other
processes.
"""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "Component": "rampup.loop.components",
    "Summary": "rampup.loop.loop",
    "ramp_to_continue": "rampup.loop.loop",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
