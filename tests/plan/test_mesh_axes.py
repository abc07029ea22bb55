"""Tests of rampup.plan.mesh_axes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import AXES, MeshAxes


@pytest.mark.parametrize(
    ("devices", "ici", "dcn", "slices", "expected"),
    [
        (1, {"data": -1}, {}, -1, {}),
        (8, {"data": -1}, {}, -1, {"data": 8}),
        (8, {"fsdp": -1}, {"data": -1}, -1, {"fsdp": 8}),
        (8, {"data": -1, "tensor": 2}, {}, -1, {"data": 4, "tensor": 2}),
        (16, {"fsdp": 4}, {"data": -1}, -1, {"fsdp": 4, "data": 4}),
        (16, {"fsdp": -1}, {"data": -1}, 2, {"fsdp": 8, "data": 2}),
        (16, {"data": 2, "pipeline": 2}, {"pipeline": 2, "data": 2}, -1, {"data": 4, "pipeline": 4}),
        (64, {"data": -1, "context": 2, "expert": 2}, {"data": 2}, 2, {"data": 16, "context": 2, "expert": 2}),
    ],
)
def test_resolve(devices, ici, dcn, slices, expected):
    """Sizes of -1 are inferred, and the sizes of dcn and ici are multiplied."""
    axes = MeshAxes.resolve(devices, ici=ici, dcn=dcn, num_slices=slices)
    assert {axis: getattr(axes, axis) for axis in AXES} == dict.fromkeys(AXES, 1) | expected
    assert axes.num_devices == devices


@given(st.integers(1, 64), st.fixed_dictionaries({axis: st.sampled_from([-1, 0, 1, 1, 2, 3]) for axis in AXES}))
def test_resolve_uses_all_devices_or_raises(devices, ici):
    """Any request either multiplies to the number of devices or raises an error that names a key."""
    try:
        axes = MeshAxes.resolve(devices, ici=ici)
    except RampupError as error:
        assert error.key
    else:
        assert axes.num_devices == devices
        assert axes.data_parallel_size * axes.tensor * axes.context * axes.expert * axes.pipeline == devices
        assert all(size in (-1, getattr(axes, axis)) for axis, size in ici.items())


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ({"data": -1, "fsdp": -1}, {}, r"only one ici_\*_parallelism may be -1"),
        ({"tensor": 0}, {}, "ici_tensor_parallelism=0 must be -1"),
        ({"tensor": -2}, {}, "ici_tensor_parallelism=-2 must be -1"),
        ({"tensor": 3, "data": -1}, {}, "=8 must be a multiple of ici_tensor_parallelism = 3|slices\\)=8 must be a multiple"),
        ({"data": 4}, {}, "ici_data_parallelism = 4 must be devices per slice"),
        ({"data": 16}, {}, "ici_data_parallelism = 16 must be devices per slice"),
        ({"data": -1}, {"data": 3}, "num_devices=8 must be a multiple of the number of slices = 3"),
    ],
)
def test_resolve_refuses_other_sizes(ici, dcn, message):
    """A size is -1 or positive, one of a group is -1, and all multiply to the devices, of which every slice has as many."""
    with pytest.raises(ConfigError, match=message):
        MeshAxes.resolve(8, ici=ici, dcn=dcn)


def test_resolve_keeps_the_slices_of_each_axis():
    """The slices along each axis are kept beside the sizes over all slices, inferred ones too; they divide their axis."""
    axes = MeshAxes.resolve(32, ici={"fsdp": -1}, dcn={"data": -1, "pipeline": 2}, num_slices=4)
    assert (axes.data, axes.fsdp, axes.pipeline, axes.num_slices) == (2, 8, 2, 4)
    assert dict(zip(AXES, axes.slices, strict=True)) == dict.fromkeys(AXES, 1) | {"data": 2, "pipeline": 2}
    assert MeshAxes.resolve(8, ici={"data": -1}).num_slices == 1
    for slices in ((3, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1)):
        with pytest.raises(ConfigError, match="slices do not divide"):
            MeshAxes(data=4, slices=slices)
