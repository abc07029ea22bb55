"""Which steps of a plan are run."""

from __future__ import annotations

import operator
from typing import Any

from rampup.errors import DataError, a_type
from rampup.plan.numbers import check_whole_or_none
from rampup.plan.plan import RampPlan


def steps_of(plan: RampPlan, start: Any, stop: int | None = None) -> range:
    """Return the steps from `start`, such as `state.step`, up to `stop`, by default to
    the end of the plan, or refuse steps that it does not have.
    """
    if not hasattr(start, "__index__"):
        raise DataError(
            f"start is {a_type(start)} and not the number of a step",
            fix="give start=step, such as start=int(state.step)",
        )
    check_whole_or_none(stop=stop)
    total = plan.total_steps
    steps = range(operator.index(start), total if stop is None else stop)
    if steps.start < 0 or max(steps.start, steps.stop) > total:
        raise DataError(
            f"steps {steps.start} to {steps.stop} were requested, but the plan has the"
            f" steps 0 to {total}"
        )
    return steps
