"""Metric writers for TensorBoard and Weights & Biases, with the interface of clu's metric writers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rampup.errors import MissingDependencyError, StorageError
from rampup.loop.run_folder import is_bucket

TENSORBOARD_FOLDER = "tensorboard"
_NEEDED_BY = {"tensorboardX": ("enable_tensorboard", "tensorboard"), "wandb": ("wandb_project", "wandb")}


class MetricWriter(Protocol):
    """The interface of a metric writer, which `clu.metric_writers` implement."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step. May be called several times for one step."""

    def flush(self) -> None:
        """Write everything that was taken."""

    def close(self) -> None:
        """Write everything and close; no call follows."""


class TensorBoardWriter:
    """Writes event files for TensorBoard in the calling thread; in a bucket, `flush` and `close` upload them.

    `tensorboardX.SummaryWriter` writes in a thread of its own. A full disk ends that thread without an error, and
    `add_scalar` blocks forever once its queue is full. Here a full disk is an error of `flush`.

    A resumed run adds a file. TensorBoard then hides what earlier processes wrote for its first step, `start`, and later ones.
    """

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        required("tensorboardX")
        self._folder = folder
        self._start = start
        self._number = itertools.count()
        self._local = Path(tempfile.mkdtemp(prefix="rampup-tensorboard-")) if is_bucket(folder) else folder
        self._file: Any = None
        self._problem: OSError | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step. Numbers that a full disk refuses are lost, and `flush` raises an error."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._attempt(lambda: self._write(step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write everything that was taken.

        Raises:
            StorageError: numbers were lost since the last call.
        """
        if self._file is not None:
            self._attempt(self._upload)
        # Reported once. The numbers that follow go into a new file and may succeed.
        problem, self._problem = self._problem, None
        if problem is not None:
            raise StorageError(f"{self._folder} cannot be written: {problem.strerror or problem}") from problem

    def close(self) -> None:
        """Write everything and close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._upload()
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _write(self, step: int, **content: Any) -> None:
        """Write an event into the file, a new one after a write that may have left the last one incomplete."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if self._file is None:
            self._local.mkdir(parents=True, exist_ok=True)
            # A file is never continued: the process before may have died in the middle of a record.
            number = next(self._number)
            self._file = EventsWriter(str(self._local / "events"), f".{os.getpid()}.{self._start}.{number}")
            # This event makes TensorBoard hide the earlier values of this step and later ones.
            if number == 0 and self._start:
                self._write(self._start, session_log=SessionLog(status=SessionLog.START))
        self._file.write_event(Event(wall_time=time.time(), step=step, **content))

    def _upload(self) -> None:
        self._file.flush()
        if self._local != self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in self._local.iterdir():
                (self._folder / file.name).write_bytes(file.read_bytes())

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._problem = error
            self.close()


class WandbWriter:
    """Logs to Weights & Biases, under the run's own step numbers.

    A resumed run continues the W&B run with the same name, that of the run's folder. Steps that it repeats are logged again,
    with equal values. W&B keeps its files in the folder, unless it is in a bucket. `config` is shown with the run.
    """

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        # `id` and not only `name`: W&B continues a run by its id.
        local = tempfile.mkdtemp(prefix="rampup-wandb-") if is_bucket(folder) else str(folder)
        self._run = required("wandb").init(
            project=project, name=folder.name, id=folder.name, resume="allow", dir=local, config=dict(config)
        )
        # W&B's own step counter refuses to go back, as a run does that was killed after its last checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        self._run.log({**scalars, "step": step})

    def flush(self) -> None:
        """Do nothing: wandb sends in the background."""

    def close(self) -> None:
        """Send everything and finish the run."""
        self._run.finish()


def required(package: str) -> Any:
    """Import `tensorboardX` or `wandb`, or raise MissingDependencyError."""
    key, extra = _NEEDED_BY[package]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{key} needs {package}: pip install 'rampup[{extra}]'", key=key) from error


def write_numbers(writers: Sequence[MetricWriter], record: Mapping[str, Any]) -> None:
    """Pass the numbers of a line of metrics.jsonl or eval.jsonl to writers, under the same names."""
    scalars = {name: float(value) for name, value in record.items() if name != "step" and isinstance(value, (int, float))}
    for writer in writers:
        writer.write_scalars(record["step"], scalars)
