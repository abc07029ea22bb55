"""Builds the plan that a configuration describes, and that of a resumed run so that its global batches do not change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from rampup.config.key import Settings
from rampup.config.schema import KEYS, RAMP_KEYS, Config
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampupError,
    ResumeMismatchError,
    raise_together,
)
from rampup.plan.auto_schedule import AUTO_SCHEDULE, auto_sizes
from rampup.plan.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.plan.learning_rate import decay_progress
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.noise_scale import noise_problems
from rampup.plan.numbers import AUTO, exact_fraction, nearest_in
from rampup.plan.per_device import RampKeys, global_batch_size, ramp_from_config
from rampup.plan.pipeline import DEFAULT_OVERHEAD_TOKENS, legal_repeats, pipeline_repeats, predicted_time
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, parse_schedule
from rampup.plan.seesaw import Seesaw, discretize
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
) -> RampPlan:
    """Return the plan that a configuration describes.

    Args:
        config: the configuration.
        num_devices: the number of devices. None = the configuration's `num_devices`, which must then not be -1.
        ramp: the ramp of a resumed run, instead of the one that the configuration describes.
        seesaw: the transform that made this ramp, if any.
        eval_size: samples of an evaluation batch of a resumed run, instead of the configured size.
        reserved_sizes: the sizes of `batch_size_schedule: auto` of a resumed run, instead of the configured ones.

    Raises:
        RampupError: the rules that the configuration breaks in any phase or in evaluation, all at once.

    Example:
        >>> plan = build_plan(Config(enable_rampup_batch_size=True), num_devices=4)
        >>> plan.ramp.sizes
        (16, 32, 48, 64)
    """
    if not isinstance(config, Config):
        text = f"build_plan takes a Config, not a {type(config).__name__}; read a file with rampup.load_config(PATH)"
        raise ConfigError(text)
    num_devices = config.num_devices if num_devices is None else num_devices
    if num_devices < 1:
        text = f"num_devices={num_devices} must be at least 1; pass the number to `build_plan` or set the key"
        raise ConfigError(text, key="num_devices", nearest=(1,))
    problems: list[RampupError] = []

    # The mesh, the pipeline and the ramp break different rules, so each is checked even if another one is refused. A mesh
    # that is refused has no known number of replicas: the ramp is then checked without its splitter.
    axes = splitter = plan = None
    num_repeats = 1
    with _collected(problems, config):
        axes = mesh_axes(config, num_devices)
    with _collected(problems, config):
        num_repeats = _num_repeats(config, axes.pipeline if axes else 1)
    with _collected(problems, config):
        splitter = _splitter(config, axes or MeshAxes(), num_repeats)
    with _collected(problems, config):
        if config.batch_size_schedule == AUTO_SCHEDULE and reserved_sizes is None and splitter:
            reserved_sizes = _auto_sizes(config, num_devices, splitter)
        if ramp is None:
            ramp = _ramp(config, num_devices, splitter if axes else None, reserved_sizes)
            if config.seesaw_factor is not None and splitter is not None:
                seesaw = _seesaw(config, ramp, splitter)
                ramp = seesaw.ramp
    raise_together(problems)
    assert axes is not None
    assert splitter is not None
    assert ramp is not None

    if splitter.num_stages > 1 and config.num_layers_per_pipeline_stage == config.num_pipeline_repeats == AUTO:
        splitter = _with_best_repeats(config, splitter, ramp)
    if eval_size is None:
        with _collected(problems, config):
            eval_size = _eval_size(config, num_devices, seesaw.base if seesaw else ramp, splitter)
    total_steps, schedule_steps = _lengths(config, ramp, seesaw)
    with _collected(problems, config):
        plan = RampPlan(
            ramp=ramp,
            splitter=splitter,
            num_devices=num_devices,
            axes=axes,
            total_steps=total_steps,
            eval_global_batch_size=eval_size,
            learning_rate_batch_scaling=config.learning_rate_batch_scaling,  # type: ignore[arg-type]
            learning_rate_clock=config.learning_rate_clock,  # type: ignore[arg-type]
            learning_rate_schedule_steps=schedule_steps,
            expansion_factor_real_data=config.expansion_factor_real_data,
            assumed_tick_overhead=_tick_overhead(config),
            reference_batch_size=config.batch_scaling_reference,
            seesaw=seesaw,
            reserved_sizes=tuple(reserved_sizes or ()),
        )
        hyperparameters(config, plan)
    raise_together(problems)
    assert plan is not None
    if config.measure_gradient_noise:
        with _collected(problems, config):
            raise_together(noise_problems(plan, plan.axes.data))
        if plan.splitter.num_stages > 1 and config.logits_via_embedding:
            problems.append(
                ConfigError(
                    "measure_gradient_noise=true with pipeline stages needs logits_via_embedding=false: the first and the last "
                    "stage each have a part of the gradient of a tied embedding",
                    key="logits_via_embedding",
                    nearest=(False,),
                )
            )
        raise_together(problems)
    return plan


def hyperparameters(config: Config, plan: RampPlan) -> tuple[AdamConstants, ...]:
    """Return AdamW's constants for every segment of a plan's clock (`RampPlan.clock`).

    Raises:
        ConfigError: a rule gives a value that is no decay rate.

    Example:
        >>> config = Config(batch_size_schedule="0:8 80:16", adam_b2=0.81, adam_b2_batch_scaling="half_life")
        >>> [constants.b2 for constants in hyperparameters(config, build_plan(config, 1))]
        [0.9, 0.81]
    """
    return adam_constants(plan, adam_base(config), adam_scaling(config, plan))


def adam_base(config: Config) -> AdamConstants:
    """Return AdamW's constants for the reference batch."""
    return AdamConstants(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps, weight_decay=config.adam_weight_decay)


def adam_scaling(config: Config, plan: RampPlan) -> AdamScaling:
    """Return how AdamW's constants depend on the batch."""
    reference = config.adam_weight_decay_reference_tokens
    samples = budget_samples(config) or plan.consumed_samples
    return AdamScaling(
        b1=config.adam_b1_batch_scaling,  # type: ignore[arg-type]
        b2=config.adam_b2_batch_scaling,  # type: ignore[arg-type]
        b1_floor=config.adam_b1_floor,
        b1_ceiling=config.adam_b1_ceiling,
        b2_floor=config.adam_b2_floor,
        b2_ceiling=config.adam_b2_ceiling,
        eps=config.adam_eps_batch_scaling,  # type: ignore[arg-type]
        weight_decay=config.adam_weight_decay_batch_scaling,  # type: ignore[arg-type]
        token_ratio=1.0 if reference is None else float(samples * config.max_target_length / reference),
    )


def budget_samples(config: Config) -> Fraction | None:
    """Return the samples of `train_samples` or `train_tokens`, exactly; None if `steps` counts."""
    if config.train_tokens is not None:
        return Fraction(config.train_tokens, config.max_target_length)
    return None if config.train_samples is None else Fraction(config.train_samples)


def _lengths(config: Config, ramp: BatchRamp, seesaw: Seesaw | None) -> tuple[int, int | None]:
    """Return the steps of the run, and those of the learning-rate schedule if it has a length of its own.

    With Seesaw, `steps` are those of the planned ramp, and the run consumes the same samples.
    """

    def steps_for(samples: Fraction | int) -> int:
        return ramp.step_of_sample(math.ceil(samples) - 1) + 1

    def length(steps: int) -> int:
        return steps if seesaw is None else steps_for(seesaw.base.samples_before(steps))

    schedule, steps = config.learning_rate_schedule_steps, config.total_steps
    total = length(steps) if steps is not None else steps_for(budget_samples(config) or 1)
    return total, None if schedule == AUTO else length(schedule)


def _seesaw(config: Config, base: BatchRamp, splitter: BatchSplitter) -> Seesaw:
    """Return the transform of the planned ramp and learning rate."""
    assert config.seesaw_factor is not None
    total = math.ceil(budget_samples(config) or base.samples_before(config.total_steps or 0))
    schedule = config.learning_rate_schedule_steps

    def rate(progress: float) -> float:
        done = decay_progress(
            progress,
            kind=config.lr_schedule_type,
            warmup_fraction=config.warmup_steps_fraction,
            decay_fraction=config.wsd_decay_steps_fraction,
            decay_style=config.wsd_decay_style,
        )
        return float(1 - (1 - config.learning_rate_final_fraction) * done)

    length = total if schedule == AUTO else base.samples_before(schedule)
    cuts = discretize(rate, factor=config.seesaw_factor, total_samples=length)
    return Seesaw(
        base=base,
        cuts=cuts,
        max_batch_size=config.seesaw_max_batch_size,
        multiple=splitter.unit,
        total_samples=total,
        exponent=1.0 if config.opt_type == "sgd" else 0.5,
    )


def with_slices(config: Config, topology: Topology | None) -> Config:
    """Return the configuration for a topology, if there is one: with its number of slices, unless it sets another one.

    Raises:
        ConfigError: `num_slices` or `num_devices` is set to another number.
    """
    if topology is None:
        return config
    for key in ("num_slices", "num_devices"):
        if (number := getattr(config, key)) not in (AUTO, has := getattr(topology, key)):
            rule = f"{key}={number}, but topology={topology.name} has {has}"
            raise ConfigError(rule, key=key, nearest=(has, AUTO))
    return config if topology.num_slices == 1 else replace(config, num_slices=topology.num_slices)


@contextmanager
def _collected(problems: list[RampupError], config: Config) -> Iterator[None]:
    """Append the errors of a block to a list, each with the place its key was set and with only the values a file can have."""
    try:
        yield
    except RampupError as error:
        for problem in error.problems or (error,):
            if problem.key and (place := config.where(problem.key)) != "default":
                problem.args = (f"{problem} [{problem.key}: {place}]",)
            # The values offered for a schedule are sizes, not schedules.
            if problem.key in KEYS and problem.key != "batch_size_schedule":
                problem.nearest = tuple(filter(KEYS[problem.key].allows, problem.nearest))
            problems.append(problem)


def mesh_axes(config: Settings, num_devices: int) -> MeshAxes:
    """Return the devices along each mesh axis. A configuration without the keys of several slices, as rl.yml, has one.

    Example:
        >>> mesh_axes(Config(ici_tensor_parallelism=2), 8).data
        4
    """
    groups = {group: {axis: getattr(config, f"{group}_{axis}_parallelism", 1) for axis in AXES} for group in ("ici", "dcn")}
    return MeshAxes.resolve(num_devices, num_slices=getattr(config, "num_slices", AUTO), **groups)


def _num_repeats(config: Config, num_stages: int) -> int:
    layers, repeats = config.base_num_decoder_layers, config.num_pipeline_repeats
    per_stage = config.num_layers_per_pipeline_stage
    if per_stage == AUTO:
        per_stage = max(layers // (num_stages * max(repeats, 1)), 1)
    return pipeline_repeats(num_layers=layers, num_stages=num_stages, num_layers_per_stage=per_stage, num_repeats=repeats)


def _with_best_repeats(config: Config, splitter: BatchSplitter, ramp: BatchRamp) -> BatchSplitter:
    """Return the splitter with the number of repeats whose predicted step time in the last phase is lowest."""

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
    """Return the overhead of a pipeline tick in samples: the configured one, or the assumed one if it was not measured."""
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
        min_microbatches=2 if config.measure_gradient_noise and axes.data == 1 else 1,
    )


def _ramp(config: Config, num_devices: int, splitter: BatchSplitter | None, sizes: Sequence[int] | None) -> BatchRamp:
    if sizes and config.batch_size_schedule == AUTO_SCHEDULE:
        if splitter is not None:
            _check_sizes(config, splitter, [(size, "batch_size_schedule: auto") for size in sizes])
        return BatchRamp.constant(sizes[0])
    unfixed = splitter and replace(splitter, microbatch_size=AUTO)
    keys = RampKeys(**{key.name: getattr(config, key.name) for key in fields(RampKeys)})
    if config.batch_size_schedule == AUTO_SCHEDULE:
        keys = replace(keys, batch_size_schedule=None)
    ramp = ramp_from_config(keys, num_devices=num_devices, splitter=unfixed, budget=budget_samples(config))
    if splitter is not None:
        phases = [(phase.global_batch_size, str(phase)) for phase in ramp.phases]
        _check_sizes(config, splitter, phases, ramp if config.batch_size_schedule is not None else None)
    return ramp


def _auto_sizes(config: Config, num_devices: int, splitter: BatchSplitter) -> tuple[int, ...]:
    """Return the sizes of `batch_size_schedule: auto`."""
    unfixed = replace(splitter, microbatch_size=AUTO)

    def size_of(key: str) -> int:
        number = getattr(config, key)
        passes = config.gradient_accumulation_steps
        return global_batch_size(number, num_devices=num_devices, gradient_accumulation_steps=passes, key=key, splitter=unfixed)

    return auto_sizes(size_of("per_device_batch_size_start"), size_of("per_device_batch_size"))


def _check_sizes(
    config: Config, splitter: BatchSplitter, sizes: Sequence[tuple[int, str]], schedule: BatchRamp | None = None
) -> None:
    """Check global batch sizes, each with its place. An error names the key that a user would change: that of `schedule`."""
    key = None if schedule is None else "batch_size_schedule"

    def find(pairs: Sequence[tuple[int, str]]) -> list[RampupError]:
        return [p for size, where in pairs if (p := splitter.problem(size, where, key=key))]

    if not (problems := find(sizes)):
        return
    if schedule is not None:
        raise_together(problems + find(_jumped_over(config, schedule)))
    numbers, unfixed = [size for size, _ in sizes], replace(splitter, microbatch_size=AUTO)
    if config.microbatch_size != AUTO and all(map(unfixed.allows, numbers)):
        legal = unfixed.legal_microbatches(numbers)
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


def _jumped_over(config: Config, ramp: BatchRamp) -> list[tuple[int, str]]:
    """Return the scheduled sizes that no step reaches. Once the other sizes are fixed, a step may reach them."""
    assert config.batch_size_schedule is not None
    length = config.max_target_length if config.batch_size_schedule_unit == "tokens" else None
    entries = parse_schedule(config.batch_size_schedule, sequence_length=length, budget=budget_samples(config))
    used = set(ramp.sizes)
    return [(size, f"from sample {threshold:,}, jumped over") for threshold, size in entries if size not in used]


def _eval_size(config: Config, num_devices: int, ramp: BatchRamp, splitter: BatchSplitter) -> int | None:
    """Return the samples of an evaluation batch; None if evaluation is off and the default size cannot be split."""
    key, size = "eval_per_device_batch_size", config.eval_per_device_batch_size
    try:
        if size == 0 and config.batch_size_schedule is not None:
            # A schedule gives global batches, so the default comes from its last one instead of per_device_batch_size.
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


# Resuming: the keys that set the length of a run, and the shape of its learning rate.
BUDGET_KEYS = ("steps", "train_samples", "train_tokens")
SCHEDULE_KEYS = (
    "lr_schedule_type",
    "learning_rate_schedule_steps",
    "warmup_steps_fraction",
    "learning_rate_final_fraction",
    "wsd_decay_steps_fraction",
    "wsd_decay_style",
)
# The keys that define the sizes of `batch_size_schedule: auto`.
AUTO_KEYS = {"batch_size_schedule", "per_device_batch_size_start", "per_device_batch_size", "gradient_accumulation_steps"}


def ramp_record(config: Config, plan: RampPlan) -> dict[str, Any]:
    """Return a checkpoint's description of the ramp, as JSON: its phases, the keys that define it, and the devices."""
    return {
        "ramp": plan.ramp.to_rows(),
        "ramp_keys": ramp_keys(config),
        "num_devices": plan.num_devices,
        "eval_per_device_batch_size": str(config.eval_per_device_batch_size),
        "eval_global_batch_size": plan.eval_global_batch_size,
        **({} if plan.seesaw is None else {"seesaw": plan.seesaw.to_dict()}),
        **({"reserved_sizes": list(plan.reserved_sizes)} if plan.reserved_sizes else {}),
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
        # A batch that follows the noise stays as it is, and grows to the new sizes.
        follows = config.batch_size_schedule == AUTO_SCHEDULE and "reserved_sizes" in record
        ramp = before if follows else before.spliced_at(record["step"], plan.ramp)
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
    if config.batch_size_schedule == AUTO_SCHEDULE:
        names &= AUTO_KEYS
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
        reserved = record.get("reserved_sizes")
        return build_plan(config, number, ramp=ramp, seesaw=seesaw, eval_size=eval_size, reserved_sizes=reserved)

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
