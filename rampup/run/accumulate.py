"""Gradient accumulation: the sum over the microbatches of a step, and `optax.MultiSteps` with a k that follows the ramp.

A replica is a group of devices that together have the parameters once: those with the same place on the data axis.

Shape suffixes: K microbatches in the buffer, R rows of one microbatch: all of them outside of `jax.shard_map`, and those of one
replica or device inside.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from rampup.errors import ConfigError, PipelineShapeError, RampDefinitionError
from rampup.moved import moved_names
from rampup.plan.plan import RampPlan
from rampup.run.gradient_noise import NoiseMeter, NoiseSums
from rampup.run.mesh import STAGE, BatchAxes, auto_view, axis_names, constrain, own_constraints
from rampup.run.zero import is_scattered, manual_specs, reduce_gradients

# What Flax calls the part of the parameters of its float8 layers whose gradients are new values.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
# loss_fn(params, batch, keys[, mutable]) -> (loss_sum, weight_sum, aux[, mutable]); see `rampup.run.step.train_step`.
LossFn = Callable[..., tuple[Any, ...]]
# (microbatches in a pipeline's pass, passes), traced. A step runs their product; without stages, only the product matters.
Counts = tuple[jax.Array, jax.Array]


class Sums(NamedTuple):
    """Sums over all rows of an optimizer step.

    Attributes:
        grads: gradient of `loss`, not of the mean, at least in float32, shaped and sharded like the parameters; or None.
        loss: sum of the losses.
        weight: sum of the weights, for instance the number of tokens; loss / weight is the mean loss.
        aux: sums of the other results of the loss function.
        mutable: the state that the loss function carries from microbatch to microbatch, or None.
        noise: sums of squares over the blocks (a microbatch on a replica), if the gradient noise is measured.
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: Any
    mutable: Any
    noise: NoiseSums | None = None

    def mean_grads(self, params: Any = None) -> Any:
        """Return the gradient of loss / weight: in the types of `params`, or by default in those of the sums."""
        scale = safe_reciprocal(self.weight)
        grads = jax.tree.map(lambda g: g * scale, self.grads)
        return grads if params is None else cast_like(grads, params)


@runtime_checkable
class SummableLoss(Protocol):
    """A loss with a method that adds it up over the microbatches of a step, which is all that a training step calls.

    `AccumulatedLoss` makes one of a loss function; `rampup.run.pipeline.PipelinedLoss` spreads its layers over stages. With
    `batch_axes`, a loss is a dataclass with a field of this name.
    """

    def check(self, mesh: Mesh, engine: str) -> None:
        """Raise an error if this loss cannot run on a mesh, or with the engine `fused` or `multi_steps`."""

    def sums_and_grads(
        self,
        params: Any,
        batch_KR: Any,
        keys_KR: jax.Array,
        counts: Counts,
        *,
        mesh: Mesh,
        param_shardings: Any,
        mutable: Any = None,
        noise: NoiseMeter | None = None,
    ) -> tuple[Sums, Any]:
        """Return the sums over the microbatches, with None as `grads`, and the gradient of the mean loss at least in float32.

        Only a step with `measure_gradient_noise` passes `noise`.
        """

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients."""


@dataclass(frozen=True, slots=True)
class AccumulatedLoss:
    """The `SummableLoss` of a loss function: microbatches run one after the other on every replica.

    Attributes:
        loss_fn: see `rampup.run.step.train_step`.
        batch_axes: the mesh axes of the rows; None = data and fsdp.
        param_shardings: None: `loss_fn` takes whole parameters and the rows of one replica, and the compiler partitions it over
            fsdp and tensor. Otherwise it takes the rows of one device, and the part of each parameter that one device has along
            the axes of the rows. These are the shardings of the parameters. It gathers what it needs with its own collectives.
        reduction_dtype: type in which replicas exchange gradients; None = the type of the sums, so that of the accumulators.
        accumulator_dtype: type in which gradients are summed over the microbatches; None = at least float32.
    """

    loss_fn: LossFn
    batch_axes: BatchAxes | None = None
    param_shardings: Any = None
    reduction_dtype: Any = None
    accumulator_dtype: Any = None

    def check(self, mesh: Mesh, engine: str) -> None:
        """Refuse pipeline stages, and a type of accumulators with `multi_steps`; see `SummableLoss`."""
        if self.accumulator_dtype is not None and engine == "multi_steps":
            raise ConfigError(
                f"gradient_accumulator_dtype={jnp.dtype(self.accumulator_dtype).name} needs gradient_accumulation=fused; "
                "optax.MultiSteps keeps the sums of multi_steps",
                key="gradient_accumulator_dtype",
                nearest=("float32",),
            )
        stages = dict(mesh.shape).get(STAGE, 1)
        if stages > 1:
            raise PipelineShapeError(
                f"the mesh has {stages} pipeline stages, so the loss must say what a stage does: give a PipelinedLoss",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )

    def sums_and_grads(
        self,
        params: Any,
        batch_KR: Any,
        keys_KR: jax.Array,
        counts: Counts,
        *,
        mesh: Mesh,
        param_shardings: Any,
        mutable: Any = None,
        noise: NoiseMeter | None = None,
    ) -> tuple[Sums, Any]:
        """Return the sums and the gradient of the mean loss; see `SummableLoss`."""
        takes_whole = self.param_shardings is None
        if noise is not None and not takes_whole:
            raise ConfigError(
                "measure_gradient_noise=true needs a loss function that takes whole parameters: with parts that it gathers "
                "itself, the gradient of a microbatch is never in one place",
                key="measure_gradient_noise",
                nearest=(False,),
            )
        # A plan whose buffer has room for one microbatch runs one in every step.
        number = 1 if keys_KR.shape[0] == 1 else counts[0] * counts[1]
        has_one_replica = BatchAxes.of(mesh, self.batch_axes).num_replicas(mesh) == 1
        if keys_KR.shape[0] == 1 and has_one_replica and takes_whole and noise is None:
            # Nothing to add up: differentiate the mean. To divide the gradient of a sum, as below, takes one more pass over
            # memory as large as the parameters.
            microbatch_sums = own_constraints()(_microbatch_sums(self.loss_fn, param_shardings, differentiate_mean=True))
            sums = microbatch_sums(params, *take((batch_KR, keys_KR), 0), mutable)
            return sums._replace(grads=None), sums.grads
        options: Any = {"mesh": mesh, "param_shardings": param_shardings, "mutable": mutable, "noise": noise}
        sums = self.sum_microbatches(params, batch_KR, number, keys_KR, **options)
        return sums._replace(grads=None), sums.mean_grads()

    def sum_microbatches(
        self,
        params: Any,
        batch_KR: Any,
        number: jax.Array | int,
        keys_KR: jax.Array | None,
        *,
        mesh: Mesh,
        param_shardings: Any = None,
        mutable: Any = None,
        noise: NoiseMeter | None = None,
    ) -> Sums:
        """Return the sums over the first `number` microbatches of the buffer, at most K; see `accumulate`."""
        axes, shardings = BatchAxes.of(mesh, self.batch_axes), param_shardings
        if self.param_shardings is not None:
            if is_scattered(param_shardings, axes):
                raise ConfigError(
                    "shard_optimizer_over_data=true needs a loss function that takes whole parameters",
                    key="shard_optimizer_over_data",
                )
            if is_scattered(self.param_shardings, axes):
                problem = f"`param_shardings` of the loss shard parameters over the replicas ({', '.join(axes.replica)})"
                raise ConfigError(f"{problem}, which need them whole; shard them over fsdp", key="param_shardings")
            # The function takes parameters as it was made for, however the given ones are sharded. Those not trained are None.
            own = self.param_shardings
            shardings = jax.tree.map(lambda p, s: None if p is None else s, params, own, is_leaf=lambda p: p is None)
        has_one = jax.tree.leaves(batch_KR)[0].shape[0] == 1 and not isinstance(number, jax.core.Tracer) and int(number) == 1
        # jit caches the trace: the loss function is traced once for the shapes of the sums and for the body of the loop.
        microbatch_sums = jax.jit(
            _microbatch_sums(self.loss_fn, shardings, noise=noise, dtype=self.accumulator_dtype), inline=True
        )

        def replica_sums(params: Any, batch_KR: Any, keys_KR: Any, number: Any, mutable: Any, moments: Any) -> Sums:
            # First over this replica's rows, then over the replicas.
            if has_one:
                sums = microbatch_sums(params, *take((batch_KR, keys_KR), 0), mutable, moments)
                return self._reduce(sums, mutable, shardings, mesh)

            def add(i: jax.Array, total: Sums) -> Sums:
                new = microbatch_sums(params, *take((batch_KR, keys_KR), i), total.mutable, moments)
                added = jax.tree.map(jnp.add, total._replace(mutable=None), new._replace(mutable=None))
                return added._replace(grads=constrain_leaves(added.grads, shardings), mutable=new.mutable)

            # Without the constraints, the compiler may replicate the carried gradients over fsdp and tensor.
            zeros = _zeros(microbatch_sums, params, *take((batch_KR, keys_KR), 0), mutable, moments)
            zeros = zeros._replace(grads=constrain_leaves(zeros.grads, shardings), mutable=mutable)
            # A while loop in the program: its bound is an argument, so one executable serves every number of microbatches.
            return self._reduce(jax.lax.fori_loop(0, number, add, zeros), mutable, shardings, mesh)

        run = _per_replica(replica_sums, mesh, axes, grad_shardings=shardings, param_shardings=self.param_shardings)
        # The noise's moments are an argument of their own: a function inside `jax.shard_map` cannot use arrays from outside.
        return run(params, batch_KR, keys_KR, jnp.asarray(number, jnp.int32), mutable, noise and noise.moments)

    def _reduce(self, sums: Sums, start: Any, shardings: Any, mesh: Mesh) -> Sums:
        """Return the sums over all replicas; `start` is `mutable` before the step."""
        axes, names = BatchAxes.of(mesh, self.batch_axes), self._summed_axes(mesh)
        if not names:
            return sums._replace(grads=jax.tree.map(accumulator, sums.grads))
        with jax.named_scope("reduce"):
            # The one collective over the data axis: after the loop, once per optimizer step.
            grads, rest = cast_for_exchange(sums.grads, self.reduction_dtype, mesh), sums._replace(grads=None, mutable=None)
            if self.param_shardings is not None:
                grads, reduced = _reduce_shards(grads, rest, shardings, mesh, axes)
            elif is_scattered(shardings, axes):
                grads, reduced = reduce_gradients(grads, shardings, mesh, axes), reduce_sums(rest, names)
            else:
                reduced = reduce_sums(rest._replace(grads=grads), names)
                grads = reduced.grads
            # Not back into a narrow type of the accumulators: the sum over the replicas has more digits.
            grads = jax.tree.map(lambda g, own: g.astype(accumulator_type(own.dtype)), grads, sums.grads)
            mutable = jax.tree.map(lambda x, before: _merge_replicas(x, before, names), sums.mutable, start)
            return reduced._replace(grads=constrain_leaves(grads, shardings), mutable=mutable)

    def _summed_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the mesh axes over which the sums of the loss function still have to be added up."""
        axes = BatchAxes.of(mesh, self.batch_axes)
        names = axes.replica if self.param_shardings is None else axes.rows
        return names if math.prod(mesh.shape[name] for name in names) > 1 else ()

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients. `mutable` is read, not carried; see `SummableLoss`."""

        def microbatch_sums(params: Any, batch_R: Any, keys_R: jax.Array, mutable: Any) -> Sums:
            loss, weight, aux, _ = call_loss(self.loss_fn, params, batch_R, keys_R, mutable, goes_on=False)
            return Sums(None, *jax.tree.map(accumulator, (loss, weight, aux)), None)

        def replica_sums(params: Any, batch_KR: Any, keys_KR: Any, number: Any, mutable: Any, _: None) -> Sums:
            def add(i: jax.Array, total: Sums) -> Sums:
                return jax.tree.map(jnp.add, total, microbatch_sums(params, *take((batch_KR, keys_KR), i), mutable))

            zeros = _zeros(microbatch_sums, params, *take((batch_KR, keys_KR), 0), mutable)
            sums, names = jax.lax.fori_loop(0, number, add, zeros), self._summed_axes(mesh)
            return reduce_sums(sums, names) if names else sums

        axes = BatchAxes.of(mesh, self.batch_axes)
        run = _per_replica(replica_sums, mesh, axes, param_shardings=self.param_shardings)
        return run(params, batch_KR, keys_KR, num_microbatches, mutable, None)


def summable(loss: LossFn | SummableLoss, batch_axes: BatchAxes | None = None) -> SummableLoss:
    """Return a loss of one of these kinds as a `SummableLoss`, with these batch axes if they are given."""
    if not isinstance(loss, SummableLoss):
        return AccumulatedLoss(loss, batch_axes)
    return loss if batch_axes is None else replace(loss, batch_axes=batch_axes)  # type: ignore[type-var]


def random_key(seed: int) -> jax.Array:
    """Return a random key whose numbers do not depend on how arrays are split or sharded.

    That is a threefry key, whatever `jax_default_prng_impl` says: with the hardware generators `rbg` and `unsafe_rbg`, a row's
    numbers depend on the other rows that are drawn together with it.
    """
    return jax.random.key(seed, impl="threefry2x32")


def per_row_keys(seed: jax.Array, step: jax.Array, rows_KR: jax.Array) -> jax.Array:
    """Return one random key per row, from a key `seed`, the optimizer step and the rows' indices (K, R) in the global batch.

    A row's key does not depend on how the batch is split, so dropout is the same on any number of devices.
    """
    base = jax.random.fold_in(seed, step)
    return jax.vmap(jax.vmap(lambda row: jax.random.fold_in(base, row)))(rows_KR)


def accumulate(
    loss_fn: LossFn | AccumulatedLoss,
    params: Any,
    batch_KR: Any,
    num_microbatches: jax.Array | int,
    keys_KR: jax.Array | None = None,
    *,
    mesh: Mesh,
    param_shardings: Any = None,
    mutable: Any = None,
    batch_axes: BatchAxes | None = None,
) -> Sums:
    """Sum loss and gradients over microbatches, with one gradient reduction over the data axis at the end.

    For a jitted training step of your own. `num_microbatches` is a traced loop bound: one executable serves any number up to K.
    With `chunk_size=max(plan.max_microbatches.values())`, `step_batches` yields batches whose `chunks[0]` is such a buffer.

    Args:
        loss_fn: the loss function (see `train_step`), which sees the rows of one replica. An `AccumulatedLoss` of it also
            chooses the types in which gradients are summed and exchanged.
        params: the parameters, not sharded over the data axis.
        batch_KR: arrays (K, R, ...), rows sharded over the data and fsdp axes.
        num_microbatches: how many of the K to use. If a traced number is not from 0 to K, loss, weight and mean are NaN.
        keys_KR: a random key per row, as `per_row_keys` makes them. None: the loss function gets None.
        mesh: the mesh.
        param_shardings: shardings of `params`, which the accumulators take. None leaves them to the compiler. If they name the
            axes of the replicas, each replica gets its own part of the summed gradients; see `rampup.run.zero`.
        mutable: state for `loss_fn` to carry, such as batch statistics. Replicas do not see each other's during a step. At the
            end, floating-point leaves become their mean over the replicas, and integers and booleans their maximum. Random keys
            must be the same on all replicas.
        batch_axes: the mesh axes of the rows; None = data and fsdp.

    Returns:
        The sums over the global batch. Their method `mean_grads` returns the gradient for the optimizer.

    Raises:
        ConfigError: `num_microbatches` is not a number from 0 to K.
    """
    loss: Any = summable(loss_fn, batch_axes)
    K = jax.tree.leaves(batch_KR)[0].shape[0]
    check_count(num_microbatches, K)
    options: Any = {"mesh": mesh, "param_shardings": param_shardings, "mutable": mutable}
    return nan_beyond(num_microbatches, K, loss.sum_microbatches(params, batch_KR, num_microbatches, keys_KR, **options))


def check_count(number: Any, K: int) -> None:
    """Refuse a number of microbatches that a buffer of K does not have. `nan_beyond` is for a traced one."""
    if isinstance(number, jax.core.Tracer):
        return
    if not np.issubdtype(np.asarray(number).dtype, np.integer) or not 0 <= number <= K:
        raise ConfigError(
            f"num_microbatches={number} must be a whole number from 0 to {K}, the microbatches of the buffer",
            key="num_microbatches",
            nearest=(K,),
        )


def nan_beyond(number: Any, K: int, sums: Sums) -> Sums:
    """Return sums, with NaN as loss and weight if a traced number is not from 0 to K.

    Without it, the last microbatch of the buffer would be added several times: JAX clamps an index beyond an array.
    """
    if not isinstance(number, jax.core.Tracer):
        return sums
    is_valid = (number >= 0) & (number <= K)
    return sums._replace(loss=jnp.where(is_valid, sums.loss, jnp.nan), weight=jnp.where(is_valid, sums.weight, jnp.nan))


def reduce_sums(sums: Sums, names: tuple[str, ...]) -> Sums:
    """Add up sums over mesh axes, in a function that is manual over them. The noise adds no collective."""
    if sums.noise is None:
        return jax.lax.psum(sums, names)  # type: ignore[no-any-return]
    # Loss, weight and number of blocks travel as one array, so there are no more reductions than without the noise.
    scalars = jnp.stack([sums.loss, sums.weight, sums.noise.blocks])
    scalars, rest = jax.lax.psum((scalars, sums._replace(loss=None, weight=None, noise=sums.noise.squares)), names)
    return rest._replace(  # type: ignore[no-any-return]
        loss=scalars[0].astype(sums.loss.dtype),
        weight=scalars[1].astype(sums.weight.dtype),
        noise=NoiseSums(rest.noise, scalars[2].astype(sums.noise.blocks.dtype)),
    )


def safe_reciprocal(weight: jax.Array) -> jax.Array:
    """Return 1 / weight, or 0 if the weight is 0, so that a batch without weight has a zero loss and a zero gradient.

    A weight that is NaN or negative is not hidden: it makes the loss NaN, or of the other sign.

    Example:
        >>> safe_reciprocal(jnp.float32(4)).item(), safe_reciprocal(jnp.float32(0)).item()
        (0.25, 0.0)
    """
    # The inner `where` keeps the division by zero out of the branch that is not selected.
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1), 0)


def accumulator(x: Any, dtype: Any = None) -> jax.Array:
    """Cast a value to the type in which it is summed; see `accumulator_type`."""
    x = jnp.asarray(x)
    return x.astype(accumulator_type(x.dtype, dtype))


def accumulator_type(dtype: Any, wanted: Any = None) -> Any:
    """Return the type in which values of a type are summed: at least float32, or `wanted` for real floating-point values.

    Integers are summed in float32 too, which counts exactly to 2**24.
    """
    is_real = jnp.issubdtype(dtype, jnp.floating)
    return wanted if wanted is not None and is_real else jnp.promote_types(dtype, jnp.float32)


def cast_for_exchange(grads: Any, dtype: Any, mesh: Mesh) -> Any:
    """Return gradients in the type in which the replicas of a mesh exchange them; None = their own."""
    if dtype is not None:
        # Complex numbers would lose their imaginary part.
        grads = jax.tree.map(lambda g: g.astype(dtype) if jnp.issubdtype(g.dtype, jnp.floating) else g, grads)
    # Rounded, but in float32 on CPUs: XLA adds 16-bit numbers in float32 there, and aborts if an axis of the mesh is automatic.
    return jax.tree.map(accumulator, grads) if mesh.devices.flat[0].platform == "cpu" else grads


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree with every leaf in the type of the corresponding leaf of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def multi_steps(tx: optax.GradientTransformation, plan: RampPlan, **options: Any) -> optax.MultiSteps:
    """Return `optax.MultiSteps(tx, k, **options)` with k = the plan's number of microbatches at every optimizer step.

    For a training step of your own that calls the optimizer once per microbatch. It differs from the engine `fused`:

    - the optimizer's arithmetic runs at every microbatch;
    - microbatches count equally, however many tokens they have;
    - a checkpoint in the middle of an accumulation cannot be resumed with another k, so write checkpoints between optimizer
      steps.

    Raises:
        RampDefinitionError: the ramp takes 2**31 optimizer steps or more, which MultiSteps cannot count.
        ConfigError: `should_skip_update_fn`, which does not count the microbatches that it skips.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:4 8:8"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=10)
        >>> tx = multi_steps(optax.sgd(0.1), plan)
        >>> [int(tx._every_k_schedule(jnp.int32(step))) for step in range(4)]
        [1, 1, 2, 2]
    """
    if options.get("should_skip_update_fn") is not None:
        raise ConfigError(
            "should_skip_update_fn makes optax.MultiSteps skip a microbatch without counting it, so all later optimizer steps "
            "would straddle two batches of the plan; use train_step(..., skip_nonfinite=True), or zero the gradient yourself",
            key="should_skip_update_fn",
        )
    if plan.ramp.ramp_steps >= 2**31:
        raise RampDefinitionError(f"the ramp takes {plan.ramp.ramp_steps:,} steps; optax.MultiSteps counts in int32")
    # MultiSteps asks for k in every microbatch, inside the compiled step: a look-up in two small constants.
    start_steps = np.array([phase.start_step for phase in plan.ramp.phases], np.int32)
    num_microbatches = np.array([split.num_microbatches for split in plan.splits], np.int32)

    def every_k(gradient_step: jax.Array) -> jax.Array:
        phase = jnp.searchsorted(jnp.asarray(start_steps), gradient_step, side="right") - 1
        return jnp.asarray(num_microbatches)[phase]

    return optax.MultiSteps(tx, every_k, **options)


def _microbatch_sums(
    loss_fn: LossFn,
    param_shardings: Any,
    *,
    differentiate_mean: bool = False,
    noise: NoiseMeter | None = None,
    dtype: Any = None,
) -> Callable[..., Sums]:
    """Return the function that sums over the rows of one microbatch.

    Args:
        loss_fn: the loss function.
        param_shardings: shardings of the gradient.
        differentiate_mean: return the gradient of loss / weight instead of that of the loss.
        noise: also return the squares of the gradient.
        dtype: type of the returned gradient; None = at least float32.
    """

    def microbatch_sums(params: Any, batch_R: Any, keys_R: jax.Array, mutable: Any, moments: Any = None) -> Sums:
        if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
            problem = f"params[{OVERWRITE_WITH_GRADIENT!r}], of Flax's float8 layers, takes its gradients as new values"
            fix = "use rampup.microbatches and rampup.multi_steps with a step of your own, or train in bfloat16"
            raise ConfigError(f"{problem}, and a step sums them over microbatches; {fix}", key="params")

        def loss_of(params: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            loss, weight, *rest = call_loss(loss_fn, params, batch_R, keys_R, mutable)
            # The weight counts tokens; it is a constant of the gradient even if it was computed from the parameters.
            scale = safe_reciprocal(accumulator(jax.lax.stop_gradient(weight))) if differentiate_mean else 1
            return loss * scale, (loss, weight, *rest)

        with jax.named_scope("microbatch"):
            (_, (loss, weight, aux, carried)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            grads, loss, weight, aux = jax.tree.map(accumulator, (grads, loss, weight, aux))
            grads = constrain_leaves(grads, param_shardings)
            block = noise and replace(noise, moments=moments).block(grads, weight, varying=loss)
            return Sums(jax.tree.map(lambda g: accumulator(g, dtype), grads), loss, weight, aux, carried, block)

    return microbatch_sums


def call_loss(
    loss_fn: LossFn, params: Any, batch_R: Any, keys_R: Any, mutable: Any, *, goes_on: bool = True
) -> tuple[Any, Any, Any, Any]:
    """Call a loss function; return (loss_sum, weight_sum, aux, mutable or None), or refuse one that breaks its contract.

    Only a new `mutable` with which training goes on must have the structure and the types of the old one.
    """
    args, carries = (params, batch_R, keys_R), mutable is not None
    args += (mutable,) if carries else ()
    try:
        inspect.signature(loss_fn).bind(*args)
    except ValueError:
        pass  # A callable without a signature, such as a built-in one.
    except TypeError as error:
        raise _contract_error(f"cannot be called with {len(args)} arguments: {error}", carries) from error
    loss, weight, aux, *carried = unpack_results(loss_fn(*args), carries)
    for name, value, kinds in (("loss_sum", loss, (jnp.floating,)), ("weight_sum", weight, (jnp.floating, jnp.integer))):
        shape, dtype = np.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            kind = "floating-point" if len(kinds) == 1 else "real"
            raise _contract_error(f"returned {dtype.name}{list(shape)} as {name}, which must be a {kind} scalar", carries)
    if carries and goes_on and (difference := _difference(mutable, carried[0])):
        raise _contract_error(f"changed the structure or a type of `mutable`: {difference}", carries)
    return loss, weight, aux, carried[0] if carries else None


def unpack_results(results: Any, carries: bool = False) -> tuple[Any, ...]:
    """Return the three results of a loss function, or four if it carries `mutable`, or refuse what is not that."""
    if not isinstance(results, (tuple, list)):
        is_array = np.isscalar(results) or hasattr(results, "shape")
        kind = ("one array" if np.shape(results) else "a scalar") if is_array else f"a {type(results).__name__}"
        raise _contract_error(f"returned {kind} and not a tuple", carries)
    if len(results) != 3 + carries:
        raise _contract_error(f"returned {len(results)} results and not {3 + carries}", carries)
    return tuple(results)


def _contract_error(problem: str, carries: bool) -> ConfigError:
    more, why = (", mutable", ", because the state has `mutable`") if carries else ("", "")
    return ConfigError(
        f"the loss function {problem}. It takes (params, batch, keys{more}) and returns (loss_sum, weight_sum, aux{more}){why}"
        ": sums over the rows of `batch`. loss_sum is a floating-point scalar, weight_sum a scalar that counts what the loss "
        "is averaged over, such as tokens, and aux a pytree of further sums, such as {}",
        key="loss_fn",
    )


def _difference(before: Any, after: Any) -> str | None:
    """Return how the structure, the shapes or the types of two trees differ, or None."""
    old, new = (
        {jax.tree_util.keystr(path): (np.shape(x), jnp.result_type(x).name) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (before, after)
    )
    for name in old | new:
        if old.get(name) != new.get(name):
            return f"{name or 'the array'} was {old.get(name, 'absent')} and is {new.get(name, 'absent')}"
    was, now = jax.tree.structure(before), jax.tree.structure(after)
    return None if was == now else f"it was {was} and is {now}"


def _per_replica(
    replica_sums: Callable[..., Sums], mesh: Mesh, axes: BatchAxes, *, grad_shardings: Any = None, param_shardings: Any = None
) -> Callable[..., Sums]:
    """Return a function of (params, batch_KR, keys_KR, number, mutable, moments) that runs on every replica's own rows.

    With `param_shardings` it runs on every device's own rows, and on its own part of the parameters. All results except for
    gradients with `grad_shardings` that split them must be equal on all replicas.
    """
    replica_sums, takes_shards = own_constraints()(replica_sums), param_shardings is not None
    if axes.num_replicas(mesh) == 1 and not takes_shards:
        return replica_sums
    # The data axis is manual, so that each replica adds up its own rows and the function decides when to reduce. If the
    # compiler partitioned the data axis, it would reduce the gradient inside the loop, once per microbatch. The other axes stay
    # automatic: parameters sharded over fsdp and tensor have to be gathered where they are used, which the compiler does well.
    #
    # With check_vma=True, JAX would track which values vary over the data axis. The gradient with respect to the parameters,
    # which do not vary, would then be reduced where it is computed: inside the loop again.
    manual = axes.manual(mesh) | (set(axes.rows) if takes_shards else set())
    whole, rows = PartitionSpec(), PartitionSpec(None, axes.rows if takes_shards else axes.replica)
    param_specs = manual_specs(param_shardings, mesh, manual) if takes_shards else whole
    is_split = takes_shards or is_scattered(grad_shardings, axes)
    grad_specs = manual_specs(grad_shardings, mesh, manual) if is_split else whole
    return jax.shard_map(
        replica_sums,
        mesh=auto_view(mesh),
        axis_names=manual,
        in_specs=(param_specs, rows, rows, whole, whole, whole),
        out_specs=Sums(grad_specs, whole, whole, whole, whole, whole),
        check_vma=False,
    )


def _reduce_shards(grads: Any, sums: Sums, shardings: Any, mesh: Mesh, axes: BatchAxes) -> tuple[Any, Sums]:
    """Add up gradients and the other sums over all devices that have rows.

    A gradient that is sharded along one of the axes is already the sum over it: the loss function's own reduce-scatters, which
    are the derivatives of its gathers, leave that.
    """
    leaves, structure = jax.tree.flatten(grads)
    rows = tuple(name for name in axes.rows if mesh.shape[name] > 1)
    # Axes left to sum over -> the indices of the leaves. One psum for each.
    groups: dict[tuple[str, ...], list[int]] = {rows: []}
    for index, sharding in enumerate(jax.tree.leaves(shardings)):
        used = {name for entry in sharding.spec for name in axis_names(entry)}
        groups.setdefault(tuple(name for name in rows if name not in used), []).append(index)
    for names, members in groups.items():
        totals = [leaves[index] for index in members]
        if names == rows:
            # The other sums travel with the gradients that are summed over all axes.
            totals, sums = jax.lax.psum((totals, sums), rows)
        elif names:
            totals = jax.lax.psum(totals, names)
        for index, total in zip(members, totals, strict=True):
            leaves[index] = total
    return jax.tree.unflatten(structure, leaves), sums


def _zeros(sums_of: Callable[..., Sums], *args: Any) -> Sums:
    """Return zeros of the shapes and types of `sums_of(*args)`, and None as `mutable`, which is not a sum."""
    shapes = jax.eval_shape(sums_of, *args)._replace(mutable=None)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)  # type: ignore[no-any-return]


def take(tree: Any, i: Any) -> Any:
    """Return entry i of every array along its first axis, such as microbatch i of arrays (K, R, ...)."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def constrain_leaves(tree: Any, shardings: Any) -> Any:
    """Constrain accumulators to the shardings of the parameters, so that fsdp saves their memory too."""
    if shardings is None:
        return tree
    return jax.tree.map(lambda x, sharding: x if sharding.is_fully_replicated else constrain(x, sharding), tree, shardings)


def _merge_replicas(x: Any, start: Any, names: tuple[str, ...]) -> Any:
    """Return what the replicas made of a carried value `start` as one value, equal on all of them."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # The mean of the changes: those of a constant are exactly 0, while the mean of three equal numbers can be another
        # number. An infinite start, such as that of a running maximum, would make the change NaN.
        # In float32: on CPUs, XLA aborts if the replicas exchange bfloat16 and another axis of the mesh is automatic.
        start = accumulator(jnp.where(jnp.isfinite(start), start, 0))
        return (start + jax.lax.pmean(x - start, names)).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    # A counter or a flag. If the replicas kept different values, each would go on with its own, and a resumed run with another.
    return jax.lax.pmax(x.astype(jnp.int32) if x.dtype == bool else x, names).astype(x.dtype)


_moved = {"row_keys": "rampup.run.accumulate.per_row_keys", "rounded": "rampup.run.accumulate.cast_for_exchange"}
__getattr__ = moved_names(__name__, _moved)
