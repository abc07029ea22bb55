"""Batch ramp-up and pipeline-microbatch scheduling for JAX.

Everything a user needs is a name of this package: `rampup.load_config`, `rampup.train_step`, ... A name is imported when it is
first used, so planning a run does not import jax.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from rampup.moved import support_moved_modules

if TYPE_CHECKING:  # for editors and type checkers; a test compares this list with the table below
    from rampup.config.build import build_plan as build_plan
    from rampup.config.load import load_config as load_config
    from rampup.config.schema import Config as Config
    from rampup.dialects import check_command as check_command
    from rampup.dialects import check_file as check_file
    from rampup.errors import BatchDivisibilityError as BatchDivisibilityError
    from rampup.errors import ConfigError as ConfigError
    from rampup.errors import DataError as DataError
    from rampup.errors import MissingDependencyError as MissingDependencyError
    from rampup.errors import PipelineShapeError as PipelineShapeError
    from rampup.errors import RampDefinitionError as RampDefinitionError
    from rampup.errors import RampupError as RampupError
    from rampup.errors import ResumeMismatchError as ResumeMismatchError
    from rampup.lm.critical import CriticalBatch as CriticalBatch
    from rampup.lm.critical import find_critical_batch_size as find_critical_batch_size
    from rampup.lm.load import LoadedRun as LoadedRun
    from rampup.lm.load import load as load
    from rampup.lm.train import Run as Run
    from rampup.lm.train import train as train
    from rampup.plan.hyperparameters import AdamConstants as AdamConstants
    from rampup.plan.hyperparameters import AdamScaling as AdamScaling
    from rampup.plan.maxtext_manager import RampupBatchManager as RampupBatchManager
    from rampup.plan.mesh_axes import MeshAxes as MeshAxes
    from rampup.plan.noise_scale import NoiseEstimate as NoiseEstimate
    from rampup.plan.noise_scale import NoiseScale as NoiseScale
    from rampup.plan.per_device import ramp_from_config as ramp_from_config
    from rampup.plan.plan import PlanPosition as PlanPosition
    from rampup.plan.plan import RampPlan as RampPlan
    from rampup.plan.ramp import BatchRamp as BatchRamp
    from rampup.plan.ramp import Phase as Phase
    from rampup.plan.seesaw import Seesaw as Seesaw
    from rampup.plan.split import BatchSplit as BatchSplit
    from rampup.plan.split import BatchSplitter as BatchSplitter
    from rampup.plan.timetable import Timetable as Timetable
    from rampup.plan.topology import Topology as Topology
    from rampup.rl.plan import RolloutPlan as RolloutPlan
    from rampup.run.accumulate import accumulate as accumulate
    from rampup.run.accumulate import multi_steps as multi_steps
    from rampup.run.checkpoint import CheckpointOptions as CheckpointOptions
    from rampup.run.compile import topology_devices as topology_devices
    from rampup.run.data.batches import Batch as Batch
    from rampup.run.data.batches import BatchLoader as BatchLoader
    from rampup.run.data.batches import microbatches as microbatches
    from rampup.run.data.batches import step_batches as step_batches
    from rampup.run.inspect import Inspection as Inspection
    from rampup.run.inspect import inspect as inspect
    from rampup.run.loop import EvalOptions as EvalOptions
    from rampup.run.loop import Loop as Loop
    from rampup.run.loop import Summary as Summary
    from rampup.run.mesh import BatchAxes as BatchAxes
    from rampup.run.mesh import make_mesh as make_mesh
    from rampup.run.metrics import MetricOptions as MetricOptions
    from rampup.run.nnx import merge_model as merge_model
    from rampup.run.nnx import split_model as split_model
    from rampup.run.optimizer import AdamSchedule as AdamSchedule
    from rampup.run.optimizer import LearningRate as LearningRate
    from rampup.run.optimizer import make_optimizer as make_optimizer
    from rampup.run.pipeline import PipelinedLoss as PipelinedLoss
    from rampup.run.state import TrainState as TrainState
    from rampup.run.state import create_state as create_state
    from rampup.run.state import prepare_state as prepare_state
    from rampup.run.step import EvalStep as EvalStep
    from rampup.run.step import TrainStep as TrainStep
    from rampup.run.step import train_step as train_step
    from rampup.show.progress import TrainProgress as TrainProgress
    from rampup.tune.design import design_ramp as design_ramp

__version__ = "0.1.0"

# Where each public name is defined.
_HOMES = {
    "rampup.config.build": ("build_plan",),
    "rampup.config.load": ("load_config",),
    "rampup.config.schema": ("Config",),
    "rampup.dialects": ("check_command", "check_file"),
    "rampup.errors": (
        "BatchDivisibilityError",
        "ConfigError",
        "DataError",
        "MissingDependencyError",
        "PipelineShapeError",
        "RampDefinitionError",
        "RampupError",
        "ResumeMismatchError",
    ),
    "rampup.lm.critical": ("CriticalBatch", "find_critical_batch_size"),
    "rampup.lm.load": ("LoadedRun", "load"),
    "rampup.lm.train": ("Run", "train"),
    "rampup.plan.hyperparameters": ("AdamConstants", "AdamScaling"),
    "rampup.plan.maxtext_manager": ("RampupBatchManager",),
    "rampup.plan.mesh_axes": ("MeshAxes",),
    "rampup.plan.noise_scale": ("NoiseEstimate", "NoiseScale"),
    "rampup.plan.per_device": ("ramp_from_config",),
    "rampup.plan.plan": ("PlanPosition", "RampPlan"),
    "rampup.plan.ramp": ("BatchRamp", "Phase"),
    "rampup.plan.seesaw": ("Seesaw",),
    "rampup.plan.split": ("BatchSplit", "BatchSplitter"),
    "rampup.plan.timetable": ("Timetable",),
    "rampup.plan.topology": ("Topology",),
    "rampup.rl.plan": ("RolloutPlan",),
    "rampup.run.accumulate": ("accumulate", "multi_steps"),
    "rampup.run.checkpoint": ("CheckpointOptions",),
    "rampup.run.data.batches": ("Batch", "BatchLoader", "microbatches", "step_batches"),
    "rampup.run.inspect": ("Inspection", "inspect"),
    "rampup.run.loop": ("EvalOptions", "Loop", "Summary"),
    "rampup.run.mesh": ("BatchAxes", "make_mesh"),
    "rampup.run.metrics": ("MetricOptions",),
    "rampup.run.nnx": ("merge_model", "split_model"),
    "rampup.run.optimizer": ("AdamSchedule", "LearningRate", "make_optimizer"),
    "rampup.run.pipeline": ("PipelinedLoss",),
    "rampup.run.state": ("TrainState", "create_state", "prepare_state"),
    "rampup.run.step": ("EvalStep", "TrainStep", "train_step"),
    "rampup.run.compile": ("topology_devices",),
    "rampup.show.progress": ("TrainProgress",),
    "rampup.tune.design": ("design_ramp",),
}
_RENAMED = {"define_ramp": "ramp_from_config"}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("bench", "config", "dialects", "lm", "packing", "plan", "rl", "run", "show", "tune")
__all__ = sorted(_HOME)

support_moved_modules()


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"rampup.{name} is now rampup.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"rampup.{name}")
    raise AttributeError(f"module 'rampup' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
