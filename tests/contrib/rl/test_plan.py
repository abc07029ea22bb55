"""Tests of rampup.contrib.rl.plan."""

import itertools

import numpy as np
import pytest

from rampup.contrib.rl.plan import (
    BYTES,
    MAX_SAMPLES,
    Experience,
    RolloutPlan,
    Size,
    Training,
    split_updates,
)
from rampup.errors import BatchDivisibilityError, ConfigError


def test_samples_of_every_unit_and_scope():
    """Prompts count their responses, and sizes per replica count all replicas."""
    factors = {"samples_per_prompt": 5, "data_parallel_size": 4}
    for scope, prompts, samples in (("job", 15, 3), ("replica", 60, 12)):
        assert Size(count=3, unit="prompts", scope=scope).samples(**factors) == prompts
        assert Size(count=3, unit="samples", scope=scope).samples(**factors) == samples


@pytest.mark.parametrize("count", [0, -1, MAX_SAMPLES + 1, True, 1.5, "3", None])
def test_size_rejects_bad_counts(count):
    """A count is a whole number from 1 to 10**9, and the error has the configuration
    key.
    """
    with pytest.raises(ConfigError) as caught:
        Size(count=count, unit="prompts", key="batch_size")
    assert caught.value.key == "batch_size"
    assert "batch_size=" in str(caught.value)


@pytest.mark.parametrize("reference", [False, True])
def test_experience_bytes_agree_with_arrays(reference):
    """The bytes are those of arrays of these shapes and types."""
    assert all(size == np.dtype(name).itemsize for name, size in BYTES.items())
    experience = Experience(
        max_prompt_length=7, max_response_length=5, reference=reference
    )
    arrays = {
        "tokens": np.zeros(12, np.int32),
        "attention_mask": np.zeros(12, bool),
        "response_mask": np.zeros(5, bool),
    }
    names = ["log_probabilities", "rewards", "advantages"]
    names += ["reference_log_probabilities"] if reference else []
    arrays |= {name: np.zeros(5, np.float32) for name in names}
    assert experience.field_bytes() == {
        name: array.nbytes for name, array in arrays.items()
    }


def cut(
    prompts,
    per_prompt,
    replicas,
    mini,
    micro,
    *,
    pad=False,
    unit="samples",
    scope="replica",
):
    """Split a rollout. The mini batch counts prompts of the job, the microbatch `unit`
    per `scope`.
    """
    training = Training(
        mini_batch=Size(count=mini, unit="prompts"),
        microbatch=None if micro is None else Size(count=micro, unit=unit, scope=scope),
        data_parallel_size=replicas,
    )
    return split_updates(
        training,
        samples_per_step=prompts * per_prompt,
        samples_per_prompt=per_prompt,
        pad=pad,
    )


GRID = list(
    itertools.product(
        (1, 4, 6, 8, 12),
        (1, 2, 3, 5),
        (1, 2, 3, 4),
        (1, 2, 3, 4, 6, 8, 12),
        (None, 1, 2, 3, 4),
    )
)


@pytest.mark.parametrize("pad", [False, True])
def test_split_updates_on_a_grid(pad):
    """A split exists exactly if everything divides, or fits with padding. It multiplies
    out and counts the padding.
    """
    cuts = 0
    for prompts, per_prompt, replicas, mini, micro in GRID:
        share, rest = divmod(mini * per_prompt, replicas)
        legal = (
            mini <= prompts
            if pad
            else prompts % mini == 0
            and not rest
            and (micro is None or share % micro == 0)
        )
        try:
            updates = cut(prompts, per_prompt, replicas, mini, micro, pad=pad)
        except BatchDivisibilityError as error:
            assert not legal
            assert error.value in (mini, micro)
            continue
        assert legal
        cuts += 1
        assert (
            updates.accumulation_steps * updates.microbatch_samples >= mini * per_prompt
        )
        assert micro in (None, updates.microbatch_size)
        ranges = [updates.mini_batch_range(i) for i in range(updates.num_mini_batches)]
        rows = (
            sum(updates.num_passes(len(r)) for r in ranges) * updates.microbatch_samples
        )
        assert rows - prompts * per_prompt == updates.padded_samples >= 0
        assert pad or updates.padded_samples == 0
        assert [i for r in ranges for i in r] == list(range(prompts * per_prompt))
    assert cuts > 200


def test_nearest_values_are_legal_and_nearest():
    """An offered value is legal in place of the rejected one, and no legal value is
    nearer.
    """

    def works(*sizes):
        try:
            return cut(*sizes)
        except BatchDivisibilityError:
            return None

    tried = 0
    for prompts, per_prompt, replicas, mini, micro in GRID:
        try:
            cut(prompts, per_prompt, replicas, mini, micro)
        except BatchDivisibilityError as error:
            is_mini = error.key == "policy.mini_batch"
            refused = mini if is_mini else micro
            sizes = [
                (value, None) if is_mini else (mini, value)
                for value in range(1, prompts * per_prompt + 1)
            ]
            legal = [
                a if is_mini else b
                for a, b in sizes
                if works(prompts, per_prompt, replicas, a, b)
            ]
            below, above = (
                [v for v in legal if v < refused],
                [v for v in legal if v > refused],
            )
            assert list(error.nearest) == below[-1:] + above[:1]
            tried += 1
    assert tried > 200


def test_microbatch_in_prompts_of_the_job():
    """MaxText RL's unit: 4 prompts * 8 responses over 8 replicas are 4 samples each. 1
    prompt * 4 cannot divide over 8.
    """
    assert cut(128, 8, 8, 128, 4, unit="prompts", scope="job").microbatch_size == 4
    with pytest.raises(BatchDivisibilityError) as caught:
        cut(4, 4, 8, 4, 1, unit="prompts", scope="job")
    assert caught.value.nearest == (2,)
    assert (
        "1 prompt * samples_per_prompt=4 = 4 samples must divide the mini batch of 16"
        " samples" in str(caught.value)
    )
    assert "data_parallel_size=8" in str(caught.value)


@pytest.mark.parametrize(
    ("budget", "passes"),
    [(100, 32), (199, 32), (200, 16), (1000, 4), (3200, 1), (10**6, 1)],
)
def test_token_budget_max_passes(budget, passes):
    """With 32 samples of at most 100 tokens on a replica; too small a budget is an
    error.
    """
    training = Training(
        mini_batch=Size(count=64, unit="samples"),
        microbatch=Size(count=budget, unit="tokens", scope="replica"),
        data_parallel_size=2,
    )
    updates = split_updates(
        training, samples_per_step=128, samples_per_prompt=4, max_length=100
    )
    found = (
        updates.accumulation_steps,
        updates.token_budget,
        updates.microbatch_size,
        updates.padded_samples,
    )
    assert found == (passes, budget, None, 0)
    with pytest.raises(ConfigError) as caught:
        split_updates(
            training,
            samples_per_step=128,
            samples_per_prompt=4,
            max_length=budget + 1,
        )
    assert (caught.value.key, caught.value.nearest) == (
        "policy.microbatch",
        (budget + 1,),
    )


def prompts(count):
    """Return a size in prompts of the job."""
    return Size(count=count, unit="prompts")


def per_replica(count):
    """Return a size in samples per replica."""
    return Size(count=count, unit="samples", scope="replica")


def make(batch=64, n=4, mini=16, micro=2, replicas=4, **options):
    """Return a plan of 64 prompts * 4 responses."""
    policy = Training(
        mini_batch=prompts(mini),
        microbatch=per_replica(micro),
        data_parallel_size=replicas,
        num_epochs=2,
    )
    return RolloutPlan(
        **{"rollout_batch": prompts(batch), "samples_per_prompt": n, "policy": policy}
        | options
    )


def test_plan_numbers():
    """Prompts, samples, mini batches, passes, optimizer steps and evaluation follow
    from the sizes.
    """
    plan = make(
        num_steps=10, eval_prompts=12, eval_samples_per_prompt=3, generation=prompts(8)
    )
    expected = {
        "prompts_per_step": 64,
        "samples_per_step": 256,
        "generate_calls": 8,
        "sequences_per_generate_call": 32,
    }
    expected |= {
        "mini_batches": 4,
        "mini_batch_samples": 64,
        "accumulation_steps": 8,
        "microbatch_size": 2,
    }
    expected |= {"optimizer_steps": 8, "weight_syncs": 10, "total_optimizer_steps": 80}
    expected |= {"eval_prompts": 12, "eval_samples": 36}
    assert expected.items() <= plan.to_dict().items()
    rows = [
        (row["what"], row["number"], row["prompts"], row["samples"], row["how"])
        for row in plan.to_dict()["timetable"]
    ]
    assert rows == [
        ("prompts", 1, 64, None, "read"),
        ("responses", 8, 8, 32, "4 per prompt"),
        ("mini batches", 4, 16, 64, "2 epochs"),
        ("microbatches", 8, 2, 8, "2 per replica"),
        ("optimizer step", 1, 16, 64, "8 per step"),
    ]


def test_plan_reports_all_problems():
    """Training and generation are checked together, and each error has legal
    values.
    """
    with pytest.raises(BatchDivisibilityError) as caught:
        make(mini=15, generation=prompts(5))
    assert [(problem.key, problem.nearest) for problem in caught.value.problems] == [
        ("policy.mini_batch", (8, 16)),
        ("generation", (4, 8)),
    ]


# Mini batches in prompts per replica, with 2 replicas, cannot make up 3 prompts.
BY_REPLICA = {
    "policy": Training(
        mini_batch=Size(count=1, unit="prompts", scope="replica"), data_parallel_size=2
    )
}


@pytest.mark.parametrize(
    ("batch", "n", "options", "nearest"),
    [
        (10, 3, {}, (8, 16)),
        (3, 3, {}, (8,)),
        (7, 4, {}, (6, 8)),
        (12, 1, {}, (8, 16)),
        (3, 2, BY_REPLICA, (2, 4)),
    ],
)
def test_plan_rejects_a_batch_without_a_legal_mini_batch(batch, n, options, nearest):
    """If not even the whole batch divides over 8 replicas, or by the unit of the mini
    batch, the error is about the batch.
    """
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
        {
            "policy": Training(
                mini_batch=prompts(4), microbatch=Size(count=4, unit="tokens")
            )
        },
        {"policy": Training(mini_batch=prompts(4), num_epochs=0)},
        {"policy": Training(mini_batch=prompts(4), num_epochs=1.5)},
    ],
)
def test_plan_rejects_bad_counts(options):
    """Counts that are not positive whole numbers raise errors with a key; tokens are
    only a budget per replica.
    """
    with pytest.raises(ConfigError) as caught:
        make(**options)
    assert caught.value.key
