"""Tests of rampup.rl.plan."""

import pytest

from rampup.errors import BatchDivisibilityError, ConfigError
from rampup.rl.plan import RolloutPlan, Size, Training


def prompts(count):
    """Return a size in prompts of the job."""
    return Size(count=count, unit="prompts")


def per_replica(count):
    """Return a size in samples per replica."""
    return Size(count=count, unit="samples", scope="replica")


def make(batch=64, n=4, mini=16, micro=2, replicas=4, **options):
    """Return a plan of 64 prompts * 4 responses."""
    policy = Training(mini_batch=prompts(mini), microbatch=per_replica(micro), data_parallel_size=replicas, num_epochs=2)
    return RolloutPlan(**{"rollout_batch": prompts(batch), "samples_per_prompt": n, "policy": policy} | options)


def test_plan_numbers():
    """Prompts, samples, mini batches, passes, optimizer steps and evaluation follow from the sizes."""
    plan = make(num_steps=10, eval_prompts=12, eval_samples_per_prompt=3, generation=prompts(8))
    expected = {"prompts_per_step": 64, "samples_per_step": 256, "generate_calls": 8, "sequences_per_generate_call": 32}
    expected |= {"mini_batches": 4, "mini_batch_samples": 64, "accumulation_steps": 8, "microbatch_size": 2}
    expected |= {"optimizer_steps": 8, "weight_syncs": 10, "total_optimizer_steps": 80}
    expected |= {"eval_prompts": 12, "eval_samples": 36, "critic": None}
    assert expected.items() <= plan.to_dict().items()
    rows = [(row["what"], row["number"], row["prompts"], row["samples"], row["how"]) for row in plan.to_dict()["timetable"]]
    assert rows == [
        ("prompts", 1, 64, None, "read"),
        ("responses", 8, 8, 32, "4 per prompt"),
        ("mini batches", 4, 16, 64, "2 epochs"),
        ("microbatches", 8, 2, 8, "2 per replica"),
        ("optimizer step", 1, 16, 64, "8 per step"),
    ]


def test_critic_has_its_own_sizes_and_trains_first():
    """The critic has its own mini batch, replicas and epochs, and trains before the policy."""
    critic = Training(mini_batch=prompts(32), microbatch=per_replica(8), data_parallel_size=2, num_epochs=3)
    plan = make(critic=critic)
    assert [updates.model for updates in plan.order] == ["critic", "policy"]
    assert plan.to_dict()["critic"]["optimizer_steps"] == 2 * 3
    assert plan.updates("critic").accumulation_steps == 32 * 4 // (2 * 8)
    assert plan.to_dict()["optimizer_steps"] == 8
    models = [row["what"].split(": ")[0] for row in plan.timetable()[2:]]
    assert models == ["critic"] * 3 + ["policy"] * 3


def test_plan_reports_all_problems():
    """Policy, critic and generation are checked together, and each error has legal values."""
    critic = Training(mini_batch=prompts(24), data_parallel_size=4)
    with pytest.raises(BatchDivisibilityError) as caught:
        make(mini=15, critic=critic, generation=prompts(5))
    assert [(problem.key, problem.nearest) for problem in caught.value.problems] == [
        ("policy.mini_batch", (8, 16)),
        ("critic.mini_batch", (16, 32)),
        ("generation", (4, 8)),
    ]


# Mini batches in prompts per replica, with 2 replicas, cannot make up 3 prompts.
BY_REPLICA = {"policy": Training(mini_batch=Size(count=1, unit="prompts", scope="replica"), data_parallel_size=2)}


@pytest.mark.parametrize(
    ("batch", "n", "options", "nearest"),
    [(10, 3, {}, (8, 16)), (3, 3, {}, (8,)), (7, 4, {}, (6, 8)), (12, 1, {}, (8, 16)), (3, 2, BY_REPLICA, (2, 4))],
)
def test_plan_rejects_a_batch_without_a_legal_mini_batch(batch, n, options, nearest):
    """If not even the whole batch divides over 8 replicas, or by the unit of the mini batch, the error is about the batch."""
    with pytest.raises(BatchDivisibilityError) as caught:
        make(batch, n, batch, 1, 8, **options)
    assert (caught.value.key, caught.value.nearest) == ("rollout_batch", nearest)
    for count in nearest:
        make(count, n, count, 1, 8, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 0},
        {"n": True},
        {"num_steps": 0},
        {"num_steps": 1.5},
        {"eval_prompts": -1},
        {"eval_samples_per_prompt": 0},
        {"generation": Size(count=5, unit="tokens")},
        {"replicas": 0},
        {"batch": 10**9, "n": 2},
        {"policy": Training(mini_batch=Size(count=4, unit="tokens"))},
        {"policy": Training(mini_batch=prompts(4), microbatch=Size(count=4, unit="tokens"))},
        {"policy": Training(mini_batch=prompts(4), num_epochs=0)},
        {"policy": Training(mini_batch=prompts(4), num_stages=1.5)},
    ],
)
def test_plan_rejects_bad_counts(options):
    """Counts that are not positive whole numbers raise errors with a key; tokens are only a budget per replica."""
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.key
