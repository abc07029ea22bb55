"""Training steps that are timed beside ours: written by hand, with optax.MultiSteps, with optax.microbatching.

All of them take the loss of `LanguageModel` and return a state (parameters, optimizer state) and a loss.
Shape suffixes: K microbatches, R rows of one microbatch, B rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from optax import microbatching

from rampup.bench.problem import ArrayRows, Problem, bench_optimizer, optimizer_state
from rampup.plan.plan import RampPlan
from rampup.plan.split import RampupMicrobatch
from rampup.run.accumulate import multi_steps
from rampup.run.data.batches import step_batches
from rampup.run.mesh import batch_sharding, replicated
from rampup.run.step import TrainState, prepare_state, train_step

StepFn = Callable[..., tuple[Any, jax.Array]]
FIXED, PER_PHASE, AUTO = "ours, fixed", "ours, per_phase", "ours, auto"
JIT, MULTI_STEPS, MICROBATCHING = "jit per batch size", "optax.MultiSteps", "optax.microbatching"


def big_batch(problem: Problem, tx: optax.GradientTransformation) -> StepFn:
    """Return the step that a person writes by hand: (state, batch_B) -> (state, loss), the whole batch at once."""

    def step(state: Any, batch_B: Any) -> tuple[Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            loss, weight, _ = problem.model.loss(params, batch_B)
            return loss / weight

        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_loss)(params)
        return _updated(tx, params, opt_state, grads), loss

    return step


def microbatched(problem: Problem, tx: optax.GradientTransformation, rows: int) -> StepFn:
    """Return a step around `optax.microbatching`: (state, batch_B, number) -> (state, loss).

    Args:
        problem: the model.
        tx: the optimizer.
        rows: R. The batch holds `strided` rows, of which the first `number` microbatches count.
    """

    def sums(params: Any, batch_R: Any) -> tuple[Any, jax.Array, jax.Array]:
        def with_weight(params: Any) -> tuple[jax.Array, jax.Array]:
            return problem.model.loss(params, batch_R)[:2]

        (loss, weight), grads = jax.value_and_grad(with_weight, has_aux=True)(params)
        return grads, loss, weight

    def step(state: Any, batch_B: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        total = microbatching.microbatch(
            sums, argnums=1, microbatch_size=rows, accumulator=microbatching.AccumulationType.SUM, num_real_microbatches=number
        )
        grads, loss, weight = total(params, batch_B)
        return _updated(tx, params, opt_state, jax.tree.map(lambda g: g / weight, grads)), loss / weight

    return step


def _updated(tx: optax.GradientTransformation, params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def strided(batch_B: Any, rows: int, most: int) -> Any:
    """Return rows in the order that `optax.microbatching` cuts them in, filled up with zeros to `most` microbatches.

    Its microbatch i holds the rows i, i + K, i + 2K and so on of K * R.

    Args:
        batch_B: arrays of whole microbatches.
        rows: R.
        most: K.

    Example:
        >>> strided(np.array([1, 2, 3, 4]), rows=2, most=3).tolist()
        [1, 3, 0, 2, 4, 0]
    """

    def of(x: np.ndarray) -> np.ndarray:
        filled = np.zeros((rows, most, *x.shape[1:]), x.dtype)
        filled[:, : len(x) // rows] = x.reshape(-1, rows, *x.shape[1:]).swapaxes(0, 1)
        return filled.reshape(rows * most, *x.shape[1:])

    return jax.tree.map(of, batch_B)


def jitted(step: StepFn, mesh: Mesh) -> Any:
    """Return the step compiled with its state donated and whole on every device, its rows as they are given."""
    return jax.jit(step, donate_argnums=0, out_shardings=replicated(mesh))


def new_state(problem: Problem, tx: optax.GradientTransformation | optax.MultiSteps, mesh: Mesh) -> Any:
    """Return (parameters, optimizer state), whole on every device."""
    params = problem.params()
    return jax.device_put((params, optimizer_state(tx, params)), replicated(mesh))


def our_state(problem: Problem, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Return the same as a training state of ours."""
    params, opt_state = new_state(problem, tx, mesh)
    state: TrainState = prepare_state(TrainState(step=0, params=params, opt_state=opt_state), mesh)
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A contender's way through a ramp.

    Attributes:
        losses: the loss after every optimizer step, on the device; running it is what is timed.
        num_compilations: of the step, so far.
        microbatch_sizes: what each step was cut into, filled as it runs.
        late_steps: steps that ran in the shape of a phase before, because their own was not compiled yet; filled too.
    """

    losses: Iterator[jax.Array]
    num_compilations: Callable[[], int]
    microbatch_sizes: list[int]
    late_steps: list[int] = field(default_factory=list)


def start_run(name: str, problem: Problem, plan: RampPlan, rows: ArrayRows, mesh: Mesh) -> Run:
    """Prepare a contender, its state on the devices and nothing compiled.

    Args:
        name: one of the names above.
        problem: the model.
        plan: with `rampup_microbatch=fixed`; the ramp, and the microbatches of all contenders with one fixed size.
        rows: the data.
        mesh: one device or several on the data axis.
    """
    if name in _OURS:
        return _ours(problem, with_policy(plan, _OURS[name]), rows, mesh)
    return _PEERS[name](problem, plan, rows, mesh)


def with_policy(plan: RampPlan, policy: RampupMicrobatch) -> RampPlan:
    """Return a plan with another way to absorb the ramp."""
    return replace(plan, splitter=replace(plan.splitter, rampup_microbatch=policy))


def _ours(problem: Problem, plan: RampPlan, rows: ArrayRows, mesh: Mesh) -> Run:
    tx = bench_optimizer()
    step = train_step(problem.model.loss, tx, plan, mesh)
    state = our_state(problem, tx, mesh)
    sizes: list[int] = []
    late: list[int] = []

    def losses() -> Iterator[jax.Array]:
        nonlocal state
        for batch in step_batches(rows, plan, mesh, split_for=step.split_for):
            position = batch.position
            sizes.append(position.split.microbatch_size)
            late.extend([position.step] * (position.split != plan.position(position.step).split))
            state, metrics = step(state, batch)
            yield metrics["loss"]
        step.close()

    return Run(losses=losses(), num_compilations=lambda: step.num_compilations, microbatch_sizes=sizes, late_steps=late)


def _jit_per_size(problem: Problem, plan: RampPlan, rows: ArrayRows, mesh: Mesh) -> Run:
    tx = bench_optimizer()
    step, state = jitted(big_batch(problem, tx), mesh), new_state(problem, tx, mesh)
    sizes: list[int] = []

    def losses() -> Iterator[jax.Array]:
        nonlocal state
        for number in range(plan.total_steps):
            batch_B = _batch(rows, plan, number)
            sizes.append(plan.position(number).split.global_batch_size)
            state, loss = step(state, jax.device_put(batch_B, batch_sharding(mesh)))
            yield loss

    return Run(losses=losses(), num_compilations=step._cache_size, microbatch_sizes=sizes)


def _multi_steps(problem: Problem, plan: RampPlan, rows: ArrayRows, mesh: Mesh) -> Run:
    tx, size = multi_steps(bench_optimizer(), plan), plan.splits[0].data_parallel_size * plan.splits[0].microbatch_size
    step, state = jitted(big_batch(problem, tx), mesh), new_state(problem, tx, mesh)
    sizes: list[int] = []

    def losses() -> Iterator[jax.Array]:
        nonlocal state
        for number in range(plan.total_steps):
            batch_B, split = _batch(rows, plan, number), plan.position(number).split
            sizes.append(split.microbatch_size)
            for start in range(0, split.global_batch_size, size):
                part = {name: x[start : start + size] for name, x in batch_B.items()}
                state, loss = step(state, jax.device_put(part, batch_sharding(mesh)))
            yield loss

    return Run(losses=losses(), num_compilations=step._cache_size, microbatch_sizes=sizes)


def _optax_microbatching(problem: Problem, plan: RampPlan, rows: ArrayRows, mesh: Mesh) -> Run:
    tx, most = bench_optimizer(), max(split.num_microbatches for split in plan.splits)
    size = plan.splits[0].data_parallel_size * plan.splits[0].microbatch_size
    step, state = jitted(microbatched(problem, tx, size), mesh), new_state(problem, tx, mesh)
    sizes: list[int] = []

    def losses() -> Iterator[jax.Array]:
        nonlocal state
        for number in range(plan.total_steps):
            split = plan.position(number).split
            batch_B = jax.device_put(strided(_batch(rows, plan, number), size, most), batch_sharding(mesh))
            sizes.append(split.microbatch_size)
            state, loss = step(state, batch_B, jnp.int32(split.num_microbatches))
            yield loss

    return Run(losses=losses(), num_compilations=step._cache_size, microbatch_sizes=sizes)


def _batch(rows: ArrayRows, plan: RampPlan, step: int) -> dict[str, np.ndarray]:
    samples = plan.rows(step)
    return {name: np.take(x, samples, axis=0, mode="wrap") for name, x in rows.arrays.items()}


_OURS: dict[str, RampupMicrobatch] = {FIXED: "fixed", PER_PHASE: "per_phase", AUTO: "auto"}
_PEERS: dict[str, Callable[[Problem, RampPlan, ArrayRows, Mesh], Run]] = {
    JIT: _jit_per_size,
    MULTI_STEPS: _multi_steps,
    MICROBATCHING: _optax_microbatching,
}
CONTENDERS = (*_OURS, *_PEERS)
