"""Tests of rampup.contrib.rl.noise: the two parts of the noise of RL gradients, and what
follows from them.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rampup.contrib.rl.noise import PromptNoise, block_facts
from rampup.contrib.rl.plan import RolloutPlan, Size, Training
from rampup.contrib.rl.policy import grpo_loss
from rampup.contrib.rl.rollout import RolloutOptions, rollout_step
from rampup.engine.mesh import make_mesh
from rampup.plan import MeshAxes

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
B, WITHIN, G2, D, P, N, PASS = 0.5, 6.0, 0.3, 20, 16, 4, 4


def gaussian_noise(
    runs, steps, rng, *, tokens=True, by_prompt=False, shares=False, drifts=False
):
    """Return the averages of runs of a two-level Gaussian model, both parts of its
    noise, and P Var(g) / |G|^2 of its steps.

    With `shares`, the noise of a response does not fall with its weight; with `drifts`,
    short ones have a larger gradient.
    """
    noises, totals, gradients = [], [], []
    found = [PromptNoise(half_life_samples=1e12) for _ in range(runs)]
    for step in range(steps):
        weights = rng.integers(1, 9, (P, N)) if tokens else np.ones((P, N))
        weights = np.repeat(weights[:, :1], N, axis=1) if by_prompt else weights
        order = (
            np.arange(P * N) if step % 2 else np.arange(P * N).reshape(P, N).T.ravel()
        )
        flat, groups = weights.ravel()[order].astype(float), (order // N)
        single = np.full(P * N, WITHIN) if shares else WITHIN / flat
        truth = np.full(D, np.sqrt(G2 / D)) * (1 + drifts * (4.5 - flat[:, None]))
        prompts = rng.normal(size=(runs, P, D)) * np.sqrt(B / D)
        noise = rng.normal(size=(runs, P * N, D)) * np.sqrt(single / D)[:, None]
        sums = flat[:, None] * (truth + prompts[:, groups] + noise)
        blocks, W = sums.reshape(runs, -1, PASS, D).sum(axis=2), flat.sum()
        gradients.append(blocks.sum(axis=1) / W)
        facts = block_facts(flat.reshape(-1, PASS), groups.reshape(-1, PASS), 1)
        # The parts of sum(|x_i - w_i G|^2) / P of pairs of responses and of single
        # ones, with a mean response as the unit.
        pairs, unit = (
            np.square(weights.sum(axis=1)).sum() - np.square(flat).sum(),
            (W / (P * N)) ** 2,
        )
        between = B * pairs / (P * N * (N - 1)) / unit
        noises.append(
            (between, (flat**2 * (B + single)).sum() / (P * N) / unit - between)
        )
        totals.append(W)
        for number, one in enumerate(found):
            squares, square = (
                np.square(blocks[number]).sum(),
                np.square(gradients[-1][number]).sum(),
            )
            one.update(
                step % 2,
                samples=P * N,
                weight=W,
                squares=squares,
                square=square,
                facts=facts,
            )
    gradients = np.concatenate(gradients)
    variance = gradients.var(axis=0).sum()
    scale = (
        P
        * variance
        / (np.square(gradients.mean(axis=0)).sum() - variance / len(gradients))
    )
    return found, np.average(noises, axis=0, weights=totals), scale


KINDS = [{}, {"by_prompt": True}, {"tokens": False}, {"shares": True}]
FURTHER = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", [{"shares": True, "drifts": 0.1}, *FURTHER], ids=str)
def test_noise_scale_is_that_of_the_steps_whatever_the_lengths_do(kind):
    """90% intervals cover 87% to 93%, and miss on both sides; both parts are within 2%
    of those of the model.
    """
    found, parts, scale = gaussian_noise(800, 60, np.random.default_rng(1), **kind)
    *estimated, scales = zip(*(one.estimates(N) for one in found), strict=True)
    assert (
        0.87
        <= np.mean([one.low <= scale <= (one.high or np.inf) for one in scales])
        <= 0.93
    )
    assert np.mean([one.low > scale for one in scales]) <= 0.08
    for truth, estimates in (
        zip(parts, estimated, strict=True) if "drifts" not in kind else ()
    ):
        assert np.mean([one.value for one in estimates]) == pytest.approx(
            truth, rel=0.02
        )
        assert (
            0.87 <= np.mean([one.low <= truth <= one.high for one in estimates]) <= 0.95
        )


def logits(params, tokens):
    """A policy that looks at the last token alone."""
    return params[tokens]


@jax.jit
def block_gradient(params, rows):
    """Return the gradient of the sum of the losses of a block."""
    return jax.grad(lambda p: grpo_loss(logits)(p, rows, None)[0])(params)


def step_on(devices, **options):
    """Return a rollout step of eight prompts on some devices, and its state."""
    prompts = Size(count=8, unit="prompts")
    training = Training(
        mini_batch=prompts,
        microbatch=Size(count=4, unit="samples"),
        data_parallel_size=devices,
        num_epochs=2,
    )
    plan = RolloutPlan(
        rollout_batch=prompts, samples_per_prompt=4, policy=training, num_steps=4
    )
    step = rollout_step(
        logits,
        optax.sgd(0.1),
        plan,
        make_mesh(MeshAxes(data=devices), jax.devices()[:devices]),
        reward=lambda prompts, responses: [
            sum(tokens) + prompt[0]
            for prompt, tokens in zip(prompts, responses, strict=True)
        ],
        options=RolloutOptions(
            max_prompt_length=1, max_response_length=3, end_token=2, **options
        ),
    )
    return step, step.create_state(
        jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)), jnp.float32)
    )


def test_a_step_measures_the_blocks_of_both_orders_without_a_collective():
    """S is that of the blocks' own gradients, in both orders of the rows; the update is
    the same, and its collectives too.
    """
    programs, updates = [], []
    for measures in (False, True):
        step, state = step_on(2, measure_gradient_noise=measures)
        passes, found, params = [], [], []
        record(step, "_passes", passes)
        record(step, "_train", found)
        for rollout in range(2):
            before = np.asarray(state.params)
            state, _ = step(state, [[n % 6] for n in range(8)])
            params.append(np.asarray(state.params))
            if not measures:
                continue
            batch, (_, metrics), (_, later) = (
                passes[2 * rollout],
                found[2 * rollout],
                found[2 * rollout + 1],
            )
            assert (
                "layout" not in later["gradient_noise"]
            )  # the second pass has the same samples
            noise = metrics["gradient_noise"]
            assert noise["layout"] == rollout
            blocks = {name: x.reshape(16, 2, *x.shape[2:]) for name, x in batch.items()}
            assert [len(set(groups)) for groups in blocks["group"].tolist()] == [
                rollout + 1
            ] * 16
            rows = [
                {name: x[n] for name, x in blocks.items() if name != "group"}
                for n in range(16)
            ]
            grads = [block_gradient(before, each) for each in rows]
            weights = blocks["weights"].sum(axis=(1, 2))
            q, g = (
                sum(
                    (np.square(x).sum() / w)
                    for x, w in zip(grads, weights, strict=True)
                ),
                sum(grads) / weights.sum(),
            )
            trace = (q - weights.sum() * np.square(g).sum()) / 15
            assert float(noise["trace"]) == pytest.approx(trace, rel=1e-4)
            assert float(noise["squares"]) == pytest.approx(
                sum(np.square(x).sum() for x in grads), rel=1e-4
            )
            assert (
                noise["layout_facts"]
                == block_facts(batch["weights"].sum(axis=2), batch["group"], 2).tolist()
            )
        updates.append(params)
        (program,) = step._step._programs.compiler._programs.values()
        programs.append(collections.Counter(COLLECTIVE.findall(program.as_text())))
    assert programs[0] == programs[1]
    assert sum(programs[0].values()) >= 1
    # The rows have another order, so that sums are rounded otherwise.
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-4, atol=1e-6)


def record(step, method, found):
    """Append to a list what a method of a step returns; mappings are copied before the
    step takes entries out of them.
    """
    run = getattr(step, method)

    def recorded(*args):
        found.append(run(*args))
        return dict(found[-1]) if isinstance(found[-1], dict) else found[-1]

    setattr(step, method, recorded)
