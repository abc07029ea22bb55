"""Published scaling laws for the batch size of language-model pre-training: how large it may be, before any run.

Two different quantities have laws. The *optimal* batch reaches the lowest loss with a number of tokens. The *critical* batch is
the largest that costs few additional tokens, so it is larger. Both grow with the tokens of the run and hardly with the model.
The laws were fitted on other data, tokenizers, optimizers and schedules, so their spread is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.numbers import parse_count

Kind = Literal["optimal", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLaw:
    """One published law.

    Attributes:
        name: its name.
        kind: `optimal` or `critical`.
        formula: the formula, in the units of the source.
        source: where it is published.
        batch_tokens: from the tokens of the run and the parameters of the model to the batch in tokens.
    """

    name: str
    kind: Kind
    formula: str
    source: str
    batch_tokens: Callable[[int, int], float]


def _kaplan(tokens: int, params: int) -> float:
    loss = ((6.4e13 / params) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103
    return float(2e8 * loss ** (-1 / 0.21))


LAWS = (
    ScalingLaw(
        name="Power Lines, optimal",
        kind="optimal",
        formula="0.0306 * D**0.383 sequences of 2,048 tokens",
        source="Bergsma et al. 2025, arXiv 2505.13738",
        batch_tokens=lambda tokens, params: 2048 * 0.0306 * tokens**0.383,
    ),
    ScalingLaw(
        name="Step Law",
        kind="optimal",
        formula="0.58 * D**0.571 tokens",
        source="Li et al. 2025, arXiv 2503.04715",
        batch_tokens=lambda tokens, params: 0.58 * tokens**0.571,
    ),
    ScalingLaw(
        name="DeepSeek LLM",
        kind="optimal",
        formula="0.2920 * C**0.3271 tokens, C = M * D FLOPs, M = 6 * N without those of attention",
        source="DeepSeek-AI 2024, arXiv 2401.02954, section 3.1",
        batch_tokens=lambda tokens, params: 0.2920 * (6.0 * params * tokens) ** 0.3271,
    ),
    ScalingLaw(
        name="nanochat",
        kind="optimal",
        formula="2**19 * (D / 1.32B)**0.383 tokens",
        source="karpathy/nanochat, scripts/base_train.py",
        batch_tokens=lambda tokens, params: 2**19 * (tokens / 1_321_210_944) ** 0.383,
    ),
    ScalingLaw(
        name="Power Lines, critical",
        kind="critical",
        formula="0.0471 * D**0.462 sequences of 2,048 tokens, D the tokens that a small batch needs for the same loss",
        source="Bergsma et al. 2025, arXiv 2505.13738",
        batch_tokens=lambda tokens, params: 2048 * 0.0471 * tokens**0.462,
    ),
    ScalingLaw(
        name="Zhang et al.",
        kind="critical",
        formula="22.91 * (D / 1M)**0.47 sequences of 512 tokens",
        source="Zhang et al. 2024, arXiv 2410.21676",
        batch_tokens=lambda tokens, params: 512 * 22.91 * (tokens / 1e6) ** 0.47,
    ),
    ScalingLaw(
        name="Kaplan et al.",
        kind="critical",
        formula="2e8 * L**(-1 / 0.21) tokens, with their loss L(N, D) at the end of the run",
        source="Kaplan et al. 2020, arXiv 2001.08361, sections 4.1 and 5.1",
        batch_tokens=_kaplan,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """What the scaling laws say about one run."""

    tokens: int  # tokens of the run, D
    params: int  # parameters of the model, N

    def batch_tokens(self, law: ScalingLaw) -> int:
        """Return the batch that a law gives, in whole tokens."""
        return max(round(law.batch_tokens(self.tokens, self.params)), 1)

    def steps(self, law: ScalingLaw) -> int:
        """Return the optimizer steps of the run with that batch throughout."""
        return -(-self.tokens // self.batch_tokens(law))

    def range_of(self, kind: Kind) -> tuple[int, int]:
        """Return the smallest and the largest batch that laws of a kind give, in tokens."""
        found = [self.batch_tokens(law) for law in LAWS if law.kind == kind]
        return min(found), max(found)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the meaning and the limits of these numbers."""
        return (
            "optimal: lowest loss for the tokens; critical: the largest batch that costs few more tokens",
            "the laws were fitted on runs of other data, models and schedules; outside of their scale they extrapolate",
            "of Power Lines and Zhang et al., the exponents are confirmed by other public texts, the factors are not",
            "a run can start smaller: measured critical batches grow during training (Merrill et al. 2025, arXiv 2505.23971)",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the laws as `rampup suggest --train-tokens --json` prints them."""
        laws = [
            {
                "name": law.name,
                "kind": law.kind,
                "batch_tokens": self.batch_tokens(law),
                "formula": law.formula,
                "source": law.source,
            }
            for law in LAWS
        ]
        return {
            "train_tokens": self.tokens,
            "params": self.params,
            "laws": laws,
            "optimal_batch_tokens": list(self.range_of("optimal")),
            "critical_batch_tokens": list(self.range_of("critical")),
            "notes": list(self.notes),
        }


def suggest_batch(train_tokens: str | int, params: str | int) -> BatchRange:
    """Return the batch sizes that published scaling laws give for a run.

    Args:
        train_tokens: tokens of the run, such as `"300B"`.
        params: parameters of the model, such as `"7B"`; of a mixture of experts, those active per token.

    Raises:
        RampupError: a number is not a whole number from 1 to 10**18; both problems at once.

    Example:
        >>> found = suggest_batch("20B", "1B")
        >>> found.range_of("optimal"), found.range_of("critical")
        ((441892, 1484335), (1232478, 5538941))
    """
    problems: list[RampupError] = []
    counts = {"train-tokens": train_tokens, "params": params}
    found = {}
    for key, value in counts.items():
        try:
            found[key] = parse_count(value, what=key, key=key)
            if found[key] < 1:
                problems.append(ConfigError(f"{key}={value} must be at least 1", key=key, nearest=(1,)))
        except RampupError as error:
            problems.append(error)
    raise_together(problems)
    return BatchRange(tokens=found["train-tokens"], params=found["params"])
