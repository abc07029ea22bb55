"""Tests of rampup.run.offload."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rampup.errors import ConfigError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan
from rampup.run import offload
from rampup.run.data.batches import step_batches
from rampup.run.mesh import make_mesh
from rampup.run.step import EvalStep, create_state, train_step

GIVEN = {"bytes_limit": 1000, "peak_bytes_in_use": 70}


def device(**stats):
    """Return a pretended device."""
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_a_program_takes_what_its_arrays_take():
    """Arguments, outputs and what is in between are counted; an output in the place of an argument once."""
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    grown = offload.program_memory(jax.jit(lambda x: (x @ x.T * jnp.ones((512,)))[:, None] * x[None]).lower(x).compile())
    assert (grown.arguments, grown.outputs, grown.aliased) == (4096, 512 * 4096, 0)
    assert grown.total == grown.arguments + grown.outputs + grown.temporary + grown.code
    in_place = offload.program_memory(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile())
    assert in_place.aliased == 4096
    assert in_place.total == 4096 + in_place.temporary + in_place.code


def test_a_backend_that_does_not_say_is_an_error():
    """No analysis is not the same as no offload."""
    with pytest.raises(ConfigError, match="does not say"):
        offload.program_memory(SimpleNamespace(memory_analysis=lambda: None))


def test_limits_are_those_of_the_smallest_device():
    """The room is the least of all devices; devices without memory of their own share half of the machine's."""
    assert offload.device_limit(device(**GIVEN)) == 1000
    assert offload.device_limit(device()) is None
    assert offload.room_to_run([device(bytes_limit=7), device(bytes_limit=5)]) == 5
    one, four = offload.room_to_run([device()]), offload.room_to_run([device()] * 4)
    assert 0 < four < one
    assert offload.peak_bytes([device(**GIVEN), device(peak_bytes_in_use=90)]) == 90
    assert offload.peak_bytes([device()]) is None


def test_out_of_memory_is_told_from_other_failures():
    """Only what the runtime calls exhausted resources counts, and Python's own error."""
    assert offload.is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"))
    assert offload.is_out_of_memory(MemoryError())
    assert not offload.is_out_of_memory(RuntimeError("INTERNAL: no"))
    assert not offload.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_a_cut_array_counts_once_per_device():
    """A cut array takes its part of every device, a copied one the whole."""
    mesh = make_mesh()
    cut = jax.device_put(jnp.zeros(16), NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(jnp.zeros(16), NamedSharding(mesh, PartitionSpec()))
    assert offload.bytes_per_device([cut, whole]) == 64 // 8 + 64


def test_a_state_host_shardings_trains_alike_and_stays_there():
    """Steps and evaluation give the very same numbers, and every array comes back to host offload."""
    mesh = make_mesh(devices=jax.devices()[:2])
    if problem := offload.host_memory_problem(mesh):
        pytest.skip(problem)
    plan = RampPlan(
        ramp=BatchRamp.from_schedule("0:4 8:8"), splitter=BatchSplitter(data_parallel_size=2), num_devices=2, total_steps=4
    )
    rows = [{"x": np.float32([n % 5, n % 3])} for n in range(32)]

    def loss_fn(params, batch, rngs):
        return jnp.sum((batch["x"] @ params["w"] - 1) ** 2), batch["x"].shape[0], {}

    def trained(place):
        tx = optax.adam(0.1)
        state = create_state({"w": jnp.ones((2,))}, tx, mesh)
        state = jax.device_put(state, place(state))
        step, losses = train_step(loss_fn, tx, plan, mesh), []
        for batch in step_batches(rows, plan, mesh):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses, [float(x) for x in EvalStep(loss_fn, mesh)(state, batch)]

    near, *numbers = trained(lambda state: jax.tree.map(lambda leaf: leaf.sharding, state))
    far, *same = trained(offload.host_shardings)
    assert numbers == same
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(far) if leaf.ndim}
    assert kinds == {offload.HOST}
    assert far.step.sharding.memory_kind == near.step.sharding.memory_kind != offload.HOST
    np.testing.assert_array_equal(far.params["w"], near.params["w"])


def test_host_memory_is_looked_for():
    """A device without it says so; a CPU does not count it apart."""
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(addressable_memories=list)]))
    assert "no pinned_host" in offload.host_memory_problem(mesh)
    assert not offload.reports_host_memory(make_mesh(devices=jax.devices()[:1]))
