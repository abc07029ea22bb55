"""What will happen: pure integers and fractions, no jax, no clock, no globals."""

from rampup.plan.axes import MeshAxes
from rampup.plan.definition import define_ramp
from rampup.plan.manager import RampupBatchManager
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp, Phase
from rampup.plan.rollout import RolloutPlan, RolloutPosition
from rampup.plan.sizes import Size, data_parallel_size
from rampup.plan.split import BatchSplit, BatchSplitter
from rampup.plan.timetable import Timetable
from rampup.plan.updates import Training, Updates

__all__ = [
    "BatchRamp",
    "BatchSplit",
    "BatchSplitter",
    "MeshAxes",
    "Phase",
    "PlanPosition",
    "RampPlan",
    "RampupBatchManager",
    "RolloutPlan",
    "RolloutPosition",
    "Size",
    "Timetable",
    "Training",
    "Updates",
    "data_parallel_size",
    "define_ramp",
]
