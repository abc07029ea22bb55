"""One training step on rollouts, as SkyRL, veRL, trlX, Tunix and MaxText RL all run it:
from prompts to responses, updates and passes, in numbers and in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rampup.contrib.check.rules import Job, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Run, Term, format_count, times


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The sizes with which a step's samples train one model."""

    name: str  # policy, actor or critic
    mini_batch: int  # size of an optimizer step, whole job, in the unit of the system
    mini_samples: int  # the same in samples
    replicas: int
    epochs: int  # passes over a step's samples

    @property
    def share(self) -> int:
        """Samples of an update and replica, rounded down."""
        return self.mini_samples // self.replicas

    @property
    def padded_share(self) -> int:
        """Samples of an update and replica, rounded up."""
        return -(-self.mini_samples // self.replicas)

    @property
    def padding(self) -> int:
        """Empty samples that fill a mini batch up to a multiple of the replicas."""
        return -self.mini_samples % self.replicas


class RolloutJob(Job):
    """The numbers of a file whose training step generates samples and trains on
    them.
    """

    prompts: int  # those of a training step
    samples_per_prompt: int
    micro: int | None = None  # samples of a policy pass and replica; None if unknown
    tokens: int | None = None  # token budget of such a pass, which replaces `micro`
    # Passes of a policy update and replica; None with a token budget, or if no key sets
    # their size.
    passes: int | None = None
    padded_samples: int = 0  # artificial samples of a training step
    # Those of the run; None if the size of the data set is unknown.
    training_steps: int | None = None
    lost_prompts: int = 0  # prompts that fill no training step

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # The policy first, then the critic if there is one.
        self.trained: dict[str, TrainedModel] = {}

    @property
    def samples(self) -> int:
        """Samples of a training step."""
        return self.prompts * self.samples_per_prompt

    @property
    def policy(self) -> TrainedModel:
        """The policy, which some systems call the actor."""
        return next(iter(self.trained.values()))

    @property
    def critic(self) -> TrainedModel | None:
        """The critic, or None without one."""
        return self.trained.get("critic")

    def train(
        self,
        name: str,
        mini_batch: int,
        replicas: int,
        epochs: int,
        mini_samples: int | None = None,
    ) -> None:
        """Add a model that is trained; `mini_batch` counts prompts, all of whose
        samples are trained on unless `mini_samples` are given.
        """
        if mini_samples is None:
            mini_samples = mini_batch * self.samples_per_prompt
        model = TrainedModel(name, mini_batch, mini_samples, replicas, epochs)
        self.trained[name] = model

    def read_data(self, epochs: int, most: int | None) -> None:
        """Count training steps, and what each pass over the data set leaves over;
        `most` ends the run.
        """
        if self["num_prompts"] is not None:
            steps, self.lost_prompts = divmod(self["num_prompts"], self.prompts)
            self.training_steps = steps * epochs
        if most is not None:
            self.training_steps = min(self.training_steps or most, most)

    def data_set_rule(self, key: str) -> Iterator[Ruling]:
        """Yield the rule that the data set fills a step; `key` is the size of one."""
        if (prompts := self["num_prompts"]) is not None:
            data = Term(f"a data set of {prompts:,} prompts", prompts)
            step = Term(f"a step's {self.prompts:,}", self.prompts)
            keys = ("num_prompts", key)
            yield self.at_least("data_set_fills_a_step", keys, data, step)

    def num_mini_batches(self, model: TrainedModel) -> int:
        """Return the updates of a pass over a step's samples."""
        return self.prompts // model.mini_batch

    def updates(self, model: TrainedModel) -> int:
        """Return the updates of a training step."""
        return self.num_mini_batches(model) * model.epochs

    @property
    def outcome(self) -> Run:
        """A step may be padded; the last, incomplete step of the data set is
        dropped.
        """
        if self.padded_samples:
            return "pads"
        return "drops" if self.lost_prompts else "runs"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "data_parallel_size": self.policy.replicas,
            "samples_per_step": self.samples,
            "mini_batches": self.num_mini_batches(self.policy),
            "optimizer_steps": self.updates(self.policy),
            "mini_batch_samples": self.policy.mini_samples,
            "padded_samples": self.padded_samples,
        }
        if self.passes is not None:
            derived["accumulation_steps"] = self.passes
        if self.critic is not None:
            derived["critic_mini_batches"] = self.num_mini_batches(self.critic)
            derived["critic_optimizer_steps"] = self.updates(self.critic)
            derived["critic_mini_batch_samples"] = self.critic.mini_samples
        if self.training_steps is not None:
            derived["training_steps"] = self.training_steps
            derived["total_optimizer_steps"] = (
                self.training_steps * derived["optimizer_steps"]
            )
        return derived

    def summary(self) -> str:
        """Return the numbers of a step in one line."""
        samples = (
            f"{times(format_count(self.prompts, 'prompt'), self.samples_per_prompt)} ="
            f" {format_count(self.samples, 'sample')}"
        )
        if self.padded_samples:
            samples += f" + {self.padded_samples:,} of padding"
        steps = format_count(self.updates(self.policy), "optimizer step")
        return f"{samples}; {steps} of {self.policy.mini_samples:,}; {self.shares()}"

    def shares(self) -> str:
        """Return how replicas and passes divide a policy update."""
        replicas = format_count(self.policy.replicas, "replica")
        if self.tokens is not None:
            return times(replicas, f"passes of up to {self.tokens:,} tokens")
        if self.micro is None or self.passes is None:
            return times(replicas, self.passes_text)
        size = min(self.micro, self.policy.padded_share)
        return times(replicas, self.passes_text, size)

    @property
    def passes_text(self) -> str:
        """The passes of a policy update."""
        if self.passes is not None:
            return format_count(self.passes, "pass")
        if self.tokens is not None:
            return "as many passes as the token budget needs"
        return "passes of unknown size"


def batch_meanings(
    job: RolloutJob, keys: Sequence[str], devices: int, sharing: int
) -> Iterator[tuple[str, str]]:
    """Yield the meanings of the keys that every system with mini batches of prompts
    has: those of prompts, responses, a mini batch and epochs; and of the policy's
    devices, of which `sharing` share a sample.
    """
    prompts, responses, mini_batch, epochs = keys
    yield prompts, f"{format_count(job.prompts, 'prompt')} per training step"
    yield (
        responses,
        f"{format_count(job.samples, 'sample')} per training step, generated together",
    )
    size = format_count(job.policy.mini_samples, "sample")
    number = format_count(job.num_mini_batches(job.policy), "mini batch")
    each = f"{size} per optimizer step, {number} per pass over the step's samples"
    yield mini_batch, f"prompts, whole job: {each}"
    yield (
        epochs,
        f"{format_count(job.updates(job.policy), 'optimizer step')} per training step",
    )
    if (critic := job.critic) is not None:
        size = format_count(critic.mini_samples, "sample")
        updates = format_count(job.updates(critic), "critic update")
        yield (
            f"mini batch of the critic = {critic.mini_batch:,}",
            f"prompts: {size} per update, {updates} per training step",
        )
    yield (
        f"{format_count(devices, 'device')} / {sharing:,} that share a sample",
        f"{format_count(job.policy.replicas, 'replica')}; each has"
        f" {format_count(job.policy.padded_share, 'sample')} of a mini batch",
    )


def rounded_replicas(
    system: str, devices: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Yield a note on each model whose devices are no multiple of those that share a
    sample.
    """
    for model, count in devices.items():
        if count % sizes[model]:
            yield (
                f"the {model}'s {count:,} devices are not a multiple of the"
                f" {sizes[model]:,} that share a sample: {system} counts"
                f" {format_count(count // sizes[model], 'replica')}, rounded down."
            )


def dropped_prompts(job: RolloutJob) -> Iterator[str]:
    """Yield a note on prompts that fill no training step, if there are any."""
    if lost := job.lost_prompts:
        yield (
            f"the last {format_count(lost, 'prompt')} of {job['num_prompts']:,} are"
            " dropped in each pass over the data set."
        )


def group_note(responses: int) -> str:
    """Return the note on groups whose responses are all right or all wrong: they have
    no advantage.

    At a success rate p, the share of them is p^n + (1 - p)^n for n responses.
    """
    if responses == 1:
        return (
            "one response per prompt has nothing to be compared with: the advantage has"
            " to come from a critic or another baseline, and an estimator that compares"
            " the responses of a prompt, such as grpo, needs 2 or more."
        )
    rates = (0.1, 0.3, 0.5)
    shares = [f"{p**responses + (1 - p) ** responses:.1%}" for p in rates]
    return (
        f"groups of {responses:,} responses that teach nothing, as all are right or all"
        f" wrong: {', '.join(shares)} of them at success rates of 0.1, 0.3 and 0.5."
    )
