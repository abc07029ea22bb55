"""Tests of rampup.run.compile."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rampup.run.compile import Compiler, compile_program


def lowering(function, *args):
    """Return a function that lowers another one, and a list of the threads that it ran in."""
    threads = []

    def lower():
        threads.append(threading.current_thread().name)
        return jax.jit(function).lower(*args)

    return lower, threads


def test_a_program_is_compiled_once():
    """Asked for, asked for ahead, and asked for again: one compilation, in the background."""
    compiler = Compiler()
    lower, threads = lowering(jnp.sin, np.float32(1))
    compiler.ahead("sin", lower)
    compiler.ahead("sin", lower)
    assert compiler.is_known("sin")
    assert compiler.get("sin", lower)(np.float32(0)) == 0
    assert compiler.get("sin", lower) is compiler.get("sin", lower)
    assert compiler.is_ready("sin")
    assert compiler.num_compilations == len(threads) == 1
    assert threads[0].startswith("rampup-compile")


def test_waiting_is_counted_and_being_ready_is_not():
    """A program that is compiled when it is asked for costs time; one that is ready costs none."""
    compiler = Compiler()
    lower, _ = lowering(jnp.cos, np.float32(1))
    compiler.ahead("ready", lower)
    while not compiler.is_ready("ready"):
        pass
    compiler.get("ready", lower)
    assert compiler.waited_seconds == 0
    compiler.get("late", lower)
    assert compiler.waited_seconds > 0


def test_contexts_reach_the_background():
    """A program that is traced in the background has the caller's precision of numbers and mesh."""
    compiler = Compiler()
    seen = []

    def lower():
        seen.append((jnp.arange(2.0).dtype, jax.config.jax_default_matmul_precision))
        return jax.jit(lambda x: x + jnp.ones(2)).lower(np.ones(2))

    jax.config.update("jax_enable_x64", True)
    try:
        with jax.default_matmul_precision("highest"):
            compiler.ahead("x", lower)
        assert compiler.get("x", lower)(np.ones(2)).dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)
    assert seen == [(np.float64, "highest")]


def test_what_goes_wrong_in_the_background_reaches_the_caller():
    """An error is raised where the program is asked for."""
    compiler = Compiler()
    lower, _ = lowering(lambda x: x @ x, np.ones((2, 3)))
    compiler.ahead("bad", lower)
    with pytest.raises(TypeError):
        compiler.get("bad", lower)


def test_closing_gives_up_what_waits():
    """After closing, what was being compiled is there, and what only waited is compiled when it is asked for."""
    compiler, gate = Compiler(), threading.Event()

    def slow():
        gate.wait()
        return jax.jit(jnp.tan).lower(np.float32(1))

    compiler.ahead("slow", slow)
    lower, threads = lowering(jnp.exp, np.float32(1))
    compiler.ahead("never", lower)
    compiler.close()
    gate.set()
    assert compiler.get("slow", slow)(np.float32(0)) == 0
    assert not compiler.is_known("never")
    assert compiler.get("never", lower)(np.float32(0)) == 1
    assert threads == ["MainThread"]


def test_a_cpu_gets_its_level_unless_it_is_set(monkeypatch):
    """Programs for a CPU are compiled at level 2; XLA_FLAGS of one's own and accelerators are left alone."""
    given = []

    class Lowered:
        def compile(self, *, compiler_options):
            given.append(compiler_options)

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    compile_program(Lowered())
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    compile_program(Lowered())
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    compile_program(Lowered())
    assert given == [{"xla_backend_optimization_level": 2}, None, None]
