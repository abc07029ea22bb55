"""Training that follows a plan: JAX, Flax, Optax, Grain and Orbax."""

from rampup.run.accumulate import accumulate, multi_steps
from rampup.run.data import Batch, microbatches, step_batches
from rampup.run.loop import Loop, Summary
from rampup.run.mesh import make_mesh
from rampup.run.nnx import merge_model, split_model
from rampup.run.optimizer import LearningRate, make_optimizer
from rampup.run.step import TrainState, TrainStep, create_state, prepare_state, train_step

__all__ = [
    "Batch",
    "LearningRate",
    "Loop",
    "Summary",
    "TrainState",
    "TrainStep",
    "accumulate",
    "create_state",
    "make_mesh",
    "make_optimizer",
    "merge_model",
    "microbatches",
    "multi_steps",
    "prepare_state",
    "split_model",
    "step_batches",
    "train_step",
]
