"""Batch ramp-up and pipeline-microbatch scheduling for JAX.

Everything a user needs is a name of this package: `rampup.load_config`,
`rampup.train_step`, ... A name is imported when it is first used, so planning a run
does not import jax.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from rampup.batch_size.hyperparameters import AdamConstants as AdamConstants
    from rampup.batch_size.hyperparameters import AdamScaling as AdamScaling
    from rampup.batch_size.noise_scale import NoiseEstimate as NoiseEstimate
    from rampup.batch_size.noise_scale import NoiseScale as NoiseScale
    from rampup.config.build import build_plan as build_plan
    from rampup.config.load import load_config as load_config
    from rampup.config.schema import Config as Config
    from rampup.data.batches import BatchLoader as BatchLoader
    from rampup.data.batches import microbatches as microbatches
    from rampup.data.batches import step_batches as step_batches
    from rampup.data.batches import stream_batches as stream_batches
    from rampup.dialects import check_command as check_command
    from rampup.dialects import check_file as check_file
    from rampup.engine.accumulate import AccumulatedLoss as AccumulatedLoss
    from rampup.engine.accumulate import accumulate as accumulate
    from rampup.engine.accumulate import multi_steps as multi_steps
    from rampup.engine.batch import Batch as Batch
    from rampup.engine.check_loss import LossReport as LossReport
    from rampup.engine.check_loss import check_loss as check_loss
    from rampup.engine.mesh import BatchAxes as BatchAxes
    from rampup.engine.mesh import make_mesh as make_mesh
    from rampup.engine.nnx import merge_model as merge_model
    from rampup.engine.nnx import split_model as split_model
    from rampup.engine.optimizer import AdamSchedule as AdamSchedule
    from rampup.engine.optimizer import LearningRate as LearningRate
    from rampup.engine.optimizer import make_optimizer as make_optimizer
    from rampup.engine.pipeline import PipelinedLoss as PipelinedLoss
    from rampup.engine.state import TrainState as TrainState
    from rampup.engine.state import create_state as create_state
    from rampup.engine.state import prepare_state as prepare_state
    from rampup.engine.step import EvalStep as EvalStep
    from rampup.engine.step import TrainStep as TrainStep
    from rampup.engine.step import train_step as train_step
    from rampup.errors import BatchDivisibilityError as BatchDivisibilityError
    from rampup.errors import ConfigError as ConfigError
    from rampup.errors import DataError as DataError
    from rampup.errors import DataWarning as DataWarning
    from rampup.errors import LossWarning as LossWarning
    from rampup.errors import MissingDependencyError as MissingDependencyError
    from rampup.errors import PipelineShapeError as PipelineShapeError
    from rampup.errors import RampDefinitionError as RampDefinitionError
    from rampup.errors import RampupError as RampupError
    from rampup.errors import ResumeMismatchError as ResumeMismatchError
    from rampup.errors import ResumeWarning as ResumeWarning
    from rampup.inspection.inspect import Inspection as Inspection
    from rampup.inspection.inspect import inspect as inspect
    from rampup.lm.branches import CriticalBatch as CriticalBatch
    from rampup.lm.branches import find_critical_batch_size as find_critical_batch_size
    from rampup.lm.load import LoadedRun as LoadedRun
    from rampup.lm.train import Run as Run
    from rampup.lm.train import train as train
    from rampup.loop.checkpoint import CheckpointOptions as CheckpointOptions
    from rampup.loop.components import Component as Component
    from rampup.loop.loop import EvalOptions as EvalOptions
    from rampup.loop.loop import Loop as Loop
    from rampup.loop.loop import Summary as Summary
    from rampup.loop.metrics import MetricOptions as MetricOptions
    from rampup.plan.learning_rate import Seesaw as Seesaw
    from rampup.plan.mesh_axes import MeshAxes as MeshAxes
    from rampup.plan.pipeline import Timetable as Timetable
    from rampup.plan.plan import PlanPosition as PlanPosition
    from rampup.plan.plan import RampPlan as RampPlan
    from rampup.plan.ramp import BatchRamp as BatchRamp
    from rampup.plan.ramp import Phase as Phase
    from rampup.plan.ramp_keys import RampupBatchManager as RampupBatchManager
    from rampup.plan.ramp_keys import ramp_from_config as ramp_from_config
    from rampup.plan.split import BatchSplit as BatchSplit
    from rampup.plan.split import BatchSplitter as BatchSplitter
    from rampup.plan.topology import Topology as Topology
    from rampup.rl.plan import RolloutPlan as RolloutPlan
    from rampup.rl.train import load as load
    from rampup.show.progress import TrainProgress as TrainProgress
    from rampup.tune.measured_design import design_ramp as design_ramp
    from rampup.tune.topology import topology_devices as topology_devices

__version__ = "0.1.0"

# Where each public name is defined, as the imports above say to editors.
_HOMES = {
    "rampup.batch_size.hyperparameters": "AdamConstants AdamScaling",
    "rampup.batch_size.noise_scale": "NoiseEstimate NoiseScale",
    "rampup.config.build": "build_plan",
    "rampup.config.load": "load_config",
    "rampup.config.schema": "Config",
    "rampup.data.batches": "BatchLoader microbatches step_batches stream_batches",
    "rampup.dialects": "check_command check_file",
    "rampup.engine.accumulate": "AccumulatedLoss accumulate multi_steps",
    "rampup.engine.batch": "Batch",
    "rampup.engine.check_loss": "LossReport check_loss",
    "rampup.engine.mesh": "BatchAxes make_mesh",
    "rampup.engine.nnx": "merge_model split_model",
    "rampup.engine.optimizer": "AdamSchedule LearningRate make_optimizer",
    "rampup.engine.pipeline": "PipelinedLoss",
    "rampup.engine.state": "TrainState create_state prepare_state",
    "rampup.engine.step": "EvalStep TrainStep train_step",
    "rampup.errors": (
        "BatchDivisibilityError ConfigError DataError DataWarning LossWarning"
        " MissingDependencyError PipelineShapeError RampDefinitionError RampupError"
        " ResumeMismatchError ResumeWarning"
    ),
    "rampup.inspection.inspect": "Inspection inspect",
    "rampup.lm.branches": "CriticalBatch find_critical_batch_size",
    "rampup.lm.load": "LoadedRun",
    "rampup.lm.train": "Run train",
    "rampup.loop.checkpoint": "CheckpointOptions",
    "rampup.loop.components": "Component",
    "rampup.loop.loop": "EvalOptions Loop Summary",
    "rampup.loop.metrics": "MetricOptions",
    "rampup.plan.learning_rate": "Seesaw",
    "rampup.plan.mesh_axes": "MeshAxes",
    "rampup.plan.pipeline": "Timetable",
    "rampup.plan.plan": "PlanPosition RampPlan",
    "rampup.plan.ramp": "BatchRamp Phase",
    "rampup.plan.ramp_keys": "RampupBatchManager ramp_from_config",
    "rampup.plan.split": "BatchSplit BatchSplitter",
    "rampup.plan.topology": "Topology",
    "rampup.rl.plan": "RolloutPlan",
    "rampup.rl.train": "load",
    "rampup.show.progress": "TrainProgress",
    "rampup.tune.measured_design": "design_ramp",
    "rampup.tune.topology": "topology_devices",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = ("batch_size", "config", "data", "dialects", "engine", "inspection", "integrations", "lm", "loop", "plan", "rl",
            "show", "tune")  # fmt: skip
__all__ = sorted(_HOME)
# The classes that a notebook shows as HTML, which `rampup.show.notebook` makes when it
# is needed.
_SHOWN = {name: _HOME[name] for name in ("BatchRamp", "RampPlan", "RolloutPlan")} | {
    "Verdict": "rampup.dialects.verdict"
}


def load_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Return a public name of a package from its module in `homes`, and keep it in the
    package.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(homes[name]), name)
    setattr(sys.modules[package], name, value)
    return value


def __getattr__(name: str) -> Any:
    return (
        importlib.import_module(f"rampup.{name}")
        if name in _MODULES
        else load_name(__name__, _HOME, name)
    )


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])


def _to_html(value: Any) -> Any:
    return importlib.import_module("rampup.show.notebook").to_html(value)


# Tell IPython, if this process is one of its shells, how to show the classes. By name:
# this imports none of them.
_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
if (_formatter := getattr(_shell, "display_formatter", None)) is not None:
    for _name, _module in _SHOWN.items():
        _formatter.formatters["text/html"].for_type_by_name(_module, _name, _to_html)
