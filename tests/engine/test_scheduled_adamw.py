"""AdamW whose constants follow the batch, in the training step, compared with
`optax.adamw` per phase.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy
from helpers.toy import make_step

from rampup.data.batches import BatchOptions, step_batches
from rampup.engine.optimizer import (
    AdamSchedule,
    FollowingOptimizer,
    LearningRate,
    make_optimizer,
    scheduled_adamw,
    segment_numbers,
)
from rampup.engine.state import create_state
from rampup.engine.update import select_step
from rampup.plan import BatchRamp, BatchSplitter, Growth, RampPlan, RateRule
from rampup.plan.hyperparameters import AdamConstants, AdamScaling, adam_constants
from rampup.plan.learning_rate import Seesaw, discretize

BASE = AdamConstants(b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.2)
SCALING = AdamScaling(
    b1="half_life", b2="half_life", eps="sde", weight_decay="timescale"
)


def train(plan, mesh, tx_at, **options):
    """Train the toy with the optimizer that `tx_at` gives for each step, and return
    parameters, state and steps.
    """
    steps, state = {}, None
    for batch in step_batches(
        toy.rows(),
        plan,
        mesh,
        seed=5,
        options=BatchOptions(chunk_size=1 if "engine" in options else None),
    ):
        tx = tx_at(batch.position)
        step = steps.setdefault(
            id(tx), make_step(toy.loss_fn, tx, plan, mesh, seed=3, **options)
        )
        if state is None:
            shard = options.get("shard_optimizer_over_data", False)
            state = create_state(
                toy.new_params(mesh), step.tx, mesh, shard_optimizer_over_data=shard
            )
        state, _ = step(state, batch)
    return jax.device_get(state.params), state, list(steps.values())


def adamw_of_phase(rate, constants):
    """Return AdamW with the constants of one phase. Its state has the products of all
    decay rates so far.
    """

    def init(params):
        return optax.adamw(rate).init(params), (jnp.ones(()), jnp.ones(()))

    def update(grads, state, params):
        (adam, decayed, clock), products = state
        products = products[0] * constants.b1, products[1] * constants.b2
        mu = optax.tree.update_moment(grads, adam.mu, constants.b1, 1)
        nu = optax.tree.update_moment(grads, adam.nu, constants.b2, 2)

        def step(m, v, param):
            change = (
                m
                / (1 - products[0])
                / (jnp.sqrt(v / (1 - products[1])) + constants.eps)
            )
            return -rate(clock.count) * (change + constants.weight_decay * param)

        new = (
            adam._replace(mu=mu, nu=nu),
            decayed,
            clock._replace(count=clock.count + 1),
        )
        return jax.tree.map(step, mu, nu, params), (new, products)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.GradientTransformation(init, update)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("data", {"shard_optimizer_over_data": True}),
        toy.slow("one", {"skip_nonfinite": True}),
        toy.slow("data", {"engine": "multi_steps"}),
        toy.slow("data_fsdp_tensor", {}),
    ],
)
def test_one_program_equals_adamw_with_the_constants_of_each_phase(name, options):
    """A fresh AdamW at each boundary, with the state carried over, gives the same
    parameters to 1e-6.
    """
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh)
    rate = LearningRate(plan=plan, peak=0.02, warmup_fraction=0.2)
    found = adam_constants(plan, BASE, SCALING)
    assert len({constants.b2 for constants in found}) == 3
    per_phase = [adamw_of_phase(rate, constants) for constants in found]
    expected, _, _ = train(
        plan, mesh, lambda position: per_phase[position.phase.index], **options
    )
    tx = make_optimizer(rate, adam=AdamSchedule(plan=plan, constants=found))
    params, _, (step,) = train(plan, mesh, lambda position: tx, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        params,
        expected,
    )
    assert step.num_compilations == 1


@pytest.mark.parametrize(
    ("b2", "dtype", "mu_dtype"),
    [
        (0.95, jnp.bfloat16, None),
        (0.95, jnp.bfloat16, jnp.float32),
        (0.95, jnp.float32, jnp.bfloat16),
        (0.95, jnp.complex64, None),
        (0.999, jnp.float32, None),
        (0.99999, jnp.float32, None),
    ],
)
def test_update_is_that_of_adamw(b2, dtype, mu_dtype):
    """The same update, moments and types as `optax.adamw`, to the digits of 1 -
    b**count that float32 leaves to the latter.
    """
    plan = toy.plan_for(toy.mesh_of("one"))
    base = AdamConstants(b2=b2)
    tx = scheduled_adamw(
        lambda count: 0.1 * count,
        AdamSchedule(plan=plan, constants=adam_constants(plan, base, AdamScaling())),
        mu_dtype,
    )
    expected = optax.adamw(
        lambda count: 0.1 * count, b2=b2, weight_decay=0.1, mu_dtype=mu_dtype
    )
    params = {"w": jnp.linspace(-1, 1, 7).astype(dtype), "none": None}
    states = [each.init(params) for each in (tx, expected)]
    for k in range(5):
        grads = {"w": (jnp.linspace(-1, 2, 7) * 10.0**-k).astype(dtype), "none": None}
        results = [
            jax.jit(each.update)(grads, state, params)
            for each, state in zip((tx, expected), states, strict=True)
        ]
        states = [state for _, state in results]
        # What is between moments and clock are the masses of the one and the weight
        # decay of the other.
        parts = [(moments, clock, updates) for updates, (moments, _, clock) in results]
        tolerances = (
            [1e-6, 1e-6, max(1e-6, 3e-8 / (1 - b2))]
            if dtype != jnp.bfloat16
            else [0.01] * 3
        )
        for found, wanted, rtol in zip(*parts, tolerances, strict=True):
            assert jax.tree.map(lambda x: (x.dtype, x.shape), found) == jax.tree.map(
                lambda x: (x.dtype, x.shape), wanted
            )
            for a, b in zip(
                jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
            ):
                np.testing.assert_allclose(
                    a.astype(np.complex64), b.astype(np.complex64), rtol=rtol
                )


def test_update_of_a_constant_gradient_is_one_in_every_step():
    """In 200 random ramps with random rules, growing and falling, with steps that are
    skipped and a resume through the host.
    """
    rng, steps, num_plans, tables = np.random.default_rng(0), 300, 200, []
    for _ in range(num_plans):
        sizes = 8 * 2 ** rng.integers(0, 7, size=rng.integers(2, 6))
        starts = np.concatenate(
            [[0], np.cumsum(sizes * rng.integers(1, 80, size=len(sizes)))[:-1]]
        )
        ramp = BatchRamp.piecewise(
            [(int(start), int(size)) for start, size in zip(starts, sizes, strict=True)]
        )
        plan = RampPlan(
            ramp=ramp,
            splitter=BatchSplitter(data_parallel_size=1),
            num_devices=1,
            total_steps=steps,
        )
        base = AdamConstants(
            b1=rng.choice([0.0, 0.9, 0.99]),
            b2=rng.choice([0.9, 0.95, 0.999, 0.99999]),
            eps=1e-12,
        )
        scaling = AdamScaling(
            b1=rng.choice(["none", "half_life"]),
            b2=rng.choice(["half_life", "sde"]),
            b2_floor=0.3,
        )
        tables.append(
            jax.vmap(AdamSchedule.from_scaling(plan, base, scaling))(np.arange(steps))
        )
    tables = jax.tree.map(lambda *parts: np.stack(parts), *tables)
    assert np.mean(tables["b2"].max(1) > tables["b2"].min(1)) > 0.8
    kept = rng.random((num_plans, steps)) > 0.1

    def run(state, tables, kept, steps):
        tx = scheduled_adamw(
            -1.0, lambda count: {name: table[count] for name, table in tables.items()}
        )

        def step(state, number):
            update, new = tx.update(jnp.ones(()), state, jnp.zeros(()))
            return select_step(kept[number], new, state), update

        return jax.lax.scan(step, state, steps)

    state = jax.vmap(lambda _: scheduled_adamw(-1.0, None).init(jnp.zeros(())))(
        jnp.arange(num_plans)
    )
    run = jax.jit(jax.vmap(run, in_axes=(0, 0, 0, None)))
    found = []
    for half in np.split(np.arange(steps), 2):
        state, updates = run(jax.device_get(state), tables, kept, half)
        found.append(updates[kept[:, half]])
    assert (np.asarray(state[0].count) == kept.sum(1)).all()
    np.testing.assert_allclose(np.concatenate(found), 1, rtol=0, atol=1e-5)


def test_learning_rate_with_seesaw_is_the_same_on_host_and_device():
    """Warm-up, then a staircase: host and device agree at every step, and each step is
    level * scale of the peak.
    """
    cuts = discretize(
        lambda t: 1 - 0.9 * max(t - 0.1, 0), factor=1.5, total_samples=2000
    )
    seesaw = Seesaw(
        base=BatchRamp.constant(16),
        cuts=cuts,
        max_batch_size=40,
        multiple=8,
        total_samples=2000,
    )
    splitter = BatchSplitter(data_parallel_size=1)
    plan = RampPlan(
        ramp=seesaw.ramp,
        splitter=splitter,
        total_steps=seesaw.ramp.step_of_sample(1999) + 1,
        num_devices=1,
        rate=RateRule(clock="samples", seesaw=seesaw),
    )
    rate = LearningRate(plan=plan, peak=0.3, warmup_fraction=0.1)
    on_device = jax.jit(jax.vmap(rate))(jnp.arange(plan.total_steps))
    np.testing.assert_allclose(
        on_device, [rate.at(step) for step in range(plan.total_steps)], rtol=1e-5
    )
    for segment in (
        segment for segment in plan.clock[1:] if segment.start_step < plan.total_steps
    ):
        assert rate.at(segment.start_step) == pytest.approx(
            0.3 * segment.level * (segment.global_batch_size / 16) ** 0.5
        )
    assert len(plan.clock) > len(plan.ramp.phases) == 4


@pytest.mark.parametrize("ramp", ["0:8 100:16 250:32", "0:8M 5B:16M 9B:32M"])
def test_a_program_that_is_given_its_segment_computes_what_one_with_a_table_does(ramp):
    """At every step of a ramp that was decided during the run, rate and constants of
    AdamW are those of the planned ramp.
    """
    ramp = BatchRamp.from_schedule(ramp)
    keys = {
        "splitter": BatchSplitter(data_parallel_size=1),
        "num_devices": 1,
        "rate": RateRule(batch_scaling="sqrt", clock="samples"),
    }
    planned = RampPlan(ramp=ramp, total_steps=900, **keys)
    began = RampPlan(
        ramp=BatchRamp.constant(ramp.sizes[0]),
        total_steps=9999,
        growth=Growth(sizes=ramp.sizes, budget_samples=planned.consumed_samples),
        **keys,
    )
    grown = began.grown(ramp)
    assert grown.total_steps == 900
    table, given = (
        LearningRate(plan=plan, peak=0.3, warmup_fraction=0.1)
        for plan in (planned, began)
    )
    tx = FollowingOptimizer(init=None, update=None)
    constants, given_constants = (
        AdamSchedule.from_scaling(plan, BASE, SCALING) for plan in (planned, began)
    )
    for step in {
        *range(0, 900, 50),
        *(phase.start_step + n for phase in ramp.phases for n in (0, 1)),
        899,
    }:
        segment = segment_numbers(tx, grown.position(step).segment)
        assert (
            table(jnp.int32(step))
            == given(jnp.int32(step), segment)
            > (-1 if step == 0 else 0)
        )
        assert constants(jnp.int32(step)) == given_constants(jnp.int32(step), segment)
