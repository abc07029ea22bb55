"""The network of ray_train.py with a batch that grows from 8 to 32: `python
ray_train_ramp.py FOLDER`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray.train
from flax import nnx
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

import rampup

train_steps, batch_size = 60, 32


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, *, rngs):
        self.hidden, self.out = (
            nnx.Linear(1, 64, rngs=rngs),
            nnx.Linear(64, 1, rngs=rngs),
        )

    def __call__(self, x):
        """Return one number per row."""
        return self.out(nnx.gelu(self.hidden(x)))[:, 0]


def loss_fn(model, batch):
    """Return the mean squared error."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def sum_loss(model, batch, keys):
    """Return the sum of the losses of a microbatch, and its number of rows."""
    return loss_fn(model, batch) * len(keys), len(keys), {}


def train():
    """Train in a worker. Ray has joined it to the others, and JAX sees the devices of
    all.
    """
    x = (
        np.random.default_rng(0)
        .uniform(-1, 1, (train_steps * batch_size, 1))
        .astype(np.float32)
    )
    rows = [{"x": value, "y": np.sin(3 * value[0])} for value in x]
    mesh = rampup.make_mesh()
    plan = rampup.build_plan(
        rampup.Config(batch_size_schedule="0:8 160:32", steps=train_steps),
        jax.device_count(),
    )
    model, tx = Model(rngs=nnx.Rngs(0)), optax.adam(0.05)
    state, pure_loss = rampup.split_model(model, sum_loss, tx, mesh)
    step = rampup.train_step(pure_loss, tx, plan, mesh)
    for batch in step.batches(rows):
        state, metrics = step(state, batch)
        if batch.position.step % 10 == 9:
            ray.train.report(
                {"loss": float(metrics["loss"]), "compilations": step.num_compilations}
            )


trainer = JaxTrainer(
    train,
    jax_config=JaxConfig(
        use_tpu=True
    ),  # Ray joins workers that have TPUs or GPUs, as it believes of these
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(
        name="run",
        storage_path=sys.argv[1],
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    ),
)
trainer.fit()
