"""Compile programs for absent TPU slices.

Whether a program fits is the compiler's own answer: it refuses a program that needs
more memory than a chip has.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from rampup.errors import MissingDependencyError
from rampup.plan.topology import Topology

INSTALL = "pip install 'rampup[tpu-compile]' installs the version that JAX needs"
# For libtpu on a machine without a TPU: it asks no metadata server, searches for no
# worker, logs nothing, and its lock file does not end a second process that compiles
# too.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_HBM_OPTION = "xla_tpu_max_hbm_size_mib"  # caps the memory that a program may use
# The version that JAX 0.7.2 asks for. Older ones end the process with a segmentation
# fault after a compilation.
_OLDEST_LIBTPU = (0, 0, 23)


def compiler_version() -> str:
    """Return the version of the TPU compiler, or refuse one that is missing or too
    old.
    """
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(
            "compiling for an absent TPU takes its compiler, the package libtpu",
            fix=INSTALL,
        ) from None
    if tuple(map(int, re.findall(r"\d+", version)))[:3] < _OLDEST_LIBTPU:
        oldest = ".".join(map(str, _OLDEST_LIBTPU))
        raise MissingDependencyError(
            f"libtpu {version} cannot compile for an absent TPU, but {oldest} and newer"
            " can",
            fix=INSTALL,
        )
    return f"libtpu {version}"


def use_cpu_as_host() -> None:
    """Keep JAX of a command away from a TPU runtime: with libtpu installed, it would
    search for chips on this machine.
    """
    jax.config.update("jax_platforms", "cpu")


def topology_devices(topology: Topology | str) -> Sequence[Any]:
    """Return the devices of a topology or its name. Programs can be compiled for them
    but cannot run on them.

    Args:
        topology: such as "v5e:4x4" or "2*v5p:4x4x4"; `rampup explain topology` lists
            the names.

    Returns:
        The devices, for `rampup.make_mesh(devices=...)`.

    Raises:
        ConfigError: there is no such topology.
        MissingDependencyError: libtpu is not installed.

    Example:
        >>> topology_devices("v5e:3x3")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        rampup.errors.ConfigError: topology=v5e:3x3 is not a slice of v5e; nearest: ...
    """
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    compiler_version()
    return _devices(topology)


@functools.cache
def _devices(topology: Topology) -> Sequence[Any]:
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": topology.chips_per_host}
    if any(topology.wrap):
        options["wrap"] = topology.wrap
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    # libtpu reads them when it is loaded; a compilation later does not need them.
    absent = _ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({name: _ENVIRONMENT[name] for name in absent})
    try:
        found = topologies.get_topology_desc(
            topology.slice_name, platform="tpu", **options
        )
    finally:
        for name in absent:
            del os.environ[name]
    return tuple(found.devices)


def compile_for(lowered: Any, *, hbm_bytes: int | None = None) -> Any:
    """Compile a program for a topology.

    `hbm_bytes` limits the memory of a device that it may use, rounded down to MiB.
    """
    options = {} if hbm_bytes is None else {_HBM_OPTION: str(hbm_bytes >> 20)}
    return lowered.compile(compiler_options=options or None)
