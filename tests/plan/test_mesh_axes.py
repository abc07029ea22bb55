"""Tests of rampup.plan.mesh_axes and rampup.plan.topology: axes, names, shapes, torus
links and figures.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError, RampupError
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.topology import CHIPS, Topology, known_topologies, peak_flops


@pytest.mark.parametrize(
    ("devices", "ici", "dcn", "slices", "expected"),
    [
        (1, {"data": -1}, {}, -1, {}),
        (8, {"data": -1}, {}, -1, {"data": 8}),
        (8, {"fsdp": -1}, {"data": -1}, -1, {"fsdp": 8}),
        (8, {"data": -1, "tensor": 2}, {}, -1, {"data": 4, "tensor": 2}),
        (16, {"fsdp": 4}, {"data": -1}, -1, {"fsdp": 4, "data": 4}),
        (16, {"fsdp": -1}, {"data": -1}, 2, {"fsdp": 8, "data": 2}),
        (
            16,
            {"data": 2, "pipeline": 2},
            {"pipeline": 2, "data": 2},
            -1,
            {"data": 4, "pipeline": 4},
        ),
        (
            64,
            {"data": -1, "context": 2, "expert": 2},
            {"data": 2},
            2,
            {"data": 16, "context": 2, "expert": 2},
        ),
    ],
)
def test_resolve(devices, ici, dcn, slices, expected):
    """Sizes of -1 are inferred, and the sizes of dcn and ici are multiplied."""
    axes = MeshAxes.resolve(devices, ici=ici, dcn=dcn, num_slices=slices)
    assert {axis: getattr(axes, axis) for axis in AXES} == dict.fromkeys(
        AXES, 1
    ) | expected
    assert axes.num_devices == devices


@given(
    st.integers(1, 64),
    st.fixed_dictionaries(
        {axis: st.sampled_from([-1, 0, 1, 1, 2, 3]) for axis in AXES}
    ),
)
def test_resolve_uses_all_devices_or_raises(devices, ici):
    """Any request either multiplies to the number of devices or raises an error that
    names a key.
    """
    try:
        axes = MeshAxes.resolve(devices, ici=ici)
    except RampupError as error:
        assert error.key
    else:
        assert axes.num_devices == devices
        assert (
            axes.data_parallel_size
            * axes.tensor
            * axes.context
            * axes.expert
            * axes.pipeline
            == devices
        )
        assert all(size in (-1, getattr(axes, axis)) for axis, size in ici.items())


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ({"data": -1, "fsdp": -1}, {}, r"only one ici_\*_parallelism may be -1"),
        ({"tensor": 0}, {}, "ici_tensor_parallelism=0 must be -1"),
        ({"tensor": -2}, {}, "ici_tensor_parallelism=-2 must be -1"),
        (
            {"tensor": 3, "data": -1},
            {},
            (
                "=8 must be a multiple of ici_tensor_parallelism = 3|slices\\)=8 must"
                " be a multiple"
            ),
        ),
        ({"data": 4}, {}, "ici_data_parallelism = 4 must be devices per slice"),
        ({"data": 16}, {}, "ici_data_parallelism = 16 must be devices per slice"),
        (
            {"data": -1},
            {"data": 3},
            "num_devices=8 must be a multiple of the number of slices = 3",
        ),
    ],
)
def test_resolve_refuses_other_sizes(ici, dcn, message):
    """A size is -1 or positive, one of a group is -1, and all multiply to the devices,
    of which every slice has as many.
    """
    with pytest.raises(ConfigError, match=message):
        MeshAxes.resolve(8, ici=ici, dcn=dcn)


def test_resolve_keeps_the_slices_of_each_axis():
    """The slices along each axis are kept beside the sizes over all slices, inferred
    ones too; they divide their axis.
    """
    axes = MeshAxes.resolve(
        32, ici={"fsdp": -1}, dcn={"data": -1, "pipeline": 2}, num_slices=4
    )
    assert (axes.data, axes.fsdp, axes.pipeline, axes.num_slices) == (2, 8, 2, 4)
    assert dict(zip(AXES, axes.slices, strict=True)) == dict.fromkeys(AXES, 1) | {
        "data": 2,
        "pipeline": 2,
    }
    assert MeshAxes.resolve(8, ici={"data": -1}).num_slices == 1
    for slices in ((3, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1)):
        with pytest.raises(ConfigError, match="slices do not divide"):
            MeshAxes(data=4, slices=slices)


# Rows of MaxText's `utils/accelerator_to_spec_map.py`: product name, compiler's name,
# devices, wrap.
MAXTEXT = [
    ("v5e-1", "v5e:1x1", 1, (False, False, False)),
    ("v5e-16", "v5e:4x4", 16, (False, False, False)),
    ("v6e-256", "v6e:16x16", 256, (True, True, False)),
    ("v4-64", "v4:2x4x4", 32, (False, False, False)),
    ("v5p-128", "v5p:4x4x4", 64, (True, True, True)),
    ("v5p-12288", "v5p:16x16x24", 6144, (True, True, True)),
    ("tpu7x-9216", "tpu7x:12x16x24", 9216, (True, True, True)),
    ("tpu7x-11136", "tpu7x:4x12x116", 11136, (True, True, True)),
]


@pytest.mark.parametrize(("product", "name", "devices", "wrap"), MAXTEXT)
def test_product_names_give_the_slices_of_maxtext(product, name, devices, wrap):
    """Shape, devices and torus links of a product name are those of MaxText's table."""
    topology = Topology.parse(product)
    assert (topology.name, topology.num_devices, topology.wrap) == (name, devices, wrap)
    assert Topology.parse(name) == topology


def test_all_known_topologies_read_back():
    """Every listed slice is found by both its names and has published figures with a
    source.
    """
    seen = set()
    for topology in known_topologies():
        assert (
            Topology.parse(topology.name)
            == Topology.parse(topology.product_name)
            == topology
        )
        facts = topology.to_dict()
        assert all(
            facts[name] > 0
            for name in ("hbm_bytes", "peak_flops", "hbm_bandwidth", "ici_bandwidth")
        )
        assert facts["source"].startswith("https://")
        assert topology.num_devices == math.prod(topology.shape) * topology.chip.devices
        seen.add(topology.chip.name)
    assert seen == set(CHIPS)


def test_slices_multiply_the_devices():
    """A number in front of either name is a number of slices."""
    for text in ("2*v5e:4x4", "2 * v5litepod-16", "2x v5e-16", "2*V5E:4X4"):
        topology = Topology.parse(text)
        assert (topology.name, topology.num_devices, topology.num_slices) == (
            "2*v5e:4x4",
            32,
            2,
        )


NEAREST = {
    "v6e:64x64": ("v6e:16x16",),
    "v5e:3x3": ("v5e:2x4", "v5e:4x4"),
    "v5e-12": ("v5e:2x4", "v5e:4x4"),
}
NEAREST |= {
    "v5e:4x4x4": ("v5e:8x8",),
    "v5p:4x4x2": ("v5p:2x4x4",),
    "v5p-100": ("v5p:2x4x4", "v5p:4x4x4"),
}
NEAREST |= {"v9:2x2": tuple(CHIPS), "v5e:xx": ("v5e:1x1",)}
NEAREST |= dict.fromkeys(["0*v5e:2x2", "v5e", "", f"v5e:{'9' * 5000}x1", None], ())


@pytest.mark.parametrize(("text", "nearest"), NEAREST.items())
def test_unknown_slices_are_refused_with_the_nearest(text, nearest):
    """The error is about the key topology and offers slices that exist."""
    with pytest.raises(ConfigError) as error:
        Topology.parse(text)
    assert error.value.key == "topology"
    assert tuple(error.value.nearest) == nearest


PEAKS = {
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
}
PEAKS |= {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 3090": None,
    "cpu": None,
}


@pytest.mark.parametrize(("kind", "peak"), PEAKS.items())
def test_peak_flops_by_the_names_that_jax_gives(kind, peak):
    """The first name that occurs in a device's kind decides, and an unknown device has
    no peak.
    """
    assert peak_flops(kind) == peak
