"""What knowing the plan costs: look-ups and resuming beside MaxText's replay, and the host's work in a training step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from rampup.bench.maxtext_manager import MakeManager, maxtext_manager
from rampup.bench.measure import ROUNDS, Seconds, take_turns
from rampup.bench.result import BenchResult
from rampup.config.schema import Config
from rampup.lm.train import language_model
from rampup.plan.maxtext_manager import RampupBatchManager
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.data.batches import Batch, step_batches
from rampup.run.data.sources import SyntheticRows
from rampup.run.events import RunPlanned
from rampup.run.loop import Loop
from rampup.run.mesh import make_mesh
from rampup.run.metrics import MetricOptions
from rampup.run.optimizer import LearningRate
from rampup.run.step import create_state, train_step
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


def run(*, quick: bool = False) -> BenchResult:
    """Time look-ups, resuming, and the host's part of a step.

    Args:
        quick: few calls and few rounds.
    """
    peer, origin = maxtext_manager()
    rounds, replayed = (3, QUICK_REPLAYED) if quick else (ROUNDS, REPLAYED)
    rows = [*plan_rows(peer, rounds, QUICK_CALLS if quick else CALLS, replayed)]
    rows += host_rows(rounds, QUICK_LOOP_STEPS if quick else LOOP_STEPS)
    return BenchResult(
        name="plan",
        title=f"look-ups and a resume at step {FAR_STEP:,} beside MaxText's manager, and the host's work in a training step",
        rows=rows,
        notes=[
            f"MaxText's manager is {origin}; it answers for step {FAR_STEP:,} by replaying every step before it, which was "
            f"timed for {replayed:,} steps and multiplied by {FAR_STEP // replayed:,}",
            f"the ramp: {CONFIG.per_device_batch_size_start} to {CONFIG.per_device_batch_size} by "
            f"{CONFIG.per_device_batch_size_increment} per device on {CONFIG.num_target_devices} devices, "
            f"{len(BatchRamp.linear(**_linear()).phases)} phases; times_faster is the peer's time over ours",
            f"medians of {rounds} rounds in turn",
            "the loop's part: look-ups, metrics file, learning rate and progress of every step, the devices' answers ready; "
            "the host's part: the same with batches read, cut and put on the device and with a step of three parameters, whose "
            "execution is in the time. Their peer is the step of the default recipe's first phase on this device, so that "
            "times_faster is how often the host's work fits into it (goal: 100, and 200 us)",
            "the difference of a long and a short run, so that what a run does once is not counted",
        ],
    )


def _linear() -> dict[str, Any]:
    devices = CONFIG.num_target_devices
    return {
        "start": devices * CONFIG.per_device_batch_size_start,
        "increment": devices * CONFIG.per_device_batch_size_increment,
        "end": devices * CONFIG.per_device_batch_size,
        "samples": CONFIG.global_rampup_samples,
    }


def plan_rows(peer: MakeManager, rounds: int, calls: int, replayed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of look-ups and of resuming.

    Args:
        peer: MaxText's manager.
        rounds: times that each is timed.
        calls: of ours in one round.
        replayed: steps that the peer replays in one round.
    """
    plan = RampPlan(
        ramp=BatchRamp.linear(**_linear()),
        splitter=BatchSplitter(data_parallel_size=CONFIG.num_target_devices),
        num_devices=CONFIG.num_target_devices,
        total_steps=2 * FAR_STEP,
    )
    sample, state = plan.ramp.samples_before(FAR_STEP), RampupBatchManager.from_plan(plan, FAR_STEP).state_dict()
    ours: dict[str, tuple[Callable[[], Any], int]] = {
        "step -> samples, phase and split": (lambda: plan.position(FAR_STEP), calls),
        "step -> batch size": (lambda: plan.ramp.global_batch_size_at(FAR_STEP), calls),
        "sample -> step": (lambda: plan.ramp.step_of_sample(sample), calls),
        "resume, from a plan": (lambda: RampupBatchManager.from_plan(plan, FAR_STEP), calls),
        "resume, from a checkpoint's state": (lambda: RampupBatchManager.from_plan(plan).load_state_dict(state), calls // 10),
        "resume, from a config": (lambda: RampupBatchManager(CONFIG, FAR_STEP), calls // 50),
    }
    repeated = {name: _repeated(function, number) for name, (function, number) in ours.items()}
    times = take_turns(repeated | {"replay": lambda: peer(CONFIG, replayed)}, rounds=rounds)
    replay = times["replay"].median * FAR_STEP / replayed
    for name, (_, number) in ours.items():
        yield _row(name, times[name], number, "replay, extrapolated", replay)
    stepping, theirs = RampupBatchManager.from_plan(plan), peer(CONFIG, 0)

    def step_ours() -> tuple[bool, int]:
        return stepping.update(), stepping.global_batch_size_current

    def step_theirs() -> tuple[bool, int]:
        return theirs.update(), theirs.global_batch_size_current

    times = take_turns({"ours": _repeated(step_ours, calls), "theirs": _repeated(step_theirs, calls)}, rounds=rounds)
    yield _row("update, one step", times["ours"], calls, "update", times["theirs"].median / calls)


def _repeated(function: Callable[[], Any], number: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(number):
            function()

    return run


def _row(case: str, ours: Seconds, number: int, peer: str, peer_seconds: float) -> dict[str, Any]:
    seconds = ours.median / number
    return {
        "case": case,
        "microseconds": seconds * 1e6,
        "spread": ours.spread,
        "peer": peer,
        "peer_microseconds": peer_seconds * 1e6,
        "times_faster": peer_seconds / seconds,
    }


def host_rows(rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the host's work in a step, beside the default recipe's step.

    Args:
        rounds: times that each is timed.
        steps: by which the long run is longer than the short one.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    recipe, tiny = _recipe_step(mesh), _Tiny(mesh)
    lengths = {"short": steps // 10, "long": steps + steps // 10}
    runs: dict[str, Callable[[], Any]] = {"recipe": recipe}
    for name, length in lengths.items():
        runs[f"loop, {name}"] = _bound(tiny.loop, length)
        runs[f"host, {name}"] = _bound(tiny.run, length)
    times = take_turns(runs, rounds=rounds)
    for case in ("loop", "host"):
        pairs = zip(times[f"{case}, long"].all, times[f"{case}, short"].all, strict=True)
        each = Seconds(all=tuple(long - short for long, short in pairs))
        yield _row(f"the {case}'s part of a step", each, steps, "the default recipe's step", times["recipe"].median)


def _bound(function: Callable[[int], Any], number: int) -> Callable[[], Any]:
    return lambda: function(number)


def _recipe_step(mesh: jax.sharding.Mesh) -> Callable[[], None]:
    """Return one optimizer step of the default recipe's first phase on one device."""
    config, tx = Config(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    model, plan = language_model(config), _constant_plan(int(config.per_device_batch_size_start), 1)
    step = train_step(model.loss, tx, plan, mesh)
    state = create_state(model.init(jax.random.key(0)), tx, mesh)
    rows = SyntheticRows(64, sequence_length=config.max_target_length, vocab_size=config.vocab_size)
    (batch,) = step_batches(rows, plan, mesh)

    def once() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()

    return once


def _constant_plan(batch: int, steps: int) -> RampPlan:
    ramp, splitter = BatchRamp.constant(batch), BatchSplitter(data_parallel_size=1)
    return RampPlan(ramp=ramp, splitter=splitter, num_devices=1, total_steps=steps)


class _Tiny:
    """A training run whose model is three numbers, so that its time is the host's."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh, self._tx = mesh, optax.sgd(0.1)
        self._rows = [{"x": np.float32(n)} for n in range(64)]

        def loss(params: Any, batch: Any, rngs: Any) -> tuple[Any, Any, Any]:
            return ((params["w"] - batch["x"][:, None]) ** 2).sum(), batch["x"].shape[0], {}

        plan = _constant_plan(8, 1)
        self._step = train_step(loss, self._tx, plan, mesh)
        (self._batch,) = step_batches(self._rows, plan, mesh)
        _, self._metrics = self._step(self._new_state(), self._batch)

    def _new_state(self) -> Any:
        return create_state({"w": np.zeros(3, np.float32)}, self._tx, self._mesh)

    def loop(self, steps: int) -> float:
        """Run the loop with batches and a step that cost nothing."""
        plan, step = _constant_plan(8, steps), _Answer(self._metrics)
        batches = (Batch(plan.position(n), self._batch.chunks, self._batch.layout) for n in range(steps))
        return self._through_loop(plan, step, lambda start: batches)

    def run(self, steps: int) -> float:
        """Run the loop with everything that it has."""
        plan, choose = _constant_plan(8, steps), self._step.split_for
        return self._through_loop(plan, self._step, lambda start: step_batches(self._rows, plan, self._mesh, split_for=choose))

    def _through_loop(self, plan: RampPlan, step: Any, batches: Callable[[int], Iterator[Batch]]) -> float:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="rampup-bench-") as folder, open("/dev/null", "w") as nowhere:
            progress = TrainProgress(Console(file=nowhere))
            progress(RunPlanned(plan=plan, num_parameters=3, devices=jax.devices(), folder=Path(folder)))
            Loop(
                plan=plan,
                step=step,
                batches=batches,
                folder=Path(folder),
                metrics=MetricOptions(
                    learning_rate=LearningRate(plan=plan, peak=1e-3).at, tokens_per_sample=1, flops_per_sample=1.0
                ),
                on_event=progress,
            ).run(self._new_state())
        return time.perf_counter() - start


class _Answer:
    """Stands in for a training step: the same metrics at once."""

    num_compilations, waited_seconds = 0, 0.0

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def __call__(self, state: Any, _: Batch) -> tuple[Any, Any]:
        return state, self._metrics

    def close(self) -> None:
        """Nothing to end."""
