"""A training state of one's own: subclasses of Flax's TrainState, aliased buffers, and
what a caller keeps.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from helpers import toy
from helpers.toy import (
    WIDTH,
    loss_fn,
    make_step,
    mesh_of,
    new_params,
    plain_loss_fn,
    plan_for,
    rows,
    start,
    train,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rampup
from rampup.engine.mesh import make_mesh
from rampup.errors import ConfigError
from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes


class BatchStatsState(train_state.TrainState):
    """A TrainState with batch statistics, as in Flax's examples."""

    batch_stats: Any = None


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_batch_stats_reach_the_loss(mesh_name):
    """The field `batch_stats` is carried through the loss like `mutable`."""

    def loss(p, b, k, batch_stats):
        return *loss_fn(p, b, k), {"count": batch_stats["count"] + 1}

    state, _ = train(
        *start(
            mesh_name,
            loss,
            state=toy.flax_state(BatchStatsState, batch_stats={"count": jnp.zeros(())}),
        ),
        steps=3,
    )
    assert float(state.batch_stats["count"]) >= 3


def test_state_that_is_a_plain_dataclass():
    """A frozen dataclass with `step`, `params` and `opt_state` works without a
    `replace` method.
    """

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Plain:
        step: Any
        params: Any
        opt_state: Any
        best: Any

    state, metrics = train(
        *start(
            state=lambda params, tx: Plain(0, params, tx.init(params), jnp.float32(7))
        ),
        steps=3,
    )
    assert (float(state.best), set(metrics)) == (
        7,
        {"loss", "weight", "grad_norm", "aux"},
    )


@pytest.mark.parametrize("mesh_name", ["one", "data"])
@pytest.mark.parametrize(
    ("tx", "state"),
    [
        (optax.contrib.prodigy(), None),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01)), None),
        (
            optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
            None,
        ),
        (optax.sgd(0.1), toy.flax_state()),
    ],
    ids=["prodigy", "sam", "plateau", "prepared"],
)
def test_arrays_of_the_caller_survive_any_optimizer(mesh_name, tx, state):
    """Some keep the initial parameters in their state, or get `value=loss`; none
    donates a buffer twice or the caller's.
    """
    params = new_params(mesh_of(mesh_name)) | {"empty": jnp.zeros((0, 3))}
    params["tied"] = params["in"]
    state, _ = train(*start(mesh_name, tx=tx, params=params, state=state), steps=3)
    assert int(state.step) == 3
    assert np.isfinite(np.asarray(params["in"])).all()
    assert not params["empty"].is_deleted()


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_two_steps_read_the_parameters_of_each_other(engine):
    """`frozen` is not donated: each of two states is trained with the other's
    parameters in it, as in a GAN.
    """

    def loss(params, batch, keys, *, frozen):
        return loss_fn(jax.tree.map(jnp.add, params, frozen), batch, keys)

    (step, one), (_, other) = (start(loss=loss, engine=engine) for _ in range(2))
    other_step = make_step(
        loss, optax.sgd(0.1), step.plan, mesh_of("one"), engine=engine
    )
    for batch in step.batches(rows(), stop=3):
        before = one.params
        one, _ = step(one.replace(frozen=other.params), batch)
        other, _ = other_step(other.replace(frozen=one.params), batch)
        assert before["in"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, other.frozen, one.params)


def test_state_survives_without_donation():
    """With `donate=False` the state given to a step can be used again."""
    step, state = start(donate=False)
    batch = next(step.batches(rows()))
    jax.tree.map(
        np.testing.assert_array_equal,
        step(state, batch)[0].params,
        step(state, batch)[0].params,
    )


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_float64_parameters(engine):
    """Both engines and the evaluation run in float64."""
    with (
        jax.enable_x64(True)
        if hasattr(jax, "enable_x64")
        else jax.experimental.enable_x64()
    ):
        step, state = start(
            params=new_params(mesh_of("one"), np.float64), engine=engine
        )
        state, metrics = train(
            step, state, steps=2, data=(data := rows(dtype=np.float64))
        )
        assert metrics["loss"].dtype == jnp.float64
        assert (
            rampup.EvalStep(loss_fn, mesh_of("one"))(state, next(step.batches(data)))[
                0
            ].dtype
            == jnp.float64
        )


def test_integers_are_frozen():
    """Integers, such as a quantized base model, are no parameters: in `frozen`, a loss
    reads them, and they are left as they are.
    """
    base = jnp.arange(WIDTH, dtype=jnp.int8)

    def loss(params, batch, keys, frozen):
        moved = batch["x"] + 0.01 * frozen["base"]
        return loss_fn(params, batch | {"x": moved}, keys)

    mesh = mesh_of("data")
    step, _ = start("data", loss)
    state = rampup.create_state(new_params(mesh), step.tx, mesh, frozen={"base": base})
    state, metrics = train(step, state, steps=3)
    assert state.frozen["base"].tolist() == base.tolist()
    assert metrics["loss"] != train(*start("data"), steps=3)[1]["loss"]


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_a_maximum_that_starts_at_infinity_skips_no_step(engine):
    """With `skip_nonfinite`, what was infinite before a step is no reason to skip it;
    what becomes so is.
    """

    def loss(params, batch, keys, mutable):
        bad = jnp.where(jnp.any(batch["id"] == 20), jnp.inf, 0.0)
        return *loss_fn(params, batch, keys), {
            "maximum": mutable["maximum"],
            "sum": mutable["sum"] + bad,
        }

    carried = {"maximum": jnp.float32(-jnp.inf), "sum": jnp.float32(0)}
    state, found = toy.history(
        *start(loss=loss, steps=3, engine=engine, skip_nonfinite=True, mutable=carried)
    )
    assert [metrics["skipped"] for metrics in found] == [False, True, False]
    assert float(state.mutable["sum"]) == 0


MODEL = LanguageModel(
    num_layers=2, width=16, mlp_dim=16, num_heads=2, num_kv_heads=1, vocab_size=32
)
init = jax.jit(MODEL.init)


class FrozenState(toy.ScaledState):
    """A TrainState that scales the loss and has frozen arrays."""

    frozen: Any = None


def run_pipeline(num_stages, **fields):
    """Return losses and parameters of some steps with a state that has further fields,
    on two replicas with stages.
    """
    mesh = make_mesh(
        MeshAxes(data=2, pipeline=num_stages), jax.devices()[: 2 * num_stages]
    )
    plan = plan_for(
        mesh, "0:8 16:16", steps=5, num_stages=num_stages, microbatch_size=2
    )
    model, tx = MODEL.on(mesh), optax.sgd(0.3)
    params = jax.device_put(init(jax.random.key(0)), model.shardings(mesh))
    state = toy.flax_state(FrozenState, **fields)(params, tx)
    step = make_step(
        model.pipelined(1) if num_stages > 1 else model.loss, tx, plan, mesh
    )
    rng = np.random.default_rng(0)
    data = [
        {
            "tokens": rng.integers(0, 32, 9).astype(np.uint8),
            "length": np.int32(n % 8 + 1),
        }
        for n in range(64)
    ]
    state, found = toy.history(
        step, rampup.prepare_state(state, mesh), step.batches(data)
    )
    losses = [
        [metrics["loss"], metrics["grad_norm"], metrics.get("skipped", 0)]
        for metrics in found
    ]
    return losses, jax.device_get((state.params, state.dynamic_scale))


@pytest.mark.slow
def test_dynamic_scale_with_pipeline_stages_is_refused():
    """The error comes before anything is computed."""
    with pytest.raises(
        rampup.errors.ConfigError, match="`dynamic_scale`, which a PipelinedLoss"
    ):
        run_pipeline(2, dynamic_scale=DynamicScale())


@pytest.mark.slow
def test_frozen_and_carried_values_with_pipeline_stages_are_refused():
    """The error comes before anything is computed, and names the field, the loss and
    what to do.
    """
    with pytest.raises(
        rampup.errors.ConfigError,
        match=r"`frozen`, which a PipelinedLoss .* optax\.transforms\.freeze",
    ):
        run_pipeline(2, frozen={"base": jnp.zeros(2)})
    mesh = make_mesh(MeshAxes(pipeline=2), jax.devices()[:2])
    plan = plan_for(mesh, "0:8", steps=5, num_stages=2)
    step = make_step(MODEL.on(mesh).pipelined(1), optax.sgd(0.1), plan, mesh)
    data = [{"tokens": np.zeros(9, np.uint8), "length": np.int32(8)}] * 8
    carried = rampup.create_state(
        init(jax.random.key(0)), step.tx, mesh, mutable={"count": jnp.zeros(())}
    )
    with pytest.raises(rampup.errors.ConfigError, match="supports neither `mutable`"):
        step(carried, next(step.batches(data)))


def test_parameters_whose_gradients_are_new_values_are_refused():
    """The scales of Flax's float8 layers cannot be summed over microbatches, so they
    would be wrong without an error.
    """
    params = {
        "params": new_params(mesh_of("one")),
        "_overwrite_with_gradient": {"scale": jnp.ones(1)},
    }
    with pytest.raises(
        rampup.errors.ConfigError,
        match=r"takes its gradients as new values.*rampup\.multi_steps",
    ):
        train(*start(loss=lambda p, *args: loss_fn(p["params"], *args), params=params))


def test_states_and_batches_print_shapes_instead_of_arrays():
    """The repr of a state has counts and shapes; a subclass, a trace and a donated
    state have one too.
    """

    class WithAverage(rampup.TrainState):
        average: Any = None

    mesh, seen = mesh_of("one"), []
    params = {
        "w": np.ones((2, 8), np.float32),
        "parts": [np.ones(n, np.float32) for n in range(1, 6)],
    }
    state = rampup.create_state(params, optax.adam(0.1), mesh)
    words = "<6 arrays, 31 numbers>"
    assert repr(state).startswith(
        f"TrainState(step=0, params={words}, opt_state=<13 arrays, 63 numbers>"
    )
    assert repr(state).endswith(", mutable=None, frozen=None)")
    own = WithAverage(
        step=np.int32(3), params=params, opt_state=(), average={"w": np.ones(2)}
    )
    assert repr(own).endswith(
        "opt_state=<no arrays>, mutable=None, frozen=None, average=<1 array, 2 numbers>)"
    )
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    state.step.delete()
    assert repr(state) == seen[0] == repr(state).replace("step=0", "step=int32[]")
    batch = next(rampup.step_batches(rows(), plan_for(mesh, "0:16"), mesh))
    assert repr(batch).startswith("Batch(step=0, 16 samples in microbatches of 16")
    assert "shape=(8,), dtype=float32" in repr(batch)


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        (
            optax.adam(0.1),
            optax.sgd(0.1),
            r"\[0\]\.count has the shape \(\) in the state and None in the optimizer",
        ),
        (
            optax.sgd(0.1),
            optax.adam(0.1),
            r"\.count has the shape None in the state and \(\) in the optimizer",
        ),
    ],
    ids=["adam", "sgd"],
)
def test_optimizer_that_did_not_make_the_state_is_refused(made, given, words, engine):
    """Another optimizer than that of the state is an error before anything is compiled;
    optax would run some of them.
    """
    (step, _), (_, state) = (
        start(tx=given, engine=engine),
        start(tx=made, engine=engine),
    )
    mesh = mesh_of("one")
    flax_made = toy.flax_state()(new_params(mesh), step.tx).replace(
        opt_state=state.opt_state
    )
    for wrong in (state, rampup.prepare_state(flax_made, mesh)):
        with pytest.raises(rampup.errors.ConfigError, match=words) as caught:
            step(wrong, next(step.batches(rows())))
        assert (caught.value.key, step.num_compilations) == ("tx", 0)


def test_what_is_no_tree_of_arrays_is_refused():
    """An NNX model and a tree with functions would train without their statistics, or
    end in an error of JAX.
    """
    mesh, tx = mesh_of("one"), optax.sgd(0.1)
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(
        rampup.errors.ConfigError,
        match=r"\['net'\] is a BatchNorm.* rampup.split_model",
    ):
        rampup.create_state({"net": model}, tx, mesh)
    for leaf in (jax.nn.relu, "words", np.array(["words"])):
        params = {"w": jnp.ones(2), "activation": leaf}
        with pytest.raises(
            rampup.errors.ConfigError,
            match=(
                r"params\['activation'\] is .* not an array of numbers.*eqx.partition"
            ),
        ):
            rampup.create_state(params, tx, mesh)
    state = rampup.create_state(
        {"w": 1.0, "half": jnp.bfloat16(1)},
        optax.identity(),
        mesh,
        frozen={"key": jax.random.key(0)},
    )
    assert len(jax.tree.leaves((state.params, state.frozen))) == 3


def test_a_donated_array_that_is_in_the_state_twice_is_named():
    """A moving average that starts as the parameters without a copy would be deleted
    with them.
    """

    class Averaged(rampup.TrainState):
        ema: Any = None

    step, state = start()
    state = Averaged(**vars(state))
    with pytest.raises(
        rampup.errors.ConfigError,
        match=r"state.params\['in'\] and state.ema\['in'\] are one array",
    ):
        train(step, state.replace(ema=state.params), steps=1)
    train(step, state.replace(ema=jax.tree.map(jnp.copy, state.params)), steps=1)


def test_parameters_sharded_over_data_train_with_the_line_that_the_error_offers():
    """As with the default of many programs, parameters in parts on the data axis:
    `batch_axes` of the error trains them.
    """
    mesh = mesh_of("data")
    params = {
        name: jax.device_put(x, NamedSharding(mesh, P("data")))
        for name, x in new_params(mesh_of("one")).items()
    }
    with pytest.raises(rampup.errors.ConfigError, match="sharded over data") as caught:
        train(*start("data", plain_loss_fn, params=params), steps=1)
    offered = eval(
        re.search(r"batch_axes=(BatchAxes\(.*?\)\))", str(caught.value))[1],
        {"BatchAxes": rampup.BatchAxes},
    )
    assert offered == rampup.BatchAxes(replica=(), rows=("data", "fsdp"))
    state, _ = train(
        *start("data", plain_loss_fn, params=params, batch_axes=offered), steps=3
    )
    expected, _ = train(*start("one", plain_loss_fn), steps=3)
    for name, x in expected.params.items():
        np.testing.assert_allclose(state.params[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", [{}, {"w": jnp.zeros(2)}])
def test_integer_parameters_are_refused(params):
    """They have no gradient, and the error says where they belong, for a new state and
    for one of one's own.
    """
    mesh, wrong = mesh_of("one"), {**params, "n": jnp.zeros(2, int)}
    refused = pytest.raises(
        ConfigError, match=r"params\['n'\] is int32, and has no gradient; .* `frozen`"
    )
    with refused:
        rampup.create_state(wrong, optax.sgd(0.1), mesh)
    step, state = start("one")
    with refused:
        own = state.replace(params=state.params | wrong)
        step(
            own.replace(opt_state=step.tx.init(own.params)), next(step.batches(rows()))
        )
    with refused:
        rampup.accumulate(loss_fn, wrong, {"x": jnp.ones((1, 2, 3))}, 1, mesh=mesh)
    with refused:
        rampup.check_loss(loss_fn, wrong, rows())
    assert int(rampup.create_state({}, optax.identity(), mesh).step) == 0
    with pytest.raises(
        ConfigError, match=r"params\['name'\] is a str and not an array"
    ):
        rampup.check_loss(loss_fn, {**params, "name": "toy"}, rows())
