"""What a plan has to say about the run that a configuration asks for: legal settings
that rarely mean what they do.

A note is a sentence for `rampup plan`, `train` and `report`. What can be seen in a plan
alone, without its configuration, is in `rampup.plan.describe.advice`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from rampup.config.draft import budget_samples, global_batch_to_load, hyperparameters
from rampup.config.schema import Config
from rampup.plan.describe import advice, format_count
from rampup.plan.hyperparameters import moment_lag_steps, warmup_steps
from rampup.plan.numbers import AUTO, plain_number
from rampup.plan.plan import RampPlan
from rampup.plan.ramp_keys import AUTO_SCHEDULE

# A batch that grows by more than this factor asks for a rate that follows it.
MOST_GROWTH = 2.0


def plan_notes(config: Config, plan: RampPlan) -> tuple[str, ...]:
    """Return all notes about a plan: its warm-up, those of the plan alone, and those
    about the devices, the rows, the length and the learning rate of the run.

    Args:
        config: the configuration.
        plan: its plan, of `build_plan`.

    Returns:
        Sentences; none if there is nothing to say.

    Example:
        >>> from rampup.config.build import build_plan
        >>> config = Config(per_device_batch_size=4, train_samples=100)
        >>> warm_up, too_long = plan_notes(config, build_plan(config, 4))
        >>> too_long.split("; ")[1]
        "batch_size_schedule='0:16 96:4' ends with a batch of the 4 left"
    """
    return (
        *_warmup_notes(config, plan),
        *advice(plan),
        *_unused_notes(config, plan),
        *_device_notes(config, plan),
        *_slice_notes(config, plan),
        *_loading_notes(config, plan),
        *_length_notes(config, plan),
        *_rate_notes(config, plan),
    )


def _unused_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    """Yield the batch per device that a schedule of batches replaces, if it was meant:
    base.yml has both keys. Also a reference batch without a rule.
    """
    given = config.per_device_batch_size
    is_scheduled = config.batch_size_schedule not in (None, AUTO_SCHEDULE)
    if is_scheduled and given != Config().per_device_batch_size:
        yield (
            f"per_device_batch_size={given} is not used: batch_size_schedule has the"
            " sizes"
        )
    rules = {config.batch_scaling, plan.rate.batch_scaling}
    if config.batch_scaling_reference is not None and rules == {"none"}:
        yield (
            f"batch_scaling_reference={config.batch_scaling_reference} is not used:"
            " batch_scaling is none"
        )


def _device_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    """Yield that a batch per device follows `--devices`, and is not that of the file."""
    own, number = config.num_devices, plan.num_devices
    if own in (AUTO, number) or config.batch_size_schedule is not None:
        return
    factor = config.per_device_batch_size * config.gradient_accumulation_steps
    if plan.ramp.sizes[-1] != number * factor:
        return  # a run that goes on keeps its batches
    ends = dict.fromkeys((plan.ramp.sizes[0], plan.ramp.sizes[-1]))
    here = " to ".join(f"{size:,}" for size in ends)
    there = " to ".join(
        f"{plain_number(Fraction(size * own, number)):,}" for size in ends
    )
    yield (
        f"the batch is per device: {here} samples on {number:,} devices, and {there} on"
        f" num_devices={own} of the configuration; batch_size_schedule has sizes that"
        " do not follow the devices"
    )


def _slice_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    """Yield the slices that no key names: a closed slice on more devices."""
    slices = plan.axes.num_slices
    named = abs(config.dcn_data_parallelism * config.dcn_pipeline_parallelism)
    if config.num_slices == AUTO and slices > named:
        yield (
            f"{plan.num_devices:,} devices are taken as {slices:,} slices of"
            f" {plan.num_devices // slices:,}, as the ici axes say; for one slice, set"
            " one of them to -1 (the rest)"
        )


def _loading_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    """Yield which hosts load data, unless every host loads its own."""
    factor = config.expansion_factor_real_data
    if factor <= 0:
        return
    shown = plain_number(factor)
    rows = (
        "global_batch_to_load = global_batch_size * expansion_factor_real_data ="
        f" {plan.ramp.sizes[-1]:,} * {shown} ="
        f" {format_count(global_batch_to_load(config, plan), 'row')} per step"
    )
    if factor < 1:
        yield (
            f"{rows}: MaxText's loaders of {plain_number(1 / factor)} times as many"
            " hosts take turns; rampup trains only with -1 or from 1 on"
        )
    elif factor > 1:
        yield (
            f"{rows}, if all hosts loaded; 1 of {shown} does, for itself and the others"
        )
    else:
        yield rows


def _length_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    budget = budget_samples(config)
    if plan.follows:
        return
    taken = plan.consumed_samples
    if budget is not None and taken > budget:
        asked = f"train_samples={config.train_samples}"
        if config.train_tokens is not None:
            asked = (
                f"train_tokens={config.train_tokens:,}, which are"
                f" {plain_number(budget):,}"
            )
        yield (
            f"the run takes {format_count(taken, 'sample')},"
            f" {plain_number(taken - budget):,} more than {asked}, as its last batch is"
            f" whole{_smaller_last_batch(plan, budget)}"
        )
    if config.num_epoch > 0:
        rows = -(-taken // config.num_epoch)
        yield (
            f"num_epoch={config.num_epoch} needs at least"
            f" {format_count(rows, 'training row')} for"
            f" {format_count(taken, 'sample')}; a last phase of batch_size_schedule"
            " can be as small as the rows that are left"
        )


def _smaller_last_batch(plan: RampPlan, budget: Fraction | int) -> str:
    """Return how to end with the samples that are left, as a batch of their own, or
    nothing if that batch cannot be split.
    """
    start = plan.ramp.samples_before(plan.total_steps - 1)
    rest = budget - start
    shards = plan.splitter.data_parallel_size
    if rest % shards or plan.splitter.num_stages > 1 or plan.seesaw is not None:
        return ""
    before = [
        f"{phase.start_sample}:{phase.global_batch_size}"
        for phase in plan.ramp.phases
        if phase.start_sample < start
    ]
    schedule = " ".join([*before, f"{start}:{rest}"])
    return f"; batch_size_schedule='{schedule}' ends with a batch of the {rest} left"


def _warmup_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    """Yield the length of the warm-up, if there is one, and whether it is too short."""
    steps = config.warmup_steps
    if steps is None:
        steps = warmup_steps(plan, config.warmup_steps_fraction)
    if steps == 0:
        return
    length = f"{steps:,} of {plan.schedule_steps:,} steps"
    if plan.follows:
        note = f"the warm-up takes at most {length}"
    else:
        samples = plan.ramp.samples_before(steps)
        note = f"the warm-up takes {length} ({format_count(samples, 'sample')})"
    enough = round(1 / (1 - config.adam_b1), 6)  # 10, not 10.000000000000002
    if steps < enough and config.opt_type != "sgd":
        note += (
            f", fewer than 1 / (1 - adam_b1) = {enough:.3g}, which AdamW's first moment"
            f" takes; warmup_steps={math.ceil(enough)} has them, whatever the batch"
        )
    yield note


def _rate_notes(config: Config, plan: RampPlan) -> Iterator[str]:
    growth = plan.ramp.sizes[-1] / plan.ramp.sizes[0]
    rate, _ = config.batch_rule
    is_kept = rate == config.batch_scaling == "none" and plan.seesaw is None
    if growth > MOST_GROWTH and is_kept:
        rule = "linear" if config.opt_type == "sgd" else "sqrt"
        yield (
            f"the batch grows by {growth:.3g} times and the learning rate stays;"
            f" batch_scaling={rule} follows it"
        )


def hyperparameter_notes(config: Config, plan: RampPlan) -> tuple[str, ...]:
    """Return the steps that AdamW's second moment takes to follow each growth of the
    batch, and the phases that end before it has.

    Args:
        config: the configuration.
        plan: its plan, of `build_plan`.

    Returns:
        A sentence for each; none without growth, or with an optimizer that has no
        second moment.

    Source: see `rampup.plan.hyperparameters.moment_lag_steps`.
    """
    if config.opt_type == "sgd":
        return ()
    constants = hyperparameters(config, plan)
    listed, short = list[str](), list[str]()
    for before, phase in itertools.pairwise(plan.ramp.phases):
        if phase.start_step >= plan.total_steps:
            break
        sizes = before.global_batch_size, phase.global_batch_size
        b2 = constants[plan.segment_index(phase.start_step)].b2
        lag = moment_lag_steps(sizes[1] / sizes[0], b2)
        if lag == 0:
            continue
        listed.append(f"{sizes[0]:,} -> {sizes[1]:,} samples {round(lag):,}")
        end = plan.total_steps
        if phase.num_steps is not None:
            end = min(end, phase.start_step + phase.num_steps)
        if end - phase.start_step < lag:
            steps = format_count(end - phase.start_step, "step")
            short.append(f"phase {phase.index} has {steps}")
    notes = []
    if listed:
        notes.append(
            "steps of training that a growth costs far below the noise scale, while"
            " AdamW's second moment still has the noise of the smaller batch:"
            f" {_first_of(listed)}"
        )
    if short:
        notes.append(
            f"shorter than that: {_first_of(short)}; there a rule of batch_scaling does not reach"
            " its rate, and a smaller adam_b2 or longer phases would"
        )
    return tuple(notes)


def _first_of(listed: Sequence[str]) -> str:
    return ", ".join(listed[:8]) + ", ..." * (len(listed) > 8)
