"""The largest microbatch that fits in memory, for a training step of one's own.

Sizes are tried from the smallest upwards: the step is compiled for one, and its memory
is what the compiler says. So nothing runs out of memory. Where the backend does not say
it, the step runs once, and fits if it does not run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.contrib.lab.memory import is_out_of_memory, program_memory, smallest_limit
from rampup.data.batches import AHEAD_ON_DEVICE
from rampup.engine.compile import compile_program
from rampup.engine.mesh import BatchAxes
from rampup.engine.step import TrainStep, train_step
from rampup.errors import ConfigError
from rampup.plan.numbers import parse_memory_gib
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter

# Left free of a device's memory, for fragmentation and for what the backend's libraries
# allocate themselves.
MARGIN = Fraction(5, 100)
MOST = 4096  # rows of the largest microbatch that is tried


class LargestMicrobatch(NamedTuple):
    """The largest microbatch that fits.

    Attributes:
        microbatch_size: rows per replica and pass; None if not even one row fits.
        next_larger: the smallest size that was tried and does not fit, or None.
        bytes_by_size: bytes that a step takes of one device by microbatch size, as far
            as the compiler said it; infinite where the compiler itself ran out.
        usable_bytes: the memory of a device less 5%; None where steps ran to find out.
    """

    microbatch_size: int | None
    next_larger: int | None
    bytes_by_size: dict[int, float]
    usable_bytes: int | None


def largest_microbatch(
    loss_fn: Any,
    tx: optax.GradientTransformation,
    state: Any,
    row: Any,
    mesh: Mesh,
    *,
    memory_gib: str | float | None = None,
    most: int = MOST,
    run: bool = False,
) -> LargestMicrobatch:
    """Return the largest microbatch with which a training step fits in memory.

    The step accumulates two microbatches, as one with any larger number of them: the
    number does not change its memory but for the rows themselves. Tried are the powers
    of two and the sizes halfway between them.

    Args:
        loss_fn: as for `rampup.train_step`.
        tx: the optimizer.
        state: the training state from `rampup.create_state`, or its shapes with their
            shardings. It is only looked at; its memory counts.
        row: one row of the data, or its shapes, without the axis of the rows.
        mesh: the devices.
        memory_gib: memory of one device in GiB; None = what the devices report. A CPU
            reports none.
        most: the largest microbatch to try, in rows.
        run: run one step of each size instead of asking the compiler. A backend whose
            compiler does not say what a program needs is always asked like this. The
            steps run on zeros as large as the state, beside it.

    Returns:
        The size, the next larger one, and the bytes of each size that was tried.

    Raises:
        ConfigError: the devices report no memory and `memory_gib` is None.

    Example:
        >>> import rampup
        >>> def loss_fn(params, batch, keys):
        ...     hidden = jnp.tanh(batch["x"] @ params["w"])
        ...     return jnp.sum(hidden**2), hidden.size, {}
        >>> mesh, tx = rampup.make_mesh(), optax.adam(1e-3)
        >>> state = rampup.create_state({"w": jnp.ones((256, 4096))}, tx, mesh)
        >>> row = {"x": jax.ShapeDtypeStruct((256,), jnp.float32)}
        >>> found = largest_microbatch(loss_fn, tx, state, row, mesh, memory_gib=0.03)
        >>> found.microbatch_size < found.next_larger <= 2 * found.microbatch_size
        True
    """
    usable = None
    if not run:
        limit = memory_limit(memory_gib, list(mesh.devices.flat))
        usable = int(limit * (1 - MARGIN))
    found: dict[int, float] = {}

    def fits(size: int) -> bool:
        step, plan = _step_of(loss_fn, tx, mesh, size)
        try:
            if usable is None:
                return _runs(step, state, row, plan)
            compiled = compile_program(step.lower(state, row, plan.splits[0]))
            if compiled.memory_analysis() is None:
                return _runs(step, state, row, plan)
            rows = AHEAD_ON_DEVICE * 2 * size * _row_bytes(row)
            found[size] = program_memory(compiled).total + rows
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found[size] = math.inf
            return False
        return found[size] <= usable

    sizes = sorted({1 << n for n in range(32)} | {3 << n for n in range(30)})
    largest, larger = largest_of([size for size in sizes if size <= most], fits)
    return LargestMicrobatch(largest, larger, found, usable)


def largest_of(
    sizes: Sequence[int], fits: Callable[[int], bool]
) -> tuple[int | None, int | None]:
    """Return the largest of ascending sizes that fits, and the next one, which was
    tried and does not; None if there is none.

    The first is tried first, and then sizes further and further, so that none far
    beyond the limit is compiled.
    """
    low, high, stride = -1, len(sizes), 1
    while high - low > 1:
        # Until something does not fit, further and further; then in the middle.
        place = min(low + stride, high - 1)
        if high < len(sizes):
            place = (low + high) // 2
        if fits(sizes[place]):
            low, stride = place, 2 * stride
        else:
            high = place
    return sizes[low] if low >= 0 else None, sizes[high] if high < len(sizes) else None


def memory_limit(memory_gib: str | float | None, devices: Sequence[jax.Device]) -> int:
    """Return the memory of one device in bytes, as given in GiB or else as the devices
    report it.
    """
    if memory_gib is not None:
        return parse_memory_gib(memory_gib)
    limit = smallest_limit(devices)
    if limit is None:
        raise ConfigError(
            f"the device {devices[0].device_kind!r} has no memory limit of its own",
            fix="pass the limit to tune for, such as --memory-gib 16",
            key="memory-gib",
        )
    return limit


def _step_of(
    loss_fn: Any, tx: optax.GradientTransformation, mesh: Mesh, size: int
) -> tuple[TrainStep, RampPlan]:
    """Return a step of two microbatches of a size, and its plan."""
    shares = BatchAxes.of(mesh).num_shards(mesh)
    plan = RampPlan(
        ramp=BatchRamp.constant(2 * size * shares),
        splitter=BatchSplitter(data_parallel_size=shares, microbatch_size=size),
        num_devices=mesh.size,
        total_steps=1,
    )
    return train_step(loss_fn, tx, plan, mesh, check_loss=False), plan


def _runs(step: TrainStep, state: Any, row: Any, plan: RampPlan) -> bool:
    """Run a step on zeros; what runs out of memory raises."""
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), state
    )
    one = jax.tree.map(lambda x: np.zeros(np.shape(x), np.result_type(x)), row)
    batch = next(step.batches([one] * plan.ramp.sizes[0]))
    jax.block_until_ready(step(zeros, batch))
    return True


def _row_bytes(row: Any) -> int:
    return sum(
        math.prod(np.shape(leaf)) * jnp.result_type(leaf).itemsize
        for leaf in jax.tree.leaves(row)
    )
