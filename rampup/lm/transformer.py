"""A decoder-only Transformer in Flax, its layers stacked so that they can be scanned,
sharded and pipelined, and its decoding.

Pre-norm blocks of grouped-query attention with rotary positions and a gated
feed-forward layer. Attention is of plain arrays, or on TPU by JAX's splash attention
kernel.

In decoding, a row is a prompt and its response without a gap, then padding: a position
is the same number with and without the cache, which has one slot per position. A slot
may contain anything, and is masked, until it is written.

Shape suffixes: B rows, T positions, E width, H query heads, G key/value heads, N query
heads per key/value head, D head width, S positions attended to or slots of the cache, F
feed-forward width, V vocabulary, L layers; N tiles of the vocabulary, C columns of one
tile, P parts of the vocabulary on several devices; in decoding, P positions of a padded
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.accumulate import AccumulatedLoss
from rampup.engine.mesh import (
    FSDP,
    STAGE,
    TENSOR,
    auto_view,
    constrain,
    manual_size,
    replicated,
)
from rampup.engine.pipeline import PipelinedLoss
from rampup.errors import ConfigError
from rampup.plan.numbers import divisors, nearest_in, nearest_multiples

# The attention kernel works on whole tiles of positions, of the largest of these sizes
# that divides the sequence.
TILES = (512, 256, 128)
# Weights as they are used, gathered from all devices of the fsdp axis. They are
# gathered again in the backward pass.
GATHERED = "gathered_weights"
# The names of a layer's activations.
_QKV = ("query_proj", "key_proj", "value_proj")
_OUT = "out_proj"
# Names and meanings are MaxText's: what the backward pass finds and does not compute
# again, beside the input of a layer.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.save_anything_except_these_names(GATHERED),
    "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "save_dot_except_mlp": jax.checkpoint_policies.save_only_these_names(*_QKV, _OUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# From queries, keys and values of one layer to the mixed values (B, T, H, D) and
# anything else.
Mixer = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
_LAYER_SPECS = {
    **dict.fromkeys(("query", "key", "value"), (FSDP, TENSOR, None)),
    "out": (TENSOR, None, FSDP),
    **dict.fromkeys(("gate", "up"), (FSDP, TENSOR)),
    "down": (TENSOR, FSDP),
}
# The matrices of a layer for Muon: which dimensions are those of their input and of
# their output, after that of the layers.
_MATRICES = {
    **dict.fromkeys(("query", "key", "value"), ((1,), (2, 3))),
    "out": ((1, 2), (3,)),
    **dict.fromkeys(("gate", "up", "down"), ((1,), (2,))),
}
# The keys of base.yml and rl.yml for attributes of a model that are not named like
# them.
_KEYS = {
    "num_layers": "base_num_decoder_layers",
    "width": "base_emb_dim",
    "mlp_dim": "base_mlp_dim",
    "num_heads": "base_num_query_heads",
    "tied": "logits_via_embedding",
    "param_dtype": "weight_dtype",
}


def matrices(params: Any) -> Any:
    """Return the matrices among a model's parameters, for
    `make_optimizer(kind="muon")`: those of the layers.
    """

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [getattr(entry, "key", None) for entry in path]
        found = _MATRICES.get(names[-2]) if "layers" in names else None
        return found and optax.contrib.MuonDimensionNumbers(*found)

    return jax.tree.map_with_path(of_leaf, params)


class Block(nn.Module):
    """One layer of a model: attention and feed-forward, each with its norm and residual
    connection.
    """

    model: LanguageModel

    @nn.compact
    def __call__(
        self,
        x_BTE: jax.Array,
        keys_B: jax.Array | None = None,
        mixer: Mixer | None = None,
    ) -> Any:
        """Return the layer's output; with a `mixer` instead of causal attention, also
        its second result.

        `keys_B`, one random key per row, turns dropout on.
        """
        model, width = self.model, x_BTE.shape[-1]
        head_dim = width // model.num_heads
        types = {
            "dtype": jnp.dtype(model.dtype),
            "param_dtype": jnp.dtype(model.param_dtype),
        }
        dense = {"use_bias": False, **types}

        h_BTE = nn.RMSNorm(name="attention_norm", **types)(x_BTE)
        projected = [
            nn.DenseGeneral((heads, head_dim), name=name, **dense)(h_BTE)
            for name, heads in (
                ("query", model.num_heads),
                ("key", model.num_kv_heads),
                ("value", model.num_kv_heads),
            )
        ]
        q_BTHD, k_BTGD, v_BTGD = map(checkpoint_name, projected, _QKV)
        if mixer is None:
            mesh = None if model.activations is None else model.activations.mesh
            mixed_BTHD = attend(
                rotate(q_BTHD), rotate(k_BTGD), v_BTGD, kind=model.attention, mesh=mesh
            )
        else:
            mixed_BTHD, extra = mixer(q_BTHD, k_BTGD, v_BTGD)
        h_BTE = nn.DenseGeneral(width, axis=(-2, -1), name="out", **dense)(mixed_BTHD)
        x_BTE = x_BTE + self._drop(checkpoint_name(h_BTE, _OUT), keys_B, 0)

        h_BTE = nn.RMSNorm(name="mlp_norm", **types)(x_BTE)
        gate_BTF, up_BTF = (
            nn.Dense(model.mlp_dim, name=name, **dense)(h_BTE)
            for name in ("gate", "up")
        )
        h_BTF = nn.silu(gate_BTF) * up_BTF
        h_BTE = nn.Dense(width, name="down", **dense)(h_BTF)
        x_BTE = x_BTE + self._drop(h_BTE, keys_B, 1)
        return x_BTE if mixer is None else (x_BTE, extra)

    def _drop(self, h_BTE: jax.Array, keys_B: jax.Array | None, part: int) -> jax.Array:
        if self.model.dropout_rate == 0 or keys_B is None:
            return h_BTE
        keep = 1 - self.model.dropout_rate
        kept = jax.vmap(
            lambda key: jax.random.bernoulli(
                jax.random.fold_in(key, part), keep, h_BTE.shape[1:]
            )
        )(keys_B)
        return jnp.where(kept, h_BTE / keep, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """The sizes of a model, L, E, F, H, G and V, and its functions."""

    num_layers: int
    width: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False  # use the embedding as the output layer
    # fraction of the output of each part of a layer that training drops
    dropout_rate: float = 0.0
    dtype: str = "float32"  # of the activations
    param_dtype: str = "float32"
    remat_policy: str = "none"  # one of `REMAT_POLICIES`
    attention: str = "dot_product"  # see `attend`
    # the loss holds the logits of one of these tiles of the vocabulary at a time
    num_vocab_tiling: int = 1
    # (B, T, E) of one replica; None leaves it to the compiler
    activations: NamedSharding | None = None

    @classmethod
    def from_config(cls, config: Any, **others: Any) -> LanguageModel:
        """Return the model that a configuration describes; `others` are attributes for
        which that of rl.yml has no key.
        """
        keys = {field.name: _KEYS.get(field.name, field.name) for field in fields(cls)}
        return cls(
            **{
                name: getattr(config, key)
                for name, key in keys.items()
                if hasattr(config, key)
            }
            | others
        )

    @property
    def num_parameters(self) -> int:
        """Total number of parameters."""
        return sum(
            leaf.size
            for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0)))
        )

    def flops_per_sample(self, length: int) -> int:
        """Return the floating-point operations of a training step on one sample, after
        Chowdhery et al., "PaLM", 2022, appendix B.

        Activations that `remat_policy` recomputes are not counted, and causal attention
        counts as much as full attention.
        """
        # An embedding look-up is no matrix product, and norms are too small to count.
        looked_up = 0 if self.tied else self.vocab_size * self.width
        norms = (2 * self.num_layers + 1) * self.width
        per_token = (
            6 * (self.num_parameters - looked_up - norms)
            + 12 * self.num_layers * self.width * length
        )
        return length * per_token

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return new parameters: `embedding`, `layers` (stacked, L in front),
        `final_norm` and, unless tied, `head`.
        """
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        dtype = jnp.dtype(self.param_dtype)
        example = jnp.zeros((1, 2, self.width), dtype)

        def init_layer(layer_key):
            return Block(self).init(layer_key, example)["params"]

        params = {
            "embedding": (
                0.02
                * jax.random.normal(embedding_key, (self.vocab_size, self.width), dtype)
            ),
            "layers": jax.vmap(init_layer)(
                jax.random.split(layers_key, self.num_layers)
            ),
            "final_norm": jnp.ones((self.width,), dtype),
        }
        if not self.tied:
            head_EV = jax.random.normal(head_key, (self.width, self.vocab_size), dtype)
            params["head"] = head_EV / np.sqrt(self.width).astype(dtype)
        return params

    def embed(self, params: Mapping[str, Any], tokens_BT: jax.Array) -> jax.Array:
        """Return the input of the first layer."""
        embedding = params["embedding"].astype(self.dtype)
        sharding = self.activations
        if sharding is None:
            return embedding[tokens_BT]
        if manual_size(FSDP) > 1:
            # Each device has some columns of the table. It looks them up for the tokens
            # of all devices, and each device then gets the other columns of its own
            # tokens: the rows travel and not the table, nor its gradient.
            columns = embedding[jax.lax.all_gather(tokens_BT, FSDP, axis=0, tiled=True)]
            return constrain(
                jax.lax.all_to_all(
                    columns, FSDP, split_axis=0, concat_axis=2, tiled=True
                ),
                sharding,
            )
        # Gathered first, as fsdp does with every weight: a look-up in a table sharded
        # over two axes aborts XLA's partitioner.
        return constrain(
            constrain(embedding, replicated(sharding.mesh))[tokens_BT], sharding
        )

    def apply_layers(
        self,
        layers: Any,
        x_BTE: jax.Array,
        keys_B: jax.Array | None = None,
        *,
        first_layer: Any = 0,
    ) -> jax.Array:
        """Apply stacked layers one after the other; `first_layer` is the number of the
        first one.
        """

        def gather_whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            spec = _LAYER_SPECS.get(path[0].key, ())
            return self._gather(leaf, spec.index(FSDP)) if FSDP in spec else leaf

        def apply(
            x_BTE: jax.Array, numbered: tuple[Any, jax.Array]
        ) -> tuple[jax.Array, None]:
            layer, number = numbered
            keys = (
                None
                if keys_B is None
                else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)
            )
            if manual_size(FSDP) > 1:  # see `sharded_loss`
                layer = jax.tree_util.tree_map_with_path(gather_whole, layer)
            return Block(self).apply({"params": layer}, x_BTE, keys), None

        if self.remat_policy != "none" or manual_size(FSDP) > 1:
            apply = jax.checkpoint(apply, policy=REMAT_POLICIES[self.remat_policy])
        num_layers = jax.tree.leaves(layers)[0].shape[0]
        numbers = first_layer + jnp.arange(num_layers)
        return jax.lax.scan(
            apply,
            x_BTE,
            (layers, numbers),
        )[0]

    def head(self, params: Mapping[str, Any], x_BTE: jax.Array) -> jax.Array:
        """Return the logits (B, T, V), in at least float32."""
        logits_BTV = self._normalize(params, x_BTE) @ self._gather(
            self._head_kernel(params), 0
        )
        return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))

    def head_loss(
        self,
        params: Mapping[str, Any],
        x_BTE: jax.Array,
        targets_BT: jax.Array,
        length_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the cross entropy and its weight, from the output of the last
        layer.
        """
        if self.num_vocab_tiling == 1:

            def of_logits(
                params: Mapping[str, Any], x_BTE: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
                return cross_entropy(self.head(params, x_BTE), targets_BT, length_B)

            if manual_size(FSDP) > 1:
                of_logits = jax.checkpoint(of_logits, policy=REMAT_POLICIES["none"])
            return of_logits(params, x_BTE)
        on_mesh = self.activations is not None and not self.tied
        return tiled_cross_entropy(
            self._normalize(params, x_BTE),
            self._head_kernel(params),
            targets_BT,
            length_B,
            num_tiles=self.num_vocab_tiling,
            prepare=lambda kernel: self._gather(kernel, 0),
            num_parts=self.activations.mesh.shape[TENSOR] if on_mesh else 1,  # type: ignore[union-attr]
        )

    def _normalize(self, params: Mapping[str, Any], x_BTE: jax.Array) -> jax.Array:
        norm = nn.RMSNorm(dtype=jnp.dtype(self.dtype))
        return norm.apply({"params": {"scale": params["final_norm"]}}, x_BTE)  # type: ignore[no-any-return]

    def _head_kernel(self, params: Mapping[str, Any]) -> jax.Array:
        return params["embedding"].T if self.tied else params["head"]

    def _gather(self, weights: jax.Array, axis: int) -> jax.Array:
        """Return weights for use, in the type of the activations and whole along the
        fsdp axis.
        """
        weights = weights.astype(self.dtype)
        if manual_size(FSDP) == 1:
            return weights
        whole = jax.lax.all_gather(weights, FSDP, axis=axis, tiled=True)
        return checkpoint_name(whole, GATHERED)

    def logits(self, params: Mapping[str, Any], tokens_BT: jax.Array) -> jax.Array:
        """Return the logits (B, T, V) of every next token."""
        x_BTE = self.apply_layers(params["layers"], self.embed(params, tokens_BT))
        return self.head(params, x_BTE)

    def loss(
        self,
        params: Mapping[str, Any],
        batch: Mapping[str, jax.Array],
        keys_B: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return (sum of cross entropies, tokens that count, {}) over rows {"tokens":
        (B, T+1), "length": (B,)}.
        """
        tokens = batch["tokens"].astype(jnp.int32)
        x_BTE = self.embed(params, tokens[:, :-1])
        x_BTE = self.apply_layers(
            params["layers"], x_BTE, keys_B if self.dropout_rate else None
        )
        return (*self.head_loss(params, x_BTE, tokens[:, 1:], batch["length"]), {})

    def sharded_loss(self, mesh: Mesh) -> AccumulatedLoss:
        """Return the loss that gathers each layer's weights over fsdp where it uses
        them, and scatters their gradients.
        """
        # Left to itself, the compiler may gather the activations of all rows.
        return AccumulatedLoss(
            self.loss,
            param_shardings=self.shardings(mesh) if mesh.shape[FSDP] > 1 else None,
        )

    def pipelined(self, num_repeats: int) -> PipelinedLoss:
        """Return the loss as the parts that pipeline stages run, each with
        `num_repeats` chunks of layers.
        """

        def first(
            params: Mapping[str, Any], batch: Mapping[str, jax.Array], keys_B: jax.Array
        ) -> jax.Array:
            return self.embed(params, batch["tokens"][:, :-1].astype(jnp.int32))

        def stage(
            layers: Any,
            x_BTE: jax.Array,
            batch: Any,
            keys_B: jax.Array,
            first_layer: Any,
        ) -> jax.Array:
            return self.apply_layers(
                layers,
                x_BTE,
                keys_B if self.dropout_rate else None,
                first_layer=first_layer,
            )

        def last(
            params: Mapping[str, Any],
            x_BTE: jax.Array,
            batch: Mapping[str, jax.Array],
            keys_B: jax.Array,
        ) -> Any:
            targets_BT = batch["tokens"][:, 1:].astype(jnp.int32)
            return (*self.head_loss(params, x_BTE, targets_BT, batch["length"]), {})

        return PipelinedLoss(
            first=first,
            stage=stage,
            last=last,
            num_repeats=num_repeats,
        )

    def on(self, mesh: Mesh) -> LanguageModel:
        """Return the model for the rows of one replica of a mesh: activations are
        sharded by rows over fsdp.
        """
        return replace(self, activations=NamedSharding(mesh, PartitionSpec(FSDP)))

    def shardings(self, mesh: Mesh) -> dict[str, Any]:
        """Return the shardings of the parameters over stage, fsdp and tensor, or refuse
        axes that do not divide a size.
        """
        rules = (
            ("base_num_decoder_layers", self.num_layers, (STAGE,)),
            ("base_emb_dim", self.width, (FSDP, TENSOR)),
            ("base_num_query_heads", self.num_heads, (TENSOR,)),
            ("base_num_kv_heads", self.num_kv_heads, (TENSOR,)),
            ("base_mlp_dim", self.mlp_dim, (TENSOR,)),
            ("vocab_size", self.vocab_size, (TENSOR,)),
        )
        for key, size, axes in rules:
            ways = math.prod(mesh.shape[axis] for axis in axes)
            if size % ways:
                raise ConfigError(
                    f"{key}={size} must be a multiple of the devices on the axes"
                    f" {' and '.join(axes)}, {ways}",
                    key=key,
                    nearest=nearest_multiples(size, ways),
                )
        parts = 1 if self.tied else mesh.shape[TENSOR]
        if self.vocab_size % (parts * self.num_vocab_tiling):
            raise ConfigError(
                f"vocab_size={self.vocab_size} must be a multiple of"
                f" num_vocab_tiling={self.num_vocab_tiling} times the devices on the"
                f" tensor axis, {parts}",
                key="num_vocab_tiling",
                nearest=nearest_in(
                    self.num_vocab_tiling, divisors(self.vocab_size // parts)
                ),
            )
        layers = jax.eval_shape(self.init, jax.random.key(0))["layers"]

        def of_layer(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            spec = _LAYER_SPECS.get(path[0].key, (None,) * (leaf.ndim - 1))
            return NamedSharding(mesh, PartitionSpec(STAGE, *spec))

        shardings = {
            "embedding": NamedSharding(mesh, PartitionSpec(None, (FSDP, TENSOR))),
            "layers": jax.tree_util.tree_map_with_path(of_layer, layers),
            "final_norm": NamedSharding(mesh, PartitionSpec()),
        }
        if not self.tied:
            shardings["head"] = NamedSharding(mesh, PartitionSpec(FSDP, TENSOR))
        return shardings


def attend(
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    *,
    kind: str,
    mesh: Mesh | None,
) -> jax.Array:
    """Return the causal attention of each query, (B, T, H, D), by the kernel on TPUs
    unless the kind is `dot_product`.

    The memory of the kernel is linear in T. `mesh` has the devices to compile for, or
    is None if they are not known.
    """
    on_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    if kind == "dot_product" or not on_tpu or q_BTHD.shape[1] % TILES[-1]:
        return causal_attention(q_BTHD, k_BTGD, v_BTGD)
    assert mesh is not None
    # XLA cannot partition a kernel: it runs in a function that is manual over every
    # axis, also over those of size 1.
    context = jax.sharding.get_abstract_mesh()
    automatic = {str(name) for name in mesh.axis_names} - {*context.manual_axes}
    if not automatic:
        return splash_attention(q_BTHD, k_BTGD, v_BTGD)
    spec = PartitionSpec(
        *(name if name in automatic else None for name in (FSDP, "", TENSOR))
    )
    run = jax.shard_map(
        splash_attention,
        mesh=None if context.manual_axes else auto_view(mesh),
        axis_names=automatic,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    return run(q_BTHD, k_BTGD, v_BTGD)


def causal_attention(
    q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array
) -> jax.Array:
    """Return softmax(q k / sqrt(D)) v over this and earlier positions. G divides H; the
    softmax is in at least float32.
    """
    return masked_attention(
        q_BTHD, k_BTGD, v_BTGD, np.tril(np.ones((q_BTHD.shape[1],) * 2, bool))
    )


def masked_attention(
    q_BTHD: jax.Array, k_BSGD: jax.Array, v_BSGD: jax.Array, mask_TS: Any
) -> jax.Array:
    """Return softmax(q k / sqrt(D)) v over the positions that a mask allows, which is
    broadcast to (B, G, N, T, S).
    """
    B, T, H, D = q_BTHD.shape
    q_BTGND = q_BTHD.reshape(B, T, k_BSGD.shape[2], -1, D) / np.sqrt(D).astype(
        q_BTHD.dtype
    )
    logits_BGNTS = jnp.einsum("btgnd,bsgd->bgnts", q_BTGND, k_BSGD)
    logits_BGNTS = logits_BGNTS.astype(
        jnp.promote_types(logits_BGNTS.dtype, jnp.float32)
    )
    weights_BGNTS = jax.nn.softmax(
        jnp.where(mask_TS, logits_BGNTS, -jnp.inf), axis=-1
    ).astype(v_BSGD.dtype)
    return jnp.einsum("bgnts,bsgd->btgnd", weights_BGNTS, v_BSGD).reshape(B, T, H, D)


def splash_attention(
    q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Return the same as `causal_attention` of the arrays of one device, by JAX's
    splash attention. T is a multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    _, length, num_heads, D = q_BTHD.shape
    tile = next(size for size in TILES if length % size == 0)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
        "block_q_dq",
        "block_kv_dq",
    )
    tiles = splash_attention_kernel.BlockSizes(**dict.fromkeys(names, tile))
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((length, length))] * num_heads
    )
    kernel = splash_attention_kernel.make_splash_mha(
        mask,
        block_sizes=tiles,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    heads_first = [
        x.transpose(0, 2, 1, 3) for x in (q_BTHD / math.sqrt(D), k_BTGD, v_BTGD)
    ]
    mixed_BHTD = jax.vmap(kernel)(*heads_first)
    return mixed_BHTD.transpose(0, 2, 1, 3)


def rotate(
    x_BTHD: jax.Array, positions_BT: jax.Array | None = None, length: int | None = None
) -> jax.Array:
    """Apply the rotary position embedding (Su et al. 2021, arXiv 2104.09864), at
    positions below `length` or from 0 on.
    """
    half = x_BTHD.shape[-1] // 2
    angle_TD = np.arange(length or x_BTHD.shape[1])[:, None] * 10_000 ** (
        -np.arange(half) / half
    )
    tables = [jnp.asarray(f(angle_TD), x_BTHD.dtype) for f in (np.cos, np.sin)]
    cos, sin = (
        x[:, None] if positions_BT is None else x[positions_BT][:, :, None]
        for x in tables
    )
    a, b = x_BTHD[..., :half], x_BTHD[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of -log p(target), number of targets that count). The first `length`
    targets of a row count.
    """
    # A sum over the vocabulary instead of a gather, which stays local if the vocabulary
    # is sharded over the tensor axis.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    log_p_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), -1) - jax.nn.logsumexp(
        logits_BTV, -1
    )
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
    """Return `cross_entropy` of the logits x @ prepare(kernel), holding those of one
    tile of the vocabulary at a time.

    Tiles of the vocabulary and not of the positions, so that each tile of the kernel is
    gathered, and its gradient reduced, only once. If V is sharded over `num_parts`
    devices, a tile takes as many columns from each: `num_tiles * num_parts` divides V.
    """
    V = kernel_EV.shape[1]
    # The gradient of x is the sum over all tiles; in this type it is summed.
    x_BTE, dtype = (
        x_BTE.astype(jnp.promote_types(x_BTE.dtype, jnp.float32)),
        x_BTE.dtype,
    )

    def tiles(columns: jax.Array) -> jax.Array:
        return jnp.moveaxis(
            columns.reshape(*columns.shape[:-1], num_parts, num_tiles, -1), -2, 0
        )

    @jax.checkpoint
    def of_tile(
        x_BTE: jax.Array, tile: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        kernel_EPC, tokens_PC = tile
        logits_BTPC = jnp.einsum(
            "bte,epc->btpc", x_BTE.astype(dtype), prepare(kernel_EPC)
        ).astype(x_BTE.dtype)
        is_target_BTPC = targets_BT[..., None, None] == tokens_PC
        return jnp.sum(
            jnp.where(is_target_BTPC, logits_BTPC, 0), (-2, -1)
        ), jax.nn.logsumexp(logits_BTPC, (-2, -1))

    target_NBT, norm_NBT = jax.lax.map(
        lambda tile: of_tile(x_BTE, tile), (tiles(kernel_EV), tiles(jnp.arange(V)))
    )
    return _sum_over_targets(
        jnp.sum(target_NBT, 0) - jax.nn.logsumexp(norm_NBT, 0), length_B
    )


def _sum_over_targets(
    log_p_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    counts_BT = jnp.arange(log_p_BT.shape[1]) < length_B[:, None]
    return -jnp.sum(jnp.where(counts_BT, log_p_BT, 0)), jnp.sum(counts_BT).astype(
        log_p_BT.dtype
    )


class Cache(NamedTuple):
    """Keys, rotated to their positions, and values of every layer: (L, B, S, G, D)
    each.
    """

    keys: jax.Array
    values: jax.Array


def prefill(
    model: LanguageModel,
    params: Mapping[str, Any],
    tokens_BP: jax.Array,
    length_B: jax.Array,
    num_slots: int,
) -> tuple[jax.Array, Cache]:
    """Read prompts of at least one token, padded after their end; return the logits (B,
    V) of the next token and the cache.

    `num_slots`, S, is the tokens of the longest prompt plus those to generate.
    """
    B, P = tokens_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        k = rotate(k, positions_BP, num_slots)
        mixed = masked_attention(
            rotate(q, positions_BP, num_slots), k, v, np.tril(np.ones((P, P), bool))
        )
        return mixed, Cache(
            *(jnp.pad(x, ((0, 0), (0, num_slots - P), (0, 0), (0, 0))) for x in (k, v))
        )

    x_BPE, cache = jax.lax.scan(
        lambda x, layer: Block(model).apply({"params": layer}, x, None, attend),
        model.embed(params, tokens_BP),
        params["layers"],
    )
    last_B1E = jnp.take_along_axis(x_BPE, (length_B - 1)[:, None, None], axis=1)
    return model.head(params, last_B1E)[:, 0], cache


def decode(
    model: LanguageModel,
    params: Mapping[str, Any],
    cache: Cache,
    token_B: jax.Array,
    position_B: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Read one token per row, at its position; return the logits (B, V) of the next one
    and the cache with it.
    """
    num_slots = cache.keys.shape[2]
    slots_BS = jnp.arange(num_slots) == position_B[:, None]
    seen = (jnp.arange(num_slots) <= position_B[:, None])[:, None, None, None, :]

    def apply(x_B1E: jax.Array, numbered: tuple[Any, Cache]) -> tuple[jax.Array, Cache]:
        layer, old = numbered

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            # A selection instead of a scatter, which the compiler would gather the rows
            # of all devices for.
            k = rotate(k, position_B[:, None], num_slots)
            new = Cache(
                *(
                    jnp.where(slots_BS[..., None, None], x, kept)
                    for x, kept in zip((k, v), old, strict=True)
                )
            )
            return (
                masked_attention(rotate(q, position_B[:, None], num_slots), *new, seen),
                new,
            )

        return Block(model).apply({"params": layer}, x_B1E, None, attend)  # type: ignore[no-any-return]

    x_B1E, cache = jax.lax.scan(
        apply, model.embed(params, token_B[:, None]), (params["layers"], cache)
    )
    return model.head(params, x_B1E)[:, 0], cache


def packed_hidden(
    model: LanguageModel,
    params: Mapping[str, Any],
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
) -> jax.Array:
    """Return the output of the last layer (B, T, E) for rows of several sequences,
    numbered by `segments_BT`.
    """
    T = tokens_BT.shape[1]
    same = (segments_BT[:, :, None] == segments_BT[:, None, :]) & np.tril(
        np.ones((T, T), bool)
    )
    mask = same[:, None, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        return (
            masked_attention(
                rotate(q, positions_BT, T), rotate(k, positions_BT, T), v, mask
            ),
            None,
        )

    return jax.lax.scan(
        lambda x, layer: Block(model).apply({"params": layer}, x, None, attend),
        model.embed(params, tokens_BT),
        params["layers"],
    )[0]
