"""Builds the plan that a configuration describes: mesh, split, ramp, evaluation and
learning rate, one after the other.

The first broken rule ends the build. Then `rampup.config.refusal` finds every broken
rule and the nearest legal values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rampup.config.key import Settings
from rampup.config.schema import Config, OptimizerKeys
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampupError,
    a_type,
    raise_together,
)
from rampup.plan.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.plan.learning_rate import Seesaw, decay_progress, discretize
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.noise_scale import noise_problems
from rampup.plan.numbers import AUTO, exact_fraction
from rampup.plan.pipeline import (
    DEFAULT_OVERHEAD_TOKENS,
    pipeline_repeats,
)
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import (
    AUTO_SCHEDULE,
    auto_sizes,
    global_batch_sizes,
    ramp_from_config,
)
from rampup.plan.refusal import END, START, batch_error
from rampup.plan.split import BatchSplitter
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
    """Return the plan that a configuration describes.

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
            f"build_plan takes a Config, not {a_type(config)}; read a file with"
            " rampup.load_config(PATH)"
        )
    num_devices = config.num_devices if num_devices is None else num_devices
    if num_devices < 1:
        text = (
            f"num_devices={num_devices} must be at least 1; pass the number to"
            " `build_plan` or set the key"
        )
        raise ConfigError(text, key="num_devices", nearest=(1,))
    resumed: dict[str, Any] = {
        "ramp": ramp,
        "seesaw": seesaw,
        "eval_size": eval_size,
        "reserved_sizes": reserved_sizes,
        "consumed_samples": consumed_samples,
    }
    try:
        return plan_or_first_error(config, num_devices, **resumed)
    except RampupError:
        from rampup.config.refusal import all_problems

        raise all_problems(config, num_devices, resumed) from None


def plan_or_first_error(
    config: Config,
    num_devices: int,
    *,
    ramp: BatchRamp | None = None,
    seesaw: Seesaw | None = None,
    eval_size: int | None = None,
    reserved_sizes: Sequence[int] | None = None,
    consumed_samples: int = 0,
) -> RampPlan:
    """Return the plan of `build_plan`, or raise the error about the first rule that is
    broken.
    """
    axes = mesh_axes(config, num_devices)
    overhead = tick_overhead(config)
    splitter = make_splitter(config, axes, num_repeats(config, axes.pipeline), overhead)
    if config.batch_size_schedule == AUTO_SCHEDULE and reserved_sizes is None:
        reserved_sizes = sizes_to_reserve(config, num_devices, splitter)
    if ramp is None:
        ramp = make_ramp(config, num_devices, splitter, reserved_sizes)
        if config.seesaw_factor is not None:
            splitter.split(
                ramp.sizes
            )  # refuses planned batches too that no step has after the transform
            seesaw = make_seesaw(config, ramp, splitter)
            ramp = seesaw.ramp
        ramp = ramp.resumed_at(ramp.phase_of_sample(consumed_samples).start_step)
    if eval_size is None:
        eval_size = eval_batch(
            config, num_devices, seesaw.base if seesaw else ramp, splitter
        )
    # The steps of a configuration are those of the planned ramp. With Seesaw, others
    # consume the same samples.
    steps = config.total_steps
    schedule = (
        None
        if config.learning_rate_schedule_steps == AUTO
        else config.learning_rate_schedule_steps
    )
    if seesaw is not None:
        steps = None if steps is None else seesaw.steps_of(steps)
        schedule = None if schedule is None else seesaw.steps_of(schedule)
    rate_scaling, adam = config.batch_rule
    follows = config.batch_size_schedule == AUTO_SCHEDULE
    budget = budget_samples(config)
    needed = math.ceil(budget or 1)
    plan = RampPlan(
        ramp=ramp,
        splitter=splitter,
        num_devices=num_devices,
        axes=axes,
        total_steps=ramp.step_of_sample(needed - 1) + 1 if steps is None else steps,
        eval_global_batch_size=eval_size,
        learning_rate_batch_scaling=rate_scaling,
        learning_rate_clock=config.learning_rate_clock,
        learning_rate_schedule_steps=schedule,
        expansion_factor_real_data=config.expansion_factor_real_data,
        assumed_tick_overhead=overhead,
        reference_batch_size=config.batch_scaling_reference,
        seesaw=seesaw,
        reserved_sizes=tuple(reserved_sizes or ()),
        follows=follows,
        budget_samples=needed if budget is not None and follows else None,
    )
    if adam.is_active:
        hyperparameters(
            config, plan.of_all_sizes
        )  # a rule can give a value that is no decay rate
    if config.measure_gradient_noise:
        problems = [*noise_problems(plan, axes.data)]
        if splitter.num_stages > 1 and config.logits_via_embedding:
            rule = (
                "measure_gradient_noise=true with pipeline stages needs"
                " logits_via_embedding=false"
            )
            reason = (
                "the first and the last stage each have a part of the gradient of a"
                " tied embedding"
            )
            problems.append(
                ConfigError(
                    f"{rule}: {reason}", key="logits_via_embedding", nearest=(False,)
                )
            )
        raise_together(problems)
    return plan


def mesh_axes(config: Settings, num_devices: int) -> MeshAxes:
    """Return the devices along each mesh axis. A configuration without the keys of
    several slices, as rl.yml, has one.
    """
    groups = {
        group: {
            axis: getattr(config, f"{group}_{axis}_parallelism", 1) for axis in AXES
        }
        for group in ("ici", "dcn")
    }
    return MeshAxes.resolve(
        num_devices, num_slices=getattr(config, "num_slices", AUTO), **groups
    )


def tick_overhead(config: Config) -> Fraction:
    """Return the fixed cost of a pipeline tick in samples: as measured, or as
    assumed.
    """
    measured = config.pipeline_tick_overhead
    if measured is None:
        return Fraction(DEFAULT_OVERHEAD_TOKENS, config.max_target_length)
    return exact_fraction(
        measured, what="pipeline_tick_overhead", key="pipeline_tick_overhead"
    )


def num_repeats(config: Config, num_stages: int) -> int:
    """Return the layer chunks of a pipeline stage."""
    return pipeline_repeats(
        num_layers=config.base_num_decoder_layers,
        num_stages=num_stages,
        num_repeats=config.num_pipeline_repeats,
    )


def make_splitter(
    config: Config, axes: MeshAxes, repeats: int, overhead: Fraction
) -> BatchSplitter:
    """Return the rule that splits every batch of a run."""
    minimizes = (
        config.pipeline_tick_overhead is not None
        or config.rampup_microbatch == "per_phase"
    )
    return BatchSplitter(
        data_parallel_size=axes.data_parallel_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_stages=axes.pipeline,
        num_repeats=repeats,
        num_pipeline_microbatches=config.num_pipeline_microbatches,
        rampup_microbatch=config.rampup_microbatch,
        microbatch_size=config.microbatch_size,
        strict_multiple=config.pipeline_strict_multiple,
        tick_overhead=overhead if minimizes else None,
        min_microbatches=2 if config.measure_gradient_noise and axes.data == 1 else 1,
    )


def sizes_to_reserve(
    config: Config, num_devices: int, splitter: BatchSplitter
) -> tuple[int, ...]:
    """Return the sizes of `batch_size_schedule: auto`."""
    factor = num_devices * config.gradient_accumulation_steps
    unfixed = replace(splitter, microbatch_size=AUTO)
    start = global_batch_sizes(
        {START: config.per_device_batch_size_start}, factor, unfixed
    )
    largest = global_batch_sizes({END: config.per_device_batch_size}, factor, unfixed)
    return auto_sizes(start[START], largest[END])


def make_ramp(
    config: Config,
    num_devices: int,
    splitter: BatchSplitter | None,
    reserved_sizes: Sequence[int] | None,
) -> BatchRamp:
    """Return the ramp. A splitter refuses sizes per device that no microbatch fits;
    `RampPlan` checks every batch fully.
    """
    if config.batch_size_schedule == AUTO_SCHEDULE:
        assert reserved_sizes is not None
        return BatchRamp.constant(reserved_sizes[0])
    # If only `microbatch_size` does not fit, `RampPlan` refuses: the error then offers
    # other microbatches, not other sizes.
    unfixed = None if splitter is None else replace(splitter, microbatch_size=AUTO)
    return ramp_from_config(
        config, num_devices, budget=budget_samples(config), splitter=unfixed
    )


def make_seesaw(config: Config, base: BatchRamp, splitter: BatchSplitter) -> Seesaw:
    """Return the transform of the planned ramp and learning rate."""
    assert config.seesaw_factor is not None
    schedule = config.learning_rate_schedule_steps

    def rate(progress: float) -> float:
        done = decay_progress(
            progress,
            kind=config.lr_schedule_type,
            warmup_fraction=config.warmup_steps_fraction,
            decay_fraction=config.wsd_decay_steps_fraction,
            decay_style="linear",
        )
        return float(1 - (1 - config.learning_rate_final_fraction) * done)

    total = math.ceil(
        budget_samples(config) or base.samples_before(config.total_steps or 0)
    )
    length = total if schedule == AUTO else base.samples_before(schedule)
    return Seesaw(
        base=base,
        cuts=discretize(rate, factor=config.seesaw_factor, total_samples=length),
        max_batch_size=config.seesaw_max_batch_size,
        multiple=splitter.unit,
        total_samples=total,
        schedule_samples=length,
        exponent=1.0 if config.opt_type == "sgd" else 0.5,
    )


def eval_batch(
    config: Config, num_devices: int, ramp: BatchRamp | None, splitter: BatchSplitter
) -> int | None:
    """Return the samples of an evaluation batch; None if it is not needed and the
    default size cannot be split.
    """
    key = "eval_per_device_batch_size"
    size = config.eval_per_device_batch_size
    rule = splitter.for_eval()
    try:
        if size == 0 and config.batch_size_schedule is not None and ramp is not None:
            # A schedule gives global batches, so the default comes from its last one
            # instead of per_device_batch_size.
            whole = ramp.sizes[-1] // config.gradient_accumulation_steps
            if not rule.allows(whole):
                raise batch_error(
                    rule,
                    whole,
                    "evaluation, the last phase without accumulation",
                    key=key,
                )
            return whole
        return global_batch_sizes(
            {key: size or config.per_device_batch_size}, num_devices, rule
        )[key]
    except BatchDivisibilityError:
        if size == 0 and config.eval_interval == AUTO:
            return None
        raise


def hyperparameters(config: Config, plan: RampPlan) -> tuple[AdamConstants, ...]:
    """Return AdamW's constants for every segment of a plan's clock; a ConfigError if a
    rule gives one that is no decay rate.
    """
    return adam_constants(plan, adam_base(config), adam_scaling(config, plan))


def adam_base(config: OptimizerKeys) -> AdamConstants:
    """Return AdamW's constants for the reference batch."""
    return AdamConstants(
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
    )


def adam_scaling(config: Config, plan: RampPlan) -> AdamScaling:
    """Return how AdamW's constants depend on the batch."""
    reference = config.adam_weight_decay_reference_tokens
    scaling = config.batch_rule[1]
    samples = budget_samples(config) or plan.consumed_samples
    return replace(
        scaling,
        b2_floor=config.adam_b2_floor,
        # A larger adam_b2 of the reference batch stays as it is.
        b2_ceiling=(
            None
            if scaling.b2_ceiling is None
            else max(scaling.b2_ceiling, config.adam_b2)
        ),
        token_ratio=(
            1.0
            if reference is None
            else float(samples * config.max_target_length / reference)
        ),
    )


def budget_samples(config: Config) -> Fraction | None:
    """Return the samples of `train_samples` or `train_tokens`, exactly; None if `steps`
    counts.
    """
    if config.train_tokens is not None:
        return Fraction(config.train_tokens, config.max_target_length)
    return None if config.train_samples is None else Fraction(config.train_samples)


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
            rule = f"{key}={number}, but topology={topology.name} has {has}"
            raise ConfigError(rule, key=key, nearest=(has, AUTO))
    return (
        config
        if topology.num_slices == 1
        else replace(config, num_slices=topology.num_slices)
    )
