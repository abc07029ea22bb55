"""Tests of rampup.contrib.rl.commands: a rollout on the command line."""

import math

from rampup.contrib.rl.commands import curves


def test_share_of_dropped_prompts_is_of_those_that_a_rollout_has_read():
    """In every line of the rollout; without dropped prompts there is no such curve."""
    line = {
        "step": 0,
        "loss": 1.0,
        "reward": 1.0,
        "global_batch_size": 4,
        "phase": 0,
        "consumed_samples": 8,
    }
    lines = [
        line
        | {
            "rollout": rollout,
            "dropped_groups": dropped,
            "consumed_prompts": consumed,
        }
        for rollout, dropped, consumed in ((0, 2, 4), (0, 2, 4), (1, 6, 12), (2, 0, 12))
    ]
    shares = curves(lines)["Share of dropped prompts"]
    assert shares[:3] == (0.5, 0.5, 0.75)
    assert math.isnan(shares[3])
    assert curves([line | {"dropped_groups": 0}]) == {}
