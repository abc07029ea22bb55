"""Gradient accumulation: the sum over the microbatches of a step.

Each replica adds up the gradients of its rows in a loop whose bound is an argument, so
one executable serves every number, and the replicas exchange the sums once, after it
(see `rampup.engine.replicas`).

Shape suffixes: K microbatches in the buffer, R rows of one microbatch: in
`_sum_of_replica`, which `Replicas.run` runs, those of one replica, or of one device if
the loss takes shards, and elsewhere all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rampup.engine.arguments import OPTIONS_OF_LOSS_GONE, gone
from rampup.engine.contract import Counts, LossFn, SummableLoss, call_loss
from rampup.engine.explicit import (
    call_with_auto_axes,
    sees_explicit,
    with_explicit_axes,
)
from rampup.engine.mesh import STAGE, BatchAxes, auto_view, constrain_leaves, replicated
from rampup.engine.operations import reads
from rampup.engine.replicas import Replicas
from rampup.engine.sums import Recipe, Sums, as_summed, check_trained, safe_reciprocal
from rampup.engine.zero import is_scattered
from rampup.errors import ConfigError, PipelineShapeError, a_type


@dataclass(frozen=True, slots=True)
class AccumulatedLoss(SummableLoss):
    """The `SummableLoss` of a loss function: microbatches run one after the other on
    every replica.

    Attributes:
        loss_fn, reduce_once: see `rampup.train_step`.
        batch_axes: the axes of the mesh that take the rows; None = data and fsdp.
        param_shardings: None: `loss_fn` takes whole parameters and the rows of one
            replica, and the compiler partitions it over fsdp and tensor. Shardings of
            the parameters: it takes the rows of one device and, along the axes of the
            rows, its part of each parameter, and gathers what it needs with its own
            collectives.
        reduction_dtype: type in which replicas exchange gradients; None = that of the
            sums.
        accumulator_dtype: type in which gradients are summed over the microbatches;
            None = at least float32.
        whole_batch: the function sees all rows of a step, which is one microbatch, as
            with `plan.with_whole_batches()`.

    Example:
        >>> def loss_fn(params, batch, keys):
        ...     return ((params - batch) ** 2).sum(), batch.size, {}
        >>> AccumulatedLoss(loss_fn, accumulator_dtype=jnp.bfloat16).reduce_once
    """

    loss_fn: LossFn
    batch_axes: BatchAxes | None = None
    param_shardings: Any = None
    reduction_dtype: Any = None
    accumulator_dtype: Any = None
    reduce_once: bool | None = None
    whole_batch: bool = False

    @property
    def takes_whole(self) -> bool:  # type: ignore[override]
        """Whether `loss_fn` takes whole parameters."""
        return self.param_shardings is None

    def check(self, mesh: Mesh, engine: str) -> None:
        """Refuse pipeline stages, and a type of accumulators with `multi_steps`.

        Args:
            mesh: the devices.
            engine: `fused` or `multi_steps`.

        Raises:
            ConfigError: `accumulator_dtype` with `multi_steps`.
            PipelineShapeError: the mesh has several stages.
        """
        if self.accumulator_dtype is not None and engine == "multi_steps":
            key = "gradient_accumulator_dtype"
            raise ConfigError(
                f"{key}={jnp.dtype(self.accumulator_dtype).name} needs"
                " gradient_accumulation=fused; optax.MultiSteps keeps the sums of"
                " multi_steps",
                key=key,
                nearest=("float32",),
            )
        if (stages := mesh.shape.get(STAGE, 1)) > 1:
            raise PipelineShapeError(
                f"the mesh has {stages} pipeline stages, so the loss must say what a"
                " stage does: give a PipelinedLoss",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )

    def sums(
        self,
        params: Any,
        rows: Any,
        counts: Counts,
        recipe: Recipe,
        mesh: Mesh,
        grad_shardings: Any = None,
    ) -> Sums:
        """Return the sums over the microbatches; see `SummableLoss`.

        Args:
            params: the parameters.
            rows: the batch and a random key per row, arrays (K, R, ...).
            counts: microbatches of a pass, and passes; int32.
            recipe: what else to sum up, and how.
            mesh: the devices.
            grad_shardings: the shardings of the gradients; None = no gradients, as in
                an evaluation. Not `self.param_shardings`, the parts that the loss takes.

        Raises:
            ConfigError: the noise of gradients that are never in one place.
        """
        if recipe.noise is not None and not self.takes_whole:
            raise ConfigError(
                "measure_gradient_noise=true needs a loss function that takes whole"
                " parameters: with parts that it gathers itself, the gradient of a"
                " microbatch is never in one place",
                key="measure_gradient_noise",
                nearest=(False,),
            )
        run = self.summation(
            mesh,
            grad_shardings,
            # A plan whose buffer has room for one microbatch runs one in every step.
            has_one=jax.tree.leaves(rows[0])[0].shape[0] == 1,
            has_grads=grad_shardings is not None,
        )
        return run(params, *rows, counts[0] * counts[1], recipe)

    def summation(
        self,
        mesh: Mesh,
        grad_shardings: Any = None,
        *,
        has_one: bool = False,
        has_grads: bool = True,
    ) -> Callable[..., Sums]:
        """Return the function of (params, batch_KR, keys_KR, number, recipe) that sums
        over the first `number` microbatches.

        Args:
            mesh: the devices.
            grad_shardings: the shardings of the gradients; None leaves them to the
                compiler.
            has_one: the buffer has one microbatch, which runs.
            has_grads: False: `recipe.mutable` is read and not carried.

        Raises:
            ConfigError: parameters or gradients are sharded over the replicas, and the
                loss takes shards.
        """
        axes = BatchAxes.of(mesh, self.batch_axes)
        if not self.takes_whole and is_scattered(
            (grad_shardings, self.param_shardings), axes
        ):
            raise ConfigError(
                "a loss with `param_shardings` cannot have parameters or gradients that"
                f" are sharded over the replicas ({', '.join(axes.replica)}): ZeRO-1"
                " (shard_optimizer_over_data=true) needs a loss function that takes"
                " whole parameters",
                fix="shard them over fsdp",
                key="shard_optimizer_over_data",
            )
        # A loss function that takes shards was written for the shardings
        # `self.param_shardings`, and its gradients have those.
        wanted = grad_shardings if self.takes_whole else self.param_shardings
        replicas = Replicas(
            mesh=mesh,
            axes=axes,
            shardings=wanted if has_grads else None,
            shards=self.param_shardings,
            reduction_dtype=self.reduction_dtype,
            reduce_once=self.reduce_once,
        )
        return replicas.run(
            _sum_of_replica(self, replicas, has_one=has_one, has_grads=has_grads)
        )


def _sum_of_replica(
    loss: AccumulatedLoss, replicas: Replicas, *, has_one: bool, has_grads: bool
) -> Callable[..., Sums]:
    """Return the function of (params, batch_KR, keys_KR, number, recipe) that sums over
    the rows of a replica; see `AccumulatedLoss.summation`.
    """
    plain = _loss_of(loss.loss_fn, replicas.mesh, keeps_mutable=has_grads)
    # jit caches the trace: the loss function is traced once for the shapes of the sums
    # and for the body of the loop.
    loss_of = jax.jit(
        jax.value_and_grad(plain, has_aux=True) if has_grads else plain, inline=True
    )
    shardings = replicas.shardings

    def sum_replica(
        params: Any, batch_KR: Any, keys_KR: Any, number: Any, recipe: Recipe
    ) -> Sums:
        rows, start = (batch_KR, keys_KR), recipe.mutable
        K = jax.tree.leaves(rows)[0].shape[0]
        if loss.whole_batch and K > 1:
            raise ConfigError(
                "whole_batch=True takes a buffer of one microbatch, which is the whole"
                f" batch, but this one has room for {K}",
                fix="make its batches with plan.with_whole_batches()",
                key="whole_batch",
            )

        def sums_of(i: Any, mutable: Any) -> Sums:
            """Return the sums over microbatch i."""
            args = params, *take(rows, i), mutable, recipe.scale
            if not has_grads:
                return loss_of(*args)[1]
            (_, sums), grads = loss_of(*args)
            grads = jax.tree.map(as_summed, grads)
            if recipe.scale is not None:
                # From the scaled mean to the sum.
                grads = jax.tree.map(lambda g: g * sums.weight / recipe.scale, grads)
            grads = constrain_leaves(grads, shardings)
            noise = recipe.noise and recipe.noise.block(grads, sums.weight)
            dtype = loss.accumulator_dtype
            grads = jax.tree.map(lambda g: as_summed(g, dtype), grads)
            return sums._replace(grads=grads, noise=noise)

        first = params, *take(rows, 0), start, recipe.scale
        traced = jax.make_jaxpr(loss_of)(*first)
        replicas.check(traced)
        if has_grads and not any(reads(traced)[: len(jax.tree.leaves(params))]):
            raise ConfigError(
                "the loss reads none of its parameters, so that nothing would be"
                " trained",
                fix="compute loss_sum, the first result, with the parameters, or the"
                " model, that it is given, and not with those of a model from outside",
                key="loss_fn",
            )
        if has_one:
            with jax.named_scope("microbatch"):
                return sums_of(0, start)
        # The sums over no microbatch: zeros shaped as those over one, and `mutable` as
        # it is, if it is carried.
        shapes = jax.eval_shape(sums_of, 0, start)._replace(mutable=None)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        # Without the constraints, the compiler may replicate the carried gradients over
        # fsdp and tensor.
        zeros = zeros._replace(
            grads=constrain_leaves(zeros.grads, shardings),
            mutable=start if has_grads else None,
        )

        def add(i: jax.Array, sums: Sums) -> Sums:
            with jax.named_scope("microbatch"):
                new = sums_of(i, sums.mutable if has_grads else start)
                added: Sums = jax.tree.map(
                    jnp.add, sums._replace(mutable=None), new._replace(mutable=None)
                )
                grads = constrain_leaves(added.grads, shardings)
                return added._replace(grads=grads, mutable=new.mutable)

        # In an iteration, parameters and gradients cross fsdp but not data, unless the
        # replicas run in the way `compiled`.
        return jax.lax.fori_loop(0, number, add, zeros)

    return sum_replica


def summable(
    loss: LossFn | SummableLoss,
    mesh: Mesh,
    batch_axes: BatchAxes | None = None,
    *,
    reduce_once: bool | None = None,
    whole_batch: bool = False,
) -> SummableLoss:
    """Return a loss as a `SummableLoss` with these batch axes and `reduce_once`, if
    they are given; with `whole_batch`, with no replicas.
    """
    own: Any = loss if isinstance(loss, SummableLoss) else AccumulatedLoss(loss)
    whole_batch |= own.whole_batch
    if not own.takes_whole and (whole_batch or reduce_once is not None):
        key = "whole_batch" if whole_batch else "reduce_once"
        raise ConfigError(
            f"{key} needs a loss function that takes whole parameters, but"
            f" {a_type(loss)} runs microbatches by itself, or sees the rows of one"
            " device, and reduces gradients once per step",
            fix="leave it out, or give the function itself",
            key=key,
            nearest=(None,),
        )
    if whole_batch:
        found = BatchAxes.of(mesh, batch_axes or own.batch_axes)
        if own.batch_axes is not None and found.replica:
            raise ConfigError(
                "a loss of whole batches sees the rows of all devices together, but"
                f" each replica of batch_axes with replica={found.replica} sees its own",
                fix=f"give BatchAxes(replica=(), rows={found.rows})",
                key="batch_axes",
            )
        batch_axes = replace(found, replica=())
    given = {
        "batch_axes": batch_axes,
        "reduce_once": reduce_once,
        "whole_batch": whole_batch or None,
    }
    changes: dict[str, Any] = {k: x for k, x in given.items() if x is not None}
    return replace(own, **changes) if changes else own


@gone(**OPTIONS_OF_LOSS_GONE)
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
) -> Sums:
    """Sum loss and gradients over microbatches, with one gradient reduction over the
    data axis at the end.

    For a jitted training step of your own: one executable serves any number of
    microbatches up to K. With
    `options=BatchOptions(chunk_size=max(plan.max_microbatches.values()))`,
    `step_batches` yields batches whose `chunks[0]` is such a buffer. The gradient for
    the optimizer is `sums.mean_grads(params)`.

    Nothing is checked here by itself: a loss that returns a mean gives another result
    for another number of microbatches. Call `check_loss` first.

    Args:
        loss_fn: see `train_step`. An `AccumulatedLoss` of it chooses the axes of the
            rows, the way of running (`reduce_once`), and the types in which gradients
            are summed and exchanged.
        params: the parameters, not sharded over the data axis.
        batch_KR: arrays (K, R, ...), rows sharded over the data and fsdp axes.
        num_microbatches: how many of the K to use. If a traced number is not from 0 to
            K, loss, weight and mean are NaN.
        keys_KR: a random key per row, as `rampup.engine.keys.per_row_keys` makes
            them. None: the loss gets None.
        param_shardings: shardings of `params`, which the accumulators take; None leaves
            them to the compiler. If they name the axes of the replicas, each replica
            gets its own part of the summed gradients.
        mutable: state for `loss_fn` to carry, on each replica its own. At the end,
            floating-point leaves become their mean over the replicas, and integers and
            booleans their maximum. Random keys must be the same on all replicas.
        mesh: see `train_step`.

    Returns:
        The `Sums`: `grads` of the summed loss, `loss`, `weight` and `aux`.

    Raises:
        ConfigError: `num_microbatches` is not a number from 0 to K, or K is not 1 for a
            loss of whole batches.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> def loss_fn(params, batch, keys):
        ...     return ((params - batch) ** 2).sum(), batch.size, {}
        >>> sums = accumulate(loss_fn, 1.0, jnp.ones((3, 2)) * 3, 2, mesh=mesh)
        >>> float(sums.mean_loss), float(sums.mean_grads())
        (4.0, -4.0)
    """
    loss: Any = summable(loss_fn, mesh)
    if hasattr(batch_KR, "chunks"):
        raise ConfigError(
            "accumulate takes arrays of shape (microbatches, rows, ...) and no Batch",
            fix="give one of its chunks, such as batch.chunks[0]",
            key="batch_KR",
        )
    # Python's numbers too are parameters, as they are for `jax.grad`.
    params, mutable = jax.tree.map(jnp.asarray, (params, mutable))
    check_trained(params)
    K = jax.tree.leaves(batch_KR)[0].shape[0]
    is_traced = isinstance(num_microbatches, jax.core.Tracer)
    if not is_traced and (
        not np.issubdtype(np.asarray(num_microbatches).dtype, np.integer)
        or not 0 <= num_microbatches <= K
    ):
        raise ConfigError(
            f"num_microbatches={num_microbatches} must be a whole number from 0 to {K},"
            " the microbatches of the buffer",
            key="num_microbatches",
            nearest=(K,),
        )
    has_one = K == 1 and not is_traced and int(num_microbatches) == 1
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, jax.typeof(x).sharding.spec), (params, mutable)
    )

    if sees_explicit(loss, mesh):
        loss = with_explicit_axes(loss, auto_view(mesh), *shardings)
    run = loss.summation(mesh, param_shardings, has_one=has_one)
    number = jnp.asarray(num_microbatches, jnp.int32)
    args = params, batch_KR, keys_KR, number, Recipe(mutable=mutable)
    whole = replicated(mesh)
    results = Sums(shardings[0], whole, whole, whole, shardings[1], whole)
    sums: Sums = call_with_auto_axes(run, mesh, args, results)
    if not is_traced:
        return sums
    # JAX clamps an index beyond an array, so the last microbatch would be added several
    # times.
    is_valid = (num_microbatches >= 0) & (num_microbatches <= K)
    loss, weight = jax.tree.map(
        lambda x: jnp.where(is_valid, x, jnp.nan), (sums.loss, sums.weight)
    )
    return sums._replace(loss=loss, weight=weight)


def _loss_of(
    loss_fn: LossFn, mesh: Mesh, *, keeps_mutable: bool
) -> Callable[..., tuple[Any, Sums]]:
    """Return the function of one microbatch that returns what `Sums.grads` is the
    gradient of, or with a scale its scaled mean, and the sums.
    """

    def loss_of(
        params: Any, batch_R: Any, keys_R: Any, mutable: Any, scale: Any
    ) -> tuple[Any, Sums]:
        args = (params, batch_R, keys_R) + (() if mutable is None else (mutable,))
        loss, weight, aux, carried = call_loss(
            loss_fn, args, mesh.axis_names, keeps_mutable=keeps_mutable
        )
        value = loss
        if scale is not None:
            # A mean, at least in float32, as in a step by hand: a sum would make the
            # gradients of float16 too large by the weight. The weight counts tokens; it
            # is a constant of the gradient even if it was computed from the parameters.
            divisor = as_summed(jax.lax.stop_gradient(weight))
            value = as_summed(loss) * safe_reciprocal(divisor) * scale
        loss, weight, aux = jax.tree.map(as_summed, (loss, weight, aux))
        return value, Sums(None, loss, weight, aux, carried if keeps_mutable else None)

    return loss_of


def take(tree: Any, i: Any) -> Any:
    """Return entry i of every array along its first axis, such as microbatch i of
    arrays (K, R, ...).
    """
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree
    )
