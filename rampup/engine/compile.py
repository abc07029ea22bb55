"""Compiles programs once, on request or in a background thread before they are needed,
and with which options.

JAX is imported only where something is compiled, so that a plan can name the options,
and the table of TPUs only for one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rampup.plan.topology import Topology

Lower = Callable[[], Any]
# Level 2 compiles a fifth faster than level 3, and the steps of the models here run
# equally fast.
CPU_OPTIONS = {"xla_backend_optimization_level": 2}
# Layouts in which the reduce-scatter of a gradient needs no transpose and no padding.
# Without them the compiler exchanges padded buffers, or reduces whole gradients and
# slices them.
_SCATTER = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
}
# Collectives run on the SparseCores, asynchronously, while the TensorCore computes.
_SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
# They change how a program communicates and when, not what it computes. Programs were
# compiled for these chips with them, not run on them. v5e has no SparseCores: there,
# asynchronous fusions of collectives are the compiler's default.
TPU_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"v5e": _SCATTER, "v5p": _SCATTER | _SPARSE_CORE, "v6e": _SCATTER | _SPARSE_CORE}
)


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
        self._requests: collections.deque[tuple[Hashable, Future[Any], Any]] = (
            collections.deque()
        )
        self._lock = threading.Lock()
        self._is_running = False

    def get(self, key: Hashable, lower: Lower) -> Any:
        """Return a program; raise the error of one that failed. Lower and compile it
        unless it is compiled or pending.
        """
        program = self._programs.get(key)
        if program is None:
            start, ready = time.perf_counter(), self.is_ready(key)
            if pending := self._pending.get(key):
                with contextlib.suppress(CancelledError):
                    program = pending.result()
            program = self._programs[key] = (
                self._compile(lower()) if program is None else program
            )
            self._pending.pop(key, None)
            self.waited_seconds += 0 if ready else time.perf_counter() - start
            self._before_first_run()
        return program

    def compile_async(self, key: Hashable, lower: Lower) -> None:
        """Lower a program in the caller's contexts, and compile it in the background.
        An error warns, and `get` raises it.
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
            # One thread: compilations share the cores with training. If it cannot be
            # started, nothing is pending.
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

    def _work(self) -> None:
        """Compile what is requested, one program after the other, until nothing is
        left.
        """
        while True:
            with self._lock:
                if not self._requests:
                    self._is_running = False
                    return
                key, program, lowered = self._requests.popleft()
            # Python joins this thread when it exits, so drop the compilations that have
            # not started.
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
        """Say that a program failed as soon as it is known, which may be long before
        its phase.
        """
        problem = (
            f"the program {key!r} of a later phase cannot be compiled:"
            f" {type(error).__name__}: {error}"
        )
        with contextlib.suppress(Warning):
            warnings.warn(
                f"{problem}. Steps go on with the programs that are ready",
                RuntimeWarning,
                stacklevel=3,
            )
        program.set_exception(error)


def compile_program(
    lowered: Any, *, level: int = CPU_OPTIONS["xla_backend_optimization_level"]
) -> Any:
    """Compile a `jax.stages.Lowered` with the options of the backend. What `XLA_FLAGS`
    and `LIBTPU_INIT_ARGS` set wins.
    """
    import jax

    platform = jax.default_backend()
    if platform == "tpu":
        return compile_for_tpu(lowered, jax.devices()[0].device_kind)
    is_set_already = any(
        option in os.environ.get("XLA_FLAGS", "") for option in CPU_OPTIONS
    )
    options = (
        None
        if platform != "cpu" or is_set_already
        else {"xla_backend_optimization_level": level}
    )
    return lowered.compile(compiler_options=options)


def compile_for_tpu(
    lowered: Any, kind: str, options: Mapping[str, str] | None = None
) -> Any:
    """Compile for a TPU generation, with further options and the `tpu_options` that
    this version of the compiler knows.
    """
    chosen = tpu_options(kind, os.environ.get("LIBTPU_INIT_ARGS", ""))
    while True:
        try:
            return lowered.compile(
                compiler_options=(chosen | dict(options or {})) or None
            )
        except RuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or chosen.pop(unknown[1], None) is None:
                raise


def tpu_options(kind: str, flags: str = "") -> dict[str, str]:
    """Return the options for a TPU generation such as `v5p`, or JAX's name of it, but
    those set in the `flags` of libtpu.
    """
    from rampup.plan.topology import CHIPS

    names = {flag.strip().lstrip("-").partition("=")[0] for flag in flags.split()}
    generation = next(
        (chip.name for chip in CHIPS.values() if kind in chip.kinds), kind
    )
    return {
        name: value
        for name, value in TPU_OPTIONS.get(generation, {}).items()
        if name not in names
    }


def topology_facts(topology: Topology) -> dict[str, Any]:
    """Return a topology for JSON, with the options that its programs are compiled
    with.
    """
    return topology.to_dict() | {"compiler_options": tpu_options(topology.chip.name)}


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
