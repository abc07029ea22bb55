"""Large memory pages for work on a CPU.

XLA takes a step's temporary memory from the C library and gives it back after the step, and the kernel hands it out anew in
pages of 4 KiB, with a fault for each. From version 2.35 on, glibc can ask for large pages instead (its manual, "Memory
Allocation Tunables": `glibc.malloc.hugetlb`), but it reads that wish only when a process starts.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
FIRST_GLIBC = (2, 35)
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask_for_huge_pages() -> None:
    """Start this process anew with large pages, where the kernel gives them on request and nobody has said what is wanted.

    Only where JAX has no other device than the CPU: the memory of a machine with accelerators is left as it is.

    With `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` in the environment the pages stay small.
    """
    before = os.environ.get(VARIABLE, "")
    if TUNABLE in before or not sys.executable or not on_offer() or has_accelerators():
        return
    os.environ[VARIABLE] = ":".join(filter(None, (before, f"{TUNABLE}=1")))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def on_offer() -> bool:
    """Say whether large pages are to be had on request, and only then."""
    library, version = platform.libc_ver()
    try:
        return library == "glibc" and _numbers(version) >= FIRST_GLIBC and "[madvise]" in KERNEL.read_text()
    except (OSError, ValueError):
        return False


def has_accelerators() -> bool:
    """Say whether a package is installed that gives JAX another device than the CPU, and JAX is not told to use the CPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return bool(metadata.entry_points(group="jax_plugins")) or _is_installed("libtpu")


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
