"""How much of a device's arithmetic a training step uses."""

from __future__ import annotations

import functools
import re

# Dense bfloat16 FLOP/s of what JAX counts as one device, from the makers' data sheets: a core of TPU v2, v3 and v7, a chip of
# the other TPUs, a whole GPU. The first name counts that stands in a device's kind.
_PEAKS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "NVIDIA L4": 121e12,
}


@functools.cache
def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of a device in bfloat16 without sparsity, or None for one that is not known.

    Args:
        device_kind: as `jax.Device.device_kind` says it.

    Example:
        >>> peak_flops("TPU v5 lite"), peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
        (197000000000000.0, 989000000000000.0, None)
    """
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device_kind)), None)


def utilisation(flops_per_device: float, device_kind: str) -> dict[str, float]:
    """Return a step's model FLOP/s as metrics: `tflops_per_device` and, where the device's peak is known, `mfu`.

    `mfu` is the model FLOP/s utilisation of Chowdhery et al., "PaLM" (2022), appendix B: what is computed again counts as
    waste. It is relative to the bfloat16 peak whatever type the model computes in.

    Args:
        flops_per_device: FLOP/s of the model on one device.
        device_kind: see `peak_flops`.

    Example:
        >>> utilisation(98.5e12, "TPU v5 lite"), utilisation(2e9, "cpu")
        ({'tflops_per_device': 98.5, 'mfu': 0.5}, {'tflops_per_device': 0.002})
    """
    found = {"tflops_per_device": round(flops_per_device / 1e12, 6)}
    peak = peak_flops(device_kind)
    return found if peak is None else {**found, "mfu": round(flops_per_device / peak, 6)}
