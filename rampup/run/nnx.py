"""Flax NNX models in a pure training step: split the model once, train arrays, merge them back at the end.

This avoids `nnx.jit`, which traverses the model at every call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from rampup.run.accumulate import LossFn
from rampup.run.step import TrainState, create_state


def split_model(
    model: nnx.Module, loss_fn: LossFn, tx: optax.GradientTransformation | optax.MultiSteps, mesh: Mesh
) -> tuple[TrainState, LossFn]:
    """Return a training state with a model's parameters, and its loss as a pure function for `train_step`.

    Args:
        model: the model. Its `nnx.Param` are trained; other variables, such as batch statistics, are carried from microbatch
            to microbatch in `TrainState.mutable`.
        loss_fn: `loss_fn(model, batch, rngs) -> (loss_sum, weight_sum, aux)`, sums over rows. The model's own random
            streams (`nnx.Dropout`) are seeded in every microbatch with the key of its first row. For masks that do not
            depend on how the batch is split, use `rngs`, one key per row.
        tx: the optimizer; with the engine `multi_steps`, the `tx` of the step.
        mesh: the devices.

    Example:
        >>> import numpy as np
        >>> from rampup.plan import BatchRamp, BatchSplitter, RampPlan
        >>> from rampup.run import make_mesh, step_batches, train_step
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(ramp=BatchRamp.from_schedule("0:2 4:4"), splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1, total_steps=100)
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, batch, rngs):
        ...     return jnp.sum((model(batch["x"]) - 2 * batch["x"]) ** 2), batch["x"].size, {}
        >>> tx = optax.sgd(0.1)
        >>> state, pure_loss_fn = split_model(model, loss_fn, tx, mesh)
        >>> step = train_step(pure_loss_fn, tx, plan, mesh)
        >>> for batch in step_batches([{"x": np.float32([n % 3 - 1])} for n in range(12)], plan, mesh):
        ...     state, metrics = step(state, batch)
        >>> merge_model(model, state)
        >>> round(float(model(jnp.ones((1, 1)))[0, 0]), 2)
        2.0
    """
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    has_rest = bool(jax.tree.leaves(rest))

    def pure(params: Any, batch: Any, rngs: jax.Array, *mutable: Any) -> tuple[Any, ...]:
        # Copy the tree: an NNX variable may only be written in the trace in which it was created.
        carried = jax.tree.map(lambda leaf: leaf, mutable[0] if has_rest else rest)
        merged = nnx.merge(graphdef, params, _reseed(streams, rngs), carried)
        loss, weight, aux = loss_fn(merged, batch, rngs)
        return (loss, weight, aux, nnx.split(merged, nnx.Param, nnx.RngState, ...)[3]) if has_rest else (loss, weight, aux)

    # The step donates its state, so the model keeps arrays of its own.
    own = jax.tree.map(jnp.copy, (params, rest))
    return create_state(own[0], tx, mesh, mutable=own[1] if has_rest else None), pure


def merge_model(model: nnx.Module, state: TrainState) -> None:
    """Write the parameters of a training state, and its `mutable`, back into the model."""
    nnx.update(model, state.params, *(() if state.mutable is None else (state.mutable,)))


def _reseed(streams: Any, rngs: jax.Array) -> Any:
    """Return random streams with new keys, derived from the key of the first row, and counters of zero."""
    leaves, structure = jax.tree.flatten(streams)

    def new(index: int, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        key = jax.random.fold_in(rngs[0], index)
        # Layers that were stacked with `nnx.split_rngs` have an array of keys.
        return jax.random.split(key, leaf.shape) if leaf.shape else key

    return jax.tree.unflatten(structure, [new(index, leaf) for index, leaf in enumerate(leaves)])
