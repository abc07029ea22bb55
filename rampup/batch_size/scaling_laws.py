"""Published scaling laws for the batch size of language-model pre-training: how large it may be, before any run.

Two different quantities have laws. The *optimal* batch reaches the lowest loss with a number of tokens. The *critical* batch is
the largest that costs few additional tokens, so it is larger. Both grow with the tokens of the run and hardly with the model.
The laws were fitted on other data, tokenizers, optimizers and schedules, so their spread is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.numbers import parse_count


class ScalingLaw(NamedTuple):
    """One published law."""

    name: str
    formula: str  # in the units of the source
    source: str
    batch_tokens: Callable[[int, int], float]  # from the tokens D of the run and the parameters N of the model
    needs_params: bool = False  # whether it depends on N


POWER_LINES = "Bergsma et al. 2025, arXiv 2505.13738"
OPTIMAL = (
    ScalingLaw(
        "Power Lines, optimal",
        "0.0306 * D**0.383 sequences of 2,048 tokens",
        POWER_LINES,
        lambda d, n: 2048 * 0.0306 * d**0.383,
    ),
    ScalingLaw("Step Law", "0.58 * D**0.571 tokens", "Li et al. 2025, arXiv 2503.04715", lambda d, n: 0.58 * d**0.571),
    ScalingLaw(
        "DeepSeek LLM",
        "0.2920 * C**0.3271 tokens, C = M * D FLOPs, M = 6 * N without those of attention",
        "DeepSeek-AI 2024, arXiv 2401.02954, section 3.1",
        lambda d, n: 0.2920 * (6.0 * n * d) ** 0.3271,
        needs_params=True,
    ),
    ScalingLaw(
        "nanochat",
        "2**19 * (D / 1.32B)**0.383 tokens",
        "karpathy/nanochat, scripts/base_train.py",
        lambda d, n: 2**19 * (d / 1_321_210_944) ** 0.383,
    ),
)
CRITICAL = (
    ScalingLaw(
        "Power Lines, critical",
        "0.0471 * D**0.462 sequences of 2,048 tokens, D the tokens that a small batch needs for the same loss",
        POWER_LINES,
        lambda d, n: 2048 * 0.0471 * d**0.462,
    ),
    ScalingLaw(
        "Zhang et al.",
        "22.91 * (D / 1M)**0.47 sequences of 512 tokens",
        "Zhang et al. 2024, arXiv 2410.21676",
        lambda d, n: 512 * 22.91 * (d / 1e6) ** 0.47,
    ),
    ScalingLaw(
        "Kaplan et al.",
        "2e8 * L**(-1 / 0.21) tokens, with their loss L(N, D) at the end of the run",
        "Kaplan et al. 2020, arXiv 2001.08361, sections 4.1 and 5.1",
        lambda d, n: 2e8 * (((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103) ** (-1 / 0.21),
        needs_params=True,
    ),
)
NOTES = (
    "optimal: lowest loss for the tokens; critical: the largest batch that costs few more tokens",
    "the laws were fitted on runs of other data, models and schedules; outside of their scale they extrapolate",
    "of Power Lines and Zhang et al., the exponents are confirmed by other public texts, the factors are not",
    "a run can start smaller: measured critical batches grow during training (Merrill et al. 2025, arXiv 2505.23971)",
)


def suggest_batch(train_tokens: str | int, params: str | int | None = None) -> dict[str, Any]:
    """Return the batch sizes that published scaling laws give for a run, as `rampup suggest --train-tokens --json` prints them.

    Args:
        train_tokens: tokens of the run, such as `"300B"`.
        params: parameters of the model, such as `"7B"`; of a mixture of experts, those active per token. None leaves out the
            laws that need them.

    Raises:
        RampupError: a number is not a whole number from 1 to 10**18; both problems at once.

    Example:
        >>> found = suggest_batch("20B", "1B")
        >>> found["optimal_batch_tokens"], found["critical_batch_tokens"]
        ([441892, 1484335], [1232478, 5538941])
    """
    problems: list[RampupError] = []
    counts = {"train-tokens": train_tokens, **({} if params is None else {"params": params})}
    numbers = {}
    for key, value in counts.items():
        try:
            numbers[key] = parse_count(value, what=key, key=key)
            if numbers[key] < 1:
                problems.append(ConfigError(f"{key}={value} must be at least 1", key=key, nearest=(1,)))
        except RampupError as error:
            problems.append(error)
    raise_together(problems)
    d, n = numbers["train-tokens"], numbers.get("params")
    rows, ranges = list[dict[str, Any]](), dict[str, list[int]]()
    for kind, laws in (("optimal", OPTIMAL), ("critical", CRITICAL)):
        known = [law for law in laws if n is not None or not law.needs_params]
        sizes = [max(round(law.batch_tokens(d, n or 0)), 1) for law in known]
        ranges[f"{kind}_batch_tokens"] = [min(sizes), max(sizes)]
        rows += [
            {"name": law.name, "kind": kind, "batch_tokens": size, "formula": law.formula, "source": law.source}
            for law, size in zip(known, sizes, strict=True)
        ]
    left_out = [law.name for law in OPTIMAL + CRITICAL if law.needs_params and n is None]
    notes = [f"--params adds the laws that need the parameters of the model: {', '.join(left_out)}"] if left_out else []
    return {"train_tokens": d, "params": n, "laws": rows, **ranges, "notes": [*notes, *NOTES]}
