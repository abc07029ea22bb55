"""float16 with Flax's DynamicScale, whose scale multiplies a mean as in a step by
hand.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers.toy import ScaledState

import rampup

STEPS, BATCH, LENGTH = 6, 64, 64


class Net(nn.Module):
    """An embedding and a layer in float16."""

    @nn.compact
    def __call__(self, tokens):
        """Return logits."""
        x = nn.Embed(24, 16, dtype=jnp.float16)(tokens)
        return nn.Dense(24, dtype=jnp.float16)(x).astype(jnp.float32)


NET, TX = Net(), optax.adam(1e-2)


def losses_of(params, batch):
    """Return the loss of every token."""
    logits = NET.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def new_state():
    """Return a state with the first scale of Flax."""
    params = NET.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return ScaledState.create(
        apply_fn=NET.apply, params=params, tx=TX, dynamic_scale=DynamicScale()
    )


@jax.jit
def by_hand(state, batch):
    """Return the state and the loss after the step of Flax's examples."""
    run = state.dynamic_scale.value_and_grad(lambda p: losses_of(p, batch).mean())
    scale, is_finite, loss, grads = run(state.params)
    new = state.apply_gradients(grads=grads)
    params, opt_state = jax.tree.map(
        lambda a, b: jnp.where(is_finite, a, b),
        (new.params, new.opt_state),
        (state.params, state.opt_state),
    )
    new = new.replace(params=params, opt_state=opt_state, dynamic_scale=scale)
    return new, loss, is_finite


@pytest.mark.parametrize(("devices", "size"), [(1, 64), (1, 8), (8, 2)])
@pytest.mark.parametrize("parts", [False, True])
def test_no_more_steps_are_skipped_than_by_hand(devices, size, parts):
    """Losses and the scale are those of the step by hand, whatever the microbatch."""
    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.integers(0, 24, LENGTH), "y": rng.integers(0, 24, LENGTH)}
        for _ in range(STEPS * BATCH)
    ]
    state, expected = new_state(), []
    for k in range(STEPS):
        part = rows[k * BATCH : (k + 1) * BATCH]
        state, loss, is_finite = by_hand(
            state, jax.tree.map(lambda *x: np.stack(x), *part)
        )
        assert is_finite
        expected.append(float(loss))

    def loss_fn(params, batch, keys):
        losses = losses_of(params, batch)
        if parts:
            return (losses.sum(), 0 * losses.sum()), (losses.size, len(losses)), {}
        return losses.sum(), losses.size, {}

    mesh = rampup.make_mesh(devices=jax.devices()[:devices])
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(BATCH),
        splitter=rampup.BatchSplitter(data_parallel_size=devices, microbatch_size=size),
        num_devices=devices,
        total_steps=STEPS,
    )
    step = rampup.train_step(loss_fn, TX, plan, mesh)
    own, found = rampup.prepare_state(new_state(), mesh), []
    for batch in step.batches(rows):
        own, metrics = step(own, batch)
        assert not metrics["skipped"]
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert float(own.dynamic_scale.scale) == float(state.dynamic_scale.scale)
