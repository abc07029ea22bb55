"""Sizes with a unit and a scope, the training of one model on the samples of a step, and the memory of the stored experience.

`Size` converts what users write into samples of the whole job. From there on, everything counts samples of the whole job:
`Training` has the requested sizes of one model, and `split_updates` checks them and makes `Updates` of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, choice_error, raise_together
from rampup.plan.numbers import divisors, nearest_in

# How the losses of tokens add up; see `rl.loss_agg_mode` in configs/rl.yml. A sequence without a token counts in none of them.
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "group-mean-token-mean")

Unit = Literal["prompts", "samples", "tokens"]
Scope = Literal["job", "replica", "process"]
_TYPES = {1: "bool int8 uint8", 2: "float16 bfloat16 uint16", 4: "float32 int32 uint32", 8: "float64 int64"}
BYTES = {name: size for size, names in _TYPES.items() for name in names.split()}
# Upper limit on the sizes of a step.
MAX_SAMPLES = 10**9


def count_problems(counts: dict[str, int], *, minimum: int = 1) -> list[RampupError]:
    """Return an error for every count that is not a whole number between `minimum` and 10**9."""
    problems: list[RampupError] = []
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            problems.append(ConfigError(f"{name}={str(count)[:100]!r} must be a whole number", key=name))
        elif not minimum <= count <= MAX_SAMPLES:
            bound = minimum if count < minimum else MAX_SAMPLES
            limit = f"at least {minimum}" if count < minimum else f"at most {MAX_SAMPLES:,}"
            problems.append(ConfigError(f"{name}={count} must be {limit}", key=name, nearest=(bound,)))
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size with its unit and its scope, which the configurations of RL systems leave implicit.

    Example:
        >>> mini_batch = Size(count=256, unit="prompts")
        >>> mini_batch.samples(samples_per_prompt=5, data_parallel_size=8), str(mini_batch)
        (1280, '256 prompts')
    """

    count: int  # the number
    unit: Unit  # what it counts. A sample is one response to a prompt.
    scope: Scope = "job"  # the whole job, each data-parallel replica, or each process that is a replica (trlX)
    key: str | None = None  # the configuration key that errors refer to

    def __post_init__(self) -> None:
        problems = count_problems({self.key or "count": self.count})
        for name, value, choices in (("unit", self.unit, get_args(Unit)), ("scope", self.scope, get_args(Scope))):
            if value not in choices:
                problems.append(choice_error(name, value, choices))
                problems[-1].key = self.key or name
        raise_together(problems)

    def factor(self, *, samples_per_prompt: int, data_parallel_size: int) -> int:
        """Return the number of samples of the whole job per unit of `count`."""
        assert self.unit != "tokens", "a number of tokens is not a number of samples"
        per_count = samples_per_prompt if self.unit == "prompts" else 1
        return per_count * (1 if self.scope == "job" else data_parallel_size)

    def samples(self, **factors: int) -> int:
        """Return this size in samples of the whole job."""
        return self.count * self.factor(**factors)

    def arithmetic(self, role: str, *, samples_per_prompt: int, data_parallel_size: int) -> str:
        """Return the conversion of the size into samples of the job as text: 'micro=4 prompts * samples_per_prompt=5 = ...'."""
        factors = [f"samples_per_prompt={samples_per_prompt}"] if self.unit == "prompts" else []
        factors += [f"data_parallel_size={data_parallel_size}"] if self.scope != "job" else []
        text = " * ".join([f"{self.key or role}={self}", *factors])
        total = self.samples(samples_per_prompt=samples_per_prompt, data_parallel_size=data_parallel_size)
        return f"{text} = {total} samples" if factors else text

    def refused(
        self, role: str, rule: str, legal: Iterable[int], otherwise: str, *, multiple: int = 1, **factors: int
    ) -> BatchDivisibilityError:
        """Return the error that the size breaks a rule, with the nearest of the legal counts, or else another fix.

        By the rule, the size in samples of the job is a multiple of `multiple`.
        """
        nearest = nearest_in(self.count, list(legal))
        fix = f"nearest: {', '.join(map(str, nearest))}" if nearest else otherwise
        divisor = multiple // math.gcd(multiple, self.factor(**factors))
        text = f"{self.arithmetic(role, **factors)} {rule}; {fix}"
        return BatchDivisibilityError(text, value=self.count, divisor=divisor, key=self.key or role, nearest=nearest)

    def misfits(
        self, role: str, of: str, samples: int, *, pad: bool, rule: str = "", multiple: int = 1, least: int = 1, **factors: int
    ) -> list[RampupError]:
        """Return an error unless the size divides a number of samples and keeps the rule, or with padding is no larger."""
        per_count = self.factor(**factors)
        counts = divisors(samples // per_count) if samples % per_count == 0 else []
        legal = [count for count in counts if count * per_count % multiple == 0 and count * per_count >= least]
        if self.count * per_count <= samples if pad else self.count in legal:
            return []
        legal = [max(samples // per_count, 1)] if pad else legal
        text = f"must not exceed {of}" if pad else f"must divide {of}{rule}"
        fix = "count it in prompts of the job" if role == "generation" else f"no count of {self.unit} fits; change another size"
        return [self.refused(role, text, legal, fix, multiple=multiple, **factors)]

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.count == 1 else self.unit
        return f"{self.count} {unit}" + ("" if self.scope == "job" else f" per {self.scope}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The requested sizes of one model's training on the samples of a step."""

    mini_batch: Size  # samples of one optimizer step
    # Samples of one forward and backward pass, or a token budget per replica. None = the whole mini batch.
    microbatch: Size | None = None
    data_parallel_size: int = 1  # replicas of this model
    num_epochs: int = 1  # passes over the samples of a step
    num_stages: int = 1  # pipeline stages. The number of microbatches of an optimizer step is a multiple of it.

    @property
    def token_budget(self) -> int | None:
        """Tokens of one pass of one replica, if the microbatch is a token budget."""
        return self.microbatch.count if self.microbatch is not None and self.microbatch.unit == "tokens" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """One model's training on the samples of a step, as it follows from `Training`."""

    model: str  # `policy` or `critic`
    samples_per_step: int  # samples of one rollout
    mini_batch_samples: int  # samples of one optimizer step, over all replicas
    num_epochs: int  # passes over the samples
    data_parallel_size: int  # replicas
    num_stages: int  # pipeline stages
    microbatch_size: int | None  # samples per replica and pass. None with a token budget.
    token_budget: int | None = None  # tokens of one pass of one replica. None without a budget.
    # With a token budget, the passes of an optimizer step if every sample has the maximum length. A first-fit packing
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
        return self.max_passes if self.microbatch_size is None else self.num_passes(self.mini_batch_samples)

    @property
    def microbatch_samples(self) -> int | None:
        """Samples per pass over all replicas. None with a token budget."""
        return None if self.microbatch_size is None else self.microbatch_size * self.data_parallel_size

    @property
    def padded_samples(self) -> int:
        """Rows of weight 0 per epoch, which pad mini batches and microbatches."""
        if self.microbatch_samples is None:
            return 0
        full, rest = divmod(self.samples_per_step, self.mini_batch_samples)
        passes = full * self.num_passes(self.mini_batch_samples) + self.num_passes(rest)
        return passes * self.microbatch_samples - self.samples_per_step

    def num_passes(self, samples: int) -> int:
        """Return the passes over a mini batch of some samples, without a token budget: whole passes of every stage."""
        assert self.microbatch_samples is not None, "with a token budget, the lengths decide"
        return -(-samples // (self.microbatch_samples * self.num_stages)) * self.num_stages

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
    """Split the samples of a step into mini batches and microbatches of one model, or raise an error with the nearest sizes.

    `pad` fills sizes that do not divide with rows of weight 0; `max_length` is in tokens, for a token budget.
    """
    replicas = training.data_parallel_size
    stages = training.num_stages
    budget = training.token_budget
    factors = {"samples_per_prompt": samples_per_prompt, "data_parallel_size": replicas}
    mini_batch = training.mini_batch.samples(**factors)
    # Every stage of every replica has as many samples as the others, so a mini batch is a multiple of this. With a token budget
    # the lengths decide which replica has how many, but each of them needs a sample.
    unit = 1 if pad or budget is not None else replicas * stages
    least = 1 if pad or budget is None else replicas
    rule = ""
    if unit > 1:
        rule = f" and be a multiple of data_parallel_size={replicas}"
        rule += f" * num_stages={stages} = {unit}" if stages > 1 else ""
    rule += f" and give each of data_parallel_size={least} replicas a sample" if least > 1 else ""
    key = f"{model}.mini_batch"
    whole = f"the {samples_per_step} samples of a step"
    problems = training.mini_batch.misfits(
        key, whole, samples_per_step, pad=pad, rule=rule, multiple=unit, least=least, **factors
    )

    microbatch_size = None
    max_passes = None
    if training.microbatch is None:
        microbatch_size = -(-mini_batch // (replicas * stages))
    elif budget is not None:
        if max_length is not None and budget < max_length:
            key = training.microbatch.key or f"{model}.microbatch"
            text = f"{key}={training.microbatch} must be at least the longest sample, max_prompt_length + "
            text += f"max_response_length = {max_length} tokens; nearest: {max_length}"
            problems.append(ConfigError(text, key=key, nearest=(max_length,)))
        elif max_length is not None:
            per_replica = -(-mini_batch // replicas)
            max_passes = -(-per_replica // (budget // max_length * stages)) * stages
    else:
        microbatch_size = -(-training.microbatch.samples(**factors) // replicas)
        # Not after an illegal mini batch: divisors of it would be no advice.
        if not pad and not problems:
            per_stage = mini_batch // stages
            whole = f"the mini batch of {mini_batch} samples" + (f" / num_stages={stages} = {per_stage}" if stages > 1 else "")
            rule = f" and be a multiple of data_parallel_size={replicas}" if replicas > 1 else ""
            limits = {"multiple": replicas, **factors}
            problems = training.microbatch.misfits(f"{model}.microbatch", whole, per_stage, pad=False, rule=rule, **limits)
    raise_together(problems)
    return Updates(
        model=model,
        samples_per_step=samples_per_step,
        mini_batch_samples=mini_batch,
        num_epochs=training.num_epochs,
        data_parallel_size=replicas,
        num_stages=stages,
        microbatch_size=microbatch_size,
        token_budget=budget,
        max_passes=max_passes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The arrays stored for every sample between generation and training, padded to the maximum lengths."""

    max_prompt_length: int  # tokens of the longest prompt
    max_response_length: int  # tokens of the longest response
    reference: bool = True  # whether a reference policy's log-probabilities are stored, for a KL term
    token_dtype: str = "int32"  # type of the tokens
    value_dtype: str = "float32"  # type of log-probabilities, values, rewards and advantages

    def __post_init__(self) -> None:
        lengths = {"max_prompt_length": self.max_prompt_length, "max_response_length": self.max_response_length}
        types = {"token_dtype": self.token_dtype, "value_dtype": self.value_dtype}
        wrong = [choice_error(name, dtype, list(BYTES)) for name, dtype in types.items() if dtype not in BYTES]
        raise_together([*count_problems(lengths), *wrong])

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return self.max_prompt_length + self.max_response_length

    def fields(self, *, critic: bool) -> dict[str, tuple[str, int]]:
        """Return type and elements per sample of each stored array. A critic adds values and returns.

        Per-token arrays cover the response. Tokens and attention mask also cover the prompt.
        """
        per_response = ["log_probabilities", "rewards", "advantages", *(["values", "returns"] if critic else [])]
        per_response[1:1] = ["reference_log_probabilities"] if self.reference else []
        return {
            "tokens": (self.token_dtype, self.max_length),
            "attention_mask": ("bool", self.max_length),
            "response_mask": ("bool", self.max_response_length),
            **dict.fromkeys(per_response, (self.value_dtype, self.max_response_length)),
        }

    def field_bytes(self, *, critic: bool) -> dict[str, int]:
        """Return the bytes of each array per sample."""
        return {name: elements * BYTES[dtype] for name, (dtype, elements) in self.fields(critic=critic).items()}

    def bytes_per_sample(self, *, critic: bool) -> int:
        """Return the bytes stored per sample."""
        return sum(self.field_bytes(critic=critic).values())
