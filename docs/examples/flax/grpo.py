"""GRPO with a reward that is a Python function: `python grpo.py`. With a ramp:
grpo_ramp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

train_steps, num_prompts, group, vocab_size, length, width = 80, 32, 8, 8, 3, 32


class Policy(nnx.Module):
    """A transformer with one block. A row is a prompt and a response, of `length`
    tokens each.
    """

    def __init__(self, *, rngs):
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(2 * length, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.hidden, self.out = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, vocab_size, rngs=rngs),
        )

    def __call__(self, tokens):
        """Return the logits of every next token."""
        places = jnp.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places)
        x = x + self.attention(x, mask=places[:, None] >= places)
        return self.out(nnx.gelu(self.hidden(x)))


def reward(prompts, responses):
    """Return how much of each response repeats its prompt."""
    return [
        float(np.mean(np.array(prompt) == np.array(response)))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def log_probabilities(policy, tokens):
    """Return the log-probability of each token of the responses."""
    logits = policy(tokens)[:, length - 1 : -1]
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, length:])


@nnx.jit
def generate(policy, prompts, key):
    """Return rows with a sampled response to each prompt, and its log-probabilities."""
    tokens = jnp.pad(prompts, ((0, 0), (0, length)))
    for place in range(length, 2 * length):
        next_token = jax.random.categorical(
            jax.random.fold_in(key, place), policy(tokens)[:, place - 1]
        )
        tokens = tokens.at[:, place].set(next_token)
    return tokens, log_probabilities(policy, tokens)


def loss_fn(policy, batch):
    """Return the loss of GRPO: the clipped ratio of new to old probabilities, times the
    advantage.
    """
    ratio = jnp.exp(log_probabilities(policy, batch["tokens"]) - batch["old"])
    advantage = batch["advantage"][:, None]
    return -jnp.mean(
        jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    )


@nnx.jit
def train_step(policy, optimizer, batch):
    """Train on a mini batch."""
    optimizer.update(policy, nnx.grad(loss_fn)(policy, batch))


random = np.random.default_rng(0)
policy = Policy(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
rewards = []
for number in range(train_steps):
    prompts = random.integers(vocab_size, size=(num_prompts, length))
    tokens, old = generate(
        policy, np.repeat(prompts, group, axis=0), jax.random.key(number)
    )
    found = np.reshape(
        reward(tokens[:, :length], tokens[:, length:]), (num_prompts, group)
    )
    advantage = (found - found.mean(1, keepdims=True)) / (
        found.std(1, keepdims=True) + 1e-6
    )
    samples = {"tokens": tokens, "old": old, "advantage": jnp.ravel(advantage)}
    for first in range(0, len(tokens), 8 * group):
        train_step(
            policy,
            optimizer,
            jax.tree.map(lambda x, first=first: x[first : first + 8 * group], samples),
        )
    rewards.append(found.mean())
    if len(rewards) % 20 == 0:
        print(f"step {len(rewards)}: reward {rewards[-1]:.2f}")
