"""The samples of a rollout on the host: rewards, advantages, their order in mini
batches, and the rows that the losses take.

Shape suffixes: S samples, G samples of a prompt, R tokens of the longest response, T
tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rampup.contrib.rl.plan import AGGREGATIONS, RolloutPlan
from rampup.contrib.rl.tasks import stable_permutation
from rampup.errors import ConfigError, DataError, ResumeMismatchError, choice_error
from rampup.plan.describe import format_count

# Added to the standard deviation of a group, as in Tunix.
STD_EPSILON = 1e-6
FLOAT32_MAX = float(np.finfo(np.float32).max)

Arrays = dict[str, np.ndarray]
Reward = Callable[[Sequence[Any], Sequence[Any]], Sequence[float]]


def check_rewards(
    reward: Reward, prompts: Sequence[Any], responses: Sequence[Any], *, where: str
) -> np.ndarray:
    """Call a reward function, and return one finite float32 per sample. If it gives
    something else, a DataError shows where; what it raises arrives as it is.
    """
    where = f"the reward function, in {where},"
    found = reward(prompts, responses)
    if not isinstance(found, Iterable):
        raise DataError(
            f"{where} returned {found!r:.80} and not a sequence of {len(prompts)}"
            " numbers, one per sample",
            key="reward",
        )
    values = list(found)
    if len(values) != len(prompts):
        raise DataError(
            f"{where} returned {format_count(len(values), 'reward')} for"
            f" {format_count(len(prompts), 'sample')}",
            fix="it must return one number per sample",
            key="reward",
            nearest=(len(prompts),),
        )
    for number, value in enumerate(values):
        is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"
        if not is_number or not abs(float(value)) <= FLOAT32_MAX:
            raise DataError(
                f"{where} returned {value!r:.80} for sample {number} (prompt"
                f" {prompts[number]!r:.80}, response {responses[number]!r:.80})",
                fix="a reward is a finite number",
                key="reward",
            )
    return np.array(values, np.float32)


def group_advantages(rewards_S: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Return the advantage of each sample over its group: (r - mean) / (standard
    deviation + 1e-6), float32.

    A group of equal rewards has advantages 0, and teaches nothing (Shao et al. 2024,
    arXiv 2402.03300, with the standard deviation of a sample, ddof=1).

    Raises:
        ConfigError: a group has one sample, whose advantage would always be 0.

    Example:
        >>> group_advantages(np.array([1.0, 0.0, 1.0, 1.0]), 2).round(2).tolist()
        [0.7099999785423279, -0.7099999785423279, 0.0, 0.0]
    """
    if samples_per_prompt < 2:
        raise ConfigError(
            f"rl.num_generations={samples_per_prompt} gives groups of one sample, whose"
            " advantage over the group is always 0",
            fix="set rl.num_generations=2 or more",
            key="rl.num_generations",
            nearest=(2,),
        )
    groups = np.asarray(rewards_S, np.float64).reshape(-1, samples_per_prompt)
    spread = groups.std(axis=1, ddof=1, keepdims=True)
    return (
        ((groups - groups.mean(axis=1, keepdims=True)) / (spread + STD_EPSILON))
        .ravel()
        .astype(np.float32)
    )


def has_zero_spread(rewards_S: np.ndarray, samples_per_prompt: int) -> np.ndarray:
    """Return whether the rewards of each group are all equal, so that all their
    advantages are 0.
    """
    groups = np.asarray(rewards_S).reshape(-1, samples_per_prompt)
    return (groups == groups[:, :1]).all(axis=1)  # type: ignore[no-any-return]


class Tally(NamedTuple):
    """The true numbers of the run up to the current rollout, and of that one, which
    depend on rewards.
    """

    prompts: float = 0  # prompts that the run has generated
    samples: float = 0  # their samples
    # Of this rollout; NaN before the first one.
    dropped: float = 0  # prompts whose samples it does not train on
    zero_spread: float = np.nan  # share of the prompts whose rewards are all equal
    reward: float = np.nan  # mean reward
    spread: float = np.nan  # mean standard deviation of the rewards of a prompt

    def after(self, rewards_S: np.ndarray, plan: RolloutPlan) -> Tally:
        """Return the numbers after a rollout with some rewards."""
        G = plan.samples_per_prompt
        rewards_PG = rewards_S.astype(np.float64).reshape(-1, G)
        generated = len(rewards_PG)
        return Tally(
            prompts=self.prompts + generated,
            samples=self.samples + generated * G,
            dropped=generated - plan.prompts_per_step,
            zero_spread=float(has_zero_spread(rewards_S, G).mean()),
            reward=float(rewards_PG.mean()),
            spread=float(rewards_PG.std(axis=1).mean()),
        )

    def to_words(self) -> np.ndarray:
        """Return the numbers bit by bit as int32, which a checkpoint keeps whatever the
        types of JAX are.
        """
        return np.array(self, np.float64).view(np.int32)

    @classmethod
    def from_words(cls, words: Any) -> Tally:
        """Return the numbers of `to_words`."""
        numbers = np.ascontiguousarray(words).view(np.float64).tolist()
        return cls(*map(int, numbers[:3]), *numbers[3:])


class MiniBatch(NamedTuple):
    """The samples of one optimizer step."""

    update: int  # the optimizer step within the rollout
    epoch: int  # the pass over the rollout's samples
    rows: np.ndarray  # the indices of its samples among the rollout's samples, in order


def mini_batches(
    plan: RolloutPlan,
    *,
    step: int,
    seed: int | None,
    start: int = 0,
) -> Iterator[MiniBatch]:
    """Return the mini batches of one rollout, epoch by epoch.

    Every sample is in exactly one mini batch of every epoch.

    Args:
        step: the rollout that generated the samples, counted from 0.
        seed: of the order of the prompts, whose responses stay together; every rollout
            and epoch has its own. None = the order of generation.
        start: the optimizer step within this rollout to start at.

    Raises:
        ResumeMismatchError: the plan has no such step or start.
        ConfigError: the seed is invalid, or mini batches would separate a prompt's
            responses.

    Example:
        >>> from rampup.contrib.rl.plan import Size, Training
        >>> policy = Training(mini_batch=Size(count=2, unit="prompts"))
        >>> plan = RolloutPlan(
        ...     rollout_batch=Size(count=4, unit="prompts"),
        ...     samples_per_prompt=2,
        ...     policy=policy,
        ... )
        >>> [batch.rows.tolist() for batch in mini_batches(plan, step=0, seed=None)]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    updates = plan.policy_updates
    for name, value, last in (
        ("step", step, plan.num_steps - 1),
        ("start", start, updates.optimizer_steps),
    ):
        if not 0 <= value <= last:
            raise ResumeMismatchError(
                f"{name}={value} must be between 0 and {last}, by the plan",
                key=name,
                nearest=(min(max(value, 0), last),),
            )
    group = 1 if seed is None else plan.samples_per_prompt
    if updates.mini_batch_samples % group:
        raise ConfigError(
            f"mini batches of {updates.mini_batch_samples} samples would separate the"
            f" samples_per_prompt={group} responses of a prompt",
            fix="count mini batches in prompts, or set seed=None",
            key="mini_batch_size",
        )
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise ConfigError(
            f"seed={str(seed)[:50]} must be a whole number from 0 to 2**63 - 1, or None",
            key="seed",
            nearest=(0,),
        )

    def mini_batch(update: int) -> MiniBatch:
        epoch, number = divmod(update, updates.num_mini_batches)
        order = np.arange(plan.samples_per_step)
        if seed is not None:
            # From the identity of the epoch alone, so that a resumed run needs no state
            # of a generator. The word is part of it.
            groups = stable_permutation(
                (seed, step, epoch, *b"policy"), len(order) // group
            )
            order = order.reshape(-1, group)[groups].ravel()
        places = updates.mini_batch_range(number)
        return MiniBatch(update, epoch, order[places.start : places.stop])

    return map(mini_batch, range(start, updates.optimizer_steps))


# The stored arrays over the response, which a loss reads by the same names.
PER_TOKEN = (
    "log_probabilities",
    "reference_log_probabilities",
    "advantages",
)


def loss_rows(
    experience: Mapping[str, Any], *, loss_agg_mode: str = "token-mean"
) -> Arrays:
    """Return samples as the rows of a loss: one sample per row, all of one length.

    Args:
        experience: arrays over samples: `tokens` (S, T), `prompt_length` and
            `response_length` (S,), and over the tokens of the response (S, R) those
            that the loss reads: `log_probabilities` (of the policy that sampled),
            `advantages`, `reference_log_probabilities`. The aggregation by groups needs
            the number of the prompt of each sample, `group` (S,), and all samples of
            each prompt.
        loss_agg_mode: how the losses of tokens add up, one of
            `rampup.contrib.rl.plan.AGGREGATIONS`.

    Example:
        >>> rows = loss_rows(
        ...     {
        ...         "tokens": np.array([[7, 8, 9, 0]]),
        ...         "prompt_length": [1],
        ...         "response_length": [2],
        ...     }
        ... )
        >>> rows["targets"].tolist(), rows["coefficients"].tolist()
        ([[8, 9, 0, 0]], [[1.0, 1.0, 0.0, 0.0]])
    """
    if loss_agg_mode not in AGGREGATIONS:
        raise choice_error("rl.loss_agg_mode", loss_agg_mode, AGGREGATIONS)
    tokens_ST = np.asarray(experience["tokens"]).astype(np.int32)
    prompt_S, response_S = (
        np.asarray(experience[name]) for name in ("prompt_length", "response_length")
    )
    # Entry t predicts token t + 1, so the first token of the response belongs to the
    # last entry of the prompt.
    number_ST = np.arange(tokens_ST.shape[1]) - (prompt_S[:, None] - 1)
    counts_ST = (number_ST >= 0) & (number_ST < response_S[:, None])
    targets_ST = np.roll(tokens_ST, -1, axis=1)
    targets_ST[:, -1] = 0
    # The loss of each token is multiplied by its coefficient, and their sum is divided
    # by that of the weights. Transfers to the devices make float32 of both, unless the
    # run is in float64.
    coefficients_ST = weights_ST = counts_ST.astype(np.float64)
    if loss_agg_mode != "token-mean":
        # The first token of a sequence carries the weight of the sequence.
        weights_ST = (counts_ST & (number_ST == 0)).astype(np.float64)
    if loss_agg_mode == "seq-mean-token-mean":
        coefficients_ST = coefficients_ST / np.maximum(response_S, 1)[:, None]
    if loss_agg_mode == "group-mean-token-mean":
        _, group_S = np.unique(experience["group"], return_inverse=True)
        tokens_S = np.bincount(group_S, response_S)[group_S]
        sequences_S = np.bincount(group_S, response_S > 0)[group_S]
        coefficients_ST = coefficients_ST / np.maximum(tokens_S, 1)[:, None]
        weights_ST = weights_ST / np.maximum(sequences_S, 1)[:, None]
    found = {
        "tokens": tokens_ST,
        "targets": targets_ST,
        "coefficients": coefficients_ST,
        "weights": weights_ST,
    }
    for name in PER_TOKEN:
        if name in experience:
            stored_SR = np.asarray(experience[name])
            wide_ST = np.take_along_axis(
                stored_SR, np.clip(number_ST, 0, stored_SR.shape[1] - 1), axis=1
            )
            found[name] = np.where(counts_ST, wide_ST, 0).astype(
                np.promote_types(stored_SR.dtype, np.float32)
            )
    return found


def padded_rows(rows: Arrays, width: int) -> Arrays:
    """Return rows of one sample as passes of one width, arrays (n, width, ...).

    Padding repeats the first row with weight 0, so that no computation on it is
    undefined.
    """
    samples = len(rows["tokens"])
    n = -(-samples // width)
    is_real = np.arange(n * width) < samples
    found = {
        name: x[np.where(is_real, np.arange(n * width), 0)] for name, x in rows.items()
    }
    for name in ("coefficients", "weights"):
        found[name][~is_real] = 0
    return {name: x.reshape(n, width, *x.shape[1:]) for name, x in found.items()}
