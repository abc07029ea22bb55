"""An Equinox model: `python equinox_mlp.py`. With rampup: equinox_mlp_ramp.py."""

import equinox as eqx
import jax
import numpy as np
import optax

sizes = [8] * 10 + [32] * 20  # of the batches


def make_rows(number):
    """Return points, and a function of each."""
    points = np.random.default_rng(0).normal(size=(number, 2)).astype(np.float32)
    return [{"x": x, "y": np.sin(x[0]) * x[1]} for x in points]


def loss_fn(model, batch):
    """Return the mean squared error of a batch."""
    return ((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2).mean()


@eqx.filter_jit
def train_step(model, opt_state, batch):
    """Train on one batch."""
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    updates, opt_state = tx.update(
        grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
    )
    return eqx.apply_updates(model, updates), opt_state, loss


rows, model, tx = (
    make_rows(720),
    eqx.nn.MLP(2, 1, 32, 2, key=jax.random.key(0)),
    optax.adam(3e-3),
)
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
losses = []
for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows[start : start + size])
    model, opt_state, loss = train_step(model, opt_state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
