"""The compiled training step: what runs on the devices."""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "AdamSchedule": "rampup.engine.optimizer",
    "LearningRate": "rampup.engine.optimizer",
    "TrainStep": "rampup.engine.step",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
