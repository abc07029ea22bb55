"""Every test runs on eight pretended CPU devices, and a program that two tests share is compiled once, by whichever process."""

import os
import signal
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="rampup-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Commands that tests start need not start anew for it.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")

import jax

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# What takes long runs only where it is asked for by its marker: `pytest -m faults`, `pytest -m notebooks`.
ON_REQUEST = ("faults", "notebooks")


def pytest_collection_modifyitems(config, items):
    """Leave out what nobody has asked for."""
    unasked = [name for name in ON_REQUEST if name not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
