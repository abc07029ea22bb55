"""The programs of a training step, and the two engines that run them: one program per
optimizer step, or one per microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.engine.batch import Batch, BufferLayout
from rampup.engine.compile import Compiler
from rampup.engine.explicit import as_auto, on_mesh
from rampup.engine.mesh import auto_context, auto_view, replicated
from rampup.engine.optimizer import FollowingOptimizer, segment_numbers
from rampup.engine.processes import wait_for_all
from rampup.engine.state import join_frozen, shardings_of, split_frozen
from rampup.engine.update import Metrics, Update
from rampup.plan.learning_rate import ClockSegment

# `Update.fused` or `Update.multi_steps`.
Part = Callable[..., Any]


class Programs:
    """The compiled programs of an update, on the mesh that the user gave: one for each
    key, such as the number of rows of a microbatch.
    """

    def __init__(self, update: Update, mesh: Mesh, *, donate: bool) -> None:
        self.update = update
        self.mesh = mesh
        self._donate = donate
        self.compiler = Compiler(functools.partial(wait_for_all, mesh))

    def lower(self, part: Part, state: Any, *args: Any) -> Any:
        """Lower a program that maps a state, its `frozen` and further arguments to the
        next state and the metrics.
        """
        # The next state has the shardings of the given one, so that the program accepts
        # its own result. Only the state is donated: no result has the shape of the
        # batch, and the padding is used again.
        shardings = shardings_of(state)
        views = on_mesh(shardings, auto_view(self.mesh))
        with auto_context(self.mesh):
            program = jax.jit(
                functools.partial(part, self.update, views),
                donate_argnums=0 if self._donate else (),
                out_shardings=(split_frozen(shardings)[0], replicated(self.mesh)),
            )
            return program.lower(*as_auto((*split_frozen(state), *args)))

    def get(self, key: Any, part: Part, state: Any, *args: Any) -> Any:
        """Return a compiled program."""
        lower = functools.partial(self.lower, part, state, *args)
        return self.compiler.get(key, lower)


def call(program: Any, state: Any, *args: Any) -> tuple[Any, Metrics]:
    """Run a program on a state and further arguments."""
    trained, frozen = split_frozen(state)
    new, metrics = program(trained, frozen, *args)
    return join_frozen(new, frozen), metrics


class Engine(Protocol):
    """How an optimizer step runs."""

    # of the batches that it takes; None = as `layout_of` chooses
    chunk_size: int | None

    def compiled(self, state: Any, batch: Batch) -> Callable[[], tuple[Any, Metrics]]:
        """Compile what a step needs, and return what runs it."""


class Fused:
    """One program per optimizer step, which sums over all microbatches."""

    chunk_size: int | None = None

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._padding: dict[BufferLayout, Any] = {}
        # A number of microbatches or passes, or the numbers of a segment, on the
        # devices: each would be copied in every step.
        whole = replicated(programs.mesh)

        def put(number: np.number) -> jax.Array:
            return jax.make_array_from_callback((), whole, lambda _: number)

        self._count = functools.cache(lambda number: put(np.int32(number)))
        self._segment = functools.cache(
            lambda segment: jax.tree.map(put, self.segment_of(segment))
        )

    def compiled(self, state: Any, batch: Batch) -> Callable[[], tuple[Any, Metrics]]:
        """Compile the program of the batch's shape, and return what runs it."""
        split, segment = batch.position.split, batch.position.segment
        counts = split.num_pipeline_microbatches, split.accumulation_steps
        args = (
            self._padded(batch),
            tuple(map(self._count, counts)),
            segment and self._segment(segment),
        )
        program = self._programs.get(batch.layout.num_rows, Update.fused, state, *args)
        return lambda: call(program, state, *args)

    def segment_of(self, segment: ClockSegment | None) -> dict[str, np.number] | None:
        """Return the numbers of a segment if the optimizer takes them: other optimizers
        know the plan.
        """
        follows = isinstance(self._programs.update.tx, FollowingOptimizer)
        return segment_numbers(segment) if segment is not None and follows else None

    def _padded(self, batch: Batch) -> tuple[Any, ...]:
        """Return as many chunks as the program takes: those of the batch, then one
        chunk of zeros that stays on the devices.
        """

        def zeros_like(x: jax.Array) -> jax.Array:
            shard = np.zeros(x.sharding.shard_shape(x.shape), x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda _: shard)

        layout = batch.layout
        if layout not in self._padding:
            # Made on the host: `jnp.zeros` would be one more compilation, at a phase
            # change and with the run waiting.
            self._padding[layout] = jax.tree.map(zeros_like, batch.chunks[0])
        missing = layout.num_chunks - len(batch.chunks)
        return batch.chunks + (self._padding[layout],) * missing


class ByMicrobatch:
    """One program per microbatch, with `optax.MultiSteps`."""

    chunk_size: int | None = 1

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._zeros: Metrics | None = None

    def compiled(self, state: Any, batch: Batch) -> Callable[[], tuple[Any, Metrics]]:
        """Compile the program of a microbatch, and return what runs all of them."""
        R, part, number = batch.layout.num_rows, Update.multi_steps, np.int32(0)
        if self._zeros is None:
            # Those of the first microbatch, as all calls have the same arguments.
            alone = self._programs.lower(part, state, None, batch.chunks[0], number)
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), alone.out_info)
            self._zeros = jax.device_put(zeros[1], replicated(self._programs.mesh))
        zeros = self._zeros
        first = (zeros, batch.chunks[0], number)
        program = self._programs.get(R, part, state, *first)

        def run() -> tuple[Any, Metrics]:
            new, metrics = state, zeros
            for index, chunk in enumerate(batch.chunks):
                args = (metrics, chunk, np.int32(index * R))
                new, metrics = call(program, new, *args)
            return new, metrics

        return run
