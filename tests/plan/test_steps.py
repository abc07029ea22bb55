"""Tests of rampup.plan.steps."""

import numpy as np
import pytest

from rampup.errors import DataError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan
from rampup.plan.steps import steps_of

PLAN = RampPlan(
    ramp=BatchRamp.constant(4),
    splitter=BatchSplitter(data_parallel_size=1),
    num_devices=1,
    total_steps=12,
)


@pytest.mark.parametrize("start", [5, np.int32(5), np.array(5)])
def test_steps_go_from_the_start_to_the_end_of_the_plan(start):
    """Any integer is a start, and a run that is done has no steps left."""
    assert steps_of(PLAN, start) == range(5, 12)
    assert steps_of(PLAN, start, 7) == range(5, 7)
    assert not steps_of(PLAN, 12)


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (-1, None, "steps -1 to 12 .* the steps 0 to 12"),
        (99, None, "steps 99 to 12 .* the steps 0 to 12"),
        (0, 13, "steps 0 to 13 .* the steps 0 to 12"),
        (1.0, None, r"start is a float .* start=int\(state\.step\)"),
    ],
)
def test_steps_that_the_plan_does_not_have_are_refused(start, stop, words):
    """The error has both, and the steps of the plan."""
    with pytest.raises(DataError, match=words):
        steps_of(PLAN, start, stop)
