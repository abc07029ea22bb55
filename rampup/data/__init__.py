"""Rows, their order, and the batch of every step."""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "BatchLoader": "rampup.data.batches",
    "BatchOptions": "rampup.data.batches",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
