"""Causal attention: as plain arrays on every backend, and on TPU with JAX's splash attention kernel.

The plain form keeps the logits of all pairs of positions, so its memory grows with the square of the sequence. The kernel never
has more than a tile of them, so its memory is linear.

Shape suffixes: B rows, T positions, S positions attended to, H query heads, G key/value heads, N query heads per key/value
head, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from rampup.engine.mesh import FSDP, TENSOR, auto_view

# The kernel works on whole tiles of positions, of the largest of these sizes that divides the sequence.
TILES = (512, 256, 128)


def attend(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, *, kind: str, mesh: Mesh | None) -> jax.Array:
    """Return the causal attention of each query, (B, T, H, D). G divides H.

    The kinds `flash` and `autoselected` use the kernel if the mesh is of TPUs and the sequence is of whole tiles, and are
    `dot_product` otherwise. `mesh` has the devices that the program is compiled for, or is None if they are not known.
    """
    on_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    if kind == "dot_product" or not on_tpu or q_BTHD.shape[1] % TILES[-1]:
        return causal_attention(q_BTHD, k_BTGD, v_BTGD)
    assert mesh is not None
    # XLA cannot partition a kernel: it runs in a function that is manual over every axis, also over those of size 1.
    context = jax.sharding.get_abstract_mesh()
    automatic = {str(name) for name in mesh.axis_names} - {*context.manual_axes}
    if not automatic:
        return splash_attention(q_BTHD, k_BTGD, v_BTGD)
    spec = PartitionSpec(*(name if name in automatic else None for name in (FSDP, "", TENSOR)))
    run = jax.shard_map(
        splash_attention,
        mesh=None if context.manual_axes else auto_view(mesh),
        axis_names=automatic,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    return run(q_BTHD, k_BTGD, v_BTGD)


def causal_attention(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    """Return softmax(q k / sqrt(D)) v over this and earlier positions. G divides H; the softmax is in at least float32."""
    return masked_attention(q_BTHD, k_BTGD, v_BTGD, np.tril(np.ones((q_BTHD.shape[1],) * 2, bool)))


def masked_attention(q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, mask_TS: Any) -> jax.Array:
    """Return softmax(q k / sqrt(D)) v over the positions that a mask allows, which is broadcast to (B, G, N, T, S)."""
    B, T, H, D = q_BTHD.shape
    q_BTGND = q_BTHD.reshape(B, T, k_BSGD.shape[2], -1, D) / np.sqrt(D).astype(q_BTHD.dtype)
    logits_BGNTS = jnp.einsum("btgnd,bsgd->bgnts", q_BTGND, k_BSGD)
    logits_BGNTS = logits_BGNTS.astype(jnp.promote_types(logits_BGNTS.dtype, jnp.float32))
    weights_BGNTS = jax.nn.softmax(jnp.where(mask_TS, logits_BGNTS, -jnp.inf), axis=-1).astype(v_BSGD.dtype)
    return jnp.einsum("bgnts,bsgd->btgnd", weights_BGNTS, v_BSGD).reshape(B, T, H, D)


def splash_attention(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Return the same as `causal_attention` of the arrays of one device, by JAX's splash attention. T is a multiple of 128.

    With `interpret`, the kernel runs on any backend, slowly, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, length, num_heads, D = q_BTHD.shape
    tile = next(size for size in TILES if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    tiles = splash_attention_kernel.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), tile))
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * num_heads)
    options = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    kernel = splash_attention_kernel.make_splash_mha(mask, block_sizes=tiles, **options)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q_BTHD / math.sqrt(D), k_BTGD, v_BTGD)]
    mixed_BHTD: jax.Array = jax.vmap(kernel)(*heads_first)
    return mixed_BHTD.transpose(0, 2, 1, 3)
