"""Token budget of a ramp: its optimizer steps and time, compared with constant batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rampup.errors import RampDefinitionError
from rampup.plan.numbers import MAX_COUNT
from rampup.plan.ramp import BatchRamp

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """A number of tokens to train on with a ramp.

    Example:
        >>> budget = TokenBudget(ramp=BatchRamp.from_schedule("0:8 80:16"), tokens=2400, tokens_per_sample=10)
        >>> budget.num_samples, budget.steps, budget.steps_at_first, budget.steps_at_final
        (240, 20, 30, 15)
    """

    ramp: BatchRamp  # maps samples to the global batch size
    tokens: int  # the budget
    tokens_per_sample: int  # tokens in one sample

    def __post_init__(self) -> None:
        for key, value in (("budget", self.tokens), ("max_target_length", self.tokens_per_sample)):
            if not 1 <= value <= MAX_COUNT:
                raise RampDefinitionError(
                    f"{key}={value} must be between 1 and 10**18 tokens", key=key, nearest=(1 if value < 1 else MAX_COUNT,)
                )

    @property
    def num_samples(self) -> int:
        """Samples needed for the budget, rounded up."""
        return -(-self.tokens // self.tokens_per_sample)

    @property
    def steps(self) -> int:
        """Optimizer steps of the ramp that consume the budget."""
        return self.ramp.step_of_sample(self.num_samples - 1) + 1

    @property
    def consumed_tokens(self) -> int:
        """Tokens of these steps: the budget, plus the excess of the last batch."""
        return self.ramp.samples_before(self.steps) * self.tokens_per_sample

    @property
    def steps_at_first(self) -> int:
        """Optimizer steps for the budget at a constant batch size, that of the first phase."""
        return self._steps_at(self.ramp.sizes[0])

    @property
    def steps_at_final(self) -> int:
        """Optimizer steps for the budget at a constant batch size, that of the last phase."""
        return self._steps_at(self.ramp.sizes[-1])

    @property
    def steps_by_size(self) -> dict[int, int]:
        """Optimizer steps of the ramp at each global batch size, as far as the budget reaches."""
        result: dict[int, int] = {}
        for phase in self.ramp.phases:
            end = self.steps if phase.num_steps is None else min(phase.start_step + phase.num_steps, self.steps)
            if end > phase.start_step:
                size = phase.global_batch_size
                result[size] = result.get(size, 0) + end - phase.start_step
        return result

    def seconds(self, tokens_per_second: Mapping[int, Fraction]) -> Fraction:
        """Return the duration of the steps.

        Args:
            tokens_per_second: throughput by global batch size. A missing size uses the nearest one, by ratio.

        Example:
            >>> budget = TokenBudget(ramp=BatchRamp.from_schedule("0:8 80:16"), tokens=2400, tokens_per_sample=10)
            >>> budget.seconds({8: Fraction(100), 16: Fraction(200)})
            Fraction(16, 1)
        """
        total = Fraction(0)
        for size, steps in self.steps_by_size.items():
            nearest = min(tokens_per_second, key=lambda known: Fraction(max(known, size), min(known, size)))
            total += Fraction(steps * size * self.tokens_per_sample) / tokens_per_second[nearest]
        return total

    def to_dict(self) -> dict[str, object]:
        """Return the budget as `rampup plan --budget --json` prints it.

        `fewer_steps_than_first` is the number of optimizer steps that the ramp saves compared with its first batch size, and
        `more_steps_than_final` the number of additional steps compared with its last one. A decreasing batch size makes them
        negative.
        """
        return {
            "tokens": self.tokens,
            "tokens_per_sample": self.tokens_per_sample,
            "num_samples": self.num_samples,
            "steps": self.steps,
            "consumed_tokens": self.consumed_tokens,
            "first_global_batch_size": self.ramp.sizes[0],
            "steps_at_first": self.steps_at_first,
            "fewer_steps_than_first": self.steps_at_first - self.steps,
            "final_global_batch_size": self.ramp.sizes[-1],
            "steps_at_final": self.steps_at_final,
            "more_steps_than_final": self.steps - self.steps_at_final,
            "steps_by_global_batch_size": {str(size): steps for size, steps in self.steps_by_size.items()},
        }

    def _steps_at(self, global_batch_size: int) -> int:
        return -(-self.num_samples // global_batch_size)
