"""Reinforcement learning: batch sizes from prompts to microbatches, generation, and
training on the samples.

The plan is pure arithmetic. jax is imported with the names that compute, when one of
them is first used.
"""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOMES = {
    "rampup.rl.config": (
        "RolloutConfig build_rollout_plan build_rollout_schedule load_rollout_config"
    ),
    "rampup.rl.experience": (
        "generalized_advantages group_advantages loss_rows mini_batches padded_rows"
    ),
    "rampup.rl.generation": "Samples Sampling generate",
    "rampup.rl.policy": (
        "Critic Policy as_policy critic_of critic_params grpo_loss split_policy"
        " value_loss"
    ),
    "rampup.rl.rollout": "RolloutOptions RolloutState RolloutStep rollout_step",
    "rampup.rl.schedule": "RolloutSchedule",
    "rampup.rl.plan": "Experience RolloutPlan Size Training Updates",
    "rampup.rl.starting_sizes": "suggest",
    "rampup.rl.tasks": "Arithmetic",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
