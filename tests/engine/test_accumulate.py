"""Tests of rampup.engine.accumulate."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from helpers import toy
from jax.sharding import NamedSharding, PartitionSpec

from rampup.engine.accumulate import AccumulatedLoss, accumulate
from rampup.engine.contract import check_results
from rampup.engine.keys import per_row_keys
from rampup.engine.mesh import batch_sharding, make_mesh, shardings_like
from rampup.engine.multi_steps import multi_steps
from rampup.engine.sums import Recipe
from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan


@pytest.fixture
def float64():
    """Compute in float64."""
    jax.config.update("jax_enable_x64", True)
    yield np.float64
    jax.config.update("jax_enable_x64", False)


def problem(name, K, R, dtype=np.float32):
    """Return a mesh, parameters, a buffer (K, R, ...) of rows on the mesh, the rows on
    the host, and their keys.
    """
    mesh, host = toy.mesh_of(name), toy.stacked(toy.rows(K * R, dtype))
    cut = {name: x.reshape(K, R, *x.shape[1:]) for name, x in host.items()}
    keys = per_row_keys(
        jax.random.key(7), jnp.int32(3), jnp.arange(K * R).reshape(K, R)
    )
    return (
        mesh,
        toy.new_params(mesh, dtype),
        jax.device_put(cut, batch_sharding(mesh, leading=1)),
        host,
        keys,
    )


def linear_loss(params, batch, keys):
    """The gradient of `w` is the sum of x."""
    return jnp.sum(params["w"] * batch["x"]), batch["x"].size, {}


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    [name if name == "data_fsdp_tensor" else toy.slow(name) for name in toy.MESHES],
)
def test_accumulate_equals_the_full_batch_gradient(name, float64):
    """In float64, with unequal weights, for any number of microbatches, from one trace
    and one executable, to 1e-10.
    """
    K, R = 5, 16
    mesh, params, batch, host, keys = problem(name, K, R, float64)
    traces = []

    def counted(params, batch, rngs):
        traces.append(1)
        return toy.loss_fn(params, batch, rngs)

    shardings = shardings_like(params, mesh)
    run = jax.jit(
        lambda *args: accumulate(counted, *args, mesh=mesh, param_shardings=shardings)
    )
    for number in (1, 2, 5):
        sums = run(params, batch, np.int32(number), keys)
        count = number * R
        whole = {name: x[:count] for name, x in host.items()}

        def value(p, whole=whole, count=count):
            loss, *others = toy.loss_fn(p, whole, keys.ravel()[:count])
            return loss, others

        (loss, (weight, aux)), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(
            params
        )
        np.testing.assert_allclose(sums.loss, loss, rtol=1e-12)
        assert (float(sums.weight), int(sums.aux["rows"])) == (
            float(weight),
            aux["rows"],
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10, rtol=1e-10),
            sums.grads,
            grads,
        )
        assert all(
            jax.tree.leaves(
                jax.tree.map(
                    lambda g, s: g.sharding.is_equivalent_to(s, g.ndim),
                    sums.grads,
                    shardings,
                )
            )
        )
    assert (len(traces), run._cache_size()) == (1, 1)


@pytest.mark.core
def test_accumulate_sums_in_float32():
    """Gradients of bfloat16 parameters are summed in float32: a thousand small ones do
    not vanish.
    """
    params, batch = (
        {"w": jnp.ones((), jnp.bfloat16)},
        {"x": jnp.full((1000, 1), 1 / 1024, jnp.bfloat16)},
    )
    sums = accumulate(linear_loss, params, batch, 1000, mesh=toy.mesh_of("one"))
    assert sums.grads["w"].dtype == jnp.float32
    assert float(sums.grads["w"]) == 1000 / 1024


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "K"), [toy.slow("one", 1), ("one", 3), toy.slow("data", 1)]
)
def test_accumulate_uses_as_many_microbatches_as_it_is_told(name, K):
    """No microbatch is no sum, of a buffer of one too; a number beyond the buffer is an
    error, and NaN if it is traced.
    """
    mesh, params, batch, host, keys = problem(name, K, 16)
    run = jax.jit(
        lambda number: accumulate(toy.loss_fn, params, batch, number, keys, mesh=mesh)
    )
    for number in range(K + 1):
        weight = host["weight"][: 16 * number].sum()
        for sums in (
            run(number),
            accumulate(toy.loss_fn, params, batch, number, keys, mesh=mesh),
        ):
            assert (float(sums.weight), int(sums.aux["rows"])) == (weight, 16 * number)
            assert all(
                (np.asarray(g) == 0).all() == (number == 0)
                for g in jax.tree.leaves(sums.grads)
            )
    for number in (K + 1, -1):
        assert np.isnan([run(number).loss, run(number).weight]).all()
        assert np.isnan(run(number).mean_grads(params)["in"]).all()
    for number in (K + 1, -1, 1.0, True, "1"):
        with pytest.raises(
            ConfigError,
            match=f"num_microbatches=.* must be a whole number from 0 to {K}",
        ):
            accumulate(toy.loss_fn, params, batch, number, keys, mesh=mesh)


@pytest.mark.parametrize("name", ["one", "data"])
def test_accumulators_in_bfloat16_round_the_gradient_and_not_the_loss(name):
    """The program carries bfloat16 and returns float32; the error grows with the number
    of microbatches, by its rounding.
    """
    K = 32
    mesh, params, batch, _, keys = problem(name, K, 8)
    loss = AccumulatedLoss(toy.loss_fn, accumulator_dtype=jnp.bfloat16)
    run, exact = (
        jax.jit(
            lambda n, loss=loss: accumulate(loss, params, batch, n, keys, mesh=mesh)
        )
        for loss in (loss, toy.loss_fn)
    )
    assert re.search(
        r"while\(.*bf16\[8,16\]|= \(.*bf16\[8,16\].* while",
        run.lower(2).compile().as_text(),
    )
    errors = []
    for number in (1, K):
        found, expected = run(number), exact(number)
        assert {leaf.dtype for leaf in jax.tree.leaves(found.grads)} == {
            np.dtype("float32")
        }
        assert float(found.loss) == float(expected.loss)
        difference = jax.tree.map(
            lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b),
            found.grads,
            expected.grads,
        )
        errors.append(max(jax.tree.leaves(difference)))
    assert 2**-11 < errors[0] < 2**-8
    assert errors[0] < errors[1] < K * 2**-8


@pytest.mark.parametrize("name", ["accumulator_dtype", "reduction_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, "int8", bool, jnp.complex64])
def test_gradients_are_not_summed_in_types_that_lose_them(name, dtype):
    """Integers would drop what is below 1, and train otherwise without a word."""
    mesh, params, batch, _, keys = problem("data", 4, 8)
    loss = AccumulatedLoss(toy.loss_fn, **{name: dtype})
    with pytest.raises(ConfigError, match="cannot be summed or exchanged in"):
        accumulate(loss, params, batch, 2, keys, mesh=mesh)


def test_replicas_exchange_gradients_without_rounding_their_sum_again():
    """The sum of 256 and 1, which are bfloat16, has nine digits: the result is 257 and
    not 256. Complex numbers stay whole.
    """
    mesh = make_mesh(devices=jax.devices()[:2])
    batch = jax.device_put(
        {"x": np.array([[256.0, 1]], np.float32)}, batch_sharding(mesh, leading=1)
    )

    def loss_fn(params, batch, keys):
        loss, *others = linear_loss(params, batch, keys)
        return loss + jnp.real(params["z"] * (1 + 2j)), *others

    params = {"w": jnp.ones(()), "z": jnp.complex64(0)}
    for accumulator, reduction in (
        (jnp.bfloat16, None),
        (jnp.bfloat16, jnp.float32),
        (None, jnp.bfloat16),
    ):
        loss = AccumulatedLoss(
            loss_fn, accumulator_dtype=accumulator, reduction_dtype=reduction
        )
        sums = accumulate(loss, params, batch, 1, mesh=mesh)
        assert sums.grads["w"].dtype == jnp.float32
        assert (float(sums.grads["w"]), complex(sums.grads["z"])) == (257, 2 + 4j)


@pytest.mark.parametrize(
    "axes", [MeshAxes(data=8), MeshAxes(data=4, fsdp=2), toy.slow(MeshAxes(fsdp=8))]
)
def test_a_loss_that_takes_shards_is_reduced_with_its_own_shardings(axes):
    """Without the argument `param_shardings`, or with others, those of the loss decide
    what is left to reduce.
    """
    mesh = make_mesh(axes)
    batch = jax.device_put(
        {"x": np.arange(16, dtype=np.float32).reshape(2, 8)},
        batch_sharding(mesh, leading=1),
    )
    own = {
        "w": NamedSharding(mesh, PartitionSpec("fsdp")),
        "b": NamedSharding(mesh, PartitionSpec()),
    }

    def loss_fn(params, batch, keys):
        w = jax.lax.all_gather(params["w"], "fsdp", axis=0, tiled=True)
        return jnp.sum((w.sum() + params["b"]) * batch["x"]), batch["x"].size, {}

    params = {"w": jnp.ones((8,)), "b": jnp.ones(())}
    for given in (
        None,
        own,
        jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), own),
    ):
        sums = accumulate(
            AccumulatedLoss(loss_fn, param_shardings=own),
            params,
            batch,
            2,
            mesh=mesh,
            param_shardings=given,
        )
        for name, size in (("w", 8), ("b", 1)):
            shards = [
                np.ravel(shard.data) for shard in sums.grads[name].addressable_shards
            ]
            assert len(shards) == 8
            assert all(
                (shard == 120).all() and shard.size in (size, size // axes.fsdp)
                for shard in shards
            )


def test_a_loss_whose_own_shardings_name_the_replicas_is_told_so():
    """Parameters sharded over the replicas by the loss are no matter of
    `shard_optimizer_over_data`.
    """
    mesh = toy.mesh_of("data")
    loss = AccumulatedLoss(
        linear_loss, param_shardings={"w": NamedSharding(mesh, PartitionSpec("data"))}
    )
    batch = {"x": jnp.ones((1, 8))}
    with pytest.raises(
        ConfigError,
        match=r"`param_shardings` cannot .* sharded over the replicas \(data\)",
    ):
        accumulate(loss, {"w": jnp.ones((8,))}, batch, 1, mesh=mesh)
    given = {"w": NamedSharding(mesh, PartitionSpec("data"))}
    with pytest.raises(ConfigError, match=r"shard_optimizer_over_data=true\) needs"):
        accumulate(
            loss, {"w": jnp.ones((8,))}, batch, 1, mesh=mesh, param_shardings=given
        )


def test_evaluation_drops_what_a_loss_carries():
    """A loss that returns `mutable` as another kind of dict evaluates: nothing goes on
    with what it returned.
    """
    mesh, params = toy.mesh_of("one"), {"w": jnp.ones(())}

    def loss_fn(params, batch, keys, mutable):
        return *linear_loss(params, batch, keys), {"n": mutable["n"] + 1}

    batch, options = (
        {"x": jnp.ones((1, 2))},
        {"mesh": mesh, "mutable": FrozenDict(n=jnp.float32(0))},
    )
    recipe = Recipe(mutable=options["mutable"])
    args = params, (batch, None), (jnp.int32(1), 1), recipe, mesh
    assert AccumulatedLoss(loss_fn).sums(*args).weight > 0
    for loss, words in (
        (loss_fn, "changed the structure"),
        (linear_loss, "cannot be called with 4 arguments"),
    ):
        with pytest.raises(ConfigError, match=words):
            accumulate(loss, params, batch, 1, **options)


CARRIED = {"n": np.float32(0)}


def test_carried_values_are_merged_to_the_same_on_all_replicas():
    """At the end, numbers are averaged, constants and infinities stay, counters and
    flags become their maximum; keys stay.
    """
    mesh = make_mesh(MeshAxes(data=3, tensor=2), jax.devices()[:6])
    batch = jax.device_put(
        {"x": np.array([[7, 1, 4], [9, 2, 1], [0, 0, 0]], np.float32)},
        batch_sharding(mesh, leading=1),
    )
    start = {
        "z": jnp.complex64(1j),
        "count": jnp.uint8(2),
        "large": jnp.bool(False),
        "key": jax.random.key(3),
    }
    start |= {
        "short": jnp.bfloat16(2),
        "number": jnp.int16(2),
        "digits": jnp.float32(0),
    }
    start |= {"constant": jnp.linspace(0.1, 3, 64), "maximum": jnp.full((2,), -jnp.inf)}

    def loss_fn(params, batch, keys, mutable):
        x = batch["x"].sum()
        new = {
            name: mutable[name] + x.astype(mutable[name].dtype)
            for name in ("z", "count", "short", "number")
        }
        maximum = mutable["maximum"].at[0].max(x)
        new |= {
            "large": x > 5,
            "maximum": maximum,
            "digits": 10 * mutable["digits"] + x,
        }
        return *linear_loss(params, batch, keys), mutable | new

    found = jax.jit(
        lambda: (
            accumulate(
                loss_fn, {"w": jnp.ones(())}, batch, 2, mesh=mesh, mutable=start
            ).mutable
        )
    )()
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(
        lambda x: x.dtype, start
    )
    for name, value in {
        "z": 8 + 1j,
        "count": 18,
        "large": True,
        "short": 10,
        "number": 18,
        "digits": 44,
    }.items():
        assert [shard.data.item() for shard in found[name].addressable_shards] == [
            value
        ] * 6
    assert (
        jax.random.key_data(found["key"]).tolist()
        == jax.random.key_data(start["key"]).tolist()
    )
    assert (np.asarray(found["constant"]) == np.asarray(start["constant"])).all()
    assert found["maximum"].tolist() == [5, -np.inf]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        (None, "returned a NoneType and not a tuple"),
        ({"loss": 1.0}, "returned a dict and not a tuple"),
        (2.0, "returned a scalar and not a tuple"),
        (np.ones(2), "returned one array and not a tuple"),
        ((1.0, 1.0), "returned 2 results and not 4"),
        (
            (np.ones(2), 1.0, {}, CARRIED),
            (
                r"returned float\d+\[2\] as loss_sum, which must be a floating-point"
                r" scalar"
            ),
        ),
        (
            (np.int32(3), 1.0, {}, CARRIED),
            r"returned int32\[\] as loss_sum, which must be a floating-point scalar",
        ),
        (
            (1.0, np.ones(2), {}, CARRIED),
            r"returned float\d+\[2\] as weight_sum, which must be a real scalar",
        ),
        (
            (1.0, 1.0, {}, FrozenDict(n=0.0)),
            r"changed the structure .*it was PyTreeDef.*'n'.* and is PyTreeDef",
        ),
        ((1.0, 1.0, {}, CARRIED | {"more": 1.0}), r"changed .*\['more'\] was None"),
        (
            (1.0, 1.0, {}, {"n": 0}),
            r"changed .*\['n'\] was float32\[\] and is int32\[\]",
        ),
    ],
)
def test_results_that_break_the_contract_are_errors_in_words(results, words):
    """The message says what the loss function returned, and what it must return with
    `mutable`.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        check_results(results, lambda *args: results, ({}, {}, None, CARRIED))
    assert (
        "(loss_sum, weight_sum, aux, mutable), because the state has `mutable`"
        in str(caught.value)
    )


def test_multi_steps_follows_the_plan():
    """K at every optimizer step is the plan's number of microbatches, also after a
    jump; steps beyond int32 are refused.
    """
    keys = {
        "splitter": BatchSplitter(data_parallel_size=2),
        "num_devices": 2,
        "total_steps": 50,
    }
    plan = RampPlan(ramp=BatchRamp.from_schedule("0:4 20:12 100:8"), **keys)
    every_k = jax.jit(multi_steps(optax.sgd(0.1), plan)._every_k_schedule)
    for step in range(50):
        assert (
            int(every_k(jnp.int32(step))) == plan.position(step).split.num_microbatches
        )
    with pytest.raises(RampDefinitionError, match="int32 step counter"):
        multi_steps(
            optax.sgd(1.0),
            RampPlan(ramp=BatchRamp.piecewise([(0, 2), (2**33, 4)]), **keys),
        )
    # It would swallow a microbatch without counting it.
    with pytest.raises(TypeError, match="skip_nonfinite"):
        multi_steps(optax.sgd(0.1), plan, should_skip_update_fn=optax.skip_not_finite)
