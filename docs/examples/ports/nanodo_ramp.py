"""The transformer of nanodo.py, with its batches by rampup: `python nanodo_ramp.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import rampup

plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 80:32", steps=30), jax.device_count()
)
V, L, D, H, N = 64, 16, 32, 2, 2  # vocabulary, length, width, heads, layers


def make_texts(number):
    """Return texts that count up in steps of one to three, of unequal length, padded
    with 0.
    """
    random = np.random.default_rng(0)
    tokens = 1 + (
        random.integers(V, size=(number, 1))
        + random.integers(1, 4, (number, 1)) * np.arange(L + 1)
    ) % (V - 1)
    return np.where(
        np.arange(L + 1) < random.integers(4, L + 2, (number, 1)), tokens, 0
    )


class TBlock(nn.Module):
    """Attention to the tokens before, and a feed-forward network."""

    @nn.compact
    def __call__(self, x_BxLxD):
        """Return the activations of the next layer."""
        mask = nn.make_causal_mask(x_BxLxD[..., 0])
        x_BxLxD = x_BxLxD + nn.MultiHeadDotProductAttention(H)(
            nn.LayerNorm(use_bias=False)(x_BxLxD), mask=mask
        )
        return x_BxLxD + nn.Dense(D)(
            nn.gelu(nn.Dense(4 * D)(nn.LayerNorm(use_bias=False)(x_BxLxD)))
        )


class TransformerDo(nn.Module):
    """Embeddings of tokens and positions, blocks, and logits by the embedding."""

    @nn.compact
    def __call__(self, y_BxL):
        """Return the logits of every next token."""
        embed = nn.Embed(V, D)
        x_BxLxD = embed(y_BxL) + nn.Embed(L, D)(jnp.arange(L))
        for _ in range(N):
            x_BxLxD = TBlock()(x_BxLxD)
        return embed.attend(nn.LayerNorm(use_bias=False)(x_BxLxD))


def loss_fn(params, in_BxL, keys):
    """Return the sum of the losses of the tokens that are not padding, and their
    number.
    """
    x_BxL, y_BxL = in_BxL[:, :-1], in_BxL[:, 1:]
    losses_BxL = optax.softmax_cross_entropy_with_integer_labels(
        model.apply(params, x_BxL), y_BxL
    )
    return losses_BxL.sum(where=y_BxL > 0), (y_BxL > 0).sum(), {}


texts, model, tx = make_texts(720), TransformerDo(), optax.adamw(1e-3)
params = model.init(jax.random.key(0), texts[:1, :-1])
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
state, step = (
    rampup.prepare_state(state, mesh := rampup.make_mesh()),
    rampup.train_step(loss_fn, tx, plan, mesh),
)
losses = []
for batch in step.batches(texts):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
