"""Measures the gradient noise scale inside a training step; see
`rampup.plan.noise_scale` for the estimator.

A block is one microbatch on one replica. Its gradient is there anyway, so all that a
step needs in addition is the sum of its squares. Those of the replicas travel with the
loss, in the reduction at the end of the step. Along axes that shard the parameters
(fsdp, tensor), each shard keeps a partial sum of its own, and these are added once,
together with those of |g|^2.

A geometry is a way to square a gradient x: x^2 (Euclidean), or x^2 / sqrt(v) with
Adam's second moment v. G_j is the gradient sum of block j and W_j its weight. S is the
trace of the gradient's covariance, and G2 the square of the true gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    BatchAxes,
    auto_view,
    axes_of,
    axis_names,
    constrain,
)
from rampup.plan.noise_scale import noise_trace

# Adam's eps. Parameters whose second moment is 0 have had no gradient yet and no
# geometry; they are left out.
_EPS = 1e-8


class NoiseSums(NamedTuple):
    """Sums over the blocks of a step."""

    # Of |G_j|^2 / W_j and of |G_j|^2, in the Euclidean geometry and in Adam's if it is
    # measured: (2, geometries, *shards).
    squares: jax.Array
    blocks: jax.Array  # number of those with a weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseMeter:
    """Measures squares of gradients. A pytree of the arrays `moments`, Adam's second
    moments for a second geometry, or None.
    """

    shardings: tuple[Any, ...] = field(metadata={"static": True})
    axes: tuple[str, ...] = field(metadata={"static": True})
    mesh: Mesh = field(metadata={"static": True})
    moments: Any = None

    @classmethod
    def of(
        cls,
        shardings: Any,
        mesh: Mesh,
        batch_axes: BatchAxes | None = None,
        moments: Any = None,
    ) -> NoiseMeter:
        """Return the meter of gradients with these shardings; of none, the compiler
        adds up each sum of squares by itself.
        """
        used = axes_of(shardings)
        outside = BatchAxes.of(mesh, batch_axes).replica
        axes = tuple(
            str(name)
            for name, size in mesh.shape.items()
            if size > 1 and name in used and name not in outside
        )
        return cls(
            shardings=tuple(jax.tree.leaves(shardings)),
            axes=axes,
            mesh=mesh,
            moments=moments,
        )

    @property
    def shards(self) -> tuple[int, ...]:
        """The shape of a sum of squares: one partial sum per shard."""
        return tuple(self.mesh.shape[name] for name in self.axes)

    def squares(
        self,
        grads: Any,
        *,
        varying: jax.Array | None = None,
    ) -> jax.Array:
        """Return the sum of squares of a gradient in every geometry, (geometries,
        *shards).
        """
        moments = self.moments
        squares = jax.tree.map(
            lambda x: (
                jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else jnp.square(x)
            ),
            grads,
        )
        found = [self._add_up(squares)]
        if moments is not None:
            if varying is not None:
                # The compiler would move what depends on the moments alone out of the
                # loop, into buffers as large as the parameters. So they depend on the
                # microbatch, but not on its gradient, which would then be read twice.
                moments = jax.lax.optimization_barrier((moments, varying))[0]
                moments = jax.tree.map(self._keep_layout, moments)
            # A quotient, because the compiler for CPUs computes the factor 1 / sqrt(v)
            # long before the gradient is there.
            scaled = jax.tree.map(
                lambda x, v: jnp.where(
                    v > 0, x / jnp.sqrt(v.astype(x.dtype) + _EPS**2), 0
                ),
                squares,
                moments,
            )
            found.append(self._add_up(scaled))
        return jnp.stack(found)

    def block(
        self, grads: Any, weight: jax.Array, *, varying: jax.Array | None = None
    ) -> NoiseSums:
        """Return the sums over one block from its gradient sum and its weight; see
        `squares` for `varying`.
        """
        squares = self.squares(grads, varying=varying)
        # A block without weight has no gradient and does not count.
        has_weight = weight != 0
        scale = jnp.where(has_weight, 1 / jnp.where(has_weight, weight, 1), 0)
        sums = squares * scale, squares * has_weight
        return NoiseSums(jnp.stack(sums), has_weight.astype(jnp.float32))

    def metrics(
        self, noise: NoiseSums, grads: Any, weight: jax.Array
    ) -> dict[str, Any]:
        """Return `grad_norm` and `gradient_noise` of a step from its sums; S and G2 of
        fewer than two blocks are NaN.
        """
        moments = self.moments
        used = axes_of(self.shardings)
        axes = tuple(
            str(name)
            for name, size in self.mesh.shape.items()
            if size > 1 and name in used
        )
        # Sums over the same shards at the same time are one collective, together with
        # those of a clipping of the gradient. If the replicas have parts of the
        # gradient (ZeRO-1), the compiler adds up the squares as it does for the
        # clipping.
        is_scattered = not {*axes} <= {*self.axes}
        meter = replace(self, axes=() if is_scattered else axes)
        divided, squares = jnp.split(
            self._total(noise.squares.reshape(-1, *noise.squares.shape[2:])), 2
        )
        norms = meter._total(meter.squares(grads))
        if moments is not None:
            # The unit of Adam's geometry becomes that of the Euclidean one. Otherwise
            # the first steps, whose second moments are too small by a factor, would
            # count too much in an average. The noise scale is a ratio and keeps its
            # value.
            exact = jax.tree.map(
                lambda v: v.astype(jnp.promote_types(v.dtype, jnp.float32)), moments
            )
            mean = meter._total(meter._add_up(exact)[None])[0]
            mean /= sum(v.size for v in jax.tree.leaves(moments))
            units = jnp.stack([jnp.ones_like(mean), jnp.sqrt(mean)])
            divided, squares, norms = divided * units, squares * units, norms * units
        trace, squared_norm = noise_trace(
            divided, weight, norms, jnp.where(noise.blocks > 1, noise.blocks, jnp.nan)
        )
        found = {"blocks": noise.blocks}
        for geometry, prefix in enumerate(
            ("", "adam_") if moments is not None else ("",)
        ):
            own = {"trace": trace, "squared_norm": squared_norm, "squares": squares}
            found |= {prefix + name: values[geometry] for name, values in own.items()}
        return {"grad_norm": jnp.sqrt(norms[0]), "gradient_noise": found}

    def _add_up(self, squares: Any) -> jax.Array:
        """Return the sum over all leaves, one partial sum per shard."""
        if not self.axes:
            return sum(map(jnp.sum, jax.tree.leaves(squares)))
        parts = map(self._partial_sums, jax.tree.leaves(squares), self.shardings)
        return constrain(
            sum(parts), NamedSharding(auto_view(self.mesh), PartitionSpec(*self.axes))
        )

    def _keep_layout(self, v: jax.Array) -> jax.Array:
        """Keep second moments on a TPU as they are: transposed one by one in the loop,
        and not copied before it.
        """
        if self.axes or v.ndim < 2 or self.mesh.devices.flat[0].platform != "tpu":
            return v
        rows, columns = v.shape[-2:]
        # The last dimension is the inner one in memory if that takes no padding to
        # tiles of 8 x 128.
        is_row_major = columns % 128 == 0 and (rows % 8 == 0 or 8 % rows == 0)
        return (
            with_layout_constraint(v, Layout(tuple(range(v.ndim))))
            if is_row_major
            else v
        )

    def _total(self, parts: jax.Array) -> jax.Array:
        """Return the sums over the shards of partial sums (n, *shards)."""
        # A gradient in 2 x 2 parts, with the sum of squares that each device has of its own part:
        #
        #               fsdp 0   fsdp 1
        #     tensor 0     a        b         parts[n] = [[a, b],
        #     tensor 1     c        d                     [c, d]]       total[n] = (a + c) + (b + d)
        #
        return jnp.sum(parts, axis=tuple(range(1, parts.ndim)))

    def _partial_sums(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Return the sum of an array as one partial sum per shard, an array
        (*shards).
        """
        shape, names, rest = list[int](), list[str](), list[int]()
        for size, entry in zip(
            x.shape,
            (*sharding.spec, *[None] * (x.ndim - len(sharding.spec))),
            strict=True,
        ):
            own = [name for name in axis_names(entry) if name in self.axes]
            names += own
            shape += [self.mesh.shape[name] for name in own]
            rest.append(len(shape))
            shape.append(size // math.prod(self.mesh.shape[name] for name in own))
        found = jnp.sum(x.reshape(shape), axis=tuple(rest))
        order = sorted(names, key=self.axes.index)
        # An equal part of the sum is on each of the shards along the other axes.
        missing = [place for place, name in enumerate(self.axes) if name not in names]
        parts = math.prod(self.mesh.shape[self.axes[place]] for place in missing)
        found = found.transpose([names.index(name) for name in order]) / parts
        return jnp.broadcast_to(jnp.expand_dims(found, missing), self.shards)


def second_moments(opt_state: Any, params: Any) -> Any:
    """Return Adam's second moments in an optimizer's state, shaped like the parameters,
    or None. See `NoiseMeter.moments`.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "nu"))
    found = [state.nu for state in states if hasattr(state, "nu")]
    return (
        found[0]
        if len(found) == 1
        and jax.tree.structure(found[0]) == jax.tree.structure(params)
        else None
    )
