"""The metrics of a run: fetched late, written once, told to whoever listens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.plan.plan import PlanPosition
from rampup.run.distributed import is_first
from rampup.run.run_folder import StepLog
from rampup.run.skipped import SkippedSteps
from rampup.run.utilisation import utilisation
from rampup.run.writers import MetricWriter, write_numbers

METRICS_FILE, EVAL_FILE = "metrics.jsonl", "eval.jsonl"
IN_FLIGHT = 2
Progress = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorder:
    """Makes the record of a step, in the names of metrics.jsonl.

    Attributes:
        learning_rate: from a step number to its learning rate.
        tokens_per_sample: for tokens per second.
        flops_per_sample: of the model, forward and backward; None leaves its FLOP/s out.
    """

    learning_rate: Callable[[int], float]
    tokens_per_sample: int
    flops_per_sample: float | None = None

    def record(
        self, position: PlanPosition, values: Mapping[str, Any], seconds: float, compile_seconds: float
    ) -> dict[str, Any]:
        """Return a step's record.

        Args:
            position: where the step stands in the plan.
            values: what the training step returned, on the host.
            seconds: since the step before.
            compile_seconds: how much of that a compilation took.
        """
        size = position.split.global_batch_size
        found = {
            "step": position.step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
            "global_batch_size": size,
            "loss": _finite(values["loss"]),
            "learning_rate": self.learning_rate(position.step),
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(size * self.tokens_per_sample / seconds, 3),
            "microbatch_size": position.split.microbatch_size,
        }
        if "grad_norm" in values:
            found["grad_norm"] = _finite(values["grad_norm"])
        if self.flops_per_sample is not None:
            flops = size * self.flops_per_sample / seconds / jax.device_count()
            found |= utilisation(flops, jax.devices()[0].device_kind)
        if compile_seconds:
            found["compile_seconds"] = round(compile_seconds, 6)
        if values.get("skipped", False):
            found["skipped"] = True
        return found


class Metrics:
    """Fetches each step's metrics two steps later, so that the devices never wait for the host.

    Args:
        folder: the run's folder.
        start: its first step here; lines of it and later are replaced.
        recorder: makes the records.
        skipped: counts the steps that were left out.
        writers: get every number besides the files.
        progress: told `phase` and `step`.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        *,
        recorder: StepRecorder,
        skipped: SkippedSteps,
        writers: Sequence[MetricWriter],
        progress: Progress,
    ) -> None:
        self._recorder, self._skipped, self._progress = recorder, skipped, progress
        self._writers = writers
        self._waiting: deque[tuple[PlanPosition, Any, float]] = deque()
        self._log = StepLog(folder / METRICS_FILE, keep_below=start, writes=is_first())
        self._eval_log = StepLog(folder / EVAL_FILE, keep_below=start, writes=is_first())
        self._phase: int | None = None
        self._tokens, self._seconds, self._first = 0, 0.0, start
        self.restart_clock()

    @property
    def tokens_per_second(self) -> float | None:
        """Of this process so far, without its first step; None before its second."""
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Do not count the time until now for the next step."""
        self._last = time.perf_counter()

    def push(self, position: PlanPosition, values: Any, compile_seconds: float) -> None:
        """Take the metrics of a step that may not be done yet."""
        self._waiting.append((position, values, compile_seconds))
        if len(self._waiting) > IN_FLIGHT:
            self._write()

    def write_eval(self, values: Mapping[str, Any]) -> None:
        """Write the line of an evaluation."""
        self._eval_log.write(values)
        write_numbers(self._writers, values)

    def flush(self) -> None:
        """Return when all metrics are on the disk.

        Raises:
            StorageError: the disk takes no more; the lines stay in memory.
            NonFiniteError: too many steps in a row were skipped.
        """
        while self._waiting:
            self._write()
        self._log.sync()
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the files and the writers."""
        self._log.close()
        self._eval_log.close()
        for writer in self._writers:
            writer.close()

    def _write(self) -> None:
        position, values, compile_seconds = self._waiting.popleft()
        values = jax.device_get({name: values[name] for name in ("loss", "grad_norm", "skipped") if name in values})
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        record = self._recorder.record(position, values, seconds, compile_seconds)
        self._log.write(record)
        write_numbers(self._writers, record)
        if position.step > self._first:
            self._tokens += position.split.global_batch_size * self._recorder.tokens_per_sample
            self._seconds += seconds
        if position.phase.index != self._phase:
            self._phase = position.phase.index
            self._progress("phase", record)
        self._progress("step", record)
        self._skipped.count(record)


def _finite(value: Any) -> float | None:
    """JSON has no NaN and no infinity; null stands for them."""
    number = float(value)
    return number if math.isfinite(number) else None
