"""A loss of several parts, each with a weight of its own: the sum of their means over
the whole step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import toy
from helpers.toy import make_step
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.engine.accumulate import AccumulatedLoss, accumulate
from rampup.engine.mesh import batch_sharding

SCHEDULE, SIZES = "0:16 32:32", (16, 16, 32, 32)


def parts(params, batch):
    """Return sums and weights of an error per number of a row, one per row, and one
    that few rows have.
    """
    y = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    counts = jnp.arange(toy.WIDTH) < batch["weight"][:, None]
    rare = batch["id"] % 16 == 3
    losses = (
        jnp.sum(counts * (y - batch["x"]) ** 2),
        jnp.sum(jnp.sin(y[:, 0])),
        jnp.sum(rare * y[:, 1] ** 2),
    )
    return losses, (counts.sum(), len(y), rare.sum())


def loss_fn(params, batch, keys):
    """Return the parts in the form of a step."""
    return *parts(params, batch), {"rows": batch["id"].size}


def big_batches():
    """Return losses, their parts and the last parameters of a plain loop over whole
    batches.
    """
    params, used, found = jax.device_get(toy.new_params(toy.mesh_of("one"))), 0, []

    def loss_of(params, batch):
        means = [
            loss / jnp.maximum(weight, 1)
            for loss, weight in zip(*parts(params, batch), strict=True)
        ]
        return sum(means), means

    run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for size in SIZES:
        (loss, means), grads = run(params, toy.stacked(toy.rows()[used : used + size]))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        used += size
        found.append((loss, *means))
    return np.array(found), params


def assert_big_batches(state, metrics):
    """Compare every step and the last parameters with the plain loop."""
    found, params = big_batches()
    np.testing.assert_allclose(
        [(m["loss"], *m["loss_parts"]) for m in metrics], found, rtol=2e-5, atol=1e-6
    )
    for name, expected in params.items():
        np.testing.assert_allclose(state.params[name], expected, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one", {"microbatch_size": 4}),
        ("data_fsdp_tensor", {"microbatch_size": 2}),
        (
            "data",
            {
                "microbatch_size": 1,
                "shard_optimizer_over_data": True,
                "skip_nonfinite": True,
            },
        ),
        ("data", {"whole_batch": True}),
        toy.slow("one", {"microbatch_size": 16}),
        toy.slow("data", {"microbatch_size": 2}),
        *(toy.slow(name, {"microbatch_size": 1}) for name in ("data_tensor", "fsdp")),
    ],
    ids=str,
)
def test_parts_equal_the_big_batch(name, options):
    """Losses, parts and parameters of a ramp, with microbatches in which a part has no
    weight, and one executable.
    """
    zero = (
        {"shard_optimizer_over_data": True}
        if "shard_optimizer_over_data" in options
        else {}
    )
    step, _ = toy.start(name, loss_fn, schedule=SCHEDULE, steps=len(SIZES), **options)
    mesh = toy.mesh_of(name)
    state, metrics = toy.history(
        step, rampup.create_state(toy.new_params(mesh), step.tx, mesh, **zero)
    )
    assert_big_batches(state, metrics)
    assert step.num_compilations == 1 + ("whole_batch" in options)
    assert [metrics[0]["weight"][1], metrics[0]["aux"]["rows"]] == [16, 16]


def test_parts_of_a_loss_that_takes_shards_and_of_a_scaled_loss():
    """The weights are those of all devices that share the rows; the scale of float16 is
    undone.
    """
    mesh = rampup.make_mesh(rampup.MeshAxes(data=4, fsdp=2))
    plan = toy.plan_for(mesh, SCHEDULE, steps=len(SIZES), microbatch_size=1)
    params = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
        for name, x in toy.new_params(mesh).items()
    }

    def gathers(params, batch, keys):
        whole = {
            name: jax.lax.all_gather(p, "fsdp", axis=0, tiled=True)
            for name, p in params.items()
        }
        return loss_fn(whole, batch, keys)

    loss = AccumulatedLoss(
        gathers, param_shardings=jax.tree.map(lambda p: p.sharding, params)
    )
    step = make_step(loss, optax.sgd(0.1), plan, mesh)
    assert_big_batches(*toy.history(step, rampup.create_state(params, step.tx, mesh)))
    scaled = toy.flax_state(toy.ScaledState, dynamic_scale=DynamicScale(scale=512.0))
    step, state = toy.start(
        "data",
        loss_fn,
        schedule=SCHEDULE,
        steps=len(SIZES),
        microbatch_size=1,
        state=scaled,
    )
    assert_big_batches(*toy.history(step, state))


def test_a_negative_weight_beside_none_hides_no_gradient():
    """A part without weight counts as 0, whatever the sign of the others."""

    def loss(params, batch, keys):
        return (
            (params["w"] * 0, params["w"] * len(batch["x"])),
            (jnp.int32(0), -3 * len(batch["x"])),
            {},
        )

    batch, mesh = {"x": jnp.ones((2, 4, 1))}, toy.mesh_of("one")
    sums = accumulate(loss, {"w": jnp.float32(1)}, batch, 2, mesh=mesh)
    np.testing.assert_allclose(
        (sums.mean_loss, sums.mean_grads()["w"]), -1 / 3, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["one", toy.slow("data")])
def test_weights_may_depend_on_parameters_and_on_what_is_carried(name):
    """The first pass over the microbatches carries what the second one does, and the
    weights are no part of the gradient.
    """
    mesh, K, R = toy.mesh_of(name), 3, 8
    params = {"w": jnp.float32(0.5)}
    x = np.arange(1, 1 + K * R, dtype=np.float32).reshape(K, R) / 10

    def weighted(params, batch, keys, mutable):
        y = jnp.tanh(params["w"] * batch["x"])
        return (
            (y.sum(), (y**2).sum()),
            ((mutable + y).sum(), batch["x"].size),
            {},
            mutable + 1,
        )

    def plain(w, number):
        y = np.tanh(0.5 * x[:number])
        counts = (y + np.arange(number)[:, None]).sum(), y.size
        y = jnp.tanh(w * x[:number])
        return y.sum() / counts[0] + (y**2).sum() / counts[1]

    batch = jax.device_put({"x": x}, batch_sharding(mesh, leading=1))
    run = jax.jit(
        lambda number: accumulate(
            weighted, params, batch, number, mesh=mesh, mutable=jnp.float32(0)
        )
    )
    for number in (1, 2, 3):
        sums = run(number)
        loss, grad = jax.value_and_grad(plain)(0.5, number)
        np.testing.assert_allclose(
            (sums.mean_loss, sums.mean_grads()["w"]), (loss, grad), rtol=1e-5
        )
    assert all(np.isnan(run(4).loss))


def test_evaluation_returns_the_sums_of_each_part():
    """To be added up over batches, and then divided; the zeros that fill the buffer up
    do not count.
    """
    step, state = toy.start("data", loss_fn, schedule=SCHEDULE, microbatch_size=1)
    batch = next(step.batches(toy.rows()))
    evaluate = rampup.EvalStep(loss_fn, toy.mesh_of("data"))
    with pytest.raises(rampup.errors.DataError, match="takes a Batch"):
        evaluate(state, batch.chunks)
    found = evaluate(state, batch)
    expected = parts(toy.new_params(toy.mesh_of("one")), toy.stacked(toy.rows()[:16]))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), found, expected
    )


def test_a_step_without_any_weight_changes_nothing():
    """With `skip_nonfinite`, parts that all weigh nothing are a loss of 0, and no
    update.
    """
    step, state = toy.start(
        loss=lambda p, b, k: ((p["in"].sum(), p["out"].sum()), (0, 0), {}),
        skip_nonfinite=True,
        steps=1,
    )
    before = jax.device_get(state.params)
    state, metrics = toy.history(step, state)
    assert (metrics[0]["loss"], metrics[0]["skipped"]) == (0, False)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_parts_are_refused_where_they_cannot_be_right():
    """With `optax.MultiSteps`, with measured noise, in a pipeline; and sums and weights
    that do not belong together.
    """
    bad = [((1.0, 2.0), 3.0), (1.0, (2.0,)), ((), ()), ((1.0, 2.0), (1.0,))]
    cases = [
        (lambda *_, r=result: (*r, {}), {}, "nor a tuple of as many each")
        for result in bad
    ]
    cases += [
        (
            loss_fn,
            {"engine": "multi_steps"},
            "needs gradient_accumulation=fused: multi_steps averages",
        ),
        (
            loss_fn,
            {"measure_gradient_noise": True, "microbatch_size": 4},
            "needs a loss with one weight",
        ),
    ]
    for loss, options, words in cases:
        step, state = toy.start(loss=loss, **options)
        with pytest.raises(rampup.errors.ConfigError, match=words):
            toy.history(step, state)
    mesh = rampup.make_mesh(rampup.MeshAxes(data=4, pipeline=2))
    plan = toy.plan_for(mesh, num_stages=2)
    for sums, weights in (
        ((1.0, 0.0), (1, 1)),
        ({"z": 1.0}, {"z": 1}),
        ({"z": 1.0}, 1),
        (1.0, [1]),
    ):
        loss = rampup.PipelinedLoss(
            first=lambda p, b, k: b["x"],
            stage=lambda layers, x, *_: x,
            last=lambda p, x, b, k, sums=sums, weights=weights: (
                jax.tree.map(lambda part: part * x.sum(), sums),
                weights,
                {},
            ),
        )
        step = make_step(loss, optax.sgd(0.1), plan, mesh)
        state = rampup.create_state({"layers": jnp.ones(2)}, step.tx, mesh)
        with pytest.raises(
            rampup.errors.ConfigError, match="a PipelinedLoss has one weight"
        ):
            toy.history(step, state)
