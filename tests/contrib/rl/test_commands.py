"""Tests of rampup.contrib.rl.commands: a rollout on the command line."""

import math

from rampup.contrib.rl.commands import curves


def test_curves_are_those_that_some_line_has():
    """A number that a line lacks is NaN; one that all lack is no curve."""
    found = curves([{"reward_spread": 0.5}, {"reward_spread": None, "step": 1}])
    assert list(found) == ["Spread of rewards"]
    assert found["Spread of rewards"][0] == 0.5
    assert math.isnan(found["Spread of rewards"][1])
