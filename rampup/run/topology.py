"""The devices of TPU slices that are not here, from the TPU compiler: programs can be compiled for them, and not run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.topology import Topology
from rampup.run.compile import compile_for_tpu

INSTALL = "pip install 'rampup[tpu-compile]' installs it"
# What libtpu needs to be loaded on a machine without a TPU: no metadata server is asked, no worker is searched for, nothing is
# logged, and its lock file does not end a second process that compiles too.
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
# Caps the memory that a program may use.
_HBM_OPTION = "xla_tpu_max_hbm_size_mib"
_lock = threading.Lock()


def compiler_version() -> str:
    """Return the version of the TPU compiler.

    Raises:
        MissingDependencyError: it is not installed.
    """
    for package in ("libtpu", "libtpu-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    raise MissingDependencyError(f"compiling for a TPU that is not here takes its compiler, the package libtpu; {INSTALL}")


def use_cpu_as_host() -> None:
    """Keep JAX of a command away from a TPU runtime: with libtpu installed, it would search for chips on this machine."""
    jax.config.update("jax_platforms", "cpu")


def topology_devices(topology: Topology | str) -> Sequence[Any]:
    """Return the devices of a topology, on none of which anything can run: they are compiled for.

    Sets the environment variables that libtpu needs, unless they are set.

    Args:
        topology: the slices, or their name.

    Raises:
        ConfigError: there is no such topology.
        MissingDependencyError: libtpu is not installed.
    """
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    compiler_version()
    with _lock:
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
    # They stay set: libtpu reads some of them at the first compilation.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(topology.slice_name, platform="tpu", **options)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the compiler {compiler_version()} refuses topology={topology.name}: {reason}", key="topology"
        ) from error
    if len(found.devices) != topology.num_devices:
        rule = f"has {topology.num_devices} devices, but {compiler_version()} gives {len(found.devices)}"
        raise ConfigError(f"topology={topology.name} {rule}", key="topology")
    return tuple(found.devices)


def compile_for(lowered: Any, *, kind: str = "", hbm_bytes: int | None = None) -> Any:
    """Compile a program that was lowered for the devices of a topology.

    Args:
        lowered: a `jax.stages.Lowered`.
        kind: the TPU generation, whose options `rampup train` would compile with; "" = without them.
        hbm_bytes: let the program use less of each device's memory, rounded down to MiB; None = all.

    Raises:
        jax.errors.JaxRuntimeError: among others if the program does not fit; see `rampup.run.offload.is_out_of_memory`.
    """
    options = {} if hbm_bytes is None else {_HBM_OPTION: str(hbm_bytes >> 20)}
    with _without_persistent_cache():
        return compile_for_tpu(lowered, kind, options)


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """JAX writes such programs into its cache but cannot read them back without a TPU: it would warn and compile again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)
