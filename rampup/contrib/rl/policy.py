"""The policy of an RL run, and the losses that train it.

A row of tokens is a prompt and its response without a gap, then padding. A model must
be causal, so that padding after a row does not change it.

A loss here is one for `rampup.train_step`: it returns the sum of the losses and the sum
of the weights, so that a mini batch has the same gradient however it is split, padded
or packed. `loss_rows` in `rampup.contrib.rl.experience` makes the rows; their
coefficients say how the losses of tokens add up. Entry t of a row is the prediction of
the token after token t.

Shape suffixes: B rows, T tokens of a row, P tokens of a padded prompt, E width, V
vocabulary, S slots of a cache.
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

from rampup.engine.contract import LossFn
from rampup.engine.mesh import BatchAxes, auto_view
from rampup.errors import ConfigError, a_type
from rampup.lm.transformer import LanguageModel, decode, packed_hidden, prefill

# Beyond it, the exponential of a difference of log-probabilities says nothing and may
# overflow.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model as pure functions of its parameters.

    Attributes:
        logits: `(params, tokens_BT) -> logits_BTV`, of every next token.
        packed: `(params, tokens_BT, positions_BT, segments_BT) -> logits_BTV`, for rows
            of several sequences. None: the model cannot be packed.
        prefill: `(params, tokens_BP, length_B, num_slots) -> (logits_BV, cache)`, which
            reads the prompts.
        decode: `(params, cache, token_B, position_B) -> (logits_BV, cache)`, which
            reads one token per row. Without both, generation runs the whole row for
            every token.
    """

    logits: Callable[[Any, jax.Array], jax.Array]
    packed: Callable[..., jax.Array] | None = None
    prefill: Callable[..., tuple[jax.Array, Any]] | None = None
    decode: Callable[..., tuple[jax.Array, Any]] | None = None


def as_policy(model: Any) -> Policy:
    """Return the policy of a model.

    Args:
        model: a `Policy`, rampup's `LanguageModel`, a Flax linen module whose call maps
            tokens (B, T) to logits (B, T, V), or a function `(params, tokens) ->
            logits`. For a Flax NNX module use `split_policy`.
    """
    if isinstance(model, Policy):
        return model
    if isinstance(model, LanguageModel):

        def packed(
            params: Any,
            tokens_BT: jax.Array,
            positions_BT: jax.Array,
            segments_BT: jax.Array,
        ) -> jax.Array:
            return model.head(
                params,
                packed_hidden(model, params, tokens_BT, positions_BT, segments_BT),
            )

        return Policy(
            logits=model.logits,
            packed=packed,
            prefill=partial(prefill, model),
            decode=partial(decode, model),
        )
    if isinstance(model, nn.Module):
        apply: Any = model.apply
        return Policy(
            logits=lambda params, tokens_BT: apply({"params": params}, tokens_BT)
        )
    if isinstance(model, nnx.Module):
        raise ConfigError(
            "an NNX model contains its parameters; use policy, params ="
            " split_policy(model)",
            key="model",
        )
    if callable(model):
        return Policy(logits=model)
    raise ConfigError(
        f"{a_type(model)} is no policy; give a Flax module or a function (params,"
        " tokens) -> logits",
        key="model",
    )


def split_policy(model: nnx.Module, *, wrt: Any = nnx.Param) -> tuple[Policy, Any]:
    """Return the policy of a Flax NNX model, whose call maps tokens (B, T) to logits
    (B, T, V), and its parameters.

    Variables other than `wrt`, as in `nnx.Optimizer`, are not trained and keep their
    values, so dropout must be off.

    Example:
        >>> class Bigram(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.table = nnx.Embed(5, 5, rngs=rngs)
        ...
        ...     def __call__(self, tokens):
        ...         return self.table(tokens)
        >>> policy, params = split_policy(Bigram(nnx.Rngs(0)))
        >>> policy.logits(params, jnp.zeros((2, 3), jnp.int32)).shape
        (2, 3, 5)
    """
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"split_policy takes a Flax NNX module and not {a_type(model)}", key="model"
        )
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def logits(params: Any, tokens_BT: jax.Array) -> jax.Array:
        # Copied: an NNX variable may only be written in the trace in which it was
        # created.
        kept = jax.tree.map(lambda leaf: leaf, rest)
        return nnx.merge(graphdef, params, kept)(tokens_BT)  # type: ignore[no-any-return,operator]

    return Policy(logits=logits), params


def over_rows(model: Any, mesh: Mesh) -> Policy:
    """Return the policy of a model for programs whose rows the compiler spreads over
    the mesh, as generation.
    """
    if isinstance(model, LanguageModel):
        model = replace(
            model,
            activations=NamedSharding(
                auto_view(mesh), PartitionSpec(BatchAxes.of(mesh).rows)
            ),
        )
    return as_policy(model)


def in_replica(model: Any, mesh: Mesh) -> Policy:
    """Return the policy of a model for the training step, in which a replica sees its
    own rows.
    """
    return as_policy(
        model.on(auto_view(mesh)) if isinstance(model, LanguageModel) else model
    )


def token_log_probabilities(
    logits_BTV: jax.Array, targets_BT: jax.Array, temperature: Any = 1.0
) -> jax.Array:
    """Return log p(target) under softmax(logits / temperature), in at least float32."""
    logits_BTV = (
        logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
        / temperature
    )
    # A sum over the vocabulary instead of a gather, which stays local if the vocabulary
    # is sharded over the tensor axis.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), -1) - jax.nn.logsumexp(
        logits_BTV, -1
    )


def grpo_loss(
    model: Any,
    *,
    epsilon: float = 0.2,
    beta: float = 0.0,
    temperature: float = 1.0,
) -> LossFn:
    """Return the loss of GRPO: the clipped ratio, and the KL divergence from a
    reference policy.

    Per token, -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * KL
    (Schulman et al. 2017, arXiv 1707.06347; Shao et al. 2024, arXiv 2402.03300). KL is
    the estimator r - 1 - log r with r = p_reference / p, which is never negative. Its
    auxiliary sums are `kl` and `clip_fraction`.

    Args:
        model: see `as_policy`.
        epsilon: how far the ratio counts; MaxText RL's `rl.grpo_epsilon`.
        beta: the weight of the KL divergence; MaxText RL's `rl.grpo_beta`.
        temperature: divides the logits, as in sampling.

    Example:
        >>> import numpy as np
        >>> from rampup.contrib.rl.experience import loss_rows
        >>> loss_fn = grpo_loss(lambda params, tokens: jnp.zeros((*tokens.shape, 4)))
        >>> arrays = {
        ...     "tokens": np.array([[1, 2, 3]]),
        ...     "prompt_length": np.array([1]),
        ...     "response_length": np.array([2]),
        ... }
        >>> rows = loss_rows(
        ...     {
        ...         **arrays,
        ...         "log_probabilities": np.log([[0.25, 0.25]]),
        ...         "advantages": np.array([[2.0, 2.0]]),
        ...     }
        ... )
        >>> [round(float(x), 3) for x in loss_fn({}, rows, None)[:2]]
        [-4.0, 2.0]
    """
    policy = as_policy(model)

    def token_losses(
        params: Any, rows: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        log_p_BT = token_log_probabilities(
            _logits(policy, params, rows), rows["targets"], temperature
        )
        log_ratio_BT = jnp.clip(
            log_p_BT - rows["log_probabilities"], -MAX_LOG_RATIO, MAX_LOG_RATIO
        )
        ratio_BT = jnp.exp(log_ratio_BT)
        advantage_BT = rows["advantages"]
        clipped_BT = jnp.clip(ratio_BT, 1 - epsilon, 1 + epsilon) * advantage_BT
        loss_BT = -jnp.minimum(ratio_BT * advantage_BT, clipped_BT)
        found = {"clip_fraction": clipped_BT < ratio_BT * advantage_BT}
        if "reference_log_probabilities" in rows:
            log_r_BT = rows["reference_log_probabilities"] - log_p_BT
            found["kl"] = (
                jnp.expm1(jnp.clip(log_r_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_r_BT
            )
            loss_BT = loss_BT + beta * found["kl"] if beta else loss_BT
        return {"loss": loss_BT} | found

    return _summed(token_losses)


def supervised_loss(model: Any) -> LossFn:
    """Return the mean of -log p over the response tokens, for a warm start on right
    answers.
    """
    policy = as_policy(model)

    def token_losses(
        params: Any, rows: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        return {
            "loss": -token_log_probabilities(
                _logits(policy, params, rows), rows["targets"]
            )
        }

    return _summed(token_losses)


def _logits(policy: Policy, params: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Return the logits of every next token, of rows with one sequence or several."""
    if "segments" not in rows:
        return policy.logits(params, rows["tokens"])
    if policy.packed is None:
        text = (
            "token_budget packs several samples into a row, which this model has no"
            " function for"
        )
        raise ConfigError(text, key="token_budget")
    return policy.packed(params, rows["tokens"], rows["positions"], rows["segments"])


def _summed(token_losses: Callable[..., dict[str, jax.Array]]) -> LossFn:
    """Return a loss function that adds up the losses of tokens with their
    coefficients.
    """

    def loss_fn(
        params: Any, rows: Mapping[str, jax.Array], keys: Any
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        coefficient_BT = rows["coefficients"]
        # Selected and not multiplied by 0: what padding leads to may be infinite.
        found = {
            name: jnp.sum(jnp.where(coefficient_BT != 0, coefficient_BT * loss_BT, 0))
            for name, loss_BT in token_losses(params, rows).items()
        }
        return found.pop("loss"), jnp.sum(rows["weights"]), found

    return loss_fn
