"""Tests of rampup.engine.mesh."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rampup.engine import mesh
from rampup.engine.mesh import batch_sharding, make_mesh, process_rows
from rampup.errors import ConfigError
from rampup.plan import MeshAxes


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
    """The rows of a process follow from the sharding: with one process all of them,
    once.
    """
    made = make_mesh(MeshAxes(data=2, fsdp=2, tensor=2))
    assert process_rows(made, 8).tolist() == list(range(8))
    rows = jax.device_put(np.arange(8), batch_sharding(made))
    assert sorted({shard.index[0].start or 0 for shard in rows.addressable_shards}) == [
        0,
        2,
        4,
        6,
    ]


def device(number, slice_index, platform="tpu"):
    """Return a stand-in for a device in a slice; the arrangement reads only these
    attributes.
    """
    return SimpleNamespace(
        id=number, slice_index=slice_index, platform=platform, device_kind=platform
    )


@pytest.mark.parametrize(
    ("axes", "crossed"),
    [
        (MeshAxes(data=4), (0,)),
        (MeshAxes(data=2, fsdp=4), (0,)),
        (MeshAxes(data=4, fsdp=2, slices=(1, 2, 1, 1, 1, 1)), (1,)),
        (MeshAxes(data=2, tensor=2, pipeline=2, slices=(1, 1, 1, 1, 1, 2)), (3,)),
        (MeshAxes(data=4, fsdp=4, slices=(2, 2, 1, 1, 1, 1)), (0, 1)),
    ],
)
def test_arrange_puts_slices_along_the_named_axes(axes, crossed, monkeypatch):
    """Moving along an axis leaves the slice only where the axis has several, at the
    multiples of its devices per slice.
    """
    monkeypatch.setattr(
        mesh.mesh_utils,
        "create_device_mesh",
        lambda shape, group, **_: np.array(group, object).reshape(shape),
    )
    num_slices = 4 if len(crossed) == 2 else 2
    per_slice = axes.num_devices // num_slices
    # In an order in which slices alternate.
    devices = [device(n, n % num_slices) for n in range(axes.num_devices)]
    found = np.vectorize(lambda d: d.slice_index)(mesh._arrange(axes, devices))
    assert found.shape == (axes.data, axes.fsdp, axes.tensor, axes.pipeline)
    assert np.bincount(found.ravel()).tolist() == [per_slice] * num_slices
    for axis in range(4):
        changes = np.flatnonzero(
            np.any(
                np.diff(found, axis=axis) != 0,
                axis=tuple(k for k in range(4) if k != axis),
            )
        )
        size = found.shape[axis] // 2
        assert changes.tolist() == ([size - 1] if axis in crossed else [])


def test_arrange_refuses_a_mesh_for_other_slices():
    """A mesh without a data axis to put the slices on, or for another number of slices,
    is refused with the numbers.
    """
    devices = [device(n, n // 4) for n in range(8)]
    for axes in (MeshAxes(fsdp=8), MeshAxes(data=8, slices=(4, 1, 1, 1, 1, 1))):
        with pytest.raises(
            ConfigError, match="the devices form num_slices=2"
        ) as caught:
            mesh._arrange(axes, devices)
        assert (caught.value.key, caught.value.nearest) == ("num_slices", (2,))


def test_make_mesh_takes_devices_in_a_row_for_a_slice():
    """Devices that do not say which slice they are in form slices in their order; by
    default, all are on the data axis.
    """
    found = make_mesh(MeshAxes(data=2, fsdp=2, pipeline=2, slices=(1, 1, 1, 1, 1, 2)))
    assert dict(found.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "stage": 2}
    assert [d.id for d in found.devices[..., 0].flat] == [0, 1, 2, 3]
    plain, sliced = make_mesh(), make_mesh(MeshAxes(data=8, slices=(2, 1, 1, 1, 1, 1)))
    assert (plain.devices == sliced.devices).all()
