"""Tests of rampup.engine.step."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import toy
from helpers.toy import make_step

import rampup
from rampup.data.batches import step_batches
from rampup.engine import batch as buffers
from rampup.engine.contract import SummableLoss
from rampup.engine.mesh import replicated
from rampup.engine.state import create_state, prepare_state
from rampup.errors import ConfigError, DataError


def trained(mesh, plan, engine="fused"):
    """Train the toy; return losses and norms, the final state and the step."""
    step = make_step(
        toy.loss_fn,
        optax.adamw(1e-2),
        plan,
        mesh,
        engine=engine,
        seed=3,
    )
    state, found = toy.history(
        step,
        create_state(toy.new_params(mesh), step.tx, mesh),
        step.batches(toy.rows(), seed=5),
    )
    assert int(state.step) == plan.total_steps
    return (
        np.array([[metrics["loss"], metrics.get("grad_norm", 0)] for metrics in found]),
        state,
        step,
    )


@pytest.fixture(scope="module")
def reference():
    """The losses, norms and parameters of a plain big-batch loop on one device, without
    any of our step.
    """
    mesh, tx = toy.mesh_of("one"), optax.adamw(1e-2)
    params, found = toy.new_params(mesh), []
    state = tx.init(params)

    @jax.jit
    def update(params, state, whole, number):
        base = jax.random.fold_in(jax.random.key(3), number)
        keys = jax.vmap(lambda row: jax.random.fold_in(base, row))(
            jnp.arange(len(whole["x"]))
        )

        def mean(params):
            loss, weight, _ = toy.loss_fn(params, whole, keys)
            return loss / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return (
            optax.apply_updates(params, updates),
            state,
            [loss, optax.tree.norm(grads)],
        )

    for number, batch in enumerate(
        step_batches(toy.rows(), toy.plan_for(mesh), mesh, seed=5)
    ):
        size = batch.position.split.global_batch_size
        whole = jax.tree.map(
            lambda *x, n=size: np.concatenate(x).reshape(-1, *x[0].shape[2:])[:n],
            *batch.chunks,
        )
        params, state, values = update(params, state, whole, number)
        found.append(values)
    return np.array(found), params


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "splitter", "limit", "compilations"),
    [
        *((name, {}, buffers.MAX_WHOLE, 1) for name in toy.MESHES),
        ("data", {"rampup_microbatch": "per_phase"}, buffers.MAX_WHOLE, 3),
        ("data", {"rampup_microbatch": "auto"}, buffers.MAX_WHOLE, 2),
        ("one", {"microbatch_size": 1}, 0, 1),
    ],
)
def test_fused_step_equals_the_full_batch(
    name, splitter, limit, compilations, reference, monkeypatch
):
    """On every mesh, in any shapes and chunks, three phases give a plain loop's losses,
    with one program for each shape.
    """
    monkeypatch.setattr(buffers, "MAX_WHOLE", limit)
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh, **splitter)
    found, state, step = trained(mesh, plan)
    np.testing.assert_allclose(found, reference[0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        state.params,
        reference[1],
    )
    assert step.num_compilations == plan.num_compiled_shapes == compilations


@pytest.mark.parametrize(
    ("name", "limit"), [("one", 0), ("data_fsdp_tensor", buffers.MAX_WHOLE)]
)
def test_step_copies_nothing_to_the_devices(name, limit, monkeypatch):
    """The steps of a phase after its first take everything from the devices: state,
    batch and the numbers of microbatches.
    """
    monkeypatch.setattr(buffers, "MAX_WHOLE", limit)
    (step, state), phases = toy.start(name, schedule="0:16 64:32 200:48"), set()
    for batch in step.batches(toy.rows()):
        is_new = batch.position.phase.index not in phases
        with jax.transfer_guard_host_to_device(
            "allow" if is_new else "disallow_explicit"
        ):
            state, _ = step(state, batch)
        phases.add(batch.position.phase.index)
    assert len(phases) == 3


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
def test_multi_steps_compiles_once_and_averages_microbatches(name, reference):
    """With unequal weights, its average of averages is near the token mean; its
    accumulators are sharded as parameters are.
    """
    mesh = toy.mesh_of(name)
    found, state, step = trained(mesh, toy.plan_for(mesh), engine="multi_steps")
    assert step.num_compilations == 1
    losses = found[:, 0], reference[0][:, 0]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    assert not np.allclose(*losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: a.sharding.spec == b.sharding.spec or pytest.fail(a),
        state.opt_state.acc_grads,
        state.params,
    )


@pytest.mark.parametrize("name", ["one", "data"])
def test_step_names_its_parts_for_profiles(name):
    """The operations of a step are grouped as accumulate, microbatch, reduce (with
    several replicas) and update.
    """
    step, state = toy.start(name, tx=optax.adamw(1e-2))
    split = next(step.batches(toy.rows())).position.split
    hlo = step.lower(state, toy.rows(1)[0], split).compile().as_text()
    assert re.search(r'op_name="[^"]*/accumulate/[^"]*microbatch', hlo)
    assert re.search(r'op_name="[^"]*/update/', hlo)
    assert bool(re.search(r'op_name="[^"]*/accumulate/[^"]*reduce/psum', hlo)) == (
        name == "data"
    )


@pytest.mark.core
def test_every_phase_runs_in_its_planned_shape():
    """A step waits for the program of its phase, which is traced in the phases before;
    each shape is compiled once.
    """
    step, state = toy.start(
        schedule="0:8 16:16 64:32", steps=10, rampup_microbatch="per_phase"
    )
    batches = list(step.batches(toy.rows()))
    assert [batch.position.split.microbatch_size for batch in batches] == (
        [8] * 2 + [16] * 3 + [32] * 5
    )
    state, _ = step(state, batches[0])
    assert {*step._programs.compiler._programs} == {8}
    assert {*step._programs.compiler._lowered} == {16, 32}
    toy.history(step, state, batches[1:])
    assert step.num_compilations == 3


def test_a_loss_that_a_later_phase_cannot_trace_fails_at_once():
    """What the loss raises for the microbatches of a later phase reaches the user in
    the first step, as it is.
    """

    def loss(params, batch, keys):
        return toy.loss_fn(params, batch, keys) if len(keys) < 32 else 1 / 0

    step, state = toy.start(
        loss=loss, schedule="0:8 16:16 64:32", rampup_microbatch="per_phase", steps=10
    )
    with pytest.raises(ZeroDivisionError):
        toy.train(step, state, steps=1)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_dropout_does_not_depend_on_the_split_with_hardware_generators(impl):
    """With the generators that TPU users choose, 4 microbatches of one row and 1 of
    four rows draw the same numbers.
    """
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", impl)
    try:
        found = []
        for size in (1, 4):
            state, metrics = toy.train(
                *toy.start(schedule="0:4", steps=1, microbatch_size=size)
            )
            found.append((float(metrics["loss"]), jax.device_get(state.params)))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            found[0][1],
            found[1][1],
        )
    finally:
        jax.config.update("jax_default_prng_impl", before)


def batch_of_arrays(step, number=None, **changes):
    """Return a batch of 16 rows made from arrays, some of them replaced."""
    return step.batch(toy.stacked(toy.rows(16)) | changes, step=number)


def test_batch_of_arrays_goes_on_with_a_restored_state():
    """A new step object does not know where a run was; the state does, and the error
    says how to give it.
    """
    step, state = toy.start()
    restored = prepare_state(state.replace(step=jnp.int32(3)), toy.mesh_of("one"))
    with pytest.raises(DataError, match=r"step.batch\(arrays, step=state.step\)"):
        step(restored, batch_of_arrays(step))
    state, _ = step(restored, batch_of_arrays(step, restored.step))
    assert int(step(state, batch_of_arrays(step))[0].step) == 5


def test_multi_steps_of_ones_own_is_refused():
    """An `optax.MultiSteps` as the optimizer would update the parameters in every k-th
    step of the plan only.
    """
    with pytest.raises(
        ConfigError,
        match=r"several of its steps; give the optimizer inside it",
    ):
        toy.start(tx=optax.MultiSteps(optax.sgd(0.1), 2))
    other = toy.plan_for(toy.mesh_of("one"), "0:32")
    with pytest.raises(ConfigError, match="does not follow this plan"):
        toy.start(tx=rampup.multi_steps(optax.sgd(0.1), other))


@pytest.mark.parametrize(
    "make",
    [
        lambda k, plan: k.gradient_transformation(),
        lambda k, plan: optax.chain(optax.clip(1.0), k.gradient_transformation()),
        lambda k, plan: optax.masked(k.gradient_transformation(), lambda params: True),
        lambda k, plan: rampup.multi_steps(k, plan),
        lambda k, plan: rampup.multi_steps(rampup.multi_steps(k, plan), plan),
    ],
    ids=["transformation", "chain", "masked", "multi_steps", "twice"],
)
def test_multi_steps_within_an_optimizer_is_refused(make):
    """It would update the parameters in every k-th step only."""
    mesh = toy.mesh_of("one")
    k = optax.MultiSteps(optax.sgd(0.1), 2)

    def train():
        step, state = toy.start(tx=make(k, toy.plan_for(mesh, "0:16")))
        step(state, batch_of_arrays(step))

    with pytest.raises(ConfigError, match=r"has an optax\.MultiSteps in it"):
        train()


def test_arguments_that_are_gone_name_what_replaces_them():
    """A step of an earlier version says what to write, and a slip that it is none."""
    mesh = toy.mesh_of("one")
    plan, tx = toy.plan_for(mesh), optax.sgd(0.1)
    for name, words in {
        "engine": r"multi_steps\(tx, plan\)",
        "batch_axes": r"AccumulatedLoss\(loss_fn, batch_axes=",
        "whole_batch": r"plan.with_whole_batches\(\)",
        "shard_optimizer_over_data": "create_state",
        "wait_for_compilation": "waits for its own program",
        "sed": "unexpected keyword argument 'sed'",
    }.items():
        with pytest.raises(TypeError, match=words):
            rampup.train_step(toy.loss_fn, tx, plan, mesh, **{name: None})
    batch = {"x": np.ones((1, 2))}
    with pytest.raises(TypeError, match="AccumulatedLoss"):
        rampup.accumulate(toy.loss_fn, {}, batch, 1, mesh=mesh, whole_batch=True)


def test_states_of_another_step_are_refused():
    """Of the other engine, inside of an accumulation, at another step of the optimizer,
    of another optimizer, or donated.
    """
    (fused, plain), (multi, wrapped) = (
        toy.start(engine=engine) for engine in ("fused", "multi_steps")
    )
    mesh = toy.mesh_of("one")
    inside, ahead = (
        wrapped.opt_state._replace(**{name: jnp.int32(1)})
        for name in ("mini_step", "gradient_step")
    )
    for step, state, words in (
        (fused, wrapped, r"create_state\(params, step.tx, mesh\)"),
        (multi, plain, r"create_state\(params, step.tx, mesh\)"),
        (multi, wrapped.replace(opt_state=inside), "microbatch 1 of step 0"),
        (multi, wrapped.replace(opt_state=ahead), "must be equal"),
        (
            fused,
            toy.flax_state()(plain.params, optax.sgd(1.0)),
            "another tx than the step",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            step(prepare_state(state, mesh), batch_of_arrays(step))
    batch = batch_of_arrays(fused)
    fused(plain, batch)
    with pytest.raises(ConfigError, match="donated to an earlier step"):
        fused(plain, batch)


def test_state_with_two_carried_fields_is_refused():
    """A loss function carries one value; the other field would be ignored."""
    kind = collections.namedtuple("State", "step params opt_state mutable batch_stats")
    with pytest.raises(ConfigError, match="both mutable and batch_stats"):
        prepare_state(
            kind(0, {}, (), {"a": np.float32(0)}, {"b": np.float32(0)}),
            toy.mesh_of("one"),
        )


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_state_or_rows_of_another_kind_are_named(engine):
    """A step compiles for one kind of state and rows. JAX names the arrays that
    differ.
    """
    mesh = toy.mesh_of("data_fsdp_tensor")
    step, state = toy.start("data_fsdp_tensor", engine=engine)
    state, _ = step(state, batch_of_arrays(step))
    whole = jax.tree.map(lambda p: jax.device_put(p, replicated(mesh)), state.params)
    for params in (
        whole,
        jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params),
        {**state.params, "more": jnp.ones(2)},
    ):
        with pytest.raises((TypeError, ValueError), match=r"(in|more)\b"):
            step(state.replace(params=params), batch_of_arrays(step))
    with pytest.raises(TypeError, match="'x'"):
        step(state, batch_of_arrays(step, x=np.ones((16, toy.WIDTH), np.int32)))


@pytest.mark.parametrize(
    ("engine", "skips"), [("fused", True), ("multi_steps", True), ("fused", False)]
)
def test_weight_of_zero_keeps_parameters_and_not_what_is_carried(engine, skips):
    """The gradient and the loss are 0, not NaN. With `skip_nonfinite`, decay does not
    act, and that is no skipped step.
    """

    def loss(params, batch, keys, carried):
        return *toy.loss_fn(params, batch, keys), {"count": carried["count"] + 1}

    options = {
        "mutable": {"count": np.float32(0)},
        "engine": engine,
        "skip_nonfinite": skips,
    }
    step, state = toy.start(
        loss=loss, tx=optax.adamw(0.1, weight_decay=0.5 * skips), **options
    )
    before = jax.device_get((state.params, optax.tree.get(state.opt_state, "mu")))
    state, metrics = step(state, batch_of_arrays(step, weight=np.zeros(16, np.float32)))
    jax.tree.map(
        np.testing.assert_array_equal,
        before,
        jax.device_get((state.params, optax.tree.get(state.opt_state, "mu"))),
    )
    assert (
        float(state.mutable["count"]),
        int(state.step),
        metrics.get("skipped", False),
    ) == (1, 1, False)
    assert float(metrics["loss"]) == 0


@pytest.mark.parametrize("field", ["dynamic_scale", "frozen"])
def test_loss_of_ones_own_without_what_the_state_needs_is_named(field):
    """A loss that only sums itself has no function to bind frozen arrays to, or to
    scale. The error names the field.
    """

    class Own(SummableLoss):
        check = sums = lambda self, *args, **options: None

    mesh = toy.mesh_of("one")
    step, _ = toy.start(loss=Own())
    kind = collections.namedtuple("State", ["step", "params", "opt_state", field])
    state = kind(
        0, toy.new_params(mesh), step.tx.init(toy.new_params(mesh)), DynamicScale()
    )
    with pytest.raises(
        ConfigError,
        match=f"`{field}`, which .* does not support",
    ):
        step(prepare_state(state, mesh), batch_of_arrays(step))


def test_loss_with_the_methods_of_a_summable_loss_is_told_to_be_one():
    """A class of the same methods that is no subclass is refused with its name."""

    class Own:
        check = sums = lambda self, *args, **options: None

    with pytest.raises(
        ConfigError, match=r"a subclass of rampup\.engine\.contract\.SummableLoss"
    ):
        toy.start(loss=Own())


@pytest.mark.parametrize("mesh_name", ["one", "data", "data_fsdp_tensor"])
def test_the_keys_of_an_evaluation_follow_the_place_of_a_row(mesh_name):
    """However the rows are cut: what is left over has keys of its own, too."""
    mesh, number = toy.mesh_of(mesh_name), 43

    def loss(params, batch, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return params * jnp.sum(noise), len(keys), {}

    evaluate = rampup.EvalStep(loss, mesh)
    state = rampup.create_state(jnp.float32(1), optax.sgd(0.1), mesh)
    found = []
    for size in (8, 16, 40):
        batches = list(evaluate.batches(toy.rows(number), size))
        sums = jax.device_get([evaluate(state, batch) for batch in batches])
        found.append(np.sum(sums, axis=0))
        firsts = [int(np.ravel(batch.chunks[0]["id"])[0]) for batch in batches]
        assert [batch.position.consumed_samples for batch in batches] == firsts
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5)
    assert len({float(loss) for loss, _ in sums}) == len(sums)


@pytest.mark.parametrize("mesh_name", ["data", "one"])
def test_state_of_another_mesh_is_refused(mesh_name):
    """A state on a part of the devices, or on more, is named."""
    step, _ = toy.start(mesh_name)
    other = toy.mesh_of("one" if mesh_name == "data" else "data")
    state = rampup.create_state(toy.new_params(other), step.tx, other)
    with pytest.raises(ConfigError, match=r"state\.step is on other devices than the"):
        step(state, batch_of_arrays(step))


@pytest.mark.parametrize(
    ("mesh_name", "field"), [("data", "opt_state"), ("fsdp", "step")]
)
def test_state_made_by_hand_on_several_devices_is_refused(mesh_name, field):
    """With several devices, an array on one device is an error that names it and says
    how to place it.
    """
    tx = optax.adam(0.1)
    step, state = toy.start(mesh_name, tx=tx)
    by_hand = {
        "opt_state": tx.init(toy.new_params(toy.mesh_of("one"))),
        "step": jax.device_put(0, jax.devices()[0]),
    }
    words = {
        "opt_state": r"state\.opt_state\[0\]\.count is on other devices",
        "step": r"state\.step is on other devices",
    }
    with pytest.raises(
        ConfigError,
        match=(
            rf"{words[field]} than the mesh; place the state with rampup.prepare_state\(state,"
            r" mesh\)"
        ),
    ):
        step(state.replace(**{field: by_hand[field]}), batch_of_arrays(step))
