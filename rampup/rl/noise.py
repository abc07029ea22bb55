"""The noise of RL gradients: its part between prompts, its part within a prompt's responses, and the sizes that follow.

Let response i, of weight w_i (such as its tokens) and of prompt p, have the gradient sum w_i (G + a_p + e_i). tr Cov(a_p) = B
is the part between prompts, and tr Cov(e_i) = s / w_i the part within: each unit of weight has noise of its own. A step sums
over J blocks, one microbatch on one replica each. Block j has the gradient sum G_j and the weight W_j; w_pj of it belong to
prompt p; W and w_p are the sums over all blocks, and g = sum(G_j) / W. With q = sum(|G_j|^2 / W_j), taking expectations term by
term,

    E q       = W |G|^2 + B sum_jp(w_pj^2 / W_j) + s J,
    E W |g|^2 = W |G|^2 + B sum_p(w_p^2 / W)     + s,

so that S = (q - W |g|^2) / (J - 1), which the training step measures without a collective of its own, has the expectation

    s + k B    with    k = (sum_jp(w_pj^2 / W_j) - sum_p(w_p^2 / W)) / (J - 1).

k follows from the weights alone. It is large if a block has the responses to one prompt and small if it has one response to
each of several, so the steps take turns: their rows are ordered by prompts, then by the numbers of the responses. Two means of
S at two k give B and s, and |g|^2 less its noise gives |G|^2. How many rollouts are enough is the question of OpenReview
uK4kMpNx0W.

A step of P prompts with n responses of the mean weight w has the noise B sum_p(w_p^2) / W^2 + s / W = (u B + s / (n w)) / P.
Here u = P sum_p(w_p^2) / W^2 is 1 if all prompts weigh the same, and larger if some have longer responses than others: they
count as fewer prompts. The noise scale in prompts is thus

    N(n) = (u B + s / (n w)) / |G|^2,

as in McCandlish et al. 2018, arXiv 1812.06162, with a prompt as the unit. If a prompt costs c and each of its responses 1, the
noise at a given cost P (c + n) is least at n^2 = c s / (w u B), as far as u does not depend on n (two-stage sampling: Cochran
1977, Sampling Techniques, chapter 10). Several updates on the same samples add up the same noise instead of averaging it: r
small updates move the parameters r times as far, in the mean and in the noise. r updates on fresh samples have r times the mean
and the square root of r times the noise. So a batch that is used r times needs r times the prompts for the same ratio of noise
to progress.

The responses of a group share a baseline in GRPO, which correlates them a little: what is within a prompt is what the rest of a
group leaves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from rampup.batch_size.auto import AutoSchedule
from rampup.batch_size.noise_scale import MIN_STEPS, NoiseEstimate, fieller, student
from rampup.engine.processes import broadcast_from_process0
from rampup.errors import DataError
from rampup.loop.components import Component
from rampup.loop.events import BatchSizeDecided, OnEvent
from rampup.plan.numbers import finite_or_none
from rampup.rl.schedule import RolloutSchedule

# Entries of `gradient_noise` in the metrics of a step that the host adds.
LAYOUT, FACTS = "layout", "layout_facts"
RESPONSES = (2, 4, 8, 16, 32, 64)
_RECORD, _ENDS = "prompt_noise", ("value", "low", "high")
_PARTS = ("noise_between_prompts", "noise_within_prompts", "noise_scale_prompts")
UNKNOWN = NoiseEstimate(value=None, low=None, high=None)
# Entry of a checkpoint's record: first rollout, prompts generated before it, and size of every phase so far.
PROMPT_ROWS = "prompt_rows"


def block_facts(weights_nR: np.ndarray, groups_nR: np.ndarray, replicas: int) -> np.ndarray:
    """Return what the estimates need to know of a step: k, sum_p(w_p^2) / W^2, 1 / W, 1 / w and u.

    Args:
        weights_nR: the weights of the rows of each pass; 0 is padding.
        groups_nR: their prompts.
        replicas: the replicas, each of which has adjacent rows of a pass.

    Example:
        >>> ones, groups = np.ones((2, 2)), np.array([[0, 0], [1, 1]])
        >>> block_facts(ones, groups, 1).tolist(), block_facts(ones, groups.T, 1).tolist()
        ([2.0, 0.5, 0.25, 1.0, 1.0], [0.0, 0.5, 0.25, 1.0, 1.0])
    """
    weights, groups = weights_nR.reshape(len(weights_nR) * replicas, -1), groups_nR.reshape(len(groups_nR) * replicas, -1)
    table = np.zeros((len(weights), int(groups.max()) + 1))
    np.add.at(table, (np.arange(len(weights))[:, None], groups), weights)
    blocks = table.sum(axis=1)
    W, J = blocks.sum(), np.count_nonzero(blocks)
    if J < 2:
        return np.full(5, np.nan)
    squares = (table**2).sum(axis=1)[blocks > 0] / blocks[blocks > 0]
    prompts = table.sum(axis=0)
    share, responses = (prompts**2).sum() / W**2, np.count_nonzero(weights)
    return np.array([(squares.sum() - W * share) / (J - 1), share, 1 / W, responses / W, np.count_nonzero(prompts) * share])


@dataclass(slots=True)
class _Means:
    """Weighted means over steps of S, |g|^2 and the numbers of `block_facts`, and the covariance of these means.

    See `rampup.NoiseScale` for the recurrences.
    """

    total: float = 0.0
    total_squared: float = 0.0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(7))
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((7, 7)))

    def update(self, x: np.ndarray, weight: float, decay: float) -> None:
        before = decay * self.total
        self.total, self.total_squared = before + weight, decay**2 * self.total_squared + weight**2
        if not weight:
            return
        h, difference = weight / self.total, x - self.mean
        kept, gain = (0.0, 0.0) if not before else (1 - 2 * h if h <= 0.5 else (1 - h) ** 2, h * h)
        self.covariance = kept * self.covariance + gain * np.outer(difference, difference)
        self.mean = self.mean + h * difference

    @property
    def effective(self) -> float:
        """The effective number of steps."""
        return self.total**2 / self.total_squared if self.total_squared else 0.0


@dataclass(slots=True, kw_only=True)
class PromptNoise:
    """Running averages of the noise of RL gradients, from which its two parts follow with 90% intervals.

    Attributes:
        half_life_samples: samples after which a step counts half.

    Example:
        >>> noise, rng = PromptNoise(half_life_samples=1e9), np.random.default_rng(0)
        >>> for step in range(400):  # S = 10 + 2 k and |g|^2 = 1 + 0.1 * 2 + 0.02 * 10, with scatter
        ...     k = 4.0 if step % 2 else 1.0
        ...     noise.update(step % 2, samples=50, weight=50.0, trace=10 + 2 * k + rng.normal(), square=1.4 + rng.normal() / 9,
        ...         facts=np.array([k, 0.1, 0.02, 1.0, 1.0]))
        >>> [round(part.value) for part in noise.estimates(5)]
        [2, 10, 4]
    """

    half_life_samples: float
    means: tuple[_Means, _Means] = field(default_factory=lambda: (_Means(), _Means()))  # by the layout of the steps

    def update(
        self, layout: int, *, samples: int, weight: float, trace: float, square: float, facts: Sequence[float] | np.ndarray
    ) -> None:
        """Add a step; one whose values are not finite, or without weight, only ages the others.

        Args:
            layout: 0 or 1, for one or the other order of the rows.
            samples: samples of the step.
            weight: W, the weight of the step.
            trace: S.
            square: |g|^2, of the gradient of the step before clipping.
            facts: from `block_facts`.
        """
        x, decay = np.array([trace, square, *facts]), 2.0 ** (-samples / self.half_life_samples)
        counts = weight > 0 and np.isfinite(x).all()
        for number, means in enumerate(self.means):
            means.update(x, weight if counts and number == layout else 0.0, decay)

    @property
    def state(self) -> dict[str, Any]:
        """The averages as JSON values, for a checkpoint."""
        return {"means": [[m.total, m.total_squared, m.mean.tolist(), m.covariance.tolist()] for m in self.means]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], half_life_samples: float) -> Self:
        """Return the averages of `state`."""
        one, two = (_Means(total, squared, *map(np.array, rest)) for total, squared, *rest in state["means"])
        return cls(half_life_samples=half_life_samples, means=(one, two))

    def estimates(self, responses: int) -> tuple[NoiseEstimate, NoiseEstimate, NoiseEstimate]:
        """Return both parts of the noise, and the noise scale in prompts for a number of responses per prompt.

        The first part is u B, the variance of a prompt's gradient over infinitely many responses, as the weights of prompts
        make it count. The second is s / w, the variance of the gradient of a response to a given prompt.
        """
        one, two = self.means
        if min(one.effective, two.effective) < MIN_STEPS / 2 or abs(one.mean[2] - two.mean[2]) < 1e-9 * abs(one.mean[2]):
            return UNKNOWN, UNKNOWN, UNKNOWN
        k, shares = (one.mean[2], two.mean[2]), np.array([one.total, two.total]) / (one.total + two.total)
        share, inverse, per_response, unequal = (float(shares @ [one.mean[n], two.mean[n]]) for n in (3, 4, 5, 6))
        # Of the means of S in both layouts, then of |g|^2 in both.
        between = np.array([1, -1, 0, 0]) / (k[0] - k[1])
        within = np.array([-k[1], k[0], 0, 0]) / (k[0] - k[1])
        square = np.array([0, 0, *shares]) - share * between - inverse * within
        matrix = np.array([unequal * between, per_response * within, square])
        measured, covariance = np.array([one.mean[0], two.mean[0], one.mean[1], two.mean[1]]), np.zeros((4, 4))
        B, s = between @ measured, within @ measured
        # What S and |g|^2 scatter by the known weights of the steps is no uncertainty of B and s.
        residuals = np.array([[1, 0, -B, 0, 0, 0, 0], [0, 1, 0, -B, -s, 0, 0]])
        for number, means in enumerate(self.means):
            covariance[number::2, number::2] = residuals @ means.covariance @ residuals.T
        # Of u B, s / w and |G|^2.
        found, covariance, freedom = matrix @ measured, matrix @ covariance @ matrix.T, one.effective + two.effective - 2
        parts = []
        for value, variance in zip(found[:2], covariance.diagonal(), strict=False):
            spread = student(freedom) * math.sqrt(max(variance, 0.0))
            value, low, high = (float(max(x, 0.0)) for x in (value, value - spread, value + spread))
            parts.append(NoiseEstimate(value=value, low=low, high=high))
        row = np.array([1, 1 / responses, 0])
        scale, noise = float(row @ found), covariance @ row
        variances = float(row @ noise), float(covariance[2, 2]), float(noise[2])
        return parts[0], parts[1], fieller(scale, float(found[2]), *variances, freedom)


def advice_from_line(
    line: Mapping[str, Any], *, responses: int, cost_per_prompt: float = 0.0, reuse: int = 1
) -> dict[str, Any]:
    """Return how many prompts and responses are worth it by a line of metrics.jsonl, as `rampup design` prints them.

    Args:
        line: has the estimates of `PromptNoise`, with the noise scale for `responses` and one update per sample.
        responses: responses per prompt now.
        cost_per_prompt: the cost of a prompt in units of that of one response.
        reuse: updates on the same samples.

    Returns:
        The estimates, the number of responses with the least noise at a cost, and for several numbers of them the prompts of
        one noise scale, and their cost relative to now.

    Raises:
        DataError: the line has no noise.
    """
    if line.get(_PARTS[0]) is None:
        text = "the run has measured no noise between prompts: train it with measure_gradient_noise=true, for some steps"
        raise DataError(text, key="measure_gradient_noise", nearest=(True,))
    between, within, scale = (
        NoiseEstimate(**{end: line[name + f"_{end}" * (end != "value")] for end in _ENDS}) for name in _PARTS
    )
    now, rows, best = _times(reuse, scale), [], None
    if within.value is not None and between.value + within.value > 0:
        B, s = between.value, within.value
        best = None if B == 0 else max(2.0, math.sqrt(cost_per_prompt * s / B))
        for number in sorted({responses, *RESPONSES}):
            prompts = (B + s / number) / (B + s / responses)
            cost = prompts * (cost_per_prompt + number) / (cost_per_prompt + responses)
            size = None if now.value is None else now.value * prompts
            rows.append({"num_generations": number, "prompts": size, "relative_prompts": prompts, "relative_cost": cost})
    return {
        **{name: {end: getattr(x, end) for end in _ENDS} for name, x in zip(_PARTS, (between, within, now), strict=True)},
        "num_generations": responses,
        "reuse": reuse,
        "best_num_generations": best,
        "choices": rows,
    }


def _times(reuse: int, scale: NoiseEstimate) -> NoiseEstimate:
    return NoiseEstimate(**{end: None if (x := getattr(scale, end)) is None else reuse * x for end in _ENDS})


class AutoPrompts(Component):
    """The decisions of `rl.batch_size_schedule="0:N auto"`; see `rampup.batch_size.auto`, with rollouts as steps.

    The averages come before it in a loop. A batch that is used several times needs as many times the prompts. The noise scale
    counts prompts that are trained on, and the schedule those that are generated: if groups are dropped, it grows later.
    """

    def __init__(
        self, auto: AutoSchedule, schedule: RolloutSchedule, noise: PromptNoiseAverages, reuse: int, on_event: OnEvent
    ) -> None:
        self.auto, self.schedule, self.noise, self.reuse, self.on_event = auto, schedule, noise, reuse, on_event

    def state(self) -> dict[str, Any]:
        """Return the decisions, from which `rampup.rl.train` makes the schedule of a resumed run."""
        return {PROMPT_ROWS: self.auto.rows}

    def may_change_plan(self, done: int) -> bool:
        """See `Component`."""
        last = self.schedule.at(done - 1)
        return last.is_last and self.auto.is_due(last.rollout + 1) and done < self.schedule.total_steps

    def after_step(self, line: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Decide about the prompts, after every tenth rollout. The decision is in the line before it is used."""
        if not self.may_change_plan(line["step"] + 1):
            return {}
        auto, before, noise = self.auto, self.auto.size, _times(self.reuse, self.noise.scale)
        rollout, prompts = values["facts"]["rollout"] + 1, values["facts"]["consumed_prompts"]
        auto.decide(step=rollout, sample=prompts, noise_scale=noise.low)
        if jax.process_count() > 1:
            # All compute the same averages; process 0 decides, in case rounding differs.
            auto.rows = json.loads(broadcast_from_process0(f"auto_prompts{rollout}", json.dumps(auto.rows)))
        outlook = auto.outlook(step=rollout, sample=prompts, noise=noise)
        self.on_event(BatchSizeDecided(step=line["step"], changed=auto.size != before, outlook=outlook))
        return {"next_num_prompts": auto.size}

    def next_plan(self, plan: Any) -> Any:
        """See `Component`."""
        return plan if self.auto.rows[-1][0] in dict(plan.stages) else plan.grown(self.auto.rows[-1][0], self.auto.size)


class PromptNoiseAverages(Component):
    """The noise of a run of RL, in the Euclidean geometry and, if it is measured, in that of Adam; see `PromptNoise`."""

    def __init__(self, half_life_samples: float, responses: int) -> None:
        self.half_life_samples, self.responses = half_life_samples, responses
        self.noises: dict[str, PromptNoise] = {}

    @property
    def scale(self) -> NoiseEstimate:
        """The noise scale in prompts, in the Euclidean geometry."""
        return self.noises[""].estimates(self.responses)[2] if "" in self.noises else UNKNOWN

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return {_RECORD: {prefix: noise.state for prefix, noise in self.noises.items()}}

    def load(self, record: Mapping[str, Any]) -> None:
        """See `Component`."""
        found = record.get(_RECORD) or {}
        self.noises = {prefix: PromptNoise.from_state(state, self.half_life_samples) for prefix, state in found.items()}

    def after_step(self, line: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Take the `gradient_noise` of a step that has the facts of its blocks."""
        noise, found = values.get("gradient_noise", {}), dict[str, Any]()
        if FACTS not in noise:
            return found
        weight = 0.0 if values.get("skipped", False) else float(values["weight"])
        for prefix in [prefix for prefix in ("", "adam_") if f"{prefix}trace" in noise]:
            trace, squared_norm = float(noise[f"{prefix}trace"]), float(noise[f"{prefix}squared_norm"])
            own = self.noises.setdefault(prefix, PromptNoise(half_life_samples=self.half_life_samples))
            # Before its first step, Adam's geometry has no S.
            counted = 0.0 if prefix and trace == squared_norm == 0 else weight
            square = squared_norm + trace / weight if weight else math.nan
            step = {"samples": line["global_batch_size"], "weight": counted, "trace": trace, "square": square}
            own.update(int(noise[LAYOUT]), facts=noise[FACTS], **step)
            for name, estimate in zip(_PARTS, own.estimates(self.responses), strict=True):
                for end in _ENDS:
                    value = getattr(estimate, end)
                    found[f"{prefix}{name}" + f"_{end}" * (end != "value")] = None if value is None else finite_or_none(value)
        return found
