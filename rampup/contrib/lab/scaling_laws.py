"""Published scaling laws for the batch size of language-model pre-training: how large
it may be, before any run.

The *optimal* batch reaches the lowest loss with a number of tokens. The *critical* laws
say what a larger batch costs, in one definition here: with D_min the tokens that a very
small batch needs for a loss, a batch B needs D_min * (1 + B / B_100%) (McCandlish et
al. 2018, arXiv 1812.06162, equation 2.11). So B_100% needs twice the tokens, and 0.2 *
B_100% needs 20% more. The laws were fitted on other data, tokenizers, optimizers and
schedules, so their spread is part of the answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from rampup.errors import ConfigError
from rampup.plan.numbers import parse_count

# The shares of additional tokens for which each critical law is evaluated. `ADVISED`
# is that of the batch that is recommended.
OVERHEADS = {"5%": 0.05, "20%": 0.2, "100%": 1.0}
ADVISED = "20%"
Range = tuple[float, float]  # from, to


class ScalingLaw(NamedTuple):
    """One published law."""

    name: str
    formula: str  # in the units of the source
    source: str
    # from the tokens D of the run and the parameters N of the model
    batch_tokens: Callable[[int, int], float]
    # Between which parameters and tokens, or FLOPs, the runs were to which it was
    # fitted, as far as the source says it.
    params: Range | None = None
    tokens: Range | None = None
    flops: Range | None = None  # C = 6 N D
    needs_params: bool = False  # whether it depends on N
    # of a critical law: the share of additional tokens that its batch needs
    overhead: float | None = None
    # the peak rate of Adam that the source fits beside its batch
    learning_rate: Callable[[int, int], float] | None = None

    @property
    def kind(self) -> str:
        """`optimal` or `critical`."""
        return "optimal" if self.overhead is None else "critical"

    def outside(self, d: int, n: int | None) -> str | None:
        """Return how a run is outside of the range to which the law was fitted, such as
        "outside of 60M to 1B parameters", or None.
        """
        flops = None if n is None else 6 * n * d
        ranges = {
            "parameters": (n, self.params),
            "tokens": (d, self.tokens),
            "FLOPs": (flops, self.flops),
        }
        found = [
            f"{_short(fitted[0])} to {_short(fitted[1])} {what}"
            for what, (value, fitted) in ranges.items()
            if fitted and value is not None and not fitted[0] <= value <= fitted[1]
        ]
        return f"outside of {' and '.join(found)}" if found else None


def _short(number: float) -> str:
    for suffix, factor in (("B", 1e9), ("M", 1e6)):
        if factor <= number < 1e15:
            return f"{number / factor:g}{suffix}"
    return f"{number:g}"


POWER_LINES = "Bergsma et al. 2025, arXiv 2505.13738"
LAWS = (
    ScalingLaw(
        "Power Lines, optimal",
        "0.0306 * D**0.383 sequences of 2,048 tokens",
        POWER_LINES,
        lambda d, n: 2048 * 0.0306 * d**0.383,
        params=(111e6, 3.3e9),
    ),
    ScalingLaw(
        "Step Law",
        "0.58 * D**0.571 tokens",
        "Li et al. 2025, arXiv 2503.04715",
        lambda d, n: 0.58 * d**0.571,
        params=(60e6, 1e9),
        tokens=(2e9, 100e9),
        learning_rate=lambda d, n: 1.79 * n**-0.713 * d**0.307,
    ),
    ScalingLaw(
        "DeepSeek LLM",
        "0.2920 * C**0.3271 tokens, C = M * D FLOPs, M = 6 * N without those of"
        " attention",
        "DeepSeek-AI 2024, arXiv 2401.02954, section 3.1",
        lambda d, n: 0.2920 * (6.0 * n * d) ** 0.3271,
        flops=(1e17, 2e19),
        needs_params=True,
        learning_rate=lambda d, n: 0.3118 * (6.0 * n * d) ** -0.125,
    ),
    ScalingLaw(
        "Power Lines, critical",
        "0.0471 * D**0.462 sequences of 2,048 tokens, which need twice the D tokens"
        " that a small batch needs",
        POWER_LINES,
        lambda d, n: 2048 * 0.0471 * d**0.462,
        params=(111e6, 3.3e9),
        overhead=1.0,
    ),
    ScalingLaw(
        "Zhang et al.",
        "22.91 * (D / 1M)**0.47 sequences of 512 tokens, which need 20% more tokens",
        "Zhang et al. 2024, arXiv 2410.21676",
        lambda d, n: 512 * 22.91 * (d / 1e6) ** 0.47,
        params=(85e6, 1.2e9),
        overhead=0.2,
    ),
    ScalingLaw(
        "Kaplan et al.",
        "2e8 * L**(-1 / 0.21) tokens, which need twice the tokens, with their loss L(N,"
        " D) at the end of the run",
        "Kaplan et al. 2020, arXiv 2001.08361, sections 4.1 and 5.1",
        lambda d, n: (
            2e8
            * (((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103) ** (-1 / 0.21)
        ),
        params=(768, 1.5e9),
        tokens=(22e6, 23e9),
        needs_params=True,
        overhead=1.0,
    ),
)
NOTES = (
    "optimal: lowest loss for the tokens; critical: the batch that needs so many"
    " more tokens for the same loss",
    f"recommended is the median of the column +{ADVISED}: the largest batch to"
    " consider, and not the fastest; on paper, the fastest constant batch of 1B and"
    " 8B parameters on 64 and 256 chips is 18% to 47% of it, which no run has tested",
    "steps are those of all tokens, the additional ones included",
    "the laws were fitted on runs of other data, models and schedules; outside of"
    " their range they extrapolate, and no rate is given",
    "N of Kaplan et al. and of DeepSeek is without the embeddings",
    "of Power Lines, the exponents are confirmed by other public texts, the factors"
    " are not",
    "a run can start smaller: measured critical batches grow during training"
    " (Merrill et al. 2025, arXiv 2505.23971)",
)
EXCEEDS = (
    "the largest optimal batch is above the smallest critical one, because the laws"
    " come from different runs"
)
RATES = (
    "rates are peak rates of Adam: Step Law and DeepSeek LLM have their own for their"
    " batch; for other batches, multiply by the square root of the ratio of the batches"
    " (Malladi et al. 2022, arXiv 2205.10287)"
)
NO_RATES = "--params adds the peak learning rates of Step Law and DeepSeek LLM"


def suggest_batch(
    train_tokens: str | int,
    params: str | int | None = None,
) -> dict[str, Any]:
    """Return the batch sizes that published scaling laws give for a run, as `rampup
    suggest --train-tokens --json` prints them.

    Args:
        train_tokens: tokens of the run; a number, or text such as "20B".
        params: parameters of the model without its embeddings; None leaves out the
            laws and the rates that need them.

    Returns:
        `laws`, one row each with `batch_tokens`, and with `outside` where the run is
        outside of what the law was fitted to: such a row has no `learning_rate`;
        `recommended_batch_tokens`, the median of the critical laws at 20% more tokens,
        beside the range of both kinds of laws.

    Raises:
        RampupError: a number is not a count; it names the key.

    Example:
        >>> found = suggest_batch("20B", "1B")
        >>> found["recommended_batch_tokens"], found["critical_batch_tokens"]
        (1107788, [651867, 1232478])
        >>> suggest_batch("20B", "8B")["laws"][1]["outside"]
        'outside of 60M to 1B parameters'
    """
    d = _count(train_tokens, "train-tokens")
    n = None if params is None else _count(params, "params")
    known = [law for law in LAWS if n is not None or not law.needs_params]
    rows = [_evaluate(law, d, n) for law in known]
    sizes = {
        kind: [_advised(row) for row in rows if row["kind"] == kind]
        for kind in ("optimal", "critical")
    }
    notes = list(NOTES)
    if max(sizes["optimal"]) > min(sizes["critical"]):
        notes.insert(0, EXCEEDS)
    if left_out := [law.name for law in LAWS if law not in known]:
        notes.insert(
            0,
            "--params adds the laws that need the parameters of the model:"
            f" {', '.join(left_out)}",
        )
    notes.append(RATES if n is not None else NO_RATES)
    return {
        "train_tokens": d,
        "params": n,
        "laws": rows,
        "recommended_batch_tokens": round(statistics.median(sizes["critical"])),
        "optimal_batch_tokens": [min(sizes["optimal"]), max(sizes["optimal"])],
        "critical_batch_tokens": [min(sizes["critical"]), max(sizes["critical"])],
        "notes": notes,
    }


def _count(value: str | int, key: str) -> int:
    if (number := parse_count(value, what=key, key=key)) < 1:
        raise ConfigError(f"{key}={value} must be at least 1", key=key, nearest=(1,))
    return number


def _evaluate(law: ScalingLaw, d: int, n: int | None) -> dict[str, Any]:
    """Return a law's row for D tokens and N parameters."""
    size = max(round(law.batch_tokens(d, n or 0)), 1)
    row = {"name": law.name, "kind": law.kind, "batch_tokens": size}
    if law.overhead is None:
        row["steps"] = -(-d // size)
    else:
        sizes = {
            name: max(round(size * share / law.overhead), 1)
            for name, share in OVERHEADS.items()
        }
        row["batch_tokens_at_overhead"] = sizes
        row["steps_at_overhead"] = {
            name: round(d * (1 + share) / sizes[name])
            for name, share in OVERHEADS.items()
        }
    row |= {"formula": law.formula, "source": law.source}
    row["outside"] = law.outside(d, n)
    # A rate that a law gives outside of its range can be off by any factor.
    if n is not None and law.learning_rate is not None and row["outside"] is None:
        row["learning_rate"] = law.learning_rate(d, n)
    return row


def _advised(row: dict[str, Any]) -> int:
    """Return the batch of a row that is advised: the optimal one, or that of 20% more
    tokens.
    """
    return row.get("batch_tokens_at_overhead", {}).get(ADVISED, row["batch_tokens"])
