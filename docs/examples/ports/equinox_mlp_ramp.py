"""The Equinox model of equinox_mlp.py, with its batches by rampup: `python
equinox_mlp_ramp.py`.
"""

import equinox as eqx
import jax
import numpy as np
import optax

import rampup

plan = rampup.build_plan(
    rampup.Config(batch_size_schedule="0:8 80:32", steps=30), jax.device_count()
)


def make_rows(number):
    """Return points, and a function of each."""
    points = np.random.default_rng(0).normal(size=(number, 2)).astype(np.float32)
    return [{"x": x, "y": np.sin(x[0]) * x[1]} for x in points]


def loss_fn(params, batch, keys):
    """Return the sum of the squared errors of a batch, and its number of rows."""
    model = eqx.combine(params, static)
    return (
        ((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2).sum(),
        len(batch["y"]),
        {},
    )


rows, model, tx = (
    make_rows(720),
    eqx.nn.MLP(2, 1, 32, 2, key=jax.random.key(0)),
    optax.adam(3e-3),
)
params, static = eqx.partition(model, eqx.is_inexact_array)
state, step = (
    rampup.create_state(params, tx, mesh := rampup.make_mesh()),
    rampup.train_step(loss_fn, tx, plan, mesh),
)
losses = []
for batch in step.batches(rows):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
