"""Reinforcement learning: batch sizes from prompts to microbatches, generation, and
training on the samples.

The plan is pure arithmetic. jax is imported with the names that compute, when one of
them is first used.
"""

from rampup import lazy_names

_HOMES = {
    "rampup.contrib.rl.config": (
        "RolloutConfig build_rollout_plan build_rollout_schedule load_rollout_config"
    ),
    "rampup.contrib.rl.experience": (
        "group_advantages loss_rows mini_batches padded_rows"
    ),
    "rampup.contrib.rl.generation": "Samples Sampling generate",
    "rampup.contrib.rl.policy": ("Policy as_policy grpo_loss split_policy"),
    "rampup.contrib.rl.rollout": "RolloutOptions RolloutState RolloutStep rollout_step",
    "rampup.contrib.rl.schedule": "RolloutSchedule",
    "rampup.contrib.rl.plan": "Experience RolloutPlan Size Training Updates",
    "rampup.contrib.rl.tasks": "Arithmetic",
    "rampup.contrib.rl.train": "load",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
