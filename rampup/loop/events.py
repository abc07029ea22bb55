"""The events that a run reports while it trains: one small class each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, dataclass_transform

# Whether Ctrl-C asks a run to stop, as SIGTERM does; so says the command line.
ctrl_c_stops: ContextVar[bool] = ContextVar("ctrl_c_stops", default=False)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """Something that a run reports. Its subclasses are frozen dataclasses with keyword
    arguments.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class RunPlanned(Event):
    """The run is planned and built, and nothing is trained yet."""

    plan: Any  #: the `RampPlan`, or another plan of the loop
    folder: Path  #: the run's folder
    devices: Sequence[Any]  #: the devices of all processes
    num_parameters: int  #: parameters of the model
    notes: Sequence[str] = ()  #: sentences about the plan, as `rampup plan` prints them


class RunStarted(Event):
    """The state is restored or new, and step `step` of the plan is next."""

    step: int
    folder: Path
    plan: Any
    tokens_per_sample: int | None = None  #: 1 if throughput is in samples per second


class LearningRateChanged(Event):
    """A run of a configuration resumes with other keys of its learning rate."""

    step: int  #: the last step before the checkpoint
    keys: tuple[str, ...]  #: those that have changed, each with both values


class PhaseStarted(Event):
    """Step `step` is the first of this launch in a phase of the ramp."""

    step: int
    phase: int


class BatchSizeChanged(Event):
    """With `batch_size_schedule: auto`, the batch changes from step `step` on; `plan`
    has the new size as its last phase.
    """

    step: int
    plan: Any


class BatchSizeDecided(Event):
    """With `batch_size_schedule: auto`, a decision after step `step`, which comes every
    tenth step.
    """

    step: int  #: the step
    changed: bool  #: whether the batch changes
    #: the size with the reason for it, or with what the next larger one needs
    outlook: str


class StepDone(Event):
    """A step's metrics are written; `metrics` is its line of metrics.jsonl."""

    step: int
    metrics: Mapping[str, Any]


class StepSkipped(Event):
    """A step was skipped because its loss or gradient was not finite, the `in_a_row`-th
    in a row.
    """

    step: int
    in_a_row: int


class Evaluated(Event):
    """An evaluation after step `step`; `metrics` is its line of eval.jsonl."""

    step: int
    metrics: Mapping[str, Any]


class CheckpointSaved(Event):
    """The state after `steps` steps was copied for a checkpoint, which may still be
    written in the background.
    """

    steps: int


class CheckpointDamaged(Event):
    """A damaged checkpoint was moved aside, and an older one is used."""

    steps: int  #: optimizer steps of the damaged checkpoint
    problem: str  #: how it is damaged
    moved_to: Path  #: where it is now
    used: int  #: optimizer steps of the checkpoint that is used instead


class StorageFailed(Event):
    """A checkpoint or metrics could not be written, or lines of the metrics are damaged
    or missing, and the run continues.
    """

    problem: str


class RunStopped(Event):
    """The run ended after `steps` steps, early if `interrupted`; `is_saved` if a
    checkpoint has its last state.
    """

    steps: int
    interrupted: bool
    folder: Path
    is_saved: bool


class RunStopping(Event):
    """The run is stopping, in all processes: the steps before step `step` end, and none
    begins from there on.
    """

    step: int


OnEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Do nothing: the default listener."""
