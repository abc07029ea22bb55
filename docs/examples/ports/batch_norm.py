"""A network with batch normalization in NNX: `python batch_norm.py`. With rampup:
batch_norm_ramp.py.
"""

import jax
import numpy as np
import optax
from flax import nnx

sizes = [8] * 10 + [32] * 20  # of the batches


def make_rows(number):
    """Return noisy points of four classes."""
    random = np.random.default_rng(0)
    labels = random.integers(4, size=number)
    points = random.normal(size=(4, 16))[labels] + random.normal(size=(number, 16))
    return [
        {"x": x, "label": label}
        for x, label in zip(points.astype(np.float32), labels, strict=True)
    ]


class Network(nnx.Module):
    """Two linear layers, with batch normalization between them."""

    def __init__(self, *, rngs):
        self.hidden, self.norm = (
            nnx.Linear(16, 32, rngs=rngs),
            nnx.BatchNorm(32, rngs=rngs),
        )
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        """Return the logits of points."""
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["label"]
    ).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    """Train on one batch."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


rows, model, tx = make_rows(720), Network(rngs=nnx.Rngs(0)), optax.adam(1e-3)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
losses = []
for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows[start : start + size])
    losses.append(float(train_step(model, optimizer, batch)))
print(
    f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; running mean"
    f" {float(model.norm.mean.mean()):.4f}"
)
