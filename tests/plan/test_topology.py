"""Tests of rampup.plan.topology: names, shapes, torus links and figures."""

import math

import pytest

from rampup.errors import ConfigError
from rampup.plan.topology import CHIPS, Topology, known_topologies, peak_flops

# Rows of MaxText's `utils/accelerator_to_spec_map.py`: product name, compiler's name, devices, wrap.
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
    """Every listed slice is found by both its names and has published figures with a source."""
    seen = set()
    for topology in known_topologies():
        assert Topology.parse(topology.name) == Topology.parse(topology.product_name) == topology
        facts = topology.to_dict()
        assert all(facts[name] > 0 for name in ("hbm_bytes", "peak_flops", "hbm_bandwidth", "ici_bandwidth"))
        assert facts["source"].startswith("https://")
        assert topology.num_devices == math.prod(topology.shape) * topology.chip.devices
        seen.add(topology.chip.name)
    assert seen == set(CHIPS)


def test_slices_multiply_the_devices():
    """A number in front of either name is a number of slices."""
    for text in ("2*v5e:4x4", "2 * v5litepod-16", "2x v5e-16", "2*V5E:4X4"):
        topology = Topology.parse(text)
        assert (topology.name, topology.num_devices, topology.num_slices) == ("2*v5e:4x4", 32, 2)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("v6e:64x64", ("v6e:16x16",)),
        ("v5e:3x3", ("v5e:2x4", "v5e:4x4")),
        ("v5e-12", ("v5e:2x4", "v5e:4x4")),
        ("v5e:4x4x4", ("v5e:8x8",)),
        ("v5p:4x4x2", ("v5p:2x4x4",)),
        ("v5p-100", ("v5p:2x4x4", "v5p:4x4x4")),
        ("v9:2x2", tuple(CHIPS)),
        ("0*v5e:2x2", ()),
        ("v5e", ()),
        ("", ()),
        ("v5e:xx", ("v5e:8x8",)),
        (f"v5e:{'9' * 5000}x1", ()),
        (None, ()),
    ],
)
def test_unknown_slices_are_refused_with_the_nearest(text, nearest):
    """The error is about the key topology and offers slices that exist."""
    with pytest.raises(ConfigError) as error:
        Topology.parse(text)
    assert error.value.key == "topology"
    assert tuple(error.value.nearest) == nearest


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 3090", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_the_names_that_jax_gives(kind, peak):
    """The first name that occurs in a device's kind decides, and an unknown device has no peak."""
    assert peak_flops(kind) == peak
