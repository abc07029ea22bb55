"""Tests of rampup.engine.step."""

import dataclasses
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState as LinenTrainState
from helpers import toy

from rampup.data.batches import step_batches
from rampup.engine import batch as buffers
from rampup.engine.mesh import make_mesh, replicated
from rampup.engine.state import create_state, prepare_state
from rampup.engine.step import EvalStep, train_step
from rampup.engine.update import all_finite, select_step
from rampup.errors import ConfigError, DataError


def losses(mesh, plan, engine="fused", tx=None, number_of_rows=400, **options):
    """Train the toy and return its losses, final parameters and step."""
    step = train_step(toy.loss_fn, tx or optax.adamw(1e-2), plan, mesh, engine=engine, seed=3)
    state = create_state(toy.new_params(mesh), step.tx, mesh)
    found = []
    for batch in step_batches(
        toy.rows(number_of_rows), plan, mesh, seed=5, chunk_size=1 if engine == "multi_steps" else None, **options
    ):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert int(state.step) == plan.total_steps
    return found, jax.device_get(state.params), step


@pytest.fixture(scope="module")
def reference():
    """The losses of a plain big-batch loop on one device, without any of our step."""
    mesh = toy.mesh_of("one")
    plan, tx = toy.plan_for(mesh), optax.adamw(1e-2)
    params = toy.new_params(mesh)
    state = tx.init(params)

    @jax.jit
    def update(params, state, whole, number):
        base = jax.random.fold_in(jax.random.key(3), number)
        keys = jax.vmap(lambda row: jax.random.fold_in(base, row))(jnp.arange(len(whole["x"])))

        def mean(params):
            loss, weight, _ = toy.loss_fn(params, whole, keys)
            return loss / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    found = []
    for number, batch in enumerate(step_batches(toy.rows(), plan, mesh, seed=5)):
        size = batch.position.split.global_batch_size
        whole = {
            name: np.concatenate([chunk[name] for chunk in batch.chunks]).reshape(-1, *batch.chunks[0][name].shape[2:])
            for name in batch.chunks[0]
        }
        whole = {name: x[:size] for name, x in whole.items()}
        params, state, loss = update(params, state, whole, number)
        found.append(float(loss))
    return found, jax.device_get(params)


@pytest.mark.parametrize("name", toy.MESHES)
def test_fused_step_equals_the_full_batch_on_every_mesh(name, reference):
    """Three phases in one executable give the losses and parameters of a plain full-batch loop, on every mesh."""
    mesh = toy.mesh_of(name)
    found, params, step = losses(mesh, toy.plan_for(mesh))
    np.testing.assert_allclose(found, reference[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, reference[1])
    assert step.num_compilations == 1


@pytest.mark.parametrize(("mode", "compilations"), [("fixed", 1), ("per_phase", 3), ("auto", 2)])
def test_step_compiles_once_per_shape(mode, compilations, reference):
    """The number of executables is the plan's number of shapes, and the losses do not depend on the shapes."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh, rampup_microbatch=mode)
    found, _, step = losses(mesh, plan)
    assert step.num_compilations == plan.num_compiled_shapes == compilations
    np.testing.assert_allclose(found, reference[0], rtol=1e-5)


def test_step_pads_chunks(reference, monkeypatch):
    """Forty-eight microbatches per step, in chunks of which the last is partly padding, change nothing."""
    monkeypatch.setattr(buffers, "MAX_WHOLE", 0)
    mesh = toy.mesh_of("one")
    found, _, step = losses(mesh, toy.plan_for(mesh, microbatch_size=1))
    np.testing.assert_allclose(found, reference[0], rtol=1e-5)
    assert step.num_compilations == 1


@pytest.mark.parametrize(("name", "limit"), [("one", 0), ("data_fsdp_tensor", buffers.MAX_WHOLE)])
def test_step_copies_nothing_to_the_devices(name, limit, monkeypatch):
    """The steps of a phase after its first take everything from the devices: state, batch and the numbers of microbatches."""
    monkeypatch.setattr(buffers, "MAX_WHOLE", limit)
    (step, state), phases = toy.start(name, schedule="0:16 64:32 200:48"), set()
    for batch in step.batches(toy.rows()):
        is_new = batch.position.phase.index not in phases
        with jax.transfer_guard_host_to_device("allow" if is_new else "disallow_explicit"):
            state, _ = step(state, batch)
        phases.add(batch.position.phase.index)
    assert len(phases) == 3


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
def test_multi_steps_compiles_once_and_averages_microbatches(name, reference):
    """MultiSteps compiles once too. With unequal weights, its average of averages is near the token mean, but not equal."""
    mesh = toy.mesh_of(name)
    found, _, step = losses(mesh, toy.plan_for(mesh), engine="multi_steps")
    assert step.num_compilations == 1
    np.testing.assert_allclose(found, reference[0], rtol=1e-2)
    assert not np.allclose(found, reference[0], rtol=1e-5)


def test_multi_steps_shards_accumulators_like_parameters():
    """The accumulators of MultiSteps are sharded over fsdp and tensor."""
    mesh = toy.mesh_of("data_fsdp_tensor")
    step = train_step(toy.loss_fn, optax.adamw(1e-2), toy.plan_for(mesh), mesh, engine="multi_steps")
    state = create_state(toy.new_params(mesh), step.tx, mesh)
    assert {name: leaf.sharding.spec for name, leaf in state.opt_state.acc_grads.items()} == {
        name: leaf.sharding.spec for name, leaf in state.params.items()
    }


def test_prepare_state_lets_a_flax_train_state_compile_once():
    """A prepared Flax TrainState runs the whole ramp in one executable and counts optimizer steps."""
    mesh = toy.mesh_of("data")
    plan, tx = toy.plan_for(mesh), optax.sgd(0.01)
    stock = LinenTrainState.create(apply_fn=lambda *_: None, params=toy.new_params(toy.mesh_of("one")), tx=tx)
    state = prepare_state(stock, mesh)
    step = train_step(toy.loss_fn, tx, plan, mesh)
    for batch in step_batches(toy.rows(), plan, mesh):
        state, metrics = step(state, batch)
    assert isinstance(state, LinenTrainState)
    assert (int(state.step), state.step.dtype, step.num_compilations) == (12, jnp.int32, 1)
    assert set(metrics) == {"loss", "weight", "grad_norm", "aux"}
    assert int(metrics["aux"]["rows"]) == 48


def test_step_with_zero_weight_changes_nothing():
    """Zero weight gives a zero gradient and a zero loss, not NaN."""
    step, state = toy.start()
    before = jax.device_get(state.params)
    state, metrics = toy.train(step, state, steps=2, data=[row | {"weight": np.float32(0)} for row in toy.rows()])
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert float(metrics["loss"]) == 0


def test_grad_norm_is_the_norm_of_the_mean_gradient():
    """`grad_norm` is the global norm of the gradient of the weighted mean."""
    step, state = toy.start("data", tx=optax.sgd(1.0))
    before = jax.device_get(state.params)
    state, metrics = toy.train(step, state, steps=1)
    change = jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params))
    norm = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(change)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)


def test_eval_step_sums_losses_and_weights():
    """EvalStep sums losses and weights over the microbatches of a batch."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh, "0:48", steps=2, microbatch_size=2)

    def no_dropout(params, batch, rngs):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        error = jnp.sum((hidden @ params["out"] - batch["x"]) ** 2, axis=-1)
        return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {}

    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)
    evaluate = EvalStep(no_dropout, mesh)
    sums = np.sum([jax.device_get(evaluate(state, batch)) for batch in step_batches(toy.rows(96), plan, mesh)], axis=0)
    rows = toy.rows(96)
    whole = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    loss, weight, _ = no_dropout(jax.device_get(state.params), whole, None)
    np.testing.assert_allclose(sums, [loss, weight], rtol=1e-5)


@pytest.mark.parametrize("name", ["one", "data"])
def test_step_names_its_parts_for_profiles(name):
    """The operations of a step are grouped as accumulate, microbatch, reduce (with several replicas) and update."""
    mesh = toy.mesh_of(name)
    plan, tx = toy.plan_for(mesh), optax.adamw(1e-2)
    step = train_step(toy.loss_fn, tx, plan, mesh)
    lowered = step.lower(create_state(toy.new_params(mesh), tx, mesh), toy.rows(1)[0], plan.splits[0])
    hlo = lowered.compile().as_text()
    assert re.search(r'op_name="[^"]*/accumulate/[^"]*microbatch', hlo)
    assert re.search(r'op_name="[^"]*/update/', hlo)
    assert bool(re.search(r'op_name="[^"]*/accumulate/[^"]*reduce/psum', hlo)) == (name == "data")


def test_train_step_refuses_an_unknown_engine():
    """The error for an unknown engine names both engines."""
    mesh = make_mesh()
    with pytest.raises(ConfigError, match="must be one of fused, multi_steps"):
        train_step(toy.loss_fn, optax.sgd(0.1), toy.plan_for(mesh), mesh, engine="multistep")


def test_split_for_falls_back_while_the_program_compiles():
    """While the next shape is being compiled, the phase runs in the old shape with more passes, on the same rows."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh, "0:16 64:32 200:64", steps=14, rampup_microbatch="per_phase")
    tx = optax.sgd(0.05)
    gate, used = threading.Event(), []
    step = train_step(toy.loss_fn, tx, plan, mesh)
    step._compiler.compile_async("gate", lambda: (gate.wait(), jax.jit(jnp.sin).lower(np.float32(1)))[1])
    state = create_state(toy.new_params(mesh), tx, mesh)
    for batch in step_batches(toy.rows(), plan, mesh, seed=3, split_for=step.split_for):
        used.append((batch.position.split.global_batch_size, batch.position.split.microbatch_size))
        state, _ = step(state, batch)
        if len(used) == 7:
            gate.set()
            while not step._compiler.is_ready(8 * plan.splits[2].microbatch_size):
                pass
    assert used[:4] == [(16, 2)] * 4
    assert used[4:8] == [(32, 2)] * 4
    assert used[-1] == (64, 8)
    fixed = toy.plan_for(mesh, "0:16 64:32 200:64", steps=14)
    other = train_step(toy.loss_fn, tx, fixed, mesh)
    wanted = create_state(toy.new_params(mesh), tx, mesh)
    for batch in step_batches(toy.rows(), fixed, mesh, seed=3):
        wanted, _ = other(wanted, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.params, wanted.params)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_checks_every_leaf(bad):
    """One NaN or infinity in any leaf is found; integers and an empty tree are finite."""
    assert all_finite({"a": jnp.ones(3)}, jnp.int32(2), None)
    assert all_finite()
    assert not all_finite({"a": jnp.ones(3)}, [jnp.array([1.0, bad])])
    assert not all_finite(jnp.array([bad], jnp.bfloat16))


def test_select_step_keeps_schedule_counts():
    """The old state is selected, except for the counts of schedules."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: 1.0))
    old = tx.init(jnp.ones(2))
    _, new = tx.update(jnp.ones(2), old)
    kept = select_step(jnp.array(False), new, old)
    assert (int(kept[0].count), int(kept[1].count)) == (0, 1)
    np.testing.assert_array_equal(kept[0].mu, old[0].mu)
    np.testing.assert_array_equal(select_step(jnp.array(True), new, old)[0].mu, new[0].mu)


def sizes_used(step, plan, mesh, *, steps=None, between=lambda number: None):
    """Return the microbatch size of every step of a run."""
    state, used = create_state(toy.new_params(mesh), step.tx, mesh), []
    for batch in step_batches(toy.rows(), plan, mesh, stop=steps, split_for=step.split_for):
        between(len(used))
        used.append(batch.position.split.microbatch_size)
        state, _ = step(state, batch)
    return used


def test_split_for_never_returns_to_an_earlier_shape():
    """The look-ahead of the reader does not take a planned shape before it is compiled and then go back."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, "0:8 16:16 64:32", steps=30, rampup_microbatch="per_phase")
    used = sizes_used(train_step(toy.loss_fn, optax.sgd(0.05), plan, mesh), plan, mesh)
    assert used == sorted(used)
    assert used[0] == 8


def test_split_for_replays_the_steps_of_a_checkpoint():
    """A step that is given the changes of an earlier run repeats them, whatever is compiled when."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, "0:8 16:16", steps=12, rampup_microbatch="per_phase")
    step = train_step(toy.loss_fn, optax.sgd(0.05), plan, mesh)
    step.replay_shape_changes({8: 0, 16: 9})
    assert sizes_used(step, plan, mesh) == [8] * 9 + [16] * 3
    assert step.shape_changes == {8: 0, 16: 9}


@pytest.mark.parametrize("rampup_microbatch", ["per_phase", "auto"])
def test_wait_for_compilation_takes_every_planned_shape(rampup_microbatch):
    """With `wait_for_compilation` the shapes are those of the plan at every step, even if compilation is slow."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, "0:8 16:16 64:32", steps=10, rampup_microbatch=rampup_microbatch)
    step = train_step(toy.loss_fn, optax.sgd(0.05), plan, mesh, wait_for_compilation=True)
    slow = lambda: (time.sleep(0.5), jax.jit(jnp.sin).lower(np.float32(1)))[1]  # noqa: E731
    step._compiler.compile_async("slow", slow)
    used = sizes_used(step, plan, mesh)
    assert used == [plan.position(number).split.microbatch_size for number in range(10)]


def test_several_processes_wait_for_compilation(monkeypatch):
    """Several processes would change shapes at different steps, so they always wait."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, "0:8 16:16", steps=4, rampup_microbatch="per_phase")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    step = train_step(toy.loss_fn, optax.sgd(0.05), plan, mesh)
    assert [step.split_for(plan.position(number)).microbatch_size for number in range(4)] == [8, 8, 16, 16]
    with pytest.raises(ConfigError, match="single process"):
        train_step(toy.loss_fn, optax.sgd(0.05), plan, mesh, wait_for_compilation=False)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_dropout_does_not_depend_on_the_split_with_hardware_generators(impl):
    """With the generators that TPU users choose, 4 microbatches of one row and 1 of four rows draw the same numbers."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", impl)
    try:
        mesh = make_mesh(devices=jax.devices()[:1])
        params = toy.new_params(mesh)
        found = []
        for size in (1, 4):
            plan = toy.plan_for(mesh, "0:4", steps=1, microbatch_size=size)
            step = train_step(toy.loss_fn, optax.sgd(0.1), plan, mesh)
            state, metrics = step(create_state(params, step.tx, mesh), next(iter(step.batches(toy.rows(4)))))
            found.append((float(metrics["loss"]), jax.device_get(state.params)))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0][1], found[1][1])
    finally:
        jax.config.update("jax_default_prng_impl", before)


def batch_of_arrays(step, number=None, **changes):
    """Return a batch of 16 rows made from arrays, some of them replaced."""
    arrays = {name: np.stack([row[name] for row in toy.rows(16)]) for name in toy.rows(1)[0]}
    return step.batch(arrays | changes, step=number)


def test_batch_of_arrays_goes_on_with_a_restored_state():
    """A new step object does not know where a run was; the state does, and the error says how to give it."""
    step, state = toy.start()
    restored = prepare_state(state.replace(step=jnp.int32(3)), toy.mesh_of("one"))
    with pytest.raises(DataError, match=r"step.batch\(arrays, step=state.step\)"):
        step(restored, batch_of_arrays(step))
    state, _ = step(restored, batch_of_arrays(step, restored.step))
    assert int(step(state, batch_of_arrays(step))[0].step) == 5


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
@pytest.mark.parametrize("make", [lambda tx: tx, lambda tx: tx.gradient_transformation()])
def test_multi_steps_of_ones_own_is_refused(engine, make):
    """An `optax.MultiSteps` as the optimizer would update the parameters in every k-th step of the plan only."""
    with pytest.raises(ConfigError, match=r"several optimizer steps of the plan; give the optimizer inside it"):
        toy.start(tx=make(optax.MultiSteps(optax.sgd(0.1), 2)), engine=engine)


def test_state_of_the_other_engine_is_refused():
    """The optimizer's state is made with the `tx` of the step, which differs between the engines."""
    (fused, plain), (multi, wrapped) = (toy.start(engine=engine) for engine in ("fused", "multi_steps"))
    for step, state in ((fused, wrapped), (multi, plain)):
        with pytest.raises(ConfigError, match=r"create_state\(params, step.tx, mesh\)"):
            step(state, batch_of_arrays(step))


@pytest.mark.parametrize(("name", "words"), [("mini_step", "microbatch 1 of step 0"), ("gradient_step", "must be equal")])
def test_multi_steps_begins_with_whole_steps(name, words):
    """A state inside an accumulation, or whose optimizer counts other steps, would leave the plan."""
    step, state = toy.start(engine="multi_steps")
    state = state.replace(opt_state=state.opt_state._replace(**{name: jnp.int32(1)}))
    with pytest.raises(ConfigError, match=words):
        step(prepare_state(state, toy.mesh_of("one")), batch_of_arrays(step))


def test_state_with_two_carried_fields_is_refused():
    """A loss function carries one value; the other field would be ignored."""
    mesh = toy.mesh_of("one")
    step, _ = toy.start()
    state = LinenTrainState.create(apply_fn=None, params=toy.new_params(mesh), tx=step.tx)
    fields = [("step", int), ("params", dict), ("opt_state", tuple), ("mutable", dict), ("batch_stats", dict)]
    kind = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Both", fields, frozen=True))
    state = kind(state.step, state.params, state.opt_state, {"a": np.float32(0)}, {"b": np.float32(0)})
    with pytest.raises(ConfigError, match="both mutable and batch_stats"):
        prepare_state(state, mesh)


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_state_or_rows_of_another_kind_are_named(engine):
    """A step compiles for one kind of state and rows. JAX names the arrays that differ, the error says what to do."""
    mesh = toy.mesh_of("data_fsdp_tensor")
    step, state = toy.start("data_fsdp_tensor", engine=engine)
    state, _ = step(state, batch_of_arrays(step))
    whole = jax.tree.map(lambda p: jax.device_put(p, replicated(mesh)), state.params)
    for params in (whole, jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params), {**state.params, "more": jnp.ones(2)}):
        with pytest.raises(ConfigError, match="make another step for them"):
            step(state.replace(params=params), batch_of_arrays(step))
    with pytest.raises(ConfigError, match=r"(?s)make another step for them.*'x'"):
        step(state, batch_of_arrays(step, x=np.ones((16, toy.WIDTH), np.int32)))


def test_donated_state_is_named():
    """A state that an earlier step has consumed is an error that says so."""
    step, state = toy.start()
    batch = batch_of_arrays(step)
    step(state, batch)
    with pytest.raises(ConfigError, match="donated to an earlier step"):
        step(state, batch)


@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_weight_of_zero_keeps_parameters_and_not_what_is_carried(engine):
    """With `skip_nonfinite`, decay does not act without a weight, and that is no skipped step."""

    def loss(params, batch, keys, carried):
        return *toy.loss_fn(params, batch, keys), {"count": carried["count"] + 1}

    options = {"mutable": {"count": np.float32(0)}, "engine": engine, "skip_nonfinite": True}
    step, state = toy.start(loss=loss, tx=optax.adamw(0.1, weight_decay=0.5), **options)
    before = jax.device_get((state.params, optax.tree.get(state.opt_state, "mu")))
    state, metrics = step(state, batch_of_arrays(step, weight=np.zeros(16, np.float32)))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, optax.tree.get(state.opt_state, "mu"))))
    assert (float(state.mutable["count"]), int(state.step), bool(metrics["skipped"])) == (1, 1, False)


@pytest.mark.parametrize("field", ["dynamic_scale", "frozen"])
def test_loss_of_ones_own_without_what_the_state_needs_is_named(field):
    """A loss that only sums itself has no function to bind frozen arrays to, or to scale. Each error has a fix of its own."""

    class Own:
        check = sums_and_grads = eval_sums = lambda self, *args, **options: None

    mesh = toy.mesh_of("one")
    step, _ = toy.start(loss=Own())
    fields = [("step", int), ("params", dict), ("opt_state", tuple), (field, dict)]
    kind = jax.tree_util.register_dataclass(dataclasses.make_dataclass("State", fields, frozen=True))
    state = kind(0, toy.new_params(mesh), step.tx.init(toy.new_params(mesh)), DynamicScale())
    with pytest.raises(ConfigError, match="scale the loss" if field == "dynamic_scale" else "keep such arrays"):
        step(prepare_state(state, mesh), batch_of_arrays(step))


def test_disable_jit_works_on_a_mesh_with_explicit_axes():
    """Without compilation a step runs on the automatic view of the mesh too."""
    kinds = (jax.sharding.AxisType.Explicit,) * 4
    mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "stage"), axis_types=kinds, devices=jax.devices()[:1])
    plan, one = toy.plan_for(mesh, "0:2", steps=1), toy.mesh_of("one")
    step = train_step(toy.loss_fn, optax.sgd(0.1), plan, mesh)
    state = create_state(toy.new_params(one), step.tx, mesh)
    with jax.set_mesh(mesh), jax.disable_jit():
        assert np.isfinite(step(state, next(step.batches(toy.rows())))[1]["loss"])


def test_evaluation_takes_batches():
    """Rows that are no Batch are an error of ours."""
    _, state = toy.start()
    with pytest.raises(DataError, match="takes a Batch"):
        EvalStep(toy.loss_fn, toy.mesh_of("one"))(state, toy.rows(4))


@pytest.mark.parametrize(("mesh_name", "field"), [("data", "opt_state"), ("fsdp", "step")])
def test_state_made_by_hand_on_several_devices_is_refused(mesh_name, field):
    """With several devices, an array on one device is an error that names it and says how to place it."""
    tx = optax.adam(0.1)
    step, state = toy.start(mesh_name, tx=tx)
    by_hand = {"opt_state": tx.init(toy.new_params(toy.mesh_of("one"))), "step": jax.device_put(0, jax.devices()[0])}
    words = {"opt_state": r"state\.opt_state\[0\]\.count is on one device", "step": r"state\.step is on one device"}
    with pytest.raises(ConfigError, match=rf"{words[field]}, .*; place the state with rampup.prepare_state\(state, mesh\)"):
        step(state.replace(**{field: by_hand[field]}), batch_of_arrays(step))


def test_optimizer_state_made_by_hand_on_one_device():
    """On a mesh of one device, a state from `tx.init` needs no placing: nothing is sharded there."""
    step, state = toy.start(tx=optax.adam(0.1))
    state, _ = step(state.replace(opt_state=optax.adam(0.1).init(state.params)), batch_of_arrays(step))
    assert int(state.step) == 1
