"""Runs of rollouts killed anywhere: parameters, samples and metrics end up as if nothing had happened."""

import time

import pytest
from faults import victim
from faults.test_kills import Campaign
from helpers import processes
from helpers.runs import assert_same_run
from helpers.tiny import RL_TINY

SETTINGS = RL_TINY | {
    "num_generations": 4,
    "enable_critic": True,
    "checkpoint_period": 3,
    "max_num_checkpoints_to_keep": 2,
    "async_checkpointing": True,
    "eval_interval": 16,
}


def run(settings):
    """Train slowly enough to be killed anywhere; return 0 when finished, 130 when stopped by a signal."""
    victim.use_cpus(1)
    from rampup.loop.events import StepDone
    from rampup.rl.config import RolloutConfig
    from rampup.rl.tasks import Arithmetic
    from rampup.rl.train import train

    # One response of a new model in eight is right, so that most groups have no spread and some have.
    Arithmetic.reward = lambda task, prompts, responses: [float(sum(map(ord, text)) % 8 == 0) for text in responses]

    def pause(event):
        if isinstance(event, StepDone):
            time.sleep(0.02)

    return 130 if train(RolloutConfig(**SETTINGS | settings), pause).interrupted else 0


class RolloutCampaign(Campaign):
    """The same for runs of rollouts, which are seen training by their metrics."""

    seen_in = "metrics.jsonl"

    def start(self, name):
        """Start a run, or go on with it."""
        return processes.start(run, self.common | {"run_name": name}, log=self.base / name / victim.LOG_FILE)

    def check(self, name):
        """Assert that a finished run is the one that was never killed, bit for bit."""
        assert_same_run(self.base / name, self.base / "whole", self.steps)


TOKENS = {"token_batch_size": 64, "mini_batch_size": -1, "max_prompt_length": 4, "max_response_length": 3}
SIZES = [{"zero_spread_groups": "refill"}, {"zero_spread_groups": "drop"}, TOKENS | {"partial_step": "carry"}]
ALL_SIZES = [{}, *SIZES, {"zero_spread_groups": "drop", "partial_step": "carry"}]


@pytest.mark.parametrize(
    ("kills", "rollouts", "sizes"),
    [
        *(pytest.param(2, 2, sizes, marks=pytest.mark.slow) for sizes in SIZES),
        *(pytest.param(30, 12, sizes, marks=pytest.mark.faults) for sizes in ALL_SIZES),
    ],
    ids=str,
)
def test_a_killed_run_of_rollouts_is_the_uninterrupted_one(kills, rollouts, sizes, tmp_path):
    """At random moments, also while it refills, between the updates of critic and policy and in checkpoint writes."""
    # Two passes over two mini batches or one, of the critic and of the policy.
    steps = rollouts * (4 if sizes.get("mini_batch_size") == -1 else 8)
    # A pause that reaches over a random number of the next eight updates.
    campaign = RolloutCampaign(tmp_path, steps=steps, pause=0.05, seed=0)
    campaign.common = {"base_output_directory": str(tmp_path), "num_batches": rollouts, **sizes}
    campaign.finish("whole")
    campaign.strike_until(kills, ["SIGKILL"] * 4 + ["SIGTERM", "SIGINT"])
