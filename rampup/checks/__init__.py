"""Checks of a user's own program: whether its loss is a sum over rows, and whether its
compiled step is right on this machine.
"""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "LossProblem": "rampup.checks.loss",
        "LossReport": "rampup.checks.loss",
        "ParameterCheck": "rampup.checks.step",
        "StepReport": "rampup.checks.step",
    },
)
