"""Decoding with a cache of keys and values, and packed rows, for the language model.

A row is a prompt and its response without a gap, then padding: a position is the same number with and without the cache. The
cache has one slot per position, which may contain anything, and is masked, until it is written.

Shape suffixes as in `rampup.lm.transformer`; P positions of a padded prompt, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rampup.lm.transformer import Block, LanguageModel, masked_attention, rotate


class Cache(NamedTuple):
    """Keys, rotated to their positions, and values of every layer: (L, B, S, G, D) each."""

    keys: jax.Array
    values: jax.Array


def prefill(
    model: LanguageModel, params: Mapping[str, Any], tokens_BP: jax.Array, length_B: jax.Array, num_slots: int
) -> tuple[jax.Array, Cache]:
    """Read prompts of at least one token, padded after their end; return the logits (B, V) of the next token and the cache.

    `num_slots`, S, is the tokens of the longest prompt plus those to generate.
    """
    B, P = tokens_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        k = rotate(k, positions_BP, num_slots)
        mixed = masked_attention(rotate(q, positions_BP, num_slots), k, v, np.tril(np.ones((P, P), bool)))
        return mixed, Cache(*(jnp.pad(x, ((0, 0), (0, num_slots - P), (0, 0), (0, 0))) for x in (k, v)))

    x_BPE, cache = jax.lax.scan(
        lambda x, layer: Block(model).apply({"params": layer}, x, None, attend),
        model.embed(params, tokens_BP),
        params["layers"],
    )
    last_B1E = jnp.take_along_axis(x_BPE, (length_B - 1)[:, None, None], axis=1)
    return model.head(params, last_B1E)[:, 0], cache


def decode(
    model: LanguageModel, params: Mapping[str, Any], cache: Cache, token_B: jax.Array, position_B: jax.Array
) -> tuple[jax.Array, Cache]:
    """Read one token per row, at its position; return the logits (B, V) of the next one and the cache with it."""
    num_slots = cache.keys.shape[2]
    slots_BS = jnp.arange(num_slots) == position_B[:, None]
    seen = (jnp.arange(num_slots) <= position_B[:, None])[:, None, None, None, :]

    def apply(x_B1E: jax.Array, numbered: tuple[Any, Cache]) -> tuple[jax.Array, Cache]:
        layer, old = numbered

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            # A selection instead of a scatter, which the compiler would gather the rows of all devices for.
            k = rotate(k, position_B[:, None], num_slots)
            new = Cache(*(jnp.where(slots_BS[..., None, None], x, kept) for x, kept in zip((k, v), old, strict=True)))
            return masked_attention(rotate(q, position_B[:, None], num_slots), *new, seen), new

        return Block(model).apply({"params": layer}, x_B1E, None, attend)  # type: ignore[no-any-return]

    x_B1E, cache = jax.lax.scan(apply, model.embed(params, token_B[:, None]), (params["layers"], cache))
    return model.head(params, x_B1E)[:, 0], cache


def packed_hidden(
    model: LanguageModel, params: Mapping[str, Any], tokens_BT: jax.Array, positions_BT: jax.Array, segments_BT: jax.Array
) -> jax.Array:
    """Return the output of the last layer (B, T, E) for rows of several sequences, numbered by `segments_BT`."""
    T = tokens_BT.shape[1]
    same = (segments_BT[:, :, None] == segments_BT[:, None, :]) & np.tril(np.ones((T, T), bool))
    mask = same[:, None, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        return masked_attention(rotate(q, positions_BT, T), rotate(k, positions_BT, T), v, mask), None

    return jax.lax.scan(
        lambda x, layer: Block(model).apply({"params": layer}, x, None, attend),
        model.embed(params, tokens_BT),
        params["layers"],
    )[0]
