"""Gradient accumulation: the sum over the microbatches of a step, and `optax.MultiSteps` with a k that follows the ramp.

A replica is a group of devices that together have the parameters once: those with the same place on the data axis. Each adds up
the gradients of its own rows in a loop whose bound is an argument, and the replicas exchange the sums once, after it. To the
compiler, the data axis is therefore manual, or mapped where XLA cannot do that (`BatchAxes.are_mapped`).

Shape suffixes: K microbatches in the buffer, R rows of one microbatch: all of them outside of `jax.shard_map`, and those of one
replica or device inside.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    STAGE,
    BatchAxes,
    auto_view,
    axes_of,
    constrain,
    has_convolutions,
    own_constraints,
    with_whole_operands,
)
from rampup.engine.totals import (
    Sums,
    Totals,
    accumulator,
    accumulator_type,
    cast_for_exchange,
    differing_leaves,
    fill,
    floating,
    has_integers,
    is_floating,
    safe_reciprocal,
)
from rampup.engine.zero import is_scattered, manual_specs, reduce_gradients
from rampup.errors import ConfigError, PipelineShapeError, RampDefinitionError, a_type
from rampup.plan.plan import RampPlan

# What Flax calls the part of the parameters of its float8 layers whose gradients are new values.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
# loss_fn(params, batch, keys[, mutable]) -> (loss_sum, weight_sum, aux[, mutable]); see `rampup.engine.step.train_step`.
LossFn = Callable[..., tuple[Any, ...]]
# (microbatches of a pass, passes), traced; a pass fills and drains the pipeline once. A step runs their product. Without
# stages, only the product matters.
Counts = tuple[jax.Array, jax.Array]


@runtime_checkable
class SummableLoss(Protocol):
    """A loss with a method that adds it up over the microbatches of a step, which is all that a training step calls.

    `AccumulatedLoss` makes one of a loss function; `rampup.engine.pipeline.PipelinedLoss` spreads its layers over stages. To
    replace its batch axes, `train_step` needs a dataclass with a field `batch_axes`.
    """

    def check(self, mesh: Mesh, engine: str) -> None:
        """Raise an error if this loss cannot run on a mesh, or with the engine `fused` or `multi_steps`."""

    def sums_and_grads(
        self, params: Any, batch_KR: Any, keys_KR: Any, counts: Counts, totals: Totals, *, mesh: Mesh, param_shardings: Any
    ) -> tuple[Sums, Any]:
        """Return the sums over the microbatches, with None as `grads`, and the gradient of the mean loss at least in float32.

        Integers among the parameters have no gradient, but None in its place. If `totals.mutable` or `totals.noise` is given,
        the sums have a new `mutable`, or the squares of the gradients. A loss that differentiates `totals.scaled(loss)` undoes
        the scale with `totals.finalize`; one that does neither is right too. `param_shardings` are the shardings that the
        gradients get: those of the parameters, or with ZeRO-1 those of each replica's part.
        """

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients. `mutable` is read, not carried."""


@dataclass(frozen=True, slots=True)
class AccumulatedLoss:
    """The `SummableLoss` of a loss function: microbatches run one after the other on every replica.

    Attributes:
        loss_fn: see `rampup.engine.step.train_step`.
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
            problem = f"gradient_accumulator_dtype={jnp.dtype(self.accumulator_dtype).name} needs gradient_accumulation=fused"
            fix = "optax.MultiSteps keeps the sums of multi_steps"
            raise ConfigError(f"{problem}; {fix}", key="gradient_accumulator_dtype", nearest=("float32",))
        stages = dict(mesh.shape).get(STAGE, 1)
        if stages > 1:
            problem = f"the mesh has {stages} pipeline stages, so the loss must say what a stage does: give a PipelinedLoss"
            raise PipelineShapeError(problem, key="ici_pipeline_parallelism", nearest=(1,))

    def sums_and_grads(
        self, params: Any, batch_KR: Any, keys_KR: Any, counts: Counts, totals: Totals, *, mesh: Mesh, param_shardings: Any
    ) -> tuple[Sums, Any]:
        """Return the sums and the gradient of the mean loss; see `SummableLoss`."""
        takes_whole = self.param_shardings is None
        if totals.noise is not None and not takes_whole:
            problem, key = "needs a loss function that takes whole parameters", "measure_gradient_noise"
            why = "with parts that it gathers itself, the gradient of a microbatch is never in one place"
            raise ConfigError(f"{key}=true {problem}: {why}", key=key, nearest=(False,))
        # A plan whose buffer has room for one microbatch runs one in every step.
        has_one = keys_KR.shape[0] == 1
        if has_one and takes_whole and totals.noise is None and BatchAxes.of(mesh, self.batch_axes).num_replicas(mesh) == 1:
            # Nothing to add up: differentiate the mean. To divide the gradient of a sum, as below, reads and writes memory as
            # large as the parameters once more.
            trained, others = _split_trained(params)
            loss_of = jax.value_and_grad(_loss_of(self.loss_fn, differentiates_mean=True), has_aux=True)
            with own_constraints(), jax.named_scope("microbatch"):
                (_, sums), grads = loss_of(trained, others, *take((batch_KR, keys_KR), 0), totals.mutable, totals.scale)
                grads = constrain_leaves(jax.tree.map(accumulator, grads), floating(param_shardings, params))
                return totals.finalize(sums, grads)
        sum_up = self.summation(params, mesh, param_shardings, has_one=has_one)
        sums = sum_up(params, batch_KR, keys_KR, counts[0] * counts[1], totals)
        return totals.finalize(sums._replace(grads=None), sums.mean_grads())

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients; see `SummableLoss`."""
        sum_up = self.summation(params, mesh, has_grads=False)
        return sum_up(params, batch_KR, keys_KR, num_microbatches, Totals(mutable=mutable))

    def summation(
        self, params: Any, mesh: Mesh, param_shardings: Any = None, *, has_one: bool = False, has_grads: bool = True
    ) -> Callable[..., Sums]:
        """Return the function of (params, batch_KR, keys_KR, number, totals) that sums over the first `number` microbatches.

        `params` are the parameters or their shapes. With `has_one`, the buffer has one microbatch, which runs. Without
        `has_grads`, the function evaluates: it reads `totals.mutable` and does not carry it.
        """
        axes, takes_whole = BatchAxes.of(mesh, self.batch_axes), self.param_shardings is None
        if not takes_whole:
            if is_scattered(param_shardings, axes):
                problem = "shard_optimizer_over_data=true needs a loss function that takes whole parameters"
                raise ConfigError(problem, key="shard_optimizer_over_data")
            if is_scattered(self.param_shardings, axes):
                problem = f"`param_shardings` of the loss shard parameters over the replicas ({', '.join(axes.replica)})"
                raise ConfigError(f"{problem}, which need them whole; shard them over fsdp", key="param_shardings")
        # A loss function that takes shards was written for the shardings `self.param_shardings`, and its gradients have those.
        shardings = floating(param_shardings if takes_whole else self.param_shardings, params) if has_grads else None
        # jit caches the trace: the loss function is traced once for the shapes of the sums and for the body of the loop.
        loss_of = _loss_of(self.loss_fn, keeps_mutable=has_grads)
        loss_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True) if has_grads else loss_of, inline=True)

        def replica_sums(params: Any, batch_KR: Any, keys_KR: Any, number: Any, totals: Totals, *, mapped: Any = None) -> Sums:
            """Return the sums of all replicas, or of one if `mapped` names the axes over which `jax.vmap` maps."""
            trained, others = _split_trained(params) if has_grads else (params, None)

            def sums_of(results: Any) -> Sums:
                (_, sums), grads = results if has_grads else (results, None)
                grads = constrain_leaves(jax.tree.map(accumulator, grads), shardings)
                noise = totals.noise and totals.noise.block(grads, sums.weight, varying=sums.loss)
                grads = jax.tree.map(lambda g: accumulator(g, self.accumulator_dtype), grads)
                return sums._replace(grads=grads, noise=noise)

            def add(i: jax.Array, sums: Sums) -> Sums:
                mutable = sums.mutable if has_grads else totals.mutable
                with jax.named_scope("microbatch"):
                    new = sums_of(loss_of(trained, others, *take((batch_KR, keys_KR), i), mutable, totals.scale))
                added = jax.tree.map(jnp.add, sums._replace(mutable=None), new._replace(mutable=None))
                return added._replace(grads=constrain_leaves(added.grads, shardings), mutable=new.mutable)

            with own_constraints(mapped or ()):
                first = trained, others, *take((batch_KR, keys_KR), 0), totals.mutable, totals.scale
                if has_one:
                    with jax.named_scope("microbatch"):
                        sums = sums_of(loss_of(*first))
                else:
                    # The sums over no microbatch: zeros shaped as those over one, and `mutable` as it is, if it is carried.
                    shapes = jax.eval_shape(sums_of, jax.eval_shape(loss_of, *first))._replace(mutable=None)
                    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
                    # Without the constraints, the compiler may replicate the carried gradients over fsdp and tensor.
                    zeros = zeros._replace(grads=constrain_leaves(zeros.grads, shardings))
                    zeros = zeros._replace(mutable=totals.mutable if has_grads else None)
                    # A while loop in the program: its bound is an argument, so one executable serves every number.
                    sums = jax.lax.fori_loop(0, number, add, zeros)
            return self._reduce(sums, totals, shardings, mesh) if mapped is None else sums

        return self._per_replica(replica_sums, shardings, mesh)

    def _per_replica(self, replica_sums: Callable[..., Sums], shardings: Any, mesh: Mesh) -> Callable[..., Sums]:
        """Return a function that runs `replica_sums` on the rows of every replica, with the same arguments; see `summation`.

        With `param_shardings` it runs on every device's own rows, and on its own part of the parameters. All reduced sums,
        except for gradients with `shardings` that split them, must be equal on all replicas.
        """
        axes, takes_shards = BatchAxes.of(mesh, self.batch_axes), self.param_shardings is not None
        if axes.num_replicas(mesh) == 1 and not takes_shards:
            return replica_sums
        # The data axis is manual, so that each replica adds up its own rows and the function decides when to reduce. If the
        # compiler partitioned the data axis, it would reduce the gradient inside the loop, once per microbatch. The other axes
        # stay automatic: parameters sharded over fsdp and tensor have to be gathered where they are used, which the compiler
        # does well.
        #
        # With check_vma=True, JAX would track which values vary over the data axis. The gradient with respect to the
        # parameters, which do not vary, would then be reduced where it is computed: inside the loop again.
        manual = axes.manual(mesh) | (set(axes.rows) if takes_shards else set())
        whole, rows = PartitionSpec(), PartitionSpec(None, axes.rows if takes_shards else axes.replica)
        param_specs = manual_specs(self.param_shardings, mesh, manual) if takes_shards else whole
        is_split = takes_shards or is_scattered(shardings, axes)
        grad_specs = manual_specs(shardings, mesh, manual) if is_split else whole
        manually = functools.partial(
            jax.shard_map,
            mesh=auto_view(mesh),
            axis_names=manual,
            out_specs=Sums(grad_specs, whole, whole, whole, whole, whole),
            check_vma=False,
        )
        all_manual = manually(with_whole_operands(replica_sums, mesh, manual), in_specs=(param_specs, rows, rows, whole, whole))
        if takes_shards or not axes.are_mapped(mesh):
            return all_manual
        # Where the partitioner cannot do that well (see `are_mapped`), only the reduction is manual. The sums of the replicas
        # are arrays (*replicas, ...), sharded over the replicas: the memory and the collectives are the same.
        n, sizes = len(axes.replica), [mesh.shape[name] for name in axes.replica]
        mapped_sums: Callable[..., Sums] = functools.partial(replica_sums, mapped=axes.replica)
        for name in reversed(axes.replica):
            in_axes = (None, 1, 1, None, None)
            mapped_sums = jax.vmap(mapped_sums, in_axes, axis_size=mesh.shape[name], axis_name=name, spmd_axis_name=name)

        def by_replica(x_KR: jax.Array) -> jax.Array:
            """Return rows (K, R, ...) as (K, *replicas, rows of a replica, ...)."""
            x = x_KR.reshape(x_KR.shape[0], *sizes, -1, *x_KR.shape[2:])
            others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - n)
            return constrain(x, NamedSharding(auto_view(mesh), PartitionSpec(None, *axes.replica, *others)))

        def reduce_own(sums: Sums, totals: Totals) -> Sums:
            return self._reduce(jax.tree.map(lambda x: x.reshape(x.shape[n:]), sums), totals, shardings, mesh)

        def run(params: Any, batch_KR: Any, keys_KR: Any, number: Any, totals: Totals) -> Sums:
            mapped = (params, *jax.tree.map(by_replica, (batch_KR, keys_KR)), number, totals)
            closed = None
            # Not every operation can be mapped: `jax.lax.ragged_dot` cannot, for one.
            with contextlib.suppress(NotImplementedError):
                closed, shapes = jax.make_jaxpr(mapped_sums, return_shape=True)(*mapped)
            # Mapped, the gradient of a convolution's kernel is a convolution with a group per replica, which XLA computes
            # wrongly when it partitions it.
            if closed is None or has_convolutions(closed):
                return all_manual(params, batch_KR, keys_KR, number, totals)
            leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(mapped))
            sums = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
            return manually(reduce_own, in_specs=(PartitionSpec(*axes.replica), whole))(sums, totals)

        return run

    def _reduce(self, sums: Sums, totals: Totals, shardings: Any, mesh: Mesh) -> Sums:
        """Return the sums over all replicas. Call it inside a function that is manual over their axes."""
        axes = BatchAxes.of(mesh, self.batch_axes)
        # The mesh axes over which the sums of the loss function still have to be added up.
        names = axes.replica if self.param_shardings is None else axes.rows
        names = tuple(name for name in names if mesh.shape[name] > 1)
        if not names:
            return sums._replace(grads=jax.tree.map(accumulator, sums.grads))
        with jax.named_scope("reduce"):
            # The one collective over the data axis: after the loop, once per optimizer step.
            grads = cast_for_exchange(sums.grads, self.reduction_dtype, mesh)
            if is_scattered(shardings, axes):
                grads = reduce_gradients(grads, shardings, mesh, axes)
                reduced = totals.aggregate(sums._replace(grads=None), names)
            else:
                leaves, structure = jax.tree.flatten(grads)
                # Axes left to sum over -> the indices of the leaves. One psum for each. A gradient that is sharded along one of
                # the axes is already the sum over it: a loss that takes shards leaves that with its own reduce-scatters, which
                # are the derivatives of its gathers.
                groups: dict[tuple[str, ...], list[int]] = {names: []}
                all_used = [axes_of(sharding) for sharding in jax.tree.leaves(shardings)] or [set[str]()] * len(leaves)
                for index, (_, used) in enumerate(zip(leaves, all_used, strict=True)):
                    if left := tuple(name for name in names if name not in used):
                        groups.setdefault(left, []).append(index)
                # The other sums travel with the gradients that are summed over all axes.
                reduced = totals.aggregate(sums._replace(grads=[leaves[index] for index in groups[names]]), names)
                for left, members in groups.items():
                    parts = reduced.grads if left == names else jax.lax.psum([leaves[index] for index in members], left)
                    for index, part in zip(members, parts, strict=True):
                        leaves[index] = part
                grads = jax.tree.unflatten(structure, leaves)
            # Not back into a narrow type of the accumulators: the sum over the replicas has more digits.
            grads = jax.tree.map(lambda g, own: g.astype(accumulator_type(own.dtype)), grads, sums.grads)
            return reduced._replace(grads=constrain_leaves(grads, shardings))


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
            axes of the replicas, each replica gets its own part of the summed gradients; see `rampup.engine.zero`.
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
    number, K = num_microbatches, jax.tree.leaves(batch_KR)[0].shape[0]
    is_traced = isinstance(number, jax.core.Tracer)
    if not is_traced and (not np.issubdtype(np.asarray(number).dtype, np.integer) or not 0 <= number <= K):
        problem = f"num_microbatches={number} must be a whole number from 0 to {K}, the microbatches of the buffer"
        raise ConfigError(problem, key="num_microbatches", nearest=(K,))
    has_one = K == 1 and not is_traced and int(number) == 1
    sum_up = loss.summation(params, mesh, param_shardings, has_one=has_one)
    sums: Sums = sum_up(params, batch_KR, keys_KR, jnp.asarray(number, jnp.int32), Totals(mutable=mutable))
    if not is_traced:
        return sums
    # JAX clamps an index beyond an array, so the last microbatch would be added several times.
    is_valid = (number >= 0) & (number <= K)
    return sums._replace(loss=jnp.where(is_valid, sums.loss, jnp.nan), weight=jnp.where(is_valid, sums.weight, jnp.nan))


def multi_steps(
    tx: optax.GradientTransformation, plan: RampPlan, *, use_grad_mean: bool = True, should_skip_update_fn: None = None
) -> optax.MultiSteps:
    """Return `optax.MultiSteps(tx, k)` with k = the plan's number of microbatches at every optimizer step.

    For a training step of your own that calls the optimizer once per microbatch. It differs from the engine `fused`:

    - the optimizer's arithmetic runs at every microbatch;
    - microbatches count equally, however many tokens they have;
    - a checkpoint in the middle of an accumulation cannot be resumed with another k, so write checkpoints between optimizer
      steps.

    Args:
        tx: the optimizer.
        plan: the plan.
        use_grad_mean: see `optax.MultiSteps`.
        should_skip_update_fn: refused, because it does not count the microbatches that it skips.

    Raises:
        RampDefinitionError: the ramp takes 2**31 optimizer steps or more, which MultiSteps cannot count.
        ConfigError: `should_skip_update_fn` is given.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:4 8:8"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=10)
        >>> tx = multi_steps(optax.sgd(0.1), plan)
        >>> [int(tx._every_k_schedule(jnp.int32(step))) for step in range(4)]
        [1, 1, 2, 2]
    """
    if should_skip_update_fn is not None:
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

    return optax.MultiSteps(tx, every_k, use_grad_mean=use_grad_mean)


def _split_trained(params: Any) -> tuple[Any, Any]:
    """Return the parameters that are trained, with None in the place of integers, and those integers, if there are any."""
    if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
        problem = f"params[{OVERWRITE_WITH_GRADIENT!r}], of Flax's float8 layers, takes its gradients as new values"
        fix = "use rampup.microbatches and rampup.multi_steps with a step of your own, or train in bfloat16"
        raise ConfigError(f"{problem}, and a step sums them over microbatches; {fix}", key="params")
    if not has_integers(params):
        return params, None
    return floating(params, params), jax.tree.map(lambda p: None if is_floating(p) else p, params)


def _loss_of(
    loss_fn: LossFn, *, differentiates_mean: bool = False, keeps_mutable: bool = True
) -> Callable[..., tuple[Any, Sums]]:
    """Return the function that calls the loss function on one microbatch: the value to differentiate, and the sums.

    With `differentiates_mean`, the value is loss / weight instead of the loss. For `keeps_mutable` see `check_results`.
    """

    def loss_of(trained: Any, others: Any, batch_R: Any, keys_R: Any, mutable: Any, scale: Any) -> tuple[Any, Sums]:
        params = trained if others is None else fill(trained, others)
        args = (params, batch_R, keys_R) if mutable is None else (params, batch_R, keys_R, mutable)
        check_signature(loss_fn, len(args))
        loss, weight, aux, carried = check_results(loss_fn(*args), loss_fn, args, keeps_mutable=keeps_mutable)
        value = Totals(scale=scale).scaled(loss)
        if differentiates_mean:
            # The weight counts tokens; it is a constant of the gradient even if it was computed from the parameters.
            value *= safe_reciprocal(accumulator(jax.lax.stop_gradient(weight)))
        loss, weight, aux = jax.tree.map(accumulator, (loss, weight, aux))
        return value, Sums(None, loss, weight, aux, carried if keeps_mutable else None)

    return loss_of


def check_results(
    results: Any, loss_fn: LossFn, args: tuple[Any, ...], *, keeps_mutable: bool = True
) -> tuple[Any, Any, Any, Any]:
    """Return (loss_sum, weight_sum, aux, mutable or None) of a loss function, or refuse one that breaks its contract.

    With `keeps_mutable=False` (evaluation), the new `mutable` is discarded and may have any structure.
    """
    carries = len(args) > 3
    loss, weight, aux, *carried = unpack_results(results, carries)
    check_aux(aux, lambda rows: unpack_results(loss_fn(args[0], *rows, *args[3:]), carries)[2], args[1:3])
    for name, value, kinds in (("loss_sum", loss, (jnp.floating,)), ("weight_sum", weight, (jnp.floating, jnp.integer))):
        shape, dtype = np.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            kind = "floating-point" if len(kinds) == 1 else "real"
            raise _contract_error(f"returned {dtype.name}{list(shape)} as {name}, which must be a {kind} scalar", carries)
    if carries and keeps_mutable:
        leaves = differing_leaves(args[3], carried[0], lambda x: (np.shape(x), jnp.result_type(x).name))
        changes = [f"{name or 'the array'} was {old or 'absent'} and is {new or 'absent'}" for name, old, new in leaves]
        was, now = jax.tree.structure(args[3]), jax.tree.structure(carried[0])
        if changes or was != now:
            change = changes[0] if changes else f"it was {was} and is {now}"
            raise _contract_error(f"changed the structure or a type of `mutable`: {change}", carries)
    return loss, weight, aux, carried[0] if carries else None


def check_signature(loss_fn: Callable[..., Any], number: int = 3) -> None:
    """Refuse a loss function that does not take this number of arguments: 3, or 4 with `mutable`."""
    if problem := signature_problem(loss_fn, number):
        raise _contract_error(f"cannot be called with {number} arguments: {problem}", number > 3)


def signature_problem(function: Callable[..., Any], number: int) -> str | None:
    """Return why a function cannot be called with a number of arguments, or None."""
    try:
        inspect.signature(function).bind(*[None] * number)
    except ValueError:
        pass  # A callable without a signature, such as a built-in one.
    except TypeError as error:
        return str(error)
    return None


def check_aux(aux: Any, aux_of: Callable[[Any], Any], rows: Any) -> None:
    """Refuse `aux`, the result for some `rows`, if it has a value for each: a step would add up rows of different microbatches.

    A dimension as long as the microbatch proves nothing: there may be as many classes. But if it is that of the rows, `aux_of`
    makes it twice as long for twice as many rows.
    """
    sizes = [size for leaf in jax.tree.leaves(aux) for size in np.shape(leaf) if size]
    if not sizes:
        return
    R = jax.tree.leaves(rows)[0].shape[0]
    if all(size % R for size in sizes):
        return
    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * R, *x.shape[1:]), x.dtype), rows)
    try:
        other = dict(jax.tree.leaves_with_path(jax.eval_shape(aux_of, twice)))
    except Exception:  # noqa: BLE001 - a loss function for one number of rows; the step runs it with no other
        return
    for path, leaf in jax.tree.leaves_with_path(aux):
        if path in other and other[path].shape != np.shape(leaf):
            name, found, more = f"aux{jax.tree_util.keystr(path)}", list(np.shape(leaf)), list(other[path].shape)
            raise ConfigError(
                f"{name} of the loss function has values for single rows: its shape is {found} for {R} rows and {more} for "
                f"{2 * R}. A step adds aux up over the microbatches, so return sums over the rows, such as jnp.sum(x, axis=0)",
                key="loss_fn",
            )


def unpack_results(results: Any, carries: bool = False) -> tuple[Any, ...]:
    """Return the three results of a loss function, or four if it carries `mutable`, or refuse what is not that."""
    if not isinstance(results, (tuple, list)):
        is_array = np.isscalar(results) or hasattr(results, "shape")
        kind = ("one array" if np.shape(results) else "a scalar") if is_array else f"{a_type(results)}"
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


def take(tree: Any, i: Any) -> Any:
    """Return entry i of every array along its first axis, such as microbatch i of arrays (K, R, ...)."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def constrain_leaves(tree: Any, shardings: Any) -> Any:
    """Constrain accumulators to the shardings of the parameters, so that fsdp saves their memory too."""
    if shardings is None:
        return tree
    return jax.tree.map(lambda x, sharding: x if sharding.is_fully_replicated else constrain(x, sharding), tree, shardings)
