"""Two towers with a contrastive loss, without a library: `python contrastive.py`. With
rampup: contrastive_ramp.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

sizes = [8] * 10 + [32] * 20  # of the batches


def make_rows(number):
    """Return pairs of noisy views of one point."""
    random = np.random.default_rng(0)
    views = random.normal(size=(number, 1, 8)) + random.normal(0, 0.5, (number, 2, 8))
    return [{"image": image, "text": text} for image, text in views.astype(np.float32)]


def loss_fn(params, batch):
    """Return the mean loss of telling each pair from the others of the batch."""
    images, texts = batch["image"] @ params["image"], batch["text"] @ params["text"]
    return optax.softmax_cross_entropy_with_integer_labels(
        images @ texts.T, jnp.arange(len(texts))
    ).mean()


@jax.jit
def train_step(params, opt_state, batch):
    """Train on one batch."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rows, params, tx = (
    make_rows(720),
    {"image": jnp.eye(8, 4), "text": jnp.eye(8, 4)},
    optax.adam(0.01),
)
opt_state = tx.init(params)
losses = []
for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *rows[start : start + size])
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
