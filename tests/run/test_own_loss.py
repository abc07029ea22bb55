"""The contract of a loss function of one's own: wrong results become clear errors, unusual ones become right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.toy import loss_fn, mesh_of, new_params, plan_for, rows

import rampup
from rampup.errors import ConfigError


def one_step(loss, *, mesh_name="data", params=None, tx=None, steps=1, **options):
    """Return the state and the metrics after some steps with a loss function."""
    mesh = mesh_of(mesh_name)
    plan = plan_for(mesh, "0:16")
    tx = tx or optax.sgd(0.1)
    state = rampup.create_state(new_params(mesh) if params is None else params, tx, mesh)
    step = rampup.train_step(loss, tx, plan, mesh, **options)
    state = rampup.create_state(state.params, step.tx, mesh)
    metrics = None
    for batch in rampup.step_batches(rows(), plan, mesh, stop=steps):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda p, b, k: jnp.sum(p["in"]), "a scalar"),
        (lambda p, b, k: (jnp.sum(p["in"]), 3.0), "2 results"),
        (lambda p, b, k: (b["weight"] * jnp.sum(p["in"]), 3.0, {}), "loss_sum"),
        (lambda p, b, k: (jnp.sum(p["in"]), b["weight"], {}), "weight_sum"),
        (lambda p, b, k: (jnp.int32(3), 3.0, {}), "loss_sum"),
    ],
)
def test_loss_contract_is_checked_in_words(loss, words):
    """A loss function that returns something else is refused before any work, with what it must return (A7)."""
    with pytest.raises(ConfigError, match=words) as caught:
        one_step(loss)
    assert "(loss_sum, weight_sum, aux)" in str(caught.value)


@pytest.mark.parametrize("weight", [np.nan, -1.0])
def test_weights_that_mean_nothing_are_not_hidden(weight):
    """NaN and negative sums of weights give NaN in the metrics, never a loss of 0 (A8)."""
    _, metrics = one_step(lambda p, b, k: (jnp.sum(p["in"] ** 2), weight * b["weight"].size, {}))
    assert np.isnan(float(metrics["loss"])) or (weight < 0 and float(metrics["loss"]) < 0)


def test_zero_weight_changes_nothing():
    """With `skip_nonfinite`, a batch in which no row counts leaves the parameters as they were (A8)."""

    def loss(p, b, k):
        return jnp.sum(p["in"] ** 2) * 0.0, 0.0, {}

    mesh = mesh_of("data")
    before = jax.tree.map(np.asarray, new_params(mesh))
    state, metrics = one_step(loss, tx=optax.adamw(0.1, weight_decay=0.5), skip_nonfinite=True)
    assert float(metrics["loss"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_multi_steps_option_that_leaves_the_plan_is_refused():
    """`should_skip_update_fn` swallows a microbatch without counting it, so it is refused and the remedy named (A9)."""
    plan = plan_for(mesh_of("data"))
    with pytest.raises(ConfigError, match="skip_nonfinite"):
        rampup.multi_steps(optax.sgd(0.1), plan, should_skip_update_fn=optax.skip_not_finite)


def test_grad_norm_is_float32():
    """The gradient's norm is computed from the float32 sums, whatever the type of the parameters (A11)."""
    mesh = mesh_of("one")
    params = {"w": jnp.zeros((4096,), jnp.float16)}

    def loss(p, b, k):
        return jnp.sum(p["w"].astype(jnp.float32) * 2000.0) * b["weight"].size, b["weight"].size, {}

    _, metrics = one_step(loss, mesh_name="one", params=jax.device_put(params, jax.devices()[0]))
    assert metrics["grad_norm"].dtype == jnp.float32
    assert float(metrics["grad_norm"]) == pytest.approx(2000 * 64, rel=1e-3)
    assert mesh.size == 1


@pytest.mark.parametrize("size", [18, 20, 72])
def test_evaluation_ignores_padding_rows(size):
    """The rows of zeros that fill the buffer up do not count in an evaluation (A3)."""
    mesh = mesh_of("one")
    plan = plan_for(mesh, f"0:{size}", microbatch_size=2, steps=2)

    def loss(p, b, k):
        error = (b["x"] - 1.0) ** 2
        return jnp.sum(error), error.size, {}

    state = rampup.create_state({"w": jnp.zeros(())}, optax.sgd(0.1), mesh)
    batch = next(iter(rampup.step_batches(rows(), plan, mesh, stop=1)))
    total, weight = rampup.EvalStep(loss, mesh)(state, batch)
    expected = sum(float(np.sum((row["x"] - 1.0) ** 2)) for row in rows()[:size])
    assert float(weight) == size * 8
    assert float(total) == pytest.approx(expected, rel=1e-5)


def test_multi_steps_engine_runs_every_microbatch():
    """Chunks of several microbatches are all run, or refused; none is dropped in silence (A4)."""
    mesh = mesh_of("one")
    plan = plan_for(mesh, "0:8 16:160", microbatch_size=8, steps=4)
    tx = optax.sgd(0.01)
    step = rampup.train_step(loss_fn, tx, plan, mesh, engine="multi_steps")
    state = rampup.create_state(new_params(mesh), step.tx, mesh)
    fused = rampup.train_step(loss_fn, tx, plan, mesh)
    other = rampup.create_state(new_params(mesh), tx, mesh)
    try:
        for batch in rampup.step_batches(rows(), plan, mesh):
            state, _ = step(state, batch)
    except ConfigError as error:
        assert "chunk_size=1" in str(error)
        return
    for batch in rampup.step_batches(rows(), plan, mesh):
        other, _ = fused(other, batch)
    assert int(state.step) == int(other.step) == 4
