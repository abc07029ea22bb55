"""RolloutPlan: the batch arithmetic of reinforcement learning, from prompts to the microbatches of each replica."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, ResumeMismatchError, choice_error, raise_together
from rampup.notebook_repr import NotebookRepr
from rampup.plan.numbers import MAX_SAMPLES, count_problems, divisors, nearest_in, nearest_multiples
from rampup.rl.sizes import Experience, Size
from rampup.rl.updates import Training, Updates, split_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPosition:
    """The progress of a model's training."""

    step: int  # the rollout, counted from 0. The generator gets the policy's weights once before each rollout.
    update: int  # the next optimizer step within the rollout, counted from 0. The samples' policy is this many updates old.
    epoch: int  # the pass over the rollout's samples
    mini_batch: int  # the mini batch within the epoch
    optimizer_step: int  # completed optimizer steps of this model, over the whole run


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan(NotebookRepr):
    """The batches of one step of reinforcement learning: generation, and the training of each model.

    A step generates `rollout_batch`, trains the critic through all of its epochs if there is one, then trains the policy
    (SkyRL's order), and sends the new weights to the generator.

    Attributes:
        rollout_batch: the batch that one step generates.
        samples_per_prompt: responses to each prompt.
        policy: the sizes of the policy's training.
        critic: the sizes of the critic's training. None without a critic.
        generation: the batch of one call of the generator (a rollout microbatch). None = the whole batch.
        num_steps: steps of the run.
        pad: pad sizes that do not divide with rows of weight 0; a last mini batch may be short. False = raise an error.
        eval_prompts: prompts of one evaluation. 0 = no evaluation.
        eval_samples_per_prompt: responses to each prompt of an evaluation.
        experience: lengths and types of the stored arrays. None = unknown.
        policy_updates, critic_updates: the resulting optimizer steps of each model (derived).

    Raises:
        ConfigError, BatchDivisibilityError: If sizes are invalid. One error has all problems and the nearest legal values.

    Example:
        >>> plan = RolloutPlan(
        ...     rollout_batch=Size(count=1024, unit="prompts"),
        ...     samples_per_prompt=5,
        ...     policy=Training(
        ...         mini_batch=Size(count=256, unit="prompts"),
        ...         microbatch=Size(count=4, unit="samples", scope="replica"),
        ...         data_parallel_size=16,
        ...     ),
        ... )
        >>> plan.samples_per_step, plan.policy_updates.optimizer_steps, plan.policy_updates.accumulation_steps
        (5120, 4, 20)
    """

    rollout_batch: Size
    samples_per_prompt: int
    policy: Training
    critic: Training | None = None
    generation: Size | None = None
    num_steps: int = 1
    pad: bool = False
    eval_prompts: int = 0
    eval_samples_per_prompt: int = 1
    experience: Experience | None = None
    policy_updates: Updates = field(init=False, repr=False, compare=False)
    critic_updates: Updates | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        raise_together(self._count_problems())
        raise_together([*self._rollout_problems()])
        problems: list[RampupError] = []
        updates: dict[str, Updates | None] = {"policy": None, "critic": None}
        for model, training in self._models().items():
            try:
                updates[model] = split_updates(
                    model,
                    training,
                    samples_per_step=self.samples_per_step,
                    samples_per_prompt=self.samples_per_prompt,
                    pad=self.pad,
                    max_length=None if self.experience is None else self.experience.max_length,
                )
            except RampupError as error:
                problems += error.problems or (error,)
        blamed = {problem.key for problem in problems}
        raise_together([*problems, *(problem for problem in self._generation_problems() if problem.key not in blamed)])
        object.__setattr__(self, "policy_updates", updates["policy"])
        object.__setattr__(self, "critic_updates", updates["critic"])

    @property
    def samples_per_step(self) -> int:
        """Samples that one step generates, over the whole job."""
        return self.rollout_batch.samples(**self._factors)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one step."""
        return self.samples_per_step // self.samples_per_prompt

    @property
    def sequences_per_call(self) -> int:
        """Sequences per call of the generator."""
        return self.samples_per_step if self.generation is None else self.generation.samples(**self._factors)

    @property
    def generate_calls(self) -> int:
        """Calls of the generator per step."""
        return -(-self.samples_per_step // self.sequences_per_call)

    @property
    def order(self) -> tuple[Updates, ...]:
        """The models in the order in which a step trains them."""
        return (self.policy_updates,) if self.critic_updates is None else (self.critic_updates, self.policy_updates)

    @property
    def total_optimizer_steps(self) -> int:
        """The policy's optimizer steps over the run: the length of its learning-rate schedule."""
        return self.num_steps * self.policy_updates.optimizer_steps

    @property
    def eval_samples(self) -> int:
        """Samples of one evaluation."""
        return self.eval_prompts * self.eval_samples_per_prompt

    @property
    def experience_bytes_per_sample(self) -> int | None:
        """Bytes stored per sample. None if the lengths are unknown."""
        return None if self.experience is None else self.experience.bytes_per_sample(critic=self.critic is not None)

    def updates(self, model: str = "policy") -> Updates:
        """Return the updates of one model.

        Raises:
            ConfigError: If the plan has no such model.
        """
        found = {updates.model: updates for updates in self.order}
        if model not in found:
            raise choice_error("model", model, list(found))
        return found[model]

    def position(self, optimizer_step: int, *, model: str = "policy") -> RolloutPosition:
        """Return the progress of a model after a number of its optimizer steps. This is a look-up, not a replay.

        Args:
            optimizer_step: completed optimizer steps over the whole run. At the end of a rollout, the position is the start of
                the next one.
            model: `policy` or `critic`.

        Raises:
            ResumeMismatchError: If the run has no such optimizer step.

        Example:
            >>> training = Training(mini_batch=Size(count=4, unit="prompts"), num_epochs=2)
            >>> batch = Size(count=8, unit="prompts")
            >>> plan = RolloutPlan(rollout_batch=batch, samples_per_prompt=2, policy=training, num_steps=9)
            >>> plan.position(7)
            RolloutPosition(step=1, update=3, epoch=1, mini_batch=1, optimizer_step=7)
        """
        updates = self.updates(model)
        last = self.num_steps * updates.optimizer_steps
        if not 0 <= optimizer_step <= last:
            raise ResumeMismatchError(
                f"optimizer_step={optimizer_step} of the {model} must be between 0 and num_steps * optimizer_steps = "
                f"{self.num_steps} * {updates.optimizer_steps} = {last}",
                key="optimizer_step",
                nearest=(0 if optimizer_step < 0 else last,),
            )
        step, update = divmod(optimizer_step, updates.optimizer_steps)
        epoch, mini_batch = divmod(update, updates.num_mini_batches)
        return RolloutPosition(step=step, update=update, epoch=epoch, mini_batch=mini_batch, optimizer_step=optimizer_step)

    def calls_before(self, microbatch: int) -> int | None:
        """Return the number of generator calls that must complete before a microbatch of the first epoch can train.

        Microbatches are counted over all mini batches of the model that trains first, in the order of generation (without a
        shuffle). Later epochs need every sample. None with a token budget, because the number depends on the lengths.
        """
        updates = self.order[0]
        if updates.split is None or updates.microbatch_samples is None:
            return None
        mini_batch, number = divmod(microbatch, updates.split.num_microbatches)
        samples = updates.mini_batch_range(mini_batch)
        end = min(samples.start + (number + 1) * updates.microbatch_samples, samples.stop)
        return -(-end // self.sequences_per_call)

    @property
    def overlapping_microbatches(self) -> int | None:
        """Microbatches of the first epoch that can train while generation is running, if they keep its order.

        Example:
            >>> plan = RolloutPlan(rollout_batch=Size(count=16, unit="prompts"), samples_per_prompt=2,
            ...     policy=Training(mini_batch=Size(count=16, unit="prompts"), microbatch=Size(count=2, unit="prompts")),
            ...     generation=Size(count=4, unit="prompts"))
            >>> plan.generate_calls, plan.overlapping_microbatches
            (4, 6)
        """
        total = self.order[0].microbatches_per_epoch
        if total is None:
            return None
        low, high = 0, total
        while low < high:
            middle = (low + high) // 2
            calls = self.calls_before(middle)
            assert calls is not None
            low, high = (middle + 1, high) if calls < self.generate_calls else (low, middle)
        return low

    def samples_before(self, update: int, *, model: str = "policy", portion: int | None = None) -> int:
        """Return the samples that must be generated before an optimizer step of a rollout can run, in the order of generation.

        Args:
            update: the optimizer step within the rollout, counted from 0.
            model: `policy` or `critic`. Steps of the model that trains second need every sample, as those of later epochs.
            portion: samples that become available together; None = those of a call of the generator.

        Example:
            >>> plan = RolloutPlan(rollout_batch=Size(count=16, unit="prompts"), samples_per_prompt=2,
            ...     policy=Training(mini_batch=Size(count=6, unit="prompts"), num_epochs=2), pad=True,
            ...     generation=Size(count=4, unit="prompts"))
            >>> [plan.samples_before(update) for update in range(plan.policy_updates.optimizer_steps)]
            [16, 24, 32, 32, 32, 32]
        """
        updates, portion = self.updates(model), portion or self.sequences_per_call
        if model != self.order[0].model or update >= updates.num_mini_batches:
            return self.samples_per_step
        return min(-(-updates.mini_batch_range(update).stop // portion) * portion, self.samples_per_step)

    def to_dict(self) -> Mapping[str, Any]:
        """Return the plan as `rampup plan --json` prints it."""
        policy = self.policy_updates.to_dict()
        return {
            "prompts_per_step": self.prompts_per_step,
            "samples_per_prompt": self.samples_per_prompt,
            "samples_per_step": self.samples_per_step,
            "generate_calls": self.generate_calls,
            "sequences_per_generate_call": self.sequences_per_call,
            "overlapping_microbatches": self.overlapping_microbatches,
            **policy,
            "critic": None if self.critic_updates is None else self.critic_updates.to_dict(),
            "weight_syncs": self.num_steps,
            "total_optimizer_steps": self.total_optimizer_steps,
            "eval_prompts": self.eval_prompts,
            "eval_samples": self.eval_samples,
            "experience": self._experience_dict(),
        }

    def _experience_dict(self) -> dict[str, Any] | None:
        per_sample = self.experience_bytes_per_sample
        if self.experience is None or per_sample is None:
            return None
        fields = self.experience.fields(critic=self.critic is not None)
        return {
            "bytes_per_sample": per_sample,
            "bytes_per_step": per_sample * self.samples_per_step,
            "bytes_per_replica": per_sample * -(-self.samples_per_step // self.policy.data_parallel_size),
            "fields": {field.name: field.bytes_per_sample for field in fields},
        }

    @property
    def _factors(self) -> dict[str, int]:
        return {"samples_per_prompt": self.samples_per_prompt, "data_parallel_size": self.policy.data_parallel_size}

    def _models(self) -> dict[str, Training]:
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    def _count_problems(self) -> list[RampupError]:
        counts = ("samples_per_prompt", "num_steps", "eval_samples_per_prompt")
        problems = count_problems({name: getattr(self, name) for name in counts})
        problems += count_problems({"eval_prompts": self.eval_prompts}, minimum=0)
        for model, training in self._models().items():
            problems += training.problems(model)
        for name, size in (("rollout_batch", self.rollout_batch), ("generation", self.generation)):
            if size is not None and size.unit == "tokens":
                key = size.key or name
                problems.append(ConfigError(f"{key}={size} must count prompts or samples", key=key))
        return problems

    def _rollout_problems(self) -> list[RampupError]:
        """Return errors unless the batch has whole prompts, is not too large, and some mini batch divides it."""
        size, samples = self.rollout_batch, self.samples_per_step
        if samples > MAX_SAMPLES:
            largest = max(MAX_SAMPLES // size.factor(**self._factors), 1)
            text = f"{size.arithmetic('rollout_batch', **self._factors)} must be at most {MAX_SAMPLES:,} samples"
            return [ConfigError(text, key=size.key or "rollout_batch", nearest=(largest,))]
        units = {"samples_per_prompt": self.samples_per_prompt}
        for model, training in self._models().items():
            replicas, per_count = training.data_parallel_size, self._mini_factor(training)
            evenly = 1 if training.token_budget is not None else replicas * training.num_stages
            units |= {} if self.pad else {f"mini batch of the {model}": math.lcm(per_count, evenly)}
        divisor, per_count = math.lcm(*units.values()), size.factor(**self._factors)
        if samples % divisor == 0:
            return []
        step = divisor // math.gcd(divisor, per_count)
        nearest = nearest_multiples(size.count, step)
        return [
            BatchDivisibilityError(
                f"{size.arithmetic('rollout_batch', **self._factors)} must be a multiple of {divisor} samples, the smallest "
                f"number that has whole prompts and divides evenly over {self._format_replicas()}; nearest: "
                f"{', '.join(map(str, nearest))}",
                value=size.count,
                divisor=step,
                key=size.key or "rollout_batch",
            )
        ]

    def _mini_factor(self, training: Training) -> int:
        return training.mini_batch.factor(
            samples_per_prompt=self.samples_per_prompt, data_parallel_size=training.data_parallel_size
        )

    def _format_replicas(self) -> str:
        return " and ".join(
            f"data_parallel_size={training.data_parallel_size}"
            + (f" * num_stages={training.num_stages}" if training.num_stages > 1 else "")
            + (f" ({model})" if self.critic is not None else "")
            for model, training in self._models().items()
        )

    def _generation_problems(self) -> list[RampupError]:
        size = self.generation
        if size is None:
            return []
        samples, per_count = size.samples(**self._factors), size.factor(**self._factors)
        if samples <= self.samples_per_step if self.pad else self.samples_per_step % samples == 0:
            return []
        if self.pad:
            legal = [max(self.samples_per_step // per_count, 1)]
        else:
            legal = divisors(self.samples_per_step // per_count) if self.samples_per_step % per_count == 0 else []
        nearest = nearest_in(size.count, legal)
        fix = f"nearest: {', '.join(map(str, nearest))}" if nearest else "count it in prompts of the job"
        return [
            BatchDivisibilityError(
                f"{size.arithmetic('generation', **self._factors)} must {'not exceed' if self.pad else 'divide'} the "
                f"{self.samples_per_step} samples of a step; {fix}",
                value=size.count,
                divisor=1,
                key=size.key or "generation",
                nearest=nearest,
            )
        ]
