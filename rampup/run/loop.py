"""The training loop: steps, metrics, evaluation, checkpoints and a clean stop."""

from __future__ import annotations

import contextlib
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import jax

from rampup.errors import DataError, ResumeMismatchError, StorageError
from rampup.plan.ramp import BatchRamp
from rampup.run.checkpoint import CheckpointOptions, Checkpoints, SavedCheckpoint, checkpoint_steps, find_checkpoint
from rampup.run.data.files import changed_files
from rampup.run.distributed import StepConsensus
from rampup.run.events import (
    BatchSizeChanged,
    CheckpointSaved,
    Evaluated,
    OnEvent,
    RunAborted,
    RunStarted,
    RunStopped,
    StopRequested,
    StorageFailed,
    ignore_event,
)
from rampup.run.metrics import MetricOptions, Metrics
from rampup.run.run_folder import CHECKPOINT_FOLDER, EVAL_FILE, METRICS_FILE, read_lines
from rampup.run.run_lock import own_run

# Files that an error message lists if the data have changed.
NAMED_FILES = 10

# Parts of a checkpoint's record: the rows of the ramp, and the steps at which microbatch shapes changed, which a resumed run
# repeats.
RAMP_ROWS, SHAPE_CHANGES = "ramp_rows", "shape_changes"
# The averages of the gradient noise, and the schedule that `auto_schedule: advise` would have used so far.
GRADIENT_NOISE, ADVISED_ROWS = "gradient_noise", "advised_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run, in the names of `rampup train --json`.

    Attributes:
        steps: optimizer steps done since the beginning.
        consumed_samples: samples consumed by them.
        first_loss: loss of step 0; None before it.
        final_loss: loss of the last step.
        num_compilations: executables built for the training step by this process.
        ramp_steps: steps before the last phase.
        tokens_per_second: of this process without its first step; None if it did no other.
        checkpoint: folder of the newest checkpoint, or None.
        metrics: the metrics file.
        interrupted: whether a signal ended the run early.
        resumed_from: steps that earlier processes had done.
        seconds: duration of this process's part of the run, compilation included.
        first_eval_loss, final_eval_loss: losses of the first and the last evaluation of the run; None without evaluation.
        batch_size_schedule: with `batch_size_schedule: auto`, the schedule that was used, or is advised; None without.
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
    seconds: float = 0.0
    first_eval_loss: float | None = None
    final_eval_loss: float | None = None
    batch_size_schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """When a run evaluates, and how.

    Attributes:
        evaluate: from a state to its metrics, `eval_loss` among them.
        eval_interval: steps between evaluations; the last step is always evaluated.
        at_start: also evaluate the state of step 0, as step -1.
    """

    evaluate: Callable[[Any], Mapping[str, float]]
    eval_interval: int
    at_start: bool = False


class LoopPlan(Protocol):
    """What a loop reads of a `RampPlan`, or of another plan of optimizer steps such as `rampup.rl.schedule.RolloutSchedule`."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    @property
    def ramp(self) -> Any:
        """A `BatchRamp`, or an object with its `samples_before`, `fingerprint`, `to_rows` and `ramp_steps`."""


class LoopStep(Protocol):
    """What a loop calls of a `TrainStep`, or of another step that maps a state and a batch to the next state and metrics."""

    num_compilations: Any
    waited_seconds: Any
    shape_changes: Any

    def replay_shape_changes(self, changes: Any) -> None:
        """Change shapes at the steps at which an earlier part of the run did."""

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run one optimizer step."""

    def close(self) -> None:
        """Cancel compilations that have not started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A run in its folder.

    Attributes:
        plan: the plan.
        step: the training step.
        batches: from a step number to the batches from there on, such as `BatchLoader.batches`.
        folder: the run's folder.
        metrics: the contents of metrics.jsonl, and its writers.
        checkpoints: when checkpoints are written, and what they contain.
        evaluation: when to evaluate, and how; None = never.
        on_event: called with every `rampup.run.events.Event`.
        batches_of: from a plan to its `batches`, if the batch of the run can grow (`MetricOptions.auto`).
    """

    plan: LoopPlan
    step: LoopStep
    batches: Callable[[int], Iterator[Any]]
    folder: Path
    metrics: MetricOptions = field(default_factory=MetricOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    evaluation: EvalOptions | None = None
    on_event: OnEvent = ignore_event
    batches_of: Callable[[Any], Callable[[int], Iterator[Any]]] | None = None

    def run(self, state: Any) -> tuple[Any, Summary]:
        """Train from the newest checkpoint, or from `state`, to the plan's end, Ctrl-C or SIGTERM: `restore`, then `train`.

        Args:
            state: the training state of step 0; its memory is reused.

        Returns:
            The trained state, and the result of the run.

        Raises:
            ConfigError: another process trains in the folder.
            RampupError: see `restore` and `train`.
        """
        with own_run(self.folder):
            return self.train(*self.restore(state, find_checkpoint(self.folder / CHECKPOINT_FOLDER)))

    def restore(self, state: Any, saved: SavedCheckpoint | None, *, ramp_before: Any = None) -> tuple[Any, int]:
        """Return the state of a checkpoint of this run and the step that follows it; without one, `state` and 0.

        Args:
            state: the training state of step 0.
            saved: the checkpoint, from `find_checkpoint`.
            ramp_before: the ramp that it was written with, if `plan` continues it with another one.

        Raises:
            ResumeMismatchError: the checkpoint does not belong to this run.
        """
        if saved is None:
            return state, 0
        self._check_identity(saved, ramp_before or self.plan.ramp)
        self.step.replay_shape_changes(self._shape_changes(saved))
        if self.metrics.noise is not None:
            self.metrics.noise.load(saved.record.get(GRADIENT_NOISE) or {})
        if self.metrics.auto is not None:
            follows = self.metrics.auto.mode == "follow"
            self.metrics.auto.load(
                self.plan.ramp.to_rows() if follows else saved.record.get(ADVISED_ROWS) or self.plan.ramp.to_rows()
            )
        with self._open_checkpoints() as checkpoints:
            return self.checkpoints.from_saved(checkpoints.restore(saved, state, self.on_event)), saved.step

    def train(self, state: Any, start: int) -> tuple[Any, Summary]:
        """Train from step `start` to the plan's end or to Ctrl-C or SIGTERM.

        Args:
            state: the training state before step `start`; its memory is reused.
            start: the first step.

        Returns:
            The trained state, and the result of the run.

        Raises:
            StorageError: a checkpoint or the metrics cannot be written.
            NonFiniteError: too many steps in a row were skipped.
            DataError: a row cannot be read; with one process, the steps before it are in a checkpoint.
        """
        began = time.perf_counter()
        with (
            own_run(self.folder),
            self._report_abort(),
            self._open_checkpoints() as checkpoints,
            stop_requests(lambda: self.on_event(StopRequested())) as stop_requested,
            contextlib.closing(
                Metrics(self.folder, start, options=self.metrics, ramp=self.plan.ramp, on_event=self.on_event)
            ) as metrics,
        ):
            self.on_event(RunStarted(step=start, folder=self.folder, plan=self.plan))
            done, state, failure, ended = self._train(state, start, stop_requested, checkpoints, metrics)
            interrupted = done < self.plan.total_steps
            self._flush(metrics)
            # A checkpoint needs all processes, and a row that one cannot read may be no problem for the others.
            can_save = failure is None or jax.process_count() == 1
            if interrupted and self.checkpoints.checkpoint_period and done > start and can_save:
                ended._save(checkpoints, done, state, metrics)
            checkpoints.wait()
        if failure is not None:
            raise failure
        is_saved = checkpoints.latest == done
        self.on_event(RunStopped(steps=done, interrupted=interrupted, folder=self.folder, is_saved=is_saved))
        return state, ended._summary(done, start, metrics, checkpoints, time.perf_counter() - began)

    @contextlib.contextmanager
    def _report_abort(self) -> Iterator[None]:
        """Report a second Ctrl-C, which ends the run in the middle of a step."""
        try:
            yield
        except KeyboardInterrupt:
            newest = max(checkpoint_steps(self.folder / CHECKPOINT_FOLDER), default=None)
            self.on_event(RunAborted(folder=self.folder, checkpoint=newest))
            raise

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.folder / CHECKPOINT_FOLDER,
            max_to_keep=self.checkpoints.max_to_keep,
            async_checkpointing=self.checkpoints.async_checkpointing,
            on_error=self._storage_failed,
        )

    def _train(
        self, state: Any, start: int, stop_requested: Callable[[], bool], checkpoints: Checkpoints, metrics: Metrics
    ) -> tuple[int, Any, DataError | None, Loop]:
        """Return the steps done, the state after them, the error if a row that cannot be read ended the run, and the loop.

        The loop is this one, or with `batch_size_schedule: auto` the one with the plan that the run has at its end.
        """
        period, last = self.checkpoints.checkpoint_period, self.plan.total_steps
        done, stopping = start, StepConsensus(any_process=True)
        grown: Loop | None = None
        try:
            if start == 0 and self.evaluation and self.evaluation.at_start:
                self._evaluate(self.evaluation, 0, state, metrics)
            for batch in self.batches(start):
                # All processes stop before the same step; one signal is enough.
                if stopping.agreed("stop", stop_requested(), batch.position.step):
                    break
                # The step returns before the devices are done, so only a compilation takes long here.
                waited = self.step.waited_seconds
                state, values = self.step(state, batch)
                metrics.push(batch.position, values, self.step.waited_seconds - waited)
                done = batch.position.step + 1
                if self.metrics.auto is not None and self.metrics.auto.is_due(done):
                    # Waits for the devices, because the decision takes the noise of all steps before it.
                    self._flush(metrics)
                    grown = self._grown(metrics)
                if self.evaluation and (done % self.evaluation.eval_interval == 0 or done == last):
                    self._evaluate(self.evaluation, done, state, metrics)
                if period and (done % period == 0 or done == last or grown):
                    (grown or self)._save(checkpoints, done, state, metrics)
                if grown:
                    break
        except DataError as error:
            return done, state, error, self
        finally:
            self.step.close()
        if grown is None:
            return done, state, None, self
        # In the checkpoint before the first step of the new size.
        checkpoints.wait()
        self.on_event(BatchSizeChanged(step=done, plan=grown.plan))
        return grown._train(state, done, stop_requested, checkpoints, metrics)

    def _grown(self, metrics: Metrics) -> Loop | None:
        """Return the loop with the plan of the decision that was made after the last step, or None if the batch stays."""
        auto = self.metrics.auto
        if auto is None or auto.mode != "follow" or auto.size == self.plan.ramp.sizes[-1]:
            return None
        assert self.batches_of is not None
        plan = replace(self.plan, ramp=auto.ramp)
        metrics.change_ramp(plan.ramp)
        return replace(self, plan=plan, batches=self.batches_of(plan))

    def _evaluate(self, evaluation: EvalOptions, done: int, state: Any, metrics: Metrics) -> None:
        self._flush(metrics)
        values = {"step": done - 1, "consumed_samples": self.plan.ramp.samples_before(done), **evaluation.evaluate(state)}
        metrics.write_eval(values)
        self.on_event(Evaluated(step=done - 1, metrics=values))
        metrics.restart_clock()

    def _save(self, checkpoints: Checkpoints, done: int, state: Any, metrics: Metrics) -> None:
        # Metrics first: a run that resumes from a checkpoint must find the lines of all steps before it.
        if self._flush(metrics):
            own = {RAMP_ROWS: self.plan.ramp.to_rows(), SHAPE_CHANGES: self.step.shape_changes}
            own |= {} if self.metrics.noise is None else {GRADIENT_NOISE: self.metrics.noise.state}
            own |= {} if self.metrics.auto is None else {ADVISED_ROWS: self.metrics.auto.rows}
            record = {**self._identity(self.plan.ramp, done), **own, **self.checkpoints.extra_metadata}
            checkpoints.save(done, self.checkpoints.to_saved(state), record)
            self.on_event(CheckpointSaved(steps=done))
        metrics.restart_clock()

    def _flush(self, metrics: Metrics) -> bool:
        """Write all metrics, and return whether the disk took them."""
        try:
            metrics.flush()
        except StorageError as error:
            self._storage_failed(error)
            return False
        return True

    def _storage_failed(self, error: StorageError) -> None:
        # Several processes always stop: the others would wait for a checkpoint that never comes.
        if self.checkpoints.on_checkpoint_error == "stop" or jax.process_count() > 1:
            raise error
        self.on_event(StorageFailed(problem=str(error)))

    def _identity(self, ramp: Any, step: int) -> dict[str, Any]:
        """Return the values that must be the same in a checkpoint after `step` steps and in the run that resumes it."""
        position = {"consumed_samples": self.plan.ramp.samples_before(step), "fingerprint": ramp.fingerprint}
        return {**position, **self.checkpoints.identity}

    def _check_identity(self, saved: SavedCheckpoint, ramp: Any) -> None:
        expected, found = self._identity(ramp, saved.step), saved.record
        if isinstance(ramp, BatchRamp) and RAMP_ROWS in found:
            expected[RAMP_ROWS] = ramp.to_rows()
        changed = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
        if "fingerprint" in changed and RAMP_ROWS in found and isinstance(ramp, BatchRamp):
            raise ResumeMismatchError(
                f"the ramp is not that of the checkpoint of step {saved.step} in {self.folder}:\n"
                f"{BatchRamp.from_rows(found[RAMP_ROWS]).compare(ramp)}\n"
                "restore the ramp, or train in another folder",
                key="fingerprint",
            )
        if changed:
            table = "\n".join(line for key, (old, new) in changed.items() for line in _format_change(key, old, new))
            raise ResumeMismatchError(
                f"the checkpoint of step {saved.step} in {self.folder} is of another run:\n{table}\n"
                "set these keys back, or give the run another run_name",
                key=next(iter(changed)),
            )

    def _shape_changes(self, saved: SavedCheckpoint) -> dict[int, int]:
        """Return the steps at which the microbatch shapes of a checkpoint's run changed."""
        changes = saved.record.get(SHAPE_CHANGES, {})
        try:
            found = {int(size): operator.index(step) for size, step in changes.items()}
        except (AttributeError, TypeError, ValueError):
            found = {-1: -1}
        if any(size < 1 or step < 0 for size, step in found.items()):
            raise ResumeMismatchError(
                f"the checkpoint of step {saved.step} in {self.folder} has no readable {SHAPE_CHANGES}: {changes!r:.100}; "
                "delete it to resume from the one before",
                key=SHAPE_CHANGES,
            )
        return found

    def _summary(self, done: int, start: int, metrics: Metrics, checkpoints: Checkpoints, seconds: float) -> Summary:
        # From the file and not from this process, which may have resumed in the middle of the run.
        lines = list(read_lines(self.folder / METRICS_FILE))
        evaluations = [line.get("eval_loss") for line in read_lines(self.folder / EVAL_FILE)]
        return Summary(
            steps=done,
            consumed_samples=self.plan.ramp.samples_before(done),
            first_loss=lines[0].get("loss") if lines else None,
            final_loss=lines[-1].get("loss") if lines else None,
            num_compilations=self.step.num_compilations,
            ramp_steps=self.plan.ramp.ramp_steps,
            tokens_per_second=metrics.tokens_per_second,
            checkpoint=None if checkpoints.latest is None else str(checkpoints.folder / str(checkpoints.latest)),
            metrics=str(self.folder / METRICS_FILE),
            interrupted=done < self.plan.total_steps,
            resumed_from=start,
            seconds=round(seconds, 3),
            first_eval_loss=evaluations[0] if evaluations else None,
            final_eval_loss=evaluations[-1] if evaluations else None,
            batch_size_schedule=None if self.metrics.auto is None else self.metrics.auto.schedule,
        )


def _format_change(key: str, old: Any, new: Any) -> list[str]:
    """Return the lines of an error message for one value; for the files of the data, the first ones that differ."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [f"  {key}: {old!r} in the checkpoint, {new!r} here"]
    lines = [f"  {key}: {name}: {before} in the checkpoint, {now} here" for name, before, now in changed_files(old, new)]
    more = [f"  {key}: and {len(lines) - NAMED_FILES:,} more files"] if len(lines) > NAMED_FILES else []
    return lines[:NAMED_FILES] + more


@contextlib.contextmanager
def stop_requests(on_request: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop after the current step; the second acts as usual.

    Args:
        on_request: called at the first one, at once and in a thread of its own: the main thread may hold any lock.
    """
    requested = False
    before: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        signal.signal(number, before[number])
        with contextlib.suppress(RuntimeError):  # The system has no thread left; the run stops all the same.
            threading.Thread(target=on_request, daemon=True).start()

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    except ValueError:
        pass  # Only the main thread may handle signals.
    try:
        yield lambda: requested
    finally:
        # Also after the first signal: the caller may have handlers of its own.
        for number, handler in before.items():
            signal.signal(number, handler)
