"""Leaving out an optimizer step whose numbers went bad, inside the compiled step and without asking the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def all_finite(*trees: Any) -> jax.Array:
    """Return whether every floating-point number is finite, as a traced bool.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.int32(3)})), bool(all_finite(jnp.array([1.0, jnp.nan])))
        (True, False)
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.array(True)


def zero_unless(good: jax.Array, tree: Any) -> Any:
    """Return a tree, or zeros of its shape; a product with 0 would keep what is not finite."""
    return jax.tree.map(lambda x: jnp.where(good, x, jnp.zeros_like(x)), tree)


def chosen(good: jax.Array, new: Any, old: Any) -> Any:
    """Return the new tree, or the old one where the step is left out.

    What only counts steps for a schedule is always the new one, so that a learning rate keeps to its step: the states of
    `optax.scale_by_schedule` and the counts of `optax.inject_hyperparams`.

    Args:
        good: a traced bool.
        new, old: parameters or an optimizer's state, before and after the step.
    """

    def of(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _has_schedules(new):
            return new._replace(inner_state=chosen(good, new.inner_state, old.inner_state))
        return jnp.where(good, new, old)

    return jax.tree.map(of, new, old, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState) or _has_schedules(x))


def _has_schedules(state: Any) -> bool:
    return hasattr(state, "hyperparams") and hasattr(state, "inner_state") and hasattr(state, "_replace")
