"""The samples of a rollout on the host: rewards, advantages, the stored arrays, and the rows that the losses take.

Shape suffixes: S samples, G samples of a prompt, R tokens of the longest response, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rampup.errors import ConfigError, DataError
from rampup.packing import PackedMicrobatches
from rampup.rl.losses import AGGREGATIONS

# Added to the standard deviation of a group, as in Tunix.
STD_EPSILON = 1e-6

Arrays = dict[str, np.ndarray]
Reward = Callable[[Sequence[Any], Sequence[Any]], Sequence[float]]


def check_rewards(
    reward: Reward, prompts: Sequence[Any], responses: Sequence[Any], *, where: str, first: int = 0
) -> np.ndarray:
    """Call a reward function, and return one finite float32 per sample. `where` and `first`, its first number, are for errors.

    Raises:
        DataError: it raises an exception, or returns not one finite number per sample. The error shows the sample.
    """
    where = f"the reward function, in {where},"
    try:
        found = reward(prompts, responses)
    except Exception as error:
        raise DataError(f"{where} raised {type(error).__name__}: {error}", key="reward") from error
    try:
        values = list(found)
    except TypeError:
        raise DataError(
            f"{where} returned {found!r:.80} and not a sequence of {len(prompts)} numbers, one per sample", key="reward"
        ) from None
    if len(values) != len(prompts):
        raise DataError(
            f"{where} returned {len(values)} rewards for {len(prompts)} samples; it must return one number per sample",
            key="reward",
            nearest=(len(prompts),),
        )
    rewards = np.zeros(len(values), np.float32)
    for number, value in enumerate(values):
        try:
            with np.errstate(over="ignore"):
                rewards[number] = float(value)
        except (TypeError, ValueError, OverflowError):
            rewards[number] = np.nan
        if not np.isfinite(rewards[number]):
            raise DataError(
                f"{where} returned {value!r:.80} for sample {first + number} (prompt {prompts[number]!r:.80}, response "
                f"{responses[number]!r:.80}); a reward is a finite number",
                key="reward",
            )
    return rewards


def group_advantages(rewards_S: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Return the advantage of each sample over its group: (r - mean) / (standard deviation + 1e-6), float32.

    A group of equal rewards has advantages 0, and teaches nothing (Shao et al. 2024, arXiv 2402.03300, with the standard
    deviation of a sample, ddof=1).

    Raises:
        ConfigError: a group has one sample, whose advantage would always be 0.

    Example:
        >>> group_advantages(np.array([1.0, 0.0, 1.0, 1.0]), 2).round(2).tolist()
        [0.7099999785423279, -0.7099999785423279, 0.0, 0.0]
    """
    if samples_per_prompt < 2:
        raise ConfigError(
            f"rl.num_generations={samples_per_prompt} gives groups of one sample, whose advantage over the group is always 0; "
            "set rl.num_generations=2 or more, or enable_critic=true",
            key="rl.num_generations",
            nearest=(2,),
        )
    groups = np.asarray(rewards_S, np.float64).reshape(-1, samples_per_prompt)
    spread = groups.std(axis=1, ddof=1, keepdims=True)
    return ((groups - groups.mean(axis=1, keepdims=True)) / (spread + STD_EPSILON)).ravel().astype(np.float32)


def zero_spread_share(rewards_S: np.ndarray, samples_per_prompt: int) -> float:
    """Return the share of groups whose rewards are all equal, so that all their advantages are 0.

    Example:
        >>> zero_spread_share(np.array([1.0, 0.0, 1.0, 1.0]), 2)
        0.5
    """
    groups = np.asarray(rewards_S).reshape(-1, samples_per_prompt)
    return float((groups == groups[:, :1]).all(axis=1).mean())


def generalized_advantages(
    rewards_SR: np.ndarray, values_SR: np.ndarray, response_length_S: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns by generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438), float32.

    delta_t = r_t + gamma * V_{t+1} - V_t and A_t = delta_t + gamma * lam * A_{t+1}, where the value after the last token is 0.
    Returns are A + V. Advantages are then normalized over all tokens of the rollout to mean 0 and standard deviation 1.

    Example:
        >>> rewards, values = np.array([[0.0, 1.0]]), np.array([[0.5, 0.5]])
        >>> generalized_advantages(rewards, values, np.array([2]), gamma=1.0, lam=1.0)[1].tolist()
        [[1.0, 1.0]]
    """
    rewards_SR, values_SR = np.asarray(rewards_SR, np.float64), np.asarray(values_SR, np.float64)
    S, R = rewards_SR.shape
    counts_SR = np.arange(R) < np.asarray(response_length_S)[:, None]
    advantages_SR, following_S, next_value_S = np.zeros((S, R)), np.zeros(S), np.zeros(S)
    for t in range(R - 1, -1, -1):
        delta_S = rewards_SR[:, t] + gamma * next_value_S - values_SR[:, t]
        following_S = np.where(counts_SR[:, t], delta_S + gamma * lam * following_S, 0)
        next_value_S = np.where(counts_SR[:, t], values_SR[:, t], 0)
        advantages_SR[:, t] = following_S
    returns_SR = np.where(counts_SR, advantages_SR + values_SR, 0)
    mean = advantages_SR[counts_SR].mean() if counts_SR.any() else 0.0
    spread = advantages_SR[counts_SR].std() if counts_SR.any() else 1.0
    advantages_SR = np.where(counts_SR, (advantages_SR - mean) / (spread + 1e-8), 0)
    return advantages_SR.astype(np.float32), returns_SR.astype(np.float32)


# --- rows of a loss ---

# From the name of a stored array over the response to that of a row's entries.
_PER_TOKEN = {
    "log_probabilities": "log_probabilities",
    "reference_log_probabilities": "reference",
    "advantages": "advantages",
    "values": "values",
    "returns": "returns",
}


def loss_rows(
    experience: Mapping[str, Any], rows: Sequence[int] | np.ndarray | None = None, *, loss_agg_mode: str = "token-mean"
) -> Arrays:
    """Return samples as the rows of a loss: one sample per row, all of one length.

    Args:
        experience: arrays over samples: `tokens` (S, T), `prompt_length` and `response_length` (S,), and over the tokens of the
            response (S, R) those that the loss reads: `log_probabilities` (of the policy that sampled), `advantages`,
            `reference_log_probabilities`, `values`, `returns`.
        rows: the samples, all by default.
        loss_agg_mode: how the losses of tokens add up, one of `AGGREGATIONS`.

    Raises:
        ConfigError: another `loss_agg_mode`.

    Example:
        >>> rows = loss_rows({"tokens": np.array([[7, 8, 9, 0]]), "prompt_length": [1], "response_length": [2]})
        >>> rows["targets"].tolist(), rows["coefficients"].tolist()
        ([[8, 9, 0, 0]], [[1.0, 1.0, 0.0, 0.0]])
    """
    tokens_ST = np.asarray(experience["tokens"]).astype(np.int32)
    chosen = np.arange(len(tokens_ST)) if rows is None else np.asarray(rows)
    tokens_BT = tokens_ST[chosen]
    prompt_B, response_B = (np.asarray(experience[name])[chosen] for name in ("prompt_length", "response_length"))
    # Entry t predicts token t + 1, so the first token of the response belongs to the last entry of the prompt.
    number_BT = np.arange(tokens_BT.shape[1]) - (prompt_B[:, None] - 1)
    counts_BT = (number_BT >= 0) & (number_BT < response_B[:, None])
    found = {"tokens": tokens_BT, "targets": np.roll(tokens_BT, -1, axis=1)}
    found["targets"][:, -1] = 0
    found |= dict(zip(("coefficients", "weights"), _coefficients(counts_BT, number_BT, response_B, loss_agg_mode), strict=True))
    for name, entry in _PER_TOKEN.items():
        if name in experience:
            stored_BR = np.asarray(experience[name])[chosen]
            wide_BT = np.take_along_axis(stored_BR, np.clip(number_BT, 0, stored_BR.shape[1] - 1), axis=1)
            found[entry] = np.where(counts_BT, wide_BT, 0).astype(np.promote_types(stored_BR.dtype, np.float32))
    return found


def packed_rows(rows: Arrays, packed: PackedMicrobatches, lengths: Sequence[int]) -> Arrays:
    """Return rows of one sample as rows of several, arrays (n, replicas, budget, ...) of a mini batch's passes.

    Args:
        rows: from `loss_rows`.
        packed: which samples are in which row; see `rampup.packing.pack`.
        lengths: tokens of each sample.

    Returns:
        The arrays of `rows`, and `positions`, `segments` (1, 2, ...; padding is 0) and `shape`, the number of the shape on the
        ladder that a pass is computed with, (n, replicas).
    """
    n, replicas, budget = packed.num_microbatches, packed.num_replicas, packed.token_budget
    found = {name: np.zeros((n, replicas, budget), x.dtype) for name, x in rows.items()}
    found |= {name: np.zeros((n, replicas, budget), np.int32) for name in ("positions", "segments")}
    for replica, microbatches in enumerate(packed.replicas):
        for number, members in enumerate(microbatches):
            place = 0
            for segment, member in enumerate(members, 1):
                length = lengths[member]
                here = number, replica, slice(place, place + length)
                for name, x in rows.items():
                    found[name][here] = x[member, :length]
                found["positions"][here], found["segments"][here] = np.arange(length), segment
                place += length
    shapes = [packed.ladder.index(shape) for shape in packed.microbatch_shapes]
    found["shape"] = np.repeat(np.array(shapes, np.int32)[:, None], replicas, axis=1)
    return found


def _coefficients(
    counts_BT: np.ndarray, number_BT: np.ndarray, length_B: np.ndarray, mode: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the loss of each token is multiplied by, and what the sum of them is divided by."""
    if mode not in AGGREGATIONS:
        raise ConfigError(
            f"rl.loss_agg_mode={mode!r} must be one of {', '.join(AGGREGATIONS)}", key="rl.loss_agg_mode", nearest=AGGREGATIONS
        )
    # float64 for a run in float64; transfers to the devices make float32 of it otherwise.
    ones = counts_BT.astype(np.float64)
    if mode == "token-mean":
        return ones, ones
    # The first token of a sequence carries the weight of the sequence.
    weights = (counts_BT & (number_BT == 0)).astype(np.float64)
    return (ones if mode == "seq-mean-token-sum" else ones / np.maximum(length_B, 1)[:, None]), weights
