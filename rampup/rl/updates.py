"""The training of one model, policy or critic, on the samples of a step: mini batches, microbatches and epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, raise_together
from rampup.plan.numbers import count_problems, divisors, nearest_in
from rampup.plan.split import BatchSplit
from rampup.rl.sizes import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The requested sizes of one model's training on the samples of a step."""

    mini_batch: Size  # samples of one optimizer step
    # Samples of one forward and backward pass, or a token budget per replica. None = the whole mini batch.
    microbatch: Size | None = None
    data_parallel_size: int = 1  # replicas of this model
    num_epochs: int = 1  # passes over the samples of a step
    num_stages: int = 1  # pipeline stages. The number of microbatches of an optimizer step is a multiple of it.

    def problems(self, model: str) -> list[RampupError]:
        """Return errors for sizes that are invalid by themselves. `model` is the name in errors."""
        sizes = ("data_parallel_size", "num_epochs", "num_stages")
        problems = count_problems({f"{model}.{name}": getattr(self, name) for name in sizes})
        for name, size, tokens_allowed in (("mini_batch", self.mini_batch, False), ("microbatch", self.microbatch, True)):
            if size is not None and size.unit == "tokens" and not (tokens_allowed and size.scope != "job"):
                key, rule = size.key or f"{model}.{name}", ", or tokens per replica" if tokens_allowed else ""
                problems.append(ConfigError(f"{key}={size} must count prompts or samples{rule}", key=key))
        return problems

    @property
    def token_budget(self) -> int | None:
        """Tokens of one pass of one replica, if the microbatch is a token budget."""
        return self.microbatch.count if self.microbatch is not None and self.microbatch.unit == "tokens" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """One model's training on the samples of a step, as it follows from `Training`.

    Example:
        >>> training = Training(mini_batch=Size(count=64, unit="prompts"), data_parallel_size=8,
        ...     microbatch=Size(count=4, unit="samples", scope="replica"), num_epochs=2)
        >>> updates = split_updates("policy", training, samples_per_step=2048, samples_per_prompt=8)
        >>> updates.num_mini_batches, updates.optimizer_steps, updates.accumulation_steps
        (4, 8, 16)
    """

    model: str  # `policy` or `critic`
    samples_per_step: int  # samples of one rollout
    mini_batch_samples: int  # samples of one optimizer step, over all replicas
    num_epochs: int  # passes over the samples
    data_parallel_size: int  # replicas
    num_stages: int  # pipeline stages
    split: BatchSplit | None  # the split of a mini batch, including rows of weight 0. None with a token budget.
    token_budget: int | None = None  # tokens of one pass of one replica. None without a budget.
    # with a token budget, the passes of an optimizer step if every sample has the maximum length. A first-fit packing
    # never needs more. None if the lengths are unknown.
    max_passes: int | None = None

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.samples_per_step // self.mini_batch_samples)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout, over all epochs."""
        return self.num_mini_batches * self.num_epochs

    @property
    def accumulation_steps(self) -> int | None:
        """Forward and backward passes of each replica per optimizer step. With a token budget the maximum, if known."""
        return self.max_passes if self.split is None else self.split.num_microbatches

    @property
    def microbatch_size(self) -> int | None:
        """Samples per replica and pass. None with a token budget."""
        return None if self.split is None else self.split.microbatch_size

    @property
    def microbatch_samples(self) -> int | None:
        """Samples per pass over all replicas. None with a token budget."""
        return None if self.split is None else self.split.microbatch_size * self.split.data_parallel_size

    @property
    def padded_samples(self) -> int:
        """Rows of weight 0 per epoch, which pad mini batches and microbatches."""
        if self.microbatch_samples is None or self.microbatches_per_epoch is None:
            return 0
        return self.microbatches_per_epoch * self.microbatch_samples - self.samples_per_step

    @property
    def microbatches_per_epoch(self) -> int | None:
        """Microbatches of each replica per epoch. None with a token budget."""
        if self.split is None:
            return None
        last = self.num_mini_batches - 1
        return last * self.split.num_microbatches + self.num_microbatches(last)

    def num_microbatches(self, mini_batch: int) -> int:
        """Return the number of microbatches of a mini batch, without a token budget. A short last one has fewer."""
        assert self.microbatch_samples is not None, "a token budget has no fixed microbatches"
        unit = self.microbatch_samples * self.num_stages
        return -(-len(self.mini_batch_range(mini_batch)) // unit) * self.num_stages

    def mini_batch_range(self, number: int) -> range:
        """Return the positions of a mini batch's samples in the epoch's order. With padding the last may be short."""
        start = number * self.mini_batch_samples
        return range(start, min(start + self.mini_batch_samples, self.samples_per_step))

    def to_dict(self) -> dict[str, int | None]:
        """Return the numbers as in `rampup plan --json`."""
        names = ("data_parallel_size", "num_mini_batches", "mini_batch_samples", "num_epochs", "optimizer_steps")
        names += ("accumulation_steps", "microbatch_size", "microbatch_samples", "padded_samples", "token_budget")
        return {"mini_batches" if name == "num_mini_batches" else name: getattr(self, name) for name in names}


def split_updates(
    model: str,
    training: Training,
    *,
    samples_per_step: int,
    samples_per_prompt: int,
    pad: bool = False,
    max_length: int | None = None,
) -> Updates:
    """Split the samples of a step into mini batches and microbatches of one model.

    Args:
        model: `policy` or `critic`.
        training: the sizes.
        samples_per_step: samples of one rollout.
        samples_per_prompt: responses to one prompt.
        pad: pad sizes that do not divide with rows of weight 0.
        max_length: tokens of the longest sample, for a token budget.

    Raises:
        BatchDivisibilityError, ConfigError: If sizes do not divide. One error has all problems and the nearest legal sizes.
    """
    rules = _UpdateRules(model, training, samples_per_step, samples_per_prompt, pad)
    split, max_passes = None, None
    if training.token_budget is None:
        raise_together(rules.mini_batch_problems() or rules.microbatch_problems())
        split = rules.split()
    else:
        raise_together([*rules.mini_batch_problems(), *rules.budget_problems(max_length)])
        if max_length is not None:
            per_replica = -(-rules.mini_batch // training.data_parallel_size)
            per_pass = (training.token_budget // max_length) * training.num_stages
            max_passes = -(-per_replica // per_pass) * training.num_stages
    return Updates(
        model=model,
        samples_per_step=samples_per_step,
        mini_batch_samples=rules.mini_batch,
        num_epochs=training.num_epochs,
        num_stages=training.num_stages,
        data_parallel_size=training.data_parallel_size,
        split=split,
        token_budget=training.token_budget,
        max_passes=max_passes,
    )


class _UpdateRules:
    """The divisibility rules of one model's sizes. Every number is in samples of the whole job."""

    def __init__(self, model: str, training: Training, samples: int, samples_per_prompt: int, pad: bool) -> None:
        self.model, self.training, self.step_samples, self.pad = model, training, samples, pad
        self.replicas, self.stages = training.data_parallel_size, training.num_stages
        self.factors = {"samples_per_prompt": samples_per_prompt, "data_parallel_size": self.replicas}
        self.mini_batch = training.mini_batch.samples(**self.factors)
        # A mini batch must be a multiple of this number.
        self.unit = 1 if pad or training.token_budget is not None else self.replicas * self.stages

    def mini_batch_problems(self) -> list[RampupError]:
        size = self.training.mini_batch
        per_count = size.factor(**self.factors)
        if self.pad:
            if self.mini_batch <= self.step_samples:
                return []
            rule = f"must not exceed the {self.step_samples} samples of a step"
            return [self._error(size, "mini_batch", rule, [max(self.step_samples // per_count, 1)])]
        # With a token budget a mini batch need not divide over the replicas, but each of them needs a sample.
        minimum = self.replicas if self.training.token_budget is not None else 1

        def is_legal(samples: int) -> bool:
            return self.step_samples % samples == 0 and samples % self.unit == 0 and samples >= minimum

        if is_legal(self.mini_batch):
            return []
        rule = f"must divide the {self.step_samples} samples of a step"
        if self.unit > 1:
            rule += f" and be a multiple of data_parallel_size={self.replicas}"
            rule += f" * num_stages={self.stages} = {self.unit}" if self.stages > 1 else ""
        rule += f" and give each of data_parallel_size={minimum} replicas a sample" if minimum > 1 else ""
        counts = divisors(self.step_samples // per_count) if self.step_samples % per_count == 0 else []
        return [self._error(size, "mini_batch", rule, [count for count in counts if is_legal(count * per_count)])]

    def microbatch_problems(self) -> list[RampupError]:
        size = self.training.microbatch
        if size is None or self.pad:
            return []
        per_count, per_stage = size.factor(**self.factors), self.mini_batch // self.stages
        samples = size.samples(**self.factors)
        if samples % self.replicas == 0 and per_stage % samples == 0:
            return []
        counts = divisors(per_stage // per_count) if per_stage % per_count == 0 else []
        rule = f"must divide the mini batch of {self.mini_batch} samples"
        rule += f" / num_stages={self.stages} = {per_stage}" if self.stages > 1 else ""
        rule += f" and be a multiple of data_parallel_size={self.replicas}" if self.replicas > 1 else ""
        return [self._error(size, "microbatch", rule, [count for count in counts if count * per_count % self.replicas == 0])]

    def budget_problems(self, max_length: int | None) -> list[RampupError]:
        size = self.training.microbatch
        assert size is not None
        if max_length is None or size.count >= max_length:
            return []
        key = size.key or f"{self.model}.microbatch"
        rule = f"the longest sample, max_prompt_length + max_response_length = {max_length} tokens; nearest: {max_length}"
        return [ConfigError(f"{key}={size} must be at least {rule}", key=key, nearest=(max_length,))]

    def split(self) -> BatchSplit:
        """Return the split of a mini batch, rounded up to full microbatches if it is padded."""
        size = self.training.microbatch
        per_replica = -(-self.mini_batch // (self.replicas * self.stages))
        microbatch = per_replica if size is None else -(-size.samples(**self.factors) // self.replicas)
        passes = -(-per_replica // microbatch)
        return BatchSplit(
            global_batch_size=self.replicas * passes * self.stages * microbatch,
            data_parallel_size=self.replicas,
            accumulation_steps=1 if self.stages > 1 else passes,
            num_pipeline_microbatches=passes * self.stages if self.stages > 1 else 1,
            microbatch_size=microbatch,
        )

    def _error(self, size: Size, name: str, rule: str, legal: list[int]) -> RampupError:
        role = f"{self.model}.{name}"
        nearest = nearest_in(size.count, legal)
        fix = f"nearest: {', '.join(map(str, nearest))}" if nearest else f"no count of {size.unit} fits; change another size"
        return BatchDivisibilityError(
            f"{size.arithmetic(role, **self.factors)} {rule}; {fix}",
            value=size.count,
            divisor=max(self.unit // math.gcd(self.unit, size.factor(**self.factors)), 1),
            key=size.key or role,
            nearest=nearest,
        )
