"""Rebuilds the plan of a resumed run so that its global batches do not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rampup.config.build import build_plan
from rampup.config.schema import KEYS, RAMP_KEYS, Config
from rampup.errors import BatchDivisibilityError, PipelineShapeError, RampupError, ResumeMismatchError
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.seesaw import Seesaw

# The keys that set the length of a run, and the shape of its learning rate.
BUDGET_KEYS = ("steps", "train_samples", "train_tokens")
SCHEDULE_KEYS = (
    "lr_schedule_type",
    "learning_rate_schedule_steps",
    "warmup_steps_fraction",
    "learning_rate_final_fraction",
    "wsd_decay_steps_fraction",
    "wsd_decay_style",
)


def ramp_record(config: Config, plan: RampPlan) -> dict[str, Any]:
    """Return a checkpoint's description of the ramp, as JSON: its phases, the keys that define it, and the devices."""
    return {
        "ramp": plan.ramp.to_rows(),
        "ramp_keys": ramp_keys(config),
        "num_devices": plan.num_devices,
        "eval_per_device_batch_size": str(config.eval_per_device_batch_size),
        "eval_global_batch_size": plan.eval_global_batch_size,
        **({} if plan.seesaw is None else {"seesaw": plan.seesaw.to_dict()}),
    }


def plan_to_resume(config: Config, num_devices: int, record: Mapping[str, Any]) -> RampPlan:
    """Return the plan of a resumed run.

    If the keys that define the ramp are unchanged, so are the batches, also on another number of devices. If they define
    another ramp, `on_plan_change` decides.

    Args:
        config: the configuration of the resumed run.
        num_devices: its number of devices.
        record: the `ramp_record` in the checkpoint, and the checkpoint's `step`.

    Raises:
        ResumeMismatchError: a global batch cannot be split here (the error gives the nearest numbers of devices that can), or
            the ramp is another one (the error shows both).
    """
    before, now = BatchRamp.from_rows(record["ramp"]), ramp_keys(config)
    # A key that an older version does not have was off.
    old = {name: value for name, value in record["ramp_keys"].items() if value is not None}
    if {name: value for name, value in now.items() if value is not None} == old:
        return _same_batches(config, num_devices, before, record)
    plan = build_plan(config, num_devices)
    if plan.ramp.fingerprint == before.fingerprint:
        return plan
    if config.on_plan_change == "continue_by_samples":
        ramp = before.spliced_at(record["step"], plan.ramp)
        seesaw = plan.seesaw and replace(plan.seesaw, ramp=ramp)
        return build_plan(config, num_devices, ramp=ramp, seesaw=seesaw, eval_size=plan.eval_global_batch_size)
    # With Seesaw, the length of the run and its schedule define the ramp too; without, they do not.
    names = [key for key in {**old, **now} if key in RAMP_KEYS or (key in old and key in now)]
    changed = [f"{key}: {old.get(key)} -> {now.get(key)}" for key in names if old.get(key) != now.get(key)]
    raise ResumeMismatchError(
        f"the ramp is not that of the checkpoint of step {record['step']} ({'; '.join(changed)}):\n"
        f"{before.compare(plan.ramp)}\n"
        "restore the keys, or set on_plan_change=continue_by_samples to continue with the new sizes by samples consumed",
        key="on_plan_change",
        nearest=("continue_by_samples",),
    )


def ramp_keys(config: Config) -> dict[str, str | None]:
    """Return the keys that define the ramp, as text.

    The length of the run is among them only if the ramp depends on it, and the learning-rate schedule only with Seesaw.
    """
    names = set(RAMP_KEYS) - set(BUDGET_KEYS)
    if config.seesaw_factor is not None:
        names |= {*BUDGET_KEYS, *SCHEDULE_KEYS, "max_target_length", "opt_type"}
    elif "%" in (config.batch_size_schedule or ""):
        names |= {*BUDGET_KEYS} - {"steps"}
    return {name: None if (value := getattr(config, name)) is None else str(value) for name in KEYS if name in names}


def _same_batches(config: Config, num_devices: int, ramp: BatchRamp, record: Mapping[str, Any]) -> RampPlan:
    same_eval = str(config.eval_per_device_batch_size) == record["eval_per_device_batch_size"]
    eval_size = record["eval_global_batch_size"] if same_eval else None
    seesaw = Seesaw.from_dict(record["seesaw"], ramp) if "seesaw" in record else None

    def plan_for(number: int) -> RampPlan:
        return build_plan(config, number, ramp=ramp, seesaw=seesaw, eval_size=eval_size)

    try:
        return plan_for(num_devices)
    except (BatchDivisibilityError, PipelineShapeError) as error:
        nearest = _nearest_devices(plan_for, num_devices)
        text = f"the run was on {record['num_devices']} devices, and its batches cannot be split for num_devices={num_devices}"
        text += f"; nearest that can: {', '.join(map(str, nearest)) or 'none'}. {error}"
        raise ResumeMismatchError(text, key="num_devices", nearest=nearest) from None


def _nearest_devices(plan_for: Any, num_devices: int) -> list[int]:
    """Return the nearest smaller and larger number of devices for which there is a plan."""

    def works(number: int) -> bool:
        try:
            plan_for(number)
        except RampupError:
            return False
        return True

    below = next((n for n in range(num_devices - 1, max(num_devices - 1025, 0), -1) if works(n)), None)
    above = next((n for n in range(num_devices + 1, min(2 * num_devices + 64, num_devices + 1024)) if works(n)), None)
    return [n for n in (below, above) if n is not None]
