"""A pre-training plan in the keys of another system: `rampup plan CONFIG.yml --export SYSTEM`.

Each system is one function, which refuses the first phase that the system cannot express. What `rampup check` can read is then
checked by the rules of its dialect, and the ramp that the dialect finds must be that of the plan.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rampup.config.schema import Config
from rampup.dialects import SYSTEMS
from rampup.dialects.export import NAMES, Exported, Target
from rampup.dialects.maxtext import MaxTextJob
from rampup.dialects.megatron import LinearRamp, MegatronJob
from rampup.errors import choice_error
from rampup.plan.mesh_axes import AXES
from rampup.plan.numbers import to_yaml_number
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp


def export_plan(config: Config, plan: RampPlan, system: str) -> Exported:
    """Return what one of `PLAN_EXPORTS` needs to run a plan's batches, checked by its rules, or refuse what it cannot run."""
    if system not in PLAN_EXPORTS:
        raise choice_error("export", system, list(PLAN_EXPORTS))
    run = _Run(system=system, config=config, plan=plan)
    run.require(plan.auto_schedule is None, "batch_size_schedule", "it cannot follow the measured noise; give a schedule")
    exported = PLAN_EXPORTS[system](run)
    if system not in SYSTEMS:
        return exported
    # The ramp that the system would run must be that of the plan; notes name rows that it reads and does not train on.
    job, notes = run.checked(exported), list(exported.notes)
    found: list[tuple[int, int, int]] = []
    if isinstance(job, MegatronJob):
        ramp = job.ramp
        if job.has_schedule:
            # The thresholds as Megatron's floating-point numbers give them.
            ramp = BatchRamp.piecewise([(entry.as_run, entry.size) for entry in job.thresholds])
        found = _rows(ramp) if ramp else []
    elif isinstance(job, MaxTextJob):
        found = job.ramp_phases or [(0, job.sizes.to_train, 0)]
        if lost := job.lost_at_ramp_end:
            notes.append(f"MaxText's loader drops {lost:,} rows at the end of the ramp; those after it move up.")
        if job.dropped_per_step:
            notes.append(f"MaxText loads a full sample per device and drops {job.dropped_per_step:,} rows in every step.")
    for expected, row in itertools.zip_longest(_rows(plan.ramp), found):
        run.require(expected == row, "export", f"a phase would be (step, batch, sample) {row} instead of {expected}")
    return replace(exported, notes=tuple(notes))


def _rows(ramp: BatchRamp) -> list[tuple[int, int, int]]:
    return [(phase.start_step, phase.global_batch_size, phase.start_sample) for phase in ramp.phases]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run(Target):
    """A plan, and the system that it is exported to."""

    config: Config
    plan: RampPlan

    @property
    def grows(self) -> bool:
        """Whether there is more than one phase."""
        return len(self.plan.ramp.phases) > 1

    def microbatch(self) -> int:
        """Return the samples of a replica in a pass, which must be the same in all phases."""
        first = self.plan.splits[0].microbatch_size
        for phase, split in zip(self.plan.ramp.phases, self.plan.splits, strict=True):
            reason = f"{phase}, has microbatches of {split.microbatch_size:,} samples, but it has one size for all phases"
            self.require(split.microbatch_size == first, "rampup_microbatch", f"{reason}; set rampup_microbatch=fixed")
        return first

    def require_axes(self, *axes: str) -> None:
        """Refuse mesh axes that the system has no key for."""
        for axis, slices in zip(AXES, self.plan.axes.slices, strict=True):
            size = getattr(self.plan.axes, axis)
            key = f"{'ici' if size > slices else 'dcn'}_{axis}_parallelism"
            self.require(size == 1 or axis in ("data", "fsdp", *axes), key, f"it has no axis like {axis}={size}; set {key}=1")

    def notes(self, *, clocks: tuple[str, ...], scaling: str = "none") -> Iterator[str]:
        """Yield the hyperparameters that differ in a system whose learning rate counts one of `clocks` and has a `scaling`."""
        if not self.grows:
            return
        name, plan = NAMES[self.system], self.plan
        if plan.learning_rate_clock not in clocks:
            yield f"The learning rate of {name} counts {clocks[0]}; that of the plan counts {plan.learning_rate_clock}."
        rules = {"none": "is the same for every batch", "sqrt": "grows with the square root of the batch"}
        here = rules.get(plan.learning_rate_batch_scaling, "grows with the batch")
        here = "follows the cuts of Seesaw" if plan.seesaw else here
        if here != rules[scaling]:
            yield f"The learning rate of {name} {rules[scaling]}; that of the plan {here}."
        if self.config.batch_rule[1].is_active:
            yield f"AdamW's constants follow the batch in the plan (batch_scaling={self.config.batch_scaling}), not in {name}."


def _export_maxtext(run: _Run) -> Exported:
    """Return MaxText's keys. Its ramp knows no accumulation, so that every batch of a ramp is one pass."""
    plan = run.plan
    config = run.config
    devices = run.plan.num_devices
    *ramp, last = plan.ramp.phases
    passes = plan.splits[-1].accumulation_steps
    values: dict[str, Any] = {
        "gradient_accumulation_steps": 1 if ramp else passes,
        "steps": plan.total_steps,
        "max_target_length": config.max_target_length,
    }
    if plan.schedule_steps != plan.total_steps:
        values["learning_rate_schedule_steps"] = plan.schedule_steps
    if plan.expansion_factor_real_data > 0:
        values["expansion_factor_real_data"] = to_yaml_number(plan.expansion_factor_real_data)
    for axis, slices in zip(AXES, plan.axes.slices, strict=True):
        values |= {f"ici_{axis}_parallelism": getattr(plan.axes, axis) // slices, f"dcn_{axis}_parallelism": slices}
    if plan.splitter.num_stages > 1:
        layers = config.base_num_decoder_layers
        repeats = plan.splitter.num_repeats
        values |= {
            # One number for all batches: the smallest, as each batch is one pass.
            "num_pipeline_microbatches": min(split.num_pipeline_microbatches for split in plan.splits),
            "num_pipeline_repeats": repeats,
            "num_layers_per_pipeline_stage": layers // (plan.splitter.num_stages * repeats),
            "base_num_decoder_layers": layers,
            "pipeline_delay_activation_forwarding": config.pipeline_delay_activation_forwarding,
        }

    def per_device(samples: int, divisor: int = 1) -> Any:
        number = to_yaml_number(Fraction(samples, devices * divisor))
        reason = f"per_device_batch_size = {samples:,} / {devices * divisor:,} = {number} must be a decimal"
        run.require(not isinstance(number, str), "per_device_batch_size", reason)
        return number

    values["per_device_batch_size"] = per_device(last.global_batch_size, values["gradient_accumulation_steps"])
    notes = list(run.notes(clocks=("steps",)))
    if ramp:
        start = plan.ramp.sizes[0]
        growth = plan.ramp.sizes[1] - plan.ramp.sizes[0]
        # MaxText counts every phase from zero, n steps of size b for a share of (n - 1) * b < share <= n * b samples.
        least, most = 0, plan.ramp.ramp_samples * len(ramp)
        for before, phase in itertools.pairwise(plan.ramp.phases):
            size = before.global_batch_size
            after = phase.global_batch_size
            reason = f"{phase}, grows from {size:,} to {after:,} samples, but its ramp grows by the same number in every phase"
            run.require(growth > 0 and after - size == growth, "batch_size_schedule", reason)
            assert before.num_steps is not None
            least = max(least, (before.num_steps - 1) * size * len(ramp))
            most = min(most, before.num_steps * size * len(ramp))
            reason = f"{before}, has {before.num_steps:,} steps, but its phases have equal shares of global_rampup_samples"
            reason = f"{reason}, each counted from zero, as with rampup_carry_overshoot=false"
            run.require(least < most, "batch_size_schedule", reason)
        wanted = config.global_rampup_samples if config.enable_rampup_batch_size else most
        values |= {
            "enable_rampup_batch_size": True,
            "per_device_batch_size_start": per_device(start),
            "per_device_batch_size_increment": per_device(growth),
            "global_rampup_samples": wanted if least < wanted <= most else most,
        }
        if passes > 1 and plan.splitter.num_stages == 1:
            largest = last.global_batch_size // plan.splitter.data_parallel_size
            sizes = {"": last.global_batch_size, "_start": start, "_increment": growth}
            keys = [f"per_device_batch_size{end}={to_yaml_number(Fraction(n, devices * passes))}" for end, n in sizes.items()]
            notes += [
                f"MaxText runs each of these batches in one pass, of up to {largest:,} samples per replica; the plan's passes "
                f"have {largest // passes:,}.",
                "To keep them, start it with `python -m rampup.integrations.maxtext` and these keys: "
                f"gradient_accumulation_steps={passes} {' '.join(keys)}",
            ]
    return Exported(values=values, facts={"num_devices": devices}, notes=tuple(notes))


def _export_megatron(run: _Run) -> Exported:
    """Return Megatron's arguments, with a step schedule in tokens, as its trainer passes the sequence length."""
    plan, config = run.plan, run.config
    micro = run.microbatch()
    length = config.max_target_length
    splitter = run.plan.splitter
    run.require_axes("tensor", "context", "pipeline")
    for before, phase in itertools.pairwise(plan.ramp.phases):
        size = before.global_batch_size
        after = phase.global_batch_size
        reason = f"{phase}, shrinks from {size:,} to {after:,} samples, where its trainer stops"
        run.require(after > size, "batch_size_schedule", reason)
    values: dict[str, Any] = {"micro_batch_size": micro, "seq_length": length}
    if run.grows:
        entries = [f"{phase.start_sample * length}:{phase.global_batch_size}" for phase in plan.ramp.phases]
        values["step_batch_size_schedule"] = " ".join(entries)
    else:
        values["global_batch_size"] = plan.ramp.sizes[0]
    if plan.learning_rate_clock == "samples":
        values["train_samples"] = plan.consumed_samples
    else:
        values["train_iters"] = plan.total_steps
    for axis, name in (("tensor", "tensor_model"), ("pipeline", "pipeline_model"), ("context", "context")):
        values[f"{name}_parallel_size"] = getattr(plan.axes, axis)
    if splitter.num_stages > 1:
        values["num_layers"] = config.base_num_decoder_layers
        if splitter.num_repeats > 1:
            values["virtual_pipeline_model_parallel_size"] = splitter.num_repeats
    words = [f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in values.items()]
    notes = [f"As arguments: {' '.join(words)}", *run.notes(clocks=("samples", "steps"))]
    if run.grows:
        older = _legacy_ramp(plan.ramp)
        text = "has no step schedule, and its linear ramp cannot run these phases"
        if older is not None:
            numbers = f"{older.start} {older.increment} {older.samples} --global-batch-size {older.end}"
            text = f"needs, instead of the step schedule, --rampup-batch-size {numbers} --train-samples {plan.consumed_samples}"
        notes.append(f"Megatron-LM until April 2026 {text}.")
    return Exported(values=values, facts={"world_size": plan.num_devices}, notes=tuple(notes))


def _legacy_ramp(ramp: BatchRamp) -> LinearRamp | None:
    """Return the linear ramp with the same phases, or None. Its size k begins at the first step at or past k shares."""
    start = ramp.sizes[0]
    growth = ramp.sizes[1] - ramp.sizes[0]
    count = len(ramp.phases) - 1
    least, most = 0, ramp.ramp_samples
    for before, phase in itertools.pairwise(ramp.phases):
        k = phase.index
        if phase.global_batch_size != start + k * growth:
            return None
        least = max(least, (phase.start_sample - before.global_batch_size) * count // k)
        most = min(most, phase.start_sample * count // k)
    found = LinearRamp(start=start, increment=growth, end=ramp.sizes[-1], samples=max(most, 1))
    return found if least < most and found.as_run() == _rows(ramp) else None


def _export_levanter(run: _Run) -> Exported:
    """Return Levanter's keys. Its schedule counts optimizer steps, as the phases do."""
    plan, splitter = run.plan, run.plan.splitter
    run.require_axes("tensor")
    # Without microbatches of its own it takes every batch in one pass.
    whole = all(split.accumulation_steps == 1 for split in plan.splits)
    sizes: Any = [{"start": phase.start_step, "value": phase.global_batch_size} for phase in plan.ramp.phases]
    values: dict[str, Any] = {
        "trainer.train_batch_size": sizes if run.grows else plan.ramp.sizes[0],
        "trainer.per_device_parallelism": -1 if whole else run.microbatch(),
        "trainer.num_train_steps": plan.total_steps,
        "train_seq_len": run.config.max_target_length,
    }
    if plan.axes.tensor > 1:
        values["trainer.mesh.axes.model"] = plan.axes.tensor
    notes = [f"For {plan.num_devices:,} devices, {splitter.data_parallel_size:,} along the axes of the batch."]
    if run.grows:
        notes.append(f"Levanter compiles a step for each of the {len(set(plan.ramp.sizes)):,} sizes.")
    if not whole:
        notes.append("Its gradient is the mean over microbatches of their means, whatever the number of tokens in each.")
    return Exported(values=values, notes=(*notes, *run.notes(clocks=("steps",))))


def _export_olmo_core(run: _Run) -> Exported:
    """Return OLMo-core's keys. It counts tokens, and changes the batch only by whole factors and between whole batches."""
    plan, length = run.plan, run.config.max_target_length
    run.require_axes("tensor", "context", "pipeline")
    for before, phase in itertools.pairwise(plan.ramp.phases):
        size = before.global_batch_size
        after = phase.global_batch_size
        reason = f"{phase}, goes from {size:,} to {after:,} samples, but it multiplies or divides the batch by a whole number"
        run.require(max(size, after) % min(size, after) == 0, "batch_size_schedule", reason)
        aligned = -(-phase.start_sample // after) * after
        reason = (
            f"{phase}, would begin later, at a multiple of its batch of {after:,}; give it the threshold of {aligned:,} samples"
        )
        run.require(after < size or phase.start_sample == aligned, "batch_size_schedule", reason)
    sizes = [phase.global_batch_size * length for phase in plan.ramp.phases]
    values: dict[str, Any] = {
        "data_loader.global_batch_size": sizes[0],
        "train_module.rank_microbatch_size": run.microbatch() * length,
        "train_module.max_sequence_length": length,
        "trainer.max_duration": {"value": plan.total_steps, "unit": "steps"},
    }
    for axis, name in (("tensor", "tp"), ("context", "cp"), ("pipeline", "pp")):
        if (degree := getattr(plan.axes, axis)) > 1:
            values[f"train_module.{name}_config.degree"] = degree
    notes = [f"For {plan.num_devices:,} devices, {plan.splitter.data_parallel_size:,} data-parallel ranks. Sizes are tokens."]
    if run.grows:
        callback = "trainer.callbacks.batch_size_scheduler"
        values[f"{callback}.batch_sizes"] = sizes
        values[f"{callback}.schedule"] = [{"value": phase.start_step, "unit": "steps"} for phase in plan.ramp.phases]
        notes.append("BatchSizeSchedulerCallback takes Duration.steps(value). The phases hold within the first epoch.")
    return Exported(values=values, notes=(*notes, *run.notes(clocks=("steps", "tokens"), scaling="sqrt")))


PLAN_EXPORTS: Mapping[str, Callable[[_Run], Exported]] = {
    "maxtext": _export_maxtext,
    "megatron": _export_megatron,
    "levanter": _export_levanter,
    "olmo_core": _export_olmo_core,
}
