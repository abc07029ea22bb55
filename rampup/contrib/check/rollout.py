"""One training step on rollouts, as SkyRL, veRL, trlX and MaxText RL all run it: its
numbers, its plan and its words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rampup.contrib.check.rules import Job, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Run, Term, counted, times
from rampup.contrib.rl.plan import RolloutPlan, Size, Training, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The sizes with which a step's samples train one model."""

    name: str  # policy, actor or critic
    mini_batch: int  # size of an optimizer step, whole job, in the unit of the system
    mini_samples: int  # the same in samples
    replicas: int
    micro: int | None  # samples of a pass and replica; None if unknown
    tokens: int | None = (
        None  # token budget of a pass and replica, which replaces `micro`
    )
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

    def training(self, unit: Unit) -> Training:
        """Return the same for rampup's plan of a step."""
        size = (
            None
            if self.micro is None
            else Size(count=self.micro, unit="samples", scope="replica")
        )
        if self.tokens is not None:
            size = Size(count=self.tokens, unit="tokens", scope="replica")
        mini = Size(count=self.mini_batch, unit=unit)
        return Training(
            mini_batch=mini,
            microbatch=size,
            data_parallel_size=self.replicas,
            num_epochs=self.epochs,
        )


class RolloutJob(Job):
    """The numbers of a file whose training step generates samples and trains on
    them.
    """

    prompts: int  # those of a training step
    samples_per_prompt: int
    passes: int | None = (
        # those of a policy update and replica; None with a token budget, or if no key
        # sets their size
        None
    )
    padded_samples: int = 0  # artificial samples of a training step
    training_steps: int | None = (
        None  # those of the run; None if the size of the data set is unknown
    )
    lost_prompts: int = 0  # prompts that fill no training step

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.trained: dict[
            str, TrainedModel
        ] = {}  # the policy first, then the critic if there is one

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

    def train(self, name: str, mini_batch: int, replicas: int, **sizes: Any) -> None:
        """Add a model that is trained; `mini_batch` counts prompts, and the `sizes` are
        those of `TrainedModel`.
        """
        samples = mini_batch * self.samples_per_prompt
        self.trained[name] = TrainedModel(
            name=name,
            mini_batch=mini_batch,
            mini_samples=samples,
            replicas=replicas,
            **sizes,
        )

    def read_data(
        self, epochs: int, *, joined: bool = False, most: int | None = None
    ) -> None:
        """Count training steps, and what each pass over the data set leaves over, or
        all passes together if they are joined; `most` ends the run.
        """
        if self["num_prompts"] is not None:
            rounds = 1 if joined else epochs
            prompts = self["num_prompts"] * epochs // rounds
            steps, self.lost_prompts = divmod(prompts, self.prompts)
            self.training_steps = steps * rounds
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
        return (
            "pads" if self.padded_samples else "drops" if self.lost_prompts else "runs"
        )

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
        policy = self.policy
        samples = (
            f"{times(counted(self.prompts, 'prompt'), self.samples_per_prompt)} ="
            f" {counted(self.samples, 'sample')}"
        )
        if self.padded_samples:
            samples += f" + {self.padded_samples:,} of padding"
        passes = (
            self.passes_text
            if policy.tokens is None
            else f"passes of up to {policy.tokens:,} tokens"
        )
        if (
            policy.tokens is None
            and policy.micro is not None
            and self.passes is not None
        ):
            passes = times(passes, min(policy.micro, policy.padded_share))
        steps = (
            f"{counted(self.updates(policy), 'optimizer step')} of"
            f" {policy.mini_samples:,}"
        )
        return (
            f"{samples}; {steps}; {times(counted(policy.replicas, 'replica'), passes)}"
        )

    def rollout_plan(self, unit: Unit = "prompts", *, pad: bool = False) -> RolloutPlan:
        """Return rampup's plan of one training step."""
        return RolloutPlan(
            rollout_batch=Size(count=self.prompts, unit=unit),
            samples_per_prompt=self.samples_per_prompt,
            policy=self.policy.training(unit),
            critic=None if self.critic is None else self.critic.training(unit),
            pad=pad,
        )

    @property
    def passes_text(self) -> str:
        """The passes of a policy update."""
        if self.passes is not None:
            return counted(self.passes, "pass")
        return (
            "passes of unknown size"
            if self.policy.tokens is None
            else "as many passes as the token budget needs"
        )


def batch_meanings(
    job: RolloutJob, prompts: str, responses: str, mini_batch: str, epochs: str
) -> Iterator[tuple[str, str]]:
    """Yield the meanings of the keys that every system with mini batches of prompts
    has.
    """
    yield prompts, f"{counted(job.prompts, 'prompt')} per training step"
    yield (
        responses,
        f"{counted(job.samples, 'sample')} per training step, generated together",
    )
    for model in job.trained.values():
        size = counted(model.mini_samples, "sample")
        if model is job.policy:
            number = counted(job.num_mini_batches(model), "mini batch")
            yield (
                mini_batch,
                (
                    f"prompts, whole job: {size} per optimizer step, {number} per pass"
                    " over the step's samples"
                ),
            )
            yield (
                epochs,
                f"{counted(job.updates(model), 'optimizer step')} per training step",
            )
        else:
            updates = counted(job.updates(model), "critic update")
            yield (
                f"mini batch of the critic = {model.mini_batch:,}",
                f"prompts: {size} per update, {updates} per training step",
            )


def dropped_prompts(job: RolloutJob) -> Iterator[str]:
    """Yield a note on prompts that fill no training step, if there are any."""
    if lost := job.lost_prompts:
        yield (
            f"the last {counted(lost, 'prompt')} of {job['num_prompts']:,} are dropped"
            " in each pass over the data set."
        )


def group_note(responses: int) -> str:
    """Return the note on groups whose responses are all right or all wrong: they have
    no advantage.

    At a success rate p, the share of them is p^n + (1 - p)^n for n responses.
    """
    if responses == 1:
        return (
            "one response per prompt has nothing to be compared with: the advantage"
            " comes from a critic or another baseline."
        )
    rates = (0.1, 0.3, 0.5)
    shares = [f"{p**responses + (1 - p) ** responses:.1%}" for p in rates]
    return (
        f"groups of {responses:,} responses that teach nothing, as all are right or all"
        f" wrong: {', '.join(shares)} of them at success rates of 0.1, 0.3 and 0.5."
    )
