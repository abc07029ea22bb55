"""The compiled training step: what runs on the devices."""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "AdamSchedule": "rampup.engine.optimizer",
        "LearningRate": "rampup.engine.optimizer",
        "TrainStep": "rampup.engine.step",
    },
)
