"""The data of `rampup train`: what the configuration reads, in which order, and which rows a step has."""

from __future__ import annotations

from typing import Any

from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.plan.plan import RampPlan
from rampup.run.data.batches import SampleOrder
from rampup.run.data.files import open_sources
from rampup.run.data.sources import RowSource


def sources(config: Config) -> tuple[RowSource, RowSource]:
    """Return the rows to train on and those to evaluate on."""
    return open_sources(
        config.dataset_type,
        train_files=config.grain_train_files,
        eval_files=config.grain_eval_files,
        holdout_fraction=config.eval_holdout_fraction,
        sequence_length=config.max_target_length,
        vocab_size=config.vocab_size,
        token_dtype=config.token_dtype,
    )


def data_options(config: Config) -> dict[str, Any]:
    """Return how rows become batches, as `step_batches` takes it."""
    return {
        "seed": config.data_shuffle_seed if config.enable_data_shuffling else None,
        "num_epochs": None if config.num_epoch == -1 else config.num_epoch,
        "num_threads": config.grain_num_threads,
        "read_ahead": config.grain_prefetch_buffer_size,
    }


def rows_of_step(config: Config, plan: RampPlan, step: int) -> list[dict[str, Any]]:
    """Return the samples that a step reads: number of the sample, row and where it comes from.

    Raises:
        RampupError: no such step, or no such data.
    """
    if not 0 <= step < plan.total_steps:
        raise ConfigError(
            f"step={step} must be from 0 to {plan.total_steps - 1}", key="step", nearest=(0, plan.total_steps - 1)
        )
    rows, _ = sources(config)
    options = data_options(config)
    order = SampleOrder(len(rows), seed=options["seed"], num_epochs=options["num_epochs"])
    order.check(plan.ramp.samples_before(step + 1))
    numbers = order.rows(plan.rows(step)).tolist()
    samples = zip(plan.rows(step), numbers, strict=True)
    return [{"sample": sample, "row": row, "source": rows.describe(row)} for sample, row in samples]


def described_rows(rows: RowSource, order: SampleOrder, plan: RampPlan, step: int) -> list[str]:
    """Return where each row of a step comes from."""
    return [rows.describe(row) for row in order.rows(plan.rows(step)).tolist()]
