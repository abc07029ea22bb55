"""Megatron: its arguments and how they are read, its two ramps, replicas, microbatches
and pipeline, and its rules.

The ramps are computed exactly and with Megatron's own roundings. Only the run finds
many problems, when a phase's step comes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rampup.config.yaml import Located
from rampup.contrib.check.known import load_table, load_unread
from rampup.contrib.check.launch import Launch, load_entries, load_launch, parse_known
from rampup.contrib.check.reading import Source, read_source
from rampup.contrib.check.rules import (
    Dialect,
    PretrainingJob,
    Ruling,
    around,
    ends_before_ramp,
    few_samples_per_pass,
)
from rampup.contrib.check.settings import Settings, rename, type_settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import has_unknown
from rampup.contrib.check.verdict import Term, format_count, product, times
from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT, SUFFIXES, plain_number
from rampup.plan.pipeline import bubble_fraction
from rampup.plan.ramp import MAX_PHASES, BatchRamp, Phase

RAMP, SCHEDULE = "rampup_batch_size", "step_batch_size_schedule"
MICRO, GLOBAL = "micro_batch_size", "global_batch_size"
DECREASE = "decrease_batch_size_if_needed"
TENSOR, STAGES = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"
SEQUENCE = "ds_sequence_parallel_size"
# The axes whose devices share a sample, with their names in messages.
AXES = {TENSOR: "tensor", STAGES: "pipeline", CONTEXT: "context", SEQUENCE: "sequence"}
EXPERT_TENSOR, EXPERT = (f"expert_{axis}_parallel_size" for axis in ("tensor", "model"))
VIRTUAL = "virtual_pipeline_model_parallel_size"
PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
LAYERS = "num_layers"
PARTITION = "pp_partition_method"
EXTRAS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
VERSION = "megatron_version"
AT_STEP = "at_step"  # where a run stands
_DEVICES = ("nnodes", "nproc_per_node", "num_nodes", "devices")
_DEVICES_GIVEN = {*_DEVICES, "world_size", "data_parallel_size"}
# Launchers whose options have names of their own.
_LAUNCHERS = {"deepspeed", "msrun"}
_LAUNCHED = {
    "num_nodes": "nnodes",
    "num_gpus": "nproc_per_node",
    "worker_num": "world_size",
}
_LAUNCHER = re.compile(r"torchrun|torch\.distributed|deepspeed|accelerate|\bray\b")

KEYS = load_entries("megatron")
_NAMES = load_table("megatron", "names")
ALIASES: dict[str, str] = _NAMES["aliases"]
UNEVEN: list[str] = _NAMES["uneven"]


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read Megatron's arguments: YAML (flat, or nested as NeMo's; names with
    underscores or dashes), a script or a command.
    """
    reading = rename(read_source(source, overrides, launch), launch)
    command, chosen = reading.command, reading.answered
    is_nemo = False
    if command is None:
        leaves = dict(reading.leaves)
        for name in {RAMP, SCHEDULE} & leaves.keys():
            if (value := leaves[name].value) is not None:
                leaves[name] = dataclasses.replace(leaves[name], value=str(value))
        is_nemo = not leaves.keys().isdisjoint({"devices", "num_nodes"})
        own = set() if is_nemo else set(leaves)
    else:
        leaves = _with_devices(command, reading.leaves, chosen)
        own = set(map(canonical, _own_options(command)))
        if _starts_swift(command):
            reading.notes.append(
                "ms-swift starts this: the rules are those of Megatron-LM."
            )
        if not (reading.is_fork or reading.questions):
            reading.questions += _find_options_of_others(command)
    # A ramp depends on the samples and tokens of the run, and the number of chunks on
    # that of layers.
    entries = KEYS
    if not {RAMP, SCHEDULE, PER_CHUNK}.isdisjoint({*leaves, *chosen}):
        entries = {
            name: dataclasses.replace(entry, optional=False)
            for name, entry in KEYS.items()
        }
    launch = dataclasses.replace(
        launch, entries=entries, decides=_LAYOUTS if is_nemo else _SIZES
    )
    reading.leaves = leaves
    settings = type_settings(reading, launch)
    foreign = own - KEYS.keys() - chosen
    looked_up = {name: place for name, place in leaves.items() if name in foreign}
    return dataclasses.replace(settings, looked_up=looked_up)


def _own_options(command: Command) -> list[str]:
    """Return the options as written that Megatron itself looks up, and refuses if it
    does not have them: those behind its program, not those of the launcher.
    """
    behind = itertools.dropwhile(lambda word: not word.endswith(".py"), command.words)
    return [word.partition("=")[0] for word in behind if word.startswith("--")]


def _find_options_of_others(command: Command) -> Iterator[ConfigError]:
    """Yield an error for each size that is not written as one of Megatron's arguments:
    with underscores, or as an option of the launcher.
    """
    for word in _own_options(command):
        name, fix = canonical(word), word.replace("_", "-")
        if name in _DEVICES_GIVEN:
            fix = "it before the program, where the launcher reads it"
        elif name not in KEYS or "_" not in word:
            continue
        yield ConfigError(
            f"Megatron-LM has no option {word}",
            fix=f"write {fix}",
            key=name,
            path=command.path,
            line=command.line or None,
        )


def _with_devices(
    command: Command, leaves: Mapping[str, Located], chosen: Collection[str]
) -> dict[str, Located]:
    """Return the keys of a command with the devices that its launcher, the variables of
    ms-swift, Slurm, MPI or a manifest give to it.
    """
    located = dict(leaves)
    programs = {word.rpartition("/")[2] for word in command.words}
    # Beside a host file they are bounds.
    if programs & _LAUNCHERS and "hostfile" not in leaves:
        for name in _LAUNCHED.keys() & leaves.keys():
            located.setdefault(_LAUNCHED[name], leaves[name])
    if _starts_swift(command):
        located.setdefault(EXPERT_TENSOR, command.locate(1))  # its own default
        for key in ("nnodes", "nproc_per_node"):
            if value := command.environment.get(key.upper()):
                size = parse_known(value, command.path)
                located.setdefault(key, command.locate(size))
    # What a script does not say about the devices is one question: the size of the job.
    given = [str(located[name].value) for name in _DEVICES if name in located]
    is_open = any(map(has_unknown, given))
    if _DEVICES_GIVEN.isdisjoint(chosen):
        # Where no launcher of PyTorch starts processes, Slurm or MPI starts one for
        # each device.
        is_launched = any(map(_LAUNCHER.search, command.words))
        is_sized = not _DEVICES_GIVEN.isdisjoint(located)
        if command.tasks and not is_sized and not is_launched:
            size = parse_known(command.tasks, command.path)
            located["world_size"] = command.locate(size)
        # What the command leaves open, the cluster tells each pod.
        if command.devices and (is_open or not located.keys() >= {*_DEVICES[:2]}):
            located.setdefault("world_size", command.locate(command.devices))
    if is_open:
        return {name: at for name, at in located.items() if name not in _DEVICES}
    return located


def _starts_swift(command: Command) -> bool:
    """Return whether a command is ms-swift's `megatron sft`."""
    return command.words[0].rpartition("/")[2] == "megatron"


def canonical(name: str) -> str:
    """Return Megatron's name for an option, a YAML key or one of its older names."""
    plain = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    return ALIASES.get(plain, plain)


# Options of forks that may be sizes, as `-pp` and `--allow-padding-num-layers`; in
# YAML, meshes of several kinds of devices.
_OPTION = re.compile(r"--\S|-[tpdcev]{1,2}p$")
_SIZES = re.compile(
    r"[tpdcev]{1,2}p"
    r"|\w*(?:batch_size|parallel_size|num_layers|hetero|num_stages|num_microbatch|accumulation_steps|interleav)\w*"
)
_LAYOUTS = re.compile(r"enable_hetero\w*|hetero_\w*mesh\w*")


def read_options(command: Command) -> dict[str, Located]:
    """Return the keys that the options of a command set: true for a flag, several words
    for a ramp, otherwise the first one.
    """
    located: dict[str, Located] = {}
    for index, word in enumerate(command.words):
        if not _OPTION.match(word):
            continue
        written, equals, attached = word.partition("=")
        following = itertools.takewhile(
            lambda other: not other.startswith("--"), command.words[index + 1 :]
        )
        values = [attached] if equals else list(following)
        name = canonical(written)
        located[name] = command.locate(_option_value(name, values, command.path))
    return located


def _option_value(name: str, values: Sequence[str], path: str) -> Any:
    """Return the value of an option with some words behind it."""
    first = values[0] if values else "true"
    if name in (RAMP, SCHEDULE):
        numbers = re.compile(r"[-+\d]" if name == RAMP else r".*:")
        parts = [v for v in values if numbers.match(v) or has_unknown(v)]
        return " ".join(parts or values[:1])
    if name in KEYS and KEYS[name].kind == "bool":
        return first.lower() != "false"  # what follows a flag is not its value
    value = parse_known(first, path)
    return first if isinstance(value, float) else value  # 64.0 is no whole number


LAUNCH = load_launch(
    "megatron", unread=load_unread("megatron"), canonical=canonical, read=read_options
)


_NUMBER, _BETWEEN = r"([-+]?[0-9](?:_?[0-9]){0,17})", r"[\s,\[\]()\"']"
# Commas are those of a list: argparse takes "16,8,1000" for one value.
_TRIPLE = re.compile(
    r"(?![^\[(]*,)"
    rf"{_BETWEEN}*{_NUMBER}{_BETWEEN}+{_NUMBER}{_BETWEEN}+{_NUMBER}{_BETWEEN}*"
)
_COUNT = r"([-+]?\d{1,19}(?:_\d{1,9}){0,9}(?:\.\d{0,18})?)([KMBT]?)"
_ENTRY = re.compile(f"{_COUNT}:{_COUNT}")


class Threshold(NamedTuple):
    """One THRESHOLD:SIZE entry of `--step-batch-size-schedule`."""

    text: str  # as written
    samples: int  # the threshold, in whole samples
    size: int  # global batch size from the threshold on


def parse_entry(text: str, seq_length: int | None) -> Threshold | None:
    """Read one entry, with suffixes K, M, B, T, as Megatron does: in floating point,
    truncated to whole numbers; None where it cannot.

    Thresholds are tokens if `seq_length` is given. Source: Megatron-LM
    `num_microbatches_calculator.py`, the step schedule.
    """
    match = _ENTRY.fullmatch(text.upper())
    if match is None:
        return None
    threshold = int(float(match[1]) * SUFFIXES.get(match[2], 1))
    size = int(float(match[3]) * SUFFIXES.get(match[4], 1))
    if max(abs(threshold), abs(size)) > MAX_COUNT:
        return None
    return Threshold(text=text, samples=threshold // (seq_length or 1), size=size)


class MegatronJob(PretrainingJob):
    """The numbers of Megatron's arguments, among them the devices, which must be
    known.
    """

    system = "megatron"
    expressed = (
        MICRO,
        GLOBAL,
        DECREASE,
        RAMP,
        SCHEDULE,
        VIRTUAL,
        PER_CHUNK,
        *AXES,
        *_DEVICES_GIVEN,
        LAYERS,
        VERSION,
        "seq_length",
        "train_iters",
        "max_steps",
        "train_samples",
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.version = (
            "Megatron-LM of August 2026 (d98e8a6), linear ramps by"
            f" {VERSION}={self[VERSION]}"
        )
        self._count_devices()
        self._count_chunks()
        self._read_linear_ramp()
        self._read_schedule()
        self._follow_ramp()

    def _count_devices(self) -> None:
        """Count devices, replicas (at least one, also if the world size breaks a rule),
        and samples of passes and batches.
        """
        # The devices of a replica, with their arithmetic.
        self.replica = product(
            {
                f"{name} parallel size": self[axis]
                for axis, name in AXES.items()
                if axis != SEQUENCE or axis in self.settings.given
            }
        )
        self.model_parallel = self.replica.number
        self.world: int | None = self["world_size"]
        for hosts, per_host in (("nnodes", "nproc_per_node"), ("num_nodes", "devices")):
            if self.world is None and (self[per_host] or 0) > 0:
                self.world = (self[hosts] or 1) * self[per_host]
        self.replicas: int = self["data_parallel_size"]
        if self.replicas is None:
            if self.world is None:
                raise ConfigError(
                    "the number of devices is not in the file",
                    fix="add world_size=N (or data_parallel_size=N)",
                    key="world_size",
                )
            self.replicas = max(self.world // self.model_parallel, 1)
        elif self.world not in (None, self.replicas * self.model_parallel):
            raise ConfigError(
                f"data_parallel_size={self.replicas} times {self.replica.text} is not"
                f" the world size {self.world}",
                key="data_parallel_size",
                nearest=(self.world // self.model_parallel,),
            )
        self.num_devices = self.replicas * self.model_parallel
        self.micro: int = self[MICRO] or 0
        # Samples of one forward pass of all replicas.
        self.unit = self.micro * self.replicas
        # The requested batch after the ramp.
        self.final: int = self.unit if self[GLOBAL] is None else self[GLOBAL]

    def _count_chunks(self) -> None:
        """Count stages, their layers and layer chunks."""
        self.stages: int = self[STAGES]
        # A pattern names each of the layers of a hybrid model.
        is_hybrid = any(
            name.startswith("hybrid_") and name.endswith("_pattern")
            for name in self.settings.others
        )
        self.num_layers: int | None = None if is_hybrid else self[LAYERS]
        self.uneven = [key for key in UNEVEN if self[key]]
        # Whether layers are known, and split evenly over the stages.
        self.even = self.num_layers is not None and not self.uneven
        # The key that divides the layers of a stage into chunks.
        given = (key for key in (VIRTUAL, PER_CHUNK) if self[key] is not None)
        self.chunk_key = next(given, "")
        self.chunks = 1
        if self.chunk_key == VIRTUAL:
            self.chunks = max(self[VIRTUAL], 1)
        elif self.chunk_key and self.num_layers is not None:
            # The embedding and the loss take the slot of a layer.
            slots = self.num_layers + sum(self[key] for key in EXTRAS)
            self.chunks = max(slots // (self.stages * self[PER_CHUNK]), 1)
        self.interleaved = self.chunks > 1 and self.stages > 1

    def _read_linear_ramp(self) -> None:
        """Read a linear ramp, which has no effect beside a schedule in steps, and none
        since April 2026.
        """
        self.has_schedule = self[SCHEDULE] is not None
        is_read = self[VERSION] == "legacy" and not self.has_schedule
        self.has_linear = self[RAMP] is not None and is_read
        self.has_ramp = self.has_schedule or self.has_linear
        if not self.has_ramp:
            self.reasons = {RAMP: "ignored by Megatron-LM since April 2026"}
        match = _TRIPLE.fullmatch(self[RAMP]) if self.has_linear else None
        self.is_triple = match is not None
        self.start, self.increment, self.ramp_samples = (
            map(int, match.groups()) if match else (0, 0, 0)
        )
        if self[DECREASE] and (self.has_ramp or self.final % max(self.unit, 1)):
            raise ConfigError(
                f"{DECREASE} rounds batches down to multiples of {self.unit:,}, and"
                f" excludes {SCHEDULE}: the rules do not follow it",
                fix=f"add {DECREASE}=false, and give such batches",
                key=DECREASE,
            )
        # Whether rules about the relation of the three can use them.
        self.ordered = min(self.start, self.increment) > 0 and self.ramp_samples >= 0
        # The batch after each number of increments, if the numbers make a ramp.
        self.linear: range | None = None
        if self.ordered and self.ramp_samples and self.final > self.start:
            count, rest = divmod(self.final - self.start, self.increment)
            if not rest and count < MAX_PHASES:
                self.linear = range(self.start, self.final + 1, self.increment)

    def _read_schedule(self) -> None:
        """Read the entries of a schedule in steps, sorted by threshold, as Megatron
        sorts them.
        """
        written = (self[SCHEDULE] or "").replace(",", " ").split()
        parsed = {
            text: parse_entry(text, self["seq_length"]) for text in written[:MAX_PHASES]
        }
        self.unreadable = [text for text in parsed if parsed[text] is None]
        self.thresholds = sorted(
            filter(None, map(parsed.get, written)), key=lambda entry: entry.samples
        )
        # Neighbouring thresholds that do not increase, and sizes that shrink.
        pairs = [*itertools.pairwise(self.thresholds)]
        self.not_rising = [(a, b) for a, b in pairs if b.samples <= a.samples]
        self.shrinking = [(a, b) for a, b in pairs if b.size < a.size]
        self.schedule_valid = (
            bool(self.thresholds)
            and self.thresholds[0].samples == 0
            and all(entry.size > 0 for entry in self.thresholds)
            and not self.unreadable
            and not self.not_rising
        )

    def _follow_ramp(self) -> None:
        """Follow the ramp, or the one batch without it, and split each size; there may
        be none to follow.
        """
        self.ramp: BatchRamp | None = None
        # The samples from which each size counts.
        self.changes: list[tuple[int, int]] = []
        if self.schedule_valid:
            self.changes = [(entry.samples, entry.size) for entry in self.thresholds]
        elif self.linear is not None:
            # The samples are exact, rounded up to whole ones; of sizes at the same
            # sample, only the last one counts.
            count = len(self.linear) - 1
            samples = self.ramp_samples
            changes = {-(-k * samples // count): b for k, b in enumerate(self.linear)}
            self.changes = [*changes.items()]
        elif not self.has_ramp and self.final >= 1:
            self.changes = [(0, self.final)]
        if self.changes:
            self.ramp = BatchRamp.piecewise(self.changes)
        # Phases that are over need no split.
        self.coming: Sequence[Phase] = ()
        if self.ramp is not None:
            self.ramp = ramp = self.ramp.resumed_at(self[AT_STEP])
            self.coming = [phase for phase in ramp.phases if not ramp.is_over(phase)]
        sizes = [phase.global_batch_size for phase in self.coming]
        self.sizes = tuple(dict.fromkeys(sizes))
        self.splits = self.unit >= 1 and not any(size % self.unit for size in sizes)
        self.num_microbatches: list[int] | None = None
        if self.ramp is not None and self.splits:
            self.num_microbatches = [size // self.unit for size in sizes]

    def total_steps(self) -> int:
        """Return the optimizer steps of the run; 0 if they are not known."""
        if self["train_samples"] and self.ramp is not None:
            return max(self.ramp.step_of_sample(int(self["train_samples"])), 1)
        return max(self["train_iters"] or self["max_steps"] or 0, 0)

    def summary(self) -> str:
        """Return the numbers of an optimizer step in one line."""
        if self.ramp is None or not self.splits:
            return ""
        final = self.ramp.sizes[-1]
        shape = times(
            format_count(self.replicas, "replica"),
            format_count(final // self.unit, "microbatch"),
            self.micro,
        )
        length = (
            f"{format_count(len(self.ramp.phases), 'phase')} and"
            f" {format_count(self.ramp.ramp_steps, 'step')}"
        )
        ramp = (
            f"; ramp from {self.ramp.sizes[0]:,} in {length}" if self.has_ramp else ""
        )
        return f"{format_count(final, 'sample')} per optimizer step; {shape}{ramp}"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "num_devices": self.num_devices,
            "data_parallel_size": self.replicas,
            "micro_batch_size": self.micro,
            "num_stages": self.stages,
            "num_repeats": self.chunks,
            "thresholds_samples": None,
            "num_microbatches": self.num_microbatches,
        }
        if self.has_schedule:
            thresholds = [[entry.samples, entry.size] for entry in self.thresholds]
            derived["thresholds_samples"] = thresholds
        if self.ramp is not None:
            derived |= {
                "global_batch_size": self.ramp.sizes[-1],
                "ramp_phases": [
                    [p.start_step, p.global_batch_size, p.start_sample]
                    for p in self.ramp.phases
                ],
                "num_increments": self.ramp.num_increments,
                "ramp_steps": self.ramp.ramp_steps,
                "ramp_samples": self.ramp.ramp_samples,
            }
        if self.num_microbatches is not None:
            derived["accumulation_steps"] = self.num_microbatches[-1]
            derived["bubble_fraction"] = self.bubble(self.num_microbatches[-1])
        return derived

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return every phase with its own split: Megatron's pipeline takes any number
        of microbatches.
        """
        if self.num_microbatches is None or not self.has_ramp:
            return None
        return [
            {
                "start_step": phase.start_step,
                "start_sample": phase.start_sample,
                "num_steps": phase.num_steps,
                "global_batch_size": phase.global_batch_size,
                "per_device_batch_size": plain_number(
                    Fraction(phase.global_batch_size, self.num_devices)
                ),
                "data_parallel_size": self.replicas,
                "accumulation_steps": count if self.stages == 1 else 1,
                "num_pipeline_microbatches": count if self.stages > 1 else 1,
                "microbatch_size": self.micro,
                "num_stages": self.stages,
                "num_repeats": self.chunks,
                "bubble_fraction": self.bubble(count),
                "learning_rate_scale": 1.0,
            }
            for phase, count in zip(self.coming, self.num_microbatches, strict=True)
        ]

    def bubble(self, num_microbatches: int) -> float:
        """Return the idle time of a pass as a fraction of its time."""
        return float(bubble_fraction(self.stages, num_microbatches, self.chunks))

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys."""
        if self.uneven and self.stages > 1:
            raise ConfigError(
                "rampup's pipeline has the same number of layers in every stage"
            )
        if self.ramp is None or not self.splits:
            raise ConfigError("not every batch of the file can be split")
        counts = sorted({size // self.unit for size in self.sizes})
        uneven = [count for count in counts if count % self.stages]
        if self.stages > 1 and len(counts) > 1 and uneven:
            raise ConfigError(
                "rampup's pipeline takes a growing number of microbatches in multiples"
                f" of its {self.stages} stages, but the file has phases of {uneven[0]}"
            )
        # If the file does not say how long the run is, it has the steps of the ramp and
        # one more.
        steps = self.total_steps() or self.ramp.ramp_steps + 1
        values: dict[str, Any] = {
            "num_devices": self.num_devices,
            "ici_tensor_parallelism": self[TENSOR],
            "ici_context_parallelism": self[CONTEXT] * self[SEQUENCE],
            "ici_pipeline_parallelism": self.stages,
            "microbatch_size": self.micro,
            "steps": steps,
            "learning_rate_clock": "samples",
            "eval_interval": -1,
        }
        if self.has_ramp:
            values["batch_size_schedule"] = " ".join(
                f"{threshold}:{size}" for threshold, size in self.changes
            )
        else:
            values["per_device_batch_size"] = Fraction(
                self.ramp.sizes[-1], self.num_devices
            )
        if self["seq_length"] is not None:
            values["max_target_length"] = self["seq_length"]
        if self.stages > 1:
            chunks = self.stages * self.chunks
            layers = chunks if self.num_layers is None else self.num_layers
            values |= {
                "num_pipeline_microbatches": counts[0] if len(counts) == 1 else -1,
                "pipeline_strict_multiple": False,
                "num_pipeline_repeats": self.chunks,
                "base_num_decoder_layers": layers,
            }
        return values


def _notes(job: MegatronJob) -> Iterator[str]:
    """Yield what is special to the file, its ramp, and its version and pipeline."""
    given = job.settings.given
    if "devices" in given and not {"num_nodes", "world_size"} & given:
        yield (
            "num_nodes is not in the file: one node is taken, as NeMo does; add"
            " num_nodes=N if the launcher sets it."
        )
    if foreign := job.keys_of("megatron", None):
        yield (
            "Megatron-LM stops at options that it does not have, such as"
            f" {', '.join(foreign[:6])}: this is for a fork or another"
            " version. They are taken as options that change no size"
        )
    if job.ramp is not None and job.has_ramp:
        phases = [(p.start_step, p.global_batch_size) for p in job.ramp.phases]
        yield from ends_before_ramp(job.total_steps(), phases)
        sizes = job.linear or {entry.size for entry in job.thresholds}
        if skipped := len(sizes) - len(set(job.ramp.sizes)):
            yield (
                f"{skipped:,} of the {len(sizes):,} sizes are skipped by one large step"
                " and never run"
            )
    if job.num_microbatches and job.stages == 1:
        count = math.gcd(*job.num_microbatches)
        yield from few_samples_per_pass(count, job.micro, MICRO)
    if job.has_schedule and job["seq_length"] is None:
        yield (
            "thresholds are taken as samples; Megatron's command line always takes"
            " them as tokens (give seq_length=N)"
        )
    is_megatron_lm = {"num_nodes", "devices", PARTITION, "deepspeed"}.isdisjoint(given)
    if job[RAMP] is not None and is_megatron_lm:
        yield _version_note(job)
    yield from _pipeline_notes(job)
    # What is true of every file with a ramp.
    if job.ramp is not None and job.has_schedule:
        yield (
            "evaluation uses one micro batch per replica unless eval_global_batch_size is"
            " given"
        )
    elif job.ramp is not None and job.has_ramp:
        yield (
            "phases are exact: Megatron's floating-point division may change the batch"
            " one step later; at every change it saves a checkpoint; the learning rate"
            " follows samples and is not scaled with the batch"
        )


def _version_note(job: MegatronJob) -> str:
    """Return for which version the report of a linear ramp speaks, and what the other
    one does.
    """
    if job.has_schedule:
        return f"{RAMP} is ignored: versions that know {SCHEDULE} only print a warning"
    if not job.has_linear:
        return (
            f"{RAMP} has no effect in Megatron-LM since April 2026, which only prints a"
            f" warning: the batch is {job.final:,} from the first step. Give {SCHEDULE}"
            f" instead, or {VERSION}=legacy for older versions"
        )
    return (
        f"this is what {RAMP} does in Megatron-LM until April 2026 and megatron-core up"
        f" to 0.16; since then it has no effect without {SCHEDULE}, and the batch is"
        f" {job.final:,} from the first step ({VERSION}=head)"
    )


def _pipeline_notes(job: MegatronJob) -> Iterator[str]:
    """Yield what is not checked of a pipeline, and where it waits."""
    if job.uneven and job.stages > 1:
        yield (
            f"{' and '.join(job.uneven)}: how layers are split is not checked, and the"
            " bubble is that of equal stages"
        )
    if (fewest := min(job.num_microbatches or [job.stages])) < job.stages > 1:
        yield (
            f"with {format_count(fewest, 'microbatch')} the {job.stages} pipeline stages"
            " are never all busy; it runs"
        )


def _rules(job: MegatronJob) -> Iterator[Ruling]:
    """Yield what Megatron's arguments and its run ask. Its run looks at each batch of a
    ramp only when its step comes.
    """
    unit = product({MICRO: job.micro, "data_parallel_size": job.replicas})
    final = Term(f"{GLOBAL}={job.final:,}", job.final)
    if job[MICRO] is None:
        yield job.broken("micro_batch_positive", [MICRO], f"{MICRO} must be set")
    elif job.micro < 1:
        yield job.at_least("micro_batch_positive", [MICRO], MICRO, 1)
    if job[GLOBAL] is not None:
        yield job.at_least("global_batch_positive", [GLOBAL], GLOBAL, 1)
    yield from _device_rules(job)
    if not job.has_ramp:
        yield job.multiple("batch_divisible", (GLOBAL, MICRO), final, unit)
    if job.has_linear:
        yield from _ramp_rules(job, final, unit)
    if job.has_schedule:
        yield from _schedule_rules(job, unit)
    yield from _pipeline_rules(job)


def _device_rules(job: MegatronJob) -> Iterator[Ruling]:
    """Yield the rules that the devices divide into replicas, and over experts, which
    have axes of their own over the same devices.
    """
    if job.world is not None:
        world = Term(f"the world size {job.world}", job.world)
        near = around(job.world, job.replica.number)
        yield job.multiple(
            "world_divisible",
            ("world_size", *AXES),
            world,
            job.replica,
            candidates=[int(n) for n in near if n >= 1],
        )
    if {EXPERT, EXPERT_TENSOR} & job.settings.given:
        experts = product(
            {
                "expert tensor parallel size": job[EXPERT_TENSOR] or job[TENSOR],
                "expert parallel size": job[EXPERT],
                "pipeline parallel size": job.stages,
            }
        )
        devices = Term(f"the world size {job.num_devices}", job.num_devices)
        keys = (EXPERT, EXPERT_TENSOR)
        yield job.multiple(
            "experts_over_devices", keys, devices, experts, found_by="run"
        )
    if job["num_experts"]:
        keys = (EXPERT, "num_experts")
        yield job.multiple("experts_shared", keys, "num_experts", EXPERT)
    if job["no_pipeline_parallel"]:
        keys = (STAGES, "no_pipeline_parallel")
        yield job.equal("no_pipeline", keys, STAGES, 1, " with no_pipeline_parallel")


def _ramp_rules(job: MegatronJob, final: Term, unit: Term) -> Iterator[Ruling]:
    """Yield the rules of a linear ramp: start, increment and samples."""
    shown = f"{RAMP}={job[RAMP]}"
    keys, size_keys = (RAMP,), (GLOBAL, RAMP)
    if job["train_iters"] is not None:
        yield job.broken(
            "ramp_counts_samples",
            ("train_iters", RAMP),
            "a linear ramp needs a run counted in samples; give train_samples instead of"
            f" train_iters={job['train_iters']:,}",
        )
    if not job.is_triple:
        yield job.broken(
            "ramp_is_a_triple",
            keys,
            f"{RAMP}={job[RAMP]!r:.80} must be three whole numbers: start, increment and"
            " samples",
        )
        return
    if not job.ordered:
        yield job.broken(
            "ramp_numbers_positive",
            keys,
            f"{shown}: start and increment must be at least 1, samples at least 0",
        )
        return
    start = Term(f"the ramp's start {job.start:,}", job.start)
    yield job.at_least("ramp_grows", size_keys, final, start)
    growth = job.final - job.start
    if growth >= 0:
        rest = Term(
            f"{GLOBAL} - start = {job.final:,} - {job.start:,} = {growth:,}", growth
        )
        increment = Term(f"the ramp's increment {job.increment:,}", job.increment)
        yield job.multiple("ramp_increment_divides", size_keys, rest, increment)
    if growth == 0 or job.ramp_samples == 0:
        yield job.broken(
            "ramp_divides_by_zero",
            (RAMP, GLOBAL),
            f"{shown} to {final.text}: a ramp without increments or samples divides by"
            " zero; leave it out",
            found_by="run",
        )
    if job.linear is not None and job.unit >= 1 and not job.splits:
        phase = next(p for p in job.coming if p.global_batch_size % job.unit)
        yield job.broken(
            "ramp_phases_divisible",
            (RAMP, MICRO),
            f"the batch of {phase.global_batch_size:,} from step {phase.start_step:,}"
            f" (sample {phase.start_sample:,}) must be a multiple of {unit.text};"
            " Megatron checks each batch only when its step comes",
            found_by="run",
        )


def _schedule_rules(job: MegatronJob, unit: Term) -> Iterator[Ruling]:
    """Yield the rules of a schedule in steps: THRESHOLD:SIZE entries."""
    keys = (SCHEDULE,)
    if job[GLOBAL] is not None:
        yield job.broken(
            "schedule_excludes_global_batch",
            (GLOBAL, SCHEDULE),
            f"{GLOBAL}={job[GLOBAL]} must not be given with {SCHEDULE}, whose last size"
            " it would contradict",
        )
    if job.unreadable or not job.thresholds:
        texts = [repr(text[:40]) for text in job.unreadable[:5]]
        yield job.broken(
            "schedule_entries",
            keys,
            f"{SCHEDULE}: {', '.join(texts) or 'nothing'} is not THRESHOLD:SIZE; spaces"
            " and commas separate entries (1_000 or 1K, not 1,000), suffixes are K, M,"
            " B, T",
        )
        return
    if first := job.thresholds[0].samples:
        yield job.broken(
            "schedule_starts_at_0",
            keys,
            f"{SCHEDULE}: the first threshold must be 0, it is {first:,} samples",
        )
    for before, after in job.not_rising[:1]:
        yield job.broken(
            "schedule_thresholds_increase",
            keys,
            f"{SCHEDULE}: thresholds must increase, but {before.text} and {after.text}"
            f" are both at {after.samples:,} samples",
        )
    least = min(job.thresholds, key=lambda entry: entry.size)
    if least.size <= 0:
        yield job.broken(
            "schedule_sizes_positive",
            keys,
            f"{SCHEDULE}: every size must be at least 1, unlike {least.text}",
        )
    if not job.schedule_valid:
        return
    for before, after in job.shrinking[:1]:
        yield job.broken(
            "schedule_grows",
            keys,
            f"{SCHEDULE}: the batch shrinks from {before.size:,} to {after.size:,} at"
            f" {after.samples:,} samples; the schedule is read, but the trainer stops"
            " there",
            found_by="run",
        )
    if job.unit >= 1 and not job.splits:
        uneven = ", ".join(str(size) for size in job.sizes if size % job.unit)
        yield job.broken(
            "schedule_phases_divisible",
            (SCHEDULE, MICRO),
            f"{SCHEDULE}: {uneven} must be multiples of {unit.text}; Megatron checks"
            " each batch only when its step comes",
            found_by="run",
        )


def _pipeline_rules(job: MegatronJob) -> Iterator[Ruling]:
    """Yield the rules of the pipeline and of its interleaved schedule."""
    if job[VIRTUAL] is not None:
        yield job.at_least("chunks_positive", [VIRTUAL], VIRTUAL, 1)
    if job.chunks > 1:
        note = f" for {job.chunks} chunks per stage"
        yield job.at_least("chunks_need_stages", (STAGES, VIRTUAL), STAGES, 2, note)
    if job.even:
        yield job.multiple("layers_over_stages", (LAYERS, STAGES), LAYERS, STAGES)
    if job.even and job.chunk_key and job[LAYERS] % job.stages == 0:
        layers = job[LAYERS] // job.stages
        share = f"({LAYERS}={job[LAYERS]}) / ({STAGES}={job.stages}) = {layers} layers"
        size = job[job.chunk_key]
        yield job.multiple(
            "layers_over_chunks",
            (LAYERS, VIRTUAL, PER_CHUNK),
            Term(share, layers),
            Term(f"{job.chunk_key}={size}", size),
        )
    if job.interleaved:
        counts = zip(job.coming, job.num_microbatches or (), strict=False)
        for phase, count in [row for row in counts if row[1] % job.stages][:1]:
            yield job.broken(
                "whole_groups",
                (GLOBAL, STAGES),
                f"the interleaved schedule needs a multiple of {STAGES}={job.stages},"
                f" but there are {count} microbatches from step {phase.start_step:,}"
                f" (batch {phase.global_batch_size:,} / {job.unit}); nothing checks it"
                " before that step",
                division=(job.final, max(job.unit, 1) * job.stages),
                found_by="run",
            )


DIALECT = Dialect(
    job=MegatronJob,
    rules=_rules,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
    devices="world_size",
    by_pass=(MICRO,),
)
