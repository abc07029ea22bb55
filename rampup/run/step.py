"""The training step: one call per optimizer step, one executable per microbatch shape."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.errors import ConfigError, PipelineShapeError
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit
from rampup.run.accumulate import LossFn, multi_steps
from rampup.run.compile import Compiler, compile_program
from rampup.run.consensus import Agreement
from rampup.run.data.batches import Batch, layout_of
from rampup.run.data.buffer import BufferLayout
from rampup.run.mesh import STAGE, batch_sharding, replicated, shardings_like
from rampup.run.offload import near_devices, on_devices_first
from rampup.run.pipeline_stage import PipelinedLoss
from rampup.run.step_programs import Metrics, aux_of, eval_sums, fused_step, micro_step

ENGINES = ("fused", "multi_steps")
PHASES_AHEAD = 2


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

    Where a later phase has another shape, its program is compiled in the background while the phases before it run.

    Attributes:
        tx: the optimizer as it runs; with `multi_steps` wrapped in `optax.MultiSteps`.
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
        skip_nonfinite: bool = False,
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
        self._plan, self._compiler = plan, Compiler()
        self._agreement = Agreement()
        self._loss_fn, self._mesh, self._fused = loss_fn, mesh, engine == "fused"
        self._seed, self._skips = jax.random.key(seed), skip_nonfinite
        self._zeros: dict[Any, Any] = {}
        self._nothing: Metrics | None = None

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""
        return self._compiler.num_compilations

    @property
    def waited_seconds(self) -> float:
        """Time that steps have waited for a compilation."""
        return self._compiler.waited_seconds

    def close(self) -> None:
        """Give up programs that are only waiting to be compiled."""
        self._compiler.close()

    def split_for(self, position: PlanPosition) -> BatchSplit:
        """Return how to cut a batch now: as planned, or as in the phase before while the planned shape is being compiled.

        Processes agree on the step from which the planned shape is used. For `step_batches(..., split_for=...)`.
        """
        one_shape = not self._fused or self._plan.num_compiled_shapes == 1
        if one_shape or self._is_ready(position.split, position):
            return position.split
        known = (split for split in self._plan.fallbacks(position.phase.index) if self._is_ready(split, position))
        return next(known, position.split)

    def choose_split(self, position: PlanPosition) -> BatchSplit:
        """Return `split_for(position)`; the old name."""
        warnings.warn("TrainStep.choose_split is now TrainStep.split_for", DeprecationWarning, stacklevel=2)
        return self.split_for(position)

    def _is_ready(self, split: BatchSplit, position: PlanPosition) -> bool:
        """Say whether every process has the program for a split."""
        layout = layout_of(self._plan, split)
        return self._agreement.reached(f"layout{layout.rows}", self._compiler.is_ready(layout), position.step)

    def __call__(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step.

        Args:
            state: the training state, placed by `create_state` or `prepare_state`; its memory is reused, so go on with the
                returned one.
            batch: from `step_batches` of the same plan, with `chunk_size=1` for the engine `multi_steps`.

        Returns:
            The new state and the step's metrics, on the devices: `loss` (the weighted mean), `weight`, `aux` (sums),
            with the engine `fused` `grad_norm` and, with `skip_nonfinite`, `skipped`.
        """
        if self._fused:
            split = batch.position.split
            chunks = self._filled_up(batch)
            program = self._program(fused_step, batch.layout, state, chunks, _counts(split))
            self._compile_ahead(batch, state)
            return program(state, chunks, _counts(split))
        sums = None
        for number, chunk in enumerate(batch.chunks):
            place = np.int32(number * batch.layout.rows)
            sums = self._no_sums(state, chunk) if sums is None else sums
            state, sums = self._program(micro_step, batch.layout, state, sums, chunk, place)(state, sums, chunk, place)
        assert sums is not None
        return state, sums

    def lower(self, state: Any, row: Any, split: BatchSplit) -> Any:
        """Return the step for one way to cut a batch, lowered and not yet compiled, without any data.

        Args:
            state: the training state, or its shapes and shardings as `jax.ShapeDtypeStruct`.
            row: one row of the data, or its shapes.
            split: a split of the plan.

        Returns:
            A `jax.stages.Lowered`.
        """
        layout = layout_of(self._plan, split)
        sharding = batch_sharding(self._mesh, leading=1)

        def chunk(x: Any) -> jax.ShapeDtypeStruct:
            shape = (layout.chunk_size, layout.rows, *np.shape(x))
            return jax.ShapeDtypeStruct(shape, np.result_type(x), sharding=sharding)

        chunks = (jax.tree.map(chunk, row),) * layout.num_chunks
        return self._lower(fused_step, state, chunks, _counts(split))

    def _program(self, function: Callable[..., Any], layout: BufferLayout, state: Any, *args: Any) -> Callable[..., Any]:
        program: Callable[..., Any] = self._compiler.get(layout, lambda: self._lower(function, state, *args))
        return program

    def _lower(self, function: Callable[..., Any], state: Any, *args: Any) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        params = near_devices(shardings.params)
        bound = functools.partial(function, self._loss_fn, self.tx, self._mesh, params, self._seed, self._skips)
        run = on_devices_first(bound, shardings)
        return jax.jit(run, donate_argnums=0, out_shardings=(shardings, replicated(self._mesh))).lower(state, *args)

    def _compile_ahead(self, batch: Batch, state: Any) -> None:
        """Begin to compile the shapes of the next phases that this run reaches."""
        phase, shapes = batch.position.phase.index, None
        for split in self._plan.splits_ahead(phase, PHASES_AHEAD):
            layout = layout_of(self._plan, split)
            if self._compiler.is_known(layout):
                continue
            if shapes is None:
                rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), batch.chunks[0])
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state), rows
            self._compiler.compile_async(layout, functools.partial(self.lower, *shapes, split))

    def _no_sums(self, state: Any, chunk: Any) -> Metrics:
        """Return the metrics of no microbatch at all."""
        if self._nothing is None:
            aux = jax.eval_shape(functools.partial(aux_of, self._loss_fn), state, chunk)
            zeros = {
                "loss": jnp.float32(0),
                "weight": jnp.float32(0),
                "aux": jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), aux),
                **({"skipped": jnp.array(False)} if self._skips else {}),
            }
            self._nothing = jax.device_put(zeros, replicated(self._mesh))
        return self._nothing

    def _filled_up(self, batch: Batch) -> tuple[Any, ...]:
        """Return all chunks of the buffer: those of the batch, then the one of zeros that is on the devices already."""
        if batch.layout not in self._zeros:
            # Made on the host: a program for it would be compiled at a phase change, with the run waiting.
            self._zeros[batch.layout] = jax.tree.map(_zeros_like, batch.chunks[0])
        return batch.chunks + (self._zeros[batch.layout],) * (batch.layout.num_chunks - len(batch.chunks))


def train_step(
    loss_fn: LossFn | PipelinedLoss,
    tx: optax.GradientTransformation,
    plan: RampPlan,
    mesh: Mesh,
    *,
    engine: str = "fused",
    seed: int = 0,
    skip_nonfinite: bool = False,
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
        skip_nonfinite: leave a step out whose loss or gradient is not finite: parameters, optimizer state and `mutable` stay
            as they were, while the step number, the rows and the learning rate's schedule move on. With `multi_steps`, what
            `mutable` took from the good microbatches of such a step remains.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.run.data.batches import step_batches
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
    return TrainStep(loss_fn, tx, plan, mesh, engine=engine, seed=seed, skip_nonfinite=skip_nonfinite)


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. Made with the loss function of training."""

    def __init__(self, loss_fn: LossFn | PipelinedLoss, mesh: Mesh) -> None:
        self._loss_fn, self._mesh = loss_fn, mesh
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, sum of weights) of a batch, on the devices."""
        key = batch.layout, len(batch.chunks)
        if key not in self._compiled:
            bound = functools.partial(eval_sums, self._loss_fn, self._mesh)
            run = on_devices_first(bound, jax.tree.map(lambda leaf: leaf.sharding, state))
            lowered = jax.jit(run, out_shardings=replicated(self._mesh)).lower(state, batch.chunks)
            self._compiled[key] = compile_program(lowered)
        return self._compiled[key](state, batch.chunks)


def _zeros_like(x: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(x.sharding.shard_shape(x.shape), x.dtype))


def _counts(split: BatchSplit) -> tuple[np.int32, np.int32]:
    return np.int32(split.num_pipeline_microbatches), np.int32(split.accumulation_steps)
