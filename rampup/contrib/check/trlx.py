"""trlX: keys, numbers and rules, those of its check and those that only the run finds,
with Accelerate.

Sizes count samples of one process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from rampup.config.yaml import Located
from rampup.contrib.check.launch import load_launch, parse_known
from rampup.contrib.check.launchers import option
from rampup.contrib.check.reading import flatten
from rampup.contrib.check.rollout import RolloutJob, TrainedModel, group_note
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.verdict import Term, format_count
from rampup.errors import ConfigError

TRAIN, MICRO = "train.batch_size", "train.minibatch_size"
ROLLOUTS = "method.num_rollouts"
CHUNK = "method.chunk_size"
INNER = "method.ppo_epochs"
EPOCHS, STEPS = "train.epochs", "train.total_steps"
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
    processes = option(command.words, "--num_processes", "--num-processes")
    if processes is not None:
        value = parse_known(processes, command.path)
        located["num_processes"] = command.locate(value)
    return located


LAUNCH = load_launch("trlx", read=read_words)


class TrlxJob(RolloutJob):
    """A trlX file's numbers, by its own formulas
    (trainer/accelerate_base_trainer.py). Sizes are those of one process.
    """

    system = "trlx"
    version = "trlX of January 2024 (3340c2f), its last"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        text = (self["method.name"] + self["train.trainer"]).lower()
        if any(name in text for name in _OTHERS):
            raise ConfigError(
                f"train.trainer={self['train.trainer']},"
                f" method.name={self['method.name']}: the rules of trlX cover PPO with"
                " Accelerate",
                key="train.trainer",
            )
        self.batch: int = self[TRAIN]
        self.micro: int = self[MICRO] or self.batch
        self.replicas: int = self["num_processes"]
        self.passes: int = self.batch // self.micro  # those of an optimizer step
        self.global_batch = self.batch * self.replicas
        self.chunks = self._collect()
        self.collected = sum(self.chunks)
        self.prompts = self.collected * self.replicas
        self.samples_per_prompt = 1
        self.train("policy", self.global_batch, self.replicas, self[INNER])
        self.mini_batches: int = -(-self.collected // self.batch)
        self.last_batch = self.collected - (self.mini_batches - 1) * self.batch
        steps = self[EPOCHS] * self.mini_batches * self[INNER]
        self.planned_steps: int = min(steps, self[STEPS])

    def _collect(self) -> list[int]:
        """Return the prompts of each generate call before PPO trains: whole chunks until
        there are enough samples. With several processes, Accelerate completes a short
        chunk at the end of the prompts from their beginning.
        """
        chunk, prompts = self[CHUNK], self["num_prompts"]
        chunks = [chunk] * -(-self[ROLLOUTS] // chunk)
        if self.replicas == 1 and prompts is not None and prompts < sum(chunks):
            raise ConfigError(
                f"a round collects {sum(chunks):,} samples of {prompts:,} prompts: a"
                " single process meets a short chunk at their end, which the rules of"
                " trlX do not follow",
                fix=f"give a smaller {ROLLOUTS} or {CHUNK}",
                key="num_prompts",
            )
        return chunks

    def num_mini_batches(self, _: TrainedModel) -> int:
        """Return the updates of a pass over a round's samples; the last one may be
        short.
        """
        return self.mini_batches

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        evaluated = self["num_prompts"] or self.global_batch
        full, rest = divmod(self.last_batch, self.micro)
        return super().derived() | {
            "micro_batch_samples_per_process": self.micro,
            "rollouts_per_process": self.collected,
            "chunks": self.chunks,
            "total_optimizer_steps": self.planned_steps,
            # Without evaluation prompts of its own, trlX takes a global batch of the
            # training prompts.
            "eval_prompts": min(self.global_batch, evaluated),
            "last_mini_batch_microbatches": [self.micro] * full
            + ([rest] if rest else []),
        }


def _meanings(job: TrlxJob) -> Iterator[tuple[str, str]]:
    yield (
        TRAIN,
        f"samples per process: {format_count(job.global_batch, 'sample')} per optimizer"
        " step",
    )
    passes = f"{job.passes_text} of {format_count(job.micro, 'sample')}"
    yield MICRO, f"{passes} per process and optimizer step"
    yield (
        ROLLOUTS,
        f"at least this many per process: {format_count(job.collected, 'sample')} are"
        " collected",
    )
    yield CHUNK, f"{format_count(len(job.chunks), 'generate call')} per process"
    steps = format_count(job.updates(job.policy), "optimizer step")
    yield (
        INNER,
        f"{format_count(job.mini_batches, 'mini batch')} per pass over the samples,"
        f" {steps} per round",
    )
    yield (
        "train.epochs, train.total_steps",
        f"{format_count(job.planned_steps, 'optimizer step')} in the whole run",
    )


def _notes(job: TrlxJob) -> Iterator[str]:
    if job.passes > 1:
        yield (
            f"gradients are summed over the {job.passes:,} passes, not averaged:"
            f" {job.passes:,} times those of one pass. Adam hides it; gradient"
            " clipping, epsilon and plain SGD do not."
        )
        yield (
            f"under DeepSpeed each pass ends in an optimizer step: {job.passes:,}"
            f" optimizer steps of {job.micro * job.replicas:,} samples instead of one."
        )
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
    sizes = (TRAIN, ROLLOUTS, CHUNK)
    if unset := [key for key in sizes if key not in job.settings.given]:
        yield (
            f"a program may set {', '.join(unset)} itself; it is not read, and trlX's"
            " ready-made sizes are taken."
        )
    yield group_note(1)
    yield f"{TRAIN}, {MICRO}, {ROLLOUTS} and {CHUNK} are per process."


def _rules(job: TrlxJob) -> Iterator[Ruling]:
    """Yield what trlX's check and its run ask."""
    micro = Term(f"{MICRO}={job.micro:,}", job.micro)
    yield job.multiple("micro_divides_batch", (MICRO, TRAIN), TRAIN, micro)


DIALECT = Dialect(
    job=TrlxJob, rules=_rules, meanings=_meanings, notes=_notes, launch=LAUNCH
)
