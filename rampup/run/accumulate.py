"""Gradient accumulation: the sum over the microbatches of a step, and `optax.MultiSteps` with a k that follows the ramp.

Shape suffixes: K microbatches in the buffer, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.errors import PipelineShapeError, RampDefinitionError
from rampup.moved import moved_names
from rampup.plan.plan import RampPlan
from rampup.run.mesh import DATA, STAGE, constrain

# loss_fn(params, batch, rngs[, mutable]) -> (loss_sum, weight_sum, aux[, mutable])
LossFn = Callable[..., tuple[Any, ...]]
# The numbers of microbatches in one pass and of passes, traced: a step runs their product.
Counts = tuple[jax.Array, jax.Array]


class Sums(NamedTuple):
    """Sums over all rows of an optimizer step.

    Attributes:
        grads: gradient of `loss`, float32 (float64 for float64 parameters), shaped and sharded like the parameters. None if no
            gradient was requested.
        loss: sum of the losses.
        weight: sum of the weights, for instance the number of tokens; loss / weight is the mean loss.
        aux: sums of the other results of the loss function.
        mutable: the state that the loss function carries from microbatch to microbatch, or None.
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: Any
    mutable: Any

    def mean_grads(self, params: Any) -> Any:
        """Return the gradient of loss / weight, in the types of the parameters."""
        scale = safe_reciprocal(self.weight)
        return jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), self.grads, params)


@runtime_checkable
class SummableLoss(Protocol):
    """A loss that sums itself over the microbatches of a step. The training step needs nothing else of it.

    `AccumulatedLoss` makes one of a loss function; `rampup.run.pipeline.PipelinedLoss` spreads its layers over stages.
    """

    def check(self, mesh: Mesh, engine: str) -> None:
        """Raise an error if this loss cannot run on a mesh, or with a gradient-accumulation engine."""

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
    ) -> tuple[Sums, Any]:
        """Return the sums over the microbatches, and the gradient of the mean loss in the types of the parameters."""

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients."""


@dataclass(frozen=True, slots=True)
class AccumulatedLoss:
    """The `SummableLoss` of a loss function: microbatches run one after the other on every replica.

    Attributes:
        loss_fn: see `rampup.run.step.train_step`.
    """

    loss_fn: LossFn

    def check(self, mesh: Mesh, engine: str) -> None:  # noqa: ARG002 - both engines work
        """Refuse pipeline stages; see `SummableLoss`."""
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
    ) -> tuple[Sums, Any]:
        """Return the sums and the gradient of the mean loss; see `SummableLoss`."""
        if keys_KR.shape[0] == 1 and mesh.shape[DATA] == 1:
            # Nothing to add up: differentiate the mean. Dividing the gradient of a sum, as below, is one more pass over memory
            # as large as the parameters.
            microbatch_sums = _microbatch_sums(self.loss_fn, param_shardings, differentiate_mean=True)
            sums = microbatch_sums(params, *_take((batch_KR, keys_KR), 0), mutable)
            return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), sums.grads, params)
        num_microbatches = counts[0] * counts[1]
        options = {"mesh": mesh, "param_shardings": param_shardings, "mutable": mutable}
        sums = accumulate(self.loss_fn, params, batch_KR, num_microbatches, keys_KR, **options)
        return sums, sums.mean_grads(params)

    def eval_sums(
        self, params: Any, batch_KR: Any, keys_KR: jax.Array, num_microbatches: jax.Array, *, mesh: Mesh, mutable: Any = None
    ) -> Sums:
        """Return the sums without gradients. `mutable` is read, not carried; see `SummableLoss`."""

        def microbatch_sums(params: Any, batch_R: Any, keys_R: jax.Array, mutable: Any) -> Sums:
            loss, weight, aux, *_ = self.loss_fn(params, batch_R, keys_R, *(() if mutable is None else (mutable,)))
            return Sums(None, *jax.tree.map(accumulator, (loss, weight, aux)), None)

        def replica_sums(params: Any, batch_KR: Any, num: Any, keys_KR: Any, mutable: Any) -> Sums:
            def add(i: jax.Array, total: Sums) -> Sums:
                return jax.tree.map(jnp.add, total, microbatch_sums(params, *_take((batch_KR, keys_KR), i), mutable))

            shapes = jax.eval_shape(microbatch_sums, params, *_take((batch_KR, keys_KR), 0), mutable)
            sums = jax.lax.fori_loop(0, num, add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
            return jax.lax.psum(sums, DATA) if mesh.shape[DATA] > 1 else sums

        return _per_replica(replica_sums, mesh)(params, batch_KR, num_microbatches, keys_KR, mutable)


def summable(loss: LossFn | SummableLoss) -> SummableLoss:
    """Return a loss that can sum itself: a loss function is wrapped in `AccumulatedLoss`."""
    return loss if isinstance(loss, SummableLoss) else AccumulatedLoss(loss)


def per_row_keys(seed: jax.Array, step: jax.Array, rows_KR: jax.Array) -> jax.Array:
    """Return one random key per row, from the seed, the optimizer step and the row's index in the global batch.

    The key does not depend on how the batch is split, so dropout is the same on any number of devices.
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

    `num_microbatches` is a traced loop bound: one executable serves any number up to K.

    Args:
        loss_fn: sums over the rows it is given; see `LossFn`. With several replicas it sees the rows of one.
        params: the parameters, not sharded over the data axis.
        batch_KR: arrays (K, R, ...), rows sharded over the data and fsdp axes.
        num_microbatches: how many of the K to use.
        keys_KR: a random key per row.
        mesh: the mesh.
        param_shardings: shardings of `params`, which the accumulators take.
        mutable: state for `loss_fn` to carry, such as batch statistics. Replicas do not see each other's during a step; its
            floating-point leaves are averaged over them at the end.

    Returns:
        The sums over the global batch.
    """
    # jit caches the trace: the loss function is traced once for the shapes of the sums and for the body of the loop.
    microbatch_sums = jax.jit(_microbatch_sums(loss_fn, param_shardings), inline=True)

    def replica_sums(params: Any, batch_KR: Any, num: Any, keys_KR: Any, mutable: Any) -> Sums:
        # First over this replica's rows, then over the replicas.
        if keys_KR.shape[0] == 1:
            sums = microbatch_sums(params, *_take((batch_KR, keys_KR), 0), mutable)
        else:

            def add(i: jax.Array, total: Sums) -> Sums:
                new = microbatch_sums(params, *_take((batch_KR, keys_KR), i), total.mutable)
                added = jax.tree.map(jnp.add, total._replace(mutable=None), new._replace(mutable=None))
                return added._replace(grads=_constrain(added.grads, param_shardings), mutable=new.mutable)

            # A while loop in the program: its bound is an argument, so it runs as often as the step has microbatches. Without
            # the constraints, the compiler may replicate the carried gradients over fsdp and tensor.
            shapes = jax.eval_shape(microbatch_sums, params, *_take((batch_KR, keys_KR), 0), mutable)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes._replace(mutable=None))
            zeros = zeros._replace(grads=_constrain(zeros.grads, param_shardings), mutable=mutable)
            sums = jax.lax.fori_loop(0, num, add, zeros)
        if mesh.shape[DATA] == 1:
            return sums
        with jax.named_scope("reduce"):
            # The one collective over the data axis: after the loop, once per optimizer step.
            reduced = jax.lax.psum(sums._replace(mutable=None), DATA)
            mutable = jax.tree.map(_mean_over_replicas, sums.mutable)
            return reduced._replace(grads=_constrain(reduced.grads, param_shardings), mutable=mutable)

    num = jnp.asarray(num_microbatches, jnp.int32)
    return _per_replica(replica_sums, mesh)(params, batch_KR, num, keys_KR, mutable)


def safe_reciprocal(weight: jax.Array) -> jax.Array:
    """Return 1 / weight, or 0 if the weight is 0, so that a batch without weight has a zero loss and a zero gradient.

    Example:
        >>> safe_reciprocal(jnp.float32(4)).item(), safe_reciprocal(jnp.float32(0)).item()
        (0.25, 0.0)
    """
    # The inner `where` keeps the division by zero out of the branch that is not selected.
    return jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)


def accumulator(x: Any) -> jax.Array:
    """Return a value in the type in which it is summed: at least float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def multi_steps(tx: optax.GradientTransformation, plan: RampPlan, **options: Any) -> optax.MultiSteps:
    """Return `optax.MultiSteps` around an optimizer, with k = the plan's number of microbatches at every optimizer step.

    For a training step of your own that calls the optimizer once per microbatch. It differs from the engine `fused`:

    - the optimizer's arithmetic runs at every microbatch;
    - microbatches count equally, whatever their numbers of tokens;
    - a checkpoint in the middle of an accumulation cannot be resumed with another k, so write checkpoints between optimizer
      steps.

    Args:
        tx: the optimizer to run once per optimizer step.
        plan: the plan whose microbatches are fed.
        options: further arguments of `optax.MultiSteps`.

    Raises:
        RampDefinitionError: the ramp takes 2**31 optimizer steps or more, which MultiSteps cannot count.

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
    # MultiSteps asks for k in every microbatch, inside the compiled step: a look-up in two small constants.
    start_steps = np.array([phase.start_step for phase in plan.ramp.phases], np.int32)
    num_microbatches = np.array([split.num_microbatches for split in plan.splits], np.int32)

    def every_k(gradient_step: jax.Array) -> jax.Array:
        phase = jnp.searchsorted(jnp.asarray(start_steps), gradient_step, side="right") - 1
        return jnp.asarray(num_microbatches)[phase]

    return optax.MultiSteps(tx, every_k, **options)


def _microbatch_sums(loss_fn: LossFn, param_shardings: Any, *, differentiate_mean: bool = False) -> Callable[..., Sums]:
    """Return the function that sums over the rows of one microbatch.

    Args:
        loss_fn: the loss function.
        param_shardings: shardings of the gradient.
        differentiate_mean: return the gradient of loss / weight instead of that of the loss.
    """

    def microbatch_sums(params: Any, batch_R: Any, keys_R: jax.Array, mutable: Any) -> Sums:
        def loss_of(params: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            loss, weight, *rest = loss_fn(params, batch_R, keys_R, *(() if mutable is None else (mutable,)))
            # The weight counts tokens; it is a constant of the gradient also if it was computed from the parameters.
            scale = safe_reciprocal(jax.lax.stop_gradient(jnp.asarray(weight))) if differentiate_mean else 1
            return loss * scale, (loss, weight, *rest)

        with jax.named_scope("microbatch"):
            (_, (loss, weight, aux, *carried)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            grads, loss, weight, aux = jax.tree.map(accumulator, (grads, loss, weight, aux))
            return Sums(_constrain(grads, param_shardings), loss, weight, aux, carried[0] if carried else None)

    return microbatch_sums


def _per_replica(replica_sums: Callable[..., Sums], mesh: Mesh) -> Callable[..., Sums]:
    """Return a function of (params, batch_KR, num, keys_KR, mutable) that runs on every replica's own rows."""
    if mesh.shape[DATA] == 1:
        return replica_sums
    # The data axis is manual, so that each replica adds up its own rows and the function decides when to reduce. If the
    # compiler partitioned the data axis, it would reduce the gradient inside the loop, once per microbatch. The other axes stay
    # automatic: parameters sharded over fsdp and tensor have to be gathered where they are used, which the compiler does well.
    #
    # With check_vma=True, JAX would track which values vary over the data axis. The gradient with respect to the parameters,
    # which do not vary, would then be reduced where it is computed: inside the loop again.
    whole, rows = PartitionSpec(), PartitionSpec(None, DATA)
    in_specs = (whole, rows, whole, rows, whole)
    return jax.shard_map(replica_sums, mesh=mesh, axis_names={DATA}, in_specs=in_specs, out_specs=whole, check_vma=False)


def _take(tree_KR: Any, i: Any) -> Any:
    """Return microbatch i of arrays (K, R, ...)."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree_KR)


def _constrain(tree: Any, shardings: Any) -> Any:
    """Keep accumulators sharded like the parameters, so that fsdp saves their memory too."""

    def constrain_leaf(x: Any, sharding: NamedSharding) -> Any:
        return x if sharding.is_fully_replicated else constrain(x, sharding)

    return jax.tree.map(constrain_leaf, tree, shardings)


def _mean_over_replicas(x: Any) -> Any:
    return jax.lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.floating) else x


__getattr__ = moved_names(__name__, {"row_keys": "rampup.run.accumulate.per_row_keys"})
