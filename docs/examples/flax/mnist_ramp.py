"""The convolutional network of mnist.py with a batch that grows from 8 to 32: `python
mnist_ramp.py`.
"""

from functools import partial

import jax
import numpy as np
import optax
from flax import nnx

import rampup

train_steps, eval_every, batch_size = 60, 20, 32
plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 160:32", steps=train_steps),
    jax.device_count(),
)


def make_digits(seed, number):
    """Return images of ten noisy patterns, and which one each shows."""
    patterns = np.random.default_rng(0).random((10, 28, 28, 1), np.float32)
    noise = np.random.default_rng(seed)
    labels = noise.integers(10, size=number)
    return {
        "image": (
            patterns[labels]
            + noise.normal(0, 0.5, (number, 28, 28, 1)).astype(np.float32)
        ),
        "label": labels,
    }


def make_batches(dataset, size):
    """Yield full batches."""
    for start in range(0, len(dataset["label"]) - size + 1, size):
        yield jax.tree.map(
            lambda rows, start=start: rows[start : start + size], dataset
        )


class CNN(nnx.Module):
    """Two convolutions and two linear layers, with batch normalization and dropout."""

    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(16 * 7 * 7, 64, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.1)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        """Return the logits of images."""
        x = self.pool(nnx.relu(self.norm1(self.conv1(x))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = nnx.relu(self.dropout(self.linear1(x.reshape(x.shape[0], -1)), rngs=rngs))
        return self.linear2(x)


def loss_fn(model, batch, rngs=None):
    """Return the mean loss of a batch, and its logits."""
    logits = model(batch["image"], rngs)
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(),
        logits,
    )


def sum_loss(model, batch, keys):
    """Return the sum of the losses of a microbatch, and its number of rows."""
    return loss_fn(model, batch, nnx.Rngs(keys[0]))[0] * len(keys), len(keys), {}


@nnx.jit
def eval_step(model, metrics, batch):
    """Add a batch to the metrics."""
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


train_set, test_set = make_digits(1, train_steps * batch_size), make_digits(2, 256)
model, tx, rngs = CNN(rngs=nnx.Rngs(0)), optax.adamw(0.005, 0.9), nnx.Rngs(0)
state, pure_loss = rampup.split_model(model, sum_loss, tx, mesh := rampup.make_mesh())
step = rampup.train_step(pure_loss, tx, plan, mesh)
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
losses = []
for batch in step.stream(make_batches(train_set, batch_size), batched=True):
    state, result = step(state, batch)
    losses.append(float(result["loss"]))
    if len(losses) % eval_every == 0:
        rampup.merge_model(model, state)
        model.eval()
        for test_batch in make_batches(test_set, 64):
            eval_step(model, metrics, test_batch)
        print(
            f"step {len(losses)}: loss {losses[-1]:.3f}, test accuracy"
            f" {float(metrics.compute()['accuracy']):.3f}"
        )
        metrics.reset()
        model.train()
