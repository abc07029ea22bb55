"""The batch of `batch_size_schedule: auto`, which a run decides while it trains."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rampup.engine.processes import broadcast_from_process0
from rampup.loop.components import Component, NoiseAverages
from rampup.loop.events import BatchSizeDecided, OnEvent
from rampup.loop.run_folder import Record
from rampup.plan.auto import AutoSchedule


@dataclass(frozen=True, slots=True)
class AutoBatch(Component):
    """Decides the batch size for `batch_size_schedule: auto`. `noise` must precede it
    in `Loop.components`.

    The decisions so far are in the plan with which a run resumes.
    """

    schedule: AutoSchedule
    noise: NoiseAverages
    on_event: OnEvent

    def after_step(
        self,
        line: Record,
        values: Record,  # noqa: ARG002
    ) -> Record:
        """Decide about the batch, every tenth step. The decision is in the step's line
        before it is used.
        """
        auto, step, sample = self.schedule, line["step"] + 1, line["consumed_samples"]
        if not auto.is_due(step):
            return {}
        noise, before = self.noise.scale.in_samples, auto.size
        auto.decide(step=step, sample=sample, noise_scale=noise.low)
        # All compute the same averages; process 0 decides, in case rounding differs.
        auto.rows = json.loads(
            broadcast_from_process0("auto_schedule", lambda: json.dumps(auto.rows))
        )
        self.on_event(
            BatchSizeDecided(
                step=line["step"],
                changed=auto.size != before,
                outlook=auto.outlook(step=step, sample=sample, noise=noise),
            )
        )
        return {"next_global_batch_size": auto.size}

    def may_change_plan(self, done: int) -> bool:
        """See `Component`."""
        return self.schedule.is_due(done)

    def next_plan(self, plan: Any) -> Any:
        """See `Component`."""
        has_grown = self.schedule.size != plan.ramp.sizes[-1]
        return plan.grown(self.schedule.ramp) if has_grown else plan
