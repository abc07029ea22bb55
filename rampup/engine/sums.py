"""What a training step adds up over its microbatches (`Sums`), and how (`Recipe`), and
in which types it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rampup.errors import ConfigError

if TYPE_CHECKING:
    from rampup.engine.gradient_noise import NoiseMeter, NoiseSums


class Sums(NamedTuple):
    """Sums over the rows of a microbatch, of a replica while its loop runs, and in the
    end of an optimizer step.
    """

    # Gradient of `loss`, not of the mean, at least in float32, but in the loop in
    # `accumulator_dtype` if there is one. Sharded like the parameters, or with ZeRO-1
    # like each replica's part of them; or None.
    grads: Any
    loss: jax.Array
    # such as the number of tokens: integers are in float32, so exact up to 2**24
    weight: jax.Array
    aux: Any
    # the state that the loss function carries from microbatch to microbatch
    mutable: Any = None
    noise: NoiseSums | None = None  # over the blocks, if the gradient noise is measured

    @property
    def mean_loss(self) -> jax.Array:
        """Loss / weight, or 0 without weight."""
        return self.loss * safe_reciprocal(self.weight)

    def mean_grads(self, params: Any = None) -> Any:
        """Return the gradient of `mean_loss`: in the types of `params`, or by default
        in those of the sums.
        """
        scale = safe_reciprocal(self.weight)
        grads = jax.tree.map(lambda g: g * scale, self.grads)
        return grads if params is None else cast_like(grads, params)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a loss is given besides parameters and rows: what else to sum, and how. A
    pytree, as its arrays are arguments.
    """

    # what the loss function carries, as it is before the first microbatch
    mutable: Any = None
    noise: NoiseMeter | None = None  # measures the squares of the gradients
    # a factor of the mean loss while a microbatch is differentiated, which keeps small
    # gradients of float16 from vanishing; the sums have none
    scale: Any = None

    def aggregate(self, sums: Sums, names: tuple[str, ...]) -> Sums:
        """Return the sums over mesh axes. Call it in a function that is manual over
        them. `mutable` has its own collectives.
        """
        mutable = sums.mutable
        if mutable is not None:
            mutable = jax.tree.map(
                lambda x, start: _merge_replicas(x, start, names), mutable, self.mutable
            )
        return jax.lax.psum(sums._replace(mutable=None), names)._replace(
            mutable=mutable
        )


def _merge_replicas(x: Any, start: Any, names: tuple[str, ...]) -> Any:
    """Merge the replicas' values of a carried variable that began as `start`."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        # The mean of the changes: those of a constant are exactly 0, while the mean of
        # three equal numbers can be another number. An infinite start, such as that of
        # a running maximum, would make the change NaN. In float32: on CPUs, XLA aborts
        # if the replicas exchange bfloat16 and another axis of the mesh is automatic.
        start = as_summed(jnp.where(jnp.isfinite(start), start, 0))
        return (start + jax.lax.pmean(x - start, names)).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    # A counter or a flag. If the replicas kept different values, each would go on with
    # its own, and a resumed run with another.
    return jax.lax.pmax(x.astype(jnp.int32) if x.dtype == bool else x, names).astype(
        x.dtype
    )


def safe_reciprocal(weight: jax.Array) -> jax.Array:
    """Return 1 / weight, or 0 if the weight is 0, so that a batch without weight has a
    zero loss and a zero gradient.
    """
    # The inner `where` keeps the division by zero out of the branch that is not
    # selected.
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1), 0)


def as_summed(x: Any, dtype: Any = None) -> jax.Array:
    """Cast a value to the type in which it is summed; see `accumulator_type`."""
    x = jnp.asarray(x)
    return x.astype(accumulator_type(x.dtype, dtype))


def accumulator_type(dtype: Any, wanted: Any = None) -> Any:
    """Return the type in which values are summed: at least float32, integers too, or
    `wanted` for real floating-point ones.
    """
    if wanted is None or not jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return real_type(wanted)


def real_type(dtype: Any) -> Any:
    """Return a type of gradients, or refuse one that is not of real floating-point
    numbers.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"gradients cannot be summed or exchanged in {jnp.dtype(dtype).name}",
            fix="give a floating-point type, such as jnp.bfloat16 or jnp.float32",
            key="gradient_accumulator_dtype",
        )
    return dtype


def zeros_to_sum(tree: Any, dtype: Any = None) -> Any:
    """Return zeros for arrays, or their shapes, in the types in which they are summed;
    see `accumulator_type`.
    """
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, accumulator_type(x.dtype, dtype)), tree
    )


def cast_for_exchange(grads: Any, dtype: Any, mesh: Mesh) -> Any:
    """Return gradients in the type in which the replicas of a mesh exchange them; None
    = their own.
    """
    if dtype is not None:
        dtype = real_type(dtype)
        grads = jax.tree.map(
            lambda g: g.astype(dtype) if jnp.issubdtype(g.dtype, jnp.floating) else g,
            grads,
        )
    # Rounded, but in float32 on CPUs: XLA adds 16-bit numbers in float32 there, and
    # aborts if an axis of the mesh is automatic.
    return (
        jax.tree.map(as_summed, grads)
        if mesh.devices.flat[0].platform == "cpu"
        else grads
    )


def cast_like(tree: Any, like: Any) -> Any:
    """Return a tree with every leaf in the type of the corresponding leaf of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def is_floating(leaf: Any) -> bool:
    """Return whether JAX can differentiate with respect to an array, real or
    complex.
    """
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def check_trained(params: Any) -> None:
    """Refuse parameters that have no gradient, or not one to add up."""
    if isinstance(params, Mapping) and (key := "_overwrite_with_gradient") in params:
        raise ConfigError(
            f"params[{key!r}], of Flax's float8 layers, takes its gradients as new"
            " values, and a step sums them over microbatches",
            fix="use rampup.microbatches and rampup.multi_steps with a step of your"
            " own, or train in bfloat16",
            key="params",
        )
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ConfigError(
                f"params{jax.tree_util.keystr(path)} is {dtype.name}, and has no"
                " gradient",
                fix="make it floating-point, or give it as `frozen` of the state, which"
                " the loss function reads as its keyword argument `frozen`",
                key="params",
            )


def differing_leaves(
    before: Any,
    after: Any,
    fact: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
    **names: Any,
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and facts of each leaf whose facts differ in two trees, None if it is
    absent; `names` are for `keystr`.
    """
    trees = [
        jax.tree_util.tree_leaves_with_path(tree, is_leaf) for tree in (before, after)
    ]
    old, new = (
        {jax.tree_util.keystr(path, **names): fact(leaf) for path, leaf in leaves}
        for leaves in trees
    )
    for name in old | new:
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)
