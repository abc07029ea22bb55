"""Training that follows a plan: JAX, Flax, Optax, Grain and Orbax."""

from rampup.moved import moved_names
from rampup.run.accumulate import accumulate, multi_steps
from rampup.run.data.batches import Batch, microbatches, step_batches
from rampup.run.loop import Loop, Summary
from rampup.run.mesh import make_mesh
from rampup.run.nnx import merge_model, split_model
from rampup.run.optimizer import LearningRate, make_optimizer
from rampup.run.pipeline import PipelinedLoss, as_loss, pipeline_sums
from rampup.run.step import TrainState, TrainStep, create_state, prepare_state, train_step

__all__ = [
    "Batch",
    "LearningRate",
    "Loop",
    "PipelinedLoss",
    "Summary",
    "TrainState",
    "TrainStep",
    "accumulate",
    "as_loss",
    "create_state",
    "make_mesh",
    "make_optimizer",
    "merge_model",
    "microbatches",
    "multi_steps",
    "pipeline_sums",
    "prepare_state",
    "split_model",
    "step_batches",
    "train_step",
]

__getattr__ = moved_names(
    __name__,
    {name: f"rampup.rl.minibatches.{name}" for name in ("Microbatch", "MiniBatch", "mini_batches", "overlap", "regroup")}
    | {"gpipe_sums": "rampup.bench.gpipe.gpipe_sums"},
)
