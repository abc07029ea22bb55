"""trlX: keys, numbers and rules, those of its check and those that only the run finds,
with Accelerate.

Sizes count samples of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rampup.config.yaml import Located
from rampup.contrib.check.base_files import Version, read_hydra
from rampup.contrib.check.launch import (
    Launch,
    Reading,
    load_entries,
    option,
    program_of,
)
from rampup.contrib.check.reading import Source, flatten
from rampup.contrib.check.rollout import RolloutJob, TrainedModel, group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.verdict import Term, counted, times
from rampup.contrib.rl.plan import RolloutPlan
from rampup.errors import ConfigError

TRAIN, MICRO = "train.batch_size", "train.minibatch_size"
ROLLOUTS = "method.num_rollouts"
CHUNK = "method.chunk_size"
INNER = "method.ppo_epochs"
EPOCHS, STEPS = "train.epochs", "train.total_steps"
KEYS = load_entries("trlx")
_OTHERS = ("nemo", "rft", "ilql", "sft")  # methods without rules


def read_words(command: Command) -> dict[str, Located]:
    """Return the keys of the JSON argument of a trlX script, and Accelerate's
    processes.
    """
    located: dict[str, Located] = {}
    for word in command.words:
        if word.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                located |= {
                    name: command.locate(value)
                    for name, value in flatten(json.loads(word))
                }
    processes = option(command, "--num_processes", "--num-processes")
    if processes is not None:
        value = int(processes) if processes.isdigit() else processes
        located["num_processes"] = command.locate(value)
    return located


LAUNCH = Launch(
    system="trlX",
    program=re.compile(r"accelerate launch|trlx|\b(?:ppo|ilql|sft)_\w+\.py"),
    others=re.compile(r"\b(?:ilql|sft|rft|nemo)_\w+\.py"),
    example=(
        'accelerate launch --num_processes 8 ppo_sentiments.py \'{"train.batch_size":'
        " 32}'"
    ),
    entries=KEYS,
    groups=("model", "optimizer", "scheduler", "tokenizer"),
    read=read_words,
)
MAX_LISTED = 10_000


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source; a program has a configuration of its own, of which a command sets
    a part.
    """

    def choose(reading: Reading, _: Mapping[str, Located]) -> Version:
        program = "" if reading.command is None else program_of(reading.command)
        names = {setting.partition("=")[0] for setting in reading.overrides}
        unset = [key for key in (TRAIN, ROLLOUTS, CHUNK) if key not in names]
        unset = [key for key in unset if key not in reading.leaves]
        note = (
            f"{program}.py may set {', '.join(unset)} itself; it is not read, and"
            " trlX's ready-made sizes are taken."
        )
        return Version(notes=[note] if program and unset else [])

    return read_hydra(source, overrides, launch, choose)


class TrlxJob(RolloutJob):
    """A trlX file's numbers, by its own formulas
    (trainer/accelerate_base_trainer.py). Sizes are those of one process.
    """

    system = "trlx"
    version = "trlX of January 2024 (3340c2f), its last"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        text = (self["method.name"] + self["train.trainer"]).lower()
        is_megatron = any("megatron_cfg" in name for name in settings.others)
        if is_megatron or any(name in text for name in _OTHERS):
            raise ConfigError(
                f"train.trainer={self['train.trainer']},"
                f" method.name={self['method.name']}: the rules of trlX cover PPO with"
                " Accelerate",
                key="train.trainer",
            )
        self.batch: int = self[TRAIN]
        self.micro_given: int = self[MICRO] or 0
        self.micro = self.micro_given or self.batch
        self.replicas: int = self["num_processes"]
        self.usable = all(rule.holds for rule in _counts(self))
        if not self.usable:
            return
        self.passes: int = self.batch // self.micro  # those of an optimizer step
        self.global_batch = self.batch * self.replicas
        self._collect()

    def _collect(self) -> None:
        """Count what PPO collects before it trains: whole chunks until there are enough
        samples. A single process meets a short chunk at the end of each pass over the
        prompts. With several, Accelerate completes it from the beginning.
        """
        self.chunk: int = self[CHUNK]
        self.one_pass: int = self[ROLLOUTS] + self.chunk
        if self.replicas == 1 and self["num_prompts"] is not None:
            self.one_pass = self["num_prompts"]
        rounds, rest = divmod(self[ROLLOUTS] - 1, self.one_pass)
        last = -(-(rest + 1) // self.chunk)
        self.num_chunks = rounds * -(-self.one_pass // self.chunk) + last
        collected = rounds * self.one_pass + min(last * self.chunk, self.one_pass)
        self.collected = collected
        self.prompts = self.collected * self.replicas
        self.samples_per_prompt = 1
        self.train(
            "policy",
            self.global_batch,
            self.replicas,
            micro=self.micro,
            epochs=self[INNER],
        )
        self.mini_batches: int = -(-self.collected // self.batch)
        self.last_batch = self.collected - (self.mini_batches - 1) * self.batch
        steps = self[EPOCHS] * self.mini_batches * self[INNER]
        self.planned_steps: int = min(steps, self[STEPS])
        # The first optimizer step is short if fewer samples than a batch are collected.
        self.first_passes = -(-min(self.batch, self.collected) // self.micro)

    def num_mini_batches(self, _: TrainedModel) -> int:
        """Return the updates of a pass over a round's samples; the last one may be
        short.
        """
        return self.mini_batches

    def summary(self) -> str:
        """Return the numbers of a round, or of an optimizer step, in one line."""
        processes = counted(self.replicas, "process")
        step = times(processes, counted(self.passes, "pass"), self.micro)
        samples = counted(self.samples, "sample")
        updates = counted(self.updates(self.policy), "optimizer step")
        return (
            f"{times(processes, self.collected)} = {samples}; {updates} of"
            f" {self.global_batch:,}; {step}"
        )

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        evaluated = self["num_prompts"] or self.global_batch
        derived: dict[str, Any] = {
            "data_parallel_size": self.replicas,
            "micro_batch_samples_per_process": self.micro,
            "accumulation_steps": self.passes,
            "mini_batch_samples": self.global_batch,
            "rollouts_per_process": self.collected,
            "samples_per_step": self.samples,
            "num_chunks": self.num_chunks,
            "mini_batches": self.mini_batches,
            "optimizer_steps": self.updates(self.policy),
            "total_optimizer_steps": self.planned_steps,
            # Without evaluation prompts of its own, trlX takes a global batch of the
            # training prompts.
            "eval_prompts": min(self.global_batch, evaluated),
        }
        if self.num_chunks <= MAX_LISTED:
            # The prompts of each generate call, in order.
            left = min(self.one_pass, self.collected)
            calls = _split(left, self.chunk, self.num_chunks)
            repeated = itertools.islice(itertools.cycle(calls), self.num_chunks)
            derived["chunks"] = list(repeated)
        if self.passes <= MAX_LISTED:
            passes = _split(self.last_batch, self.micro, self.passes)
            derived["last_mini_batch_microbatches"] = passes
        return derived

    def plan(self) -> RolloutPlan | None:
        """Return the plan of one round of collecting and training."""
        if self.planned_steps < 1:
            return None
        return self.rollout_plan("samples", pad=self.last_batch < self.batch)


def _split(total: int, size: int, most: int) -> list[int]:
    """Return up to `most` parts of a size; the last may be smaller."""
    full, rest = divmod(total, size)
    parts = [size] * min(full, most)
    return [*parts, rest] if rest else parts


def _meanings(job: TrlxJob) -> Iterator[tuple[str, str]]:
    size = counted(job.global_batch, "sample")
    yield f"{TRAIN} = {job.batch:,}", f"samples per process: {size} per optimizer step"
    passes = f"{counted(job.passes, 'pass')} of {counted(job.micro, 'sample')}"
    yield MICRO, f"{passes} per process and optimizer step"
    over = job.collected - job[ROLLOUTS]
    more = f", {over:,} more than requested" if over else ""
    collected = f"{counted(job.collected, 'sample')} are collected{more}"
    yield ROLLOUTS, f"at least this many per process: {collected}"
    calls = counted(job.num_chunks, "generate call")
    yield CHUNK, f"{calls} of {counted(job.chunk, 'prompt')} per process"
    batches = counted(job.mini_batches, "mini batch")
    steps = counted(job.updates(job.policy), "optimizer step")
    yield INNER, f"{batches} per pass over the samples, {steps} per round"
    planned = counted(job.planned_steps, "optimizer step")
    yield "train.epochs, train.total_steps", f"{planned} in the whole run"


def _notes(job: TrlxJob) -> Iterator[str]:
    if job.passes > 1:
        steps = (
            f"{job.passes:,} optimizer steps of {job.micro * job.replicas:,} samples"
        )
        ends = "each pass ends" if job["deepspeed"] else "each pass would end"
        yield (
            f"gradients are summed over the {job.passes:,} passes, not averaged:"
            f" {job.passes:,} times those of one pass. Adam hides it; gradient"
            " clipping, epsilon and plain SGD do not."
        )
        yield f"under DeepSpeed {ends} in an optimizer step: {steps} instead of one."
    if job.last_batch < job.batch:
        size = f"{job.last_batch:,} of {job.batch:,} samples"
        yield f"the last mini batch of each pass has {size} and the weight of others."
    if job["num_prompts"] is None:
        yield (
            "the size of the prompt set is unknown (give num_prompts=N): every chunk is"
            " assumed to be full."
        )
    elif job.replicas == 1 and job["num_prompts"] % job[CHUNK]:
        yield (
            f"every pass over the {job['num_prompts']:,} prompts ends with a short"
            " chunk, so later rounds may collect a different number of samples than the"
            " first, from which trlX computes the planned steps."
        )
    yield group_note(1)
    yield f"{TRAIN}, {MICRO}, {ROLLOUTS} and {CHUNK} are per process."


def _counts(job: TrlxJob) -> Iterator[Ruling]:
    """Yield the rules without which there are no numbers."""
    yield from job.positive([TRAIN], "the trainer divides by it")
    why = "nothing would be collected or trained"
    yield from job.positive([ROLLOUTS, CHUNK, INNER], why, found_by="run")
    why = "there would be nothing to train"
    yield from job.positive(["num_processes", "num_prompts"], why, found_by="run")
    if job.micro_given < 0:
        said = (
            f"{MICRO}={job.micro_given:,} must not be negative: no pass would be made"
        )
        yield job.broken(
            "micro_not_negative", [MICRO], said, candidates=[0], found_by="run"
        )


def _rules(job: TrlxJob) -> Iterator[Ruling]:
    """Yield what trlX's check and its run ask."""
    yield from _counts(job)
    if not job.usable:
        return
    batch = Term(f"{TRAIN}={job.batch:,}", job.batch)
    micro = Term(f"{MICRO}={job.micro:,}", job.micro)
    yield job.multiple("micro_divides_batch", (MICRO, TRAIN), batch, micro)
    # The first optimizer step must not exceed the limit.
    is_short = 0 < job.first_passes < job.passes
    if job[STEPS] < (0 if is_short else 1):
        yield job.broken(
            "total_steps_reached",
            [STEPS],
            f"{STEPS}={job[STEPS]:,} must be at least 1: the first optimizer step"
            " already exceeds it, and trlX stops in the middle of that step",
            found_by="run",
        )
    yield job.at_least(
        *("epochs_train", [EPOCHS], EPOCHS, 1, ": nothing would be trained"),
        found_by="run",
    )


DIALECT = Dialect(
    job=TrlxJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
)
