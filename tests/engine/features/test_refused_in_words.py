"""What used to end in an exception of JAX or Python ends in words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.toy import MESHES, loss_fn, make_step, mesh_of, plan_for, rows, start
from jax.sharding import AxisType

import rampup
from rampup.engine.mesh import batch_sharding
from rampup.errors import ConfigError
from rampup.plan import MeshAxes


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_evaluation_of_a_donated_state_names_the_step(mesh_name):
    """`EvalStep` says that an earlier step has the state's memory."""
    step, state = start(mesh_name)
    step(state, next(step.batches(rows())))
    evaluate = rampup.EvalStep(loss_fn, mesh_of(mesh_name))
    with pytest.raises(ConfigError, match="was donated to an earlier step"):
        evaluate(state, next(evaluate.batches(rows(16), 16)))


def test_evaluation_of_a_state_on_the_host_says_how_to_place_it():
    """Arrays of NumPy are named, with the function that places them."""
    mesh = mesh_of("one")
    params = jax.tree.map(np.asarray, start()[1].params)
    state = rampup.TrainState(step=np.int32(0), params=params, opt_state=())
    evaluate = rampup.EvalStep(loss_fn, mesh)
    with pytest.raises(ConfigError, match=r"prepare_state\(state, mesh\)"):
        evaluate(state, next(evaluate.batches(rows(16), 16)))


@pytest.mark.parametrize("which", ["both", "loss", "weight"])
@pytest.mark.parametrize("mesh_name", ["one", "data"])
@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_parts_of_a_loss_are_refused(mesh_name, which, kind):
    """The error says that a sum of means needs the whole batch."""

    def loss(params, batch, keys):
        total, weight, aux = loss_fn(params, batch, keys)
        sums = (total, 0.1 * total)
        weights = (weight, weight + 1)
        if kind is dict:
            sums, weights = (
                dict(zip(("errors", "z"), parts, strict=True))
                for parts in (sums, weights)
            )
        return (
            total if which == "weight" else sums,
            weight if which == "loss" else weights,
            aux,
        )

    step, state = start(mesh_name, loss)
    name = "weight_sum" if which == "weight" else "loss_sum"
    words = rf"returned a {kind.__name__} as {name}, .* plan\.with_whole_batches\(\)"
    with pytest.raises(ConfigError, match=words):
        step(state, next(step.batches(rows())))


def as_dicts(params, batch, keys):
    """Return sums and weights as dicts, as some write them."""
    total, weight, aux = loss_fn(params, batch, keys)
    return {"errors": total, "z": total}, {"errors": weight, "z": 1}, aux


class Scale(nnx.Module):
    """A model of one number."""

    def __init__(self):
        self.w = nnx.Param(jnp.float32(1))


def check(mesh):
    """Ask whether it is a sum over rows."""
    rampup.check_loss(as_dicts, start()[1].params, rows(16))


def evaluate(mesh):
    """Evaluate it."""
    evaluate = rampup.EvalStep(as_dicts, mesh)
    evaluate(start()[1], next(evaluate.batches(rows(16), 16)))


def accumulate(mesh):
    """Accumulate it in a step of one's own."""
    batch = jax.tree.map(lambda *x: np.stack(x)[None], *rows(4))
    rampup.accumulate(
        as_dicts,
        start()[1].params,
        batch,
        1,
        jax.random.split(jax.random.key(0), (1, 4)),
        mesh=mesh,
    )


def train_a_model(mesh):
    """Train a model of NNX with it."""

    def loss(model, batch, keys):
        errors = jnp.sum((model.w * batch["x"] - 1) ** 2)
        return {"errors": errors}, {"errors": len(keys)}, {}

    state, pure = rampup.split_model(Scale(), loss, optax.sgd(0.1), mesh)
    step = make_step(pure, optax.sgd(0.1), plan_for(mesh, "0:16", steps=1), mesh)
    step(state, next(step.batches(rows())))


def train_whole_batches(mesh):
    """Train with it on whole batches."""
    step, state = start("one", as_dicts, whole_batch=True)
    step(state, next(step.batches(rows())))


@pytest.mark.parametrize(
    "use", [check, evaluate, accumulate, train_a_model, train_whole_batches]
)
def test_parts_as_a_dict_are_refused_by_everything_that_takes_a_loss(use):
    """The words are those of a training step."""
    with pytest.raises(ConfigError, match=r"a dict as loss_sum, .*one number"):
        use(mesh_of("one"))


@pytest.mark.parametrize("number", [2.0, np.float32(2)])
def test_python_numbers_among_parameters_are_arrays(number):
    """`accumulate` sums as with an array in their place, and gives a float its
    gradient.
    """

    def scaled(params, batch, keys):
        return (params["w"] * batch).sum() * params["scale"], batch.size, {}

    buffer, mesh = jnp.ones((2, 4)), mesh_of("one")
    found, expected = (
        rampup.accumulate(
            scaled, {"w": jnp.float32(3), "scale": scale}, buffer, 2, mesh=mesh
        )
        for scale in (number, jnp.asarray(number))
    )
    assert float(found.loss) == float(expected.loss) == 48
    assert jax.tree.leaves(found.grads) == jax.tree.leaves(expected.grads)


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_python_numbers_among_the_layers_of_a_model_are_trained(mesh_name):
    """A state, `accumulate` and `check_loss` take them as arrays, wherever they are."""
    mesh, tx = mesh_of(mesh_name), optax.adam(0.1)

    def loss(params, batch, keys):
        (first, second), bias = params["layers"], params["bias"]
        errors = (first["w"] * batch["x"] * second["scale"] + bias) ** 2
        return errors.sum(), errors.size, {}

    def params(number):
        layers = ({"w": jnp.ones(8)}, {"scale": number(0.5)})
        return {"layers": layers, "bias": number(2.0)}

    found = []
    for number in (float, jnp.float32):
        plan = plan_for(mesh, "0:16", steps=2, microbatch_size=1)
        step = make_step(loss, tx, plan, mesh)
        state = rampup.create_state(params(number), tx, mesh)
        for batch in step.batches(rows()):
            state, metrics = step(state, batch)
        data = jax.tree.map(lambda *x: np.stack(x)[None], *rows(8))
        sums = rampup.accumulate(
            loss,
            params(number),
            jax.device_put(data, batch_sharding(mesh, leading=1)),
            1,
            mesh=mesh,
        )
        assert rampup.check_loss(loss, params(number), rows(16))
        found.append(jax.device_get((state.params, metrics["loss"], sums.grads)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][0]["bias"] < 2


def test_the_engine_multi_steps_survives_a_row_of_nan():
    """With an optimizer that zeroes NaN, the steps after the row change the
    parameters.
    """
    data = rows()
    data[20]["x"] = np.full(8, np.nan, np.float32)
    mesh = mesh_of("one")
    plan = plan_for(mesh, "0:16", steps=4, microbatch_size=4)
    tx = optax.chain(optax.zero_nans(), optax.sgd(0.1))
    step = make_step(loss_fn, tx, plan, mesh, engine="multi_steps")
    state = rampup.create_state(start()[1].params, step.tx, mesh)
    seen = []
    for batch in step.batches(data):
        state, _ = step(state, batch)
        seen.append(np.asarray(state.params["in"]))
    assert np.isfinite(seen[-1]).all()
    assert np.abs(seen[3] - seen[2]).max() > 0


def test_arguments_of_another_kind_are_named():
    """A number of devices is no mesh, and a dict of keys no keys."""
    with pytest.raises(ConfigError, match=r"takes MeshAxes, and not an int; give make"):
        rampup.make_mesh(4)
    with pytest.raises(TypeError, match=r"by name, and not a dict: write Config\(\*\*"):
        rampup.Config({"steps": 3})


def test_merging_a_donated_state_names_the_step():
    """As a step that is given it does."""
    mesh, model = mesh_of("one"), Scale()
    state, loss = rampup.split_model(model, scaled, optax.sgd(0.1), mesh)
    step = make_step(loss, optax.sgd(0.1), plan_for(mesh), mesh)
    step(state, next(step.batches(rows())))
    with pytest.raises(ConfigError, match="was donated to an earlier step"):
        rampup.merge_model(model, state)


def scaled(model, batch, keys):
    """The sum of squares of the rows times the number of a `Scale`."""
    return jnp.sum((batch["x"] * model.w) ** 2), len(keys), {}


def test_evaluation_of_a_pipeline_names_the_batches_that_it_takes():
    """Rows are not cut for stages; the batches of a plan are evaluated."""
    mesh = rampup.make_mesh(MeshAxes(pipeline=2), jax.devices()[:2])
    loss = rampup.PipelinedLoss(
        first=lambda params, batch, keys: batch["x"],
        stage=lambda layers, x, batch, keys, first: x * layers[0],
        last=lambda params, x, batch, keys: (x.sum(), len(x), {}),
    )
    evaluate, plan = rampup.EvalStep(loss, mesh), plan_for(mesh, "0:8", num_stages=2)
    params = {"layers": np.full(2, 3, np.float32)}
    state = rampup.create_state(params, optax.sgd(0.1), mesh)
    with pytest.raises(ConfigError, match=r"pipeline stages; take step_batches\("):
        next(evaluate.batches(rows(), 8))
    batch = next(rampup.step_batches(rows(), plan, mesh))
    total = 9 * np.sum([row["x"] for row in rows(8)])
    np.testing.assert_allclose(evaluate(state, batch)[0], total, rtol=1e-5)


def explicit_mesh():
    """Return a mesh of four devices with Explicit axes."""
    axes = ("data", "fsdp", "tensor")
    return jax.make_mesh((2, 1, 2), axes, axis_types=(AxisType.Explicit,) * 3)


@pytest.mark.filterwarnings("ignore:the mesh has Explicit axes")
@pytest.mark.parametrize("way", ["explicit", *MESHES])
def test_a_loss_that_reads_no_parameters_is_refused(way):
    """It would train nothing, without a word: so does a loss that computes with a model
    from outside.
    """
    mesh = explicit_mesh() if way == "explicit" else mesh_of(way)
    own = jax.device_get(start("one")[1].params)

    def outside(params, batch, keys):
        return loss_fn(own, batch, keys)

    plan = plan_for(mesh)
    step = make_step(outside, optax.sgd(0.1), plan, mesh)
    state = rampup.create_state(own, step.tx, mesh)
    with pytest.raises(ConfigError, match="reads none of its parameters"):
        step(state, next(step.batches(rows())))


def test_a_loss_of_a_model_from_outside_is_refused():
    """The model that a loss gets is the one whose parameters are trained."""
    mesh = mesh_of("one")
    model = Scale()

    def outside(_, batch, keys):
        return jnp.sum((batch["x"] * model.w) ** 2), len(keys), {}

    state, pure = rampup.split_model(model, outside, optax.sgd(0.1), mesh)
    step = make_step(pure, optax.sgd(0.1), plan_for(mesh), mesh)
    with pytest.raises(ConfigError, match="and not with those of a model from outside"):
        step(state, next(step.batches(rows())))


def test_a_loss_and_its_weight_in_the_wrong_order_are_refused():
    """The first result is then a number of rows, which no parameter changes."""

    def swapped(params, batch, keys):
        loss, weight, aux = loss_fn(params, batch, keys)
        return jnp.float32(weight), loss, aux

    step, state = start("one", swapped)
    with pytest.raises(ConfigError, match="compute loss_sum, the first result"):
        step(state, next(step.batches(rows())))


def test_a_loss_whose_gradient_is_zero_trains():
    """It reads its parameters, as a hinge does where it is flat."""
    step, state = start(
        loss=lambda p, batch, keys: (sum(map(jnp.sum, p.values())) * 0, 1, {})
    )
    before = jax.device_get(state.params)
    after, _ = step(state, next(step.batches(rows())))
    jax.tree.map(np.testing.assert_array_equal, before, after.params)
