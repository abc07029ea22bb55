"""The contract of a loss function of one's own: wrong results become clear errors,
unusual ones become right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers.toy import (
    ScaledState,
    flax_state,
    loss_fn,
    rows,
    start,
    train,
)

import rampup
from rampup.errors import ConfigError, DataError


def one_step(loss, *, mesh_name="data", **options):
    """Return the state and the metrics after a step with a loss function."""
    return train(*start(mesh_name, loss, **options), steps=1)


@pytest.mark.parametrize("weight", [np.nan, -1.0])
def test_weights_that_mean_nothing_are_not_hidden(weight):
    """NaN and negative sums of weights give NaN in the metrics, never a loss of 0."""
    _, metrics = one_step(
        lambda p, b, k: (jnp.sum(p["in"] ** 2), weight * b["weight"].size, {})
    )
    assert np.isnan(float(metrics["loss"])) or (
        weight < 0 and float(metrics["loss"]) < 0
    )


@pytest.mark.parametrize(
    ("params", "loss_of", "norm"),
    [
        (
            np.zeros(4096, np.float16),
            lambda w: jnp.sum(w.astype(jnp.float32) * 2000),
            2000 * 64,
        ),
        (np.array([3 + 4j, 0], np.complex64), lambda w: jnp.sum(jnp.abs(w) ** 2), 10),
    ],
)
def test_grad_norm_is_real_and_float32(params, loss_of, norm):
    """The gradient's norm is computed from the sums, whatever the type of the
    parameters.
    """

    def loss(p, b, k):
        return loss_of(p["w"]) * b["weight"].size, b["weight"].size, {}

    _, metrics = one_step(loss, mesh_name="one", params={"w": jnp.asarray(params)})
    assert metrics["grad_norm"].dtype == jnp.float32
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-3)


def test_multi_steps_refuses_chunks_of_several_microbatches():
    """A batch made without `chunk_size=1` would lose microbatches."""
    (step, state), (fused, _) = (
        start(microbatch_size=8, engine=engine) for engine in ("multi_steps", "fused")
    )
    with pytest.raises(DataError, match="chunk_size=1"):
        step(state, next(fused.batches(rows())))


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("plain", "fused"),
        ("plain", "multi_steps"),
        ("scaled", "fused"),
    ],
)
def test_loss_function_without_keys_is_refused(kind, engine):
    """A loss function of two arguments is named, also if the state makes the step wrap
    it.
    """
    state = flax_state(
        ScaledState, dynamic_scale=DynamicScale() if kind == "scaled" else None
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot be called with 3 arguments, .* It takes \(params, batch, keys\)",
    ):
        one_step(
            lambda params, batch: (0.0, 1.0, {}),
            mesh_name="one",
            state=state,
            engine=engine,
        )


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
@pytest.mark.parametrize("mesh_name", ["one", "data"])
@pytest.mark.parametrize(
    "per_row",
    [lambda x: x, lambda x: x.T, lambda x: {"deep": [x.ravel()]}],
    ids=["RC", "CR", "flat"],
)
def test_aux_with_a_value_per_row_is_refused(per_row, mesh_name, engine):
    """Rows of different microbatches would be added up, so the error names the entry
    and its two shapes.
    """

    def loss(params, batch, keys):
        return *loss_fn(params, batch, keys)[:2], {"seen": per_row(batch["x"])}

    with pytest.raises(
        ConfigError,
        match=(
            r"aux\['seen'\].* of the loss function has values for single rows: its"
            r" shape is"
        ),
    ):
        one_step(loss, mesh_name=mesh_name, engine=engine)


def test_text_in_aux_keys_taken_for_one_key_and_unknown_axes_are_named():
    """A text is refused. The other two are errors of JAX, which name neither the loss
    function nor what to change: a note below them does.
    """
    with pytest.raises(
        ConfigError, match=r"returned a str as aux\['name'\], which must be a number"
    ):
        one_step(lambda *args: (*loss_fn(*args)[:2], {"name": "x"}))
    with pytest.raises(
        (TypeError, ValueError),
        match=r"a single key[\s\S]*`keys` has one random key per row, so take jax.vmap",
    ):
        one_step(
            lambda p, b, keys: (jnp.sum(b["x"] * jax.random.bernoulli(keys)), 1, {})
        )

    def of_a_pmap(*args):
        loss, *others = loss_fn(*args)
        return jax.lax.pmean(loss, "batch"), *others

    for mesh_name, engine in (
        ("data", "fused"),
        ("data", "multi_steps"),
        ("data_fsdp_tensor", "fused"),
    ):
        with pytest.raises(
            NameError,
            match=r"unbound axis name: batch[\s\S]*The axes of the mesh are .*data",
        ):
            one_step(of_a_pmap, mesh_name=mesh_name, engine=engine)
    with pytest.raises(NameError, match=r"axis name: batch[\s\S]*axes of the mesh are"):
        rampup.check_loss(
            lambda p, b, keys: (jax.lax.pmean(p["w"] * b.sum(), "batch"), 1, {}),
            {"w": 1.0},
            np.ones((4, 2)),
        )


def test_aux_as_long_as_the_rows_is_no_value_per_row():
    """Counts of 16 classes are summed over a microbatch of 16 rows; so is what a loss
    function for 16 rows alone returns.
    """

    def loss(params, batch, keys):
        classes = jax.nn.one_hot(batch["id"] % 16, 16)
        only = (
            batch["x"].reshape(16, -1)
            if batch["x"].size == 16 * 8
            else batch["x"].reshape(7, 7)
        )
        return *loss_fn(params, batch, keys)[:2], {
            "classes": jnp.sum(classes, axis=0),
            "only": only.sum(axis=1),
        }

    _, metrics = one_step(loss, mesh_name="one")
    assert metrics["aux"]["classes"].tolist() == [1] * 16


def test_a_backward_rule_that_is_not_linear_sees_the_same_however_a_batch_is_split():
    """A model that clips the gradient of its activations has one update with any
    microbatches, devices and phases.
    """
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    def loss(params, batch, keys):
        error = jnp.sum(
            (clip(jnp.tanh(batch["x"] @ params["in"]) @ params["out"]) - batch["x"])
            ** 2,
            axis=-1,
        )
        return jnp.sum(error), len(error), {}

    found = [
        one_step(loss, mesh_name=name, schedule=schedule, engine=engine, **size)[
            0
        ].params
        for name, schedule, engine, size in (
            ("one", "0:16", "fused", {}),
            ("one", "0:16", "multi_steps", {}),
            ("one", "0:16 16:32", "fused", {"microbatch_size": 16}),
            ("one", "0:16", "fused", {"microbatch_size": 2}),
            ("data", "0:16", "fused", {}),
        )
    ]
    for params in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            params,
            found[0],
        )


def test_float16_hides_no_gradient_of_a_batch_in_one_microbatch():
    """There, 1 / weight is 0 for a large weight, so the gradient is that of the sum."""

    def loss(params, batch, keys):
        x = (
            params["in"].astype(jnp.float16)[:, 0]
            * batch["x"].astype(jnp.float16).sum()
        )
        return jnp.sum(x), len(keys) * 3.0 * 2**23, {}

    tx, before = optax.sgd(2.0**30), start("one", loss)[1].params["in"]
    one, many = (
        one_step(loss, mesh_name="one", tx=tx, microbatch_size=size)[0].params["in"]
        for size in (16, 4)
    )
    assert np.abs(many - before).max() > 0.1
    np.testing.assert_allclose(one, many, rtol=2e-3)
