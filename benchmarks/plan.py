"""Look-ups and resumes compared with MaxText's replay, and the host's work in a
training step.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
from contenders import bench_optimizer, plan_for, stepper
from maxtext_baselines import MakeManager, manager_ramp, maxtext_manager
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    Seconds,
    ignore_row,
    main,
    take_turns,
)
from rich.console import Console

from rampup.config.schema import Config
from rampup.data.batches import step_batches
from rampup.data.sources import SyntheticRows
from rampup.engine.batch import Batch
from rampup.engine.mesh import make_mesh
from rampup.engine.optimizer import LearningRate
from rampup.engine.state import create_state
from rampup.engine.step import train_step
from rampup.lm.transformer import LanguageModel
from rampup.loop.events import RunPlanned
from rampup.loop.loop import Loop
from rampup.loop.metrics import MetricOptions
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import RampupBatchManager
from rampup.show.progress import TrainProgress

FAR_STEP = 10**9
REPLAYED, QUICK_REPLAYED = 300_000, 3_000
CALLS, QUICK_CALLS = 10_000, 50
LOOP_STEPS, QUICK_LOOP_STEPS = 1_000, 20
CONFIG = SimpleNamespace(
    per_device_batch_size_start=4,
    per_device_batch_size_increment=2,
    per_device_batch_size=128,
    global_rampup_samples=10**9,
    num_target_devices=64,
)


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time look-ups, resuming, and the host's part of a step."""
    manager, origin = maxtext_manager()
    rounds, replayed = (3, QUICK_REPLAYED) if quick else (ROUNDS, REPLAYED)
    found = Measurements(8, on_row)
    found.add(plan_rows(manager, rounds, QUICK_CALLS if quick else CALLS, replayed))
    found.add(host_rows(rounds, QUICK_LOOP_STEPS if quick else LOOP_STEPS))
    return BenchResult(
        name="plan",
        title=(
            f"look-ups and a resume at step {FAR_STEP:,} compared with MaxText's"
            " manager, and the host's work in a step"
        ),
        rows=found.rows,
        notes=[
            (
                f"MaxText's manager is {origin}; it answers for step {FAR_STEP:,} by"
                f" replaying every step before it: the time of {replayed:,} steps,"
                f" multiplied by {FAR_STEP // replayed:,}."
            ),
            (
                f"The ramp: {CONFIG.per_device_batch_size_start} to"
                f" {CONFIG.per_device_batch_size} by"
                f" {CONFIG.per_device_batch_size_increment} per device on"
                f" {CONFIG.num_target_devices} devices,"
                f" {len(manager_ramp(CONFIG).phases)} phases. times_faster is the"
                " baseline's time over rampup's."
            ),
            f"Medians of {rounds} rounds in turn.",
            (
                "The loop's part: look-ups, metrics file, learning rate and progress of"
                " every step. The host's part: also reading, splitting and placing the"
                " batches, and a step with three parameters. The baseline is a step of"
                " the default recipe's first phase on this device (goal: 100 times, and"
                " 200 us). Both are a long run less a short one."
            ),
        ],
    )


def plan_rows(
    manager: MakeManager, rounds: int, calls: int, replayed: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of look-ups and of resuming."""
    plan = plan_for(
        manager_ramp(CONFIG), 2 * FAR_STEP, replicas=CONFIG.num_target_devices
    )
    sample = plan.ramp.samples_before(FAR_STEP)
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "step -> samples, phase and split": (lambda: plan.position(FAR_STEP), calls),
        "step -> batch size": (lambda: plan.ramp.global_batch_size_at(FAR_STEP), calls),
        "sample -> step": (lambda: plan.ramp.step_of_sample(sample), calls),
        "resume, from a plan": (
            lambda: RampupBatchManager.from_plan(plan, FAR_STEP),
            calls,
        ),
        "resume, from a config": (
            lambda: RampupBatchManager(CONFIG, FAR_STEP),
            calls // 50,
        ),
    }
    repeated = {
        name: _repeat(function, number) for name, (function, number) in cases.items()
    }
    times = take_turns(
        repeated | {"replay": lambda: manager(CONFIG, replayed)}, rounds=rounds
    )
    replay = times["replay"].median * FAR_STEP / replayed
    for name, (_, number) in cases.items():
        yield _row(name, times[name], number, "replay, extrapolated", replay)

    def step(manager: Any) -> tuple[bool, int]:
        return manager.update(), manager.global_batch_size_current

    managers = {
        "rampup": RampupBatchManager.from_plan(plan),
        "baseline": manager(CONFIG, 0),
    }
    times = take_turns(
        {name: _repeat(partial(step, managers[name]), calls) for name in managers},
        rounds=rounds,
    )
    yield _row(
        "update, one step",
        times["rampup"],
        calls,
        "update",
        times["baseline"].median / calls,
    )


def _repeat(function: Callable[[], Any], number: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(number):
            function()

    return run


def _row(
    case: str, measured: Seconds, number: int, baseline: str, baseline_seconds: float
) -> dict[str, Any]:
    seconds = measured.median / number
    return {
        "case": case,
        "microseconds": seconds * 1e6,
        "spread": measured.spread,
        "peer": baseline,
        "peer_microseconds": baseline_seconds * 1e6,
        "times_faster": baseline_seconds / seconds,
    }


def host_rows(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the host's work in a step, compared with the default recipe's
    step.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    lengths = {"short": steps // 10, "long": steps + steps // 10}
    runs: dict[str, Callable[[], Any]] = {"recipe": _recipe_step(mesh)}
    for length, number in lengths.items():
        tiny = _Tiny(mesh, number)
        runs |= {f"loop, {length}": tiny.run_loop, f"host, {length}": tiny.run_host}
    times = take_turns(runs, rounds=rounds)
    for case in ("loop", "host"):
        pairs = zip(
            times[f"{case}, long"].all, times[f"{case}, short"].all, strict=True
        )
        difference = Seconds(all=tuple(long - short for long, short in pairs))
        yield _row(
            f"the {case}'s part of a step",
            difference,
            steps,
            "the default recipe's step",
            times["recipe"].median,
        )


def _recipe_step(mesh: jax.sharding.Mesh) -> Callable[[], Any]:
    """Return one optimizer step of the default recipe's first phase on one device."""
    config, tx = Config(), bench_optimizer()
    model, plan = (
        LanguageModel.from_config(config),
        plan_for(BatchRamp.constant(int(config.per_device_batch_size_start)), 1),
    )
    step = train_step(model.loss, tx, plan, mesh)
    state = create_state(model.init(jax.random.key(0)), tx, mesh)
    rows = SyntheticRows(
        64, sequence_length=config.max_target_length, vocab_size=config.vocab_size
    )
    (batch,) = step_batches(rows, plan, mesh)
    return partial(stepper(step, state), batch)


class _Tiny:
    """A training run with a model of three numbers, so that its time is the host's."""

    def __init__(self, mesh: jax.sharding.Mesh, steps: int) -> None:
        self._mesh, self._tx = mesh, optax.sgd(0.1)
        self._plan = plan_for(BatchRamp.constant(8), steps)
        self._rows = [{"x": np.float32(n)} for n in range(64)]

        def loss(params: Any, batch: Any, rngs: Any) -> tuple[Any, Any, Any]:
            return (
                ((params["w"] - batch["x"][:, None]) ** 2).sum(),
                batch["x"].shape[0],
                {},
            )

        self._step = train_step(loss, self._tx, self._plan, mesh)
        self._batch = next(step_batches(self._rows, self._plan, mesh))
        _, self._metrics = self._step(self._new_state(), self._batch)

    def _new_state(self) -> Any:
        return create_state({"w": np.zeros(3, np.float32)}, self._tx, self._mesh)

    def run_loop(self) -> None:
        """Run the loop with batches and a step that cost nothing."""
        batches = (
            Batch(self._plan.position(n), self._batch.chunks, self._batch.layout)
            for n in range(self._plan.total_steps)
        )
        self._through_loop(_ConstantStep(self._metrics), lambda start: batches)

    def run_host(self) -> None:
        """Run the loop with real batches and the step."""
        self._through_loop(
            self._step,
            lambda start: step_batches(self._rows, self._plan, self._mesh),
        )

    def _through_loop(
        self, step: Any, batches: Callable[[int], Iterator[Batch]]
    ) -> None:
        plan = self._plan
        with (
            tempfile.TemporaryDirectory(prefix="rampup-bench-") as folder,
            open(os.devnull, "w") as nowhere,
        ):
            progress = TrainProgress(Console(file=nowhere))
            progress(
                RunPlanned(
                    plan=plan,
                    num_parameters=3,
                    devices=jax.devices(),
                    folder=Path(folder),
                )
            )
            rate = LearningRate(plan=plan, peak=1e-3).at
            metrics = MetricOptions(
                learning_rate=rate,
                tokens_per_sample=1,
                flops_per_sample=1.0,
                on_event=progress,
            )
            loop = Loop(
                plan=plan,
                step=step,
                batches=batches,
                folder=Path(folder),
                metrics=metrics,
            )
            loop.run(self._new_state())


class _ConstantStep:
    """Replaces a training step: returns the same metrics at once."""

    num_compilations, waited_seconds = 0, 0.0

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def __call__(self, state: Any, _: Batch) -> tuple[Any, Any]:
        return state, self._metrics

    def close(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    main(plan=run)
