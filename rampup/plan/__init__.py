"""The plan of a run: pure arithmetic on integers and fractions, without jax."""

from rampup.moved import moved_names
from rampup.plan.maxtext_manager import RampupBatchManager
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.per_device import ramp_from_config
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp, Phase
from rampup.plan.split import BatchSplit, BatchSplitter
from rampup.plan.timetable import Timetable

__all__ = [
    "BatchRamp",
    "BatchSplit",
    "BatchSplitter",
    "MeshAxes",
    "Phase",
    "PlanPosition",
    "RampPlan",
    "RampupBatchManager",
    "Timetable",
    "ramp_from_config",
]

__getattr__ = moved_names(
    __name__,
    {
        "RolloutPlan": "rampup.rl.plan.RolloutPlan",
        "RolloutPosition": "rampup.rl.plan.RolloutPosition",
        "Size": "rampup.rl.sizes.Size",
        "Training": "rampup.rl.updates.Training",
        "Updates": "rampup.rl.updates.Updates",
        "data_parallel_size": "rampup.rl.sizes.data_parallel_size",
        "define_ramp": "rampup.plan.per_device.ramp_from_config",
    },
)
