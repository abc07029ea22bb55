"""Tunix's PeftTrainer with a batch that grows from 8 to 32: `python tunix_ramp.py
FOLDER`. Needs google-tunix.

Run it again with the same folder, also after a kill, and it resumes from its last
checkpoint.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import peft_trainer

import rampup
from rampup.contrib.tunix import num_microbatches, prepare


class Model(nnx.Module):
    """Stands for a model of Tunix."""

    def __init__(self, rngs):
        self.embed, self.out = (
            nnx.Embed(64, 32, rngs=rngs),
            nnx.Linear(32, 64, rngs=rngs),
        )

    def __call__(self, tokens):
        """Return the logits of every next token."""
        return self.out(self.embed(tokens))


def loss_fn(model, tokens):
    """Return the mean loss of a microbatch."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    ).mean()


rows = [
    {"tokens": ((row + np.arange(33) * (1 + row % 3)) % 64).astype(np.int32)}
    for row in range(2000)
]
config = rampup.Config(batch_size_schedule="0:8 160:16 480:32", steps=60)
plan = rampup.build_plan(config, jax.device_count())
mesh = rampup.make_mesh()
trainer = peft_trainer.PeftTrainer(
    Model(nnx.Rngs(0)),
    rampup.multi_steps(optax.adam(1e-2), plan),
    peft_trainer.TrainingConfig(
        max_steps=num_microbatches(plan),
        eval_every_n_steps=1000,
        data_sharding_axis=("data",),
        checkpoint_root_directory=str(Path(sys.argv[1]).resolve()),
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_interval_steps=50, max_to_keep=2
        ),
    ),
)
trainer.with_loss_fn(loss_fn)
prepare(trainer, rows, plan, mesh, seed=0)
# Tunix reads the mesh of this context, and not that of `jax.set_mesh`.
with mesh:
    trainer.train(())
state = trainer.optimizer.opt_state
print(
    f"{trainer.iter_steps} microbatches, {int(state.gradient_step[...])} optimizer"
    " steps"
)
