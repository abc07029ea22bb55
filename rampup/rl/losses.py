"""The losses of the policy and of the critic, as sums over rows with one weight per token.

A loss here is one for `rampup.train_step`: it returns the sum of the losses and the sum of the weights, so that a mini batch
has the same gradient however it is split, padded or packed. `loss_rows` and `packed_rows` in `rampup.rl.experience` make the
rows; the coefficients in them say how the losses of tokens add up (`rampup.rl.sizes.AGGREGATIONS`).

Shape suffixes: B rows, T tokens of a row. Entry t of a row is the prediction of the token after token t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rampup.engine.contract import LossFn
from rampup.errors import ConfigError
from rampup.rl.policy import Policy, as_policy, token_log_probabilities

# Beyond it, the exponential of a difference of log-probabilities says nothing and may overflow.
MAX_LOG_RATIO = 20.0


def grpo_loss(
    model: Any, *, epsilon: float = 0.2, beta: float = 0.0, temperature: float = 1.0, shapes: tuple[int, ...] = ()
) -> LossFn:
    """Return the loss of GRPO and PPO: the clipped ratio, and the KL divergence from a reference policy.

    Per token, -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * KL (Schulman et al. 2017, arXiv 1707.06347;
    Shao et al. 2024, arXiv 2402.03300). KL is the estimator r - 1 - log r with r = p_reference / p, which is never negative.

    Args:
        model: see `as_policy`.
        epsilon: how far the ratio counts; MaxText RL's `rl.grpo_epsilon`.
        beta: the weight of the KL divergence; MaxText RL's `rl.grpo_beta`.
        temperature: divides the logits, as in sampling.
        shapes: for packed rows, the numbers of tokens that a row may be computed with.

    Returns:
        A loss function for `train_step`, over the rows of `loss_rows` or `packed_rows`. Its auxiliary sums are `kl` and
        `clip_fraction`.

    Example:
        >>> import numpy as np
        >>> from rampup.rl.experience import loss_rows
        >>> loss_fn = grpo_loss(lambda params, tokens: jnp.zeros((*tokens.shape, 4)))
        >>> arrays = {"tokens": np.array([[1, 2, 3]]), "prompt_length": np.array([1]), "response_length": np.array([2])}
        >>> rows = loss_rows({**arrays, "log_probabilities": np.log([[0.25, 0.25]]), "advantages": np.array([[2.0, 2.0]])})
        >>> [round(float(x), 3) for x in loss_fn({}, rows, None)[:2]]
        [-4.0, 2.0]
    """
    policy = as_policy(model)

    def token_losses(params: Any, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        log_p_BT = token_log_probabilities(_logits(policy, params, rows), rows["targets"], temperature)
        log_ratio_BT = jnp.clip(log_p_BT - rows["log_probabilities"], -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_BT = jnp.exp(log_ratio_BT)
        advantage_BT = rows["advantages"]
        clipped_BT = jnp.clip(ratio_BT, 1 - epsilon, 1 + epsilon) * advantage_BT
        loss_BT = -jnp.minimum(ratio_BT * advantage_BT, clipped_BT)
        found = {"clip_fraction": clipped_BT < ratio_BT * advantage_BT}
        if "reference_log_probabilities" in rows:
            log_r_BT = rows["reference_log_probabilities"] - log_p_BT
            found["kl"] = jnp.expm1(jnp.clip(log_r_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_r_BT
            loss_BT = loss_BT + beta * found["kl"] if beta else loss_BT
        return {"loss": loss_BT} | found

    return _summed(token_losses, shapes)


def value_loss(values_fn: Callable[..., jax.Array], *, epsilon: float = 0.2, shapes: tuple[int, ...] = ()) -> LossFn:
    """Return the critic's loss: half the squared error of the value, clipped as in PPO around the value of the rollout.

    Args:
        values_fn: `(params, rows) -> values_BT`, the value before the token after each token.
        epsilon: how far a value may move from that of the rollout.
        shapes: see `grpo_loss`.
    """

    def token_losses(params: Any, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        values_BT = values_fn(params, rows)
        old_BT = rows["values"]
        returns_BT = rows["returns"]
        near_BT = old_BT + jnp.clip(values_BT - old_BT, -epsilon, epsilon)
        return {"loss": 0.5 * jnp.maximum((values_BT - returns_BT) ** 2, (near_BT - returns_BT) ** 2)}

    return _summed(token_losses, shapes)


def supervised_loss(model: Any) -> LossFn:
    """Return the mean of -log p over the response tokens, for a warm start on right answers."""
    policy = as_policy(model)

    def token_losses(params: Any, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"loss": -token_log_probabilities(_logits(policy, params, rows), rows["targets"])}

    return _summed(token_losses, ())


def _logits(policy: Policy, params: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Return the logits of every next token, of rows with one sequence or several."""
    if "segments" not in rows:
        return policy.logits(params, rows["tokens"])
    if policy.packed is None:
        text = "token_budget packs several samples into a row, which this model has no function for"
        raise ConfigError(text, key="token_budget")
    return policy.packed(params, rows["tokens"], rows["positions"], rows["segments"])


def _summed(token_losses: Callable[..., dict[str, jax.Array]], shapes: tuple[int, ...]) -> LossFn:
    """Return a loss function that adds up the losses of tokens with their coefficients."""

    def sums(params: Any, rows: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        coefficient_BT = rows["coefficients"]
        # Selected and not multiplied by 0: what padding leads to may be infinite.
        found = {
            name: jnp.sum(jnp.where(coefficient_BT != 0, coefficient_BT * loss_BT, 0))
            for name, loss_BT in token_losses(params, rows).items()
        }
        return found.pop("loss"), jnp.sum(rows["weights"]), found

    def loss_fn(params: Any, batch: Mapping[str, jax.Array], keys: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        if "shape" not in batch:
            return sums(params, batch)
        # The rows of a pass are computed with as many tokens as its shape has: one branch for each, in one program.
        rows = {name: x for name, x in batch.items() if name != "shape"}
        branches = [lambda params, rows, n=n: sums(params, {k: x[:, :n] for k, x in rows.items()}) for n in shapes]
        return jax.lax.switch(batch["shape"][0], branches, params, rows)  # type: ignore[no-any-return]

    return loss_fn
