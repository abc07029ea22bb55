"""The byte-level language model that `rampup train` trains."""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "LoadedRun": "rampup.lm.load",
    "Run": "rampup.lm.train",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
