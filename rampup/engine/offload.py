"""Memory: what a compiled program needs, what the devices have, and keeping state in
host memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rampup.engine.mesh import replicated
from rampup.errors import ConfigError

HOST = "pinned_host"
# The share of this machine's free memory that programs on simulated devices may use:
# everything else runs in it too.
SHARE_OF_HOST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Memory per device that a program needs while it runs, in bytes."""

    arguments: int
    outputs: int
    aliased: int  # results that are written into the memory of donated arguments
    temporary: int
    code: int
    host: int = 0  # arguments and results in host memory, which the others leave out
    peak: int | None = (
        # on a TPU, by the compiler: up to libtpu 0.0.50, `temporary` counts
        # fragmentation twice
        None
    )

    @property
    def total(self) -> int:
        """Total bytes of device memory."""
        total = (
            self.arguments + self.outputs - self.aliased + self.temporary + self.code
        )
        # The peak includes what is in host memory, so it is an upper bound only if
        # nothing is there.
        return (
            total
            if self.peak is None or self.host
            else min(total, self.peak + self.code)
        )


def program_memory(compiled: Any) -> ProgramMemory:
    """Return the memory per device that a `jax.stages.Compiled` needs, as the compiler
    planned it.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ConfigError(
            f"the backend {jax.default_backend()!r} does not report how much memory a"
            " compiled program needs"
        )
    devices = [
        device
        for sharding in jax.tree.leaves(compiled.input_shardings)
        for device in sharding.device_set
    ]
    platform = devices[0].platform if devices else jax.default_backend()
    return ProgramMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes,
        peak=(
            getattr(stats, "peak_memory_in_bytes", None) if platform == "tpu" else None
        ),
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of the compiler, a device or the host means that memory
    ran out.
    """
    # JAX 0.7 says INTERNAL where a CPU cannot allocate.
    words = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def device_limit(device: jax.Device) -> int | None:
    """Return the bytes of memory that a device has for programs, or None if it has no
    memory of its own.
    """
    return (device.memory_stats() or {}).get("bytes_limit")


def peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the largest peak memory of the devices so far in bytes, or None if they do
    not report it.
    """
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def room_to_run(devices: Sequence[jax.Device]) -> int:
    """Return the bytes that a program may use on each device: the smallest limit, or a
    share of this machine's free memory.
    """
    limits = [device_limit(device) for device in devices]
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits):
        return min(known)
    free = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(
            1024
            * next(
                int(line.split()[1])
                for line in lines
                if line.startswith("MemAvailable:")
            )
        )
    except (OSError, StopIteration, ValueError):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # Not Linux: assume that half of the memory is free.
            free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    with contextlib.suppress(OSError, ValueError):
        # Control groups of version 2, as containers have them. Without a limit,
        # memory.max contains "max".
        folder = Path("/sys/fs/cgroup")
        limit, used = (
            (folder / name).read_text(encoding="ascii")
            for name in ("memory.max", "memory.current")
        )
        free.append(int(limit) - int(used))
    return int(SHARE_OF_HOST * max(min(free, default=0), 0)) // len(devices)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes per device of arrays, or of their shapes and shardings."""
    shapes = [
        (leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def host_memory_problem(mesh: Mesh) -> str | None:
    """Return why this backend cannot keep a training state in host memory, or None.
    Compiles a small program to find out.
    """
    backend = mesh.devices.flat[0].platform
    # Another process's device does not list its memories, nor does one of a topology
    # that is only compiled for.
    local = next(iter(mesh.local_devices), None)
    if local is not None and HOST not in [
        memory.kind for memory in local.addressable_memories()
    ]:
        return f"the backend {backend!r} has no {HOST} memory"
    try:
        _host_program(mesh)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return (
            f"the backend {backend!r} cannot use {HOST} memory in a program:"
            f" {str(error)[:100]}"
        )
    return None


def reports_host_memory(mesh: Mesh) -> bool:
    """Return whether this backend counts a program's host memory apart from device
    memory. On CPU they are the same.
    """
    return (
        host_memory_problem(mesh) is None
        and program_memory(_host_program(mesh)).host > 0
    )


@functools.cache
def _host_program(mesh: Mesh) -> Any:
    """Return a program that copies an array from host memory to the devices and
    back.
    """
    device = replicated(mesh)
    host = device.with_memory_kind(HOST)
    shape: Any = jax.eval_shape(lambda: jax.numpy.zeros(8)).update(sharding=host)
    return (
        jax.jit(lambda x: jax.device_put(x, device) + 1, out_shardings=host)
        .lower(shape)
        .compile()
    )


def device_shardings(shardings: Any) -> Any:
    """Return shardings with those of host memory replaced by the default memory of the
    same devices.
    """

    def on_device(sharding: Any) -> Any:
        if sharding.memory_kind != HOST:
            return sharding
        # Only a device of this process says what its default memory is called. On all
        # accelerators it is "device".
        local = next(iter(sharding.addressable_devices), None)
        return sharding.with_memory_kind(
            "device" if local is None else local.default_memory().kind
        )

    return jax.tree.map(on_device, shardings)


def host_shardings(tree: Any) -> Any:
    """Return the shardings of a tree's leaves with arrays in host memory; scalars stay
    on the devices.
    """
    return jax.tree.map(
        lambda leaf: (
            leaf.sharding.with_memory_kind(HOST) if leaf.ndim else leaf.sharding
        ),
        tree,
    )


def fetch_offloaded(state: Any, shardings: Any) -> Any:
    """Return a state with arrays in host memory copied to the devices, in a program
    whose `out_shardings` bring it back.
    """
    on_devices = device_shardings(shardings)
    is_on_devices = jax.tree.leaves(on_devices) == jax.tree.leaves(shardings)
    return state if is_on_devices else jax.device_put(state, on_devices)
