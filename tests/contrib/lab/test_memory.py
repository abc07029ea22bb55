"""Tests of rampup.contrib.lab.memory."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from rampup.contrib.lab import memory
from rampup.errors import ConfigError

pytestmark = pytest.mark.usefixtures("optimized")

GIVEN = {"bytes_limit": 1000}


def device(**stats):
    """Return a simulated device."""
    return SimpleNamespace(memory_stats=lambda: stats or None)


def test_program_memory_counts_arrays():
    """Arguments, outputs, temporaries; an output that aliases an argument once. A
    missing analysis is an error, not a zero.
    """
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    grown = memory.program_memory(
        jax.jit(lambda x: (x @ x.T * jnp.ones((512,)))[:, None] * x[None])
        .lower(x)
        .compile()
    )
    assert (grown.arguments, grown.outputs, grown.aliased) == (4096, 512 * 4096, 0)
    assert grown.total == grown.arguments + grown.outputs + grown.temporary + grown.code
    in_place = memory.program_memory(
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    )
    assert in_place.aliased == 4096
    assert in_place.total == 4096 + in_place.temporary + in_place.code
    with pytest.raises(ConfigError, match="does not report"):
        memory.program_memory(SimpleNamespace(memory_analysis=lambda: None))


def test_room_to_run_is_that_of_the_smallest_device():
    """The room is the smallest of all devices. Devices without memory of their own
    share half of the host's free memory.
    """
    assert memory.smallest_limit([device(**GIVEN)]) == 1000
    assert memory.smallest_limit([device(**GIVEN), device()]) is None
    assert memory.room_to_run([device(bytes_limit=7), device(bytes_limit=5)]) == 5
    one, four = memory.room_to_run([device()]), memory.room_to_run([device()] * 4)
    assert 0 < four < one


def test_is_out_of_memory_recognizes_only_exhausted_resources():
    """Only RESOURCE_EXHAUSTED errors of the runtime and MemoryError count."""
    assert memory.is_out_of_memory(
        RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
    )
    assert memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(RuntimeError("INTERNAL: no"))
    assert not memory.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
