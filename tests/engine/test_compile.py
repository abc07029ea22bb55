"""Tests of rampup.engine.compile."""

import threading

import flax.linen
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import processes, toy

from rampup.engine.compile import (
    Compiler,
    compile_program,
)


def lowering(function, *args):
    """Return a function that lowers another one, and a list of the threads that the
    program was compiled in.
    """
    threads = []

    def lower():
        return toy.delayed(
            jax.jit(function).lower(*args),
            lambda: threads.append(threading.current_thread().name),
        )

    return lower, threads


def test_a_program_is_compiled_once_and_waited_for_if_it_is_not_ready():
    """One compilation in the background, however often it is asked for; an error there
    is a warning, and `get` raises it.
    """
    compiler = Compiler()
    lower, threads = lowering(jnp.sin, np.float32(1))
    compiler.compile_async("sin", lower)
    compiler.compile_async("sin", lower)
    compiler._pending["sin"].result(60)
    assert compiler.get("sin", lower)(np.float32(0)) == 0
    assert compiler.get("sin", lower) is compiler.get("sin", lower)
    assert compiler.num_compilations == len(threads) == 1
    assert threads[0].startswith("rampup-compile")
    waited = compiler.waited_seconds
    assert waited > 0  # for the trace, which is the caller's
    compiler.get("sin", lower)
    assert compiler.waited_seconds == waited
    compiler.get("late", lower)
    assert compiler.waited_seconds > waited

    def no_memory():
        return toy.delayed(None, lambda: 1 / 0)

    with pytest.warns(
        RuntimeWarning,
        match="'bad' of a later phase cannot be compiled: division by zero",
    ):
        compiler.compile_async("bad", no_memory), compiler._pending["bad"].exception(60)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiler.get("bad", no_memory)

    def untraceable():
        return jax.jit(lambda x: x @ x).lower(np.ones((2, 3)))

    with pytest.raises(TypeError):
        compiler.compile_async("worse", untraceable)
    with pytest.raises(TypeError):
        compiler.get("worse", untraceable)


def test_compile_async_uses_the_contexts_of_the_caller():
    """A program that is compiled in the background was traced in all contexts of the
    caller: JAX's, Flax's and any other.
    """
    compiler, own, seen = Compiler(), threading.local(), []

    def lower():
        rules = flax.linen.get_logical_axis_rules()
        seen.append(
            (
                jnp.arange(2.0).dtype,
                jax.config.jax_numpy_dtype_promotion,
                rules,
                getattr(own, "value", None),
            )
        )
        return jax.jit(lambda x: x + jnp.ones(2)).lower(np.ones(2))

    own.value, rules = 3, (("batch", "data"),)
    x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with (
        x64(True),
        jax.numpy_dtype_promotion("strict"),
        flax.linen.logical_axis_rules(rules),
    ):
        compiler.compile_async("x", lower)
        assert compiler.get("x", lower)(np.ones(2)).dtype == np.float64
    assert seen == [(np.float64, "strict", rules, 3)]


def test_a_thread_that_cannot_be_started_leaves_nothing_pending(monkeypatch):
    """The caller gets the error of the operating system; later, `get` compiles in its
    own thread and does not wait.
    """

    def fail(self):
        raise RuntimeError("can't start new thread")

    compiler = Compiler()
    lower, threads = lowering(jnp.tanh, np.float32(1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            compiler.compile_async("tanh", lower)
    assert not compiler._pending
    assert compiler.get("tanh", lower)(np.float32(0)) == 0
    compiler.compile_async("again", lower)
    compiler._pending["again"].result(60)
    assert threads == ["MainThread", "rampup-compile"]


def test_close_cancels_pending_programs():
    """A compilation that has started finishes; one that has not is compiled by
    `get`.
    """
    compiler, gate = Compiler(), threading.Event()

    def slow():
        return toy.delayed(jax.jit(jnp.tan).lower(np.float32(1)), gate.wait)

    compiler.compile_async("slow", slow)
    lower, threads = lowering(jnp.exp, np.float32(1))
    compiler.compile_async("never", lower)
    compiler.close()
    gate.set()
    assert compiler.get("slow", slow)(np.float32(0)) == 0
    assert compiler.get("never", lower)(np.float32(0)) == 1
    assert threads == ["MainThread"]


def leave(folder):
    """Request three programs, the first of which takes until the main thread has ended,
    and return without `close`.
    """
    compiler = Compiler()

    def wait(number):
        (folder / str(number)).touch()
        threading.main_thread().join(5)

    lowered = jax.jit(jnp.sin).lower(np.float32(1))
    for number in range(3):
        compiler.compile_async(
            number, lambda number=number: toy.delayed(lowered, lambda: wait(number))
        )
    while not (folder / "0").exists():
        pass


def test_a_program_that_ends_without_close_waits_for_one_compilation_at_most(tmp_path):
    """At the end of a program, the compilation that has started finishes; the others,
    which nobody will run, are left.
    """
    process = processes.start(leave, tmp_path, log=tmp_path / "log")
    process.join(300)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "log"}


def test_compile_program_sets_the_level_only_on_cpu(monkeypatch):
    """On a CPU the level is 2, unless XLA_FLAGS sets one; other backends keep their
    default.
    """
    given = []

    class Lowered:
        def compile(self, *, compiler_options):
            given.append(compiler_options)

    for platform, flags in (
        ("cpu", ""),
        ("cpu", "--xla_backend_optimization_level=3"),
        ("gpu", ""),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        compile_program(Lowered())
    assert given == [{"xla_backend_optimization_level": 2}, None, None]
