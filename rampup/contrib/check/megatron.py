"""Megatron: its arguments and how they are read, its two ramps, replicas, microbatches
and pipeline, and its rules.

The ramps are computed exactly and with Megatron's own roundings. Only the run finds
many problems, when a phase's step comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple

from rampup.config.yaml import Located, parse_scalar
from rampup.contrib.check.known import load_known_keys, load_unread, with_lines
from rampup.contrib.check.reading import (
    Launch,
    Reading,
    Settings,
    Source,
    load_entries,
    option,
    read_source,
    resolve_reference,
    type_settings,
)
from rampup.contrib.check.rules import (
    Dialect,
    PretrainingJob,
    Rule,
    Side,
    around,
    at_least,
    ends_before_ramp,
    equal,
    few_samples_per_pass,
    multiple,
)
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import unknown_names
from rampup.contrib.check.verdict import Always, Conversion, Term, counted, times
from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT, SUFFIXES
from rampup.plan.pipeline import bubble_fraction
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import MAX_PHASES, BatchRamp, check_num_phases
from rampup.plan.split import BatchSplitter

RAMP, SCHEDULE = "rampup_batch_size", "step_batch_size_schedule"
MICRO, GLOBAL, EVAL_MICRO, EVAL_GLOBAL = (
    f"{scope}_batch_size" for scope in ("micro", "global", "eval_micro", "eval_global")
)
DECREASE = "decrease_batch_size_if_needed"
MODEL_AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
TENSOR, STAGES, CONTEXT = MODEL_AXES
SEQUENCE = "ds_sequence_parallel_size"
# The axes whose devices share a sample, with their names in messages.
AXES = {TENSOR: "tensor", STAGES: "pipeline", CONTEXT: "context", SEQUENCE: "sequence"}
EXPERT_TENSOR, EXPERT = (f"expert_{axis}_parallel_size" for axis in ("tensor", "model"))
VIRTUAL = "virtual_pipeline_model_parallel_size"
PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
GROUP = "microbatch_group_size_per_vp_stage"
OVERLAP = "overlap_p2p_comm"
LAYERS = "num_layers"
LAYOUT = "pipeline_model_parallel_layout"
PARTITION = "pp_partition_method"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
EXTRAS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
VERSION = "megatron_version"
AT_STEP, AT_SAMPLES = "at_step", "at_samples"  # where a run stands
# What splits layers over stages in another way than evenly.
UNEVEN = (
    *(*ENDS, *EXTRAS, LAYOUT, PARTITION, "deepspeed"),
    *("standalone_embedding_stage", "pipeline_model_parallel_split_rank"),
    *("decoder_num_layers", "heterogeneous_layers_config_path"),
    "heterogeneous_layers_config_encoded_json",
)
_DEVICES = ("nnodes", "nproc_per_node", "num_nodes", "devices")
_DEVICES_GIVEN = {*_DEVICES, "world_size", "data_parallel_size"}
# Options of DeepSpeed's launcher, and those of torchrun. With a file of hosts they are
# bounds.
_DEEPSPEED = {"num_nodes": "nnodes", "num_gpus": "nproc_per_node"}
_PLAIN = (
    r"(?:\S*/)?(?:python[\d.]*(?: -u)?(?: -m"
    r" torch\.distributed\.(?:launch|run))?|torchrun)(?: --\S+(?: [^-\s]\S*)?)*"
)
_LAUNCHER = re.compile(r"torchrun|torch\.distributed|deepspeed|accelerate|\bray\b")

KEYS = load_entries("megatron")
ALIASES = {
    "num_virtual_stages_per_pipeline_rank": VIRTUAL,
    "microbatch_group_size_per_virtual_pipeline_stage": GROUP,
    "encoder_seq_length": "seq_length",
    "encoder_num_layers": LAYERS,
    "num_moe_experts": "num_experts",
    "gpus_per_node": "nproc_per_node",
    **{
        f"num_layers_in_{end}_pipeline_stage": key
        for end, key in zip(("first", "last"), ENDS, strict=True)
    },
}
_NEGATIVES = {"no_overlap_p2p_communication": OVERLAP, "no_overlap_p2p_comm": OVERLAP}


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read Megatron's arguments: YAML (flat, or nested as NeMo's; names with
    underscores or dashes), a script or a command.
    """
    reading = _rename(read_source(source, overrides, launch), launch)
    overridden = {setting.partition("=")[0] for setting in reading.overrides}
    read_devices = _read_yaml if reading.command is None else _read_command
    reading = read_devices(reading, overridden)
    located = reading.leaves
    # What a script does not say about the devices is one question: the size of the job.
    if any(name in located and _is_open(located[name]) for name in _DEVICES):
        located = {name: at for name, at in located.items() if name not in _DEVICES}
        reading = dataclasses.replace(reading, leaves=located)
    # A ramp depends on the samples and tokens of the run, and the number of chunks on
    # that of layers.
    entries = KEYS
    if not {RAMP, SCHEDULE, PER_CHUNK}.isdisjoint({*located, *overridden}):
        entries = {
            name: dataclasses.replace(entry, optional=False)
            for name, entry in KEYS.items()
        }
    own = _own_options(reading)
    decides = _LAYOUTS if own is None else _SIZES
    launch = dataclasses.replace(launch, entries=entries, decides=decides)
    looked_up = {
        name: located[name] for name in (own or set()) - KEYS.keys() - overridden
    }
    return dataclasses.replace(type_settings(reading, launch), looked_up=looked_up)


def _rename(reading: Reading, launch: Launch) -> Reading:
    """Return a reading whose settings have Megatron's own names."""
    settings = [setting.partition("=") for setting in reading.overrides]
    renamed = [
        canonical(name) + equals + value
        if launch.known(name) and name[0] != "-"
        else name + equals + value
        for name, equals, value in settings
    ]
    repeated = {canonical(name): line for name, line in reading.repeated.items()}
    return dataclasses.replace(reading, overrides=renamed, repeated=repeated)


def _read_yaml(reading: Reading, overridden: Collection[str]) -> Reading:
    """Return a YAML file by Megatron's names, without the keys of further runs: groups
    such as MODEL_ARGS_2 beside MODEL_ARGS, as those in a script.
    """
    groups = {name.rpartition(".")[0] for name in reading.leaves}
    later = sorted(
        group
        for group in groups
        if (match := re.fullmatch(r"(.+)_\d+", group)) and match[1] in groups
    )
    notes = reading.notes
    if later:
        said = f"{', '.join(later)}: the keys of another run, which are not read."
        notes = (*notes, said)
    located = _least_nested(reading, later, overridden)
    return dataclasses.replace(reading, leaves=located, notes=notes)


def _read_command(reading: Reading, overridden: Collection[str]) -> Reading:
    """Return a command with the devices that its launcher says, or the one of a process
    that nothing launches.
    """
    assert reading.command is not None
    notes = [*reading.notes]
    if _starts_swift(reading.command):
        notes.append("ms-swift starts this: the rules are those of Megatron-LM.")
    located = _find_devices(reading.command, reading.leaves, overridden)
    hints = re.search(
        "gpu|node|world|data_parallel_size", " ".join({*located, *overridden})
    )
    is_whole = all(located[axis].value == 1 for axis in AXES if axis in located)
    if _starts_one_process(reading.command) and not hints and is_whole:
        located["world_size"] = reading.command.locate(1)
        notes.append(
            "the command says no number of processes, so it is one, with one device; if"
            " a launcher does, add world_size=N."
        )
    return dataclasses.replace(reading, leaves=located, notes=tuple(notes))


def _own_options(reading: Reading) -> set[str] | None:
    """Return the keys that Megatron itself looks up, and refuses if it does not have
    them: those behind its program, not those of the launcher, or all of a flat file.
    None for a file of NeMo.
    """
    if reading.command is None:
        is_nemo = not {"devices", "num_nodes"}.isdisjoint(reading.leaves)
        return None if is_nemo else {*reading.leaves}
    words = reading.command.words
    behind = itertools.dropwhile(lambda word: not word.endswith(".py"), words)
    options = (word.partition("=")[0] for word in behind if word.startswith("--"))
    return {canonical(word) for word in options} & reading.leaves.keys()


def _least_nested(
    reading: Reading, later: Collection[str], overridden: Collection[str]
) -> dict[str, Located]:
    """Return the keys of a YAML file by Megatron's names. Of several values the least
    nested counts; two such are refused.
    """
    names = defaultdict[str, list[str]](list)
    for name in reading.leaves:
        if name.rpartition(".")[0] not in later:
            names[canonical(name)].append(name)
    located: dict[str, Located] = {}
    for known, same in names.items():
        depth = min(name.count(".") for name in same)
        values = {
            name: reading.leaves[name] for name in same if name.count(".") == depth
        }
        for name, value in values.items():
            with contextlib.suppress(
                ConfigError
            ):  # a reference to Megatron's own name of a key is resolved later
                content = resolve_reference(value.value, name, reading.leaves, {})
                values[name] = dataclasses.replace(value, value=content)
        (first, value), *rest = values.items()
        for other, second in rest:
            if (
                known in KEYS
                and known not in overridden
                and second.value != value.value
            ):
                said = (
                    f"{known} is given twice, as {first}={value.value!r} and"
                    f" {other}={second.value!r}; choose one with"
                )
                raise ConfigError(
                    f"{said} {known}=...",
                    key=known,
                    path=reading.path,
                    line=second.line,
                )
        located.update([_normalize(known, value)])
    return located


def _is_open(place: Located) -> bool:
    """Return whether the script does not say a value."""
    return isinstance(place.value, str) and bool(unknown_names(place.value))


def _find_devices(
    command: Command, leaves: Mapping[str, Located], overridden: Collection[str]
) -> dict[str, Located]:
    """Return the keys of a command with those that DeepSpeed's launcher, Slurm, MPI or
    a manifest gives to it.
    """
    located = {**_read_launcher(command), **leaves}
    # Where no launcher of PyTorch starts processes, Slurm or MPI starts one for each
    # device.
    is_launched = any(map(_LAUNCHER.search, command.words))
    if (
        command.tasks
        and not is_launched
        and _DEVICES_GIVEN.isdisjoint({*located, *overridden})
    ):
        tasks: Any = int(command.tasks) if command.tasks.isdecimal() else command.tasks
        located["world_size"] = command.locate(tasks)
    is_sized = all(
        name in located and not _is_open(located[name])
        for name in ("nnodes", "nproc_per_node")
    )
    if (
        command.machine.devices
        and not is_sized
        and _DEVICES_GIVEN.isdisjoint(overridden)
    ):
        # What the command leaves open, the cluster tells each pod.
        located = {
            name: value for name, value in located.items() if name not in _DEVICES
        }
        located.setdefault("world_size", command.locate(command.machine.devices))
    return located


def _read_launcher(command: Command) -> dict[str, Located]:
    """Return the devices that the launcher of a command says: in its options, those of
    the command around it, or the variables of ms-swift.
    """
    found: dict[str, Located] = {}
    launcher = command
    if command.outer:
        launcher = command._replace(words=command.outer)
    names = {word.rpartition("/")[2] for word in launcher.words}
    options = read_options(launcher)
    if "deepspeed" in names and "hostfile" not in options:
        found |= {
            key: options[name] for name, key in _DEEPSPEED.items() if name in options
        }
        included = option(launcher, "--include", "-i") or ""
        if re.fullmatch(r"[\w.-]+:\d+(?:,\d+)*(?:@[\w.-]+:\d+(?:,\d+)*)*", included):
            count = len(re.findall(r"[:,]\d", included))
            found["world_size"] = command.locate(count)
    if "msrun" in names and "worker_num" in options:
        found["world_size"] = options["worker_num"]
    if _starts_swift(command):
        found[EXPERT_TENSOR] = command.locate(1)  # its own default
        for name in ("nnodes", "nproc_per_node"):
            if value := command.environment.get(name.upper()):
                number = int(value) if value.isdecimal() else value
                found[name] = command.locate(number)
    return found


def _starts_swift(command: Command) -> bool:
    """Return whether a command is ms-swift's `megatron sft`."""
    return command.words[0].rpartition("/")[2] in ("megatron", "swift")


def _starts_one_process(command: Command) -> bool:
    """Return whether a command is `python PROGRAM.py`, or `torchrun PROGRAM.py` without
    a number of processes.
    """
    start = [*itertools.takewhile(lambda word: not word.endswith(".py"), command.words)]
    is_plain = re.fullmatch(_PLAIN, " ".join(start)) is not None and start != [
        *command.words
    ]
    return is_plain and not (
        command.outer
        or command.tasks
        or command.machine.devices
        or any(map(unknown_names, start))
    )


def canonical(name: str) -> str:
    """Return Megatron's name for an option, a YAML key or one of its older names."""
    plain = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    return ALIASES.get(plain, plain)


def _normalize(name: str, located: Located) -> tuple[str, Located]:
    """Return a key and its value in the form that the key takes: lists as text, a
    negative option as its opposite.
    """
    value = located.value
    if name in _NEGATIVES and isinstance(value, bool):
        name, value = _NEGATIVES[name], not value
    elif name == RAMP and isinstance(value, list):
        value = " ".join(map(str, value)) or "[]"
    elif name == LAYOUT and isinstance(value, list):
        value = "|" * (len(value) - 1) or "L"  # only the number of stages counts
    elif (
        name in (RAMP, SCHEDULE)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ):
        value = str(value)
    return name, dataclasses.replace(located, value=value)


# Options of forks that may be sizes, as `-pp` and `--allow-padding-num-layers`; in
# YAML, meshes of several kinds of devices.
_OPTION = re.compile(r"--\S|-[tpdcev]{1,2}p$")
_SIZES = re.compile(
    r"[tpdcev]{1,2}p"
    r"|\w*(?:batch_size|parallel_size|num_layers|hetero|num_stages|num_microbatch|accumulation_steps|interleav)\w*"
)
_LAYOUTS = re.compile(r"enable_hetero\w*|hetero_\w*mesh\w*")
# Programs of Megatron-LM, Megatron-DeepSpeed and NeMo. None: options alone, or those of
# ms-swift's `megatron sft`.
_OWN = re.compile(
    r"(?:.*/)?(?:pretrain\w*|finetune\w*|train|megatron_(?:gpt|bert|t5|bart|retro|llama|mamba)_\w*(?:train|tun|sft)\w*)|"
)


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
        name = canonical(written)
        values = [attached] if equals else list(following)
        value: Any = True
        if name == RAMP:
            value = " ".join(
                [v for v in values if re.match(r"[-+\d]", v) or unknown_names(v)]
                or values[:1]
            )
        elif name == SCHEDULE:
            value = " ".join(
                v for v in values if ":" in v or unknown_names(v)
            ) or " ".join(values[:1])
        elif (
            values
            and not (name in KEYS and KEYS[name].key.kind == "bool")
            and name not in _NEGATIVES
        ):
            value = (
                values[0]
                if unknown_names(values[0])
                else parse_scalar(values[0], command.path)
            )
        elif values and values[0].lower() in ("true", "false"):
            value = values[0].lower() == "true"
        located.update(
            [
                _normalize(
                    name, command.locate(value, word, *([] if equals else values[:1]))
                )
            ]
        )
    return located


LAUNCH = Launch(
    system="Megatron",
    program=re.compile(
        r"(?i)(?:pretrain|finetune|train|sft)\w*\.py|megatron[\w.]*train|--(?:micro|global|rampup)-batch-size"
    ),
    others=re.compile(
        r"(?i)\b(?:tools|tasks)/(?!main\.py)\S*\.py|\w*(?:evaluat|generat|convert|preprocess|inference|predict|export)\w*\.py"
        r"|-\w*m [\w.]*(?:evaluat|generat|inference|convert|export)\w*"
    ),
    own=_OWN,
    per_host="nproc_per_node",
    follows=f"{VERSION}=legacy",
    example="torchrun pretrain_gpt.py --micro-batch-size 1",
    entries=KEYS,
    keys="megatron",
    unread=load_unread("megatron"),
    canonical=canonical,
    read=read_options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRamp:
    """`--rampup-batch-size START INCREMENT SAMPLES` up to `--global-batch-size`.

    Source: megatron-core `num_microbatches_calculator.py`,
        RampupBatchsizeNumMicroBatchesCalculator.
    """

    start: int
    increment: int
    end: int
    samples: int
    # divisor that every batch is rounded down to, with
    # `--decrease-batch-size-if-needed`
    unit: int = 1

    @property
    def num_increments(self) -> int:
        """Requested changes of size."""
        return (self.end - self.start) // self.increment

    def size(self, k: int) -> int:
        """Return the batch after k increments."""
        return (self.start + k * self.increment) // self.unit * self.unit

    def exact(self) -> BatchRamp:
        """Return the ramp without any rounding."""
        if self.unit == 1:
            return BatchRamp.linear(
                start=self.start,
                increment=self.increment,
                end=self.end,
                samples=self.samples,
                carry_overshoot=True,
            )
        return BatchRamp.piecewise(self.thresholds())

    def thresholds(self) -> list[tuple[int, int]]:
        """Return (samples, batch) at every change; sizes that rounding makes equal are
        merged.
        """
        count = self.num_increments
        check_num_phases(count + 1)
        pairs = sorted(
            {
                -(-k * self.samples // count): self.size(k) for k in range(count + 1)
            }.items()
        )
        changed = [
            pair for before, pair in itertools.pairwise(pairs) if pair[1] != before[1]
        ]
        return [pairs[0], *changed]

    def as_run(self) -> list[tuple[int, int, int]]:
        """Return (first step, batch, samples before) as Megatron's floating-point
        division gives them.
        """
        count = self.num_increments
        share = self.samples / count
        rows = []
        step = consumed = k = 0

        def stage(samples: int) -> int:
            return count if samples > self.samples else int(samples / share)

        while k < count:
            size = self.size(k)
            number = max(
                math.ceil((Fraction((k + 1) * self.samples, count) - consumed) / size),
                1,
            )
            while number > 1 and stage(consumed + (number - 1) * size) > k:
                number -= 1
            while stage(consumed + number * size) <= k:
                number += 1
            rows.append((step, size, consumed))
            step, consumed = step + number, consumed + number * size
            k = stage(consumed)
        rows.append((step, self.size(count), consumed))
        return rows[:1] + [
            row for before, row in itertools.pairwise(rows) if row[1] != before[1]
        ]


class Threshold(NamedTuple):
    """One THRESHOLD:SIZE entry of `--step-batch-size-schedule`."""

    text: str  # as written
    samples: int  # the threshold, exact, truncated to whole samples
    as_run: int  # the same as Megatron's floating-point product gives it
    size: int  # global batch size from the threshold on


def parse_entry(text: str, seq_length: int | None) -> Threshold | None:
    """Read one entry, with suffixes K, M, B, T, as Megatron does; None where it cannot.

    Thresholds are tokens if `seq_length` is given. Source: Megatron-LM
    `num_microbatches_calculator.py`, the step schedule.
    """
    numbers: list[tuple[int, int]] = []
    for part in text.split(":", 1):
        digits, factor = part.strip().upper(), 1
        if digits and digits[-1] in SUFFIXES:
            digits, factor = digits[:-1], SUFFIXES[digits[-1]]
        try:
            exact = Decimal(digits)
        except InvalidOperation:
            return None
        if (
            not exact.is_finite()
            or abs(exact.adjusted()) > 18
            or abs(exact) * factor > MAX_COUNT
        ):
            return None
        numbers.append((int(exact * factor), int(float(exact) * factor)))
    if len(numbers) < 2:
        return None
    (samples, as_run), (_, size) = numbers
    return Threshold(
        text=text,
        samples=samples // (seq_length or 1),
        as_run=as_run // (seq_length or 1),
        size=size,
    )


MAX_LAYOUT = 10_000
MAX_LISTED = 12
MANY_SIZES = 2_000


def _layout_stages(layout: str) -> int:
    """Return the stages of a layout such as `Et*3|(tt|)*29m|L`: Megatron unrolls first
    groups, then letters.
    """
    text = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(
            pattern,
            lambda match: match[1] * min(int(match[2]), MAX_LAYOUT),
            text[:MAX_LAYOUT],
        )
    return text.count("|") + 1


class MegatronJob(PretrainingJob):
    """The numbers of Megatron's arguments, among them the devices, which must be
    known.
    """

    expressed = (
        *(
            MICRO,
            GLOBAL,
            DECREASE,
            RAMP,
            SCHEDULE,
            VIRTUAL,
            PER_CHUNK,
            EVAL_GLOBAL,
            *AXES,
            *_DEVICES_GIVEN,
        ),
        *(LAYERS, VERSION, "seq_length", "train_iters", "max_steps", "train_samples"),
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        ramps = ", with the linear ramps of those until April 2026"
        if self[VERSION] == "head":
            ramps = (
                "; without megatron_version=head, with linear ramps, as until April"
                " 2026"
            )
        self.version = f"Megatron-LM of August 2026 (d98e8a6){ramps}"
        self._count_devices()
        self._count_chunks()
        self._read_ramps()
        self._follow_ramp()

    def _count_devices(self) -> None:
        """Count devices, replicas (at least one, also if the world size breaks a rule),
        and samples of passes and batches.
        """
        sizes = {
            axis: self[axis]
            for axis in AXES
            if axis in MODEL_AXES or axis in self.settings.given
        }
        # The axes in a message, `tensor * pipeline * context`, and their sizes.
        self.axes = " * ".join(AXES[axis] for axis in sizes)
        self.axes_sizes = " * ".join(map(str, sizes.values()))
        self.model_parallel = math.prod(sizes.values())  # devices of a replica
        self.world: int | None = self["world_size"]
        for hosts, per_host in (("nnodes", "nproc_per_node"), ("num_nodes", "devices")):
            if self.world is None and self[per_host] is not None and self[per_host] > 0:
                self.world = (self[hosts] or 1) * self[per_host]
        replicas = self["data_parallel_size"]
        if self.world is None and replicas is None:
            said = (
                "the number of devices is not in the file; add world_size=N (or"
                " data_parallel_size=N)"
            )
            raise ConfigError(said, key="world_size")
        self.replicas: int = (
            max((self.world or 1) // self.model_parallel, 1)
            if replicas is None
            else replicas
        )
        self.num_devices = self.replicas * self.model_parallel
        if (
            replicas is not None
            and self.world is not None
            and self.world != self.num_devices
        ):
            said = (
                f"data_parallel_size * {self.axes} parallel sizes ="
                f" {self.replicas} * {self.model_parallel}"
            )
            said += f" = {self.num_devices} is not the world size {self.world}"
            raise ConfigError(
                said,
                key="data_parallel_size",
                nearest=(self.world // self.model_parallel,),
            )
        self.micro: int = self[MICRO] or 0
        self.unit = (
            self.micro * self.replicas
        )  # samples of one forward pass of all replicas
        self.eval_unit = max(self[EVAL_MICRO] or self.micro, 1) * self.replicas
        self.final: int = (
            self.unit if self[GLOBAL] is None else self[GLOBAL]
        )  # the requested batch after the ramp
        self.rounding = (
            self.unit if self[DECREASE] else 1
        )  # divisor to which batches are rounded down

    def _count_chunks(self) -> None:
        """Count stages, their layers and layer chunks, and microbatches that pass one
        chunk in a row.
        """
        self.stages: int = self[STAGES]
        # Devices of one copy of the experts, if they have axes of their own.
        self.expert_tensor: int = self[EXPERT_TENSOR] or self[TENSOR]
        given = {EXPERT, EXPERT_TENSOR} & self.settings.given
        self.expert_devices = (
            self.expert_tensor * self[EXPERT] * self.stages if given else 1
        )
        hybrid = any(
            name.startswith("hybrid_") and name.endswith("_pattern")
            for name in self.settings.others
        )
        self.num_layers: int | None = (
            None if hybrid else self[LAYERS]
        )  # a pattern names each of the hybrid layers
        self.uneven = [key for key in UNEVEN if self[key]]
        # The layers of a stage, if they are given and split evenly, and the key that
        # divides them into chunks.
        even = (
            not self.uneven
            and self.num_layers is not None
            and self.num_layers % self.stages == 0
        )
        self.stage_layers = (self.num_layers or 0) // self.stages if even else None
        self.chunk_key = next(
            (key for key in (VIRTUAL, PER_CHUNK) if self[key] is not None), ""
        )
        self.layout_stages = _layout_stages(self[LAYOUT]) if self[LAYOUT] else 0
        self.chunks = 1
        if self.layout_stages:
            self.chunks = max(self.layout_stages // self.stages, 1)
        elif self[VIRTUAL] is not None:
            self.chunks = max(self[VIRTUAL], 1)
        elif self[PER_CHUNK] is not None and self.num_layers is not None:
            extras = sum(
                self[key] for key in EXTRAS
            )  # the embedding and the loss take the slot of a layer
            self.chunks = max(
                (self.num_layers + extras) // (self.stages * self[PER_CHUNK]), 1
            )
        self.interleaved = self.chunks > 1 and self.stages > 1
        self.group: int = self.stages if self[GROUP] is None else self[GROUP]

    def _read_ramps(self) -> None:
        """Read a schedule in steps, which wins over a linear ramp, and a linear one,
        which has no effect since April 2026.
        """
        self.has_schedule = self[SCHEDULE] is not None
        self.has_linear = (
            self[RAMP] is not None
            and not self.has_schedule
            and self[VERSION] == "legacy"
        )
        self.has_ramp = self.has_schedule or self.has_linear
        self.reasons = {
            GROUP: "no counterpart: rampup sends all microbatches round together"
        }
        if not self.has_ramp:
            self.reasons[RAMP] = "ignored by Megatron-LM since April 2026"
        self.triple: tuple[int, ...] | None = (
            None  # fewer or more numbers if it is malformed
        )
        if self.has_linear:
            words = re.split(r"[\s,]+", re.sub(r"[\[\]()\"']", " ", self[RAMP]).strip())
            whole = all(
                re.fullmatch(r"[-+]?[0-9](?:_?[0-9]){0,17}", word) for word in words
            )
            self.triple = tuple(map(int, words)) if whole else ()
        self.start, self.increment, self.ramp_samples = (
            self.triple if self.triple and len(self.triple) == 3 else (0, 0, 0)
        )
        # Whether rules about the relation of the three can use them.
        self.ordered = self.start > 0 and self.increment > 0 and self.ramp_samples >= 0
        self.linear: LinearRamp | None = (
            None  # the linear ramp, if its numbers make one
        )
        grows = (
            min(self.start, self.increment, self.ramp_samples) >= 1
            and self.final > self.start >= self.rounding >= 1
        )
        count, rest = divmod(self.final - self.start, max(self.increment, 1))
        if grows and not rest and count < MAX_PHASES:
            self.linear = LinearRamp(
                start=self.start,
                increment=self.increment,
                end=self.final,
                samples=self.ramp_samples,
                unit=self.rounding,
            )
        # The entries of a schedule, as written and sorted by threshold, as Megatron
        # sorts them.
        self.written_entries: list[str] = (
            self[SCHEDULE].replace(",", " ").split() if self.has_schedule else []
        )
        parsed = [
            parse_entry(text, self["seq_length"])
            for text in self.written_entries[:MAX_PHASES]
        ]
        self.unreadable = [
            text
            for text, entry in zip(self.written_entries, parsed, strict=False)
            if entry is None
        ]
        self.thresholds = sorted(
            (entry for entry in parsed if entry is not None),
            key=lambda entry: entry.samples,
        )
        # Neighbouring thresholds that do not increase, and sizes that shrink.
        self.not_rising = [
            (a, b)
            for a, b in itertools.pairwise(self.thresholds)
            if b.samples <= a.samples
        ]
        self.shrinking = [
            (a, b) for a, b in itertools.pairwise(self.thresholds) if b.size < a.size
        ]
        starts = (
            bool(self.thresholds)
            and self.thresholds[0].samples == 0
            and all(entry.size > 0 for entry in self.thresholds)
        )
        self.schedule_valid = starts and not self.unreadable and not self.not_rising

    def _follow_ramp(self) -> None:
        """Follow the ramp, or the one batch without it, and split each size; there may
        be none to follow.
        """
        self.ramp: BatchRamp | None = None
        if self.has_schedule and self.schedule_valid:
            self.ramp = BatchRamp.piecewise(
                [(entry.samples, entry.size) for entry in self.thresholds]
            )
        elif self.linear is not None:
            self.ramp = self.linear.exact()
        elif not self.has_ramp and self.final >= (rounding := max(self.rounding, 1)):
            self.ramp = BatchRamp.constant(self.final // rounding * rounding)
        if self.ramp is not None:
            step = max(self[AT_STEP], self.ramp.step_of_sample(self[AT_SAMPLES]))
            self.ramp = self.ramp.resumed_at(step)
        # Phases that are over need no split.
        coming = () if self.ramp is None else self.ramp.phases
        self.coming = [p for p in coming if self.ramp and not self.ramp.is_over(p)]
        self.sizes = tuple(
            dict.fromkeys(phase.global_batch_size for phase in self.coming)
        )
        self.splits = self.unit >= 1 and not any(
            size % self.unit for size in self.sizes
        )
        self.num_microbatches = (
            [phase.global_batch_size // self.unit for phase in self.coming]
            if self.ramp and self.splits
            else None
        )

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
            counted(self.replicas, "replica"),
            counted(final // self.unit, "microbatch"),
            self.micro,
        )
        length = (
            f"{counted(len(self.ramp.phases), 'phase')} and"
            f" {counted(self.ramp.ramp_steps, 'step')}"
        )
        ramp = (
            f"; ramp from {self.ramp.sizes[0]:,} in {length}" if self.has_ramp else ""
        )
        return f"{counted(final, 'sample')} per optimizer step; {shape}{ramp}"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "num_devices": self.num_devices,
            "data_parallel_size": self.replicas,
            "micro_batch_size": self.micro,
            "num_stages": self.stages,
            "num_repeats": self.chunks,
            "thresholds_samples": (
                [[entry.samples, entry.size] for entry in self.thresholds]
                if self.has_schedule
                else None
            ),
            "num_microbatches": self.num_microbatches,
        }
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
            derived["bubble_fraction"] = float(
                bubble_fraction(self.stages, self.num_microbatches[-1], self.chunks)
            )
        return derived

    def phases(self) -> Sequence[Mapping[str, Any]] | None:
        """Return every phase, split on its own: rampup's pipeline takes multiples of
        its stages, Megatron's any number.
        """
        if self.ramp is None or not self.splits or not self.has_ramp:
            return None
        rows = []
        for phase in self.coming:
            splitter = BatchSplitter(
                data_parallel_size=self.replicas,
                num_stages=self.stages,
                num_repeats=self.chunks if self.stages > 1 else 1,
                num_pipeline_microbatches=(
                    phase.global_batch_size // self.unit if self.stages > 1 else -1
                ),
                microbatch_size=self.micro,
                strict_multiple=False,
            )
            ramp = BatchRamp.constant(phase.global_batch_size)
            plan = RampPlan(
                ramp=ramp,
                splitter=splitter,
                num_devices=self.num_devices,
                total_steps=1,
            )
            rows.append(
                plan.phase_rows()[0]
                | {
                    n: getattr(phase, n)
                    for n in ("start_step", "start_sample", "num_steps")
                }
            )
        return rows

    def rampup_values(self) -> dict[str, Any]:
        """Return the run in rampup's keys."""
        if self.ramp is None or not self.splits:
            raise ConfigError("not every batch of the file can be split")
        counts = sorted({size // self.unit for size in self.sizes})
        uneven = [count for count in counts if count % self.stages]
        if self.stages > 1 and len(counts) > 1 and uneven:
            said = (
                "rampup's pipeline takes a growing number of microbatches in multiples"
                f" of its {self.stages} stages"
            )
            raise ConfigError(f"{said}, but the file has phases of {uneven[0]}")
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
        linear = self.linear
        if self.has_schedule or (linear is not None and linear.unit > 1):
            given = [(entry.samples, entry.size) for entry in self.thresholds]
            pairs = given if linear is None else linear.thresholds()
            values["batch_size_schedule"] = " ".join(
                f"{threshold}:{size}" for threshold, size in pairs
            )
        else:
            values["per_device_batch_size"] = Fraction(
                self.ramp.sizes[-1], self.num_devices
            )
        if linear is not None and linear.unit == 1:
            values |= {
                "enable_rampup_batch_size": True,
                "per_device_batch_size_start": Fraction(linear.start, self.num_devices),
                "per_device_batch_size_increment": Fraction(
                    linear.increment, self.num_devices
                ),
                "global_rampup_samples": linear.samples,
                "rampup_carry_overshoot": True,
            }
        if self["seq_length"] is not None:
            values["max_target_length"] = self["seq_length"]
        if self[EVAL_GLOBAL] is not None:
            values["eval_per_device_batch_size"] = Fraction(
                self[EVAL_GLOBAL], self.num_devices
            )
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

    def conversion(self) -> Conversion:
        """Return the same run in rampup's keys, or why they cannot express it."""
        if self.uneven and self.stages > 1:
            return Conversion(
                refusal="rampup's pipeline has the same number of layers in every stage"
            )
        return super().conversion()


def _meanings(job: MegatronJob) -> Iterator[tuple[str, str]]:
    if job.micro:
        yield (MICRO, f"{counted(job.micro, 'sample')} per replica and forward pass")
    yield (
        f"{job.axes} = {job.axes_sizes}",
        (
            f"{counted(job.model_parallel, 'device')} per replica,"
            f" {counted(job.replicas, 'replica')}"
        ),
    )
    if job.ramp is not None:
        final = job.ramp.sizes[-1]
        passes = (
            f", {counted(final // job.unit, 'microbatch')} per replica"
            if job.splits
            else ""
        )
        yield (
            GLOBAL,
            f"{counted(final, 'sample')} per optimizer step after any ramp{passes}",
        )
        if job.has_ramp:
            phases = (
                f"{counted(len(job.ramp.phases), 'phase')} from {job.ramp.sizes[0]:,}"
                f" to {final:,} samples"
            )
            length = (
                f"{counted(job.ramp.ramp_steps, 'step')} and {job.ramp.ramp_samples:,}"
                " samples"
            )
            yield (
                SCHEDULE if job.has_schedule else RAMP,
                f"{phases}, complete after {length}",
            )
    if job.chunks > 1:
        yield (
            VIRTUAL,
            (
                f"{job.chunks:,} layer chunks on each of {job.stages:,} stages,"
                f" {job.group:,} microbatches in a row"
            ),
        )


def _notes(job: MegatronJob) -> Iterator[str]:
    """Yield what is special to the file, its ramp, and its version and pipeline."""
    given = job.settings.given
    if "devices" in given and not {"num_nodes", "world_size"} & given:
        yield (
            "num_nodes is not in the file: one node is taken, as NeMo does; add"
            " num_nodes=N if the launcher sets it."
        )
    yield from _foreign_options(job)
    if job.ramp is not None and job.has_ramp:
        phases = [(p.start_step, p.global_batch_size) for p in job.ramp.phases]
        yield from ends_before_ramp(job.total_steps(), phases)
    if job.num_microbatches and job.stages == 1:
        count = math.gcd(*job.num_microbatches)
        yield from few_samples_per_pass(count, job.micro, MICRO)
    if job.has_schedule:
        yield from _schedule_notes(job)
    elif job.linear is not None and job.ramp is not None:
        yield from _linear_notes(job.linear, job.ramp)
    elif job[DECREASE] and job.ramp is not None and job.ramp.sizes[-1] != job.final:
        yield (
            f"{DECREASE}: {GLOBAL}={job.final:,} runs as {job.ramp.sizes[-1]:,}, a"
            f" multiple of {job.unit:,}"
        )
    yield from _version_notes(job)
    yield from _pipeline_notes(job)


def _foreign_options(job: MegatronJob) -> Iterator[str]:
    """Yield a note on options that no Megatron has."""
    known = load_known_keys("megatron")
    foreign = {
        name: place
        for name, place in job.settings.looked_up.items()
        if known.life(name) is None
    }
    if foreign:
        yield (
            "Megatron-LM stops at options that it does not have, such as"
            f" {', '.join(with_lines(foreign)[:6])}: this is for a fork or another"
            " version. They are taken as options that change no size"
        )


def _schedule_notes(job: MegatronJob) -> Iterator[str]:
    """Yield what Megatron makes of the entries of a schedule in steps."""
    kept = [entry.text for entry in job.thresholds]
    if not job.unreadable and job.written_entries != kept:
        yield (
            f"{SCHEDULE} is in the wrong order; Megatron sorts it, as was done"
            f" here: {_listed(kept)}"
        )
    if job["seq_length"] is None:
        yield (
            "thresholds are taken as samples; Megatron's command line always takes"
            " them as tokens (give seq_length=N)"
        )
    for pair in job.thresholds:
        threshold, _, size = pair.text.partition(":")
        if pair.samples != pair.as_run:
            exact = f"threshold {threshold} is {pair.samples:,} samples exactly"
            yield (f"{exact} and {pair.as_run:,} in Megatron's floating-point product")
        if "." in size and not size.upper().endswith(("K", "M", "B", "T")):
            yield f"{pair.text}: the size is silently truncated to {pair.size}"
    if job.ramp is not None:
        skipped = len({entry.size for entry in job.thresholds}) - len(
            set(job.ramp.sizes)
        )
        if skipped > 0:
            yield f"{skipped:,} sizes are skipped by one large step and never run"
        yield Always(
            "evaluation uses one micro batch per replica unless"
            " eval_global_batch_size is given"
        )


def _linear_notes(linear: LinearRamp, ramp: BatchRamp) -> Iterator[str]:
    """Yield what a linear ramp rounds, skips and saves."""
    if linear.unit > 1:
        yield (
            f"{DECREASE}: every batch is rounded down to a multiple of"
            f" {linear.unit:,}: {_listed(ramp.sizes)}"
        )
    for phase, row in zip(ramp.phases, linear.as_run(), strict=False):
        if (phase.start_step, phase.global_batch_size, phase.start_sample) != row:
            change = (
                f"changes to {phase.global_batch_size:,} at step"
                f" {phase.start_step:,} (sample {phase.start_sample:,})"
            )
            theirs = (
                f"Megatron's floating-point division has {row[1]:,} from step"
                f" {row[0]:,} (sample {row[2]:,})"
            )
            yield (f"exact arithmetic {change}; {theirs}; later phases may differ too")
            break
    skipped = linear.num_increments + 1 - len(ramp.phases)
    if skipped and linear.unit == 1:
        yield (
            f"{skipped:,} of the {linear.num_increments + 1:,} sizes are skipped by"
            " one large step and never run"
        )
    yield Always(
        "at every change Megatron saves a checkpoint; the learning rate follows"
        " samples and is not scaled with the batch"
    )


def _version_notes(job: MegatronJob) -> Iterator[str]:
    """Yield for which version the report speaks, if a linear ramp depends on it, and
    what the other one does.
    """
    is_nemo = not {"num_nodes", "devices"}.isdisjoint(job.settings.given)
    if is_nemo and job.ramp is not None and len(job.ramp.phases) > 1:
        yield (
            "NeMo 2 ends the job at every change of the batch, to be restarted with the"
            " devices for the next"
        )
    if job[RAMP] is None:
        return
    if job.has_schedule:
        yield f"{RAMP} is ignored: versions that know {SCHEDULE} only print a warning"
    elif not job.has_linear:
        yield (
            f"{RAMP} has no effect in Megatron-LM since April 2026, which only prints a"
            f" warning: the batch is {job.final:,} from the first step. Give {SCHEDULE}"
            f" instead, or {VERSION}=legacy for older versions"
        )
    elif not is_nemo and not {PARTITION, "deepspeed"} & {*job.uneven}:
        yield (
            f"this is what {RAMP} does in Megatron-LM until April 2026 and"
            " megatron-core up to 0.16; since then it has no effect without"
            f" {SCHEDULE}, and the batch is {job.final:,} from the first step"
            f" ({VERSION}=head)"
        )


def _pipeline_notes(job: MegatronJob) -> Iterator[str]:
    """Yield what is not checked of a pipeline, and where it waits."""
    if job.uneven and job.stages > 1:
        yield (
            f"{' and '.join(job.uneven)}: how layers are split is not checked, and the"
            " bubble is that of equal stages"
        )
    if job.chunks > 1 and job.stages == 1:
        yield "there is one pipeline stage: its layer chunks change nothing"
    if (fewest := min(job.num_microbatches or [job.stages])) < job.stages > 1:
        yield (
            f"with {counted(fewest, 'microbatch')} the {job.stages} pipeline stages are"
            " never all busy; it runs"
        )


def _listed(values: Sequence[object]) -> str:
    shown = ", ".join(
        f"{value:,}" if isinstance(value, int) else str(value)
        for value in values[:MAX_LISTED]
    )
    return shown + (", ..." if len(values) > MAX_LISTED else "")


_ROUNDS_TO_0 = f"; {DECREASE} rounds it down to 0 microbatches"


def _unit(job: MegatronJob) -> Term:
    return Term(
        f"{MICRO} * data_parallel_size = {job.micro} * {job.replicas} = {job.unit}",
        job.unit,
    )


_FINAL: Side[MegatronJob] = (f"{GLOBAL}={{:,}}", lambda job: job.final)


def _triples(job: MegatronJob) -> Iterator[str]:
    """Yield triples near the given one: start and increment at multiples of the unit,
    an increment that divides the growth.
    """
    if job.triple is None or len(job.triple) != 3 or len(job.sizes) > MANY_SIZES:
        return
    start, increment, samples = job.triple
    unit = max(job.unit, 1)
    starts = [int(n) for n in around(start, unit)[:16] if 0 < n < job.final]
    found = [
        (s, i)
        for s in starts
        for n in around(increment, unit)[:64]
        if (i := int(n)) > 0 and (job.final - s) % i == 0
    ]
    for s, i in sorted(
        found, key=lambda pair: abs(pair[0] - start) + abs(pair[1] - increment)
    ):
        yield f"{s} {i} {max(samples, 1)}"


def _with_rounded_sizes(job: MegatronJob) -> Iterator[str]:
    """Yield the schedule with each size rounded to the unit, down and then up."""
    if not job.schedule_valid or job.unit < 1:
        return
    for extra in (0, job.unit - 1):
        rows = (
            (entry.text.partition(":")[0], (entry.size + extra) // job.unit)
            for entry in job.thresholds
        )
        yield " ".join(
            f"{threshold}:{max(units, 1) * job.unit}" for threshold, units in rows
        )


def _in_groups(
    name: str,
    fits: Callable[[MegatronJob, int], bool],
    says: Callable[[MegatronJob, str], str],
) -> Rule[MegatronJob]:
    """Return the rule that every phase's number of microbatches fits the groups of the
    interleaved schedule.
    """

    def failing(job: MegatronJob) -> list[str]:
        return [
            f"{number} microbatches from step {phase.start_step:,} (batch"
            f" {phase.global_batch_size:,} / {job.unit})"
            for phase, number in zip(
                job.coming, job.num_microbatches or (), strict=False
            )
            if not fits(job, number)
        ]

    return Rule(name=f"megatron.{name}", keys=(GLOBAL, GROUP, STAGES), when=lambda job: job.interleaved,
        holds=lambda job: not failing(job),
        message=lambda job: f"{says(job, failing(job)[0])}; nothing checks it before that step",
        division=lambda job: (job.final, max(job.unit, 1) * max(job.group, 1)), found_by="run")  # fmt: skip


RULES: list[Rule[MegatronJob]] = [
    Rule(name="megatron.micro_batch_positive", keys=(MICRO,), holds=lambda job: job.micro >= 1,
        message=lambda job: f"{MICRO} must be set" if job[MICRO] is None else f"{MICRO}={job[MICRO]} must be at least 1"),
    at_least("megatron.global_batch_positive", (GLOBAL,), GLOBAL, 1, when=lambda job: job[GLOBAL] is not None),
    multiple("megatron.world_divisible", ("world_size", *AXES), ("the world size {}", lambda job: job.world or 0),
        lambda job: Term(f"{job.axes} parallel sizes = {job.axes_sizes} = {job.model_parallel}", job.model_parallel),
        when=lambda job: job.world is not None),
    # Experts have axes of their own over the same devices.
    multiple("megatron.experts_over_devices", (EXPERT, EXPERT_TENSOR), ("the world size {}", lambda job: job.num_devices),
        lambda job: Term(
            f"expert tensor * expert * pipeline parallel sizes = {job.expert_tensor} * {job[EXPERT]} * {job.stages} = "
            f"{job.expert_devices}", job.expert_devices),
        when=lambda job: job.expert_devices > 1 and job.num_devices % job.model_parallel == 0, found_by="run"),
    multiple("megatron.experts_shared", (EXPERT, "num_experts"), "num_experts", EXPERT,
        when=lambda job: bool(job["num_experts"])),
    equal("megatron.no_pipeline", (STAGES, "no_pipeline_parallel"), STAGES, 1,
        when=lambda job: job["no_pipeline_parallel"], note=" with no_pipeline_parallel"),
    multiple("megatron.batch_divisible", (GLOBAL, MICRO), _FINAL, _unit,
        when=lambda job: not job.has_ramp and not job[DECREASE]),
    at_least("megatron.decreased_to_nothing", (GLOBAL, MICRO), _FINAL, _unit,
        when=lambda job: not job.has_ramp and job[DECREASE] and job.unit >= 1 and job.final >= 1, note=_ROUNDS_TO_0),
    multiple("megatron.eval_batch_divisible", (EVAL_GLOBAL, EVAL_MICRO), EVAL_GLOBAL, lambda job: Term(
        f"the evaluation's micro batch * data_parallel_size = {job.eval_unit // job.replicas} * {job.replicas} = "
        f"{job.eval_unit}",
        job.eval_unit), when=lambda job: job[EVAL_GLOBAL] is not None),
    # The linear ramp: start, increment and samples.
    Rule(name="megatron.ramp_is_a_triple", keys=(RAMP,), when=lambda job: job.triple is not None,
        holds=lambda job: len(job.triple or ()) == 3,
        message=lambda job: f"{RAMP}={job[RAMP]!r:.80} must be three whole numbers: start, increment and samples"),
    Rule(name="megatron.ramp_numbers_positive", keys=(RAMP,), when=lambda job: len(job.triple or ()) == 3,
        holds=lambda job: job.ordered,
        message=lambda job: f"{RAMP}={job[RAMP]}: start and increment must be at least 1, samples at least 0",
        candidates=_triples),
    at_least("megatron.ramp_grows", (GLOBAL, RAMP), _FINAL, ("the ramp's start {:,}", lambda job: job.start),
        when=lambda job: job.ordered,
        candidates=lambda job: [int(n) for n in around(job.final, job.increment, origin=job.start) if n >= 1]),
    multiple("megatron.ramp_increment_divides", (GLOBAL, RAMP), lambda job: Term(
        f"{GLOBAL} - start = {job.final:,} - {job.start:,} = {job.final - job.start:,}", job.final - job.start),
        ("the ramp's increment {:,}", lambda job: job.increment), when=lambda job: job.ordered and job.final >= job.start),
    Rule(name="megatron.ramp_counts_samples", keys=("train_iters", RAMP), when=lambda job: job.triple is not None,
        holds=lambda job: job["train_iters"] is None,
        message=lambda job: "a linear ramp needs a run counted in samples; give train_samples instead of "
            f"train_iters={job['train_iters']:,}"),
    Rule(name="megatron.ramp_divides_by_zero", keys=(RAMP, GLOBAL), when=lambda job: job.ordered,
        holds=lambda job: job.final != job.start and job.ramp_samples > 0,
        message=lambda job: f"{RAMP}={job[RAMP]} to {GLOBAL}={job.final:,}: a ramp without increments or samples divides by "
            "zero; leave it out", candidates=_triples, found_by="run"),
    at_least("megatron.ramp_decreased_to_nothing", (RAMP, MICRO), ("the ramp's start {:,}", lambda job: job.start), _unit,
        when=lambda job: job.ordered and job[DECREASE] and job.unit >= 1, note=_ROUNDS_TO_0, candidates=_triples,
        found_by="run"),
    Rule(name="megatron.ramp_phases_divisible", keys=(RAMP, MICRO), when=lambda job: job.linear is not None and job.unit >= 1,
        holds=lambda job: job.splits, message=lambda job: next(
            f"the batch of {phase.global_batch_size:,} from step {phase.start_step:,} (sample {phase.start_sample:,}) must be "
            f"a multiple of {_unit(job).text}; Megatron checks each batch only when its step comes"
            for phase in job.coming if phase.global_batch_size % job.unit),
        candidates=_triples, found_by="run"),
    # The schedule in steps: THRESHOLD:SIZE entries.
    Rule(name="megatron.schedule_excludes_global_batch", keys=(GLOBAL, SCHEDULE), when=lambda job: job.has_schedule,
        holds=lambda job: job[GLOBAL] is None,
        message=lambda job: f"{GLOBAL}={job[GLOBAL]} must not be given with {SCHEDULE}, whose last size it would contradict"),
    Rule(name="megatron.schedule_excludes_decrease", keys=(DECREASE, SCHEDULE), when=lambda job: job.has_schedule,
        holds=lambda job: not job[DECREASE], message=lambda _: f"{DECREASE} must not be given with {SCHEDULE}",
        candidates=lambda _: (False,)),
    Rule(name="megatron.schedule_entries", keys=(SCHEDULE,), when=lambda job: job.has_schedule,
        holds=lambda job: bool(job.thresholds) and not job.unreadable,
        message=lambda job: f"{SCHEDULE}: {', '.join(repr(text[:40]) for text in job.unreadable[:5]) or 'nothing'} is not "
            "THRESHOLD:SIZE; spaces and commas separate entries (1_000 or 1K, not 1,000), suffixes are K, M, B, T"),
    Rule(name="megatron.schedule_starts_at_0", keys=(SCHEDULE,), when=lambda job: bool(job.thresholds),
        holds=lambda job: job.thresholds[0].samples == 0,
        message=lambda job: f"{SCHEDULE}: the first threshold must be 0, it is {job.thresholds[0].samples:,} samples",
        candidates=lambda job: [] if job.unreadable else [
            " ".join([f"0:{job.thresholds[0].size}", *(entry.text for entry in job.thresholds[1:])])]),
    Rule(name="megatron.schedule_thresholds_increase", keys=(SCHEDULE,), when=lambda job: not job.unreadable,
        holds=lambda job: not job.not_rising,
        message=lambda job: f"{SCHEDULE}: thresholds must increase, but {job.not_rising[0][0].text} and "
            f"{job.not_rising[0][1].text} are both at {job.not_rising[0][1].samples:,} samples"),
    Rule(name="megatron.schedule_sizes_positive", keys=(SCHEDULE,),
        holds=lambda job: all(entry.size > 0 for entry in job.thresholds),
        message=lambda job: f"{SCHEDULE}: every size must be at least 1, unlike "
            f"{min(job.thresholds, key=lambda entry: entry.size).text}"),
    Rule(name="megatron.schedule_grows", keys=(SCHEDULE,), when=lambda job: job.schedule_valid,
        holds=lambda job: not job.shrinking,
        message=lambda job: f"{SCHEDULE}: the batch shrinks from {job.shrinking[0][0].size:,} to {job.shrinking[0][1].size:,} "
            f"at {job.shrinking[0][1].samples:,} samples; the schedule is read, but the trainer stops there", found_by="run"),
    Rule(name="megatron.schedule_phases_divisible", keys=(SCHEDULE, MICRO),
        when=lambda job: job.schedule_valid and job.unit >= 1, holds=lambda job: job.splits,
        message=lambda job: f"{SCHEDULE}: {', '.join(str(size) for size in job.sizes if size % job.unit)} must be multiples of "
            f"{_unit(job).text}; Megatron checks each batch only when its step comes",
        candidates=_with_rounded_sizes, found_by="run"),
    # The pipeline and its interleaved schedule.
    at_least("megatron.chunks_positive", (VIRTUAL,), VIRTUAL, 1, when=lambda job: job[VIRTUAL] is not None),
    at_least("megatron.chunks_need_stages", (STAGES, VIRTUAL, OVERLAP), STAGES, ("{:,}", lambda job: 2 if job[OVERLAP] else 3),
        when=lambda job: job.chunks > 1,
        note=lambda job: f" for {job.chunks} chunks per stage{'' if job[OVERLAP] else f' without {OVERLAP}'}"),
    multiple("megatron.layers_over_stages", (LAYERS, STAGES), LAYERS, STAGES,
        when=lambda job: job.num_layers is not None and not job.uneven),
    multiple("megatron.layers_over_chunks", (LAYERS, VIRTUAL, PER_CHUNK), lambda job: Term(
        f"({LAYERS}={job.num_layers}) / ({STAGES}={job.stages}) = {job.stage_layers} layers", job.stage_layers or 0),
        lambda job: Term(f"{job.chunk_key}={job[job.chunk_key]}", max(job[job.chunk_key], 1)),
        when=lambda job: job.stage_layers is not None and bool(job.chunk_key)),
    multiple("megatron.layout_fills_stages", (STAGES, LAYOUT),
        (f"{LAYOUT} has {{}} stages, which", lambda job: job.layout_stages), STAGES),
    _in_groups("group_in_range", lambda job, count: job.stages <= job.group <= count,
        lambda job, first: (
            f"the interleaved schedule needs {STAGES}={job.stages} <= {GROUP}={job.group} <= microbatches, but "
            f"there are {first}")),
    _in_groups("whole_groups",
        lambda job, count: count < job.group or count % job.group == 0 or count % job.group >= job.stages,
        lambda job, first: (
            f"{first} must fill groups of {GROUP}={job.group}, or leave at least {STAGES}={job.stages} for the last")),
]  # fmt: skip
DIALECT = Dialect(
    job=MegatronJob,
    rules=RULES,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
    devices="world_size",
    by_pass=(MICRO,),
)
