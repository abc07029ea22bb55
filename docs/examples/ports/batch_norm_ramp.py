"""The network of batch_norm.py, with its batches by rampup: `python
batch_norm_ramp.py`.
"""

import jax
import numpy as np
import optax
from flax import nnx

import rampup

plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 80:32", steps=30), jax.device_count()
)


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


def loss_fn(model, batch, keys):
    """Return the sum of the losses of a batch, and its number of rows."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["label"]
    )
    return losses.sum(), losses.size, {}


rows, model, tx = make_rows(720), Network(rngs=nnx.Rngs(0)), optax.adam(1e-3)
state, pure_loss = rampup.split_model(model, loss_fn, tx, mesh := rampup.make_mesh())
step = rampup.train_step(pure_loss, tx, plan.with_whole_batches(), mesh)
losses = []
for batch in step.batches(rows):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
rampup.merge_model(model, state)
print(
    f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; running mean"
    f" {float(model.norm.mean.mean()):.4f}"
)
