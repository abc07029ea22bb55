"""Collects per-step metrics: fetches them asynchronously, writes metrics.jsonl, and forwards them to writers and listeners."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.engine.processes import is_primary
from rampup.errors import NonFiniteError
from rampup.loop.components import Component
from rampup.loop.events import OnEvent, PhaseStarted, StepDone, StepSkipped, StorageFailed
from rampup.loop.lock import require_owner
from rampup.loop.run_folder import EVAL_FILE, METRICS_FILE, StepLog, describe_gaps, read_lines_backwards
from rampup.loop.writers import MetricWriter, write_numbers
from rampup.plan.numbers import finite_or_none
from rampup.plan.plan import PlanPosition

# Steps whose metrics stay on the devices, so that the host does not wait for a step before it starts the next one.
IN_FLIGHT = 2
# Rows of a skipped step that an error message names.
NAMED_ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """The metrics of a run.

    Attributes:
        learning_rate: called with a step number; returns its learning rate. None leaves it out.
        tokens_per_sample: for tokens per second. With 1, they are samples per second.
        flops_per_sample: FLOPs of the model, forward and backward, for FLOP/s; None leaves FLOP/s out.
        writers: called with the first step; returns what gets the metrics in addition to the files, see `MetricWriter`.
        skip_nonfinite: consecutive skipped steps (see `train_step`) that end the run; 0 = never.
        describe_rows: called with a step number; returns descriptions of its rows, for the error that ends the run.
    """

    learning_rate: Callable[[int], float] | None = None
    tokens_per_sample: int = 1
    flops_per_sample: float | None = None
    writers: Callable[[int], Sequence[MetricWriter]] = lambda start: ()
    skip_nonfinite: int = 0
    describe_rows: Callable[[int], Sequence[str]] = lambda step: ()


class Metrics:
    """Fetches each step's metrics two steps later, so that the devices never wait for the host.

    Lines of step `start`, the first of this launch, and of later ones are replaced. Each component gets the steps in order and
    adds to their lines. `PhaseStarted`, `StepDone`, `StepSkipped` and, if lines are damaged or missing,
    `StorageFailed` are reported.
    """

    def __init__(
        self, folder: Path, start: int, *, options: MetricOptions, components: Sequence[Component], on_event: OnEvent
    ) -> None:
        self._options = options
        self._components = components
        self._on_event = on_event
        # The lines of the steps that were skipped in a row, beginning with those just before this launch.
        before = itertools.dropwhile(lambda line: line["step"] >= start, read_lines_backwards(folder / METRICS_FILE))
        self._skipped = list(itertools.takewhile(lambda line: line.get("skipped"), before))[::-1]
        self._waiting: deque[tuple[PlanPosition, Any, float, float]] = deque()
        # A minute: a lease of which nothing was heard for a while is renewed first.
        owned = functools.partial(require_owner, folder, seconds=60)
        log: dict[str, Any] = {"writes": is_primary(), "on_event": on_event, "before_upload": owned}
        self._log = StepLog(folder / METRICS_FILE, keep_below=start, **log)
        if is_primary() and (problem := describe_gaps(folder / METRICS_FILE, start)):
            on_event(StorageFailed(problem=problem))
        # An evaluation before step 0 has the number -1.
        self._eval_log = StepLog(folder / EVAL_FILE, keep_below=start or -1, **log)
        self._writers = options.writers(start) if is_primary() else ()
        self._phase: int | None = None
        self._tokens, self._seconds, self._first = 0, 0.0, start
        self.restart_clock()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all processes in this launch, without its first step; None before its second."""
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's time."""
        self._last = self._last_push = time.perf_counter()

    def push(self, position: PlanPosition, values: Any, compile_seconds: float) -> None:
        """Queue the metrics of a step, which may still be running, and the time that it waited for a compilation."""
        now = time.perf_counter()
        between, self._last_push = now - self._last_push - compile_seconds, now
        self._waiting.append((position, values, compile_seconds, between))
        if len(self._waiting) > IN_FLIGHT:
            self._write_oldest()

    def write_eval(self, values: Mapping[str, Any]) -> None:
        """Write the line of an evaluation."""
        self._eval_log.write(values)
        write_numbers(self._writers, values)

    def flush(self) -> None:
        """Wait until all metrics are on disk.

        Raises:
            StorageError: the disk is full; the lines stay in memory.
            NonFiniteError: too many steps in a row were skipped.
        """
        while self._waiting:
            self._write_oldest(flushing=True)
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

    def _write_oldest(self, *, flushing: bool = False) -> None:
        position, values, compile_seconds, between = self._waiting.popleft()
        known = ("loss", "loss_parts", "grad_norm", "skipped", "facts", "gradient_noise")
        fetched = {name: values[name] for name in known if name in values}
        # The scalars among the auxiliary sums, by their names or paths.
        leaves = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(values.get("aux")) if getattr(leaf, "ndim", 0) == 0]
        if leaves:
            fetched["aux"] = {jax.tree_util.keystr(path, simple=True, separator="/") or "aux": leaf for path, leaf in leaves}
        if fetched.keys() & {"aux", "gradient_noise"}:
            fetched["weight"] = values["weight"]
        # This waits for a step of a while ago, which is done unless the devices are behind by `IN_FLIGHT` steps.
        values = jax.device_get(fetched)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        # If the host is slower than the devices, steps are done already when a flush fetches them: they took as long as the
        # host did from one to the next, and not the time of fetching them.
        step_seconds = max(seconds, between) if flushing else seconds
        options, facts = self._options, values.get("facts", {})
        size = facts.get("global_batch_size", position.split.global_batch_size)
        record = {
            "step": position.step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
            "global_batch_size": size,
            "loss": finite_or_none(values["loss"]),
            **({"learning_rate": options.learning_rate(position.step)} if options.learning_rate else {}),
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(size * options.tokens_per_sample / step_seconds, 3),
            "microbatch_size": position.split.microbatch_size,
        }
        record |= {f"loss/{part}": finite_or_none(mean) for part, mean in enumerate(values.get("loss_parts", ()))}
        if "grad_norm" in values:
            record["grad_norm"] = finite_or_none(values["grad_norm"])
        if options.flops_per_sample is not None:
            # Imported here: a run that does not know its operations needs no table of TPUs.
            from rampup.plan.topology import peak_flops

            flops = size * options.flops_per_sample / step_seconds / jax.device_count()
            peak = peak_flops(jax.devices()[0].device_kind)
            record["tflops_per_device"] = round(flops / 1e12, 6)
            # Model FLOP/s utilisation (Chowdhery et al., "PaLM", 2022, appendix B): recomputed activations are no work, and the
            # peak is that of bfloat16 whatever type the model computes in.
            record |= {} if peak is None else {"mfu": round(flops / peak, 6)}
        # Left out of most lines: readers of throughput skip the steps that have it.
        if compile_seconds:
            record["compile_seconds"] = round(compile_seconds, 6)
        if values.get("skipped", False):
            record["skipped"] = True
        for component in self._components:
            record |= component.after_step(record, values)
        # Means, as the loss is one: the sums over the step's rows, by the step's weight, of several parts the first.
        weight = values.get("weight", 0)
        weight = float(weight[0] if isinstance(weight, tuple) else weight)
        means = {name: finite_or_none(value / weight) if weight else None for name, value in values.get("aux", {}).items()}
        # Facts are numbers that the host knew when the step began.
        record |= {f"aux/{name}" if name in record else name: mean for name, mean in means.items()} | facts
        self._log.write(record)
        write_numbers(self._writers, record)
        # The first step includes the start of the run and is no measure of its speed.
        if position.step > self._first:
            self._tokens += size * self._options.tokens_per_sample
            self._seconds += seconds
        if position.phase.index != self._phase:
            self._phase = position.phase.index
            self._on_event(PhaseStarted(step=position.step, phase=self._phase))
        self._on_event(StepDone(step=position.step, metrics=record))
        self._skipped = [*self._skipped, record] if "skipped" in record else []
        if self._skipped:
            self._on_event(StepSkipped(step=position.step, in_a_row=len(self._skipped)))
        # More, if the steps before this launch were trained with a higher limit.
        if 0 < options.skip_nonfinite <= len(self._skipped):
            steps = [line["step"] for line in self._skipped]
            found = []
            for line in self._skipped[-NAMED_ROWS:]:
                rows = self._options.describe_rows(line["step"])
                end = line["consumed_samples"]
                more = f", and {len(rows) - NAMED_ROWS} more (rampup rows lists them)" if len(rows) > NAMED_ROWS else ""
                samples = f"  step {line['step']}: samples {end - line['global_batch_size']:,} to {end - 1:,}"
                found.append(samples + (f": {', '.join(rows[:NAMED_ROWS])}{more}" if rows else ""))
            raise NonFiniteError(
                f"the loss or the gradient of step {', '.join(map(str, steps[-10:]))} was not finite, {len(steps)} in a row: "
                f"skip_nonfinite={options.skip_nonfinite} stops there; none of them changed the parameters, and the "
                "checkpoints stay. The " + "\n".join(["rows they used:", *found]),
                steps=steps,
                key="skip_nonfinite",
            )
