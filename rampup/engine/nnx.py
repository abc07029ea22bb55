"""Flax NNX models in a pure training step: split the model once, train arrays, merge
them back at the end.

This avoids `nnx.jit`, which traverses the model at every call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from rampup.engine.contract import LossFn, check_signature, unpack_results
from rampup.engine.mesh import BatchAxes
from rampup.engine.state import (
    TrainState,
    check_kept,
    check_state,
    create_state,
    is_key,
    read_by_loss,
)
from rampup.engine.sums import differing_leaves
from rampup.errors import ConfigError, a_type


def split_model(
    model: nnx.Module,
    loss_fn: LossFn,
    tx: optax.GradientTransformation | optax.MultiSteps,
    mesh: Mesh,
    *,
    wrt: Any = nnx.Param,
    shard_optimizer_over_data: bool = False,
    batch_axes: BatchAxes | None = None,
) -> tuple[TrainState, LossFn]:
    """Return a training state with a model's parameters, and its loss as a pure
    function for `train_step`.

    Args:
        model: the model. Variables that are not parameters, such as batch statistics,
            are carried in `TrainState.mutable`, on each replica its own. At the end of
            a step, floating-point variables become their mean over the replicas and
            integers their maximum: return counts of rows in `aux`. Take sown
            intermediates in the loss, with `nnx.pop`.
        loss_fn: `loss_fn(model, batch, keys) -> (loss_sum, weight_sum, aux)`, sums over
            rows. `keys` is one random key per row, an array and not an `nnx.Rngs`. The
            model's own random streams (`nnx.Dropout`) are seeded in every microbatch
            with the key of its first row; masks from `keys` do not depend on how the
            batch is split. The mode of the model (`model.train()`, `model.eval()`) is
            that of this call, so split it again for an `EvalStep`.
        tx: the optimizer, or `rampup.multi_steps(tx, plan)`.
        wrt: the variables to train, such as `nnx.LoRAParam`. The other `nnx.Param` are
            in `TrainState.frozen`.
        mesh, shard_optimizer_over_data, batch_axes: see `create_state`.

    Raises:
        ConfigError: the model is no NNX module or has no variables to train, or the
            loss function does not take three arguments.

    Example:
        >>> import numpy as np
        >>> from rampup.plan import BatchRamp, BatchSplitter, RampPlan
        >>> from rampup import make_mesh, step_batches, train_step
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:2 4:4"),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=100,
        ... )
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, batch, keys):
        ...     return (
        ...         jnp.sum((model(batch["x"]) - 2 * batch["x"]) ** 2),
        ...         batch["x"].size,
        ...         {},
        ...     )
        >>> tx = optax.sgd(0.1)
        >>> state, pure_loss_fn = split_model(model, loss_fn, tx, mesh)
        >>> step = train_step(pure_loss_fn, tx, plan, mesh)
        >>> for batch in step_batches(
        ...     [{"x": np.float32([n % 3 - 1])} for n in range(12)], plan, mesh
        ... ):
        ...     state, metrics = step(state, batch)
        >>> merge_model(model, state)
        >>> round(float(model(jnp.ones((1, 1)))[0, 0]), 2)
        2.0
    """
    if not isinstance(model, nnx.Module) or not callable(loss_fn):
        raise ConfigError(
            f"split_model(model, loss_fn, tx, mesh): model is {a_type(model)}, loss_fn"
            f" is {a_type(loss_fn)}; check the order of the arguments",
            key="model",
        )
    check_signature(loss_fn)
    filters = wrt, nnx.Param, nnx.RngState, nnx.Intermediate, ...
    graphdef, params, frozen, streams, sown, rest = nnx.split(model, *filters)
    if not jax.tree.leaves(params):
        raise ConfigError(
            f"the model has no variables of wrt={wrt}, so that nothing would be trained",
            fix="give the type of those to train, such as nnx.Param",
            key="wrt",
        )
    has_frozen = bool(jax.tree.leaves(frozen))
    has_rest = bool(jax.tree.leaves(rest))
    # Frozen arrays come from the state, as arguments of the program. In a closure they
    # would be constants of it.
    none_frozen = None if has_frozen else frozen

    def pure(
        params: Any,
        batch: Any,
        keys: jax.Array,
        *mutable: Any,
        frozen: Any = none_frozen,
        deterministic: bool = False,
    ) -> tuple[Any, ...]:
        # Copy the tree: an NNX variable may only be written in the trace in which it
        # was created.
        carried, kept = jax.tree.map(
            lambda leaf: leaf, (mutable[0] if has_rest else rest, frozen)
        )
        merged = nnx.merge(
            graphdef, params, kept, _reseed(streams, keys), sown, carried
        )
        nnx.pop(merged, nnx.Intermediate)
        if deterministic:  # for `check_loss`: without dropout
            merged.set_attributes(deterministic=True, raise_if_not_found=False)
        results = unpack_results(loss_fn(merged, batch, keys))
        if has_rest:
            results += (nnx.split(merged, *filters)[-1],)
        return results

    pure.has_streams = bool(jax.tree.leaves(streams))  # type: ignore[attr-defined]
    state = create_state(
        params,
        tx,
        mesh,
        mutable=rest if has_rest else None,
        frozen=frozen if has_frozen else None,
        shard_optimizer_over_data=shard_optimizer_over_data,
        batch_axes=batch_axes,
    )
    return state, pure


def merge_model(model: nnx.Module, state: TrainState) -> None:
    """Write the parameters of a training state, its `mutable` and its `frozen` into the
    model: all variables but the random streams. The first two are copies.

    Args:
        model: the model that was split, or one of the same structure.
        state: a state of its training.

    Raises:
        ConfigError: the model has other variables, or of other shapes, or this is no
            training state.

    Example:
        >>> from rampup import make_mesh
        >>> model, mesh = (
        ...     nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        ...     make_mesh(devices=jax.devices()[:1]),
        ... )
        >>> def loss_fn(model, batch, keys):
        ...     return jnp.sum(model(batch)), len(batch), {}
        >>> state, _ = split_model(model, loss_fn, optax.sgd(0.1), mesh)
        >>> merge_model(
        ...     model, state.replace(params=jax.tree.map(jnp.ones_like, state.params))
        ... )
        >>> float(model.kernel[0, 0])
        1.0
    """
    check_state(state)
    read = read_by_loss(state)
    for leaf in jax.tree.leaves(read):
        check_kept("state", leaf)
    # No step takes the memory of what is frozen.
    *donated, frozen = read
    written = *jax.tree.map(jnp.copy, donated), frozen
    trees = [tree for tree in written if tree is not None]
    own = nnx.state(model)
    for tree in trees:
        for name, there, here in differing_leaves(own, tree, np.shape):
            if here is not None:
                raise ConfigError(
                    f"the state has {name} of shape {here}, and the model of shape"
                    f" {there}, where None is absent",
                    fix="give the model that was split, or one like it",
                    key="model",
                )
    nnx.update(model, *trees)


def _reseed(streams: Any, keys: jax.Array) -> Any:
    """Return random streams with new keys, derived from the key of the first row, and
    counters of zero.
    """
    leaves, structure = jax.tree.flatten(streams)

    def new(index: int, leaf: jax.Array) -> jax.Array:
        if not is_key(leaf):
            return jnp.zeros_like(leaf)
        key = jax.random.fold_in(keys[0], index)
        # Layers that were stacked with `nnx.split_rngs` have an array of keys.
        return jax.random.split(key, leaf.shape) if leaf.shape else key

    return jax.tree.unflatten(
        structure, [new(index, leaf) for index, leaf in enumerate(leaves)]
    )
