"""Metrics on their way out: TensorBoard and Weights & Biases, behind the interface that clu's metric writers have."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rampup.errors import MissingDependencyError

TENSORBOARD_FOLDER = "tensorboard"
_NEEDED_BY = {
    "tensorboardX": ("enable_tensorboard", "tensorboard"),
    "wandb": ("wandb_project", "wandb"),
}


class MetricWriter(Protocol):
    """What a metric writer does; `clu.metric_writers` fit as they are."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step; may be called several times for one step."""

    def flush(self) -> None:
        """Write out what has been taken."""

    def close(self) -> None:
        """Write everything out; nothing follows."""


class TensorBoardWriter:
    """Writes event files for TensorBoard.

    Args:
        folder: where; a resumed run adds a file.
        start: the run's first step; what an earlier process wrote of it and later steps is hidden by TensorBoard.

    Raises:
        MissingDependencyError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        self._writer = required("tensorboardX").SummaryWriter(
            str(folder), purge_step=start or None, filename_suffix=f".{start}"
        )

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write out what has been taken."""
        self._writer.flush()

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()


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
