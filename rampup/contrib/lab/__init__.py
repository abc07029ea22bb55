"""From a measurement to a decision: what fits, what is fast, how large a batch."""

from __future__ import annotations

from typing import Any

from rampup import load_name

_HOME = {
    "CriticalBatch": "rampup.contrib.lab.branches",
    "find_critical_batch_size": "rampup.contrib.lab.branches",
    "Inspection": "rampup.contrib.lab.inspection",
    "inspect": "rampup.contrib.lab.inspection",
    "design_ramp": "rampup.contrib.lab.measured_design",
    "largest_microbatch": "rampup.contrib.lab.largest",
    "suggest_batch": "rampup.contrib.lab.scaling_laws",
    "topology_devices": "rampup.contrib.lab.topology",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return __all__
