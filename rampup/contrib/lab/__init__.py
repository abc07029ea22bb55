"""From a measurement to a decision: what fits, what is fast, how large a batch."""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "CriticalBatch": "rampup.contrib.lab.branches",
        "find_critical_batch_size": "rampup.contrib.lab.branches",
        "Inspection": "rampup.contrib.lab.inspection",
        "inspect": "rampup.contrib.lab.inspection",
        "design_ramp": "rampup.contrib.lab.measured_design",
        "largest_microbatch": "rampup.contrib.lab.largest",
        "suggest_batch": "rampup.contrib.lab.scaling_laws",
        "topology_devices": "rampup.contrib.lab.topology",
    },
)
