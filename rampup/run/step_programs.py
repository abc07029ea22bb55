"""What a training step compiles: from a state and a batch to the next state, by either engine, and the sums of an evaluation.

Shape suffixes: K microbatches of the buffer, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rampup.run.accumulate import LossFn, Sums, accumulate, accumulator, inverse, one_microbatch, per_replica, row_keys
from rampup.run.mesh import DATA, replicated
from rampup.run.nonfinite import all_finite, chosen, zero_unless
from rampup.run.pipeline import pipeline_sums
from rampup.run.pipeline_stage import PipelinedLoss

Metrics = dict[str, Any]


def fused_step(
    loss_fn: LossFn | PipelinedLoss,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    skips: bool,
    state: Any,
    chunks: tuple[Any, ...],
    counts: tuple[jax.Array, jax.Array],
) -> tuple[Any, Metrics]:
    """One optimizer step: sum over all microbatches, reduce once, run the optimizer once.

    Args:
        loss_fn, tx, mesh: see `rampup.run.step.train_step`.
        param_shardings: where the parameters lie, and so their gradients.
        seed: a random key.
        skips: whether a step that is not finite is left out.
        state: the training state.
        chunks: the buffer, arrays (K, R, ...) each.
        counts: microbatches of a pass, and passes.
    """
    sums, grads = _sum_over(loss_fn, mesh, param_shardings, seed, state, _joined(chunks), counts, jnp.int32(0))
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
        "loss": sums.loss * inverse(sums.weight),
        "weight": sums.weight,
        "grad_norm": _norm(grads),
        "aux": sums.aux,
    }
    if skips:
        good = all_finite(sums._replace(aux=None))
        metrics["skipped"] = ~good
        params, opt_state = chosen(good, (params, opt_state), (state.params, state.opt_state))
        sums = sums._replace(mutable=chosen(good, sums.mutable, _carried(state)))
    return _replaced(state, sums, params=params, opt_state=opt_state, step=state.step + 1), metrics


def micro_step(
    loss_fn: LossFn,
    tx: optax.MultiSteps,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    skips: bool,
    state: Any,
    so_far: Metrics,
    chunk: Any,
    first_row: jax.Array,
) -> tuple[Any, Metrics]:
    """One microbatch with `optax.MultiSteps`; see `fused_step`.

    Args:
        so_far: the metrics of the step's microbatches before.
        chunk: the microbatch, arrays (1, R, ...).
        first_row: the number of its first row in the step, for the random keys.
    """
    once = jnp.int32(1), jnp.int32(1)
    sums, grads = _sum_over(loss_fn, mesh, param_shardings, seed, state, chunk, once, first_row)
    if skips:
        good = all_finite(sums._replace(aux=None))
        grads = zero_unless(good, grads)
        sums = sums._replace(mutable=chosen(good, sums.mutable, _carried(state)))
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    weight = so_far["weight"] + sums.weight
    metrics = {
        "loss": (so_far["loss"] * so_far["weight"] + sums.loss) * inverse(weight),
        "weight": weight,
        "aux": jax.tree.map(jnp.add, so_far["aux"], sums.aux),
    }
    if skips:
        metrics["skipped"] = so_far["skipped"] | ~good
        kept = ~metrics["skipped"] | ~tx.has_updated(opt_state)
        params = chosen(kept, params, state.params)
        inner = chosen(kept, opt_state.inner_opt_state, state.opt_state.inner_opt_state)
        opt_state = opt_state._replace(inner_opt_state=inner)
    return _replaced(state, sums, params=params, opt_state=opt_state, step=opt_state.gradient_step), metrics


def eval_sums(loss_fn: LossFn | PipelinedLoss, mesh: Mesh, state: Any, chunks: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the sums of loss and weight over a batch."""
    batch_KR = _joined(chunks)
    keys_KR = row_keys(jax.random.key(0), jnp.int32(0), _row_numbers(batch_KR, 0))
    if isinstance(loss_fn, PipelinedLoss):
        shardings = jax.tree.map(lambda _: replicated(mesh), state.params)
        options: dict[str, Any] = {"mesh": mesh, "param_shardings": shardings, "with_grads": False}
        sums = pipeline_sums(loss_fn, state.params, batch_KR, keys_KR.shape[0], keys_KR, **options)
        return sums.loss, sums.weight

    def of_one_replica(batch_KR: Any, keys_KR: jax.Array, params: Any, carried: Any) -> tuple[jax.Array, jax.Array]:
        def add(i: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            batch_R = jax.tree.map(lambda x: x[i], batch_KR)
            loss, weight, *_ = loss_fn(params, batch_R, keys_KR[i], *(() if carried is None else (carried,)))
            return so_far[0] + loss, so_far[1] + weight

        zero = jnp.zeros((), jnp.float32)
        sums = jax.lax.fori_loop(0, keys_KR.shape[0], add, (zero, zero))
        return jax.lax.psum(sums, DATA) if mesh.shape[DATA] > 1 else sums

    run = per_replica(of_one_replica, mesh, rows=(0, 1)) if mesh.shape[DATA] > 1 else of_one_replica
    return run(batch_KR, keys_KR, state.params, _carried(state))


def aux_of(loss_fn: LossFn, state: Any, chunk: Any) -> Any:
    """Return what the loss function gives besides loss and weight, in the type that sums have."""
    batch_R = jax.tree.map(lambda x: x[0], chunk)
    keys_R = row_keys(jax.random.key(0), jnp.int32(0), _row_numbers(chunk, 0))[0]
    carried = _carried(state)
    return jax.tree.map(accumulator, loss_fn(state.params, batch_R, keys_R, *(() if carried is None else (carried,)))[2])


def _sum_over(
    loss_fn: LossFn | PipelinedLoss,
    mesh: Mesh,
    param_shardings: Any,
    seed: jax.Array,
    state: Any,
    batch_KR: Any,
    counts: tuple[jax.Array, jax.Array],
    first_row: jax.Array,
) -> tuple[Sums, Any]:
    """Return the sums over a batch, and the gradient of its mean loss in the type of the parameters."""
    params, carried, shardings = state.params, _carried(state), {"param_shardings": param_shardings}
    keys_KR = row_keys(seed, state.step, _row_numbers(batch_KR, first_row))
    m, passes = counts
    if isinstance(loss_fn, PipelinedLoss):
        sums = pipeline_sums(loss_fn, params, batch_KR, m, keys_KR, num_passes=passes, mesh=mesh, **shardings)
    elif keys_KR.shape[0] == 1 and mesh.shape[DATA] == 1:
        sums = one_microbatch(loss_fn, params, batch_KR, keys_KR, mutable=carried, **shardings)
        return sums, jax.tree.map(lambda g, p: g.astype(p.dtype), sums.grads, params)
    else:
        sums = accumulate(loss_fn, params, batch_KR, m * passes, keys_KR, mutable=carried, mesh=mesh, **shardings)
    scale = inverse(sums.weight)
    return sums, jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), sums.grads, params)


def _joined(chunks: tuple[Any, ...]) -> Any:
    return chunks[0] if len(chunks) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)


def _row_numbers(batch_KR: Any, first_row: Any) -> jax.Array:
    K, R = jax.tree.leaves(batch_KR)[0].shape[:2]
    return first_row + jnp.arange(K * R, dtype=jnp.int32).reshape(K, R)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _carried(state: Any) -> Any:
    return getattr(state, "mutable", None)


def _replaced(state: Any, sums: Sums, **changes: Any) -> Any:
    return state.replace(**changes) if sums.mutable is None else state.replace(**changes, mutable=sums.mutable)
