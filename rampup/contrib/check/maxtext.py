"""MaxText's base.yml: the keys of its batches, how its files are read, its numbers, and
its rules.

Numbers have MaxText's own roundings: float products truncated to whole numbers. Exact
arithmetic belongs to `rampup.plan`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rampup.config.key import REMOVED
from rampup.config.load import BASE, COMMAND_LINE
from rampup.config.yaml import Located
from rampup.contrib.check.known import load_known_keys, load_table, load_unread
from rampup.contrib.check.reading import (
    Launch,
    Reading,
    Settings,
    Source,
    find_in_repository,
    load_entries,
    option,
    read_source,
    type_settings,
)
from rampup.contrib.check.rules import (
    Dialect,
    PretrainingJob,
    Rule,
    Side,
    around,
    at_least,
    broken_rules,
    ends_before_ramp,
    few_samples_per_pass,
    found_by_run,
    multiple,
)
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import show_unknown, unknown_names
from rampup.contrib.check.verdict import Always, Run, Term, counted, product, times
from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.numbers import AUTO, plain_number, to_yaml_number
from rampup.plan.pipeline import bubble_fraction
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import MAX_PHASES, segments_counted_per_phase

END = "per_device_batch_size"
START, INCREMENT = (f"{END}_{part}" for part in ("start", "increment"))
EVAL = f"eval_{END}"
SAMPLES = "global_rampup_samples"
ACCUMULATION = "gradient_accumulation_steps"
MICROBATCHES, REPEATS = (f"num_pipeline_{what}" for what in ("microbatches", "repeats"))
LAYERS = "pipeline_parallel_layers"
EXPANSION = "expansion_factor_real_data"
DELAY = "pipeline_delay_activation_forwarding"
RAMP = "enable_rampup_batch_size"
STAGE_LAYERS = "num_layers_per_pipeline_stage"
SHARD_OPTIMIZER = "shard_optimizer_over_data"
VERSION = "maxtext_version"
AT_STEP = "at_step"  # where a run stands
TUNIX = "use_tunix_gradient_accumulation"
# How MaxText's mesh axes map to rampup's; the sizes of each group are multiplied.
AXIS_GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("diloco", "data"),
    "fsdp": ("fsdp", "fsdp_transpose"),
    "tensor": ("tensor", "tensor_transpose", "tensor_sequence", "autoregressive"),
    "context": ("context", "context_usp_ulysses", "context_autoregressive", "sequence"),
    "expert": ("expert",),
    "pipeline": ("pipeline",),
}
AUTOMATIC = {"ici": "fsdp", "dcn": "data"}
KEYS = load_entries("maxtext")
ALIASES = {
    "num_target_devices": "num_devices",
    "internal_compile_num_devices": "num_devices",
}
# Text keys that are empty in many files, which means their default.
MAY_BE_EMPTY = ("quantization", "model_name", "decoder_block")
# The families of models whose files MaxText ships. They set no batch sizes.
_MODELS = re.compile(
    r"(?i)default|llama|gemma|gpt|mistral|mixtral|qwen|deepseek|kimi|olmo|grok"
)
_SIMILAR = 0.85  # a key at least this similar to another one may be a misspelling of it


BASES: dict[str, dict[str, Any]] = load_table("maxtext", "bases")
UNREAD = load_unread("maxtext")
LAUNCH = Launch(
    system="MaxText",
    program=re.compile(
        r"(?i)\bmaxtext[\w./]*[./](?:\w*train\w*|sft\w*|dpo\w*|distill\w*)\b|\bper_device_batch_size="
    ),
    others=re.compile(
        r"(?i)train_(?:tokenizer|rl|grpo)\b|train_compile_xaot|"
        r"(?:\bmaxtext[\w./]*[./]|(?<=[\s/]))(?:decode|inference\w*|\w*generat\w*|evaluat\w*)(?:\.py)?(?=\s|$)"
    ),
    # MaxText's own programs, of today and of 2024 and 2025.
    own=re.compile(
        r"(?i)(?:.*/)?(?:train|train_compile|elastic_train|goodput_train|sft_train(?:er)?"
        r"|train_(?:sft|dpo|distill)\w*)|"
    ),
    follows=f"{VERSION}=2026-08",
    example="python3 -m maxtext.trainers.pre_train.train base.yml key=value",
    entries=KEYS,
    canonical=lambda name: ALIASES.get(name, name),
    bases=BASES,
    version="August 2026",
    keys="maxtext",
    unread=UNREAD,
)


def read_chain(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a base.yml, a script or a command, above the files that `base_config` or the
    command names, and the file of its model.
    """
    reading = read_source(source, overrides, launch).rename(launch.canonical)
    chosen = dict(setting.split("=", 1) for setting in reading.overrides)
    given = (
        _read_slices(reading.command)
        | _read_topology(reading.leaves)
        | dict(reading.leaves)
    )
    chain = _Chain(launch, reading, given, chosen.get(BASE, ""))
    answered = {*chosen, BASE, *launch.entries, *chain.own_bases}
    looked_up = {
        key: value for key, value in reading.leaves.items() if key not in answered
    }
    leaves, model_notes = _above_model(chain.leaves, reading, launch, chosen)
    reading = dataclasses.replace(
        reading,
        notes=(*reading.notes, *model_notes),
        leaves={
            name: value
            for name, value in leaves.items()
            if not (name in MAY_BE_EMPTY and value.value in ("", None))
        },
        overrides=[
            setting
            for setting in reading.overrides
            if setting.partition("=")[0] != BASE
        ],
        recognized=reading.recognized or bool(chain.shipped),
    )
    defaults = {
        name: value
        for name, value in launch.bases.get(chain.shipped, {}).items()
        if name in launch.entries
    }
    settings = type_settings(reading, launch, defaults)
    notes = [*settings.notes]
    if chain.files[1:] and reading.command is not None:
        notes.append(f"{', '.join(chain.files[1:])}: its base file, which is read.")
    if chain.shipped not in ("", "base.yml"):
        notes.append(
            f"what the source does not set is from MaxText's own {chain.shipped} of"
            f" {launch.version}."
        )
    return dataclasses.replace(settings, looked_up=looked_up, notes=tuple(notes))


class _Chain:
    """The base files from which a source starts. Upper ones win over those from which
    they start; the last one may be one that MaxText ships.
    """

    def __init__(
        self,
        launch: Launch,
        reading: Reading,
        leaves: Mapping[str, Located],
        chosen: str,
    ) -> None:
        self.launch = launch
        self.path = reading.path
        self.leaves = dict(leaves)
        self.own_bases: dict[str, Located] = {}  # the keys of files that were read
        self.files = [os.path.realpath(reading.path)]
        self.shipped = ""
        place = leaves.get(BASE, Located(value="", path=reading.path))
        if chosen:
            place = dataclasses.replace(place, value=chosen)
        elif reading.command is not None:
            words = reading.command.words
            files = (word for word in words if word.endswith((".yml", ".yaml")))
            name = next((word for word in files if "=" not in word), "")
            place = reading.command.locate(name, name)
        folder = Path(reading.path).parent
        while isinstance(place.value, str) and place.value.strip():
            if (file := self._find(place.value, folder)) is None:
                self.shipped = self._find_shipped(place)
                return
            place, folder = self._read(file), file.parent

    def _find(self, name: str, folder: Path) -> Path | None:
        """Return the file of a name: beside the one that names it, or in its
        repository.
        """
        places = (folder / name, *_copies(name, self.path))
        return next((file for file in places if os.path.isfile(file)), None)

    def _find_shipped(self, place: Located) -> str:
        """Return the file of MaxText's configs that a path ends with, or else one of its
        name.
        """
        name = show_unknown(place.value)
        parts = PurePosixPath(name).parts
        ends = ("/".join(parts[first:]) for first in range(len(parts)))
        named = (
            found
            for found in self.launch.bases
            if parts and found.endswith(f"/{parts[-1]}")
        )
        found = next((end for end in ends if end in self.launch.bases), None)
        if found := found or next(named, ""):
            return found
        raise ConfigError(
            f"{BASE}={name} is neither beside this file nor one that MaxText ships",
            fix=f"put it there, or add {BASE}=base.yml for MaxText's defaults",
            key=BASE,
            path=place.path,
            line=place.line,
        )

    def _read(self, file: Path) -> Located:
        """Add the keys of a file below those above it; return the base that it
        names.
        """
        if os.path.realpath(file) in self.files:
            raise ConfigError(
                f"{BASE} is a circular reference at {file.name}",
                key=BASE,
                path=str(file),
            )
        self.files.append(os.path.realpath(file))
        below = read_source(file, (), self.launch).rename(self.launch.canonical)
        self.own_bases |= below.leaves
        self.leaves = {**below.leaves, **self.leaves}
        return below.leaves.get(BASE, Located(value="", path=str(file)))


def _above_model(
    leaves: Mapping[str, Located],
    reading: Reading,
    launch: Launch,
    chosen: Mapping[str, str],
) -> tuple[Mapping[str, Located], list[str]]:
    """Return the keys with those of the model's own file, which counts above base.yml
    and below a command's settings; and a note on it.
    """
    place = leaves.get("model_name")
    model = chosen.get("model_name", str(place.value) if place else "default")
    if not model or unknown_names(model):
        return leaves, []
    files = find_in_repository(reading.path, f"configs/models/{model}.yml")
    if files:
        own = read_source(files[0], (), launch, strict=False).rename(launch.canonical)
        note = f"model_name={model}: {files[0]} is read above base.yml."
        if reading.command is None:
            return {**leaves, **own.leaves}, [note]
        return {**own.leaves, **leaves}, [note]
    if _MODELS.match(model):
        return leaves, []
    return leaves, [
        f"model_name={model} is no model of MaxText; what its"
        f" configs/models/{model}.yml sets is not read."
    ]


def _copies(name: str, path: str) -> list[Path]:
    """Return where a base file of a command may be in its repository, as far as its
    path is that of this machine.
    """
    parts = PurePosixPath(
        show_unknown(name).rpartition("$")[2].partition("/")[2]
        if unknown_names(name)
        else name
    ).parts
    parts = tuple(part for part in parts if part != "/")
    ends = range(max(len(parts) - 1, 1)) if path != COMMAND_LINE else ()
    return [
        file
        for first in ends
        for file in find_in_repository(path, "/".join(parts[first:]))
        if ".." not in parts
    ]


def known_keys(system: str, key: str) -> Rule[Any]:
    """Return the rule that MaxText has all keys that are not in a base file of a
    fork.
    """
    known = load_known_keys("maxtext")

    def unknown(job: Any) -> list[str]:
        return [name for name in job.settings.looked_up if known.life(name) is None]

    def message(job: Any) -> str:
        shown = []
        for name in unknown(job)[:4]:
            line = job.settings.looked_up[name].line
            close = difflib.get_close_matches(name, known.lives, n=1, cutoff=_SIMILAR)
            details = [f"line {line}"] * bool(line) + [
                f"the closest key is {other}" for other in close
            ]
            shown.append(f"{name} ({'; '.join(details)})" if details else name)
        return (
            f"{', '.join(shown)} must be left out: MaxText refuses what is not in its"
            " configuration (that of November 2025 warned). For a fork with keys of"
            f" its own, name its base file with {BASE}=..., or give them on rampup's"
            " command line as well"
        )

    rule_name = f"{system}.known_keys"
    return Rule(
        name=rule_name,
        keys=(key,),
        holds=lambda job: not unknown(job),
        message=message,
        candidates=lambda _: None,
    )


def old_keys(job: Any) -> Iterator[str]:
    """Yield a note about keys that only older versions of MaxText have."""
    if old := [
        name
        for name in job.settings.looked_up
        if load_known_keys("maxtext").life(name) == (1, 1)
    ]:
        yield (
            f"{', '.join(old[:4])}: only MaxText before August 2026 has these keys; a"
            " newer one refuses them."
        )


def _read_slices(command: Command | None) -> dict[str, Located]:
    """Return the devices and slices that a manifest, or xpk, gives to a command; none
    if it does not say them.
    """
    if command is None:
        return {}
    if command.machine.devices:
        found = {"num_devices": command.locate(command.machine.devices)}
        return found | (
            {"num_slices": command.locate(command.machine.slices)}
            if command.machine.slices > 1
            else {}
        )
    outer = command._replace(words=command.outer)
    machine = (
        option(outer, "--tpu-type", "--tpu_type", "--device-type", "--device_type")
        or ""
    )
    slices = option(outer, "--num-slices", "--num_slices") or "1"
    nodes = option(outer, "--num-nodes", "--num_nodes") or "1"
    if not (slices.isdecimal() and nodes.isdecimal()):
        return {}
    if devices := _slice_devices(machine):
        return {
            "num_devices": outer.locate(devices * int(slices)),
            "num_slices": outer.locate(int(slices)),
        }
    match = re.fullmatch(r"(?:[abhlg]|gb)\d+\w*-.*?(\d+)", machine)
    return {"num_devices": outer.locate(int(match[1]) * int(nodes))} if match else {}


def _read_topology(leaves: Mapping[str, Located]) -> dict[str, Located]:
    """Return the devices and slices for which `train_compile` compiles."""
    topology = leaves.get("compile_topology")
    slices = leaves.get("compile_topology_num_slices")
    if topology is None or slices is None or not isinstance(slices.value, int):
        return {}
    devices = _slice_devices(str(topology.value)) * slices.value
    if devices < 1:
        return {}
    return {
        "num_devices": dataclasses.replace(topology, value=devices),
        "num_slices": slices,
    }


def _slice_devices(machine: str) -> int:
    """Return the devices of a TPU slice such as `v5p-128` or `tpu7x-4x4x4`; 0 for other
    machines.
    """
    match = re.fullmatch(r"(v[2-6]\w*|tpu7x)-(\d+(?:x\d+)*)", machine)
    if match is None:
        return 0
    devices = math.prod(map(int, match[2].split("x")))
    if match[2].isdecimal():  # v4 and v5p count two cores in a device
        return devices // 2 if match[1] in ("v4", "v5p") else devices
    # A topology counts chips, and each core of a TPU7x is a device.
    return devices * 2 if match[1] == "tpu7x" else devices


class BatchSizes(NamedTuple):
    """One batch as MaxText sees it, in samples."""

    # rows that the loaders read per optimizer step: at least a full sample per device
    to_load: int
    to_train: int  # rows that the optimizer step is meant to use
    micro: int  # rows of one forward pass over all devices


def batch_sizes(
    per_device: Fraction, expansion: Fraction, num_devices: int, accumulation: int
) -> BatchSizes:
    """Return the sizes of one batch. Source: MaxText `configs/types.py`,
    calculate_global_batch_sizes.
    """
    factor = float(expansion) if expansion > 0 else 1
    micro_to_load = (
        num_devices * factor
        if per_device < 1
        else int(num_devices * float(per_device) * factor)
    )
    micro = int(num_devices * float(per_device))
    return BatchSizes(
        to_load=int(micro_to_load * accumulation),
        to_train=micro * accumulation,
        micro=micro,
    )


class MaxTextJob(PretrainingJob):
    """The numbers of a base.yml, which must not leave the number of devices open."""

    version = "MaxText of August 2026 (e591f30)"
    expressed = (
        *(
            f"{group}_{axis}_parallelism"
            for group in ("ici", "dcn")
            for axes in AXIS_GROUPS.values()
            for axis in axes
        ),
        *("learning_rate_schedule_steps", LAYERS),
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # MaxText's mesh axes, multiplied into rampup's; -1 if one of a group is -1.
        self.combined_axes: dict[str, dict[str, int]] = {"ici": {}, "dcn": {}}
        for group, combined in self.combined_axes.items():
            for name, axes in AXIS_GROUPS.items():
                sizes = [self[f"{group}_{axis}_parallelism"] for axis in axes]
                combined[name] = AUTO if AUTO in sizes else math.prod(sizes)
        self.num_slices: int = self["num_slices"]
        self.num_devices: int = self["num_devices"] or 0
        self.assumes_one_slice = False
        if not self.num_devices:  # those of a mesh without a free axis
            ici, dcn = (self.combined_axes[group].values() for group in ("ici", "dcn"))
            if AUTO in ici or min(ici) < 1:
                said = (
                    "the file leaves a mesh axis open (-1), so its batches depend on"
                    " the machine; add num_devices=N"
                )
                raise ConfigError(
                    f"{said}, for example num_devices=8", key="num_devices"
                )
            given = self.num_slices > 0 and AUTO in dcn
            slices = (
                self.num_slices
                if given
                else math.prod(size for size in dcn if size != AUTO)
            )
            self.num_devices = max(math.prod(ici) * slices, 1)
            self.assumes_one_slice = AUTO in dcn and not given
        # An impossible mesh is reported by a rule; one device stands in for it.
        self.axes, self.mesh_problem = MeshAxes(), ""
        try:
            self.axes = MeshAxes.resolve(
                self.num_devices, num_slices=self.num_slices, **self.combined_axes
            )
        except RampupError as error:
            self.mesh_problem = str(error)
        # A loaded batch is sharded over the data, stage, fsdp and expert axes.
        self.loading_shards = (
            self.axes.data_parallel_size * self.axes.pipeline * self.axes.expert
        )
        # The pipeline. With one stage every pipeline key is ignored.
        self.stages = self.axes.pipeline
        self.is_piped = self.stages > 1
        self.least_microbatches = self.stages * (2 if self[DELAY] else 1)
        self.microbatches: int = (
            self.least_microbatches
            if self[MICROBATCHES] == AUTO
            else self[MICROBATCHES]
        )
        dense = (
            self["first_num_dense_layers"] if self["decoder_block"] == "deepseek" else 0
        )
        self.layers: int = (
            self["base_num_decoder_layers"] - dense
            if self[LAYERS] == AUTO
            else self[LAYERS]
        )
        # Layers of one round through the pipeline, or of all repeats if their number is
        # given.
        self.layer_product: int = (
            self.stages
            * (1 if self[REPEATS] == AUTO else self[REPEATS])
            * self[STAGE_LAYERS]
        )
        automatic = self.layers // max(self.stages * self[STAGE_LAYERS], 1)
        self.repeats: int = automatic if self[REPEATS] == AUTO else self[REPEATS]
        # The step between sizes per device that divide over the mesh and into
        # microbatches.
        microbatches = (
            self.microbatches if self.is_piped and self.microbatches > 0 else 1
        )
        self.unit = Fraction(
            math.lcm(self.loading_shards, microbatches), self.num_devices
        )
        self.sizes = batch_sizes(
            self[END], self[EXPANSION], self.num_devices, self[ACCUMULATION]
        )
        # Rows loaded and not trained on, per step after the ramp. Partial loading by
        # few hosts reads each row once.
        partial = self[EXPANSION] > 0 and self[END] >= 1
        self.dropped_per_step = (
            0 if partial else max(self.sizes.to_load - self.sizes.to_train, 0)
        )
        self.eval_sizes = batch_sizes(
            self[EVAL] or self[END], self[EXPANSION], self.num_devices, 1
        )
        self.total_steps: int = (
            self["learning_rate_schedule_steps"]
            if self["steps"] == AUTO
            else self["steps"]
        )
        self.ramps: bool = self[RAMP]
        self.reasons = (
            {}
            if self.ramps
            else dict.fromkeys(sorted((START, INCREMENT, SAMPLES)), "the ramp is off")
        )
        self.grows: bool = self[END] > self[START]
        # MaxText tests the increment in floating point: 1 - 0.1 is not a multiple of
        # 0.1 there.
        increment = float(self[INCREMENT])
        self.increment_divides = (
            increment == 0 or (float(self[END]) - float(self[START])) % increment == 0
        )
        # Whether MaxText builds the ramp, its number of increments, and the keys that
        # decide whether all of its sizes divide: start and end, and the increment if a
        # size is between.
        self.builds_ramp: bool = (
            self.ramps
            and self.grows
            and self.increment_divides
            and min(self[START], self[INCREMENT]) > 0
        )
        self.num_increments = (
            int((float(self[END]) - float(self[START])) // increment)
            if self.builds_ramp
            else 0
        )
        self.all_phases = self.ramp_phases
        if self.all_phases and self[AT_STEP] >= self.all_phases[-1][0]:
            # The ramp is over: only its last batch is to come.
            self.ramps = self.builds_ramp = False
            del self.ramp_phases
        has_steps = self.global_size(START) + self.global_size(
            INCREMENT
        ) < self.global_size(END)
        self.divided_keys = (
            (START, END, *([INCREMENT] if has_steps else []))
            if self.builds_ramp
            else ()
        )

    def global_size(self, key: str) -> int:
        """Return devices * size per device, truncated to whole samples as MaxText
        does.
        """
        return int(self.num_devices * float(self[key]))

    @cached_property
    def ramp_phases(self) -> list[tuple[int, int, int]]:
        """The first step, the global batch size and the samples before it, of every
        phase of MaxText's ramp as it runs.

        Batches are without the accumulation factor, and each phase counts from zero
        (`utils/rampup_batch.py`). Empty without a ramp, or with one of too many phases.
        """
        start, increment, end = (
            self.global_size(key) for key in (START, INCREMENT, END)
        )
        ends = (
            start >= max(end, 1)
            if min(start, increment) < 1
            else (end - start) // increment < MAX_PHASES
        )
        if not self.builds_ramp or not ends:
            return []
        rows = []
        step = consumed = 0
        sizes = range(start, end, max(increment, 1))
        for num_steps, size in segments_counted_per_phase(
            sizes, self[SAMPLES], self.num_increments
        ):
            rows.append((step, size, consumed))
            step, consumed = step + num_steps, consumed + num_steps * size
        return [*rows, (step, end, consumed)]

    @property
    def lost_at_ramp_end(self) -> int:
        """Rows that were read in the ramp and never trained on: the loader's buffer is
        dropped with the ramp.

        MaxText's RampUpDataLoader (`common/data_loader.py`) believes that a pull fills
        its buffer to the final batch.
        """
        if not self.ramp_phases or self.global_size(END) < 1 or self[EXPANSION] > 0:
            return 0
        _, end, trained = self.ramp_phases[-1]
        return -(-trained // end) * self.sizes.to_load - trained

    @property
    def outcome(self) -> Run:
        """Rows may be dropped in each step, and at the end of the ramp."""
        return "drops" if self.dropped_per_step or self.lost_at_ramp_end else "runs"

    def summary(self) -> str:
        """Return the numbers of an optimizer step in one line."""
        sizes, replicas = self.sizes, self.axes.data_parallel_size
        share = to_yaml_number(Fraction(sizes.micro, replicas))
        shape = times(
            counted(replicas, "replica"), counted(self[ACCUMULATION], "pass"), share
        )
        text = f"{counted(sizes.to_train, 'sample')} per optimizer step; {shape}"
        if sizes.to_load != sizes.to_train:
            text += f"; {counted(sizes.to_load, 'row')} loaded"
        if phases := self.ramp_phases:
            text += (
                f"; ramp from {phases[0][1]:,} in {counted(len(phases), 'phase')} and"
                f" {counted(phases[-1][0], 'step')}"
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
            "data_parallel_size": self.axes.data_parallel_size,
            "accumulation_steps": self[ACCUMULATION],
            "num_stages": self.stages,
            "dropped_samples_per_step": self.dropped_per_step,
        }
        if self.is_piped and self.microbatches > 0:
            # Forwarding one tick later is a pipeline with twice the distance between
            # its stages.
            distance = (2 if self[DELAY] else 1) * (self.stages - 1) + 1
            bubble = bubble_fraction(
                distance, max(self.microbatches, self.stages), max(self.repeats, 1)
            )
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
        """Return the phases of the ramp, which count accumulation in every batch."""
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
        if self.ramps:
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
        experts: what other slices and experts share counts as one slice, with devices
        that do not shard the batch.
        """
        found = {"num_slices": self.num_slices} | {
            f"{group}_{axis}_parallelism": size
            for group, axes in self.combined_axes.items()
            for axis, size in axes.items()
        }
        gone = {key: found.pop(key) for key in [*found] if key in REMOVED}
        if set(gone.values()) == {1} or self.mesh_problem:
            return found
        axes = self.axes
        slices = dict(zip(AXES, axes.slices, strict=True))
        within = {
            axis: getattr(axes, axis)
            // (slices[axis] if axis in ("data", "pipeline") else 1)
            for axis in AXES
        }
        within["context"] *= within.pop("expert")
        return {
            **{f"ici_{axis}_parallelism": size for axis, size in within.items()},
            "dcn_data_parallelism": slices["data"],
            "dcn_pipeline_parallelism": slices["pipeline"],
            "num_slices": slices["data"] * slices["pipeline"],
        }


MAX_LISTED_PHASES = 12


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


def _meanings(job: MaxTextJob) -> Iterator[tuple[str, str]]:
    sizes = job.sizes
    forward = (
        f"{counted(sizes.micro, 'sample')} per forward pass over"
        f" {counted(job.num_devices, 'device')}"
    )
    yield END, f"{forward}; {sizes.micro * job['max_target_length']:,} tokens"
    passes = counted(job[ACCUMULATION], "pass")
    yield (
        ACCUMULATION,
        f"{passes}, so {counted(sizes.to_train, 'sample')} per optimizer step",
    )
    yield EXPANSION, f"{counted(sizes.to_load, 'row')} to load per step"
    evaluates = job["eval_interval"] > 0
    yield (
        EVAL,
        (
            f"{counted(job.eval_sizes.to_train, 'sample')} per evaluation batch"
            if evaluates
            else "no evaluation"
        ),
    )
    yield (
        "",
        (
            "the batch is sharded over"
            f" {counted(job.axes.data_parallel_size, 'replica')} (data * fsdp)"
        ),
    )
    if job.ramps:
        yield (
            START,
            (
                f"{counted(job.global_size(START), 'sample')} in the first phase,"
                " without accumulation"
            ),
        )
        yield (
            INCREMENT,
            (
                f"{counted(job.global_size(INCREMENT), 'sample')} more in each phase,"
                " without accumulation"
            ),
        )
        yield (
            SAMPLES,
            "samples requested for the whole ramp, shared equally by its phases",
        )
    if job.is_piped and job.microbatches > 0:
        microbatches = (
            f"{counted(job.microbatches, 'microbatch')} of"
            f" {counted(sizes.micro // job.microbatches, 'sample')}"
        )
        yield (
            MICROBATCHES,
            (
                f"{microbatches} through {job.stages:,} stages,"
                f" {counted(job.repeats, 'repeat')}"
            ),
        )


def _notes(job: MaxTextJob) -> Iterator[str]:
    sizes, expansion = job.sizes, job[EXPANSION]
    yield from old_keys(job)
    if job.ramp_phases:
        phases = [(start, size) for start, size, _ in job.ramp_phases]
        yield from ends_before_ramp(job.total_steps, phases)
    rows = to_yaml_number(job[END])
    if isinstance(rows, int):
        yield from few_samples_per_pass(job[ACCUMULATION], rows, END)
    if job.assumes_one_slice:
        assumed = (
            f"one of {job.num_devices:,} devices is assumed, and the batch of several"
            " is as many times as large"
        )
        yield (
            f"dcn_data_parallelism=-1 leaves the number of slices open: {assumed}; add"
            " num_slices=N or num_devices=N"
        )
    if job.dropped_per_step and sizes.micro >= 1:
        loaded = f"a full sample per device is loaded, {sizes.to_load:,} rows per step"
        kept = (
            f"{sizes.to_train:,} of them are trained on; {job.dropped_per_step:,} are"
            " dropped"
        )
        yield f"{END}={show(job[END])} is below 1: {loaded}, and {kept}"
    for key in (START, INCREMENT, END) if job.ramps else (END,):
        exact = Fraction(job.num_devices) * job[key]
        truncated = job.global_size(key)
        if exact != truncated:
            yield (
                f"{product_text(job, key)} is truncated to {truncated}, in floating"
                " point; rampup reports an error"
            )
    if 0 < expansion < 1:
        step = f"each step gets the {sizes.to_load:,} rows of one of them"
        turns = (
            f"the loaders of {int(1 / expansion)} times as many hosts take turns, and"
            f" {step}"
        )
        yield (
            f"{EXPANSION}={show(expansion)}: {turns}, while"
            f" global_batch_size_to_train_on is {sizes.to_train:,}"
        )
    elif expansion > 1:
        loaded = (
            f"global_batch_size_to_load={sizes.to_load:,} counts the rows that they"
            " would load together if all did"
        )
        yield (
            f"{EXPANSION}={show(expansion)}: 1 of {show(expansion)} hosts loads, for"
            f" itself and the others; {loaded}"
        )
    passes = job[ACCUMULATION]
    if job[SHARD_OPTIMIZER] and passes > 1:
        summed = (
            f"the gradients of the {passes:,} passes are summed in bfloat16, which"
            " keeps 8 bits of each sum"
        )
        before = "casts float32 parameters to bfloat16 before the accumulation passes"
        yield f"{SHARD_OPTIMIZER} {before}, so {summed}; rampup sums in float32"
    if job[TUNIX] and passes > 1:
        few = (
            "a pass with few tokens counts as much as a full one; otherwise the sum"
            " over all passes is divided by all tokens"
        )
        yield (
            f"{TUNIX} divides the loss of each of the {passes:,} passes by its own"
            f" tokens and averages them: {few}"
        )
    if job.ramp_phases:
        yield from _ramp_notes(job)
    yield from _pipeline_notes(job)
    if isinstance(job.planned, RampupError) and not broken_rules(RULES, job):
        refusals = "; ".join(
            str(problem) for problem in job.planned.problems or (job.planned,)
        )
        yield f"rampup itself would refuse this file: {refusals}"


def _ramp_notes(job: MaxTextJob) -> Iterator[str]:
    """Yield what MaxText's ramp ignores, takes, and loses at its end and at a resume."""
    sizes, passes = job.sizes, job[ACCUMULATION]
    *ramp, (steps, _, trained) = job.ramp_phases
    samples = job[SAMPLES]
    if passes > 1:
        shown = [f"{size:,}" for _, size, _ in ramp[:MAX_LISTED_PHASES]] + ["..."] * (
            len(ramp) > MAX_LISTED_PHASES
        )
        batches = (
            f"in the ramp its batches are {', '.join(shown)} ({trained:,} samples"
            f" in {steps:,} steps)"
        )
        jump = (
            f"jumps from {ramp[-1][1]:,} to {sizes.to_train:,}; the phases here"
            " include the factor in every batch"
        )
        yield (
            f"MaxText's ramp ignores {ACCUMULATION}={passes}: {batches}, then the"
            f" batch {jump}"
        )
    if samples < 1:
        yield f"{SAMPLES}={samples:,} is below 1: every phase lasts one step"
    elif trained != samples:
        taken = (
            f"the ramp takes {trained:,} samples in {steps:,} steps, but {SAMPLES}"
            f" requests {samples:,}"
        )
        yield (
            f"{taken} ({trained / samples - 1:+.1%}): samples beyond a phase's"
            " share do not count towards the next"
        )
    if lost := job.lost_at_ramp_end:
        buffer = f"the buffer of {sizes.to_load:,} rows is dropped with the ramp"
        rows = f"{trained:,} trained, {trained + lost:,} loaded"
        yield (
            f"at the end of the ramp {lost:,} loaded rows are never trained on:"
            f" {buffer} ({rows})"
        )
    buffered = (
        f"up to {max(sizes.to_load - 1, 0):,} buffered rows, which no checkpoint"
        " contains"
    )
    replay = "a checkpoint labelled s contains s + 1 batches and s are replayed"
    yield Always(
        f"a resume within the ramp loses {buffered}, and is one batch behind: {replay}"
    )
    number = f"each of the {len(job.ramp_phases):,} batch sizes"
    yield (
        f"{number} is compiled at its first step; only the final one is lowered at"
        " the start"
    )


def _pipeline_notes(job: MaxTextJob) -> Iterator[str]:
    """Yield which keys a pipeline ignores, what it does not check, and where it
    waits.
    """
    sizes, passes = job.sizes, job[ACCUMULATION]
    if not job.is_piped:
        if ignored := [
            key for key in (MICROBATCHES, REPEATS, LAYERS) if job[key] != AUTO
        ]:
            yield (
                f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'}"
                " ignored: there is one pipeline stage"
            )
    elif job.microbatches > 0 and sizes.micro % (
        job.microbatches * job.axes.data_parallel_size
    ):
        uneven = f"does not divide over data * fsdp = {job.axes.data_parallel_size}"
        size = sizes.micro // job.microbatches
        yield (
            f"a pipeline microbatch of {size} samples {uneven}: MaxText does not check"
            " it, and devices share or pad samples"
        )
    if (
        job.is_piped
        and job["model_name"] != "default"
        and LAYERS not in job.settings.given
    ):
        used = (
            f"{job.layers} from base_num_decoder_layers was used here, so give"
            " base_num_decoder_layers=N"
        )
        yield (
            f"model_name={job['model_name']} has its own number of layers; {used} if"
            " the model has another"
        )
    if job.is_piped and passes > 1:
        once = "the same microbatches in one pass would wait once"
        yield (
            f"each of the {passes} accumulation passes waits for the pipeline to fill;"
            f" {once}"
        )


FP8 = ("fp8", "nanoo_fp8", "fp8_gpu", "te_fp8_delayedscaling")
VOCAB_TILING = "num_vocab_tiling"


def _sizes_near(key: str, job: MaxTextJob) -> Iterable[Any]:
    """Return the candidates of a size per device, which is a fraction."""
    value = max(Fraction(job[key]), Fraction(0))
    increment = abs(Fraction(job[INCREMENT]))
    steps = {
        job.unit,
        Fraction(1, job.num_devices),
        *([increment] if job.ramps else []),
    }
    origin = job[START] if job.ramps and key == END else 0
    found = {n for step in steps for n in around(value, step)[:256]} | {
        *around(value, increment, origin=origin)[:64]
    }
    return sorted((n for n in found if n > 0), key=lambda n: abs(n - value))


def _increments_near(job: MaxTextJob) -> Iterable[Any]:
    span = Fraction(job[END]) - Fraction(job[START])
    value = Fraction(job[INCREMENT])
    return sorted(
        (span / n for n in range(1, 257) if span > 0), key=lambda n: abs(n - value)
    )


_MICROBATCHES: Side[MaxTextJob] = (
    f"{MICROBATCHES}={{:,}}",
    lambda job: job.microbatches,
)


def _over_mesh(name: str, key: str) -> Rule[MaxTextJob]:
    """Return the rule that a batch, or the increment of one, divides over the
    devices.
    """

    def divided(job: MaxTextJob) -> int:
        if key == END:  # below 1 per device a full sample per device is loaded
            return 0 if job[END] < 1 else job.sizes.to_train
        return max(job.global_size(key), 0) if key in job.divided_keys else 0

    return Rule(name=f"maxtext.{name}", keys=(key,), holds=lambda job: divided(job) % job.loading_shards == 0,
        message=lambda job: f"{product_text(job, key)} samples must be a multiple of the devices that a batch is sharded over, "
            f"data * stage * fsdp * expert = {job.loading_shards}; MaxText does not check it, and the first such step fails",
        candidates=_increments_near if key == INCREMENT else partial(_sizes_near, key))  # fmt: skip


def _eval_rule(job: MaxTextJob) -> tuple[bool, str]:
    """Return whether the batch of evaluation fits, and the rule: that it is the shape
    of training, or divides over devices.
    """
    micro, key = job.eval_sizes.micro, EVAL if job[EVAL] else END
    fits = (
        micro >= 1
        and (job[key] < 1 or micro % job.loading_shards == 0)
        and (not job.is_piped or micro == job.sizes.micro)
    )
    rule = f"a multiple of data * stage * fsdp * expert = {job.loading_shards}"
    if job.is_piped:
        rule = (
            f"the training batch of one forward pass, {job.sizes.micro}, for whose"
            " shape the pipeline is built"
        )
    return (
        fits,
        (
            f"{product_text(job, key)} ({micro} rows of evaluation) must be {rule};"
            " MaxText does not check it"
        ),
    )


RULES: list[Rule[MaxTextJob]] = [
    known_keys("maxtext", END),
    at_least("maxtext.accumulation_positive", (ACCUMULATION,), ACCUMULATION, 1),
    Rule(name="maxtext.ramp_grows", keys=(END, START), when=lambda job: job.ramps, holds=lambda job: job.grows,
        message=lambda job: f"{END}={show(job[END])} must be greater than {START}={show(job[START])}",
        candidates=partial(_sizes_near, END)),
    Rule(name="maxtext.ramp_increment_divides", keys=(INCREMENT, START, END), when=lambda job: job.ramps and job.grows,
        holds=lambda job: job.increment_divides, message=lambda job: (
            f"{END} - {START} = {show(job[END])} - {show(job[START])} = {show(job[END] - job[START])} must be a multiple of "
            f"{INCREMENT}={show(job[INCREMENT])}"
            + (
                f" in floating point, where the remainder is {(float(job[END]) - float(job[START])) % float(job[INCREMENT]):g}"
                if (job[END] - job[START]) % job[INCREMENT] == 0
                else ""
            )), candidates=_increments_near),
    Rule(name="maxtext.vocab_tiling", keys=(VOCAB_TILING, END, "max_target_length"), when=lambda job: job[END] > 0,
        holds=lambda job: (float(job[END]) * job["max_target_length"]) % job[VOCAB_TILING] == 0,
        message=lambda job: f"{END} * max_target_length = {show(job[END])} * {job['max_target_length']} = "
            f"{show(job[END] * job['max_target_length'])} must be a multiple of {VOCAB_TILING}={job[VOCAB_TILING]}",
        division=lambda job: (int(job[END] * job["max_target_length"]), job[VOCAB_TILING])),
    Rule(name="maxtext.fp8_accumulation", keys=(ACCUMULATION, "quantization"), when=lambda job: job["quantization"] in FP8,
        holds=lambda job: job[ACCUMULATION] <= 1,
        message=lambda job: f"{ACCUMULATION}={job[ACCUMULATION]} must be 1 with quantization={job['quantization']}"),
    Rule(name="maxtext.pipeline_layers", keys=(LAYERS, "base_num_decoder_layers", STAGE_LAYERS, REPEATS),
        when=lambda job: job.is_piped, holds=lambda job: (
            min(job.layer_product, job.layers) >= 1
            and (job.layers == job.layer_product or (job[REPEATS] == AUTO and job.layers % job.layer_product == 0))),
        message=lambda job: (
            f"{LAYERS}={job.layers:,} must be "
            + product({"num_stages": job.stages} | ({} if job[REPEATS] == AUTO else {REPEATS: job[REPEATS]})
                      | {STAGE_LAYERS: job[STAGE_LAYERS]}).text
            + (", or a multiple" if job[REPEATS] == AUTO else "")),
        candidates=lambda job: [int(n) for n in around(job.layers, max(job.layer_product, 1)) if n >= 1]),
    at_least("maxtext.microbatches_positive", (MICROBATCHES,), _MICROBATCHES, 1, when=lambda job: job.is_piped,
        note=", or -1 for automatic"),
    multiple("maxtext.microbatches_multiple_of_stages", (MICROBATCHES,), _MICROBATCHES,
        ("the stages, ici_pipeline_parallelism * dcn_pipeline_parallelism = {}", lambda job: job.stages),
        when=lambda job: job.is_piped and job.microbatches >= 1),
    multiple("maxtext.batch_multiple_of_microbatches", (END, MICROBATCHES),
        lambda job: Term(f"{product_text(job, END)}, the batch of one forward pass ({job.sizes.micro}),", job.sizes.micro),
        _MICROBATCHES, when=lambda job: job.is_piped and job.microbatches >= 1 and job.sizes.micro > 0,
        candidates=partial(_sizes_near, END)),
    at_least("maxtext.delayed_microbatches", (MICROBATCHES, DELAY), _MICROBATCHES,
        ("2 * stages = {}", lambda job: job.least_microbatches),
        when=lambda job: job.is_piped and job[DELAY], note=f" with {DELAY}"),
    *found_by_run([
        # pyconfig accepts any mesh; create_device_mesh asserts that it has as many
        # devices as the run.
        Rule(name="maxtext.mesh", keys=("num_devices",), holds=lambda job: not job.mesh_problem,
            message=lambda job: f"{job.mesh_problem}; MaxText's configuration is accepted, and the run stops at its mesh",
            candidates=lambda job: [int(n) for n in around(job.num_devices) if n >= 1]),
        Rule(name="maxtext.empty_batch", keys=(END,), holds=lambda job: job.sizes.micro >= 1, message=lambda job: (
                f"{product_text(job, END)} is truncated to {job.sizes.micro} samples: the step silently trains on nothing"),
            candidates=partial(_sizes_near, END)),
        Rule(name="maxtext.empty_first_batch", keys=(START,), when=lambda job: job.ramps and job.grows,
            holds=lambda job: job.global_size(START) >= 1, message=lambda job: (
                f"{product_text(job, START)} is truncated to {job.global_size(START)} samples: the ramp never starts"),
            candidates=partial(_sizes_near, START)),
        Rule(name="maxtext.increment_positive", keys=(INCREMENT,),
            when=lambda job: job.ramps and job.grows and job.increment_divides,
            holds=lambda job: job.global_size(INCREMENT) >= 1,
            message=lambda job: f"{product_text(job, INCREMENT)}, truncated to {job.global_size(INCREMENT)}, must be at least "
                "1: MaxText divides by zero, hangs, or keeps the first batch indefinitely", candidates=_increments_near),
        _over_mesh("rows_over_mesh", END),
        _over_mesh("first_rows_over_mesh", START),
        _over_mesh("increment_over_mesh", INCREMENT),
        Rule(name="maxtext.ramp_accumulation", keys=(ACCUMULATION, START, INCREMENT),
            when=lambda job: job.builds_ramp and job[ACCUMULATION] >= 2, holds=lambda job: (
                not any(job.global_size(key) % job[ACCUMULATION] for key in job.divided_keys) or not job.ramp_phases),
            message=lambda job: f"MaxText's ramp ignores {ACCUMULATION}={job[ACCUMULATION]}, but splits each batch into that "
                f"many parts: {product_text(job, START)} and {product_text(job, INCREMENT)} must be multiples of it",
            division=lambda job: (max(job.global_size(START), 1), 1)),
        Rule(name="maxtext.ramp_in_pipeline", keys=(RAMP, "ici_pipeline_parallelism"), when=lambda job: job.is_piped,
            holds=lambda job: not job.builds_ramp,
            message=lambda job: f"the pipeline is built for the final batch of {job.sizes.micro} samples only; the ramp's "
                f"first one of {job.global_size(START)} cannot be given that shape, and the first step fails",
            candidates=lambda job: (False,)),
        Rule(name="maxtext.eval_batch", keys=(EVAL, "eval_interval"), when=lambda job: job["eval_interval"] > 0,
            holds=lambda job: _eval_rule(job)[0], message=lambda job: _eval_rule(job)[1],
            candidates=lambda job: [0, job[END], *around(job[EVAL] or job[END], job.unit)]),
        Rule(name="maxtext.no_steps", keys=("steps",), holds=lambda job: job.total_steps >= 1,
            message=lambda job: f"the run has steps={job['steps']} "
                f"(learning_rate_schedule_steps={job['learning_rate_schedule_steps']})"),
    ]),
]  # fmt: skip
DIALECT = Dialect(
    job=MaxTextJob,
    rules=RULES,
    meanings=_meanings,
    notes=_notes,
    reader=read_chain,
    launch=LAUNCH,
    devices="num_devices",
    by_device=(END, START, INCREMENT),
    by_pass=(ACCUMULATION,),
)
