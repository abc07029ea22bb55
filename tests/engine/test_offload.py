"""Tests of rampup.engine.offload."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy
from jax.sharding import NamedSharding, PartitionSpec

from rampup.data.batches import step_batches
from rampup.engine import offload
from rampup.engine.evaluation import EvalStep
from rampup.engine.mesh import make_mesh
from rampup.engine.state import create_state
from rampup.engine.step import train_step
from rampup.errors import ConfigError

pytestmark = pytest.mark.usefixtures("optimized")

GIVEN = {"bytes_limit": 1000, "peak_bytes_in_use": 70}


def device(**stats):
    """Return a simulated device."""
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_program_memory_counts_arrays():
    """Arguments, outputs, temporaries; an output that aliases an argument once. A
    missing analysis is an error, not a zero.
    """
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    grown = offload.program_memory(
        jax.jit(lambda x: (x @ x.T * jnp.ones((512,)))[:, None] * x[None])
        .lower(x)
        .compile()
    )
    assert (grown.arguments, grown.outputs, grown.aliased) == (4096, 512 * 4096, 0)
    assert grown.total == grown.arguments + grown.outputs + grown.temporary + grown.code
    in_place = offload.program_memory(
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    )
    assert in_place.aliased == 4096
    assert in_place.total == 4096 + in_place.temporary + in_place.code
    with pytest.raises(ConfigError, match="does not report"):
        offload.program_memory(SimpleNamespace(memory_analysis=lambda: None))


def test_room_to_run_is_that_of_the_smallest_device():
    """The room is the smallest of all devices. Devices without memory of their own
    share half of the host's free memory.
    """
    assert offload.device_limit(device(**GIVEN)) == 1000
    assert offload.device_limit(device()) is None
    assert offload.room_to_run([device(bytes_limit=7), device(bytes_limit=5)]) == 5
    one, four = offload.room_to_run([device()]), offload.room_to_run([device()] * 4)
    assert 0 < four < one
    assert offload.peak_bytes([device(**GIVEN), device(peak_bytes_in_use=90)]) == 90
    assert offload.peak_bytes([device()]) is None


def test_is_out_of_memory_recognizes_only_exhausted_resources():
    """Only RESOURCE_EXHAUSTED errors of the runtime and MemoryError count."""
    assert offload.is_out_of_memory(
        RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
    )
    assert offload.is_out_of_memory(MemoryError())
    assert not offload.is_out_of_memory(RuntimeError("INTERNAL: no"))
    assert not offload.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


def test_bytes_per_device_counts_shards():
    """A sharded array counts with its shard per device, a replicated one with its full
    size.
    """
    mesh = make_mesh()
    cut = jax.device_put(jnp.zeros(16), NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.device_put(jnp.zeros(16), NamedSharding(mesh, PartitionSpec()))
    assert offload.bytes_per_device([cut, whole]) == 64 // 8 + 64


def test_offloaded_state_trains_identically_and_stays_in_host_memory():
    """Steps and evaluation give identical numbers, and every array returns to host
    memory.
    """
    mesh = make_mesh(devices=jax.devices()[:2])
    if problem := offload.host_memory_problem(mesh):
        pytest.skip(problem)
    plan = toy.plan_for(mesh, "0:4 8:8", steps=4)
    rows = [{"x": np.float32([n % 5, n % 3])} for n in range(32)]

    def loss_fn(params, batch, rngs):
        return jnp.sum((batch["x"] @ params["w"] - 1) ** 2), batch["x"].shape[0], {}

    def trained(place):
        tx = optax.adam(0.1)
        state = create_state({"w": jnp.ones((2,))}, tx, mesh)
        batches = list(step_batches(rows, plan, mesh))
        state, found = toy.history(
            train_step(loss_fn, tx, plan, mesh),
            jax.device_put(state, place(state)),
            batches,
        )
        return (
            state,
            found,
            [float(x) for x in EvalStep(loss_fn, mesh)(state, batches[-1])],
        )

    on_device, *numbers = trained(
        lambda state: jax.tree.map(lambda leaf: leaf.sharding, state)
    )
    offloaded, *same = trained(offload.host_shardings)
    assert numbers == same
    kinds = {
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded) if leaf.ndim
    }
    assert kinds == {offload.HOST}
    assert (
        offloaded.step.sharding.memory_kind
        == on_device.step.sharding.memory_kind
        != offload.HOST
    )
    np.testing.assert_array_equal(offloaded.params["w"], on_device.params["w"])


def test_host_memory_problem_names_the_missing_memory():
    """A device without host memory is reported, and a CPU does not count it
    separately.
    """
    without = SimpleNamespace(addressable_memories=list, platform="cpu")
    mesh = SimpleNamespace(devices=np.array([without]), local_devices=[without])
    assert "no pinned_host" in offload.host_memory_problem(mesh)
    assert not offload.reports_host_memory(make_mesh(devices=jax.devices()[:1]))
