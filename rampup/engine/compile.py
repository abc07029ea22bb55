"""Compiles programs once, when they are first needed, and with which options.

JAX is imported only where something is compiled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

Lower = Callable[[], Any]
# Level 2 compiles a fifth faster than level 3, and the steps of the models here run
# equally fast.
CPU_LEVEL, _LEVEL = 2, "xla_backend_optimization_level"


class Compiler:
    """A cache of ahead-of-time compiled programs on a mesh. Before its first run, a
    program waits until all processes have it.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.num_compilations = 0
        self.waited_seconds = 0.0  # of callers, for a trace or a compilation
        self._lowered: dict[Hashable, Any] = {}
        self._programs: dict[Hashable, Any] = {}

    def get(self, key: Hashable, lower: Lower) -> Any:
        """Return a program, which is compiled when it is first asked for."""
        if key not in self._programs:
            from rampup.engine.processes import wait_for_all

            self.trace(key, lower)
            start = time.perf_counter()
            self._programs[key] = compile_program(self._lowered.pop(key))
            self.num_compilations += 1
            self.waited_seconds += time.perf_counter() - start
            wait_for_all(self._mesh)
        return self._programs[key]

    def trace(self, key: Hashable, lower: Lower) -> None:
        """Lower a program before it is needed, so that the caller sees now what its
        trace raises.
        """
        if key not in self._programs and key not in self._lowered:
            start = time.perf_counter()
            self._lowered[key] = lower()
            self.waited_seconds += time.perf_counter() - start


def compile_program(lowered: Any, *, level: int = CPU_LEVEL) -> Any:
    """Compile a `jax.stages.Lowered`, on a CPU at a level, unless `XLA_FLAGS` has
    one.
    """
    import jax

    options = None
    if jax.default_backend() == "cpu" and _LEVEL not in os.environ.get("XLA_FLAGS", ""):
        options = {_LEVEL: level}
    return lowered.compile(compiler_options=options)


def enable_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in a folder for later processes, unless JAX has a cache
    folder already. None changes nothing.
    """
    import jax

    if folder is not None and jax.config.jax_compilation_cache_dir is None:
        # The URL of a bucket is no path, and JAX takes it as it is.
        jax.config.update(
            "jax_compilation_cache_dir",
            folder if "://" in folder else str(Path(folder).expanduser()),
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
