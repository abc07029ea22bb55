"""configs/rl.yml, written from the schema; `python -m rampup.rl.template > configs/rl.yml` writes it anew."""

from __future__ import annotations

from typing import Any

from rampup.config.template import MODELINE, yaml_text
from rampup.rl.config import ROLLOUT_KEYS, RolloutConfig

SCHEMA_FILE = "rl.schema.json"
_HEAD = f"""\
{MODELINE.format(SCHEMA_FILE)}
# A step of reinforcement learning, for `rampup plan configs/rl.yml`: every key, its meaning and its value.
# Names and meanings are MaxText RL's where it has the key; where its own default is another, the comment gives it.
# A size in prompts counts prompts of the whole job; each stands for rl.num_generations samples.
"""
# The schema cuts nothing, so that a file of a few keys does not get a cut by surprise; this file shows one.
_OVERRIDES: dict[str, Any] = {"mini_batch_size": 16, "train_micro_batch_size": 8}


def rollout_yaml() -> str:
    """Return the text of configs/rl.yml.

    Example:
        >>> "num_generations: 8" in rollout_yaml()
        True
    """
    return yaml_text(_HEAD, ROLLOUT_KEYS, rollout_values())


def rollout_values() -> dict[str, Any]:
    """Return the keys and values of configs/rl.yml."""
    return RolloutConfig(**_OVERRIDES).to_dict()


if __name__ == "__main__":
    print(rollout_yaml(), end="")
