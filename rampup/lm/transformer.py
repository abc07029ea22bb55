"""A decoder-only Transformer in Flax, its layers stacked so that they can be scanned, sharded and pipelined.

Pre-norm blocks of grouped-query attention with rotary positions and a gated feed-forward layer.
Shape suffixes: B rows, T positions, E width, H query heads, G key/value heads, N query heads per key/value head, D head width,
S positions attended to, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.errors import ConfigError
from rampup.plan.numbers import nearest_multiples
from rampup.run.mesh import FSDP, STAGE, TENSOR, constrain, replicated
from rampup.run.pipeline import PipelinedLoss

REMAT_POLICIES = {
    "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "full": jax.checkpoint_policies.nothing_saveable,
}
KEEP_POLICIES = {"nothing": None, "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims}
_LAYER_SPECS = {
    "query": (FSDP, TENSOR, None),
    "key": (FSDP, TENSOR, None),
    "value": (FSDP, TENSOR, None),
    "out": (TENSOR, None, FSDP),
    "gate": (FSDP, TENSOR),
    "up": (FSDP, TENSOR),
    "down": (TENSOR, FSDP),
}


class Block(nn.Module):
    """One layer: attention and feed-forward, each with its norm and residual connection.

    Attributes:
        num_heads, num_kv_heads, mlp_dim: sizes H, G and F.
        dropout_rate: fraction of the output of attention and of the feed-forward layer that training drops.
        dtype: dtype of the activations.
        param_dtype: dtype of the parameters.
    """

    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    dropout_rate: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x_BTE: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Return the layer's output. `keys_B`, one random key per row, turns dropout on."""
        width = x_BTE.shape[-1]
        head_dim = width // self.num_heads
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dense: dict[str, Any] = {"use_bias": False, **types}

        h_BTE = nn.RMSNorm(name="attention_norm", **types)(x_BTE)
        q_BTHD = nn.DenseGeneral((self.num_heads, head_dim), name="query", **dense)(h_BTE)
        k_BTGD = nn.DenseGeneral((self.num_kv_heads, head_dim), name="key", **dense)(h_BTE)
        v_BTGD = nn.DenseGeneral((self.num_kv_heads, head_dim), name="value", **dense)(h_BTE)
        mixed_BTHD = causal_attention(_rotate(q_BTHD), _rotate(k_BTGD), v_BTGD)
        h_BTE = nn.DenseGeneral(width, axis=(-2, -1), name="out", **dense)(mixed_BTHD)
        x_BTE = x_BTE + self._drop(h_BTE, keys_B, 0)

        h_BTE = nn.RMSNorm(name="mlp_norm", **types)(x_BTE)
        h_BTF = nn.silu(nn.Dense(self.mlp_dim, name="gate", **dense)(h_BTE)) * nn.Dense(self.mlp_dim, name="up", **dense)(h_BTE)
        h_BTE = nn.Dense(width, name="down", **dense)(h_BTF)
        return x_BTE + self._drop(h_BTE, keys_B, 1)

    def _drop(self, h_BTE: jax.Array, keys_B: jax.Array | None, part: int) -> jax.Array:
        if self.dropout_rate == 0 or keys_B is None:
            return h_BTE
        keep = 1 - self.dropout_rate
        kept = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, part), keep, h_BTE.shape[1:]))(keys_B)
        return jnp.where(kept, h_BTE / keep, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """The sizes of a model, and its functions.

    Attributes:
        num_layers, width, mlp_dim, num_heads, num_kv_heads, vocab_size: L, E, F, H, G and V.
        tied: use the embedding as the output layer.
        dropout_rate: see `Block`.
        dtype: dtype of the activations, `float32` or `bfloat16`.
        param_dtype: dtype of the parameters.
        remat_policy: `none`, `minimal` or `full`.
        activations: sharding of the activations (B, T, E) of one replica, or None to leave it to the compiler.

    Example:
        >>> model = LanguageModel(num_layers=1, width=8, mlp_dim=16, num_heads=2, num_kv_heads=1, vocab_size=11)
        >>> params = model.init(jax.random.key(0))
        >>> model.logits(params, jnp.zeros((3, 5), jnp.int32)).shape, model.num_parameters
        ((3, 5, 11), 776)
    """

    num_layers: int
    width: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    activations: NamedSharding | None = None

    @property
    def block(self) -> Block:
        """The Flax module of one layer."""
        return Block(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            mlp_dim=self.mlp_dim,
            dropout_rate=self.dropout_rate,
            dtype=jnp.dtype(self.dtype),
            param_dtype=jnp.dtype(self.param_dtype),
        )

    @property
    def num_parameters(self) -> int:
        """Total number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))))

    def flops_per_sample(self, length: int) -> int:
        """Return the floating-point operations of a training step on one sample.

        For each token, 6 for each parameter of a matrix product and 12 · layers · width · length for its attention
        (Chowdhery et al., "PaLM", 2022, appendix B). Activations that `remat_policy` recomputes are not counted, and causal
        attention counts as much as full attention.

        Args:
            length: tokens of the sample.
        """
        # An embedding look-up is no matrix product, and norms are too small to count.
        looked_up = 0 if self.tied else self.vocab_size * self.width
        norms = (2 * self.num_layers + 1) * self.width
        per_token = 6 * (self.num_parameters - looked_up - norms) + 12 * self.num_layers * self.width * length
        return length * per_token

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return new parameters: `embedding`, `layers` (stacked, L in front), `final_norm` and, unless tied, `head`."""
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        dtype = jnp.dtype(self.param_dtype)
        example = jnp.zeros((1, 2, self.width), dtype)
        init_layer = lambda layer_key: self.block.init(layer_key, example)["params"]  # noqa: E731
        params = {
            "embedding": 0.02 * jax.random.normal(embedding_key, (self.vocab_size, self.width), dtype),
            "layers": jax.vmap(init_layer)(jax.random.split(layers_key, self.num_layers)),
            "final_norm": jnp.ones((self.width,), dtype),
        }
        if not self.tied:
            params["head"] = jax.random.normal(head_key, (self.width, self.vocab_size), dtype) / np.sqrt(self.width)
        return params

    def embed(self, params: Mapping[str, Any], tokens_BT: jax.Array) -> jax.Array:
        """Return the input of the first layer."""
        embedding, sharding = params["embedding"].astype(self.dtype), self.activations
        if sharding is None:
            return embedding[tokens_BT]
        # Gathered first, as fsdp does with every weight: a look-up in a table sharded over two axes aborts XLA's partitioner.
        return constrain(constrain(embedding, replicated(sharding.mesh))[tokens_BT], sharding)

    def apply_layers(
        self, layers: Any, x_BTE: jax.Array, keys_B: jax.Array | None = None, *, first_layer: Any = 0
    ) -> jax.Array:
        """Apply stacked layers one after the other; `first_layer` is the number of the first one."""

        def apply(x_BTE: jax.Array, numbered: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
            layer, number = numbered
            keys = None if keys_B is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)
            return self.block.apply({"params": layer}, x_BTE, keys), None

        if self.remat_policy != "none":
            apply = jax.checkpoint(apply, policy=REMAT_POLICIES[self.remat_policy])
        numbers = first_layer + jnp.arange(jax.tree.leaves(layers)[0].shape[0])
        return jax.lax.scan(apply, x_BTE, (layers, numbers))[0]

    def head(self, params: Mapping[str, Any], x_BTE: jax.Array) -> jax.Array:
        """Return the logits (B, T, V), in at least float32."""
        x_BTE = nn.RMSNorm(dtype=jnp.dtype(self.dtype)).apply({"params": {"scale": params["final_norm"]}}, x_BTE)
        kernel = params["embedding"].T if self.tied else params["head"]
        logits_BTV = x_BTE @ kernel.astype(self.dtype)
        return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))

    def logits(self, params: Mapping[str, Any], tokens_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Return the logits (B, T, V) of every next token."""
        return self.head(params, self.apply_layers(params["layers"], self.embed(params, tokens_BT), keys_B))

    def loss(
        self, params: Mapping[str, Any], batch: Mapping[str, jax.Array], rngs: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return (sum of cross entropies, tokens that count, {}) over rows {"tokens": (B, T+1), "length": (B,)}."""
        tokens = batch["tokens"].astype(jnp.int32)
        logits_BTV = self.logits(params, tokens[:, :-1], rngs if self.dropout_rate else None)
        return (*cross_entropy(logits_BTV, tokens[:, 1:], batch["length"]), {})

    def pipelined(self, num_repeats: int, *, keep: str = "nothing") -> PipelinedLoss:
        """Return the loss as the parts that pipeline stages run.

        Args:
            num_repeats: layer chunks per stage.
            keep: what a stage keeps of a microbatch for its backward pass besides its input: `nothing`, or `dots` (the results
                of matrix products).
        """

        def first(params: Mapping[str, Any], batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
            return self.embed(params, batch["tokens"][:, :-1].astype(jnp.int32))

        def stage(layers: Any, x_BTE: jax.Array, batch: Any, rngs: jax.Array, first_layer: Any) -> jax.Array:
            return self.apply_layers(layers, x_BTE, rngs if self.dropout_rate else None, first_layer=first_layer)

        def last(params: Mapping[str, Any], x_BTE: jax.Array, batch: Mapping[str, jax.Array], rngs: jax.Array) -> Any:
            targets_BT = batch["tokens"][:, 1:].astype(jnp.int32)
            return (*cross_entropy(self.head(params, x_BTE), targets_BT, batch["length"]), {})

        return PipelinedLoss(first=first, stage=stage, last=last, num_repeats=num_repeats, remat_policy=KEEP_POLICIES[keep])

    def on(self, mesh: Mesh) -> LanguageModel:
        """Return the model for a mesh: activations are sharded by rows over fsdp and replicated otherwise.

        The model then runs on the rows of one replica. The training step handles data parallelism.
        """
        return replace(self, activations=NamedSharding(mesh, PartitionSpec(FSDP)))

    def shardings(self, mesh: Mesh) -> dict[str, Any]:
        """Return the shardings of the parameters over the stage, fsdp and tensor axes.

        Raises:
            ConfigError: these axes do not divide a size.
        """
        self._check_divisible(mesh)
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

    def _check_divisible(self, mesh: Mesh) -> None:
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
                    f"{key}={size} must be a multiple of the devices on the axes {' and '.join(axes)}, {ways}",
                    key=key,
                    nearest=nearest_multiples(size, ways),
                )


def causal_attention(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array) -> jax.Array:
    """Return softmax(q k / sqrt(D)) v over this and earlier positions. G divides H; the softmax is in at least float32."""
    B, T, H, D = q_BTHD.shape
    q_BTGND = q_BTHD.reshape(B, T, k_BTGD.shape[2], -1, D) / np.sqrt(D).astype(q_BTHD.dtype)
    logits_BGNTS = jnp.einsum("btgnd,bsgd->bgnts", q_BTGND, k_BTGD)
    logits_BGNTS = logits_BGNTS.astype(jnp.promote_types(logits_BGNTS.dtype, jnp.float32))
    past_TS = np.tril(np.ones((T, T), bool))
    weights_BGNTS = jax.nn.softmax(jnp.where(past_TS, logits_BGNTS, -jnp.inf), axis=-1).astype(v_BTGD.dtype)
    return jnp.einsum("bgnts,bsgd->btgnd", weights_BGNTS, v_BTGD).reshape(B, T, H, D)


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (sum of -log p(target), number of targets that count). The first `length` targets of a row count."""
    counts_BT = jnp.arange(targets_BT.shape[1]) < length_B[:, None]
    # A sum over the vocabulary instead of a gather, which stays local if the vocabulary is sharded over the tensor axis.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    log_p_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), -1) - jax.nn.logsumexp(logits_BTV, -1)
    return -jnp.sum(jnp.where(counts_BT, log_p_BT, 0)), jnp.sum(counts_BT).astype(log_p_BT.dtype)


def _rotate(x_BTHD: jax.Array) -> jax.Array:
    """Apply the rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""
    half = x_BTHD.shape[-1] // 2
    frequency = 10_000 ** (-np.arange(half) / half)
    angle_TD = np.arange(x_BTHD.shape[1])[:, None] * frequency
    cos, sin = (jnp.asarray(f(angle_TD)[:, None, :], x_BTHD.dtype) for f in (np.cos, np.sin))
    a, b = x_BTHD[..., :half], x_BTHD[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
