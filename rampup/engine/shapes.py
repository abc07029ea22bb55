"""In which microbatch shape every step runs: the planned one, or while its program is
being compiled that of an earlier phase.
"""

from __future__ import annotations

from collections.abc import Callable

from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit


class ShapeClock:
    """The microbatch shapes of a plan's steps, each decided once.

    Attributes:
        waits: every step has its planned shape.
        changes: the first step of every microbatch size.
    """

    def __init__(
        self, plan: RampPlan, is_ready: Callable[[BatchSplit], bool], *, waits: bool
    ) -> None:
        self._plan = plan
        self._is_ready = is_ready
        self.waits = waits
        self.changes: dict[int, int] = {}

    @property
    def keeps_planned(self) -> bool:
        """Whether every batch is split as planned."""
        return self.waits or self._plan.num_compiled_shapes == 1

    def split_for(self, position: PlanPosition) -> BatchSplit:
        """Return how to split the batch of a position now.

        At a step, a microbatch size is `new`, `used`, or, in a run that is replayed,
        `later` if a later step changes to it. A fallback is a size in use: another one
        would have to be compiled as well.

        ============  ==========  =============  =====================================
        planned size  a fallback  program ready  split
        ============  ==========  =============  =====================================
        used          any         any            the planned one
        later         there is    any            the fallback
        new           there is    no             the fallback
        new           there is    yes            the planned one, `used` from now on
        new or later  none        any            the planned one, `used` from now on
        ============  ==========  =============  =====================================
        """
        planned, step = position.split, position.step
        if self.keeps_planned:
            return planned

        def is_used(split: BatchSplit) -> bool:
            return self.changes.get(split.microbatch_size, step + 1) <= step

        if is_used(planned):
            return planned
        fallbacks = self._plan.fallbacks(position.phase.index)
        fallback = next(filter(is_used, fallbacks), None)
        is_later = planned.microbatch_size in self.changes
        if fallback is not None and (is_later or not self._is_ready(planned)):
            return fallback
        self.changes[planned.microbatch_size] = step
        return planned
