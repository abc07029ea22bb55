"""The compiled training steps of one configuration, with their memory and their measured
times.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rampup.config.schema import Config
from rampup.contrib.lab.topology import compile_for
from rampup.data.batches import AHEAD_ON_DEVICE, step_batches
from rampup.data.sources import SyntheticRows
from rampup.engine.compile import compile_program
from rampup.engine.memory import is_out_of_memory, program_memory
from rampup.engine.mesh import make_mesh
from rampup.lm.train import TrainSetup
from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.topology import Topology

Report = Callable[[str], None]
ROUNDS, TIMING_SECONDS = 9, 60.0


class Timing(NamedTuple):
    """Times of a step."""

    seconds: float  # the median
    spread: float  # (slowest - fastest) / median
    rounds: int  # number of measurements


class Trial:
    """The training step of a configuration on these devices, compiled for every
    microbatch size that the run uses.

    With a `topology` the devices are those of absent slices, and nothing runs: a
    program fits if their compiler accepts it with at most `limit` bytes.

    Attributes:
        config: the configuration.
        plan: its plan.
        programs: the compiled step by microbatch size.
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
        self.programs: dict[int, Any] = {}
        try:
            for split in self.splits.values():
                self._compile(split, topology, limit)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.bytes = math.inf
            return
        self.bytes = max(map(self._bytes, self.programs))
        if limit is not None:
            # On absent slices the compiler decides what fits: it also recomputes values
            # if memory is short.
            self.bytes = min(self.bytes, limit)

    @property
    def splits(self) -> dict[int, BatchSplit]:
        """The split of every phase that the run reaches, by the phase's first step."""
        pairs = zip(self.plan.ramp.phases, self.plan.splits, strict=True)
        return {
            phase.start_step: split
            for phase, split in pairs
            if phase.start_step < self.plan.total_steps
        }

    @property
    def microbatch_size(self) -> int:
        """The largest microbatch of the run."""
        return max(split.microbatch_size for split in self.splits.values())

    def _compile(
        self, split: BatchSplit, topology: Topology | None, limit: int | None
    ) -> None:
        """Compile the step for the microbatch size of a split, if it is a new one."""
        if split.microbatch_size in self.programs:
            return
        shapes = self.setup.state_shapes()
        lowered = self.setup.step.lower(shapes, self._row, split)
        if topology is None:
            compiled = compile_program(lowered)
        else:
            compiled = compile_for(lowered, kind=topology.chip.name, hbm_bytes=limit)
        self.programs[split.microbatch_size] = compiled

    @property
    def _row(self) -> Any:
        return jax.tree.map(lambda x: x[0], self._source.read(np.arange(1)))

    def _bytes(self, microbatch_size: int) -> int:
        rows = microbatch_size * self.plan.max_microbatches[microbatch_size]
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._row))
        memory = program_memory(self.programs[microbatch_size])
        return memory.total + AHEAD_ON_DEVICE * rows * row_bytes

    def timed_splits(self) -> Iterator[tuple[int, BatchSplit]]:
        """Yield the splits to time, with the first steps of their phases: for every
        microbatch size those of the fewest and of the most microbatches.
        """
        for size in self.programs:
            found = {
                split.num_microbatches: (start, split)
                for start, split in self.splits.items()
                if split.microbatch_size == size
            }
            for number in sorted({min(found), max(found)}):
                yield found[number]

    def step_of(self, start: int, states: list[Any]) -> Callable[[], None]:
        """Return a function that runs the optimizer step `start` on synthetic rows and
        waits for it. The training state is the one in `states`, which all steps share,
        so that it is in memory only once; its values do not matter.
        """
        batches = step_batches(
            self._source, self.plan, self.setup.mesh, start=start, stop=start + 1
        )
        batch = next(batches)
        segment = self.setup.step.segment_of(batch.position.segment)
        split = self.splits[start]
        counts = (
            np.int32(split.num_pipeline_microbatches),
            np.int32(split.accumulation_steps),
        )
        program = self.programs[split.microbatch_size]

        def step() -> None:
            # A language model has nothing frozen.
            states[0], metrics = program(states[0], None, batch.chunks, counts, segment)
            jax.block_until_ready((states[0], metrics))

        return step

    def run_seconds(self, times: Mapping[int, Timing]) -> float:
        """Return the time of all steps of the run without compilation, from that of
        some steps by the first steps of their phases; infinite if none was timed.
        """
        starts = [*self.splits, self.plan.total_steps]
        return sum(
            (end - start) * self.step_seconds(self.splits[start], times)
            for start, end in itertools.pairwise(starts)
        )

    def step_seconds(self, split: BatchSplit, times: Mapping[int, Timing]) -> float:
        """Return the seconds of a step: on a line over the number of microbatches, with
        a constant for the update.
        """
        points = [
            (self.splits[start].num_microbatches, timing.seconds)
            for start, timing in times.items()
            if self.splits[start].microbatch_size == split.microbatch_size
        ]
        if not points:
            return math.inf
        (n0, t0), (n1, t1) = points[0], points[-1]
        slope = t0 / n0 if n0 == n1 else (t1 - t0) / (n1 - n0)
        return max(t0 + slope * (split.num_microbatches - n0), 0.0)


def take_turns(
    steps: Mapping[Any, Callable[[], None]], *, seconds: float = TIMING_SECONDS
) -> dict[Any, Timing]:
    """Time steps, which wait for their results, once a round for about these seconds,
    after two rounds that are not counted.
    """

    def run(step: Callable[[], None]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    names = list(steps)
    # Compiled and warm.
    one_round = [sum(map(run, steps.values())) for _ in range(2)][-1]
    rounds = max(min(int(seconds / one_round), ROUNDS), 1)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # Each round begins with another one.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(run(steps[name]))
    found = {}
    for name, measured in times.items():
        median = statistics.median(measured)
        spread = (max(measured) - min(measured)) / median
        found[name] = Timing(seconds=median, spread=spread, rounds=rounds)
    return found
