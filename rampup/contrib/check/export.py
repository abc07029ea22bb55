"""A plan in the keys of another system: `rampup plan FILE --export SYSTEM`.

Each system is one function, which refuses what the system cannot express. The file is
then checked by the rules of its dialect, and the batches that the dialect finds must be
those of the plan.
"""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from rampup.config.schema import Config
from rampup.contrib.check import check_file
from rampup.errors import ConfigError, choice_error
from rampup.plan.mesh_axes import AXES
from rampup.plan.numbers import to_yaml_number
from rampup.plan.plan import RampPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A run in another system's keys."""

    values: Mapping[str, Any]  # by key
    facts: Mapping[str, Any]  # what the system takes elsewhere, as `rampup check` does
    # What the system does otherwise than the plan, or needs in addition.
    notes: tuple[str, ...]

    def to_yaml(self, system: str) -> str:
        """Return the text of the file, with the notes as comments."""
        facts = "".join(f" {key}={value}" for key, value in self.facts.items())
        lines = (
            f"The sizes for {NAMES[system]}, as rampup planned them.",
            f"Check: rampup check FILE --from {system}{facts}",
            *self.notes,
        )
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(dict(self.values), sort_keys=False)


def export_plan(config: Config, plan: RampPlan, system: str) -> Exported:
    """Return what one of `PLAN_EXPORTS` needs to run a plan's batches, checked by its
    rules, or refuse what it cannot run.
    """
    if system not in PLAN_EXPORTS:
        raise choice_error("export", system, list(PLAN_EXPORTS))
    run = _Run(system=system, config=config, plan=plan)
    run.require(
        not plan.follows,
        "batch_size_schedule",
        "it cannot follow the measured noise; give a schedule",
    )
    exported = PLAN_EXPORTS[system](run)
    # The ramp that the system would run must be that of the plan; notes name rows that
    # it reads and does not train on.
    numbers, notes = run.checked(exported), list(exported.notes)
    found = numbers.get("ramp_phases") or numbers.get("manager_phases")
    if found is None:
        found = [[0, numbers["global_batch_size_to_train_on"], 0]]
    wanted = [
        [phase.start_step, phase.global_batch_size, phase.start_sample]
        for phase in plan.ramp.phases
    ]
    for expected, row in itertools.zip_longest(wanted, found):
        run.require(
            expected == row,
            "batch_size_schedule",
            f"a phase of its own ramp would be [step, batch, sample] {row} instead of"
            f" {expected}",
        )
    if lost := numbers.get("lost_samples_at_ramp_end"):
        notes.append(
            f"MaxText's loader drops {lost:,} rows at the end of the ramp; those after"
            " it move up."
        )
    if dropped := numbers.get("dropped_samples_per_step"):
        notes.append(
            f"MaxText loads a full sample per device and drops {dropped:,} rows in"
            " every step."
        )
    return replace(exported, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A plan, and the system that it is exported to."""

    system: str
    config: Config
    plan: RampPlan

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise an error unless a condition of the system holds."""
        if not condition:
            raise ConfigError(
                f"{NAMES[self.system]} cannot run this plan: {reason}", key=key
            )

    def checked(self, exported: Exported) -> Mapping[str, Any]:
        """Return the numbers of an exported file by the rules of its system, which it
        must satisfy.
        """
        facts = [f"{key}={value}" for key, value in exported.facts.items()]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "exported.yml"
            path.write_text(exported.to_yaml(self.system), encoding="utf-8")
            verdict = check_file(path, self.system, facts)
        for broken in verdict.violations:
            self.require(False, broken.keys[0], broken.message)
        return verdict.derived

    @property
    def grows(self) -> bool:
        """Whether there is more than one phase."""
        return len(self.plan.ramp.phases) > 1

    def microbatch(self) -> int:
        """Return the samples of a replica in a pass, which must be the same in all
        phases.
        """
        first = self.plan.splits[0].microbatch_size
        for phase, split in zip(self.plan.ramp.phases, self.plan.splits, strict=True):
            self.require(
                split.microbatch_size == first,
                "rampup_microbatch",
                f"{phase}, has microbatches of {split.microbatch_size:,} samples, but"
                " it has one size for all phases; set rampup_microbatch=fixed",
            )
        return first

    def notes(self) -> Iterator[str]:
        """Yield the hyperparameters that differ in a system whose learning rate is the
        same for every batch.
        """
        if not self.grows:
            return
        name, plan = NAMES[self.system], self.plan
        if plan.seesaw or plan.rate.batch_scaling != "none":
            yield (
                f"The learning rate of {name} is the same for every batch; that of the"
                " plan changes with it."
            )
        if self.config.batch_rule[1].is_active:
            yield (
                "AdamW's constants follow the batch in the plan"
                f" (batch_scaling={self.config.batch_scaling}), not in {name}."
            )


def _to_maxtext(run: _Run) -> Exported:
    """Return MaxText's keys. Its ramp knows no accumulation, so that every batch of a
    ramp is one pass.
    """
    plan = run.plan
    config = run.config
    *ramp, last = plan.ramp.phases
    passes = plan.splits[-1].accumulation_steps
    values: dict[str, Any] = {
        "gradient_accumulation_steps": 1 if ramp else passes,
        "steps": plan.total_steps,
        "max_target_length": config.max_target_length,
    }
    if plan.schedule_steps != plan.total_steps:
        values["learning_rate_schedule_steps"] = plan.schedule_steps
    factor = config.expansion_factor_real_data
    if factor > 0:
        values["expansion_factor_real_data"] = to_yaml_number(factor)
    for axis, slices in zip(AXES, plan.axes.slices, strict=True):
        values |= {
            f"ici_{axis}_parallelism": getattr(plan.axes, axis) // slices,
            f"dcn_{axis}_parallelism": slices,
        }
    if plan.splitter.num_stages > 1:
        layers = config.base_num_decoder_layers
        repeats = plan.splitter.num_repeats
        values |= {
            # One number for all batches: the smallest, as each batch is one pass.
            "num_pipeline_microbatches": min(
                split.num_pipeline_microbatches for split in plan.splits
            ),
            "num_pipeline_repeats": repeats,
            "num_layers_per_pipeline_stage": (
                layers // (plan.splitter.num_stages * repeats)
            ),
            "base_num_decoder_layers": layers,
        }

    values["per_device_batch_size"] = _per_device(
        run, last.global_batch_size, values["gradient_accumulation_steps"]
    )
    notes = list(run.notes())
    if ramp:
        if plan.rate.clock != "steps":
            notes.append(
                "The learning rate of MaxText counts steps; that of the plan counts"
                f" {plan.rate.clock}."
            )
        values |= _maxtext_ramp(run)
        if passes > 1 and plan.splitter.num_stages == 1:
            largest = last.global_batch_size // plan.splitter.data_parallel_size
            notes.append(
                "MaxText runs each of these batches in one pass, of up to"
                f" {largest:,} samples per replica, where the plan has several."
            )
    return Exported(
        values=values, facts={"num_devices": plan.num_devices}, notes=tuple(notes)
    )


def _per_device(run: _Run, samples: int, passes: int = 1) -> Any:
    """Return samples for each device and pass, which MaxText takes as a decimal."""
    parts = run.plan.num_devices * passes
    number = to_yaml_number(Fraction(samples, parts))
    run.require(
        not isinstance(number, str),
        "per_device_batch_size",
        f"per_device_batch_size = {samples:,} / {parts:,} = {number} must be a decimal",
    )
    return number


def _maxtext_ramp(run: _Run) -> dict[str, Any]:
    """Return the keys of a ramp that grows by the same number in phases of equal
    shares. That they run the phases of the plan is checked behind it.
    """
    sizes, phases = run.plan.ramp.sizes, run.plan.ramp.phases[:-1]
    # MaxText counts every phase from zero: n steps of size b for a share of at most n * b
    # samples.
    share = min((phase.num_steps or 1) * phase.global_batch_size for phase in phases)
    return {
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": _per_device(run, sizes[0]),
        "per_device_batch_size_increment": _per_device(run, sizes[1] - sizes[0]),
        "global_rampup_samples": share * len(phases),
    }


def _to_megatron(run: _Run) -> Exported:
    """Return Megatron's arguments, with a step schedule in tokens, as its trainer
    passes the sequence length.
    """
    plan, config = run.plan, run.config
    micro = run.microbatch()
    length = config.max_target_length
    splitter = plan.splitter
    values: dict[str, Any] = {"micro_batch_size": micro, "seq_length": length}
    if run.grows:
        values["step_batch_size_schedule"] = " ".join(
            f"{phase.start_sample * length}:{phase.global_batch_size}"
            for phase in plan.ramp.phases
        )
    else:
        values["global_batch_size"] = plan.ramp.sizes[0]
    if plan.rate.clock == "samples":
        values["train_samples"] = plan.consumed_samples
    else:
        values["train_iters"] = plan.total_steps
    for axis, name in (
        ("tensor", "tensor_model_parallel_size"),
        ("pipeline", "pipeline_model_parallel_size"),
        ("context", "context_parallel_size"),
    ):
        values[name] = getattr(plan.axes, axis)
    if splitter.num_stages > 1:
        values["num_layers"] = config.base_num_decoder_layers
        if splitter.num_repeats > 1:
            values["virtual_pipeline_model_parallel_size"] = splitter.num_repeats
    words = [
        f"--{key.replace('_', '-')} {shlex.quote(str(value))}"
        for key, value in values.items()
    ]
    notes = [f"As arguments: {' '.join(words)}", *run.notes()]
    if run.grows:
        notes.append("Megatron-LM has the step schedule since April 2026.")
    return Exported(
        values=values, facts={"world_size": plan.num_devices}, notes=tuple(notes)
    )


PLAN_EXPORTS = {"maxtext": _to_maxtext, "megatron": _to_megatron}
NAMES = {"maxtext": "MaxText", "megatron": "Megatron-LM"}
