"""RolloutPlan: the batch arithmetic of reinforcement learning, from prompts to the
microbatches of each replica.

`Size` converts what users write into samples of the whole job, which everything else
counts. A step's samples are divided three
times: among the calls of the generator, among mini batches (one optimizer step each),
and among the passes of a mini batch.
The plan checks from the outside in, and stops where an error would only repeat one
before it: the numbers, then the batch, for which some legal mini batch must exist, then
the mini batches and passes, and the calls of the generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampupError,
    choice_error,
    raise_together,
)
from rampup.plan.numbers import divisors, nearest_in, nearest_multiples

# How the losses of tokens add up; see `rl.loss_agg_mode` in configs/rl.yml. A sequence
# without a token counts in none of them.
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "group-mean-token-mean",
)

Unit = Literal["prompts", "samples", "tokens"]
Scope = Literal["job", "replica"]
BYTES = {"bool": 1, "int32": 4, "float32": 4}
# Upper limit on the sizes of a step.
MAX_SAMPLES = 10**9


def count_problems(counts: dict[str, int], *, minimum: int = 1) -> list[RampupError]:
    """Return an error for every count that is not a whole number between `minimum` and
    10**9.
    """
    problems: list[RampupError] = []
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            problems.append(
                ConfigError(
                    f"{name}={str(count)[:100]!r} must be a whole number", key=name
                )
            )
        elif not minimum <= count <= MAX_SAMPLES:
            bound = minimum if count < minimum else MAX_SAMPLES
            limit = (
                f"at least {minimum}" if count < minimum else f"at most {MAX_SAMPLES:,}"
            )
            problems.append(
                ConfigError(
                    f"{name}={count} must be {limit}", key=name, nearest=(bound,)
                )
            )
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size with its unit and its scope, which the configurations of RL systems leave
    implicit.
    """

    count: int  # the number
    unit: Unit  # what it counts. A sample is one response to a prompt.
    # the whole job, or each data-parallel replica
    scope: Scope = "job"
    key: str | None = None  # the configuration key that errors refer to

    def __post_init__(self) -> None:
        problems = count_problems({self.key or "count": self.count})
        for name, value, choices in (
            ("unit", self.unit, get_args(Unit)),
            ("scope", self.scope, get_args(Scope)),
        ):
            if value not in choices:
                problems.append(choice_error(name, value, choices))
                problems[-1].key = self.key or name
        raise_together(problems)

    def factors(
        self, *, samples_per_prompt: int, data_parallel_size: int
    ) -> dict[str, int]:
        """Return what turns `count` into samples of the whole job, by name.

        Args:
            samples_per_prompt: responses to a prompt, each a sample.
            data_parallel_size: replicas of the job.
        """
        assert self.unit != "tokens", "a number of tokens is not a number of samples"
        found = {}
        if self.unit == "prompts":
            found["samples_per_prompt"] = samples_per_prompt
        if self.scope == "replica":
            found["data_parallel_size"] = data_parallel_size
        return found

    def factor(self, **factors: int) -> int:
        """Return the number of samples of the whole job per unit of `count`."""
        return math.prod(self.factors(**factors).values())

    def samples(self, **factors: int) -> int:
        """Return this size in samples of the whole job."""
        return self.count * self.factor(**factors)

    def arithmetic(self, role: str, **factors: int) -> str:
        """Return the conversion of the size into samples of the job as text: 'micro=4
        prompts * samples_per_prompt=5 = ...'.
        """
        own = [f"{name}={size}" for name, size in self.factors(**factors).items()]
        text = " * ".join([f"{self.key or role}={self}", *own])
        return f"{text} = {self.samples(**factors)} samples" if own else text

    def refused(
        self,
        role: str,
        rule: str,
        legal: Sequence[int],
        otherwise: str,
        *,
        multiple: int = 1,
        **factors: int,
    ) -> BatchDivisibilityError:
        """Return the error that the size breaks a rule, with the nearest of the legal
        counts, or else another fix.

        By the rule, the size in samples of the job is a multiple of `multiple`.
        """
        nearest = nearest_in(self.count, legal)
        fix = f"nearest: {', '.join(map(str, nearest))}" if nearest else otherwise
        divisor = multiple // math.gcd(multiple, self.factor(**factors))
        text = f"{self.arithmetic(role, **factors)} {rule}; {fix}"
        return BatchDivisibilityError(
            text,
            value=self.count,
            divisor=divisor,
            key=self.key or role,
            nearest=nearest,
        )

    def misfits(
        self,
        role: str,
        of: str,
        samples: int,
        *,
        pad: bool,
        rule: str = "",
        multiple: int = 1,
        least: int = 1,
        **factors: int,
    ) -> list[RampupError]:
        """Return an error unless the size divides a number of samples and keeps the
        rule, or with padding is no larger.

        By the rule, the size in samples of the job is a multiple of `multiple`, and not
        below `least`.
        """
        per_count = self.factor(**factors)
        fix = (
            "count it in prompts of the job"
            if role == "generation"
            else f"no count of {self.unit} fits; change another size"
        )
        if pad:
            if self.count * per_count <= samples:
                return []
            most = [max(samples // per_count, 1)]
            return [self.refused(role, f"must not exceed {of}", most, fix, **factors)]
        counts = divisors(samples // per_count) if samples % per_count == 0 else []
        legal = [
            count
            for count in counts
            if count * per_count % multiple == 0 and count * per_count >= least
        ]
        if self.count in legal:
            return []
        text = f"must divide {of}{rule}"
        return [self.refused(role, text, legal, fix, multiple=multiple, **factors)]

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.count == 1 else self.unit
        return f"{self.count} {unit}" + (
            "" if self.scope == "job" else f" per {self.scope}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The requested sizes of the training on the samples of a step."""

    mini_batch: Size  # samples of one optimizer step
    # Samples of one forward and backward pass, or a token budget per replica. None =
    # the whole mini batch.
    microbatch: Size | None = None
    data_parallel_size: int = 1  # replicas of the policy
    num_epochs: int = 1  # passes over the samples of a step

    @property
    def token_budget(self) -> int | None:
        """Tokens of one pass of one replica, if the microbatch is a token budget."""
        return (
            self.microbatch.count
            if self.microbatch is not None and self.microbatch.unit == "tokens"
            else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """The training on the samples of a step, as it follows from `Training`."""

    samples_per_step: int  # samples of one rollout
    mini_batch_samples: int  # samples of one optimizer step, over all replicas
    num_epochs: int  # passes over the samples
    data_parallel_size: int  # replicas
    microbatch_size: (
        int | None
    )  # samples per replica and pass. None with a token budget.
    token_budget: int | None = (
        None  # tokens of one pass of one replica. None without a budget.
    )
    # With a token budget, the passes of an optimizer step if every sample has the
    # maximum length. A first-fit packing never needs more. None if the lengths are
    # unknown.
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
        """Forward and backward passes of each replica per optimizer step. With a token
        budget the maximum, if known.
        """
        return (
            self.max_passes
            if self.microbatch_size is None
            else self.num_passes(self.mini_batch_samples)
        )

    @property
    def microbatch_samples(self) -> int | None:
        """Samples per pass over all replicas. None with a token budget."""
        return (
            None
            if self.microbatch_size is None
            else self.microbatch_size * self.data_parallel_size
        )

    @property
    def padded_samples(self) -> int:
        """Rows of weight 0 per epoch, which pad mini batches and microbatches."""
        if self.microbatch_samples is None:
            return 0
        full, rest = divmod(self.samples_per_step, self.mini_batch_samples)
        passes = full * self.num_passes(self.mini_batch_samples) + self.num_passes(rest)
        return passes * self.microbatch_samples - self.samples_per_step

    def num_passes(self, samples: int) -> int:
        """Return the passes over a mini batch of some samples, without a token
        budget.
        """
        assert self.microbatch_samples is not None, (
            "with a token budget, the lengths decide"
        )
        return -(-samples // self.microbatch_samples)

    def mini_batch_range(self, number: int) -> range:
        """Return the positions of a mini batch's samples in the epoch's order. With
        padding the last may be short.
        """
        start = number * self.mini_batch_samples
        return range(start, min(start + self.mini_batch_samples, self.samples_per_step))

    def to_dict(self) -> dict[str, int | None]:
        """Return the numbers as in `rampup plan --json`."""
        names = (
            "data_parallel_size",
            "num_mini_batches",
            "mini_batch_samples",
            "num_epochs",
            "optimizer_steps",
            "accumulation_steps",
            "microbatch_size",
            "microbatch_samples",
            "padded_samples",
            "token_budget",
        )
        return {
            "mini_batches" if name == "num_mini_batches" else name: getattr(self, name)
            for name in names
        }


def split_updates(
    training: Training,
    *,
    samples_per_step: int,
    samples_per_prompt: int,
    pad: bool = False,
    max_length: int | None = None,
) -> Updates:
    """Split the samples of a step into mini batches and microbatches, or raise an error
    with the nearest sizes.

    `pad` fills sizes that do not divide with rows of weight 0; `max_length` is in
    tokens, for a token budget.
    """
    replicas = training.data_parallel_size
    budget, micro = training.token_budget, training.microbatch
    factors = {"samples_per_prompt": samples_per_prompt, "data_parallel_size": replicas}
    mini_batch = training.mini_batch.samples(**factors)
    # Every replica has as many samples as the others, so a mini batch is a multiple of
    # their number. With a token budget the lengths decide which replica has how many,
    # but each of them needs a sample.
    evenly = shared = ""
    if replicas > 1:
        evenly = f" and be a multiple of data_parallel_size={replicas}"
        shared = f" and give each of data_parallel_size={replicas} replicas a sample"
    problems = training.mini_batch.misfits(
        "policy.mini_batch",
        f"the {samples_per_step} samples of a step",
        samples_per_step,
        pad=pad,
        rule=evenly if budget is None else shared,
        multiple=replicas if budget is None else 1,
        least=1 if budget is None else replicas,
        **factors,
    )
    microbatch_size = max_passes = None
    if micro is None:
        microbatch_size = -(-mini_batch // replicas)
    elif budget is None:
        microbatch_size = -(-micro.samples(**factors) // replicas)
        # Not after an illegal mini batch: divisors of it would be no advice.
        if not pad and not problems:
            problems = micro.misfits(
                "policy.microbatch",
                f"the mini batch of {mini_batch} samples",
                mini_batch,
                pad=False,
                rule=evenly,
                multiple=replicas,
                **factors,
            )
    elif max_length is not None and budget < max_length:
        key = micro.key or "policy.microbatch"
        problems.append(
            ConfigError(
                f"{key}={micro} must be at least the longest sample, max_prompt_length"
                f" + max_response_length = {max_length} tokens",
                fix=f"nearest: {max_length}",
                key=key,
                nearest=(max_length,),
            )
        )
    elif max_length is not None:
        per_replica = -(-mini_batch // replicas)
        max_passes = -(-per_replica // (budget // max_length))
    raise_together(problems)
    return Updates(
        samples_per_step=samples_per_step,
        mini_batch_samples=mini_batch,
        num_epochs=training.num_epochs,
        data_parallel_size=replicas,
        microbatch_size=microbatch_size,
        token_budget=budget,
        max_passes=max_passes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The arrays stored for every sample between generation and training, padded to the
    maximum lengths.
    """

    max_prompt_length: int  # tokens of the longest prompt
    max_response_length: int  # tokens of the longest response
    reference: bool = (
        True  # whether a reference policy's log-probabilities are stored, for a KL term
    )

    def __post_init__(self) -> None:
        lengths = {
            "max_prompt_length": self.max_prompt_length,
            "max_response_length": self.max_response_length,
        }
        raise_together(count_problems(lengths))

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return self.max_prompt_length + self.max_response_length

    def fields(self) -> dict[str, tuple[str, int]]:
        """Return type and elements per sample of each stored array.

        Per-token arrays cover the response. Tokens and attention mask also cover the
        prompt.
        """
        per_response = ["log_probabilities", "rewards", "advantages"]
        per_response[1:1] = ["reference_log_probabilities"] if self.reference else []
        return {
            "tokens": ("int32", self.max_length),
            "attention_mask": ("bool", self.max_length),
            "response_mask": ("bool", self.max_response_length),
            **dict.fromkeys(per_response, ("float32", self.max_response_length)),
        }

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of all arrays per sample."""
        return sum(self.field_bytes().values())

    def field_bytes(self) -> dict[str, int]:
        """Return the bytes of each array per sample."""
        return {
            name: elements * BYTES[dtype]
            for name, (dtype, elements) in self.fields().items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The batches of one step of reinforcement learning: generation, and training.

    A step generates `rollout_batch`, trains the policy on it, and sends the new weights
    to the generator.

    Attributes:
        rollout_batch: the batch that one step generates.
        samples_per_prompt: responses to each prompt.
        policy: the sizes of the training.
        generation: the batch of one call of the generator (a rollout microbatch). None
            = the whole batch.
        num_steps: steps of the run.
        pad: pad sizes that do not divide with rows of weight 0; a last mini batch may
            be short. False = raise an error.
        eval_prompts, eval_samples_per_prompt: prompts of one evaluation, and responses
            to each.
        experience: lengths and types of the stored arrays. None = unknown;
            `rollout_step` takes the lengths of its options.
        policy_updates: the resulting optimizer steps (derived).

    Raises:
        ConfigError, BatchDivisibilityError: sizes are invalid. One error has all
            problems and the nearest legal values.

    Example:
        >>> micro = Size(count=4, unit="samples", scope="replica")
        >>> policy = Training(
        ...     mini_batch=Size(count=256, unit="prompts"),
        ...     microbatch=micro,
        ...     data_parallel_size=16,
        ... )
        >>> plan = RolloutPlan(
        ...     rollout_batch=Size(count=1024, unit="prompts"),
        ...     samples_per_prompt=5,
        ...     policy=policy,
        ... )
        >>> (
        ...     plan.samples_per_step,
        ...     plan.policy_updates.optimizer_steps,
        ...     plan.policy_updates.accumulation_steps,
        ... )
        (5120, 4, 20)
    """

    rollout_batch: Size
    samples_per_prompt: int
    policy: Training
    generation: Size | None = None
    num_steps: int = 1
    pad: bool = False
    eval_prompts: int = 0
    eval_samples_per_prompt: int = 1
    experience: Experience | None = None
    policy_updates: Updates = field(init=False, repr=False, compare=False)

    def _repr_html_(self) -> str:
        from rampup.contrib.rl.tables import rollout_html

        return rollout_html(self)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_batch()
        samples = self.samples_per_step
        problems = list[RampupError]()
        try:
            updates = split_updates(
                self.policy,
                samples_per_step=samples,
                samples_per_prompt=self.samples_per_prompt,
                pad=self.pad,
                max_length=self.experience and self.experience.max_length,
            )
        except RampupError as error:
            problems += error.problems or (error,)
        # A key may set the size of a mini batch, of a pass and of a call at once; one
        # error about it is enough.
        call = self.generation
        known = {problem.key for problem in problems}
        if call is not None and (call.key or "generation") not in known:
            problems += call.misfits(
                "generation",
                f"the {samples} samples of a step",
                samples,
                pad=self.pad,
                **self._factors,
            )
        raise_together(problems)
        object.__setattr__(self, "policy_updates", updates)

    def _check_counts(self) -> None:
        """Refuse numbers that are no counts, and sizes in units that they cannot
        have.
        """
        counts = ("samples_per_prompt", "num_steps", "eval_samples_per_prompt")
        problems = count_problems({name: getattr(self, name) for name in counts})
        problems += count_problems({"eval_prompts": self.eval_prompts}, minimum=0)
        counts = ("data_parallel_size", "num_epochs")
        problems += count_problems(
            {f"policy.{name}": getattr(self.policy, name) for name in counts}
        )
        sizes = {
            "rollout_batch": self.rollout_batch,
            "generation": self.generation,
            "policy.mini_batch": self.policy.mini_batch,
            "policy.microbatch": self.policy.microbatch,
        }
        for name, size in sizes.items():
            if size is None or size.unit != "tokens":
                continue
            rule = ", or tokens per replica" if name.endswith(".microbatch") else ""
            if not rule or size.scope == "job":
                key = size.key or name
                problems.append(
                    ConfigError(
                        f"{key}={size} must count prompts or samples{rule}", key=key
                    )
                )
        raise_together(problems)

    def _check_batch(self) -> None:
        """Refuse a batch for which no mini batch would do.

        Whether the configured mini batch divides it is another question: `split_updates`
        blames the mini batch then.
        """
        size = self.rollout_batch
        samples = self.samples_per_step
        per_count = size.factor(**self._factors)
        if samples > MAX_SAMPLES:
            raise ConfigError(
                f"{size.arithmetic('rollout_batch', **self._factors)} must be at most"
                f" {MAX_SAMPLES:,} samples",
                key=size.key or "rollout_batch",
                nearest=(max(MAX_SAMPLES // per_count, 1),),
            )
        # The batch must be a multiple of each of these. One count of a mini batch may
        # be several samples, and without padding a mini batch gives every replica the
        # same number; with a token budget the lengths decide that.
        units = [self.samples_per_prompt]
        replicas = self.policy.data_parallel_size
        if not self.pad:
            units.append(self.policy.mini_batch.factor(**self._factors))
            if self.policy.token_budget is None:
                units.append(replicas)
        divisor = math.lcm(*units)
        if samples % divisor:
            step = divisor // math.gcd(divisor, per_count)
            raise size.refused(
                "rollout_batch",
                f"must be a multiple of {divisor} samples, the smallest number that has"
                f" whole prompts and divides evenly over data_parallel_size={replicas}",
                nearest_multiples(size.count, step),
                "",
                multiple=divisor,
                **self._factors,
            )

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
        return (
            self.samples_per_step
            if self.generation is None
            else self.generation.samples(**self._factors)
        )

    @property
    def generate_calls(self) -> int:
        """Calls of the generator per step."""
        return -(-self.samples_per_step // self.sequences_per_call)

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps over the run: the length of the learning-rate schedule."""
        return self.num_steps * self.policy_updates.optimizer_steps

    @property
    def eval_samples(self) -> int:
        """Samples of one evaluation."""
        return self.eval_prompts * self.eval_samples_per_prompt

    def timetable(self) -> list[dict[str, Any]]:
        """Return a step in its order, from prompts to optimizer steps: what there is,
        how many of it, and the sizes of each.

        Tokens are those of samples of the maximum lengths; None if these are unknown or
        there is no fixed size.
        """
        stored, G = self.experience, self.samples_per_prompt

        def row(what: str, number: int | None, samples: int | None, how: str) -> Any:
            whole = samples is not None and samples % G == 0
            return {
                "what": what,
                "number": number,
                "prompts": samples // G if whole else None,
                "samples": samples,
                "tokens": samples and stored and samples * stored.max_length,
                "how": how,
            }

        prompts = row("prompts", 1, None, "read") | {
            "prompts": self.prompts_per_step,
            "tokens": stored and stored.max_prompt_length * self.prompts_per_step,
        }
        calls, size = self.generate_calls, self.sequences_per_call
        rows = [prompts, row("responses", calls, size, f"{G:,} per prompt")]
        updates = self.policy_updates
        replicas = updates.data_parallel_size
        mini_batch, passes = updates.mini_batch_samples, updates.accumulation_steps
        epochs = updates.num_epochs
        how = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
        rows.append(row("mini batches", updates.num_mini_batches, mini_batch, how))
        how = f"{updates.microbatch_size or 0:,} per replica"
        micro = row(
            "microbatches",
            passes,
            updates.microbatch_samples,
            "1 replica" if replicas == 1 else how,
        )
        if updates.token_budget is not None:
            micro["how"] = "at most, packed"
            micro["tokens"] = updates.token_budget * replicas
        rows.append(micro)
        how = f"{updates.optimizer_steps:,} per step"
        rows.append(row("optimizer step", 1, mini_batch, how))
        return rows

    def to_dict(self) -> Mapping[str, Any]:
        """Return the plan as `rampup plan --json` prints it."""
        stored = None
        if self.experience is not None:
            per_sample = self.experience.bytes_per_sample
            stored = {
                "bytes_per_sample": per_sample,
                "bytes_per_step": per_sample * self.samples_per_step,
                "bytes_per_replica": (
                    per_sample
                    * -(-self.samples_per_step // self.policy.data_parallel_size)
                ),
                "fields": self.experience.field_bytes(),
            }
        return {
            "prompts_per_step": self.prompts_per_step,
            "samples_per_prompt": self.samples_per_prompt,
            "samples_per_step": self.samples_per_step,
            "generate_calls": self.generate_calls,
            "sequences_per_generate_call": self.sequences_per_call,
            **self.policy_updates.to_dict(),
            "weight_syncs": self.num_steps,
            "total_optimizer_steps": self.total_optimizer_steps,
            "eval_prompts": self.eval_prompts,
            "eval_samples": self.eval_samples,
            "experience": stored,
            "timetable": self.timetable(),
        }

    @property
    def _factors(self) -> dict[str, int]:
        """What turns a size into samples of the job."""
        return {
            "samples_per_prompt": self.samples_per_prompt,
            "data_parallel_size": self.policy.data_parallel_size,
        }
