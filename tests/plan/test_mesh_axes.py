"""Tests of rampup.plan.mesh_axes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError
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


def test_two_inferred_sizes():
    """At most one size of a group may be -1."""
    with pytest.raises(ConfigError, match=r"only one ici_\*_parallelism may be -1"):
        MeshAxes.resolve(8, ici={"data": -1, "fsdp": -1})


@pytest.mark.parametrize("size", [0, -2])
def test_bad_sizes(size):
    """A size must be -1 or positive."""
    with pytest.raises(ConfigError, match="ici_tensor_parallelism=") as caught:
        MeshAxes.resolve(8, ici={"tensor": size})
    assert caught.value.key == "ici_tensor_parallelism"


@pytest.mark.parametrize("ici", [{"tensor": 3, "data": -1}, {"data": 4}, {"data": 16}])
def test_sizes_must_multiply_to_the_devices(ici):
    """Sizes that do not multiply to the number of devices are rejected."""
    with pytest.raises(BatchDivisibilityError) as caught:
        MeshAxes.resolve(8, ici=ici)
    assert math.gcd(caught.value.value, caught.value.divisor) < max(caught.value.value, caught.value.divisor)


def test_slices_must_divide_devices():
    """All slices have the same number of devices."""
    with pytest.raises(BatchDivisibilityError, match="num_devices=10 must be a multiple of the number of slices = 4"):
        MeshAxes.resolve(10, ici={"data": -1}, dcn={"data": 4})


def test_resolve_keeps_the_slices_of_each_axis():
    """The slices along each axis are kept beside the sizes over all slices, inferred ones too."""
    axes = MeshAxes.resolve(32, ici={"fsdp": -1}, dcn={"data": -1, "pipeline": 2}, num_slices=4)
    assert (axes.data, axes.fsdp, axes.pipeline, axes.num_slices) == (2, 8, 2, 4)
    assert dict(zip(AXES, axes.slices, strict=True)) == dict.fromkeys(AXES, 1) | {"data": 2, "pipeline": 2}
    assert MeshAxes.resolve(8, ici={"data": -1}).num_slices == 1


@pytest.mark.parametrize("slices", [(3, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1)])
def test_slices_divide_their_axis(slices):
    """An axis has whole slices."""
    with pytest.raises(ConfigError, match="slices do not divide"):
        MeshAxes(data=4, slices=slices)
