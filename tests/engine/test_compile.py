"""Tests of rampup.engine.compile."""

import threading
from types import SimpleNamespace

import flax.linen
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy import mesh_of

from rampup.engine.compile import (
    Compiler,
    compile_program,
)


def test_a_program_is_traced_and_compiled_once():
    """Also if it was traced before it is needed; what the trace or the compiler raises
    is raised each time, and every wait counts.
    """
    compiler, traces = Compiler(mesh_of("one")), []

    def lower():
        traces.append(1)
        return jax.jit(jnp.sin).lower(np.float32(1))

    compiler.trace("sin", lower)
    compiler.trace("sin", lower)
    traced = compiler.waited_seconds
    assert traced > 0
    assert compiler.num_compilations == 0
    assert compiler.get("sin", lower)(np.float32(0)) == 0
    assert compiler.get("sin", lower) is compiler.get("sin", lower)
    compiler.trace("sin", lower)
    assert compiler.num_compilations == len(traces) == 1
    waited = compiler.waited_seconds
    assert waited > traced
    compiler.get("sin", lower)
    assert compiler.waited_seconds == waited
    compiler.get("late", lower)
    assert compiler.waited_seconds > waited

    def no_memory():
        return SimpleNamespace(compile=lambda **options: 1 / 0)

    def untraceable():
        return jax.jit(lambda x: x @ x).lower(np.ones((2, 3)))

    compiler.trace("bad", no_memory)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiler.get("bad", no_memory)
        for run in (compiler.trace, compiler.get):
            with pytest.raises(TypeError):
                run("worse", untraceable)


def test_a_program_has_the_contexts_in_which_it_was_traced():
    """Those of the first caller: JAX's, Flax's and any other."""
    compiler, own, seen = Compiler(mesh_of("one")), threading.local(), []

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
        compiler.trace("x", lower)
        assert compiler.get("x", lower)(np.ones(2)).dtype == np.float64
    assert seen == [(np.float64, "strict", rules, 3)]


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
