"""Tests of rampup.rl.rollout, rampup.rl.losses and rampup.rl.critic."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes
from rampup.rl.critic import critic_of
from rampup.rl.losses import AGGREGATIONS
from rampup.rl.plan import RolloutPlan
from rampup.rl.rollout import RolloutOptions, rollout_step
from rampup.rl.sizes import Size
from rampup.rl.updates import Training
from rampup.run.mesh import make_mesh

MESHES = {"one": MeshAxes(), "data": MeshAxes(data=2), "fsdp": MeshAxes(fsdp=2), "tensor": MeshAxes(tensor=2)}
MODEL = LanguageModel(num_layers=1, width=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=12)
P, R, EPSILON, BETA, RATE = 3, 4, 0.2, 0.1, 0.01


@contextlib.contextmanager
def float64():
    """Compute in float64."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def mesh_of(name):
    """Return one of the meshes above, on the first devices."""
    return make_mesh(MESHES[name], jax.devices()[: MESHES[name].num_devices])


def plan_of(mesh="one", *, prompts=4, samples=2, mini=2, microbatch=None, pad=False, epochs=1, critic=False, steps=3):
    """Return a plan of small rollouts."""
    sizes = {"data_parallel_size": MESHES[mesh].data_parallel_size, "num_epochs": epochs, "microbatch": microbatch}
    policy = Training(mini_batch=Size(count=mini, unit="prompts"), **sizes)
    return RolloutPlan(
        rollout_batch=Size(count=prompts, unit="prompts"),
        samples_per_prompt=samples,
        policy=policy,
        critic=replace(policy, mini_batch=Size(count=prompts, unit="prompts")) if critic else None,
        num_steps=steps,
        pad=pad,
    )


def stored(samples, *, critic=False):
    """Return the samples of a rollout whose ratios are on both sides of both limits, with a prompt of every length."""
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(1, P + 1, samples), rng.integers(1, R + 1, samples)
    counts = np.arange(R) < response[:, None]
    arrays = {
        "tokens": rng.integers(0, 12, (samples, P + R)).astype(np.int32),
        "attention_mask": np.arange(P + R) < (prompt + response)[:, None],
        "response_mask": counts,
        "rewards": rng.normal(size=(samples, R)),
    }
    names = ["advantages", *(["values", "returns"] if critic else [])]
    arrays |= {name: np.where(counts, rng.normal(size=(samples, R)), 0) for name in names}
    # Near the log-probabilities of a new model, log(1 / 12).
    names = ["log_probabilities", "reference_log_probabilities"]
    return arrays | {name: np.where(counts, -2.5 + 0.3 * rng.normal(size=(samples, R)), 0) for name in names}


def step_of(mesh, plan, *, params, arrays, critic=False, **options):
    """Return a rollout step whose first rollout has the given samples, and its state."""
    options = RolloutOptions(max_prompt_length=P, max_response_length=R, beta=BETA, epsilon=EPSILON, **options)
    model = (
        MODEL if jnp.result_type(params["embedding"]) == jnp.float32 else replace(MODEL, dtype="float64", param_dtype="float64")
    )
    found = (critic_of(model, mesh), optax.sgd(RATE)) if critic else None
    step = rollout_step(model, optax.sgd(RATE), plan, mesh, reward=lambda p, r: [0.0] * len(p), options=options, critic=found)
    step._collect = lambda state, position, prompts: arrays
    return step


@jax.jit
def loss_by_hand(params, tokens, places, targets, old, reference, advantage, coefficients):
    """Return the weighted sum of the losses of single tokens: row and column of each, and what its definition needs."""
    model = replace(MODEL, dtype="float64", param_dtype="float64")
    log_p = jax.nn.log_softmax(model.logits(params, tokens))[places[0], places[1], targets]
    ratio = jnp.exp(log_p - old)
    clipped = jnp.where(ratio > 1 + EPSILON, 1 + EPSILON, jnp.where(ratio < 1 - EPSILON, 1 - EPSILON, ratio))
    kl = jnp.exp(reference - log_p) - (reference - log_p) - 1
    return jnp.sum(coefficients * (-jnp.minimum(ratio * advantage, clipped * advantage) + BETA * kl))


def by_hand(params, arrays, rows, mode):
    """Return loss and gradient of a mini batch in one pass over all samples, from the definition of the aggregation."""
    lengths = arrays["response_mask"].sum(axis=1)
    found = []
    for row, (n, r) in enumerate(zip(arrays["attention_mask"].sum(axis=1), lengths, strict=True)):
        share = {
            "token-mean": 1 / lengths[rows].sum(),
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / r,
        }
        for number in range(r):
            place = n - r + number
            stored = (arrays[name][row, number] for name in ("log_probabilities", "reference_log_probabilities", "advantages"))
            found.append((row, place - 1, arrays["tokens"][row, place], *stored, share[mode] if row in rows else 0.0))
    row, column, targets, old, reference, advantage, coefficients = map(np.array, zip(*found, strict=True))
    args = arrays["tokens"], np.array([row, column]), targets, old, reference, advantage, coefficients
    return grad_by_hand(params, *args)


grad_by_hand = jax.jit(jax.value_and_grad(loss_by_hand))


def assert_gradients_are_those_by_hand(mesh, *, modes=AGGREGATIONS, prompts=4, mini=2, pad=False, microbatch=None, **options):
    """Compare the gradients of all mini batches of a rollout, which SGD shows, in float64 to 1e-9."""
    with float64():
        devices, plan = mesh_of(mesh), plan_of(mesh, prompts=prompts, mini=mini, pad=pad, microbatch=microbatch)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), MODEL.init(jax.random.key(0)))
        arrays = stored(plan.samples_per_step)
        placed = jax.device_put(params, MODEL.shardings(devices))
        step = step_of(devices, plan, params=params, arrays=arrays, **options)
        for mode in modes:
            step.options = replace(step.options, loss_agg_mode=mode)
            state = step.create_state(placed)
            step._steps["policy"]._returned = None, 0
            for number in range(plan.policy_updates.num_mini_batches):
                before = jax.device_get(state.params)
                state, metrics = step.update(state, step.schedule.at(number), lambda _: [])
                rows = step_rows(step, plan, number)
                loss, grads = by_hand(before, arrays, rows, mode)
                moved = jax.tree.map(lambda a, b: (a - b) / RATE, before, jax.device_get(state.params))
                jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), moved, grads)
                assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-9)
                assert metrics["aux"]["clip_fraction"] > 0
        assert step.compilations["update"] == 1
        return step


def step_rows(step, plan, number):
    """Return the samples of a mini batch."""
    from rampup.rl.minibatches import mini_batches

    return next(mini_batches(np.arange(plan.samples_per_step), plan, step=0, seed=step.options.shuffle_seed, start=number)).rows


SAMPLES = {size: Size(count=size, unit="samples", scope="replica") for size in (1, 2, 3, 4)}
TOKENS = {size: Size(count=size, unit="tokens", scope="replica") for size in (7, 11, 20)}
CASES = [
    ("one", {"microbatch": SAMPLES[1], "modes": AGGREGATIONS}),
    ("data", {"microbatch": TOKENS[11], "modes": AGGREGATIONS, "mini": 4}),
    ("fsdp", {"microbatch": SAMPLES[3], "pad": True, "prompts": 5, "mini": 4, "modes": AGGREGATIONS[2:]}),
    ("tensor", {"microbatch": SAMPLES[2], "modes": AGGREGATIONS[1:2]}),
]
ALL_CASES = [
    (mesh, sizes)
    for mesh in MESHES
    for sizes in (
        *({"microbatch": SAMPLES[size]} for size in (1, 2)),
        {"microbatch": None},
        *({"microbatch": SAMPLES[size], "pad": True, "prompts": 5, "mini": 4} for size in (1, 3)),
        *({"microbatch": size, "mini": 4, "rungs": rungs} for size in TOKENS.values() for rungs in (1, 3)),
    )
]


@pytest.mark.parametrize(("mesh", "sizes"), CASES, ids=str)
def test_gradient_of_a_mini_batch_is_that_by_hand(mesh, sizes):
    """However a mini batch is split, padded or packed, on every kind of mesh, for every aggregation; one program."""
    assert_gradients_are_those_by_hand(mesh, **sizes)


@pytest.mark.faults
@pytest.mark.parametrize(("mesh", "sizes"), ALL_CASES, ids=str)
def test_gradient_of_a_mini_batch_is_that_by_hand_in_all_sizes(mesh, sizes):
    """The same for every size of a pass, padding, budget and number of shapes."""
    assert_gradients_are_those_by_hand(mesh, **sizes)
