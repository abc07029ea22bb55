"""Metrics on their way out: TensorBoard and Weights & Biases, behind the interface that clu's metric writers have."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rampup.errors import MissingDependencyError, StorageError

TENSORBOARD_FOLDER = "tensorboard"
_NEEDED_BY = {"tensorboardX": ("enable_tensorboard", "tensorboard"), "wandb": ("wandb_project", "wandb")}


class MetricWriter(Protocol):
    """What a metric writer does; `clu.metric_writers` fit as they are."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step; may be called several times for one step."""

    def flush(self) -> None:
        """Write out what has been taken."""

    def close(self) -> None:
        """Write everything out; nothing follows."""


class TensorBoardWriter:
    """Writes event files for TensorBoard, in the thread that calls it: a full disk ends in an error and not in a dead thread.

    Args:
        folder: where; a resumed run adds a file.
        start: the run's first step; what an earlier process wrote of it and later steps is hidden by TensorBoard.

    Raises:
        MissingDependencyError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        required("tensorboardX")
        self._folder, self._start, self._number = folder, start, itertools.count()
        self._file: Any = None
        self._problem: OSError | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step; what a full disk refuses is left out, and told by `flush`."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            self._open().write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Write out what has been taken.

        Raises:
            StorageError: the disk took less than all since the last time.
        """
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)
        problem, self._problem = self._problem, None
        if problem is not None:
            raise StorageError(f"{self._folder} cannot be written: {problem.strerror or problem}") from problem

    def close(self) -> None:
        """Write everything out."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> Any:
        """Return the event file, a new one after a write that may have torn the last."""
        if self._file is None:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

            self._folder.mkdir(parents=True, exist_ok=True)
            number = next(self._number)
            self._file = EventsWriter(str(self._folder / "events"), f".{os.getpid()}.{self._start}.{number}")
            if number == 0 and self._start:
                log = SessionLog(status=SessionLog.START)
                self._file.write_event(Event(wall_time=time.time(), step=self._start, session_log=log))
        return self._file

    def _give_up(self, error: OSError) -> None:
        self._problem = error
        self.close()


class WandbWriter:
    """Logs to Weights & Biases, under the run's own step numbers.

    A resumed run goes on as the same one, known by its name. Steps that it does again are logged again with equal values.

    Args:
        folder: the run's folder, whose name is the run's name there and in which W&B keeps its files.
        project: the project.
        config: key -> value, shown with the run.

    Raises:
        MissingDependencyError: wandb is not installed.
    """

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        self._run = required("wandb").init(
            project=project, name=folder.name, id=folder.name, resume="allow", dir=str(folder), config=dict(config)
        )
        # Its own counter refuses to go back, which a run does that was killed after its last checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        self._run.log({**scalars, "step": step})

    def flush(self) -> None:
        """Nothing waits here: wandb sends in the background."""

    def close(self) -> None:
        """Send everything and end the run."""
        self._run.finish()


def required(package: str) -> Any:
    """Import `tensorboardX` or `wandb`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    key, extra = _NEEDED_BY[package]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{key} needs {package}: pip install 'rampup[{extra}]'", key=key) from error


def write_numbers(writers: Sequence[MetricWriter], record: Mapping[str, Any]) -> None:
    """Give the numbers of a line of metrics.jsonl or eval.jsonl to writers, under their names there.

    Example:
        >>> class Printer:
        ...     def write_scalars(self, step, scalars):
        ...         print(step, scalars)
        >>> write_numbers([Printer()], {"step": 3, "loss": None, "phase": 1, "skipped": True})
        3 {'phase': 1.0, 'skipped': 1.0}
    """
    scalars = {name: float(value) for name, value in record.items() if name != "step" and isinstance(value, (int, float))}
    for writer in writers:
        writer.write_scalars(record["step"], scalars)
