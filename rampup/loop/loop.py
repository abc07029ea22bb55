"""The training loop: steps, metrics, evaluation, checkpoints and a clean stop.

A step returns before the devices are done: its metrics are fetched two steps later, or
by a flush, which waits.

A component may replace the plan, as `batch_size_schedule: auto` does, and then this
holds:

- A plan changes between two steps and only extends its ramp: the steps that are done
  have the same batches in both.
- It is decided from the flushed lines of all steps before it, alike in all processes,
  and written into the step's line.
- A run that writes checkpoints has one with the new ramp before the first step of the
  new size, from which it can resume.
- State and compiled step stay. The plan has reserved the sizes that may come, so that
  no size needs another executable.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from rampup.engine.arguments import gone
from rampup.engine.processes import first_problem, is_primary
from rampup.errors import (
    ConfigError,
    DataEndedError,
    DataError,
    ResumeWarning,
    a_type,
    warn,
)
from rampup.loop import events
from rampup.loop.checkpoint import (
    RESERVED,
    CheckpointOptions,
    Checkpoints,
    SavedCheckpoint,
    find_checkpoint,
)
from rampup.loop.components import Component, LoopPlan, LoopStep, NoiseAverages
from rampup.loop.distributed import StopConsensus, leaving_on_error
from rampup.loop.lock import own_run, require_owner
from rampup.loop.metrics import MetricOptions, Metrics
from rampup.loop.run_folder import (
    CHECKPOINT_FOLDER,
    EVAL_FILE,
    METRICS_FILE,
    Record,
    as_json,
    as_path,
    first_and_last_line,
    read_lines,
    write_whole,
)
from rampup.loop.same_run import (
    IDENTITY_KEYS,
    NUM_DEVICES,
    RAMP_ROWS,
    SameRun,
    check_same_run,
)
from rampup.plan.noise_scale import default_half_life
from rampup.plan.numbers import check_whole, finite_or_none
from rampup.plan.ramp import BatchRamp

ENDED_FILE = "data_ended.json"  # the step for which the run had no rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run, in the names of `rampup train --json`.

    Example:
        >>> found = Summary(
        ...     steps=5,
        ...     consumed_samples=40,
        ...     first_loss=2.0,
        ...     final_loss=1.0,
        ...     num_compilations=1,
        ...     ramp_steps=0,
        ...     tokens_per_second=None,
        ...     checkpoint=None,
        ...     metrics="run/metrics.jsonl",
        ...     interrupted=False,
        ...     resumed_from=0,
        ... )
        >>> found.final_loss / found.first_loss
        0.5
    """

    steps: int  #: optimizer steps done since the beginning
    consumed_samples: int  #: samples consumed by them
    first_loss: float | None  #: loss of step 0; None before it
    final_loss: float | None  #: loss of the last step
    num_compilations: int  #: executables built for the training step in this launch
    ramp_steps: int  #: of these steps, those before the last phase
    #: of all processes, in this launch without its first step; None if it did no other
    tokens_per_second: float | None
    checkpoint: str | None  #: folder of the newest checkpoint
    metrics: str  #: the metrics file
    interrupted: bool  #: whether a signal ended the run early
    resumed_from: int  #: steps that earlier launches of the run had done
    seconds: float = 0.0  #: duration of this launch, compilation included
    #: of the first evaluation of the run; None without evaluation
    first_eval_loss: float | None = None
    final_eval_loss: float | None = None  #: of the last one
    batch_size_schedule: str | None = None  #: with `auto`, the schedule that was used


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """When a run evaluates, and how.

    Attributes:
        evaluate: called with a state; returns its metrics, numbers by name. The summary
            has the one that is called `eval_loss`.
        eval_interval: steps between evaluations; the last step is always evaluated.
        at_start: also evaluate the state of step 0, as step -1.

    Example:
        Held-out rows, with the training loss, every second step.

        >>> import jax, numpy as np, optax, rampup, tempfile
        >>> mesh, tx = rampup.make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)
        >>> plan = rampup.RampPlan(
        ...     ramp=rampup.BatchRamp.from_schedule("0:2 8:4"),
        ...     splitter=rampup.BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=6,
        ... )
        >>> def loss_fn(params, batch, keys):
        ...     return ((params - batch) ** 2).sum(), batch.size, {}
        >>> step = rampup.train_step(loss_fn, tx, plan, mesh)
        >>> rows = np.linspace(0, 1, 32, dtype=np.float32)
        >>> evaluator = rampup.EvalStep(loss_fn, mesh)
        >>> def evaluate(state):
        ...     sums = [evaluator(state, b) for b in evaluator.batches(rows[:9], 4)]
        ...     loss, weight = np.sum(jax.device_get(sums), axis=0)
        ...     return {"eval_loss": float(loss / weight)}
        >>> loop = rampup.Loop(
        ...     plan=plan,
        ...     step=step,
        ...     batches=lambda start: step.batches(rows, start),
        ...     folder=tempfile.mkdtemp(),
        ...     evaluation=EvalOptions(evaluate=evaluate, eval_interval=2),
        ... )
        >>> _, summary = loop.run(rampup.create_state(np.float32(0), tx, mesh))
        >>> summary.final_eval_loss < summary.first_eval_loss
        True
    """

    evaluate: Callable[[Any], Mapping[str, float]]
    eval_interval: int
    at_start: bool = False

    def __post_init__(self) -> None:
        check_whole(1, eval_interval=self.eval_interval)


@gone(
    should_stop="give it to loop.run(state, should_stop=...)",
    batches_of="`batches` is called with `plan=` if a component changes the plan",
    on_event="give it to metrics=MetricOptions(on_event=...)",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A run in its folder.

    Attributes:
        plan: the steps of the run, such as a `RampPlan`.
        step: from state and batch to the next state and metrics: a `TrainStep`, or
            another object with its `num_compilations` and `waited_seconds`.
        folder: of metrics.jsonl, eval.jsonl and checkpoints; also a bucket,
            `gs://bucket/run`.
        metrics: what is in a line of metrics.jsonl, who else gets it, and who hears of
            the run.
        checkpoints: when checkpoints are written; by default never.
        batches: called with a step number; returns the batches from that step on, as
            `step.batches(rows, start)` does. If a component changes the plan, it is
            called with `plan=` as well.
        evaluation: when to evaluate, and how; None = never.
        components: what else has state and belongs to the run, such as an iterator of
            its data. Checkpoints contain it. The step brings its own.

    Example:
        A run that is stopped goes on where it was, with the same rows.

        >>> import jax, numpy as np, optax, rampup, tempfile
        >>> mesh, tx = rampup.make_mesh(devices=jax.devices()[:1]), optax.sgd(0.1)
        >>> plan = rampup.RampPlan(
        ...     ramp=rampup.BatchRamp.from_schedule("0:2 8:4"),
        ...     splitter=rampup.BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=6,
        ... )
        >>> def loss_fn(params, batch, keys):
        ...     return ((params - batch) ** 2).sum(), batch.size, {}
        >>> step = rampup.train_step(loss_fn, tx, plan, mesh)
        >>> rows = np.linspace(0, 1, 32, dtype=np.float32)
        >>> folder, calls = tempfile.mkdtemp(), iter(range(100))
        >>> def run():
        ...     loop = rampup.Loop(
        ...         plan=plan,
        ...         step=step,
        ...         batches=lambda start: step.batches(rows, start, seed=0),
        ...         folder=folder,
        ...         checkpoints=rampup.CheckpointOptions(checkpoint_period=2),
        ...     )
        ...     state = rampup.create_state(np.float32(0), tx, mesh)
        ...     return loop.run(state, should_stop=lambda: next(calls) == 3)[1]
        >>> [
        ...     (found.resumed_from, found.steps, found.interrupted)
        ...     for found in (run(), run())
        ... ]
        [(0, 3, True), (3, 6, False)]
    """

    plan: LoopPlan
    step: LoopStep
    batches: Callable[..., Iterator[Any]]
    folder: Path
    metrics: MetricOptions = field(default_factory=MetricOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    evaluation: EvalOptions | None = None
    components: tuple[Component, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", as_path(self.folder))
        if not callable(self.batches):
            raise ConfigError(
                f"batches is {a_type(self.batches)} and no function",
                fix="give batches=lambda start: step.batches(rows, start)",
                key="batches",
            )
        own = getattr(self.step, "plan", self.plan)
        if own.ramp != self.plan.ramp or own.total_steps != self.plan.total_steps:
            raise ConfigError(
                "step follows another plan than the loop",
                fix="make both with the same: train_step(loss_fn, tx, plan, mesh) and"
                " Loop(plan=plan, ...)",
                key="plan",
            )
        brought = [SameRun(self.step)]
        if getattr(self.step, "measures_noise", False):
            # A step that measures is a TrainStep, and its plan a RampPlan.
            brought.append(NoiseAverages(default_half_life(self.plan)))  # type: ignore[arg-type]
        kinds = set(map(type, self.components))
        brought = [component for component in brought if type(component) not in kinds]
        object.__setattr__(self, "components", (*brought, *self.components))

    def run(
        self, state: Any, *, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Any, Summary]:
        """Train from the newest checkpoint, or from `state`, to the plan's end or to
        SIGTERM: `restore`, then `train`.

        Args:
            state: that of step 0; its buffers are donated.
            should_stop: called once before every step, in every process; True in one of
                them stops the run as SIGTERM does. For threads, which cannot handle
                signals, and for launchers that give notice in another way.

        Returns:
            The trained state and the result of the run.

        Raises:
            RampupError: another process trains in the folder; see `restore` and
                `train`.
        """
        with self._owned():
            return self.train(
                *self.restore(state, find_checkpoint(self.folder)),
                should_stop=should_stop,
            )

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """Own the folder; a process that fails does not wait for the others."""
        shared = bool(self.checkpoints.checkpoint_period)
        with leaving_on_error(), own_run(self.folder, shared=shared):
            yield

    def restore(self, state: Any, saved: SavedCheckpoint | None) -> tuple[Any, int]:
        """Return the state of a checkpoint of this run and the step that follows it;
        without one, `state` of step 0, and 0.

        Args:
            state: that of step 0, whose structure the checkpoint has.
            saved: the checkpoint, from `find_checkpoint`, or None.

        Raises:
            ResumeMismatchError: the checkpoint does not belong to this run.
            DataEndedError: the data of the run ended there.
        """
        if saved is None:
            return state, 0
        if ended := first_problem(self._ended_at(saved.step)):
            raise DataEndedError(
                f"the data of the run in {self.folder} ended after step {ended} of"
                f" {self.plan.total_steps}, and a start from there might take the first"
                " rows again",
                fix=f"give a plan of total_steps={ended}, or, if the batches now go on"
                f" with new rows, delete {self.folder / ENDED_FILE}",
            )
        check_same_run(
            saved.record,
            self.plan,
            as_json(self.checkpoints.identity),
            f"the checkpoint of step {saved.step} in {self.folder}",
        )
        for component in self.components:
            component.load(saved.record)
        with Checkpoints(
            self.folder / CHECKPOINT_FOLDER, self.checkpoints
        ) as checkpoints:
            return self.checkpoints.from_saved(
                checkpoints.restore(saved, state, self._report)
            ), saved.step

    def _ended_at(self, saved: int) -> str:
        """Return the step after which the data ended, if the plan goes beyond it, or
        "". Among several processes, the checkpoint of step `saved` may be older.
        """
        file = self.folder / ENDED_FILE
        if not is_primary() or not file.exists():
            return ""
        # A damaged file does not let a run start over.
        ended = next(read_lines(file), {"step": saved})["step"]
        return str(ended) if saved <= ended < self.plan.total_steps else ""

    def train(
        self, state: Any, start: int, *, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Any, Summary]:
        """Train from step `start`, with the state before it, to the plan's end or to
        SIGTERM; see `run`.

        Args:
            state: that before step `start`; its buffers are donated.
            start: the first step.
            should_stop: see `run`.

        Returns:
            The trained state and the result of the run.

        Raises:
            StorageError: a checkpoint or the metrics cannot be written.
            NonFiniteError: too many steps in a row were skipped.
            DataError: a row cannot be read; with one process, the steps before it are
                in a checkpoint.
        """
        began = time.perf_counter()
        if start > self.plan.total_steps and is_primary():
            warn(
                f"the run in {self.folder} has done {start} steps, and its plan ends"
                f" after {self.plan.total_steps}: no step runs; for more, give a longer"
                " plan",
                ResumeWarning,
            )
        with (
            self._owned(),
            Checkpoints(
                self.folder / CHECKPOINT_FOLDER, self.checkpoints
            ) as checkpoints,
            stop_requests() as stop_requested,
            contextlib.closing(
                Metrics(
                    self.folder, start, options=self.metrics, components=self.components
                )
            ) as metrics,
        ):
            self._report(
                events.RunStarted(
                    step=start,
                    folder=self.folder,
                    plan=self.plan,
                    tokens_per_sample=self.metrics.tokens_per_sample,
                )
            )
            done, state, failure, plan = self._train(
                state,
                start,
                lambda: should_stop() or stop_requested(),
                checkpoints,
                metrics,
            )
            interrupted = done < plan.total_steps
            self._flush(metrics)
            if isinstance(failure, DataEndedError) and is_primary():
                write_whole(
                    self.folder / ENDED_FILE,
                    f"{json.dumps({'step': done, 'problem': str(failure)})}\n".encode(),
                )
            # A checkpoint needs all processes, and a row that one cannot read may be no
            # problem for the others.
            if (
                interrupted
                and self.checkpoints.checkpoint_period
                and done > start
                and (failure is None or jax.process_count() == 1)
            ):
                self._save(checkpoints, plan, done, state, metrics)
            checkpoints.wait()
        if failure is not None:
            raise failure
        saved = checkpoints.latest
        self._report(
            events.RunStopped(
                steps=done,
                interrupted=interrupted,
                folder=self.folder,
                is_saved=saved == done,
            )
        )
        # From the file and not from this process, which may have resumed in the middle
        # of the run.
        first, last = first_and_last_line(self.folder / METRICS_FILE)
        first_eval, last_eval = first_and_last_line(self.folder / EVAL_FILE)
        return state, Summary(
            steps=done,
            consumed_samples=plan.ramp.samples_before(done),
            first_loss=first.get("loss"),
            final_loss=last.get("loss"),
            num_compilations=self.step.num_compilations,
            ramp_steps=min(plan.ramp.ramp_steps, done),
            tokens_per_second=metrics.tokens_per_second,
            checkpoint=None if saved is None else str(checkpoints.folder / str(saved)),
            metrics=str(self.folder / METRICS_FILE),
            interrupted=interrupted,
            resumed_from=start,
            seconds=round(time.perf_counter() - began, 3),
            first_eval_loss=first_eval.get("eval_loss"),
            final_eval_loss=last_eval.get("eval_loss"),
        )

    def _report(self, event: events.Event) -> None:
        self.metrics.on_event(event)

    def _train(
        self,
        state: Any,
        start: int,
        should_stop: Callable[[], bool],
        checkpoints: Checkpoints,
        metrics: Metrics,
    ) -> tuple[int, Any, DataError | None, Any]:
        """Return the steps done, the state after them, the error if a row that cannot
        be read ended the run, and its plan.
        """
        period = self.checkpoints.checkpoint_period
        plan, batches, done = self.plan, self.batches, start
        stopping = StopConsensus()
        while True:
            next_plan = plan
            try:
                if done == 0 and self.evaluation and self.evaluation.at_start:
                    self._evaluate(plan, 0, state, metrics)
                found = batches(min(done, plan.total_steps - 1))
                rows = iter(found)
                # A finished run is compared too, with its last batch, if its rows can
                # be: others are not read or generated for that.
                if done >= plan.total_steps and hasattr(found, "identity"):
                    self._compare(found, state, next(rows))
                while done < plan.total_steps and next_plan is plan:
                    # Before the batch is read: the place of an iterator, which a
                    # component may save, is that of the steps done. All processes stop
                    # before the same step; one signal is enough.
                    if stopping.agreed(should_stop(), done):
                        self._report(events.RunStopping(step=done))
                        break
                    batch = next(rows, None)
                    if batch is None:
                        raise DataEndedError(
                            f"the batches ended after step {done} of"
                            f" {plan.total_steps}",
                            fix=f"give more rows, or a plan of total_steps={done}",
                        )
                    if done == start and (period or start):
                        self._compare(found, state, batch)
                        # What no checkpoint can have is refused before any work.
                        as_json(self._record(plan))
                    # The step returns before the devices are done, so only a
                    # compilation takes long here.
                    waited = self.step.waited_seconds
                    state, values = self.step(state, batch)
                    metrics.push(
                        batch.position, values, self.step.waited_seconds - waited
                    )
                    done = batch.position.step + 1
                    if any(
                        component.may_change_plan(done) for component in self.components
                    ):
                        # The decision takes the metrics of all steps before it.
                        self._flush(metrics)
                        for component in self.components:
                            next_plan = component.next_plan(next_plan)
                    is_last = done == plan.total_steps
                    if self.evaluation and (
                        done % self.evaluation.eval_interval == 0 or is_last
                    ):
                        self._evaluate(plan, done, state, metrics)
                    if period and (
                        done % period == 0 or is_last or next_plan is not plan
                    ):
                        self._save(checkpoints, next_plan, done, state, metrics)
            except DataError as error:
                return done, state, error, plan
            if next_plan is plan:
                return done, state, None, plan
            checkpoints.wait()
            self._report(events.BatchSizeChanged(step=done, plan=next_plan))
            plan = next_plan
            batches = functools.partial(self.batches, plan=plan)

    def _compare(self, batches: Any, state: Any, batch: Any) -> None:
        """Compare what is about to run with the checkpoint, if there is one."""
        for component in self.components:
            if isinstance(component, SameRun):
                component.check(batches, state, batch)

    def _evaluate(
        self, plan: LoopPlan, done: int, state: Any, metrics: Metrics
    ) -> None:
        assert self.evaluation is not None
        self._flush(metrics)
        values = {"step": done - 1, "consumed_samples": plan.ramp.samples_before(done)}
        found = self.evaluation.evaluate(state)
        if not isinstance(found, Mapping) or any(map(np.ndim, found.values())):
            raise ConfigError(
                f"evaluate returned {a_type(found)} and no numbers by name",
                fix='return {"eval_loss": float(...)}',
                key="evaluate",
            )
        for name, value in found.items():
            values[name] = finite_or_none(value)
        metrics.write_eval(values)
        self._report(events.Evaluated(step=done - 1, metrics=values))
        metrics.restart_clock()

    def _save(
        self,
        checkpoints: Checkpoints,
        plan: LoopPlan,
        done: int,
        state: Any,
        metrics: Metrics,
    ) -> None:
        # Metrics first: a run that resumes from a checkpoint must find the lines of all
        # steps before it.
        self._flush(metrics)
        record = self._record(plan)
        if checkpoints.save(done, self.checkpoints.to_saved(state), record):
            self._report(events.CheckpointSaved(steps=done))
        metrics.restart_clock()

    def _record(self, plan: LoopPlan) -> Record:
        """Return what a checkpoint has beside the state, or refuse two values of one
        name, which a resume could not read back.
        """
        record = {
            **self.checkpoints.identity,
            **self.checkpoints.extra_metadata,
            IDENTITY_KEYS: sorted(self.checkpoints.identity),
            RAMP_ROWS: plan.ramp.to_rows(),
            NUM_DEVICES: getattr(plan, NUM_DEVICES, None),
        }
        for component in self.components:
            own = component.state()
            if taken := own.keys() & {*record, *RESERVED}:
                raise ConfigError(
                    f"the state of {a_type(component)} has the entry {min(taken)}, which"
                    " another part of the run has in a checkpoint",
                    fix="give it another name",
                    key="components",
                )
            record |= own
        return record

    def _flush(self, metrics: Metrics) -> None:
        """Write all metrics, if the run is still that of this process."""
        require_owner(self.folder)
        metrics.flush()


def ramp_to_continue(folder: Path | str, ramp: BatchRamp) -> BatchRamp:
    """Return the ramp with which the run in a folder goes on: that of its newest
    checkpoint, and from there on the sizes of another one for the same samples.

    It is for a loop of one's own what `on_plan_change=continue_by_samples` is for
    `rampup train`. Make plan, step and `Loop` with it. Phases that are over need no
    split, so the run may go on with more devices. With another last batch, a
    `ResumeWarning` says what keeps the rates of a `batch_scaling`.

    Args:
        folder: the run's folder.
        ramp: the ramp from here on, and all of it if there is no checkpoint.

    Returns:
        A ramp whose steps before the checkpoint are those that the run has done.

    Raises:
        ResumeMismatchError: every checkpoint is damaged.

    Example:
        >>> ramp = BatchRamp.from_schedule("0:8 100:16")
        >>> ramp_to_continue("runs/a-new-one", ramp) == ramp
        True
    """
    saved = find_checkpoint(folder)
    if saved is None:
        return ramp
    before = BatchRamp.from_rows(saved.record[RAMP_ROWS])
    if (last := before.sizes[-1]) != ramp.sizes[-1]:
        warn(
            f"the ramp ended at {last} samples and ends at {ramp.sizes[-1]}: all rates"
            " of a batch_scaling change, unless batch_scaling_reference (of a RateRule,"
            f" reference_batch_size) is {last}",
            ResumeWarning,
        )
    return before.spliced_at(saved.step, ramp)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM, or Ctrl-C where it stops runs, into a request to stop."""
    requested = threading.Event()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            # None: of a library in C, such as that of JAX among several processes.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        restore()

    # Only the main thread may handle signals.
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM]
        numbers += [signal.SIGINT] if events.ctrl_c_stops.get() else []
        before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield requested.is_set
    finally:
        # Also after the first signal: the caller may have handlers of its own.
        restore()
