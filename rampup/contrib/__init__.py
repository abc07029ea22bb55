"""What most programs do not need: nothing in the core imports it.

`check` reads the configurations of other systems, `rl` trains on samples of a policy,
`lab` measures what to choose, and `maxtext` and `tunix` are adapters.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("check", "lab", "maxtext", "rl", "tunix")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"rampup.contrib.{name}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
