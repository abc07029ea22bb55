"""Measures the gradient noise scale inside a training step; see
`rampup.plan.noise_scale` for the estimator.

A block is one microbatch on one replica. Its gradient is there anyway, so all that a
step needs in addition is the sum of its squares. Those of the replicas travel with the
loss, in the reduction at the end of the step. Along axes that shard the parameters
(fsdp, tensor), each shard keeps a partial sum of its own, and these are added once,
together with those of |g|^2.

G_j is the gradient sum of block j and W_j its weight. S is the trace of the gradient's
covariance, and G2 the square of the true gradient.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    BatchAxes,
    auto_view,
    axes_of,
    axis_names,
    constrain,
    wide_axes,
)
from rampup.engine.sums import safe_reciprocal
from rampup.plan.noise_scale import noise_trace


class NoiseSums(NamedTuple):
    """Sums over the blocks of a step."""

    squares: jax.Array  # of |G_j|^2 / W_j and of |G_j|^2: (2, *shards)
    blocks: jax.Array  # number of those with a weight


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeter:
    """Measures squares of gradients with the given shardings."""

    shardings: tuple[Any, ...]
    axes: tuple[str, ...]  # along which each shard keeps a partial sum
    mesh: Mesh

    @classmethod
    def of(cls, shardings: Any, mesh: Mesh, batch_axes: BatchAxes) -> NoiseMeter:
        """Return the meter of gradients with these shardings; of none, the compiler
        adds up each sum of squares by itself.
        """
        axes = _used_axes(shardings, mesh)
        return cls(
            shardings=tuple(jax.tree.leaves(shardings)),
            axes=tuple(name for name in axes if name not in batch_axes.replica),
            mesh=mesh,
        )

    def squares(self, grads: Any) -> jax.Array:
        """Return the sum of squares of a gradient: one partial sum per shard."""
        squares = [jnp.real(x * jnp.conj(x)) for x in jax.tree.leaves(grads)]
        if not self.axes:
            return sum(map(jnp.sum, squares))
        parts = map(self._partial_sums, squares, self.shardings)
        by_shard = NamedSharding(auto_view(self.mesh), PartitionSpec(*self.axes))
        return constrain(sum(parts), by_shard)

    def block(self, grads: Any, weight: jax.Array) -> NoiseSums:
        """Return the sums over one block from its gradient sum and its weight."""
        squares = self.squares(grads)
        # A block without weight has no gradient and does not count.
        has_weight = weight != 0
        sums = squares * safe_reciprocal(weight), squares * has_weight
        return NoiseSums(jnp.stack(sums), has_weight.astype(squares.dtype))

    def metrics(
        self, noise: NoiseSums, grads: Any, weight: jax.Array
    ) -> dict[str, Any]:
        """Return `grad_norm` and `gradient_noise` of a step from its sums; S and G2 of
        fewer than two blocks are NaN.
        """
        # Sums over the same shards at the same time are one collective, together with
        # those of a clipping of the gradient. If the replicas have parts of the
        # gradient (ZeRO-1), the compiler adds up the squares as it does for the
        # clipping.
        is_scattered = _used_axes(self.shardings, self.mesh) != self.axes
        meter = replace(self, axes=()) if is_scattered else self
        # A gradient in 2 x 2 parts, with the sum of squares that each device has of its own part:
        #
        #               fsdp 0   fsdp 1
        #     tensor 0     a        b         squares[n] = [[a, b],
        #     tensor 1     c        d                       [c, d]]       total[n] = (a + c) + (b + d)
        #
        over = tuple(range(1, noise.squares.ndim))
        divided, squares = jnp.sum(noise.squares, axis=over)
        norm = jnp.sum(meter.squares(grads))
        blocks = jnp.where(noise.blocks > 1, noise.blocks, jnp.nan)
        trace, squared_norm = noise_trace(divided, weight, norm, blocks)
        found = {
            "trace": trace,
            "squared_norm": squared_norm,
            "squares": squares,
            "blocks": noise.blocks,
        }
        return {"grad_norm": jnp.sqrt(norm), "gradient_noise": found}

    def _partial_sums(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Return the sum of an array as one partial sum per shard, an array
        (*shards).
        """
        shape: list[int] = []
        names: list[str] = []
        rest: list[int] = []
        for size, entry in itertools.zip_longest(x.shape, sharding.spec):
            own = [name for name in axis_names(entry) if name in self.axes]
            shards = [self.mesh.shape[name] for name in own]
            names += own
            shape += shards
            rest.append(len(shape))
            shape.append(size // math.prod(shards))
        found = jnp.sum(x.reshape(shape), axis=tuple(rest))
        # An equal part of the sum is on each of the shards along the other axes.
        others = [name for name in self.axes if name not in names]
        names += others
        found = found.reshape(*found.shape, *[1] * len(others))
        found = found.transpose([names.index(name) for name in self.axes])
        parts = math.prod(self.mesh.shape[name] for name in others)
        sizes = tuple(self.mesh.shape[name] for name in self.axes)
        return jnp.broadcast_to(found / parts, sizes)


def _used_axes(shardings: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several devices that shardings name."""
    used = axes_of(shardings)
    return tuple(name for name in wide_axes(mesh) if name in used)
