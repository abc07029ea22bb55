"""MaxText's base.yml: the keys of its batches, how its files are read, its numbers, and
its rules.

Numbers have MaxText's own roundings: float products truncated to whole numbers. Exact
arithmetic belongs to `rampup.plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rampup.config.key import other_names
from rampup.config.load import BASE
from rampup.config.schema import KEYS
from rampup.contrib.check.base_files import BaseFiles, read_bases, type_above
from rampup.contrib.check.known import load_table, load_unread
from rampup.contrib.check.launch import Launch, load_launch
from rampup.contrib.check.reading import Source
from rampup.contrib.check.rules import (
    Dialect,
    PretrainingJob,
    Ruling,
    around,
    ends_before_ramp,
    few_samples_per_pass,
    found_by_run,
)
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.verdict import Run, Term, format_count, product, times
from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO, plain_number, to_yaml_number
from rampup.plan.pipeline import bubble_fraction
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import MAX_PHASES, segments_counted_per_phase

END = "per_device_batch_size"
START = "per_device_batch_size_start"
INCREMENT = "per_device_batch_size_increment"
EVAL = "eval_per_device_batch_size"
SAMPLES = "global_rampup_samples"
ACCUMULATION = "gradient_accumulation_steps"
MICROBATCHES = "num_pipeline_microbatches"
REPEATS = "num_pipeline_repeats"
LAYERS = "pipeline_parallel_layers"
EXPANSION = "expansion_factor_real_data"
RAMP = "enable_rampup_batch_size"
STAGE_LAYERS = "num_layers_per_pipeline_stage"
SHARD_OPTIMIZER = "shard_optimizer_over_data"
AT_STEP = "at_step"  # where a run stands
# How MaxText's mesh axes map to rampup's, within a slice and between slices.
MESH: dict[str, dict[str, list[str]]] = load_table("maxtext", "axes")
# Text keys that are empty in many files, which means their default.
MAY_BE_EMPTY = ("quantization", "model_name", "decoder_block")
BASES: dict[str, dict[str, Any]] = load_table("maxtext", "bases")
UNREAD = load_unread("maxtext")
LAUNCH = load_launch("maxtext", bases=BASES, unread=UNREAD, parent=BASE)


def read_chain(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a base.yml, a script or a command, above the files that `base_config` or the
    command names. Files of models are not read: those of MaxText set no batch sizes,
    and a note names another one.
    """
    bases = read_bases(source, overrides, launch, _start)
    reading = bases.source
    answered = {*reading.answered, *launch.entries, *bases.beside}
    looked_up = {
        key: value for key, value in reading.leaves.items() if key not in answered
    }
    reading.leaves = {
        name: value
        for name, value in reading.leaves.items()
        if not (name in MAY_BE_EMPTY and value.value in ("", None))
    }
    return type_above(bases, looked_up)


def _start(bases: BaseFiles, command: Command, chosen: str) -> None:
    """Read the base file that the user or a command names."""
    words = [word for word in command.words if "=" not in word]
    named = (word for word in words if word.endswith((".yml", ".yaml")))
    bases.follow(command.locate(chosen or next(named, "")))


def known_keys(job: Any, key: str) -> Iterator[Ruling]:
    """Yield the rule that MaxText has all keys that are not in a base file of a
    fork.
    """
    yield from job.unknown(
        job.keys_of("maxtext", None),
        key,
        "left out: MaxText refuses what is not in its configuration (that of November"
        " 2025 warned). For a fork with keys of its own, name its base file with"
        f" {BASE}=..., or give one of them on rampup's command line as well",
    )


def old_keys(job: Any) -> Iterator[str]:
    """Yield a note about keys that only older versions of MaxText have."""
    if old := job.keys_of("maxtext", (1, 1)):
        yield (
            f"{', '.join(old[:4])}: only MaxText before August 2026 has these keys; a"
            " newer one refuses them."
        )


class BatchSizes(NamedTuple):
    """One batch as MaxText sees it, in samples."""

    # rows that the loaders read per optimizer step: at least a full sample per device
    to_load: int
    to_train: int  # rows that the optimizer step is meant to use
    micro: int  # rows of one forward pass over all devices


class MaxTextJob(PretrainingJob):
    """The numbers of a base.yml, which must not leave the number of devices open."""

    system = "maxtext"
    version = "MaxText of August 2026 (e591f30)"
    expressed = (
        *(key for axes in MESH.values() for keys in axes.values() for key in keys),
        *("learning_rate_schedule_steps", LAYERS),
        *(RAMP, END, START, INCREMENT, SAMPLES),
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._read_mesh()
        self._read_pipeline()
        self._count_rows()
        self._read_ramp()

    def _read_mesh(self) -> None:
        """Read the mesh and the devices, which follow from it if no axis is free."""
        # MaxText's mesh axes, multiplied into rampup's; -1 if one of a group is -1.
        self.combined_axes: dict[str, dict[str, int]] = {"ici": {}, "dcn": {}}
        for group, combined in self.combined_axes.items():
            for name, keys in MESH[group].items():
                sizes = [self[key] for key in keys]
                combined[name] = AUTO if AUTO in sizes else math.prod(sizes)
        self.num_slices: int = self["num_slices"]
        self.num_devices: int = self["num_devices"] or 0
        if not self.num_devices:
            axes = [*self.combined_axes["ici"].values()]
            axes += self.combined_axes["dcn"].values()
            if min(axes) < 1:
                raise ConfigError(
                    "the file leaves a mesh axis open (-1), so its batches depend on"
                    " the machine",
                    fix="add num_devices=N, for example num_devices=8",
                    key="num_devices",
                )
            self.num_devices = math.prod(axes)
        # An impossible mesh is reported by a rule; one device stands in for it.
        self.axes, self.mesh_problem = MeshAxes(), ""
        try:
            self.axes = MeshAxes.resolve(
                self.num_devices, num_slices=self.num_slices, **self.combined_axes
            )
        except RampupError as error:
            self.mesh_problem = str(error)
        self.replicas = self.axes.data_parallel_size
        # A loaded batch is sharded over the data, stage, fsdp and expert axes.
        self.loading_shards = self.replicas * self.axes.pipeline * self.axes.expert

    def _read_pipeline(self) -> None:
        """Read the pipeline. With one stage every pipeline key is ignored."""
        self.stages = self.axes.pipeline
        self.is_piped = self.stages > 1
        self.microbatches: int = self[MICROBATCHES]
        if self.microbatches == AUTO:
            self.microbatches = self.stages
        self.layers: int = self[LAYERS]
        if self.layers == AUTO:
            self.layers = self["base_num_decoder_layers"]
            if self["decoder_block"] == "deepseek":
                self.layers -= self["first_num_dense_layers"]
        # Layers of one round through the pipeline, or of all repeats if their number is
        # given.
        self.repeats: int = self[REPEATS]
        self.layer_product: int = self.stages * self[STAGE_LAYERS]
        if self.repeats == AUTO:
            self.repeats = self.layers // max(self.layer_product, 1)
        else:
            self.layer_product *= self.repeats

    def _count_rows(self) -> None:
        """Count the rows of training and of evaluation."""
        self.sizes = self._batch_sizes(self[END], self[ACCUMULATION])
        self.eval_sizes = self._batch_sizes(self[EVAL] or self[END], 1)
        # Rows loaded and not trained on, per step after the ramp. Partial loading by
        # few hosts reads each row once.
        self.dropped_per_step = max(self.sizes.to_load - self.sizes.to_train, 0)
        if self[EXPANSION] > 0 and self[END] >= 1:
            self.dropped_per_step = 0
        self.total_steps: int = self["steps"]
        if self.total_steps == AUTO:
            self.total_steps = self["learning_rate_schedule_steps"]
        # The step between sizes per device that divide over the mesh and into
        # microbatches.
        parts = self.microbatches if self.is_piped and self.microbatches > 0 else 1
        self.unit = Fraction(math.lcm(self.loading_shards, parts), self.num_devices)

    def _batch_sizes(self, per_device: Fraction, accumulation: int) -> BatchSizes:
        """Return the sizes of one batch. Source: MaxText `configs/types.py`,
        calculate_global_batch_sizes.
        """
        factor = float(self[EXPANSION]) if self[EXPANSION] > 0 else 1
        rows = self.num_devices * float(per_device)
        to_load = self.num_devices * factor if per_device < 1 else int(rows * factor)
        return BatchSizes(
            to_load=int(to_load * accumulation),
            to_train=int(rows) * accumulation,
            micro=int(rows),
        )

    def _read_ramp(self) -> None:
        """Read the ramp, whose increment MaxText tests in floating point: 1 - 0.1 is
        not a multiple of 0.1 there.
        """
        start, increment, end = (float(self[key]) for key in (START, INCREMENT, END))
        self.ramps: bool = self[RAMP]
        if not self.ramps:
            self.reasons = dict.fromkeys((SAMPLES, INCREMENT, START), "the ramp is off")
        self.grows: bool = self[END] > self[START]
        self.remainder = (end - start) % increment if increment else 0
        # Whether MaxText builds the ramp, and its number of increments.
        is_regular = self.grows and not self.remainder and min(start, increment) > 0
        self.builds_ramp: bool = self.ramps and is_regular
        self.num_increments = 0
        # The keys that decide whether all sizes of a ramp divide: start and end, and
        # the increment if a size is between.
        self.divided_keys: tuple[str, ...] = ()
        # The first step, the global batch size and the samples before it, of every
        # phase of MaxText's ramp as it runs. Empty without a ramp, or with one of too
        # many phases.
        self.ramp_phases: list[tuple[int, int, int]] = []
        if self.builds_ramp:
            self.num_increments = int((end - start) // increment)
            self._follow_ramp()
        if self.ramp_phases and self[AT_STEP] >= self.ramp_phases[-1][0]:
            # The ramp is over: only its last batch is to come.
            self.ramps = self.builds_ramp = False
            self.divided_keys, self.ramp_phases = (), []

    def _follow_ramp(self) -> None:
        """Follow the ramp as it runs: batches are without the accumulation factor, and
        each phase counts from zero (`utils/rampup_batch.py`).
        """
        keys = (START, INCREMENT, END)
        start, increment, end = (self.global_size(key) for key in keys)
        self.divided_keys = keys if start + increment < end else (START, END)
        if min(start, increment) < 1 or (end - start) // increment >= MAX_PHASES:
            return
        step = consumed = 0
        sizes = range(start, end, increment)
        for num_steps, size in segments_counted_per_phase(
            sizes, self[SAMPLES], self.num_increments
        ):
            self.ramp_phases.append((step, size, consumed))
            step, consumed = step + num_steps, consumed + num_steps * size
        self.ramp_phases.append((step, end, consumed))

    def global_size(self, key: str) -> int:
        """Return devices * size per device, truncated to whole samples as MaxText
        does.
        """
        return int(self.num_devices * float(self[key]))

    @property
    def lost_at_ramp_end(self) -> int:
        """Rows that were read in the ramp and never trained on: the loader's buffer is
        dropped with the ramp.

        MaxText's RampUpDataLoader (`common/data_loader.py`) believes that a pull fills
        its buffer to the final batch.
        """
        if not self.ramp_phases or self[EXPANSION] > 0:
            return 0
        _, end, trained = self.ramp_phases[-1]
        return -(-trained // end) * self.sizes.to_load - trained

    @property
    def outcome(self) -> Run:
        """Rows may be dropped in each step, and at the end of the ramp."""
        return "drops" if self.dropped_per_step or self.lost_at_ramp_end else "runs"

    def summary(self) -> str:
        """Return the numbers of an optimizer step in one line."""
        sizes, replicas = self.sizes, self.replicas
        share = to_yaml_number(Fraction(sizes.micro, replicas))
        shape = times(
            format_count(replicas, "replica"),
            format_count(self[ACCUMULATION], "pass"),
            share,
        )
        text = f"{format_count(sizes.to_train, 'sample')} per optimizer step; {shape}"
        if sizes.to_load != sizes.to_train:
            text += f"; {format_count(sizes.to_load, 'row')} loaded"
        if phases := self.ramp_phases:
            text += (
                f"; ramp from {phases[0][1]:,} in {format_count(len(phases), 'phase')}"
                f" and {format_count(phases[-1][0], 'step')}"
            )
        return text

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        sizes = self.sizes
        derived: dict[str, Any] = {
            "num_devices": self.num_devices,
            "global_batch_size_to_load": sizes.to_load,
            "global_batch_size_to_train_on": sizes.to_train,
            "micro_batch_size_to_train_on": sizes.micro,
            "global_batch_size_to_load_eval": self.eval_sizes.to_load,
            "global_batch_size_to_eval_on": self.eval_sizes.to_train,
            "data_parallel_size": self.replicas,
            "accumulation_steps": self[ACCUMULATION],
            "num_stages": self.stages,
            "dropped_samples_per_step": self.dropped_per_step,
        }
        if self.is_piped and self.microbatches > 0:
            count = max(self.microbatches, self.stages)
            bubble = bubble_fraction(self.stages, count, max(self.repeats, 1))
            derived |= {
                "num_repeats": self.repeats,
                "num_pipeline_microbatches": self.microbatches,
                "pipeline_microbatch_samples": sizes.micro // self.microbatches,
                "bubble_fraction": float(bubble),
            }
        if self.builds_ramp:
            derived["num_increments"] = self.num_increments
            derived["samples_per_increment"] = plain_number(
                Fraction(self[SAMPLES], self.num_increments)
            )
        if self.ramp_phases:
            derived["manager_phases"] = [list(phase) for phase in self.ramp_phases]
            derived["manager_ramp_steps"], _, derived["manager_ramp_samples"] = (
                self.ramp_phases[-1]
            )
            derived["lost_samples_at_ramp_end"] = self.lost_at_ramp_end
        return derived

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the phases of the ramp as it runs."""
        return (
            self.planned.phase_rows()
            if isinstance(self.planned, RampPlan) and self.ramps
            else None
        )

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys."""
        values: dict[str, Any] = {
            "num_devices": self.num_devices,
            **self._rampup_axes(),
            **{key: self[key] for key in (END, EVAL, ACCUMULATION)},
            EXPANSION: self[EXPANSION] if self[EXPANSION] > 0 else Fraction(AUTO),
            "rampup_microbatch": "per_phase",
            RAMP: self.ramps,
            "steps": self.total_steps,
            "eval_interval": (
                self["eval_interval"] if self["eval_interval"] > 0 else AUTO
            ),
            "max_target_length": self["max_target_length"],
            "learning_rate_clock": "steps",
        }
        if self[SHARD_OPTIMIZER]:
            values[SHARD_OPTIMIZER] = True
        if self["eval_steps"] > 0:
            values["eval_steps"] = self["eval_steps"]
        if self["steps"] != AUTO and self["learning_rate_schedule_steps"] > 0:
            values["learning_rate_schedule_steps"] = self[
                "learning_rate_schedule_steps"
            ]
        if self.ramp_phases and self[ACCUMULATION] > 1:
            # MaxText's ramp ignores the factor up to its last phase.
            del values[END], values[RAMP]
            *ramp, (_, _, end) = self.ramp_phases
            changes = [(start, size) for _, size, start in ramp]
            changes.append((end, self.sizes.to_train))
            values["batch_size_schedule"] = " ".join(
                f"{start}:{size}" for start, size in changes
            )
        elif self.ramps:
            # With no samples requested, every phase of MaxText's ramp lasts one step;
            # so does a ramp of one sample.
            values |= {
                START: self[START],
                INCREMENT: self[INCREMENT],
                SAMPLES: max(self[SAMPLES], 1),
            }
        if self.is_piped:
            values |= {
                MICROBATCHES: self.microbatches,
                REPEATS: self.repeats,
                "base_num_decoder_layers": self.layers,
            }
        return values

    def _rampup_axes(self) -> dict[str, int]:
        """Return the mesh in rampup's keys, which have slices along two axes and no
        experts.
        """
        found = {"num_slices": self.num_slices}
        for group, axes in self.combined_axes.items():
            for axis, size in axes.items():
                key = f"{group}_{axis}_parallelism"
                if key in KEYS:
                    found[key] = size
                elif size != 1:
                    why = other_names()["removed"][key]
                    raise ConfigError(f"{key}={size}: {why}", key=key)
        return found


def show(value: Any) -> str:
    """Return a size as text: a whole number with commas, a fraction as a decimal if it
    is one.
    """
    return str(to_yaml_number(value)) if isinstance(value, Fraction) else f"{value:,}"


def product_text(job: MaxTextJob, key: str) -> str:
    """Return the arithmetic from a size per device to a global batch size."""
    return (
        f"num_devices * {key} = {job.num_devices} * {show(job[key])} ="
        f" {show(job.num_devices * job[key])}"
    )


def _notes(job: MaxTextJob) -> Iterator[str]:
    sizes, expansion = job.sizes, job[EXPANSION]
    if job["model_name"] != "default":
        yield (
            f"model_name={job['model_name']}: the file of the model is not read; those"
            " of MaxText set no batch sizes, but the number of layers: with a pipeline,"
            " give base_num_decoder_layers=N"
        )
    yield from old_keys(job)
    named = abs(math.prod(job.combined_axes["dcn"].values()))
    if job.num_slices == AUTO and (slices := job.axes.num_slices) > named:
        # Which slices a run has is a fact of its machines.
        yield (
            f"num_devices={job.num_devices} is taken as {slices} slices of"
            f" {job.num_devices // slices} devices, those of the ici axes; on one"
            " slice the run fails, which num_slices=1 checks"
        )
    yield from few_samples_per_pass(job[ACCUMULATION], job[END], END)
    if job.dropped_per_step and sizes.micro >= 1:
        yield (
            f"{END}={show(job[END])} is below 1: a full sample per device is loaded,"
            f" {sizes.to_load:,} rows per step, and {sizes.to_train:,} of them are"
            f" trained on; {job.dropped_per_step:,} are dropped"
        )
    for key in (START, INCREMENT, END) if job.ramps else (END,):
        truncated = job.global_size(key)
        if job.num_devices * job[key] != truncated:
            yield (
                f"{product_text(job, key)} is truncated to {truncated}, in floating"
                " point; rampup reports an error"
            )
    if 0 < expansion < 1:
        yield (
            f"{EXPANSION}={show(expansion)}: the loaders of {int(1 / expansion)} times"
            f" as many hosts take turns, and each step gets the {sizes.to_load:,} rows"
            " of one of them, while global_batch_size_to_train_on is"
            f" {sizes.to_train:,}"
        )
    elif expansion > 1:
        yield (
            f"{EXPANSION}={show(expansion)}: 1 of {show(expansion)} hosts loads, for"
            f" itself and the others; global_batch_size_to_load={sizes.to_load:,} counts"
            " the rows that they would load together if all did"
        )
    if (passes := job[ACCUMULATION]) > 1 and job[SHARD_OPTIMIZER]:
        yield (
            f"{SHARD_OPTIMIZER} casts float32 parameters to bfloat16 before the"
            f" accumulation passes, so the gradients of the {passes:,} passes are"
            " summed in bfloat16, which keeps 8 bits of each sum; rampup sums in"
            " float32"
        )
    if job.ramp_phases:
        yield from _ramp_notes(job)
    yield from _pipeline_notes(job)


def _ramp_notes(job: MaxTextJob) -> Iterator[str]:
    """Yield whether the run reaches the end of MaxText's ramp, and what the ramp ignores,
    takes, and loses at its end and at a resume.
    """
    phases = [(start, size) for start, size, _ in job.ramp_phases]
    yield from ends_before_ramp(job.total_steps, phases)
    sizes, passes, samples = job.sizes, job[ACCUMULATION], job[SAMPLES]
    *ramp, (steps, _, trained) = job.ramp_phases
    if passes > 1:
        yield (
            f"MaxText's ramp ignores {ACCUMULATION}={passes}: in step {steps:,} the batch"
            f" jumps from {ramp[-1][1]:,} to {sizes.to_train:,}"
        )
    if samples < 1:
        yield f"{SAMPLES}={samples:,} is below 1: every phase lasts one step"
    elif trained != samples:
        yield (
            f"the ramp takes {trained:,} samples in {steps:,} steps, but {SAMPLES}"
            f" requests {samples:,} ({trained / samples - 1:+.1%}): samples beyond a"
            " phase's share do not count towards the next"
        )
    if lost := job.lost_at_ramp_end:
        yield (
            f"at the end of the ramp {lost:,} loaded rows are never trained on: the"
            f" buffer of {sizes.to_load:,} rows is dropped with the ramp"
            f" ({trained:,} trained, {trained + lost:,} loaded)"
        )
    yield (
        f"a resume within the ramp loses up to {max(sizes.to_load - 1, 0):,} buffered"
        " rows, which no checkpoint contains, and is one batch behind: a checkpoint"
        " labelled s contains s + 1 batches and s are replayed"
    )


def _pipeline_notes(job: MaxTextJob) -> Iterator[str]:
    """Yield which keys a pipeline ignores, what it does not check, and where it
    waits.
    """
    if not job.is_piped:
        ignored = [key for key in (MICROBATCHES, REPEATS, LAYERS) if job[key] != AUTO]
        if ignored:
            yield f"ignored, as there is one pipeline stage: {', '.join(ignored)}"
        return
    rows = job.sizes.micro
    if job.microbatches > 0 and rows % (job.microbatches * job.replicas):
        yield (
            f"a pipeline microbatch of {rows // job.microbatches} samples does not"
            f" divide over data * fsdp = {job.replicas}: MaxText does not check it, and"
            " devices share or pad samples"
        )


FP8 = ("fp8", "nanoo_fp8", "fp8_gpu", "te_fp8_delayedscaling")
VOCAB_TILING = "num_vocab_tiling"


def _sizes_near(job: MaxTextJob, key: str) -> Iterator[Fraction]:
    """Yield the candidates of a size per device, which is a fraction, the nearest
    first. They are found when they are needed, as most rules hold.
    """
    value = max(job[key], Fraction(0))
    found = {*around(value, job.unit), *around(value, Fraction(1, job.num_devices))}
    yield from sorted((n for n in found if n > 0), key=lambda n: abs(n - value))


def _rules(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield what MaxText's configuration and its run ask."""
    yield from known_keys(job, END)
    yield from _checked(job)
    yield from found_by_run(_run_rules(job))


def _checked(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield what the check of the configuration asks."""
    passes = job[ACCUMULATION]
    yield job.at_least("accumulation_positive", [ACCUMULATION], ACCUMULATION, 1)
    growth = f"{END} - {START} = {show(job[END])} - {show(job[START])}"
    if job.ramps and not job.grows:
        yield job.broken(
            "ramp_grows",
            (END, START),
            f"{END}={show(job[END])} must be greater than {START}={show(job[START])}",
            candidates=_sizes_near(job, END),
        )
    elif job.ramps and job.remainder:
        where = ""
        if (job[END] - job[START]) % job[INCREMENT] == 0:
            where = f" in floating point, where the remainder is {job.remainder:g}"
        yield job.broken(
            "ramp_increment_divides",
            (INCREMENT, START, END),
            f"{growth} = {show(job[END] - job[START])} must be a multiple of"
            f" {INCREMENT}={show(job[INCREMENT])}{where}",
            candidates=_sizes_near(job, INCREMENT),
        )
    tokens = job[END] * job["max_target_length"]
    if job[END] > 0 and float(job[END]) * job["max_target_length"] % job[VOCAB_TILING]:
        yield job.broken(
            "vocab_tiling",
            (VOCAB_TILING, END, "max_target_length"),
            f"{END} * max_target_length = {show(job[END])} * {job['max_target_length']}"
            f" = {show(tokens)} must be a multiple of {VOCAB_TILING}={job[VOCAB_TILING]}",
            division=(int(tokens), job[VOCAB_TILING]),
        )
    if job["quantization"] in FP8 and passes > 1:
        yield job.broken(
            "fp8_accumulation",
            (ACCUMULATION, "quantization"),
            f"{ACCUMULATION}={passes} must be 1 with"
            f" quantization={job['quantization']}",
        )
    if job.is_piped:
        yield from _pipeline_rules(job)


def _pipeline_rules(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield what the check asks of a pipeline."""
    factors = {"num_stages": job.stages, STAGE_LAYERS: job[STAGE_LAYERS]}
    is_free = job[REPEATS] == AUTO  # whether the repeats follow from the layers
    if not is_free:
        factors[REPEATS] = job[REPEATS]
    fits = job.layers == job.layer_product or (
        is_free and job.layers % max(job.layer_product, 1) == 0
    )
    if not fits or min(job.layer_product, job.layers) < 1:
        near = around(job.layers, max(job.layer_product, 1))
        yield job.broken(
            "pipeline_layers",
            (LAYERS, "base_num_decoder_layers", STAGE_LAYERS, REPEATS),
            f"{LAYERS}={job.layers:,} must be"
            f" {'a multiple of ' * is_free}{product(factors).text}",
            candidates=[int(n) for n in near if n >= 1],
        )
    count = Term(f"{MICROBATCHES}={job.microbatches:,}", job.microbatches)
    note = ", or -1 for automatic"
    yield job.at_least("microbatches_positive", [MICROBATCHES], count, 1, note)
    rows = job.sizes.micro
    if job.microbatches >= 1:
        stages = Term(
            "the stages, ici_pipeline_parallelism * dcn_pipeline_parallelism ="
            f" {job.stages}",
            job.stages,
        )
        keys = [MICROBATCHES]
        yield job.multiple("microbatches_multiple_of_stages", keys, count, stages)
        if rows > 0:
            batch = f"{product_text(job, END)}, the batch of one forward pass ({rows}),"
            yield job.multiple(
                "batch_multiple_of_microbatches",
                (END, MICROBATCHES),
                Term(batch, rows),
                count,
                candidates=_sizes_near(job, END),
            )


def _run_rules(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield what only the run finds."""
    micro = job.sizes.micro
    if job.mesh_problem:
        # pyconfig accepts any mesh; create_device_mesh asserts that it has as many
        # devices as the run.
        yield job.broken(
            "mesh",
            ["num_devices"],
            f"{job.mesh_problem}; MaxText's configuration is accepted, and the run stops"
            " at its mesh",
            candidates=[int(n) for n in around(job.num_devices) if n >= 1],
        )
    if micro < 1:
        yield job.broken(
            "empty_batch",
            [END],
            f"{product_text(job, END)} is truncated to {micro} samples: the step"
            " silently trains on nothing",
            candidates=_sizes_near(job, END),
        )
    if job.ramps and job.grows:
        yield from _ramp_rules(job)
    # Below 1 per device a full sample per device is loaded.
    if job[END] >= 1:
        yield from _over_mesh(job, "rows_over_mesh", END, job.sizes.to_train)
    for key, name in ((START, "first_rows"), (INCREMENT, "increment")):
        if key in job.divided_keys:
            rows = max(job.global_size(key), 0)
            yield from _over_mesh(job, f"{name}_over_mesh", key, rows)
    passes = job[ACCUMULATION]
    is_split = any(job.global_size(key) % passes for key in job.divided_keys if passes)
    if passes >= 2 and is_split and job.ramp_phases:
        yield job.broken(
            "ramp_accumulation",
            (ACCUMULATION, START, INCREMENT),
            f"MaxText's ramp ignores {ACCUMULATION}={passes}, but splits each batch into"
            f" that many parts: {product_text(job, START)} and"
            f" {product_text(job, INCREMENT)} must be multiples of it",
            division=(max(job.global_size(START), 1), 1),
        )
    if job.is_piped and job.builds_ramp:
        yield job.broken(
            "ramp_in_pipeline",
            (RAMP, "ici_pipeline_parallelism"),
            f"the pipeline is built for the final batch of {micro} samples only; the"
            f" ramp's first one of {job.global_size(START)} cannot be given that shape,"
            " and the first step fails",
            candidates=(False,),
        )
    if job["eval_interval"] > 0:
        yield from _eval_rule(job)
    if job.total_steps < 1:
        yield job.broken(
            "no_steps",
            ["steps"],
            f"the run has steps={job['steps']}"
            f" (learning_rate_schedule_steps={job['learning_rate_schedule_steps']})",
        )


def _ramp_rules(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield what the run finds of a ramp that grows."""
    first, increment = job.global_size(START), job.global_size(INCREMENT)
    if first < 1:
        yield job.broken(
            "empty_first_batch",
            [START],
            f"{product_text(job, START)} is truncated to {first} samples: the ramp never"
            " starts",
            candidates=_sizes_near(job, START),
        )
    if not job.remainder and increment < 1:
        yield job.broken(
            "increment_positive",
            [INCREMENT],
            f"{product_text(job, INCREMENT)}, truncated to {increment}, must be at least"
            " 1: MaxText divides by zero, hangs, or keeps the first batch indefinitely",
            candidates=_sizes_near(job, INCREMENT),
        )


def _over_mesh(job: MaxTextJob, name: str, key: str, rows: int) -> Iterator[Ruling]:
    """Yield the rule that a batch, or the increment of one, divides over the
    devices.
    """
    if rows % job.loading_shards:
        yield job.broken(
            name,
            [key],
            f"{product_text(job, key)} samples must be a multiple of the devices that a"
            f" batch is sharded over, data * stage * fsdp * expert ="
            f" {job.loading_shards}; MaxText does not check it, and the first such step"
            " fails",
            candidates=_sizes_near(job, key),
        )


def _eval_rule(job: MaxTextJob) -> Iterator[Ruling]:
    """Yield the rule that the batch of evaluation is the shape of training, or divides
    over devices.
    """
    rows, key = job.eval_sizes.micro, EVAL if job[EVAL] else END
    fits = job[key] < 1 or rows % job.loading_shards == 0
    rule = f"a multiple of data * stage * fsdp * expert = {job.loading_shards}"
    if job.is_piped:
        fits = fits and rows == job.sizes.micro
        rule = (
            f"the training batch of one forward pass, {job.sizes.micro}, for whose"
            " shape the pipeline is built"
        )
    if rows < 1 or not fits:
        near = around(job[EVAL] or job[END], job.unit)
        yield job.broken(
            "eval_batch",
            (EVAL, "eval_interval"),
            f"{product_text(job, key)} ({rows} rows of evaluation) must be {rule};"
            " MaxText does not check it",
            candidates=[0, job[END], *near],
        )


DIALECT = Dialect(
    job=MaxTextJob,
    rules=_rules,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
    devices="num_devices",
    by_device=(END, START, INCREMENT),
    by_pass=(ACCUMULATION,),
)
