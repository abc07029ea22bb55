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

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.errors import ConfigError, DataError, RampDefinitionError, raise_together
from rampup.plan.noise_scale import noise_problems
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.timetable import num_ticks
from rampup.run.accumulate import (
    AccumulatedLoss,
    LossFn,
    SummableLoss,
    accumulator,
    cast_like,
    multi_steps,
    per_row_keys,
    random_key,
    safe_reciprocal,
    summable,
)
from rampup.run.compile import Compiler, compile_program
from rampup.run.data.batches import Batch, layout_of, step_batches, stream_batches
from rampup.run.gradient_noise import NoiseMeter, second_moments
from rampup.run.mesh import (
    BatchAxes,
    auto_context,
    auto_view,
    batch_sharding,
    check_plan_fits,
    process_rows,
    replicated,
    shardings_like,
)
from rampup.run.offload import device_shardings, fetch_offloaded
from rampup.run.zero import constrain_all, gather_parameters, is_scattered, scattered_shardings

ENGINES = ("fused", "multi_steps")
# Phases whose programs are compiled in the background before the run reaches them.
PHASES_AHEAD = 2
# Counts (microbatches per pass, passes) of one call of the program of `multi_steps`.
ONE_MICROBATCH = np.int32(1), np.int32(1)
# The fields of a state that the loss function carries from microbatch to microbatch; Flax's examples call theirs `batch_stats`.
CARRIED_FIELDS = ("mutable", "batch_stats")
MAX_STEPS = 2**31 - 1

Metrics = dict[str, Any]


class TrainState(struct.PyTreeNode):
    """The values that training changes. Flax's own `TrainState` works as well, and so does any dataclass with these fields.

    A state with a method `apply_gradients` is updated by it, as in Flax, so a subclass can keep a moving average there. Its
    `tx` must be that of the step. A field `batch_stats` is carried like `mutable`, and a Flax `DynamicScale` in
    `dynamic_scale` scales the loss. All other fields are kept.

    Attributes:
        step: optimizer steps done, int32.
        params: the parameters. Integer arrays among them are not trained.
        opt_state: the optimizer's state.
        mutable: state that the loss function carries from microbatch to microbatch, such as batch statistics, or None.
        frozen: arrays that the loss function reads as its keyword argument `frozen` and that nobody changes, such as the base
            model of a LoRA fine-tune, or None. They take no memory for gradients.
    """

    step: Any
    params: Any
    opt_state: Any
    mutable: Any = None
    frozen: Any = None


def create_state(
    params: Any,
    tx: optax.GradientTransformation | optax.MultiSteps,
    mesh: Mesh,
    *,
    mutable: Any = None,
    frozen: Any = None,
    shard_optimizer_over_data: bool = False,
    batch_axes: BatchAxes | None = None,
) -> TrainState:
    """Return the training state at step 0, with every leaf placed on the mesh. The caller's arrays are copied.

    Args:
        params: the parameters. Those on the mesh keep their sharding, others are replicated.
        tx: the optimizer. Its state takes the sharding of the parameters that it mirrors.
        mesh: the devices.
        mutable, frozen: see `TrainState`.
        shard_optimizer_over_data, batch_axes: see `train_step`.
    """
    _check_arguments("create_state(params, tx, mesh)", tx=tx, mesh=mesh)
    params, mutable, frozen = _copy_to((params, mutable, frozen), mesh)
    with auto_context(mesh):
        opt_state = _init_sharded(tx, params, mesh, batch_axes) if shard_optimizer_over_data else tx.init(params)
    state = TrainState(step=jnp.int32(0), params=params, opt_state=opt_state, mutable=mutable, frozen=frozen)
    # The optimizer's state may contain the parameters themselves. A buffer cannot be donated twice.
    return _without_aliases(jax.device_put(state, shardings_like(state, mesh)))  # type: ignore[no-any-return]


def _init_sharded(tx: Any, params: Any, mesh: Mesh, batch_axes: BatchAxes | None) -> Any:
    """Return the optimizer's state with its arrays sharded over the replicas."""
    axes = BatchAxes.of(mesh, batch_axes)
    # Of parameters that are sharded already, so that no device ever has the whole state.
    opt_state = tx.init(jax.device_put(params, scattered_shardings(params, mesh, axes)))
    opt_state = jax.device_put(opt_state, shardings_like(opt_state, mesh))
    return jax.device_put(opt_state, scattered_shardings(opt_state, mesh, axes))


def prepare_state(
    state: Any, mesh: Mesh, *, shard_optimizer_over_data: bool = False, batch_axes: BatchAxes | None = None
) -> Any:
    """Return a copy of a training state with which the step compiles once: `step` a strong int32, every leaf on the mesh.

    A stock Flax `TrainState` has a Python integer as step and leaves on one device. The step would be compiled for it, and
    again for the state that it returns.

    Args:
        state: has `step`, `params` and `opt_state`, as `flax.training.train_state.TrainState` has; see `TrainState`.
        mesh: the devices. Leaves on the mesh keep their sharding, others are replicated.
        shard_optimizer_over_data, batch_axes: see `train_step`. `opt_state` is sharded over the replicas too.
    """
    _check_state(state)
    _check_step_number(int(state.step))
    state = _copy_to(replace_fields(state, step=jnp.asarray(state.step, jnp.int32)), mesh)
    if shard_optimizer_over_data:
        scattered = scattered_shardings(state.opt_state, mesh, BatchAxes.of(mesh, batch_axes))
        state = replace_fields(state, opt_state=jax.device_put(state.opt_state, scattered))
    return state


def replace_fields(state: Any, **changes: Any) -> Any:
    """Return a copy of a state with some fields changed; it is a Flax or plain dataclass, or a named tuple."""
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, **changes)  # type: ignore[type-var]
    return (state.replace if hasattr(state, "replace") else state._replace)(**changes)


def train_step(
    loss_fn: LossFn | SummableLoss,
    tx: optax.GradientTransformation,
    plan: RampPlan,
    mesh: Mesh,
    *,
    engine: str = "fused",
    seed: int = 0,
    skip_nonfinite: bool = False,
    donate: bool = True,
    batch_axes: BatchAxes | None = None,
    shard_optimizer_over_data: bool = False,
    wait_for_compilation: bool | None = None,
    measure_gradient_noise: bool = False,
) -> TrainStep:
    """Return a training step that follows a plan: one executable for all phases with the same microbatch shape.

    Gradients and losses are summed over all microbatches in float32, reduced over the data axis once, and divided by the sum
    of the weights, so that every token counts the same wherever it is.

    Args:
        loss_fn: `loss_fn(params, batch, keys) -> (loss_sum, weight_sum, aux)`, sums over the rows it is given. Rows are the
            first axis of `batch`. `keys` is one random key per row, which depends on seed, step and row alone. The weight is a
            constant of the gradient. A step of weight 0 has loss 0 and gradient 0, and moments and weight decay still act; with
            `skip_nonfinite` it leaves parameters and optimizer as they are. If the state has `mutable` or `batch_stats`, it is
            a fourth argument and its new value a fourth result. With pipeline stages, a `PipelinedLoss`.
        tx: the optimizer, run once per optimizer step. Optimizers with extra arguments get `value`, the loss.
        plan: the plan.
        mesh: the devices.
        engine: `fused`, or `multi_steps` for `optax.MultiSteps` (see `multi_steps` for how it differs).
        seed: seed of the random keys.
        skip_nonfinite: skip a step whose loss or gradient is not finite: parameters, optimizer state and `mutable` stay as they
            were, while the step number, the rows and the learning-rate schedule move on. With `multi_steps`, `mutable` keeps
            the changes that the finite microbatches of such a step made.
        donate: reuse the memory of the state that is given to a step. False keeps it, and needs the memory of a second one.
        batch_axes: the axes of `mesh` that take the rows; None = data and fsdp.
        shard_optimizer_over_data: each replica keeps and updates its own part of the optimizer's state (ZeRO-1), with one
            reduce-scatter of the gradients and one all-gather of the parameters per step; see `rampup.run.zero`. Give it to
            `create_state` too.
        wait_for_compilation: start every phase in its planned shape, and wait for its program if necessary. Then the shapes do
            not depend on time, and a run is bit for bit the same whenever it is repeated. False runs the steps until then in
            the shape of an earlier phase. None: True if there are several processes.
        measure_gradient_noise: also return S and G2 of every step, from which `rampup.NoiseScale` estimates the gradient noise
            scale. Needs the engine `fused` and at least two blocks in every step: microbatches, or replicas.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.run.data.batches import step_batches
        >>> from rampup.run.mesh import make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=20)
        >>> def loss_fn(params, batch, keys):
        ...     return jnp.sum((params["w"] - batch["x"]) ** 2), batch["x"].size, {}
        >>> tx = optax.sgd(0.1)
        >>> state = create_state({"w": jnp.zeros(())}, tx, mesh)
        >>> step = train_step(loss_fn, tx, plan, mesh)
        >>> for batch in step_batches([{"x": np.float32(3)}] * 8, plan, mesh):
        ...     state, metrics = step(state, batch)
        >>> round(float(state.params["w"]), 2), int(state.step), step.num_compilations
        (2.97, 20, 1)
    """
    options: Any = {"engine": engine, "seed": seed, "skip_nonfinite": skip_nonfinite, "donate": donate}
    options |= {"batch_axes": batch_axes, "shard_optimizer_over_data": shard_optimizer_over_data}
    options |= {"wait_for_compilation": wait_for_compilation, "measure_gradient_noise": measure_gradient_noise}
    return TrainStep(loss_fn, tx, plan, mesh, **options)


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
        donate: bool = True,
        batch_axes: BatchAxes | None = None,
        shard_optimizer_over_data: bool = False,
        wait_for_compilation: bool | None = None,
        measure_gradient_noise: bool = False,
    ) -> None:
        _check_arguments("train_step(loss_fn, tx, plan, mesh)", loss_fn=loss_fn, tx=tx, plan=plan, mesh=mesh)
        if engine not in ENGINES:
            raise ConfigError(
                f"gradient_accumulation={engine!r} (engine) must be one of {', '.join(ENGINES)}",
                key="gradient_accumulation",
                nearest=ENGINES,
            )
        _check_step_number(plan.total_steps)
        check_plan_fits(plan, mesh, batch_axes)
        mesh = auto_view(mesh)
        self._plan, self._mesh = plan, mesh
        self._loss, self._batch_axes = summable(loss_fn, batch_axes), batch_axes
        self._loss.check(mesh, engine)
        planned, repeats = plan.splitter.num_repeats, getattr(loss_fn, "num_repeats", plan.splitter.num_repeats)
        if planned != repeats:
            raise ConfigError(
                f"the plan has num_repeats={planned}, but the loss has num_repeats={repeats}; give both the same",
                key="num_pipeline_repeats",
                nearest=(repeats,),
            )
        self._is_fused = engine == "fused"
        if shard_optimizer_over_data and not self._is_fused:
            raise ConfigError(
                "shard_optimizer_over_data=true needs gradient_accumulation=fused; multi_steps runs the optimizer at every "
                "microbatch",
                key="shard_optimizer_over_data",
                nearest=(False,),
            )
        self._measures_noise = measure_gradient_noise
        if measure_gradient_noise:
            self._check_noise()
        # The axes of the replicas if the optimizer's state is split over them.
        axes = BatchAxes.of(mesh, batch_axes)
        self._zero = axes if shard_optimizer_over_data and axes.num_replicas(mesh) > 1 else None
        self.tx = tx if self._is_fused else multi_steps(tx, plan)
        with auto_context(mesh):
            self._seed = random_key(seed)
        self._skip_nonfinite, self._donate = skip_nonfinite, donate
        # The `step` of the state that the last call returned, and its number: known here without waiting for the devices.
        self._returned: tuple[Any, int] = None, 0
        several = jax.process_count() > 1
        if several and wait_for_compilation is False:
            raise ConfigError(
                "wait_for_compilation=false is for a single process: several processes would change shapes at different steps",
                key="wait_for_compilation",
                nearest=(True,),
            )
        self._wait_for_compilation = several if wait_for_compilation is None else wait_for_compilation
        # The first step of every microbatch size in use.
        self._shape_changes: dict[int, int] = {}
        self._compiler = Compiler()
        # The phase for which the programs of the next phases have been requested.
        self._requested_after: int | None = None
        self._padding: dict[Any, Any] = {}
        # That of the last batch, which the plan has: a batch with the same one needs no look-up.
        self._planned_layout: Any = None
        self._zero_metrics: Metrics | None = None

    def _check_noise(self) -> None:
        """Refuse to measure the gradient noise if this step cannot."""
        key = "measure_gradient_noise"
        if not self._is_fused:
            raise ConfigError(
                f"{key}=true needs gradient_accumulation=fused; with multi_steps, all microbatches count equally whatever they "
                "weigh",
                key=key,
                nearest=(False,),
            )
        if "noise" not in inspect.signature(self._loss.sums_and_grads).parameters:
            raise ConfigError(
                f"{key}=true: `sums_and_grads` of {type(self._loss).__name__} does not take `noise`, so it cannot add up the "
                "squares of its gradients; see rampup.run.accumulate.SummableLoss",
                key=key,
                nearest=(False,),
            )
        replicas = BatchAxes.of(self._mesh, self._batch_axes).num_replicas(self._mesh)
        raise_together(noise_problems(self._plan, replicas))

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
            state: the training state, placed by `create_state` or `prepare_state`. It is donated, unless `donate=False`: its
                memory is reused, and only the returned state can be used afterwards.
            batch: from `step_batches` of the same plan; with the engine `multi_steps` made with `chunk_size=1`.

        Returns:
            The new state and the step's metrics, on the devices: `loss` (the weighted mean), `weight`, `aux` (sums),
            with the engine `fused` `grad_norm` and, with `skip_nonfinite`, `skipped`. With `measure_gradient_noise`,
            `gradient_noise`: see `rampup.run.gradient_noise.NoiseMeter.metrics`.
        """
        self._check(state, batch)
        if self._is_fused:
            # The counts are int32 arrays of the host: as Python numbers they would be constants of the program.
            args = self._pad_chunks(batch), _counts(batch.position.split)
            program = self._program(batch, self._fused_update, state, *args)
            # Before the call, which donates the state. The call itself returns at once, while the devices still work.
            self._compile_next_phases(batch, state)
            state, metrics = program(state, *args)
        else:
            state, metrics = self._run_multi_steps(state, batch)
        self._returned = state.step, batch.position.step + 1
        return state, metrics

    def batches(self, source: Any, start: Any = 0, stop: int | None = None, **options: Any) -> Iterator[Batch]:
        """Yield the batch of every optimizer step from rows with random access, as this step needs them.

        `step_batches` with the plan, the mesh, `split_for` and `chunk_size` of this step.

        Args:
            source: see `step_batches`.
            start: the first step, such as `state.step`.
            stop: the step to stop before; None = the end of the plan.
            options: further arguments of `step_batches`, such as `seed`.
        """
        return step_batches(source, self._plan, self._mesh, start=int(start), stop=stop, **self._batch_options, **options)

    def stream(
        self, source: Iterable[Any], start: Any = 0, stop: int | None = None, *, batched: bool = False
    ) -> Iterator[Batch]:
        """Yield the batch of every optimizer step from rows that come one after the other; see `stream_batches`.

        Args:
            source: yields rows, or batches of rows: a `grain.IterDataset` or `DataLoader`, a generator.
            start: the first step, such as `state.step`. The source must start at the rows of that step.
            stop: the step to stop before; None = the end of the plan, or of the source.
            batched: the source yields arrays (rows, ...) of any number of rows.
        """
        options = {"start": int(start), "stop": stop, "batched": batched, **self._batch_options}
        return stream_batches(source, self._plan, self._mesh, **options)

    def batch(self, rows: Any, step: int | None = None) -> Batch:
        """Return the batch of one optimizer step, from arrays that already contain its rows.

        Args:
            rows: a pytree of arrays (rows, ...); with several processes, the rows of this one.
            step: the optimizer step; None = that after the last one that was run.

        Raises:
            DataError: not as many rows as the plan has at this step.
        """
        step = self._returned[1] if step is None else int(step)
        split = self._plan.position(step).split
        rows_R = process_rows(self._mesh, split.data_parallel_size * split.microbatch_size, self._batch_axes)
        needed = split.num_microbatches * len(rows_R)
        found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(rows)}
        if found != {(needed,)}:
            raise DataError(f"step {step} takes arrays of {needed} rows, but the given ones are of shape {found}")
        return next(self.stream([rows], step, step + 1, batched=True))

    @property
    def _batch_options(self) -> dict[str, Any]:
        return {"batch_axes": self._batch_axes} | ({"split_for": self.split_for} if self._is_fused else {"chunk_size": 1})

    def _check(self, state: Any, batch: Batch) -> None:
        """Check that state, batch, plan and optimizer belong together."""
        if not isinstance(batch, Batch):
            raise DataError(
                f"a step takes a Batch and not a {type(batch).__name__}; get batches from step.batches(source), or make one of "
                "arrays with step.batch(arrays)"
            )
        known, done = self._returned
        if getattr(state, "step", None) is not known or known is None:
            _check_state(state)
            # A state from elsewhere. Reading its number waits for the devices, once.
            if isinstance(state.step, jax.core.Tracer):
                raise ConfigError("a TrainStep is compiled already; in a jitted function of your own, use rampup.accumulate")
            if getattr(state, "tx", self.tx) != self.tx:
                raise ConfigError(
                    "the state has another tx than the step; give the same optimizer to both, with engine='multi_steps' "
                    "the `tx` of the step",
                    key="tx",
                )
            self._check_shardings(state)
            done = int(state.step)
        if batch.position.step != done:
            raise DataError(
                f"the state is at step {done}, but the batch is that of step {batch.position.step}; start the batches with the "
                f"state: step.batches(source, start=state.step)"
            )
        if batch.layout != self._planned_layout:
            chunk_size = None if self._is_fused else batch.layout.chunk_size
            planned = {layout_of(self._plan, split, chunk_size=chunk_size) for split in self._plan.splits}
            if batch.layout not in planned:
                raise DataError(
                    f"the batch has {batch.layout}, but the plan of this step {planned}; make it with the same plan, and with "
                    "chunk_size only for engine='multi_steps'"
                )
            self._planned_layout = batch.layout

    def _check_shardings(self, state: Any) -> None:
        """Check that every replica has whole parameters, and its part of the optimizer's state if the step expects that."""
        axes = BatchAxes.of(self._mesh, self._batch_axes)
        if is_scattered(_shardings_of(state.params), dataclasses.replace(axes, replica=_axes_in_use(axes.replica, self._mesh))):
            raise ConfigError(
                f"the parameters are sharded over {' and '.join(axes.replica)}, along which every replica needs them whole; "
                "shard them over another axis such as fsdp, or only the optimizer's state, with shard_optimizer_over_data=True",
                key="shard_optimizer_over_data",
            )
        opt_shardings = jax.tree.leaves(_shardings_of(state.opt_state))
        expected = jax.tree.leaves(scattered_shardings(state.opt_state, self._mesh, axes)) if self._zero else opt_shardings
        if expected != opt_shardings or (
            not self._zero and axes.num_replicas(self._mesh) > 1 and is_scattered(opt_shardings, axes)
        ):
            raise ConfigError(
                f"the step has shard_optimizer_over_data={self._zero is not None}, but the state was made with "
                f"{self._zero is None}; give the same value to train_step and to create_state or prepare_state",
                key="shard_optimizer_over_data",
            )

    def _program(self, batch: Batch, update: Callable[..., Any], state: Any, *args: Any) -> Callable[..., Any]:
        """Return the program for a batch, compiled if it is not yet."""
        if jax.config.jax_disable_jit:
            return functools.partial(update, _shardings_of(state))
        return self._compiler.get(  # type: ignore[no-any-return]
            batch.layout, functools.partial(self._lower, update, state, *args)
        )

    def _run_multi_steps(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step with `optax.MultiSteps`: one call of the program per microbatch."""
        if batch.layout.chunk_size != 1:
            raise ConfigError(
                f"gradient_accumulation=multi_steps runs one microbatch at a time, but the batch has chunks of "
                f"{batch.layout.chunk_size}; give chunk_size=1 to step_batches",
                key="gradient_accumulation",
                nearest=("fused",),
            )
        if getattr(state, "dynamic_scale", None) is not None:
            raise ConfigError(
                "multi_steps runs one program per microbatch, but dynamic_scale adapts once per step; use the engine fused",
                key="gradient_accumulation",
                nearest=("fused",),
            )
        if self._zero_metrics is None:
            self._zero_metrics = self._init_metrics(state, batch.chunks[0])
        metrics = self._zero_metrics
        for index, chunk in enumerate(batch.chunks):
            args = metrics, chunk, np.int32(index * batch.layout.rows)
            state, metrics = self._program(batch, self._multi_steps_update, state, *args)(state, *args)
        return state, metrics

    @property
    def shape_changes(self) -> dict[int, int]:
        """The first step of every microbatch size that the run has used: {microbatch_size: step}."""
        return dict(self._shape_changes)

    def replay_shape_changes(self, changes: Mapping[int, int]) -> None:
        """Change shapes at the steps at which an earlier part of the run did; see `shape_changes`."""
        self._shape_changes |= changes

    def split_for(self, position: PlanPosition) -> BatchSplit:
        """Return how to split the batch of a position now. Use it as `step_batches(..., split_for=step.split_for)`.

        That is the planned split, or while its program is being compiled, a split of the same batch into the microbatches of an
        earlier phase. With `wait_for_compilation`, it is always the planned split.

        The step of a change depends on how long a compilation takes. It is decided once, and `shape_changes` records it.
        Several processes would decide at different steps, even if they exchanged messages: each dispatches steps ahead of the
        devices, by a number of steps that nothing bounds. Therefore they wait.
        """
        planned, step, changes = position.split, position.step, self._shape_changes
        if self._wait_for_compilation or not self._is_fused or self._plan.num_compiled_shapes == 1:
            return planned
        in_use = {size for size, first_step in changes.items() if first_step <= step}
        if planned.microbatch_size in in_use:
            return planned
        # Nearest phase first. Only a size in use is a fallback: another one would have to be compiled as well.
        fallbacks = (split for split in self._plan.fallbacks(position.phase.index) if split.microbatch_size in in_use)
        fallback = next(fallbacks, None)
        if fallback is not None and (planned.microbatch_size in changes or not self._is_ready(planned)):
            return fallback
        changes[planned.microbatch_size] = step
        return planned

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
        sharding = batch_sharding(self._mesh, leading=1, axes=self._batch_axes)

        def chunk(x: Any) -> jax.ShapeDtypeStruct:
            shape = (layout.chunk_size, layout.rows, *np.shape(x))
            return jax.ShapeDtypeStruct(shape, np.result_type(x), sharding=sharding)

        chunks = (jax.tree.map(chunk, row),) * layout.num_chunks
        return self._lower(self._fused_update, state, chunks, _counts(split))

    def loop_trips(self, split: BatchSplit) -> tuple[int, ...]:
        """Return the iterations of the program's loops whose bound is an argument: passes, and ticks of a pipeline pass."""
        m, splitter = split.num_pipeline_microbatches, self._plan.splitter
        if splitter.num_stages == 1:
            return (split.num_microbatches,)
        return split.accumulation_steps, num_ticks(splitter.num_stages, m, splitter.num_repeats)

    def _lower(self, update: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Lower a program that maps a state and further arguments to the next state and the metrics."""
        # The next state has the shardings of the given one, so that the program accepts its own result. The state is donated:
        # all of it is replaced. The batch is not: no result has its shape, and the padding is used again in later steps.
        shardings = _shardings_of(state)
        options = {"donate_argnums": 0 if self._donate else (), "out_shardings": (shardings, replicated(self._mesh))}
        with auto_context(self._mesh):
            return jax.jit(functools.partial(update, shardings), **options).lower(state, *args)

    def _fused_update(
        self, shardings: Any, state: Any, chunks: tuple[Any, ...], counts: tuple[jax.Array, jax.Array]
    ) -> tuple[Any, Metrics]:
        """One optimizer step, compiled: sum over all microbatches, reduce once, run the optimizer once.

        Args:
            shardings: shardings of the state.
            state: the training state.
            chunks: the chunks of the buffer, whose arrays together are (K, R, ...).
            counts: microbatches of a pass, and passes. Their product is at most K.
        """
        state = fetch_offloaded(state, shardings)
        batch_KR = _join(chunks)
        keys_KR = per_row_keys(self._seed, state.step, _row_numbers(batch_KR, 0))
        with jax.named_scope("accumulate"):
            sums, grads, measured = self._sums_and_grads(shardings, state, batch_KR, keys_KR, counts)
        metrics = {"loss": sums.loss * safe_reciprocal(sums.weight), "weight": sums.weight, "aux": sums.aux, **measured}
        if self._zero:
            # Each replica updates its own part of the parameters.
            scattered = scattered_shardings(
                _with_shardings(state.params, device_shardings(shardings.params)), self._mesh, self._zero
            )
            state = replace_fields(state, params=constrain_all(state.params, scattered))
        with jax.named_scope("update"):
            new = self._apply(state, grads, metrics["loss"])
        changes, scale = {"step": new.step}, getattr(state, "dynamic_scale", None)
        carried = sums.mutable
        if self._skip_nonfinite or scale is not None:
            # Decided on the device, without a round trip to the host: compute the update anyway and select the old values.
            # That is one more pass over the state, so a step of weight 0 is left out only here, where there is a selection.
            is_finite = all_finite((grads, sums.loss, sums.weight, _changes(carried, _carried(state))))
            metrics["skipped"] = ~is_finite
            new = tree_where(is_finite & (sums.weight != 0), new, state)
            carried = tree_where(is_finite, carried, _carried(state))
        if scale is not None:
            changes["dynamic_scale"] = _adapt_scale(scale, is_finite)
        new = replace_fields(new, **changes, **_carried_fields(state, carried))
        if self._zero:
            with jax.named_scope("gather"):
                new = replace_fields(new, params=gather_parameters(new.params, scattered, self._mesh, self._zero))
        return new, metrics

    def _sums_and_grads(
        self, shardings: Any, state: Any, batch_KR: Any, keys_KR: jax.Array, counts: Any
    ) -> tuple[Any, Any, Metrics]:
        """Return the sums, the gradient of the mean loss at least in float32, and metrics of the gradient before clipping.

        The gradient is zero for parameters that are integers.
        """
        params, where = state.params, device_shardings(shardings.params)
        if self._zero:
            where = scattered_shardings(_with_shardings(params, where), self._mesh, self._zero)
        loss, scale = _bind_loss(self._loss, state), getattr(state, "dynamic_scale", None)
        has_integers = not all(map(_is_trained, jax.tree.leaves(params)))
        # Moments that are scattered over the replicas, or in host memory between steps, would have to be gathered or kept.
        in_device_memory = device_shardings(shardings.opt_state) == shardings.opt_state
        moments = (
            second_moments(state.opt_state, params) if self._measures_noise and in_device_memory and not self._zero else None
        )
        if has_integers:
            # JAX differentiates with respect to floating-point arrays only. None takes the place of the others.
            trained, params = params, jax.tree.map(lambda p: p if _is_trained(p) else None, params)
            where, moments = (
                tree and jax.tree.map(lambda p, leaf: leaf if _is_trained(p) else None, trained, tree)
                for tree in (where, moments)
            )
            loss = _wrap(loss, "integer parameters", lambda fn: lambda p, *args: fn(_fill(p, trained), *args))
        if scale is not None:
            # Of a pipeline, the last part returns the loss.
            part = "loss_fn" if isinstance(loss, AccumulatedLoss) else "last"
            loss = _wrap(loss, "`dynamic_scale`", lambda fn: lambda *args: _scaled(fn(*args), scale.scale), part)
        options = {"mesh": self._mesh, "param_shardings": where, "mutable": _carried(state)}
        meter = NoiseMeter.of(where, self._mesh, self._batch_axes, moments) if self._measures_noise else None
        if meter is not None:
            options |= {"noise": meter}
        sums, grads = loss.sums_and_grads(params, batch_KR, keys_KR, counts, **options)
        if scale is not None:
            sums = sums._replace(loss=sums.loss / scale.scale)
            grads = jax.tree.map(lambda g: g / scale.scale, grads)
        if meter is None:
            measured = {"grad_norm": _norm(grads)}
        else:
            noise = sums.noise if scale is None else sums.noise._replace(squares=sums.noise.squares / scale.scale**2)
            with jax.named_scope("gradient_noise"):
                measured = meter.metrics(noise, grads, sums.weight)
        if has_integers:
            grads = _fill(grads, jax.tree.map(jnp.zeros_like, state.params))
        return sums, grads, measured

    def _apply(self, state: Any, grads: Any, loss: jax.Array) -> Any:
        """Return the state after the optimizer: by its own `apply_gradients`, if it has one."""
        tx = self.tx
        # Flax's `apply_gradients` passes no further arguments to an optimizer: bind the loss, and restore the state's own tx.
        if isinstance(tx, (optax.GradientTransformationExtraArgs, optax.MultiSteps)):
            tx = optax.GradientTransformation(self.tx.init, functools.partial(self._update_with_loss, loss))
        grads = cast_like(grads, state.params)
        if hasattr(state, "apply_gradients"):
            has_tx = hasattr(state, "tx")
            new = (replace_fields(state, tx=tx) if has_tx else state).apply_gradients(grads=grads)
            new = replace_fields(new, tx=state.tx) if has_tx else new
        else:
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = replace_fields(state, params=params, opt_state=opt_state, step=state.step + 1)
        if all(map(_is_trained, jax.tree.leaves(state.params))):
            return new
        # Decay and the like leave integers alone, and the state that an optimizer keeps for them keeps its type.
        params = jax.tree.map(lambda new, old: new if _is_trained(old) else old, new.params, state.params)
        return replace_fields(new, params=params, opt_state=cast_like(new.opt_state, state.opt_state))

    def _update_with_loss(self, loss: jax.Array, *args: Any) -> Any:
        """Run an optimizer that accepts extra arguments."""
        try:
            return self.tx.update(*args, value=loss)
        except TypeError as error:
            # An optimizer may accept other extra arguments only, as `optax.contrib.sam` does.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            return self.tx.update(*args)

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
        with jax.named_scope("accumulate"):
            sums, grads, _ = self._sums_and_grads(shardings, state, chunk, keys_KR, ONE_MICROBATCH)
        carried, is_finite = sums.mutable, jnp.array(True)
        if self._skip_nonfinite:
            # MultiSteps must see every microbatch, or its counter would leave the plan: zero this gradient, remember that, and
            # drop the update that the accumulated gradient leads to.
            is_finite = all_finite((grads, sums.loss, sums.weight, _changes(carried, _carried(state))))
            grads = zeros_if_not(is_finite, grads)
            carried = tree_where(is_finite, carried, _carried(state))
        # The loss of the metrics is the weighted mean over the microbatches so far. Only the gradients are averaged with equal
        # weights, by MultiSteps.
        weight = so_far["weight"] + sums.weight
        metrics = {
            "loss": (so_far["loss"] * so_far["weight"] + sums.loss) * safe_reciprocal(weight),
            "weight": weight,
            "aux": jax.tree.map(jnp.add, so_far["aux"], sums.aux),
        }
        with jax.named_scope("update"):
            new = self._apply(state, grads, metrics["loss"])
        opt_state, keep = new.opt_state, self.tx.has_updated(new.opt_state)
        if self._skip_nonfinite:
            metrics["skipped"] = so_far["skipped"] | ~is_finite
            keep &= ~metrics["skipped"] & (weight != 0)
        if self._skip_nonfinite or hasattr(state, "apply_gradients"):
            # Only the last microbatch changes the state: MultiSteps emits zero updates before, but a state may do more than
            # apply them. A step that is dropped takes the old inner state; the counters of MultiSteps always advance.
            inner = tree_where(keep, opt_state.inner_opt_state, state.opt_state.inner_opt_state)
            opt_state = opt_state._replace(inner_opt_state=inner)
            new = tree_where(keep, replace_fields(new, opt_state=opt_state), replace_fields(state, opt_state=opt_state))
        changes = {"opt_state": opt_state, "step": opt_state.gradient_step, **_carried_fields(state, carried)}
        return replace_fields(new, **changes), metrics

    def _init_metrics(self, state: Any, chunk: Any) -> Metrics:
        """Return the metrics of no microbatch: zeros of the shapes and types that the loss sums have."""
        # The program adds to them from the first microbatch on, so that all calls of a step are of one shape.
        keys_KR = jax.eval_shape(lambda: per_row_keys(self._seed, jnp.int32(0), _row_numbers(chunk, 0)))
        eval_sums = functools.partial(_bind_loss(self._loss, state).eval_sums, mesh=self._mesh, mutable=_carried(state))
        sums = jax.eval_shape(eval_sums, state.params, chunk, keys_KR, np.int32(1))
        shapes = {"loss": sums.loss, "weight": sums.weight, "aux": sums.aux}
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.device_put(zeros | ({"skipped": np.False_} if self._skip_nonfinite else {}), replicated(self._mesh))

    def _is_ready(self, split: BatchSplit) -> bool:
        """Return whether the program for a split is compiled."""
        return self._compiler.is_ready(layout_of(self._plan, split))

    def _compile_next_phases(self, batch: Batch, state: Any) -> None:
        """Request the programs of the next phases that this run reaches, once per phase."""
        index = batch.position.phase.index
        if index == self._requested_after or jax.config.jax_disable_jit:
            return
        self._requested_after = index
        # This phase too: it may run in the shape of an earlier one.
        phases = self._plan.ramp.phases[index : index + 1 + PHASES_AHEAD]
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
        padding = self._padding.get(batch.layout)
        if padding is None:
            # Made on the host: `jnp.zeros` would be one more compilation, at a phase change and with the run waiting.
            padding = self._padding[batch.layout] = jax.tree.map(_zeros_like, batch.chunks[0])
        return batch.chunks + (padding,) * (batch.layout.num_chunks - len(batch.chunks))


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. Made with the loss function of training."""

    def __init__(self, loss_fn: LossFn | SummableLoss, mesh: Mesh, *, batch_axes: BatchAxes | None = None) -> None:
        self._loss, self._mesh = summable(loss_fn, batch_axes), auto_view(mesh)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, sum of weights) of a batch, on the devices."""
        # One program per number of chunks. Evaluation batches are all of one size, so there is one.
        key, num_microbatches = (batch.layout, len(batch.chunks)), np.int32(batch.num_microbatches)
        sums = functools.partial(self._sums, _shardings_of(state))
        if jax.config.jax_disable_jit:
            return sums(state, batch.chunks, num_microbatches)
        if key not in self._programs:
            with auto_context(self._mesh):
                lowered = jax.jit(sums, out_shardings=replicated(self._mesh)).lower(state, batch.chunks, num_microbatches)
            self._programs[key] = compile_program(lowered)
        return self._programs[key](state, batch.chunks, num_microbatches)  # type: ignore[no-any-return]

    def _sums(
        self, shardings: Any, state: Any, chunks: tuple[Any, ...], num_microbatches: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        state = fetch_offloaded(state, shardings)
        batch_KR = _join(chunks)
        # A loss function takes keys. Evaluation is the same every time, whatever the step.
        keys_KR = per_row_keys(random_key(0), jnp.int32(0), _row_numbers(batch_KR, 0))
        options = {"mesh": self._mesh, "mutable": _carried(state)}
        sums = _bind_loss(self._loss, state).eval_sums(state.params, batch_KR, keys_KR, num_microbatches, **options)
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
    squares = (jnp.sum(jnp.square(jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf)) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum(squares))


def _shardings_of(state: Any) -> Any:
    """Return the shardings of a state's leaves."""

    def of(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "sharding"):
            name = jax.tree_util.keystr(path)
            raise ConfigError(f"state{name} is a {type(leaf).__name__}; place the state with rampup.prepare_state(state, mesh)")
        return leaf.sharding

    return jax.tree.map_with_path(of, state)


def _copy_to(tree: Any, mesh: Mesh) -> Any:
    """Return a copy of a tree on the mesh, so that the caller's arrays survive when the copy is donated."""
    placed = jax.device_put(tree, shardings_like(tree, mesh), may_alias=False)
    # On several devices, JAX keeps the shards that are already where they belong.
    return _without_aliases(placed, [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)])


def _without_aliases(tree: Any, others: Iterable[jax.Array] = ()) -> Any:
    """Return a tree in which leaves that share a buffer with an earlier leaf, or with one of `others`, are copies.

    The buffers of an array on several processes cannot be compared, so it is always copied.
    """

    def buffers(leaf: jax.Array) -> set[int]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards if shard.data.size}

    seen = {buffer for leaf in others if leaf.is_fully_addressable for buffer in buffers(leaf)}

    def copy(leaf: jax.Array) -> jax.Array:
        if not leaf.is_fully_addressable:
            return jnp.copy(leaf)
        if not seen.isdisjoint(buffers(leaf)):
            leaf = jax.device_put(jnp.copy(leaf), leaf.sharding)
        seen.update(buffers(leaf))
        return leaf

    return jax.tree.map(copy, tree)


def _carried(state: Any) -> Any:
    """Return the value that the loss function carries, or None."""
    return next((value for name in CARRIED_FIELDS if (value := getattr(state, name, None)) is not None), None)


def _changes(new: Any, old: Any) -> Any:
    """Return what has changed in a carried value, and zeros elsewhere: a running maximum may start at -infinity."""
    return jax.tree.map(lambda x, before: jnp.where(x == before, jnp.zeros_like(x), x), new, old)


def _carried_fields(state: Any, value: Any) -> dict[str, Any]:
    """Return the field of a state that is carried with its new value; none if nothing is carried."""
    names = [name for name in CARRIED_FIELDS if getattr(state, name, None) is not None]
    return {names[0]: value} if names else {}


def _bind_loss(loss: SummableLoss, state: Any) -> SummableLoss:
    """Return the loss with the frozen arrays of a state as an argument, if it has any."""
    frozen = getattr(state, "frozen", None)
    return loss if frozen is None else _wrap(loss, "`frozen`", lambda fn: functools.partial(fn, frozen=frozen))


def _wrap(loss: Any, reason: str, wrap: Callable[[LossFn], LossFn], part: str = "loss_fn") -> SummableLoss:
    """Return a loss with one of its functions wrapped, for something that a state has."""
    if not hasattr(loss, part):
        raise ConfigError(
            f"the state has {reason}, which a {type(loss).__name__} does not support; keep such arrays in `params` as "
            "floating-point numbers and exclude them from the optimizer with optax.transforms.freeze, or train without a "
            "pipeline",
            key="state",
        )
    return dataclasses.replace(loss, **{part: wrap(getattr(loss, part))})


def _with_shardings(tree: Any, shardings: Any) -> Any:
    """Return the shapes of arrays, whose shardings a trace does not know, with these shardings."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def _axes_in_use(names: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of more than one device."""
    return tuple(name for name in names if mesh.shape[name] > 1)


def _scaled(results: tuple[Any, ...], scale: jax.Array) -> tuple[Any, ...]:
    """Return the results of a loss function with the loss scaled."""
    return accumulator(results[0]) * scale, *results[1:]


def _adapt_scale(dynamic_scale: Any, is_finite: jax.Array) -> Any:
    """Return a Flax `DynamicScale` after a step whose gradients were finite or not."""
    # Its rule is in a method that differentiates a function, so give it one whose gradient is as finite as that of the step.
    return dynamic_scale.value_and_grad(lambda x: x * jnp.where(is_finite, 1.0, jnp.nan))(jnp.float32(0))[0]


def _is_trained(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _fill(tree: Any, values: Any) -> Any:
    """Return a tree with the leaves of another one where it has None."""
    return jax.tree.map(lambda x, value: value if x is None else x, tree, values, is_leaf=lambda x: x is None)


def _check_state(state: Any) -> None:
    """Refuse something that is not a training state."""
    missing = [name for name in ("step", "params", "opt_state") if not hasattr(state, name)]
    if missing or jax.tree_util.all_leaves([state]):
        raise ConfigError(
            f"a {type(state).__name__} cannot be trained: "
            + (f"it has no {', '.join(missing)}" if missing else "register it with jax.tree_util.register_dataclass")
            + "; a state is a pytree with `step`, `params` and `opt_state`, such as flax.training.train_state.TrainState"
        )


def _check_step_number(steps: int) -> None:
    if steps > MAX_STEPS:
        raise RampDefinitionError(
            f"steps={steps:,} does not fit into the int32 step counter of a device", key="steps", nearest=(MAX_STEPS,)
        )


def _check_arguments(call: str, **arguments: Any) -> None:
    """Refuse arguments of another kind, such as swapped ones."""
    tests: dict[str, Callable[[Any], bool]] = {
        "loss_fn": lambda x: callable(x) or isinstance(x, SummableLoss),
        "tx": lambda x: hasattr(x, "init") and hasattr(x, "update"),
        "plan": lambda x: isinstance(x, RampPlan),
        "mesh": lambda x: isinstance(x, Mesh),
    }
    wrong = {name: type(value).__name__ for name, value in arguments.items() if not tests[name](value)}
    if wrong:
        hint = "; give the optimizer's `tx`, not an nnx.Optimizer" if hasattr(arguments.get("tx"), "opt_state") else ""
        found = ", ".join(f"{name} is a {kind}" for name, kind in wrong.items())
        raise ConfigError(f"{call}: {found}{hint or '; check the order of the arguments'}", key=next(iter(wrong)))
