"""Tests of rampup.rl.experience and rampup.rl.schedule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError, DataError, ResumeMismatchError
from rampup.packing import make_ladder, pack
from rampup.rl.config import RolloutConfig, build_rollout_schedule
from rampup.rl.experience import (
    check_rewards,
    generalized_advantages,
    group_advantages,
    loss_rows,
    packed_rows,
    zero_spread_share,
)
from rampup.rl.losses import AGGREGATIONS


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (lambda p, r: [1.0, float("nan")], "returned nan for sample 1 .*'b'.*'y'"),
        (lambda p, r: [float("inf"), 1.0], "returned inf for sample 0"),
        (lambda p, r: [1.0, None], "returned None for sample 1"),
        (lambda p, r: ["good", 1.0], "returned 'good' for sample 0"),
        (lambda p, r: [[1.0, 2.0], 1.0], r"returned \[1.0, 2.0\] for sample 0"),
        (lambda p, r: None, "returned None and not a sequence of 2 numbers"),
        (lambda p, r: 1.0, "returned 1.0 and not a sequence of 2 numbers"),
        (lambda p, r: [1.0], "returned 1 rewards for 2 samples"),
        (lambda p, r: [1.0] * 3, "returned 3 rewards for 2 samples"),
        (lambda p, r: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_check_rewards_rejects(reward, text):
    """NaN, None, text, a wrong number and an exception: an error that names the rollout and shows the sample."""
    with pytest.raises(DataError, match=f"the reward function, in rollout 7, {text}"):
        check_rewards(reward, ["a", "b"], ["x", "y"], where="rollout 7")


def test_check_rewards_accepts_numbers():
    """Lists, arrays, booleans and integers."""
    for found in ([1, 0.5], np.array([1, 0.5]), (True, 0.5)):
        assert check_rewards(lambda p, r, found=found: found, [1, 2], [3, 4], where="").tolist() == [1.0, 0.5]


@given(
    st.integers(2, 6).flatmap(
        lambda g: st.lists(st.integers(-5, 5), min_size=g, max_size=4 * g).map(lambda x: (g, x[: len(x) // g * g]))
    )
)
def test_group_advantages_have_mean_zero(case):
    """Every group has mean 0 and standard deviation 1, or 0 if its rewards are equal."""
    size, rewards = case
    groups = group_advantages(np.array(rewards, np.float32), size).reshape(-1, size)
    np.testing.assert_allclose(groups.mean(axis=1), 0, atol=1e-6)
    equal = np.ptp(np.array(rewards).reshape(-1, size), axis=1) == 0
    np.testing.assert_allclose(groups.std(axis=1, ddof=1), np.where(equal, 0, 1), atol=1e-4)
    assert zero_spread_share(np.array(rewards), size) == equal.mean()


def test_groups_of_one_are_refused():
    """Their advantage would always be 0."""
    with pytest.raises(ConfigError, match="groups of one sample") as caught:
        group_advantages(np.ones(3), 1)
    assert caught.value.nearest == (2,)


def test_generalized_advantages_are_those_of_the_definition():
    """Sums over later differences, before normalization; padding is 0."""
    rng = np.random.default_rng(0)
    lengths, gamma, lam = np.array([4, 1, 3]), 0.9, 0.7
    counts = np.arange(4) < lengths[:, None]
    rewards, values = (np.where(counts, rng.normal(size=(3, 4)), 0) for _ in range(2))
    raw = np.zeros((3, 4))
    for row, length in enumerate(lengths):
        following = [*values[row, 1:length], 0.0]
        delta = [rewards[row, t] + gamma * following[t] - values[row, t] for t in range(length)]
        for t in range(length):
            raw[row, t] = sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, length))
    advantages, returns = generalized_advantages(rewards, values, lengths, gamma=gamma, lam=lam)
    np.testing.assert_allclose(returns, np.where(counts, raw + values, 0), atol=1e-6)
    np.testing.assert_allclose(advantages, np.where(counts, (raw - raw[counts].mean()) / raw[counts].std(), 0), atol=1e-5)


def experience(lengths=((2, 3), (1, 1), (3, 0), (2, 2))):
    """Return arrays over samples with prompts and responses of these lengths; one response is empty."""
    rng = np.random.default_rng(0)
    prompt, response = np.array(lengths).T
    arrays = {"tokens": rng.integers(1, 9, (len(lengths), 6)), "prompt_length": prompt, "response_length": response}
    return arrays | {name: rng.normal(size=(len(lengths), 3)) for name in ("log_probabilities", "advantages")}


def test_loss_rows_align_responses_with_predictions():
    """Entry t belongs to the prediction of token t + 1, and only those of the response count."""
    arrays = experience()
    rows = loss_rows(arrays)
    for row, (prompt, response) in enumerate(zip(arrays["prompt_length"], arrays["response_length"], strict=True)):
        counts = np.flatnonzero(rows["coefficients"][row])
        assert counts.tolist() == list(range(prompt - 1, prompt - 1 + response))
        np.testing.assert_array_equal(rows["targets"][row, counts], arrays["tokens"][row, counts + 1])
        np.testing.assert_array_equal(rows["advantages"][row, counts], arrays["advantages"][row, :response])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_are_those_of_their_names(mode):
    """The sum of coefficient * loss over the sum of the weights, with an empty response that counts in no mean."""
    arrays = experience()
    loss = np.random.default_rng(1).normal(size=(4, 6))
    rows = loss_rows(arrays, loss_agg_mode=mode)
    per_sequence = [loss[row][rows["coefficients"][row] != 0] for row in range(4)]
    full = [one for one in per_sequence if len(one)]
    expected = {
        "token-mean": np.concatenate(full).mean(),
        "seq-mean-token-sum": np.mean([one.sum() for one in full]),
        "seq-mean-token-mean": np.mean([one.mean() for one in full]),
    }[mode]
    assert np.sum(rows["coefficients"] * loss) / rows["weights"].sum() == pytest.approx(expected)


def test_loss_rows_reject_another_aggregation():
    """The error lists the three."""
    with pytest.raises(ConfigError) as caught:
        loss_rows(experience(), loss_agg_mode="mean")
    assert caught.value.nearest == AGGREGATIONS


@pytest.mark.parametrize("replicas", [1, 2])
def test_packed_rows_lose_nothing(replicas):
    """Every token is in one row with its entries, its position and a segment of its own; the rest is weightless."""
    arrays = experience()
    rows, lengths = loss_rows(arrays), (arrays["prompt_length"] + arrays["response_length"]).tolist()
    packed = pack(lengths, 8, make_ladder(8, 2), num_replicas=replicas)
    found = packed_rows(rows, packed, lengths)
    assert found["tokens"].shape == (packed.num_microbatches, replicas, 8)
    for name in ("coefficients", "weights", "advantages"):
        np.testing.assert_allclose(found[name].sum(), rows[name].sum(), atol=1e-12)
    assert (found["segments"] > 0).sum() == sum(lengths)
    assert (found["segments"][found["coefficients"] != 0] > 0).all()
    for number, shape in enumerate(packed.microbatch_shapes):
        assert (found["segments"][number, :, shape:] == 0).all()
        assert (found["shape"][number] == packed.ladder.index(shape)).all()


def test_schedule_counts_every_optimizer_step_once():
    """Steps are those of the plans, the critic's before the policy's, over stages of growing batches."""
    config = RolloutConfig(
        batch_size=16,
        batch_size_schedule="0:4 2:8 5:16",
        num_generations=4,
        num_generations_schedule="0:2 3:4",
        num_batches=7,
        mini_batch_size=4,
        train_micro_batch_size=2,
        num_iterations=2,
        enable_critic=True,
        critic_num_iterations=1,
    )
    schedule = build_rollout_schedule(config, 1)
    seen, samples, prompts = {"policy": 0, "critic": 0}, 0, 0
    position = 0
    for rollout, (batch, responses) in enumerate([(4, 2), (4, 2), (8, 2), (8, 4), (8, 4), (16, 4), (16, 4)]):
        assert schedule.prompts_before(rollout) == prompts
        assert schedule.plan_of(rollout).samples_per_step == batch * responses
        for model, updates in (("critic", batch // 4), ("policy", batch // 4 * 2)):
            for update in range(updates):
                at = schedule.at(position)
                assert (at.rollout, at.model, at.update, at.model_step) == (rollout, model, update, seen[model])
                assert at.consumed_samples == samples
                assert at.is_first == (model == "critic" and update == 0)
                assert at.is_last == (model == "policy" and update == updates - 1)
                assert at.split.global_batch_size == 4 * responses
                position, seen[model] = position + 1, seen[model] + 1
        samples, prompts = samples + batch * responses, prompts + batch
    assert (schedule.total_steps, schedule.consumed_samples, schedule.num_rollouts) == (position, samples, 7)
    assert {model: schedule.optimizer_steps(model) for model in seen} == seen
    # One shape for all stages: a pass of 2 * 2 samples.
    assert (schedule.pass_samples("policy"), schedule.sequences_per_call, schedule.max_samples) == (4, 4, 64)
    assert schedule.max_passes("policy") == 4
    with pytest.raises(ResumeMismatchError):
        schedule.at(position)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"batch_size_schedule": "1:4 2:8"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 0:16"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 4:64"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:0"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "many"}, "rl.batch_size_schedule"),
        ({"num_generations_schedule": "0:4 3:9"}, "rl.num_generations_schedule"),
        ({"batch_size_schedule": "0:8 4:12", "mini_batch_size": 8}, "mini_batch_size"),
    ],
)
def test_schedule_rejects_bad_growth(settings, key):
    """Every error names the key; sizes of a later stage that do not divide name the step."""
    with pytest.raises(ValueError, match=r"\d") as caught:
        build_rollout_schedule(RolloutConfig(**settings), 1)
    assert key in str(caught.value) or caught.value.key == key
