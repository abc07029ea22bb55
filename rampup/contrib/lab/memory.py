"""Memory: what a compiled program needs, and what the devices have."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.errors import ConfigError

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
    # On a TPU, by the compiler: up to libtpu 0.0.50, `temporary` counts fragmentation
    # twice.
    peak: int | None = None

    @property
    def total(self) -> int:
        """Total bytes of device memory."""
        own = self.arguments + self.outputs - self.aliased + self.temporary
        # The peak includes what is in host memory, so it is an upper bound only if
        # nothing is there.
        if self.peak is not None and not self.host:
            own = min(own, self.peak)
        return own + self.code


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
    shardings = jax.tree.leaves(compiled.input_shardings)
    platforms = [device.platform for x in shardings for device in x.device_set]
    has_peak = (platforms or [jax.default_backend()])[0] == "tpu"
    return ProgramMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes,
        peak=getattr(stats, "peak_memory_in_bytes", None) if has_peak else None,
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


def smallest_limit(devices: Sequence[jax.Device]) -> int | None:
    """Return the bytes of memory that each of some devices has for programs, or None if
    one has no memory of its own.
    """
    stats = [device.memory_stats() or {} for device in devices]
    known = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    return min(known) if len(known) == len(stats) else None


def room_to_run(devices: Sequence[jax.Device]) -> int:
    """Return the bytes that a program may use on each device: the smallest limit, or a
    share of this machine's free memory.
    """
    if (limit := smallest_limit(devices)) is not None:
        return limit
    try:
        memory = Path("/proc/meminfo").read_text(encoding="ascii")
        free = 1024 * int(re.findall(r"MemAvailable: *(\d+)", memory)[0])
    except OSError:
        # Not Linux: assume that half of the memory is free.
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(SHARE_OF_HOST * free) // len(devices)
