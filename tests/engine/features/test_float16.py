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
from helpers.toy import ScaledState, history

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


@pytest.mark.parametrize(
    ("devices", "size"),
    [
        pytest.param(8, 2, marks=pytest.mark.slow),
        (1, 8),
        pytest.param(1, 64, marks=pytest.mark.slow),
    ],
)
def test_no_more_steps_are_skipped_than_by_hand(devices, size):
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


class Images(nn.Module):
    """A convolution and a layer in float16, which gives a number per row."""

    @nn.compact
    def __call__(self, x):
        """Return numbers."""
        x = nn.Conv(8, (3, 3), dtype=jnp.float16)(x.reshape(-1, 8, 8, 1))
        x = nn.relu(x).reshape(len(x), -1)
        return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)[:, 0]


class Features(nn.Module):
    """Two layers in float16, with a norm between them."""

    @nn.compact
    def __call__(self, x):
        """Return numbers."""
        x = nn.LayerNorm(dtype=jnp.float16)(nn.Dense(32, dtype=jnp.float16)(x))
        return nn.Dense(1, dtype=jnp.float16)(jnp.tanh(x)).astype(jnp.float32)[:, 0]


@pytest.mark.parametrize(
    ("net", "tx", "axes", "size", "together"),
    [
        pytest.param(
            Images(),
            optax.sgd(1e-3, momentum=0.9),
            {"data": 4},
            4,
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Features(), optax.adamw(1e-2), {"fsdp": 8}, 2, 16, marks=pytest.mark.slow
        ),
        (
            Features(),
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
            {"data": 2, "fsdp": 2, "tensor": 2},
            2,
            8,
        ),
    ],
)
def test_weighted_rows_of_other_models_are_scaled_as_by_hand(
    net, tx, axes, size, together
):
    """Rows with weights of hundreds: the steps that are skipped, the losses and the
    scale are those of a loop by hand over the rows whose mean is scaled together, those
    of a replica or, with `reduce_once=False`, of all replicas.
    """
    rng = np.random.default_rng(0)
    rows = [
        {
            "x": rng.normal(size=LENGTH).astype(np.float32),
            "y": np.float32(rng.normal()),
            "weight": np.float32(rng.integers(1, 900)),
        }
        for _ in range(STEPS * BATCH)
    ]

    def loss_fn(params, batch, keys):
        errors = (net.apply({"params": params}, batch["x"]) - batch["y"]) ** 2
        return (errors * batch["weight"]).sum(), batch["weight"].sum(), {}

    sizes = rampup.MeshAxes(**axes)
    mesh = rampup.make_mesh(sizes, jax.devices()[: sizes.num_devices])
    replicas = sizes.data * sizes.fsdp
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(BATCH),
        splitter=rampup.BatchSplitter(
            data_parallel_size=replicas, microbatch_size=size
        ),
        num_devices=mesh.size,
        total_steps=STEPS,
    )
    params = net.init(jax.random.key(0), jnp.zeros((1, LENGTH)))["params"]

    @jax.jit
    def by_hand(params, opt_state, scale, batch):
        parts = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), batch)

        def add(sums, part):
            def scaled(params):
                total, weight, _ = loss_fn(params, part, None)
                return scale * total / weight, (total, weight)

            grads, (total, weight) = jax.grad(scaled, has_aux=True)(params)
            grads = jax.tree.map(lambda g: g / scale * weight, grads)
            return jax.tree.map(jnp.add, sums, (grads, total, weight)), None

        zeros = (jax.tree.map(jnp.zeros_like, params), 0.0, 0.0)
        (grads, total, weight), _ = jax.lax.scan(add, zeros, parts)
        grads = jax.tree.map(lambda g: g / weight, grads)
        is_finite = jnp.isfinite(optax.tree.norm(grads))
        updates, new = tx.update(grads, opt_state, params)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (optax.apply_updates(params, updates), new),
            (params, opt_state),
        )
        scale = jnp.where(is_finite, scale, scale / 2)
        return params, opt_state, scale, (~is_finite, total / weight)

    scaled, expected = (params, tx.init(params), DynamicScale().scale), []
    for k in range(STEPS):
        part = rows[k * BATCH : (k + 1) * BATCH]
        *scaled, found = by_hand(*scaled, jax.tree.map(lambda *x: np.stack(x), *part))
        expected.append(found)
    step = rampup.train_step(
        loss_fn, tx, plan, mesh, reduce_once=False if "tensor" in axes else None
    )
    state = ScaledState.create(
        apply_fn=None, params=params, tx=tx, dynamic_scale=DynamicScale()
    )
    state, metrics = history(
        step, rampup.prepare_state(state, mesh), step.batches(rows)
    )
    assert [m["skipped"] for m in metrics] == [skipped for skipped, _ in expected]
    np.testing.assert_allclose(
        [m["loss"] for m in metrics], [loss for _, loss in expected], rtol=2e-3
    )
    assert float(state.dynamic_scale.scale) == float(scaled[2])
