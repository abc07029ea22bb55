"""From a configuration to its plan, or to all that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rampup.config.draft import Draft, plan_or_first_error
from rampup.config.schema import Config
from rampup.errors import ConfigError, RampupError, a_type
from rampup.plan.learning_rate import Seesaw
from rampup.plan.numbers import AUTO, check_whole
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.topology import Topology


def build_plan(
    config: Config,
    num_devices: int | None = None,
    *,
    ramp: BatchRamp | None = None,
    seesaw: Seesaw | None = None,
    eval_size: int | None = None,
    reserved_sizes: Sequence[int] | None = None,
    consumed_samples: int = 0,
) -> RampPlan:
    """Return the plan that a configuration describes. The rate of its `batch_scaling`
    acts where the optimizer has a `rampup.engine.LearningRate` with this plan, and the
    constants of AdamW where it has a `rampup.engine.AdamSchedule`.

    Args:
        config: the configuration.
        num_devices: None = the configuration's `num_devices`, which must then not be
            -1.
        ramp, seesaw: the ramp of a resumed run and the transform that made it, instead
            of those that the keys describe.
        eval_size, reserved_sizes: its evaluation batch in samples, and its sizes of
            `batch_size_schedule: auto`.
        consumed_samples: samples after which the run goes on with the ramp of the keys.
            Phases before them need no split.

    Returns:
        The plan, with every phase checked.

    Raises:
        RampupError: the rules that the configuration breaks in any phase or in
            evaluation, all at once.

    Example:
        >>> plan = build_plan(Config(enable_rampup_batch_size=True), num_devices=4)
        >>> plan.ramp.sizes
        (8, 16, 24, 32)
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"build_plan takes a Config, not {a_type(config)}",
            fix="read a file with rampup.load_config(PATH)",
        )
    num_devices = config.num_devices if num_devices is None else num_devices
    check_whole(num_devices=num_devices)
    if num_devices < 1:
        raise ConfigError(
            f"num_devices={num_devices} must be at least 1",
            fix="pass the number to `build_plan` or set the key",
            key="num_devices",
            nearest=(1,),
        )
    draft = Draft(
        config=config,
        num_devices=num_devices,
        ramp=ramp,
        seesaw=seesaw,
        eval_size=eval_size,
        reserved_sizes=reserved_sizes,
        consumed_samples=consumed_samples,
    )
    try:
        return plan_or_first_error(replace(draft))
    except RampupError as error:
        # A legal plan does not load what is wrong with others.
        from rampup.config.refusal import all_problems

        raise all_problems(draft, error) from None


def with_slices(config: Config, topology: Topology | None) -> Config:
    """Return the configuration for a topology, if there is one: with its number of
    slices, unless it sets another one.
    """
    if topology is None:
        return config
    for key in ("num_slices", "num_devices"):
        if (number := getattr(config, key)) not in (
            AUTO,
            has := getattr(topology, key),
        ):
            raise ConfigError(
                f"{key}={number}, but topology={topology.name} has {has}",
                key=key,
                nearest=(has, AUTO),
            )
    return (
        config
        if topology.num_slices == 1
        else replace(config, num_slices=topology.num_slices)
    )
