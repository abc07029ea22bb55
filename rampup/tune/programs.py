"""The compiled training steps of a configuration, one per microbatch size: their memory without running, and their time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rampup.config.build import build_plan, mesh_axes
from rampup.config.schema import Config
from rampup.lm.train import initial_state, state_shapes, training_step
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import AUTO, BatchSplit, BatchSplitter
from rampup.plan.timetable import num_ticks
from rampup.run.compile import compile_program
from rampup.run.data.batches import AHEAD_ON_DEVICE, step_batches
from rampup.run.data.sources import SyntheticRows
from rampup.run.mesh import make_mesh
from rampup.run.offload import ProgramMemory, is_out_of_memory, program_memory, room_to_run

Report = Callable[[str], None]
ROUNDS = 5
TIMING_SECONDS = 60.0
# What one measurement takes at least, so that a clock and a busy machine do not decide it.
LEAST_SECONDS, MAX_REPEATS = 0.05, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A microbatch size with the buffer of the program that runs it.

    Attributes:
        microbatch_size: b, samples per replica and forward pass.
        num_microbatches: the most that a step of this program takes.
    """

    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of a step.

    Attributes:
        seconds: the median.
        spread: slowest less fastest, over the median.
        rounds: how many were measured.
    """

    seconds: float
    spread: float
    rounds: int


class Programs:
    """The training steps of one configuration on this machine's devices, compiled when they are asked for.

    Args:
        config: the configuration; its own microbatch and accumulation do not matter.
        devices: the devices to use.
        report: called with a line about every compilation.

    Raises:
        RampupError: the configuration has no plan for these devices, or cannot be trained on them.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device], report: Report = lambda line: None) -> None:
        self.config, self.devices, self._report = config, tuple(devices), report
        self.plan = build_plan(config, len(devices))
        self.mesh = make_mesh(mesh_axes(config, len(devices)), devices)
        self.free = free_splitter(self.plan.splitter)
        self._memory: dict[Size, ProgramMemory | None] = {}
        self._compiled: dict[Size, Any] = {}
        self.compile_seconds: list[float] = []

    def size(self, microbatch_size: int) -> Size:
        """Return a size with the number of microbatches of the largest batch, rounded up to whole passes."""
        per_replica = max(self.plan.ramp.sizes) / self.free.data_parallel_size
        passes = math.ceil(per_replica / (microbatch_size * self.pass_unit))
        return Size(microbatch_size=microbatch_size, num_microbatches=max(passes, 1) * self.pass_unit)

    @property
    def pass_unit(self) -> int:
        """Microbatches that a pass consists of at least: 1 without a pipeline."""
        return self.free.smallest // self.free.data_parallel_size

    def memory(self, size: Size) -> ProgramMemory | None:
        """Return the memory of one device that a step takes, or None if the compiler ran out of it."""
        if size not in self._memory:
            start = time.perf_counter()
            try:
                compiled = compile_program(self._lower(size))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._memory[size] = None
            else:
                self._compiled[size], self._memory[size] = compiled, program_memory(compiled)
            self.compile_seconds.append(time.perf_counter() - start)
            self._report(f"microbatch of {size.microbatch_size:,}: {self._in_words(size)}")
        return self._memory[size]

    def bytes(self, size: Size) -> float:
        """Return the bytes of one device that training takes: the step, and the batches that wait for the next ones."""
        memory = self.memory(size)
        return math.inf if memory is None else memory.total + AHEAD_ON_DEVICE * self._batch_bytes(size)

    def fits_here(self, size: Size) -> bool:
        """Say whether a step can be run on this machine without running out of its memory."""
        return self.bytes(size) <= room_to_run(self.devices)

    def step_of(self, size: Size, num_microbatches: int) -> Callable[[], None]:
        """Return a function that runs one optimizer step on synthetic rows and waits for it.

        All of them train one state, which lies in memory once; what it becomes does not matter.
        """
        self.memory(size)
        program, chunks = self._compiled[size], self._chunks(size)
        split = self.split(size.microbatch_size, num_microbatches)
        counts = np.int32(split.num_pipeline_microbatches), np.int32(split.accumulation_steps)

        def step() -> None:
            self._state, metrics = program(self._state, chunks, counts)
            jax.block_until_ready((self._state, metrics))

        return step

    def ticks(self, microbatch_size: int, num_microbatches: int) -> int:
        """Return the pipeline ticks of a step."""
        split, splitter = self.split(microbatch_size, num_microbatches), self.free
        return split.accumulation_steps * num_ticks(splitter.num_stages, split.num_pipeline_microbatches, splitter.num_repeats)

    def split(self, microbatch_size: int, num_microbatches: int) -> BatchSplit:
        """Return how a batch of so many microbatches per replica is cut."""
        size = self.free.data_parallel_size * microbatch_size * num_microbatches
        split = self.free.split_with(size, microbatch_size)
        assert split is not None
        return split

    def forget_state(self) -> None:
        """Give the memory of the state back."""
        self.__dict__.pop("_state", None)

    @cached_property
    def _state(self) -> Any:
        return initial_state(self.config, self.plan, self.mesh, training_step(self.config, self.plan, self.mesh).tx)

    def _lower(self, size: Size) -> Any:
        plan = self._plan_of(size)
        step = training_step(self.config, plan, self.mesh)
        return step.lower(state_shapes(self.config, self.mesh, step.tx), self._row, plan.splits[0])

    def _plan_of(self, size: Size) -> RampPlan:
        """Return a plan of nothing but such steps, as long as the run."""
        batch = self.free.data_parallel_size * size.microbatch_size * size.num_microbatches
        splitter = replace(self.free, microbatch_size=size.microbatch_size)
        ramp = BatchRamp.constant(batch)
        return RampPlan(ramp=ramp, splitter=splitter, num_devices=len(self.devices), total_steps=self.plan.total_steps)

    def _rows(self, number: int) -> SyntheticRows:
        return SyntheticRows(number, sequence_length=self.config.max_target_length, vocab_size=self.config.vocab_size)

    @cached_property
    def _row(self) -> Any:
        return jax.tree.map(lambda x: x[0], self._rows(1).read(np.arange(1)))

    def _chunks(self, size: Size) -> tuple[Any, ...]:
        """Return a full buffer of synthetic rows."""
        plan = self._plan_of(size)
        return next(step_batches(self._rows(plan.ramp.sizes[0]), plan, self.mesh, stop=1)).chunks

    def _batch_bytes(self, size: Size) -> int:
        """Bytes of one device that the rows of a step take."""
        row: int = sum(leaf.nbytes for leaf in jax.tree.leaves(self._row))
        return row * size.microbatch_size * size.num_microbatches

    def _in_words(self, size: Size) -> str:
        bytes_ = self.bytes(size)
        return "the compiler runs out of memory" if math.isinf(bytes_) else f"{bytes_ / 2**20:,.1f} MiB"


def free_splitter(splitter: BatchSplitter) -> BatchSplitter:
    """Return the rule of a run without what its configuration says about microbatches and accumulation."""
    return replace(splitter, microbatch_size=AUTO, gradient_accumulation_steps=1, rampup_microbatch="fixed", tick_overhead=None)


def take_turns(steps: Mapping[Any, Callable[[], None]], *, seconds: float = TIMING_SECONDS) -> dict[Any, Timing]:
    """Time every step once a round, after two rounds that do not count; a short one several times in a row.

    Args:
        steps: name -> a step, which waits for itself.
        seconds: what all rounds may take together, about; there is always one.
    """
    for step in steps.values():
        step()
    warm_up = _seconds_of(steps.values(), 1)
    repeats = min(max(int(LEAST_SECONDS * len(steps) / warm_up), 1), MAX_REPEATS)
    rounds = max(min(int(seconds / (repeats * warm_up)), ROUNDS), 1)
    times: dict[Any, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            times[name].append(_seconds_of([steps[name]], repeats) / repeats)
    return {name: _timing(of_name) for name, of_name in times.items()}


def _seconds_of(steps: Iterable[Callable[[], None]], repeats: int) -> float:
    start = time.perf_counter()
    for step in steps:
        for _ in range(repeats):
            step()
    return time.perf_counter() - start


def _timing(seconds: Sequence[float]) -> Timing:
    middle = statistics.median(seconds)
    return Timing(seconds=middle, spread=(max(seconds) - min(seconds)) / middle, rounds=len(seconds))
