"""Config -> RampPlan: which keys make which part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from rampup.config.schema import KEYS, Config
from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, raise_together
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.numbers import AUTO, exact_fraction, nearest_in
from rampup.plan.per_device import define_ramp, global_batch_size
from rampup.plan.pipeline import DEFAULT_OVERHEAD_TOKENS, legal_repeats, pipeline_repeats, predicted_time
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, parse_schedule
from rampup.plan.split import BatchSplitter

T = TypeVar("T")


def build_plan(
    config: Config, num_devices: int | None = None, *, ramp: BatchRamp | None = None, eval_size: int | None = None
) -> RampPlan:
    """Return the plan that a configuration describes.

    Args:
        config: the configuration.
        num_devices: devices to plan for; None = the configuration's `num_devices`, which then must not be -1.
        ramp: a ramp in place of the one that the configuration describes, and
        eval_size: samples of an evaluation batch likewise: those of a run that goes on.

    Raises:
        RampupError: every rule that the configuration breaks in any phase or in evaluation, all at once.

    Example:
        >>> plan = build_plan(Config(enable_rampup_batch_size=True), num_devices=4)
        >>> plan.ramp.sizes
        (16, 32, 48, 64)
    """
    num_devices = config.num_devices if num_devices is None else num_devices
    if num_devices < 1:
        raise ConfigError(f"num_devices={num_devices} must be at least 1", key="num_devices", nearest=(1,))
    problems: list[RampupError] = []
    axes = _collect(problems, config, lambda: mesh_axes(config, num_devices))
    repeats = _collect(problems, config, lambda: _num_repeats(config, axes.pipeline if axes else 1))
    splitter = _collect(problems, config, lambda: _splitter(config, axes or MeshAxes(), repeats or 1))
    chosen = ramp or _collect(problems, config, lambda: _ramp(config, num_devices, splitter if axes else None))
    raise_together(problems)
    assert splitter is not None
    assert chosen is not None
    splitter = _with_best_repeats(config, splitter, chosen)
    size = eval_size or _collect(problems, config, lambda: _eval_size(config, num_devices, chosen, splitter))
    plan = _collect(problems, config, lambda: _plan(config, num_devices, axes, chosen, splitter, size))
    raise_together(problems)
    assert plan is not None
    return plan


def mesh_axes(config: Config, num_devices: int) -> MeshAxes:
    """Return the devices along each mesh axis.

    Example:
        >>> mesh_axes(Config(ici_tensor_parallelism=2), 8).data
        4
    """
    groups = {group: {axis: getattr(config, f"{group}_{axis}_parallelism") for axis in AXES} for group in ("ici", "dcn")}
    return MeshAxes.resolve(num_devices, num_slices=config.num_slices, **groups)


def _num_repeats(config: Config, num_stages: int) -> int:
    layers, per_stage, repeats = (
        config.base_num_decoder_layers,
        config.num_layers_per_pipeline_stage,
        config.num_pipeline_repeats,
    )
    if per_stage == AUTO:
        per_stage = max(layers // (num_stages * max(repeats, 1)), 1)
    return pipeline_repeats(num_layers=layers, num_stages=num_stages, num_layers_per_stage=per_stage, num_repeats=repeats)


def _with_best_repeats(config: Config, splitter: BatchSplitter, ramp: BatchRamp) -> BatchSplitter:
    """Where repeats and layers per stage are both automatic, choose the repeats with the lowest predicted time at the end."""
    if splitter.num_stages == 1 or config.num_layers_per_pipeline_stage != AUTO or config.num_pipeline_repeats != AUTO:
        return splitter

    def time(num_repeats: int) -> Fraction:
        *_, last = replace(splitter, num_repeats=num_repeats).split(ramp.sizes)
        return last.accumulation_steps * predicted_time(
            last.num_pipeline_microbatches,
            last.microbatch_size,
            num_stages=splitter.num_stages,
            num_repeats=num_repeats,
            overhead=_tick_overhead(config),
        )

    repeats = legal_repeats(num_layers=config.base_num_decoder_layers, num_stages=splitter.num_stages)
    return replace(splitter, num_repeats=min(repeats, key=time))


def _tick_overhead(config: Config) -> Fraction:
    """What a tick costs beside its arithmetic, in samples: as measured, or as assumed where nobody has."""
    if config.pipeline_tick_overhead is None:
        return Fraction(DEFAULT_OVERHEAD_TOKENS, config.max_target_length)
    return exact_fraction(config.pipeline_tick_overhead, what="pipeline_tick_overhead", key="pipeline_tick_overhead")


def _splitter(config: Config, axes: MeshAxes, num_repeats: int) -> BatchSplitter:
    measured = config.pipeline_tick_overhead is not None
    return BatchSplitter(
        data_parallel_size=axes.data_parallel_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_stages=axes.pipeline,
        num_repeats=num_repeats,
        num_pipeline_microbatches=config.num_pipeline_microbatches,
        rampup_microbatch=config.rampup_microbatch,  # type: ignore[arg-type]
        microbatch_size=config.microbatch_size,
        strict_multiple=config.pipeline_strict_multiple,
        delay_activation_forwarding=config.pipeline_delay_activation_forwarding,
        tick_overhead=_tick_overhead(config) if measured or config.rampup_microbatch == "per_phase" else None,
    )


def _ramp(config: Config, num_devices: int, splitter: BatchSplitter | None) -> BatchRamp:
    ramp = define_ramp(
        num_devices=num_devices,
        per_device_batch_size=config.per_device_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        enable_rampup_batch_size=config.enable_rampup_batch_size,
        per_device_batch_size_start=config.per_device_batch_size_start,
        per_device_batch_size_increment=config.per_device_batch_size_increment,
        global_rampup_samples=config.global_rampup_samples,
        rampup_carry_overshoot=config.rampup_carry_overshoot,
        batch_size_schedule=config.batch_size_schedule,
        batch_size_schedule_unit=config.batch_size_schedule_unit,
        max_target_length=config.max_target_length,
        splitter=splitter and replace(splitter, microbatch_size=AUTO),
    )
    if splitter is not None:
        _check_phases(config, ramp, splitter)
    return ramp


def _check_phases(config: Config, ramp: BatchRamp, splitter: BatchSplitter) -> None:
    """Check every phase, and blame the key that a person would change."""
    scheduled, fixed = config.batch_size_schedule is not None, config.microbatch_size != AUTO
    unfixed = replace(splitter, microbatch_size=AUTO)
    key = "batch_size_schedule" if scheduled else None
    problems = [p for phase in ramp.phases if (p := splitter.problem(phase.global_batch_size, str(phase), key=key))]
    if problems and scheduled:
        problems += _problems_jumped_over(config, ramp, splitter)
    if problems and fixed and not scheduled and all(map(unfixed.allows, ramp.sizes)):
        legal = unfixed.legal_microbatches(ramp.sizes)
        nearest = nearest_in(config.microbatch_size, legal)
        raise BatchDivisibilityError(
            f"microbatch_size={config.microbatch_size} must divide global_batch_size / data_parallel_size in every phase; "
            f"nearest: {', '.join(map(str, nearest))} ({problems[0]})",
            value=config.microbatch_size,
            divisor=max(legal),
            key="microbatch_size",
            nearest=nearest,
        )
    raise_together(problems)


def _problems_jumped_over(config: Config, ramp: BatchRamp, splitter: BatchSplitter) -> list[RampupError]:
    """Return what is wrong with sizes of a refused schedule that no step has: with others put right, a step may have them."""
    assert config.batch_size_schedule is not None
    length = config.max_target_length if config.batch_size_schedule_unit == "tokens" else None
    entries = parse_schedule(config.batch_size_schedule, sequence_length=length)
    used = set(ramp.sizes)
    unused = [(f"from sample {threshold:,}, jumped over", size) for threshold, size in entries if size not in used]
    return [p for where, size in unused if (p := splitter.problem(size, where, key="batch_size_schedule"))]


def _eval_size(config: Config, num_devices: int, ramp: BatchRamp, splitter: BatchSplitter) -> int | None:
    """Samples of an evaluation batch; None where evaluation is off and the default size could not be cut."""
    key, size = "eval_per_device_batch_size", config.eval_per_device_batch_size
    try:
        if size == 0 and config.batch_size_schedule is not None:
            whole = ramp.sizes[-1] // config.gradient_accumulation_steps
            if problem := splitter.for_eval().problem(whole, "evaluation, the last phase without accumulation", key=key):
                raise problem
            return whole
        return global_batch_size(
            size or config.per_device_batch_size,
            num_devices=num_devices,
            gradient_accumulation_steps=1,
            key=key,
            splitter=splitter.for_eval(),
        )
    except BatchDivisibilityError:
        if size == 0 and config.eval_interval == AUTO:
            return None
        raise


def _plan(
    config: Config, num_devices: int, axes: MeshAxes | None, ramp: BatchRamp, splitter: BatchSplitter, eval_size: int | None
) -> RampPlan:
    assert axes is not None
    return RampPlan(
        axes=axes,
        ramp=ramp,
        splitter=splitter,
        num_devices=num_devices,
        total_steps=config.total_steps,
        eval_global_batch_size=eval_size,
        learning_rate_batch_scaling=config.learning_rate_batch_scaling,  # type: ignore[arg-type]
        learning_rate_clock=config.learning_rate_clock,  # type: ignore[arg-type]
        learning_rate_schedule_steps=None
        if config.learning_rate_schedule_steps == AUTO
        else config.learning_rate_schedule_steps,
        expansion_factor_real_data=config.expansion_factor_real_data,
        assumed_tick_overhead=_tick_overhead(config),
    )


def _collect(problems: list[RampupError], config: Config, make: Callable[[], T]) -> T | None:
    """Return what `make` makes; note what it raises, with the place that the key's value came from and what a file may say."""
    try:
        return make()
    except RampupError as error:
        for problem in error.problems or (error,):
            if problem.key and (place := config.where(problem.key)) != "default":
                problem.args = (f"{problem} [{problem.key}: {place}]",)
            # A schedule's offers are sizes, not what its key takes.
            if problem.key in KEYS and problem.key != "batch_size_schedule":
                problem.nearest = tuple(filter(KEYS[problem.key].allows, problem.nearest))
            problems.append(problem)
        return None
