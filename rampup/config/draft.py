"""The draft of a plan, from a configuration, and what finds its parts: mesh, split,
ramp and evaluation, one after the other.

`FINDERS` is the one list of them. `rampup.config.build` runs them until the first
broken rule, `rampup.config.refusal` runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rampup.config.key import Settings
from rampup.config.schema import Config, OptimizerKeys
from rampup.errors import BatchDivisibilityError, ConfigError, raise_together
from rampup.plan.hyperparameters import (
    AdamConstants,
    AdamScaling,
    adam_constants,
    warmup_fraction,
)
from rampup.plan.learning_rate import RateRule, Seesaw, decay_progress, discretize
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.nearest import END, START, batch_error
from rampup.plan.noise_scale import noise_problems
from rampup.plan.numbers import AUTO, exact_fraction
from rampup.plan.pipeline import DEFAULT_OVERHEAD_TOKENS, pipeline_repeats
from rampup.plan.plan import Growth, RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import (
    AUTO_SCHEDULE,
    auto_sizes,
    global_batch_sizes,
    ramp_from_config,
)
from rampup.plan.split import BatchSplitter


@dataclass(slots=True, kw_only=True)
class Draft:
    """A plan in the making: what the `FINDERS` have found so far.

    Attributes:
        config, num_devices: the configuration, and the devices to plan for.
        ramp, seesaw: the ramp of a resumed run and the transform that made it; without
            one, those that the keys describe, once `find_ramp` has run.
        eval_size, reserved_sizes: the samples of an evaluation batch and the sizes of
            `batch_size_schedule: auto`, given or found in the same way.
        consumed_samples: samples after which a run goes on with the ramp of the keys.
        axes, overhead, repeats, splitter: mesh, cost of a pipeline tick in samples,
            layer chunks of a stage, and the rule that splits batches.
    """

    config: Config
    num_devices: int
    ramp: BatchRamp | None = None
    seesaw: Seesaw | None = None
    eval_size: int | None = None
    reserved_sizes: Sequence[int] | None = None
    consumed_samples: int = 0
    axes: MeshAxes | None = None
    overhead: Fraction = Fraction(0)
    repeats: int = 1
    splitter: BatchSplitter | None = None

    @property
    def follows(self) -> bool:
        """Whether the run decides about its batches while it runs."""
        return self.config.batch_size_schedule == AUTO_SCHEDULE


def find_axes(draft: Draft) -> None:
    """Find the devices along each mesh axis."""
    draft.axes = mesh_axes(draft.config, draft.num_devices)


def find_overhead(draft: Draft) -> None:
    """Find the fixed cost of a pipeline tick in samples: as measured, or as assumed."""
    key = "pipeline_tick_overhead"
    if (measured := draft.config.pipeline_tick_overhead) is None:
        draft.overhead = Fraction(
            DEFAULT_OVERHEAD_TOKENS, draft.config.max_target_length
        )
    else:
        draft.overhead = exact_fraction(measured, what=key, key=key)


def find_repeats(draft: Draft) -> None:
    """Find the layer chunks of a pipeline stage."""
    draft.repeats = pipeline_repeats(
        num_layers=draft.config.base_num_decoder_layers,
        num_stages=(draft.axes or MeshAxes()).pipeline,
        # Without a legal mesh, nobody knows whether there are stages.
        num_repeats=draft.config.num_pipeline_repeats if draft.axes else AUTO,
    )


def find_splitter(draft: Draft) -> None:
    """Find the rule that splits every batch of a run."""
    config = draft.config
    axes = draft.axes or MeshAxes()
    minimizes = (
        config.pipeline_tick_overhead is not None
        or config.rampup_microbatch == "per_phase"
    )
    draft.splitter = BatchSplitter(
        data_parallel_size=axes.data_parallel_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_stages=axes.pipeline,
        num_repeats=draft.repeats,
        num_pipeline_microbatches=(
            config.num_pipeline_microbatches if draft.axes else AUTO
        ),
        rampup_microbatch=config.rampup_microbatch,
        microbatch_size=config.microbatch_size,
        strict_multiple=config.pipeline_strict_multiple,
        tick_overhead=draft.overhead if minimizes else None,
        min_microbatches=2 if config.measure_gradient_noise and axes.data == 1 else 1,
    )


def find_reserved_sizes(draft: Draft) -> None:
    """Find the sizes of `batch_size_schedule: auto`."""
    if not draft.follows or draft.reserved_sizes is not None or draft.splitter is None:
        return
    config = draft.config
    factor = draft.num_devices * config.gradient_accumulation_steps
    unfixed = replace(draft.splitter, microbatch_size=AUTO)
    start, largest = (
        global_batch_sizes({key: getattr(config, key)}, factor, unfixed)[key]
        for key in (START, END)
    )
    draft.reserved_sizes = auto_sizes(start, largest)


def find_ramp(draft: Draft) -> None:
    """Find the ramp, by Seesaw if it is on."""
    if draft.ramp is not None:
        return
    assert draft.splitter is not None
    ramp = ramp_of_keys(draft, draft.splitter)
    if draft.config.seesaw_factor is not None:
        # Refuses planned batches too that no step has after the transform.
        draft.splitter.split(ramp.sizes_to_come)
    set_ramp(draft, ramp)


def find_eval_size(draft: Draft) -> None:
    """Find the samples of an evaluation batch; None if it is not needed and the default
    size cannot be split.
    """
    if draft.eval_size is not None:
        return
    assert draft.splitter is not None
    config = draft.config
    key = "eval_per_device_batch_size"
    size = config.eval_per_device_batch_size
    rule = draft.splitter.for_eval()
    planned = draft.ramp if draft.seesaw is None else draft.seesaw.base
    try:
        if size == 0 and config.batch_size_schedule is not None and planned is not None:
            # A schedule gives global batches, so the default comes from its last one
            # instead of per_device_batch_size.
            whole = planned.sizes[-1] // config.gradient_accumulation_steps
            if not rule.allows(whole):
                raise batch_error(
                    rule,
                    whole,
                    "evaluation, the last phase without accumulation",
                    key=key,
                )
            draft.eval_size = whole
        else:
            sizes = {key: size or config.per_device_batch_size}
            draft.eval_size = global_batch_sizes(sizes, draft.num_devices, rule)[key]
    except BatchDivisibilityError:
        if size != 0 or config.eval_interval != AUTO:
            raise


# What finds the parts of a plan, in this order. A build runs them until one raises an
# error; a refusal runs them all.
FINDERS: tuple[Callable[[Draft], None], ...] = (
    find_axes,
    find_overhead,
    find_repeats,
    find_splitter,
    find_reserved_sizes,
    find_ramp,
    find_eval_size,
)


def plan_or_first_error(draft: Draft) -> RampPlan:
    """Return the plan of a draft, or raise the error about the first rule that is
    broken.
    """
    for find in FINDERS:
        find(draft)
    return plan_of(draft)


def plan_of(draft: Draft) -> RampPlan:
    """Return the plan of a draft whose parts are all found, or raise the errors about
    its batches, its constants and its noise.
    """
    config, ramp, splitter, axes = (
        draft.config,
        draft.ramp,
        draft.splitter,
        draft.axes,
    )
    assert ramp is not None
    assert splitter is not None
    assert axes is not None
    # The steps of a configuration are those of the planned ramp. With Seesaw, others
    # consume the same samples.
    steps = config.total_steps
    schedule = (
        None
        if config.learning_rate_schedule_steps == AUTO
        else config.learning_rate_schedule_steps
    )
    if (seesaw := draft.seesaw) is not None:
        steps = None if steps is None else seesaw.steps_of(steps)
        schedule = None if schedule is None else seesaw.steps_of(schedule)
    rate_scaling, adam = config.batch_rule
    budget = budget_samples(config)
    needed = math.ceil(budget or 1)
    growth = None
    if draft.follows:
        sizes = tuple(draft.reserved_sizes or ())
        growth = Growth(sizes=sizes, budget_samples=needed if budget else None)
    plan = RampPlan(
        ramp=ramp,
        splitter=splitter,
        num_devices=draft.num_devices,
        axes=axes,
        total_steps=ramp.step_of_sample(needed - 1) + 1 if steps is None else steps,
        eval_global_batch_size=draft.eval_size,
        rate=RateRule(
            clock=config.learning_rate_clock,
            schedule_steps=schedule,
            batch_scaling=rate_scaling,
            reference_batch_size=config.batch_scaling_reference,
            seesaw=seesaw,
        ),
        growth=growth,
    )
    global_batch_to_load(config, plan)  # or an error
    if config.warmup_steps is not None:
        is_wsd = config.lr_schedule_type == "wsd"
        decay = config.wsd_decay_steps_fraction if is_wsd else 0.0
        warmup_fraction(plan, config.warmup_steps, decay_fraction=decay)
    if adam.is_active:
        # A rule can give a value that is no decay rate.
        hyperparameters(config, plan.of_all_sizes)
    if config.measure_gradient_noise:
        problems = noise_problems(plan, axes.data)
        if splitter.num_stages > 1:
            problems.append(
                ConfigError(
                    "measure_gradient_noise=true and batch_size_schedule=auto need a"
                    " mesh without pipeline stages, as each stage has a part of a"
                    " gradient",
                    fix="set ici_pipeline_parallelism and dcn_pipeline_parallelism to 1",
                    key="ici_pipeline_parallelism",
                )
            )
        raise_together(problems)
    return plan


def global_batch_to_load(config: Config, plan: RampPlan) -> int:
    """Return the rows of a step after the ramp if all hosts loaded them (MaxText
    `global_batch_size_to_load`), or an error if `expansion_factor_real_data` gives no
    whole number.
    """
    key = "expansion_factor_real_data"
    factor = config.expansion_factor_real_data
    last = plan.ramp.sizes[-1]
    rows = last * factor if factor > 0 else Fraction(last)
    if rows.denominator > 1:
        raise BatchDivisibilityError(
            f"global_batch_size * {key} = {last} * {factor} ="
            f" {float(rows):g} must be a whole number of samples",
            fix="-1 loads the batch itself",
            value=last * factor.numerator,
            divisor=factor.denominator,
            key=key,
            nearest=(-1,),
        )
    return int(rows)


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


def ramp_of_keys(draft: Draft, splitter: BatchSplitter) -> BatchRamp:
    """Return the planned ramp of the keys, from where the run goes on with it. A
    splitter refuses sizes per device that no microbatch fits; `RampPlan` checks every
    batch fully.
    """
    config = draft.config
    if draft.follows:
        assert draft.reserved_sizes is not None
        return BatchRamp.constant(draft.reserved_sizes[0])
    # If only `microbatch_size` does not fit, `RampPlan` refuses: the error then offers
    # other microbatches, not other sizes.
    unfixed = replace(splitter, microbatch_size=AUTO)
    ramp = ramp_from_config(
        config, draft.num_devices, budget=budget_samples(config), splitter=unfixed
    )
    return ramp.resumed_at(ramp.phase_of_sample(draft.consumed_samples).start_step)


def set_ramp(draft: Draft, ramp: BatchRamp) -> None:
    """Set the planned ramp of a draft, or what Seesaw makes of it."""
    draft.ramp = ramp
    if draft.config.seesaw_factor is None or draft.splitter is None:
        return
    draft.seesaw = make_seesaw(draft.config, ramp, draft.splitter)
    grown = draft.seesaw.ramp
    start = grown.phase_of_sample(draft.consumed_samples).start_step
    draft.ramp = grown.resumed_at(start)


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
