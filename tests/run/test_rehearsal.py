"""Tests of rampup.run.rehearsal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rampup.run.mesh import make_mesh
from rampup.run.rehearsal import rehearse


class Watched:
    """A compiled program that keeps the results of its runs, or fails with an error."""

    def __init__(self, program, error=None):
        self._program, self._error, self.results = program, error, []

    def __getattr__(self, name):
        return getattr(self._program, name)

    def __call__(self, *args):
        """Run the program."""
        if self._error is not None:
            raise self._error
        self.results.append(self._program(*args))
        return self.results[-1]


def rehearsed(function, *args):
    """Return the watched program of a function after its rehearsal, and the memory that is kept for it."""
    lowered = jax.jit(function, donate_argnums=0).lower(*args)
    program = Watched(lowered.compile())
    return program, rehearse(program, lowered)


def test_it_runs_once_on_zeros():
    """What is donated is not the state of training; keys and half precision are made as well; the memory is there."""
    state = {"x": jnp.ones((64, 64)), "key": jax.random.key(1), "half": jnp.ones(3, jnp.bfloat16)}

    def step(state, rows, number):
        return jax.tree.map(lambda x: x, state), jnp.sort(rows @ state["x"]).sum() + number

    program, memory = rehearsed(step, state, np.ones((8, 64), np.float32), np.int32(3))
    ((after, total),) = program.results
    assert total == 0
    assert not after["half"].any()
    assert after["key"].dtype == state["key"].dtype
    assert state["x"].sum() == 64 * 64
    assert memory.nbytes == program.memory_analysis().temp_size_in_bytes > 0


def test_what_would_print_is_not_run(capfd):
    """A loss function that prints, or calls Python, does so for the rows of training alone."""

    def step(x):
        jax.debug.print("seen {}", x)
        return x

    program, memory = rehearsed(step, jnp.float32(1))
    assert program.results == []
    assert memory is not None
    assert "seen" not in capfd.readouterr().out


@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_what_looks_for_nans_is_not_run(option):
    """With JAX's search for NaNs on, zeros in place of parameters would stop a run that is sound."""
    jax.config.update(option, True)
    try:
        program, _ = rehearsed(lambda x: x / x, jnp.float32(1))
    finally:
        jax.config.update(option, False)
    assert program.results == []


def test_programs_of_several_devices_are_not_run():
    """Their collectives could meet those of training in another order."""
    mesh = make_mesh(devices=jax.devices()[:2])
    x = jax.device_put(np.ones(2), NamedSharding(mesh, PartitionSpec("data")))
    program, memory = rehearsed(jnp.sum, x)
    assert program.results == []
    assert memory is not None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")])
def test_where_memory_is_short_there_is_no_rehearsal(error):
    """The program that was compiled is not lost for it."""
    lowered = jax.jit(jnp.sin).lower(jnp.float32(1))
    assert rehearse(Watched(lowered.compile(), error), lowered) is None


def test_what_else_goes_wrong_is_raised():
    """A program that fails on zeros fails loudly."""
    lowered = jax.jit(jnp.sin).lower(jnp.float32(1))
    with pytest.raises(RuntimeError, match="INTERNAL"):
        rehearse(Watched(lowered.compile(), RuntimeError("INTERNAL: no")), lowered)


def test_an_accelerator_keeps_its_own_memory(monkeypatch):
    """Elsewhere nothing is run and nothing is kept on the host."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    program, memory = rehearsed(jnp.sin, jnp.float32(1))
    assert (program.results, memory) == ([], None)
