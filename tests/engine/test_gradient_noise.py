"""Tests of rampup.engine.gradient_noise: S and G2 of a training step against gradients
of each block, in float64.
"""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import toy
from helpers.toy import make_step
from helpers.toy import plain_loss_fn as loss_fn

from rampup.engine.accumulate import AccumulatedLoss
from rampup.engine.compile import compile_program
from rampup.engine.mesh import make_mesh
from rampup.engine.state import TrainState, create_state, prepare_state
from rampup.errors import ConfigError
from rampup.plan import MeshAxes
from rampup.plan.noise_scale import noise_trace

pytestmark = pytest.mark.usefixtures("optimized", "float64")

BLOCKS, ROWS, WIDTH = 32, 2, 8
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def plan_for(mesh, *, size=BLOCKS * ROWS, rows=ROWS, steps=2, stages=1, repeats=1):
    """Return a plan of blocks of `rows` rows: a microbatch of one replica, over all its
    fsdp shards.
    """
    splitter = {
        "microbatch_size": rows // mesh.shape["fsdp"],
        "num_stages": stages,
        "num_repeats": repeats,
    }
    return toy.plan_for(
        mesh, f"0:{size}", steps=steps, strict_multiple=False, **splitter
    )


def oracle(block_loss, params, batch, rows=ROWS):
    """Return S and G2 of one step from the gradient of every block."""
    number = len(batch["weight"]) // rows
    blocks = jax.tree.map(lambda x: x.reshape(number, rows, *x.shape[1:]), batch)
    grads = jax.jit(jax.vmap(jax.grad(block_loss), (None, 0)))(params, blocks)
    flat = np.concatenate(
        [np.asarray(g).reshape(number, -1) for g in jax.tree.leaves(grads)], axis=1
    )
    weights = batch["weight"].reshape(number, -1).sum(1)
    real, total = weights > 0, weights.sum()
    q = ((flat[real] ** 2).sum(1) / weights[real]).sum()
    mean = flat.sum(0) / total
    return noise_trace(q, total, (mean**2).sum(), real.sum())


def run(step, state, rows, plan, check=lambda state, batch, metrics: None):
    """Run all steps; `check` sees the state before each step, its rows on the host, and
    its metrics.
    """
    for number, batch in enumerate(step.batches(rows)):
        before = jax.device_get(state)
        state, metrics = step(state, batch)
        own = toy.stacked([rows[sample % len(rows)] for sample in plan.rows(number)])
        check(before, own, jax.device_get(metrics))
    return state


def program_of(step):
    """Return the one program that a step has compiled."""
    (program,) = step._programs.compiler._programs.values()
    return program


def assert_close(found, wanted):
    """Compare the metrics of a step with the oracle's S and G2."""
    for name, value in zip(("trace", "squared_norm"), wanted, strict=True):
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


MESHES = {
    "1x32": MeshAxes(),
    "4x8": MeshAxes(data=4),
    "8x4": MeshAxes(data=8),
    "fsdp": MeshAxes(data=2, fsdp=2),
    "tensor": MeshAxes(data=2, tensor=2),
    "fsdp_tensor": MeshAxes(fsdp=2, tensor=4),
    "all": MeshAxes(data=2, fsdp=2, tensor=2),
}
ZERO = ("zero-all", "zero-4x8", "zero-fsdp", "zero-tensor")


@pytest.mark.parametrize(
    "name", [name if "all" in name else toy.slow(name) for name in (*MESHES, *ZERO)]
)
def test_gradient_noise_of_the_same_blocks_is_the_same_on_every_mesh(name):
    """S and G2 equal those of the blocks' own gradients to 1e-6, with no collective
    more, and no parameter changes a bit.
    """
    axes = MESHES[name.removeprefix("zero-")]
    mesh, zero = (
        make_mesh(axes, jax.devices()[: axes.num_devices]),
        {"shard_optimizer_over_data": name.startswith("zero-")},
    )
    plan, rows = plan_for(mesh), toy.rows(200, np.float64)
    found, params, programs = [], [], []

    def check(state, batch, metrics):
        found.append(metrics["gradient_noise"])
        assert_close(
            found[-1],
            oracle(lambda p, b: loss_fn(p, b, None)[0], state.params, batch),
        )
        assert found[-1]["blocks"] == BLOCKS

    for measures in (False, True):
        step = make_step(
            loss_fn, ADAM, plan, mesh, measure_gradient_noise=measures, **zero
        )
        state = create_state(toy.new_params(mesh, np.float64), step.tx, mesh, **zero)
        params.append(
            run(step, state, rows, plan, check if measures else lambda *_: None).params
        )
        programs.append(program_of(step))
    assert np.isfinite([value for step in found for value in step.values()]).all()
    off, on = (
        collections.Counter(COLLECTIVE.findall(program.as_text()))
        for program in programs
    )
    # Before JAX 0.8, XLA wrote the same groups of three axes in two ways, and did not
    # combine their reductions of a number.
    is_old = name == "zero-all" and jax.__version_info__ < (0, 8)
    assert on == off + collections.Counter({"all-reduce": 2} if is_old else {})
    jax.tree.map(np.testing.assert_array_equal, *params)


def one_device(**options):
    """Return a mesh of one device, its plan, and a step that measures."""
    mesh = make_mesh(devices=jax.devices()[:1])
    plan = plan_for(mesh, **options)
    return mesh, plan, toy.rows(200, np.float64)


def test_gradient_noise_with_scaled_loss_and_carried_state():
    """A scaled loss and batch statistics change neither S nor G2."""
    mesh, plan, rows = one_device(steps=2)

    class State(TrainState):
        dynamic_scale: Any = None

    def loss(params, batch, keys, mutable):
        return *loss_fn(params, batch, keys), {"n": mutable["n"] + 1}

    tx = optax.sgd(1e-3)
    params = toy.new_params(mesh, np.float64)
    step = make_step(loss, tx, plan, mesh, measure_gradient_noise=True)
    fields = {
        "mutable": {"n": jnp.int32(0)},
        "dynamic_scale": DynamicScale(scale=jnp.float64(1024)),
    }
    state = prepare_state(
        State(step=0, params=params, opt_state=tx.init(params), **fields), mesh
    )

    def check(state, batch, metrics):
        assert_close(
            metrics["gradient_noise"],
            oracle(lambda p, b: loss_fn(p, b, None)[0], state.params, batch),
        )

    run(step, state, rows, plan, check)


def test_gradient_noise_of_a_state_made_by_hand_on_one_device():
    """Arrays on one device that are not placed on its mesh are whole there, and their
    noise is measured.
    """
    mesh, plan, rows = one_device(steps=1, size=2 * ROWS)
    step = make_step(loss_fn, ADAM, plan, mesh, measure_gradient_noise=True)
    params = jax.device_put(toy.new_params(mesh, np.float64), jax.devices()[0])
    state = TrainState(step=jnp.int32(0), params=params, opt_state=ADAM.init(params))
    noise = step(state, next(step.batches(rows)))[1]["gradient_noise"]
    assert noise["blocks"] == 2
    assert np.isfinite([noise["trace"], noise["squared_norm"]]).all()


def test_gradient_noise_needs_no_more_memory():
    """Nothing as large as the parameters is kept over the microbatches of a step."""
    mesh, plan, _ = one_device(size=16 * 64, rows=64)

    def loss(params, batch, keys):
        x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params)[
            0
        ]
        return jnp.sum(x**2), jnp.float64(len(x)), {}

    def temporary(measures):
        step = make_step(loss, ADAM, plan, mesh, measure_gradient_noise=measures)
        state = create_state(jnp.ones((8, 64, 64)), step.tx, mesh)
        lowered = step.lower(state, {"x": np.zeros(64)}, plan.splits[0])
        return compile_program(lowered).memory_analysis().temp_size_in_bytes

    assert temporary(True) <= 1.01 * temporary(False)


def test_gradient_noise_is_measured_before_clipping_and_not_a_number_in_a_skipped_step():
    """The gradient's norm is that before the clipping to 0.5. A step with an infinite
    row has no S for an average to take.
    """
    mesh, plan, rows = one_device()
    rows[70]["x"] = rows[70]["x"] * np.inf
    step = make_step(
        loss_fn, ADAM, plan, mesh, measure_gradient_noise=True, skip_nonfinite=True
    )

    def check(state, batch, metrics):
        assert metrics["skipped"] == (state.step == 1)
        if metrics["skipped"]:
            assert not np.isfinite(metrics["gradient_noise"]["trace"])
            return
        grads = jax.grad(lambda p: loss_fn(p, batch, None)[0] / batch["weight"].sum())(
            state.params
        )
        assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)))
        assert metrics["grad_norm"] > 0.5

    run(
        step,
        create_state(toy.new_params(mesh, np.float64), step.tx, mesh),
        rows,
        plan,
        check,
    )


def test_gradient_noise_needs_two_blocks_in_every_phase():
    """One microbatch on one replica is refused with the phase and what to do; two
    replicas are enough.
    """
    one, two = (make_mesh(devices=jax.devices()[:number]) for number in (1, 2))
    make_step(
        loss_fn, ADAM, toy.plan_for(two, "0:16 64:8"), two, measure_gradient_noise=True
    )
    smaller = (
        "0:16 64:8",
        r"phase 1,.* = 1 \* 1 = 1 .*set microbatch_size=4",
        ("microbatch_size", (4,)),
    )
    for schedule, words, found in (
        smaller,
        ("0:1", "larger batch", ("measure_gradient_noise", (False,))),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            make_step(
                loss_fn,
                ADAM,
                toy.plan_for(one, schedule),
                one,
                measure_gradient_noise=True,
            )
        assert (caught.value.key, caught.value.nearest) == found


def test_gradient_noise_refuses_engines_and_losses_that_cannot_measure_it():
    """MultiSteps does not weight microbatches, and a loss of one's own must use the
    meter.
    """

    class OwnLoss(AccumulatedLoss):
        def sums(self, *args):
            return super().sums(*args)._replace(noise=None)

    mesh, plan, rows = one_device()
    with pytest.raises(ConfigError, match="measure_gradient_noise exclude each other"):
        make_step(
            loss_fn, ADAM, plan, mesh, measure_gradient_noise=True, engine="multi_steps"
        )
    step = make_step(OwnLoss(loss_fn), ADAM, plan, mesh, measure_gradient_noise=True)
    state = create_state(toy.new_params(mesh), ADAM, mesh)
    with pytest.raises(ConfigError, match=r"OwnLoss does not use `recipe\.noise`"):
        step(state, next(step.batches(rows)))
