"""The towers of contrastive.py, with their batches by rampup: `python
contrastive_ramp.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rampup

plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 80:32", steps=30), jax.device_count()
)


def make_rows(number):
    """Return pairs of noisy views of one point."""
    random = np.random.default_rng(0)
    views = random.normal(size=(number, 1, 8)) + random.normal(0, 0.5, (number, 2, 8))
    return [{"image": image, "text": text} for image, text in views.astype(np.float32)]


def loss_fn(params, batch, keys):
    """Return the sum of the losses of telling each pair from the others of the batch,
    and their number.
    """
    images, texts = batch["image"] @ params["image"], batch["text"] @ params["text"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        images @ texts.T, jnp.arange(len(texts))
    )
    return losses.sum(), losses.size, {}


rows, params, tx = (
    make_rows(720),
    {"image": jnp.eye(8, 4), "text": jnp.eye(8, 4)},
    optax.adam(0.01),
)
state = rampup.create_state(params, tx, mesh := rampup.make_mesh())
step = rampup.train_step(loss_fn, tx, plan.with_whole_batches(), mesh)
losses = []
for batch in step.batches(rows):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
