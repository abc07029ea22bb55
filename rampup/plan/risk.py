"""The exact expected risk of SGD on linear regression, for any schedule of learning rate and batch.

The loss of a row (x, y) is 1/2 (x'theta - y)^2 with Gaussian x of covariance diag(h) and label noise of variance s2. Let m_i be
the expected square of the error in direction i. One step of SGD with learning rate eta and batch B gives

    m_i <- m_i (1 - 2 eta h_i + eta^2 h_i^2 (1 + 1/B)) + eta^2 / B * h_i (sum_j h_j m_j + s2),

which follows from the fourth moments of a Gaussian (Isserlis). The risk is 1/2 sum_i h_i m_i. Nothing is sampled, so schedules
can be compared without noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rampup.errors import RampDefinitionError


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskState:
    """Expected squared errors of SGD on linear regression.

    Attributes:
        eigenvalues: h, the variances of the input in its principal directions.
        squared_errors: m, the expected squared error of the parameters in each direction.
        noise: s2, the variance of the labels' noise.

    Example:
        >>> state = RiskState(eigenvalues=(1.0, 0.5), squared_errors=(1.0, 1.0), noise=0.01)
        >>> state.risk
        0.75
        >>> round(state.after(100, learning_rate=0.1, batch_size=4).risk, 5)
        0.00011
    """

    eigenvalues: tuple[float, ...]
    squared_errors: tuple[float, ...]
    noise: float

    def __post_init__(self) -> None:
        if len(self.eigenvalues) != len(self.squared_errors) or not self.eigenvalues:
            raise RampDefinitionError(
                f"{len(self.eigenvalues)} eigenvalues and {len(self.squared_errors)} squared errors; give as many of both"
            )
        if min(*self.eigenvalues, *self.squared_errors, self.noise) < 0:
            raise RampDefinitionError("eigenvalues, squared errors and noise must not be negative")

    @property
    def risk(self) -> float:
        """Expected loss above that of the best parameters."""
        return 0.5 * sum(h * m for h, m in zip(self.eigenvalues, self.squared_errors, strict=True))

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale in rows, tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv 1812.06162)."""
        pairs = list(zip(self.eigenvalues, self.squared_errors, strict=True))
        gradient = sum(h * h * m for h, m in pairs)
        if gradient == 0:
            return float("inf")
        return 1 + (2 * self.risk + self.noise) * sum(self.eigenvalues) / gradient

    def after(self, steps: int, *, learning_rate: float, batch_size: int) -> RiskState:
        """Return the state after some steps of one learning rate and one batch size."""
        if steps < 0 or batch_size < 1:
            raise RampDefinitionError(f"steps={steps} must be at least 0 and batch_size={batch_size} at least 1")
        h, m = self.eigenvalues, list(self.squared_errors)
        kept = [1 - 2 * learning_rate * hi + learning_rate**2 * hi**2 * (1 + 1 / batch_size) for hi in h]
        added = [learning_rate**2 / batch_size * hi for hi in h]
        for _ in range(steps):
            total = sum(hi * mi for hi, mi in zip(h, m, strict=True)) + self.noise
            m = [mi * keep + add * total for mi, keep, add in zip(m, kept, added, strict=True)]
        return replace(self, squared_errors=tuple(m))


def sgd_risk(start: RiskState, phases: Iterable[Sequence[float]]) -> RiskState:
    """Return the state after phases of constant learning rate and batch.

    Args:
        start: the state before the first step.
        phases: (steps, learning rate, batch size) of each phase.

    Example:
        >>> start = RiskState(eigenvalues=(1.0, 0.3, 0.1), squared_errors=(1.0, 1.0, 1.0), noise=0.1)
        >>> halved = sgd_risk(start, [(512, 0.2, 8), (512, 0.1, 8)])
        >>> doubled = sgd_risk(start, [(512, 0.2, 8), (256, 0.2, 16)])
        >>> round(halved.risk, 5), round(doubled.risk, 5)
        (0.00046, 0.00048)
    """
    for steps, learning_rate, batch_size in phases:
        start = start.after(int(steps), learning_rate=learning_rate, batch_size=int(batch_size))
    return start
