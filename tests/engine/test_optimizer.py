"""Tests of rampup.engine.optimizer."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rampup import create_state, make_mesh, multi_steps, train_step
from rampup.engine.optimizer import AdamSchedule, LearningRate, make_optimizer
from rampup.errors import ConfigError, MissingDependencyError, RampDefinitionError
from rampup.lm.transformer import LanguageModel, matrices
from rampup.plan import BatchRamp, BatchSplitter, RampPlan, RateRule
from rampup.plan.hyperparameters import AdamConstants, AdamScaling

RAMP = BatchRamp.from_schedule("0:8 100:16 250:32")


def plan(steps=60, ramp=RAMP, **keys):
    """Return a plan of the ramp above, or another."""
    return RampPlan(
        ramp=ramp,
        splitter=BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=steps,
        **keys,
    )


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("clock", ["steps", "samples"])
@pytest.mark.parametrize("scaling", ["none", "sqrt"])
def test_learning_rate_is_the_same_on_host_and_device(kind, clock, scaling):
    """The rate on the device equals the rate on the host, at every step, also after the
    end of the schedule.
    """
    rule = RateRule(clock=clock, batch_scaling=scaling, schedule_steps=50)
    rate = LearningRate(
        plan=plan(rate=rule),
        peak=0.3,
        kind=kind,
        warmup_fraction=0.2,
        decay_fraction=0.3,
    )
    on_device = jax.vmap(jax.jit(rate))(jnp.arange(60))
    np.testing.assert_allclose(
        on_device, [rate.at(step) for step in range(60)], rtol=1e-5, atol=1e-7
    )
    assert (rate.at(55) == 0) == (kind != "constant")


def test_learning_rate_warm_up_follows_the_samples_clock():
    """Warm-up over a tenth of the samples ends at the step that has consumed a tenth of
    them, not at a tenth of the steps.
    """
    by_samples = LearningRate(
        plan=plan(rate=RateRule(clock="samples")),
        peak=1.0,
        kind="constant",
        warmup_fraction=0.1,
    )
    by_steps = LearningRate(
        plan=plan(rate=RateRule(clock="steps")),
        peak=1.0,
        kind="constant",
        warmup_fraction=0.1,
    )
    tenth = RAMP.samples_before(60) / 10
    first_full = next(step for step in range(60) if by_samples.at(step) == 1.0)
    assert (
        RAMP.samples_before(first_full - 1) < tenth <= RAMP.samples_before(first_full)
    )
    assert next(step for step in range(60) if by_steps.at(step) == 1.0) == 6


def test_learning_rate_of_a_constant_batch_equals_optax():
    """With a constant batch, both clocks give the usual warm-up and cosine decay."""
    rate = LearningRate(
        plan=plan(100, BatchRamp.constant(8)),
        peak=0.5,
        warmup_fraction=0.1,
        final_fraction=0.2,
    )
    usual = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 100, end_value=0.1)
    np.testing.assert_allclose(
        [rate.at(step) for step in range(100)],
        [usual(step) for step in range(100)],
        rtol=1e-5,
        atol=1e-7,
    )


def test_learning_rate_wsd_is_stable_then_decays():
    """Warm-up, a constant rate, then linear decay. By sqrt, a quarter of the batch has
    half of the rate.
    """
    rate = LearningRate(
        plan=plan(100, BatchRamp.constant(8)),
        peak=1.0,
        kind="wsd",
        warmup_fraction=0.1,
        decay_fraction=0.2,
        final_fraction=0.0,
    )
    assert [round(rate.at(step), 3) for step in (0, 5, 10, 80, 90, 99)] == [
        0.0,
        0.5,
        1.0,
        1.0,
        0.5,
        0.05,
    ]
    rate = LearningRate(
        plan=plan(rate=RateRule(batch_scaling="sqrt")), peak=1.0, kind="constant"
    )
    assert (rate.at(1), rate.at(59)) == (0.5, 1.0)


def test_learning_rate_refuses_steps_beyond_int32():
    """Phases beyond the int32 range are ignored as long as the run ends before them. A
    longer run is refused.
    """
    long = BatchRamp.piecewise([(0, 1), (2**33, 2)])
    assert (
        float(
            LearningRate(plan=plan(10, long), peak=1.0, kind="constant")(jnp.int32(3))
        )
        == 1.0
    )
    with pytest.raises(RampDefinitionError, match="int32"):
        LearningRate(plan=plan(2**33, long), peak=1.0)


def rate_of(other):
    """Return an optimizer whose rate follows a plan."""
    return optax.adamw(LearningRate(plan=other, peak=0.1))


def constants_of(other):
    """Return an optimizer whose rate is a number and whose constants follow a plan."""
    scaling = AdamScaling(b2="half_life")
    adam = AdamSchedule.from_scaling(other, AdamConstants(), scaling)
    return make_optimizer(0.1, adam=adam)


@pytest.mark.parametrize("optimizer", [rate_of, constants_of])
@pytest.mark.parametrize("in_multi_steps", [False, True])
def test_a_step_refuses_a_rate_or_constants_of_another_plan(optimizer, in_multi_steps):
    """One of a shorter plan would end in a rate of 0, without a word. The refusal ends
    with the step: the rate itself still works.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    own, other = plan(), plan(40)
    if optimizer is constants_of:
        other = plan(ramp=BatchRamp.from_schedule("0:8 80:16 250:32"))

    def run(tx):
        tx = multi_steps(tx, own) if in_multi_steps else tx
        step = train_step(squares, tx, own, mesh)
        state = create_state(np.float32(1), tx, mesh)
        return step(state, step.batch(np.ones(8, np.float32)))

    with pytest.raises(ConfigError, match="another plan than the step"):
        run(optimizer(other))
    assert LearningRate(plan=other, peak=0.5)(jnp.int32(0)) == 0.5
    _, metrics = run(optimizer(own))
    assert float(metrics["loss"]) == 0


@pytest.mark.parametrize("optimizer", [rate_of, constants_of])
def test_multi_steps_in_a_step_of_ones_own_refuse_it_too(optimizer):
    """In the trace of that step, and without one."""
    other = plan(40, BatchRamp.from_schedule("0:8 80:16 250:32"))
    tx = multi_steps(optimizer(other), plan())
    state = tx.init(1.0)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ConfigError, match="another plan than the step"):
            update(1.0, state, 1.0)
    tx = multi_steps(optimizer(plan()), plan())
    updates, _ = jax.jit(tx.update)(1.0, tx.init(1.0), 1.0)
    assert updates != 0


def squares(params, batch, keys):
    """Return the sum of the squared distances."""
    return ((params - batch) ** 2).sum(), len(keys), {}


def test_whole_batches_take_the_rate_of_their_plan():
    """The plan of whole batches has the clock of the plan that it was made of."""
    mesh = make_mesh(devices=jax.devices()[:1])
    step = train_step(squares, rate_of(plan()), plan().with_whole_batches(), mesh)
    state = create_state(np.float32(1), step.tx, mesh)
    step(state, step.batch(np.ones(8, np.float32)))


def test_make_optimizer_runs_both_kinds():
    """Both kinds run, clipping limits the step, and an unknown kind is refused."""
    params, grads = {"w": jnp.ones(4)}, {"w": jnp.full(4, 100.0)}
    for kind in ("adamw", "sgd"):
        tx = make_optimizer(0.1, kind=kind, clip_norm=1.0)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert float(jnp.linalg.norm(updates["w"])) < 1.0
    free = make_optimizer(0.1, kind="sgd", clip_norm=0)
    assert float(free.update(grads, free.init(params), params)[0]["w"][0]) == -10.0
    with pytest.raises(ConfigError, match="must be one of adamw, sgd, muon"):
        make_optimizer(0.1, kind="adm")


HAS_MUON = "consistent_rms" in inspect.signature(optax.contrib.muon).parameters


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_MUON, reason="this Optax has no Muon with updates of AdamW's size"
)
def test_muon_updates_are_orthogonal_and_of_the_size_of_adam():
    """A matrix of a layer moves along nearly orthonormal rows, with a root mean square
    of 0.2; the rest moves as with AdamW.
    """
    model = LanguageModel(
        num_layers=2, width=32, mlp_dim=64, num_heads=4, num_kv_heads=2, vocab_size=16
    )
    params = model.init(jax.random.key(0))
    grads = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    options = {"clip_norm": 0, "weight_decay": 0.0}
    tx = make_optimizer(1.0, kind="muon", matrices=matrices, **options)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    shapes = {
        "query": (32, 32),
        "key": (32, 16),
        "value": (32, 16),
        "out": (32, 32),
        "gate": (32, 64),
        "up": (32, 64),
    }
    for name, shape in (shapes | {"down": (64, 32)}).items():
        for update in np.asarray(updates["layers"][name]["kernel"]):
            assert np.sqrt(np.mean(update**2)) == pytest.approx(0.2, rel=0.25)
            values = np.linalg.svd(update.reshape(shape), compute_uv=False)
            # A random square matrix has one direction of nearly no gradient.
            assert values[0] / values[-2] < 2.5
    adam = optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=0.0, nesterov=True)
    expected, _ = adam.update(grads, adam.init(params), params)
    for name in ("embedding", "final_norm"):
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-5)
    with pytest.raises(ConfigError, match="batch_scaling changes how AdamW works"):
        make_optimizer(1.0, kind="muon", adam=lambda count: {})


@pytest.mark.skipif(HAS_MUON, reason="this Optax has Muon")
def test_muon_needs_a_newer_optax():
    """The error names the version and the command."""
    with pytest.raises(
        MissingDependencyError, match=r"needs Optax 0\.2\.7 or newer.*pip install"
    ):
        make_optimizer(1.0, kind="muon")


def test_make_optimizer_stores_the_first_moment_in_another_type():
    """Between steps, it has the requested type, also with bfloat16 parameters, whose
    type the second moment has; the updates are close to exact.
    """
    params = {"w": jnp.linspace(0.5, 2, 64)}
    grads = [
        {"w": jnp.asarray(np.random.default_rng(n).normal(size=64), jnp.float32)}
        for n in range(5)
    ]

    def run(params, **types):
        tx = make_optimizer(0.1, clip_norm=0, weight_decay=0, **types)
        state = tx.init(params)
        for grad in grads:
            updates, state = jax.jit(tx.update)(
                jax.tree.map(lambda g, p: g.astype(p.dtype), grad, params),
                state,
                params,
            )
        adam = next(
            part
            for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu"))
            if hasattr(part, "nu")
        )
        return updates["w"], adam.mu["w"].dtype.name, adam.nu["w"].dtype.name

    exact, *types = run(params)
    assert types == ["float32", "float32"]
    found, *types = run(params, mu_dtype="bfloat16")
    assert types == ["bfloat16", "float32"]
    np.testing.assert_allclose(found, exact, rtol=2e-2, atol=1e-3)
    small = {"w": params["w"].astype(jnp.bfloat16)}
    assert run(small)[1:] == ("bfloat16", "bfloat16")
    found, *types = run(small, mu_dtype="float32")
    assert types == ["float32", "bfloat16"]
    np.testing.assert_allclose(found.astype(np.float32), exact, rtol=3e-2, atol=2e-3)
    with pytest.raises(TypeError, match="nu_dtype'; the second moment has the type of"):
        make_optimizer(0.1, nu_dtype="float32")
