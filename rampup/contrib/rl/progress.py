"""The progress of a run of reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rampup.contrib.rl.tables import print_rollout
from rampup.loop import events
from rampup.show.progress import TrainProgress


class RolloutProgress(TrainProgress):
    """Shows the events of a run of reinforcement learning, as `TrainProgress` does those
    of another: with rollouts and rewards, and evaluations as right answers.
    """

    def show_plan(self, plan: Any, notes: Sequence[str]) -> None:
        """Print the schedule of rollouts of a run that begins."""
        print_rollout(plan, self._console, notes=notes)

    def length_key(self) -> str:
        """Return the key that makes a run longer."""
        return "num_batches"

    def describe_step(self, metrics: Mapping[str, Any]) -> str:
        """Return the line about a step that is done, with its rollout and its reward."""
        step, rest = super().describe_step(metrics).split(", ", 1)
        rollout, reward = metrics["rollout"], metrics["reward"]
        return f"{step}, rollout {rollout:,}, {rest}, reward {reward:.3f}"

    def describe_result(self, event: events.Evaluated) -> str:
        """Return the share of right answers that an evaluation has found."""
        accuracy, greedy = event.metrics["accuracy"], event.metrics["greedy_accuracy"]
        found = (
            f"{accuracy:.1%} of the answers are right, {greedy:.1%} of the greedy ones"
        )
        if event.step < 0 and accuracy == 0:
            found += (
                "; what is never right has no reward to learn from: a larger"
                " warm_start_steps helps"
            )
        return found
