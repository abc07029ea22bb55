"""Measures the gradient noise scale inside a training step; see `rampup.plan.noise_scale` for the estimator.

A block is one microbatch on one replica. Its gradient is there anyway, before it is added to those of the other microbatches.
So all that a step needs in addition is the sum of its squares. Three things keep that cheap:

- The sums of the replicas travel with the loss, in the reduction that a step has at its end.
- Along axes that shard the parameters (fsdp, tensor), a sum of squares would be a reduction per microbatch and array. So each
  shard keeps a partial sum of its own, and the partial sums are added once, together with those of |g|^2.
- The second geometry, that of Adam, weights the squares with the second moments that the optimizer has anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.plan.noise_scale import noise_trace
from rampup.run.mesh import STAGE, BatchAxes, auto_view, axis_names, constrain

# Adam's eps. Parameters whose second moment is 0 have had no gradient yet and no geometry; they are left out.
_EPS = 1e-8


class NoiseSums(NamedTuple):
    """Sums over the blocks of a step.

    Attributes:
        squares: sum of |G_j|^2 / W_j, an array (geometries, *shards): the Euclidean geometry, then Adam's if it is measured.
            Each shard of the parameters has a partial sum.
        blocks: number of blocks with a weight.
    """

    squares: jax.Array
    blocks: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeter:
    """Measures the squares of gradients on a mesh, without communication.

    Attributes:
        shardings: shardings of the gradients.
        axes: the mesh axes, with their sizes, over which a sum of squares is split into partial sums.
        mesh: the mesh.
        moments: Adam's second moments, for a second geometry: sum of x^2 / (sqrt(v) + eps). None: the Euclidean one alone.
    """

    shardings: Any
    axes: Mapping[str, int]
    mesh: Mesh
    moments: Any = None

    @classmethod
    def of(cls, shardings: Any, mesh: Mesh, batch_axes: BatchAxes | None = None, moments: Any = None) -> NoiseMeter:
        """Return the meter of gradients with these shardings; of none, the compiler adds up each sum of squares by itself."""
        used = _axes_of(shardings)
        outside = {*BatchAxes.of(mesh, batch_axes).replica, STAGE}
        axes = {str(name): mesh.shape[name] for name in mesh.axis_names if name in used}
        axes = {name: size for name, size in axes.items() if size > 1 and name not in outside}
        return cls(shardings=shardings, axes=axes, mesh=mesh, moments=moments)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shape of a sum of squares: one partial sum per shard."""
        return tuple(self.axes.values())

    def squares(self, grads: Any, moments: Any = None, shardings: Any = None, *, varying: jax.Array | None = None) -> jax.Array:
        """Return the sum of squares of a gradient in every geometry, (geometries, *shards).

        Args:
            grads: the gradient.
            moments: those of `grads`.
            shardings: shardings of `grads`, if they are a part of all.
            varying: in a loop over microbatches, a number that each has its own of.
        """
        shardings = self.shardings if shardings is None else shardings
        squares = jax.tree.map(lambda x: jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else jnp.square(x), grads)
        found = [self._add_up(squares, shardings)]
        if moments is not None:
            if varying is not None:
                # The compiler would move what depends on the moments alone out of the loop, into buffers as large as the
                # parameters. So they depend on the microbatch, though not on its gradient: all of it would have to be complete
                # and be read again, instead of once, where it is added to its sum.
                moments = jax.lax.optimization_barrier((moments, varying))[0]
                moments = jax.tree.map(self._keep_layout, moments)
            # A quotient, because the compiler for CPUs computes the factor 1 / sqrt(v) long before the gradient is there.
            scaled = jax.tree.map(lambda x, v: jnp.where(v > 0, x / jnp.sqrt(v.astype(x.dtype) + _EPS**2), 0), squares, moments)
            found.append(self._add_up(scaled, shardings))
        return jnp.stack(found)

    def block(self, grads: Any, weight: jax.Array, *, varying: jax.Array | None = None) -> NoiseSums:
        """Return the sums over one block, of which there are the gradient sum and the weight; see `squares` for `varying`."""
        squares = self.squares(grads, self.moments, varying=varying)
        return NoiseSums(*divide_by_weights(squares[..., None], weight[None]))

    def metrics(self, noise: NoiseSums, grads: Any, weight: jax.Array) -> dict[str, Any]:
        """Return S and G2 of a step in every geometry, as the metrics of a training step.

        Args:
            noise: the sums over its blocks.
            grads: the gradient of the mean loss, sharded as this meter expects, possibly over the replicas too.
            weight: the weight of the step.

        Returns:
            `grad_norm`, and `gradient_noise` with `trace`, `squared_norm`, `blocks` and, in Adam's geometry, `adam_trace` and
            `adam_squared_norm`. NaN with fewer than two blocks.
        """
        moments = self.moments
        used = _axes_of(self.shardings)
        sizes = {str(name): size for name, size in self.mesh.shape.items() if size > 1 and name in used}
        # Sums over the same shards at the same time are one collective, together with those of a clipping of the gradient. If
        # the replicas have parts of the gradient (ZeRO-1), the compiler adds up the squares as it does for the clipping.
        is_scattered = bool(sizes.keys() - self.axes.keys() - {STAGE})
        meter = replace(self, axes={} if is_scattered else sizes)
        q, norms = self._total(noise.squares), meter._total(meter.squares(grads, moments))
        if moments is not None:
            # The unit of Adam's geometry becomes that of the Euclidean one. Without it, the first steps, whose second moments
            # are too small by a factor, would count too much in an average. The noise scale is a ratio and keeps its value.
            exact = jax.tree.map(lambda v: v.astype(jnp.promote_types(v.dtype, jnp.float32)), moments)
            mean = meter._total(meter._add_up(exact, self.shardings)[None])[0]
            mean /= sum(v.size for v in jax.tree.leaves(moments))
            units = jnp.stack([jnp.ones_like(mean), jnp.sqrt(mean)])
            q, norms = q * units, norms * units
        trace, squared_norm = noise_trace(q, weight, norms, jnp.where(noise.blocks > 1, noise.blocks, jnp.nan))
        found = {"trace": trace[0], "squared_norm": squared_norm[0], "blocks": noise.blocks}
        if moments is not None:
            found |= {"adam_trace": trace[1], "adam_squared_norm": squared_norm[1]}
        return {"grad_norm": jnp.sqrt(norms[0]), "gradient_noise": found}

    def _add_up(self, squares: Any, shardings: Any) -> jax.Array:
        """Return the sum over all leaves, one partial sum per shard."""
        if not self.axes:
            return sum(map(jnp.sum, jax.tree.leaves(squares)))  # type: ignore[return-value]
        parts = jax.tree.leaves(jax.tree.map(self._partial_sums, squares, shardings))
        return constrain(sum(parts), NamedSharding(auto_view(self.mesh), PartitionSpec(*self.axes)))

    def _keep_layout(self, v: jax.Array) -> jax.Array:
        """Keep second moments on a TPU as they are outside of the loop, where they would otherwise be copied for all of it.

        The gradient of a microbatch often has its dimensions in another order, in which the compiler wants the moments too. So
        it transposes one array at a time, inside the loop. Not of shards: JAX 0.7 would gather them.
        """
        if self.axes or v.ndim < 2 or self.mesh.devices.flat[0].platform != "tpu":
            return v
        rows, columns = v.shape[-2:]
        # The last dimension is the inner one in memory if that takes no padding to tiles of 8 x 128.
        is_row_major = columns % 128 == 0 and (rows % 8 == 0 or 8 % rows == 0)
        return with_layout_constraint(v, Layout(tuple(range(v.ndim)))) if is_row_major else v

    def _total(self, parts: jax.Array) -> jax.Array:
        """Return the sums over the shards of partial sums (n, *shards)."""
        if len(self.axes) > 1 and STAGE in self.axes:
            # Over the stages last, as the compiler does for the norm of a clipping.
            parts = jnp.sum(parts, axis=tuple(range(1, parts.ndim - 1)))
            parts = constrain(parts, NamedSharding(auto_view(self.mesh), PartitionSpec(None, STAGE)))
        return jnp.sum(parts, axis=tuple(range(1, parts.ndim)))

    def _partial_sums(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Return the sum of an array as one partial sum per shard, an array (*shards)."""
        # Every sharded dimension is split into its shards and the rest. The sum over the rest is local to each shard.
        shape: list[int] = []
        names: list[str] = []
        rest: list[int] = []
        for size, entry in zip(x.shape, (*sharding.spec, *[None] * (x.ndim - len(sharding.spec))), strict=True):
            own = [name for name in axis_names(entry) if name in self.axes]
            names += own
            shape += [self.axes[name] for name in own]
            rest.append(len(shape))
            shape.append(size // math.prod(self.axes[name] for name in own))
        found = jnp.sum(x.reshape(shape), axis=tuple(rest))
        order = sorted(names, key=list(self.axes).index)
        return self._spread(found.transpose([names.index(name) for name in order])[None], tuple(order))[0]

    def _spread(self, x: jax.Array, names: tuple[str, ...]) -> jax.Array:
        """Return sums (n, *names) as (n, *shards), with an equal part of each on the shards along the other axes."""
        missing = [place for place, name in enumerate(self.axes, start=1) if name not in names]
        parts = math.prod(size for name, size in self.axes.items() if name not in names)
        return jnp.broadcast_to(jnp.expand_dims(x / parts, missing), (len(x), *self.shards))


def divide_by_weights(squares: jax.Array, weights: jax.Array) -> NoiseSums:
    """Return the sums over blocks, the last axis of both arguments. Blocks without weight have no gradient and do not count."""
    scale = jnp.where(weights != 0, 1 / jnp.where(weights != 0, weights, 1), 0)
    return NoiseSums(jnp.sum(squares * scale, axis=-1), jnp.sum(weights != 0).astype(jnp.float32))


def second_moments(opt_state: Any, params: Any) -> Any:
    """Return Adam's second moments in an optimizer's state, a tree like the parameters, or None if there is not one such tree.

    Example:
        >>> import optax
        >>> params = {"w": jnp.zeros(3)}
        >>> second_moments(optax.adamw(1e-3).init(params), params)["w"].shape
        (3,)
        >>> second_moments(optax.sgd(1e-3).init(params), params) is None
        True
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "nu"))
    found = [state.nu for state in states if hasattr(state, "nu")]
    # A part of the parameters, as with `optax.masked`, has another structure.
    return found[0] if len(found) == 1 and jax.tree.structure(found[0]) == jax.tree.structure(params) else None


def _axes_of(shardings: Any) -> set[str]:
    """Return the mesh axes that shardings name. That of an array on one device, outside of a mesh, names none."""
    return {name for leaf in jax.tree.leaves(shardings) for entry in getattr(leaf, "spec", ()) for name in axis_names(entry)}
