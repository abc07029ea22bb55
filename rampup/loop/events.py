"""The events that a run reports while it trains: one small class each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned:
    """The run is planned and built, and nothing is trained yet.

    Attributes:
        plan: the `RampPlan`, or another plan of the loop.
        folder: the run's folder.
        devices: the devices of all processes.
        num_parameters: parameters of the model.
    """

    plan: Any
    folder: Path
    devices: Sequence[Any]
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The state is restored or new, and step `step` of the plan is next."""

    step: int
    folder: Path
    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateChanged:
    """A run resumes with another learning-rate schedule than that of its checkpoint.

    Attributes:
        step: the last step before the checkpoint.
        before: the learning rate that it had.
        after: the learning rate that the schedule of this run has there; the steps from here on follow it.
        schedule_steps: the length of the schedule before, if it was another one.
        plan: the plan from here on.
    """

    step: int
    before: float
    after: float
    schedule_steps: int | None
    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted:
    """Step `step` is the first of this process in a phase of the ramp."""

    step: int
    phase: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeChanged:
    """With `batch_size_schedule: auto`, the batch changes from step `step` on; `plan` has the new size as its last phase."""

    step: int
    plan: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeDecided:
    """With `batch_size_schedule: auto`, a decision after step `step`, of which there is one every tenth step.

    Attributes:
        step: the step.
        changed: whether the batch changes, or the advised one.
        outlook: the size with the reason for it, or with what the next larger one needs.
    """

    step: int
    changed: bool
    outlook: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A step's metrics are written; `metrics` is its line of metrics.jsonl."""

    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped:
    """A step was skipped because its loss or gradient was not finite, the `in_a_row`-th in a row."""

    step: int
    in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation after step `step`; `metrics` is its line of eval.jsonl."""

    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint after `steps` steps has its data; it may still be written in the background."""

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A damaged checkpoint was moved aside, and an older one is used.

    Attributes:
        steps: optimizer steps of the damaged checkpoint.
        problem: how it is damaged.
        moved_to: where it is now.
        used: optimizer steps of the checkpoint that is used instead.
    """

    steps: int
    problem: str
    moved_to: Path
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFailed:
    """A checkpoint or metrics could not be written, or lines of the metrics were damaged, and the run continues."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The run ended after `steps` steps, early if `interrupted`; `is_saved` if a checkpoint has its last state."""

    steps: int
    interrupted: bool
    folder: Path
    is_saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Ctrl-C or SIGTERM: the run stops after the steps in flight. Reported at once, from a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopping:
    """After a `StopRequested`: the steps before step `step` end, and none begins from there on."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAborted:
    """A second Ctrl-C ended the run at once. Nothing was saved after `checkpoint` steps; None if there is no checkpoint."""

    folder: Path
    checkpoint: int | None


Event = (
    RunPlanned
    | RunStarted
    | LearningRateChanged
    | PhaseStarted
    | BatchSizeDecided
    | BatchSizeChanged
    | StepDone
    | StepSkipped
    | Evaluated
    | CheckpointSaved
    | CheckpointDamaged
    | StorageFailed
    | RunStopped
    | StopRequested
    | RunStopping
    | RunAborted
)
OnEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Do nothing: the default listener."""
