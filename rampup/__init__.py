"""Batch ramp-up and pipeline-microbatch scheduling for JAX.

`import rampup` gives the plan and the configuration, and does not import jax; `rampup.run` does.
"""

from __future__ import annotations

import importlib
from typing import Any

from rampup.config.build import build_plan
from rampup.config.load import load_config
from rampup.config.schema import Config
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    DataError,
    MissingDependencyError,
    PipelineShapeError,
    RampDefinitionError,
    RampupError,
    ResumeMismatchError,
)
from rampup.plan import (
    BatchRamp,
    BatchSplit,
    BatchSplitter,
    MeshAxes,
    Phase,
    PlanPosition,
    RampPlan,
    RampupBatchManager,
    Timetable,
    define_ramp,
)
from rampup.rl.plan import RolloutPlan

__version__ = "0.1.0"
__all__ = [
    "BatchDivisibilityError",
    "BatchRamp",
    "BatchSplit",
    "BatchSplitter",
    "Config",
    "ConfigError",
    "DataError",
    "MeshAxes",
    "MissingDependencyError",
    "Phase",
    "PipelineShapeError",
    "PlanPosition",
    "RampDefinitionError",
    "RampPlan",
    "RampupBatchManager",
    "RampupError",
    "ResumeMismatchError",
    "RolloutPlan",
    "Timetable",
    "build_plan",
    "define_ramp",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in ("run", "show", "lm", "tune", "rl", "bench"):
        return importlib.import_module(f"rampup.{name}")
    raise AttributeError(f"module 'rampup' has no attribute {name!r}")
