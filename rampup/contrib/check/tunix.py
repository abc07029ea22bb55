"""Tunix: GRPO by its command line (YAML and `key=value`) and in notebooks, whose
constants are read and never executed.

All sizes, also micro batches, count prompts of the whole job; a pass has the responses
of its prompts. Sources: Tunix `common/configs.py`, `rl/rl_learner.py`,
`rl/agentic/agentic_rl_learner.py`, `cli/base_rl_pipeline.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.base_files import repository_folders
from rampup.contrib.check.known import Unread
from rampup.contrib.check.launch import Launch, load_entries
from rampup.contrib.check.notebook import read_constants
from rampup.contrib.check.reading import Source, read_leaves, read_source
from rampup.contrib.check.rollout import RolloutJob, group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings, type_settings
from rampup.contrib.check.verdict import Term, counted, times
from rampup.errors import ConfigError

TRAINING = "rl_training_config."
BATCH = "batch_size"
MINI, TRAIN, ROLLOUT, LOGPS = (
    f"{TRAINING}{name}_batch_size"
    for name in ("mini", "train_micro", "rollout_micro", "compute_logps_micro")
)
ACCUMULATION = f"{TRAINING}gradient_accumulation_steps"
MAX_STEPS = f"{TRAINING}max_steps"
GENERATIONS, ITERATIONS = (
    f"grpo_config.num_{what}" for what in ("generations", "iterations")
)
MODE = "training_mode"
ROLES = ("actor", "reference", "rollout")
MESHES = {role: f"{role}_model_config.mesh" for role in ROLES}
MODEL_MESH = "model_config.mesh"
OVERRIDE = "override_config_file"
PROMPTS = "num_prompts"

KEYS = load_entries("tunix")
# The names of notebooks: those of constants, of keys of a dictionary, and of arguments.
_NAMES = {
    **{key.rpartition(".")[2]: key for key in (MINI, TRAIN, ROLLOUT, LOGPS, MAX_STEPS)},
    **{name: name for name in (BATCH, "num_batches", "num_train_epochs")},
    "num_generations": GENERATIONS,
    "num_iterations": ITERATIONS,
    "num_epochs": "num_train_epochs",
    "train_fraction": "train_fraction",
    "mesh": f"{MESHES['actor']}.shape",
    "mesh_shape": f"{MESHES['actor']}.shape",
}
# The sizes that tell a program that trains with GRPO from one that does not.
_OF_GRPO = {GENERATIONS, ITERATIONS, MINI, TRAIN, ROLLOUT, LOGPS}
# The calls whose arguments are sizes, and one that a constant of its name is not.
_ARGUMENTS = {**_NAMES, "gradient_accumulation_steps": ACCUMULATION}
_CALLS = ("RLTrainingConfig", "GRPOConfig", "GrpoConfig")


def read_python(path: str, overrides: Sequence[str]) -> dict[str, Located]:
    """Return the keys that the constants of a notebook or a program stand for. What it
    gives to Tunix's classes counts more than a constant of the same name.
    """
    sizes = [text.partition("=") for text in overrides]
    devices = [int(value) for name, _, value in sizes if name == "num_devices"]
    found = read_constants(Path(path), devices=devices[-1] if devices else None)
    named = {
        _NAMES[name.lower()]: place
        for name, place in found.constants.items()
        if name.lower() in _NAMES
    }
    for call, name, place in found.arguments:
        if place.value is None:
            continue
        if call in _CALLS and name in _ARGUMENTS:
            named[_ARGUMENTS[name]] = place
        elif call == "make_mesh" and name in ("0", "axis_shapes"):
            named[_NAMES["mesh"]] = place
        elif call == "batch" and BATCH not in named:
            named[BATCH] = place  # the first data set is the one to train on
    if TRAIN in named:  # a pasted constant
        named.setdefault(MINI, named.get(BATCH, named[TRAIN]))
    shape = named.get(_NAMES["mesh"])
    if shape is not None and isinstance(shape.value, tuple):
        value = shape.value
        if value and isinstance(value[0], tuple):  # with the names of its axes
            value, names = value
            named[f"{MESHES['actor']}.axis_names"] = replace(shape, value=str(names))
        named[_NAMES["mesh"]] = replace(shape, value=str(value))
    return named


LAUNCH = Launch(
    system="Tunix",
    program=re.compile(r"\btunix[\w./]*(?:grpo|rl)\w*main|\bgrpo_main\b"),
    others=re.compile(r"\b(?:peft|ppo|sft|dpo)_main\b"),
    example="python3 -m tunix.cli.grpo_main base_config.yaml key=value",
    entries=KEYS,
    groups=(
        *(
            "model_config",
            "critic_model_config",
            "tokenizer_config",
            "rl_training_config",
        ),
        *("rollout_config", "optimizer_config", "training_config", "grpo_config"),
        *("agentic_grpo_config", "vllm_config", "sglang_jax_config", "data_config"),
    ),
    unread={
        OVERRIDE: Unread("names a file of settings", asks=False),
        "actor_model_config.same_mesh_as": Unread("shares a mesh", asks=False),
    },
    python=read_python,
)


_NOTHING = Located(value=None, path="")


def _effective(leaves: dict[str, Located]) -> dict[str, Located]:
    """Return the keys with those of the learner that runs, which has a section of its
    own if it is agentic. What YAML merges into a model is left out: Tunix inherits the
    same from `model_config`.
    """
    mode = str(leaves[MODE].value) if MODE in leaves else "grpo"
    found = {name: place for name, place in leaves.items() if ".<<." not in name}
    if mode.startswith("agentic"):
        agentic = "agentic_grpo_config."
        own = {name: place for name, place in found.items() if name.startswith(agentic)}
        found |= {name.removeprefix("agentic_"): place for name, place in own.items()}
    return found


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a YAML file, a notebook, or a script or command with the files that it
    names: first the base file, above it `override_config_file`, and above both the
    command.
    """
    reading = read_source(source, overrides, launch)
    own, notes = dict(reading.leaves), [*reading.notes]
    leaves: dict[str, Located] = {}
    for word in () if reading.command is None else reading.command.words:
        name = word.rpartition("=")[2]
        here = [folder / name for folder in repository_folders(reading.path)]
        file = next((path for path in here if path.is_file()), None)
        if name.endswith((".yaml", ".yml")) and file is not None:
            leaves |= read_leaves(read_text(file), str(file))[0]
            notes.append(f"{name} is read below the command.")
            own |= {OVERRIDE: _NOTHING}
    leaves = _effective(leaves | own)
    given = {text.partition("=")[0] for text in reading.overrides} | leaves.keys()
    is_python = reading.path.endswith((".py", ".ipynb"))

    def ask(key: str, said: str, fix: str) -> ConfigError:
        return ConfigError(f"unknown: {said}", fix=fix, key=key, path=reading.path)

    no_batch = ask(
        BATCH,
        "this does not say how many prompts a training step has",
        f"add {BATCH}=..., the size of the batches of the data set",
    )
    questions = []
    if leaves.get(OVERRIDE, _NOTHING).value and f"{OVERRIDE}=null" not in overrides:
        said = f"{OVERRIDE}={own[OVERRIDE].value} is not here, and may set sizes"
        fix = f"put it beside the script, or give its sizes and {OVERRIDE}=null"
        questions.append(ask(OVERRIDE, said, fix))
    if BATCH not in given and not (is_python and MINI in given):
        questions.append(no_batch)
    if is_python and not given & _OF_GRPO:
        said = "this sets no size of GRPO, and may not train with GRPO"
        fix = (
            f"if it does, add {GENERATIONS}=...; the rules of Tunix do not cover"
            " fine-tuning and distillation"
        )
        questions.append(ask(GENERATIONS, said, fix))
    reading = replace(
        reading, leaves=leaves, notes=tuple(notes), questions=tuple(questions)
    )
    settings = type_settings(reading, launch)
    if settings[BATCH] is None and settings[MINI] is None:
        raise no_batch
    return settings


class PromptJob(RolloutJob):
    """The numbers of a run of Tunix, by whatever program: all sizes count prompts."""

    micro: int  # prompts of a pass
    rollout_micro: int  # prompts of a generate call
    num_devices: int | None = None

    def count(self, mini: int, micro: int, iterations: int) -> None:
        """Count the updates of a step and the passes of an update."""
        self.train("policy", mini, 1, micro=None, epochs=iterations)
        self.micro, self.passes = micro, mini // micro
        self.pass_sequences = micro * self.samples_per_prompt

    def summary(self) -> str:
        """Return the numbers of a step in one line."""
        samples = times(counted(self.prompts, "prompt"), self.samples_per_prompt)
        updates = counted(self.updates(self.policy), "optimizer step")
        return (
            f"{samples} = {counted(self.samples, 'sample')}; {updates} of"
            f" {self.policy.mini_samples:,}; {times(self.passes_text, self.pass_sequences)}"
        )

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "samples_per_step": self.samples,
            "mini_batches": self.num_mini_batches(self.policy),
            "mini_batch_samples": self.policy.mini_samples,
            "optimizer_steps": self.updates(self.policy),
            "accumulation_steps": self.passes,
            "microbatch_samples": [self.pass_sequences],
            "generation_calls": self.prompts // self.rollout_micro,
            "samples_per_generation_call": self.rollout_micro * self.samples_per_prompt,
        }
        if self.training_steps is not None:
            derived["training_steps"] = self.training_steps
        return derived

    def prompts_text(self, number: int) -> str:
        """Return prompts with their samples."""
        samples = counted(number * self.samples_per_prompt, "sample")
        return f"{counted(number, 'prompt')} = {samples}"

    def micro_meanings(self, train: str, rollout: str) -> Iterator[tuple[str, str]]:
        """Yield the meanings of the two micro batches, whose sizes have these names."""
        micro = self.prompts_text(self.micro)
        yield train, f"{micro} per backward pass; {self.passes_text} per optimizer step"
        calls = counted(self.prompts // self.rollout_micro, "call")
        micro = self.prompts_text(self.rollout_micro)
        yield rollout, f"{micro} per generate call; {calls} per step"

    def sharding_note(self, fsdp: int) -> Iterator[str]:
        """Yield that the sequences of a pass do not divide over the axis that they are
        sharded over, if so (`rl/utils.py`).
        """
        if self.pass_sequences % fsdp:
            yield (
                f"the {counted(self.pass_sequences, 'sequence')} of a pass do not divide"
                f" over fsdp={fsdp:,}: every device silently gets all of them, and"
                f" {fsdp:,} times the work is done."
            )


def _sizes(text: str | None) -> list[int]:
    """Return the sizes of a mesh such as `(2, 4)`."""
    sizes = [int(number) for number in re.findall(r"\d+", text or "")]
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
        self.agentic = self[MODE].startswith("agentic")
        self.mini: int = self[MINI] or self.prompts
        self.micro: int = self[TRAIN] or self.mini
        self.rollout_micro: int = 1 if self.agentic else self[ROLLOUT] or self.micro
        self.logps: int = self[LOGPS] or (1 if self.agentic else self.micro)
        self._read_meshes()
        self.usable = all(rule.holds for rule in _counts(self))
        if not self.usable:
            return
        self.count(self.mini, self.micro, self[ITERATIONS])
        # Steps of the run; None if the size of the data set is unknown.
        batches = self["num_batches"] or None
        if self[PROMPTS] is not None:
            there = self[PROMPTS] // self.prompts
            batches = there if batches is None else min(batches, there)
        if batches is not None:
            fraction = self["train_fraction"]
            fraction = fraction if 0 < fraction < 1 else 1
            self.training_steps = int(batches * fraction) * self["num_train_epochs"]

    def _read_meshes(self) -> None:
        """Find the chips of each mesh. A model without one has that of `model_config`,
        and with null, the actor's; each mesh of its own takes chips of its own
        (`BasePipeline.create_role_to_mesh`).
        """
        shared = self[f"{MODEL_MESH}.shape"]
        shapes = {
            role: self[f"{mesh}.shape"] or shared for role, mesh in MESHES.items()
        }
        is_set = any(
            self[f"{mesh}.shape"] for role, mesh in MESHES.items() if role != "actor"
        )
        self.meshes = {"actor": _sizes(shapes["actor"])}
        for role in ROLES[1:]:
            is_null = MESHES[role] in self.settings.others
            if (is_set or shared) and shapes[role] and not is_null:
                self.meshes[role] = _sizes(shapes[role])
        names = (
            self[f"{MESHES['actor']}.axis_names"] or self[f"{MODEL_MESH}.axis_names"]
        )
        axes = re.findall(r"\w+", names or "fsdp tp")
        sizes = dict(zip(axes, self.meshes["actor"], strict=False))
        self.fsdp: int = sizes.get("fsdp", 1)
        self.chips = sum(math.prod(shape) for shape in self.meshes.values() if shape)

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived = super().derived()
        if self.chips:
            derived |= {"data_parallel_size": self.fsdp, "devices_used": self.chips}
        if self.training_steps is not None:
            steps = self.training_steps * derived["optimizer_steps"]
            most = self[MAX_STEPS] or steps
            derived["total_optimizer_steps"] = min(steps, most)
        return derived


def _meanings(job: TunixJob) -> Iterator[tuple[str, str]]:
    batch = f"batch = {job.prompts:,}"
    yield batch, f"{job.prompts_text(job.prompts)} per training step, the whole job"
    yield GENERATIONS, f"{counted(job.samples_per_prompt, 'response')} per prompt"
    updates = counted(job.updates(job.policy), "optimizer step")
    yield (
        f"mini batch = {job.mini:,}",
        f"{job.prompts_text(job.mini)} per update; {updates}",
    )
    train = f"train micro batch = {job.micro:,}"
    yield from job.micro_meanings(train, f"rollout micro batch = {job.rollout_micro:,}")
    for role, shape in job.meshes.items():
        if shape:
            chips = counted(math.prod(shape), "chip")
            yield f"mesh of the {role} = {tuple(shape)}", chips
    if job.training_steps is not None:
        total = job.derived()["total_optimizer_steps"]
        yield (
            f"{counted(job.training_steps, 'batch')} of the data set",
            f"{counted(total, 'optimizer step')} in the whole run",
        )


def _notes(job: TunixJob) -> Iterator[str]:
    if job[BATCH] is None:
        yield (
            f"the batches of the data set are not read, and taken as the {job.prompts:,}"
            f" prompts of an update; {BATCH}=N gives them."
        )
    devices = job["num_devices"]
    if not job.chips:
        yield (
            "the chips of the mesh are not known; give num_devices=N, or"
            f" {MESHES['actor']}.shape='(1, 4)'."
        )
    elif devices is None:
        yield (
            f"the meshes take {counted(job.chips, 'chip')}; give num_devices=N to see"
            " how many stay idle."
        )
    elif job.chips < devices:
        idle = devices - job.chips
        yield (
            f"the meshes take {job.chips:,} of {devices:,} chips: {idle:,} stay idle."
        )
    if len(job.meshes) > 1:
        yield (
            f"the {' and the '.join(job.meshes)} have chips of their own; a mesh of null"
            " with same_mesh_as: actor shares those of the actor."
        )
    if job.chips:
        yield from job.sharding_note(job.fsdp)
    if job.passes and job.passes > 1 and job.pass_sequences == job.samples_per_prompt:
        yield (
            f"each of the {job.passes:,} passes of an update has one prompt; a larger"
            " train_micro_batch_size does the same in fewer passes, if it fits."
        )
    if job.agentic:
        yield f"the agentic learner generates prompt by prompt, regardless of {ROLLOUT}."
    if job.training_steps is not None:
        steps = job.training_steps * job.updates(job.policy)
        if job[MAX_STEPS] and job[MAX_STEPS] < steps:
            yield f"{MAX_STEPS}={job[MAX_STEPS]:,} ends the run before its {steps:,} steps."
        elif job[MAX_STEPS] and job[MAX_STEPS] > steps:
            yield (
                f"the data set gives {steps:,} optimizer steps, fewer than"
                f" {MAX_STEPS}={job[MAX_STEPS]:,}: the learning rate does not reach its"
                " end, and Tunix's command line refuses it."
            )
    yield group_note(job.samples_per_prompt)
    yield "all sizes count prompts of the whole job, micro batches too, and none per chip."


def _counts(job: TunixJob) -> Iterator[Ruling]:
    """Yield the rules without which there are no numbers."""
    sizes = (MINI, TRAIN, ROLLOUT, LOGPS)
    yield from job.positive(sizes, "Tunix asks for a whole number")
    counts = (BATCH, ITERATIONS, "num_train_epochs", "num_devices", PROMPTS)
    yield from job.positive(counts, "nothing would be trained", found_by="run")
    yield job.at_least("responses_to_compare", [GENERATIONS], GENERATIONS, 2)
    if job[ACCUMULATION] is not None:
        yield job.broken(
            "no_accumulation",
            [ACCUMULATION],
            f"{ACCUMULATION}={job[ACCUMULATION]} must be null: Tunix derives it from the"
            " mini batch and the train micro batch",
            candidates=[None],
        )
    if job[TRAIN] is not None and job[MINI] is None:
        said = f"{MINI} must be set if {TRAIN}={job[TRAIN]} is"
        yield job.broken(
            "micro_needs_mini", (MINI, TRAIN), said, candidates=[job[BATCH]]
        )


def _rules(job: TunixJob) -> Iterator[Ruling]:
    """Yield what Tunix's configuration and its learner ask."""
    yield from _counts(job)
    if not job.usable:
        return
    if job[TRAIN] is not None:
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
    if job.agentic and job.logps not in (1, job.micro):
        yield job.broken(
            "agentic_log_probabilities",
            (LOGPS, TRAIN),
            f"{LOGPS}={job.logps:,} must equal the train micro batch of {job.micro:,} in"
            " the agentic learner, or be 1",
            candidates=[job.micro],
            found_by="run",
        )
    if job["num_devices"] is not None:
        chips = Term(f"the {job.chips:,} chips of the meshes", job.chips)
        keys = ["num_devices"]
        yield job.at_least("meshes_fit", keys, "num_devices", chips, found_by="run")


DIALECT = Dialect(
    job=TunixJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
    devices="num_devices",
)
