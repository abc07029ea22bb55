"""Reinforcement learning: batch sizes from prompts to microbatches, generation, and training on the samples.

The plan is pure arithmetic. jax is imported with the names that compute, when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "rampup.rl.config": ("RolloutConfig", "build_rollout_plan", "build_rollout_schedule", "load_rollout_config"),
    "rampup.rl.experience": ("generalized_advantages", "group_advantages", "loss_rows"),
    "rampup.rl.generation": ("Samples", "Sampling", "generate"),
    "rampup.rl.losses": ("grpo_loss", "value_loss"),
    "rampup.rl.minibatches": ("Microbatch", "MiniBatch", "mini_batches", "overlap", "regroup"),
    "rampup.rl.plan": ("RolloutPlan", "RolloutPosition"),
    "rampup.rl.policy": ("Critic", "Policy", "as_policy", "critic_of", "critic_params", "split_policy"),
    "rampup.rl.rollout": ("RolloutOptions", "RolloutState", "RolloutStep", "rollout_step"),
    "rampup.rl.schedule": ("RolloutSchedule",),
    "rampup.rl.sizes": ("Experience", "Size", "data_parallel_size"),
    "rampup.rl.starting_sizes": ("StartingSizes", "suggest"),
    "rampup.rl.tasks": ("Arithmetic",),
    "rampup.rl.updates": ("Training", "Updates"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
