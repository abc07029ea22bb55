"""Rows, their order, and the batch of every step."""

from rampup.moved import moved_names

__getattr__ = moved_names(
    __name__, {name: f"rampup.run.data.batches.{name}" for name in ("Batch", "SampleOrder", "microbatches", "step_batches")}
)
