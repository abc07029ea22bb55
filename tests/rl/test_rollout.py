"""Tests of rampup.rl.rollout, rampup.rl.losses and rampup.rl.policy."""

import contextlib
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rampup.errors import DataError
from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes
from rampup.rl.losses import AGGREGATIONS
from rampup.rl.plan import RolloutPlan
from rampup.rl.policy import critic_of, critic_params
from rampup.rl.rollout import RolloutOptions, rollout_step
from rampup.rl.sizes import Size
from rampup.rl.updates import Training
from rampup.run.mesh import make_mesh

MESHES = {"one": MeshAxes(), "data": MeshAxes(data=2), "fsdp": MeshAxes(fsdp=2), "tensor": MeshAxes(tensor=2)}
MODEL = LanguageModel(num_layers=1, width=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=12)
init = jax.jit(MODEL.init)
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
    step._with_samples = lambda state, position, prompts, needed: state.replace(experience=arrays)
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
        params = jax.tree.map(lambda x: x.astype(jnp.float64), init(jax.random.key(0)))
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


@jax.jit
def value_loss_by_hand(params, tokens, places, old, returns):
    """Return the mean over single tokens of half the squared error of their values, clipped around the old ones."""
    model = replace(MODEL, dtype="float64", param_dtype="float64")
    x = model.apply_layers(params["layers"], model.embed(params, tokens))
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["final_norm"]
    value = (x @ params["value"])[places[0], places[1]]
    near = jnp.where(value > old + EPSILON, old + EPSILON, jnp.where(value < old - EPSILON, old - EPSILON, value))
    return jnp.mean(0.5 * jnp.maximum((value - returns) ** 2, (near - returns) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes"), [("data", {"microbatch": None}), ("one", {"microbatch": Size(count=11, unit="tokens", scope="replica")})]
)
def test_gradient_of_the_critic_is_that_by_hand(mesh, sizes):
    """In float64 to 1e-9, padded and packed, with values on both sides of both limits; the policy's parameters stay."""
    with float64():
        devices, plan = mesh_of(mesh), plan_of(mesh, mini=4, critic=True, **sizes)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), init(jax.random.key(0)))
        arrays = stored(plan.samples_per_step, critic=True)
        step = step_of(devices, plan, params=params, arrays=arrays, critic=True, value_epsilon=EPSILON)
        critic = {name: params[name] for name in ("embedding", "layers", "final_norm")}
        critic["value"] = jnp.asarray(np.random.default_rng(1).normal(size=MODEL.width) * 0.3)
        state, metrics = step.update(step.create_state(params, critic_params=critic), step.schedule.at(0), lambda _: [])
        # The value before a token is that of the token before it.
        counts, prompt = arrays["response_mask"], (arrays["attention_mask"].sum(1) - arrays["response_mask"].sum(1))
        rows, numbers = np.nonzero(counts)
        places = rows, prompt[rows] - 1 + numbers
        args = arrays["tokens"], places, arrays["values"][counts], arrays["returns"][counts]
        loss, grads = jax.jit(jax.value_and_grad(value_loss_by_hand))(critic, *args)
        moved = jax.tree.map(lambda a, b: (a - b) / RATE, critic, jax.device_get(state.critic_params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), moved, grads)
        assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-9)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), jax.device_get(state.params), params))


def ppo_run(rollouts, **options):
    """Return the lines of a run of PPO whose reward is the share of token 3, and its final state."""
    mesh = mesh_of("one")
    plan = plan_of(prompts=8, samples=4, mini=4, epochs=2, critic=True, steps=rollouts)
    tx = {"policy": optax.adam(0.01), "critic": optax.adam(0.01)}
    step = rollout_step(
        MODEL,
        tx["policy"],
        plan,
        mesh,
        reward=lambda prompts, responses: [response.count(3) / R for response in responses],
        options=RolloutOptions(max_prompt_length=P, max_response_length=R, **options),
        critic=(critic_of(MODEL, mesh), tx["critic"]),
    )
    params = init(jax.random.key(0))
    state, lines = step.create_state(params, critic_params=critic_params(MODEL, params, mesh)), []
    prompts = [[number % 12, number % 5, 1] for number in range(8)]
    for number in range(step.schedule.total_steps):
        state, metrics = step.update(state, step.schedule.at(number), lambda _: prompts)
        lines.append({"loss": float(metrics["loss"]), **metrics["facts"]})
    return lines, state


@pytest.mark.slow
def test_ppo_learns():
    """The critic's loss on the samples of a rollout falls, and the reward rises from chance to nearly all."""
    lines, _ = ppo_run(30)
    assert [line["model"] for line in lines[:6]] == ["critic"] * 2 + ["policy"] * 4
    rewards = [lines[6 * number]["reward"] for number in range(30)]
    assert rewards[0] < 0.2
    assert np.mean(rewards[-5:]) > 0.7
    critic = [line["loss"] for line in lines if line["model"] == "critic"]
    # The values begin at 0, and chance is nearly as good; then the reward moves away and the critic follows it.
    assert np.mean(critic[-10:]) < 0.5 * max(critic)


class Clock:
    """A reward whose later calls wait until somebody has seen an update."""

    def __init__(self, free):
        self.free, self.calls, self.updated = free, 0, threading.Event()

    def __call__(self, prompts, responses):
        """Count the tokens 3. After `free` calls, wait for an update."""
        assert len(prompts) == len(responses)
        self.calls += 1
        if self.calls > self.free:
            assert self.updated.wait(60), "no update ran while the generator was waiting"
        return [float(response.count(3)) for response in responses]


@pytest.mark.parametrize("critic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_generation_overlaps_with_updates_and_changes_nothing(critic):
    """An update runs while later samples wait for a reward; parameters and samples are bit for bit those without overlap."""
    mesh, found = mesh_of("one"), []
    plan = replace(plan_of(prompts=4, mini=1, epochs=2, critic=critic, steps=2), generation=Size(count=1, unit="prompts"))
    if critic:
        plan = replace(plan, critic=replace(plan.critic, mini_batch=Size(count=2, unit="prompts")))
    params, prompts = init(jax.random.key(0)), [[1], [2, 3], [4], [5, 6, 7]]
    # The first update needs one call, that of a critic with twice the mini batch two.
    reward = Clock(free=2 if critic else 1)
    for overlapped in (True, False):
        reward = reward if overlapped else lambda p, r: [float(response.count(3)) for response in r]
        options = RolloutOptions(max_prompt_length=P, max_response_length=R, beta=BETA, shuffle_seed=None)
        own = (critic_of(MODEL, mesh), optax.sgd(RATE)) if critic else None
        step = rollout_step(MODEL, optax.sgd(RATE), plan, mesh, reward=reward, options=options, critic=own)
        assert step.overlaps
        state = step.create_state(params, critic_params=critic_params(MODEL, params, mesh) if critic else None)
        pending = []
        if overlapped:
            for number in range(step.schedule.total_steps):
                state, metrics = step.update(state, step.schedule.at(number), lambda _: prompts)
                jax.block_until_ready(state.params)
                pending.append(metrics["facts"]["pending_samples"])
                reward.updated.set()
            per_rollout = [4, 0, 0, 0] if critic else [6, 4, 2, 0]
            assert pending == (per_rollout + [0] * (len(pending) // 2 - 4)) * 2
        else:
            for _ in range(2):
                state, metrics = step(state, prompts)
        step.close()
        found.append(jax.device_get((state.params, state.critic_params, state.experience)))
        assert step.compilations["generate"] == 1
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_failed_reward_during_an_update_loses_nothing():
    """The updates before it stand, and the rollout goes on from them when the reward works again."""
    mesh, broken = mesh_of("one"), [True]
    plan = replace(plan_of(prompts=4, mini=1, steps=1), generation=Size(count=1, unit="prompts"))

    def reward(prompts, responses):
        if broken[0] and prompts[0] == [4]:
            raise OSError("the judge does not answer")
        return [float(response.count(3)) for response in responses]

    options = RolloutOptions(max_prompt_length=P, max_response_length=R, shuffle_seed=None)
    step = rollout_step(MODEL, optax.sgd(RATE), plan, mesh, reward=reward, options=options)
    state, done, prompts = step.create_state(init(jax.random.key(0))), [], [[1], [2, 3], [4], [5, 6, 7]]
    for number in [0, 1, 2, 2, 3]:
        try:
            state, _ = step.update(state, step.schedule.at(number), lambda _: prompts)
            done.append(number)
        except DataError as error:
            assert "rollout 0" in str(error)
            assert "the judge does not answer" in str(error)
            assert int(state.generated) == 4
            broken[0] = False
    assert done == [0, 1, 2, 3]
    whole = step.create_state(init(jax.random.key(0)))
    whole, _ = step(whole, prompts)
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get((x.params, x.experience)) for x in (state, whole)))


SAMPLES = {size: Size(count=size, unit="samples", scope="replica") for size in (1, 2, 3, 4)}
TOKENS = {size: Size(count=size, unit="tokens", scope="replica") for size in (7, 11, 20)}
CASES = [
    pytest.param("one", {"microbatch": SAMPLES[1], "modes": AGGREGATIONS}, marks=pytest.mark.slow),
    ("data", {"microbatch": TOKENS[11], "modes": AGGREGATIONS[:1], "mini": 4}),
    pytest.param("data", {"microbatch": TOKENS[11], "modes": AGGREGATIONS[1:], "mini": 4}, marks=pytest.mark.slow),
    ("fsdp", {"microbatch": SAMPLES[3], "pad": True, "prompts": 5, "mini": 4, "modes": AGGREGATIONS[2:]}),
    pytest.param("tensor", {"microbatch": SAMPLES[2], "modes": AGGREGATIONS[1:2]}, marks=pytest.mark.slow),
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
