"""A training loop over the toy problem, on one device, in this process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import toy
from helpers.toy import make_step

from rampup.data.batches import BatchOptions, step_batches
from rampup.engine.state import create_state
from rampup.loop.checkpoint import CheckpointOptions
from rampup.loop.loop import Loop
from rampup.loop.metrics import MetricOptions

STEPS = 12
CHUNK_SIZE = {"fused": None, "multi_steps": 1}


def loss_fn(params, batch, rngs):
    """The toy's loss, with what a row may add to it."""
    loss, weight, aux = toy.loss_fn(params, batch, rngs)
    return loss + jnp.sum(batch["poison"] * jnp.sum(params["in"])), weight, aux


@functools.cache
def parts(engine="fused", *, skips=True, mesh="one", rate=1e-2):
    """Return mesh, plan and a compiled step, shared by all runs."""
    mesh = toy.mesh_of(mesh)
    plan = toy.plan_for(mesh, steps=STEPS)
    schedule = optax.linear_schedule(rate, rate / 10, STEPS)
    step = make_step(
        loss_fn,
        optax.adamw(schedule),
        plan,
        mesh,
        engine=engine,
        seed=3,
        skip_nonfinite=skips,
    )
    return mesh, plan, step


def rows(poisoned=()):
    """Return the toy's rows; the poisoned ones make the loss infinite or not a
    number.
    """
    poison = dict(poisoned)
    return [
        row | {"poison": np.float32(poison.get(number, 0))}
        for number, row in enumerate(toy.rows())
    ]


def run(
    folder,
    *,
    source=None,
    engine="fused",
    events=None,
    skips=True,
    mesh="one",
    **options,
):
    """Run or resume; return the summary and the last state."""
    mesh, plan, step = parts(engine, skips=skips, mesh=mesh)
    source = rows() if source is None else source
    last = {}

    def to_saved(state):
        last["state"] = jax.device_get(state)
        return state

    loop = Loop(
        plan=plan,
        step=step,
        batches=lambda start: step_batches(
            source,
            plan,
            mesh,
            start=start,
            options=BatchOptions(chunk_size=CHUNK_SIZE[engine]),
        ),
        folder=folder,
        metrics=MetricOptions(
            learning_rate=lambda step: 0.01,
            tokens_per_sample=10,
            on_event=lambda event: None if events is None else events.append(event),
            **{
                name: options.pop(name)
                for name in ("skip_nonfinite",)
                if name in options
            },
        ),
        checkpoints=CheckpointOptions(
            **{"identity": {"who": "toy"}, "checkpoint_period": 4, "to_saved": to_saved}
            | options
        ),
    )
    _, summary = loop.run(create_state(toy.new_params(mesh), step.tx, mesh))
    return summary, last.get("state")


def assert_equal(one, other):
    """Assert that two states are the same, bit for bit."""
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
        one,
        other,
    )
