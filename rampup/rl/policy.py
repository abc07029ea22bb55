"""The models of an RL run: what generation and the losses need of a policy, for rampup's own, Flax linen and NNX models.

Also the critic of PPO: rampup's language model with a value in place of the logits.

A row of tokens is a prompt and its response without a gap, then padding. A model must be causal, so that padding after a row
does not change it.

Shape suffixes: B rows, T tokens of a row, P tokens of a padded prompt, E width, V vocabulary, S slots of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import BatchAxes, auto_view, replicated
from rampup.errors import ConfigError, a_type
from rampup.lm.decode import decode, packed_hidden, prefill
from rampup.lm.transformer import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model as pure functions of its parameters.

    Attributes:
        logits: `(params, tokens_BT) -> logits_BTV`, of every next token.
        packed: `(params, tokens_BT, positions_BT, segments_BT) -> logits_BTV`, for rows of several sequences. None: the model
            cannot be packed.
        prefill: `(params, tokens_BP, length_B, num_slots) -> (logits_BV, cache)`, which reads the prompts.
        decode: `(params, cache, token_B, position_B) -> (logits_BV, cache)`, which reads one token per row. Without both,
            generation runs the whole row for every token.
    """

    logits: Callable[[Any, jax.Array], jax.Array]
    packed: Callable[..., jax.Array] | None = None
    prefill: Callable[..., tuple[jax.Array, Any]] | None = None
    decode: Callable[..., tuple[jax.Array, Any]] | None = None


def as_policy(model: Any) -> Policy:
    """Return the policy of a model.

    Args:
        model: a `Policy`, rampup's `LanguageModel`, a Flax linen module whose call maps tokens (B, T) to logits (B, T, V), or
            a function `(params, tokens) -> logits`. For a Flax NNX module use `split_policy`.

    Raises:
        ConfigError: something else.
    """
    if isinstance(model, Policy):
        return model
    if isinstance(model, LanguageModel):

        def packed(params: Any, tokens_BT: jax.Array, positions_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
            return model.head(params, packed_hidden(model, params, tokens_BT, positions_BT, segments_BT))

        return Policy(logits=model.logits, packed=packed, prefill=partial(prefill, model), decode=partial(decode, model))
    if isinstance(model, nn.Module):
        apply: Any = model.apply
        return Policy(logits=lambda params, tokens_BT: apply({"params": params}, tokens_BT))
    if isinstance(model, nnx.Module):
        raise ConfigError("an NNX model contains its parameters; use policy, params = split_policy(model)", key="model")
    if callable(model):
        return Policy(logits=model)
    raise ConfigError(f"{a_type(model)} is no policy; give a Flax module or a function (params, tokens) -> logits", key="model")


def split_policy(model: nnx.Module, *, wrt: Any = nnx.Param) -> tuple[Policy, Any]:
    """Return the policy of a Flax NNX model, whose call maps tokens (B, T) to logits (B, T, V), and its parameters.

    Args:
        model: the model. Variables that are not trained keep their values, so dropout must be off.
        wrt: the variables to train, as in `nnx.Optimizer`.

    Example:
        >>> class Bigram(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.table = nnx.Embed(5, 5, rngs=rngs)
        ...     def __call__(self, tokens):
        ...         return self.table(tokens)
        >>> policy, params = split_policy(Bigram(nnx.Rngs(0)))
        >>> policy.logits(params, jnp.zeros((2, 3), jnp.int32)).shape
        (2, 3, 5)
    """
    if not isinstance(model, nnx.Module):
        raise ConfigError(f"split_policy takes a Flax NNX module and not {a_type(model)}", key="model")
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def logits(params: Any, tokens_BT: jax.Array) -> jax.Array:
        # Copied: an NNX variable may only be written in the trace in which it was created.
        kept = jax.tree.map(lambda leaf: leaf, rest)
        return nnx.merge(graphdef, params, kept)(tokens_BT)  # type: ignore[no-any-return,operator]

    return Policy(logits=logits), params


def over_rows(model: Any, mesh: Mesh) -> Policy:
    """Return the policy of a model for programs whose rows the compiler spreads over the mesh, as generation."""
    if isinstance(model, LanguageModel):
        model = replace(model, activations=NamedSharding(auto_view(mesh), PartitionSpec(BatchAxes.of(mesh).rows)))
    return as_policy(model)


def in_replica(model: Any, mesh: Mesh) -> Policy:
    """Return the policy of a model for the training step, in which a replica sees its own rows."""
    return as_policy(model.on(auto_view(mesh)) if isinstance(model, LanguageModel) else model)


def token_log_probabilities(logits_BTV: jax.Array, targets_BT: jax.Array, temperature: Any = 1.0) -> jax.Array:
    """Return log p(target) under softmax(logits / temperature), in at least float32.

    Example:
        >>> token_log_probabilities(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2), jnp.int32)).round(3).tolist()
        [[-1.3860000371932983, -1.3860000371932983]]
    """
    logits_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32)) / temperature
    # A sum over the vocabulary instead of a gather, which stays local if the vocabulary is sharded over the tensor axis.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), -1) - jax.nn.logsumexp(logits_BTV, -1)


ValuesFn = Callable[[Any, Mapping[str, jax.Array]], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """A value function: `(params, rows) -> values_BT`, the value before the token after each token of `rows["tokens"]`."""

    spread: ValuesFn  # for programs whose rows the compiler spreads over the mesh
    in_replica: ValuesFn  # for the training step, in which a replica sees its own rows


def critic_of(model: LanguageModel, mesh: Mesh) -> Critic:
    """Return the critic with the layers of a language model."""
    rows = NamedSharding(auto_view(mesh), PartitionSpec(BatchAxes.of(mesh).rows))
    return Critic(spread=_values_of(replace(model, activations=rows)), in_replica=_values_of(model.on(auto_view(mesh))))


def critic_params(model: LanguageModel, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return the critic's parameters before training: a policy's layers, and a value of 0 everywhere."""
    kept = {name: params[name] for name in ("embedding", "layers", "final_norm")}
    value = jnp.zeros((model.width,), jnp.dtype(model.param_dtype))
    return kept | {"value": jax.device_put(value, replicated(mesh))}


def _values_of(model: LanguageModel) -> ValuesFn:
    def values(params: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
        if "segments" in rows:
            x_BTE = packed_hidden(model, params, rows["tokens"], rows["positions"], rows["segments"])
        else:
            x_BTE = model.apply_layers(params["layers"], model.embed(params, rows["tokens"]))
        x_BTE = nn.RMSNorm(dtype=jnp.dtype(model.dtype)).apply({"params": {"scale": params["final_norm"]}}, x_BTE)
        values_BT = x_BTE @ params["value"].astype(model.dtype)
        return values_BT.astype(jnp.promote_types(values_BT.dtype, jnp.float32))

    return values
