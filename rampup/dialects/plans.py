"""Our plan of another system's step of reinforcement learning, where ours can express it."""

from __future__ import annotations

from dataclasses import dataclass

from rampup.errors import RampupError
from rampup.rl.plan import RolloutPlan
from rampup.rl.sizes import Size, Unit
from rampup.rl.updates import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One model's sizes.

    Attributes:
        mini_batch: what an optimizer step sees, whole job, in the unit of the step.
        micro: samples of a pass and replica; None = by tokens.
        tokens: token budget of a pass and replica; None = by samples.
        data_parallel_size: replicas.
        num_epochs: passes over a step's samples.
    """

    mini_batch: int
    micro: int | None
    tokens: int | None = None
    data_parallel_size: int
    num_epochs: int

    def training(self, unit: Unit) -> Training:
        """Return the same in the plan's words."""
        size = None
        if self.tokens is not None:
            size = Size(count=self.tokens, unit="tokens", scope="replica")
        elif self.micro is not None:
            size = Size(count=self.micro, unit="samples", scope="replica")
        return Training(
            mini_batch=Size(count=self.mini_batch, unit=unit),
            microbatch=size,
            data_parallel_size=self.data_parallel_size,
            num_epochs=self.num_epochs,
        )


def rollout_plan(
    count: int, unit: Unit, *, samples_per_prompt: int, policy: Trained, critic: Trained | None = None, pad: bool = False
) -> RolloutPlan | None:
    """Return the plan of a step of `count` prompts or samples; None where our rules refuse what the system takes.

    Example:
        >>> sizes = Trained(mini_batch=64, micro=4, data_parallel_size=8, num_epochs=1)
        >>> rollout_plan(256, "prompts", samples_per_prompt=4, policy=sizes).policy_updates.accumulation_steps
        8
    """
    try:
        return RolloutPlan(
            rollout_batch=Size(count=count, unit=unit),
            samples_per_prompt=samples_per_prompt,
            policy=policy.training(unit),
            critic=None if critic is None else critic.training(unit),
            pad=pad,
        )
    except RampupError:
        return None
