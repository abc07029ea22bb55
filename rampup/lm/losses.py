"""The cross entropy of a language model, from all logits at once or from some columns of the vocabulary at a time.

Shape suffixes: B rows, T positions, E width, V vocabulary, N tiles, C columns of one tile, P parts of the vocabulary on several
devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sum of -log p(target), number of targets that count). The first `length` targets of a row count."""
    # A sum over the vocabulary instead of a gather, which stays local if the vocabulary is sharded over the tensor axis.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    log_p_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), -1) - jax.nn.logsumexp(logits_BTV, -1)
    return _sum_over_targets(log_p_BT, length_B)


def tiled_cross_entropy(
    x_BTE: jax.Array,
    kernel_EV: jax.Array,
    targets_BT: jax.Array,
    length_B: jax.Array,
    *,
    num_tiles: int,
    prepare: Callable[[jax.Array], jax.Array],
    num_parts: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Return `cross_entropy` of the logits x @ kernel, of which only one tile of the vocabulary exists at a time.

    The backward pass computes each tile again, one more matrix product. The tiles are of the vocabulary and not of the
    positions, so that each tile of the kernel is gathered, and its gradient reduced, only once.

    Args:
        x_BTE: the output of the last layer, normalized.
        kernel_EV: the output matrix, as stored.
        targets_BT, length_B: see `cross_entropy`.
        num_tiles: tiles; times `num_parts` it divides V.
        prepare: converts a part (E, ...) of the stored matrix for the product, such as to another type.
        num_parts: devices that the vocabulary is sharded over. A tile takes as many columns from each.
    """
    V = kernel_EV.shape[1]
    # The gradient of x is the sum over all tiles; in this type it is summed.
    x_BTE, dtype = x_BTE.astype(jnp.promote_types(x_BTE.dtype, jnp.float32)), x_BTE.dtype

    def tiles(columns: jax.Array) -> jax.Array:
        return jnp.moveaxis(columns.reshape(*columns.shape[:-1], num_parts, num_tiles, -1), -2, 0)

    @jax.checkpoint
    def of_tile(x_BTE: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kernel_EPC, tokens_PC = tile
        logits_BTPC = jnp.einsum("bte,epc->btpc", x_BTE.astype(dtype), prepare(kernel_EPC)).astype(x_BTE.dtype)
        is_target_BTPC = targets_BT[..., None, None] == tokens_PC
        return jnp.sum(jnp.where(is_target_BTPC, logits_BTPC, 0), (-2, -1)), jax.nn.logsumexp(logits_BTPC, (-2, -1))

    def scan_tile(carry: Any, tile: Any) -> Any:
        return carry, of_tile(x_BTE, tile)

    target_NBT, norm_NBT = jax.lax.scan(scan_tile, None, (tiles(kernel_EV), tiles(jnp.arange(V))))[1]
    return _sum_over_targets(jnp.sum(target_NBT, 0) - jax.nn.logsumexp(norm_NBT, 0), length_B)


def _sum_over_targets(log_p_BT: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    counts_BT = jnp.arange(log_p_BT.shape[1]) < length_B[:, None]
    return -jnp.sum(jnp.where(counts_BT, log_p_BT, 0)), jnp.sum(counts_BT).astype(log_p_BT.dtype)
