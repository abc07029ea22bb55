"""Collects per-step metrics: fetches them asynchronously, writes metrics.jsonl, and forwards them to writers and listeners."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.errors import NonFiniteError
from rampup.plan.auto_schedule import AutoSchedule
from rampup.plan.noise_scale import NoiseScale
from rampup.plan.plan import PlanPosition
from rampup.plan.ramp import BatchRamp
from rampup.run.distributed import broadcast_from_process0, is_primary
from rampup.run.events import OnEvent, PhaseStarted, StepDone, StepSkipped
from rampup.run.run_folder import EVAL_FILE, METRICS_FILE, StepLog, read_lines
from rampup.run.writers import MetricWriter, write_numbers

# Steps whose metrics stay on the devices, so that the host does not wait for a step before it starts the next one.
IN_FLIGHT = 2
# Rows of a skipped step that an error message names.
NAMED_ROWS = 3

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets: a core of TPU v2, v3 and v7, a chip of the other
# TPUs, a whole GPU. The first name that occurs in a device's kind counts.
_PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "NVIDIA L4": 121e12,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricOptions:
    """The metrics of a run.

    Attributes:
        learning_rate: from a step number to its learning rate; None leaves it out.
        tokens_per_sample: for tokens per second. With 1, they are samples per second.
        flops_per_sample: FLOPs of the model, forward and backward, for FLOP/s; None leaves FLOP/s out.
        writers: from the first step to the writers that get the metrics in addition to the files; see `MetricWriter`.
        skip_nonfinite: consecutive skipped steps (see `train_step`) that end the run; 0 = never.
        describe_rows: from a step number to descriptions of its rows, for the error that ends the run.
        noise: the averages of the gradient noise of a step that measures it; checkpoints of the run contain them.
        auto: the decisions of `batch_size_schedule: auto`, which follow the noise.
    """

    learning_rate: Callable[[int], float] | None = None
    tokens_per_sample: int = 1
    flops_per_sample: float | None = None
    writers: Callable[[int], Sequence[MetricWriter]] = lambda start: ()
    skip_nonfinite: int = 0
    describe_rows: Callable[[int], Sequence[str]] = lambda step: ()
    noise: NoiseAverages | None = None
    auto: AutoSchedule | None = None


class NoiseAverages:
    """The noise scale of a run, in the Euclidean geometry and, if it is measured, in that of Adam.

    Args:
        half_life_samples: see `NoiseScale`.
    """

    def __init__(self, half_life_samples: float) -> None:
        self.half_life_samples = half_life_samples
        self.scales: dict[str, NoiseScale] = {"": NoiseScale(half_life_samples=half_life_samples)}

    @property
    def state(self) -> dict[str, dict[str, float]]:
        """The averages as JSON values."""
        return {prefix: scale.state for prefix, scale in self.scales.items()}

    @property
    def lower_end(self) -> float | None:
        """Lower end of the noise scale's interval in samples, in the Euclidean geometry."""
        return self.scales[""].in_samples.low

    def load(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from the averages in a checkpoint, with the half-life of this run."""
        own = {"half_life_samples": self.half_life_samples}
        self.scales |= {prefix: NoiseScale.from_state({**values, **own}) for prefix, values in state.items()}

    def update(self, values: Mapping[str, float], *, samples: int, weight: float, skipped: bool) -> dict[str, float | None]:
        """Take the `gradient_noise` of a step, and return its line's metrics. A skipped step stays out of the averages."""
        found: dict[str, float | None] = {}
        for prefix in ("", *(["adam_"] if "adam_trace" in values else [])):
            trace, squared_norm = float(values[f"{prefix}trace"]), float(values[f"{prefix}squared_norm"])
            scale = self.scales.setdefault(prefix, NoiseScale(half_life_samples=self.half_life_samples))
            if not skipped:
                # Before its first step, Adam has no second moments and its geometry no S.
                counted = 0.0 if prefix and trace == squared_norm == 0 else weight
                scale.update(samples=samples, weight=counted, trace=trace, squared_norm=squared_norm)
            found |= {f"{prefix}gradient_noise_trace": _finite_or_none(trace)}
            found |= {f"{prefix}gradient_squared_norm": _finite_or_none(squared_norm), **scale.metrics(prefix)}
        return found


class Metrics:
    """Fetches each step's metrics two steps later, so that the devices never wait for the host.

    Args:
        folder: the run's folder.
        start: the first step of this process; lines of this and later steps are replaced.
        options: see `MetricOptions`.
        ramp: the samples of each step.
        on_event: called with `PhaseStarted`, `StepDone` and `StepSkipped`.
    """

    def __init__(self, folder: Path, start: int, *, options: MetricOptions, ramp: BatchRamp, on_event: OnEvent) -> None:
        self._options, self._on_event = options, on_event
        self._skipped = SkippedSteps(
            skipped_before(folder / METRICS_FILE, start),
            limit=options.skip_nonfinite,
            ramp=ramp,
            describe_rows=options.describe_rows,
            on_event=on_event,
        )
        self._waiting: deque[tuple[PlanPosition, Any, float, float]] = deque()
        self._log = StepLog(folder / METRICS_FILE, keep_below=start, writes=is_primary())
        # An evaluation before step 0 has the number -1.
        self._eval_log = StepLog(folder / EVAL_FILE, keep_below=start or -1, writes=is_primary())
        self._writers = options.writers(start) if is_primary() else ()
        self._phase: int | None = None
        self._tokens, self._seconds, self._first = 0, 0.0, start
        self.restart_clock()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of this process without its first step; None before its second."""
        return self._tokens / self._seconds if self._seconds else None

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's time."""
        self._last = self._last_push = time.perf_counter()

    def push(self, position: PlanPosition, values: Any, compile_seconds: float) -> None:
        """Take the metrics of a step that may still be running.

        Args:
            position: the step's position in the plan.
            values: the metrics on the devices, as the training step returns them.
            compile_seconds: time that the step waited for a compilation.
        """
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
            self._write_oldest(is_last=True)
        self._log.sync()
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Close the files and the writers."""
        self._log.close()
        self._eval_log.close()
        for writer in self._writers:
            writer.close()

    def _write_oldest(self, *, is_last: bool = False) -> None:
        position, values, compile_seconds, between = self._waiting.popleft()
        fetched = {name: values[name] for name in ("loss", "grad_norm", "skipped", "facts") if name in values}
        if auxiliary := scalar_leaves(values.get("aux")):
            fetched |= {"weight": values["weight"], "aux": auxiliary}
        if self._options.noise is not None and "gradient_noise" in values:
            fetched |= {"weight": values["weight"], "gradient_noise": values["gradient_noise"]}
        # This waits for a step of a while ago, which is done unless the devices are behind by `IN_FLIGHT` steps.
        values = jax.device_get(fetched)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        # If the host is slower than the devices, the last steps before an evaluation are done already: they took as long as the
        # host did from one to the next, and not the time of fetching them.
        record = self._record(position, values, max(seconds, between) if is_last else seconds, compile_seconds)
        self._log.write(record)
        write_numbers(self._writers, record)
        # The first step includes the start of the run and is no measure of its speed.
        if position.step > self._first:
            self._tokens += position.split.global_batch_size * self._options.tokens_per_sample
            self._seconds += seconds
        if position.phase.index != self._phase:
            self._phase = position.phase.index
            self._on_event(PhaseStarted(step=position.step, phase=self._phase))
        self._on_event(StepDone(step=position.step, metrics=record))
        self._skipped.count(record)

    def _record(
        self, position: PlanPosition, values: Mapping[str, Any], seconds: float, compile_seconds: float
    ) -> dict[str, Any]:
        """Return a step's line of metrics.jsonl."""
        options, facts = self._options, values.get("facts", {})
        size = facts.get("global_batch_size", position.split.global_batch_size)
        found = {
            "step": position.step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
            "global_batch_size": size,
            "loss": _finite_or_none(values["loss"]),
            **({"learning_rate": options.learning_rate(position.step)} if options.learning_rate else {}),
            "step_seconds": round(seconds, 6),
            "tokens_per_second": round(size * options.tokens_per_sample / seconds, 3),
            "microbatch_size": position.split.microbatch_size,
        }
        if "grad_norm" in values:
            found["grad_norm"] = _finite_or_none(values["grad_norm"])
        if options.flops_per_sample is not None:
            flops = size * options.flops_per_sample / seconds / jax.device_count()
            found |= utilisation(flops, jax.devices()[0].device_kind)
        # Left out of most lines: readers of throughput skip the steps that have it.
        if compile_seconds:
            found["compile_seconds"] = round(compile_seconds, 6)
        if values.get("skipped", False):
            found["skipped"] = True
        if "gradient_noise" in values:
            assert options.noise is not None
            noise, skipped = values["gradient_noise"], bool(values.get("skipped", False))
            found |= options.noise.update(noise, samples=size, weight=float(values["weight"]), skipped=skipped)
        if options.auto is not None:
            found |= self._decide(options.auto, found["step"] + 1, found["consumed_samples"])
        # Means, as the loss is one: the sums over the step's rows, by the step's weight.
        weight = float(values.get("weight", 0))
        means = {name: _finite_or_none(value / weight) if weight else None for name, value in values.get("aux", {}).items()}
        # Facts are numbers that the host knew when the step began.
        return found | {f"aux/{name}" if name in found else name: mean for name, mean in means.items()} | facts

    def _decide(self, auto: AutoSchedule, step: int, sample: int) -> dict[str, int]:
        """Return the decision about the batch after a step, if there is one. It is in the step's line before it is used."""
        if not auto.is_due(step):
            return {}
        assert self._options.noise is not None
        size = auto.decide(step=step, sample=sample, noise_scale=self._options.noise.lower_end)
        if jax.process_count() > 1:
            # The averages are the same everywhere, computed from the same numbers; one process has the last word all the same.
            rows = json.loads(broadcast_from_process0(f"auto_schedule{step}", json.dumps(auto.rows)))
            auto.load(rows)
            size = auto.size
        return {"next_global_batch_size" if auto.mode == "follow" else "advised_global_batch_size": size}

    def change_ramp(self, ramp: BatchRamp) -> None:
        """Take the ramp of a run whose batch has grown."""
        self._skipped.ramp = ramp


class SkippedSteps:
    """Counts consecutive skipped steps, and ends the run when there are too many.

    Args:
        before: steps that an earlier process skipped just before this run's first step; see `skipped_before`.
        limit: consecutive skipped steps that end the run; 0 = never.
        ramp: the samples of each step.
        describe_rows: from a step number to descriptions of its rows.
        on_event: called with `StepSkipped`.
    """

    def __init__(
        self,
        before: Sequence[int],
        *,
        limit: int,
        ramp: BatchRamp,
        describe_rows: Callable[[int], Sequence[str]],
        on_event: OnEvent,
    ) -> None:
        self._steps, self._limit = list(before), limit
        self.ramp, self._describe_rows, self._on_event = ramp, describe_rows, on_event

    def count(self, record: Mapping[str, Any]) -> None:
        """Take the next step's line of metrics.jsonl.

        Raises:
            NonFiniteError: the limit is reached.
        """
        if "skipped" not in record:
            self._steps = []
            return
        # After a resume the list starts with the steps that were skipped just before it, so that the count continues.
        self._steps.append(record["step"])
        self._on_event(StepSkipped(step=record["step"], in_a_row=len(self._steps)))
        if len(self._steps) == self._limit:
            rows = "\n".join(self._rows_in_words(step) for step in self._steps[-NAMED_ROWS:])
            raise NonFiniteError(
                f"the loss or the gradient of step {', '.join(map(str, self._steps[-10:]))} was not finite, "
                f"{len(self._steps)} in a row: skip_nonfinite={self._limit} stops there; none of them changed "
                f"the parameters, and the checkpoints stay. The rows they used:\n{rows}",
                steps=self._steps,
                key="skip_nonfinite",
            )

    def _rows_in_words(self, step: int) -> str:
        ramp, rows = self.ramp, self._describe_rows(step)
        samples = f"  step {step}: samples {ramp.samples_before(step):,} to {ramp.samples_before(step + 1) - 1:,}"
        more = f", and {len(rows) - NAMED_ROWS} more (rampup rows lists them)" if len(rows) > NAMED_ROWS else ""
        return f"{samples}: {', '.join(rows[:NAMED_ROWS])}{more}" if rows else samples


def skipped_before(path: Path, start: int) -> list[int]:
    """Return the steps that an earlier process skipped just before step `start`.

    Args:
        path: the run's metrics.jsonl.
        start: the first step of this process.
    """
    done = [line for line in read_lines(path) if line["step"] < start]
    return [line["step"] for line in itertools.takewhile(lambda line: line.get("skipped"), reversed(done))][::-1]


@functools.cache
def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of a device in bfloat16 without sparsity, or None for an unknown device.

    Args:
        device_kind: `jax.Device.device_kind`.

    Example:
        >>> peak_flops("TPU v5 lite"), peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
        (197000000000000.0, 989000000000000.0, None)
    """
    return next((peak for name, peak in _PEAK_FLOPS.items() if re.search(rf"\b{name}\b", device_kind)), None)


def utilisation(flops_per_device: float, device_kind: str) -> dict[str, float]:
    """Return a step's model FLOP/s as metrics: `tflops_per_device` and, if the device's peak is known, `mfu`.

    `mfu` is the model FLOP/s utilisation of Chowdhery et al., "PaLM" (2022), appendix B: recomputed activations do not count
    as work. It is relative to the bfloat16 peak whatever type the model computes in.

    Args:
        flops_per_device: FLOP/s of the model on one device.
        device_kind: see `peak_flops`.

    Example:
        >>> utilisation(98.5e12, "TPU v5 lite"), utilisation(2e9, "cpu")
        ({'tflops_per_device': 98.5, 'mfu': 0.5}, {'tflops_per_device': 0.002})
    """
    found = {"tflops_per_device": round(flops_per_device / 1e12, 6)}
    peak = peak_flops(device_kind)
    return found if peak is None else {**found, "mfu": round(flops_per_device / peak, 6)}


def scalar_leaves(aux: Any) -> dict[str, Any]:
    """Return the scalars in the auxiliary sums of a loss function, by their names or paths. Arrays are left out.

    Example:
        >>> import numpy as np
        >>> scalar_leaves({"correct": np.float32(3), "layers": {"a": np.float32(1), "histogram": np.zeros(4)}})
        {'correct': np.float32(3.0), 'layers/a': np.float32(1.0)}
    """
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") or "aux": leaf
        for path, leaf in leaves
        if getattr(leaf, "ndim", 0) == 0
    }


def _finite_or_none(value: Any) -> float | None:
    """Return a number, or None for one that JSON cannot represent."""
    number = float(value)
    return number if math.isfinite(number) else None
