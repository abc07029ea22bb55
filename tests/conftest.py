"""Every test runs on eight pretended CPU devices, and a program that two tests share is compiled once."""

import tempfile

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

_cache = tempfile.TemporaryDirectory(prefix="rampup-test-cache-")
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
