"""The training step: one call per optimizer step, one executable per microbatch shape.

`TrainStep.__call__` checks that state and batch belong together, and pads the chunks of
the batch to the number that its program takes. A program is compiled once for each
microbatch shape of the plan, if possible in the background before its phase begins. The
*number* of microbatches is an argument, so a growing batch needs no compilation. What
it computes is in `rampup.engine.update`. The call returns while the devices still work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.engine.accumulate import multi_steps, random_key, summable
from rampup.engine.batch import (
    Batch,
    BufferLayout,
    in_microbatches,
    layout_of,
    put_batch,
    row_size,
    stop_step,
)
from rampup.engine.compile import Compiler
from rampup.engine.contract import LossFn, SummableLoss
from rampup.engine.explicit import (
    as_auto,
    may_need_explicit,
    move,
    neither,
    on_mesh,
    with_either_axes,
)
from rampup.engine.mesh import (
    BatchAxes,
    auto_context,
    auto_view,
    batch_sharding,
    check_plan_fits,
    process_rows,
    replicated,
)
from rampup.engine.optimizer import FollowingOptimizer, segment_numbers
from rampup.engine.processes import wait_for_all
from rampup.engine.state import (
    NewState,
    carried,
    check_arguments,
    check_placed,
    check_step_number,
    join_frozen,
    shardings_of,
    split_frozen,
)
from rampup.engine.update import Metrics, Update, eval_sums, explicit_loss
from rampup.errors import ConfigError, DataError, a_type, raise_together
from rampup.plan.learning_rate import ClockSegment
from rampup.plan.noise_scale import noise_problems
from rampup.plan.pipeline import pass_ticks
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.split import BatchSplit

ENGINES = ("fused", "multi_steps")
PHASES_AHEAD = 2


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
    whole_batch: bool = False,
    check_loss: bool = True,
) -> TrainStep:
    """Return a training step that follows a plan: one executable for all phases with
    the same microbatch shape.

    The engine `fused` sums gradients and losses over all microbatches, reduces them
    over the data axis once, and divides them by the sum of the weights, so that every
    token counts the same wherever it is. Sums are at least in float32, unless an
    `AccumulatedLoss` says otherwise for gradients. Integers are summed in float32 too:
    token counts are exact up to 2**24.

    Args:
        loss_fn: `loss_fn(params, batch, keys) -> (loss_sum, weight_sum, aux)`, sums
            over the rows, which are the first axis of `batch`. `keys` is one random key
            per row, from seed, step and the row's place. Gradients do not flow through
            the weight. A backward rule that clips or rounds sees a cotangent of 1 for
            loss_sum, however the batch is split. If the state has `mutable` or
            `batch_stats`, it is a fourth argument and its new value a fourth result. A
            loss that adds up several means, such as one per token and one per row,
            returns a tuple of sums and one of weights: each sum is divided by its own
            weight over the whole step. That takes a pass over the weights before the
            first gradient, and the engine `fused`; the cotangents are then the largest
            weight divided by each. With pipeline stages, a `PipelinedLoss`.
        tx: the optimizer, run once per optimizer step. Optimizers with extra arguments
            get `value`, the loss.
        plan, mesh: which batch every step has, and on which devices.
        engine: `fused`, or `multi_steps` for `optax.MultiSteps` (see `multi_steps` for
            how it differs).
        skip_nonfinite: do not run the optimizer in a step whose loss or gradient is not
            finite, or whose weight is 0. Step number, rows and learning-rate schedule
            move on in every step; the rest is:

            ==================  ===============  =====================================  ===========  =========
            step                skip_nonfinite   parameters and optimizer state         `mutable`    `skipped`
            ==================  ===============  =====================================  ===========  =========
            not finite          True             stay                                   stays        True
            of weight 0         True             stay                                   moves on     False
            of weight 0         False            change as by a gradient of 0           moves on     no key
            not finite          False            change, to what is not finite          moves on     no key
            ==================  ===============  =====================================  ===========  =========

            A `dynamic_scale` in the state has the effect of True. With `multi_steps`,
            `mutable` keeps the changes that the finite microbatches of a skipped step
            made.
        donate: reuse the memory of the state that is given to a step, which cannot be
            used again.
        batch_axes: the axes of `mesh` that take the rows; None = data and fsdp.
        shard_optimizer_over_data: each replica keeps and updates its own part of the
            optimizer's state (ZeRO-1). Give it to `create_state` too.
        wait_for_compilation: start every phase in its planned microbatch shape. False:
            run in the shape of an earlier phase until the program is compiled, so two
            runs are not equal bit for bit. None: True if there are several processes.
        measure_gradient_noise: also return the estimates S (`trace`) and G2
            (`squared_norm`) of every step, for `rampup.plan.NoiseScale`. Needs the engine
            `fused` and in every step at least two microbatches or replicas.
        whole_batch: the loss sees all rows of a step, for one in which rows interact: a
            contrastive loss, normalization over the batch, a quotient of sums. Take the
            batches from the step: they are one microbatch each. Each batch size has a
            program of its own, and needs the memory of its whole batch. Also True if
            the plan has whole batches.
        check_loss: in step 0, warn with `rampup.errors.LossWarning` of a loss that is not a
            sum over rows, as `rampup.check_loss` finds it, for models with at most 20
            million parameters, in a single process, and not with `whole_batch`.

    Example:
        >>> from rampup import BatchRamp, BatchSplitter, create_state, make_mesh, train_step
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=20)
        >>> def loss_fn(params, batch, keys):
        ...     return ((params["w"] - batch["x"]) ** 2).sum(), batch["x"].size, {}
        >>> step = train_step(loss_fn, optax.sgd(0.1), plan, mesh)
        >>> state = create_state({"w": np.float32(0)}, step.tx, mesh)
        >>> for batch in step.batches([{"x": np.float32(3)}] * 8):
        ...     state, metrics = step(state, batch)
        >>> round(float(state.params["w"]), 2), int(state.step), step.num_compilations
        (2.97, 20, 1)
    """
    check_arguments(
        "train_step(loss_fn, tx, plan, mesh)",
        loss_fn=loss_fn,
        tx=tx,
        plan=plan,
        mesh=mesh,
    )
    if engine not in ENGINES:
        problem = (
            f"gradient_accumulation={engine!r} (engine) must be one of"
            f" {', '.join(ENGINES)}"
        )
        raise ConfigError(problem, key="gradient_accumulation", nearest=ENGINES)
    if isinstance(getattr(tx.init, "__self__", None), optax.MultiSteps):
        problem = (
            "tx is an optax.MultiSteps, which would average the gradients of several"
            " optimizer steps of the plan"
        )
        fix = (
            "give the optimizer inside it; the step accumulates by itself"
            " (engine='multi_steps' to use optax.MultiSteps)"
        )
        raise ConfigError(f"{problem}; {fix}", key="tx")
    whole_batch |= plan.splitter.whole_batch
    equally = "with multi_steps, all microbatches count equally whatever they weigh"
    reasons = {
        "shard_optimizer_over_data": (
            shard_optimizer_over_data
            and "multi_steps runs the optimizer at every microbatch"
        ),
        "measure_gradient_noise": measure_gradient_noise and equally,
        "whole_batch": (
            whole_batch and "a batch of one microbatch has nothing to accumulate"
        ),
    }
    for key, reason in reasons.items():
        if reason and engine == "multi_steps":
            raise ConfigError(
                f"{key}=true needs gradient_accumulation=fused; {reason}",
                key=key,
                nearest=(False,),
            )
    check_step_number(plan.total_steps)
    check_plan_fits(plan, mesh, batch_axes)
    given, mesh = mesh, auto_view(mesh)
    axes = BatchAxes.of(mesh, batch_axes)
    loss = summable(loss_fn, mesh, batch_axes, whole_batch=whole_batch)
    loss.check(mesh, engine)
    if whole_batch:
        if wait_for_compilation is False:
            problem = (
                "whole_batch=True waits for the program of each batch size: another"
                " shape would be a part of the batch"
            )
            raise ConfigError(problem, key="wait_for_compilation", nearest=(True,))
        if measure_gradient_noise:
            problem = (
                "measure_gradient_noise=true compares microbatches, but with"
                " whole_batch=True a step has only one"
            )
            raise ConfigError(problem, key="measure_gradient_noise", nearest=(False,))
        plan, wait_for_compilation = plan.with_whole_batches(), True
        batch_axes = BatchAxes.whole(mesh, batch_axes)
    planned = plan.splitter.num_repeats
    if planned != (repeats := getattr(loss, "num_repeats", planned)):
        problem = (
            f"the plan has num_repeats={planned}, but the loss has"
            f" num_repeats={repeats}; give both the same"
        )
        raise ConfigError(problem, key="num_pipeline_repeats", nearest=(repeats,))
    if measure_gradient_noise:
        raise_together(noise_problems(plan, axes.num_replicas(mesh)))
    with auto_context(mesh):
        run_key = random_key(seed)
    optimizer = tx if engine == "fused" else multi_steps(tx, plan)
    scatter_axes = (
        axes if shard_optimizer_over_data and axes.num_replicas(mesh) > 1 else None
    )
    update = Update(
        loss,
        optimizer,
        mesh,
        batch_axes,
        run_key,
        skip_nonfinite,
        scatter_axes,
        measure_gradient_noise,
    )
    options = {"donate": donate, "check_loss": check_loss and not whole_batch}
    return TrainStep(
        update, plan, given, wait_for_compilation=wait_for_compilation, **options
    )


class TrainStep:
    """A compiled training step that follows a plan, made by `train_step`.

    State and rows have the same structure, types, shapes and shardings in all steps.

    Attributes:
        tx: the optimizer as it runs; with the engine `multi_steps` wrapped in
            `optax.MultiSteps`.
        measures_noise: whether the metrics have `gradient_noise`.
    """

    def __init__(
        self,
        update: Update,
        plan: RampPlan,
        mesh: Mesh,
        *,
        donate: bool,
        wait_for_compilation: bool | None,
        check_loss: bool,
    ) -> None:
        several = jax.process_count() > 1
        if several and wait_for_compilation is False:
            problem = (
                "wait_for_compilation=false is for a single process: several would"
                " change shapes at different steps"
            )
            raise ConfigError(problem, key="wait_for_compilation", nearest=(True,))
        self.tx = update.tx
        self.measures_noise = update.measures_noise
        self._update = update
        self._plan = plan
        self._mesh = mesh
        self._batch_axes = update.batch_axes
        self._is_fused = not isinstance(update.tx, optax.MultiSteps)
        self._donate = donate
        self._checks_loss = check_loss
        self._chunk_size = None if self._is_fused else 1
        self._layouts: set[BufferLayout] = set()
        self._wait_for_compilation = (
            several if wait_for_compilation is None else wait_for_compilation
        )
        self._compiler = Compiler(functools.partial(wait_for_all, self._mesh))
        # The `step` of the state that the last call returned, and its number, known
        # without waiting for the devices.
        self._returned: tuple[Any, int] = None, 0
        self._shape_changes: dict[
            int, int
        ] = {}  # the first step of every microbatch size
        self._requested_in: int | None = (
            None  # the phase in which the programs of the next phases were requested
        )
        self._padding: dict[BufferLayout, Any] = {}

        # A number of microbatches or passes, or the numbers of a segment, on the
        # devices: each would be copied in every step.
        def put(number: np.number) -> jax.Array:
            return jax.make_array_from_callback((), replicated(mesh), lambda _: number)

        self._on_devices = functools.cache(lambda number: put(np.int32(number)))
        self._segment_on_devices = functools.cache(
            lambda segment: jax.tree.map(put, self.segment_of(segment))
        )
        self._zero_metrics: Metrics | None = None

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""
        return self._compiler.num_compilations

    @property
    def waited_seconds(self) -> float:
        """Seconds that calls have waited for a trace or a compilation."""
        return self._compiler.waited_seconds

    def close(self) -> None:
        """Cancel the compilations that have not started. The step can still be called,
        and requests them again.
        """
        self._compiler.close()
        self._requested_in = None

    def __call__(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """Run one optimizer step.

        Args:
            state: the training state, placed by `create_state` or `prepare_state`.
                Unless `donate=False`, its memory is reused, except for `frozen`: only
                the returned state can be used afterwards.
            batch: from `batches`, `stream` or `batch`, or from `step_batches` of the
                same plan; with the engine `multi_steps` made with `chunk_size=1`.

        Returns:
            The new state and the step's metrics, on the devices: `loss` (the weighted
            mean), `weight`, `aux` (sums); of a loss of several parts `loss_parts`, the
            mean of each; with the engine `fused` `grad_norm`; with `skip_nonfinite` or
            a `dynamic_scale` in the state `skipped`; with `measure_gradient_noise`
            `gradient_noise`.

        Raises:
            ConfigError: the state does not fit the step.
            DataError: the batch is that of another step or plan.
        """
        self._check(state, batch)
        if self._checks_loss and not batch.position.step:
            # By name, as the checks stand on the engine, and few runs need them twice.
            from rampup.checks.loss import warn_of_loss

            is_one = all(split.num_microbatches == 1 for split in self._plan.splits)
            has_replicas = (
                BatchAxes.of(self._mesh, self._batch_axes).num_replicas(self._mesh) > 1
            )
            sees_whole = is_one and not has_replicas and self._has_planned_shapes
            warn_of_loss(self._update.loss, state, batch, sees_whole=sees_whole)
        self._checks_loss = False
        if self._is_fused:
            split = batch.position.split
            counts = (
                self._on_devices(split.num_pipeline_microbatches),
                self._on_devices(split.accumulation_steps),
            )
            segment = batch.position.segment
            args = (
                self._padded(batch),
                counts,
                segment and self._segment_on_devices(segment),
            )
            lower = functools.partial(self._lower_program, Update.fused, state, *args)
            program = (
                None
                if jax.config.jax_disable_jit
                else self._compiler.get(batch.layout.num_rows, lower)
            )
            # Before the call, which does not return at once everywhere.
            self._compile_next_phases(batch, state)
            state, metrics = self._run(program, Update.fused, state, *args)
        else:
            if self._zero_metrics is None:
                self._zero_metrics = self._update.zero_metrics(
                    *as_auto((state, batch.chunks[0]))
                )
            metrics = self._zero_metrics
            for index, chunk in enumerate(batch.chunks):
                part = metrics, chunk, np.int32(index * batch.layout.num_rows)
                lower = functools.partial(
                    self._lower_program, Update.multi_steps, state, *part
                )
                program = (
                    None
                    if jax.config.jax_disable_jit
                    else self._compiler.get(batch.layout.num_rows, lower)
                )
                state, metrics = self._run(program, Update.multi_steps, state, *part)
        self._returned = state.step, batch.position.step + 1
        return state, metrics

    def batches(
        self,
        source: Any,
        start: Any = 0,
        stop: int | None = None,
        *,
        seed: int | None = None,
        num_epochs: int | None = None,
        batched: bool | None = None,
        num_threads: int = 2,
        read_ahead: int = 4,
    ) -> Iterator[Batch]:
        """Yield the batch of every step from `start`, such as `state.step`, in the
        shapes of this step; see `step_batches`.
        """
        # Imported here: the engine needs nothing that reads data.
        from rampup.data.batches import BatchOptions, step_batches

        options = BatchOptions(
            batched=batched,
            num_threads=num_threads,
            read_ahead=read_ahead,
            **self._batch_options,
        )
        return step_batches(
            source,
            self._plan,
            self._mesh,
            start=int(start),
            stop=stop,
            seed=seed,
            num_epochs=num_epochs,
            options=options,
        )

    def stream(
        self,
        source: Iterable[Any],
        start: Any = 0,
        stop: int | None = None,
        *,
        batched: bool | None = None,
        drop_remainder: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batch of every step from rows that come one after another, from
        those of `start`; see `stream_batches`.
        """
        from rampup.data.batches import BatchOptions, stream_batches

        return stream_batches(
            source,
            self._plan,
            self._mesh,
            start=int(start),
            stop=stop,
            drop_remainder=drop_remainder,
            options=BatchOptions(batched=batched, **self._batch_options),
        )

    def batch(self, rows: Any, step: Any = None) -> Batch:
        """Return the batch of a step, by default that after the last call, from arrays
        (rows, ...) of this process's rows.

        Raises:
            DataError: not as many rows as the plan has at this step.
        """
        step = self._returned[1] if step is None else int(step)
        stop_step(self._plan, step, step + 1)
        position = self._plan.position(step)
        split = self.split_for(position)
        needed = split.num_microbatches * len(
            process_rows(self._mesh, _num_rows(split), self._batch_axes)
        )
        from rampup.data.fields import own_arrays

        # Copied: the caller may fill the same arrays with the next rows while the
        # devices still read these.
        rows = own_arrays(rows, batched=True)
        found = {leaf.shape[:1] for leaf in jax.tree.leaves(rows)}
        if found != {(needed,)}:
            lengths = (
                ", ".join(str(shape[0]) if shape else "no" for shape in sorted(found))
                or "no"
            )
            raise DataError(
                f"step {step} takes arrays of {needed} rows, but the given ones have"
                f" {lengths} rows"
            )
        batch_nR = in_microbatches(rows, split.num_microbatches)
        if split != position.split:
            position = dataclasses.replace(position, split=split)
        return put_batch(
            batch_nR,
            position,
            self._plan,
            self._mesh,
            batch_axes=self._batch_axes,
            chunk_size=self._chunk_size,
        )

    @property
    def shape_changes(self) -> dict[int, int]:
        """The first step of every microbatch size that `split_for` has decided on,
        which may be before that step.
        """
        return dict(self._shape_changes)

    def replay_shape_changes(self, changes: Mapping[int, int]) -> None:
        """Change shapes at the steps at which an earlier part of the run did; see
        `shape_changes`.
        """
        self._shape_changes |= changes

    def split_for(self, position: PlanPosition) -> BatchSplit:
        """Return how to split the batch of a position now. Use it as `step_batches(...,
        split_for=step.split_for)`.

        That is the planned split, or while its program is being compiled, a split of
        the same batch into the microbatches of an earlier phase. With
        `wait_for_compilation`, the engine `multi_steps`, or one microbatch shape, it is
        the planned split.

        The step of a change depends on how long a compilation takes. It is decided
        once, and `shape_changes` records it. Several processes would decide at
        different steps. Therefore they wait.

        At a step, a microbatch size is `new`, `used`, or, in a run that is replayed,
        `later` if a later step changes to it. A fallback is a size in use: another one
        would have to be compiled as well.

        ============  ==========  =============  =============================================
        planned size  a fallback  program ready  split
        ============  ==========  =============  =============================================
        used          any         any            the planned one
        later         there is    any            the fallback
        new           there is    no             the fallback
        new           there is    yes            the planned one; its size becomes `used`
        new or later  none        any            the planned one; its size becomes `used`
        ============  ==========  =============  =============================================
        """
        planned, step = position.split, position.step
        if self._has_planned_shapes:
            return planned

        def use_of(split: BatchSplit) -> str:
            first_step = self._shape_changes.get(split.microbatch_size)
            return (
                "new"
                if first_step is None
                else "later"
                if first_step > step
                else "used"
            )

        now = use_of(planned)
        if now == "used":
            return planned
        fallback = next(
            (
                split
                for split in self._plan.fallbacks(position.phase.index)
                if use_of(split) == "used"
            ),
            None,
        )
        if fallback is not None and (
            now == "later" or not self._compiler.is_ready(_num_rows(planned))
        ):
            return fallback
        self._shape_changes[planned.microbatch_size] = step
        return planned

    @property
    def _has_planned_shapes(self) -> bool:
        """Whether every batch is split as planned, also while programs are being
        compiled.
        """
        return (
            self._wait_for_compilation
            or not self._is_fused
            or self._plan.num_compiled_shapes == 1
        )

    def lower(self, state: Any, row: Any, split: BatchSplit) -> Any:
        """Return the program of the engine `fused` for a split of the plan, from a
        state and a row, or from their shapes.
        """
        layout = layout_of(self._plan, split, row_size(row))
        array = functools.partial(
            jax.ShapeDtypeStruct,
            sharding=batch_sharding(self._mesh, leading=1, axes=self._batch_axes),
        )
        chunk = jax.tree.map(
            lambda x: array(
                (layout.chunk_size, layout.num_rows, *np.shape(x)), np.result_type(x)
            ),
            row,
        )
        chunks = (chunk,) * layout.num_chunks
        scalar = functools.partial(
            jax.ShapeDtypeStruct, (), sharding=replicated(self._mesh)
        )
        segment = jax.tree.map(
            lambda x: scalar(x.dtype), self.segment_of(self._plan.clock[0])
        )
        return self._lower_program(
            Update.fused, state, chunks, (scalar(np.int32), scalar(np.int32)), segment
        )

    def jaxprs(self, state: Any, row: Any) -> dict[str, Any]:
        """Return what the optimizer computes, and for two rows the loss function, if it
        can be traced, as jaxprs.
        """

        def loss(state: Any, rows: Any, keys: Any) -> Any:
            bound: Any = self._update.bound_loss(state)
            mutable = carried(state)
            return bound.loss_fn(
                state.params, rows, keys, *(() if mutable is None else (mutable,))
            )

        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((2, *np.shape(x)), np.result_type(x)), row
        )
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), state
        )
        found = {}
        with auto_context(self._mesh):
            keys = jax.random.split(self._update.key, 2)
            optimizer_args = (
                shapes,
                shapes.params,
                jax.ShapeDtypeStruct((), np.float32),
                self.segment_of(self._plan.clock[0]),
            )
            traces = {
                "optimizer": (self._update.run_optimizer, optimizer_args),
                "loss": (loss, (shapes, rows, keys)),
            }
            for name, (function, args) in traces.items():
                # Whatever a function of the user's raises, the step itself has another
                # place to say it.
                with contextlib.suppress(Exception):
                    found[name] = jax.make_jaxpr(function)(*args)
        return found

    def segment_of(self, segment: ClockSegment | None) -> dict[str, np.number] | None:
        """Return the numbers of a segment if the optimizer takes them: other optimizers
        know the plan.
        """
        return (
            segment_numbers(segment)
            if segment is not None and isinstance(self.tx, FollowingOptimizer)
            else None
        )

    def loop_trips(self, split: BatchSplit) -> tuple[int, ...]:
        """Return the iterations of the `fused` program's loops: microbatches, or passes
        and the ticks of a pipeline pass.
        """
        splitter = self._plan.splitter
        if splitter.num_stages == 1:
            return (split.num_microbatches,)
        ticks = pass_ticks(
            splitter.num_stages, split.num_pipeline_microbatches, splitter.num_repeats
        )
        return split.accumulation_steps, ticks

    @property
    def _batch_options(self) -> dict[str, Any]:
        """The options of `batches` and `stream` for this step."""
        return {
            "batch_axes": self._batch_axes,
            "chunk_size": self._chunk_size,
            "split_for": self.split_for,
        }

    def _check(self, state: Any, batch: Batch) -> None:
        """Check that state, batch, plan and optimizer belong together."""
        if not isinstance(batch, Batch):
            fix = (
                "get batches from step.batches(source), or make one of arrays with"
                " step.batch(arrays)"
            )
            raise DataError(f"a step takes a Batch and not {a_type(batch)}; {fix}")
        known, done = self._returned
        # A state with the `step` that the last call returned needs no check. Before the
        # first call, `known` is None.
        if known is None or getattr(state, "step", None) is not known:
            axes = self._update.scatter_axes or BatchAxes.of(
                self._mesh, self._batch_axes
            )
            # An axis of one device shards nothing, even if a sharding names it.
            axes = dataclasses.replace(
                axes,
                replica=tuple(
                    name for name in axes.replica if self._mesh.shape[name] > 1
                ),
            )
            facts = {
                "is_first": known is None,
                "is_fused": self._is_fused,
                "scatters": self._update.scatter_axes is not None,
            }
            done = NewState(
                state=state,
                tx=self.tx,
                mesh=self._mesh,
                axes=axes,
                donate=self._donate,
                **facts,
            ).check()
        if batch.position.step != done:
            fix = (
                "start with the state: step.batches(source, start=state.step), or"
                " step.batch(arrays, step=state.step)"
            )
            raise DataError(
                f"the state is at step {done}, but the batch is that of step"
                f" {batch.position.step}; {fix}"
            )
        phase = batch.position.phase
        # A plan with reserved sizes grows during the run: its batches may be of a
        # longer one.
        if (
            not self._plan.reserved_sizes
            and phase not in self._plan.ramp.phases[phase.index : phase.index + 1]
        ):
            problem = (
                f"the batch is of another plan: {phase}, with {phase.global_batch_size}"
                " samples per step"
            )
            raise DataError(
                f"{problem}, is not in the plan of this step; make both with the same"
                " plan"
            )
        if batch.layout not in self._layouts:
            size = row_size(batch.row)
            layouts = {
                layout_of(self._plan, split, size, chunk_size=self._chunk_size)
                for split in self._plan.splits_to_come
            }
            if batch.layout in layouts:
                self._layouts.add(batch.layout)
                return
            if self._plan.splitter.whole_batch:
                raise DataError(
                    "with whole_batch=True, a step takes its own batches:"
                    " step.batches(...), stream or batch"
                )
            if not self._is_fused and batch.layout.chunk_size != 1:
                problem = (
                    "multi_steps runs one microbatch at a time, but the batch has"
                    f" chunks of {batch.layout.chunk_size}"
                )
                raise ConfigError(
                    f"{problem}; give chunk_size=1 to step_batches",
                    key="gradient_accumulation",
                    nearest=("fused",),
                )
            planned = ", ".join(map(str, layouts))
            fix = "make it with the same plan, and without chunk_size"
            raise DataError(
                f"the batch has the layout {batch.layout}, but the plan of this step"
                f" has {planned}; {fix}"
            )

    def _run(
        self, program: Any, update: Callable[..., Any], state: Any, *args: Any
    ) -> Any:
        """Run the program of an update, or for None the update itself, without
        compilation.
        """
        trained, frozen = split_frozen(state)
        if program is None:
            with auto_context(self._mesh):
                view = auto_view(self._mesh)
                own = move((trained, frozen, *args), view)
                new, metrics = move(
                    update(self._update, on_mesh(shardings_of(state), view), *own),
                    self._mesh,
                )
        else:
            new, metrics = _call(program, trained, frozen, *args)
        return join_frozen(new, frozen), metrics

    def _lower_program(self, update: Callable[..., Any], state: Any, *args: Any) -> Any:
        """Lower a program that maps a state, its `frozen` and further arguments to the
        next state and the metrics.
        """
        # The next state has the shardings of the given one, so that the program accepts
        # its own result. Only the state is donated: no result has the shape of the
        # batch, and the padding is used again.
        shardings = shardings_of(state)
        donated = 0 if self._donate else ()
        results = (split_frozen(shardings)[0], replicated(self._mesh))
        views = on_mesh(shardings, auto_view(self._mesh))

        own = self._update
        try:
            with auto_context(self._mesh):
                program = jax.jit(
                    functools.partial(update, own, views),
                    donate_argnums=donated,
                    out_shardings=results,
                )
                return program.lower(*as_auto((*split_frozen(state), *args)))
        except Exception as error:
            if own.has_explicit or not may_need_explicit(error, self._mesh):
                raise
            first = error
        self._update = dataclasses.replace(own, has_explicit=True)
        try:
            return self._lower_program(update, state, *args)
        except Exception as error:
            self._update = own
            raise neither(first, error, self._mesh) from error

    def _compile_next_phases(self, batch: Batch, state: Any) -> None:
        """Request the programs of the next phases that this run reaches, once per
        phase.
        """
        index = batch.position.phase.index
        if index == self._requested_in or jax.config.jax_disable_jit:
            return
        self._requested_in = index
        # This phase too: it may run in the shape of an earlier one.
        phases = self._plan.ramp.phases[index : index + 1 + PHASES_AHEAD]
        splits = [
            self._plan.splits[phase.index]
            for phase in phases
            if phase.start_step < self._plan.total_steps
        ]
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        for split in splits:
            self._compiler.compile_async(
                _num_rows(split),
                functools.partial(self.lower, shapes, batch.row, split),
            )

    def _padded(self, batch: Batch) -> tuple[Any, ...]:
        """Return as many chunks as the program takes: those of the batch, then one
        chunk of zeros that stays on the devices.
        """

        def zeros_like(x: jax.Array) -> jax.Array:
            shard = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)

        if batch.layout not in self._padding:
            # Made on the host: `jnp.zeros` would be one more compilation, at a phase
            # change and with the run waiting.
            self._padding[batch.layout] = jax.tree.map(zeros_like, batch.chunks[0])
        return batch.chunks + (self._padding[batch.layout],) * (
            batch.layout.num_chunks - len(batch.chunks)
        )


def _num_rows(split: BatchSplit) -> int:
    """Return R, the number of rows of a microbatch. In a plan, there is one program for
    each.
    """
    return split.data_parallel_size * split.microbatch_size


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. It takes the same
    loss function as `train_step`.

    With `whole_batch`, the loss sees all rows of a batch, which is then one microbatch,
    as in a plan of a constant batch.

    Example:
        >>> from rampup import create_state, make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> evaluate = EvalStep(lambda params, batch, keys: (((batch - params) ** 2).sum(), len(keys), {}), mesh)
        >>> state = create_state(np.float32(1), optax.sgd(0.1), mesh)
        >>> sums = [evaluate(state, batch) for batch in evaluate.batches(np.arange(7.0), 3)]
        >>> [(float(loss), int(weight)) for loss, weight in sums]
        [(2.0, 3), (29.0, 3), (25.0, 1)]
    """

    def __init__(
        self,
        loss_fn: LossFn | SummableLoss,
        mesh: Mesh,
        *,
        batch_axes: BatchAxes | None = None,
        whole_batch: bool = False,
    ) -> None:
        self._loss = summable(loss_fn, mesh, batch_axes, whole_batch=whole_batch)
        self._whole_batch = whole_batch
        self._loss_fn, self._batch_axes = loss_fn, batch_axes
        self._mesh = mesh
        self._compiler = Compiler(functools.partial(wait_for_all, self._mesh))

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return (sum of losses, sum of weights) of a batch, on the devices. Batches of
        one size share a program.
        """
        if not isinstance(batch, Batch):
            raise DataError(
                "an EvalStep takes a Batch, such as `step_batches` yields, and not"
                f" {a_type(batch)}"
            )
        check_placed(state)
        if self._whole_batch and batch.num_microbatches > 1:
            problem = (
                "whole_batch=True evaluates a batch of one microbatch, but this one"
                f" has {batch.num_microbatches}"
            )
            raise DataError(f"{problem}; make it with plan.with_whole_batches()")
        args = state, batch.chunks, np.int32(batch.num_microbatches)
        # The rows that are left over are on every device, as if the mesh had no axes
        # for rows; see `batches`.
        is_shared = (
            BatchAxes.of(self._mesh, self._batch_axes).num_shards(self._mesh) > 1
        )
        is_whole = (
            is_shared and jax.tree.leaves(batch.chunks)[0].sharding.is_fully_replicated
        )
        loss = (
            self._loss
            if not is_whole
            else summable(self._loss_fn, self._mesh, BatchAxes(replica=(), rows=()))
        )
        view = auto_view(self._mesh)
        shardings = on_mesh(shardings_of(state), view)
        if jax.config.jax_disable_jit:
            with auto_context(self._mesh):
                return move(
                    eval_sums(loss, view, shardings, *move(args, view)), self._mesh
                )

        def lower(has_explicit: bool) -> Any:
            own = explicit_loss(loss, view, shardings) if has_explicit else loss
            with auto_context(self._mesh):
                sums = jax.jit(
                    functools.partial(eval_sums, own, view, shardings),
                    out_shardings=replicated(self._mesh),
                )
                return sums.lower(*as_auto(args))

        key = batch.layout, len(batch.chunks), is_whole
        return _call(
            self._compiler.get(key, lambda: with_either_axes(lower, self._mesh)), *args
        )

    def batches(
        self, source: Any, batch_size: int, *, batched: bool | None = None
    ) -> Iterator[Batch]:
        """Yield all rows of a source once, in order: batches of `batch_size` rows, then
        what is left over.

        That is at most two batches with programs of their own: as many rows as all
        replicas can share, and the rest, which every device computes. `batch_size` is a
        multiple of the devices that share the rows. For the rest see `step_batches`.
        """
        from rampup.data.batches import eval_batches

        options: dict[str, Any] = {
            "batch_axes": self._batch_axes,
            "whole_batch": self._whole_batch,
            "batched": batched,
        }
        return eval_batches(source, batch_size, self._mesh, **options)


def _call(program: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled program."""
    try:
        return program(*args)
    except (TypeError, ValueError) as error:
        problem = (
            "structure, types, shapes or shardings of the state or the rows are not"
            " those that this step compiled for"
        )
        raise ConfigError(
            f"{problem}; convert them, or make another step for them: {error}",
            key="state",
        ) from error
