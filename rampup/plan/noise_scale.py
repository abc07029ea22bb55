"""The gradient noise scale: how large a batch is before averaging more gradients stops
paying.

A step sums gradients over J blocks, one microbatch on one replica each. Block j has the
gradient sum G_j and the weight W_j, such as its tokens. W is the sum of the weights and
g = sum(G_j) / W the gradient of the step. With q = sum(|G_j|^2 / W_j),

    S = (q - W |g|^2) / (J - 1)
    G2 = |g|^2 - S / W

are unbiased estimates: S of tr(Sigma), the variance of the gradient of one unit of
weight, and G2 of |G|^2, the square of the true gradient.

The noise scale is tr(Sigma) / |G|^2 (McCandlish et al., "An Empirical Model of
Large-Batch Training", 2018, arXiv 1812.06162, appendix A.1, which has blocks of equal
size; the weights make it unbiased for unequal ones). S is never negative. G2 of one
step often is, so S and G2 are averaged separately over many steps, and only the
averages are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rampup.errors import ConfigError
from rampup.plan.plan import RampPlan

_Z = 1.6448536269514722  # two-sided 90%: the 0.95 quantile of the normal distribution
MIN_STEPS = 4.0  # effective number of steps below which there is no interval
# Half-life of the averages if it is not given: a share of the run's samples, but this
# many of its largest batches at least.
HALF_LIFE_SHARE, HALF_LIFE_BATCHES = 0.05, 30


def noise_trace(
    squares: Any, weight: Any, squared_norm: Any, blocks: Any
) -> tuple[Any, Any]:
    """Return S and G2 of one step, from q, W, |g|^2 before clipping, and J, the number
    of blocks with a weight, at least 2.
    """
    trace = (squares - weight * squared_norm) / (blocks - 1)
    return trace, squared_norm - trace / weight


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    """A noise scale with its 90% interval, all in one unit: samples or tokens.

    Attributes:
        value: the estimate. None if the squared gradient cannot be distinguished from
            zero.
        low: lower end of the interval. If `high` is None, the noise scale is at least
            this. None before there are enough steps.
        high: upper end, or None.
    """

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """Return text such as "120 (90 to 160)" or "at least 90"."""
        if self.low is None:
            return "not known yet"
        low, *known = (
            f"{x:,.3g}" if x < 1000 else f"{x:,.0f}"
            for x in (self.low, self.value, self.high)
            if x is not None
        )
        if len(known) < 2:
            return f"at least {low}"
        return f"{known[0]} ({low} to {known[1]})"


@dataclass(slots=True, kw_only=True)
class NoiseScale:
    """Running averages of S and G2, and the noise scale with its interval.

    The age of a step is counted in samples, so a growing batch does not lengthen the
    memory. A step of weight W counts W times. The interval is Fieller's for the ratio
    of two means, with variances from the spread over steps: formulas for Gaussian
    gradients are wrong for small blocks. While the batch grows, every step has a
    scatter of its own, of which nothing is assumed. A step x of variance s, with a
    share h of all weight, moves a mean m of variance v to (1 - h) m + h x, of variance
    (1 - h)^2 v + h^2 s. As (x - m)^2 has the expectation s + v, this is (1 - 2 h) v +
    h^2 (x - m)^2 on average. If the mean of G2 is not different from zero, the interval
    has no upper end.

    Attributes:
        half_life_samples: samples after which a step counts half.
        total, total_squared: sums of d W and of (d W)^2 over the steps, where d =
            2^(-age / half-life).
        trace, squared_norm: the averages of S and of G2.
        trace_variance, squared_norm_variance, covariance: those of the averages.
        samples_total: sum of d times the samples of the step, to convert weights into
            samples.

    Example:
        >>> noise = NoiseScale(half_life_samples=1000)
        >>> for number in range(100):
        ...     noise.update(
        ...         samples=10,
        ...         weight=10.0,
        ...         trace=50.0 + number % 5,
        ...         squared_norm=0.5 + 0.1 * (number % 2),
        ...     )
        >>> print(noise.tokens, noise.samples_per_weight)
        94.5 (93 to 96.1) 1.0
    """

    half_life_samples: float
    total: float = 0.0
    total_squared: float = 0.0
    trace: float = 0.0
    squared_norm: float = 0.0
    trace_variance: float = 0.0
    squared_norm_variance: float = 0.0
    covariance: float = 0.0
    samples_total: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.half_life_samples < math.inf:
            raise ConfigError(
                "the half-life of the noise scale must be a positive number of samples,"
                f" not {self.half_life_samples}",
                key="gradient_noise_half_life_samples",
            )

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Self:
        """Return the averages of `state`; empty ones if it lacks any of them, since no
        interval follows from the others.
        """
        names = [field.name for field in fields(cls)]
        known = names if all(name in state for name in names) else names[:1]
        return cls(**{name: float(state[name]) for name in known})

    @property
    def state(self) -> dict[str, float]:
        """The averages as JSON values, for a checkpoint. They come back bit for bit."""
        return asdict(self)

    def update(
        self, *, samples: int, weight: float, trace: float, squared_norm: float
    ) -> None:
        """Add a step of weight W, with S and G2. One whose values are not finite, or
        without weight, only ages the others.
        """
        decay = 2.0 ** (-samples / self.half_life_samples)
        counts = (
            weight > 0
            and math.isfinite(weight)
            and math.isfinite(trace)
            and math.isfinite(squared_norm)
        )
        w = weight if counts else 0.0
        before = decay * self.total
        self.total = before + w
        self.total_squared = decay * decay * self.total_squared + w * w
        self.samples_total = decay * self.samples_total + (samples if counts else 0)
        if not counts:
            return
        h, ds, dg = w / self.total, trace - self.trace, squared_norm - self.squared_norm
        # With more than half of the weight, the unbiased variance could be negative:
        # its limit is what the steps before have.
        kept, gain = (
            (0.0, 0.0)
            if not before
            else (1 - 2 * h if h <= 0.5 else (1 - h) ** 2, h * h)
        )
        self.trace_variance = kept * self.trace_variance + gain * ds * ds
        self.squared_norm_variance = kept * self.squared_norm_variance + gain * dg * dg
        self.covariance = kept * self.covariance + gain * ds * dg
        self.trace += h * ds
        self.squared_norm += h * dg

    @property
    def samples_per_weight(self) -> float:
        """Samples of one unit of weight: 1 / (tokens of a sample)."""
        return self.samples_total / self.total if self.total else math.nan

    @property
    def tokens(self) -> NoiseEstimate:
        """The noise scale in units of weight, such as tokens."""
        effective = self.total**2 / self.total_squared if self.total_squared else 0.0
        if effective < MIN_STEPS:
            return NoiseEstimate(value=None, low=None, high=None)
        return fieller(
            self.trace,
            self.squared_norm,
            self.trace_variance,
            self.squared_norm_variance,
            self.covariance,
            effective - 1,
        )

    @property
    def in_samples(self) -> NoiseEstimate:
        """The noise scale in samples."""
        factor, found = self.samples_per_weight, self.tokens
        value, low, high = (
            None if x is None else x * factor
            for x in (found.value, found.low, found.high)
        )
        return NoiseEstimate(value=value, low=low, high=high)

    def metrics(self) -> dict[str, float | None]:
        """Return the noise scale under its names in metrics.jsonl. None is "not known",
        and for `high` also "no upper end".
        """
        return {
            f"noise_scale_{unit}{end}": value
            for unit, found in {
                "samples": self.in_samples,
                "tokens": self.tokens,
            }.items()
            for end, value in {
                "": found.value,
                "_low": found.low,
                "_high": found.high,
            }.items()
        }


def fieller(
    s: float, g: float, var_s: float, var_g: float, cov: float, freedom: float
) -> NoiseEstimate:
    """Return Fieller's interval of the ratio of two means, with their variances and
    their covariance.
    """
    # |G|^2 is not negative. An average of G2 below zero is noise, or comes from rows that
    # are drawn without replacement.
    g, t2 = max(g, 0.0), student(freedom) ** 2
    # All ratios r with (s - r g)^2 <= t^2 var(s - r g), which is a r^2 - 2 b r + c <=
    # 0.
    a, b, c = g * g - t2 * var_g, s * g - t2 * cov, s * s - t2 * var_s
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0:
        return NoiseEstimate(
            value=s / g, low=max((b - root) / a, 0.0), high=(b + root) / a
        )
    # G2 is not separable from zero: all ratios above the positive root, or if S is not
    # separable either, all ratios.
    return NoiseEstimate(
        value=None, low=(b - root) / a if a < 0 < c else 0.0, high=None
    )


def measured_noise(
    lines: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], NoiseEstimate]]:
    """Yield the lines of a metrics.jsonl that have a noise scale in samples or a lower
    bound of it, with the estimate.
    """
    for line in lines:
        ends = [line.get(f"noise_scale_samples{end}") for end in ("", "_low", "_high")]
        value, low, high = (
            float(end) if isinstance(end, int | float) else None for end in ends
        )
        if value is not None or low:
            yield line, NoiseEstimate(value=value, low=low, high=high)


def default_half_life(plan: RampPlan) -> float:
    """Return the half-life in samples with which a run averages, if none is given."""
    first = max(plan.reserved_sizes[:1] or plan.ramp.sizes)
    samples = first * plan.total_steps if plan.reserved_sizes else plan.consumed_samples
    # Not of the steps, whose number would change as the batch grows.
    samples = samples if plan.budget_samples is None else plan.budget_samples
    return max(samples * HALF_LIFE_SHARE, float(first * HALF_LIFE_BATCHES))


def noise_problems(plan: RampPlan, num_replicas: int) -> list[ConfigError]:
    """Return an error for every phase whose batch is a single block, so that its noise
    cannot be measured.
    """
    found = []
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        if num_replicas * split.num_microbatches >= 2 or plan.ramp.is_over(phase):
            continue
        smaller = [
            size
            for size in plan.splitter.legal_microbatches(plan.ramp.sizes_to_come)
            if size < split.microbatch_size
        ]
        fix = (
            f"set microbatch_size={smaller[-1]}"
            if smaller
            else "set a larger batch, or more devices on the data axis"
        )
        found.append(
            ConfigError(
                "measure_gradient_noise=true compares the gradients of the blocks of a"
                f" step, but {phase} has one block: num_replicas * num_microbatches ="
                f" {num_replicas} * {split.num_microbatches} = 1 with"
                f" microbatch_size={split.microbatch_size}; {fix}",
                key="microbatch_size" if smaller else "measure_gradient_noise",
                # `auto` needs the measurement.
                nearest=tuple(smaller[-1:])
                or (() if plan.reserved_sizes else (False,)),
            )
        )
    return found


def student(freedom: float) -> float:
    """Return the 0.95 quantile of Student's t (Cornish and Fisher's expansion, within
    0.3% from 3 degrees of freedom on).
    """
    z, n = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
