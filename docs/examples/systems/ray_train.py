"""A network on two CPU workers of Ray Train: `python ray_train.py FOLDER`. With a ramp:
ray_train_ramp.py. Needs ray[train].
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray.train
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

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


@nnx.jit
def train_step(model, optimizer, batch):
    """Train on one batch."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


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
    mesh = jax.make_mesh(
        (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    model, tx = Model(rngs=nnx.Rngs(0)), optax.adam(0.05)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(
        (model, optimizer),
        jax.device_put(nnx.state((model, optimizer)), NamedSharding(mesh, P())),
    )
    for start in range(0, len(rows), batch_size):
        own = rows[start : start + batch_size][
            jax.process_index() :: jax.process_count()
        ]
        own = jax.tree.map(lambda *values: np.stack(values), *own)
        batch = jax.make_array_from_process_local_data(
            NamedSharding(mesh, P("data")), own
        )
        loss = train_step(model, optimizer, batch)
        if start // batch_size % 10 == 9:
            ray.train.report({"loss": float(loss)})


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
