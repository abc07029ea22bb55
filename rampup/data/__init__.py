"""Rows, their order, and the batch of every step."""

from rampup import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"BatchLoader": "rampup.data.batches", "BatchOptions": "rampup.data.batches"},
)
