"""Huge memory pages for work on a CPU.

XLA allocates a step's temporary buffers from the C library on every step and frees them after it. With pages of 4 KiB, the
kernel handles one page fault per page, every time. From version 2.35 on, glibc can ask for huge pages instead (its manual,
"Memory Allocation Tunables": `glibc.malloc.hugetlb`), but it reads the tunable only when a process starts.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from rampup.cli.common import SWITCH

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
FIRST_GLIBC = (2, 35)
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The device files of TPU chips: accel0 up to v4, vfio/0 since v5e.
DEVICES, TPU_FILES = Path("/dev"), ("accel[0-9]*", "vfio/[0-9]*")


def enable_huge_pages() -> None:
    """Re-execute this process with huge pages if the kernel offers them and the user has not set the tunable.

    Only if JAX has no other device than the CPU. `RAMPUP_HUGE_PAGES=0` in the environment turns this off.
    """
    before = os.environ.get(VARIABLE, "")
    if os.environ.get(SWITCH) == "0" or TUNABLE in before or not sys.executable or not on_offer() or has_accelerators():
        return
    os.environ[VARIABLE] = ":".join(filter(None, (before, f"{TUNABLE}=1")))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def on_offer() -> bool:
    """Return whether transparent huge pages are in `madvise` mode and the C library can ask for them."""
    library, version = platform.libc_ver()
    try:
        recent = tuple(map(int, version.split("."))) >= FIRST_GLIBC
        return library == "glibc" and recent and "[madvise]" in KERNEL.read_text()
    except (OSError, ValueError):
        return False


def has_accelerators() -> bool:
    """Return whether JAX has another device than the CPU: a plugin is installed, or the machine has TPU chips.

    libtpu without a chip is none: it also compiles for chips that are not here.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return bool(metadata.entry_points(group="jax_plugins")) or any(any(DEVICES.glob(name)) for name in TPU_FILES)
