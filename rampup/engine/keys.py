"""Random keys: one per row, that does not depend on how a batch is split."""

from __future__ import annotations

import jax


def random_key(seed: int) -> jax.Array:
    """Return a threefry key: with `rbg`, a row's random numbers depend on the rows that
    are drawn together with it.
    """
    return jax.random.key(seed, impl="threefry2x32")


def per_row_keys(seed: jax.Array, step: jax.Array, rows_KR: jax.Array) -> jax.Array:
    """Return one random key per row, from a key `seed`, the optimizer step and the
    rows' indices (K, R) in the global batch.
    """
    base = jax.random.fold_in(seed, step)
    return jax.vmap(jax.vmap(lambda row: jax.random.fold_in(base, row)))(rows_KR)
