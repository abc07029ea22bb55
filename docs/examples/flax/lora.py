"""LoRA: a trained network learns another task by low-rank parameters only: `python
lora.py`. With a ramp: lora_ramp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

train_steps, batch_size = 60, 32


def make_rows(seed, number, frequency):
    """Return numbers and their sine."""
    x = np.random.default_rng(seed).uniform(-1, 1, (number, 1)).astype(np.float32)
    return {"x": x, "y": np.sin(frequency * x[:, 0])}


def make_batches(rows, size):
    """Yield full batches."""
    for start in range(0, len(rows["y"]) - size + 1, size):
        yield jax.tree.map(
            lambda values, start=start: values[start : start + size], rows
        )


class Model(nnx.Module):
    """Two layers, the first with low-rank parameters beside its kernel."""

    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(1, 64, rngs=rngs)
        self.middle = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        """Return one number per row."""
        return self.out(nnx.gelu(self.middle(nnx.gelu(self.hidden(x)))))[:, 0]


def loss_fn(model, batch):
    """Return the mean squared error."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@nnx.jit
def train_step(model, optimizer, batch):
    """Train on one batch."""
    loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, optimizer.wrt))(
        model, batch
    )
    optimizer.update(model, grads)
    return loss


model = Model(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
for batch in make_batches(make_rows(0, 200 * batch_size, 3.0), batch_size):
    trained_loss = train_step(model, optimizer, batch)
rows, tx = make_rows(1, train_steps * batch_size, 5.0), optax.adam(0.01)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
losses = []
for batch in make_batches(rows, batch_size):
    losses.append(float(train_step(model, optimizer, batch)))
    if len(losses) % 20 == 0:
        print(f"step {len(losses)}: loss {losses[-1]:.4f}")
