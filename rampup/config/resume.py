"""The plan of a resumed run: its global batches are those of the checkpoint, also on
another number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rampup.config.build import build_plan
from rampup.config.devices import list_devices, numbers_that_can
from rampup.config.rules import BUDGET_KEYS
from rampup.config.schema import KEYS, RAMP_KEYS, Config
from rampup.errors import (
    BatchDivisibilityError,
    PipelineShapeError,
    ResumeMismatchError,
)
from rampup.plan.learning_rate import Seesaw
from rampup.plan.numbers import nearest_in
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import AUTO_SCHEDULE


def ramp_record(config: Config, plan: RampPlan) -> dict[str, Any]:
    """Return what a checkpoint has of the ramp beside its rows, as JSON: the keys that
    define it, and the devices.
    """
    return {
        "ramp_keys": ramp_keys(config),
        "num_devices": plan.num_devices,
        "reference_size": plan.reference_size,
        "eval_per_device_batch_size": str(config.eval_per_device_batch_size),
        "eval_global_batch_size": plan.eval_global_batch_size,
        **({} if plan.seesaw is None else {"seesaw": plan.seesaw.to_dict()}),
        **(
            {"reserved_sizes": list(plan.reserved_sizes)} if plan.reserved_sizes else {}
        ),
    }


def plan_to_resume(
    config: Config, num_devices: int, record: Mapping[str, Any]
) -> RampPlan:
    """Return the plan of a resumed run from its checkpoint's `ramp_record`, with the
    rows of its `ramp`, and `step`.

    Unchanged keys keep the batches, also on other devices, or a ResumeMismatchError
    gives the nearest numbers of devices that can split them. For another ramp,
    `on_plan_change` decides. Phases that the run has left need no split: a run whose
    batch has grown goes on with more devices. The batch for which the rates are given
    stays.
    """
    plan = _plan_of_ramp(config, num_devices, record)
    was, now = record.get("reference_size"), plan.reference_size
    if config.batch_scaling != "none" and was not in (None, now):
        raise ResumeMismatchError(
            f"learning_rate is that of a batch of {was:,} samples in the checkpoint and"
            f" of {now:,} here, so that batch_scaling={config.batch_scaling} would"
            " change the rate of every batch",
            fix=f"set batch_scaling_reference={was} to keep the rates",
            key="batch_scaling_reference",
            nearest=(was,),
        )
    return plan


def _plan_of_ramp(
    config: Config, num_devices: int, record: Mapping[str, Any]
) -> RampPlan:
    """Return the plan of a resumed run, or refuse its ramp; see `plan_to_resume`."""
    before = BatchRamp.from_rows(record["ramp"]).resumed_at(record["step"])
    now = ramp_keys(config)
    old: dict[str, str | None] = record["ramp_keys"]
    if now == old:
        same = _same_batches(config, before, record)
        try:
            return build_plan(config, num_devices, **same)
        except (BatchDivisibilityError, PipelineShapeError) as error:
            was = record["num_devices"]
            numbers = numbers_that_can(config, was, same)
            raise ResumeMismatchError(
                f"the run was on num_devices={was}, and its batches cannot be split for"
                f" num_devices={num_devices}; numbers of devices that can run all of"
                f" them: {list_devices(numbers)} (rampup train --fake-devices N"
                f" simulates N on a CPU). {error}",
                key="num_devices",
                nearest=nearest_in(num_devices, numbers),
            ) from None
    plan = build_plan(
        config, num_devices, consumed_samples=before.samples_before(record["step"])
    )
    if plan.ramp.fingerprint == before.fingerprint:
        return plan
    if config.on_plan_change == "continue_by_samples":
        # A batch that follows the noise stays as it is, and grows to the new sizes.
        follows = (
            config.batch_size_schedule == AUTO_SCHEDULE and "reserved_sizes" in record
        )
        ramp = before if follows else before.spliced_at(record["step"], plan.ramp)
        seesaw = plan.seesaw and replace(plan.seesaw, ramp=ramp)
        return build_plan(
            config,
            num_devices,
            ramp=ramp,
            seesaw=seesaw,
            eval_size=plan.eval_global_batch_size,
        )
    # With Seesaw, the length of the run and its schedule define the ramp too; without,
    # they do not.
    names = [
        key for key in {**old, **now} if key in RAMP_KEYS or (key in old and key in now)
    ]
    changed = [
        f"{key}: {old.get(key)} -> {now.get(key)}"
        for key in names
        if old.get(key) != now.get(key)
    ]
    raise ResumeMismatchError(
        f"the ramp is not that of the checkpoint of step {record['step']}"
        f" ({'; '.join(changed)}):\n{plan.ramp.differences(before.to_rows())}\nrestore"
        " the keys, as `rampup train RUN_DIR` does, or set"
        " on_plan_change=continue_by_samples to continue with the new sizes by samples"
        " consumed",
        key="on_plan_change",
        nearest=("continue_by_samples",),
    )


def ramp_keys(config: Config) -> dict[str, str | None]:
    """Return the keys that define the ramp, as text: the run's length if it counts, and
    the rate's schedule with Seesaw.
    """
    names = set(RAMP_KEYS) - set(BUDGET_KEYS)
    if config.batch_size_schedule == AUTO_SCHEDULE:
        names = {
            "batch_size_schedule",
            "gradient_accumulation_steps",
            "per_device_batch_size_start",
            "per_device_batch_size",
        }
    if config.seesaw_factor is not None:
        names |= {
            *BUDGET_KEYS,
            "max_target_length",
            "opt_type",
            "lr_schedule_type",
            "learning_rate_schedule_steps",
            "warmup_steps_fraction",
            "learning_rate_final_fraction",
            "wsd_decay_steps_fraction",
        }
    elif "%" in (config.batch_size_schedule or ""):
        names |= {*BUDGET_KEYS} - {"steps"}
    return {
        name: None if (value := getattr(config, name)) is None else str(value)
        for name in KEYS
        if name in names
    }


def _same_batches(
    config: Config, ramp: BatchRamp, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which `build_plan` keeps the batches of a record."""
    same_eval = (
        str(config.eval_per_device_batch_size) == record["eval_per_device_batch_size"]
    )
    return {
        "ramp": ramp,
        "seesaw": (
            Seesaw.from_dict(record["seesaw"], ramp) if "seesaw" in record else None
        ),
        "eval_size": record["eval_global_batch_size"] if same_eval else None,
        "reserved_sizes": record.get("reserved_sizes"),
    }


def possible_devices(config: Config, plan: RampPlan) -> list[int]:
    """Return the numbers of devices on which a run can continue with the batches of a
    plan; see `numbers_that_can`.
    """
    return numbers_that_can(
        config,
        plan.num_devices,
        _same_batches(config, plan.ramp, ramp_record(config, plan)),
    )
