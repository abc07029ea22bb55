"""One stage of a pipeline: lock-step 1F1B, in the trace of a function that is manual over the stage axis.

At tick t, stage s runs the forward of unit t - s and then the backward of unit t - (v*p - 1) - (p - 1 - s), where a unit is one
microbatch in one repeat: groups of p microbatches pass through all v repeats in turn. Both are skipped where no such unit is
left, and both results move on by one stage at the end of the tick. So a pass costs v*m + p - 1 forwards and as many backwards
of a chunk, and at most 2*v*p - 1 chunk inputs wait for their backward on any stage, however many microbatches there are; with
v = 1 that is 2p - 1 stage inputs. The number of microbatches may be traced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rampup.run.accumulate import Sums, accumulator
from rampup.run.mesh import DATA, STAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedLoss:
    """A loss in three parts, so that its layers can be spread over pipeline stages. Takes the place of a loss function.

    The parameters are a mapping: `layers`, stacked with the layer in front and in the order of `stage_layer_order`, and
    whatever else the first and the last part use, which every stage holds.

    Attributes:
        first: `first(params, batch, rngs) -> x`, before the layers; `params` without `layers`. x is any pytree of arrays.
        stage: `stage(layers, x, batch, rngs, first_layer) -> x`, some consecutive layers; x keeps its shape. `batch` gives what
            belongs to the microbatch, such as positions or masks; `first_layer` is the number of the first of the layers.
        last: `last(params, x, batch, rngs) -> (loss_sum, weight_sum, aux)`, after the layers.
        num_repeats: layer chunks v per stage.
        keep: what to keep of a chunk's forward for its backward besides its input: a policy of `jax.checkpoint`, such as
            `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`. None keeps nothing more and computes the chunk again.
            Each stage holds what is kept of up to 2*v*p - 1 chunks.
        skip_idle: whether each stage skips the work that it has no microbatch for, and the first and the last part run on
            their stages alone. Otherwise the stages compute on placeholders, whose results are dropped, wherever another
            stage has work to do; a pass takes as long, but all stages do the work of the first and the last part. True is
            safe only if no stage waits inside a branch for one that does not take it, as collectives that the compiler
            inserts for other axes may do. None: True if there are no such axes, with fsdp and tensor of 1.
    """

    first: Callable[..., Any]
    stage: Callable[..., Any]
    last: Callable[..., tuple[Any, Any, Any]]
    num_repeats: int = 1
    keep: Callable[..., Any] | None = None
    skip_idle: bool | None = None


class Stage:
    """What one stage does.

    Args:
        loss: the loss in parts.
        layers: this stage's layers, stacked, in the order of `stage_layer_order`.
        shared: the other parameters.
        batch_KR, keys_KR: microbatches and a random key per row.
        mesh: the mesh.
        with_grads: False for the forward alone.
    """

    def __init__(
        self,
        loss: PipelinedLoss,
        layers: Any,
        shared: Any,
        batch_KR: Any,
        keys_KR: Any,
        mesh: Mesh,
        with_grads: bool,
    ) -> None:
        self.loss, self.shared, self.with_grads = loss, shared, with_grads
        self.batch_KR, self.keys_KR = batch_KR, keys_KR
        self.p, self.v = mesh.shape[STAGE], loss.num_repeats
        alone = math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in (STAGE, DATA)) == 1
        self.skips = alone if loss.skip_idle is None else loss.skip_idle
        self.chunks = jax.tree.map(lambda x: x.reshape(self.v, -1, *x.shape[1:]), layers)
        self.chunk_size = jax.tree.leaves(self.chunks)[0].shape[1]
        self.s = jax.lax.axis_index(STAGE)
        self.ring_size = 2 * self.v * self.p - 1
        self.structure: Any = None
        self.roles: list[int | None] = []

    def nothing(self) -> Sums:
        """Return the sums over no microbatch."""
        _, weight, aux = jax.eval_shape(self._last, self._example_x(), 0)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), (weight, aux))
        grads = None
        if self.with_grads:
            grads = jax.tree.map(
                lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (self.chunks, self.shared)
            )
        return Sums(grads, jnp.zeros_like(zeros[0]), *zeros, None)

    def one_pass(self, first: Any, m: Any, sums: Sums) -> Sums:
        """Run microbatches first to first + m through the pipeline and add them to the sums."""
        groups = (m + self.p - 1) // self.p
        last_unit = ((groups - 1) * self.v + self.v - 1) * self.p + (m - 1) % self.p
        lag = self.v * self.p - 1 if self.with_grads else 0
        x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), self._example_x())
        kept = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), self._example_kept(x)) if self.with_grads else None
        ring = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.ring_size, *x.shape)), (x, kept) if self.with_grads else None)
        tick = functools.partial(self._tick, first, m, last_unit + self.p)
        return jax.lax.fori_loop(0, last_unit + self.p + lag, tick, (sums, ring, x, x))[0]

    def flat(self, sums: Sums) -> Sums:
        """Return the gradients of the layers stacked again."""
        if not self.with_grads:
            return sums
        chunks, shared = sums.grads
        return sums._replace(grads=(jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), chunks), shared))

    def _tick(self, first: Any, m: Any, forward_ticks: Any, t: jax.Array, carry: Any) -> Any:
        sums, ring, arrived, arrived_gradient = carry
        if not self.with_grads:
            y, sums = self._evaluate(first, m, t, arrived, sums)
            return sums, ring, self._pass_on(y, 1), arrived_gradient
        has_forward, has_backward = t < forward_ticks, t >= self.v * self.p - 1
        y, ring = self._on_all(has_forward, lambda: self._forwards(first, m, t, arrived, ring), (arrived, ring))
        sums, gradient = self._on_all(
            has_backward, lambda: self._backwards(first, m, t, y, ring, arrived_gradient, sums), (sums, arrived_gradient)
        )
        return sums, ring, self._pass_on(y, 1), self._pass_on(gradient, -1)

    def _evaluate(self, first: Any, m: Any, t: jax.Array, arrived: Any, sums: Sums) -> tuple[Any, Sums]:
        is_real, k, r = self._unit(t - self.s, m)
        x = self._when(is_real & (self.s == 0) & (r == 0), lambda: self._first(first + k), arrived)
        y = self._when(is_real, lambda: self._stage(self._chunk(r), x, first + k, r), x)
        at_the_end = is_real & (self.s == self.p - 1) & (r == self.v - 1)
        return y, self._when(at_the_end, lambda: self._with_loss(sums, self._last(y, first + k)), sums)

    def _forwards(self, first: Any, m: Any, t: jax.Array, arrived: Any, ring: Any) -> tuple[Any, Any]:
        """Return what the tick's forward gives, and the ring with what its backward will need."""
        unit = t - self.s
        is_real, k, r = self._unit(unit, m)
        x = self._when(is_real & (self.s == 0) & (r == 0), lambda: self._first(first + k), arrived)
        is_last = (self.s == self.p - 1) & (r == self.v - 1)
        # Where nothing is kept, the last chunk's forward is part of its backward, which runs in the same tick.
        runs = is_real if self.loss.keep else is_real & ~is_last
        y, kept = self._when(runs, lambda: self._forward(self._chunk(r), x, first + k, r), (x, self._slot(ring[1], 0)))
        return y, self._stashed(ring, unit, (x, kept), is_real)

    def _backwards(self, first: Any, m: Any, t: jax.Array, y: Any, ring: Any, arrived: Any, sums: Sums) -> tuple[Sums, Any]:
        """Return the sums with the tick's gradients, and the gradient to pass on."""
        unit = t - (self.v * self.p - 1) - (self.p - 1 - self.s)
        is_real, k, turn = self._unit(unit, m)
        r = self.v - 1 - turn
        stash = self._slot(ring, (unit + (r - turn) * self.p) % self.ring_size)
        return self._when(  # type: ignore[no-any-return]
            is_real, lambda: self._backward(sums, stash, y, arrived, first + k, r), (sums, arrived)
        )

    def _unit(self, unit: jax.Array, m: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return whether there is such a unit, its microbatch and its turn: groups of p microbatches, v turns each."""
        group, rest = unit // (self.v * self.p), unit % (self.v * self.p)
        k, turn = group * self.p + rest % self.p, rest // self.p
        is_real = (unit >= 0) & (k < m)
        return is_real, jnp.where(is_real, k, 0), jnp.where(is_real, turn, 0)

    def _forward(self, chunk: Any, x: Any, k: Any, r: Any) -> tuple[Any, list[Any]]:
        """Return a chunk's output and what is kept for its backward."""
        if self.loss.keep is None:
            return self._stage(chunk, x, k, r), []
        given = (chunk, x, self._microbatch(k), self._first_layer(r))
        y, pull_back = self._pulled(*given)
        leaves, self.structure = jax.tree.flatten(pull_back)
        known = jax.tree.leaves(given)
        self.roles = [next((n for n, other in enumerate(known) if other is leaf), None) for leaf in leaves]
        return y, [leaf for leaf, role in zip(leaves, self.roles, strict=True) if role is None]

    def _pulled(self, chunk: Any, x: Any, microbatch: Any, first_layer: Any) -> tuple[Any, Any]:
        stage = jax.checkpoint(self.loss.stage, policy=self.loss.keep) if self.loss.keep else self.loss.stage
        return jax.vjp(lambda chunk, x: stage(chunk, x, *microbatch, first_layer), chunk, x)

    def _backward(self, sums: Sums, stash: Any, y: Any, arrived: Any, k: jax.Array, r: jax.Array) -> tuple[Sums, Any]:
        """Add the gradients of one unit to the sums; return the gradient of its input."""
        x, kept = stash
        given = (self._chunk(r), x, self._microbatch(k), self._first_layer(r))
        if self.loss.keep is None:
            y, pull_back = self._pulled(*given)
        else:
            known, rest = jax.tree.leaves(given), iter(kept)
            leaves = [next(rest) if role is None else known[role] for role in self.roles]
            pull_back = jax.tree.unflatten(self.structure, leaves)
        is_last = (self.s == self.p - 1) & (r == self.v - 1)
        sums, gradient = self._when(is_last, lambda: self._loss_gradient(sums, y, k), (sums, arrived))
        chunk_gradient, gradient = pull_back(gradient)
        chunks, shared = sums.grads
        chunks = jax.tree.map(lambda total, g: total.at[r].add(g.astype(total.dtype)), chunks, chunk_gradient)
        is_first = (self.s == 0) & (r == 0)
        shared = self._when(is_first, lambda: self._first_gradient(shared, gradient, k), shared)
        return sums._replace(grads=(chunks, shared)), gradient

    def _loss_gradient(self, sums: Sums, y: Any, k: jax.Array) -> tuple[Sums, Any]:
        def last(shared: Any, y: Any) -> tuple[Any, Any]:
            loss, weight, aux = self.loss.last(shared, y, *self._microbatch(k))
            return loss, (weight, aux)

        (loss, (weight, aux)), (shared, gradient) = jax.value_and_grad(last, argnums=(0, 1), has_aux=True)(self.shared, y)
        sums = self._with_loss(sums, (loss, weight, aux))
        return sums._replace(grads=(sums.grads[0], _added(sums.grads[1], shared))), gradient

    def _first_gradient(self, shared: Any, gradient: Any, k: jax.Array) -> Any:
        _, pull_back = jax.vjp(lambda shared: self.loss.first(shared, *self._microbatch(k)), self.shared)
        return _added(shared, pull_back(gradient)[0])

    def _with_loss(self, sums: Sums, found: tuple[Any, Any, Any]) -> Sums:
        loss, weight, aux = jax.tree.map(accumulator, found)
        return sums._replace(loss=sums.loss + loss, weight=sums.weight + weight, aux=jax.tree.map(jnp.add, sums.aux, aux))

    def _first(self, k: Any) -> Any:
        return self.loss.first(self.shared, *self._microbatch(k))

    def _stage(self, chunk: Any, x: Any, k: Any, r: Any) -> Any:
        return self.loss.stage(chunk, x, *self._microbatch(k), self._first_layer(r))

    def _first_layer(self, r: Any) -> Any:
        return (r * self.p + self.s) * self.chunk_size

    def _last(self, y: Any, k: Any) -> tuple[Any, Any, Any]:
        return self.loss.last(self.shared, y, *self._microbatch(k))

    def _microbatch(self, k: Any) -> tuple[Any, Any]:
        tree = (self.batch_KR, self.keys_KR)
        return self._slot(tree, k)  # type: ignore[no-any-return]

    def _chunk(self, r: Any) -> Any:
        return self._slot(self.chunks, r)

    def _example_x(self) -> Any:
        return jax.eval_shape(self._first, 0)

    def _example_kept(self, x: Any) -> Any:
        return jax.eval_shape(lambda: self._forward(self._chunk(0), x, 0, 0)[1])

    def _slot(self, ring: Any, slot: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), ring)

    def _stashed(self, ring: Any, unit: jax.Array, stash: Any, is_real: jax.Array) -> Any:
        slot = unit % self.ring_size
        return jax.tree.map(lambda ring, x: ring.at[slot].set(jnp.where(is_real, x, ring[slot])), ring, stash)

    def _pass_on(self, x: Any, step: int) -> Any:
        return jax.lax.ppermute(x, STAGE, [(s, (s + step) % self.p) for s in range(self.p)])

    def _when(self, condition: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
        """Return what this stage computes if it has something to do."""
        if self.skips:
            return jax.lax.cond(condition, compute, lambda: otherwise)
        return jax.tree.map(lambda a, b: jnp.where(condition, a, b), compute(), otherwise)

    def _on_all(self, condition: jax.Array, compute: Callable[[], Any], otherwise: Any) -> Any:
        """Return what is computed if any stage has something to do: all stages take the same branch."""
        return compute() if self.skips else jax.lax.cond(condition, compute, lambda: otherwise)


def _added(total: Any, more: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)
