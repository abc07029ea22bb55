"""Every test runs on eight pretended CPU devices, and a program that two tests share is compiled once."""

import os
import tempfile

_cache = tempfile.TemporaryDirectory(prefix="rampup-test-cache-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402 - it reads the environment

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
