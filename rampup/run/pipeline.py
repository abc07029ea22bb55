"""Pipelined training over the mesh axis `stage`, in one executable for any number of microbatches.

`pipeline_stage` says what a stage does at each tick; here it runs on all stages, beside the data, fsdp and tensor axes.
Shape suffixes: K microbatches in the buffer, R rows of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from rampup.errors import PipelineShapeError
from rampup.plan.numbers import nearest_multiples
from rampup.run.accumulate import Sums, accumulator
from rampup.run.mesh import DATA, STAGE, constrain
from rampup.run.pipeline_stage import PipelinedLoss, Stage

LAYERS = "layers"
Params = Mapping[str, Any]


def pipeline_sums(
    loss: PipelinedLoss,
    params: Params,
    batch_KR: Any,
    num_microbatches: jax.Array | int,
    keys_KR: jax.Array,
    *,
    mesh: Mesh,
    param_shardings: Any,
    num_passes: jax.Array | int = 1,
    with_grads: bool = True,
) -> Sums:
    """Sum loss and gradients over microbatches through the pipeline, each gradient reduced once.

    Args:
        loss: the loss in parts.
        params: the parameters, `layers` cut over the stage axis.
        batch_KR: arrays (K, R, ...), rows cut over the data and fsdp axes.
        num_microbatches: microbatches m of one pass; passes * m of the K are used.
        keys_KR: a random key per row.
        mesh: the mesh, whose `stage` axis is the pipeline.
        param_shardings: shardings of `params`, which the accumulators take.
        num_passes: passes one after the other.
        with_grads: False for evaluation: forward only, and no gradients in the result.

    Raises:
        PipelineShapeError: no `stage` axis, layers that do not divide, or a stage that changes the activation's shape.
    """
    counts = (jnp.asarray(num_microbatches, jnp.int32), jnp.asarray(num_passes, jnp.int32))

    def on_one_stage(layers: Any, shared: Any, batch_KR: Any, keys_KR: Any, m: Any, passes: Any) -> Sums:
        pipe = Stage(loss, layers, shared, batch_KR, keys_KR, mesh, with_grads)
        sums = jax.lax.fori_loop(0, passes, lambda number, sums: pipe.one_pass(number * m, m, sums), pipe.nothing())
        return pipe.flat(sums)

    return _on_all_stages(on_one_stage, loss, params, batch_KR, keys_KR, counts, mesh, param_shardings, with_grads)


def gpipe_sums(
    loss: PipelinedLoss,
    params: Params,
    batch_KR: Any,
    keys_KR: jax.Array,
    *,
    mesh: Mesh,
    param_shardings: Any,
) -> Sums:
    """Do the same by differentiating through the forward ticks, as GPipe, praxis and MaxText do: the simple reference.

    All K microbatches are used, their number is part of the program, and what the backward needs of each of them is kept.

    Args:
        loss, params, batch_KR, keys_KR, mesh, param_shardings: see `pipeline_sums`.
    """

    def on_one_stage(layers: Any, shared: Any, batch_KR: Any, keys_KR: Any) -> Sums:
        def forward(layers: Any, shared: Any) -> tuple[jax.Array, Sums]:
            pipe = Stage(loss, layers, shared, batch_KR, keys_KR, mesh, with_grads=False)
            sums = pipe.one_pass(0, keys_KR.shape[0], pipe.nothing())
            return sums.loss, sums

        grads, sums = jax.grad(forward, argnums=(0, 1), has_aux=True)(layers, shared)
        return sums._replace(grads=jax.tree.map(accumulator, grads))

    return _on_all_stages(on_one_stage, loss, params, batch_KR, keys_KR, (), mesh, param_shardings, True)


def as_loss(loss: PipelinedLoss, mesh: Mesh, param_shardings: Any) -> Callable[[Params, Any, jax.Array], jax.Array]:
    """Return the weighted mean loss as a function that `jax.grad` and `jax.value_and_grad` differentiate.

    The gradients come from the pipeline itself, computed with the value; the function has a custom rule that hands them over.

    Args:
        loss: the loss in parts.
        mesh: the mesh, whose `stage` axis is the pipeline.
        param_shardings: shardings of the parameters.

    Returns:
        `mean_loss(params, batch_KR, keys_KR)` over all K microbatches.
    """

    def sums_of(params: Params, batch_KR: Any, keys_KR: jax.Array, with_grads: bool) -> Sums:
        options: Any = {"mesh": mesh, "param_shardings": param_shardings, "with_grads": with_grads}
        return pipeline_sums(loss, params, batch_KR, keys_KR.shape[0], keys_KR, **options)

    @jax.custom_vjp
    def mean_loss(params: Params, batch_KR: Any, keys_KR: jax.Array) -> jax.Array:
        sums = sums_of(params, batch_KR, keys_KR, False)
        return sums.loss / sums.weight

    def with_gradient(params: Params, batch_KR: Any, keys_KR: jax.Array) -> tuple[jax.Array, Any]:
        sums = sums_of(params, batch_KR, keys_KR, True)
        grads = jax.tree.map(lambda g, p: (g / sums.weight).astype(p.dtype), sums.grads, dict(params))
        return sums.loss / sums.weight, grads

    def scaled(grads: Any, cotangent: jax.Array) -> tuple[Any, None, None]:
        return jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads), None, None

    mean_loss.defvjp(with_gradient, scaled)
    return mean_loss


def reordered(tree: Any, order: Sequence[int]) -> Any:
    """Return a tree with all stacked layers (every leaf under a key `layers`) in another order; others stay as they are.

    Args:
        tree: parameters, or an optimizer's state that mirrors them.
        order: for every place, the layer that goes there: `stage_layer_order`, or its inverse `np.argsort(order)`.
    """
    index = np.asarray(order)
    if (index == np.arange(len(index))).all():
        return tree

    def of(path: tuple[Any, ...], leaf: Any) -> Any:
        stacked = any(getattr(part, "key", None) == LAYERS for part in path)
        return jnp.take(leaf, index, axis=0) if stacked and jnp.ndim(leaf) else leaf

    return jax.tree_util.tree_map_with_path(of, tree)


def _on_all_stages(
    on_one_stage: Callable[..., Sums],
    loss: PipelinedLoss,
    params: Params,
    batch_KR: Any,
    keys_KR: jax.Array,
    counts: tuple[jax.Array, ...],
    mesh: Mesh,
    param_shardings: Any,
    with_grads: bool,
) -> Sums:
    """Run a function on every stage, and add up what they return: over replicas, and what all stages hold over stages."""
    _check(loss, params, batch_KR, keys_KR, mesh)
    replicas = (DATA,) if mesh.shape[DATA] > 1 else ()
    shardings = param_shardings[LAYERS], _without_layers(param_shardings)

    def reduced(*arguments: Any) -> Sums:
        sums = on_one_stage(*arguments)
        totals = jax.lax.psum(sums._replace(grads=None), (*replicas, STAGE))
        if not with_grads:
            return totals
        layers, shared = sums.grads
        grads = (jax.lax.psum(layers, replicas) if replicas else layers, jax.lax.psum(shared, (*replicas, STAGE)))
        return totals._replace(grads=jax.tree.map(_constrained, grads, shardings))

    rows = PartitionSpec(None, DATA) if replicas else PartitionSpec()
    cut, whole = PartitionSpec(STAGE), PartitionSpec()
    sums: Sums = jax.shard_map(
        reduced,
        mesh=mesh,
        axis_names={*replicas, STAGE},
        in_specs=(cut, whole, rows, rows, *(whole,) * len(counts)),
        out_specs=Sums((cut, whole) if with_grads else None, whole, whole, whole, None),
        check_vma=False,
    )(params[LAYERS], _without_layers(params), batch_KR, keys_KR, *counts)
    return sums._replace(grads={LAYERS: sums.grads[0], **sums.grads[1]}) if with_grads else sums


def _constrained(x: jax.Array, sharding: Any) -> jax.Array:
    """Keep a gradient cut like its parameter over the axes that are left to the compiler."""
    spec = PartitionSpec(*(None if axis == STAGE else axis for axis in sharding.spec))
    return constrain(x, sharding.update(spec=spec)) if any(spec) else x


def _without_layers(params: Params) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != LAYERS}


def _check(loss: PipelinedLoss, params: Params, batch_KR: Any, keys_KR: jax.Array, mesh: Mesh) -> None:
    if STAGE not in mesh.axis_names:
        axes = ", ".join(mesh.axis_names)
        raise PipelineShapeError(f"the mesh has the axes {axes} and no axis {STAGE!r}; make it with make_mesh")
    p, v = mesh.shape[STAGE], loss.num_repeats
    if v < 1:
        raise PipelineShapeError(f"num_pipeline_repeats={v} must be at least 1", key="num_pipeline_repeats", nearest=(1,))
    num_layers = jax.tree.leaves(params[LAYERS])[0].shape[0]
    if num_layers % (p * v):
        nearest = nearest_multiples(num_layers, p * v)
        raise PipelineShapeError(
            f"base_num_decoder_layers={num_layers} must be a multiple of num_stages * num_pipeline_repeats = {p} * {v} = "
            f"{p * v}; nearest: {', '.join(map(str, nearest))}",
            key="base_num_decoder_layers",
            nearest=nearest,
        )
    num_rows, replicas = keys_KR.shape[1], mesh.shape[DATA]
    if num_rows % replicas:
        raise PipelineShapeError(
            f"a microbatch of {num_rows} rows must be a multiple of the data axis = {replicas}",
            key="microbatch_size",
            nearest=nearest_multiples(num_rows, replicas),
        )
    batch_R, keys_R = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch_KR, keys_KR))
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_layers // (p * v), *x.shape[1:]), x.dtype), params[LAYERS])
    x = jax.eval_shape(loss.first, _without_layers(params), batch_R, keys_R)
    y = jax.eval_shape(loss.stage, chunk, x, batch_R, keys_R, 0)
    before, after = (jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tree) for tree in (x, y))
    if before != after:
        raise PipelineShapeError(
            f"a pipeline stage must keep the shape and type of its input, but it turns {before} into {after}; put what changes "
            "them into the first or the last part"
        )
