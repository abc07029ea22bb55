"""The GRPO loss beside Tunix's, on the same samples. Needs google-tunix, which is not a
dependency: skipped without it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rampup.contrib.rl.experience import group_advantages, loss_rows
from rampup.contrib.rl.plan import AGGREGATIONS
from rampup.contrib.rl.policy import grpo_loss, split_policy

algo = pytest.importorskip("tunix.rl.algo_core")
common = pytest.importorskip("tunix.rl.common")
grpo_learner = pytest.importorskip("tunix.rl.grpo.grpo_learner")

S, P, R, V, EPSILON, BETA = 8, 3, 5, 11, 0.2, 0.1
# Tunix has no aggregation by groups.
NAMES = dict(
    zip(
        AGGREGATIONS[:3],
        ("token-mean", "seq-mean-token-sum", "sequence-mean-token-mean"),
        strict=True,
    )
)


class Bigram(nnx.Module):
    """A model in which a token depends on the one before it, so that neither padding
    nor positions matter.
    """

    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(V, 6, rngs=rngs), nnx.Linear(6, V, rngs=rngs)

    def __call__(self, tokens, positions=None, cache=None, attention_mask=None):  # noqa: ARG002 - Tunix gives all of them
        """Return logits; with a mask, as Tunix calls it, also the cache."""
        logits = self.out(self.embed(tokens))
        return logits if attention_mask is None else (logits, cache)


@pytest.mark.parametrize("mode", NAMES)
def test_loss_and_gradient_are_tunix(mode):
    """Loss and gradient to 1e-5, with ratios beyond both limits, a KL term, and rows of
    every length.
    """
    rng, model = np.random.default_rng(0), Bigram(nnx.Rngs(0))
    tokens = rng.integers(1, V, (S, P + R)).astype(np.int32)
    lengths = rng.integers(1, R + 1, S)
    counts = np.arange(R) < lengths[:, None]
    tokens[:, P:][~counts] = 0
    # Near the probabilities of a new model, log(1 / V).
    old, reference = (
        np.where(counts, -np.log(V) + 0.3 * rng.normal(size=(S, R)), 0).astype(
            np.float32
        )
        for _ in range(2)
    )
    advantages = group_advantages(rng.normal(size=S), 4)

    example = common.TrainExample(
        prompt_ids=jnp.asarray(tokens[:, :P]),
        prompt_mask=jnp.ones((S, P), bool),
        completion_ids=jnp.asarray(tokens[:, P:]),
        completion_mask=jnp.asarray(counts),
        advantages=jnp.asarray(advantages),
        ref_per_token_logps=jnp.asarray(reference),
        old_per_token_logps=jnp.asarray(old),
    )
    config = grpo_learner.GRPOConfig(
        num_generations=4,
        beta=BETA,
        epsilon=EPSILON,
        loss_agg_mode=NAMES[mode],
        kl_loss_mode="low_var_kl",
    )
    for name, value in {"temperature": 1.0, "kl_clamp_value": None}.items():
        if not hasattr(config, name):
            setattr(config, name, value)

    theirs = nnx.value_and_grad(
        lambda model: algo.grpo_loss_fn(model, example, config, pad_id=0, eos_id=V)[0]
    )
    loss, grads = theirs(model)

    policy, params = split_policy(model)
    arrays = {
        "tokens": tokens,
        "prompt_length": np.full(S, P),
        "response_length": lengths,
    }
    arrays |= {"log_probabilities": old, "reference_log_probabilities": reference}
    arrays |= {"advantages": np.where(counts, advantages[:, None], 0)}
    rows = loss_rows(arrays, loss_agg_mode=mode)
    loss_fn = grpo_loss(policy, epsilon=EPSILON, beta=BETA)

    def ours(params):
        loss, weight, _ = loss_fn(params, rows, None)
        return loss / weight

    own_loss, own_grads = jax.value_and_grad(ours)(params)
    assert float(own_loss) == pytest.approx(float(loss), abs=1e-5)
    for own, other in zip(
        jax.tree.leaves(own_grads), jax.tree.leaves(grads), strict=True
    ):
        np.testing.assert_allclose(own, other, atol=1e-5)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(own_grads)) > 1e-2


def test_advantages_are_tunix():
    """Groups with and without spread."""
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0])
    theirs = algo.function_registry.get_advantage_estimator("grpo")(
        rewards=rewards, num_generations=4
    )
    np.testing.assert_allclose(group_advantages(rewards, 4), theirs, atol=1e-5)
