"""What a loop is made of: the plan and the step that it needs, and the components that have state of their own."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from rampup.batch_size.auto import AutoSchedule
from rampup.batch_size.noise_scale import NoiseScale
from rampup.engine.processes import broadcast_from_process0
from rampup.errors import ResumeMismatchError
from rampup.loop.events import BatchSizeDecided, OnEvent
from rampup.plan.numbers import finite_or_none

# Entries of a checkpoint's record: the steps at which microbatch shapes changed, which a resumed run repeats; the averages of
# the gradient noise; and the schedule that `auto_schedule: advise` would have used so far.
SHAPE_CHANGES = "shape_changes"
GRADIENT_NOISE = "gradient_noise"
ADVISED_ROWS = "advised_rows"


class LoopRamp(Protocol):
    """The part of a ramp that a loop reads: of a `BatchRamp`, or of another schedule of samples."""

    @property
    def fingerprint(self) -> str:
        """A digest of the sizes."""

    @property
    def ramp_steps(self) -> int:
        """Steps before the last phase."""

    def samples_before(self, step: int) -> int:
        """Return the samples of the steps before one."""

    def to_rows(self) -> list[list[Any]]:
        """Return the ramp as a table, a list of JSON values for each phase."""

    def differences(self, rows: list[list[Any]]) -> str:
        """Return how the `to_rows` of a checkpoint differ, as lines of an error message; "" if they cannot be shown."""


class LoopPlan(Protocol):
    """The part of a `RampPlan` that a loop reads, or of another plan of optimizer steps such as that of rollouts."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    @property
    def ramp(self) -> LoopRamp:
        """The samples of each step."""


class LoopStep(Protocol):
    """The part of a `TrainStep` that a loop calls, or of another step from state and batch to the next state and metrics."""

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that the calls have waited for compilations."""

    @property
    def shape_changes(self) -> Mapping[int, int]:
        """Microbatch size -> the step from which it is used. By default the shape never changes."""
        return {}

    def replay_shape_changes(self, changes: Mapping[int, int]) -> None:
        """Change shapes at the steps at which an earlier part of the run did, so that a resume repeats them."""

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run one optimizer step; return the state and the metrics.

        Of these the loop knows `loss`, and if they are there `grad_norm`, `skipped`, `aux` (sums), `weight` (what the means of
        sums are divided by), `gradient_noise` and `facts` (numbers of the host, for the line of the step).
        """

    def close(self) -> None:
        """Cancel compilations that have not started. The step may be called again."""


class Component:
    """A part of a run with state of its own. By default it has none and does nothing.

    All processes have the same components and call them alike, so that their states stay equal.
    """

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's record, as JSON values."""
        return {}

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's record."""

    def after_step(self, line: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Process the metrics of one finished step; return what to add to its line. Called once per step, in order.

        `line` is the line so far, with what the components before this one have added. `values` are the metrics of the step on
        the host.
        """
        return {}

    def may_change_plan(self, done: int) -> bool:  # noqa: ARG002
        """Return whether `next_plan` is to be asked after `done` steps, when the lines of all of them are written."""
        return False

    def next_plan(self, plan: Any) -> Any:
        """Return the plan from here on: `plan` itself if it stays. It is what the loop was given, such as a `RampPlan`."""
        return plan


@dataclass(frozen=True, slots=True)
class ShapeChanges(Component):
    """The steps at which the microbatch shapes of a training step changed, in a run's folder."""

    step: LoopStep
    folder: Path

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return {SHAPE_CHANGES: self.step.shape_changes}

    def load(self, record: Mapping[str, Any]) -> None:
        """See `Component`."""
        changes = record.get(SHAPE_CHANGES, {})
        try:
            found = {int(size): operator.index(step) for size, step in changes.items()}
        except (AttributeError, TypeError, ValueError):
            found = {-1: -1}
        if any(size < 1 or step < 0 for size, step in found.items()):
            raise ResumeMismatchError(
                f"the checkpoint of step {record['step']} in {self.folder} has no readable {SHAPE_CHANGES}: {changes!r:.100}; "
                "delete it to resume from the one before",
                key=SHAPE_CHANGES,
            )
        self.step.replay_shape_changes(found)


class NoiseAverages(Component):
    """The noise scale of a run whose step measures it, in the Euclidean geometry and, if it is measured, in that of Adam."""

    def __init__(self, half_life_samples: float) -> None:
        self.half_life_samples = half_life_samples
        self.scales: dict[str, NoiseScale] = {"": NoiseScale(half_life_samples=half_life_samples)}

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return {GRADIENT_NOISE: {prefix: scale.state for prefix, scale in self.scales.items()}}

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from the averages in a checkpoint, with the half-life of this run."""
        own = {"half_life_samples": self.half_life_samples}
        found = record.get(GRADIENT_NOISE) or {}
        self.scales |= {prefix: NoiseScale.from_state({**values, **own}) for prefix, values in found.items()}

    def after_step(self, line: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the `gradient_noise` of a step. A skipped step stays out of the averages."""
        noise = values.get("gradient_noise", {})
        found = dict[str, Any]()
        for prefix in [prefix for prefix in ("", "adam_") if f"{prefix}trace" in noise]:
            trace = float(noise[f"{prefix}trace"])
            squared_norm = float(noise[f"{prefix}squared_norm"])
            scale = self.scales.setdefault(prefix, NoiseScale(half_life_samples=self.half_life_samples))
            if not values.get("skipped", False):
                # Before its first step, Adam has no second moments: both are 0 in its geometry, and say nothing.
                counted = 0.0 if prefix and trace == squared_norm == 0 else float(values["weight"])
                scale.update(samples=line["global_batch_size"], weight=counted, trace=trace, squared_norm=squared_norm)
            found |= {f"{prefix}gradient_noise_trace": finite_or_none(trace)}
            found |= {f"{prefix}gradient_squared_norm": finite_or_none(squared_norm), **scale.metrics(prefix)}
        return found


@dataclass(frozen=True, slots=True)
class AutoBatch(Component):
    """Decides the batch size for `batch_size_schedule: auto`. `noise` must precede it in `Loop.components`.

    `schedule` has the decisions so far. With `follow` they are in the plan with which a run resumes, so only those of `advise`
    are loaded from the record.
    """

    schedule: AutoSchedule
    noise: NoiseAverages
    on_event: OnEvent

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return {ADVISED_ROWS: self.schedule.rows}

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from the advice in a checkpoint."""
        if self.schedule.mode == "advise" and record.get(ADVISED_ROWS):
            self.schedule.rows = [list(map(int, row)) for row in record[ADVISED_ROWS]]

    def after_step(self, line: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Decide about the batch, every tenth step. The decision is in the step's line before it is used."""
        auto = self.schedule
        step = line["step"] + 1
        sample = line["consumed_samples"]
        if not auto.is_due(step):
            return {}
        before, noise = auto.size, self.noise.scales[""].in_samples
        auto.decide(step=step, sample=sample, noise_scale=noise.low)
        if jax.process_count() > 1:
            # All compute the same averages; process 0 decides, in case rounding differs.
            auto.rows = json.loads(broadcast_from_process0(f"auto_schedule{step}", json.dumps(auto.rows)))
        outlook = auto.outlook(step=step, sample=sample, noise=noise)
        self.on_event(BatchSizeDecided(step=step - 1, changed=auto.size != before, outlook=outlook))
        return {"next_global_batch_size" if auto.mode == "follow" else "advised_global_batch_size": auto.size}

    def may_change_plan(self, done: int) -> bool:
        """See `Component`."""
        return self.schedule.is_due(done)

    def next_plan(self, plan: Any) -> Any:
        """See `Component`."""
        follows = self.schedule.mode == "follow" and self.schedule.size != plan.ramp.sizes[-1]
        return plan.grown(self.schedule.ramp) if follows else plan
