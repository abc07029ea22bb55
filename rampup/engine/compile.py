"""Compiles programs once, on request or in a background thread before they are needed,
and with which options.

JAX is imported only where something is compiled.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

Lower = Callable[[], Any]
# Level 2 compiles a fifth faster than level 3, and the steps of the models here run
# equally fast.
CPU_LEVEL, _LEVEL = 2, "xla_backend_optimization_level"


class Compiler:
    """A cache of ahead-of-time compiled programs, with one background thread. A new
    program waits for `before_first_run`.
    """

    def __init__(self, before_first_run: Callable[[], None] = lambda: None) -> None:
        self._before_first_run = before_first_run
        self.num_compilations = 0
        self.waited_seconds = 0.0  # of callers, for a trace or a compilation
        self._programs: dict[Hashable, Any] = {}
        self._pending: dict[Hashable, Future[Any]] = {}
        # One compilation in the background at a time: they share the cores with
        # training.
        self._turn = threading.Lock()
        self._count = threading.Lock()

    def get(self, key: Hashable, lower: Lower) -> Any:
        """Return a program; raise the error of one that failed. Lower and compile it
        unless it is compiled or pending.
        """
        if key not in self._programs:
            start, program = time.perf_counter(), None
            if pending := self._pending.pop(key, None):
                with contextlib.suppress(CancelledError):
                    program = pending.result()
            if program is None:
                program = self._compile(lower())
            self._programs[key] = program
            self.waited_seconds += time.perf_counter() - start
            self._before_first_run()
        return self._programs[key]

    def compile_async(self, key: Hashable, lower: Lower) -> None:
        """Lower a program in the caller's contexts, and compile it in the background.
        An error of the compiler warns, and `get` raises it.
        """
        if key in self._programs or key in self._pending:
            return
        start, program = time.perf_counter(), Future[Any]()
        lowered = lower()
        self.waited_seconds += time.perf_counter() - start
        threading.Thread(
            target=self._work, args=(key, program, lowered), name="rampup-compile"
        ).start()
        self._pending[key] = program

    def close(self) -> None:
        """Cancel the programs whose compilation has not started. They are compiled when
        `get` is called.
        """
        # One that has started is not waited for: XLA cannot be interrupted, and it may
        # take minutes.
        self._pending = {
            key: pending
            for key, pending in self._pending.items()
            if not pending.cancel()
        }

    def _work(self, key: Hashable, program: Future[Any], lowered: Any) -> None:
        """Compile a program when those before it are compiled."""
        with self._turn:
            # Python joins this thread when it exits, so drop the compilations that have
            # not started.
            if not threading.main_thread().is_alive():
                program.cancel()
            if not program.set_running_or_notify_cancel():
                return
            try:
                program.set_result(self._compile(lowered))
            except BaseException as error:  # noqa: BLE001 - raised by `get`
                try:
                    warnings.warn(
                        f"the program {key!r} of a later phase cannot be compiled:"
                        f" {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                finally:
                    program.set_exception(error)

    def _compile(self, lowered: Any) -> Any:
        program = compile_program(lowered)
        with self._count:
            self.num_compilations += 1
        return program


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
