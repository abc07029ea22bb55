"""Tests of rampup.run.metrics; the lines of a run are in test_loop."""

import pytest

from rampup.run.metrics import peak_flops, utilisation


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v4", 275e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
        ("cpu", None),
    ],
)
def test_peak_flops_by_the_names_that_jax_gives(kind, peak):
    """The first name that occurs in a device's kind decides, and an unknown device has no peak."""
    assert peak_flops(kind) == peak


def test_utilisation_has_mfu_only_with_a_peak():
    """Every device has FLOP/s, and their fraction of the peak if it is known."""
    assert utilisation(494.5e12, "NVIDIA H200") == {"tflops_per_device": 494.5, "mfu": 0.5}
    assert set(utilisation(1e9, "cpu")) == {"tflops_per_device"}
