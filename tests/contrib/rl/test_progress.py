"""Tests of rampup.contrib.rl.progress: the events of a run of reinforcement learning."""

import io

import pytest
from rich.console import Console

from rampup.contrib.rl.config import RolloutConfig, build_rollout_schedule
from rampup.contrib.rl.progress import RolloutProgress
from rampup.loop import events


def shown(*given):
    """Return what is printed about events."""
    console = Console(file=io.StringIO(), width=300)
    progress = RolloutProgress(console)
    for event in given:
        progress(event)
    return console.file.getvalue()


def test_a_line_has_the_rollout_and_its_reward(tmp_path):
    """A step names its rollout before the batch and the mean reward at the end; a
    finished run says which key trains longer.
    """
    plan = build_rollout_schedule(RolloutConfig(), 1)
    metrics = {
        "step": 0,
        "consumed_samples": 256,
        "phase": 0,
        "global_batch_size": 256,
        "loss": 5.0,
        "tokens_per_second": 9.0,
        "rollout": 3,
        "reward": 0.25,
    }
    text = shown(
        events.RunStarted(step=plan.total_steps, folder=tmp_path, plan=plan),
        events.StepDone(step=0, metrics=metrics),
    )
    assert "a larger num_batches trains longer" in text
    assert ", rollout 3, batch 256, loss 5.000, 9 tokens/s, reward 0.250" in text


@pytest.mark.parametrize(
    ("step", "accuracy", "hints"), [(-1, 0.0, True), (-1, 0.2, False), (7, 0.0, False)]
)
def test_a_policy_that_is_never_right_is_explained(step, accuracy, hints):
    """Before the first step, a line says why nothing will be learned."""
    text = shown(
        events.Evaluated(
            step=step, metrics={"accuracy": accuracy, "greedy_accuracy": 0.5}
        )
    )
    assert f"{accuracy:.1%} of the answers are right, 50.0% of the greedy ones" in text
    assert ("warm_start_steps" in text) == hints
