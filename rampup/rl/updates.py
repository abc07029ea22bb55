"""How one model, policy or critic, is trained on the samples of a step: mini batches, microbatches, epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, raise_together
from rampup.plan.numbers import count_problems, divisors, nearest_in
from rampup.plan.split import BatchSplit
from rampup.rl.sizes import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is asked of one model's training on the samples of a step.

    Attributes:
        mini_batch: what one optimizer step sees.
        microbatch: what one forward and backward pass sees; in tokens per replica, a budget; None = the whole mini batch.
        data_parallel_size: replicas of this model.
        num_epochs: passes over the samples of a step.
        num_stages: pipeline stages; the microbatches of an optimizer step are then a multiple of them.
    """

    mini_batch: Size
    microbatch: Size | None = None
    data_parallel_size: int = 1
    num_epochs: int = 1
    num_stages: int = 1

    def problems(self, model: str) -> list[RampupError]:
        """Return what is wrong with the sizes by themselves; `model` names it in errors."""
        counts = {
            f"{model}.data_parallel_size": self.data_parallel_size,
            f"{model}.num_epochs": self.num_epochs,
            f"{model}.num_stages": self.num_stages,
        }
        problems = count_problems(counts)
        for name, size, tokens_allowed in (("mini_batch", self.mini_batch, False), ("microbatch", self.microbatch, True)):
            if size is not None and size.unit == "tokens" and not (tokens_allowed and size.scope != "job"):
                problems.append(
                    ConfigError(
                        f"{size.key or f'{model}.{name}'}={size} must count prompts or samples"
                        + (", or tokens per replica" if tokens_allowed else ""),
                        key=size.key or f"{model}.{name}",
                    )
                )
        return problems

    @property
    def token_budget(self) -> int | None:
        """Tokens of one pass of one replica, where a budget stands in the place of a count."""
        return self.microbatch.count if self.microbatch is not None and self.microbatch.unit == "tokens" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What follows: one model's training on the samples of a step.

    Attributes:
        model: `policy` or `critic`.
        samples_per_step: samples of one rollout.
        mini_batch_samples: samples of one optimizer step, over all replicas.
        num_epochs: passes over the samples.
        data_parallel_size: replicas.
        num_stages: pipeline stages.
        split: how a mini batch is cut, rows of weight 0 included; None with a token budget.
        token_budget: tokens of one pass of one replica; None without a budget.
        most_passes: with a token budget, the passes of an optimizer step if every sample is as long as can be; None where
            the lengths are not known. A first-fit packing never needs more.

    Example:
        >>> training = Training(mini_batch=Size(count=64, unit="prompts"), data_parallel_size=8,
        ...     microbatch=Size(count=4, unit="samples", scope="replica"), num_epochs=2)
        >>> updates = cut_updates("policy", training, samples_per_step=2048, samples_per_prompt=8)
        >>> updates.num_mini_batches, updates.optimizer_steps, updates.accumulation_steps
        (4, 8, 16)
    """

    model: str
    samples_per_step: int
    mini_batch_samples: int
    num_epochs: int
    data_parallel_size: int
    num_stages: int
    split: BatchSplit | None
    token_budget: int | None = None
    most_passes: int | None = None

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.samples_per_step // self.mini_batch_samples)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout, epochs included."""
        return self.num_mini_batches * self.num_epochs

    @property
    def accumulation_steps(self) -> int | None:
        """Forward and backward passes of each replica per optimizer step; with a token budget the most, if known."""
        return self.most_passes if self.split is None else self.split.num_microbatches

    @property
    def microbatch_size(self) -> int | None:
        """Samples per replica and pass; None with a token budget."""
        return None if self.split is None else self.split.microbatch_size

    @property
    def microbatch_samples(self) -> int | None:
        """Samples per pass over all replicas; None with a token budget."""
        return None if self.split is None else self.split.microbatch_size * self.split.data_parallel_size

    @property
    def padded_samples(self) -> int:
        """Rows of weight 0 per epoch, which fill up mini batches and microbatches."""
        if self.microbatch_samples is None or self.microbatches_per_epoch is None:
            return 0
        return self.microbatches_per_epoch * self.microbatch_samples - self.samples_per_step

    @property
    def microbatches_per_epoch(self) -> int | None:
        """Microbatches of each replica per epoch; None with a token budget."""
        if self.split is None:
            return None
        last = self.num_mini_batches - 1
        return last * self.split.num_microbatches + self.num_microbatches(last)

    def num_microbatches(self, mini_batch: int) -> int:
        """Return the microbatches of a mini batch, without a token budget; a short last one has fewer."""
        assert self.microbatch_samples is not None, "a token budget has no fixed microbatches"
        unit = self.microbatch_samples * self.num_stages
        return -(-len(self.mini_batch_range(mini_batch)) // unit) * self.num_stages

    def mini_batch_range(self, number: int) -> range:
        """Return the places of a mini batch's samples in the epoch's order; with padding the last may be short."""
        start = number * self.mini_batch_samples
        return range(start, min(start + self.mini_batch_samples, self.samples_per_step))

    def to_dict(self) -> dict[str, int | None]:
        """Return the numbers by the names of `rampup plan --json`."""
        return {
            "data_parallel_size": self.data_parallel_size,
            "mini_batches": self.num_mini_batches,
            "mini_batch_samples": self.mini_batch_samples,
            "num_epochs": self.num_epochs,
            "optimizer_steps": self.optimizer_steps,
            "accumulation_steps": self.accumulation_steps,
            "microbatch_size": self.microbatch_size,
            "microbatch_samples": self.microbatch_samples,
            "padded_samples": self.padded_samples,
            "token_budget": self.token_budget,
        }


def cut_updates(
    model: str,
    training: Training,
    *,
    samples_per_step: int,
    samples_per_prompt: int,
    pad: bool = False,
    max_length: int | None = None,
) -> Updates:
    """Return what follows from one model's sizes.

    Args:
        model: `policy` or `critic`.
        training: the sizes.
        samples_per_step: samples of one rollout.
        samples_per_prompt: responses to one prompt.
        pad: fill up what does not divide with rows of weight 0.
        max_length: tokens of the longest sample, for a token budget.

    Raises:
        BatchDivisibilityError, ConfigError: sizes that do not fit, with the nearest legal ones, all at once.
    """
    cutter = _Cutter(model, training, samples_per_step, samples_per_prompt, pad)
    if training.token_budget is not None:
        raise_together([*cutter.mini_batch_problems(), *cutter.budget_problems(max_length)])
        split, passes = None, None
        if max_length is not None:
            per_replica = -(-cutter.mini_batch // training.data_parallel_size)
            fewest_each = (training.token_budget // max_length) * training.num_stages
            passes = -(-per_replica // fewest_each) * training.num_stages
    else:
        raise_together(cutter.mini_batch_problems() or cutter.microbatch_problems())
        split, passes = cutter.split(), None
    return Updates(
        model=model,
        samples_per_step=samples_per_step,
        mini_batch_samples=cutter.mini_batch,
        num_epochs=training.num_epochs,
        num_stages=training.num_stages,
        data_parallel_size=training.data_parallel_size,
        split=split,
        token_budget=training.token_budget,
        most_passes=passes,
    )


class _Cutter:
    """The divisibility rules of one model's sizes; everything is counted in samples of the job."""

    def __init__(self, model: str, training: Training, samples: int, samples_per_prompt: int, pad: bool) -> None:
        self.model, self.training, self.step_samples, self.pad = model, training, samples, pad
        self.replicas, self.stages = training.data_parallel_size, training.num_stages
        self.factors = {"samples_per_prompt": samples_per_prompt, "data_parallel_size": self.replicas}
        self.mini_batch = training.mini_batch.samples(**self.factors)

    @property
    def unit(self) -> int:
        """What a mini batch must be a multiple of."""
        return 1 if self.pad or self.training.token_budget is not None else self.replicas * self.stages

    def mini_batch_problems(self) -> list[RampupError]:
        size, per_count = self.training.mini_batch, self.training.mini_batch.factor(**self.factors)
        rules = ["must not exceed" if self.pad else "must divide", f"the {self.step_samples} samples of a step"]
        rules += [f"and be a multiple of {self._unit_text()}"] if self.unit > 1 else []
        least = self.replicas if self.training.token_budget is not None and not self.pad else 1
        rules += [f"and give each of data_parallel_size={least} replicas a sample"] if least > 1 else []
        if self.pad:
            fits, legal = self.mini_batch <= self.step_samples, [max(self.step_samples // per_count, 1)]
        else:
            fits = self.step_samples % self.mini_batch == 0 and self.mini_batch % self.unit == 0 and self.mini_batch >= least
            legal = [] if fits else self._mini_batch_counts(per_count, least)
        return [] if fits else [self._problem(size, "mini_batch", " ".join(rules), legal)]

    def _mini_batch_counts(self, per_count: int, least: int) -> list[int]:
        if self.step_samples % per_count:
            return []
        return [
            count
            for count in divisors(self.step_samples // per_count)
            if count * per_count % self.unit == 0 and count * per_count >= least
        ]

    def microbatch_problems(self) -> list[RampupError]:
        size = self.training.microbatch
        if size is None or self.pad:
            return []
        per_count, whole = size.factor(**self.factors), self.mini_batch // self.stages
        samples = size.samples(**self.factors)
        if samples % self.replicas == 0 and whole % samples == 0:
            return []
        counts = divisors(whole // per_count) if whole % per_count == 0 else []
        legal = [count for count in counts if count * per_count % self.replicas == 0]
        rule = f"must divide the mini batch of {self.mini_batch} samples"
        rule += f" / num_stages={self.stages} = {whole}" if self.stages > 1 else ""
        rule += f" and be a multiple of data_parallel_size={self.replicas}" if self.replicas > 1 else ""
        return [self._problem(size, "microbatch", rule, legal)]

    def budget_problems(self, max_length: int | None) -> list[RampupError]:
        size = self.training.microbatch
        assert size is not None
        if max_length is None or size.count >= max_length:
            return []
        key = size.key or f"{self.model}.microbatch"
        return [
            ConfigError(
                f"{key}={size} must hold the longest sample of max_prompt_length + max_response_length = {max_length} tokens; "
                f"nearest: {max_length}",
                key=key,
                nearest=(max_length,),
            )
        ]

    def split(self) -> BatchSplit:
        size = self.training.microbatch
        whole = -(-self.mini_batch // (self.replicas * self.stages))
        microbatch = whole if size is None else -(-size.samples(**self.factors) // self.replicas)
        passes = -(-whole // microbatch)
        return BatchSplit(
            global_batch_size=self.replicas * passes * self.stages * microbatch,
            data_parallel_size=self.replicas,
            accumulation_steps=1 if self.stages > 1 else passes,
            num_pipeline_microbatches=passes * self.stages if self.stages > 1 else 1,
            microbatch_size=microbatch,
        )

    def _problem(self, size: Size, name: str, rule: str, legal: list[int]) -> RampupError:
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

    def _unit_text(self) -> str:
        text = f"data_parallel_size={self.replicas}"
        return text + (f" * num_stages={self.stages} = {self.unit}" if self.stages > 1 else "")
