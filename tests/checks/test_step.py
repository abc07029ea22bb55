"""`check_step`: the compiled step beside the same rows without a loop and a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.toy import MESHES, WIDTH, loss_fn, mesh_of, slow, start

import rampup
from rampup.errors import ConfigError

ROWS = [
    {
        "x": np.random.default_rng(n).normal(size=WIDTH).astype(np.float32),
        "weight": np.float32(1 + n % 3),
    }
    for n in range(512)
]


def in_bfloat16(params, batch, keys):
    """Compute in bfloat16."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    batch = batch | {"x": batch["x"].astype(jnp.bfloat16)}
    return loss_fn(params, batch, keys)


@pytest.mark.parametrize(
    ("mesh_name", "loss", "options"),
    [
        ("one", loss_fn, {}),
        slow("data_fsdp_tensor", in_bfloat16, {}),
        slow("data", loss_fn, {"tx": optax.adam(0.1)}),
        slow("fsdp", loss_fn, {"tx": optax.adam(0.1)}),
        slow("data_tensor", loss_fn, {"shard_optimizer_over_data": True}),
    ],
)
def test_a_right_step_is_right_on_every_mesh(mesh_name, loss, options):
    """The differences are those of rounding, with any optimizer, and are said."""
    step, state = start(mesh_name, loss, microbatch_size=1, **options)
    report = rampup.check_step(step, state, ROWS)
    assert report, str(report)
    assert {p.name for p in report.parameters} >= {"params['in']", "params['out']"}
    assert all(0 < p.tolerance < 0.2 for p in report.parameters), str(report)
    assert re.search(
        r"the largest difference: \S+ by \S+ of its change \(up to \S+ may be rounding",
        str(report),
    )


@pytest.mark.parametrize("mesh_name", ["data", slow("data_fsdp_tensor")])
def test_a_loss_of_whole_batches_is_compared_as_a_whole(mesh_name):
    """Its rows interact, so they are not cut into those of each device."""

    def contrastive(params, batch, keys):
        hidden = batch["x"] @ params["in"]
        similar = jax.nn.log_softmax(hidden @ hidden.T)
        return -similar.diagonal().sum() + (params["out"] ** 2).sum(), len(keys), {}

    step, state = start(mesh_name, contrastive, whole_batch=True)
    report = rampup.check_step(step, state, ROWS)
    assert report, str(report)


@pytest.mark.core
@pytest.mark.parametrize("mesh_name", ["one", slow("data_fsdp_tensor")])
def test_a_wrong_program_is_found_by_its_parameter(mesh_name):
    """A program that was compiled otherwise than the loss says is wrong, and the
    report names the parameter.
    """
    factor = [1.01]

    def loss(params, batch, keys):
        out = params["out"] * factor[0] + jax.lax.stop_gradient(
            params["out"] * (1 - factor[0])
        )
        return loss_fn(params | {"out": out}, batch, keys)

    step, state = start(mesh_name, loss, microbatch_size=1, donate=False)
    step(state, next(step.batches(ROWS)))  # compiles it
    factor[0] = 1.0
    report = rampup.check_step(step, state, ROWS)
    assert [p.name for p in report.wrong] == ["params['out']"]
    assert report.wrong[0].difference == pytest.approx(0.01, rel=0.05)
    assert "- params['out'] by 0.01 of its change (up to " in str(report)


def test_a_wrong_scale_is_found_behind_the_sign_of_adam():
    """Adam's first step has the sign of the gradient; its moments have the rest."""
    factor = [1.01]

    def loss(params, batch, keys):
        total, weight, aux = loss_fn(params, batch, keys)
        return total * factor[0], weight, aux

    tx = optax.adam(0.1)
    step, state = start("one", loss, tx, microbatch_size=1, donate=False)
    step(state, next(step.batches(ROWS)))  # compiles it
    factor[0] = 1.0
    report = rampup.check_step(step, state, ROWS)
    assert "opt_state[0].mu['out']" in {p.name for p in report.wrong}


def test_the_state_stays_and_the_run_goes_on():
    """The step donates a copy, and its next call needs no other program."""
    step, state = start("data", loss_fn, microbatch_size=1)
    before = jax.device_get(state.params)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert rampup.check_step(step, state, ROWS)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    compilations = step.num_compilations
    batches = step.batches(ROWS)
    state, _ = step(state, next(batches))
    assert rampup.check_step(step, state, ROWS)  # of step 1
    assert step.num_compilations == compilations


def test_dropout_of_a_model_is_drawn_as_in_the_step():
    """A microbatch of a replica draws from the key of its first row."""

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    def loss(model, batch, keys):
        return ((model(batch["x"]) - batch["x"]) ** 2).sum(), len(keys), {}

    mesh, tx = mesh_of("data"), optax.sgd(0.1)
    state, pure = rampup.split_model(Model(), loss, tx, mesh)
    step, _ = start("data", pure, tx=tx, microbatch_size=1)
    report = rampup.check_step(step, state, ROWS)
    assert report, str(report)


def test_what_cannot_be_compared_is_refused():
    """Steps whose result depends on the order of microbatches are refused in words."""
    step, state = start("one", loss_fn, engine="multi_steps")
    with pytest.raises(ConfigError, match=r"cannot compare a step that has the engine"):
        rampup.check_step(step, state, ROWS)
    assert set(MESHES) >= {"one"}
