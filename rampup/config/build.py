"""Builds the plan that a configuration describes, and that of a resumed run so that its global batches do not change."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rampup.batch_size.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.batch_size.noise_scale import noise_problems
from rampup.config.key import Settings
from rampup.config.schema import BUDGET_KEYS, KEYS, RAMP_KEYS, Config, OptimizerKeys, RampKeys
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampDefinitionError,
    RampupError,
    ResumeMismatchError,
    a_type,
    raise_together,
)
from rampup.plan.learning_rate import Seesaw, decay_progress, discretize
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.numbers import AUTO, divisors, exact_fraction, nearest_in
from rampup.plan.per_device import AUTO_SCHEDULE, auto_sizes, global_batch_size, ramp_from_config
from rampup.plan.pipeline import DEFAULT_OVERHEAD_TOKENS, pipeline_repeats, predicted_time
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, parse_schedule
from rampup.plan.split import BatchSplitter
from rampup.plan.topology import Topology

MAX_DEVICES_LISTED = 16


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
        raise ConfigError(f"build_plan takes a Config, not {a_type(config)}; read a file with rampup.load_config(PATH)")
    num_devices = config.num_devices if num_devices is None else num_devices
    if num_devices < 1:
        text = f"num_devices={num_devices} must be at least 1; pass the number to `build_plan` or set the key"
        raise ConfigError(text, key="num_devices", nearest=(1,))
    problems: list[RampupError] = []
    is_auto, budget = config.batch_size_schedule == AUTO_SCHEDULE, budget_samples(config)
    # The assumed overhead of a pipeline tick, in samples, if it was not measured.
    overhead, measured = Fraction(DEFAULT_OVERHEAD_TOKENS, config.max_target_length), config.pipeline_tick_overhead

    # The mesh, the pipeline and the ramp break different rules, so each is checked even if another one is refused. A mesh
    # that is refused has no known number of replicas: the ramp is then checked without its splitter.
    axes = splitter = plan = None
    num_repeats = 1
    with _collected(problems, config):
        axes = mesh_axes(config, num_devices)
    with _collected(problems, config):
        if measured is not None:
            overhead = exact_fraction(measured, what="pipeline_tick_overhead", key="pipeline_tick_overhead")
    known = axes or MeshAxes()
    with _collected(problems, config):
        num_repeats = _num_repeats(config, known.pipeline)
    with _collected(problems, config):
        minimizes = measured is not None or config.rampup_microbatch == "per_phase"
        splitter = BatchSplitter(
            data_parallel_size=known.data_parallel_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_stages=known.pipeline,
            num_repeats=num_repeats,
            num_pipeline_microbatches=config.num_pipeline_microbatches,
            rampup_microbatch=config.rampup_microbatch,
            whole_batch=config.whole_batch,
            microbatch_size=config.microbatch_size,
            strict_multiple=config.pipeline_strict_multiple,
            delay_activation_forwarding=config.pipeline_delay_activation_forwarding,
            tick_overhead=overhead if minimizes else None,
            min_microbatches=2 if config.measure_gradient_noise and known.data == 1 else 1,
        )
    with _collected(problems, config):
        if is_auto and reserved_sizes is None and splitter:
            reserved_sizes = _auto_sizes(config, num_devices, splitter)
        if ramp is None and not (is_auto and reserved_sizes is None):
            ramp = _ramp(config, num_devices, splitter if axes else None, reserved_sizes)
            if config.seesaw_factor is not None and splitter is not None:
                total = math.ceil(budget or ramp.samples_before(config.total_steps or 0))
                seesaw = _seesaw(config.ramp, config.optimizer, ramp, total_samples=total, multiple=splitter.unit)
                ramp = seesaw.ramp
    eval_problems: list[RampupError] = []
    if eval_size is None and axes and splitter and (config.eval_per_device_batch_size > 0 or not problems):
        with _collected(eval_problems, config):
            eval_size = _eval_size(config, num_devices, seesaw.base if seesaw else ramp, splitter)
    closing = "" if axes else "the batch sizes are checked again once the mesh is legal"
    refused = any(isinstance(problem, BatchDivisibilityError) for problem in [*problems, *eval_problems])
    if axes and splitter and ramp is None and refused:
        closing = _devices_of_schedule(config, num_devices)
    if problems:
        raise_together([*problems, *eval_problems], closing)
    assert axes is not None
    assert splitter is not None
    assert ramp is not None

    if splitter.num_stages > 1 and config.num_layers_per_pipeline_stage == config.num_pipeline_repeats == AUTO:
        most = pipeline_repeats(num_layers=config.base_num_decoder_layers, num_stages=splitter.num_stages)
        rules = (replace(splitter, num_repeats=number) for number in divisors(most))
        splitter = min(rules, key=lambda rule: _last_step_time(rule, ramp, overhead))

    def steps_of(steps: int) -> int:
        """Return the steps of the run for steps of the planned ramp: with Seesaw, those that consume the same samples."""
        return steps if seesaw is None else ramp.step_of_sample(seesaw.base.samples_before(steps) - 1) + 1

    steps, schedule = config.total_steps, config.learning_rate_schedule_steps
    problems += eval_problems
    with _collected(problems, config):
        plan = RampPlan(
            ramp=ramp,
            splitter=splitter,
            num_devices=num_devices,
            axes=axes,
            total_steps=ramp.step_of_sample(math.ceil(budget or 1) - 1) + 1 if steps is None else steps_of(steps),
            eval_global_batch_size=eval_size,
            learning_rate_batch_scaling=config.batch_rule[0],
            learning_rate_clock=config.learning_rate_clock,
            learning_rate_schedule_steps=None if schedule == AUTO else steps_of(schedule),
            expansion_factor_real_data=config.expansion_factor_real_data,
            assumed_tick_overhead=overhead,
            reference_batch_size=config.batch_scaling_reference,
            seesaw=seesaw,
            reserved_sizes=tuple(reserved_sizes or ()),
            auto_schedule=config.auto_schedule if is_auto else None,
        )
        hyperparameters(config, plan)
    raise_together(problems)
    assert plan is not None
    if config.measure_gradient_noise:
        with _collected(problems, config):
            raise_together(noise_problems(plan, plan.axes.data))
        if plan.splitter.num_stages > 1 and config.logits_via_embedding:
            rule = "measure_gradient_noise=true with pipeline stages needs logits_via_embedding=false"
            reason = "the first and the last stage each have a part of the gradient of a tied embedding"
            problems.append(ConfigError(f"{rule}: {reason}", key="logits_via_embedding", nearest=(False,)))
        raise_together(problems)
    return plan


def hyperparameters(config: Config, plan: RampPlan) -> tuple[AdamConstants, ...]:
    """Return AdamW's constants for every segment of a plan's clock (`RampPlan.clock`).

    Raises:
        ConfigError: a rule gives a value that is no decay rate.

    Example:
        >>> config = Config(batch_size_schedule="0:8 80:16", adam_b2=0.81, batch_scaling="half_life")
        >>> [constants.b2 for constants in hyperparameters(config, build_plan(config, 1))]
        [0.9, 0.81]
    """
    return adam_constants(plan, adam_base(config), adam_scaling(config, plan))


def adam_base(config: OptimizerKeys) -> AdamConstants:
    """Return AdamW's constants for the reference batch."""
    return AdamConstants(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps, weight_decay=config.adam_weight_decay)


def adam_scaling(config: Config, plan: RampPlan) -> AdamScaling:
    """Return how AdamW's constants depend on the batch."""
    reference, scaling = config.adam_weight_decay_reference_tokens, config.batch_rule[1]
    samples = budget_samples(config) or plan.consumed_samples
    return replace(
        scaling,
        b2_floor=config.adam_b2_floor,
        # A larger adam_b2 of the reference batch stays as it is.
        b2_ceiling=None if scaling.b2_ceiling is None else max(scaling.b2_ceiling, config.adam_b2),
        token_ratio=1.0 if reference is None else float(samples * config.max_target_length / reference),
    )


def budget_samples(config: Config) -> Fraction | None:
    """Return the samples of `train_samples` or `train_tokens`, exactly; None if `steps` counts."""
    if config.train_tokens is not None:
        return Fraction(config.train_tokens, config.max_target_length)
    return None if config.train_samples is None else Fraction(config.train_samples)


def _seesaw(keys: RampKeys, optimizer: OptimizerKeys, base: BatchRamp, *, total_samples: int, multiple: int) -> Seesaw:
    """Return the transform of the planned ramp and learning rate."""
    assert keys.seesaw_factor is not None
    schedule = optimizer.learning_rate_schedule_steps

    def rate(progress: float) -> float:
        done = decay_progress(
            progress,
            kind=optimizer.lr_schedule_type,
            warmup_fraction=optimizer.warmup_steps_fraction,
            decay_fraction=optimizer.wsd_decay_steps_fraction,
            decay_style=optimizer.wsd_decay_style,
        )
        return float(1 - (1 - optimizer.learning_rate_final_fraction) * done)

    length = total_samples if schedule == AUTO else base.samples_before(schedule)
    return Seesaw(
        base=base,
        cuts=discretize(rate, factor=keys.seesaw_factor, total_samples=length),
        max_batch_size=keys.seesaw_max_batch_size,
        multiple=multiple,
        total_samples=total_samples,
        schedule_samples=length,
        exponent=1.0 if optimizer.opt_type == "sgd" else 0.5,
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


@contextlib.contextmanager
def _collected(problems: list[RampupError], config: Config) -> Iterator[None]:
    """Append the errors of a block to a list, each with the place its key was set and with only the values a file can have."""
    try:
        yield
    except RampupError as error:
        for problem in error.problems or (error,):
            keys = [problem.key or ""]
            if keys == ["num_devices"] and config.num_devices == AUTO:
                # The number of devices is that of the caller or of the machine; what was written are the axes.
                keys = [name for name in KEYS if name.endswith("_parallelism") and name in str(problem)]
            if places := [f"{key}: {place}" for key in keys if (place := config.where(key)) != "default"]:
                problem.args = (f"{problem} [{', '.join(places)}]",)
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
    num_layers, repeats = config.base_num_decoder_layers, config.num_pipeline_repeats
    per_stage = config.num_layers_per_pipeline_stage
    if per_stage == AUTO:
        per_stage = max(num_layers // (num_stages * max(repeats, 1)), 1)
    return pipeline_repeats(num_layers=num_layers, num_stages=num_stages, num_layers_per_stage=per_stage, num_repeats=repeats)


def _auto_sizes(config: Config, num_devices: int, splitter: BatchSplitter) -> tuple[int, ...]:
    """Return the sizes of `batch_size_schedule: auto`."""
    unfixed, factor = replace(splitter, microbatch_size=AUTO), config.gradient_accumulation_steps
    start, largest = (
        global_batch_size(
            getattr(config, key), num_devices=num_devices, gradient_accumulation_steps=factor, key=key, splitter=unfixed
        )
        for key in ("per_device_batch_size_start", "per_device_batch_size")
    )
    return auto_sizes(start, largest)


def _devices_of_schedule(config: Config, num_devices: int) -> str:
    """Return on which other numbers of devices the batches of a schedule run, as text; the other ramps follow the devices."""
    if config.batch_size_schedule in (None, AUTO_SCHEDULE) or config.seesaw_factor is not None:
        return ""
    with contextlib.suppress(RampupError):
        ramp = ramp_from_config(config, num_devices, budget=budget_samples(config))
        numbers = _numbers_that_can(config, ramp, num_devices, functools.partial(build_plan, config, ramp=ramp))
        return f"numbers of devices that can run these batches: {list_devices(numbers)}" if numbers else ""
    return ""


def _last_step_time(splitter: BatchSplitter, ramp: BatchRamp, overhead: Fraction) -> Fraction:
    """Return the predicted time of a step in the last phase."""
    *_, last = splitter.split(ramp.sizes)
    shape = {"num_stages": splitter.num_stages, "num_repeats": splitter.num_repeats}
    m, b = last.num_pipeline_microbatches, last.microbatch_size
    return last.accumulation_steps * predicted_time(m, b, **shape, overhead=overhead)


def _ramp(config: Config, num_devices: int, splitter: BatchSplitter | None, reserved_sizes: Sequence[int] | None) -> BatchRamp:
    """Return the ramp. With a splitter, each size can be split, also those that `batch_size_schedule: auto` reserves."""
    schedule, length = config.batch_size_schedule, config.max_target_length
    budget, unfixed = budget_samples(config), splitter and replace(splitter, microbatch_size=AUTO)
    ramp, problems = None, list[RampupError]()
    if schedule == AUTO_SCHEDULE:
        assert reserved_sizes is not None
        ramp = BatchRamp.constant(reserved_sizes[0])
        sizes = [(size, "batch_size_schedule: auto") for size in reserved_sizes]
    else:
        try:
            ramp = ramp_from_config(config, num_devices, budget=budget, splitter=unfixed)
            sizes = [(phase.global_batch_size, str(phase)) for phase in ramp.phases]
        except RampDefinitionError as error:
            if splitter is None or schedule is None or config.enable_rampup_batch_size:
                raise
            problems, sizes = [error], []
    if splitter is None or unfixed is None:
        assert ramp is not None
        return ramp

    scheduled = None if schedule == AUTO_SCHEDULE else schedule
    if scheduled is not None and not (ramp and all(map(splitter.allows, ramp.sizes))):
        # A schedule in the wrong order still has sizes to check. No step reaches a size that is jumped over; once the other
        # sizes are fixed, a step may.
        used, state = {size for size, _ in sizes}, ", jumped over" if ramp else ""
        tokens = config.batch_size_schedule_unit == "tokens"
        with contextlib.suppress(RampDefinitionError):
            entries = parse_schedule(scheduled, sequence_length=length if tokens else None, budget=budget)
            sizes += [(size, f"from sample {at:,}{state}") for at, size in entries if size > 0 and size not in used]
    key = None if scheduled is None else "batch_size_schedule"
    refused = [problem for size, where in sizes if (problem := splitter.problem(size, where, key=key))]
    fixed, numbers = splitter.microbatch_size, [size for size, _ in sizes]
    if refused and fixed != AUTO and scheduled is not None:
        # A smaller microbatch changes the batches least.
        near = [min((abs(legal - size), legal) for legal in unfixed.nearest(size))[1] for size in numbers]
        smaller = [n for n in unfixed.legal_microbatches(near) if n < fixed][-1:]
        if smaller and not all(map(splitter.allows, near)):
            for problem in refused:
                problem.args = (f"{problem}; or microbatch_size={smaller[0]}",)
                problem.alternatives = {"microbatch_size": tuple(smaller)}
    elif refused and fixed != AUTO and all(map(unfixed.allows, numbers)):
        legal = unfixed.legal_microbatches(numbers)
        nearest = nearest_in(fixed, legal)
        rule = f"microbatch_size={fixed} must divide global_batch_size / data_parallel_size in every phase"
        text = f"{rule}; nearest: {', '.join(map(str, nearest))} ({refused[0]})"
        raise BatchDivisibilityError(text, value=fixed, divisor=max(legal), key="microbatch_size", nearest=nearest)
    raise_together([*problems, *refused])
    assert ramp is not None
    return ramp


def _eval_size(config: Config, num_devices: int, ramp: BatchRamp | None, splitter: BatchSplitter) -> int | None:
    """Return the samples of an evaluation batch; None if it is not needed and the default size cannot be split."""
    key, size, rule = "eval_per_device_batch_size", config.eval_per_device_batch_size, splitter.for_eval()
    try:
        if size == 0 and config.batch_size_schedule is not None and ramp is not None:
            # A schedule gives global batches, so the default comes from its last one instead of per_device_batch_size.
            whole = ramp.sizes[-1] // config.gradient_accumulation_steps
            if problem := rule.problem(whole, "evaluation, the last phase without accumulation", key=key):
                raise problem
            return whole
        per_device = size or config.per_device_batch_size
        return global_batch_size(per_device, num_devices=num_devices, gradient_accumulation_steps=1, key=key, splitter=rule)
    except BatchDivisibilityError:
        if size == 0 and config.eval_interval == AUTO:
            return None
        raise


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
    old: dict[str, str | None] = record["ramp_keys"]
    if now == old:
        plan_for = _same_batches(config, before, record)
        try:
            return plan_for(num_devices)
        except (BatchDivisibilityError, PipelineShapeError) as error:
            was = record["num_devices"]
            numbers = _numbers_that_can(config, before, was, plan_for)
            text = f"the run was on {was} devices, and its batches cannot be split for num_devices={num_devices}; numbers of "
            text += f"devices that can run all of them: {list_devices(numbers)}. {error}"
            raise ResumeMismatchError(text, key="num_devices", nearest=nearest_in(num_devices, numbers)) from None
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
    rule = f"the ramp is not that of the checkpoint of step {record['step']} ({'; '.join(changed)})"
    fix = "restore the keys, or set on_plan_change=continue_by_samples to continue with the new sizes by samples consumed"
    text = f"{rule}:\n{plan.ramp.differences(before.to_rows())}\n{fix}"
    raise ResumeMismatchError(text, key="on_plan_change", nearest=("continue_by_samples",))


def ramp_keys(config: Config) -> dict[str, str | None]:
    """Return the keys that define the ramp, as text.

    The length of the run is among them only if the ramp depends on it, and the learning-rate schedule only with Seesaw.
    """
    names = set(RAMP_KEYS) - set(BUDGET_KEYS)
    if config.batch_size_schedule == AUTO_SCHEDULE:
        names = {"batch_size_schedule", "gradient_accumulation_steps", "per_device_batch_size_start", "per_device_batch_size"}
    if config.seesaw_factor is not None:
        names |= {*BUDGET_KEYS, "max_target_length", "opt_type", "lr_schedule_type", "learning_rate_schedule_steps"}
        names |= {"warmup_steps_fraction", "learning_rate_final_fraction", "wsd_decay_steps_fraction", "wsd_decay_style"}
    elif "%" in (config.batch_size_schedule or ""):
        names |= {*BUDGET_KEYS} - {"steps"}
    return {name: None if (value := getattr(config, name)) is None else str(value) for name in KEYS if name in names}


def _same_batches(config: Config, ramp: BatchRamp, record: Mapping[str, Any]) -> Callable[[int], RampPlan]:
    """Return the function from a number of devices to the plan with the batches of a record."""
    same_eval = str(config.eval_per_device_batch_size) == record["eval_per_device_batch_size"]
    eval_size = record["eval_global_batch_size"] if same_eval else None
    seesaw = Seesaw.from_dict(record["seesaw"], ramp) if "seesaw" in record else None
    reserved = record.get("reserved_sizes")
    return functools.partial(build_plan, config, ramp=ramp, seesaw=seesaw, eval_size=eval_size, reserved_sizes=reserved)


def possible_devices(config: Config, plan: RampPlan) -> list[int]:
    """Return the numbers of devices on which a run can continue with the batches of a plan: each can split every one of them.

    If the configuration leaves an axis open that does not shard the batch, larger ones are left out.

    Example:
        >>> config = Config(batch_size_schedule="0:8 80:24", eval_interval=-1)
        >>> possible_devices(config, build_plan(config, 4))
        [1, 2, 4, 8]
    """
    plan_for = _same_batches(config, plan.ramp, ramp_record(config, plan))
    return _numbers_that_can(config, plan.ramp, plan.num_devices, plan_for)


def list_devices(numbers: Sequence[int]) -> str:
    """Return numbers of devices as text, of many only the first and the last."""
    shown = [f"{number:,}" for number in numbers]
    if len(shown) > MAX_DEVICES_LISTED:
        shown = [*shown[: MAX_DEVICES_LISTED - 2], "...", shown[-1]]
    return ", ".join(shown) or "none"


def _numbers_that_can(config: Config, ramp: BatchRamp, num_devices: int, plan_for: Callable[[int], RampPlan]) -> list[int]:
    """Return the numbers of devices for which there is a plan of a ramp, in ascending order."""
    sizes = {f"{group}_{axis}_parallelism": axis for group in ("ici", "dcn") for axis in AXES}
    known = math.prod(getattr(config, key) for key in sizes if getattr(config, key) != AUTO)
    # What the axes of -1 share shards the batch, and so divides every one. Only another axis could have any size.
    factors = divisors(math.gcd(*ramp.sizes))
    if any(getattr(config, key) == AUTO and axis not in ("data", "fsdp") for key, axis in sizes.items()):
        factors = list(range(1, 4 * num_devices // known + 1))
    found = []
    for number in [known * factor for factor in factors]:
        with contextlib.suppress(RampupError):
            plan_for(number)
            found.append(number)
    return found
