"""The plan of a run: pure arithmetic on integers and fractions, without jax."""

from rampup.plan.hyperparameters import AdamConstants as AdamConstants
from rampup.plan.hyperparameters import AdamScaling as AdamScaling
from rampup.plan.learning_rate import RateRule as RateRule
from rampup.plan.learning_rate import Seesaw as Seesaw
from rampup.plan.mesh_axes import MeshAxes as MeshAxes
from rampup.plan.noise_scale import NoiseEstimate as NoiseEstimate
from rampup.plan.noise_scale import NoiseScale as NoiseScale
from rampup.plan.pipeline import Timetable as Timetable
from rampup.plan.plan import Growth as Growth
from rampup.plan.plan import PlanPosition as PlanPosition
from rampup.plan.plan import RampPlan as RampPlan
from rampup.plan.ramp import BatchRamp as BatchRamp
from rampup.plan.ramp import Phase as Phase
from rampup.plan.ramp_keys import RampupBatchManager as RampupBatchManager
from rampup.plan.ramp_keys import ramp_from_config as ramp_from_config
from rampup.plan.split import BatchSplit as BatchSplit
from rampup.plan.split import BatchSplitter as BatchSplitter
