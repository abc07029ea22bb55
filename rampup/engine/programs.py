"""The programs of a training step, and the two engines that run them: one program per
optimizer step, or one per microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.engine.batch import Batch
from rampup.engine.compile import Compiler
from rampup.engine.explicit import as_auto
from rampup.engine.mesh import auto_context, replicated
from rampup.engine.optimizer import segment_numbers, with_plan
from rampup.engine.state import join_frozen, shardings_of, split_frozen
from rampup.engine.update import Metrics, Update
from rampup.plan.learning_rate import ClockSegment
from rampup.plan.plan import RampPlan

# `Update.fused` or `Update.multi_steps`.
Part = Callable[..., Any]
# From a state and further arguments, if any are left, to the next state and metrics.
Run = Callable[..., tuple[Any, Metrics]]


class Programs:
    """The compiled programs of an update, on the mesh that the user gave: one for each
    number of rows of a microbatch. A subclass says which, and how a step runs them.
    """

    # Microbatches of a chunk of the batches that a step takes; None = as `layout_of`
    # chooses.
    chunk_size: int | None = None

    def __init__(
        self, update: Update, plan: RampPlan, mesh: Mesh, *, donate: bool
    ) -> None:
        self.compiler = Compiler(mesh)
        self._update = update
        self._plan = plan
        self._mesh = mesh
        self._donate = donate
        # Each number would be copied to the devices in every step.
        self._numbers = functools.cache(functools.partial(_numbers, update.tx, mesh))

    def lower(self, part: Part, state: Any, *args: Any) -> Any:
        """Lower a program that maps a state, its `frozen` and further arguments to the
        next state and the metrics.
        """
        # The next state has the shardings of the given one, so that the program accepts
        # its own result. Only the state is donated: no result has the shape of the
        # batch.
        results = split_frozen(shardings_of(state))[0], replicated(self._mesh)
        state, args = as_auto((state, args))
        with auto_context(self._mesh):
            program = jax.jit(
                functools.partial(part, self._update, shardings_of(state)),
                donate_argnums=0 if self._donate else (),
                out_shardings=results,
            )
            return with_plan(self._plan, program.lower, *split_frozen(state), *args)

    def _get(self, num_rows: int, part: Part, state: Any, *args: Any) -> Run:
        """Return a compiled program, as a function of a state and further arguments."""
        lower = functools.partial(self.lower, part, state, *args)
        program = self.compiler.get(num_rows, lower)

        def run(state: Any, *args: Any) -> tuple[Any, Metrics]:
            trained, frozen = split_frozen(state)
            new, metrics = program(trained, frozen, *args)
            return join_frozen(new, frozen), metrics

        return run


class Fused(Programs):
    """One program per optimizer step, which sums over all microbatches."""

    def compiled(self, state: Any, batch: Batch) -> Run:
        """Compile the program of the batch's shape, and return what runs it."""
        position, layout = batch.position, batch.layout
        split = position.split
        counts = split.num_pipeline_microbatches, split.accumulation_steps
        # The loop ends before the chunks that the batch does not fill, so any will do.
        missing = layout.num_chunks - len(batch.chunks)
        chunks = batch.chunks + batch.chunks[:1] * missing
        args = chunks, *self._numbers(counts, position.segment)
        run = self._get(layout.num_rows, Update.fused, state, *args)
        return lambda: run(state, *args)


def _numbers(
    tx: Any, mesh: Mesh, counts: tuple[int, int], segment: ClockSegment | None
) -> Any:
    """Return the numbers of microbatches and passes, and those of a segment, on all
    devices.
    """
    return jax.tree.map(
        lambda x: jax.make_array_from_callback((), replicated(mesh), lambda _: x),
        (tuple(map(np.int32, counts)), segment_numbers(tx, segment)),
    )


class ByMicrobatch(Programs):
    """One program per microbatch, with `optax.MultiSteps`."""

    chunk_size = 1
    _zeros: Metrics | None = None

    def compiled(self, state: Any, batch: Batch) -> Run:
        """Compile the program of a microbatch, and return what runs all of them."""
        R, part, number = batch.layout.num_rows, Update.multi_steps, np.int32(0)
        if self._zeros is None:
            # Those of the first microbatch, as all calls have the same arguments.
            alone = self.lower(part, state, None, batch.chunks[0], number)
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), alone.out_info)
            self._zeros = jax.device_put(zeros[1], replicated(self._mesh))
        zeros = self._zeros
        run = self._get(R, part, state, zeros, batch.chunks[0], number)

        def run_all() -> tuple[Any, Metrics]:
            new, metrics = state, zeros
            for index, chunk in enumerate(batch.chunks):
                new, metrics = run(new, metrics, chunk, np.int32(index * R))
            return new, metrics

        return run_all
