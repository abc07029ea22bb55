"""The transformer of minigpt.py with a batch that grows from 8 to 32: `python
minigpt_ramp.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rampup

mesh = Mesh(
    np.array(jax.devices()).reshape(-1, 2 - jax.device_count() % 2), ("batch", "model")
)
train_steps, batch_size, vocab_size, length, width = 60, 32, 64, 32, 32
config = rampup.Config(
    batch_size_schedule="0:8 160:32",
    steps=train_steps,
    ici_tensor_parallelism=mesh.shape["model"],
)
plan = rampup.build_plan(config, jax.device_count())


def make_texts(seed, number):
    """Return texts that count up in steps of one to three, of unequal length, padded
    with 0.
    """
    random = np.random.default_rng(seed)
    starts, steps = (
        random.integers(1, vocab_size, (number, 1)),
        random.integers(1, 4, (number, 1)),
    )
    tokens = 1 + (starts + steps * np.arange(length + 1)) % (vocab_size - 1)
    return np.where(
        np.arange(length + 1) < random.integers(length // 2, length + 2, (number, 1)),
        tokens,
        0,
    )


def make_batches(texts, size):
    """Yield full batches of inputs and the tokens that follow."""
    for start in range(0, len(texts) - size + 1, size):
        yield texts[start : start + size, :-1], texts[start : start + size, 1:]


def sharded(initializer, *axes):
    """Return an initializer of an array that the axes of the mesh shard."""
    return nnx.with_partitioning(initializer, NamedSharding(mesh, P(*axes)))


class Block(nnx.Module):
    """Attention to the tokens before, and a feed-forward network."""

    def __init__(self, *, rngs):
        kernel = sharded(nnx.initializers.xavier_uniform(), None, "model")
        self.norm1, self.norm2 = (
            nnx.LayerNorm(width, rngs=rngs),
            nnx.LayerNorm(width, rngs=rngs),
        )
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=width, decode=False, rngs=rngs
        )
        self.linear1 = nnx.Linear(width, 4 * width, kernel_init=kernel, rngs=rngs)
        self.linear2 = nnx.Linear(4 * width, width, kernel_init=kernel, rngs=rngs)

    def __call__(self, x):
        """Return the activations of the next layer."""
        x = x + self.attention(self.norm1(x), mask=jnp.tril(jnp.ones((length, length))))
        return x + self.linear2(nnx.relu(self.linear1(self.norm2(x))))


class MiniGPT(nnx.Module):
    """Embeddings of tokens and positions, two blocks, and logits."""

    def __init__(self, *, rngs):
        table = sharded(nnx.initializers.normal(width**-0.5), "model", None)
        self.tokens = nnx.Embed(vocab_size, width, embedding_init=table, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.Sequential(Block(rngs=rngs), Block(rngs=rngs))
        self.output = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of every next token."""
        return self.output(
            self.blocks(self.tokens(tokens) + self.positions(jnp.arange(length)))
        )


def loss_fn(model, batch, keys):
    """Return the sum of the losses of the tokens that are not padding, and their
    number.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1])
    weights = batch[1] > 0
    return jnp.sum(losses * weights), weights.sum(), {}


texts = make_texts(0, train_steps * batch_size)
model, tx = MiniGPT(rngs=nnx.Rngs(0)), optax.adam(3e-3)
axes = rampup.BatchAxes(replica=("batch",), rows=("batch",))
state, pure_loss = rampup.split_model(model, loss_fn, tx, mesh, batch_axes=axes)
step = rampup.train_step(
    rampup.AccumulatedLoss(pure_loss, batch_axes=axes), tx, plan, mesh
)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
losses = []
for number, batch in enumerate(
    step.stream(make_batches(texts, batch_size), batched=True), 1
):
    state, result = step(state, batch)
    metrics.update(loss=result["loss"])
    if number % 20 == 0:
        losses.append(float(metrics.compute()["loss"]))
        print(f"step {number}: loss {losses[-1]:.3f}")
        metrics.reset()
