"""Sizes with a unit and a scope, the data-parallel size, and the memory of the stored experience."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rampup.errors import BatchDivisibilityError, choice_error, raise_together
from rampup.plan.numbers import count_problems, format_product, nearest_multiples

Unit = Literal["prompts", "samples", "tokens"]
Scope = Literal["job", "replica", "process"]
_TYPES = {1: "bool int8 uint8", 2: "float16 bfloat16 uint16", 4: "float32 int32 uint32", 8: "float64 int64"}
BYTES = {name: size for size, names in _TYPES.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size with its unit and its scope, which the configurations of RL systems leave implicit.

    Raises:
        ConfigError: If the count is below 1 or above 10**9, or the unit or scope is unknown.

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

    def samples(self, *, samples_per_prompt: int, data_parallel_size: int) -> int:
        """Return this size in samples of the whole job."""
        return self.count * self.factor(samples_per_prompt=samples_per_prompt, data_parallel_size=data_parallel_size)

    def arithmetic(self, role: str, *, samples_per_prompt: int, data_parallel_size: int) -> str:
        """Return the conversion of the size into samples of the job as text.

        Example:
            >>> size = Size(count=4, unit="prompts", scope="replica", key="micro")
            >>> size.arithmetic("microbatch", samples_per_prompt=5, data_parallel_size=8)
            'micro=4 prompts per replica * samples_per_prompt=5 * data_parallel_size=8 = 160 samples'
        """
        factors = [f"samples_per_prompt={samples_per_prompt}"] if self.unit == "prompts" else []
        factors += [f"data_parallel_size={data_parallel_size}"] if self.scope != "job" else []
        text = " * ".join([f"{self.key or role}={self}", *factors])
        total = self.samples(samples_per_prompt=samples_per_prompt, data_parallel_size=data_parallel_size)
        return f"{text} = {total} samples" if factors else text

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.count == 1 else self.unit
        return f"{self.count} {unit}" + ("" if self.scope == "job" else f" per {self.scope}")


def data_parallel_size(
    num_devices: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1, sequence: int = 1, key: str = "num_devices"
) -> int:
    """Return the number of replicas that share the batch: devices / (tensor * pipeline * context * sequence).

    Args:
        num_devices: devices of the job that train the model.
        tensor: devices that share each layer's matrices.
        pipeline: pipeline stages.
        context: devices that share each sequence throughout the model (Megatron's context parallelism).
        sequence: devices that share each sequence by exchanging heads (Ulysses, in the FSDP backends of veRL and SkyRL).
            Megatron's sequence parallelism uses the tensor-parallel devices, so it is 1 here.
        key: the configuration key of `num_devices`, for errors.

    Raises:
        ConfigError: If a size is below 1.
        BatchDivisibilityError: If the devices cannot be divided evenly. The error has the nearest numbers of devices.

    Example:
        >>> data_parallel_size(256, tensor=8, pipeline=2), data_parallel_size(256, sequence=8)
        (16, 32)

    Source: Megatron-LM `parallel_state.py`; veRL `fsdp/transformer_impl.py` (world // ulysses_sequence_parallel_size).
    """
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "sequence": sequence}
    raise_together(count_problems({key: num_devices} | sizes))
    shared = math.prod(sizes.values())
    if num_devices % shared:
        nearest = ", ".join(map(str, nearest_multiples(num_devices, shared)))
        text = f"{key}={num_devices} must be a multiple of {format_product(sizes)}; nearest: {nearest}"
        raise BatchDivisibilityError(text, value=num_devices, divisor=shared, key=key)
    return num_devices // shared


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceField:
    """One array of the stored experience."""

    name: str  # the name of the array
    dtype: str  # type of its elements
    elements: int  # elements per sample

    @property
    def bytes_per_sample(self) -> int:
        """Bytes per sample."""
        return self.elements * BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The arrays stored for every sample between generation and training, padded to the maximum lengths.

    Raises:
        ConfigError: If a length is below 1 or a type is unknown.

    Example:
        >>> experience = Experience(max_prompt_length=512, max_response_length=1024)
        >>> experience.bytes_per_sample(critic=False), experience.bytes_per_sample(critic=True)
        (25088, 33280)
    """

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

    def fields(self, *, critic: bool) -> tuple[ExperienceField, ...]:
        """Return the stored arrays. A critic adds values and returns.

        Per-token arrays cover the response. Tokens and attention mask also cover the prompt.
        """
        value, response = self.value_dtype, self.max_response_length
        per_response = ["log_probabilities", "rewards", "advantages", *(["values", "returns"] if critic else [])]
        per_response[1:1] = ["reference_log_probabilities"] if self.reference else []
        return (
            ExperienceField(name="tokens", dtype=self.token_dtype, elements=self.max_length),
            ExperienceField(name="attention_mask", dtype="bool", elements=self.max_length),
            ExperienceField(name="response_mask", dtype="bool", elements=response),
            *(ExperienceField(name=name, dtype=value, elements=response) for name in per_response),
        )

    def bytes_per_sample(self, *, critic: bool) -> int:
        """Return the bytes stored per sample."""
        return sum(field.bytes_per_sample for field in self.fields(critic=critic))
