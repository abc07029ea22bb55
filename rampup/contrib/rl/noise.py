"""The noise of RL gradients: its part between prompts, its part within a prompt's
responses, and the sizes that follow.

Let response i have the weight w_i (such as its tokens) and the gradient sum x_i, with E
x_i = w_i G on average over lengths. Responses to different prompts are independent;
E(x_i x_i') = w_i w_i' (|G|^2 + B) for two responses to one prompt. Nothing is assumed
about the size of a single x_i: the tokens of a response share an advantage, so its
noise need not fall with its length. A step sums over blocks, one microbatch on one
replica each. Block j has the gradient sum G_j and the weight W_j; w_pj of it belong to
prompt p; W and w_p are the sums over all blocks, and g = sum(G_j) / W. Sorting the
products of responses,

    E sum(|G_j|^2) = |G|^2 sum(W_j^2) + B (sum_jp(w_pj^2) - sum(w_i^2)) + D,
    E W^2 |g|^2    = |G|^2 W^2        + B (sum_p(w_p^2)   - sum(w_i^2)) + D,

where D = sum(E |x_i|^2 - w_i^2 |G|^2). A block has all responses to one prompt, or one
response to each of several, as the steps take turns: their rows are ordered by prompts,
then by the numbers of the responses. So there are two equations of the first kind and
one of the second for |G|^2, B and D / W. Each is summed over many steps before it is
divided by their weight, as the mean of a quotient would be biased where few prompts
make a step. If blocks have whole prompts, |G|^2 is the mean product of the gradients of
different prompts, so that no error of the noise enters it.

A step of P prompts with n responses each has the noise (B (sum_p(w_p^2) - sum(w_i^2)) +
D) / W^2 = (b + s / n) / P. Here b is B times the mean of w_i w_i' over pairs of
responses to a prompt, divided by the square of the mean w of w_i; and s is D / (W w)
less b. The noise scale in prompts is thus

    N(n) = (b + s / n) / |G|^2,

as in McCandlish et al. 2018, arXiv 1812.06162, with a prompt as the unit. If a prompt
costs c and each of its responses 1, the noise at a given cost P (c + n) is least at n^2
= c s / b (two-stage sampling: Cochran 1977, Sampling Techniques, chapter 10). That
takes |G|^2 as fixed. It falls with fewer responses: a group of equal rewards has no
gradient, and the mean reward of a group contains the response's own. So a number below
the measured one is never recommended.

r updates on the same samples at the same learning rate add up the same noise: they move
the parameters r times as far, in the mean and in the noise, while r updates on fresh
samples have sqrt(r) times the noise. So a batch that is used r times needs r times the
prompts for the same ratio of noise to progress. In GRPO, the responses of a group share
a baseline, which correlates them a little: what is within a prompt is what the rest of
a group leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from rampup.loop.components import Component
from rampup.plan.noise_scale import MIN_STEPS, NoiseEstimate, fieller, student
from rampup.plan.numbers import finite_or_none

# Entries of `gradient_noise` in the metrics of a step that the host adds.
LAYOUT, FACTS = "layout", "layout_facts"
_RECORD = "prompt_noise"
_PARTS = ("noise_between_prompts", "noise_within_prompts", "noise_scale_prompts")
UNKNOWN = NoiseEstimate(value=None, low=None, high=None)


def block_facts(
    weights_nR: np.ndarray, groups_nR: np.ndarray, replicas: int
) -> np.ndarray:
    """Return what the estimates need to know of a step, from the weights and prompts of
    the rows of each pass; 0 is padding.

    Divided by the weight W of the step: sum(W_j^2), sum_jp(w_pj^2) - sum(w_i^2), W^2,
    sum_p(w_p^2) - sum(w_i^2), the number of responses, and that of ordered pairs of
    responses to one prompt. NaN with fewer than two blocks.
    """
    blocks = len(weights_nR) * replicas
    weights = weights_nR.reshape(blocks, -1)
    groups = groups_nR.reshape(blocks, -1)
    table_jp = np.zeros((blocks, int(groups.max()) + 1))
    np.add.at(table_jp, (np.arange(blocks)[:, None], groups), weights)
    by_block, by_prompt = table_jp.sum(axis=1), table_jp.sum(axis=0)
    if np.count_nonzero(by_block) < 2:
        return np.full(6, np.nan)
    single = np.square(weights).sum()
    within_blocks = np.square(table_jp).sum() - single
    within_prompts = np.square(by_prompt).sum() - single
    responses = np.bincount(groups[weights > 0])
    pairs = (responses * (responses - 1)).sum()
    W = by_block.sum()
    return (
        np.array(
            [
                np.square(by_block).sum(),
                within_blocks,
                W**2,
                within_prompts,
                responses.sum(),
                pairs,
            ]
        )
        / W
    )


@dataclass(slots=True)
class _Means:
    """Weighted means over steps of sum(|G_j|^2) / W, W |g|^2 and the numbers of
    `block_facts`, with their covariance.

    See `rampup.plan.NoiseScale` for the recurrences.
    """

    total: float = 0.0
    total_squared: float = 0.0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(8))
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((8, 8)))

    def update(self, x: np.ndarray, weight: float, decay: float) -> None:
        before = decay * self.total
        self.total, self.total_squared = (
            before + weight,
            decay**2 * self.total_squared + weight**2,
        )
        if not weight:
            return
        h = weight / self.total
        difference = x - self.mean
        kept, gain = (
            (0.0, 0.0)
            if not before
            else (1 - 2 * h if h <= 0.5 else (1 - h) ** 2, h * h)
        )
        self.covariance = kept * self.covariance + gain * np.outer(
            difference, difference
        )
        self.mean = self.mean + h * difference

    @property
    def effective(self) -> float:
        """The effective number of steps."""
        return self.total**2 / self.total_squared if self.total_squared else 0.0


@dataclass(slots=True, kw_only=True)
class PromptNoise:
    """Running averages of the noise of RL gradients, from which its two parts follow
    with 90% intervals.
    """

    half_life_samples: float  # samples after which a step counts half
    means: tuple[_Means, _Means] = field(
        default_factory=lambda: (_Means(), _Means())
    )  # by the layout of the steps

    def update(
        self,
        layout: int,
        *,
        samples: int,
        weight: float,
        squares: float,
        square: float,
        facts: Sequence[float] | np.ndarray,
    ) -> None:
        """Add a step of weight W with sum(|G_j|^2) and, before clipping, |g|^2; its
        layout is 0 or 1, by the order of the rows.

        One whose values are not finite, or without weight, only ages the others.
        """
        decay = 2.0 ** (-samples / self.half_life_samples)
        x = (
            np.array([squares / weight, weight * square, *facts])
            if weight > 0
            else np.full(8, np.nan)
        )
        counts = np.isfinite(x).all()
        for number, means in enumerate(self.means):
            means.update(x, weight if counts and number == layout else 0.0, decay)

    @property
    def state(self) -> dict[str, Any]:
        """The averages as JSON values, for a checkpoint."""
        return {
            "means": [
                [m.total, m.total_squared, m.mean.tolist(), m.covariance.tolist()]
                for m in self.means
            ]
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], half_life_samples: float) -> Self:
        """Return the averages of `state`."""
        one, two = (
            _Means(total, squared, *map(np.array, rest))
            for total, squared, *rest in state["means"]
        )
        return cls(half_life_samples=half_life_samples, means=(one, two))

    def estimates(
        self, responses: int
    ) -> tuple[NoiseEstimate, NoiseEstimate, NoiseEstimate]:
        """Return both parts of the noise, b and s above, and the noise scale in prompts
        for some responses per prompt.
        """
        one, two = self.means
        if min(one.effective, two.effective) < MIN_STEPS / 2 or abs(
            one.mean[3] - two.mean[3]
        ) <= 1e-9 * abs(one.mean[3]):
            return UNKNOWN, UNKNOWN, UNKNOWN
        found, covariance = self._solve()
        freedom = one.effective + two.effective - 2
        parts = []
        for value, variance in zip(found[:2], covariance.diagonal(), strict=False):
            spread = student(freedom) * math.sqrt(max(variance, 0.0))
            ends = (value, value - spread, value + spread)
            middle, low, high = (float(max(end, 0.0)) for end in ends)
            parts.append(NoiseEstimate(value=middle, low=low, high=high))
        row = np.array([1, 1 / responses, 0])
        scale, noise = float(row @ found), covariance @ row
        variances = float(row @ noise), float(covariance[2, 2]), float(noise[2])
        return parts[0], parts[1], fieller(scale, float(found[2]), *variances, freedom)

    def _solve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return b, s and |G|^2 by the three equations above, and their covariance."""
        one, two = self.means
        shares = np.array([one.total, two.total]) / (one.total + two.total)
        *_, weight, pair_weight, per_weight, pairs = shares @ [one.mean, two.mean]
        equations = np.array(
            [[*one.mean[2:4], 1], [*two.mean[2:4], 1], [weight, pair_weight, 1]]
        )
        # From the means of both kinds in the first layout, then in the second, to
        # |G|^2, B and D / W.
        solution = np.linalg.inv(equations) @ [
            [1, 0, 0, 0],
            [0, 0, 1, 0],
            [0, shares[0], 0, shares[1]],
        ]
        measured = np.concatenate([one.mean[:2], two.mean[:2]])
        square, B, _ = solution @ measured
        # To b, s and |G|^2.
        relative = pair_weight / pairs * per_weight**2
        matrix = (
            np.array([[0, relative, 0], [0, -relative, per_weight], [1, 0, 0]])
            @ solution
        )
        # What the known weights of the steps make the means scatter is no uncertainty
        # of what is found.
        residuals = np.array(
            [[1, 0, -square, -B, 0, 0, 0, 0], [0, 1, 0, 0, -square, -B, 0, 0]]
        )
        covariance = np.zeros((4, 4))
        for number, means in enumerate(self.means):
            own = slice(2 * number, 2 * number + 2)
            covariance[own, own] = residuals @ means.covariance @ residuals.T
        return matrix @ measured, matrix @ covariance @ matrix.T


class PromptNoiseAverages(Component):
    """The noise of a run of RL; see `PromptNoise`."""

    def __init__(self, half_life_samples: float, responses: int) -> None:
        self.noise = PromptNoise(half_life_samples=half_life_samples)
        self.responses = responses

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return {_RECORD: {"": self.noise.state}}

    def load(self, record: Mapping[str, Any]) -> None:
        """Continue from the averages in a checkpoint, with the half-life of this
        run.
        """
        if found := record.get(_RECORD):
            self.noise = PromptNoise.from_state(found[""], self.noise.half_life_samples)

    def after_step(
        self, line: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take the `gradient_noise` of a step that has the facts of its blocks."""
        noise = values.get("gradient_noise", {})
        if FACTS not in noise:
            return {}
        weight = 0.0 if values.get("skipped", False) else float(values["weight"])
        trace, squared_norm, squares = (
            float(noise[name]) for name in ("trace", "squared_norm", "squares")
        )
        self.noise.update(
            int(noise[LAYOUT]),
            samples=line["global_batch_size"],
            weight=weight,
            squares=squares,
            square=squared_norm + trace / weight if weight else math.nan,
            facts=noise[FACTS],
        )
        found = dict[str, Any]()
        estimates = self.noise.estimates(self.responses)
        for name, estimate in zip(_PARTS, estimates, strict=True):
            found |= {
                name: estimate.value,
                f"{name}_low": estimate.low,
                f"{name}_high": estimate.high,
            }
        return {
            key: None if value is None else finite_or_none(value)
            for key, value in found.items()
        }
