"""The policy of grpo.py with a batch that grows from 8 to 32 prompts: `python
grpo_ramp.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rampup
from rampup.contrib.rl import (
    RolloutConfig,
    RolloutOptions,
    build_rollout_schedule,
    rollout_step,
    split_policy,
)

train_steps, num_prompts, group, vocab_size, length, width = 80, 32, 8, 8, 3, 32
sizes = {
    "batch_size": num_prompts,
    "mini_batch_size": 8,
    "num_generations": group,
    "num_batches": train_steps,
}
schedule = build_rollout_schedule(
    RolloutConfig(**sizes, batch_size_schedule="0:8 30:32"), jax.device_count()
)


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


random = np.random.default_rng(0)
policy, params = split_policy(Policy(rngs=nnx.Rngs(0)))
options = RolloutOptions(max_prompt_length=length, max_response_length=length)
step = rollout_step(
    policy,
    optax.adam(3e-3),
    schedule,
    rampup.make_mesh(),
    reward=reward,
    options=options,
)
state = step.create_state(params)
rewards = []
for _ in range(train_steps):
    state, facts = step(
        state,
        lambda start, stop: random.integers(vocab_size, size=(stop - start, length)),
    )
    rewards.append(facts["reward"])
    if len(rewards) % 20 == 0:
        print(f"step {len(rewards)}: reward {rewards[-1]:.2f}")
