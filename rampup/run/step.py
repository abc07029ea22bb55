"""The training step: one call per optimizer step, one executable per microbatch shape.

The story of one step, top to bottom:

1. `TrainStep.__call__` pads the batch to the shape of its program and calls the program. A program is compiled once for each
   microbatch shape of the plan; the *number* of microbatches is an argument of it, so a growing batch needs no compilation.
2. The program is `_fused_update` (or `_multi_steps_update`): the loss sums itself over the microbatches and returns the
   gradient of the mean, then the optimizer runs once.
3. How a loss sums itself is its own business (`rampup.run.accumulate.SummableLoss`): one microbatch after the other, or through
   the stages of a pipeline.

Shape suffixes: K microbatches of the buffer, R rows of one microbatch over all replicas.
"""

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

from rampup.errors import ConfigError
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit
from rampup.run.accumulate import LossFn, SummableLoss, multi_steps, per_row_keys, safe_reciprocal, summable
from rampup.run.compile import Compiler, compile_program
from rampup.run.data.batches import Batch, layout_of
from rampup.run.distributed import StepConsensus
from rampup.run.mesh import batch_sharding, replicated, shardings_like
from rampup.run.offload import device_shardings, fetch_offloaded

ENGINES = ("fused", "multi_steps")
# Phases whose programs are compiled in the background before the run reaches them.
PHASES_AHEAD = 2
# Microbatches of a pass, and passes, of a call of MultiSteps.
ONE_MICROBATCH = np.int32(1), np.int32(1)

Metrics = dict[str, Any]


class TrainState(struct.PyTreeNode):
    """The values that training changes. Flax's own `TrainState` works as well.

    Attributes:
        step: optimizer steps done, int32.
        params: the parameters.
        opt_state: the optimizer's state.
        mutable: state that the loss function carries from microbatch to microbatch, such as batch statistics, or None.
    """

    step: Any
    params: Any
    opt_state: Any
    mutable: Any = None


def create_state(
    params: Any, tx: optax.GradientTransformation | optax.MultiSteps, mesh: Mesh, *, mutable: Any = None
) -> TrainState:
    """Return the training state at step 0, with every leaf placed on the mesh.

    Args:
        params: the parameters. Those on the mesh keep their sharding, others are replicated.
        tx: the optimizer. Its state takes the sharding of the parameters that it mirrors.
        mesh: the devices.
        mutable: see `TrainState`.
    """
    params = jax.device_put(params, shardings_like(params, mesh))
    return prepare_state(TrainState(step=0, params=params, opt_state=tx.init(params), mutable=mutable), mesh)


def prepare_state(state: Any, mesh: Mesh) -> Any:
    """Return a training state with which the step compiles once: `step` a strong int32, every leaf placed on the mesh.

    A stock Flax `TrainState` has a Python integer as step and leaves on one device. The step would be compiled for it, and
    again for the state that it returns.

    Args:
        state: has `step`, `params`, `opt_state` and `replace`, as `flax.training.train_state.TrainState` has.
        mesh: the devices. Leaves on the mesh keep their sharding, others are replicated.
    """
    state = state.replace(step=jnp.asarray(state.step, jnp.int32))
    return jax.device_put(state, shardings_like(state, mesh))


def train_step(
    loss_fn: LossFn | SummableLoss,
    tx: optax.GradientTransformation,
    plan: RampPlan,
    mesh: Mesh,
    *,
    engine: str = "fused",
    seed: int = 0,
    skip_nonfinite: bool = False,
) -> TrainStep:
    """Return a training step that follows a plan: one executable for all phases with the same microbatch shape.

    Gradients and losses are summed over all microbatches in float32, reduced over the data axis once, and divided by the sum
    of the weights, so that every token counts the same wherever it is.

    Args:
        loss_fn: `loss_fn(params, batch, rngs) -> (loss_sum, weight_sum, aux)`, sums over the rows it is given. Rows are the
            first axis of `batch`. `rngs` is one random key per row, which depends on seed, step and row alone. If the state has
            `mutable`, it is a fourth argument and its new value a fourth result. With pipeline stages, a `PipelinedLoss`.
        tx: the optimizer, run once per optimizer step.
        plan: the plan.
        mesh: the devices.
        engine: `fused`, or `multi_steps` for `optax.MultiSteps` (see `multi_steps` for how it differs).
        seed: seed of the random keys.
        skip_nonfinite: skip a step whose loss or gradient is not finite: parameters, optimizer state and `mutable` stay as they
            were, while the step number, the rows and the learning-rate schedule move on. With `multi_steps`, `mutable` keeps
            the changes that the finite microbatches of such a step made.

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


class TrainStep:
    """A compiled training step that follows a plan, made by `train_step`.

    If a later phase has another microbatch shape, its program is compiled in the background while earlier phases run.

    Attributes:
        tx: the optimizer as it runs; with the engine `multi_steps` wrapped in `optax.MultiSteps`.
    """

    def __init__(
        self,
        loss_fn: LossFn | SummableLoss,
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
        self._loss = summable(loss_fn)
        self._loss.check(mesh, engine)
        self._is_fused = engine == "fused"
        self.tx = tx if self._is_fused else multi_steps(tx, plan)
        self._plan, self._mesh = plan, mesh
        self._seed, self._skip_nonfinite = jax.random.key(seed), skip_nonfinite
        self._compiler, self._consensus = Compiler(), StepConsensus()
        # The phase for which the programs of the next phases have been requested.
        self._requested_after: int | None = None
        self._padding: dict[Any, Any] = {}
        self._zero_metrics: Metrics | None = None

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""
        return self._compiler.num_compilations

    @property
    def waited_seconds(self) -> float:
        """Time that steps have waited for a compilation."""
        return self._compiler.waited_seconds

    def close(self) -> None:
        """Cancel the compilations that have not started."""
        self._compiler.close()
        self._requested_after = None

    def __call__(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step.

        Args:
            state: the training state, placed by `create_state` or `prepare_state`. It is donated: its memory is reused, and
                only the returned state can be used afterwards.
            batch: from `step_batches` of the same plan; with the engine `multi_steps` made with `chunk_size=1`.

        Returns:
            The new state and the step's metrics, on the devices: `loss` (the weighted mean), `weight`, `aux` (sums),
            with the engine `fused` `grad_norm` and, with `skip_nonfinite`, `skipped`.
        """
        if not self._is_fused:
            return self._run_multi_steps(state, batch)
        # The counts are int32 arrays of the host: as Python numbers they would be constants of the program.
        args = self._pad_chunks(batch), _counts(batch.position.split)
        program = self._compiler.get(batch.layout, functools.partial(self._lower, self._fused_update, state, *args))
        # Before the call, which donates the state. The call itself returns at once, while the devices still work.
        self._compile_next_phases(batch, state)
        return program(state, *args)  # type: ignore[no-any-return]

    def _run_multi_steps(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step with `optax.MultiSteps`: one call of the program per microbatch."""
        if batch.layout.chunk_size != 1:
            raise ConfigError(
                f"gradient_accumulation=multi_steps runs one microbatch at a time, but the batch has chunks of "
                f"{batch.layout.chunk_size}; give chunk_size=1 to step_batches",
                key="gradient_accumulation",
                nearest=("fused",),
            )
        if self._zero_metrics is None:
            self._zero_metrics = self._init_metrics(state, batch.chunks[0])
        metrics = self._zero_metrics
        for index, chunk in enumerate(batch.chunks):
            args = metrics, chunk, np.int32(index * batch.layout.rows)
            lower = functools.partial(self._lower, self._multi_steps_update, state, *args)
            state, metrics = self._compiler.get(batch.layout, lower)(state, *args)
        return state, metrics

    def split_for(self, position: PlanPosition) -> BatchSplit:
        """Return how to split the batch of a position now. Use it as `step_batches(..., split_for=step.split_for)`.

        That is the planned split, or while its program is being compiled, a split of the same batch into the microbatches of an
        earlier phase. All processes change to the planned split at the same step.
        """
        if not self._is_fused or self._plan.num_compiled_shapes == 1 or self._is_ready(position.split, position):
            return position.split
        fallbacks = self._plan.fallbacks(position.phase.index)
        return next((split for split in fallbacks if self._is_ready(split, position)), position.split)

    def choose_split(self, position: PlanPosition) -> BatchSplit:
        """Return `split_for(position)`; the old name."""
        warnings.warn("TrainStep.choose_split is now TrainStep.split_for", DeprecationWarning, stacklevel=2)
        return self.split_for(position)

    def lower(self, state: Any, row: Any, split: BatchSplit) -> Any:
        """Return the program of the engine `fused` for one split, lowered and not yet compiled. It needs no data.

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
        return self._lower(self._fused_update, state, chunks, _counts(split))

    def _lower(self, update: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Lower a program that maps a state and further arguments to the next state and the metrics."""
        # The next state has the shardings of the given one, so that the program accepts its own result. The state is donated:
        # all of it is replaced. The batch is not: no result has its shape, and the padding is used again in later steps.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        out_shardings = shardings, replicated(self._mesh)
        return jax.jit(functools.partial(update, shardings), donate_argnums=0, out_shardings=out_shardings).lower(state, *args)

    def _fused_update(
        self, shardings: Any, state: Any, chunks: tuple[Any, ...], counts: tuple[jax.Array, jax.Array]
    ) -> tuple[Any, Metrics]:
        """One optimizer step, compiled: sum over all microbatches, reduce once, run the optimizer once.

        Args:
            shardings: shardings of the state.
            state: the training state.
            chunks: the chunks of the buffer, whose arrays together are (K, R, ...).
            counts: microbatches of a pass, and passes; together at most K.
        """
        state = fetch_offloaded(state, shardings)
        batch_KR = _join(chunks)
        keys_KR = per_row_keys(self._seed, state.step, _row_numbers(batch_KR, 0))
        options = {"param_shardings": device_shardings(shardings.params), "mutable": _mutable(state)}
        with jax.named_scope("accumulate"):
            sums, grads = self._loss.sums_and_grads(state.params, batch_KR, keys_KR, counts, mesh=self._mesh, **options)
        with jax.named_scope("update"):
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": sums.loss * safe_reciprocal(sums.weight),
            "weight": sums.weight,
            "grad_norm": _norm(grads),
            "aux": sums.aux,
        }
        mutable = sums.mutable
        if self._skip_nonfinite:
            # Decided on the device, without a round trip to the host: compute the update anyway and select the old values.
            is_finite = all_finite(sums._replace(aux=None))
            metrics["skipped"] = ~is_finite
            params, opt_state = tree_where(is_finite, (params, opt_state), (state.params, state.opt_state))
            mutable = tree_where(is_finite, mutable, _mutable(state))
        return _next_state(state, mutable, params=params, opt_state=opt_state, step=state.step + 1), metrics

    def _multi_steps_update(
        self, shardings: Any, state: Any, so_far: Metrics, chunk: Any, first_row: jax.Array
    ) -> tuple[Any, Metrics]:
        """One microbatch with `optax.MultiSteps`, compiled; the last of a step runs the optimizer.

        Args:
            shardings: shardings of the state.
            state: the training state.
            so_far: the metrics of the step's earlier microbatches.
            chunk: the microbatch, arrays (1, R, ...).
            first_row: the index of its first row in the global batch, for the random keys.
        """
        state = fetch_offloaded(state, shardings)
        keys_KR = per_row_keys(self._seed, state.step, _row_numbers(chunk, first_row))
        options = {"param_shardings": device_shardings(shardings.params), "mutable": _mutable(state)}
        with jax.named_scope("accumulate"):
            sums, grads = self._loss.sums_and_grads(state.params, chunk, keys_KR, ONE_MICROBATCH, mesh=self._mesh, **options)
        mutable, is_finite = sums.mutable, jnp.array(True)
        if self._skip_nonfinite:
            # MultiSteps must see every microbatch, or its counter would leave the plan: zero this gradient, remember that, and
            # drop the update that the accumulated gradient leads to.
            is_finite = all_finite(sums._replace(aux=None))
            grads = zeros_if_not(is_finite, grads)
            mutable = tree_where(is_finite, mutable, _mutable(state))
        with jax.named_scope("update"):
            updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        # The loss of the metrics is the weighted mean over the microbatches so far. Only the gradients are averaged with equal
        # weights, by MultiSteps.
        weight = so_far["weight"] + sums.weight
        metrics = {
            "loss": (so_far["loss"] * so_far["weight"] + sums.loss) * safe_reciprocal(weight),
            "weight": weight,
            "aux": jax.tree.map(jnp.add, so_far["aux"], sums.aux),
        }
        if self._skip_nonfinite:
            # Nothing to drop between optimizer steps: MultiSteps emits zero updates there and leaves the inner state alone.
            metrics["skipped"] = so_far["skipped"] | ~is_finite
            keep = ~metrics["skipped"] | ~self.tx.has_updated(opt_state)
            params = tree_where(keep, params, state.params)
            inner = tree_where(keep, opt_state.inner_opt_state, state.opt_state.inner_opt_state)
            opt_state = opt_state._replace(inner_opt_state=inner)
        return _next_state(state, mutable, params=params, opt_state=opt_state, step=opt_state.gradient_step), metrics

    def _init_metrics(self, state: Any, chunk: Any) -> Metrics:
        """Return the metrics of no microbatch: zeros of the shapes and types that the loss sums have."""
        # The program adds to them from the first microbatch on, so that all calls of a step are of one shape.
        keys_KR = jax.eval_shape(lambda: per_row_keys(self._seed, jnp.int32(0), _row_numbers(chunk, 0)))
        eval_sums = functools.partial(self._loss.eval_sums, mesh=self._mesh, mutable=_mutable(state))
        sums = jax.eval_shape(eval_sums, state.params, chunk, keys_KR, np.int32(1))
        shapes = {"loss": sums.loss, "weight": sums.weight, "aux": sums.aux}
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.device_put(zeros | ({"skipped": np.False_} if self._skip_nonfinite else {}), replicated(self._mesh))

    def _is_ready(self, split: BatchSplit, position: PlanPosition) -> bool:
        """Return whether every process has the program for a split."""
        # All processes must run the same program at the same step: their collectives meet in it.
        layout = layout_of(self._plan, split)
        return self._consensus.agreed(f"layout{layout.rows}", self._compiler.is_ready(layout), position.step)

    def _compile_next_phases(self, batch: Batch, state: Any) -> None:
        """Request the programs of the next phases that this run reaches, once per phase."""
        index = batch.position.phase.index
        if index == self._requested_after:
            return
        self._requested_after = index
        phases = self._plan.ramp.phases[index + 1 : index + 1 + PHASES_AHEAD]
        splits = [self._plan.splits[phase.index] for phase in phases if phase.start_step < self._plan.total_steps]
        layouts = {layout_of(self._plan, split): split for split in splits}
        unknown = {layout: split for layout, split in layouts.items() if not self._compiler.is_known(layout)}
        if unknown:
            # Shapes, not arrays: the background thread must not hold on to a state that the next step donates.
            row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), batch.chunks[0])
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            for layout, split in unknown.items():
                self._compiler.compile_async(layout, functools.partial(self.lower, shapes, row, split))

    def _pad_chunks(self, batch: Batch) -> tuple[Any, ...]:
        """Return as many chunks as the program takes: those of the batch, then one chunk of zeros, repeated."""
        # The zeros are on the devices already, so a step in an early phase transfers its own rows and not those of the largest
        # batch. The program does not compute with them: its loop ends before.
        if batch.layout not in self._padding:
            # Made on the host: `jnp.zeros` would be one more compilation, at a phase change and with the run waiting.
            self._padding[batch.layout] = jax.tree.map(_zeros_like, batch.chunks[0])
        return batch.chunks + (self._padding[batch.layout],) * (batch.layout.num_chunks - len(batch.chunks))


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. Made with the loss function of training."""

    def __init__(self, loss_fn: LossFn | SummableLoss, mesh: Mesh) -> None:
        self._loss, self._mesh = summable(loss_fn), mesh
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, sum of weights) of a batch, on the devices."""
        # One program per number of chunks. Evaluation batches are all of one size, so there is one.
        key, num_microbatches = (batch.layout, len(batch.chunks)), np.int32(batch.num_microbatches)
        if key not in self._programs:
            sums = functools.partial(self._sums, jax.tree.map(lambda leaf: leaf.sharding, state))
            lowered = jax.jit(sums, out_shardings=replicated(self._mesh)).lower(state, batch.chunks, num_microbatches)
            self._programs[key] = compile_program(lowered)
        return self._programs[key](state, batch.chunks, num_microbatches)  # type: ignore[no-any-return]

    def _sums(
        self, shardings: Any, state: Any, chunks: tuple[Any, ...], num_microbatches: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        state = fetch_offloaded(state, shardings)
        batch_KR = _join(chunks)
        # A loss function takes keys. Evaluation is the same every time, whatever the step.
        keys_KR = per_row_keys(jax.random.key(0), jnp.int32(0), _row_numbers(batch_KR, 0))
        options = {"mesh": self._mesh, "mutable": _mutable(state)}
        sums = self._loss.eval_sums(state.params, batch_KR, keys_KR, num_microbatches, **options)
        return sums.loss, sums.weight


def all_finite(*trees: Any) -> jax.Array:
    """Return whether every floating-point number is finite, as a traced bool.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.int32(3)})), bool(all_finite(jnp.array([1.0, jnp.nan])))
        (True, False)
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.array(True)


def zeros_if_not(condition: jax.Array, tree: Any) -> Any:
    """Return a tree, or zeros of its shape. A product with 0 would keep NaN and infinity."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return the new tree if the condition holds, else the old one.

    Counters of schedules are always taken from the new tree, so that a skipped step does not shift the learning rate: the
    states of `optax.scale_by_schedule` and the counts of `optax.inject_hyperparams`.

    Args:
        condition: a traced bool.
        new, old: parameters or an optimizer's state, after and before the step.
    """

    def select(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _has_schedules(new):
            return new._replace(inner_state=tree_where(condition, new.inner_state, old.inner_state))
        return jnp.where(condition, new, old)

    return jax.tree.map(select, new, old, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState) or _has_schedules(x))


def _has_schedules(state: Any) -> bool:
    """Return whether this is the state of `optax.inject_hyperparams`, which has several types."""
    return hasattr(state, "hyperparams") and hasattr(state, "inner_state") and hasattr(state, "_replace")


def _counts(split: BatchSplit) -> tuple[np.int32, np.int32]:
    """Return the microbatches of a pass, and the passes."""
    return np.int32(split.num_pipeline_microbatches), np.int32(split.accumulation_steps)


def _join(chunks: tuple[Any, ...]) -> Any:
    """Return the chunks of a buffer as one: arrays (K, R, ...)."""
    return chunks[0] if len(chunks) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)


def _row_numbers(batch_KR: Any, first_row: Any) -> jax.Array:
    """Return the index in the global batch of every row (K, R)."""
    K, R = jax.tree.leaves(batch_KR)[0].shape[:2]
    return first_row + jnp.arange(K * R, dtype=jnp.int32).reshape(K, R)


def _zeros_like(x: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(x.sharding.shard_shape(x.shape), x.dtype))


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _mutable(state: Any) -> Any:
    return getattr(state, "mutable", None)


def _next_state(state: Any, mutable: Any, **changes: Any) -> Any:
    return state.replace(**changes) if mutable is None else state.replace(**changes, mutable=mutable)
