"""Sizes that say what they count and of what, and the data-parallel size from the other parallel sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, raise_together
from rampup.plan.numbers import count_problems, nearest_multiples

Unit = Literal["prompts", "samples", "tokens"]
Scope = Literal["job", "replica", "process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size with its unit and its scope: the two things that every system leaves unsaid.

    Attributes:
        count: how many.
        unit: of what; a sample is one response to a prompt.
        scope: of the whole job, of each data-parallel replica, or of each process that is one (trlX).
        key: the configuration key that it was written as, for errors.

    Raises:
        ConfigError: a count below 1 or above 10**9, or a unit or scope that does not exist.

    Example:
        >>> mini_batch = Size(count=256, unit="prompts")
        >>> mini_batch.samples(samples_per_prompt=5, data_parallel_size=8), str(mini_batch)
        (1280, '256 prompts')
    """

    count: int
    unit: Unit
    scope: Scope = "job"
    key: str | None = None

    def __post_init__(self) -> None:
        raise_together(
            [
                *count_problems({self.key or "count": self.count}),
                *_choice_problems("unit", self.unit, get_args(Unit), self.key),
                *_choice_problems("scope", self.scope, get_args(Scope), self.key),
            ]
        )

    def factor(self, *, samples_per_prompt: int, data_parallel_size: int) -> int:
        """Return the samples of the whole job that a count of one stands for."""
        assert self.unit != "tokens", "tokens are no samples"
        per_count = samples_per_prompt if self.unit == "prompts" else 1
        return per_count * (1 if self.scope == "job" else data_parallel_size)

    def samples(self, *, samples_per_prompt: int, data_parallel_size: int) -> int:
        """Return this size in samples of the whole job."""
        return self.count * self.factor(samples_per_prompt=samples_per_prompt, data_parallel_size=data_parallel_size)

    def arithmetic(self, role: str, *, samples_per_prompt: int, data_parallel_size: int) -> str:
        """Return the size by its name, and how it becomes samples of the job.

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
    """Return how many replicas share the batch: devices / (tensor * pipeline * context * sequence).

    Args:
        num_devices: devices of the job that train the model.
        tensor: devices that share each layer's matrices.
        pipeline: pipeline stages.
        context: devices that share each sequence throughout the model (Megatron's context parallelism).
        sequence: devices that share each sequence by exchanging heads (Ulysses, as the FSDP backends of veRL and SkyRL use
            it). Megatron's sequence parallelism lies on the tensor-parallel devices and is 1 here.
        key: the configuration key of `num_devices`, for the error.

    Raises:
        ConfigError: a size below 1.
        BatchDivisibilityError: the devices cannot be shared out so; names the nearest numbers of devices.

    Example:
        >>> data_parallel_size(256, tensor=8, pipeline=2), data_parallel_size(256, sequence=8)
        (16, 32)

    Source: Megatron-LM `parallel_state.py`; veRL `fsdp/transformer_impl.py` (world // ulysses_sequence_parallel_size).
    """
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "sequence": sequence}
    raise_together(count_problems({key: num_devices} | sizes))
    shared = math.prod(sizes.values())
    if num_devices % shared:
        used = {name: size for name, size in sizes.items() if size > 1}
        names, values = " * ".join(used), " * ".join(map(str, used.values()))
        nearest = nearest_multiples(num_devices, shared)
        raise BatchDivisibilityError(
            f"{key}={num_devices} must be a multiple of {names} = {values}{f' = {shared}' if len(used) > 1 else ''}; nearest: "
            f"{', '.join(map(str, nearest))}",
            value=num_devices,
            divisor=shared,
            key=key,
        )
    return num_devices // shared


def _choice_problems(name: str, value: object, choices: tuple[str, ...], key: str | None) -> list[RampupError]:
    if value in choices:
        return []
    return [ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}", key=key or name, nearest=choices)]
