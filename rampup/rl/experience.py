"""The experience that a step stores between generation and training, in bytes, from lengths and types."""

from __future__ import annotations

from dataclasses import dataclass

from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.numbers import count_problems

BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float16": 2,
    "bfloat16": 2,
    "uint16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float64": 8,
    "int64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceField:
    """One array of the stored experience.

    Attributes:
        name: what it holds.
        dtype: type of its elements.
        elements: elements per sample.
    """

    name: str
    dtype: str
    elements: int

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of one sample."""
        return self.elements * BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What is stored of every sample, padded to the greatest lengths.

    Attributes:
        max_prompt_length: tokens of the longest prompt.
        max_response_length: tokens of the longest response.
        reference: whether a reference policy's log-probabilities are stored (for a KL term).
        token_dtype: type of the tokens.
        value_dtype: type of log-probabilities, values, rewards and advantages.

    Raises:
        ConfigError: a length below 1 or a type that is not known.

    Example:
        >>> experience = Experience(max_prompt_length=512, max_response_length=1024)
        >>> experience.bytes_per_sample(critic=False), experience.bytes_per_sample(critic=True)
        (25088, 33280)
    """

    max_prompt_length: int
    max_response_length: int
    reference: bool = True
    token_dtype: str = "int32"
    value_dtype: str = "float32"

    def __post_init__(self) -> None:
        lengths = {"max_prompt_length": self.max_prompt_length, "max_response_length": self.max_response_length}
        types = {"token_dtype": self.token_dtype, "value_dtype": self.value_dtype}
        problems: list[RampupError] = count_problems(lengths)
        problems += [
            ConfigError(f"{name}={dtype!r} must be one of {', '.join(BYTES)}", key=name, nearest=tuple(BYTES))
            for name, dtype in types.items()
            if dtype not in BYTES
        ]
        raise_together(problems)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_length + self.max_response_length

    def fields(self, *, critic: bool) -> tuple[ExperienceField, ...]:
        """Return the stored arrays; a critic adds values and returns.

        Per-token arrays cover the response, tokens and attention mask the prompt too.
        """
        value, response = self.value_dtype, self.max_response_length
        per_response = [
            "log_probabilities",
            *(["reference_log_probabilities"] if self.reference else []),
            "rewards",
            "advantages",
        ]
        per_response += ["values", "returns"] if critic else []
        return (
            ExperienceField(name="tokens", dtype=self.token_dtype, elements=self.max_length),
            ExperienceField(name="attention_mask", dtype="bool", elements=self.max_length),
            ExperienceField(name="response_mask", dtype="bool", elements=response),
            *(ExperienceField(name=name, dtype=value, elements=response) for name in per_response),
        )

    def bytes_per_sample(self, *, critic: bool) -> int:
        """Return the bytes that are stored of one sample."""
        return sum(field.bytes_per_sample for field in self.fields(critic=critic))
