"""Training that follows a plan: JAX, Flax, Optax, Grain and Orbax.

Every name is imported when it is first used, so that the modules here that need no JAX can be imported without it.
"""

from __future__ import annotations

import importlib
from typing import Any

from rampup.moved import moved_names

_HOMES = {
    "accumulate": ("accumulate", "multi_steps"),
    "checkpoint": ("CheckpointOptions",),
    "data.batches": ("Batch", "BatchLoader", "microbatches", "step_batches"),
    "loop": ("EvalOptions", "Loop", "Summary"),
    "mesh": ("make_mesh",),
    "metrics": ("MetricOptions",),
    "nnx": ("merge_model", "split_model"),
    "optimizer": ("LearningRate", "make_optimizer"),
    "pipeline": ("PipelinedLoss", "as_loss", "pipeline_sums"),
    "state": ("TrainState", "create_state", "prepare_state"),
    "step": ("TrainStep", "train_step"),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)

_moved = moved_names(
    __name__,
    {name: f"rampup.rl.minibatches.{name}" for name in ("Microbatch", "MiniBatch", "mini_batches", "overlap", "regroup")}
    | {"gpipe_sums": "rampup.bench.pipeline.gpipe_sums"},
)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        return _moved(name)
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
