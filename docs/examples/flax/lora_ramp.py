"""The low-rank parameters of lora.py with a batch that grows from 8 to 32: `python
lora_ramp.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rampup

train_steps, batch_size = 60, 32
plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 160:32", steps=train_steps),
    jax.device_count(),
)


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


def sum_loss(model, batch, keys):
    """Return the sum of the losses of a microbatch, and its number of rows."""
    return loss_fn(model, batch) * len(keys), len(keys), {}


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
state, pure_loss = rampup.split_model(
    model, sum_loss, tx, mesh := rampup.make_mesh(), wrt=nnx.LoRAParam
)
step = rampup.train_step(pure_loss, tx, plan, mesh)
losses = []
for batch in step.stream(make_batches(rows, batch_size), batched=True):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
    if len(losses) % 20 == 0:
        print(f"step {len(losses)}: loss {losses[-1]:.4f}")
