"""Tests of rampup.run.mesh."""

import jax
import numpy as np
import pytest

from rampup.errors import ConfigError
from rampup.plan import MeshAxes
from rampup.run.mesh import AXIS_NAMES, batch_sharding, make_mesh, process_rows


def test_make_mesh_has_four_axes():
    """The mesh has four axes, with all devices on the data axis by default."""
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1, "stage": 1}
    mesh = make_mesh(MeshAxes(data=2, fsdp=2, pipeline=2))
    assert mesh.axis_names == AXIS_NAMES
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "stage": 2}
    assert make_mesh(devices=jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    ("axes", "key"),
    [
        (MeshAxes(data=4), "num_devices"),
        (MeshAxes(data=4, context=2), "ici_context_parallelism"),
        (MeshAxes(expert=8), "ici_expert_parallelism"),
    ],
)
def test_make_mesh_refuses_axes_that_cannot_be_trained(axes, key):
    """A mesh of another size, and axes that can only be planned, are refused by key."""
    with pytest.raises(ConfigError) as caught:
        make_mesh(axes)
    assert caught.value.key == key


def test_process_rows_of_one_process_are_all_rows():
    """The rows of a process follow from the sharding: with one process all of them, once."""
    mesh = make_mesh(MeshAxes(data=2, fsdp=2, tensor=2))
    assert process_rows(mesh, 8).tolist() == list(range(8))
    rows = jax.device_put(np.arange(8), batch_sharding(mesh))
    assert sorted({shard.index[0].start or 0 for shard in rows.addressable_shards}) == [0, 2, 4, 6]
