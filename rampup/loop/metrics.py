"""Per-step metrics: fetched asynchronously, written to metrics.jsonl, and passed to
listeners and to writers like clu's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from rampup.engine.arguments import gone
from rampup.engine.processes import is_primary
from rampup.errors import LossWarning, MissingDependencyError, NonFiniteError, warn
from rampup.loop.components import Component
from rampup.loop.events import (
    OnEvent,
    PhaseStarted,
    StepDone,
    StepSkipped,
    StorageFailed,
    ignore_event,
)
from rampup.loop.run_folder import (
    EVAL_FILE,
    METRICS_FILE,
    Record,
    StepLog,
    as_path,
    is_bucket,
    read_lines,
    writing,
)
from rampup.plan.describe import format_count
from rampup.plan.numbers import check_whole, finite_or_none
from rampup.plan.plan import PlanPosition

# steps whose metrics stay on the devices, so that the host does not wait for them
IN_FLIGHT = 2
TENSORBOARD_FOLDER = "tensorboard"
# of the metrics of a step, beside `aux`
_KNOWN = ("loss", "grad_norm", "skipped", "facts", "gradient_noise", "weight")
_NEEDED_BY = {
    "tensorboardX": ("enable_tensorboard", "tensorboard"),
    "wandb": ("wandb_project", "wandb"),
}


class MetricWriter(Protocol):
    """The interface of a metric writer, which `clu.metric_writers` implement.

    Example:
        >>> class Printer:
        ...     def write_scalars(self, step, scalars):
        ...         print(step, scalars["loss"])
        ...
        ...     def flush(self):
        ...         pass
        ...
        ...     def close(self):
        ...         pass
        >>> options = MetricOptions(writers=lambda start: [Printer()])
        >>> write_numbers(options.writers(0), {"step": 3, "loss": 0.5})
        3 0.5
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step. May be called several times for one step."""

    def flush(self) -> None:
        """Write everything that was taken."""

    def close(self) -> None:
        """Write everything and close; no call follows."""


@gone(
    describe_rows="NonFiniteError has the steps, and `rampup plan --rows STEP` lists"
    " their rows"
)
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """The metrics of a run.

    Attributes:
        learning_rate: called with a step number; returns its learning rate. None leaves
            it out.
        tokens_per_sample: for tokens per second. With 1, they are samples per second.
        flops_per_sample: FLOPs of the model, forward and backward, for FLOP/s; None
            leaves FLOP/s out.
        writers: called with the first step; returns what gets the metrics in addition
            to the files, see `MetricWriter`.
        skip_nonfinite: consecutive skipped steps (see `train_step`) that end the run; 0
            = never.
        on_event: called with every `rampup.loop.events.Event` of the run.

    Example:
        TensorBoard beside metrics.jsonl; `Loop(..., metrics=options)` uses it.

        >>> import optax
        >>> rate = optax.linear_schedule(1e-3, 1e-4, 100)
        >>> options = MetricOptions(
        ...     learning_rate=lambda step: float(rate(step)),
        ...     writers=lambda start: [TensorBoardWriter(Path("tb"), start=start)],
        ... )
        >>> round(options.learning_rate(0), 6)
        0.001
    """

    learning_rate: Callable[[int], float] | None = None
    tokens_per_sample: int = 1
    flops_per_sample: float | None = None
    writers: Callable[[int], Sequence[MetricWriter]] = lambda start: ()
    skip_nonfinite: int = 0
    on_event: OnEvent = ignore_event

    def __post_init__(self) -> None:
        check_whole(0, skip_nonfinite=self.skip_nonfinite)
        check_whole(1, tokens_per_sample=self.tokens_per_sample)


@dataclass(slots=True)
class _Step:
    """A step that has no line yet: its metrics, the time that it waited for a
    compilation, when it was started after the step before it, and, when its numbers are
    on the host, when they came after those of that step.
    """

    position: PlanPosition
    values: Any
    compile_seconds: float
    between: float
    seconds: float = 0.0


class Metrics:
    """Fetches each step's metrics two steps later, and replaces the lines from the
    first step of this launch on.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        *,
        options: MetricOptions,
        components: Sequence[Component],
    ) -> None:
        self._options = options
        self._components = components
        self._on_event = on_event = options.on_event
        # The steps that were skipped in a row, from those just before this launch on.
        self._skipped: list[int] = []
        steps = list[int]()
        for line in read_lines(folder / METRICS_FILE):
            if line["step"] < start:
                self._add_skipped(line)
                steps.append(line["step"])
        self._waiting: deque[_Step] = deque()
        log = functools.partial(StepLog, writes=is_primary(), on_event=on_event)
        self._log = log(folder / METRICS_FILE, keep_below=start)
        if is_primary() and steps != [*range(start)]:
            on_event(
                StorageFailed(
                    problem=f"{folder / METRICS_FILE} has {len(steps)} lines, and not one"
                    f" each of the {format_count(start, 'step')} before this start"
                )
            )
        # An evaluation before step 0 has the number -1.
        self._eval_log = log(folder / EVAL_FILE, keep_below=start or -1)
        self._writers = options.writers(start) if is_primary() else ()
        self._phase: int | None = None
        # What was wrong with a loss, said once.
        self._warned: set[str] = set()
        self._tokens, self._seconds, self._first = 0, 0.0, start
        self.restart_clock()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all processes in this launch, without its first step;
        None before its second.
        """
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's time."""
        self._last = self._last_push = time.perf_counter()

    def push(self, position: PlanPosition, values: Any, compile_seconds: float) -> None:
        """Queue the metrics of a step, which may still be running, and the time that it
        waited for a compilation.
        """
        now = time.perf_counter()
        between, self._last_push = now - self._last_push - compile_seconds, now
        self._waiting.append(_Step(position, values, compile_seconds, between))
        if len(self._waiting) > IN_FLIGHT:
            step = self._fetch_oldest()
            self._write(step, step.seconds)

    def write_eval(self, values: Record) -> None:
        """Write the line of an evaluation."""
        self._eval_log.write(values)
        write_numbers(self._writers, values)

    def flush(self) -> None:
        """Wait until all metrics are on disk; the lines that it refuses stay in
        memory.
        """
        fetched = [self._fetch_oldest() for _ in range(len(self._waiting))]
        # The first step of a launch has the time of its start. Of the others each has
        # the mean: they ran while the host waited for the first of them.
        timed = [step for step in fetched if step.position.step > self._first]
        # If the host is slower than the devices, steps are done when they are fetched,
        # and took as long as the host did.
        total = max(
            sum(step.seconds for step in timed), sum(step.between for step in timed)
        )
        for step in fetched:
            self._write(
                step,
                total / len(timed)
                if step.position.step > self._first
                else step.seconds,
            )
        self._log.sync()
        self._eval_log.sync()
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the files and the writers."""
        self._log.close()
        self._eval_log.close()
        for writer in self._writers:
            writer.close()

    def _fetch_oldest(self) -> _Step:
        """Wait for the oldest step that waits, and return it with its numbers."""
        step = self._waiting.popleft()
        # This waits for a step of a while ago, which is done unless the devices are
        # behind by `IN_FLIGHT` steps.
        step.values = jax.device_get(_to_fetch(step.values))
        now = time.perf_counter()
        step.seconds, self._last = now - self._last, now
        return step

    def _write(self, step: _Step, shown_seconds: float) -> None:
        """Write the line of a step."""
        position, values = step.position, step.values
        facts = values.get("facts", {})
        size = facts.get("global_batch_size", position.split.global_batch_size)
        record = self._line(position, values, size, shown_seconds)
        # Readers of throughput skip the steps that have it.
        if step.compile_seconds:
            record["compile_seconds"] = round(step.compile_seconds, 6)
        if values.get("skipped", False):
            record["skipped"] = True
        for component in self._components:
            record |= component.after_step(record, values)
        for name, mean in _means(values).items():
            record[f"aux/{name}" if name in record else name] = mean
        record |= facts
        self._log.write(record)
        write_numbers(self._writers, record)
        # The first step includes the start of the run and is no measure of its speed.
        if position.step > self._first:
            self._tokens += size * self._options.tokens_per_sample
            self._seconds += step.seconds
        if position.phase.index != self._phase:
            self._phase = position.phase.index
            self._on_event(PhaseStarted(step=position.step, phase=self._phase))
        self._on_event(StepDone(step=position.step, metrics=record))
        self._count_skipped(record)
        problem = None
        if record["loss"] is None and not self._skipped:
            problem = (
                "is not finite, and the step was not skipped: the parameters, and the"
                " checkpoints from here on, may not be finite either;"
                " train_step(..., skip_nonfinite=True) skips such steps, and"
                " MetricOptions(skip_nonfinite=3) ends the run at the third in a row;"
                " both are the key skip_nonfinite=3 of rampup train"
            )
        elif values.get("weight") == 0:
            problem = (
                "has the weight 0, so that its rows train nothing: see that the loss"
                " function returns as weight_sum what the loss is to be divided by,"
                " and that not all of it is masked"
            )
        if problem is not None and problem not in self._warned and is_primary():
            self._warned.add(problem)
            warn(f"the loss of step {position.step} {problem}", LossWarning)

    def _line(
        self, position: PlanPosition, values: Record, size: int, step_seconds: float
    ) -> dict[str, Any]:
        """Return the line of a step of `size` samples, without what components add."""
        options = self._options
        record = {
            "step": position.step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
            "global_batch_size": size,
            "loss": finite_or_none(values["loss"]),
        }
        if options.learning_rate is not None:
            # A schedule of Optax returns an array.
            record["learning_rate"] = float(options.learning_rate(position.step))
        record |= {
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(
                size * options.tokens_per_sample / step_seconds, 3
            ),
            "microbatch_size": position.split.microbatch_size,
        }
        if "grad_norm" in values:
            record["grad_norm"] = finite_or_none(values["grad_norm"])
        if options.flops_per_sample is not None:
            # Imported here: a run that does not know its operations needs no table of
            # TPUs.
            from rampup.plan.topology import peak_flops

            flops = size * options.flops_per_sample / step_seconds / jax.device_count()
            record["tflops_per_device"] = round(flops / 1e12, 6)
            # Model FLOP/s utilisation (Chowdhery et al., "PaLM", 2022, appendix B):
            # recomputed activations are no work, and the peak is that of bfloat16
            # whatever type the model computes in.
            if (peak := peak_flops(jax.devices()[0].device_kind)) is not None:
                record["mfu"] = round(flops / peak, 6)
        return record

    def _add_skipped(self, line: Record) -> None:
        self._skipped.append(line["step"])
        if "skipped" not in line:
            self._skipped.clear()

    def _count_skipped(self, record: Record) -> None:
        """Report a skipped step, and end the run if there are too many in a row."""
        self._add_skipped(record)
        if not self._skipped:
            return
        most = self._options.skip_nonfinite
        self._on_event(StepSkipped(step=record["step"], in_a_row=len(self._skipped)))
        # More, if the steps before this launch were trained with a higher limit.
        if 0 < most <= len(self._skipped):
            raise NonFiniteError(
                "the loss or the gradient of step"
                f" {', '.join(map(str, self._skipped[-10:]))} was not finite,"
                f" {len(self._skipped)} in a row: skip_nonfinite={most} stops there;"
                " none of them changed the parameters, and the checkpoints stay",
                fix="a lower learning rate or a longer warm-up is the usual cure;"
                " rampup plan --rows STEP lists the rows that a step used",
                steps=self._skipped,
                key="skip_nonfinite",
            )


def _to_fetch(values: Any) -> dict[str, Any]:
    """Return those of a step's metrics that its line needs; of `aux` the numbers."""
    aux = {
        jax.tree_util.keystr(path, simple=True, separator="/") or "aux": leaf
        for path, leaf in jax.tree.leaves_with_path(values.get("aux"))
        if getattr(leaf, "ndim", 0) == 0
    }
    return {name: values[name] for name in _KNOWN if name in values} | {"aux": aux}


def _means(values: Record) -> dict[str, float | None]:
    """Return means, as the loss is one: the sums over the step's rows, by the step's
    weight.
    """
    weight = float(values.get("weight", 0))
    return {
        name: finite_or_none(value / weight) if weight else None
        for name, value in values["aux"].items()
    }


def _local_folder(folder: Path) -> Path:
    """Return a folder where other libraries can write: for a bucket a temporary one."""
    return Path(tempfile.mkdtemp(prefix="rampup-")) if is_bucket(folder) else folder


class TensorBoardWriter:
    """Writes an event file for TensorBoard in the calling thread, when it is flushed;
    in a bucket, it uploads the file.

    A full disk is an error of `flush`. It ends the thread of
    `tensorboardX.SummaryWriter` without one, and blocks `add_scalar`. A resumed run
    adds a file. TensorBoard then hides what earlier processes wrote for its first step,
    `start`, and later ones.
    """

    def __init__(self, folder: str | os.PathLike[str], *, start: int = 0) -> None:
        required("tensorboardX")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        self._event = Event
        self._folder = folder = as_path(folder)
        with writing(folder):
            self._local = _local_folder(folder)
            self._local.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(
                str(self._local / "events"), f".{os.getpid()}.{start}"
            )
        self._events: list[Any] = []  # not yet written
        if start:
            # This event makes TensorBoard hide the earlier values of this step and
            # later ones.
            self._add(start, session_log={"status": "START"})

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        values = [
            {"tag": name, "simple_value": value} for name, value in scalars.items()
        ]
        self._add(step, summary={"value": values})

    def flush(self) -> None:
        """Write everything that was taken, or raise a StorageError."""
        with writing(self._folder):
            while self._events:
                self._file.write_event(self._events.pop(0))
            self._file.flush()
            if self._local != self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                for file in self._local.iterdir():
                    (self._folder / file.name).write_bytes(file.read_bytes())

    def close(self) -> None:
        """Write everything and close the file."""
        with contextlib.suppress(OSError):
            self.flush()
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        self._events.append(self._event(wall_time=time.time(), step=step, **content))


class WandbWriter:
    """Logs to Weights & Biases, under the run's own step numbers. A resumed run
    continues the W&B run of the folder's name.
    """

    def __init__(self, folder: Path, *, project: str, config: Record) -> None:
        self._run = required("wandb").init(
            project=project,
            config=dict(config),
            name=folder.name,
            id=folder.name,  # by which W&B continues a run
            resume="allow",
            dir=str(_local_folder(folder)),
        )
        # W&B's own step counter refuses to go back, as a run does that was killed after
        # its last checkpoint.
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
        raise MissingDependencyError(
            f"{package}, for {key} or a writer of yours, is not installed: pip install"
            f" 'rampup[{extra}]'",
            key=key,
        ) from error


def write_numbers(writers: Sequence[MetricWriter], record: Record) -> None:
    """Pass the numbers of a line of metrics.jsonl or eval.jsonl to writers, under the
    same names.
    """
    scalars = {
        name: float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float))
    }
    for writer in writers:
        writer.write_scalars(record["step"], scalars)
