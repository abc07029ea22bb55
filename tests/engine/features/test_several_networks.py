"""Several networks that read each other, one of them updated more rarely."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rampup

TAU = 0.1
STEPS = 6


def critic_rows(critic, targets, batch, keys):
    """The squared error to a noisy target, as in TD3."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    actions = jnp.tanh(batch["next"] @ targets["actor"]) + 0.2 * noise
    best = batch["next"] @ targets["critic"][:3] + actions @ targets["critic"][3:]
    goal = jax.lax.stop_gradient(batch["reward"] + 0.9 * best)
    inputs = jnp.concatenate([batch["state"], batch["action"]], -1)
    return (inputs @ critic - goal) ** 2


def actor_rows(actor, critic, batch):
    """What the critic says of the actor's actions, less is better."""
    actions = jnp.tanh(batch["state"] @ actor)
    return -(batch["state"] @ critic[:3] + actions @ critic[3:])


def transitions():
    """Return random rows."""
    random = np.random.default_rng(0)
    shapes = {"state": 3, "action": 2, "next": 3}
    rows = {n: random.normal(size=(96, k)) for n, k in shapes.items()}
    rows["reward"] = random.normal(size=96)
    return {name: value.astype(np.float32) for name, value in rows.items()}


def networks():
    """Return the first actor and critic, both linear."""
    random = np.random.default_rng(1)
    actor = random.normal(size=(3, 2)).astype(np.float32)
    return actor, random.normal(size=5).astype(np.float32)


def mean_critic_loss(critic, targets, batch, keys):
    """Return the loss as a program by hand has it."""
    return critic_rows(critic, targets, batch, keys).mean()


def mean_actor_loss(actor, critic, batch):
    """Return the loss as a program by hand has it."""
    return actor_rows(actor, critic, batch).mean()


def by_hand(plan, tx, keys_of):
    """Both networks and the targets after every step, with a program per batch."""
    actor, critic = networks()
    targets = {"actor": actor, "critic": critic}
    critic_state, actor_state = tx.init(critic), tx.init(actor)
    data, first, found = transitions(), 0, []
    for number in range(STEPS):
        size = plan.ramp.global_batch_size_at(number)
        batch = {name: x[first : first + size] for name, x in data.items()}
        first += size
        keys = keys_of(number, size)
        grads = jax.grad(mean_critic_loss)(critic, targets, batch, keys)
        updates, critic_state = tx.update(grads, critic_state, critic)
        critic = optax.apply_updates(critic, updates)
        if number % 2 == 0:
            grads = jax.grad(mean_actor_loss)(actor, critic, batch)
            updates, actor_state = tx.update(grads, actor_state, actor)
            actor = optax.apply_updates(actor, updates)
            new = {"actor": actor, "critic": critic}
            targets = optax.incremental_update(new, targets, TAU)
        found.append(jax.device_get((actor, critic, targets)))
    return found


@pytest.mark.parametrize(
    "num_devices",
    [
        pytest.param(1, marks=pytest.mark.slow),
        4,
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
def test_an_actor_that_is_updated_in_every_second_step(num_devices):
    """It takes the place of the critic: the step of their batch."""
    config = rampup.Config(
        batch_size_schedule="0:8 24:16", microbatch_size=1, steps=STEPS
    )
    plan = rampup.build_plan(config, num_devices=num_devices)
    mesh = rampup.make_mesh(devices=jax.devices()[:num_devices])
    tx = optax.adam(1e-2)

    def critic_loss(params, batch, keys, *, frozen):
        rows = critic_rows(params, frozen, batch, keys)
        return rows.sum(), rows.size, {}

    def actor_loss(params, batch, keys, *, frozen):
        rows = actor_rows(params, frozen, batch)
        return rows.sum(), rows.size, {}

    def keys_of(number, size):
        rows = jnp.arange(size)[None]
        key = jax.random.key(0, impl="threefry2x32")
        return rampup.engine.keys.per_row_keys(key, jnp.int32(number), rows)[0]

    first_actor, first_critic = networks()
    critic_step = rampup.train_step(critic_loss, tx, plan, mesh)
    actor_step = rampup.train_step(actor_loss, tx, plan, mesh)
    targets = {"actor": first_actor, "critic": first_critic}
    critic = rampup.create_state(first_critic, tx, mesh, frozen=targets)
    actor = rampup.create_state(first_actor, tx, mesh, frozen=critic.params)
    average = jax.jit(lambda new, old: optax.incremental_update(new, old, TAU))
    data = transitions()
    rows = [{name: x[n] for name, x in data.items()} for n in range(96)]
    found = []
    for number, batch in enumerate(critic_step.batches(rows, seed=None)):
        critic, _ = critic_step(critic, batch)
        if number % 2 == 0:
            actor = actor.replace(frozen=critic.params, step=critic.step - 1)
            actor, _ = actor_step(actor, batch)
            new = {"actor": actor.params, "critic": critic.params}
            critic = critic.replace(frozen=average(new, critic.frozen))
        found.append(jax.device_get((actor.params, critic.params, critic.frozen)))
    expected = by_hand(plan, tx, keys_of)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6),
        found,
        expected,
    )
    assert critic_step.num_compilations + actor_step.num_compilations == 2
