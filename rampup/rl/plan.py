"""RolloutPlan: the batch arithmetic of reinforcement learning, from prompts to the microbatches of each replica.

A step's samples are divided three times: among the calls of the generator, among mini batches (one optimizer step each), and
among the passes of a mini batch. The plan checks from the outside in, and stops where an error would only repeat one before it:
numbers that are none, then the batch, for which some legal mini batch must exist, then the mini batches and passes of each
model, and the calls of the generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rampup.errors import ConfigError, RampupError, choice_error, raise_together
from rampup.plan.numbers import nearest_multiples
from rampup.rl.sizes import MAX_SAMPLES, Experience, Size, Training, Updates, count_problems, split_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The batches of one step of reinforcement learning: generation, and the training of each model.

    A step generates `rollout_batch`, trains the critic through all of its epochs if there is one, then trains the policy
    (SkyRL's order), and sends the new weights to the generator.

    Attributes:
        rollout_batch: the batch that one step generates.
        samples_per_prompt: responses to each prompt.
        policy, critic: the sizes of the training of each model. None without a critic.
        generation: the batch of one call of the generator (a rollout microbatch). None = the whole batch.
        num_steps: steps of the run.
        pad: pad sizes that do not divide with rows of weight 0; a last mini batch may be short. False = raise an error.
        eval_prompts, eval_samples_per_prompt: prompts of one evaluation, and responses to each.
        experience: lengths and types of the stored arrays. None = unknown; `rollout_step` takes the lengths of its options.
        policy_updates, critic_updates: the resulting optimizer steps of each model (derived).

    Raises:
        ConfigError, BatchDivisibilityError: sizes are invalid. One error has all problems and the nearest legal values.

    Example:
        >>> micro = Size(count=4, unit="samples", scope="replica")
        >>> policy = Training(mini_batch=Size(count=256, unit="prompts"), microbatch=micro, data_parallel_size=16)
        >>> plan = RolloutPlan(rollout_batch=Size(count=1024, unit="prompts"), samples_per_prompt=5, policy=policy)
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
        counts = ("samples_per_prompt", "num_steps", "eval_samples_per_prompt")
        problems = count_problems({name: getattr(self, name) for name in counts})
        problems += count_problems({"eval_prompts": self.eval_prompts}, minimum=0)
        models = {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

        def check_unit(name: str, size: Size | None, *, is_pass: bool = False) -> None:
            if size is not None and size.unit == "tokens" and not (is_pass and size.scope != "job"):
                key = size.key or name
                rule = ", or tokens per replica" if is_pass else ""
                problems.append(ConfigError(f"{key}={size} must count prompts or samples{rule}", key=key))

        for model, training in models.items():
            counts = ("data_parallel_size", "num_epochs", "num_stages")
            problems += count_problems({f"{model}.{name}": getattr(training, name) for name in counts})
            check_unit(f"{model}.mini_batch", training.mini_batch)
            check_unit(f"{model}.microbatch", training.microbatch, is_pass=True)
        check_unit("rollout_batch", self.rollout_batch)
        check_unit("generation", self.generation)
        raise_together(problems)

        # Whether the configured mini batch divides the batch is another question: `split_updates` blames the mini batch then.
        # Here the batch is to blame, because no size of a mini batch would do.
        size = self.rollout_batch
        samples = self.samples_per_step
        factors = self._factors
        if samples > MAX_SAMPLES:
            largest = max(MAX_SAMPLES // size.factor(**factors), 1)
            text = f"{size.arithmetic('rollout_batch', **factors)} must be at most {MAX_SAMPLES:,} samples"
            raise ConfigError(text, key=size.key or "rollout_batch", nearest=(largest,))
        # The batch must be a multiple of each of these. One count of a mini batch may be several samples, and without padding a
        # mini batch gives every stage of every replica the same number; with a token budget the lengths decide that.
        units = [self.samples_per_prompt]
        replicas = []
        for model, training in models.items():
            count = {"samples_per_prompt": self.samples_per_prompt, "data_parallel_size": training.data_parallel_size}
            evenly = 1 if training.token_budget is not None else training.data_parallel_size * training.num_stages
            units += [] if self.pad else [training.mini_batch.factor(**count), evenly]
            stages = f" * num_stages={training.num_stages}" if training.num_stages > 1 else ""
            name = f" ({model})" if self.critic is not None else ""
            replicas.append(f"data_parallel_size={training.data_parallel_size}{stages}{name}")
        divisor = math.lcm(*units)
        if samples % divisor:
            rule = f"must be a multiple of {divisor} samples, the smallest number that has whole prompts and divides evenly "
            rule += f"over {' and '.join(replicas)}"
            legal = nearest_multiples(size.count, divisor // math.gcd(divisor, size.factor(**factors)))
            raise size.refused("rollout_batch", rule, legal, "", multiple=divisor, **factors)

        updates: dict[str, Updates] = {}
        longest = None if self.experience is None else self.experience.max_length
        shared = {"samples_per_step": samples, "samples_per_prompt": self.samples_per_prompt, "max_length": longest}
        for model, training in models.items():
            try:
                updates[model] = split_updates(model, training, pad=self.pad, **shared)  # type: ignore[arg-type]
            except RampupError as error:
                problems += error.problems or (error,)
        # A key may set the size of a mini batch, of a pass and of a call at once; one error about it is enough.
        call = self.generation
        if call is not None and (call.key or "generation") not in {problem.key for problem in problems}:
            problems += call.misfits("generation", f"the {samples} samples of a step", samples, pad=self.pad, **factors)
        raise_together(problems)
        object.__setattr__(self, "policy_updates", updates["policy"])
        object.__setattr__(self, "critic_updates", updates.get("critic"))

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
        """Return the updates of one model."""
        found = {updates.model: updates for updates in self.order}
        if model not in found:
            raise choice_error("model", model, list(found))
        return found[model]

    def timetable(self) -> list[dict[str, Any]]:
        """Return a step in its order, from prompts to optimizer steps: what there is, how many of it, and the sizes of each.

        Tokens are those of samples of the maximum lengths; None if these are unknown or there is no fixed size.
        """
        stored = self.experience
        length, prompt = (None, None) if stored is None else (stored.max_length, stored.max_prompt_length)

        def row(what: str, number: int | None, samples: int | None, remark: str, **sizes: int | None) -> dict[str, Any]:
            prompts = None if samples is None or samples % self.samples_per_prompt else samples // self.samples_per_prompt
            tokens = None if samples is None or length is None else samples * length
            counts = {"number": number, "prompts": prompts, "samples": samples, "tokens": tokens}
            return {"what": what, **counts, **sizes, "how": remark}

        asked = {"prompts": self.prompts_per_step, "tokens": prompt and prompt * self.prompts_per_step}
        rows = [row("prompts", 1, None, "read", **asked)]
        rows.append(row("responses", self.generate_calls, self.sequences_per_call, f"{self.samples_per_prompt:,} per prompt"))
        for updates in self.order:
            model = "" if len(self.order) == 1 else f"{updates.model}: "
            replicas = updates.data_parallel_size
            remark = "1 epoch" if updates.num_epochs == 1 else f"{updates.num_epochs:,} epochs"
            rows.append(row(f"{model}mini batches", updates.num_mini_batches, updates.mini_batch_samples, remark))
            remark = "1 replica" if replicas == 1 else f"{updates.microbatch_size or 0:,} per replica"
            sizes = {}
            if updates.token_budget is not None:
                remark = "at most, packed"
                sizes = {"tokens": updates.token_budget * replicas}
            rows.append(row(f"{model}microbatches", updates.accumulation_steps, updates.microbatch_samples, remark, **sizes))
            remark = f"{updates.optimizer_steps:,} per step"
            rows.append(row(f"{model}optimizer step", 1, updates.mini_batch_samples, remark))
        return rows

    def to_dict(self) -> Mapping[str, Any]:
        """Return the plan as `rampup plan --json` prints it."""
        per_sample = self.experience_bytes_per_sample
        stored = None
        if self.experience is not None and per_sample is not None:
            stored = {
                "bytes_per_sample": per_sample,
                "bytes_per_step": per_sample * self.samples_per_step,
                "bytes_per_replica": per_sample * -(-self.samples_per_step // self.policy.data_parallel_size),
                "fields": self.experience.field_bytes(critic=self.critic is not None),
            }
        return {
            "prompts_per_step": self.prompts_per_step,
            "samples_per_prompt": self.samples_per_prompt,
            "samples_per_step": self.samples_per_step,
            "generate_calls": self.generate_calls,
            "sequences_per_generate_call": self.sequences_per_call,
            **self.policy_updates.to_dict(),
            "critic": None if self.critic_updates is None else self.critic_updates.to_dict(),
            "weight_syncs": self.num_steps,
            "total_optimizer_steps": self.total_optimizer_steps,
            "eval_prompts": self.eval_prompts,
            "eval_samples": self.eval_samples,
            "experience": stored,
            "timetable": self.timetable(),
        }

    @property
    def _factors(self) -> dict[str, int]:
        """What turns a size of the rollout into samples of the job. `per replica` means those of the policy."""
        return {"samples_per_prompt": self.samples_per_prompt, "data_parallel_size": self.policy.data_parallel_size}
