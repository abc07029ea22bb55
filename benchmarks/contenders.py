"""What the benchmarks of training compare: models of several sizes, and the ways to
grow a batch.

Baselines take the loss of `LanguageModel`; their state is (parameters, optimizer state)
and a step returns (state, loss). Shape suffixes: K microbatches, R rows of one
microbatch, B rows of the batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from optax import microbatching

from rampup.engine.batch import Batch
from rampup.engine.mesh import batch_sharding, replicated
from rampup.engine.multi_steps import multi_steps
from rampup.engine.state import TrainState, prepare_state
from rampup.engine.step import train_step
from rampup.lm.transformer import LanguageModel
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter, RampupMicrobatch

FIXED, PER_PHASE, AUTO = "rampup, fixed", "rampup, per_phase", "rampup, auto"
JIT, MULTI_STEPS, MICROBATCHING = (
    "jit per batch size",
    "optax.MultiSteps",
    "optax.microbatching",
)
POLICIES: dict[str, RampupMicrobatch] = {
    FIXED: "fixed",
    PER_PHASE: "per_phase",
    AUTO: "auto",
}
CONTENDERS = (*POLICIES, JIT, MULTI_STEPS, MICROBATCHING)

# Bytes of a parameter in training: itself, its gradient and Adam's two moments, in
# float32.
BYTES_PER_PARAMETER = 16
# 1 / the share of a device's memory for them; the rest is for activations and for the
# other systems' states.
MEMORY_SHARE = 8

StepFn = Callable[..., tuple[Any, jax.Array]]


@dataclass(frozen=True)
class ArrayRows:
    """A RowSource of arrays in memory."""

    arrays: Mapping[str, np.ndarray]  # name -> array, rows first

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return these rows of every array."""
        return {name: array[rows] for name, array in self.arrays.items()}

    def describe(self, row: int) -> str:
        """Return the number of the row."""
        return f"row {row:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model and the shape of its microbatch."""

    name: str  # the name in the tables
    model: LanguageModel
    tokens: int  # T, tokens per row
    rows: int  # rows of one microbatch on one device

    def source(self, num_rows: int) -> ArrayRows:
        """Return random rows of T + 1 tokens, without padding."""
        tokens = np.random.default_rng(0).integers(
            self.model.vocab_size, size=(num_rows, self.tokens + 1), dtype=np.int32
        )
        return ArrayRows(
            {"tokens": tokens, "length": np.full(num_rows, self.tokens, np.int32)}
        )

    def plan(self, k: int, mesh: Mesh) -> RampPlan:
        """Return the plan of one step of k microbatches."""
        ramp = BatchRamp.constant(k * mesh.size * self.rows)
        return plan_for(ramp, 1, replicas=mesh.size, microbatch_size=self.rows)

    def params(self) -> Any:
        """Return small random parameters, made on the host so that nothing is compiled
        for them.
        """
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        return jax.tree.map(
            lambda s: (0.02 * rng.standard_normal(s.shape, np.float32)).astype(s.dtype),
            shapes,
        )

    def __str__(self) -> str:
        size = (
            f"{self.model.num_parameters / 1e6:.1f} M parameters, microbatches of"
            f" {self.rows} rows of {self.tokens} tokens"
        )
        return f"{self.name}: {size}, {self.model.dtype}"


def _model(*sizes: int, **more: Any) -> LanguageModel:
    names = ("num_layers", "width", "mlp_dim", "num_heads", "num_kv_heads")
    return LanguageModel(
        **dict(zip(names, sizes, strict=True)), **{"vocab_size": 256, **more}
    )


QUICK = Problem(name="quick", model=_model(1, 16, 32, 2, 1), tokens=8, rows=2)
SMALL = Problem(name="1M", model=_model(4, 128, 512, 4, 2), tokens=64, rows=8)
MEDIUM = Problem(name="10M", model=_model(6, 384, 1024, 6, 3), tokens=32, rows=4)
_LARGE = {
    "vocab_size": 32_768,
    "tied": True,
    "dtype": "bfloat16",
    "remat_policy": "minimal",
}
# For accelerators, the smallest first.
LARGE = (
    Problem(
        name="138M", model=_model(12, 768, 3072, 12, 12, **_LARGE), tokens=1024, rows=8
    ),
    Problem(
        name="1.3B", model=_model(24, 2048, 5632, 16, 16, **_LARGE), tokens=1024, rows=4
    ),
)


def problems(device: jax.Device, *, quick: bool = False) -> list[Problem]:
    """Return the problems for a device: two small ones on a CPU, and also the largest
    that fits on an accelerator.
    """
    if quick:
        return [QUICK]
    if device.platform == "cpu":
        return [SMALL, MEDIUM]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0) // MEMORY_SHARE
    fitting = [
        large
        for large in LARGE
        if large.model.num_parameters * BYTES_PER_PARAMETER <= memory
    ]
    return [SMALL, MEDIUM, fitting[-1] if fitting else LARGE[0]]


def main_problem(device: jax.Device, *, quick: bool = False) -> Problem:
    """Return the problem of a whole ramp: the 1 M model on a CPU, one of more than 100
    M on an accelerator.
    """
    if quick:
        return QUICK
    # At least 1,024 tokens, so that a step's work is in its rows and not in the
    # optimizer, as in real training.
    return replace(SMALL, rows=16) if device.platform == "cpu" else LARGE[0]


def plan_for(
    ramp: BatchRamp,
    total_steps: int,
    *,
    replicas: int = 1,
    microbatch_size: int = -1,
    policy: RampupMicrobatch = "fixed",
) -> RampPlan:
    """Return a plan of data parallelism only."""
    splitter = BatchSplitter(
        data_parallel_size=replicas,
        microbatch_size=microbatch_size,
        rampup_microbatch=policy,
    )
    return RampPlan(
        ramp=ramp, splitter=splitter, num_devices=replicas, total_steps=total_steps
    )


def with_policy(plan: RampPlan, policy: RampupMicrobatch) -> RampPlan:
    """Return a plan with another `rampup_microbatch`."""
    return replace(plan, splitter=replace(plan.splitter, rampup_microbatch=policy))


def bench_optimizer() -> optax.GradientTransformation:
    """Return the optimizer of the default recipe at a constant rate: AdamW after
    clipping by the global norm.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def new_state(
    problem: Problem, tx: optax.GradientTransformation | optax.MultiSteps, mesh: Mesh
) -> Any:
    """Return (parameters, optimizer state), replicated. AdamW and MultiSteps start from
    zeros, made on the host.
    """
    params = problem.params()
    opt_state = jax.tree.map(
        lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, params)
    )
    return jax.device_put((params, opt_state), replicated(mesh))


def start_rampup(
    problem: Problem, plan: RampPlan, mesh: Mesh, **options: Any
) -> tuple[Any, Any]:
    """Return rampup's training step, with further options of `train_step`, and its
    first state.
    """
    step = train_step(problem.model.loss, bench_optimizer(), plan, mesh, **options)
    params, opt_state = new_state(problem, step.tx, mesh)
    return step, prepare_state(
        TrainState(step=0, params=params, opt_state=opt_state), mesh
    )


def stepper(step: Any, state: Any) -> Callable[[Batch], tuple[Any, Any]]:
    """Return a function that takes the next optimizer step on a batch, waits for it,
    and returns the state and the metrics.
    """
    numbers = itertools.count()

    def take_step(batch: Batch) -> tuple[Any, Any]:
        nonlocal state
        state, metrics = step(
            state, batch._replace(position=replace(batch.position, step=next(numbers)))
        )
        done: tuple[Any, Any] = jax.block_until_ready((state, metrics))
        return done

    return take_step


# The baselines.


def baseline(
    name: str, problem: Problem, plan: RampPlan, mesh: Mesh
) -> tuple[Any, Any]:
    """Return the jitted step of a baseline, which donates its state, and its first
    state.
    """
    tx: Any = bench_optimizer()
    if name == MULTI_STEPS:
        tx = multi_steps(tx, plan)
    step = (
        microbatched(problem, tx, _microbatch_rows(plan))
        if name == MICROBATCHING
        else big_batch(problem, tx)
    )
    return jax.jit(step, donate_argnums=0, out_shardings=replicated(mesh)), new_state(
        problem, tx, mesh
    )


def baseline_calls(
    name: str, batch_B: Mapping[str, np.ndarray], plan: RampPlan
) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a baseline's step in one optimizer step,
    after the state.
    """
    size = _microbatch_rows(plan)
    num_rows = len(next(iter(batch_B.values())))
    if name == MULTI_STEPS:
        return [
            ({key: x[start : start + size] for key, x in batch_B.items()},)
            for start in range(0, num_rows, size)
        ]
    if name == MICROBATCHING:
        most = max(split.num_microbatches for split in plan.splits)
        return [(strided(dict(batch_B), size, most), jnp.int32(num_rows // size))]
    return [(dict(batch_B),)]


def _microbatch_rows(plan: RampPlan) -> int:
    """Return the rows of a microbatch on all replicas."""
    return plan.splits[0].data_parallel_size * plan.splits[0].microbatch_size


def big_batch(problem: Problem, tx: optax.GradientTransformation) -> StepFn:
    """Return the step that a person writes by hand: (state, batch_B) -> (state, loss),
    the whole batch at once.
    """

    def step(state: Any, batch_B: Any) -> tuple[Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            loss, weight, _ = problem.model.loss(params, batch_B)
            return loss / weight

        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_loss)(params)
        return _apply(tx, params, opt_state, grads), loss

    return step


def microbatched(
    problem: Problem, tx: optax.GradientTransformation, rows: int
) -> StepFn:
    """Return a step around `optax.microbatching`: (state, batch_B, number) -> (state,
    loss).

    The batch has `strided` rows in microbatches of `rows`. The first `number`
    microbatches count.
    """

    def sums(params: Any, batch_R: Any) -> tuple[Any, jax.Array, jax.Array]:
        def with_weight(params: Any) -> tuple[jax.Array, jax.Array]:
            return problem.model.loss(params, batch_R)[:2]

        (loss, weight), grads = jax.value_and_grad(with_weight, has_aux=True)(params)
        return grads, loss, weight

    def step(state: Any, batch_B: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        total = microbatching.microbatch(
            sums,
            argnums=1,
            microbatch_size=rows,
            accumulator=microbatching.AccumulationType.SUM,
            num_real_microbatches=number,
        )
        grads, loss, weight = total(params, batch_B)
        return (
            _apply(tx, params, opt_state, jax.tree.map(lambda g: g / weight, grads)),
            loss / weight,
        )

    return step


def scanned(problem: Problem, tx: optax.GradientTransformation) -> StepFn:
    """Return gradient accumulation by `jax.lax.scan`, which the compiler partitions:
    (state, batch_KR) -> (state, loss).

    Source: `utils/gradient_accumulation.py` of MaxText.
    """

    def step(state: Any, batch_KR: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state

        def with_weight(params: Any, batch_R: Any) -> tuple[jax.Array, jax.Array]:
            return problem.model.loss(params, batch_R)[:2]

        def add(so_far: Any, batch_R: Any) -> tuple[Any, None]:
            (loss, weight), grads = jax.value_and_grad(with_weight, has_aux=True)(
                params, batch_R
            )
            return jax.tree.map(jnp.add, so_far, (grads, loss, weight)), None

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.float32(0), jnp.float32(0)
        (grads, loss, weight), _ = jax.lax.scan(add, zeros, batch_KR)
        return (
            _apply(tx, params, opt_state, jax.tree.map(lambda g: g / weight, grads)),
            loss / weight,
        )

    return step


def _apply(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, grads: Any
) -> Any:
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def strided(batch_B: Any, rows: int, most: int) -> Any:
    """Return rows in the order in which `optax.microbatching` splits them, padded with
    zeros to `most` microbatches.

    Its microbatch i has the rows i, i + K, i + 2K and so on of K * R.

    Example:
        >>> strided(np.array([1, 2, 3, 4]), rows=2, most=3).tolist()
        [1, 3, 0, 2, 4, 0]
    """

    def reorder(x: np.ndarray) -> np.ndarray:
        padded = np.zeros((rows, most, *x.shape[1:]), x.dtype)
        padded[:, : len(x) // rows] = x.reshape(-1, rows, *x.shape[1:]).swapaxes(0, 1)
        return padded.reshape(rows * most, *x.shape[1:])

    return jax.tree.map(reorder, batch_B)


# A contender's run through a ramp.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A contender's run through a ramp, not started yet."""

    losses: Iterator[
        jax.Array
    ]  # yields the loss after every optimizer step; iterating runs the steps
    num_compilations: Callable[[], int]  # returns the compilations of the step so far
    microbatch_sizes: list[int] = field(
        default_factory=list
    )  # microbatch size of each step, filled while it runs


def start_run(name: str, problem: Problem, plan: RampPlan, mesh: Mesh) -> Run:
    """Return a contender's run, with its state on the devices and nothing compiled.

    The plan has `rampup_microbatch=fixed`; contenders with a fixed microbatch take its
    microbatches.
    """
    source = problem.source(4 * plan.ramp.sizes[-1])
    sizes: list[int] = []
    if name in POLICIES:
        plan = with_policy(plan, POLICIES[name])
        rampup_step, rampup_first = start_rampup(problem, plan, mesh)

        def rampup_losses() -> Iterator[jax.Array]:
            state = rampup_first
            for batch in rampup_step.batches(source):
                sizes.append(batch.position.split.microbatch_size)
                state, metrics = rampup_step(state, batch)
                yield metrics["loss"]

        def compilations():
            return rampup_step.num_compilations

        return Run(
            losses=rampup_losses(),
            num_compilations=compilations,
            microbatch_sizes=sizes,
        )
    step, first = baseline(name, problem, plan, mesh)

    def losses() -> Iterator[jax.Array]:
        state = first
        for number in range(plan.total_steps):
            split, rows = plan.position(number).split, plan.rows(number)
            batch_B = {
                key: np.take(x, rows, axis=0, mode="wrap")
                for key, x in source.arrays.items()
            }
            sizes.append(
                split.global_batch_size if name == JIT else split.microbatch_size
            )
            for rows_B, *more in baseline_calls(name, batch_B, plan):
                state, loss = step(
                    state, jax.device_put(rows_B, batch_sharding(mesh)), *more
                )
            yield loss

    return Run(
        losses=losses(), num_compilations=step._cache_size, microbatch_sizes=sizes
    )


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Disable the persistent compilation cache, so that everything compiles."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX decides only once per process whether there is a cache.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
