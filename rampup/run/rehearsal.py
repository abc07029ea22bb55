"""What makes the first step of a program on a CPU as fast as its second: run it once, and have its memory at hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rampup.run.offload import is_out_of_memory


def rehearse(program: Any, lowered: Any) -> np.ndarray | None:
    """Run a program for one CPU device once, on zeros; return memory as large as it takes for its work.

    What no process has touched for long is slow to get from the kernel. Given back just before the program's first step, the
    memory is there for it. Other devices keep a pool of memory of their own, which may have no room for a second state, and
    programs with collectives must not overtake each other: those are left alone. Where memory is short, there is none.

    Args:
        program: a `jax.stages.Compiled`.
        lowered: the `jax.stages.Lowered` that it was compiled from.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        if _is_for_one_device(program) and not _would_be_noticed(lowered):
            args, kwargs = jax.tree.map(_zeros, program.args_info, program.input_shardings)
            jax.block_until_ready(program(*args, **kwargs))
        analysis = program.memory_analysis()
        return None if analysis is None else np.ones(analysis.temp_size_in_bytes, np.uint8)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _is_for_one_device(program: Any) -> bool:
    return all(len(sharding.device_set) == 1 for sharding in jax.tree.leaves(program.input_shardings))


def _would_be_noticed(lowered: Any) -> bool:
    """Say whether a run on zeros would print, call Python in another way, or be stopped because of its own numbers."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs or "callback" in lowered.as_text()


def _zeros(info: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    # Made on the host where numpy can: on the device, every shape would be one more compilation.
    zeros = jnp.zeros if jax.dtypes.issubdtype(info.dtype, jax.dtypes.extended) else np.zeros
    return jax.device_put(zeros(info.shape, info.dtype), sharding)
