"""Batch ramp-up and pipeline-microbatch scheduling for JAX.

Most programs need five names:

- `load_config(path)` reads a base.yml file.
- `build_plan(config)` turns it into a `RampPlan`: every phase, checked before step 0.
- `RampupBatchManager(config, step)` is the same arithmetic inside a loop of your own.
- `train_step(loss_fn, tx, plan, mesh)` is the compiled step: one program for the ramp.
- `Loop(...)` is a run in its folder: metrics, checkpoints, and an exact resume.

The other public names are in groups in `docs/reference/api.md`, and each room has those
that fewer programs need: `rampup.plan`, `rampup.data`, `rampup.engine`, `rampup.checks`,
`rampup.loop`, `rampup.errors`, and what is optional in `rampup.contrib`. A name is imported when it is
first used, so planning a run does not import jax.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from rampup.checks.loss import check_loss as check_loss
    from rampup.checks.step import check_step as check_step
    from rampup.config.build import build_plan as build_plan
    from rampup.config.load import load_config as load_config
    from rampup.config.schema import Config as Config
    from rampup.data.batches import microbatches as microbatches
    from rampup.data.batches import step_batches as step_batches
    from rampup.data.batches import stream_batches as stream_batches
    from rampup.engine.accumulate import AccumulatedLoss as AccumulatedLoss
    from rampup.engine.accumulate import accumulate as accumulate
    from rampup.engine.batch import Batch as Batch
    from rampup.engine.evaluation import EvalStep as EvalStep
    from rampup.engine.mesh import BatchAxes as BatchAxes
    from rampup.engine.mesh import make_mesh as make_mesh
    from rampup.engine.multi_steps import multi_steps as multi_steps
    from rampup.engine.nnx import merge_model as merge_model
    from rampup.engine.nnx import split_model as split_model
    from rampup.engine.optimizer import make_optimizer as make_optimizer
    from rampup.engine.pipeline import PipelinedLoss as PipelinedLoss
    from rampup.engine.state import TrainState as TrainState
    from rampup.engine.state import create_state as create_state
    from rampup.engine.state import prepare_state as prepare_state
    from rampup.engine.step import train_step as train_step
    from rampup.errors import RampupError as RampupError
    from rampup.lm.load import load as load
    from rampup.lm.train import train as train
    from rampup.loop.checkpoint import CheckpointOptions as CheckpointOptions
    from rampup.loop.loop import EvalOptions as EvalOptions
    from rampup.loop.loop import Loop as Loop
    from rampup.loop.metrics import MetricOptions as MetricOptions
    from rampup.plan.mesh_axes import MeshAxes as MeshAxes
    from rampup.plan.plan import RampPlan as RampPlan
    from rampup.plan.ramp import BatchRamp as BatchRamp
    from rampup.plan.ramp import Phase as Phase
    from rampup.plan.ramp_keys import RampupBatchManager as RampupBatchManager
    from rampup.plan.ramp_keys import ramp_from_config as ramp_from_config
    from rampup.plan.split import BatchSplit as BatchSplit
    from rampup.plan.split import BatchSplitter as BatchSplitter
    from rampup.show.progress import TrainProgress as TrainProgress

__version__ = "0.1.0"

# Where each public name is defined, as the imports above say to editors.
_HOME = {
    # Most programs need these.
    "load_config": "rampup.config.load",
    "build_plan": "rampup.config.build",
    "RampupBatchManager": "rampup.plan.ramp_keys",
    "train_step": "rampup.engine.step",
    "Loop": "rampup.loop.loop",
    # Configuration and plans.
    "Config": "rampup.config.schema",
    "BatchRamp": "rampup.plan.ramp",
    "Phase": "rampup.plan.ramp",
    "RampPlan": "rampup.plan.plan",
    "BatchSplitter": "rampup.plan.split",
    "BatchSplit": "rampup.plan.split",
    "MeshAxes": "rampup.plan.mesh_axes",
    "ramp_from_config": "rampup.plan.ramp_keys",
    # The batch of every step.
    "step_batches": "rampup.data.batches",
    "stream_batches": "rampup.data.batches",
    "microbatches": "rampup.data.batches",
    "Batch": "rampup.engine.batch",
    # The compiled step.
    "make_mesh": "rampup.engine.mesh",
    "BatchAxes": "rampup.engine.mesh",
    "TrainState": "rampup.engine.state",
    "create_state": "rampup.engine.state",
    "prepare_state": "rampup.engine.state",
    "split_model": "rampup.engine.nnx",
    "merge_model": "rampup.engine.nnx",
    "make_optimizer": "rampup.engine.optimizer",
    "EvalStep": "rampup.engine.evaluation",
    "AccumulatedLoss": "rampup.engine.accumulate",
    "accumulate": "rampup.engine.accumulate",
    "multi_steps": "rampup.engine.multi_steps",
    "PipelinedLoss": "rampup.engine.pipeline",
    "check_loss": "rampup.checks.loss",
    "check_step": "rampup.checks.step",
    # A run in its folder.
    "EvalOptions": "rampup.loop.loop",
    "CheckpointOptions": "rampup.loop.checkpoint",
    "MetricOptions": "rampup.loop.metrics",
    "TrainProgress": "rampup.show.progress",
    "train": "rampup.lm.train",
    "load": "rampup.lm.load",
    # Errors.
    "RampupError": "rampup.errors",
}
# Names that fewer programs need, by the room that has them.
_ROOMS = {
    "rampup.errors": "BatchDivisibilityError ConfigError DataEndedError DataError DataWarning LossWarning MissingDependencyError PipelineShapeError RampDefinitionError ResumeMismatchError ResumeWarning",
    "rampup.plan": "AdamConstants AdamScaling Growth NoiseEstimate NoiseScale PlanPosition RateRule Seesaw Timetable",
    "rampup.data": "BatchLoader BatchOptions",
    "rampup.engine": "AdamSchedule LearningRate TrainStep",
    "rampup.checks": "LossProblem LossReport ParameterCheck StepReport",
    "rampup.loop": "Component Summary ramp_to_continue",
    "rampup.lm": "LoadedRun Run",
    "rampup.plan.topology": "Topology",
    "rampup.contrib.check": "check_command check_file",
    "rampup.contrib.rl": "RolloutPlan",
    "rampup.contrib.lab": "CriticalBatch Inspection design_ramp find_critical_batch_size inspect topology_devices",
}
_MODULES = (
    "checks",
    "config",
    "contrib",
    "data",
    "engine",
    "errors",
    "lm",
    "loop",
    "plan",
    "show",
)
__all__ = list(_HOME)
# The classes that a notebook shows as HTML, which `rampup.show.notebook` makes when it
# is needed.
_SHOWN = {
    "BatchRamp": "rampup.plan.ramp",
    "RampPlan": "rampup.plan.plan",
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


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are
    imported from their modules in `homes` when they are first used.
    """
    names = sorted(homes)
    return functools.partial(load_name, package, homes), lambda: names, names


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rampup.{name}")
    for room, names in _ROOMS.items():
        if name in names.split():
            raise AttributeError(
                f"module 'rampup' has no attribute {name!r}; it is {room}.{name}"
            )
    return load_name(__name__, _HOME, name)


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
