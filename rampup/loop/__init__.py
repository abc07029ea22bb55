"""A run in its folder: the loop over steps, checkpoints, metrics and other
processes.
"""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Component": "rampup.loop.components",
        "Summary": "rampup.loop.loop",
        "find_checkpoint": "rampup.loop.checkpoint",
        "ramp_to_continue": "rampup.loop.loop",
    },
)
