"""The compiled training step of one configuration, with its memory and its measured
times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rampup.config.schema import Config
from rampup.contrib.lab.memory import is_out_of_memory, program_memory
from rampup.contrib.lab.topology import compile_for
from rampup.data.batches import AHEAD_ON_DEVICE, step_batches
from rampup.data.sources import SyntheticRows
from rampup.engine.compile import compile_program
from rampup.engine.mesh import make_mesh
from rampup.engine.optimizer import segment_numbers
from rampup.lm.train import TrainSetup
from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.topology import Topology

# Rounds of a step that is timed, fewer if they take longer than this.
ROUNDS, TIMING_SECONDS = 9, 30.0


class Trial:
    """The training step of a configuration on these devices, compiled for the one
    microbatch size that all its phases have.

    With a `topology` the devices are those of absent slices, and nothing runs: a
    program fits if their compiler accepts it with at most `limit` bytes.

    Attributes:
        config: the configuration.
        plan: its plan.
        program: the compiled step; None if the compiler ran out of memory.
        bytes: what training takes of one device, the step and the prefetched batches;
            infinite if the compiler ran out of memory.
    """

    def __init__(
        self,
        config: Config,
        plan: RampPlan,
        devices: Sequence[jax.Device],
        *,
        topology: Topology | None = None,
        limit: int | None = None,
    ) -> None:
        self.config, self.plan = config, plan
        self.setup = TrainSetup.from_config(config, plan, make_mesh(plan.axes, devices))
        self._source = SyntheticRows(
            max(plan.ramp.sizes),
            sequence_length=config.max_target_length,
            vocab_size=config.vocab_size,
        )
        lowered = self.setup.step.lower(
            self.setup.state_shapes(), self._row, plan.splits[0]
        )
        self.program, self.bytes = None, math.inf
        try:
            if topology is None:
                self.program = compile_program(lowered)
            else:
                self.program = compile_for(lowered, hbm_bytes=limit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return
        self.bytes = self._bytes()
        if limit is not None:
            # On absent slices the compiler decides what fits: it also recomputes values
            # if memory is short.
            self.bytes = min(self.bytes, limit)

    @property
    def _row(self) -> Any:
        return jax.tree.map(lambda x: x[0], self._source.read(np.arange(1)))

    def _bytes(self) -> int:
        size = self.plan.splits[0].microbatch_size
        rows = size * self.plan.max_microbatches[size]
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._row))
        memory = program_memory(self.program)
        return memory.total + AHEAD_ON_DEVICE * rows * row_bytes

    def times(self) -> dict[int, float]:
        """Return the seconds of a step on synthetic rows with the fewest and with the
        most microbatches, by the number of microbatches.
        """
        # All steps share one state, so that it is in memory only once.
        states = [self.setup.initial_state()]
        starts = {
            split.num_microbatches: phase.start_step
            for phase, split in zip(
                self.plan.ramp.phases, self.plan.splits, strict=True
            )
            if phase.start_step < self.plan.total_steps
        }
        return {
            number: median_seconds(self._step_of(starts[number], states))
            for number in sorted({min(starts), max(starts)})
        }

    def _step_of(self, start: int, states: list[Any]) -> Callable[[], None]:
        """Return a function that runs the optimizer step `start` and waits for it. The
        training state is the one in `states`; its values do not matter.
        """
        batches = step_batches(
            self._source, self.plan, self.setup.mesh, start=start, stop=start + 1
        )
        batch = next(batches)
        segment = segment_numbers(self.setup.step.tx, batch.position.segment)
        split = batch.position.split
        counts = (
            np.int32(split.num_pipeline_microbatches),
            np.int32(split.accumulation_steps),
        )
        program: Any = self.program

        def step() -> None:
            # A language model has nothing frozen.
            states[0], metrics = program(states[0], None, batch.chunks, counts, segment)
            jax.block_until_ready((states[0], metrics))

        return step

    def step_seconds(self, split: BatchSplit, times: Mapping[int, float]) -> float:
        """Return the seconds of a step: on a line over the number of microbatches, with
        a constant for the update.
        """
        if not times:
            return math.inf
        (n0, t0), (n1, t1) = min(times.items()), max(times.items())
        slope = t0 / n0 if n0 == n1 else (t1 - t0) / (n1 - n0)
        return max(t0 + slope * (split.num_microbatches - n0), 0.0)


def median_seconds(step: Callable[[], None]) -> float:
    """Return the median time of a step, which waits for its results, after two runs that
    are not counted.
    """

    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    run()  # compiled and warm from here on
    rounds = max(min(int(TIMING_SECONDS / run()), ROUNDS), 1)
    return statistics.median(run() for _ in range(rounds))
