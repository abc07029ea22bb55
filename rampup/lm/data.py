"""The data of `rampup train`: the configured files, the order of their rows, and the rows of a step."""

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


def sample_order(config: Config, num_rows: int, consumed_samples: int) -> SampleOrder:
    """Return the order of the training rows.

    Args:
        config: the configuration.
        num_rows: training rows.
        consumed_samples: samples that will be read.

    Raises:
        DataError: `num_epoch` passes contain fewer samples.
    """
    seed = config.data_shuffle_seed if config.enable_data_shuffling else None
    order = SampleOrder(num_rows, seed=seed, num_epochs=None if config.num_epoch == -1 else config.num_epoch)
    order.check(consumed_samples)
    return order


def rows_of_step(config: Config, plan: RampPlan, step: int) -> list[dict[str, Any]]:
    """Return the samples that a step reads: number of the sample, row, and where the row comes from.

    Raises:
        RampupError: no such step, or no such data.
    """
    if not 0 <= step < plan.total_steps:
        raise ConfigError(
            f"step={step} must be from 0 to {plan.total_steps - 1}", key="step", nearest=(0, plan.total_steps - 1)
        )
    rows, _ = sources(config)
    order = sample_order(config, len(rows), plan.ramp.samples_before(step + 1))
    samples = zip(plan.rows(step), order.rows(plan.rows(step)).tolist(), strict=True)
    return [{"sample": sample, "row": row, "source": rows.describe(row)} for sample, row in samples]
