"""The training step: one call per optimizer step, one executable per microbatch shape.

`TrainStep.__call__` checks that state and batch belong together. `Fused` in
`rampup.engine.programs` pads the chunks of the batch to the number that its program
takes. A program is compiled once for each microbatch shape of the plan, in the first
step that has it, and traced one or two phases before. The *number* of microbatches is
an argument, so a growing batch needs no compilation. What it computes is in
`rampup.engine.update`. The call returns while the devices still work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.engine.accumulate import summable
from rampup.engine.arguments import (
    BATCHED_GONE,
    OPTIONS_OF_LOSS_GONE,
    check_arguments,
    gone,
)
from rampup.engine.batch import (
    Batch,
    BufferLayout,
    check_batch,
    in_microbatches,
    layout_of,
    put_batch,
    row_size,
)
from rampup.engine.contract import LossFn, SummableLoss
from rampup.engine.explicit import sees_explicit
from rampup.engine.keys import random_key
from rampup.engine.mesh import (
    BatchAxes,
    auto_context,
    auto_view,
    batch_sharding,
    check_plan_fits,
    process_rows,
    replicated,
)
from rampup.engine.optimizer import segment_numbers
from rampup.engine.programs import ByMicrobatch, Fused
from rampup.engine.state import carried, check_new_state, check_step_number
from rampup.engine.sums import is_floating
from rampup.engine.update import Metrics, Update
from rampup.errors import ConfigError, DataError, raise_together, warn
from rampup.plan.describe import format_count
from rampup.plan.noise_scale import noise_problems
from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.steps import steps_of

PHASES_AHEAD = 2
_GONE = OPTIONS_OF_LOSS_GONE | {
    "engine": "for multi_steps, give tx=rampup.multi_steps(tx, plan)",
    "whole_batch": "give plan.with_whole_batches() as the plan",
    "shard_optimizer_over_data": (
        "give it to create_state, prepare_state or split_model: the step follows the"
        " state"
    ),
    "wait_for_compilation": "leave it out: a step waits for its own program",
}


@gone(**_GONE)
def train_step(
    loss_fn: LossFn | SummableLoss,
    tx: optax.GradientTransformation,
    plan: RampPlan,
    mesh: Mesh,
    *,
    seed: int = 0,
    skip_nonfinite: bool = False,
    donate: bool = True,
    reduce_once: bool | None = None,
    measure_gradient_noise: bool = False,
    check_loss: bool = True,
) -> TrainStep:
    """Return a training step that follows a plan: one executable for all phases with
    the same microbatch shape.

    A step sums gradients and losses over all microbatches, reduces them over the data
    axis once, and divides them by the sum of the weights, so that every token counts
    the same wherever it is. Sums are at least in float32, unless an `AccumulatedLoss`
    says otherwise for gradients. Integers are summed in float32 too: token counts are
    exact up to 2**24.

    Args:
        loss_fn: `loss_fn(params, batch, keys) -> (loss_sum, weight_sum, aux)`, sums
            over the rows, which are the first axis of `batch`. `keys` is one random key
            per row, from seed, step and the row's place. Gradients do not flow through
            the weight. A backward rule that clips or rounds sees a cotangent of 1 for
            loss_sum, however the batch is split. If the state has `mutable` or
            `batch_stats`, it is a fourth argument and its new value a fourth result.
            With pipeline stages, a `PipelinedLoss`. For a mesh whose axes of the rows
            have other names than data and fsdp, an `AccumulatedLoss` with `batch_axes`.
        tx: the optimizer, run once per optimizer step. Optimizers with extra arguments
            get `value`, the loss. `rampup.multi_steps(tx, plan)`: run once per
            microbatch, with the differences that `multi_steps` names. If the state of
            the optimizer is sharded over the replicas (`create_state(...,
            shard_optimizer_over_data=True)`), each replica updates its own part.
        plan: which batch every step has. With `plan.with_whole_batches()`, the loss
            sees all rows of a step, for one in which rows interact: a contrastive loss,
            normalization over the batch, a quotient of sums, a sum of several means.
            Take the batches from the step: they are one microbatch each. Each batch
            size has a program of its own, and needs the memory of its whole batch.
        mesh: the devices. With Explicit axes, a loss sees those, as in `jax.jit`.
        seed: of the random keys that the loss gets.
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
        reduce_once: False: the compiler partitions the loss over all axes of the mesh,
            as in `jax.jit`, and reduces gradients once per microbatch. True: each
            replica runs the loss on its own rows, also a single one, and with Explicit
            axes, which it then sees as Auto; gradients are reduced once per step. None:
            True with several replicas on a mesh of Auto axes. What cannot run so is
            refused by name.
        measure_gradient_noise: also return the estimates S (`trace`) and G2
            (`squared_norm`) of every step, for `rampup.plan.NoiseScale`. Needs in every
            step at least two microbatches or replicas.
        check_loss: in the first call, warn with `rampup.errors.LossWarning` of a loss
            that is not a sum over rows, as `rampup.check_loss` finds it, for models
            with at most 20 million parameters, in a single process, and not with whole
            batches.

    What a loss carries in `mutable` changes once per microbatch, on each replica by its
    own rows. In a step by hand it changes once per step: a running average with the
    factor 0.9 moves by 1 - 0.9**k in a step of k microbatches, and a warning says so.
    To change it once, return sums in `aux`, and compute it from `metrics["aux"]`.

    Returns:
        The `TrainStep`.

    Raises:
        ConfigError: plan, mesh, optimizer and loss do not fit.
        TypeError: an argument that is gone.

    Example:
        >>> from rampup import (
        ...     BatchRamp,
        ...     BatchSplitter,
        ...     create_state,
        ...     make_mesh,
        ...     train_step,
        ... )
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:2 4:4"),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=20,
        ... )
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
    has_multi_steps = isinstance(tx, optax.MultiSteps)
    if has_multi_steps and getattr(tx, "plan", None) != plan:
        raise ConfigError(
            "tx is an optax.MultiSteps that does not follow this plan, and would"
            " average the gradients of several of its steps",
            fix="give the optimizer inside it, as the step accumulates by itself, or"
            " rampup.multi_steps(tx, plan)",
            key="tx",
        )
    users_mesh, mesh = mesh, auto_view(mesh)
    loss = summable(
        loss_fn, mesh, reduce_once=reduce_once, whole_batch=plan.splitter.whole_batch
    )
    given = {
        "tx=multi_steps": has_multi_steps,
        "whole batches": loss.whole_batch,
        "measure_gradient_noise": measure_gradient_noise,
    }
    if sum(given.values()) > 1:
        raise ConfigError(
            f"{' and '.join(filter(given.get, given))} exclude each other",
            fix="multi_steps runs microbatches that count equally, whole batches are"
            " one microbatch, and the noise is measured between microbatches",
            key="gradient_accumulation",
            nearest=("fused",),
        )
    if loss.whole_batch:
        plan = plan.with_whole_batches()
    check_step_number(plan.total_steps)
    axes = BatchAxes.of(mesh, loss.batch_axes)
    check_plan_fits(plan, mesh, axes)
    loss.check(mesh, "multi_steps" if has_multi_steps else "fused")
    planned = plan.splitter.num_repeats
    if loss.num_repeats not in (None, planned):
        raise ConfigError(
            f"the plan has num_repeats={planned}, but the loss has"
            f" num_repeats={loss.num_repeats}",
            fix="give both the same",
            key="num_pipeline_repeats",
            nearest=(loss.num_repeats,),
        )
    num_replicas = axes.num_replicas(mesh)
    if measure_gradient_noise:
        raise_together(noise_problems(plan, num_replicas))
    has_explicit = sees_explicit(loss, users_mesh)
    is_undecided = loss.reduce_once is None and not loss.whole_batch
    if has_explicit and is_undecided and num_replicas > 1:
        warn(
            "the mesh has Explicit axes, which the loss sees, so gradients are reduced"
            " once per microbatch; reduce_once=True reduces them once per step, and the"
            " loss then sees Auto axes; reduce_once=False says that you mean it",
            RuntimeWarning,
        )
    with auto_context(mesh):
        run_key = random_key(seed)
    update = Update(
        loss=loss,
        tx=tx,
        mesh=mesh,
        axes=axes,
        key=run_key,
        skip_nonfinite=skip_nonfinite,
        measures_noise=measure_gradient_noise,
        has_explicit=has_explicit,
    )
    return TrainStep(
        update,
        plan,
        users_mesh,
        donate=donate,
        check_loss=check_loss and not loss.whole_batch,
    )


class TrainStep:
    """A compiled training step that follows a plan, made by `train_step`.

    State and rows have the same structure, types, shapes and shardings in all steps.

    Attributes:
        tx: the optimizer as it runs, for `create_state`.
        plan: which batch every step has.
        measures_noise: whether the metrics have `gradient_noise`.

    Example:
        >>> from rampup import BatchRamp, BatchSplitter, create_state, make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.constant(4),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=1,
        ... )
        >>> step = train_step(
        ...     lambda p, batch, keys: (((p - batch) ** 2).sum(), len(keys), {}),
        ...     optax.sgd(0.5),
        ...     plan,
        ...     mesh,
        ... )
        >>> state = create_state(np.float32(0), step.tx, mesh)
        >>> state, metrics = step(state, step.batch(np.full(4, 3.0)))
        >>> float(metrics["loss"]), float(state.params)
        (9.0, 3.0)
    """

    def __init__(
        self,
        update: Update,
        plan: RampPlan,
        mesh: Mesh,
        *,
        donate: bool,
        check_loss: bool,
    ) -> None:
        self.tx = update.tx
        self.measures_noise = update.measures_noise
        self._update = update
        self.plan = plan
        self._mesh = mesh
        self._axes = update.axes
        self._checks_loss = check_loss
        engine = ByMicrobatch if isinstance(self.tx, optax.MultiSteps) else Fused
        self._programs = engine(update, plan, mesh, donate=donate)
        self._donate = donate
        self._layouts: set[BufferLayout] = set()
        # The `step` of the state that the last call returned, and its number, known
        # without waiting for the devices.
        self._returned: tuple[Any, int] = None, 0

    @property
    def chunk_size(self) -> int | None:
        """Microbatches of a chunk of its batches; None = as `step_batches` chooses."""
        return self._programs.chunk_size

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""
        return self._programs.compiler.num_compilations

    @property
    def waited_seconds(self) -> float:
        """Seconds that calls have waited for a trace or a compilation."""
        return self._programs.compiler.waited_seconds

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
            mean), `weight`, `aux` (sums); with the engine `fused` `grad_norm`; with
            `skip_nonfinite` or a `dynamic_scale` in the state `skipped`; with
            `measure_gradient_noise` `gradient_noise`.

        Raises:
            ConfigError: the state does not fit the step.
            DataError: the batch is that of another step or plan.
        """
        self._check(state, batch)
        run = self._programs.compiled(state, batch)
        if self._checks_loss:
            # By name, as the checks stand on the engine, and few calls need them.
            # After the trace, so that what a loss raises is seen at once.
            from rampup.checks.loss import warn_of_loss

            warn_of_loss(self._update.loss, state, batch)
        self._checks_loss = False
        # Before the run, which takes the memory of the state.
        self._trace_next_phases(batch, state)
        state, metrics = run()
        self._returned = state.step, batch.position.step + 1
        return state, metrics

    @gone(batched=BATCHED_GONE)
    def batches(
        self,
        source: Any,
        start: Any = 0,
        stop: int | None = None,
        *,
        seed: int | None = None,
        num_epochs: int | None = None,
        num_threads: int = 2,
        read_ahead: int = 4,
    ) -> Iterator[Batch]:
        """Yield the batch of every step from `start`, such as `state.step`, in the
        shapes of this step.

        Args:
            source, seed, num_epochs: the rows and their order; see `step_batches`.
            start, stop: the first step, such as `state.step`, and the one to stop
                before; None = the end of the plan.
            num_threads, read_ahead: how rows are read; see `BatchOptions` of
                `rampup.data`.
        """
        # Imported here: the engine needs nothing that reads data.
        from rampup.data.batches import step_batches

        steps = steps_of(self.plan, start, stop)
        return step_batches(
            source,
            self.plan,
            self._mesh,
            start=steps.start,
            stop=steps.stop,
            seed=seed,
            num_epochs=num_epochs,
            options=self._options(num_threads=num_threads, read_ahead=read_ahead),
        )

    def stream(
        self,
        source: Iterable[Any],
        start: Any = 0,
        stop: int | None = None,
        *,
        batched: bool = False,
        drop_remainder: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batch of every step from rows that come one after another, of which
        the first is that of `start`: nothing is skipped.

        Args:
            source: the rows; see `stream_batches`.
            start, stop: the first step, such as `state.step`, and the one to stop
                before; None = the end of the plan.
            batched: whether an element has several rows; see `stream_batches`.
            drop_remainder: see `stream_batches`.
        """
        from rampup.data.batches import stream_batches

        steps = steps_of(self.plan, start, stop)
        return stream_batches(
            source,
            self.plan,
            self._mesh,
            start=steps.start,
            stop=steps.stop,
            batched=batched,
            drop_remainder=drop_remainder,
            options=self._options(),
        )

    def _options(self, **given: Any) -> Any:
        """Return how batches of this step are read, as `BatchOptions`."""
        from rampup.data.batches import BatchOptions

        return BatchOptions(batch_axes=self._axes, chunk_size=self.chunk_size, **given)

    def batch(self, rows: Any, step: Any = None) -> Batch:
        """Return the batch of a step, by default that after the last call, from arrays
        (rows, ...) of this process's rows.

        Args:
            rows: a pytree of arrays (rows, ...), which are copied.
            step: the optimizer step; None = that after the last call.

        Raises:
            DataError: not as many rows as the plan has at this step.
        """
        step = self._returned[1] if step is None else int(step)
        steps_of(self.plan, step, step + 1)
        position = self.plan.position(step)
        number = position.split.num_microbatches
        own = process_rows(self._mesh, position.split.num_rows, self._axes)
        needed = number * len(own)
        from rampup.data.fields import num_rows, own_arrays

        # Copied: the caller may fill the same arrays with the next rows while the
        # devices still read these.
        rows = own_arrays(rows, batched=True)
        found = num_rows(rows, step)
        if found != needed:
            raise DataError(
                f"step {step} takes arrays of {format_count(needed, 'row')}, but the"
                f" given ones have {found}"
            )
        return put_batch(
            in_microbatches(rows, number),
            position,
            self.plan,
            self._mesh,
            batch_axes=self._axes,
            chunk_size=self.chunk_size,
        )

    def lower(self, state: Any, row: Any, split: BatchSplit) -> Any:
        """Return the program of a step for a split of the plan, lowered. It is that of
        the engine `fused`, also with `multi_steps`.

        Args:
            state: a state, or its shapes and shardings.
            row: a row, or its shapes.
            split: the split, such as one of `plan.splits`.
        """
        layout = layout_of(self.plan, split, row_size(row))
        C, R = layout.chunk_size, layout.num_rows
        by_rows = batch_sharding(self._mesh, leading=1, axes=self._axes)
        shape = jax.ShapeDtypeStruct
        chunk = jax.tree.map(
            lambda x: shape((C, R, *np.shape(x)), np.result_type(x), sharding=by_rows),
            row,
        )
        numbers = jax.tree.map(
            lambda x: shape((), x.dtype, sharding=replicated(self._mesh)),
            ((np.int32(0),) * 2, segment_numbers(self.tx, self.plan.clock[0])),
        )
        return self._programs.lower(
            Update.fused, state, (chunk,) * layout.num_chunks, *numbers
        )

    def jaxprs(self, state: Any, row: Any) -> dict[str, Any]:
        """Return what the optimizer computes, and for two rows the loss function, if it
        can be traced, as jaxprs.

        Args:
            state: a state, or its shapes.
            row: a row, or its shapes.
        """
        shape = jax.ShapeDtypeStruct
        own = jax.tree.map(lambda x: shape(np.shape(x), x.dtype), state)
        rows = jax.tree.map(lambda x: shape((2, *np.shape(x)), np.result_type(x)), row)
        mutable = [x for x in [carried(own)] if x is not None]

        def loss(state: Any, rows: Any, *args: Any) -> Any:
            bound = self._update.bound_loss(state)
            # The key is a constant of the loss, so that another seed is another loss.
            return bound.loss_fn(  # type: ignore[attr-defined]
                state.params, rows, jax.random.split(self._update.key, 2), *args
            )

        found = {}
        with auto_context(self._mesh):
            # A resumed run compares them, by these names.
            whole = " of whole batches" if self._update.loss.whole_batch else ""
            traces = {
                "optimizer": (
                    self._update.run_optimizer,
                    own.params,
                    shape((), np.float32),
                    segment_numbers(self.tx, self.plan.clock[0]),
                ),
                f"loss{whole}": (loss, rows, *mutable),
            }
            for name, (function, *args) in traces.items():
                # Whatever a function of the user's raises, the step itself has another
                # place to say it.
                with contextlib.suppress(Exception):
                    found[name] = jax.make_jaxpr(function)(own, *args)
        return found

    def _check(self, state: Any, batch: Batch) -> None:
        """Check that state, batch, plan and optimizer belong together."""
        check_batch(batch)
        known, done = self._returned
        # A state with the `step` that the last call returned needs no check. Before the
        # first call, `known` is None.
        if known is None or getattr(state, "step", None) is not known:
            check_new_state(state, self.tx, self._mesh, self._axes, donate=self._donate)
            if known is None:
                self._warn_of_carried(state)
            done = int(state.step)  # waits for the devices, once
        if batch.position.step != done:
            raise DataError(
                f"the state is at step {done}, but the batch is that of step"
                f" {batch.position.step}; start with the state:"
                " step.batches(source, start=state.step), or"
                " step.batch(arrays, step=state.step)"
            )
        phase = batch.position.phase
        # A plan with reserved sizes grows during the run: its batches may be of a
        # longer one.
        if not self.plan.reserved_sizes and phase not in self.plan.ramp.phases:
            raise DataError(
                f"the batch is of another plan: {phase}, with"
                f" {format_count(phase.global_batch_size, 'sample')} per step, is not"
                " in the plan of this step",
                fix="make both with the same plan",
            )
        if batch.layout not in self._layouts:
            size = row_size(batch.row)
            layouts = {
                layout_of(self.plan, split, size, chunk_size=self.chunk_size)
                for split in self.plan.splits_to_come
            }
            if batch.layout not in layouts:
                raise DataError(
                    f"the batch has the layout {batch.layout}, but this step takes"
                    f" {', '.join(map(str, layouts))}",
                    fix="take its own batches: step.batches(...), stream or batch",
                )
            self._layouts.add(batch.layout)

    def _warn_of_carried(self, state: Any) -> None:
        """Say that a loss changes what it carries more often than a step by hand
        does.
        """
        most = max(self.plan.max_microbatches.values())
        if most > 1 and any(map(is_floating, jax.tree.leaves(carried(state)))):
            warn(
                f"the loss changes `mutable` once per microbatch, up to {most} times in"
                " a step, where a step by hand changes it once; if it is a running"
                " average, return sums in `aux` and compute it from the metrics",
                RuntimeWarning,
            )

    def _trace_next_phases(self, batch: Batch, state: Any) -> None:
        """Trace the programs of the next phases that this run reaches, if they are new:
        what a loss raises there is seen before hours of training.
        """
        if self.chunk_size is not None:
            return  # `lower` has the programs of the engine `fused`
        index = batch.position.phase.index
        for phase in self.plan.ramp.phases[index + 1 :][:PHASES_AHEAD]:
            if phase.start_step < self.plan.total_steps:
                split = self.plan.splits[phase.index]
                lower = functools.partial(self.lower, state, batch.row, split)
                self._programs.compiler.trace(split.num_rows, lower)
