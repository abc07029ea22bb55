"""Options of the TPU compiler with which rampup compiles its programs.

They change how a program communicates and when, not what it computes. Programs were compiled for these chips with them, not run
on them. This module imports no JAX, so that a plan can name the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rampup.plan.topology import Topology

# Layouts in which the reduce-scatter of a gradient needs no transpose and no padding. Without them the compiler exchanges
# padded buffers, or reduces whole gradients and slices them.
_SCATTER = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
}
# Collectives run on the SparseCores, asynchronously, while the TensorCore computes.
_SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
# v5e has no SparseCores. There the latency-hiding scheduler and asynchronous fusions of collectives are the compiler's default.
TPU_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"v5e": _SCATTER, "v5p": _SCATTER | _SPARSE_CORE, "v6e": _SCATTER | _SPARSE_CORE}
)
# What JAX calls the devices of these generations.
_GENERATIONS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def tpu_options(kind: str, flags: str = "") -> dict[str, str]:
    """Return the options for a TPU generation; none for another device.

    Args:
        kind: the compiler's name of the generation, such as `v5p`, or JAX's name of the device.
        flags: the value of `LIBTPU_INIT_ARGS`. Options that it sets are left out, so that the user's value counts.

    Example:
        >>> sorted(tpu_options("TPU v5 lite")) == sorted(tpu_options("v5e")), tpu_options("cpu")
        (True, {})
        >>> "xla_tpu_assign_all_reduce_scatter_layout" in tpu_options("v5e", "--xla_tpu_assign_all_reduce_scatter_layout=false")
        False
    """
    names = {flag.strip().lstrip("-").partition("=")[0] for flag in flags.split()}
    options = TPU_OPTIONS.get(_GENERATIONS.get(kind, kind), {})
    return {name: value for name, value in options.items() if name not in names}


def topology_facts(topology: Topology) -> dict[str, Any]:
    """Return a topology for JSON, with the options that its programs are compiled with."""
    return topology.to_dict() | {"compiler_options": tpu_options(topology.chip.name)}
