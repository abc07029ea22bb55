"""What will happen: pure integers and fractions, no jax, no clock, no globals."""

from rampup.moved import moved_names
from rampup.plan.maxtext_manager import RampupBatchManager
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.per_device import define_ramp
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
    "define_ramp",
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
    },
)
