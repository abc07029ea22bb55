"""The training step: one call per optimizer step, one executable per microbatch shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.errors import ConfigError, PipelineShapeError
from rampup.plan.plan import RampPlan
from rampup.run.accumulate import LossFn, Sums, accumulate, accumulator, multi_steps, per_replica, row_keys
from rampup.run.data import Batch
from rampup.run.mesh import DATA, STAGE, replicated, shardings_like
from rampup.run.pipeline import pipeline_sums
from rampup.run.pipeline_stage import PipelinedLoss

Metrics = dict[str, Any]
ENGINES = ("fused", "multi_steps")


class TrainState(struct.PyTreeNode):
    """What training changes. Flax's own `TrainState` works as well.

    Attributes:
        step: optimizer steps done, int32.
        params: the parameters.
        opt_state: the optimizer's state.
        mutable: what the loss function carries from microbatch to microbatch, such as batch statistics; or None.
    """

    step: Any
    params: Any
    opt_state: Any
    mutable: Any = None


def create_state(
    params: Any, tx: optax.GradientTransformation | optax.MultiSteps, mesh: Mesh, *, mutable: Any = None
) -> TrainState:
    """Return the state of a run at step 0, every leaf placed on the mesh.

    Args:
        params: the parameters; those that lie on the mesh keep their sharding, others are replicated.
        tx: the optimizer; its state takes the sharding of the parameters it mirrors.
        mesh: the devices.
        mutable: see `TrainState`.
    """
    params = jax.device_put(params, shardings_like(params, mesh))
    return prepare_state(TrainState(step=0, params=params, opt_state=tx.init(params), mutable=mutable), mesh)


def prepare_state(state: Any, mesh: Mesh) -> Any:
    """Return a training state that compiles once: `step` a strong int32, every leaf placed on the mesh.

    A stock Flax `TrainState` starts with a Python integer as step and with leaves on one device, and compiles twice.

    Args:
        state: has `step`, `params`, `opt_state` and `replace`, as `flax.training.train_state.TrainState` has.
        mesh: the devices; leaves that lie on it already keep their sharding, others are replicated.
    """
    state = state.replace(step=jnp.asarray(state.step, jnp.int32))
    return jax.device_put(state, shardings_like(state, mesh))


class TrainStep:
    """A compiled training step that follows a plan; made by `train_step`.

    Attributes:
        tx: the optimizer as it runs; with `multi_steps` wrapped in `optax.MultiSteps`.
        num_compilations: executables built so far.
    """

    def __init__(
        self,
        loss_fn: LossFn | PipelinedLoss,
        tx: optax.GradientTransformation,
        plan: RampPlan,
        mesh: Mesh,
        *,
        engine: str = "fused",
        seed: int = 0,
    ) -> None:
        if engine not in ENGINES:
            raise ConfigError(
                f"gradient_accumulation={engine!r} must be one of {', '.join(ENGINES)}",
                key="gradient_accumulation",
                nearest=ENGINES,
            )
        pipelined, stages = isinstance(loss_fn, PipelinedLoss), dict(mesh.shape).get(STAGE, 1)
        if stages > 1 and not pipelined:
            raise PipelineShapeError(
                f"the mesh has {stages} pipeline stages, so the loss must say what a stage does: give a PipelinedLoss",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )
        if pipelined and engine == "multi_steps":
            raise ConfigError(
                "gradient_accumulation=multi_steps is without a pipeline; fused runs the optimizer once per step too",
                key="gradient_accumulation",
                nearest=("fused",),
            )
        self.tx = multi_steps(tx, plan) if engine == "multi_steps" else tx
        self.num_compilations = 0
        self._loss_fn, self._mesh, self._fused = loss_fn, mesh, engine == "fused"
        self._seed = jax.random.key(seed)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._zeros: dict[Any, Any] = {}
        self._nothing: Metrics | None = None

    def __call__(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step.

        Args:
            state: the training state, placed by `create_state` or `prepare_state`; its memory is reused, so go on with the
                returned one.
            batch: from `step_batches` of the same plan, with `one_by_one=True` for the engine `multi_steps`.

        Returns:
            The new state and the step's metrics, on the devices: `loss` (the weighted mean), `weight`, `aux` (sums) and,
            with the engine `fused`, `grad_norm`.
        """
        if self._fused:
            split = batch.position.split
            counts = np.int32(split.num_pipeline_microbatches), np.int32(split.accumulation_steps)
            chunks = self._filled_up(batch)
            return self._executable(_fused_step, batch, state, chunks, counts)(state, chunks, counts)
        sums = None
        for number, chunk in enumerate(batch.chunks):
            place = np.int32(number * batch.layout.rows)
            sums = self._no_sums(state, chunk) if sums is None else sums
            state, sums = self._executable(_micro_step, batch, state, sums, chunk, place)(state, sums, chunk, place)
        assert sums is not None
        return state, sums

    def _executable(self, function: Callable[..., Any], batch: Batch, state: Any, *args: Any) -> Callable[..., Any]:
        key = _shapes(batch)
        if key not in self._compiled:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            bound = functools.partial(function, self._loss_fn, self.tx, self._mesh, shardings.params, self._seed)
            jitted = jax.jit(bound, donate_argnums=0, out_shardings=(shardings, replicated(self._mesh)))
            self._compiled[key] = jitted.lower(state, *args).compile()
            self.num_compilations += 1
        return self._compiled[key]

    def _no_sums(self, state: Any, chunk: Any) -> Metrics:
        """Return the metrics of no microbatch at all."""
        if self._nothing is None:
            aux = jax.eval_shape(functools.partial(_aux_of, self._loss_fn), state, chunk)
            zeros = {
                "loss": jnp.float32(0),
                "weight": jnp.float32(0),
                "aux": jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), aux),
            }
            self._nothing = jax.device_put(zeros, replicated(self._mesh))
        return self._nothing

    def _filled_up(self, batch: Batch) -> tuple[Any, ...]:
        """Return all chunks of the buffer: those of the batch, then the one of zeros that is on the devices already."""
        key = _shapes(batch)
        if key not in self._zeros:
            self._zeros[key] = jax.tree.map(jnp.zeros_like, batch.chunks[0])
        return batch.chunks + (self._zeros[key],) * (batch.layout.num_chunks - len(batch.chunks))


def train_step(
    loss_fn: LossFn | PipelinedLoss,
    tx: optax.GradientTransformation,
    plan: RampPlan,
    mesh: Mesh,
    *,
    engine: str = "fused",
    seed: int = 0,
) -> TrainStep:
    """Return a training step that follows a plan: one executable for every phase that shares a microbatch shape.

    Gradients and losses are summed over all microbatches in float32, reduced over the data axis once, and divided by the sum
    of the weights, so that every token counts the same wherever it stands.

    Args:
        loss_fn: `loss_fn(params, batch, rngs) -> (loss_sum, weight_sum, aux)`, sums over the rows it is given. `batch` has
            rows in front; `rngs` is one random key per row, which depends on seed, step and row alone. If the state has
            `mutable`, it is a fourth argument and its new value a fourth result. With pipeline stages, a `PipelinedLoss`.
        tx: the optimizer, run once per optimizer step.
        plan: the plan.
        mesh: the devices.
        engine: `fused`, or `multi_steps` for `optax.MultiSteps` (see `multi_steps` for how it differs).
        seed: of the random keys.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.run.data import step_batches
        >>> from rampup.run.mesh import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=20)
        >>> def loss_fn(params, batch, rngs):
        ...     return jnp.sum((params["w"] - batch["x"]) ** 2), batch["x"].size, {}
        >>> tx = optax.sgd(0.1)
        >>> state = create_state({"w": jnp.zeros(())}, tx, mesh)
        >>> step = train_step(loss_fn, tx, plan, mesh)
        >>> for batch in step_batches([{"x": np.float32(3)}] * 8, plan, mesh):
        ...     state, metrics = step(state, batch)
        >>> round(float(state.params["w"]), 2), int(state.step), step.num_compilations
        (2.97, 20, 1)
    """
    return TrainStep(loss_fn, tx, plan, mesh, engine=engine, seed=seed)


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. Made with the loss function of training."""

    def __init__(self, loss_fn: LossFn | PipelinedLoss, mesh: Mesh) -> None:
        self._loss_fn, self._mesh = loss_fn, mesh
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, sum of weights) of a batch, on the devices."""
        key = _shapes(batch)
        if key not in self._compiled:
            bound = functools.partial(_eval_sums, self._loss_fn, self._mesh)
            self._compiled[key] = jax.jit(bound, out_shardings=replicated(self._mesh)).lower(state, batch.chunks).compile()
        return self._compiled[key](state, batch.chunks)


def _fused_step(
    loss_fn: LossFn | PipelinedLoss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    state: Any,
    chunks: tuple[Any, ...],
    counts: tuple[jax.Array, jax.Array],
) -> tuple[Any, Metrics]:
    sums = _sum_over(loss_fn, mesh, param_shardings, seed, state, _joined(chunks), counts, jnp.int32(0))
    grads = _mean_gradient(sums, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": sums.loss * _inverse(sums.weight),
        "weight": sums.weight,
        "grad_norm": _norm(grads),
        "aux": sums.aux,
    }
    return _replaced(state, sums, params=params, opt_state=opt_state, step=state.step + 1), metrics


def _micro_step(
    loss_fn: LossFn,
    tx: optax.MultiSteps,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    state: Any,
    so_far: Metrics,
    chunk: Any,
    first_row: jax.Array,
) -> tuple[Any, Metrics]:
    sums = _sum_over(loss_fn, mesh, param_shardings, seed, state, chunk, (jnp.int32(1), jnp.int32(1)), first_row)
    updates, opt_state = tx.update(_mean_gradient(sums, state.params), state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    weight = so_far["weight"] + sums.weight
    metrics = {
        "loss": (so_far["loss"] * so_far["weight"] + sums.loss) * _inverse(weight),
        "weight": weight,
        "aux": jax.tree.map(jnp.add, so_far["aux"], sums.aux),
    }
    return _replaced(state, sums, params=params, opt_state=opt_state, step=opt_state.gradient_step), metrics


def _eval_sums(loss_fn: LossFn | PipelinedLoss, mesh: Mesh, state: Any, chunks: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    batch_KR = _joined(chunks)
    keys_KR = row_keys(jax.random.key(0), jnp.int32(0), _row_numbers(batch_KR, 0))
    if isinstance(loss_fn, PipelinedLoss):
        shardings = jax.tree.map(lambda _: replicated(mesh), state.params)
        options: dict[str, Any] = {"mesh": mesh, "param_shardings": shardings, "with_grads": False}
        sums = pipeline_sums(loss_fn, state.params, batch_KR, keys_KR.shape[0], keys_KR, **options)
        return sums.loss, sums.weight

    def of_one_replica(batch_KR: Any, keys_KR: jax.Array, params: Any, carried: Any) -> tuple[jax.Array, jax.Array]:
        def add(i: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            batch_R = jax.tree.map(lambda x: x[i], batch_KR)
            loss, weight, *_ = loss_fn(params, batch_R, keys_KR[i], *(() if carried is None else (carried,)))
            return so_far[0] + loss, so_far[1] + weight

        zero = jnp.zeros((), jnp.float32)
        sums = jax.lax.fori_loop(0, keys_KR.shape[0], add, (zero, zero))
        return jax.lax.psum(sums, DATA) if mesh.shape[DATA] > 1 else sums

    run = per_replica(of_one_replica, mesh, rows=(0, 1)) if mesh.shape[DATA] > 1 else of_one_replica
    return run(batch_KR, keys_KR, state.params, _carried(state))


def _aux_of(loss_fn: LossFn, state: Any, chunk: Any) -> Any:
    """What the loss function returns besides loss and weight, in the type that sums have."""
    batch_R = jax.tree.map(lambda x: x[0], chunk)
    keys_R = row_keys(jax.random.key(0), jnp.int32(0), _row_numbers(chunk, 0))[0]
    carried = _carried(state)
    return jax.tree.map(accumulator, loss_fn(state.params, batch_R, keys_R, *(() if carried is None else (carried,)))[2])


def _sum_over(
    loss_fn: LossFn | PipelinedLoss,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    state: Any,
    batch_KR: Any,
    counts: tuple[jax.Array, jax.Array],
    first_row: jax.Array,
) -> Sums:
    keys_KR = row_keys(seed, state.step, _row_numbers(batch_KR, first_row))
    m, passes = counts
    options: dict[str, Any] = {"mesh": mesh, "param_shardings": param_shardings}
    if isinstance(loss_fn, PipelinedLoss):
        return pipeline_sums(loss_fn, state.params, batch_KR, m, keys_KR, num_passes=passes, **options)
    return accumulate(loss_fn, state.params, batch_KR, m * passes, keys_KR, mutable=_carried(state), **options)


def _joined(chunks: tuple[Any, ...]) -> Any:
    return chunks[0] if len(chunks) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)


def _row_numbers(batch_KR: Any, first_row: Any) -> jax.Array:
    K, R = jax.tree.leaves(batch_KR)[0].shape[:2]
    return first_row + jnp.arange(K * R, dtype=jnp.int32).reshape(K, R)


def _mean_gradient(sums: Sums, params: Any) -> Any:
    inverse = _inverse(sums.weight)
    return jax.tree.map(lambda g, p: (g * inverse).astype(p.dtype), sums.grads, params)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _inverse(weight: jax.Array) -> jax.Array:
    """1 / weight; 0 for a batch in which nothing counts, so that it changes nothing."""
    return jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)


def _carried(state: Any) -> Any:
    return getattr(state, "mutable", None)


def _replaced(state: Any, sums: Sums, **changes: Any) -> Any:
    return state.replace(**changes) if sums.mutable is None else state.replace(**changes, mutable=sums.mutable)


def _shapes(batch: Batch) -> Any:
    return batch.layout, tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch.chunks[0]))
