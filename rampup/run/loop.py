"""The training loop: steps, metrics, evaluation, checkpoints and a clean stop."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from rampup.errors import DataError, NonFiniteError, ResumeMismatchError, StorageError
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.run.agreement import Agreement
from rampup.run.checkpoint import Checkpoints
from rampup.run.data import Batch
from rampup.run.processes import is_first
from rampup.run.run_folder import StepLog, read_lines
from rampup.run.step import TrainStep

METRICS_FILE, EVAL_FILE, CHECKPOINT_FOLDER = "metrics.jsonl", "eval.jsonl", "checkpoints"
IN_FLIGHT = 2
NAMED_ROWS, NAMED_FILES = 3, 10
Progress = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did, in the names of `rampup train --json`.

    Attributes:
        steps: optimizer steps done since the beginning.
        consumed_samples: samples consumed by them.
        first_loss: loss of step 0; None before it.
        final_loss: loss of the last step.
        num_compilations: executables built for the training step by this process.
        ramp_steps: steps before the last phase.
        tokens_per_second: of this process, without its first step; None if it did no other.
        checkpoint: folder of the newest checkpoint, or None.
        metrics: the metrics file.
        interrupted: whether a signal ended the run early.
        resumed_from: steps that an earlier process had done.
    """

    steps: int
    consumed_samples: int
    first_loss: float | None
    final_loss: float | None
    num_compilations: int
    ramp_steps: int
    tokens_per_second: float | None
    checkpoint: str | None
    metrics: str
    interrupted: bool
    resumed_from: int


@dataclass(kw_only=True)
class Loop:
    """A run in its folder.

    Attributes:
        plan: the plan.
        step: the training step.
        batches: from a step number to the batches from there on.
        learning_rate: from a step number to its learning rate, for the metrics.
        evaluate: from a state to its evaluation metrics, or None.
        folder: the run's folder.
        tokens_per_sample: for tokens per second.
        record: what a checkpoint must agree on with the run that resumes it; key -> value.
        remarks: what a checkpoint keeps besides, without any check.
        ramp_before: the ramp that the run's checkpoint was written with, if `plan` goes on with another one.
        eval_interval, checkpoint_period: in steps; None = never.
        keep_checkpoints, async_checkpoints: see `Checkpoints`.
        to_checkpoint, from_checkpoint: between the state in training and the state that checkpoints hold, where they differ.
        on_checkpoint_error: what a disk that takes no more means: `stop`, or `continue` with the checkpoints that are there.
        skip_nonfinite: the run stops when so many steps in a row were skipped (see `train_step`); 0 = never.
        rows_of: from a step number to its rows, for a person.
        progress: called with an event's name and its values: start, phase, step, eval, checkpoint, stop, and where something
            is wrong damaged_checkpoint, storage, skip.
    """

    plan: RampPlan
    step: TrainStep
    batches: Callable[[int], Iterator[Batch]]
    learning_rate: Callable[[int], float]
    folder: Path
    tokens_per_sample: int
    record: Mapping[str, Any]
    remarks: Mapping[str, Any] = field(default_factory=dict)
    ramp_before: BatchRamp | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    eval_interval: int | None = None
    checkpoint_period: int | None = None
    keep_checkpoints: int | None = None
    async_checkpoints: bool = True
    to_checkpoint: Callable[[Any], Any] = lambda state: state
    from_checkpoint: Callable[[Any], Any] = lambda state: state
    on_checkpoint_error: str = "stop"
    skip_nonfinite: int = 0
    rows_of: Callable[[int], Sequence[str]] = lambda step: ()
    progress: Progress = field(default=lambda event, values: None)

    def run(self, state: Any) -> Summary:
        """Train from the newest checkpoint, or from `state`, to the plan's end or to Ctrl-C or SIGTERM.

        Raises:
            ResumeMismatchError: the folder's checkpoint does not belong to this run, or all are damaged.
            StorageError: a checkpoint or the metrics cannot be written.
            NonFiniteError: too many steps in a row were skipped.
            DataError: a row cannot be read; what was trained before it is in a checkpoint (with one process).
        """
        checkpoints = Checkpoints(
            self.folder / CHECKPOINT_FOLDER,
            keep=self.keep_checkpoints,
            asynchronous=self.async_checkpoints,
            on_error=self._storage_failed,
        )
        with checkpoints, stop_requests() as stop:
            restored = checkpoints.restore(state, self._check_record, self.progress)
            state, start = (self.from_checkpoint(restored[0]), restored[1]) if restored else (state, 0)
            metrics = _Metrics(self, start)
            self.progress("start", {"step": start, "folder": str(self.folder)})
            done, stopping, failure = start, Agreement(by_any=True), None
            try:
                for batch in self.batches(start):
                    if stopping.reached("stop", stop(), batch.position.step):
                        break
                    waited = self.step.waited_seconds
                    state, values = self.step(state, batch)
                    metrics.push(batch.position, values, self.step.waited_seconds - waited)
                    done = batch.position.step + 1
                    self._evaluate_if_due(done, state, metrics)
                    if self.checkpoint_period and (done % self.checkpoint_period == 0 or done == self.plan.total_steps):
                        self._save(checkpoints, done, state, metrics)
            except DataError as error:
                failure = error
            finally:
                self.step.close()
            interrupted = done < self.plan.total_steps
            self._flushed(metrics)
            # Other processes may not have failed, and a checkpoint needs all of them.
            if interrupted and self.checkpoint_period and done > start and (failure is None or jax.process_count() == 1):
                self._save(checkpoints, done, state, metrics)
            checkpoints.wait()
            metrics.close()
            if failure is not None:
                raise failure
            self.progress("stop", {"step": done, "interrupted": interrupted})
            return self._summary(done, start, interrupted, metrics, checkpoints)

    def _check_record(self, found: Mapping[str, Any]) -> None:
        ramp = self.ramp_before or self.plan.ramp
        expected = self._record(found["step"]) | {"fingerprint": ramp.fingerprint}
        changed = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
        if changed:
            table = "\n".join(line for key, (old, new) in changed.items() for line in _lines_of_change(key, old, new))
            raise ResumeMismatchError(
                f"the checkpoint of step {found['step']} in {self.folder} is of another run:\n{table}\n"
                "set these keys back, or give the run another run_name",
                key=next(iter(changed)),
            )

    def _record(self, step: int) -> dict[str, Any]:
        position = {"consumed_samples": self.plan.ramp.samples_before(step), "fingerprint": self.plan.ramp.fingerprint}
        return {**position, **self.record}

    def _save(self, checkpoints: Checkpoints, done: int, state: Any, metrics: _Metrics) -> None:
        if self._flushed(metrics):
            checkpoints.save(done, self.to_checkpoint(state), {**self._record(done), **self.remarks})
            self.progress("checkpoint", {"step": done})
        metrics.restart_clock()

    def _flushed(self, metrics: _Metrics) -> bool:
        """Write all metrics out; say whether the disk took them."""
        try:
            metrics.flush()
        except StorageError as error:
            self._storage_failed(error)
            return False
        return True

    def _storage_failed(self, error: StorageError) -> None:
        # With several processes the others would wait for a checkpoint that does not come.
        if self.on_checkpoint_error == "stop" or jax.process_count() > 1:
            raise error
        self.progress("storage", {"problem": str(error)})

    def _evaluate_if_due(self, done: int, state: Any, metrics: _Metrics) -> None:
        due = self.eval_interval and (done % self.eval_interval == 0 or done == self.plan.total_steps)
        if self.evaluate and due:
            self._flushed(metrics)
            values = {"step": done - 1, **self.evaluate(state)}
            metrics.eval_log.write(values)
            self.progress("eval", values)
            metrics.restart_clock()

    def _summary(self, done: int, start: int, interrupted: bool, metrics: _Metrics, checkpoints: Checkpoints) -> Summary:
        lines = list(read_lines(self.folder / METRICS_FILE))
        return Summary(
            steps=done,
            consumed_samples=self.plan.ramp.samples_before(done),
            first_loss=lines[0]["loss"] if lines else None,
            final_loss=lines[-1]["loss"] if lines else None,
            num_compilations=self.step.num_compilations,
            ramp_steps=self.plan.ramp.ramp_steps,
            tokens_per_second=metrics.tokens_per_second,
            checkpoint=None if checkpoints.latest is None else str(checkpoints.folder / str(checkpoints.latest)),
            metrics=str(self.folder / METRICS_FILE),
            interrupted=interrupted,
            resumed_from=start,
        )


class _Metrics:
    """Fetches each step's metrics two steps later, so that the devices never wait for the host."""

    def __init__(self, loop: Loop, start: int) -> None:
        self._loop = loop
        self._waiting: deque[tuple[PlanPosition, Any, float]] = deque()
        self._skipped = _skipped_before(loop.folder / METRICS_FILE, start)
        self._log = StepLog(loop.folder / METRICS_FILE, keep_below=start, writes=is_first())
        self.eval_log = StepLog(loop.folder / EVAL_FILE, keep_below=start, writes=is_first())
        self._phase: int | None = None
        self._tokens, self._seconds, self._first = 0, 0.0, start
        self.restart_clock()

    @property
    def tokens_per_second(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        self._last = time.perf_counter()

    def push(self, position: PlanPosition, values: Any, compile_seconds: float) -> None:
        self._waiting.append((position, values, compile_seconds))
        if len(self._waiting) > IN_FLIGHT:
            self._write()

    def flush(self) -> None:
        while self._waiting:
            self._write()
        self._log.sync()

    def close(self) -> None:
        self._log.close()
        self.eval_log.close()

    def _write(self) -> None:
        position, values, compile_seconds = self._waiting.popleft()
        values = jax.device_get({name: values[name] for name in ("loss", "grad_norm", "skipped") if name in values})
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        size = position.split.global_batch_size
        tokens = size * self._loop.tokens_per_sample
        record = {
            "step": position.step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
            "global_batch_size": size,
            "loss": _finite(values["loss"]),
            "learning_rate": self._loop.learning_rate(position.step),
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(tokens / seconds, 3),
            "microbatch_size": position.split.microbatch_size,
            **({"grad_norm": _finite(values["grad_norm"])} if "grad_norm" in values else {}),
            **({"compile_seconds": round(compile_seconds, 6)} if compile_seconds else {}),
            **({"skipped": True} if values.get("skipped", False) else {}),
        }
        self._log.write(record)
        if position.step > self._first:
            self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        if position.phase.index != self._phase:
            self._phase = position.phase.index
            self._loop.progress("phase", record)
        self._loop.progress("step", record)
        self._count_skipped(record)

    def _count_skipped(self, record: Mapping[str, Any]) -> None:
        if "skipped" not in record:
            self._skipped = []
            return
        self._skipped.append(record["step"])
        self._loop.progress("skip", {"step": record["step"], "in_a_row": len(self._skipped)})
        if len(self._skipped) == self._loop.skip_nonfinite:
            rows = "\n".join(self._rows_in_words(step) for step in self._skipped[-NAMED_ROWS:])
            raise NonFiniteError(
                f"the loss or the gradient of step {', '.join(map(str, self._skipped[-10:]))} was not finite, "
                f"{len(self._skipped)} in a row: skip_nonfinite={self._loop.skip_nonfinite} stops there; none of them changed "
                f"the parameters, and the checkpoints stay. The rows they used:\n{rows}",
                steps=self._skipped,
                key="skip_nonfinite",
            )

    def _rows_in_words(self, step: int) -> str:
        ramp, rows = self._loop.plan.ramp, self._loop.rows_of(step)
        samples = f"  step {step}: samples {ramp.samples_before(step):,} to {ramp.samples_before(step + 1) - 1:,}"
        more = f", and {len(rows) - NAMED_ROWS} more (rampup rows lists them)" if len(rows) > NAMED_ROWS else ""
        return f"{samples}: {', '.join(rows[:NAMED_ROWS])}{more}" if rows else samples


def _lines_of_change(key: str, old: Any, new: Any) -> list[str]:
    """Return what a refusal says of one value; of the files of the data, the first that differ."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [f"  {key}: {old!r} in the checkpoint, {new!r} here"]
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    values = [(name, old.get(name, "no such file"), new.get(name, "no such file")) for name in names[:NAMED_FILES]]
    more = [f"  {key}: and {len(names) - NAMED_FILES:,} more files"] if len(names) > NAMED_FILES else []
    return [f"  {key}: {name}: {before} in the checkpoint, {now} here" for name, before, now in values] + more


def _skipped_before(path: Path, start: int) -> list[int]:
    """Return the steps that an earlier process skipped just before the one that this run starts with."""
    done = [line for line in read_lines(path) if line["step"] < start]
    return [line["step"] for line in itertools.takewhile(lambda line: line.get("skipped"), reversed(done))][::-1]


def _finite(value: Any) -> float | None:
    """JSON has no NaN and no infinity; null stands for them."""
    number = float(value)
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step; the second acts as usual."""
    requested = False
    before: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    except ValueError:
        pass  # Not the main thread: signals go elsewhere.
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
