"""Tunix: GRPO by its command line (YAML and `key=value`) and in notebooks, whose
constants are read and never executed.

All sizes, also micro batches, count prompts of the whole job; a pass has the responses
of its prompts. Sources: Tunix `common/configs.py`, `rl/rl_learner.py`,
`cli/base_rl_pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located
from rampup.contrib.check.base_files import BaseFiles, find_in_repository
from rampup.contrib.check.known import Unread, load_table
from rampup.contrib.check.launch import Launch, Reading, load_launch
from rampup.contrib.check.notebook import Call, read_program
from rampup.contrib.check.reading import Source, read_source
from rampup.contrib.check.rollout import RolloutJob, group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings, type_settings
from rampup.contrib.check.shell.values import mark, unknown_names
from rampup.contrib.check.verdict import Term, format_count, times
from rampup.errors import ConfigError

BATCH = "batch_size"
MINI = "rl_training_config.mini_batch_size"
TRAIN = "rl_training_config.train_micro_batch_size"
ROLLOUT = "rl_training_config.rollout_micro_batch_size"
LOGPS = "rl_training_config.compute_logps_micro_batch_size"
ACCUMULATION = "rl_training_config.gradient_accumulation_steps"
MAX_STEPS = "rl_training_config.max_steps"
GENERATIONS = "grpo_config.num_generations"
ITERATIONS = "grpo_config.num_iterations"
MESH = "actor_model_config.mesh.shape"
OVERRIDE = "override_config_file"

# The keys that names stand for: those of constants, and of the arguments of the classes
# of Tunix. An argument of another call, or an attribute, with the name of a size of GRPO
# counts as well.
_NAMES: dict[str, dict[str, Any]] = load_table("tunix", "names")
MESHES: dict[str, str] = _NAMES["meshes"]
_OF_GRPO: dict[str, str] = _NAMES["of_grpo"]
_CLASSES: dict[str, dict[str, str]] = _NAMES["classes"]
# The sizes of sections by the names that they have there.
_AT_HOME = _OF_GRPO | _CLASSES["RLTrainingConfig"]


def read_python(path: str, overrides: Sequence[str]) -> dict[str, Located]:
    """Return the keys that the constants of a notebook or a program stand for. What it
    gives to calls counts more than a constant of the same name.
    """
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    devices = given.get("num_devices", "")  # what is no number is refused later
    program = read_program(
        Path(path), devices=int(devices) if devices.isdecimal() else None
    )
    calls = [*program.calls()]
    known = _NAMES["constants"]
    constants = [
        (known[name.lower()], place)
        for name, place in program.constants()
        if name.lower() in known and (name.isupper() or name.islower())
    ]
    # The first data set is that to train on.
    data_sets = [call.arguments for call in calls if call.name == "batch"]
    constants += [
        (BATCH, first) for first in [d.get("0") for d in data_sets][:1] if first
    ]
    named = _agreed(constants) | _agreed(row for call in calls for row in _given(call))
    if TRAIN in named:  # a pasted constant
        named.setdefault(MINI, named.get(BATCH, named[TRAIN]))
    # Without a mesh, a note says that its chips are not known.
    shape = named.pop(MESH, None)
    if shape is not None and isinstance(shape.value, tuple):
        # Perhaps with the names of its axes.
        named[MESH] = dataclasses.replace(shape, value=str(shape.value))
    return named


def _given(call: Call) -> Iterator[tuple[str, Located]]:
    """Yield the keys that the arguments of a call stand for; all of a class that is
    given others by place or by `**` are open.
    """
    given = call.arguments
    if call.name == "make_mesh" and "0" in given:
        yield MESH, given["0"]
    others = given.get("**", given.get("0"))
    if call.name in _CLASSES and others is not None:
        others = dataclasses.replace(others, value=mark(f"${{{call.name}(...)}}"))
    else:
        others = None
    for name, key in _CLASSES.get(call.name, _OF_GRPO).items():
        place = given.get(name, others)
        if place is not None and place.value is not None:
            yield key, place


def _agreed(rows: Iterable[tuple[str, Located]]) -> dict[str, Located]:
    """Return the value of each key; that of a key with several is open."""
    found: dict[str, Located] = {}
    for key, place in rows:
        if found.setdefault(key, place).value != place.value:
            several = mark(f"${{{key.rpartition('.')[2]}}}")
            found[key] = dataclasses.replace(place, value=several)
    return found


LAUNCH = load_launch(
    "tunix",
    unread={
        OVERRIDE: Unread("names a file of settings", asks=False),
        "actor_model_config.same_mesh_as": Unread("shares a mesh", asks=False),
    },
    python=read_python,
)


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a YAML file, a notebook, or a script or command with the files that it
    names: first the base file, above it `override_config_file`, and above both the
    command.
    """
    reading = read_source(source, overrides, launch)
    bases = BaseFiles(launch, reading)
    read: list[str] = []  # the files that a command names and that are there
    for word in () if reading.command is None else reading.command.words:
        name = word.rpartition("=")[2]
        if unknown_names(name) or not name.endswith((".yaml", ".yml")):
            continue
        if bases.add(name, find_in_repository(reading.path, name), reading.path):
            read.append(name)
    # What YAML merges into a model Tunix inherits from `model_config`.
    reading.leaves = {
        name: place
        for name, place in {**bases.beside, **reading.leaves}.items()
        if ".<<." not in name and not (name == OVERRIDE and str(place.value) in read)
    }
    reading.notes += [
        f"{name} is read below the command." for name in dict.fromkeys(read)
    ]
    reading.questions += _questions(reading)
    settings = type_settings(reading, launch)
    if settings[BATCH] is None and settings[MINI] is None:
        raise _no_batch(reading.path)
    return settings


def _no_batch(path: str) -> ConfigError:
    return ConfigError(
        "unknown: this does not say how many prompts a training step has",
        fix=f"add {BATCH}=..., the size of the batches of the data set",
        key=BATCH,
        path=path,
    )


def _questions(reading: Reading) -> Iterator[ConfigError]:
    """Yield what must be answered before the sizes are known."""
    path, overrides = reading.path, reading.overrides
    given = {text.partition("=")[0] for text in overrides} | reading.leaves.keys()
    is_python = path.endswith((".py", ".ipynb"))
    for name in sorted(given & _AT_HOME.keys()):
        yield ConfigError(
            f"{name} is not of any section, so Tunix has no such setting",
            fix=f"give it as {_AT_HOME[name]}",
            key=name,
            path=path,
        )
    override = reading.leaves.get(OVERRIDE)
    if override is not None and override.value and f"{OVERRIDE}=null" not in overrides:
        yield ConfigError(
            f"unknown: {OVERRIDE}={override.value} is not here, and may set sizes",
            fix=f"put it beside the script, or give its sizes and {OVERRIDE}=null",
            key=OVERRIDE,
            path=path,
        )
    if BATCH not in given and not (is_python and MINI in given):
        yield _no_batch(path)
    # Tunix's own base file has a section of PPO too, beside that of GRPO.
    has_ppo = "ppo_config" in {name.partition(".")[0] for name in given}
    may_differ = is_python or (has_ppo and reading.command is None)
    if may_differ and GENERATIONS not in given:
        yield ConfigError(
            f"unknown: this does not set {GENERATIONS}, and may not train with GRPO",
            fix=f"if it does, add {GENERATIONS}=...; the rules of Tunix do not cover"
            " PPO, fine-tuning and distillation",
            key=GENERATIONS,
            path=path,
        )


class PromptJob(RolloutJob):
    """The numbers of a run of Tunix, by whatever program: all sizes count prompts."""

    micro: int  # sequences of a pass, of the whole job
    pass_prompts: int
    rollout_micro: int  # prompts of a generate call

    def count(self, mini: int, micro: int, iterations: int) -> None:
        """Count the updates of a step and the passes of an update."""
        self.train("policy", mini, 1, iterations)
        self.passes, self.pass_prompts = mini // micro, micro
        self.micro = micro * self.samples_per_prompt

    def shares(self) -> str:
        """Return how passes divide an update; no size counts replicas."""
        return times(self.passes_text, self.micro)

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived = super().derived()
        del derived["data_parallel_size"], derived["padded_samples"]
        return derived | {
            "microbatch_samples": [self.micro],
            "generation_calls": self.prompts // self.rollout_micro,
            "samples_per_generation_call": self.rollout_micro * self.samples_per_prompt,
        }

    def meanings(self, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the meanings of the keys of a step's prompts, their responses, a pass,
        a generate call, and the passes over the samples.
        """
        batch, responses, train, rollout, iterations = keys

        def prompts(number: int) -> str:
            samples = format_count(number * self.samples_per_prompt, "sample")
            return f"{format_count(number, 'prompt')} = {samples}"

        yield batch, f"{prompts(self.prompts)} per training step, the whole job"
        yield (
            responses,
            f"{format_count(self.samples_per_prompt, 'response')} per prompt",
        )
        passes = f"{self.passes_text} per optimizer step"
        yield train, f"{prompts(self.pass_prompts)} per backward pass; {passes}"
        calls = format_count(self.prompts // self.rollout_micro, "call")
        yield (
            rollout,
            f"{prompts(self.rollout_micro)} per generate call; {calls} per step",
        )
        yield (
            iterations,
            f"{format_count(self.updates(self.policy), 'optimizer step')} of"
            f" {prompts(self.policy.mini_batch)} per step",
        )

    def sharding_note(self, fsdp: int) -> Iterator[str]:
        """Yield that the sequences of a pass do not divide over the axis that they are
        sharded over, if so (`rl/utils.py`).
        """
        if self.micro % fsdp:
            yield (
                f"the {format_count(self.micro, 'sequence')} of a pass do not divide"
                f" over fsdp={fsdp:,}: every device silently gets all of them, and"
                f" {fsdp:,} times the work is done."
            )


def _sizes(text: str | None) -> list[int]:
    """Return the sizes of a mesh such as `(2, 4)`."""
    sizes = [int(number) for number in re.findall(r"\b\d+\b", text or "")]
    if 0 in sizes:
        raise ConfigError(f"the mesh {text} must have sizes of at least 1")
    return sizes


class TunixJob(PromptJob):
    """A Tunix file's numbers."""

    system = "tunix"
    version = "Tunix of August 2026 (c7d8950f)"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # Tunix's own notebooks batch the data set by the size of an update.
        self.prompts: int = self[BATCH] or self[MINI]
        self.samples_per_prompt: int = self[GENERATIONS]
        self.mini: int = self[MINI] or self.prompts
        train: int = self[TRAIN] or self.mini
        self.rollout_micro: int = self[ROLLOUT] or train
        self.logps: int = self[LOGPS] or train
        self._read_meshes()
        self.count(self.mini, train, self[ITERATIONS])
        # Steps of the run; None if the size of the data set is unknown.
        batches = [self["num_batches"]] if self["num_batches"] else []
        if self["num_prompts"] is not None:
            batches.append(self["num_prompts"] // self.prompts)
        if batches:
            fraction = self["train_fraction"]
            fraction = fraction if 0 < fraction < 1 else 1
            self.training_steps = (
                int(min(batches) * fraction) * self["num_train_epochs"]
            )

    def _read_meshes(self) -> None:
        """Find the chips of each mesh. A model without one has that of `model_config`,
        and with null, the actor's; each mesh of its own takes chips of its own
        (`BasePipeline.create_role_to_mesh`).
        """
        shared = self["model_config.mesh.shape"]
        self.meshes = {
            role: _sizes(self[f"{mesh}.shape"] or shared)
            for role, mesh in MESHES.items()
            if role == "actor" or mesh not in self.settings.others
        }
        names = self["actor_model_config.mesh.axis_names"]
        names = names or self["model_config.mesh.axis_names"]
        # A notebook has them beside the sizes.
        names = names or self[MESH] or ""
        axes = re.findall(r"[A-Za-z_]\w*", names) or ("fsdp", "tp")
        sizes = zip(axes, self.meshes["actor"], strict=False)
        self.fsdp: int = dict(sizes).get("fsdp", 1)
        self.chips = sum(math.prod(shape) for shape in self.meshes.values() if shape)
        self.num_devices = self["num_devices"] or self.chips

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived = super().derived()
        if self.chips:
            derived |= {"data_parallel_size": self.fsdp, "devices_used": self.chips}
        if self[MAX_STEPS] and self.training_steps is not None:
            steps = derived["total_optimizer_steps"]
            derived["total_optimizer_steps"] = min(steps, self[MAX_STEPS])
        return derived


def _meanings(job: TunixJob) -> Iterator[tuple[str, str]]:
    yield from job.meanings((BATCH, GENERATIONS, TRAIN, ROLLOUT, ITERATIONS))
    for role, shape in job.meshes.items():
        if shape:
            yield f"{MESHES[role]}.shape", format_count(math.prod(shape), "chip")


def _notes(job: TunixJob) -> Iterator[str]:
    if job[BATCH] is None:
        yield (
            f"the batches of the data set are not read, and taken as the {job.prompts:,}"
            f" prompts of an update; {BATCH}=N gives them."
        )
    devices = job["num_devices"]
    if not job.chips:
        more = "num_devices=N, or " if devices is None else ""
        yield f"the chips of the mesh are not known; give {more}{MESH}='(1, 4)'."
    elif devices is None:
        yield (
            f"the meshes take {format_count(job.chips, 'chip')}; give num_devices=N to"
            " see how many stay idle."
        )
    elif job.chips < devices:
        yield (
            f"the meshes take {job.chips:,} of {devices:,} chips:"
            f" {devices - job.chips:,} stay idle."
        )
    own = [role for role, shape in job.meshes.items() if shape]
    if len(own) > 1:
        yield (
            f"the {' and the '.join(own)} have chips of their own; a mesh of null"
            " with same_mesh_as: actor shares those of the actor."
        )
    if job.chips:
        yield from job.sharding_note(job.fsdp)
    if job[MAX_STEPS] and job.training_steps is not None:
        steps = job.training_steps * job.updates(job.policy)
        if job[MAX_STEPS] < steps:
            yield f"{MAX_STEPS}={job[MAX_STEPS]:,} ends the run before its {steps:,} steps."
        elif job[MAX_STEPS] > steps:
            yield (
                f"the data set gives {steps:,} optimizer steps, fewer than"
                f" {MAX_STEPS}={job[MAX_STEPS]:,}: the learning rate does not reach its"
                " end, and Tunix's command line refuses it."
            )
    yield group_note(job.samples_per_prompt)
    yield "all sizes count prompts of the whole job, micro batches too, and none per chip."


def _rules(job: TunixJob) -> Iterator[Ruling]:
    """Yield what Tunix's configuration and its learner ask."""
    if job[ACCUMULATION] is not None:
        yield job.broken(
            "no_accumulation",
            [ACCUMULATION],
            f"{ACCUMULATION}={job[ACCUMULATION]} must be null: Tunix derives it from the"
            " mini batch and the train micro batch",
            candidates=[None],
        )
    if job[TRAIN] is not None and job[MINI] is None:
        yield job.broken(
            "micro_needs_mini",
            (MINI, TRAIN),
            f"{MINI} must be set if {TRAIN}={job[TRAIN]} is",
            candidates=[job.prompts],
        )
    elif job[TRAIN] is not None:
        yield job.multiple("micro_divides_mini", (TRAIN, MINI), MINI, TRAIN)
    batch = Term(f"{BATCH}={job.prompts:,}", job.prompts)
    for key, size, what in (
        (MINI, job.mini, "an update"),
        (ROLLOUT, job.rollout_micro, "a generate call"),
        (LOGPS, job.logps, "a log-probability pass"),
    ):
        yield job.multiple(
            f"{key.rpartition('.')[2]}_divides_batch",
            (key, BATCH),
            batch,
            Term(f"{key}={size:,}", size),
            f" (prompts of {what}; both count prompts)",
            found_by="run",
        )
    if job["num_devices"] is not None:
        chips = Term(f"the {job.chips:,} chips of the meshes", job.chips)
        key = "num_devices"
        yield job.at_least("meshes_fit", [key], key, chips, found_by="run")


DIALECT = Dialect(
    job=TunixJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
    devices="num_devices",
)
