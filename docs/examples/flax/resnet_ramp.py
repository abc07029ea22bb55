"""The residual network of resnet.py with a batch that grows from 8 to 32: `python
resnet_ramp.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import rampup

train_steps, batch_size = 60, 32
plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 160:32", steps=train_steps),
    jax.device_count(),
)


def make_images(seed, number):
    """Return images of ten noisy patterns, and which one each shows."""
    patterns = np.random.default_rng(0).random((10, 16, 16, 3), np.float32)
    noise = np.random.default_rng(seed)
    labels = noise.integers(10, size=number)
    return [
        {
            "image": (
                patterns[label] + noise.normal(0, 0.5, (16, 16, 3)).astype(np.float32)
            ),
            "label": label,
        }
        for label in labels
    ]


def make_batches(rows, size):
    """Yield full batches."""
    for start in range(0, len(rows) - size + 1, size):
        yield jax.tree.map(
            lambda *values: np.stack(values), *rows[start : start + size]
        )


class Block(nn.Module):
    """Two convolutions and what goes around them."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        """Return the images of the next layer."""
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9)
        y = nn.relu(
            norm(nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(x))
        )
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(
            nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        )
        return nn.relu(y + nn.Conv(self.channels, (1, 1), self.stride)(x))


class ResNet(nn.Module):
    """Three blocks and a linear layer."""

    @nn.compact
    def __call__(self, x, train=True):
        """Return the logits of images."""
        for channels, stride in ((8, 1), (16, 2), (32, 2)):
            x = Block(channels, stride)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    """A state with the statistics of the batch normalization."""

    batch_stats: Any


def loss_fn(params, batch_stats, batch):
    """Return the mean loss of a batch, and the new statistics."""
    logits, new = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        mutable=["batch_stats"],
    )
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(),
        new["batch_stats"],
    )


def sum_loss(params, batch, keys, batch_stats):
    """Return the sum of the losses of a microbatch, its number of rows, and the new
    statistics.
    """
    loss, batch_stats = loss_fn(params, batch_stats, batch)
    return loss * len(keys), len(keys), {}, batch_stats


images = make_images(1, train_steps * batch_size)
model, tx = ResNet(), optax.adamw(0.005)
variables = model.init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
state = TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    tx=tx,
    batch_stats=variables["batch_stats"],
)
state = rampup.prepare_state(state, mesh := rampup.make_mesh())
step = rampup.train_step(sum_loss, tx, plan, mesh)
losses = []
for batch in step.batches(images):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
    if len(losses) % 20 == 0:
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")
