"""The plan of a run: pure arithmetic on integers and fractions, without jax."""

from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.per_device import RampupBatchManager, ramp_from_config
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
