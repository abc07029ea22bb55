"""Tests of rampup.contrib.rl.rollout and rampup.contrib.rl.policy."""

import itertools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import processes
from helpers.toy import campaign

from rampup.contrib.rl.experience import Tally, mini_batches
from rampup.contrib.rl.plan import AGGREGATIONS, Experience, RolloutPlan, Size, Training
from rampup.contrib.rl.policy import Policy
from rampup.contrib.rl.rollout import RolloutOptions, rollout_step
from rampup.engine.mesh import make_mesh
from rampup.errors import ConfigError, DataError
from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes

MESHES = {
    "one": MeshAxes(),
    "data": MeshAxes(data=2),
    "fsdp": MeshAxes(fsdp=2),
    "tensor": MeshAxes(tensor=2),
}
MESHES |= {"four": MeshAxes(data=2, fsdp=2), "three": MeshAxes(data=3)}
MODEL = LanguageModel(
    num_layers=1, width=8, mlp_dim=8, num_heads=2, num_kv_heads=2, vocab_size=12
)
MODEL64 = replace(MODEL, dtype="float64", param_dtype="float64")
init = jax.jit(MODEL.init)
logits_by_hand = jax.jit(MODEL64.logits)
P, R, EPSILON, BETA, RATE = 3, 4, 0.2, 0.1, 0.01


@pytest.fixture
def float64():
    """Compute in float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def params64():
    """Return the parameters of a new model in float64."""
    return jax.tree.map(lambda x: x.astype(jnp.float64), init(jax.random.key(0)))


def assert_close(trees, others, tolerance):
    """Compare the leaves of two trees."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        trees,
        others,
    )


def moved(before, after):
    """Return the gradient by which SGD has moved the parameters."""
    return jax.tree.map(lambda a, b: (a - b) / RATE, before, after)


def mesh_of(name):
    """Return one of the meshes above, on the first devices."""
    return make_mesh(MESHES[name], jax.devices()[: MESHES[name].num_devices])


def plan_of(
    mesh="one",
    *,
    prompts=4,
    samples=2,
    mini=2,
    microbatch=None,
    pad=False,
    epochs=1,
    steps=3,
):
    """Return a plan of small rollouts."""
    sizes = {
        "data_parallel_size": MESHES[mesh].data_parallel_size,
        "num_epochs": epochs,
        "microbatch": microbatch,
    }
    policy = Training(mini_batch=Size(count=mini, unit="prompts"), **sizes)
    return RolloutPlan(
        rollout_batch=Size(count=prompts, unit="prompts"),
        samples_per_prompt=samples,
        policy=policy,
        num_steps=steps,
        pad=pad,
    )


def stored(samples):
    """Return the samples of a rollout whose ratios are on both sides of both limits,
    with a prompt of every length.
    """
    rng = np.random.default_rng(0)
    prompt, response = rng.integers(1, P + 1, samples), rng.integers(1, R + 1, samples)
    counts = np.arange(R) < response[:, None]
    arrays = {
        "tokens": rng.integers(0, 12, (samples, P + R)).astype(np.int32),
        "attention_mask": np.arange(P + R) < (prompt + response)[:, None],
        "response_mask": counts,
        "rewards": rng.normal(size=(samples, R)),
    }
    arrays["advantages"] = np.where(counts, rng.normal(size=(samples, R)), 0)
    # Near the log-probabilities of a new model, log(1 / 12).
    names = ["log_probabilities", "reference_log_probabilities"]
    return arrays | {
        name: np.where(counts, -2.5 + 0.3 * rng.normal(size=(samples, R)), 0)
        for name in names
    }


def step_of(mesh, plan, *, arrays, **options):
    """Return a rollout step whose first rollout has the given samples."""
    options = RolloutOptions(
        max_prompt_length=P,
        max_response_length=R,
        beta=BETA,
        epsilon=EPSILON,
        **options,
    )
    step = rollout_step(
        MODEL64,
        optax.sgd(RATE),
        plan,
        mesh,
        reward=lambda p, r: [0.0] * len(p),
        options=options,
    )
    step._collect = lambda state, position, prompts: (arrays, Tally())
    return step


@jax.jit
def loss_by_hand(
    params, tokens, places, targets, old, reference, advantage, coefficients
):
    """Return the weighted sum of the losses of single tokens: row and column of each,
    and what its definition needs.
    """
    log_p = jax.nn.log_softmax(MODEL64.logits(params, tokens))[
        places[0], places[1], targets
    ]
    ratio = jnp.exp(log_p - old)
    clipped = jnp.where(
        ratio > 1 + EPSILON,
        1 + EPSILON,
        jnp.where(ratio < 1 - EPSILON, 1 - EPSILON, ratio),
    )
    kl = jnp.exp(reference - log_p) - (reference - log_p) - 1
    return jnp.sum(
        coefficients
        * (-jnp.minimum(ratio * advantage, clipped * advantage) + BETA * kl)
    )


def by_hand(params, arrays, rows, mode):
    """Return loss and gradient of a mini batch in one pass over all samples, from the
    definition of the aggregation.
    """
    lengths = np.maximum(arrays["response_mask"].sum(axis=1), 1)
    found = []
    for row, (n, r) in enumerate(
        zip(arrays["attention_mask"].sum(axis=1), lengths, strict=True)
    ):
        share = {
            "token-mean": 1 / lengths[rows].sum(),
            "seq-mean-token-sum": 1 / len(rows),
            "seq-mean-token-mean": 1 / len(rows) / r,
            "group-mean-token-mean": (
                1
                / len({i // 2 for i in rows})
                / sum(lengths[row // 2 * 2 : row // 2 * 2 + 2])
            ),
        }
        for number in range(r if n else 0):
            place = n - r + number
            stored = (
                arrays[name][row, number]
                for name in (
                    "log_probabilities",
                    "reference_log_probabilities",
                    "advantages",
                )
            )
            found.append(
                (
                    row,
                    place - 1,
                    arrays["tokens"][row, place],
                    *stored,
                    share[mode] if row in rows else 0.0,
                )
            )
    row, column, targets, old, reference, advantage, coefficients = map(
        np.array, zip(*found, strict=True)
    )
    places = np.array([row, column])
    return grad_by_hand(
        params,
        arrays["tokens"],
        places,
        targets,
        old,
        reference,
        advantage,
        coefficients,
    )


grad_by_hand = jax.jit(jax.value_and_grad(loss_by_hand))


SAMPLES = {
    size: Size(count=size, unit="samples", scope="replica") for size in (1, 2, 3, 4)
}
TOKENS = {
    size: Size(count=size, unit="tokens", scope="replica") for size in (7, 11, 20)
}
CASES = [
    pytest.param(
        "one", AGGREGATIONS, {"microbatch": SAMPLES[1]}, marks=pytest.mark.slow
    ),
    pytest.param(
        "data",
        AGGREGATIONS,
        {"microbatch": TOKENS[11], "mini": 4},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "fsdp",
        AGGREGATIONS[2:],
        {"microbatch": SAMPLES[3], "pad": True, "prompts": 5, "mini": 4},
        marks=pytest.mark.slow,
    ),
    ("tensor", AGGREGATIONS[1:2], {"microbatch": SAMPLES[2]}),
]
CASES += [
    campaign(mesh, AGGREGATIONS, sizes)
    for mesh in MESHES
    for sizes in (
        *(
            {"microbatch": size, "prompts": 24, "mini": 12}
            for size in (SAMPLES[1], SAMPLES[2], None)
        ),
        *(
            {"microbatch": SAMPLES[size], "pad": True, "prompts": 5, "mini": 4}
            for size in (1, 3)
        ),
        *({"microbatch": size, "mini": 4} for size in TOKENS.values()),
    )
]


@pytest.mark.parametrize(("mesh", "modes", "sizes"), CASES, ids=str)
def test_gradient_of_a_mini_batch_is_that_by_hand(mesh, modes, sizes, float64):
    """In float64 to 1e-9, split, padded or packed, on every kind of mesh, for every
    aggregation; one program.
    """
    devices, plan = mesh_of(mesh), plan_of(mesh, **sizes)
    arrays, placed = (
        stored(plan.samples_per_step),
        jax.device_put(params64(), MODEL.shardings(devices)),
    )
    step = step_of(devices, plan, arrays=arrays)
    for mode in modes:
        step.options = replace(step.options, loss_agg_mode=mode)
        state = step.create_state(placed)
        step._step._returned = None, 0
        for number in range(plan.policy_updates.num_mini_batches):
            before = jax.device_get(state.params)
            state, metrics = step.update(state, step.schedule.at(number), lambda *_: [])
            rows = next(mini_batches(plan, step=0, seed=0, start=number)).rows
            loss, grads = by_hand(before, arrays, rows, mode)
            assert_close(moved(before, jax.device_get(state.params)), grads, 1e-9)
            assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-9)
            assert metrics["aux"]["clip_fraction"] > 0
    assert step.compilations["update"] == 1


class ByHand:
    """The trained groups of a run of varying steps, made from all generated samples by
    the words of the keys.
    """

    def __init__(self, mesh, plan, *, teaches, **options):
        self.devices, self.plan, self.teaches, self.seen, self.queue = (
            mesh_of(mesh),
            plan,
            teaches,
            [],
            [],
        )
        lengths = {"max_prompt_length": P, "max_response_length": R, "end_token": 5}
        self.step = rollout_step(
            MODEL64,
            optax.sgd(RATE),
            plan,
            self.devices,
            reward=self.reward,
            options=RolloutOptions(**lengths, beta=BETA, epsilon=EPSILON, **options),
        )
        self.reference = params64()
        placed = jax.device_put(self.reference, MODEL.shardings(self.devices))
        self.state = self.step.create_state(placed)
        generate = self.step._generate

        def record(params, prompts, *args, **kwargs):
            found = generate(params, prompts, *args, **kwargs)
            self.seen.append(found)
            return found

        self.step._generate = record

    def prompts(self, start, stop):
        """Return prompts that are their numbers."""
        return [[n % 12, n // 12 % 12, n // 144] for n in range(start, stop)]

    def reward(self, prompts, responses):
        """Return rewards with a spread for some prompts, and 7 for all responses to the
        others.
        """
        G, found = self.plan.samples_per_prompt, []
        for number, (prompt, response) in enumerate(
            zip(prompts, responses, strict=True)
        ):
            spread = self.teaches(sum(x * 12**place for place, x in enumerate(prompt)))
            found.append(number % G * 1.5 + len(response) if spread else 7.0)
            # Lengths may cancel what the number of the sample adds.
            found[-1] += sum(response) / 100 if spread else 0
        return found

    def rollout(self):
        """Run all updates of the next rollout, and return their lines."""
        self.seen, self.lines, self.before = [], [], []
        self.start = jax.device_get(self.state.params)
        for number in itertools.count(int(self.state.step)):
            position, before = (
                self.step.schedule.at(number),
                jax.device_get(self.state.params),
            )
            self.state, metrics = self.step.update(self.state, position, self.prompts)
            self.before.append((before, jax.device_get(self.state.params)))
            self.lines.append({"loss": float(metrics["loss"]), **metrics["facts"]})
            if position.is_last:
                break
        self._queue_groups()
        return self.lines

    def _queue_groups(self):
        """Put the groups that the rollout generated behind those that wait, with what
        was stored when they were generated.
        """
        options, G = self.step.options, self.plan.samples_per_prompt
        if not self.seen:
            return
        tokens, prompt, response, _ = jax.tree.map(
            lambda *parts: np.concatenate(parts), *self.seen
        )
        counts = np.arange(R) < response[:, None]
        rewards = np.concatenate(
            [self.step._rewards(part, where="the test") for part in self.seen]
        )
        kept = [
            n
            for n in range(0, len(tokens), G)
            if options.zero_spread_groups == "keep"
            or len(set(rewards[n : n + G].tolist())) > 1
        ]
        rows = np.array([n + i for n in kept for i in range(G)], int)
        tokens, prompt, response, counts, rewards = (
            x[rows] for x in (tokens, prompt, response, counts, rewards)
        )
        places = np.minimum(prompt[:, None] - 1 + np.arange(R), P + R - 1)
        stored = {"tokens": tokens, "response_mask": counts}
        stored["attention_mask"] = np.arange(P + R) < (prompt + response)[:, None]
        targets = np.roll(tokens, -1, axis=1)
        for name, params in (
            ("log_probabilities", self.start),
            ("reference_log_probabilities", self.reference),
        ):
            logits = np.asarray(logits_by_hand(params, np.resize(tokens, (48, P + R))))[
                : len(tokens)
            ]
            log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            log_p = np.take_along_axis(log_p, targets[..., None], axis=2)[..., 0]
            stored[name] = np.where(
                counts, np.take_along_axis(log_p, places, axis=1), 0
            )
        groups = rewards.reshape(-1, G).astype(np.float64)
        spread = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
        stored["advantages"] = np.repeat(
            ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1, 1),
            R,
            axis=1,
        )
        self.queue += [
            {name: x[n : n + G] for name, x in stored.items()}
            for n in range(0, len(rows), G)
        ]

    def assert_gradient(self, groups, mode, update=0):
        """Compare one update with the gradient of some groups of the queue, as one
        batch.
        """
        empty = {
            name: np.zeros((2 * 24, *x.shape[1:]), x.dtype)
            for name, x in self.queue[0].items()
        }
        arrays = {
            name: np.concatenate([*(group[name] for group in groups), x])[: len(x)]
            for name, x in empty.items()
        }
        rows = list(range(2 * len(groups)))
        loss, grads = by_hand(self.before[update][0], arrays, rows, mode)
        assert_close(moved(*self.before[update]), grads, 1e-6)
        assert self.lines[update]["loss"] == pytest.approx(float(loss), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "sizes", "per_pass"),
    [
        ("one", (6, 12), 2),
        campaign("one", range(3, 25), 8),
        ("data", (3, 8, 24, 12), 2),
        campaign("three", range(3, 25), 3),
        ("four", (3, 8, 24, 12), 4),
    ],
    ids=str,
)
def test_a_step_of_the_groups_with_spread_is_the_batch_by_hand(
    mesh, sizes, per_pass, float64
):
    """Of 24 prompts, `sizes` are kept, and others take the places of the rest, by all
    aggregations; one program for all.
    """
    microbatch = Size(count=per_pass, unit="samples")
    plan = plan_of(
        mesh,
        prompts=24,
        mini=24,
        microbatch=microbatch,
        pad=True,
        steps=len(sizes),
    )
    first = 0
    run = ByHand(mesh, plan, teaches=lambda n: teaching(n), zero_spread_groups="refill")
    for number, size in enumerate(sizes):
        mode = AGGREGATIONS[number % 4]
        run.step.options = replace(run.step.options, loss_agg_mode=mode)

        def teaching(n, first=first, size=size):
            return (n - first) * size % 24 < size

        (line,) = run.rollout()
        run.queue = trained = run.queue[:24]
        assert line["num_prompts"] == len(trained) == 24
        assert line["num_samples"] == line["global_batch_size"] == 48
        first += line["dropped_groups"] + 24
        assert line["consumed_prompts"] == first
        assert line["consumed_samples"] == 2 * first
        run.assert_gradient(trained, mode)
        run.queue = []
    assert run.step.compilations == {"generate": 1, "logprobs": 1, "update": 1}


def plain_run(plan, reward, **options):
    """Return a rollout step of a policy without a model, which compiles fast, and its
    state.
    """
    options = RolloutOptions(max_prompt_length=1, max_response_length=2, **options)

    def logits(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, 4))

    step = rollout_step(
        logits, optax.sgd(0.1), plan, mesh_of("one"), reward=reward, options=options
    )
    return step, step.create_state(jnp.zeros(4))


def test_a_refill_without_end_is_an_error_and_loses_nothing():
    """After max_num_gen_batches batches with too few prompts of a spread: an error that
    says so, and the state goes on with other rewards.
    """
    asked, rewards = [], {"spread": 0.0}
    step, state = plain_run(
        plan_of(prompts=4, mini=4),
        lambda p, r: [rewards["spread"] * (n % 2) for n in range(len(p))],
        zero_spread_groups="refill",
        max_num_gen_batches=3,
    )

    def prompts(start, stop):
        asked.append((start, stop))
        return [[1]] * (stop - start)

    with pytest.raises(
        DataError,
        match=r"found 0 of 4 .* among the 12 of max_num_gen_batches=3 batches",
    ) as caught:
        step(state, prompts)
    assert (caught.value.key, asked) == (
        "max_num_gen_batches",
        [(0, 4), (4, 8), (8, 12)],
    )
    rewards["spread"] = 1.0
    state, line = step(state, prompts)
    assert (line["num_prompts"], line["consumed_prompts"], int(state.step)) == (4, 4, 1)
    with pytest.raises(DataError, match="rollout 1 has 4 prompts, and was given 3"):
        step(state, [[1]] * 3)


def test_packing_takes_the_lengths_of_the_options():
    """A plan that knows no lengths packs as many passes as rollouts need, with one
    program. Too short ones are refused.
    """
    tokens = Size(count=8, unit="tokens", scope="replica")
    plan = plan_of(prompts=8, samples=4, mini=8, microbatch=tokens, steps=6)
    policy = Policy(
        logits=lambda p, t: p[t], packed=lambda p, t, positions, segments: p[t]
    )

    def step_on(plan):
        options = RolloutOptions(
            max_prompt_length=1, max_response_length=5, end_token=0
        )

        def reward(prompts, responses):
            return [len(response) for response in responses]

        return rollout_step(
            policy, optax.sgd(0.1), plan, mesh_of("one"), reward=reward, options=options
        )

    step = step_on(plan)
    state, passes = step.create_state(jnp.zeros((8, 8))), []
    for _ in range(6):
        state, metrics = step(state, [[1 + n % 7] for n in range(8)])
        passes.append(metrics["passes"])
    assert len(set(passes)) > 1
    assert step.compilations == {"generate": 1, "logprobs": 1, "update": 1}
    with pytest.raises(
        ConfigError, match="= 5 tokens, fewer than the 6 of the options"
    ):
        step_on(
            replace(
                plan, experience=Experience(max_prompt_length=1, max_response_length=4)
            )
        )


def fail_in_an_own_loop(process, port):
    """Train with an own loop as one of two processes, of which process 0 leaves in its
    reward function.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=process,
        heartbeat_timeout_seconds=10,
    )
    calls = []

    def reward(prompts, responses):
        calls.append(len(prompts))
        if len(calls) == 1:
            return [0.0, 1.0] * 4
        # A process of multiprocessing ends before it prints the words of an exit.
        print("the budget is spent", flush=True)
        sys.exit(1)

    options = RolloutOptions(max_prompt_length=1, max_response_length=2)
    step = rollout_step(
        lambda p, t: p[t],
        optax.sgd(0.1),
        plan_of("data"),
        mesh_of("data"),
        reward=reward,
        options=options,
    )
    state = step.create_state(jnp.zeros((8, 8)))
    for _ in range(3):
        state, _ = step(state, [[1]] * 4)


@pytest.mark.slow
def test_processes_of_an_own_loop_end_with_the_one_that_rewards(tmp_path):
    """JAX ends the other process, which does not wait for rewards that will never
    come.
    """
    port, logs = processes.free_port(), [tmp_path / "0.log", tmp_path / "1.log"]
    started = [
        processes.start(fail_in_an_own_loop, n, port, log=log)
        for n, log in enumerate(logs)
    ]
    started[1].join(60)
    assert started[1].exitcode not in (None, 0)


@pytest.mark.parametrize(
    ("sizes", "options", "key"),
    [
        ({"mini": 2}, {"zero_spread_groups": "drop"}, "zero_spread_groups"),
        ({"mini": 2}, {"max_num_gen_batches": 0}, "max_num_gen_batches"),
        # Passes that cannot tell both parts of the noise apart.
        (
            {"microbatch": SAMPLES[1]},
            {"measure_gradient_noise": True},
            "measure_gradient_noise",
        ),
    ],
)
def test_sizes_that_no_step_can_have_are_refused(sizes, options, key):
    """Ways that do not exist, and passes that measure no noise."""
    with pytest.raises(ConfigError) as caught:
        plain_run(plan_of(**sizes), lambda p, r: [0.0] * len(p), **options)
    assert caught.value.key == key
    assert caught.value.nearest
