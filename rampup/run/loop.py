"""The training loop: steps, metrics, evaluation, checkpoints and a clean stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from rampup.errors import DataError, ResumeMismatchError, StorageError
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.run.checkpoint import Checkpoints
from rampup.run.consensus import Agreement
from rampup.run.data.batches import Batch
from rampup.run.data.fingerprint import changed_files
from rampup.run.distributed import is_first
from rampup.run.metrics import METRICS_FILE, Metrics, Progress, StepRecorder
from rampup.run.run_folder import read_lines
from rampup.run.skipped import SkippedSteps, skipped_before
from rampup.run.step import TrainStep
from rampup.run.writers import MetricWriter

CHECKPOINT_FOLDER = "checkpoints"
NAMED_FILES = 10


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
        tokens_per_sample, flops_per_sample: for tokens and FLOP per second; see `StepRecorder`.
        writers: from the first step to what gets the metrics besides the files; see `MetricWriter`.
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
    flops_per_sample: float | None = None
    writers: Callable[[int], Sequence[MetricWriter]] = lambda start: ()
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
            with contextlib.closing(self._metrics(start)) as metrics:
                self.progress("start", {"step": start, "folder": str(self.folder)})
                done, state, failure = self._train(state, start, stop, checkpoints, metrics)
                interrupted = done < self.plan.total_steps
                self._flushed(metrics)
                # Other processes may not have failed, and a checkpoint needs all of them.
                if interrupted and self.checkpoint_period and done > start and (failure is None or jax.process_count() == 1):
                    self._save(checkpoints, done, state, metrics)
                checkpoints.wait()
            if failure is not None:
                raise failure
            self.progress("stop", {"step": done, "interrupted": interrupted})
            return self._summary(done, start, metrics, checkpoints)

    def _train(
        self, state: Any, start: int, stop: Callable[[], bool], checkpoints: Checkpoints, metrics: Metrics
    ) -> tuple[int, Any, DataError | None]:
        """Return the steps done, the state after them, and what ended them early, if that was a row."""
        done, stopping = start, Agreement(by_any=True)
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
            return done, state, error
        finally:
            self.step.close()
        return done, state, None

    def _metrics(self, start: int) -> Metrics:
        skipped = SkippedSteps(
            skipped_before(self.folder / METRICS_FILE, start),
            limit=self.skip_nonfinite,
            ramp=self.plan.ramp,
            rows_of=self.rows_of,
            progress=self.progress,
        )
        recorder = StepRecorder(
            learning_rate=self.learning_rate,
            tokens_per_sample=self.tokens_per_sample,
            flops_per_sample=self.flops_per_sample,
        )
        writers = self.writers(start) if is_first() else ()
        return Metrics(self.folder, start, recorder=recorder, skipped=skipped, writers=writers, progress=self.progress)

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

    def _save(self, checkpoints: Checkpoints, done: int, state: Any, metrics: Metrics) -> None:
        if self._flushed(metrics):
            checkpoints.save(done, self.to_checkpoint(state), {**self._record(done), **self.remarks})
            self.progress("checkpoint", {"step": done})
        metrics.restart_clock()

    def _flushed(self, metrics: Metrics) -> bool:
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

    def _evaluate_if_due(self, done: int, state: Any, metrics: Metrics) -> None:
        due = self.eval_interval and (done % self.eval_interval == 0 or done == self.plan.total_steps)
        if self.evaluate and due:
            self._flushed(metrics)
            values = {"step": done - 1, **self.evaluate(state)}
            metrics.write_eval(values)
            self.progress("eval", values)
            metrics.restart_clock()

    def _summary(self, done: int, start: int, metrics: Metrics, checkpoints: Checkpoints) -> Summary:
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
            interrupted=done < self.plan.total_steps,
            resumed_from=start,
        )


def _lines_of_change(key: str, old: Any, new: Any) -> list[str]:
    """Return what a refusal says of one value; of the files of the data, the first that differ."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [f"  {key}: {old!r} in the checkpoint, {new!r} here"]
    lines = [f"  {key}: {name}: {before} in the checkpoint, {now} here" for name, before, now in changed_files(old, new)]
    more = [f"  {key}: and {len(lines) - NAMED_FILES:,} more files"] if len(lines) > NAMED_FILES else []
    return lines[:NAMED_FILES] + more


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
