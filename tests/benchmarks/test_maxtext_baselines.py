"""Tests of benchmarks/maxtext_baselines.py."""

from types import SimpleNamespace

import jax
import pytest
from maxtext_baselines import ReplayManager, arrange_layers

from rampup import make_mesh
from rampup.plan import BatchRamp, MeshAxes


@pytest.mark.parametrize(
    ("start", "increment", "end", "devices", "samples"),
    [(4, 2, 12, 4, 500), (1, 1, 3, 8, 100), (2, 3, 8, 1, 77), (1, 15, 16, 2, 9)],
)
def test_replay_manager_agrees_with_the_closed_form(
    start, increment, end, devices, samples
):
    """It takes the steps of the closed form that reproduces MaxText's reference
    sequences.
    """
    sizes = {
        "per_device_batch_size_start": start,
        "per_device_batch_size_increment": increment,
        "per_device_batch_size": end,
    }
    config = SimpleNamespace(
        **sizes, global_rampup_samples=samples, num_target_devices=devices
    )
    ramp = BatchRamp.linear(
        start=start * devices,
        increment=increment * devices,
        end=end * devices,
        samples=samples,
    )
    manager = ReplayManager(config, 0)
    for step in range(ramp.ramp_steps + 3):
        assert manager.global_batch_size_current == ramp.global_batch_size_at(step)
        assert manager.total_used_samples == ramp.samples_before(step)
        assert (
            ReplayManager(config, step).global_batch_size_current
            == manager.global_batch_size_current
        )
        assert manager.update() == (step + 1 < ramp.ramp_steps)


@pytest.mark.parametrize(("repeats", "shape"), [(1, (4, 2, 3)), (2, (2, 4, 1, 3))])
def test_arrange_layers_has_the_chunks_of_maxtext(repeats, shape):
    """Repeat r of stage s holds chunk r*p + s of the layers."""
    layers = {"w": jax.numpy.arange(24.0).reshape(8, 3)}
    mesh = make_mesh(MeshAxes(pipeline=4), jax.devices()[:4])
    found = arrange_layers(layers, mesh, repeats)["w"]
    assert found.shape == shape
    assert (found.reshape(8, 3) == layers["w"]).all()
    assert {shard.index[repeats - 1].start for shard in found.addressable_shards} == {
        0,
        1,
        2,
        3,
    }
