"""Tests of rampup.contrib.rl.experience."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from helpers import processes
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import rampup
from rampup.contrib.rl.experience import (
    check_rewards,
    group_advantages,
    has_zero_spread,
    loss_rows,
    mini_batches,
    padded_rows,
)
from rampup.contrib.rl.plan import AGGREGATIONS, RolloutPlan, Size, Training
from rampup.contrib.rl.policy import grpo_loss
from rampup.contrib.rl.schedule import split_of
from rampup.engine.batch import put_batch
from rampup.engine.mesh import process_rows
from rampup.errors import ConfigError, DataError, RampupError, ResumeMismatchError


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
        (lambda p, r: [1.0], "returned 1 reward for 2 samples"),
    ],
)
def test_check_rewards_rejects(reward, text):
    """NaN, None, text and a wrong number: an error that names the rollout and shows the
    sample.
    """
    with pytest.raises(DataError, match=f"the reward function, in rollout 7, {text}"):
        check_rewards(reward, ["a", "b"], ["x", "y"], where="rollout 7")


def test_what_a_reward_function_raises_arrives_as_it_is():
    """With its own type and text."""
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        check_rewards(lambda p, r: 1 / 0, ["a"], ["x"], where="rollout 7")


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(2, 6)),
        elements=st.integers(-5, 5),
    )
)
def test_group_advantages_have_mean_zero(rewards):
    """Every group has mean 0 and standard deviation 1, or 0 if its rewards are
    equal.
    """
    size, equal = rewards.shape[1], np.ptp(rewards, axis=1) == 0
    groups = group_advantages(rewards.ravel(), size).reshape(-1, size)
    np.testing.assert_allclose(groups.mean(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(
        groups.std(axis=1, ddof=1), np.where(equal, 0, 1), atol=1e-4
    )
    assert has_zero_spread(rewards.ravel(), size).tolist() == equal.tolist()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_are_those_of_their_names(mode):
    """The sum of coefficient * loss over the sum of the weights, with an empty response
    that counts in no mean.
    """
    tokens, loss = (
        np.random.default_rng(0).integers(1, 9, (4, 6)),
        np.random.default_rng(1).normal(size=(4, 6)),
    )
    lengths = {"prompt_length": [2, 1, 3, 2], "response_length": [3, 1, 0, 2]}
    rows = loss_rows(
        {"tokens": tokens, "group": [7, 7, 9, 9], **lengths}, loss_agg_mode=mode
    )
    per_sequence = [loss[row][rows["coefficients"][row] != 0] for row in range(4)]
    full = [one for one in per_sequence if len(one)]
    expected = {
        "token-mean": np.concatenate(full).mean(),
        "seq-mean-token-sum": np.mean([one.sum() for one in full]),
        "seq-mean-token-mean": np.mean([one.mean() for one in full]),
        "group-mean-token-mean": np.mean(
            [np.concatenate(per_sequence[n : n + 2]).mean() for n in (0, 2)]
        ),
    }[mode]
    assert np.sum(rows["coefficients"] * loss) / rows["weights"].sum() == pytest.approx(
        expected
    )


GROUP, WIDTH = 3, 4


def train_rows(process, number, port):
    """Train on 1, 7 and 32 prompts by each aggregation on two devices, and compare with
    all samples in one batch on one.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 // number)
    jax.config.update("jax_enable_x64", True)
    if number > 1:
        jax.distributed.initialize(
            f"localhost:{port}", num_processes=number, process_id=process
        )
    mesh = rampup.make_mesh()
    splitter = rampup.BatchSplitter(data_parallel_size=2, microbatch_size=WIDTH // 2)
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(32 * GROUP),
        splitter=splitter,
        num_devices=2,
        total_steps=12,
    )
    loss_fn = grpo_loss(lambda params, tokens: params[tokens])
    by_hand = jax.jit(
        jax.value_and_grad(
            lambda params, rows: loss_fn(params, rows, None)[0] / rows["weights"].sum()
        )
    )
    step = rampup.train_step(loss_fn, optax.sgd(1.0), plan, mesh)
    state = rampup.create_state(
        np.random.default_rng(0).normal(size=(8, 8)), step.tx, mesh
    )
    for place, (mode, count) in enumerate(
        (mode, size * GROUP) for mode in AGGREGATIONS for size in (1, 7, 32)
    ):
        rng = np.random.default_rng(place)
        samples = {
            "tokens": rng.integers(0, 8, (count, 5)),
            "prompt_length": np.full(count, 2),
        }
        samples |= {
            "response_length": rng.integers(1, 4, count),
            "group": np.arange(count) // GROUP,
        }
        samples |= {
            name: rng.normal(size=(count, 3)) - 2
            for name in ("log_probabilities", "advantages")
        }
        rows = loss_rows(samples, loss_agg_mode=mode)
        passes = padded_rows(rows, WIDTH)
        split = split_of(len(passes["tokens"]), WIDTH, 2)
        own = {name: x[:, process_rows(mesh, WIDTH)] for name, x in passes.items()}
        before = np.asarray(state.params.addressable_data(0))
        state, metrics = step(
            state,
            put_batch(own, replace(plan.position(place), split=split), plan, mesh),
        )
        moved = before - np.asarray(state.params.addressable_data(0))
        with jax.default_device(jax.local_devices()[0]):
            loss, grads = by_hand(before, rows)
        np.testing.assert_allclose(moved, grads, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6, atol=1e-6)
    assert step.num_compilations == 1


@pytest.mark.slow
def test_gradient_of_any_number_of_prompts_is_that_of_one_batch_in_1_and_2_processes(
    tmp_path,
):
    """By all aggregations, in 1 to 24 microbatches of one program, to 1e-6 on two
    devices, in every process.
    """
    port = processes.free_port()
    processes.run_all(train_rows, [(0, 1, port), (0, 2, port), (1, 2, port)], tmp_path)


def plan_of(prompts=12, n=2, mini=4, *, epochs=2, pad=False, unit="prompts"):
    """Return a plan of three rollouts."""
    policy = Training(mini_batch=Size(count=mini, unit=unit), num_epochs=epochs)
    batch = Size(count=prompts, unit="prompts")
    return RolloutPlan(
        rollout_batch=batch,
        samples_per_prompt=n,
        policy=policy,
        num_steps=3,
        pad=pad,
    )


def rows_of(plan, **options):
    """Return the rows of every mini batch of a rollout."""
    return [
        batch.rows.tolist()
        for batch in mini_batches(plan, **{"step": 1, "seed": 0} | options)
    ]


@given(*[st.integers(1, 6)] * 3, st.booleans(), st.integers(0, 3), st.booleans())
def test_mini_batches_have_every_sample_once(prompts, n, mini, pad, seed, together):
    """Every epoch has every sample once, in mini batches of the planned sizes, with the
    responses to a prompt together.
    """
    try:
        plan = plan_of(prompts, n, mini, pad=pad)
    except RampupError:
        return
    seed = seed if together else None
    found = list(mini_batches(plan, step=1, seed=seed))
    updates = plan.policy_updates
    assert [batch.update for batch in found] == list(range(updates.optimizer_steps))
    for epoch in range(updates.num_epochs):
        rows = [batch.rows for batch in found if batch.epoch == epoch]
        assert sorted(np.concatenate(rows).tolist()) == list(
            range(plan.samples_per_step)
        )
        assert [len(part) for part in rows] == [
            len(updates.mini_batch_range(i)) for i in range(updates.num_mini_batches)
        ]
        if together:
            assert all(
                (np.bincount(part // n)[np.unique(part // n)] == n).all()
                for part in rows
            )


def test_mini_batches_resume_at_every_optimizer_step():
    """Starting at any number gives the rest of an uninterrupted run."""
    plan = plan_of()
    whole = rows_of(plan)
    assert len(whole) == plan.policy_updates.optimizer_steps
    assert all(
        rows_of(plan, start=start) == whole[start:] for start in range(len(whole) + 1)
    )


def test_shuffle_depends_on_seed_rollout_and_epoch():
    """Every seed, rollout and epoch has its own order, and always the same."""
    plan = plan_of(mini=12, epochs=3)
    cases = [{}, {"seed": 1}, {"step": 0}]
    orders = [tuple(rows) for case in cases for rows in rows_of(plan, **case)]
    assert len(set(orders)) == len(orders) == 3 * 3
    # That of seed 0 is the same in all versions of the libraries; without a seed it is
    # that of generation.
    assert [row // 2 for row in rows_of(plan_of(), step=0)[0][::2]] == [8, 3, 5, 10]
    assert np.concatenate(rows_of(plan_of(epochs=1), seed=None)).tolist() == list(
        range(24)
    )


def test_keep_prompts_together():
    """Mini batches that would separate the responses to a prompt are an error, unless
    nothing is shuffled.
    """
    plan = plan_of(prompts=4, n=3, mini=2, epochs=1, unit="samples")
    with pytest.raises(ConfigError, match="samples_per_prompt=3"):
        mini_batches(plan, step=0, seed=0)
    assert len(rows_of(plan, seed=None)) == 6


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, ResumeMismatchError),
        ({"step": 3}, ResumeMismatchError),
        ({"start": -1}, ResumeMismatchError),
        ({"start": 7}, ResumeMismatchError),
        ({"seed": -1}, ConfigError),
        ({"seed": 2**63}, ConfigError),
        ({"seed": 0.5}, ConfigError),
    ],
)
def test_mini_batches_rejects_bad_arguments(arguments, error):
    """Wrong starts and seeds raise errors at the call, before training."""
    with pytest.raises(error):
        mini_batches(plan_of(), **{"step": 0, "seed": 0} | arguments)
