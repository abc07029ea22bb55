"""Tests of rampup.rl.schedule."""

import pytest

from rampup.errors import ResumeMismatchError
from rampup.rl.config import RolloutConfig, build_rollout_schedule


def test_schedule_counts_every_optimizer_step_once():
    """Steps are those of the plans, the critic's before the policy's, over stages of growing batches."""
    sizes = {"batch_size": 16, "num_generations": 4, "num_batches": 7, "mini_batch_size": 4, "train_micro_batch_size": 2}
    growth = {"batch_size_schedule": "0:4 2:8 5:16", "num_generations_schedule": "0:2 3:4"}
    critic = {"num_iterations": 2, "enable_critic": True, "critic_num_iterations": 1}
    schedule = build_rollout_schedule(RolloutConfig(**sizes, **growth, **critic), 1)
    seen, samples, position = {"policy": 0, "critic": 0}, 0, 0
    for rollout, (batch, responses) in enumerate([(4, 2), (4, 2), (8, 2), (8, 4), (8, 4), (16, 4), (16, 4)]):
        for model, updates in (("critic", batch // 4), ("policy", batch // 4 * 2)):
            for update in range(updates):
                at = schedule.at(position)
                assert (at.rollout, at.model, at.update, at.model_step) == (rollout, model, update, seen[model])
                assert at.consumed_samples == samples
                assert at.is_first == (model == "critic" and update == 0)
                assert at.is_last == (model == "policy" and update == updates - 1)
                assert at.split.global_batch_size == 4 * responses
                position, seen[model] = position + 1, seen[model] + 1
        samples += batch * responses
    assert (schedule.total_steps, schedule.consumed_samples, schedule.num_rollouts) == (position, samples, 7)
    assert {model: schedule.optimizer_steps(model) for model in seen} == seen
    # One shape for all stages: a pass of 2 * 2 samples.
    assert (schedule.pass_samples("policy"), schedule.sequences_per_call, schedule.max_samples) == (4, 4, 64)
    assert schedule.ramp_plan("policy").splits[0].accumulation_steps == 4
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
        ({"batch_size_schedule": "0:8 4:16 auto", "measure_gradient_noise": True}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "auto", "measure_gradient_noise": True}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 auto", "measure_gradient_noise": True}, "train_micro_batch_size"),
    ],
)
def test_schedule_rejects_bad_growth(settings, key):
    """Every error names the key; sizes of a later stage that do not divide name the step."""
    with pytest.raises(ValueError, match=r"\d") as caught:
        build_rollout_schedule(RolloutConfig(**settings), 1)
    assert key in str(caught.value) or caught.value.key == key
