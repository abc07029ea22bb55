"""Compiles programs once: on request, or in a background thread before they are needed."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import jax

from rampup.engine.tpu_options import tpu_options

Lower = Callable[[], Any]
BACKGROUND_NICENESS = 10
CPU_OPTIONS = {"xla_backend_optimization_level": 2}


class Compiler:
    """A cache of ahead-of-time compiled programs, with one background thread.

    `jax.jit` compiles on the first call with a new shape and blocks until it is done. Here a program can be compiled before its
    first call, and the caller can ask whether it is ready. Ahead-of-time compilation does not fill the cache of `jax.jit`, so
    this class holds the executables. `get` calls `before_first_run` before it returns a program for the first time:
    there, the processes of a run wait for each other, as their compilations end at different times.

    Attributes:
        num_compilations: programs compiled so far.
        waited_seconds: total time that callers waited for a trace or a compilation.
    """

    def __init__(self, before_first_run: Callable[[], None] = lambda: None) -> None:
        self._before_first_run = before_first_run
        self.num_compilations = 0
        self.waited_seconds = 0.0
        self._programs: dict[Hashable, Any] = {}
        self._pending: dict[Hashable, Future[Any]] = {}
        self._requests: collections.deque[tuple[Hashable, Future[Any], Any]] = collections.deque()
        self._lock = threading.Lock()
        self._is_running = False

    def get(self, key: Hashable, lower: Lower) -> Any:
        """Return a program. Compile it now unless it is compiled or pending; raise the error of one that failed.

        Args:
            key: identifies the program.
            lower: returns its `jax.stages.Lowered`; called only if the program has to be compiled here.
        """
        program = self._programs.get(key)
        if program is None:
            start, ready = time.perf_counter(), self.is_ready(key)
            if pending := self._pending.get(key):
                with contextlib.suppress(CancelledError):
                    program = pending.result()
            program = self._programs[key] = self._compile(lower()) if program is None else program
            self._pending.pop(key, None)
            self.waited_seconds += 0 if ready else time.perf_counter() - start
            self._before_first_run()
        return program

    def compile_async(self, key: Hashable, lower: Lower) -> None:
        """Lower a program here, and compile it in the background, after those requested earlier.

        It is traced in the caller's thread, because contexts are thread-local: those of JAX, such as the promotion of types,
        those of Flax, such as logical axis rules, and what a loss function may read by itself. An error is a warning when it
        happens, and raised by `get`.
        """
        if key in self._programs or key in self._pending:
            return
        start, program = time.perf_counter(), Future[Any]()
        try:
            lowered = lower()
        except Exception as error:  # noqa: BLE001 - the step that runs now does not need this program
            self._fail(key, program, error)
            self._pending[key] = program
            return
        finally:
            self.waited_seconds += time.perf_counter() - start
        with self._lock:
            # One thread: compilations share the cores with training, and a second one would only slow both down. The new
            # thread waits for the lock. If it cannot be started, nothing is pending.
            if not self._is_running:
                threading.Thread(target=self._work, name="rampup-compile").start()
                self._is_running = True
            self._pending[key] = program
            self._requests.append((key, program, lowered))

    def is_ready(self, key: Hashable) -> bool:
        """Return whether `get` would return a program without waiting."""
        pending = self._pending.get(key)
        if pending is None or not pending.done():
            return key in self._programs
        return not pending.cancelled() and pending.exception() is None

    def close(self) -> None:
        """Cancel the programs whose compilation has not started. They are compiled when `get` is called."""
        # One that has started is not waited for: XLA cannot be interrupted, and it may take minutes.
        self._pending = {key: pending for key, pending in self._pending.items() if not pending.cancel()}

    def _work(self) -> None:
        """Compile what is requested, one program after the other, until nothing is left."""
        # Give way to training and its data loading, which need the same cores.
        if sys.platform == "linux":  # where a niceness belongs to a thread; elsewhere it would slow the whole process down
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):  # a sandbox may forbid it, and no compilation may fail for that
                niceness = max(BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))  # raising it takes a privilege
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        while True:
            with self._lock:
                if not self._requests:
                    self._is_running = False
                    return
                key, program, lowered = self._requests.popleft()
            # When Python exits it joins this thread, so drop the compilations that have not started: nobody will use them. The
            # thread of a `concurrent.futures.ThreadPoolExecutor` would run all of them first.
            if not threading.main_thread().is_alive():
                program.cancel()
            if program.set_running_or_notify_cancel():
                try:
                    program.set_result(self._compile(lowered))
                except BaseException as error:  # noqa: BLE001 - raised by `get`
                    self._fail(key, program, error)

    def _compile(self, lowered: Any) -> Any:
        program = compile_program(lowered)
        with self._lock:
            self.num_compilations += 1
        return program

    def _fail(self, key: Hashable, program: Future[Any], error: BaseException) -> None:
        """Say that a program failed as soon as it is known, which may be long before its phase."""
        problem = f"the program {key!r} of a later phase cannot be compiled: {type(error).__name__}: {error}"
        # Warnings may be errors, and this may be the thread that compiles the others.
        with contextlib.suppress(Warning):
            warnings.warn(f"{problem}. Steps go on with the programs that are ready", RuntimeWarning, stacklevel=3)
        program.set_exception(error)


def compile_program(lowered: Any, *, level: int = CPU_OPTIONS["xla_backend_optimization_level"]) -> Any:
    """Compile a `jax.stages.Lowered`, on a CPU with XLA's optimization level 2 and on a TPU with the options of `tpu_options`.

    Level 2 compiles a fifth faster than level 3, and the steps of the models here run equally fast. What `XLA_FLAGS` and
    `LIBTPU_INIT_ARGS` set wins.
    """
    platform = jax.default_backend()
    if platform == "tpu":
        return compile_for_tpu(lowered, jax.devices()[0].device_kind)
    is_set_already = any(option in os.environ.get("XLA_FLAGS", "") for option in CPU_OPTIONS)
    return lowered.compile(
        compiler_options=None if platform != "cpu" or is_set_already else {"xla_backend_optimization_level": level}
    )


def compile_for_tpu(lowered: Any, kind: str, options: Mapping[str, str] | None = None) -> Any:
    """Compile for a generation of TPUs, with further options and the `tpu_options` that this version of the compiler knows."""
    chosen = tpu_options(kind, os.environ.get("LIBTPU_INIT_ARGS", ""))
    while True:
        try:
            return lowered.compile(compiler_options=(chosen | dict(options or {})) or None)
        except RuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or chosen.pop(unknown[1], None) is None:
                raise


def enable_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in a folder for later processes, unless JAX has a cache folder already. None changes nothing."""
    if folder is not None and jax.config.jax_compilation_cache_dir is None:
        # The URL of a bucket is no path, and JAX takes it as it is.
        jax.config.update("jax_compilation_cache_dir", folder if "://" in folder else str(Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
