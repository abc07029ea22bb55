"""The compiled training steps of a configuration, one per microbatch size, with their
memory and their measured times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.contrib.lab.design_model import weighted_line
from rampup.contrib.lab.topology import compile_for
from rampup.data.batches import AHEAD_ON_DEVICE, step_batches
from rampup.data.sources import SyntheticRows
from rampup.engine.compile import compile_program
from rampup.engine.mesh import make_mesh
from rampup.engine.offload import is_out_of_memory, program_memory, room_to_run
from rampup.engine.state import TrainState
from rampup.lm.train import TrainSetup, unconstrained
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplit
from rampup.plan.topology import Topology

Report = Callable[[str], None]
Point = tuple[float, float]  # (x, y)
ROUNDS, TIMING_SECONDS = 5, 60.0
# A shorter measurement would depend on the clock's resolution and on other processes;
# short steps are repeated.
LEAST_SECONDS, MAX_REPEATS = 0.05, 20


class Size(NamedTuple):
    """A microbatch size, with the buffer of the program that runs it."""

    microbatch_size: int  # b, samples per replica and forward pass
    num_microbatches: int  # the most that one step of this program takes


class Timing(NamedTuple):
    """Times of a step."""

    seconds: float  # the median
    spread: float  # (slowest - fastest) / median
    rounds: int  # number of measurements


class Programs:
    """The training steps of one configuration on these devices, compiled on first use,
    without its own microbatch.

    With a `topology` the devices are those of absent slices, and nothing runs: a
    program fits if their compiler accepts it with at most `limit` bytes.
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        report: Report = lambda line: None,
        *,
        topology: Topology | None = None,
        limit: int | None = None,
    ) -> None:
        self.config = config
        self.devices = tuple(devices)
        self._report = report
        self.topology, self._limit = topology, limit
        self.plan = build_plan(config, len(devices))
        self.mesh = make_mesh(self.plan.axes, devices)
        self.splitter = unconstrained(self.plan.splitter)
        # Model, learning rate and optimizer are those of every size; only the batches
        # of the step differ.
        self._setup = TrainSetup.from_config(config, self.plan, self.mesh)
        self._bytes: dict[Size, float] = {}
        self._compiled: dict[Size, Any] = {}

    @property
    def compiled_sizes(self) -> list[int]:
        """The microbatch sizes whose program for the largest batch was compiled, those
        that do not fit among them, ascending.
        """
        return sorted(b for b, n in self._bytes if n == self.size(b).num_microbatches)

    def size(self, microbatch_size: int) -> Size:
        """Return a size with the microbatches of the largest batch, rounded up to whole
        passes.
        """
        per_replica = max(self.plan.ramp.sizes) / self.splitter.data_parallel_size
        passes = math.ceil(per_replica / (microbatch_size * self.pass_unit))
        return Size(
            microbatch_size=microbatch_size,
            num_microbatches=max(passes, 1) * self.pass_unit,
        )

    @property
    def pass_unit(self) -> int:
        """Fewest microbatches of a pass: 1 without a pipeline."""
        return self.splitter.smallest // self.splitter.data_parallel_size

    def bytes(self, size: Size) -> float:
        """Return the bytes that training takes of one device, the step and the
        prefetched batches; infinite if the compiler ran out of memory.
        """
        if size not in self._bytes:
            self._report(f"microbatch of {size.microbatch_size:,}: compiling")
            found = self._bytes[size] = self._compile(size)
            needs = "too much" if found == math.inf else f"{found / 2**20:,.1f} MiB"
            self._report(f"microbatch of {size.microbatch_size:,}: {needs}")
        return self._bytes[size]

    def _compile(self, size: Size) -> float:
        """Compile a step, and return the bytes that training takes."""
        try:
            compiled = self._compiled[size] = self.compile(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
        rows = size.microbatch_size * size.num_microbatches
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._row))
        used = program_memory(compiled).total + AHEAD_ON_DEVICE * rows * row_bytes
        # On absent slices the compiler decides what fits: it also recomputes values if
        # memory is short.
        return used if self._limit is None else min(used, self._limit)

    def compile(self, size: Size) -> Any:
        """Return the compiled step of a size."""
        lowered = self._lower(size)
        if self.topology is None:
            return compile_program(lowered)
        chip = self.topology.chip.name
        return compile_for(lowered, kind=chip, hbm_bytes=self._limit)

    def fits_here(self, size: Size) -> bool:
        """Return whether a step can run on this machine: the devices are here and it
        fits in their memory.
        """
        return self.topology is None and self.bytes(size) <= room_to_run(self.devices)

    def loop_trips(
        self, microbatch_size: int, num_microbatches: int
    ) -> tuple[int, ...]:
        """Return the iterations of the loops of a step whose bound is an argument:
        passes, and the ticks of a pipeline pass.
        """
        return self._setup.step.loop_trips(
            self.split(microbatch_size, num_microbatches)
        )

    def step_of(self, size: Size, num_microbatches: int) -> Callable[[], None]:
        """Return a function that runs one optimizer step on synthetic rows and waits
        for it.
        """
        self.bytes(size)
        program, plan = self._compiled[size], self._plan_of(size)
        batch = next(
            step_batches(self._rows(plan.ramp.sizes[0]), plan, self.mesh, stop=1)
        )
        segment = self._setup.step.segment_of(batch.position.segment)
        split = self.split(size.microbatch_size, num_microbatches)
        counts = (
            np.int32(split.num_pipeline_microbatches),
            np.int32(split.accumulation_steps),
        )

        def step() -> None:
            # A language model has nothing frozen.
            self._state, metrics = program(
                self._state, None, batch.chunks, counts, segment
            )
            jax.block_until_ready((self._state, metrics))

        return step

    def split(self, microbatch_size: int, num_microbatches: int) -> BatchSplit:
        """Return the split of a batch of this many microbatches per replica."""
        size = self.splitter.data_parallel_size * microbatch_size * num_microbatches
        split = self.splitter.split_with(size, microbatch_size)
        assert split is not None
        return split

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shapes, types and shardings of the training state."""
        return self._setup.state_shapes()

    @cached_property
    def _state(self) -> Any:
        # All steps share one training state, so that it is in memory only once. Its
        # values do not matter.
        return self._setup.initial_state()

    def _lower(self, size: Size) -> Any:
        setup = replace(self._setup, plan=self._plan_of(size))
        return setup.step.lower(self.state_shapes, self._row, setup.plan.splits[0])

    def _plan_of(self, size: Size) -> RampPlan:
        """Return a plan of one phase with only such steps, as long as the run."""
        batch = (
            self.splitter.data_parallel_size
            * size.microbatch_size
            * size.num_microbatches
        )
        splitter = replace(self.splitter, microbatch_size=size.microbatch_size)
        unused = {
            "eval_global_batch_size": None,
            "expansion_factor_real_data": Fraction(-1),
            "seesaw": None,
        }
        return replace(
            self.plan, ramp=BatchRamp.constant(batch), splitter=splitter, **unused
        )

    def _rows(self, number: int) -> SyntheticRows:
        return SyntheticRows(
            number,
            sequence_length=self.config.max_target_length,
            vocab_size=self.config.vocab_size,
        )

    @cached_property
    def _row(self) -> Any:
        return jax.tree.map(lambda x: x[0], self._rows(1).read(np.arange(1)))


def take_turns(
    steps: Mapping[Any, Callable[[], None]], *, seconds: float = TIMING_SECONDS
) -> dict[Any, Timing]:
    """Time steps, which wait for their results, once a round for about these seconds,
    after two rounds that are not counted.
    """

    def run(chosen: Iterable[Callable[[], None]], repeats: int = 1) -> float:
        start = time.perf_counter()
        for step in chosen:
            for _ in range(repeats):
                step()
        return time.perf_counter() - start

    run(steps.values())
    one_round = run(steps.values())
    repeats = min(max(int(LEAST_SECONDS * len(steps) / one_round), 1), MAX_REPEATS)
    rounds = max(min(int(seconds / (repeats * one_round)), ROUNDS), 1)
    names, times = list(steps), {name: [] for name in steps}  # type: tuple[list[Any], dict[Any, list[float]]]
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            times[name].append(run([steps[name]], repeats) / repeats)
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    spreads = {
        name: (max(measured) - min(measured)) / medians[name]
        for name, measured in times.items()
    }
    return {
        name: Timing(seconds=medians[name], spread=spreads[name], rounds=rounds)
        for name in names
    }


def fit_line(points: Sequence[Point]) -> Point:
    """Return start and slope of the line with the least squared errors relative to y >
    0; through 0 if all x are the same.
    """
    start, slope, squares = weighted_line([(x, y, 1 / y**2) for x, y in points])
    return (start, slope) if squares else (0.0, start / points[0][0])


def fit_tick_overhead(
    times: Mapping[int, Sequence[Point]], *, num_repeats: int
) -> float | None:
    """Return h of `predicted_time`, in samples per replica, from the (ticks, seconds)
    of each b, or None.
    """
    # A step takes c + t * ticks * (b / v + h), with c for the optimizer. So the slope
    # of the times over the ticks is t * (b / v + h): a line over b, whose start over
    # its slope is h * v.
    slopes = [
        (float(b), fit_line(points)[1])
        for b, points in times.items()
        if len({ticks for ticks, _ in points}) > 1
    ]
    if len(slopes) < 2 or min(slope for _, slope in slopes) <= 0:
        return None
    start, slope = fit_line(slopes)
    return None if slope <= 0 else max(start / slope / num_repeats, 0.0)
