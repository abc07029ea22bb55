"""Gradient accumulation: fused in one executable, or with optax.MultiSteps whose k follows the ramp.

Shape suffixes: K microbatches, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.errors import RampDefinitionError
from rampup.plan.plan import RampPlan
from rampup.run.mesh import DATA, constrain

# loss_fn(params, batch, rngs[, mutable]) -> (loss_sum, weight_sum, aux[, mutable])
LossFn = Callable[..., tuple[Any, ...]]


class Sums(NamedTuple):
    """What is summed over all rows of an optimizer step.

    Attributes:
        grads: gradient of `loss`, float32 (float64 for float64 parameters), shaped and sharded like the parameters; of
            loss / weight from `one_microbatch`.
        loss: sum of losses.
        weight: sum of weights, for instance tokens that count; loss / weight is the mean loss.
        aux: sums of whatever else the loss function returns.
        mutable: the state that the loss function carries from microbatch to microbatch, or None.
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: Any
    mutable: Any


def row_keys(seed: jax.Array, step: jax.Array, rows_KR: jax.Array) -> jax.Array:
    """Return one random key per row, from the seed, the optimizer step and the row's place in the global batch.

    The key does not depend on how the batch is cut, so that dropout is the same on any number of devices.
    """
    base = jax.random.fold_in(seed, step)
    return jax.vmap(jax.vmap(lambda row: jax.random.fold_in(base, row)))(rows_KR)


def accumulate(
    loss_fn: LossFn,
    params: Any,
    batch_KR: Any,
    num_microbatches: jax.Array | int,
    keys_KR: jax.Array,
    *,
    mesh: Mesh,
    param_shardings: Any,
    mutable: Any = None,
) -> Sums:
    """Sum loss and gradients over microbatches, with one gradient reduction over the data axis at the end.

    The sums run inside a `jax.shard_map` that is manual over the data axis alone, so that each replica adds up its own rows;
    fsdp and tensor axes are left to the compiler. `num_microbatches` is a traced loop bound: one executable serves any
    number up to K.

    Args:
        loss_fn: sums over the rows it is given; see `LossFn`. Under several replicas it sees the rows of one.
        params: the parameters, not cut over the data axis.
        batch_KR: arrays (K, R, ...), rows cut over the data and fsdp axes.
        num_microbatches: how many of the K to use.
        keys_KR: a random key per row.
        mesh: the mesh.
        param_shardings: shardings of `params`, which the accumulators take.
        mutable: state for `loss_fn` to carry, such as batch statistics. Replicas do not see each other's during a step;
            its floating-point leaves are averaged over them at the end.

    Returns:
        The sums over the whole global batch.
    """
    local_sums = _local_sums(loss_fn, param_shardings)

    def of_one_replica(params: Any, batch_KR: Any, num: Any, keys_KR: Any, mutable: Any) -> Sums:
        sums = local_sums(params, batch_KR, num, keys_KR, mutable)
        reduced = jax.lax.psum(sums._replace(mutable=None), DATA)
        return reduced._replace(
            grads=_constrain(reduced.grads, param_shardings), mutable=jax.tree.map(_mean_over_replicas, sums.mutable)
        )

    arguments = (params, batch_KR, jnp.asarray(num_microbatches, jnp.int32), keys_KR, mutable)
    if mesh.shape[DATA] == 1:
        return local_sums(*arguments)
    return per_replica(of_one_replica, mesh, rows=(1, 3))(*arguments)


def one_microbatch(
    loss_fn: LossFn, params: Any, batch_1R: Any, keys_1R: jax.Array, *, param_shardings: Any, mutable: Any = None
) -> Sums:
    """Return the sums of a single microbatch on a single replica, with the gradient of the mean loss.

    To divide a gradient afterwards, as sums over several microbatches need it, is one more pass over memory as large as the
    parameters.

    Args:
        loss_fn, params, param_shardings, mutable: see `accumulate`.
        batch_1R, keys_1R: the microbatch and its keys, with a leading axis of one.
    """
    one = _of_microbatch(loss_fn, param_shardings, of_mean=True)
    sums: Sums = one(params, *_microbatch((batch_1R, keys_1R), 0), mutable)
    return sums


def inverse(weight: jax.Array) -> jax.Array:
    """Return 1 / weight; 0 for a batch in which nothing counts, so that it changes nothing.

    Example:
        >>> inverse(jnp.float32(4)).item(), inverse(jnp.float32(0)).item()
        (0.25, 0.0)
    """
    return jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)


def per_replica(function: Callable[..., Any], mesh: Mesh, *, rows: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that runs on every replica's own rows: manual over the data axis, automatic over the others.

    Args:
        function: what to run; it must reduce its results over the data axis.
        mesh: the mesh.
        rows: the positions of the arguments (K, R, ...) whose rows are cut over the data axis; others are whole.
    """

    def run(*arguments: Any) -> Any:
        specs = tuple(PartitionSpec(None, DATA) if n in rows else PartitionSpec() for n in range(len(arguments)))
        # Checked, replicated parameters would get their gradient reduction put back into the loop.
        mapped = jax.shard_map(
            function, mesh=mesh, axis_names={DATA}, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
        )
        return mapped(*arguments)

    return run


def multi_steps(tx: optax.GradientTransformation, plan: RampPlan, **options: Any) -> optax.MultiSteps:
    """Return `optax.MultiSteps` around an optimizer, with k = the plan's number of microbatches at every optimizer step.

    For a training step of your own that calls the optimizer once per microbatch. It differs from the fused engine: the
    optimizer's arithmetic runs at every microbatch; microbatches count equally, whatever their numbers of tokens; and a
    checkpoint in the middle of an accumulation cannot be continued with another k, so write them between optimizer steps.

    Args:
        tx: the optimizer to run once per optimizer step.
        plan: the plan whose microbatches are fed.
        options: further arguments of `optax.MultiSteps`.

    Raises:
        RampDefinitionError: the ramp goes on beyond 2**31 optimizer steps, which MultiSteps cannot count.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:4 8:8"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=10)
        >>> tx = multi_steps(optax.sgd(0.1), plan)
        >>> [int(tx._every_k_schedule(jnp.int32(step))) for step in range(4)]
        [1, 1, 2, 2]
    """
    if plan.ramp.ramp_steps >= 2**31:
        raise RampDefinitionError(f"the ramp takes {plan.ramp.ramp_steps:,} steps; optax.MultiSteps counts in int32")
    start_steps = np.array([phase.start_step for phase in plan.ramp.phases], np.int32)
    num_microbatches = np.array([split.num_microbatches for split in plan.splits], np.int32)

    def every_k(gradient_step: jax.Array) -> jax.Array:
        phase = jnp.searchsorted(jnp.asarray(start_steps), gradient_step, side="right") - 1
        return jnp.asarray(num_microbatches)[phase]

    return optax.MultiSteps(tx, every_k, **options)


def _of_microbatch(loss_fn: LossFn, param_shardings: Any, *, of_mean: bool = False) -> Callable[..., Sums]:
    """Return the function that sums over the rows of one microbatch."""

    def of_microbatch(params: Any, batch_R: Any, keys_R: Any, mutable: Any) -> Sums:
        def loss_of(params: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            loss, weight, *rest = loss_fn(params, batch_R, keys_R, *(() if mutable is None else (mutable,)))
            scale = inverse(jax.lax.stop_gradient(jnp.asarray(weight))) if of_mean else 1
            return loss * scale, (loss, weight, *rest)

        (_, of_rows), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        loss, weight, aux, *carried = of_rows
        sums = jax.tree.map(accumulator, (grads, loss, weight, aux))
        return Sums(_constrain(sums[0], param_shardings), *sums[1:], carried[0] if carried else None)

    return of_microbatch


def _local_sums(loss_fn: LossFn, param_shardings: Any) -> Callable[..., Sums]:
    """Return the function that sums over this replica's rows."""
    # Traced once, for the shapes of the sums and for the loop's body.
    of_microbatch = jax.jit(_of_microbatch(loss_fn, param_shardings), inline=True)

    def of_all(params: Any, batch_KR: Any, num: Any, keys_KR: Any, mutable: Any) -> Sums:
        if keys_KR.shape[0] == 1:
            return of_microbatch(params, *_microbatch((batch_KR, keys_KR), 0), mutable)

        def add(i: jax.Array, so_far: Sums) -> Sums:
            new = of_microbatch(params, *_microbatch((batch_KR, keys_KR), i), so_far.mutable)
            total = jax.tree.map(jnp.add, so_far._replace(mutable=None), new._replace(mutable=None))
            return total._replace(grads=_constrain(total.grads, param_shardings), mutable=new.mutable)

        shapes = jax.eval_shape(of_microbatch, params, *_microbatch((batch_KR, keys_KR), 0), mutable)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes._replace(mutable=None))
        start = zeros._replace(grads=_constrain(zeros.grads, param_shardings), mutable=mutable)
        return jax.lax.fori_loop(0, num, add, start)

    return of_all


def _microbatch(tree_KR: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree_KR)


def accumulator(x: Any) -> jax.Array:
    """Return a value in the type that it is summed in: at least float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _constrain(tree: Any, shardings: Any) -> Any:
    """Keep accumulators cut like the parameters, so that fsdp saves their memory too."""

    def of(x: Any, sharding: NamedSharding) -> Any:
        return x if sharding.is_fully_replicated else constrain(x, sharding)

    return jax.tree.map(of, tree, shardings)


def _mean_over_replicas(x: Any) -> Any:
    return jax.lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.floating) else x
